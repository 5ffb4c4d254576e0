"""Wiring of `DeltaNetConfig`, and of the gate of `GatedAttentionConfig`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from powerinfer.devices.cpu import CpuExecutor
from powerinfer.formats.checkpoint import Checkpoint
from powerinfer.models.attention import attend

if TYPE_CHECKING:
    from powerinfer import _native

_MATRICES = tuple("qkvzba")


def attend_gated(executor: CpuExecutor, checkpoint: Checkpoint, layer: int, norm: _native.Norm | None) -> None:
    """What attention gives for norm(x), times the sigmoid of q_gate . norm(x)."""
    attend(executor, checkpoint, layer, norm)
    executor.gate_attended(layer, norm, executor.matrix(checkpoint.take(f"layers.{layer}.q_gate")))


def remember(executor: CpuExecutor, checkpoint: Checkpoint, layer: int, norm: _native.Norm | None) -> None:
    """What Gated DeltaNet gives for norm(x)."""
    name = f"layers.{layer}.delta_"
    taps = checkpoint.take(f"{name}conv").float32()
    executor.delta_net(
        layer,
        norm,
        [executor.matrix(checkpoint.take(name + part)) for part in _MATRICES],
        taps=np.ascontiguousarray(taps.T),
        decay=checkpoint.take(f"{name}decay").float32(),
        dt_bias=checkpoint.take(f"{name}dt_bias").float32(),
        out_norm=checkpoint.take(f"{name}norm").float32(),
    )


def project_remembered(executor: CpuExecutor, checkpoint: Checkpoint, layer: int, norm: _native.Norm | None) -> None:
    """Its output projection: x += norm(delta_o . attended)."""
    executor.project(layer, executor.matrix(checkpoint.take(f"layers.{layer}.delta_o")), None, norm)
