"""A table whose rows stay in a file until they are needed, as an embedding is looked up."""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

from powerinfer.errors import ModelError
from powerinfer.formats.mapped import MappedFile
from powerinfer.formats.quant import Bytes, block_type
from powerinfer.formats.tensors import RawTensor

ROOM = 1 << 24
"""Bytes of memory that rows of a model in RAM may take."""


class FileRows:
    """A matrix of a file, in memory of its own that holds the rows that `fetch` was asked for.

    They are read, not mapped: of a mapped file that becomes shorter the next access ends the process, whatever was
    checked before. data: uint8 1-D, the whole matrix, of which only these rows are there; present: uint8 [rows], not 0
    for each of them.
    """

    def __init__(self, file: MappedFile, begin: int, tensor: RawTensor, fewest: int, room: int = ROOM) -> None:
        """begin: of the tensor, in the file; fewest: rows that are needed together; room: bytes for more of them."""
        rows, cols = tensor.shape
        self._file, self._begin = file, begin
        self._row_bytes = block_type(tensor.type).row_bytes(cols)
        self._most = max(fewest, room // max(self._row_bytes, mmap.PAGESIZE))
        self._present = np.zeros(rows, bool)
        self._count = 0
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        try:
            self._memory = mmap.mmap(-1, tensor.nbytes, flags=flags)
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot reserve {tensor.nbytes} bytes for rows of {file.path}: {error}") from None
        self.data: Bytes = np.frombuffer(self._memory, np.uint8)
        self.present: Bytes = self._present.view(np.uint8)

    def fetch(self, rows: NDArray[np.int32]) -> None:
        """Read those of these rows that are not there. ModelError, or ChangedError, if the file is not what it was.

        A row that the matrix does not have is left to whoever looks it up.
        """
        valid = rows[(rows >= 0) & (rows < len(self._present))]
        missing = valid[~self._present[valid]]
        if not len(missing):
            return
        missing = np.unique(missing)
        if self._count + len(missing) > self._most:
            self._memory.madvise(mmap.MADV_DONTNEED)
            self._present[:] = False
            self._count, missing = 0, np.unique(valid)
        view = memoryview(self._memory)
        try:
            for row in missing.tolist():
                at = row * self._row_bytes
                self._file.read_into(self._begin + at, view[at : at + self._row_bytes])
        finally:
            view.release()
        self._file.check_unchanged()  # afterwards: what was read is then of the file as it was opened
        self._present[missing] = True
        self._count += len(missing)
