"""Speed of random disk reads that bypass the system's cache."""

from __future__ import annotations

import mmap
import os
import random
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from powerinfer.hardware.description import READERS, Disk
from powerinfer.progress import Progress, silent

SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
"""Sizes in bytes of the timed reads."""

_LEAST = 4 * SIZES[-1]  # minimum size of the file for a meaningful result
_WRITE_SECONDS = 2.0
_SLAB = 1 << 20


def disk_rates(folder: Path, nbytes: int, seconds: float, progress: Progress = silent) -> Disk | None:
    """Random reads of a file in `folder` of up to `nbytes`, for `seconds` each size; the file is temporary.

    None if it cannot be measured: the folder cannot be written, the disk is full or too slow to write the file in a few
    seconds, or the system cannot bypass its cache.
    """
    try:
        with _scratch_file(folder, nbytes) as (fd, size, direct):
            rates = {}
            for done, each in enumerate(SIZES):
                progress("measuring the disk", done, len(SIZES))
                rates[each] = _random_reads(fd, size, each, seconds, direct)
    except OSError:
        return None
    return Disk(rates)


@contextmanager
def _scratch_file(folder: Path, nbytes: int) -> Iterator[tuple[int, int, bool]]:
    """(descriptor, bytes, whether it was opened with O_DIRECT) of an unlinked file."""
    folder.mkdir(parents=True, exist_ok=True)
    space = os.statvfs(folder)
    if space.f_bavail * space.f_frsize < 4 * nbytes:
        raise OSError("the disk has no room")
    fd, name = tempfile.mkstemp(prefix="measure-", suffix=".part", dir=folder)
    try:
        try:
            reader, direct = _open_past_cache(name)
        finally:
            os.unlink(name)
        try:
            yield reader, _fill(fd, nbytes), direct
        finally:
            os.close(reader)
    finally:
        os.close(fd)


def _open_past_cache(name: str) -> tuple[int, bool]:
    if hasattr(os, "O_DIRECT"):
        with suppress(OSError):
            return os.open(name, os.O_RDONLY | os.O_DIRECT), True
    if not hasattr(os, "posix_fadvise"):
        raise OSError("this system cannot bypass its cache")
    return os.open(name, os.O_RDONLY), False


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


def _random_reads(fd: int, size: int, each: int, seconds: float, direct: bool) -> float:
    """GB/s of reads of `each` bytes at random offsets, READERS at a time; each offset is read at most once."""
    if not direct:
        os.posix_fadvise(fd, 0, size, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    places = list(range(0, size - each + 1, each))
    random.Random(each).shuffle(places)
    begin = time.perf_counter()
    end = begin + seconds

    def reader(number: int) -> int:
        done = 0
        with mmap.mmap(-1, each) as buffer:  # page alignment, as O_DIRECT requires
            for place in places[number::READERS]:
                done += os.preadv(fd, [buffer], place)
                if time.perf_counter() > end:  # after the read: a busy machine measures one, too
                    break
        return done

    with ThreadPoolExecutor(READERS) as pool:
        done = sum(pool.map(reader, range(READERS)))
    if done == 0:
        raise OSError("nothing was read")
    return float(f"{done / (time.perf_counter() - begin) / 1e9:.4g}")
