"""Wiring of `DeltaNetConfig`, and of the gate of `GatedAttentionConfig`."""

from __future__ import annotations

import numpy as np

from powerinfer.models.attention import attend
from powerinfer.models.builder import Builder, Matrix, Norm, Tensors

_MATRICES = tuple("qkvzba")
_OF_CHANNELS = ("q", "k", "v", "g_a", "b", "f_a")


def attend_gated(builder: Builder[Matrix, Norm], checkpoint: Tensors, layer: int, norm: Norm | None) -> None:
    """What attention gives for norm(x), times the gate that q_gate . norm(x) makes."""
    attend(builder, checkpoint, layer, norm)
    builder.gate_attended(layer, norm, builder.matrix(checkpoint.take(f"layers.{layer}.q_gate")))


def remember(builder: Builder[Matrix, Norm], checkpoint: Tensors, layer: int, norm: Norm | None) -> None:
    """What Gated DeltaNet gives for norm(x)."""
    name = f"layers.{layer}.delta_"
    taps = checkpoint.take(f"{name}conv").float32()
    builder.delta_net(
        layer,
        norm,
        [builder.matrix(checkpoint.take(name + part)) for part in _MATRICES],
        taps=np.ascontiguousarray(taps.T),
        decay=checkpoint.take(f"{name}decay").float32(),
        dt_bias=checkpoint.take(f"{name}dt_bias").float32(),
        out_norm=checkpoint.take(f"{name}norm").float32(),
    )


def remember_channels(builder: Builder[Matrix, Norm], checkpoint: Tensors, layer: int, norm: Norm | None) -> None:
    """The same of Kimi Delta Attention."""
    name = f"layers.{layer}.delta_"
    taps = np.concatenate([checkpoint.take(f"{name}{part}_conv").float32() for part in "qkv"])
    builder.delta_net(
        layer,
        norm,
        [builder.matrix(checkpoint.take(name + part)) for part in _OF_CHANNELS],
        further=[builder.matrix(checkpoint.take(name + part)) for part in ("g_b", "f_b")],
        taps=np.ascontiguousarray(taps.T),
        decay=checkpoint.take(f"{name}decay").float32(),
        dt_bias=checkpoint.take(f"{name}dt_bias").float32(),
        out_norm=checkpoint.take(f"{name}norm").float32(),
    )


def project_remembered(builder: Builder[Matrix, Norm], checkpoint: Tensors, layer: int, norm: Norm | None) -> None:
    """Its output projection: x += norm(delta_o . attended)."""
    builder.project(layer, builder.matrix(checkpoint.take(f"layers.{layer}.delta_o")), None, norm)
