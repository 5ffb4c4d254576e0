"""Wiring of `AttentionConfig`: heads over keys and values in the cache."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from powerinfer.models.builder import Builder, Matrix, Norm, Tensors, Vector, vector


def attend(builder: Builder[Matrix, Norm], checkpoint: Tensors, layer: int, norm: Norm | None) -> None:
    """What attention gives for norm(x)."""
    about, name = checkpoint.config.layers[layer].heads, f"layers.{layer}."
    heads = {part: about.n_heads if part == "q" else about.n_kv_heads for part in about.projections}
    # Values are not rotated: their rows may be padded, but are never reordered.
    interleaved = about.rope.dim if about.rope is not None and about.rope.interleaved else 0
    turned = {"q": interleaved, "k": interleaved, "v": 0}
    maps = {part: builder.head_rows(n, about.head_dim, turned[part]) for part, n in heads.items()}
    plain = np.ones(about.head_dim, np.float32) if about.qk_norm == "plain" else None
    builder.attention(
        layer,
        norm,
        [builder.matrix(checkpoint.take(name + part), maps[part]) for part in heads],
        biases=[_reordered(vector(checkpoint, name + part + "_bias"), maps[part]) for part in heads],
        q_norm=_flat(vector(checkpoint, name + "q_norm")) if plain is None else plain,
        k_norm=_flat(vector(checkpoint, name + "k_norm")) if plain is None else plain,
        sinks=vector(checkpoint, name + "sinks"),
    )


def project(builder: Builder[Matrix, Norm], checkpoint: Tensors, layer: int, norm: Norm | None) -> None:
    """Its output projection: x += norm(o . attended), or of what a norm makes of that."""
    name = f"layers.{layer}.o"
    matrix, bias = builder.matrix(checkpoint.take(name)), vector(checkpoint, name + "_bias")
    weight, order = vector(checkpoint, f"layers.{layer}.attended_norm"), checkpoint.order(name)
    reads = None if weight is None else builder.norm(weight, None, order)
    builder.project(layer, matrix, bias, norm, order if reads is None else None, reads)


def _flat(norms: Vector) -> Vector:
    return None if norms is None else norms.reshape(-1)


def _reordered(bias: Vector, rows: NDArray[np.int32] | None) -> Vector:
    if bias is None or rows is None:
        return bias
    return np.where(rows < 0, np.float32(0), bias[rows])
