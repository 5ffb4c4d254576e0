"""The blocks of a decoder-only transformer, wired in the order they run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from powerinfer.devices.cpu import CpuExecutor
from powerinfer.formats.checkpoint import Checkpoint, Progress

if TYPE_CHECKING:
    from powerinfer import _native


def wire(executor: CpuExecutor, checkpoint: Checkpoint, progress: Progress | None) -> None:
    """Embedding, layers, head. Every tensor of the checkpoint is taken once."""
    config = checkpoint.config
    embedding = checkpoint.take("embed")
    positions = checkpoint.take("positions") if config.positions == "learned" else None
    executor.embed(embedding, positions, _projection(executor, checkpoint, "project_in"))
    for layer in range(config.n_layers):
        _layer(executor, checkpoint, layer)
        checkpoint.release()  # packed: the file's pages need not stay in memory
        if progress is not None:
            progress("loading weights", layer + 1, config.n_layers)
    norm = _norm(executor, checkpoint, "final_norm") if config.final_norm else None
    head = executor.matrix(embedding if config.tied_embeddings else checkpoint.take("head"))
    executor.head(norm, head, _projection(executor, checkpoint, "project_out"))


def _layer(executor: CpuExecutor, checkpoint: Checkpoint, layer: int) -> None:
    """x += attention(norm(x)); x += ffn(norm(x)), with what `parallel` and `norm_order` change of it."""
    config = checkpoint.config
    name = f"layers.{layer}."
    attn_norm = _norm(executor, checkpoint, name + "attn_norm")
    ffn_norm = attn_norm if config.shared_norm else _norm(executor, checkpoint, name + "ffn_norm")
    if config.norm_order == "post":
        _attention(executor, checkpoint, layer, None)
        _project(executor, checkpoint, name)
        executor.normalise(attn_norm)
        _ffn(executor, checkpoint, name, None)
        executor.normalise(ffn_norm)
        return
    _attention(executor, checkpoint, layer, attn_norm)
    if config.parallel:  # the FFN reads x before the result of attention is added to it
        _ffn(executor, checkpoint, name, ffn_norm)
        _project(executor, checkpoint, name)
    else:
        _project(executor, checkpoint, name)
        _ffn(executor, checkpoint, name, ffn_norm)


def _attention(executor: CpuExecutor, checkpoint: Checkpoint, layer: int, norm: _native.Norm | None) -> None:
    config = checkpoint.config
    name = f"layers.{layer}."
    heads = {"q": config.n_heads, "k": config.n_kv_heads, "v": config.n_kv_heads}
    # Values are not rotated: their rows are padded, never reordered.
    maps = {part: executor.head_rows(n, config.rope.interleaved and part != "v") for part, n in heads.items()}
    executor.attention(
        layer,
        norm,
        [executor.matrix(checkpoint.take(name + part), maps[part]) for part in heads],
        biases=[_reordered(_vector(checkpoint, name + part + "_bias"), maps[part]) for part in heads],
        q_norm=_vector(checkpoint, name + "q_norm"),
        k_norm=_vector(checkpoint, name + "k_norm"),
        window=config.window(layer),
    )


def _project(executor: CpuExecutor, checkpoint: Checkpoint, name: str) -> None:
    executor.project(executor.matrix(checkpoint.take(name + "o")), _vector(checkpoint, name + "o_bias"))


def _ffn(executor: CpuExecutor, checkpoint: Checkpoint, name: str, norm: _native.Norm | None) -> None:
    gate = executor.matrix(checkpoint.take(name + "gate")) if checkpoint.config.gated else None
    up, down = (executor.matrix(checkpoint.take(name + part)) for part in ("up", "down"))
    biases = [_vector(checkpoint, name + part + "_bias") for part in ("gate", "up", "down")]
    executor.ffn(norm, gate, up, down, biases)


def _norm(executor: CpuExecutor, checkpoint: Checkpoint, name: str) -> _native.Norm:
    return executor.norm(checkpoint.take(name).float32(), _vector(checkpoint, name + "_bias"))


def _projection(executor: CpuExecutor, checkpoint: Checkpoint, name: str) -> _native.Matrix | None:
    return executor.matrix(checkpoint.take(name)) if checkpoint.config.embed_dim else None


def _vector(checkpoint: Checkpoint, name: str) -> NDArray[np.float32] | None:
    return checkpoint.take(name).float32() if checkpoint.has(name) else None


def _reordered(vector: NDArray[np.float32] | None, rows: NDArray[np.int32] | None) -> NDArray[np.float32] | None:
    if vector is None or rows is None:
        return vector
    return np.where(rows < 0, np.float32(0), vector[rows])
