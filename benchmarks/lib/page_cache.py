"""Files out of the page cache, so that what reads them next reads the disk, and how much of a file is in it."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

DROPPED, ADVISED = "page cache dropped", "files dropped from the page cache"


def drop(files: Sequence[Path]) -> str:
    """Write the files to disk and drop them from the page cache, as root everything else too; says which it was."""
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)  # pages that are not on disk yet are not dropped
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    with suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("1")
        return DROPPED
    return ADVISED


def cached(path: Path) -> int:
    """Bytes of a file that are in the page cache. OSError where the system does not say."""
    size = path.stat().st_size
    if not size:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE) as mapped:
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        view = (ctypes.c_ubyte * size).from_buffer(mapped)
        try:
            if libc.mincore(ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(size), pages):
                raise OSError(ctypes.get_errno(), "mincore", str(path))
        finally:
            del view  # else the mapping cannot be closed
        return mmap.PAGESIZE * sum(page & 1 for page in pages)
