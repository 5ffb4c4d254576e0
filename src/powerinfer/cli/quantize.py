"""Make a GGUF file of a model whose matrices have another type, mostly a smaller one.

Of each block of weights many scales are tried, and those with the least squared error are kept. TYPE is one of
llama.cpp's mixes of types: what most depends on gets a better one, and its programs load the file. The file appears
when it is complete; after Ctrl-C the same command goes on where it was. The model is not changed.

JSON: path, bytes, type, types (how many tensors have each), narrow (matrices whose rows are no whole blocks of the
type, so that they have another), resumed (tensors that an interrupted run wrote), source_bytes, seconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from powerinfer.cli.common import SIZE_FLAG, Output, config_flags, config_from, model_path
from powerinfer.config import EngineConfig
from powerinfer.errors import PowerInferError, RequestError, did_you_mean

if TYPE_CHECKING:
    from powerinfer.formats.checkpoint import Checkpoint
    from powerinfer.formats.importance import Importance
    from powerinfer.formats.mixes import Mix
    from powerinfer.formats.quantised_file import Original
    from powerinfer.formats.source import Names
    from powerinfer.prepare.corpus import Corpus, Windows
    from powerinfer.progress import Progress

_MOST_COARSE_LOSS = 0.05
NO_HEADS = "no file that is made of a folder has them, while llama.cpp's convert_hf_to_gguf.py and quantize keep them"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="GGUF file, Hugging Face folder or name of a model")
    parser.add_argument(
        "mix", metavar="TYPE", nargs="?", help="q8_0, q6_k, q5_k_m, q4_k_m, q4_0, ...; a wrong one shows all"
    )
    parser.add_argument(
        "-o", "--out", metavar="FILE", help="the GGUF file to write; default: beside the model, MODEL-TYPE.gguf"
    )
    parser.add_argument(
        "--size", **SIZE_FLAG,
        help="in place of TYPE: at most this size (8GiB); types are chosen by what they are measured to cost on the "
        "text of --corpus",
    )  # fmt: skip
    parser.add_argument("--pure", action="store_true", help="the type alone, of all matrices")
    parser.add_argument(
        "--tensor-type", metavar="NAMES=TYPE", action="append", default=[],
        help="type of the matrices in whose names a regular expression is found, such as 'blk\\.[0-3]\\.=q6_k'; may be "
        "repeated, the first that fits counts",
    )  # fmt: skip
    parser.add_argument(
        "--imatrix", metavar="FILE", help="file of llama-imatrix: errors weigh more where inputs are larger"
    )
    parser.add_argument(
        "--corpus", metavar="PATH", action="append", default=[],
        help="weigh errors by the inputs of matrices on this text, or folder of texts, which is computed first; may be "
        "repeated; - stands for a small built-in sample",
    )  # fmt: skip
    parser.add_argument("--tokens", metavar="N", type=int, default=16384, help="most tokens of it (default 16384)")
    parser.add_argument("--save-imatrix", metavar="FILE", help="write what --corpus gave as a file for --imatrix")
    parser.add_argument("--force", action="store_true", help="replace FILE if it is there")
    config_flags(parser, EngineConfig, "engine", only=("threads",))


def execute(args: argparse.Namespace, out: Output) -> int:
    import time

    from powerinfer.cli.progress import Bar
    from powerinfer.formats.mixes import chosen_types, target_types, wanted_types
    from powerinfer.formats.quantised_file import write_quantised
    from powerinfer.formats.sized_types import coarse_loss, main_number
    from powerinfer.kernels.cpu import choose_threads

    _check_flags(args)
    threads, _ = choose_threads(config_from(args, EngineConfig).threads)
    patterns = [_chosen(text) for text in args.tensor_type]
    mix = None if args.mix is None else _mix(args.mix.upper(), args.pure)
    source = model_path(args.model, out, fetch_pinned=False)
    target = Path(args.out).expanduser() if args.out is not None else _usual_target(source, args.mix)
    original = _original(source, out)
    if args.out is None and target.exists():
        raise RequestError(f"{target} is there already: give another name with -o FILE")
    _check_target(target, [file.path for file in original.files], args.force, "--out")
    matrices = original.matrices
    wanted = chosen_types(matrices, patterns)
    if mix is not None:
        importance = _importance(args, source, original, out)
        wanted = wanted_types(matrices, mix, importance is not None) | wanted
        types, number = target_types(matrices, wanted), mix.number
    else:
        types, importance = _sized(args, source, original, target_types(matrices, wanted), out)
        number = main_number(types, original.shapes)
    _check_weighed(types, importance)
    narrow = [wanted[one] for one in wanted if types[one] != wanted[one]]
    lost = coarse_loss(original, types)
    if lost > _MOST_COARSE_LOSS:
        out.note(
            f"matrices of two to four values lose {lost:.0%} of their weights' squares: a model that was not trained "
            "for that gives no sensible answers"
        )
    begin = time.monotonic()
    with Bar() as bar:
        result = write_quantised(original, types, number, target, threads, importance, bar)
    seconds = time.monotonic() - begin
    if narrow:
        count = len(narrow)
        line = "1 matrix has another type: its" if count == 1 else f"{count} matrices have another type: their"
        out.note(f"{line} rows are not whole blocks of {' or '.join(sorted(set(narrow)))}")
    if result.resumed:
        out.note(f"{result.resumed} tensors are of the run that was interrupted")
    if result.nbytes > 1.01 * original.nbytes:  # one that is only converted gets a tokenizer
        out.note(f"the file is larger than the model: nothing is gained over the {original.nbytes / 1e6:,.1f} MB")
    kinds = ", ".join(f"{count} {kind}" for kind, count in result.types.items())
    sizes = f"{result.nbytes / 1e6:,.1f} MB from {original.nbytes / 1e6:,.1f} MB"
    out.line(f"{result.path}: {sizes} in {seconds:.1f} s; tensors: {kinds}")
    document = {"path": str(result.path), "bytes": result.nbytes, "type": args.mix, "types": result.types}
    document |= {"narrow": len(narrow), "resumed": result.resumed, "source_bytes": original.nbytes, "seconds": seconds}
    out.document(document)
    return 0


def _check_flags(args: argparse.Namespace) -> None:
    """RequestError for flags that do not go together."""
    if (args.mix is None) == (args.size is None):
        raise RequestError("give either TYPE, such as q4_k_m, or --size, such as 8GiB")
    if args.size is not None and args.out is None:
        raise RequestError("--size needs a name for the file: -o FILE")
    if args.pure and args.size is not None:
        raise RequestError("--pure is for a TYPE: --size chooses several")
    if args.corpus and args.imatrix is not None and args.size is None:
        raise RequestError("--imatrix and --corpus both say how errors are weighed: give one of them")
    if args.save_imatrix is not None and (args.imatrix is not None or not (args.corpus or args.size)):
        raise RequestError("--save-imatrix writes what a text gives: give --corpus, too")
    if None not in (args.save_imatrix, args.out) and _expanded(args.save_imatrix) == _expanded(args.out):
        raise RequestError(f"--out and --save-imatrix are both {args.out}: give two names")
    if args.tokens < 1:
        raise RequestError(f"--tokens must be at least 1, not {args.tokens}")


def _check_weighed(types: dict[str, str], importance: Importance | None) -> None:
    """RequestError for types that need to know which weights matter."""
    from powerinfer.formats.mixes import WEIGHED

    kinds = sorted(set(types.values()) & set(WEIGHED))
    if kinds and importance is None:
        raise RequestError(f"{kinds[0]} needs the importance of weights: give --imatrix FILE, or --corpus PATH")


def _expanded(path: str) -> Path:
    return Path(path).expanduser().resolve()


def _usual_target(source: Path, mix: str) -> Path:
    """MODEL-TYPE.gguf beside the model; of one in the cache, in the current folder."""
    from powerinfer.formats.catalogue_names import quantised_name
    from powerinfer.hub import cache_folder

    folder = Path() if source.resolve().is_relative_to(cache_folder().resolve()) else source.resolve().parent
    name = source.stem if source.suffix == ".gguf" else source.resolve().name
    return folder / f"{quantised_name(name, mix.upper())}.gguf"


def _importance(args: argparse.Namespace, source: Path, original: Original, out: Output) -> Importance | None:
    """Weights of the errors."""
    from powerinfer.cli.progress import Bar
    from powerinfer.formats.importance import read_importance, write_importance

    if args.imatrix is not None:
        return read_importance(Path(args.imatrix).expanduser(), original.shapes, original.path)
    if not args.corpus and args.size is None:
        return None
    path = None if args.save_imatrix is None else Path(args.save_imatrix).expanduser()
    if path is not None:
        _check_target(path, [file.path for file in original.files], args.force, "--save-imatrix")
    with Bar() as bar, _text(args, source, out, bar) as text:
        from powerinfer_train.activations import measure_importance

        importance = measure_importance(text.checkpoint, text.names, text.windows, bar)
    if path is not None:
        try:
            write_importance(path, importance, text.windows.size)
        except OSError as error:
            raise PowerInferError(f"cannot write {path}: {error.strerror or error}") from None
    return importance


def _unmeasured(args: argparse.Namespace, original: Original) -> Importance:
    """Importance as a file will name it, before a text is computed."""
    from powerinfer.formats.importance import Importance, read_importance

    if args.imatrix is not None:
        return read_importance(Path(args.imatrix).expanduser(), original.shapes, original.path)
    return Importance(", ".join(corpus.name for corpus in _corpora(args)), {}, {})


def _corpora(args: argparse.Namespace) -> list[Corpus]:
    from powerinfer.prepare.corpus import open_corpora

    return open_corpora([] if args.corpus in ([], ["-"]) else args.corpus)


@dataclass(frozen=True)
class _Text:
    """A model and a text to compute with it."""

    checkpoint: Checkpoint
    names: Names
    windows: Windows


@contextmanager
def _text(args: argparse.Namespace, source: Path, out: Output, progress: Progress) -> Iterator[_Text]:
    """The model and the text of --corpus, with torch at hand."""
    from powerinfer.formats.checkpoint import open_checkpoint
    from powerinfer.formats.gguf import read_gguf
    from powerinfer.formats.gguf_model import NAMES, names_of
    from powerinfer.prepare.corpus import read_windows
    from powerinfer.prepare.profiling import WINDOW
    from powerinfer.prepare.training import need_torch, torch_threads
    from powerinfer.text.model_text import chat_template_of, tokenizer_of

    need_torch()
    checkpoint = open_checkpoint(source)
    window = min(WINDOW, checkpoint.config.context_length)
    limit = max(args.tokens, window)
    template = chat_template_of(checkpoint)
    windows = read_windows(_corpora(args), tokenizer_of(checkpoint), window, limit, progress, template, out.note)
    is_gguf = checkpoint.source == "gguf"
    names = names_of(read_gguf(checkpoint.path), checkpoint.config) if is_gguf else NAMES
    with torch_threads(config_from(args, EngineConfig).threads or 0):
        yield _Text(checkpoint, names, windows)


def _sized(
    args: argparse.Namespace, source: Path, original: Original, chosen: dict[str, str], out: Output
) -> tuple[dict[str, str], Importance]:
    """(the types of a file of --size, how errors are weighed). chosen: types that are given, by name."""
    from powerinfer.cli.progress import Bar
    from powerinfer.formats.sized_types import check_size, sized_types
    from powerinfer.kernels.cpu import choose_threads

    check_size(original, args.size, chosen, _unmeasured(args, original))
    importance = _importance(args, source, original, out)
    assert importance is not None
    with Bar() as bar:
        with _text(args, source, out, bar) as text:
            from powerinfer_train.sensitivity import measure_sensitivity

            sensitivities = measure_sensitivity(text.checkpoint, text.names, text.windows, importance, bar)
        threads, _ = choose_threads(config_from(args, EngineConfig).threads)
        return sized_types(original, args.size, sensitivities, chosen, importance, threads, bar), importance


def _mix(name: str, pure: bool) -> Mix:
    from powerinfer.formats.mixes import ALIASES, MIXES, find_mix

    try:
        return find_mix(name, pure)
    except KeyError:
        names = ", ".join(MIXES)
        raise RequestError(f"no type {name}{did_you_mean(name, (*MIXES, *ALIASES))}; there are {names}") from None


def _chosen(text: str) -> tuple[str, str]:
    """(regular expression, type) of a --tensor-type."""
    import re

    from powerinfer.formats.scale_search import WRITTEN

    pattern, _, kind = text.rpartition("=")
    if not pattern:
        raise RequestError(f"--tensor-type {text}: give NAMES=TYPE, such as 'ffn_down=q6_k'")
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise RequestError(f"--tensor-type {text}: {pattern} is no regular expression: {error}") from None
    if kind.upper() not in WRITTEN:
        near = did_you_mean(kind.upper(), WRITTEN)
        raise RequestError(f"--tensor-type {text}: no type {kind}{near}; there are {', '.join(WRITTEN)}")
    return pattern, kind.upper()


def _original(source: Path, out: Output) -> Original:
    from powerinfer.formats.checkpoint import open_checkpoint
    from powerinfer.formats.gguf import read_gguf
    from powerinfer.formats.quantised_file import gguf_original

    if source.is_dir() and (source / "config.json").exists():
        from powerinfer_train.folder_original import folder_original

        checkpoint = open_checkpoint(source, draft_head=True)
        if checkpoint.config.draft is not None:
            out.note(checkpoint.leave_draft(NO_HEADS))
        return folder_original(checkpoint)
    gguf = read_gguf(open_checkpoint(source).path if source.is_dir() else source)
    if gguf.magic != "GGUF":
        raise RequestError(f"{source} is a file of PowerInfer's own form: quantize takes GGUF files and folders")
    return gguf_original(gguf)


def _check_target(target: Path, sources: list[Path], force: bool, flag: str) -> None:
    """RequestError for a file that must not, or cannot, be written; before anything is computed for it."""
    if target.is_dir():
        raise RequestError(f"{target} is a folder: {flag} takes the name of a file")
    if not target.parent.is_dir():
        raise RequestError(f"cannot write {target}: there is no folder {target.parent}")
    if not target.exists():
        return
    if not target.is_file():
        raise RequestError(f"{target} is not a file: {flag} takes the name of a file")
    if any(target.samefile(source) for source in sources):
        raise RequestError(f"{target} is the model itself, which stays as it is: give another {flag}")
    if not force:
        raise RequestError(f"{target} is there already; --force replaces it")
