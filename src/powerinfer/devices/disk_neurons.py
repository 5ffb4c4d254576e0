"""Neurons that rest on disk as bundles, and memory for some of them."""

from __future__ import annotations

from dataclasses import dataclass

from powerinfer import _native
from powerinfer.devices.disk import DiskTier
from powerinfer.formats.quant import Bytes
from powerinfer.neurons import BUNDLE_GROUP, BundleLayout


@dataclass(frozen=True)
class NeuronSlots:
    """The neurons of a layer.

    left_out: bytes at the beginning of each bundle that are not read: the row that a matrix has, too. shared:
    uint8 [groups, layout.shared_bytes], a copy of the scales that rows of down share, None: they share none.
    """

    slots: _native.Slots
    layout: BundleLayout
    left_out: int
    shared: Bytes | None


def neuron_slots(
    disk: DiskTier,
    layout: BundleLayout,
    groups: Bytes,
    neurons: int,
    slots: int,
    *,
    entire: bool,
    memory: _native.SlotMemory | None = None,
) -> NeuronSlots:
    """Memory for so many neurons of a layer.

    groups: uint8 [groups, layout.group_bytes] in a file of the tier. entire: all rows are read; else a matrix has
    those of gate, or of up where there is no gate. memory: None: of its own.
    """
    place = disk.place(groups)
    assert place is not None
    file, offset = place
    left_out = 0 if entire else layout.gate_bytes
    part = _native.Resting(
        file, offset + left_out, layout.pitch - left_out, layout.pitch, BUNDLE_GROUP, layout.group_bytes
    )
    shared = groups[:, BUNDLE_GROUP * layout.pitch :].copy() if layout.shared_bytes else None
    of_layer = _native.Slots(disk.reads, [part], neurons, slots, memory)
    return NeuronSlots(of_layer, layout, left_out, shared)


def n_slots(disk: DiskTier, layer: int, neurons: int, least: int) -> int:
    """The number of neurons of a layer that RAM is to hold, `least` of them at least."""
    return min(neurons, max(disk.about.neurons[layer], least))
