"""The writer of GGUF files of benchmarks, runs and tests; nothing of the engine's reader is in it.

Tests also make wrong files with it: every number of the header can be overridden.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from powerinfer.formats.quant import block_type

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q", I64: "q", F64: "d"}
KINDS = {bool: BOOL, int: U32, float: F32, str: STRING}
"""Of values whose type is not stated; whole numbers in arrays are I32."""
FILE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "bf16": 32}
"""Type of most matrices -> `general.file_type`."""
EPS, THETA = 1e-5, 10000.0
"""Of the norms and of the rotary embedding of dense models."""


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
    """name, ggml type id, dims with the fastest first, data; offset None: the next free place; size: of the data, in
    bytes, where it comes later."""

    name: str
    type_id: int
    dims: list[int]
    data: bytes
    offset: int | None = None
    n_dims: int | None = None
    size: int | None = None

    @property
    def nbytes(self) -> int:
        return len(self.data) if self.size is None else self.size


@dataclass
class Builder:
    """Collects metadata and tensors; `encode` gives the file, `stream` writes one whose tensors are made meanwhile."""

    version: int = 3
    magic: bytes = b"GGUF"
    alignment: int = 32
    entries: list[tuple[str | bytes, int, Any]] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    n_tensors: int | None = None
    n_entries: int | None = None

    # --- metadata

    def add(self, key: str | bytes, kind: int, value: Any) -> Builder:
        self.entries.append((key, kind, value))
        return self

    def put(self, key: str, kind: int, value: Any) -> Builder:
        """Add, or replace what has that key."""
        return self.drop(key).add(key, kind, value)

    def drop(self, key: str) -> Builder:
        self.entries = [entry for entry in self.entries if entry[0] != key]
        return self

    def fields(self, values: Mapping[str, Any], prefix: str = "") -> Builder:
        """Add values under their keys, each of the kind that its type has in `KINDS`."""
        for key, value in values.items():
            if isinstance(value, list):
                kind = KINDS[type(value[0])]
                self.add(prefix + key, ARRAY, Array(I32 if kind == U32 else kind, value))
            else:
                self.add(prefix + key, KINDS[type(value)], value)
        return self

    def model(self, architecture: str, name: str, shape: Any) -> Builder:
        """Add what every architecture has. shape: sizes, under the names that `speed_models.Shape` has for them."""
        sizes = {
            "context_length": shape.context,
            "embedding_length": shape.d_model,
            "block_count": shape.n_layers,
            "feed_forward_length": shape.d_ff,
            "attention.head_count": shape.n_heads,
            "attention.head_count_kv": shape.n_kv_heads,
        }
        return self.fields({"architecture": architecture, "name": name}, "general.").fields(sizes, f"{architecture}.")

    # --- tensors

    def tensor(
        self, name: str, array: np.ndarray, type_id: int = 0, dims: list[int] | None = None, **more: Any
    ) -> Builder:
        """A tensor; `array` is float32, or raw block bytes with `dims` given."""
        shape = list(reversed(array.shape)) if dims is None else dims
        self.tensors.append(Tensor(name, type_id, shape, np.ascontiguousarray(array).tobytes(), **more))
        return self

    def declare(self, name: str, type_name: str, shape: tuple[int, ...]) -> Builder:
        """A tensor of a type of `quant.BLOCK_TYPES` whose data comes later, to `stream`."""
        kind = block_type(type_name)
        size = int(np.prod(shape[:-1], dtype=np.int64)) * kind.row_bytes(shape[-1])
        self.tensors.append(Tensor(name, kind.id, list(reversed(shape)), b"", size=size))
        return self

    # --- the file

    def header(self) -> bytes:
        """The file up to the padding before its data."""
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        n_entries = len(self.entries) if self.n_entries is None else self.n_entries
        out = [self.magic, struct.pack("<IQQ", self.version, n_tensors, n_entries)]
        out += [text(key) + struct.pack("<I", kind) + scalar(kind, value) for key, kind, value in self.entries]
        start = 0
        for tensor in self.tensors:
            offset = start if tensor.offset is None else tensor.offset
            n_dims = len(tensor.dims) if tensor.n_dims is None else tensor.n_dims
            out.append(text(tensor.name) + struct.pack("<I", n_dims))
            out.append(struct.pack(f"<{len(tensor.dims)}QIQ", *tensor.dims, tensor.type_id, offset))
            start += tensor.nbytes + self._padding(tensor.nbytes)
        return b"".join(out)

    def _padding(self, length: int) -> int:
        return -length % self.alignment

    def encode(self) -> bytes:
        out = bytearray(self.header())
        out += bytes(self._padding(len(out)))
        for tensor in self.tensors:
            out += bytes(self._padding(len(out))) + tensor.data
        return bytes(out)

    def write(self, path: Path) -> Path:
        path.write_bytes(self.encode())
        return path

    def stream(self, path: Path, data: Iterable[np.ndarray]) -> None:
        """Write the file, first under another name. data: of each declared tensor, one in memory at a time."""
        beside = path.with_name(path.name + ".part")
        with beside.open("wb") as file:
            file.write(self.header())
            file.write(bytes(self._padding(file.tell())))
            for tensor, values in zip(self.tensors, data, strict=True):
                if values.nbytes != tensor.nbytes:
                    raise ValueError(f"{tensor.name} has {values.nbytes} bytes, not {tensor.nbytes}")
                file.write(np.ascontiguousarray(values).data)
                file.write(bytes(self._padding(file.tell())))
        os.replace(beside, path)


def dense(
    architecture: str, name: str, shape: Any, kind: str, layer_norm: bool = False, rotated: bool = True
) -> Builder:
    """The metadata of a dense model, but for its tokenizer. shape: as of `Builder.model`; kind: of `FILE_TYPES`."""
    keys: dict[str, Any] = {f"attention.layer_norm_{'' if layer_norm else 'rms_'}epsilon": EPS}
    if rotated:
        keys |= {"rope.freq_base": THETA, "rope.dimension_count": shape.head_dim}
    builder = Builder().model(architecture, name, shape).fields(keys | {"vocab_size": shape.vocab}, f"{architecture}.")
    return builder.add("general.file_type", U32, FILE_TYPES[kind])
