"""Wiring of `ShortConvConfig`."""

from __future__ import annotations

import numpy as np

from powerinfer.models.builder import Builder, Matrix, Norm, Tensors, vector

_MATRICES = "xbc"


def convolve(builder: Builder[Matrix, Norm], checkpoint: Tensors, layer: int, norm: Norm | None) -> None:
    """Wire what a gated short convolution gives for norm(x)."""
    name = f"layers.{layer}.short_"
    builder.short_conv(
        layer,
        norm,
        [builder.matrix(checkpoint.take(name + part)) for part in _MATRICES],
        biases=[vector(checkpoint, f"{name}{part}_bias") for part in _MATRICES],
        taps=np.ascontiguousarray(checkpoint.take(f"{name}conv").float32().T),
        taps_bias=vector(checkpoint, f"{name}conv_bias"),
    )


def project_convolved(builder: Builder[Matrix, Norm], checkpoint: Tensors, layer: int, norm: Norm | None) -> None:
    """Wire its output projection: x += norm(short_o . attended)."""
    name = f"layers.{layer}.short_o"
    builder.project(layer, builder.matrix(checkpoint.take(name)), vector(checkpoint, f"{name}_bias"), norm)
