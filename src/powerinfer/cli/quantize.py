"""Make a GGUF file of a model whose matrices have another type, mostly a smaller one.

Of each block of weights many scales are tried, and those with the least squared error are kept. TYPE is one of
llama.cpp's mixes of types: what most depends on gets a better one, and its programs load the file. The file appears
when it is complete; after Ctrl-C the same command goes on where it was. The model is not changed.

JSON: path, bytes, type, types (how many tensors have each), narrow (matrices whose rows are no whole blocks of the
type, so that they have another), resumed (tensors that an interrupted run wrote), source_bytes, seconds.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from powerinfer.cli.common import Output, config_flags, config_from, model_path
from powerinfer.config import EngineConfig
from powerinfer.errors import PowerInferError, RequestError, did_you_mean

if TYPE_CHECKING:
    from powerinfer.formats.importance import Importance
    from powerinfer.formats.mixes import Mix
    from powerinfer.formats.quantised_file import Original


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="GGUF file, Hugging Face folder or name of a model")
    parser.add_argument("type", metavar="TYPE", help="q8_0, q6_k, q5_k_m, q4_k_m, q4_0, ...; a wrong one shows all")
    parser.add_argument("-o", "--out", metavar="FILE", required=True, help="the GGUF file to write")
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
    from powerinfer.formats.mixes import target_types, wanted_types, with_chosen
    from powerinfer.formats.quantised_file import write_quantised
    from powerinfer.system import usable_cores

    name = args.type.upper()
    mix, chosen = _mix(name, args.pure), [_chosen(text) for text in args.tensor_type]
    target = Path(args.out).expanduser()
    _check_importance(args)
    source = model_path(args.model, out, fetch_pinned=False)
    original = _original(source)
    _check_target(target, [file.path for file in original.files], args.force)
    importance, matrices = _importance(args, source, original, out), original.matrices
    wanted = with_chosen(matrices, wanted_types(matrices, mix, importance is not None), chosen)
    types = target_types(matrices, wanted)
    begin = time.monotonic()
    threads = config_from(args, EngineConfig).threads or usable_cores()[0]
    with Bar() as bar:
        result = write_quantised(original, types, mix.number, target, threads, importance, bar)
    seconds, narrow = time.monotonic() - begin, sum(types[one] != wanted[one] for one in types)
    if narrow:
        out.note(f"{narrow} matrices have another type: their rows are not whole blocks of {name}'s")
    if result.resumed:
        out.note(f"{result.resumed} tensors are of the run that was interrupted")
    if result.nbytes > original.nbytes:
        out.note(f"the file is larger than the model: nothing is gained over the {original.nbytes / 1e6:,.1f} MB")
    kinds = ", ".join(f"{count} {kind}" for kind, count in result.types.items())
    sizes = f"{result.nbytes / 1e6:,.1f} MB from {original.nbytes / 1e6:,.1f} MB"
    out.line(f"{result.path}: {sizes} in {seconds:.1f} s; tensors: {kinds}")
    document = {"path": str(result.path), "bytes": result.nbytes, "type": name, "types": result.types}
    document |= {"narrow": narrow, "resumed": result.resumed, "source_bytes": original.nbytes, "seconds": seconds}
    out.document(document)
    return 0


def _check_importance(args: argparse.Namespace) -> None:
    """RequestError for flags that do not go together."""
    if args.corpus and args.imatrix is not None:
        raise RequestError("--imatrix and --corpus both say how errors are weighed: give one of them")
    if args.save_imatrix is not None and not args.corpus:
        raise RequestError("--save-imatrix writes what a text gives: give --corpus, too")
    if args.tokens < 1:
        raise RequestError(f"--tokens must be at least 1, not {args.tokens}")


def _importance(args: argparse.Namespace, source: Path, original: Original, out: Output) -> Importance | None:
    """How errors are weighed."""
    from powerinfer.formats.importance import read_importance, write_importance

    if args.imatrix is not None:
        return read_importance(Path(args.imatrix).expanduser(), original.shapes, original.path)
    if not args.corpus:
        return None
    path = None if args.save_imatrix is None else Path(args.save_imatrix).expanduser()
    if path is not None:
        _check_target(path, [file.path for file in original.files], args.force)
    importance, window = _measured(args, source, out)
    if path is not None:
        try:
            write_importance(path, importance, window)
        except OSError as error:
            raise PowerInferError(f"cannot write {path}: {error.strerror or error}") from None
    return importance


def _measured(args: argparse.Namespace, source: Path, out: Output) -> tuple[Importance, int]:
    """(the importance on the text of --corpus, tokens of a window)."""
    from powerinfer.cli.progress import Bar
    from powerinfer.formats.checkpoint import open_checkpoint
    from powerinfer.formats.gguf import read_gguf
    from powerinfer.formats.gguf_model import NAMES, names_of
    from powerinfer.prepare.corpus import open_corpora, read_windows
    from powerinfer.prepare.profiling import WINDOW
    from powerinfer.prepare.training import need_torch, torch_threads
    from powerinfer.text.model_text import chat_template_of, tokenizer_of

    need_torch()
    checkpoint = open_checkpoint(source)
    corpora = open_corpora([] if args.corpus == ["-"] else args.corpus)
    window = min(WINDOW, checkpoint.config.context_length)
    limit = max(args.tokens, window)
    with Bar() as bar, torch_threads(config_from(args, EngineConfig).threads or 0):
        from powerinfer_train.activations import measure_importance

        template = chat_template_of(checkpoint)
        windows = read_windows(corpora, tokenizer_of(checkpoint), window, limit, bar, template, out.note)
        is_gguf = checkpoint.source == "gguf"
        names = names_of(read_gguf(checkpoint.path), checkpoint.config) if is_gguf else NAMES
        return measure_importance(checkpoint, names, windows, bar), window


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


def _original(source: Path) -> Original:
    from powerinfer.formats.checkpoint import open_checkpoint
    from powerinfer.formats.gguf import read_gguf
    from powerinfer.formats.quantised_file import gguf_original

    if source.is_dir() and (source / "config.json").exists():
        from powerinfer_train.folder_original import folder_original

        return folder_original(open_checkpoint(source))
    gguf = read_gguf(open_checkpoint(source).path if source.is_dir() else source)
    if gguf.magic != "GGUF":
        raise RequestError(f"{source} is a file of PowerInfer's own form: quantize takes GGUF files and folders")
    return gguf_original(gguf)


def _check_target(target: Path, sources: list[Path], force: bool) -> None:
    """RequestError for a file that must not be written."""
    if target.is_dir():
        raise RequestError(f"{target} is a folder: --out takes the name of a file")
    if not target.exists():
        return
    if not target.is_file():
        raise RequestError(f"{target} is not a file: --out takes the name of a file")
    if any(target.samefile(source) for source in sources):
        raise RequestError(f"{target} is the model itself, which stays as it is: give another --out")
    if not force:
        raise RequestError(f"{target} is there already; --force replaces it")
