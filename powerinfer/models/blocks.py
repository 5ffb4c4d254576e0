"""The blocks of a decoder-only transformer, wired in the order they run."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from powerinfer.devices.cpu import CpuExecutor
from powerinfer.formats.checkpoint import Checkpoint, Progress


def wire(executor: CpuExecutor, checkpoint: Checkpoint, progress: Progress | None) -> None:
    """Embedding, layers, head. Every tensor of the checkpoint is taken once."""
    config = checkpoint.config
    embedding = checkpoint.take("embed")
    executor.embed(embedding)
    for layer in range(config.n_layers):
        _attention(executor, checkpoint, layer)
        _ffn(executor, checkpoint, layer)
        checkpoint.release()  # packed: the file's pages need not stay in memory
        if progress is not None:
            progress("loading weights", layer + 1, config.n_layers)
    head = embedding if config.tied_embeddings else checkpoint.take("head")
    executor.head(checkpoint.take("final_norm").float32(), executor.matrix(head))


def _attention(executor: CpuExecutor, checkpoint: Checkpoint, layer: int) -> None:
    config = checkpoint.config
    name = f"layers.{layer}."
    heads = {"q": config.n_heads, "k": config.n_kv_heads, "v": config.n_kv_heads}
    # Values are not rotated: their rows are padded, never reordered.
    maps = {part: executor.head_rows(n, config.rope.interleaved and part != "v") for part, n in heads.items()}
    executor.attention(
        layer,
        checkpoint.take(name + "attn_norm").float32(),
        [executor.matrix(checkpoint.take(name + part), maps[part]) for part in heads],
        executor.matrix(checkpoint.take(name + "o")),
        biases=[_reordered(_vector(checkpoint, name + part + "_bias"), maps[part]) for part in heads],
        output_bias=_vector(checkpoint, name + "o_bias"),
        q_norm=_vector(checkpoint, name + "q_norm"),
        k_norm=_vector(checkpoint, name + "k_norm"),
        window=config.window(layer),
    )


def _ffn(executor: CpuExecutor, checkpoint: Checkpoint, layer: int) -> None:
    name = f"layers.{layer}."
    parts = ("gate", "up", "down")
    gate, up, down = (executor.matrix(checkpoint.take(name + part)) for part in parts)
    biases = [_vector(checkpoint, name + part + "_bias") for part in parts]
    executor.ffn(checkpoint.take(name + "ffn_norm").float32(), gate, up, down, biases)


def _vector(checkpoint: Checkpoint, name: str) -> NDArray[np.float32] | None:
    return checkpoint.take(name).float32() if checkpoint.has(name) else None


def _reordered(vector: NDArray[np.float32] | None, rows: NDArray[np.int32] | None) -> NDArray[np.float32] | None:
    if vector is None or rows is None:
        return vector
    return np.where(rows < 0, np.float32(0), vector[rows])
