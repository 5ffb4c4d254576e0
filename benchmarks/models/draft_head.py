"""Give a model in a GGUF file a draft head (MTP) with random weights, to measure what a real one costs.

    python -m benchmarks.models.draft_head MODEL.gguf OUT.gguf [--type q4_0]

The head's layer has the tensors of the model's last layer, which must have attention; its projection is random, in the
type of that layer's matrices or as --type says, and its norms are ones. Embedding and output head are the model's, as
in files of Qwen3.5. What such a head predicts is worth nothing. Bundles and predictors of MODEL suit OUT, too. A file
that exists is kept.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.models import few_bits
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.formats.gguf import encoded, metadata_bytes, read_gguf, write_gguf
from powerinfer.formats.quant import can_quantize

SEED = 20241216


def add_draft_head(source: Path, target: Path, kind: str | None = None, seed: int = SEED) -> None:
    """Write a copy with a head behind the model's layers. kind: type of its projection, None: that of the last layer's
    first matrix, or Q8_0 where that is not rounded to directly. ValueError for a model that has one."""
    file = read_gguf(source)
    architecture = file.metadata["general.architecture"]
    layers, d_model = (file.metadata[f"{architecture}.{key}"] for key in ("block_count", "embedding_length"))
    if file.metadata.get(f"{architecture}.nextn_predict_layers", 0):
        raise ValueError(f"{source} has a draft head already")
    last, at = f"blk.{layers - 1}.", f"blk.{layers}."
    layer = {name.replace(last, at): one for name, one in file.tensors.items() if name.startswith(last)}
    if kind is None:
        kind = next(one.type for one in layer.values() if len(one.shape) == 2 and one.type != "F32")
        kind = kind if can_quantize(kind) else "Q8_0"
    norms = [f"{at}nextn.{name}.weight" for name in ("enorm", "hnorm", "shared_head_norm")]
    described = [(name, one.type, one.shape) for name, one in (file.tensors | layer).items()]
    described += [(f"{at}nextn.eh_proj.weight", kind.upper(), (d_model, 2 * d_model))]
    described += [(name, "F32", (d_model,)) for name in norms]

    def values() -> Iterator[Any]:
        for one in (file.tensors | layer).values():
            yield one.gathered().data
        join = np.random.default_rng(seed).standard_normal((d_model, 2 * d_model), np.float32)
        stored = few_bits.stored(join * np.float32((2 * d_model) ** -0.5), kind.upper())
        yield np.ascontiguousarray(stored).view(np.uint8).reshape(-1)
        for _ in norms:
            yield np.ones(d_model, "<f4").view(np.uint8)

    metadata = metadata_bytes(source)
    metadata |= {f"{architecture}.block_count": encoded(layers + 1)}
    metadata |= {f"{architecture}.nextn_predict_layers": encoded(1)}
    part = target.with_name(target.name + ".part")
    with part.open("wb") as to:
        write_gguf(to, metadata, described, values())
    os.replace(part, target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL", help="GGUF file of one part, without a draft head")
    parser.add_argument("out", type=Path, metavar="OUT", help="file to write")
    parser.add_argument("--type", help="of the head's projection, such as q4_0 or f16")
    arguments = parser.parse_args()
    if arguments.out.exists():
        print(f"{arguments.out} exists already: kept", file=sys.stderr)
        return
    try:
        add_draft_head(arguments.model, arguments.out, arguments.type)
    except ValueError as error:
        parser.error(str(error))
    checkpoint = open_checkpoint(arguments.out, draft_head=True)
    if checkpoint.config.draft is None:
        sys.exit(f"{arguments.out}: {'; '.join(checkpoint.notes)}")


if __name__ == "__main__":
    main()
