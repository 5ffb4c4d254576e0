"""Matrices of -1, 0 and 1 times a scale in Hugging Face folders: BitNet's `BitLinear` and `AutoBitLinear`.

They are stored as codes, four rows in a byte, with a scale of the whole matrix, or as floats that are made such ones
(absmean, arXiv 2402.17764). TQ2_0 holds the codes exactly, and the scale in F16; Q4_0 does where rows are not whole
blocks of it. `transformers` also rounds what such a matrix is multiplied with to 8 bits of a token's largest, as it was
trained; here that is rounded as with any other matrix, which is finer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import numpy as np

from powerinfer.errors import ModelError
from powerinfer.formats.folder_modules import Module, Settings, as_f16, fill, finite, numbers
from powerinfer.formats.mapped import shown
from powerinfer.formats.quant import Bytes, Float32, dequantize
from powerinfer.formats.tensors import MadeTensor
from powerinfer.formats.weight_types import FLOAT_TYPES

_LEAST_SCALE = 1e-5  # of absmean
_CLASSES, _MODES = ("bitlinear", "autobitlinear"), ("offline", "online")
_ONLINE = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}


def problem_of_bitnet(settings: Settings) -> str | None:
    """The part of the settings that is not read; None: all is."""
    for key, known in (("linear_class", _CLASSES), ("quantization_mode", _MODES)):
        if settings.get(key, known[0]) not in known:
            return f"has the {key} {shown(settings[key])}, which is not read (only {', '.join(known)})"
    if settings.get("use_rms_norm"):
        return "has use_rms_norm, and norms before every matrix are not computed"
    names = settings.get("modules_to_not_convert") or []
    if type(names) is not list or not all(type(name) is str for name in names):
        return f"has modules_to_not_convert {shown(names)}, not a list of names"
    return None


def is_made_ternary(name: str, settings: Settings) -> bool:
    """Whether floats of that name are a matrix that becomes one of -1, 0 and 1 as it is loaded."""
    stated = {key: settings.get(key) for key in ("quant_method", "linear_class", "quantization_mode")}
    if stated != _ONLINE or not re.search(r"\.layers\.\d+\.", name):
        return False
    module = name.removesuffix(".weight")
    left = settings.get("modules_to_not_convert") or []
    return not any(module == other or f".{other}." in f".{module}." for other in left)


def read_ternary(module: Module, settings: Settings) -> MadeTensor:
    """A matrix that is stored as codes, four rows in a byte."""
    packed, rows, cols = module.matrix("weight", "U8")
    scale = module.take("weight_scale", "F32", "F16", "BF16")
    if scale.size != 1:
        raise module.bad(f"has {scale.size} scales, not one")
    divides = settings.get("linear_class", _CLASSES[0]) == _CLASSES[0]
    kind, pack = _form(module.title, 4 * rows, cols)

    def make(data: Bytes, factor: Bytes) -> Bytes:
        number = float(finite(module.title, numbers(factor, scale.type))[0])
        if not number > 0:
            raise ModelError(f"{module.title} has a scale of {number:g}")
        codes = data.reshape(rows, cols)
        if (codes & codes >> 1 & 0x55).any():
            raise ModelError(f"{module.title} has codes other than -1, 0 and 1")
        return pack(partial(_unpacked, codes), 1 / number if divides else number)

    return MadeTensor(kind, (4 * rows, cols), (packed, scale), make)


def _unpacked(codes: Bytes, begin: int, end: int) -> Bytes:
    """Codes 0, 1 and 2 of rows: a byte has those of the rows a quarter of the matrix apart, the first in its lowest
    bits."""
    quarter, index = len(codes), np.arange(begin, end)
    return codes[index % quarter] >> (2 * (index // quarter)).astype(np.uint8)[:, None] & np.uint8(3)


def make_ternary(module: Module, settings: Settings) -> MadeTensor:
    """A matrix of floats that is made one of -1, 0 and 1 times its mean magnitude, in the type of the floats."""
    floats, rows, cols = module.matrix("weight", *FLOAT_TYPES)
    kind, pack = _form(module.title, rows, cols)

    def make(data: Bytes) -> Bytes:
        stored = data.reshape(rows, -1)

        def values(begin: int, end: int) -> Float32:
            return dequantize(stored[begin:end], floats.type).reshape(-1, cols)

        sums: dict[int, float] = {}

        def add(begin: int, end: int) -> None:
            sums[begin] = float(np.abs(values(begin, end)).sum(dtype=np.float64))

        fill(rows, cols, add)
        mean = np.float32(sum(sums[begin] for begin in sorted(sums)) / (rows * cols))
        if not np.isfinite(mean):
            raise ModelError(f"{module.title} holds weights that are not numbers")
        by = np.float32(1) / max(mean, np.float32(_LEAST_SCALE))
        scale = _rounded(np.float32(1) / by, floats.type)

        def codes(begin: int, end: int) -> Bytes:
            ternary: Float32 = np.clip(np.rint(values(begin, end) * by), -1, 1)
            result: Bytes = (ternary + 1).astype(np.uint8)
            return result

        return pack(codes, scale)

    return MadeTensor(kind, (rows, cols), (floats,), make)


def _rounded(number: np.float32, kind: str) -> float:
    """The number as a tensor of floats holds it."""
    if kind == "BF16":
        bits = int(number.view(np.uint32))
        return float(np.uint32((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).view(np.float32))
    return float(np.float16(number) if kind == "F16" else number)


Codes = Callable[[int, int], Bytes]
"""Codes 0, 1 and 2 of rows from the first on to an end, uint8 [rows, cols]."""


def _form(title: str, rows: int, cols: int) -> tuple[str, Callable[[Codes, float], Bytes]]:
    """(type of the matrix, what makes its data of codes and a scale)."""
    if cols % 32:
        return "F16", lambda codes, scale: as_f16(
            title, rows, cols, lambda begin, end: (codes(begin, end) - np.float32(1)) * np.float32(scale)
        )
    block, pack = (256, _tq2_0) if cols % 256 == 0 else (32, _q4_0)
    nbytes = 66 if block == 256 else 18

    def make(codes: Codes, scale: float) -> Bytes:
        out = np.empty((rows, cols // block, nbytes), np.uint8)
        with np.errstate(over="ignore"):
            stored = np.array([scale], "<f2")
        if not np.isfinite(stored[0]) or not stored[0]:
            raise ModelError(f"{title} has a scale of {scale:g}, which F16 does not hold")

        def pack_rows(begin: int, end: int) -> None:
            pack(codes(begin, end).reshape(end - begin, cols // block, block), stored.view(np.uint8), out[begin:end])

        fill(rows, cols, pack_rows)
        return out.reshape(-1)

    return ("TQ2_0" if block == 256 else "Q4_0"), make


def _tq2_0(codes: Bytes, scale: Bytes, out: Bytes) -> None:
    quarters = codes.reshape(*codes.shape[:2], 2, 4, 32)
    joined = quarters[:, :, :, 0] | quarters[:, :, :, 1] << 2 | quarters[:, :, :, 2] << 4 | quarters[:, :, :, 3] << 6
    out[:, :, :64] = joined.reshape(*codes.shape[:2], 64)
    out[:, :, 64:] = scale


def _q4_0(codes: Bytes, scale: Bytes, out: Bytes) -> None:
    offset = codes + np.uint8(7)  # 8 stands for zero
    out[:, :, :2] = scale
    out[:, :, 2:] = offset[:, :, :16] | offset[:, :, 16:] << 4
