"""Bundles in memory: some of a layer's neurons copied out of the bundle file, and cut into pieces for a transfer.

The bundles of the copied neurons are stored group by group (`SomeBundles`), each followed by its shared scales; or
their rows lie apart, without those that a matrix has (`ApartBundles`).
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from powerinfer.formats.prepared import LINE
from powerinfer.formats.quant import Bytes
from powerinfer.neurons import BUNDLE_GROUP, BundleLayout, Indices


@dataclass(frozen=True)
class SomeBundles:
    """Bundles of some of a layer's neurons, copied.

    index: int32 [n], the neurons, ascending; counts: int32 [groups], how many of them each group of the layer has;
    rows: uint8 [1, bytes], group by group the bundles, and if a group has any, its shared scales; page-aligned.
    """

    index: Indices
    counts: NDArray[np.int32]
    rows: Bytes

    @property
    def places(self) -> Indices:
        """Index of each neuron's biases etc.: group * BUNDLE_GROUP + its number in the group."""
        first = np.cumsum(self.counts) - self.counts
        group = self.index // BUNDLE_GROUP
        return (group * BUNDLE_GROUP + np.arange(len(self.index)) - first[group]).astype(np.int32)


@dataclass(frozen=True)
class ApartBundles:
    """The rows of a layer's neurons, copied, but those of the first product, which a matrix has.

    up: uint8 [groups, BUNDLE_GROUP rows], None in a plain FFN, whose first product it is; down: uint8 [groups,
    BUNDLE_GROUP rows and their shared scales].
    """

    up: Bytes | None
    down: Bytes


def some_bytes(layout: BundleLayout, index: Indices) -> int:
    """Bytes of the bundles of these neurons, including what their groups share."""
    return len(index) * layout.pitch + len(np.unique(index // BUNDLE_GROUP)) * layout.shared_bytes


def own_pages(nbytes: int) -> Bytes:
    """Anonymous memory, allocated by the system as it is written: uint8 [nbytes]."""
    # private: Linux gives huge pages to shared memory only where an administrator asks for them
    memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # scattered rows touch many pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def owned(rows: Bytes) -> Bytes:
    """A copy in anonymous memory, in huge pages if possible.

    Files are mostly mapped in 4 KB pages, in which reading scattered rows takes a quarter longer.
    """
    copy = own_pages(rows.nbytes).reshape(rows.shape)
    copy[:] = rows
    return copy


def gather(layout: BundleLayout, groups: Bytes, index: Indices, memory: Bytes | None = None) -> SomeBundles:
    """The bundles of some neurons, copied. groups: uint8 [groups, layout.group_bytes]; index: ascending, not empty.

    memory: uint8 [bytes] to copy into, None: newly allocated.
    """
    out = own_pages(some_bytes(layout, index)) if memory is None else memory[: some_bytes(layout, index)]
    counts = np.bincount(index // BUNDLE_GROUP, minlength=len(groups)).astype(np.int32)
    bundles, first, at = BUNDLE_GROUP * layout.pitch, 0, 0
    for group, count in zip(groups[counts > 0], counts[counts > 0].tolist(), strict=True):
        size = count * layout.pitch
        numbers = index[first : first + count] % BUNDLE_GROUP
        place = out[at : at + size].view(np.int64).reshape(count, -1)
        np.take(group[:bundles].view(np.int64).reshape(BUNDLE_GROUP, -1), numbers, axis=0, out=place, mode="clip")
        out[at + size : at + size + layout.shared_bytes] = group[bundles : bundles + layout.shared_bytes]
        first, at = first + count, at + size + layout.shared_bytes
    return SomeBundles(index, counts, out.reshape(1, -1))


def apart_bytes(layout: BundleLayout, groups: int) -> int:
    """Bytes of so many groups of `ApartBundles`."""
    return groups * (layout.group_bytes - BUNDLE_GROUP * layout.gate_bytes)


def apart(layout: BundleLayout, groups: Bytes, memory: Bytes) -> ApartBundles:
    """The rows of `groups`, uint8 [groups, layout.group_bytes], copied into `memory`, uint8 [apart_bytes], which is
    kept."""
    bundles = groups[:, : BUNDLE_GROUP * layout.pitch].reshape(len(groups), BUNDLE_GROUP, layout.pitch)
    up, down = bundles[:, :, layout.up_at : layout.down_at], bundles[:, :, layout.down_at :]
    ups = up.size if layout.gated else 0
    if layout.gated:
        np.copyto(memory[:ups].reshape(up.shape), up)
    rest = memory[ups:].reshape(len(groups), -1)
    rows = BUNDLE_GROUP * layout.down_bytes
    np.copyto(rest[:, :rows].reshape(len(groups), BUNDLE_GROUP, -1), down)
    rest[:, rows:] = groups[:, BUNDLE_GROUP * layout.pitch :]
    return ApartBundles(memory[:ups].reshape(len(groups), -1) if layout.gated else None, rest)


@dataclass(frozen=True)
class Piece:
    """Whole groups of `SomeBundles`.

    first, last: which of its neurons, from `first` up to `last`; rows: uint8 [bytes], a view of their bytes; at:
    int32 [n], the cache line of `rows` at which each bundle begins; group: int32 [n], the number of its group among
    those that are there; shared: int32 [those], the line at which a group's shared scales begin.
    """

    first: int
    last: int
    rows: Bytes
    at: Indices
    group: Indices
    shared: Indices


def cuts(layout: BundleLayout, counts: NDArray[np.int32], limit: int, beside: int = 0) -> Iterator[tuple[int, int]]:
    """Groups that lie together, from .. up to, so that none exceeds `limit` bytes, but at least one at a time.

    counts: int32 [groups], neurons of each that are there; beside: bytes of each neuron beside its bundle's.
    """
    ends = np.cumsum(counts * (layout.pitch + beside) + (counts > 0) * layout.shared_bytes, dtype=np.int64)
    begin, groups = 0, len(counts)
    while begin < groups:
        before = int(ends[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, before + limit, side="right")))
        yield begin, end
        begin = end


def whole(layout: BundleLayout, bundles: SomeBundles) -> Piece:
    """All of it as one piece."""
    (piece,) = pieces(layout, bundles, bundles.rows.nbytes)
    return piece


def pieces(layout: BundleLayout, bundles_: SomeBundles, limit: int, beside: int = 0) -> Iterator[Piece]:
    """Groups in pieces of at most `limit` bytes unless a single group is larger; see `cuts`."""
    rows, at, first = bundles_.rows[0], 0, 0
    for begin, end in cuts(layout, bundles_.counts, limit, beside):
        counts = bundles_.counts[begin:end]
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
        piece_rows = rows[at : at + size]
        yield Piece(first, first + n, piece_rows, (places // LINE).astype(np.int32), group, shared.astype(np.int32))
        at, first = at + size, first + n


def transposed(matrix: NDArray[Any]) -> NDArray[Any]:
    """[n, m] -> [m, n], contiguous; in strips, for locality."""
    rows, cols = matrix.shape
    out = np.empty((cols, rows), matrix.dtype)
    for at in range(0, rows, 64):
        out[:, at : at + 64] = matrix[at : at + 64].T
    return out


def by_group(blocks: Bytes, nbytes: int) -> Bytes:
    """Blocks across groups, each of `nbytes`, uint8 [d_model, groups * nbytes], group by group: [groups, d_model *
    nbytes]."""
    rows = len(blocks)
    return np.ascontiguousarray(blocks.reshape(rows, -1, nbytes).transpose(1, 0, 2)).reshape(-1, rows * nbytes)
