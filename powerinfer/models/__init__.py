"""Wiring: a checkpoint becomes an executor. A family of models is data in `ModelConfig`, not code here."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from powerinfer.config import EngineConfig
from powerinfer.devices.cpu import CpuExecutor
from powerinfer.formats.checkpoint import Checkpoint, Progress
from powerinfer.models.blocks import wire
from powerinfer.models.rope import rope_frequencies

__all__ = ["load", "rotation"]


def load(
    checkpoint: Checkpoint, engine: EngineConfig, progress: Progress | None = None, room: int | None = None
) -> CpuExecutor:
    """Pack the weights and wire the model on the CPU.

    Memory beyond the packed weights stays within one layer's file pages.
    progress: called with ("loading weights", layers done, layers); room: bytes that the KV cache must not exceed,
    enough for one context. ModelError for a checkpoint with tensors missing or left over, RequestError for options that
    cannot be met.
    """
    executor = CpuExecutor(checkpoint.config, engine, *rotation(checkpoint), room=room)
    wire(executor, checkpoint, progress)
    checkpoint.finish()
    checkpoint.release()
    return executor


def rotation(checkpoint: Checkpoint) -> tuple[NDArray[np.float32], float]:
    """(frequencies, factor) of the rotary embedding; without one, nothing is rotated."""
    ropes = checkpoint.config.ropes
    if not ropes:
        return np.empty(0, np.float32), 1.0
    factors = checkpoint.take("rope_factors").float32() if checkpoint.has("rope_factors") else None
    return rope_frequencies(ropes[0], factors)
