"""Safetensors files: an 8-byte length, a JSON header, the data. Parsed strictly; tensors are views of the mapping.

The `safetensors` library returns copies or framework tensors; this returns views of the bytes, with the same checks: no
overlaps, no holes, no duplicate names, nothing beyond the end.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from powerinfer.errors import ModelError
from powerinfer.formats.json_file import parse_json
from powerinfer.formats.mapped import MappedFile, shown
from powerinfer.formats.tensors import RawTensor

_MAX_HEADER = 1 << 24  # more than 100,000 tensors need; a hostile header must not cost seconds
_MAX_DIMS = 8
_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
}


def read_safetensors(path: Path) -> tuple[dict[str, RawTensor], dict[str, Any], MappedFile]:
    """All tensors of a file under their own names, the object `__metadata__`, and the mapped file.

    Tensors are views; one of an integer or 8-bit type is listed with that type, and reading it fails later, by name.
    ModelError if the file is malformed.
    """
    file = MappedFile(path)
    if file.size < 8:
        raise ModelError(f"{path}: not a safetensors file, or truncated")
    length = int.from_bytes(file.read(0, 8), "little")
    if length > min(_MAX_HEADER, file.size - 8):
        raise ModelError(f"{path}: the header claims {length} bytes; not a safetensors file, or truncated")
    header = parse_json(file.read(8, length), str(path))
    if type(header) is not dict:
        raise ModelError(f"{path}: the header is not a JSON object")
    metadata = header.pop("__metadata__", None)
    if metadata is not None and type(metadata) is not dict:
        raise ModelError(f"{path}: __metadata__ is not a JSON object")
    start = 8 + length
    entries = [(*_entry(name, entry, str(path)), name) for name, entry in header.items()]
    entries.sort(key=lambda entry: entry[:2])
    _check_layout(entries, file.size - start, str(path))
    data = file.view()[start:]
    tensors = {name: RawTensor(kind, shape, data[begin:end]) for begin, end, kind, shape, name in entries}
    return tensors, metadata or {}, file


def safetensors_header(tensors: Iterable[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, Any]) -> bytes:
    """The beginning of a file of these tensors (name, type, shape, bytes), whose data follow it in this order."""
    entries: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for name, kind, shape, nbytes in tensors:
        entries[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, at := at + nbytes]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


def _entry(name: str, entry: Any, source: str) -> tuple[int, int, str, tuple[int, ...]]:
    """(begin, end, type, shape) of one entry of the header, consistent in itself."""

    def bad(problem: str) -> ModelError:
        return ModelError(f"{source}: tensor {shown(name)} {problem}")

    if type(entry) is not dict or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise bad("is not described by dtype, shape and data_offsets")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if type(kind) is not str or kind not in _BYTES:
        raise bad(f"has the unknown type {shown(kind)}")
    if not _naturals(shape) or len(shape) > _MAX_DIMS:
        raise bad(f"has the shape {shown(shape)}")
    if not _naturals(offsets) or len(offsets) != 2:
        raise bad(f"has the offsets {shown(offsets)}")
    nbytes = _BYTES[kind]
    for dim in shape:
        nbytes *= dim  # Python integers: nothing wraps
    if offsets[1] - offsets[0] != nbytes:
        raise bad("has offsets that do not go with its shape")
    return offsets[0], offsets[1], kind, tuple(shape)


def _naturals(value: Any) -> bool:
    """Whether it is a list of numbers from 0 to 2**63."""
    return type(value) is list and all(type(v) is int and 0 <= v < 1 << 63 for v in value)


def _check_layout(entries: list[tuple[int, int, str, tuple[int, ...], str]], size: int, source: str) -> None:
    """Sorted entries must follow one another without overlap or hole and fill the data."""
    at = 0
    for begin, end, *_, name in entries:
        if end > size:
            raise ModelError(f"{source}: tensor {shown(name)} runs past the end of the file; is the download complete?")
        if begin != at:
            raise ModelError(f"{source}: tensor {shown(name)} {'overlaps another' if begin < at else 'follows a hole'}")
        at = end
    if at != size:
        raise ModelError(f"{source}: {size - at} bytes at the end belong to no tensor")
