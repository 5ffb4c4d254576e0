"""Make a GGUF file of a model whose matrices have another type, mostly a smaller one.

Of each block of weights many scales are tried, and those with the least squared error are kept. Embeddings, the head,
norms and routers get the types that llama.cpp gives them, and its programs load the file. Q4_K_M and Q5_K_M are mixes:
Q6_K where most depends on a matrix. The file appears when it is complete; the model is not changed.

JSON: path, bytes, type, types (how many tensors have each), narrow (matrices whose rows are no whole blocks of the
type, so that they have another), source_bytes, seconds.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from powerinfer.cli.common import Output, config_flags, config_from, model_path
from powerinfer.config import EngineConfig
from powerinfer.errors import RequestError, did_you_mean


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="GGUF file or name of a model")
    parser.add_argument("type", metavar="TYPE", help="q8_0, q6_k, q5_k_m, q4_k_m, q4_0, ...; a wrong one shows all")
    parser.add_argument("-o", "--out", metavar="FILE", required=True, help="the GGUF file to write")
    parser.add_argument(
        "--imatrix", metavar="FILE", help="GGUF file of llama-imatrix: errors weigh more where inputs are larger"
    )
    parser.add_argument("--force", action="store_true", help="replace FILE if it is there")
    config_flags(parser, EngineConfig, "engine", only=("threads",))


def execute(args: argparse.Namespace, out: Output) -> int:
    import time

    from powerinfer.cli.progress import Bar
    from powerinfer.formats.gguf import read_gguf
    from powerinfer.formats.quantised_file import MIXES, read_importance, write_quantised
    from powerinfer.system import usable_cores

    type_name = args.type.upper()
    if type_name not in MIXES:
        base, size = type_name[:-2], type_name[-2:]
        names = [base] if size in ("_S", "_M", "_L") and base in MIXES else MIXES
        raise RequestError(f"no type {args.type}{did_you_mean(type_name, names)}; there are {', '.join(MIXES)}")
    target = Path(args.out).expanduser()
    source = model_path(args.model, out)
    if source.is_dir():
        raise RequestError(f"{source} is a folder: quantize takes GGUF files")
    gguf = read_gguf(source)
    if gguf.magic != "GGUF":
        raise RequestError(f"{source} is a file of PowerInfer's own form: quantize takes GGUF files")
    _check_target(target, [file.path for file in gguf.files], args.force)
    importance = None if args.imatrix is None else read_importance(Path(args.imatrix).expanduser(), gguf)
    begin = time.monotonic()
    threads = config_from(args, EngineConfig).threads or usable_cores()[0]
    with Bar() as bar:
        result = write_quantised(gguf, type_name, target, threads, importance, bar)
    seconds, before = time.monotonic() - begin, sum(file.size for file in gguf.files)
    if result.narrow:
        out.note(f"{result.narrow} matrices have another type: their rows are not whole blocks of {type_name}'s")
    kinds = ", ".join(f"{count} {kind}" for kind, count in result.types.items())
    sizes = f"{result.nbytes / 1e6:,.1f} MB from {before / 1e6:,.1f} MB"
    out.line(f"{result.path}: {sizes} in {seconds:.1f} s; tensors: {kinds}")
    document = {"path": str(result.path), "bytes": result.nbytes, "type": type_name, "types": result.types}
    out.document(document | {"narrow": result.narrow, "source_bytes": before, "seconds": seconds})
    return 0


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
