"""Bundles on disk: gate, up and down of one neuron side by side; a layer is `layers.N.neurons` U8 [groups, bytes].

A part is the row of one neuron in one of `PART_TYPES`, its bytes in the order that the native module chooses, padded to
whole cache lines. 32 bundles make a group, the last one of a layer filled up with zeros. Down may also be `ACROSS`: its
scales lie behind each group. Biases stay in the model's own files.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from powerinfer.config import ModelConfig
from powerinfer.formats.checkpoint import Checkpoint
from powerinfer.formats.mapped import MappedFile, shown
from powerinfer.formats.prepared import BUNDLES, LINE, PreparedFile
from powerinfer.formats.quant import Bytes, block_type
from powerinfer.neurons import BUNDLE_GROUP, BundleLayout, Indices

PART_TYPES = ("F16", "BF16", "Q8_0", "Q4_0")
"""The types that a part can have."""

ACROSS = "Q4_0X32"
"""Down as files of Q4_0 have it: each block across the 32 neurons of a group, whose rows share their scales."""

DOWN_TYPES = (*PART_TYPES, ACROSS)

PartBytes = Callable[[str, int], tuple[int, int]]
"""part_bytes(type, k): bytes of a row of k elements, and of what a group's rows share; `kernels.cpu.part_bytes`."""


@dataclass(frozen=True)
class BundleFile:
    """The bundles of a model, mapped.

    layers: for each layer uint8 [groups, layout.group_bytes], read-only; source_type: the main type of the weights they
    were made from; file: `file.check()` tells whether it is still as long as when it was opened, to be asked before it
    is read.
    """

    layout: BundleLayout
    layers: tuple[Bytes, ...]
    source_type: str
    file: MappedFile

    @property
    def path(self) -> Path:
        """Where it lies."""
        return self.file.path

    @property
    def nbytes(self) -> int:
        """Bytes of all bundles."""
        return sum(layer.nbytes for layer in self.layers)

    def copied(self, layer: int) -> Bytes:
        """A layer, copied as `owned` does; the pages of the file are given back."""
        rows = self.layers[layer]
        self.file.populate(rows)
        own = owned(rows)
        self.file.release(rows)
        return own


def bundle_layout(config: ModelConfig, gate_type: str, down_type: str, part_bytes: PartBytes) -> BundleLayout:
    """The layout of the bundles of a model with parts of these types."""
    gate_bytes, _ = part_bytes(gate_type, config.d_model)
    down_bytes, shared_bytes = part_bytes(down_type, config.d_model)
    return BundleLayout(config.d_model, config.gated, gate_type, down_type, gate_bytes, down_bytes, shared_bytes)


def can_hold(config: ModelConfig, part: str, type_name: str) -> bool:
    """Whether rows of gate, up or down of this type are whole blocks."""
    if type_name == ACROSS:
        return part == "down" and config.d_model % 32 == 0 and config.widest_ffn % BUNDLE_GROUP == 0
    return type_name in PART_TYPES and config.d_model % block_type(type_name).block == 0


