"""FP4 matrices of Hugging Face folders: NVFP4 of compressed-tensors and ModelOpt, and MXFP4 of compressed-tensors.

Codes and scales are those of the types of that name, in another order.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from powerinfer.errors import ModelError
from powerinfer.formats.folder_modules import E4M3, Module, Settings, as_f16
from powerinfer.formats.quant import Bytes, Float32, block_type, dequantize
from powerinfer.formats.tensors import MadeTensor, RawTensor

_NVFP4, _MXFP4 = 16, 32
"""Weights that share a scale."""


def split_halves(pairs: Bytes) -> Bytes:
    """Codes of 4 bits [..., bytes], of which each byte holds neighbours, with those of the first half in the low bits,
    and those of the other in the high bits."""
    out = np.empty_like(pairs)
    first, other = np.split(pairs, 2, axis=-1)
    out[..., 0::2] = (first & 0x0F) | (other << 4)
    out[..., 1::2] = (first >> 4) | (other & 0xF0)
    return out


def read_fp4(module: Module, settings: Settings) -> MadeTensor:
    """`weight_packed` and `weight_scale`, of bytes: MXFP4; of e4m3: NVFP4, divided by `weight_global_scale`."""
    codes, rows, half = module.matrix("weight_packed", "U8")
    scales, _, groups = module.matrix("weight_scale", "F8_E4M3", "F8_E8M0", "U8")
    group = _NVFP4 if scales.type == "F8_E4M3" else _MXFP4
    _check_groups(module, rows, half * 2, scales, group)
    if group == _NVFP4:
        factor = 1 / _single(module, "weight_global_scale")
        return _nvfp4(module, codes, scales, rows, half * 2, factor)
    make = partial(_make_mxfp4, module.title, rows, groups)
    return MadeTensor("MXFP4", (rows, half * 2), (codes, scales), make)


def read_modelopt_fp4(module: Module, settings: Settings) -> MadeTensor:
    """`weight` and `weight_scale` of e4m3, times `weight_scale_2`."""
    codes, rows, half = module.matrix("weight", "U8")
    scales, *_ = module.matrix("weight_scale", "F8_E4M3")
    _check_groups(module, rows, half * 2, scales, _NVFP4)
    return _nvfp4(module, codes, scales, rows, half * 2, _single(module, "weight_scale_2"))


def _check_groups(module: Module, rows: int, cols: int, scales: RawTensor, group: int) -> None:
    if cols % group or scales.shape != (rows, cols // group):
        weights = f"{rows} x {cols} weights in groups of {group}"
        raise module.bad(f"has scales of shape {list(scales.shape)}, which do not go with {weights}")


def _single(module: Module, end: str) -> float:
    """A positive number, the only one of its tensor."""
    tensor = module.take(end, "F32")
    value = float(tensor.float32().reshape(-1)[0]) if tensor.size == 1 else 0.0
    if not 2.0**-120 < value < 2.0**120:  # of which 1 / value is a number, too
        raise module.bad(f"has no positive number as {end}")
    return value


def _nvfp4(module: Module, codes: RawTensor, scales: RawTensor, rows: int, cols: int, factor: float) -> MadeTensor:
    factors = np.array([factor], np.float32)
    if cols % block_type("NVFP4").block:
        make = partial(_make_f16, module.title, rows, cols, factors)
        return MadeTensor("F16", (rows, cols), (codes, scales), make)
    return MadeTensor("NVFP4", (rows, cols), (codes, scales), partial(_make_nvfp4, module.title), factors)


def _check_scales(title: str, scales: Bytes) -> None:
    if (scales >= 0x7F).any():
        raise ModelError(f"{title} has scales that are negative or not numbers")


def _make_nvfp4(title: str, codes: Bytes, scales: Bytes) -> Bytes:
    """Blocks of 4 scales, and the codes of as many groups."""
    _check_scales(title, scales)
    out = np.empty((len(scales) // 4, 36), np.uint8)
    out[:, :4] = scales.reshape(-1, 4)
    out[:, 4:] = split_halves(codes.reshape(-1, 8)).reshape(-1, 32)
    return out.reshape(-1)


def _make_f16(title: str, rows: int, cols: int, factors: Float32, codes: Bytes, scales: Bytes) -> Bytes:
    """Values of rows that are not whole blocks."""
    _check_scales(title, scales)
    pairs, codes_of = scales.reshape(rows, -1), codes.reshape(rows, -1)
    unit = np.uint8(0x38)  # 1 in e4m3

    def values(begin: int, end: int) -> Float32:
        groups = split_halves(codes_of[begin:end].reshape(-1, 8))
        blocks = np.zeros((len(groups), 36), np.uint8)
        blocks[:, 0], blocks[:, 4:12] = unit, groups
        result = dequantize(blocks, "NVFP4")[:, :_NVFP4] * (E4M3[pairs[begin:end]].reshape(-1, 1) * factors)
        return result.reshape(end - begin, cols)

    return as_f16(title, rows, cols, values)


def _make_mxfp4(title: str, rows: int, groups: int, codes: Bytes, scales: Bytes) -> Bytes:
    """Blocks of a scale and its codes."""
    if (scales == 255).any():
        raise ModelError(f"{title} has scales that are not numbers")
    out = np.empty((rows * groups, 17), np.uint8)
    out[:, 0] = scales
    out[:, 1:] = split_halves(codes.reshape(-1, 16))
    return out.reshape(-1)
