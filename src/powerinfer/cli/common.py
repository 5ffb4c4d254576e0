"""Shared by the verbs: flags generated from the configuration's dataclasses, output, the model flag."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from powerinfer.cli.keys import unechoed
from powerinfer.cli.screen import Wrapping, styled
from powerinfer.config import EngineConfig
from powerinfer.errors import RequestError, did_you_mean
from powerinfer.progress import Progress, silent
from powerinfer.sizes import A_SIZE, NoUnitError, read_size, read_sizes

if TYPE_CHECKING:
    from powerinfer.formats.checkpoint import Checkpoint
    from powerinfer.runtime.engine import LLM
    from powerinfer.runtime.params import SamplingParams


# Flags of llama.cpp, Ollama and vLLM: the flag here that a command must have for the hint to suit it, and the hint.
_GPU = ("--vram", "use --vram SIZE, the memory of the GPU to fill, or --gpu none")
_SHARES = ("--vram", "use --vram, with the memory of each GPU to fill, as 8GiB,12GiB")
_SEVERAL = (
    "--gpu",
    "use --gpu, with the GPUs to use, as 0,1: each computes some of the layers, or with --split-mode expert some of "
    "every layer's experts",
)
_EXPERTS = ("--vram", "leave it out: experts are in RAM where the GPU is full; --vram SIZE limits it")
_ATTENTION = ("--kv-type", "leave it out: attention is always computed like that")
_MAPPING = ("--ram", "leave it out: weights that do not fit RAM are read from disk; --ram SIZE limits it")
_LENGTH = ("--max-tokens", "use -n N")
_CONTEXT = ("--context", "use -c N")
_FILE = ("--prompt", "powerinfer run < FILE")
_DRAFTS = ("--speculate", "use --speculate MODEL, lookup or mtp; how many is decided as it runs")
_TALK = ("--prompt", "`powerinfer chat` is a conversation")
FOREIGN = {
    **dict.fromkeys(("-ngl", "--gpu-layers", "--n-gpu-layers", "--gpu-memory-utilization"), _GPU),
    **dict.fromkeys(("-ts", "--tensor-split"), _SHARES),
    **dict.fromkeys(("-mg", "--main-gpu", "-dev", "--device", "--tensor-parallel-size"), _SEVERAL),
    **dict.fromkeys(("--predict", "--n-predict", "--num-predict"), _LENGTH),
    **dict.fromkeys(("--ctx-size", "--n-ctx", "--num-ctx", "--max-model-len"), _CONTEXT),
    **dict.fromkeys(("-f", "--file"), _FILE),
    **dict.fromkeys(("-i", "--interactive"), _TALK),
    **dict.fromkeys(("-cmoe", "--cpu-moe", "-ncmoe", "--n-cpu-moe", "-ot", "--override-tensor"), _EXPERTS),
    **dict.fromkeys(("-fa", "--flash-attn"), _ATTENTION),
    **dict.fromkeys(("--mmap", "--no-mmap", "--mlock"), _MAPPING),
    **dict.fromkeys(("-ctk", "-ctv", "--cache-type-k", "--cache-type-v"), ("--kv-type", "use --kv-type TYPE, of both")),
    **dict.fromkeys(("-np", "--parallel", "--max-num-seqs"), ("--max-batch", "use --max-batch N")),
    **dict.fromkeys(("-md", "--model-draft", "--draft-max", "--spec-type", "--spec-draft-n-max"), _DRAFTS),
    "--jinja": ("--context", "leave it out: the model's chat template is always used"),
    "--chat-template": ("--raw", "the model's chat template is always used; --raw goes without"),
    "-p": ("--prompt-tokens", "use --prompt-tokens N"),
    "-n": ("--gen-tokens", "use --gen-tokens N"),
    "-r": ("--repeat", "use --repeat N"),
    **dict.fromkeys(("--nothink", "--no-think"), ("--think", "use --think off")),
    **dict.fromkeys(("-rea", "--reasoning"), ("--think", "use --think VALUE")),
    "--output-tensor-type": ("--tensor-type", "use --tensor-type '^output=TYPE', or token_embd where that is the head"),
    "--token-embedding-type": ("--tensor-type", "use --tensor-type token_embd=TYPE"),
    "--leave-output-tensor": ("--tensor-type", "use --tensor-type '^output=TYPE', with the type that it has"),
    "--allow-requantize": ("--tensor-type", "leave it out: models in any type are taken"),
    "--keep-split": ("--tensor-type", "leave it out: what is written is one file"),
    "--dry-run": ("--tensor-type", "leave it out: docs/quantize.md has the bits of a weight of each type"),
    "--repeat-penalty": ("--repetition-penalty", "use --repetition-penalty X"),
}


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line and whose usage is short; the flags are listed below."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(formatter_class=_plain_formatter, allow_abbrev=False, **kwargs)
        self._negative_number_matcher = re.compile(r"-\.?\d")  # -1GiB is a wrong value, not a flag

    def format_help(self) -> str:
        self.formatter_class = _help_formatter
        places = [action for action in self._actions if not action.option_strings and action.help != argparse.SUPPRESS]
        names = [str(action.metavar or "|".join(action.choices or ()) or action.dest) for action in places]
        shown = [f"[{name}]" if action.nargs == "?" else name for name, action in zip(names, places, strict=True)]
        self.usage = " ".join(["%(prog)s", *shown, "[flags]"])
        return super().format_help()

    def parse_args(self, args: Any, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse like argparse; a flag that is not known is answered with the nearest one that is."""
        flags = [flag for action in self._actions for flag in action.option_strings]
        self._refuse_foreign(args, flags)
        values, rest = self.parse_known_args(args, namespace)
        wrong = next((word.partition("=")[0] for word in rest if word.startswith("-")), None)
        if wrong is not None:
            self.error(f"unrecognized arguments: {' '.join(rest)}{did_you_mean(wrong, flags)}")
        if rest and hasattr(values, "prompt"):
            # `ollama run MODEL PROMPT`
            if len(rest) == 1 and values.model is None and _may_be_model(values.prompt):
                values.model, values.prompt = values.prompt, rest[0]
                return values
            self._refuse_second_prompt(values, rest)
        if len(rest) == 1 and getattr(values, "mix", "") is None:
            values.mix = rest.pop()  # argparse gives an optional word behind flags to nobody
        if rest:
            hint = "; the file to write is -o FILE" if hasattr(values, "mix") else ""
            self.error(f"unexpected: {' '.join(rest)}{hint}")
        if getattr(values, "place", None) is not None:
            if values.model is not None:
                self.error("give the model once: as MODEL or with -m")
            values.model = values.place
        return values

    def _refuse_second_prompt(self, args: argparse.Namespace, rest: Sequence[str]) -> NoReturn:
        """RequestError for words behind a prompt: the prompt may have lost its quotes, or be a misspelt model."""
        refuse_model_as_prompt(args.prompt)
        name = args.prompt if args.model is None and len(rest) == 1 and " " not in args.prompt else ""
        _refuse_unsupported(name)
        if name and " " in rest[0]:  # it had its quotes
            self.error(f"{name} is not the name of a model{_did_you_mean(name)}")
        model = f", and {name} is not the name of a model{_did_you_mean(name)}" if name else ""
        self.error(f"unexpected: {' '.join(rest)}; a prompt of several words needs quotes{model}")

    def _refuse_foreign(self, words: Sequence[str], flags: Collection[str]) -> None:
        """RequestError for a flag of another program: argparse would read -ngl as -n gl."""
        for word in words[: words.index("--") if "--" in words else len(words)]:
            flag = word.partition("=")[0]
            equivalent, hint = FOREIGN.get(flag, ("", ""))
            if equivalent in flags and flag not in flags:
                self.error(f"no flag {flag}: {hint}")

    def error(self, message: str) -> NoReturn:
        raise RequestError(f"{self._plain_message(message)}; see `{self.prog} --help`")

    def _plain_message(self, message: str) -> str:
        """A message of argparse as its users would say it."""
        if missing := re.fullmatch(r"the following arguments are required: (.+)", message):
            helps = {str(one.metavar): one.help for one in self._actions if not one.option_strings}
            helps |= {flag: one.help for one in self._actions for flag in one.option_strings}
            names = [f"{name} ({helps[name]})" if helps.get(name) else name for name in missing[1].split(", ")]
            return f"missing: {', '.join(names)}"
        argument = re.fullmatch(r"argument (.+?): (.+)", message)
        if argument is None:
            return message
        name, problem = argument[1].rpartition("/")[2], argument[2]
        subject = f"what follows `{self.prog}`" if "|" in name else name
        if choice := re.fullmatch(r"invalid choice: '?(.+?)'? \(choose from (.+)\)", problem):
            choices = choice[2].replace("'", "")
            near = did_you_mean(choice[1], choices.split(", "))
            return f"{subject} must be one of {choices}, not {choice[1]!r}{near}"
        if wrong := re.fullmatch(r"invalid (.+) value: (.+)", problem):
            kind = {"int": "whole number", "float": "number"}.get(wrong[1], wrong[1])
            return f"{subject} must be {'' if kind[0].isupper() else 'a '}{kind}, not {wrong[2]}"
        return f"{subject} needs a value" if problem == "expected one argument" else f"{subject}: {problem}"


