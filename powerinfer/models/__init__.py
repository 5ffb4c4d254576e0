"""Wiring: a checkpoint becomes an executor. A family of models is data in `ModelConfig`, not code here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from powerinfer.config import EngineConfig
from powerinfer.devices.cpu import CpuExecutor, Weights
from powerinfer.formats.checkpoint import Checkpoint, Progress
from powerinfer.models.blocks import wire
from powerinfer.models.rope import rope_frequencies

if TYPE_CHECKING:
    from powerinfer.devices.split import SplitExecutor
    from powerinfer.formats.bundle_file import BundleFile

__all__ = ["GpuShare", "load", "load_split"]


@dataclass(frozen=True)
class GpuShare:
    """What of a model is to lie on a GPU.

    device: a name for `choose_device`; layers: how many, from the first on, with their KV cache; head: and the head;
    bundled: the neurons of their FFNs come from elsewhere (`GpuLayers.hang`), the checkpoint's matrices are not read;
    bundles: the same for the CPU's layers, whose neurons are these, None: they are dense; most: for each layer, up to
    which magnitude activations of its neurons count as zero; predictors: gives the predictor of a layer, None: every
    gate of the CPU's layers is computed. pages: of the KV cache on both devices, None: chosen by
    what the CPU's memory holds.
    """

    device: str
    layers: int
    head: bool = False
    bundled: bool = False
    bundles: BundleFile | None = None
    most: Sequence[float] | None = None
    pages: int | None = None
    predictors: Callable[[int], Weights] | None = None


def load(
    checkpoint: Checkpoint, engine: EngineConfig, progress: Progress | None = None, room: int | None = None
) -> CpuExecutor:
    """Pack the weights and wire the model. Memory beyond the packed weights stays within one layer's file pages.

    progress: called with ("loading weights", layers done, layers); room: bytes that the KV cache must not exceed,
    enough for one context. ModelError for a checkpoint with tensors missing or left over, RequestError for options that
    cannot be met.
    """
    executor = CpuExecutor(checkpoint.config, engine, *_rotation(checkpoint), room=room)
    wire(executor, checkpoint, progress)
    checkpoint.finish()
    checkpoint.release()
    return executor


def load_split(
    checkpoint: Checkpoint, engine: EngineConfig, share: GpuShare, progress: Progress | None = None
) -> SplitExecutor:
    """As `load`, with the first layers on a GPU. There must be at least one; `load` is for none.

    PowerInferError, too, when the GPU cannot be used or has not enough memory.
    """
    from powerinfer.devices.gpu import GpuLayers
    from powerinfer.devices.split import SplitExecutor
    from powerinfer.devices.torch_device import choose_device, gpu_failures

    config, device = checkpoint.config, choose_device(share.device)
    assert not share.head or share.layers == config.n_layers, "the head reads what the last layer gives"
    frequencies, factor = _rotation(checkpoint)
    cpu = CpuExecutor(config, engine, frequencies, factor, first_layer=share.layers, pages=share.pages)
    try:
        with gpu_failures("the model was loaded", "put fewer layers on it, or lower --context or --max-batch"):
            gpu = GpuLayers(
                config,
                device,
                layers=share.layers,
                pages=cpu.n_pages,
                kv_type=engine.kv_type,
                max_tokens=cpu.max_tokens,
                frequencies=frequencies,
                rope_factor=factor,
            )
            own = share.bundles, share.most, share.predictors
            wire(cpu, checkpoint, progress, gpu, *own, bundled=share.bundled, head=share.head)
    except BaseException:
        cpu.close()
        raise
    checkpoint.finish()
    checkpoint.release()
    return SplitExecutor(cpu, gpu)


def _rotation(checkpoint: Checkpoint) -> tuple[NDArray[np.float32], float]:
    """(frequencies, factor) of the rotary embedding; without one, nothing is rotated."""
    if checkpoint.config.positions != "rope":
        return np.empty(0, np.float32), 1.0
    factors = checkpoint.take("rope_factors").float32() if checkpoint.has("rope_factors") else None
    return rope_frequencies(checkpoint.config.rope, factors)
