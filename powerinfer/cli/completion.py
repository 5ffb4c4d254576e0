"""Print a shell completion script, for verbs, flags and the names of local models.

bash:  source <(powerinfer completion bash)
zsh:   source <(powerinfer completion zsh)
fish:  powerinfer completion fish | source
"""

from __future__ import annotations

import argparse

from powerinfer.cli.common import Output

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
    parser.add_argument("shell", choices=(*SCRIPTS, "words"), help="`words` is for the scripts themselves")
    parser.add_argument("context", nargs="*", help=argparse.SUPPRESS)  # the verb, and the word before the cursor


def execute(args: argparse.Namespace, out: Output) -> int:
    if args.shell == "words":
        verb, previous = (*args.context, "", "")[:2]
        found = words(verb, previous)
        out.line("\n".join(found))
        out.document({"words": found})
    else:
        out.line(SCRIPTS[args.shell].rstrip())
        out.document({"shell": args.shell, "script": SCRIPTS[args.shell]})
    return 0


def words(verb: str, previous: str) -> list[str]:
    """Completions, given the verb of the line and the word before the cursor."""
    from powerinfer.cli.main import VERBS

    if verb not in VERBS or previous in ("powerinfer", ""):
        return list(VERBS)
    if previous in ("-m", "--model"):
        return _models()
    return [*(_models() if verb == previous == "pull" else ()), *_flags(verb, previous)]


def _models() -> list[str]:
    from powerinfer.hub import CATALOGUE, list_stored

    return sorted({*CATALOGUE, *(model.name for model in list_stored())})


def _flags(verb: str, previous: str) -> list[str]:
    """The choices of the flag before the cursor, or else every flag of the verb."""
    from importlib import import_module

    from powerinfer.cli.common import Parser, common_flags

    parser = Parser(prog=verb)
    common_flags(parser)
    import_module(f"powerinfer.cli.{verb}").configure(parser)
    for action in parser._actions:
        if previous in action.option_strings and action.nargs != 0:
            return [str(choice) for choice in action.choices or ()]
    return [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