def _plain_formatter(prog: str) -> argparse.HelpFormatter:
    """argparse makes one for every flag; a fixed width saves querying the terminal."""
    return argparse.HelpFormatter(prog, width=80)


def _help_formatter(prog: str) -> argparse.HelpFormatter:
    from shutil import get_terminal_size

    width = min(get_terminal_size().columns, 120)
    return _HelpFormatter(prog, max_help_position=30, width=width)


class _HelpFormatter(argparse.HelpFormatter):
    """Wraps each paragraph of a description on its own."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return wrapped(text, width)


def wrapped(text: str, width: int) -> str:
    """The paragraphs of a text, wrapped; one with two spaces inside is a table, whose lines stay."""
    from textwrap import fill

    paragraphs = text.split("\n\n")
    return "\n\n".join(part if "  " in part else fill(part, width, break_on_hyphens=False) for part in paragraphs)


def common_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="end stdout with one JSON document; everything else goes to stderr"
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors")


def model_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-m",
        "-hf",
        "--model",
        metavar="MODEL",
        help="GGUF file, model folder or name of a model, of Hugging Face, too; default: the default model",
    )


def model_argument(parser: argparse.ArgumentParser, many: bool = False) -> None:
    """MODEL as an argument, which stands for -m. many: the flag collects a list."""

    def read(text: str) -> str | list[str]:
        return [text] if many else text

    parser.add_argument("place", nargs="?", type=read, metavar="MODEL", help="the model, as with -m")


def _is_model(prompt: str) -> bool:
    from powerinfer.hub import names_model

    return names_model(prompt)


def _may_be_model(text: str) -> bool:
    from powerinfer.hub import may_name_model

    return may_name_model(text)


def _refuse_unsupported(name: str) -> None:
    from powerinfer.formats.catalogue_names import unsupported

    refusal = unsupported(name)
    if refusal is not None:
        raise refusal


def _did_you_mean(name: str) -> str:
    from powerinfer.hub import similar_known

    near = similar_known(name)
    return "" if near is None else f"; did you mean {near}?"


def refuse_model_as_prompt(prompt: str) -> None:
    """RequestError for a prompt that is a model, as in `powerinfer run MODEL`."""
    if _is_model(prompt):
        raise RequestError(f'{prompt} is a model: powerinfer run "PROMPT" -m {prompt}, or powerinfer chat {prompt}')


# ---------------------------------------------------------------- flags from dataclasses


def _or_none(read: Callable[[str], Any], name: str, unlimited: int | None = None) -> Callable[[str], Any]:
    """A converter that also takes "none", and `unlimited` for it.

    Messages show its name: "must be a whole number, not 'x'".
    """

    def convert(text: str) -> Any:
        value = None if text.lower() == "none" else read(text)
        return None if value == unlimited else value

    convert.__name__ = name
    return convert


def _with_units(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """A reader of sizes for argparse; ArgumentTypeError for a number without a unit."""

    def convert(text: str) -> Any:
        try:
            return read(text)
        except NoUnitError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


_SECONDS = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def read_duration(text: str) -> float | None:
    """Seconds: "90", "30s", "5m", "1h"; None for a negative number, as Ollama reads it. ValueError otherwise."""
    match = re.fullmatch(r"(-?)(\d{1,9}(?:\.\d{0,9})?)(ms|s|m|h|)", text.strip().lower())
    if match is None:
        raise ValueError(text)
    return None if match[1] else float(match[2]) * _SECONDS[match[3]]


def _bias(text: str) -> tuple[int, float]:
    token, separator, bias = text.partition("=")
    if not separator:
        raise ValueError(text)
    return int(token), float(bias)


_bias.__name__ = "ID=BIAS"
_WHOLE_NUMBER = {"type": _or_none(int, "whole number")}
_NUMBER = {"type": _or_none(float, "number")}

SIZE_FLAG: dict[str, Any] = {"type": _or_none(_with_units(read_size), A_SIZE), "metavar": "SIZE"}
"""Reader of a flag of a size in bytes."""

# The annotation of a field decides how its flag reads.
_READERS: dict[str, dict[str, Any]] = {
    "int": _WHOLE_NUMBER,
    "int | None": _WHOLE_NUMBER,
    "size": SIZE_FLAG,
    "sizes": {"type": _or_none(_with_units(read_sizes), A_SIZE), "metavar": "SIZE"},
    "duration": {"type": _or_none(read_duration, "duration (such as 30s, 5m)"), "metavar": "TIME"},
    "float": _NUMBER,
    "float | None": _NUMBER,
    "str": {},
    "str | None": {},
    "Sequence[str]": {"action": "append"},
    "Sequence[int]": {"action": "append", "type": int},
    "Mapping[int, float]": {"action": "append", "type": _bias, "metavar": "ID=BIAS"},
}


SAMPLING = "sampling (defaults where the model has none of its own)"
"""The title of the flags of `SamplingParams`."""


def config_flags(
    parser: argparse.ArgumentParser,
    config: type,
    title: str,
    defaults: Mapping[str, Any] | None = None,
    only: Collection[str] | None = None,
) -> None:
    """Give `parser` a flag for each option of a configuration dataclass, with the class's own help and default.

    `defaults`: overrides of the verb; `only`: the options of the verb, None for all.
    """
    group = parser.add_argument_group(title)
    for field in dataclasses.fields(config):
        if "help" not in field.metadata or (only is not None and field.name not in only):
            continue
        flag = "--" + field.name.replace("_", "-")
        help_text = field.metadata["help"].replace("%", "%%")
        fallback = (defaults or {}).get(field.name, argparse.SUPPRESS)
        details: dict[str, Any] = {"default": fallback, "dest": field.name}
        if field.type == "bool":
            if field.default:
                flag = "--no-" + field.name.replace("_", "-")
                group.add_argument(flag, action="store_false", help=f"do not {help_text}", **details)
            else:
                group.add_argument(flag, action="store_true", help=help_text, **details)
            continue
        kind = next((one for one in ("size", "sizes", "duration") if field.metadata.get(one)), str(field.type))
        details.update(_READERS[kind])
        if "unlimited" in field.metadata:
            details["type"] = _or_none(int, "whole number", field.metadata["unlimited"])
        details |= {key: field.metadata[key] for key in ("choices", "metavar") if key in field.metadata}
        default = field.default if fallback is argparse.SUPPRESS else fallback
        if (default not in (None, ()) or fallback is None) and "default" not in help_text:
            help_text += f" (default {'none' if default is None else default})"
        group.add_argument(*field.metadata.get("flags", ()), flag, help=help_text, **details)


def config_from(args: argparse.Namespace, config: Callable[..., Any], **overrides: Any) -> Any:
    """The configuration from the flags; a field without a flag keeps its default."""
    names = {field.name for field in dataclasses.fields(config)}  # type: ignore[arg-type]
    values = {name: value for name, value in vars(args).items() if name in names}
    if "logit_bias" in values:
        values["logit_bias"] = dict(values["logit_bias"])
    return config(**{**overrides, **values})


def option_names(config: type) -> list[str]:
    return [field.name for field in dataclasses.fields(config) if "help" in field.metadata]


def read_option(config: type, name: str, text: str) -> dict[str, Any]:
    """{option: value}, read as its flag reads it; true or false for a switch. RequestError, which names no flags, if it
    cannot be."""
    wanted = "--" + name.lstrip("-").replace("_", "-")
    options = {field.name: field for field in dataclasses.fields(config) if "help" in field.metadata}
    names = {f"--{one.replace('_', '-')}": one for one in options}
    names |= {flag: one for one, field in options.items() for flag in field.metadata.get("flags", ())}
    if wanted not in names:
        near = did_you_mean(wanted, names).replace("-", "_").replace("__", "")
        raise RequestError(f"no option {name}{near or '; there are ' + ', '.join(options)}")
    option = names[wanted]
    if options[option].type == "bool":
        if text not in ("true", "false"):
            raise RequestError(f"{option} must be true or false, not {text!r}")
        return {option: text == "true"}
    if text == "none" and options[option].default == ():
        return {option: ()}
    parser = Parser(prog=name)
    config_flags(parser, config, "", only=(option,))
    try:
        args = parser.parse_args([f"--{option.replace('_', '-')}={text}"])
    except RequestError as error:
        message = str(error).partition("; see `")[0]
        raise RequestError(message.replace(f"--{option.replace('_', '-')}", option, 1)) from None
    return {option: getattr(config_from(args, config), option)}


# ---------------------------------------------------------------- output


def checked_text(text: str | bytes, noun: str) -> str:
    """External text, which must be UTF-8; RequestError if it is not (Python marks such bytes in arguments)."""
    try:
        raw = text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")
        return raw.decode("utf-8")
    except UnicodeError:
        raise RequestError(f"{noun} is not UTF-8 text") from None


class Output:
    """The output of a verb: text on stdout, or with --json one document at its end."""

    def __init__(self, json_mode: bool) -> None:
        self.json_mode = json_mode
        self._terminal = not json_mode and sys.stdout.isatty()
        self._answer = Wrapping(sys.stdout) if self._terminal else None
        self._thought = Wrapping(sys.stderr)

    def line(self, text: str = "") -> None:
        """A line of text: stdout, or stderr with --json."""
        print(text, file=sys.stderr if self.json_mode else sys.stdout)

    def note(self, text: str) -> None:
        """A note: always stderr."""
        print(text, file=sys.stderr, flush=True)

    def aside(self, text: str) -> None:
        """A note that matters less than the text around it, such as a speed: dimmed on a terminal."""
        self.note(styled(text, "dim", sys.stderr))

    def verbatim(self) -> None:
        """Let all lines of the text be as generated, as those of JSON must be; a terminal breaks long ones."""
        self._answer = None

    def text(self, piece: str) -> None:
        """A piece of generated text, at once; silent with --json, whose document holds the whole text.

        A terminal may get the end of a word with the piece after it (`flush` says that there is none).
        """
        if self.json_mode or not piece:
            return
        shown = printable(piece) if self._terminal else piece
        _write(sys.stdout, shown if self._answer is None else self._answer.push(shown))

    def thought(self, piece: str) -> None:
        """A piece of what a model writes before its answer: dimmed, on stderr, if that is a terminal."""
        if piece and not self.json_mode and sys.stderr.isatty():
            _write(sys.stderr, styled(self._thought.push(printable(piece)), "dim", sys.stderr))

    def flush(self) -> None:
        """Show what is left of `thought` and `text`."""
        _write(sys.stderr, styled(self._thought.flush(), "dim", sys.stderr))
        if self._answer is not None:
            _write(sys.stdout, self._answer.flush())

    def document(self, document: dict[str, Any]) -> None:
        """The result as JSON: the last line of stdout, only with --json."""
        if self.json_mode:
            import json

            sys.stdout.write(json.dumps(document, ensure_ascii=False, allow_nan=False, default=_plain) + "\n")
            sys.stdout.flush()


def _write(stream: TextIO, text: str) -> None:
    """Write it at once."""
    if text:
        stream.write(text)
        stream.flush()


def _plain(value: Any) -> Any:
    """Numpy numbers and dataclasses as JSON."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    import numpy as np

    if isinstance(value, np.generic):
        return value.item()
    return str(value)


