"""The disk as a tier below RAM: what of a model stays in its files, and the reads that bring it into memory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from powerinfer import _native
from powerinfer.errors import ModelError

if TYPE_CHECKING:
    from powerinfer.formats.mapped import MappedFile
    from powerinfer.formats.quant import Bytes
    from powerinfer.formats.tensors import RawTensor


@dataclass(frozen=True)
class OnDisk:
    """What of a model stays on disk while it runs on the CPU, and how much of it RAM holds at a time.

    matrices: canonical names of those that pass through a window of `window` bytes, in the order in which a step uses
    them. experts, neurons: by layer the number of those in RAM, where the layer's rest on disk. direct: reads go past
    the system's cache; why: for people.
    """

    matrices: frozenset[str] = frozenset()
    window: int = 0
    experts: Mapping[int, int] = field(default_factory=dict)
    neurons: Mapping[int, int] = field(default_factory=dict)
    direct: bool = True
    why: str = ""

    @property
    def anything(self) -> bool:
        return bool(self.matrices or self.experts or self.neurons)


class DiskTier:
    """The files of a model that is read while it runs, and what of it stays in them. about: `OnDisk`; reads: of all
    that a step needs."""

    def __init__(
        self,
        about: OnDisk,
        files: Sequence[MappedFile],
        places: Iterable[tuple[int, int]] = (),
        reads: _native.Reads | None = None,
    ) -> None:
        """files: of the model, and of its bundles; places: (file, offset) of `about.matrices`.

        reads: of the files in that order, None: of the disk itself. ModelError if a file cannot be read.
        """
        self.about = about
        self._files = list(files)
        self._begin = [file.view().ctypes.data for file in self._files]
        self._streamed = frozenset(places)
        self.reads = reads or read_files(self._files, about.direct)
        self.window = _native.Window(self.reads, about.window) if about.window else None
        self.slots: dict[int, _native.Slots] = {}  # of layers whose neurons or experts are on disk
        self._cleared: dict[str, float] = {}

    def place(self, data: Bytes) -> tuple[int, int] | None:
        """(file, offset) of a view of one of the files; None for other data."""
        address = data.ctypes.data
        for number, (file, begin) in enumerate(zip(self._files, self._begin, strict=True)):
            if begin <= address < begin + file.size:
                return number, address - begin
        return None

    def matrix(self, tensor: RawTensor, row_map: NDArray[np.int32] | None) -> _native.Matrix | None:
        """A matrix that passes through the window; None: the tensor is not one of those."""
        place = self.place(tensor.data)
        if place is None or place not in self._streamed:
            return None
        rows, cols = tensor.shape
        return _native.disk_matrix(tensor.type, rows, cols, *place, row_map)

    def report(self) -> dict[str, Any]:
        """What was read since the last `clear`, not while a step runs.

        mode; bytes; read_gb_s: while the disk was reading, None without reads; stall_seconds: that steps waited; of
        neurons and experts wanted, how many RAM had: hit_rate, None where none is on disk.
        """
        now = self._now()
        since = {name: value - self._cleared.get(name, 0) for name, value in now.items()}
        return {
            "mode": f"{self.reads.engine}, {'direct' if self.reads.direct else 'cached'}",
            "bytes": int(since["bytes"]),
            "read_gb_s": since["bytes"] / since["active"] / 1e9 if since["active"] else None,
            "stall_seconds": since["waited"],
            "hit_rate": since["hits"] / since["wanted"] if since["wanted"] else None,
        }

    def clear(self) -> None:
        """Begin to count anew."""
        self._cleared = self._now()

    def _now(self) -> dict[str, float]:
        stats = self.reads.stats()
        counted = {"bytes": float(stats.bytes), "waited": stats.waited, "active": stats.active}
        every = [slots.stats() for slots in self.slots.values()]
        return counted | {name: float(sum(one[name] for one in every)) for name in ("wanted", "hits")}

    def check(self) -> None:
        """ModelError if a file was changed since it was opened: what was read from it may be of both."""
        for file in self._files:
            file.check_unchanged()


def read_files(files: Sequence[MappedFile], direct: bool) -> _native.Reads:
    """Reads of files that are open. ModelError if one cannot be opened again, or is no longer the same."""
    try:
        return _native.Reads([(os.fspath(file.path), file.size) for file in files], direct)
    except _native.ReadError as error:
        raise ModelError(str(error)) from None
