"""Wiring of `LatentAttentionConfig`: heads over latents in the cache."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from powerinfer.config import LatentAttentionConfig
from powerinfer.models.builder import Builder, Matrix, Norm, Tensors, vector


def attend_latents(builder: Builder[Matrix, Norm], checkpoint: Tensors, layer: int, norm: Norm | None) -> None:
    """What each head gets from the latents in the cache, for norm(x)."""
    about, name = checkpoint.config.layers[layer].attention, f"layers.{layer}."
    assert isinstance(about, LatentAttentionConfig)
    q_latent = None
    if about.q_latents is not None:
        q_latent = builder.matrix(checkpoint.take(name + "q_a"))
    q = checkpoint.take(name + ("q" if q_latent is None else "q_b"))
    builder.latent_attention(
        layer,
        norm,
        q_latent,
        vector(checkpoint, name + "q_a_norm"),
        builder.matrix(q, _rotated_last(about.n_heads, about.plain_dim, about)),
        builder.matrix(checkpoint.take(name + "kv_a"), _rotated_last(1, about.latents, about)),
        checkpoint.take(name + "kv_a_norm").float32(),
        checkpoint.take(name + "k_b"),
    )


def project_latents(builder: Builder[Matrix, Norm], checkpoint: Tensors, layer: int, norm: Norm | None) -> None:
    """Values of the heads, and their output projection: x += norm(o . values)."""
    name = f"layers.{layer}."
    builder.latent_project(layer, checkpoint.take(name + "v_b"), builder.matrix(checkpoint.take(name + "o")), norm)


def _rotated_last(heads: int, before: int, about: LatentAttentionConfig) -> NDArray[np.int32] | None:
    """The row map of a matrix whose rows are `heads` times `before` rows and then rotated ones: these in pairs (i, i +
    dim/2). None where they are already."""
    if about.rope is None or not about.rope.interleaved:
        return None
    within = np.arange(before + about.rope_dim)
    within[before:] = before + np.arange(about.rope_dim).reshape(-1, 2).T.reshape(-1)
    return (np.arange(heads)[:, None] * len(within) + within).reshape(-1).astype(np.int32)
