"""A GGUF model with the matrices of its layers in another type: decode speed depends on the type.

    python -m benchmarks.sparse.retyped smollm2-sparse q8_0 sparse-q8_0.gguf

Embedding, head, norms and vectors stay as they are, and so does the metadata. Parts become one file.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from powerinfer.errors import PowerInferError
from powerinfer.formats.gguf import metadata_bytes, read_gguf, write_gguf
from powerinfer.formats.quant import Bytes, quantize
from powerinfer.hub import resolve_model

TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")


def retype(source: Path, type_name: str, target: Path) -> None:
    file = read_gguf(source)
    changed = {name for name, own in file.tensors.items() if name.startswith("blk.") and len(own.shape) > 1}
    tensors = [
        (name, type_name if name in changed else own.type, own.shape) for name, own in file.tensors.items()
    ]  # in the order of the data
    metadata = {key: value for key, value in metadata_bytes(file.files[0].path).items() if not key.startswith("split.")}

    def data() -> Iterator[Bytes]:
        for name, own in file.tensors.items():
            if name not in changed:
                yield own.data
            else:
                yield quantize(own.float32().reshape(-1, own.shape[-1]), type_name).reshape(-1)

    part = target.with_name(f"{target.name}.part")
    try:
        with part.open("wb") as to:
            write_gguf(to, metadata, tensors, data())
        part.rename(target)
    finally:
        part.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a path, or a name that `powerinfer pull` knows")
    parser.add_argument("type", choices=TYPES, help="%(choices)s")
    parser.add_argument("out", type=Path, help="the GGUF file to write; one that is there is replaced")
    args = parser.parse_args()
    try:
        retype(resolve_model(args.model), args.type.upper(), args.out)
    except (PowerInferError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
