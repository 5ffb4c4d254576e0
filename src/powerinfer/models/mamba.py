"""Wiring of `Mamba2Config`."""

from __future__ import annotations

import numpy as np

from powerinfer.config import Mamba2Config
from powerinfer.models.builder import Builder, Matrix, Norm, Tensors, vector


def remember_mamba(builder: Builder[Matrix, Norm], checkpoint: Tensors, layer: int, norm: Norm | None) -> None:
    """What Mamba2 gives for norm(x)."""
    about, name = checkpoint.config.layers[layer].attention, f"layers.{layer}.mamba_"
    assert isinstance(about, Mamba2Config)
    parts = ("z", "xbc", "dt")
    taps = checkpoint.take(f"{name}conv").float32()
    keys = about.n_groups * about.state_dim
    scales = np.repeat(np.array(about.scales[1:4], np.float32), (about.width, keys, keys))
    builder.mamba(
        layer,
        norm,
        [builder.matrix(checkpoint.take(name + part)) for part in parts],
        biases=[vector(checkpoint, f"{name}{part}_bias") for part in parts],
        taps=np.ascontiguousarray(taps.T * scales),
        taps_bias=vector(checkpoint, f"{name}conv_bias"),
        of_heads=[checkpoint.take(name + one).float32() for one in ("a", "d", "step_bias")],
        out_norm=vector(checkpoint, f"{name}norm"),
    )


def project_mamba(builder: Builder[Matrix, Norm], checkpoint: Tensors, layer: int, norm: Norm | None) -> None:
    """Its output projection: x += norm(mamba_o . attended)."""
    name = f"layers.{layer}.mamba_o"
    builder.project(layer, builder.matrix(checkpoint.take(name)), vector(checkpoint, f"{name}_bias"), norm)


def add_nothing(*_: object) -> None:
    """Wires nothing: a layer lacks that part."""
