"""GGUF files, versions 2 and 3, single or split: header parsed strictly, tensors as views of the mapped file.

PowerInfer's own files are GGUF as well, behind the magic `PWRI`.

Layout (little-endian): magic, version, tensor count, metadata count; the metadata as (key, type, value); per tensor
its name, dimensions (fastest first), type and offset; padding up to the alignment; the data. Every number in the
header is checked against the size of the file before it is used, and long arrays are checked in bulk.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from powerinfer.errors import ModelError
from powerinfer.formats.mapped import MappedFile, shown
from powerinfer.formats.quant import BLOCK_TYPES, BlockType, Bytes, block_type
from powerinfer.formats.tensors import RawTensor

# Far above any real model, far below what would be expensive: the largest vocabularies have about 1e6 tokens and
# merges.
_MAX_HEADER = 1 << 27
_MAX_STRING = 1 << 26
_MAX_NAME = 1 << 16
_MAX_ELEMENTS = 1 << 22  # of all arrays of numbers together
_MAX_STRINGS = 1 << 21  # of all arrays of strings together
_MAX_ENTRIES = 1 << 16  # metadata entries; tensors of one file
_MAX_DIMS = 4
_DEFAULT_ALIGNMENT = 32
_MAX_ALIGNMENT = 1 << 16
_FIRST_READ = 1 << 21  # most headers fit in one read

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_STRING, _ARRAY, _BOOL, _UINT32, _INT32, _FLOAT32 = 8, 9, 7, 4, 5, 6
_NUMBERS: dict[int, tuple[struct.Struct, np.dtype[Any]]] = {  # metadata type -> (struct code, numpy type)
    0: (struct.Struct("<B"), np.dtype("<u1")),
    1: (struct.Struct("<b"), np.dtype("<i1")),
    2: (struct.Struct("<H"), np.dtype("<u2")),
    3: (struct.Struct("<h"), np.dtype("<i2")),
    4: (_U32, np.dtype("<u4")),
    5: (struct.Struct("<i"), np.dtype("<i4")),
    6: (struct.Struct("<f"), np.dtype("<f4")),
    7: (struct.Struct("<B"), np.dtype("<u1")),  # bool: 0 or 1
    10: (_U64, np.dtype("<u8")),
    11: (struct.Struct("<q"), np.dtype("<i8")),
    12: (struct.Struct("<d"), np.dtype("<f8")),
}


@dataclass(frozen=True)
class GGUFFile:
    """Metadata (Python numbers, strings, lists) and tensors of a model, all its parts joined; data is read-only.

    magic: "GGUF", or "PWRI" for one of PowerInfer's own.
    """

    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, RawTensor]
    files: list[MappedFile] = field(repr=False)
    magic: str = "GGUF"

    def check(self) -> None:
        """ModelError if a part changed its size since it was opened."""
        for file in self.files:
            file.check()


class _Header:
    """A cursor over the start of a file that reads on as far as it is asked to, and never past the end."""

    def __init__(self, file: MappedFile) -> None:
        self.file = file
        self.limit = min(file.size, _MAX_HEADER)
        self.buffer = file.read(0, min(self.limit, _FIRST_READ))
        self.at = 0
        self.strings = 0
        self.elements = 0

    def bad(self, problem: str) -> ModelError:
        return ModelError(f"{self.file.path}: {problem}")

    def need(self, end: int) -> bytes:
        """The buffer, filled at least up to `end`."""
        if end > len(self.buffer):
            if end > self.limit:
                cut = self.limit == self.file.size
                raise self.bad("the header runs past the end of the file" if cut else "the header is absurdly long")
            more = min(max(end, 2 * len(self.buffer)), self.limit)
            self.buffer += self.file.read(len(self.buffer), more - len(self.buffer))
        return self.buffer

    def number(self, code: struct.Struct) -> Any:
        start, self.at = self.at, self.at + code.size
        (value,) = code.unpack_from(self.need(self.at), start)
        return value

    def string(self, noun: str, longest: int) -> str:
        length = self.number(_U64)
        if length > longest:
            raise self.bad(f"{noun} has an absurd length, {length} bytes")
        start, self.at = self.at, self.at + length
        try:
            return str(self.need(self.at)[start : self.at], "utf-8")
        except UnicodeDecodeError:
            raise self.bad(f"{noun} is not valid UTF-8") from None

    def value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self.string(f"metadata value {shown(key)}", _MAX_STRING)
        if kind == _ARRAY:
            return self.array(key)
        if kind not in _NUMBERS:
            raise self.bad(f"metadata {shown(key)} has the unknown type {kind}")
        value = self.number(_NUMBERS[kind][0])
        return self.booleans([value], key)[0] if kind == _BOOL else value

    def booleans(self, values: list[int], key: str) -> list[bool]:
        if not {0, 1}.issuperset(values):
            raise self.bad(f"metadata {shown(key)} holds a truth value that is neither 0 nor 1")
        return [value == 1 for value in values]

    def array(self, key: str) -> list[Any]:
        kind, count = self.number(_U32), self.number(_U64)
        if kind == _STRING:
            return self.string_array(key, count)
        if kind == _ARRAY:
            raise self.bad(f"metadata {shown(key)} is an array of arrays, which is not supported")
        if kind not in _NUMBERS:
            raise self.bad(f"metadata {shown(key)} is an array of the unknown type {kind}")
        self.elements += count
        if self.elements > _MAX_ELEMENTS:
            raise self.bad(f"metadata {shown(key)} claims an absurd {count} elements")
        dtype = _NUMBERS[kind][1]
        start, self.at = self.at, self.at + count * dtype.itemsize
        values: list[Any] = np.frombuffer(self.need(self.at), dtype, count, start).tolist()
        return self.booleans(values, key) if kind == _BOOL else values

    def string_array(self, key: str, count: int) -> list[str]:
        """Bounds are checked string by string; UTF-8 is checked once for all, which is what makes this fast."""
        self.strings += count
        if self.strings > _MAX_STRINGS:
            raise self.bad(f"metadata {shown(key)} claims an absurd {count} strings")
        at = self.at
        buffer = self.need(at + 8 * count)
        filled, unpack = len(buffer), _U64.unpack_from
        pieces: list[bytes] = []
        add = pieces.append
        for _ in range(count):
            start = at + 8
            if start > filled:
                buffer = self.need(start)
                filled = len(buffer)
            at = start + unpack(buffer, at)[0]
            if at > filled:
                buffer = self.need(at)
                filled = len(buffer)
            add(buffer[start:at])
        self.at = at
        try:
            strings = b"\0".join(pieces).decode().split("\0")
        except UnicodeDecodeError:
            raise self.bad(f"metadata {shown(key)} holds a string that is not valid UTF-8") from None
        return strings if len(strings) == count else [piece.decode() for piece in pieces]

    def metadata(self, count: int) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        for _ in range(count):
            key = self.string("a metadata key", _MAX_NAME)
            if key in entries:
                raise self.bad(f"metadata {shown(key)} occurs twice")
            entries[key] = self.value(self.number(_U32), key)
        return entries


def metadata_bytes(path: Path) -> dict[str, bytes]:
    """The metadata of one file as it is stored: by key, the number of the value's type and the value."""
    header = _Header(MappedFile(path))
    header.at = 4 + _U32.size + _U64.size  # of the tensors
    entries = {}
    for _ in range(header.number(_U64)):
        key = header.string("a metadata key", _MAX_NAME)
        start = header.at
        header.value(header.number(_U32), key)
        entries[key] = header.buffer[start : header.at]
    return entries


