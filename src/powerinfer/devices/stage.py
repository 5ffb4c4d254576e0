"""Cold neurons that a GPU computes for a long prompt: their bundles are streamed to it through two buffers.

The bundles stay in RAM. A piece of them, whole groups, is copied into one of two pinned buffers, from there to one of
two on the GPU on a separate stream, and is converted to the GPU's byte order and multiplied on the step's stream:

    CPU       into 0 | into 1 | into 0 ....... | into 1 ....
    copies             0 over | 1 over | ...... 0 over | ...
    GPU                         sum of 0 | sum of 1 |    sum of 0 ...

A buffer is reused only when its reader is done: the copy from a pinned one, the sum of one on the GPU. The CPU waits
for nothing else, so it copies the next layer's first piece while the GPU still computes the last one.

Memory that is registered with the GPU (registered.py) is read by it directly, and the CPU copies nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from powerinfer.config import FfnConfig
from powerinfer.devices.registered import RegisteredMemory, lines_bytes
from powerinfer.devices.sharing import Sharing
from powerinfer.devices.streams import streams_of
from powerinfer.devices.torch_device import MemoryShare
from powerinfer.formats.bundle_file import n_groups
from powerinfer.formats.bundle_memory import SomeBundles, pieces
from powerinfer.formats.prepared import LINE
from powerinfer.formats.quant import Bytes
from powerinfer.kernels import gpu, gpu_panels
from powerinfer.kernels.cpu import LANES, PAGE
from powerinfer.neurons import BUNDLE_GROUP, BundleLayout, NeuronVectors
from powerinfer.system import usable_cores

if TYPE_CHECKING:
    from torch import Tensor, device

PIECE = 32 << 20
"""Maximum bytes of a buffer: large enough for the bus's full speed, and small compared with a layer."""

BUFFERS = 2

MOST_THREADS = 8
"""Threads that copy, at some 8 GB/s each: as fast as the fastest bus."""

BESIDE = 28
"""Maximum bytes of metadata per bundle: its offset, its group, the offset of the group's scales, and its vectors."""

_LAYER_PIECES = 8  # of a layer's matrices, at least, if they are not so small
_PADDING = 7 * LINE  # the parts of a piece begin at cache lines
_SEGMENT = 2 << 20  # torch's rounding of tensors of that size on a GPU
_LEAST_SHARE = 1 << 20  # minimum bytes per thread

Span = tuple[int, int, int]
"""The number of a part, and those of its bytes from one to another."""


