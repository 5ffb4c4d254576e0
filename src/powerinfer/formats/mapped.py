"""Files that other people wrote: opened, measured and mapped so that no content of theirs can hang or crash us."""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from powerinfer.errors import ChangedError, ModelError

_POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14, missing in the mmap module


def shown(text: object) -> str:
    """A name out of a file, fit for a one-line message: quoted, control characters escaped, not too long."""
    text = str(text)
    return repr(text if len(text) <= 80 else text[:77] + "...")


class MappedFile:
    """A regular file, its size taken once; headers are read with `read`, big data is mapped by `view`.

    Accessing a mapping of a truncated file kills the process, so headers are never read through it, and `check`
    verifies the length of the file before data is used.
    """

    def __init__(self, path: Path) -> None:
        """Open `path`; ModelError if it cannot be opened or is no regular file."""
        self.path = path
        # O_NONBLOCK: opening a named pipe must not wait for a writer
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise ModelError(f"cannot open {path}: {reason}") from None
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            raise ModelError(f"{path} is not a regular file")
        self.size = status.st_size
        self.modified_ns = status.st_mtime_ns
        self._view: NDArray[np.uint8] | None = None
        self._mapping: mmap.mmap | None = None

    def __del__(self) -> None:
        # An array over the mapping keeps the mapping alive by itself; only the descriptor needs closing.
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd >= 0:
            os.close(fd)

    def read(self, offset: int, count: int) -> bytes:
        """Exactly `count` bytes from `offset`; ModelError if the file ends before."""
        parts = []
        while count > 0:
            try:
                part = os.pread(self._fd, count, offset)
            except OSError as error:
                raise ModelError(f"cannot read {self.path}: {error.strerror}") from None
            if not part:
                raise ModelError(f"{self.path} is truncated")
            parts.append(part)
            offset, count = offset + len(part), count - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_into(self, offset: int, to: memoryview) -> None:
        """Fill `to` from `offset`; ModelError if the file cannot be read, ChangedError if it ends before."""
        done = 0
        while done < len(to):
            try:
                count = os.preadv(self._fd, [to[done:]], offset + done)
            except OSError as error:
                raise ModelError(f"cannot read {self.path}: {error.strerror}") from None
            if not count:
                self.check_unchanged()
                raise ModelError(f"{self.path} is truncated")
            done += count

    def check(self) -> None:
        """ModelError if the file is no longer as long as when it was opened."""
        if os.fstat(self._fd).st_size != self.size:
            raise ModelError(f"{self.path} changed while it was in use; load the model again")

    def check_unchanged(self) -> None:
        """ChangedError if it is not, or if it was written to."""
        status = os.fstat(self._fd)
        if (status.st_size, status.st_mtime_ns) != (self.size, self.modified_ns):
            raise ChangedError(f"{self.path} changed while it was in use; load the model again")

    def view(self) -> NDArray[np.uint8]:
        """The whole file, memory-mapped: uint8 [size], read-only. Keep it (or a slice) and the mapping stays."""
        if self._view is None:
            if self.size == 0:
                return np.empty(0, np.uint8)
            self.check()
            try:
                mapping = mmap.mmap(self._fd, self.size, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise ModelError(f"cannot map {self.path} into memory: {error}") from None
            self._mapping = mapping
            self._view = np.frombuffer(mapping, np.uint8)
        return self._view

    def release(self, part: NDArray[np.uint8] | None = None) -> None:
        """Give back the memory of the pages read so far, or of those under a part of the view.

        They are read from the file again on access.
        """
        if self._mapping is not None:
            self._mapping.madvise(mmap.MADV_DONTNEED, *self._pages(part))

    def populate(self, part: NDArray[np.uint8] | None = None) -> None:
        """Read the mapped file, or a part of its view, into memory now, so that no page has to be fetched later.

        Best effort.
        """
        if self._mapping is not None:
            with contextlib.suppress(OSError, ValueError):
                self._mapping.madvise(_POPULATE_READ, *self._pages(part))

    def _pages(self, part: NDArray[np.uint8] | None) -> tuple[int, int]:
        """(offset, bytes) of the pages that a part of the view touches, None: of the whole."""
        if part is None or self._view is None:
            return 0, self.size
        begin = part.ctypes.data - self._view.ctypes.data
        return begin - begin % mmap.PAGESIZE, part.nbytes + begin % mmap.PAGESIZE


def is_mapped(part: NDArray[np.uint8]) -> bool:
    """Whether an array is a view of a mapped file, whose pages come back on access."""
    while isinstance(part.base, np.ndarray):
        part = part.base
    base: object = part.base
    return isinstance(base, memoryview) and isinstance(base.obj, mmap.mmap) and not part.flags.writeable
