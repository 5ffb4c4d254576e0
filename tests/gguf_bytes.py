"""Writes GGUF files byte by byte, wrong ones included: every number of the header can be overridden."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q", I64: "q", F64: "d"}


def text(value: str | bytes, length: int | None = None) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw) if length is None else length) + raw


@dataclass
class Array:
    """An array value: element type, elements, and the count to claim when it is not the true one."""

    kind: int
    items: list[Any]
    count: int | None = None

    def encode(self) -> bytes:
        head = struct.pack("<IQ", self.kind, len(self.items) if self.count is None else self.count)
        return head + b"".join(scalar(self.kind, item) for item in self.items)


@dataclass
class Raw:
    """Bytes to write as they are."""

    data: bytes


def scalar(kind: int, value: Any) -> bytes:
    if isinstance(value, Raw):
        return value.data
    if kind == STRING:
        return text(value)
    if kind == ARRAY:
        return value.encode()
    return struct.pack("<" + CODES[kind], value)


@dataclass
class Tensor:
    """name, ggml type id, dims with the fastest first, data; offset None: the next free place."""

    name: str
    type_id: int
    dims: list[int]
    data: bytes
    offset: int | None = None
    n_dims: int | None = None


@dataclass
class Builder:
    """Collects metadata and tensors; `encode` gives the file."""

    version: int = 3
    magic: bytes = b"GGUF"
    alignment: int = 32
    entries: list[tuple[str | bytes, int, Any]] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    n_tensors: int | None = None
    n_entries: int | None = None

    def add(self, key: str | bytes, kind: int, value: Any) -> Builder:
        self.entries.append((key, kind, value))
        return self

    def put(self, key: str, kind: int, value: Any) -> Builder:
        """Add, or replace what has that key."""
        self.entries = [entry for entry in self.entries if entry[0] != key]
        return self.add(key, kind, value)

    def drop(self, key: str) -> Builder:
        self.entries = [entry for entry in self.entries if entry[0] != key]
        return self

    def tensor(
        self, name: str, array: np.ndarray, type_id: int = 0, dims: list[int] | None = None, **more: Any
    ) -> Builder:
        """A tensor; `array` is float32, or raw block bytes with `dims` given."""
        shape = list(reversed(array.shape)) if dims is None else dims
        self.tensors.append(Tensor(name, type_id, shape, np.ascontiguousarray(array).tobytes(), **more))
        return self

    def header(self) -> tuple[bytes, bytes]:
        """The header (before padding) and the data section."""
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        n_entries = len(self.entries) if self.n_entries is None else self.n_entries
        out = [self.magic, struct.pack("<IQQ", self.version, n_tensors, n_entries)]
        out += [text(key) + struct.pack("<I", kind) + scalar(kind, value) for key, kind, value in self.entries]
        data = bytearray()
        for tensor in self.tensors:
            data += bytes(-len(data) % self.alignment)
            offset = len(data) if tensor.offset is None else tensor.offset
            n_dims = len(tensor.dims) if tensor.n_dims is None else tensor.n_dims
            out.append(text(tensor.name) + struct.pack("<I", n_dims))
            out.append(struct.pack(f"<{len(tensor.dims)}QIQ", *tensor.dims, tensor.type_id, offset))
            data += tensor.data
        return b"".join(out), bytes(data)

    def encode(self) -> bytes:
        head, data = self.header()
        return head + bytes(-len(head) % self.alignment) + data

    def write(self, path: Path) -> Path:
        path.write_bytes(self.encode())
        return path
