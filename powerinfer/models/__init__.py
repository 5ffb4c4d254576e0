"""Wiring: a checkpoint becomes an executor. A family of models is data in `ModelConfig`, not code here."""

from __future__ import annotations

import numpy as np

from powerinfer.config import EngineConfig
from powerinfer.devices.cpu import CpuExecutor
from powerinfer.formats.checkpoint import Checkpoint, Progress
from powerinfer.models.blocks import wire
from powerinfer.models.rope import rope_frequencies

__all__ = ["load"]


def load(checkpoint: Checkpoint, engine: EngineConfig, progress: Progress | None = None) -> CpuExecutor:
    """Pack the weights and wire the model. Memory beyond the packed weights stays within one layer's file pages.

    progress: called with ("loading weights", layers done, layers). ModelError for a checkpoint with tensors missing or
    left over, RequestError for options that cannot be met.
    """
    config = checkpoint.config
    if config.positions == "rope":
        factors = checkpoint.take("rope_factors").float32() if checkpoint.has("rope_factors") else None
        frequencies, factor = rope_frequencies(config.rope, factors)
    else:
        frequencies, factor = np.empty(0, np.float32), 1.0  # nothing is rotated
    executor = CpuExecutor(config, engine, frequencies, factor)
    wire(executor, checkpoint, progress)
    checkpoint.finish()
    checkpoint.release()
    return executor