def encoded(value: str | bool | int | float | Sequence[str] | Sequence[int] | Sequence[float]) -> bytes:
    """A value of the metadata as it is stored: a text, a bool, a uint32 (below 0: an int32), a float32, or texts, int32
    or floats."""
    if isinstance(value, str):
        return _U32.pack(_STRING) + _text(value)
    if isinstance(value, bool):
        return _U32.pack(_BOOL) + bytes([value])
    if isinstance(value, int):
        kind = _UINT32 if value >= 0 else _INT32
        return _U32.pack(kind) + _NUMBERS[kind][0].pack(value)
    if isinstance(value, float):
        return _U32.pack(_FLOAT32) + _NUMBERS[_FLOAT32][0].pack(value)
    kinds = {type(one) for one in value}
    kind = _STRING if kinds == {str} else _INT32 if kinds == {int} else _FLOAT32
    head = _U32.pack(_ARRAY) + _U32.pack(kind) + _U64.pack(len(value))
    if kind == _STRING:
        return head + b"".join(_text(str(one)) for one in value)
    return head + np.array(value, _NUMBERS[kind][1]).tobytes()


def _text(text: str) -> bytes:
    raw = text.encode()
    return _U64.pack(len(raw)) + raw


_Tensors = Sequence[tuple[str, str, tuple[int, ...]]]


