"""Memory of the host that a GPU reads by itself: registered with the driver, so that its pages stay in RAM.

A copy to pinned memory first reads and writes RAM before the GPU reads it, and two channels of RAM are then slower than
the bus. Registering takes about 0.13 s a GB, and its memory cannot be swapped; so memory is noted while a model is
wired, and registered once it is known that a GPU reads it. Some systems refuse that.
"""

from __future__ import annotations

import ctypes
import warnings
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from mmap import PAGESIZE
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from powerinfer.devices.streams import Streams
from powerinfer.formats.prepared import LINE
from powerinfer.formats.quant import Bytes

if TYPE_CHECKING:
    from torch import Tensor

LEAST_BYTES = 1 << 20
"""Less is not registered."""


@dataclass(eq=False)
class _Range:
    """Whole pages of `memory`, uint8 of the host, from an address on. pages: they are registered until `release` is
    called: so long the memory is not freed."""

    address: int
    nbytes: int
    memory: Bytes
    pages: Tensor | None = None
    release: Callable[[], None] | None = None


def lines_bytes(sizes: Sequence[int]) -> int:
    """Bytes of arrays one after another, each at a line."""
    return sum(-(-one // LINE) * LINE for one in sizes)


def _address(pages: _Range) -> int:
    return pages.address


class Sending(NamedTuple):
    """Arrays that are to lie one after another in a buffer, each at a line.

    places: of each in it; runs: bytes of the host, each with its place, that make the buffer; copied: (to, from) in the
    host's memory, before they are sent.
    """

    places: list[slice]
    runs: list[tuple[int, Tensor]]
    copied: list[tuple[Bytes, Bytes]]


class RegisteredMemory:
    """Memory that a device reads by itself.

    active: what is noted is registered when it is asked for first; else only what is already.
    """

    def __init__(self, streams: Streams) -> None:
        self.active = False
        self._streams = streams
        self._ranges: list[_Range] = []  # by address
        self._refused = False
        self._lock = Lock()  # experts are copied by a thread of their own

    def note(self, memory: Bytes) -> None:
        """Note memory that stays where it is until it is released."""
        begin, end = -(-memory.ctypes.data // PAGESIZE), (memory.ctypes.data + memory.nbytes) // PAGESIZE
        nbytes = (end - begin) * PAGESIZE
        if nbytes >= LEAST_BYTES and not any(one.memory is memory for one in self._ranges):
            insort(self._ranges, _Range(begin * PAGESIZE, nbytes, memory), key=_address)

    def register(self) -> None:
        """Register all that is noted, and from now on what will be."""
        self.active = True
        for one in self._ranges:
            self._register(one)

    def _register(self, memory: _Range) -> None:
        import torch

        with self._lock:
            if memory.pages is not None or self._refused:
                return
            memory.release = self._streams.register(memory.address, memory.nbytes)
            self._refused = memory.release is None
            if not self._refused:
                pages = (ctypes.c_uint8 * memory.nbytes).from_address(memory.address)
                memory.pages = torch.from_numpy(np.ctypeslib.as_array(pages))

    @property
    def nbytes(self) -> int:
        """Bytes that are registered."""
        return sum(one.nbytes for one in self._ranges if one.pages is not None)

    def release(self, memory: Bytes) -> None:
        """Let memory be freed, or used for something else; once no step runs. RuntimeError if the device fails."""
        self._streams.finish()
        for one in [one for one in self._ranges if one.memory is memory]:
            if one.release is not None:
                one.release()
            self._ranges.remove(one)

    def unregister(self) -> None:
        """Let all memory be swapped again, which stays noted; no copy is under way, or follows. Warns of memory that
        stays registered."""
        self.active = False
        registered = [one for one in self._ranges if one.release is not None]
        if not registered:
            return
        # Copies end, and CUDA gets to know this thread, which may never have run a step.
        with suppress(RuntimeError):  # of a device that has failed
            self._streams.finish()
        failures = list[RuntimeError]()
        for memory in registered:
            assert memory.release is not None
            try:
                memory.release()
            except RuntimeError as error:
                failures.append(error)
            memory.pages = memory.release = None
        if failures:
            warnings.warn(str(failures[0]), RuntimeWarning, stacklevel=3)

    def close(self) -> None:
        """Release all. May be called twice."""
        self.unregister()
        self._ranges.clear()

    def arranged(self, parts: Sequence[NDArray[Any] | None], pinned: Tensor) -> Sending:
        """Arrange that arrays are sent: the registered bytes from where they are, the others by way of a pinned buffer,
        uint8, which is large enough. None: no bytes."""
        at, places = 0, []
        for part in parts:
            size = 0 if part is None else part.nbytes
            places.append(slice(at, at + size))
            at += -(-size // LINE) * LINE
        runs, copied, staged = list[tuple[int, Any]](), list[tuple[Bytes, Bytes]](), 0
        host = pinned.numpy()
        for place, part in zip(places, parts, strict=True):
            if part is None:
                continue
            data = part.view(np.uint8)
            begin, direct = self._read_by_device(data)
            end = begin if direct is None else begin + len(direct)
            if direct is not None:
                runs += [(staged, pinned[staged : place.start + begin]), (place.start + begin, direct)]
                staged = place.start + end
            copied += [(host[place][span], data[span]) for span in (slice(0, begin), slice(end, len(data)))]
        runs.append((staged, pinned[staged : places[-1].stop] if places else pinned[:0]))
        return Sending(places, [run for run in runs if len(run[1])], [one for one in copied if len(one[0])])

    def _read_by_device(self, part: Bytes) -> tuple[int, Tensor | None]:
        """The bytes of a part that the device reads by itself, and where they begin in it."""
        first = part.ctypes.data
        number = bisect_left(self._ranges, first + part.nbytes, key=_address) - 1
        if number < 0:
            return 0, None
        memory = self._ranges[number]
        begin, end = max(first, memory.address), min(first + part.nbytes, memory.address + memory.nbytes)
        if begin >= end:
            return 0, None
        if self.active and memory.pages is None:
            self._register(memory)
        if memory.pages is None:
            return 0, None
        return begin - first, memory.pages[begin - memory.address : end - memory.address]
