"""NF4 and FP4 matrices of Hugging Face folders, by bitsandbytes: codes of 4 bits into a table, times a scale for each
block.

Blocks run through the rows. Scales may be quantised themselves: codes of 8 bits into a second table, times a scale for
each block of these, and an offset. No type has that table: they become F16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from powerinfer.config import Shape
from powerinfer.formats.folder_modules import Module, Settings, as_f16, finite
from powerinfer.formats.json_file import parse_json
from powerinfer.formats.layout import MAX_WIDTH
from powerinfer.formats.mapped import shown
from powerinfer.formats.quant import Bytes, Float32
from powerinfer.formats.tensors import MadeTensor, RawTensor

_STATE = "weight.quant_state.bitsandbytes__"
_MAX_STATE = 1 << 12  # bytes; it has a few small fields


@dataclass(frozen=True)
class _Nf4:
    """title: the beginning of an error; block: weights that share a scale; nested: scales that share one, 0: they are
    not quantised."""

    title: str
    shape: Shape
    block: int
    nested: int
    offset: float

    def make(self, codes: Bytes, scales: Bytes, table: Bytes, *nested: Bytes) -> Bytes:
        """The data of the matrix."""
        rows, cols = self.shape
        entries = finite(self.title, table.view("<f4"))
        if nested:
            factors, of_scales = (finite(self.title, part.view("<f4")) for part in nested)
            spread = np.repeat(factors, self.nested)[: len(scales)]
            absolute = of_scales[scales] * spread + np.float32(self.offset)
        else:
            absolute = finite(self.title, scales.view("<f4"))

        def values(begin: int, end: int) -> Float32:
            first, last = begin * cols, end * cols
            pairs = codes[first // 2 : -(-last // 2)]
            fields = np.stack([pairs >> 4, pairs & 0x0F], axis=-1).reshape(-1)[first % 2 :][: last - first]
            at = first // self.block
            factors_of = np.repeat(absolute[at : -(-last // self.block)], self.block)[first - at * self.block :]
            result: Float32 = (entries[fields] * factors_of[: last - first]).reshape(end - begin, cols)
            return result

        return as_f16(self.title, rows, cols, values)


def problem_of_bitsandbytes(settings: Settings) -> str | None:
    """The part of the settings that is not read."""
    of_4_bits = settings.get("load_in_4bit") is True
    if not of_4_bits and settings.get("load_in_8bit") is True:
        return None
    if not of_4_bits or settings.get("bnb_4bit_quant_type") not in ("nf4", "fp4"):
        return "is of bitsandbytes, but neither nf4, fp4 nor of 8 bits, which alone are read"
    stated = settings.get("bnb_4bit_quant_storage", "uint8")
    return None if stated == "uint8" else f"has the bnb_4bit_quant_storage {shown(stated)}, not 'uint8'"


def read_nf4(module: Module, settings: Settings) -> MadeTensor:
    """`weight` of bytes, and behind that name `absmax`, `quant_map`, a state in JSON, and perhaps `nested_absmax` and
    `nested_quant_map`."""
    codes = module.take("weight", "U8")
    state = _state(module, settings)
    rows, cols = _stated_shape(module, state)
    block = _number(module, state, "blocksize", 1 << 16)
    blocks = -(-rows * cols // block)
    if codes.size != -(-rows * cols // 2):
        raise module.bad(f"has {codes.size} bytes of codes, which do not go with {rows} x {cols} weights of 4 bits")
    scales = module.take("weight.absmax", "F32", "U8")
    parts = [codes, _check_size(module, "absmax", scales, blocks)]
    parts.append(_check_size(module, "quant_map", module.take("weight.quant_map", "F32"), 16))
    nested, offset = 0, 0.0
    if scales.type == "U8":
        nested = _number(module, state, "nested_blocksize", 1 << 16)
        stated = state.get("nested_offset")
        if type(stated) is not float or not abs(stated) < 1e30:
            raise module.bad(f"has the nested_offset {shown(stated)}, which is no number")
        offset = stated
        factors = module.take("weight.nested_absmax", "F32")
        parts.append(_check_size(module, "nested_absmax", factors, -(-blocks // nested)))
        of_scales = module.take("weight.nested_quant_map", "F32")
        parts.append(_check_size(module, "nested_quant_map", of_scales, 256))
    matrix = _Nf4(module.title, (rows, cols), block, nested, offset)
    return MadeTensor("F16", (rows, cols), tuple(parts), matrix.make)


def _state(module: Module, settings: Settings) -> dict[str, Any]:
    tensor = module.take(f"{_STATE}{settings['bnb_4bit_quant_type']}", "U8")
    state = parse_json(tensor.data.tobytes(), module.title) if tensor.size <= _MAX_STATE else None
    if type(state) is not dict:
        raise module.bad("has a quant_state that is no JSON object")
    return state


def _stated_shape(module: Module, state: dict[str, Any]) -> Shape:
    shape = state.get("shape")
    right = type(shape) is list and len(shape) == 2 and all(type(n) is int and 0 < n <= MAX_WIDTH * 16 for n in shape)
    if not right:
        raise module.bad(f"has the shape {shown(shape)} in its quant_state, not that of a matrix")
    return tuple(shape or ())


def _number(module: Module, state: dict[str, Any], key: str, most: int) -> int:
    value = state.get(key)
    if type(value) is not int or not 0 < value <= most:
        raise module.bad(f"has the {key} {shown(value)}, not a number from 1 to {most}")
    return value


def _check_size(module: Module, end: str, tensor: RawTensor, size: int) -> RawTensor:
    if tensor.size != size:
        raise module.bad(f"has {tensor.size} numbers of {end}, not {size}")
    return tensor