def buffer_bytes(layout: BundleLayout, neurons: int, limit: int) -> int:
    """Bytes of a buffer for pieces of layers of `neurons` neurons, at most `limit`; 0 if that is less than a group.

    A piece is half a layer at most, so that there are two of them.
    """
    group = layout.group_bytes + BUNDLE_GROUP * BESIDE
    nbytes = min(limit, PIECE, -(-n_groups(neurons) // 2) * group + _PADDING)
    if nbytes < group + _PADDING:
        return 0
    return nbytes - nbytes % min(nbytes, _SEGMENT)


def layer_buffer(layer: int, widest: int, page: int, limit: int) -> int:
    """Bytes of a buffer for panels of layers whose matrices take `layer` bytes and have up to `widest` columns: a few
    pieces a layer, `limit` at most; 0 if that is less than a panel, in whatever type, or a page of their cache."""
    least = max(4 * LANES * widest, page)
    least = least if least < _SEGMENT else -(-least // _SEGMENT) * _SEGMENT
    size = min(limit, max(least, min(PIECE, layer // _LAYER_PIECES)))
    return 0 if size < least else size - size % min(size, _SEGMENT)


def return_buffer(page: int, tokens: int, staging: int) -> int:
    """Bytes of a buffer for pages that come back, of which there are `BUFFERS` in RAM: those of a prompt's step, as far
    as the stage's buffers would hold them. page: bytes of the largest page of a layer, 0 where none passes."""
    return page and max(page, min(staging, (tokens // PAGE + 2) * page))


def expert_buffer(matrices: Sequence[int], experts: int, most: int = 1 << 62) -> int:
    """Bytes of a buffer for whole experts of layers that have that number: half a layer at most, or `most` experts.
    matrices: bytes of each of an expert's."""
    count = max(1, min(PIECE // sum(matrices), -(-experts // 2), most))
    size = lines_bytes([8 * experts]) + count * lines_bytes(matrices)
    return -(-size // _SEGMENT) * _SEGMENT if size >= _SEGMENT else size


def experts_held(nbytes: int, matrices: Sequence[int], experts: int) -> int:
    """The number of experts that a buffer of so many bytes holds beside the table of their places; arguments as of
    `expert_buffer`."""
    return (nbytes - lines_bytes([8 * experts])) // lines_bytes(matrices)


class Stage:
    """Two buffers in RAM and two on the GPU, for the layers in turn.

    least: the number of tokens of a step from which on the GPU computes the cold neurons too; None: never. sharing:
    of experts, the CPU's part in such steps; None: it has none.
    """

    def __init__(self, to: device, nbytes: int) -> None:
        """nbytes: of a buffer, as `buffer_bytes` has it."""
        import torch

        self.least: int | None = None
        self.sharing: Sharing | None = None
        self._beside = ThreadPoolExecutor(1)
        self._to = to
        self._size = nbytes
        self._streams = streams_of(to)
        self._host = [self._streams.pinned(nbytes, torch.uint8) for _ in range(BUFFERS)]
        self._share = MemoryShare(to)  # other models' limits do not count for its buffers
        try:
            self._on_device = [torch.empty(nbytes, dtype=torch.uint8, device=to) for _ in range(BUFFERS)]
        except BaseException:
            self._share.end()
            raise
        self._share.limit(0)  # they are part of the limit of its model
        self._turn = 0
        self._side = self._streams.stream()
        self._copied, self._summed = ([self._streams.event() for _ in range(BUFFERS)] for _ in range(2))
        for event in self._summed:  # earlier contents of this memory may still be read
            event.record(self._streams.current())
        self.registered = RegisteredMemory(self._streams)
        self._threads = min(MOST_THREADS, usable_cores()[0])
        self._pool = ThreadPoolExecutor(self._threads - 1) if self._threads > 1 else None

    @property
    def piece_bytes(self) -> int:
        """Bytes of the arrays that a buffer holds, at most seven of which do not fill a line."""
        return self._size - _PADDING

    def limit(self, layout: BundleLayout) -> int:
        """Bytes of a piece of bundles, with `BESIDE` for each: what becomes of it takes no more, as is planned."""
        return min(self.piece_bytes, self.piece_bytes * layout.pitch // gpu.neuron_bytes(layout))

    def experts_at_once(self, matrices: Sequence[int], experts: int) -> int:
        """The number of experts that a buffer holds beside the table of their places; arguments as of
        `expert_buffer`."""
        return experts_held(self._size, matrices, experts)

    def panels_at_once(self, kind: str, k: int, nbytes: int) -> int:
        """The number of panels of k columns, of `nbytes` each, that a buffer holds as they are and converted; at least
        1."""
        return self.items_held(max(nbytes, gpu_panels.panel_bytes(kind, k)))

    def items_held(self, nbytes: int) -> int:
        """The number of items of that size that a buffer holds; at least one."""
        return max(1, self._size // nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers on the GPU, and again of those in RAM."""
        return BUFFERS * self._size

    def close(self) -> None:
        """Free the buffers and end the threads that copy; no step follows. May be called twice. Warns of memory that
        stays registered."""
        self.least = None
        self.registered.close()
        self._host, self._on_device = [], []
        self._share.end()
        self._beside.shutdown()
        if self._pool is not None:
            self._pool.shutdown()

    def run_beside(self, compute: Callable[[], object]) -> Future[object]:
        """Let the CPU compute beside what streams; its result is to be waited for before the step ends."""
        return self._beside.submit(compute)

    def takes(self, tokens: int) -> bool:
        """Whether a step of that number of tokens is long enough; those of up to `gpu.FEW` are recorded, and replayed
        without the host, which sends what streams."""
        return self.least is not None and tokens >= max(self.least, gpu.FEW + 1)

    def add_sum(
        self,
        total: Tensor,
        n: Tensor,
        layout: BundleLayout,
        cold: SomeBundles,
        ffn: FfnConfig,
        vectors: NeuronVectors,
        threshold: float,
        most: int | None = None,
    ) -> None:
        """total += the sum of these neurons of n, both float32 [T, d_model] on the GPU.

        threshold: activations up to it count as zero. most: pieces that count, None: all.
        """
        import torch

        kinds, activations = (torch.int32,) * 3 + (torch.float32,) * len(vectors), gpu.activations_of(n)
        for piece in islice(pieces(layout, cold, self.limit(layout), BESIDE), most):
            index = cold.index[piece.first : piece.last]
            of_piece_vectors = [None if values is None else values[index].astype(np.float32) for values in vectors]
            with self.sent([piece.rows, piece.at, piece.group, piece.shared, *of_piece_vectors]) as (rows, *more):
                at, group, shared, *of_piece = (
                    None if part is None else part.view(kind) for part, kind in zip(more, kinds, strict=True)
                )
                assert rows is not None and at is not None and group is not None and shared is not None
                neurons = gpu.empty_neurons(layout, len(at), len(shared), self._to, ffn, group, of_piece)
                gpu.unpack(layout, rows, at, group, shared, neurons)
                total.add_(gpu.neuron_sum(neurons, activations, None, threshold)[0])
                del neurons  # the next piece reuses their memory

    @contextmanager
    def sent(self, parts: Sequence[NDArray[Any] | None]) -> Iterator[list[Tensor | None]]:
        """Arrays, one after another in a buffer on the GPU, each at a line: their bytes there, within the context."""
        slot, self._turn = self._turn, (self._turn + 1) % BUFFERS
        self._copied[slot].synchronize()
        places, runs, copied = self.registered.arranged(parts, self._host[slot])
        self._copy(copied)
        sent = self._on_device[slot]
        main = self._streams.current()
        self._side.wait_event(self._summed[slot])
        with self._streams.on(self._side):
            for begin, source in runs:
                sent[begin : begin + len(source)].copy_(source, non_blocking=True)
        self._copied[slot].record(self._side)
        main.wait_event(self._copied[slot])
        try:
            yield [None if part is None else sent[place] for part, place in zip(parts, places, strict=True)]
        finally:
            self._summed[slot].record(main)

    def settle(self) -> None:
        """Let the GPU read by itself what passes through the buffers, if steps stream, which is known now; else let go
        of what was registered to measure that."""
        self.registered.unregister() if self.least is None else self.registered.register()

    def finish(self) -> None:
        """Wait for copies, before memory that passes through the buffers is written to. RuntimeError if the device
        fails."""
        self._streams.finish()

    def _copy(self, copied: Sequence[tuple[Bytes, Bytes]]) -> None:
        """Copy each part, (to, from), the bytes of all shared out among the threads: numpy copies without Python's
        lock."""

        def copy(share: Sequence[Span]) -> None:
            for number, begin, end in share:
                to, part = copied[number]
                np.copyto(to[begin:end], part[begin:end])

        sizes = [len(part) for _, part in copied]
        first, *further = shared_out(sizes, min(self._threads, max(1, sum(sizes) // _LEAST_SHARE)))
        copying = [] if self._pool is None else [self._pool.submit(copy, share) for share in further]
        copy(first)
        for one in copying:
            one.result()


def shared_out(sizes: Sequence[int], shares: int) -> list[list[Span]]:
    """Parts of so many bytes, in their order, cut into that number of shares of as many bytes each: several short parts
    in one, a long part in several."""
    result, at, number, begin = list[list[Span]](), 0, 0, 0
    for share in range(1, shares + 1):
        spans, last = list[Span](), sum(sizes) * share // shares
        while at < last:
            end = min(sizes[number], begin + last - at)
            spans.append((number, begin, end))
            at += end - begin
            number, begin = (number, end) if end < sizes[number] else (number + 1, 0)
        result.append(spans)
    return result
