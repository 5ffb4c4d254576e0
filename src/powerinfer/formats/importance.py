"""Importance of the columns of matrices: the mean square of each of their inputs on some text, by which the errors of
quantised weights are weighed. Read from files of llama.cpp's `llama-imatrix`, and written as one.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from powerinfer.errors import ModelError
from powerinfer.formats.gguf import encoded, read_gguf, write_gguf
from powerinfer.formats.mapped import MappedFile, shown
from powerinfer.formats.quant import Float32

Shapes = Mapping[str, tuple[int, ...]]
"""The shapes of a model's tensors, by the names of GGUF files."""

_MAX_ENTRIES, _MAX_NAME, _MAX_NUMBERS = 1 << 16, 1 << 10, 1 << 28  # of files in the old form


@dataclass(frozen=True)
class Importance:
    """Sums of squares of the inputs of matrices. name: of their file, or of the text; columns: mean squares of the
    inputs by tensor, [matrices, cols], 1 for a matrix that got none; counts: tokens that each matrix got."""

    name: str
    columns: dict[str, Float32]
    counts: dict[str, Float32]

    def rows(self, name: str, shape: tuple[int, ...], begin: int, end: int) -> Float32 | None:
        """The weight of each element of some rows of a tensor; None where nothing is known of it."""
        columns = self.columns.get(name)
        if columns is None:
            return None
        rows_each = math.prod(shape[:-1]) // len(columns)
        rows: Float32 = columns[np.arange(begin, end) // rows_each]
        return rows

    def shares(self, name: str, shape: tuple[int, ...]) -> Float32 | None:
        """Shares of the tokens that each matrix of a tensor got, as multiples of the mean; None where nothing is known,
        or all are one."""
        counts = self.counts.get(name)
        if counts is None or len(counts) == 1 or not counts.sum() or len(counts) != math.prod(shape[:-2]):
            return None
        shares: Float32 = counts / counts.mean()
        return shares


def read_importance(path: Path, shapes: Shapes, model: Path) -> Importance:
    """The importance in an imatrix file of llama.cpp, GGUF or of the old form, of a model's matrices. ModelError if
    malformed or of another model."""
    sums = _read_gguf(path, shapes) if MappedFile(path).read(0, 4) == b"GGUF" else _read_old(path, shapes)
    columns, counts = {}, {}
    for name, (numbers, times) in sums.items():
        if not (np.isfinite(numbers).all() and np.isfinite(times).all() and (numbers >= 0).all()):
            raise ModelError(f"{path}: {shown(name)} holds numbers that are infinite, below 0 or no numbers")
        if (times < 0).any():
            raise ModelError(f"{path}: {shown(name)} holds counts below 0")
        columns[name], counts[name] = mean_squares(numbers, times), times
    if not columns:
        raise ModelError(f"{path} says nothing of the matrices of {model}: it was made of another model")
    return Importance(path.name, columns, counts)


def mean_squares(sums: Float32, counts: Float32) -> Float32:
    """Mean squares of the inputs, [matrices, cols]; of a matrix that got none all are 1."""
    means: Float32 = np.where(counts[:, None] > 0, sums / np.maximum(counts, 1)[:, None], np.float32(1))
    return means.astype(np.float32)


def _unsuitable(path: Path, name: str) -> ModelError:
    return ModelError(f"{path}: {shown(name)} does not suit the model's tensor; was it made of another model?")


def _read_gguf(path: Path, shapes: Shapes) -> dict[str, tuple[Float32, Float32]]:
    """(sums of squares, counts) by tensor."""
    file = read_gguf(path)
    if file.metadata.get("general.type") != "imatrix":
        raise ModelError(f"{path} is not an imatrix file: llama-imatrix -o FILE.gguf makes one")
    read = {}
    for stored, sums in file.tensors.items():
        name = stored.removesuffix(".in_sum2")
        shape, counts = shapes.get(name), file.tensors.get(f"{name}.counts")
        if name == stored or shape is None:
            continue
        matrices = sums.size // sums.shape[-1]
        right = (sums.type, sums.shape[-1]) == ("F32", shape[-1]) and matrices in (1, math.prod(shape[:-2]))
        if not right or counts is None or (counts.type, counts.size) != ("F32", matrices):
            raise _unsuitable(path, stored)
        read[name] = sums.values(0, matrices), counts.float32().reshape(-1)
    return read


def _read_old(path: Path, shapes: Shapes) -> dict[str, tuple[Float32, Float32]]:
    """The same from the form before GGUF: for each tensor its name, the number of calls and mean squares times that."""
    file, at = MappedFile(path), 0

    def number() -> int:
        nonlocal at
        if at + 4 > file.size:
            raise ModelError(f"{path} is not an imatrix file, or it was cut short")
        (value,) = struct.unpack("<i", file.read(at, 4))
        at += 4
        return int(value)

    def limited(most: int) -> int:
        value = number()
        if not 0 < value <= most:
            raise ModelError(f"{path} is not an imatrix file, or it was cut short")
        return value

    read = {}
    for _ in range(limited(_MAX_ENTRIES)):
        length = limited(_MAX_NAME)
        name = file.read(at, min(length, file.size - at)).decode(errors="replace")
        at += length
        calls, count = number(), limited(_MAX_NUMBERS)
        if at + 4 * count > file.size:
            raise ModelError(f"{path} is not an imatrix file, or it was cut short")
        shape = shapes.get(name)
        if shape is not None:
            if count % shape[-1] or count // shape[-1] not in (1, math.prod(shape[:-2])):
                raise _unsuitable(path, name)
            sums = np.frombuffer(file.read(at, 4 * count), "<f4").astype(np.float32).reshape(-1, shape[-1])
            read[name] = sums, np.full(len(sums), max(1, calls), np.float32)
        at += 4 * count
    return read


def write_importance(path: Path, importance: Importance, window: int) -> None:
    """Write it as an imatrix file that llama.cpp reads, too, which has its name when it is whole. window: tokens of a
    piece of the text. OSError if that fails."""
    entries, data = [], []
    for name, columns in importance.columns.items():
        counts = importance.counts[name][:, None]
        for end, values in (("in_sum2", columns * counts), ("counts", counts)):
            entries.append((f"{name}.{end}", "F32", values.shape))
            data.append(np.ascontiguousarray(values, "<f4").reshape(-1).view(np.uint8))
    tokens = max((int(counts.max()) for counts in importance.counts.values()), default=0)
    metadata = {
        "general.type": encoded("imatrix"),
        "imatrix.datasets": encoded([importance.name]),
        "imatrix.chunk_count": encoded(max(1, tokens // window)),
        "imatrix.chunk_size": encoded(window),
    }
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as to:
            write_gguf(to, metadata, entries, data)
            to.flush()
            os.fsync(to.fileno())
        os.replace(part, path)
    finally:
        with suppress(OSError):
            part.unlink()
