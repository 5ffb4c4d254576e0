"""The tensors that hold a quantised matrix in a Hugging Face folder, taken by the ends of their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from powerinfer.errors import ModelError
from powerinfer.formats.family import Tensors
from powerinfer.formats.mapped import shown
from powerinfer.formats.quant import Bytes, Float32, dequantize
from powerinfer.formats.tensors import RawTensor, map_pieces

Settings: TypeAlias = Mapping[str, Any]
"""`quantization_config` of a config.json."""

SCALES = ("F32", "F16", "BF16", "F8_E8M0")
"""Types of scales."""


def _e4m3() -> Float32:
    """The number of each code of 8 bits, NaN of the two that are none."""
    codes = np.arange(256, dtype=np.float32)
    exponent, mantissa = codes % 128 // 8, codes % 8
    values = np.where(exponent == 0, mantissa / 512, (1 + mantissa / 8) * np.exp2(exponent - 7))
    values = np.where(codes % 128 == 127, np.nan, values)
    return np.where(codes < 128, values, -values).astype(np.float32)


E4M3 = _e4m3()


class Module:
    """A linear layer of a quantised folder. Its tensors leave `stored` as they are taken.

    name: as the file has it, without `.weight`.
    """

    def __init__(self, stored: Tensors, name: str, source: str) -> None:
        self._stored = stored
        self.name = name
        self._source = source

    @property
    def title(self) -> str:
        """The beginning of an error."""
        return f"{self._source}: {shown(self.name)}"

    def bad(self, problem: str) -> ModelError:
        """The error of tensors that do not go together."""
        return ModelError(f"{self.title} {problem}")

    def find(self, end: str, *types: str) -> RawTensor | None:
        """The tensor whose name ends so, None where there is none. ModelError if it has none of these types."""
        tensor = self._stored.pop(f"{self.name}.{end}", None)
        if tensor is None:
            return None
        if not isinstance(tensor, RawTensor) or tensor.type not in types:
            raise self.bad(f"has {end} of type {tensor.type}, not {' or '.join(types)}")
        return tensor

    def take(self, end: str, *types: str) -> RawTensor:
        """The tensor that `find` gives; ModelError where there is none."""
        tensor = self.find(end, *types)
        if tensor is None:
            raise self.bad(f"has no {end}")
        return tensor

    def matrix(self, end: str, *types: str) -> tuple[RawTensor, int, int]:
        """(tensor, rows, columns) of one of two dimensions, with something in it."""
        tensor = self.take(end, *types)
        if len(tensor.shape) != 2 or not tensor.size:
            raise self.bad(f"has {end} of shape {list(tensor.shape)}, not of a matrix")
        return tensor, *tensor.shape


def finite(title: str, values: Float32) -> Float32:
    """The scales. ModelError if one is not a number."""
    if not np.isfinite(values).all():
        raise ModelError(f"{title} has scales that are infinite or not numbers")
    return values


def numbers(data: Bytes, type_name: str) -> Float32:
    """Values of a tensor of small floats or of one of SCALES, 1-D."""
    if type_name == "F8_E4M3":
        return E4M3[data]
    if type_name == "F8_E8M0":
        return np.where(data == 255, np.nan, np.exp2(data.astype(np.float64) - 127)).astype(np.float32)
    return dequantize(data.reshape(1, -1), type_name).reshape(-1)


def as_f16(title: str, rows: int, cols: int, values: Callable[[int, int], Float32]) -> Bytes:
    """A matrix in F16, of the values of rows from the first on to an end. ModelError if one does not fit."""
    out = np.empty((rows, cols), "<f2")

    def round_rows(begin: int, end: int) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            out[begin:end] = values(begin, end)
        if ((out[begin:end].view("<u2") & 0x7C00) == 0x7C00).any():  # isfinite of float16 is slow
            raise ModelError(f"{title} holds weights that are not numbers, or too large for F16")

    fill(rows, cols, round_rows)
    return out.view(np.uint8).reshape(-1)


def fill(rows: int, cols: int, work: Callable[[int, int], None]) -> None:
    """All pieces of the rows, each done by `work`."""
    for _ in map_pieces(rows, cols, work):
        pass