def stored_alignment(metadata: Mapping[str, bytes]) -> int:
    """The alignment of the tensors of a file with metadata as `metadata_bytes` gives it."""
    stated = metadata.get("general.alignment")
    return int.from_bytes(stated[_U32.size :], "little") if stated else _DEFAULT_ALIGNMENT


def header_bytes(metadata: Mapping[str, bytes], tensors: _Tensors) -> tuple[bytes, list[int]]:
    """(the beginning of a file up to its data, where each tensor begins in the data).

    metadata: as `metadata_bytes` gives it; tensors: (name, type, shape) of each, which follow one another in this
    order, at multiples of the file's alignment.
    """
    alignment = stored_alignment(metadata)
    parts = [b"GGUF", _U32.pack(3), _U64.pack(len(tensors)), _U64.pack(len(metadata))]
    for key, value in metadata.items():
        parts += [_text(key), value]
    at, starts = 0, []
    for name, type_name, shape in tensors:
        kind = block_type(type_name)
        dims = b"".join(_U64.pack(dim) for dim in reversed(shape))
        parts += [_text(name), _U32.pack(len(shape)), dims, _U32.pack(kind.id), _U64.pack(at)]
        starts.append(at)
        at += -(-math.prod(shape[:-1]) * kind.row_bytes(shape[-1]) // alignment) * alignment
    header = b"".join(parts)
    return header + b"\0" * (-len(header) % alignment), starts


def write_gguf(to: BinaryIO, metadata: Mapping[str, bytes], tensors: _Tensors, data: Iterable[Bytes]) -> None:
    """A whole file. metadata, tensors: as of `header_bytes`; data: the bytes of each tensor, in this order.

    The last one is padded, too: llama.cpp reads the data of an imatrix as one piece.
    """
    header, starts = header_bytes(metadata, tensors)
    to.write(header)
    for start, one in zip(starts, data, strict=True):
        to.write(b"\0" * (len(header) + start - to.tell()))
        to.write(one.data)
    to.write(b"\0" * (-to.tell() % _DEFAULT_ALIGNMENT))


_FOREIGN = {
    **{at: f"type Q4_0_{of}, which is out of use: take Q4_0" for at, of in ((31, "4_4"), (32, "4_8"), (33, "8_8"))},
    36: "type I2_S of bitnet.cpp: take the model's Hugging Face folder, whose weights are the same",
}
"""Types that other programs have, or had."""

_OTHER_BLOCKS = {"Q2_0": "; Q2_0 in blocks of 128, of files before llama.cpp had it, is not read, only in blocks of 64"}
"""Types that other programs had with smaller blocks under the same number, so that tensors seem to overlap."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor as the header describes it, before its place in the file is known."""

    name: str
    shape: tuple[int, ...]
    type: BlockType
    offset: int
    nbytes: int


def _entry(header: _Header) -> _Entry:
    name = header.string("a tensor name", _MAX_NAME)
    n_dims = header.number(_U32)
    if not 1 <= n_dims <= _MAX_DIMS:
        raise header.bad(f"tensor {shown(name)} has {n_dims} dimensions")
    dims = [header.number(_U64) for _ in range(n_dims)]
    type_id, offset = header.number(_U32), header.number(_U64)
    kind = BLOCK_TYPES.get(type_id)
    if kind is None:
        raise header.bad(f"tensor {shown(name)} has the {_FOREIGN.get(type_id, f'unknown type {type_id}')}")
    if min(dims) < 1:
        raise header.bad(f"tensor {shown(name)} has an empty dimension")
    if dims[0] % kind.block:
        raise header.bad(f"rows of tensor {shown(name)}, {dims[0]} elements, are not whole {kind.name} blocks")
    nbytes = kind.row_bytes(dims[0])
    for dim in dims[1:]:
        nbytes *= dim  # Python integers: nothing wraps
    return _Entry(name, tuple(reversed(dims)), kind, offset, nbytes)


def _check_layout(header: _Header, entries: list[_Entry], data_size: int, alignment: int) -> None:
    """Every tensor aligned and inside the data, no two sharing a byte, no name used twice."""
    end, before, other = 0, "", ""
    for entry in sorted(entries, key=lambda entry: entry.offset):
        if entry.offset % alignment:
            raise header.bad(f"tensor {shown(entry.name)} is not aligned to {alignment} bytes")
        hint = _OTHER_BLOCKS.get(entry.type.name, "")
        if entry.offset + entry.nbytes > data_size:
            past = "runs past the end of the file; is the download complete?"
            raise header.bad(f"tensor {shown(entry.name)} {past}{hint}")
        if entry.offset < end:
            raise header.bad(f"tensors {shown(before)} and {shown(entry.name)} overlap{other}")
        end, before, other = entry.offset + entry.nbytes, entry.name, hint
    if len({entry.name for entry in entries}) != len(entries):
        raise header.bad("two tensors have the same name")


def _alignment(header: _Header, metadata: dict[str, Any]) -> int:
    value = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(value) is not int or not 8 <= value <= _MAX_ALIGNMENT or value & (value - 1):
        raise header.bad(f"general.alignment is {shown(value)}, not a power of two from 8 to {_MAX_ALIGNMENT}")
    return value


def _read_part(path: Path) -> GGUFFile:
    """One file, alone or one of several parts."""
    file = MappedFile(path)
    header = _Header(file)
    magic = header.buffer[:4]
    if magic not in (b"GGUF", b"PWRI"):
        raise header.bad("not a GGUF file")
    header.at = 4
    version = header.number(_U32)
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3)
        kind = "big-endian GGUF" if swapped else f"GGUF version {version}"
        raise header.bad(f"{kind} is not supported, only little-endian versions 2 and 3")
    n_tensors, n_entries = header.number(_U64), header.number(_U64)
    if n_tensors > _MAX_ENTRIES or n_entries > _MAX_ENTRIES:
        raise header.bad(f"the header claims an absurd {n_tensors} tensors and {n_entries} metadata entries")
    metadata = header.metadata(n_entries)
    alignment = _alignment(header, metadata)
    entries = [_entry(header) for _ in range(n_tensors)]
    start = -(-header.at // alignment) * alignment
    _check_layout(header, entries, file.size - start, alignment)
    data = file.view()[start:] if entries else np.empty(0, np.uint8)
    tensors = {
        entry.name: RawTensor(entry.type.name, entry.shape, data[entry.offset : entry.offset + entry.nbytes])
        for entry in entries
    }
    return GGUFFile(path, version, metadata, tensors, [file], magic.decode())


_PART_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


def _part_path(path: Path, number: int) -> Path | None:
    """The path of part `number` (from 0) beside a part at `path`; None if its name does not say where."""
    match = _PART_NAME.fullmatch(path.name)
    return path.with_name(f"{match[1]}-{number + 1:05d}-of-{match[3]}.gguf") if match else None


def _split(part: GGUFFile) -> tuple[int, int]:
    """Number of the part, and of how many, as the file says."""
    number, count = part.metadata.get("split.no", 0), part.metadata.get("split.count", 1)
    if type(number) is not int or type(count) is not int or not 0 <= number < max(count, 1):
        raise ModelError(f"{part.path}: says it is part {shown(number)} of {shown(count)}")
    return number, max(count, 1)


def _join(first: GGUFFile, count: int) -> GGUFFile:
    """All parts of a split model: metadata of the first, tensors of all."""
    tensors, files = dict(first.tensors), list(first.files)
    for number in range(1, count):
        path = _part_path(first.path, number)
        if path is None or not path.exists():
            hint = path or f"a file named like PREFIX-{number + 1:05d}-of-{count:05d}.gguf"
            raise ModelError(f"{first.path} is part 1 of {count}; part {number + 1} is missing: put {hint} beside it")
        part = _read_part(path)
        if _split(part) != (number, count) or part.magic != first.magic:
            raise ModelError(f"{path} is not part {number + 1} of {count} of {first.path}")
        if not tensors.keys().isdisjoint(part.tensors):
            raise ModelError(f"{path} repeats a tensor of another part of the model")
        tensors.update(part.tensors)
        files += part.files
    expected = first.metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise ModelError(f"{first.path}: its {count} parts hold {len(tensors)} tensors, not {shown(expected)}")
    return GGUFFile(first.path, first.version, first.metadata, tensors, files, first.magic)


def read_gguf(path: str | Path) -> GGUFFile:
    """Parse a GGUF file, and the other parts beside it when it is one part of a split model (any part will do).

    The tensors are views of memory-mapped files: nothing but the header is read. ModelError if the file is malformed.
    """
    part = _read_part(Path(path))
    number, count = _split(part)
    if number > 0:
        first = _part_path(part.path, 0)
        if first is None or not first.exists():
            raise ModelError(f"{path} is part {number + 1} of {count}, and part 1 is missing beside it")
        part = _read_part(first)
        if _split(part) != (0, count):
            raise ModelError(f"{first} is not part 1 of {count}, to go with {path}")
    return _join(part, count) if count > 1 else part
