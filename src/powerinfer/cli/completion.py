"""Print a script with which a shell completes commands, flags, their values, and the names of models.

For this shell alone, or in its start file (~/.bashrc, ~/.zshrc, ~/.config/fish/config.fish) for all:

bash:  source <(powerinfer completion bash)
zsh:   source <(powerinfer completion zsh)
fish:  powerinfer completion fish | source
"""

from __future__ import annotations

import argparse

from powerinfer.cli.common import Output
from powerinfer.errors import RequestError

_BASH = """\
_powerinfer() {
    local word=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]}
    local IFS=$'\\n'
    COMPREPLY=($(compgen -W "$(powerinfer completion words -- "${COMP_WORDS[1]}" "$previous" 2>/dev/null)" -- "$word"))
}
complete -o default -F _powerinfer powerinfer
"""

_ZSH = """\
_powerinfer() {
    local -a found
    found=("${(@f)$(powerinfer completion words -- "${words[2]}" "${words[CURRENT-1]}" 2>/dev/null)}")
    compadd -a found
    _files
}
compdef _powerinfer powerinfer
"""

_FISH = """\
function __powerinfer_words
    set -l line (commandline -opc)
    powerinfer completion words -- "$line[2]" "$line[-1]" 2>/dev/null
end
complete -c powerinfer -a '(__powerinfer_words)'
"""

SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", help="bash, zsh or fish")
    parser.add_argument(
        "context", nargs="*", default=[], help=argparse.SUPPRESS
    )  # the verb, and the word before the cursor


def execute(args: argparse.Namespace, out: Output) -> int:
    if args.shell == "words":
        verb, previous = (*args.context, "", "")[:2]
        candidates = words(verb, previous)
        out.line("\n".join(candidates))
        out.document({"words": candidates})
    elif args.shell not in SCRIPTS:
        raise RequestError(f"no completion for {args.shell}; the shells are {', '.join(SCRIPTS)}")
    else:
        out.line(SCRIPTS[args.shell].rstrip())
        out.document({"shell": args.shell, "script": SCRIPTS[args.shell]})
    return 0


def words(verb: str, previous: str) -> list[str]:
    """Completions, given the verb of the line and the word before the cursor."""
    from powerinfer.cli.main import VERBS

    if verb not in VERBS or previous in ("powerinfer", ""):
        return list(VERBS)
    if previous in ("-m", "--model", "-hf"):
        return _models()
    named = {"pull": _known_models, "rm": _local_models}
    return [*(named[verb]() if verb == previous and verb in named else ()), *_flags(verb, previous)]


def _known_models() -> list[str]:
    from powerinfer.hub import known_names

    return known_names()


def _local_models() -> list[str]:
    from powerinfer.hub import list_stored

    return [model.name for model in list_stored()]


def _models() -> list[str]:
    """Names of models that open without a question."""
    from powerinfer.pinned import ALIASES, CATALOGUE

    return sorted({*CATALOGUE, *ALIASES, *_local_models()})


def _described(flag: str) -> list[str] | None:
    """The names that a flag of a free text also takes; None for other flags."""
    if flag == "--hardware":
        from powerinfer.hardware.description import ready_made

        return ready_made()
    if flag == "--shape":
        from powerinfer.placement.shapes import shape_names

        return shape_names()
    if flag == "--dtype":
        from powerinfer.placement.mixes import DTYPES

        return list(DTYPES)
    return None


def _flags(verb: str, previous: str) -> list[str]:
    """The choices of the flag before the cursor, or else every flag of the verb."""
    from importlib import import_module

    from powerinfer.cli.common import Parser, common_flags

    parser = Parser(prog=verb)
    common_flags(parser)
    import_module(f"powerinfer.cli.{verb}").configure(parser)
    for action in parser._actions:
        if previous in action.option_strings and action.nargs != 0:
            return _described(previous) or [str(choice) for choice in action.choices or ()]
    return [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
