"""Speed of random disk reads past the system's cache, by the engine's own reader."""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from statistics import median

from powerinfer.devices.disk import Reads
from powerinfer.formats.bundle_memory import own_pages
from powerinfer.hardware.description import READERS, Disk
from powerinfer.progress import Progress, silent

SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
"""Sizes in bytes of the timed reads."""

_LEAST = 4 * SIZES[-1]  # minimum size of the file for a meaningful result
_WRITE_SECONDS = 2.0
_SLAB = 1 << 20
_TICKETS = 2  # that are waited for in turn, so that reads are under way meanwhile
_AHEAD = 32 << 20  # bytes under way, as the reader has


def disk_rates(folder: Path, nbytes: int, seconds: float, progress: Progress = silent) -> Disk | None:
    """Random reads of a file in `folder` of up to `nbytes`, for `seconds` each size; the file is temporary.

    None if it cannot be measured: the folder cannot be written, the disk is full or too slow to write the file in a few
    seconds, or the system cannot bypass its cache.
    """
    try:
        with _scratch_file(folder, nbytes) as (fd, size):
            reads = Reads([(f"/proc/self/fd/{fd}", size)], True)
            if not (reads.direct or hasattr(os, "posix_fadvise")):
                return None
            rates = {}
            for done, read_size in enumerate(SIZES):
                progress("measuring the disk", done, len(SIZES))
                rates[read_size] = float(f"{_rate(reads, fd, size, read_size, seconds) / 1e9:.4g}")
            latency = _latency(reads, fd, size, seconds)
    except OSError:
        return None
    return Disk(rates, float(f"{1e6 * latency:.4g}"))


@contextmanager
def _scratch_file(folder: Path, nbytes: int) -> Iterator[tuple[int, int]]:
    """(descriptor, bytes) of an unlinked file."""
    folder.mkdir(parents=True, exist_ok=True)
    space = os.statvfs(folder)
    if space.f_bavail * space.f_frsize < 4 * nbytes:
        raise OSError("the disk has no room")
    fd, name = tempfile.mkstemp(prefix="measure-", suffix=".part", dir=folder)
    try:
        os.unlink(name)
        yield fd, _fill(fd, nbytes)
    finally:
        os.close(fd)


def _fill(fd: int, nbytes: int) -> int:
    """Write random bytes for at most a few seconds; returns their number."""
    slab = random.Random(1).randbytes(_SLAB)
    end, written = time.monotonic() + _WRITE_SECONDS, 0
    while written < nbytes and time.monotonic() < end:
        written += os.write(fd, slab)
        if written % (16 * _SLAB) == 0:
            os.fsync(fd)
    os.fsync(fd)
    written -= written % _SLAB
    if written < min(_LEAST, nbytes):
        raise OSError("the disk is too slow to be measured")
    return written


def _places(reads: Reads, fd: int, size: int, nbytes: int) -> Iterator[int]:
    """Offsets in random order, again and again; what the system's cache has is forgotten first."""
    places = list(range(0, size - nbytes + 1, nbytes))
    while True:
        random.Random(nbytes).shuffle(places)
        if not reads.direct:
            os.posix_fadvise(fd, 0, size, os.POSIX_FADV_DONTNEED)
        yield from places


def _rate(reads: Reads, fd: int, size: int, nbytes: int, seconds: float) -> float:
    """Bytes a second of reads of `each` bytes, READERS or 32 MiB of them under way."""
    together = max(1, min(READERS, _AHEAD // nbytes) // _TICKETS)
    places, memory = _places(reads, fd, size, nbytes), own_pages(_TICKETS * together * nbytes)
    tickets: deque[int] = deque()
    begin, waited, number = time.perf_counter(), 0, 0
    while not waited or time.perf_counter() < begin + seconds:
        first = number % _TICKETS * together
        wanted = [(0, place, nbytes, (first + i) * nbytes) for i, place in enumerate(islice(places, together))]
        tickets.append(reads.begin(wanted, memory))
        number += 1
        if len(tickets) == _TICKETS:
            reads.wait(tickets.popleft())
            waited += 1
    end = time.perf_counter()
    for ticket in tickets:
        reads.wait(ticket)
    return waited * together * nbytes / (end - begin)


def _latency(reads: Reads, fd: int, size: int, seconds: float) -> float:
    """Seconds of the smallest read alone."""
    nbytes = SIZES[0]
    places, memory = _places(reads, fd, size, nbytes), own_pages(nbytes)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        begin = time.perf_counter()
        reads.wait(reads.begin([(0, next(places), nbytes, 0)], memory))
        times.append(time.perf_counter() - begin)
    return median(times)
