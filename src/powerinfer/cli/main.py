"""The `powerinfer` command: runs a verb and turns every outcome into an exit status.

Nothing heavy is imported before the verb is known; each verb is a module of this folder with `configure(parser)` and
`execute(args, out) -> exit status`. Exit status: 0 success, 1 the work failed, 2 invalid request, 130 stopped
by Ctrl-C.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, NoReturn

from powerinfer.errors import PowerInferError, RequestError, did_you_mean

if TYPE_CHECKING:
    from argparse import Namespace

    from powerinfer.cli.common import Output

VERBS = {
    "run": "answer one prompt",
    "chat": "talk with a model",
    "serve": "answer requests over HTTP, as OpenAI's API does",
    "demo": "show on this machine what skipping neurons gains",
    "prepare": "profile, train, pack and plan in one command",
    "bench": "measure prefill and decode speed",
    "eval": "measure quality: perplexity, agreement, tasks",
    "profile": "count how often each neuron fires over a text",
    "experts": "show what memory for some experts would hit",
    "pack": "store the neurons of a model for sparse decoding",
    "quantize": "make a smaller GGUF file of a model",
    "train": "train predictors of the neurons that fire",
    "sparsify": "make a dense model sparse, by training",
    "measure": "measure this machine, for plans",
    "report": "write a page with plots of a model's prepared data",
    "plan": "decide what is placed on the GPU, in RAM and on disk",
    "inspect": "show what a model is and how it would run",
    "pull": "download a model",
    "list": "list local models",
    "rm": "remove a local model",
    "completion": "print a shell completion script",
}

FOREIGN = {
    "show": "inspect", "info": "inspect", "ls": "list", "remove": "rm", "delete": "rm", "download": "pull",
    "generate": "run", "cli": "run", "server": "serve", "benchmark": "bench", "perplexity": "eval",
}  # fmt: skip
"""Commands of llama.cpp, Ollama and vLLM, and what they are called here."""

HINTS = {
    "ps": "the page of a server and its route /v1/models show what is loaded",
    "stop": "Ctrl-C ends a server; one of several models unloads them itself (--keep-alive)",
    "search": "`powerinfer pull --names` shows models with short names; OWNER/NAME of Hugging Face works, too",
    **dict.fromkeys(
        ("convert", "convert_hf_to_gguf.py"),
        "folders of Hugging Face are used as they are, -m FOLDER; `powerinfer quantize FOLDER bf16` makes a GGUF file",
    ),
    "imatrix": "`powerinfer quantize MODEL TYPE --corpus FILE --save-imatrix FILE` writes one beside the smaller model",
    "create": "a file or folder is a model as it is: -m PATH; `powerinfer pull PATH` gives it a name",
    "cp": "`powerinfer pull PATH` gives a file or folder a name",
    "push": "models are not uploaded",
    **dict.fromkeys(("embed", "embedding"), "`powerinfer serve` answers /v1/embeddings"),
}
"""Commands of theirs that are none here, and what to do instead."""

INTERRUPTED = 130
TERMINATED = 143  # what a shell reports for a program that SIGTERM ended
BROKEN_PIPE = 141  # what a shell reports for a program that SIGPIPE ended


_USAGE = (
    "`powerinfer COMMAND --help` shows the flags of a command. Without -m MODEL the default model is used, downloaded "
    "once. Every command takes --json (the last line of stdout is one JSON document, of an error too) and --debug "
    "(tracebacks)."
)


def usage() -> str:
    from shutil import get_terminal_size
    from textwrap import fill

    verbs = "\n".join(f"  {verb:<12}{text}" for verb, text in VERBS.items())
    return (
        "usage: powerinfer COMMAND ...\n\n"
        "Runs large language models on ordinary machines.\n\n"
        f"commands:\n{verbs}\n\n{fill(_USAGE, min(get_terminal_size().columns, 120))}\n\n"
        'examples:\n  powerinfer run "Why is the sky blue?"\n  powerinfer chat -m model.gguf\n  powerinfer pull\n'
    )


def main(argv: list[str]) -> int:
    """Run one command line; the exit status. No error is raised."""
    json_mode = "--json" in (argv[: argv.index("--")] if "--" in argv else argv)
    try:
        return _dispatch(argv)
    except BrokenPipeError:
        return BROKEN_PIPE
    except (Exception, KeyboardInterrupt) as error:
        message, status = _explained(error)
        if "--debug" in argv:
            import traceback

            traceback.print_exc()
        kind = "Interrupted" if status == INTERRUPTED else type(error).__name__
        _report(kind, message, status, json_mode)
        return status


def _explained(error: BaseException) -> tuple[str, int]:
    """Message for the user, and exit status."""
    if isinstance(error, PowerInferError):
        return str(error), error.exit_status
    if isinstance(error, KeyboardInterrupt):
        return "", INTERRUPTED
    if isinstance(error, MemoryError):
        return "out of memory; a smaller --context or model needs less", 1
    if isinstance(error, OSError):
        file = f"{error.filename}: " if error.filename else ""
        return f"{file}{error.strerror or error}", 1
    return f"internal error, {type(error).__name__}: {error} (--debug shows where; please report it)", 1


def error_line(message: str) -> str:
    """Line that is shown for an error."""
    from powerinfer.cli.screen import styled

    return f"{styled('powerinfer:', 'red', sys.stderr)} {message}"


def _report(kind: str, message: str, status: int, json_mode: bool) -> None:
    """A line on stderr, and with --json a document on stdout."""
    from contextlib import suppress

    line = " ".join(message.split())
    with suppress(OSError, ValueError):  # stderr may be closed; the exit status still reports it
        if line:
            print(error_line(line), file=sys.stderr)
    if json_mode:
        import json

        document = {"error": {"type": kind, "message": line or "stopped by Ctrl-C"}, "status": status}
        with suppress(OSError, ValueError):
            print(json.dumps(document), flush=True)


def _dispatch(argv: list[str]) -> int:
    verb = argv[0] if argv else "--help"
    if verb == "help" and len(argv) > 1:
        return _dispatch([argv[1], "--help"])
    if verb in ("--help", "-h", "help"):
        print(usage(), end="", file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    if verb in ("--version", "-V", "version"):
        from powerinfer import __version__

        print(f"powerinfer {__version__}")
        return 0
    if verb not in VERBS:
        raise RequestError(f"no command {verb}{_hint(verb)}")
    # The engine has its own threads. OpenBLAS would start more on `import numpy`, which takes as long as the import.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    import gc
    from importlib import import_module

    gc.disable()  # imports leave no garbage; collection takes a tenth of their time
    from powerinfer.cli.common import Output, Parser, common_flags

    module = import_module(f"powerinfer.cli.{verb}")
    gc.enable()
    parser = Parser(prog=f"powerinfer {verb}", description=(module.__doc__ or "").strip())
    common_flags(parser)
    module.configure(parser)
    args = parser.parse_args(argv[1:])
    out = Output(args.json)
    _limit_threads(verb, args, out)
    return int(module.execute(args, out))


def _hint(verb: str) -> str:
    """The end of an error about a word that is no command: what may have been meant."""
    if verb in HINTS:
        return f": {HINTS[verb]}"
    if verb in FOREIGN:
        return f"; did you mean {FOREIGN[verb]}?"
    # rm, which deletes, is meant last: rum is run
    if near := did_you_mean(verb, [name for name in VERBS if name != "rm"]) or did_you_mean(verb, VERBS):
        return near
    if " " in verb:
        prompt = verb if len(verb) <= 60 and '"' not in verb else "PROMPT"
        return f'; a prompt follows `run`: powerinfer run "{prompt}"'
    return f"; there are {', '.join(VERBS)}"


def _limit_threads(verb: str, args: Namespace, out: Output) -> None:
    """Limit --threads to the number of cores, in every verb; not of a machine that `plan` describes."""
    described = verb == "plan" and (hasattr(args, "card") or hasattr(args, "hardware"))
    if getattr(args, "threads", None) and not described:
        from powerinfer.system import limited_threads

        args.threads, line = limited_threads(args.threads)
        if line is not None:
            out.note(line)


def _terminate(number: int, frame: object) -> NoReturn:
    """SIGTERM ends like Ctrl-C: incomplete files are removed, or kept where the next run goes on with them."""
    raise SystemExit(TERMINATED)


def entry() -> NoReturn:
    """The console script."""
    # one that the shell closed is None, and the next file that is opened would get its number
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal that lacks a character shows ?
    import signal

    signal.signal(signal.SIGTERM, _terminate)
    status = main(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        status = BROKEN_PIPE
    except (OSError, ValueError):
        status = status or 1
    if status == BROKEN_PIPE:
        # The reader is gone: send the interpreter's last flush to /dev/null, or it would print an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(status)


if __name__ == "__main__":
    entry()