_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """Text that is safe for a terminal: control characters are escaped."""
    return text.translate(_CONTROLS)


# ---------------------------------------------------------------- the engine


def agreed(question: str) -> bool:
    """Whether the user says yes to a question on stderr; False without a terminal."""
    if sys.stdin is None or not sys.stdin.isatty() or not sys.stderr.isatty():
        return False
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def small_model_note(model: str | None, out: Output) -> None:
    """A line about a model (-m) so small that it is often wrong, for those who meet it first: they give no path."""
    from powerinfer.hub import small_note

    if not out.json_mode and (model is None or not Path(model).exists()) and (note := small_note(model)):
        out.aside(note)


def shown_name(model: str | None, path: Path) -> str:
    """The name of a model: as in `powerinfer list` or the short one, if -m says that, else its file's."""
    from powerinfer.formats.catalogue_names import short_name
    from powerinfer.hub import default_name, known_names

    if model is None:
        return default_name()
    if not Path(model).exists():
        for name in known_names():
            if name.lower() == model.lower():
                return name
        short = short_name(model)
        if short is not None and short[1] is None:
            return short[0]
    return path.stem if path.suffix == ".gguf" else path.name


def model_path(model: str | None, out: Output, fetch_pinned: bool = True) -> Path:
    """The path of a model (-m), downloaded if it is a small one, unless not to be fetched, or the user agrees, with
    progress on stderr."""
    from powerinfer.cli.progress import Bar
    from powerinfer.hub import resolve_model

    with Bar() as bar:
        return resolve_model(model, say=out.note, agree=agreed, progress=bar, fetch_pinned=fetch_pinned)


