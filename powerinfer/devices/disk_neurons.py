"""Neurons that rest on disk as bundles: memory for some of them, and which of them stay there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from powerinfer import _native
from powerinfer.devices.cpu_ffn import CpuFfn, PartMaker, Weights
from powerinfer.devices.disk import DiskTier
from powerinfer.devices.disk_policy import make_disk_policy
from powerinfer.errors import ModelError
from powerinfer.formats.quant import Bytes
from powerinfer.neurons import BUNDLE_GROUP, BundleLayout


@dataclass(frozen=True)
class NeuronSlots:
    """The neurons of a layer.

    left_out: bytes at the beginning of each bundle that are not read: the row that a matrix in memory has, too. shared:
    uint8 [groups, layout.shared_bytes], a copy of the scales that rows of down share, None: they share none.
    """

    slots: _native.Slots
    layout: BundleLayout
    left_out: int
    shared: Bytes | None


class RestingNeurons:
    """The neurons of a model's layers that rest on disk.

    policy: of `DISK_POLICIES`, says which of them stay in memory; frequency: gives, of a layer, the share of the tokens
    that each neuron fires for, float64 [neurons]; None: not known.
    """

    def __init__(
        self, disk: DiskTier, parts: PartMaker, policy: str, frequency: Callable[[int], NDArray[np.float64]] | None
    ) -> None:
        self._disk = disk
        self._parts = parts
        self._name = policy
        self._frequency = frequency
        self._layers: list[tuple[NDArray[np.int32], NDArray[np.float32]]] = []  # uses and priorities
        self._start: list[NDArray[np.float64]] = []

    def add(
        self,
        layer: int,
        ffn: CpuFfn,
        layout: BundleLayout,
        groups: Bytes,
        *,
        threshold: float = 0.0,
        predictor: Weights | None = None,
    ) -> None:
        """Give a layer's FFN its neurons, of which memory has those that fire most often.

        groups: uint8 [groups, layout.group_bytes] in a file of the tier; the other arguments as of `CpuFfn.add_bundles`.
        Without a predictor gates, or what is activated in their place, are computed from a matrix in memory, and their
        rows are not read. ModelError if the neurons cannot be read.
        """
        own = self._slots(layer, ffn.neurons, layout, groups, 0 if predictor else layout.gate_bytes)
        neurons = ffn.add_resting(own, threshold=threshold, predictor=predictor)
        self._disk.slots[layer] = own.slots
        self._layers.append((neurons.uses, own.slots.priority))
        if self._frequency is not None:
            self._start.append(self._frequency(layer))
            _fill(own.slots, self._start[-1])

    def _slots(self, layer: int, neurons: int, layout: BundleLayout, groups: Bytes, left_out: int) -> NeuronSlots:
        """Memory for those neurons that RAM is to hold, or the fewest that do."""
        place = self._disk.place(groups)
        assert place is not None
        file, offset = place
        part = _native.Resting(
            file, offset + left_out, layout.pitch - left_out, layout.pitch, BUNDLE_GROUP, layout.group_bytes
        )
        some = min(neurons, max(self._disk.about.neurons[layer], self._parts.least_slots(neurons)))
        slots = _native.Slots(self._disk.reads, [part], neurons, some)
        shared = groups[:, BUNDLE_GROUP * layout.pitch :].copy() if layout.shared_bytes else None
        return NeuronSlots(slots, layout, left_out, shared)

    def begin(self) -> None:
        """When all layers are there."""
        shape = len(self._layers), max(len(uses) for uses, _ in self._layers)
        start = np.zeros(shape, np.float32) if self._start else None
        for row, own in enumerate(self._start):
            start[row, : len(own)] = own  # type: ignore[index]
        self._policy = make_disk_policy(self._name, *shape, start)
        self._uses = np.zeros(shape, np.int32)
        self._set_priorities()

    def observe(self, tokens: int) -> None:
        """After a step of that many tokens: which neurons leave memory first in the next one."""
        for row, (uses, _) in zip(self._uses, self._layers, strict=True):
            row[: len(uses)] = uses
            uses[:] = 0
        self._policy.observe(self._uses, tokens)
        self._set_priorities()

    def _set_priorities(self) -> None:
        for row, (_, priority) in zip(self._policy.priority, self._layers, strict=True):
            priority[:] = row[: len(priority)]


def _fill(slots: _native.Slots, frequency: NDArray[np.float64]) -> None:
    hottest = np.argsort(-frequency, kind="stable")[: slots.slots]
    try:
        slots.want(np.sort(hottest).astype(np.int32))
        slots.wait()
    except _native.ReadError as error:
        raise ModelError(str(error)) from None
    slots.let_go()
    slots.clear()
