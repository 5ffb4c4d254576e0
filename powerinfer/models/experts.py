"""Wiring of `ExpertsConfig`: experts that a router selects, and a shared one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from powerinfer.config import ExpertsConfig
from powerinfer.devices.cpu import CpuExecutor
from powerinfer.formats.checkpoint import Checkpoint, RawTensor
from powerinfer.models.builder import OwnFfn, vector

if TYPE_CHECKING:
    from powerinfer import _native


def sum_experts(
    executor: CpuExecutor,
    checkpoint: Checkpoint,
    layer: int,
    norm: _native.Norm | None,
    out_norm: _native.Norm | None,
    own: OwnFfn[_native.Norm] | None,
) -> None:
    """x += out_norm(the selected experts' weighted sum of norm(x), and the shared expert's)."""
    assert own is None, "experts have no bundles"
    about = checkpoint.config.layers[layer].ffn
    assert isinstance(about, ExpertsConfig)
    name = f"layers.{layer}."
    shared = [checkpoint.take(f"{name}shared_{part}") for part in about.matrices if about.shared_size]
    executor.experts(
        layer,
        norm,
        executor.matrix(_float32(checkpoint.take(f"{name}router"))),
        (checkpoint.take(f"{name}experts_{part}") for part in about.matrices),  # large: one in memory at a time
        [executor.matrix(tensor) for tensor in shared],
        correction=vector(checkpoint, f"{name}router_correction_bias"),
        shared_weight=vector(checkpoint, f"{name}shared_weight"),
        router_bias=vector(checkpoint, f"{name}router_bias"),
        biases=[vector(checkpoint, f"{name}experts_{part}_bias") for part in about.matrices],
        out_norm=out_norm,
    )


def _float32(tensor: RawTensor) -> RawTensor:
    """A router's scores decide: they are computed exactly, whatever type a file has them in."""
    return RawTensor("F32", tensor.shape, tensor.float32().view(np.uint8).reshape(-1))