def open_model(
    model: str | None,
    engine: EngineConfig,
    out: Output,
    progress: Progress = silent,
    fetch_pinned: bool = True,
    *,
    draft_head: bool = False,
) -> Checkpoint:
    """The files of a model (-m), opened with --quantize; draft_head: with its draft head, where the engine reads one;
    fetch_pinned: as of `model_path`."""
    from powerinfer.formats.checkpoint import open_checkpoint

    path, reads = model_path(model, out, fetch_pinned), draft_head and engine.reads_draft_head
    return open_checkpoint(path, quantize=engine.quantize, progress=progress, draft_head=reads)


def open_llm(
    model: str | None,
    engine: EngineConfig,
    out: Output,
    check: Callable[[Checkpoint], object] = silent,
    *,
    alone: bool = False,
) -> LLM:
    """The engine for a model (-m), with progress on stderr. check, alone: as of `load_llm`."""
    from powerinfer.cli.progress import Bar

    path = model_path(model, out)
    with Bar() as bar, unechoed():
        llm = load_llm(path, engine, bar, check, alone=alone)
    for note in llm.notes:
        out.note(note)
    return llm


def load_llm(
    path: Path,
    engine: EngineConfig,
    progress: Progress,
    check: Callable[[Checkpoint], object] = silent,
    *,
    alone: bool = False,
) -> LLM:
    """The engine for a model's file or folder. check: called before its weights are read; alone: as of `LLM`."""
    # Loading makes a hundred thousand objects and no garbage: collection would take 10 ms.
    gc.disable()
    try:
        from powerinfer.runtime.engine import LLM

        return LLM(path, progress=progress, check=check, alone=alone, **dataclasses.asdict(engine))
    finally:
        gc.freeze()
        gc.enable()


