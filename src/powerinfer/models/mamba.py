"""Wiring of `Mamba2Config`, and of `ParallelConfig`, where attention is beside it."""

from __future__ import annotations

import numpy as np

from powerinfer.config import Mamba2Config, ParallelConfig
from powerinfer.models.attention import attend, project
from powerinfer.models.builder import Builder, Matrix, Norm, Tensors, Vector, vector


def remember_mamba(builder: Builder[Matrix, Norm], checkpoint: Tensors, layer: int, norm: Norm | None) -> None:
    """Wire what Mamba2 gives for norm(x)."""
    settings, name = checkpoint.config.states[layer], f"layers.{layer}.mamba_"
    assert isinstance(settings, Mamba2Config)
    parts = ("z", "xbc", "dt")
    taps = checkpoint.take(f"{name}conv").float32()
    keys = settings.n_groups * settings.state_dim
    scales = np.repeat(np.array(settings.scales[1:4], np.float32), (settings.width, keys, keys))
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
    """Wire its output projection: x += norm(mamba_o . attended)."""
    builder.project(layer, *_output(builder, checkpoint, layer), norm)


def attend_beside(builder: Builder[Matrix, Norm], checkpoint: Tensors, layer: int, norm: Norm | None) -> None:
    """Wire what attention gives for norm(x), and what Mamba2 does."""
    attend(builder, checkpoint, layer, norm)
    remember_mamba(builder, checkpoint, layer, norm)


def project_both(builder: Builder[Matrix, Norm], checkpoint: Tensors, layer: int, norm: Norm | None) -> None:
    """Wire their output projections."""
    settings = checkpoint.config.layers[layer].attention
    assert isinstance(settings, ParallelConfig)
    residual = checkpoint.config.residual_scale
    of_attention, of_mamba = (norm if one == 1 else builder.scale(one * residual) for one in settings.factors)
    project(builder, checkpoint, layer, of_attention)
    builder.project_beside(layer, *_output(builder, checkpoint, layer), of_mamba)


def _output(builder: Builder[Matrix, Norm], checkpoint: Tensors, layer: int) -> tuple[Matrix, Vector]:
    name = f"layers.{layer}.mamba_o"
    return builder.matrix(checkpoint.take(name)), vector(checkpoint, f"{name}_bias")


def add_nothing(*_: object) -> None:
    """Wire nothing: a layer lacks that part."""