def n_groups(neurons: int) -> int:
    """Groups of the bundles of so many neurons, the last of which need not be full."""
    return -(-neurons // BUNDLE_GROUP)


def open_bundles(checkpoint: Checkpoint, prepared: str | None, part_bytes: PartBytes) -> BundleFile:
    """The bundles that were packed for a model, from the folder `prepared` (None: beside the model).

    ModelError, naming the command that makes them, if there are none or they do not suit the model as it is opened.
    """
    place = PreparedFile(BUNDLES, checkpoint, prepared)
    description, tensors, file = place.read()
    config = checkpoint.config
    for name, size in (("d_model", config.d_model), ("d_ff", config.widest_ffn), ("n_layers", config.n_layers)):
        if description.get(name) != size:
            raise place.bad(f"states a {name} of {shown(description.get(name))}, and the model has {size}")
    if description.get("gated") is not config.gated:
        raise place.bad("is not of the model's kind of FFN")
    gate_type, down_type = str(description.get("gate_type")), str(description.get("down_type"))
    for part, name in (("up", gate_type), ("down", down_type)):
        if not can_hold(config, part, name):
            raise place.bad(f"holds parts of type {shown(name)}, which it cannot")
    layout = bundle_layout(config, gate_type, down_type, part_bytes)
    groups = n_groups(config.widest_ffn)
    layers = []
    for layer in range(config.n_layers):
        tensor = tensors.pop(_name(layer), None)
        if tensor is None or tensor.type != "U8" or tensor.shape != (groups, layout.group_bytes):
            raise place.bad(f"does not hold layer {layer} as {groups} groups of {layout.group_bytes} bytes")
        if tensor.data.ctypes.data % LINE:
            raise place.bad(f"holds layer {layer} where no cache line begins")
        layers.append(tensor.data.reshape(tensor.shape))
    if tensors:
        raise place.bad(f"holds tensors that are not bundles, such as {shown(next(iter(tensors)))}")
    return BundleFile(layout, tuple(layers), str(description.get("source_type")), file)


@dataclass(frozen=True)
class SomeBundles:
    """Bundles of some of a layer's neurons, in memory of their own.

    index: int32 [n], the neurons, ascending; counts: int32 [groups], how many of them each group of the layer has;
    rows: uint8 [1, bytes], group by group the bundles and, where a group has any, what they share, pages of their own.
    """

    index: Indices
    counts: NDArray[np.int32]
    rows: Bytes

    @property
    def places(self) -> Indices:
        """Of each neuron, where biases and the like of it are kept: group * BUNDLE_GROUP + its number in the group."""
        first = np.cumsum(self.counts) - self.counts
        group = self.index // BUNDLE_GROUP
        return (group * BUNDLE_GROUP + np.arange(len(self.index)) - first[group]).astype(np.int32)


def some_bytes(layout: BundleLayout, index: Indices) -> int:
    """Bytes of the bundles of these neurons, with what their groups share."""
    return len(index) * layout.pitch + len(np.unique(index // BUNDLE_GROUP)) * layout.shared_bytes


def own_pages(nbytes: int) -> Bytes:
    """Memory that takes room as it is written: uint8 [nbytes]."""
    memory = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # rows that lie anywhere touch many pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def owned(rows: Bytes) -> Bytes:
    """A copy in pages of its own, huge ones where the system has them.

    Files are mostly mapped in pages of 4 KB, and out of those rows that lie anywhere take a quarter longer to read.
    """
    own = own_pages(rows.nbytes).reshape(rows.shape)
    own[:] = rows
    return own


def gather(layout: BundleLayout, groups: Bytes, index: Indices, memory: Bytes | None = None) -> SomeBundles:
    """The bundles of some neurons, copied. groups: uint8 [groups, layout.group_bytes]; index: ascending, not empty.

    memory: uint8 [bytes] where they are to lie, None: in pages of their own.
    """
    out = own_pages(some_bytes(layout, index)) if memory is None else memory[: some_bytes(layout, index)]
    counts = np.bincount(index // BUNDLE_GROUP, minlength=len(groups)).astype(np.int32)
    bundles, first, at = BUNDLE_GROUP * layout.pitch, 0, 0
    for group, count in zip(groups[counts > 0], counts[counts > 0].tolist(), strict=True):
        size = count * layout.pitch
        own = index[first : first + count] % BUNDLE_GROUP
        here = out[at : at + size].view(np.int64).reshape(count, -1)
        np.take(group[:bundles].view(np.int64).reshape(BUNDLE_GROUP, -1), own, axis=0, out=here, mode="clip")
        out[at + size : at + size + layout.shared_bytes] = group[bundles : bundles + layout.shared_bytes]
        first, at = first + count, at + size + layout.shared_bytes
    return SomeBundles(index, counts, out.reshape(1, -1))


@dataclass(frozen=True)
class Piece:
    """Whole groups of `SomeBundles`.

    first, last: which of its neurons, from `first` up to `last`; rows: uint8 [bytes], their bytes where they lie; at:
    int32 [n], the cache line of `rows` at which each bundle begins; group: int32 [n], the number of its group among
    those that are there; shared: int32 [those], the line at which what a group shares begins.
    """

    first: int
    last: int
    rows: Bytes
    at: Indices
    group: Indices
    shared: Indices


def cuts(layout: BundleLayout, counts: NDArray[np.int32], most: int, beside: int = 0) -> Iterator[tuple[int, int]]:
    """Groups that lie together, from .. up to, so that none exceeds `most` bytes, but at least one at a time.

    counts: int32 [groups], neurons of each that are there; beside: bytes of each neuron beside its bundle's.
    """
    ends = np.cumsum(counts * (layout.pitch + beside) + (counts > 0) * layout.shared_bytes, dtype=np.int64)
    begin, groups = 0, len(counts)
    while begin < groups:
        before = int(ends[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, before + most, side="right")))
        yield begin, end
        begin = end


def whole(layout: BundleLayout, some: SomeBundles) -> Piece:
    """All of it as one piece."""
    (piece,) = pieces(layout, some, some.rows.nbytes)
    return piece


def pieces(layout: BundleLayout, some: SomeBundles, most: int, beside: int = 0) -> Iterator[Piece]:
    """Its groups, in pieces of at most so many bytes where a group has no more; see `cuts`."""
    rows, at, first = some.rows[0], 0, 0
    for begin, end in cuts(layout, some.counts, most, beside):
        counts = some.counts[begin:end]
        counts = counts[counts > 0]
        if not len(counts):
            continue
        ends = np.cumsum(counts * layout.pitch + layout.shared_bytes, dtype=np.int64)
        group = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        behind = np.cumsum(counts) - counts  # neurons of the groups before
        places = (ends - layout.shared_bytes - counts * layout.pitch)[group]
        places += (np.arange(len(group)) - behind[group]) * layout.pitch
        shared = (ends - layout.shared_bytes) // LINE
        size, n = int(ends[-1]), len(group)
        own = rows[at : at + size]
        yield Piece(first, first + n, own, (places // LINE).astype(np.int32), group, shared.astype(np.int32))
        at, first = at + size, first + n


@contextmanager
def write_bundles(
    checkpoint: Checkpoint, prepared: str | None, layout: BundleLayout
) -> Iterator[Callable[[int, Bytes], None]]:
    """Write the bundles of a model: the block calls what it is given with (layer, uint8 [groups, layout.group_bytes]).

    Layers in order, the groups of a layer in order and in as many pieces as one likes. The file appears under its name
    when the block has ended well. PowerInferError if it cannot be written.
    """
    config = checkpoint.config
    description = {
        "d_model": config.d_model,
        "d_ff": config.widest_ffn,
        "n_layers": config.n_layers,
        "gated": config.gated,
        "gate_type": layout.gate_type,
        "down_type": layout.down_type,
        "source_type": checkpoint.main_type,
    }
    shape = (n_groups(config.widest_ffn), layout.group_bytes)
    tensors = [(_name(layer), "U8", shape) for layer in range(config.n_layers)]
    with PreparedFile(BUNDLES, checkpoint, prepared).write(description, tensors) as write:
        yield lambda layer, rows: write(_name(layer), rows)


def _name(layer: int) -> str:
    return f"layers.{layer}.neurons"