def with_model_defaults(params: SamplingParams, llm: LLM, args: argparse.Namespace) -> SamplingParams:
    """`params` of the flags, with the model's own defaults for flags that were not given."""
    fields = dataclasses.fields(params)
    values = {field.name: getattr(params, field.name) for field in fields if hasattr(args, field.name)}
    filled = llm.sampling.with_given(values)
    return dataclasses.replace(params, **{name: filled[name] for name in llm.sampling.values if name in filled})


def sparsity_summary(llm: LLM) -> dict[str, Any] | None:
    """`LLM.sparsity` without its layers, with the number of layers by way instead; None for a dense model."""
    report = llm.sparsity
    if report is None:
        return None
    layers = report.pop("layers")
    if "gpu_share" in report:
        return report
    ways = [layer["ways"]["1"] for layer in layers]
    return {**report, "ways": {way: ways.count(way) for way in sorted(set(ways))}}


def disk_text(disk: Mapping[str, Any]) -> str:
    """`LLM.disk` as text."""
    if disk["read_gb_s"] is None:
        return f"nothing was read ({disk['mode']})"
    hits = "" if disk["hit_rate"] is None else f", {100 * disk['hit_rate']:.1f} % of what was needed was in RAM"
    hits += "" if disk["guess_rate"] is None else f", {100 * disk['guess_rate']:.0f} % of what was expected was needed"
    hits += f", {disk['small_reads']} small reads in {disk['joined_reads']}" if disk["small_reads"] else ""
    read = f"{disk['bytes'] / 1e6:.0f} MB read at {disk['read_gb_s']:.2f} GB/s ({disk['mode']})"
    return f"{read}, {disk['stall_seconds']:.2f} s waited{hits}"


def sparsity_text(sparsity: Mapping[str, Any]) -> str:
    """`LLM.sparsity` or its summary as text."""
    if sparsity["selector"] == "router":  # experts on two devices
        if sparsity["gpu_share"] is None:
            return "no layer has experts on both devices"
        split = f"{100 * sparsity['gpu_share']:.1f} % of the selected experts on the GPU"
        active = sparsity["active_fraction"]
        fired = "" if active is None else f", where {100 * active:.1f} % of its experts' neurons fired"
        return f"{split}, the CPU had work in {100 * sparsity['jobs']:.0f} % of the FFNs{fired}"
    if not sparsity["tokens"]:
        return "no token was computed sparsely"
    active = f"{100 * sparsity['active_fraction']:.1f} % active"
    needed = [active]
    if "gpu_share" in sparsity:
        share = sparsity["gpu_share"]
        of_them = [] if share is None else [f"{100 * share:.1f} % of them on the GPU"]
        return ", ".join([*needed, *of_them, f"the CPU had work in {100 * sparsity['jobs']:.0f} % of the FFNs"])
    if sparsity["selector"] == "predicted":
        needed.append(f"{100 * sparsity['candidate_fraction']:.1f} % candidates")
    if sparsity["recall"] is not None:
        needed.append(f"{100 * sparsity['recall']:.1f} % of those that fire among them")
    computed, dense = 100 * sparsity["computed_fraction"], sparsity["dense_bytes_per_token"] / 1e6
    if f"{computed:.1f} % active" != active:
        needed[0] += " in the layers that decode sparsely"
        needed.append(f"{computed:.1f} % computed in all layers")
    read = f"{sparsity['bytes_per_token'] / 1e6:.1f} MB of FFN weights a token, dense {dense:.1f} MB"
    return f"{', '.join(needed)}; {read}"
