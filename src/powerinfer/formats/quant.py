"""Block formats of GGUF files: their sizes, and numpy code that reads and writes them.

A row of a quantised matrix is a run of blocks; a block holds `block` elements in `nbytes` bytes. The numpy code is
the reference for the tests of the native kernels, and converts types without kernels on load; results are bit-identical
to ggml's reference code.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from powerinfer.errors import ModelError
from powerinfer.formats import iq_blocks
from powerinfer.formats.weight_types import WEIGHT_TYPES

Bytes = NDArray[np.uint8]
Float32 = NDArray[np.float32]


@dataclass(frozen=True)
class BlockType:
    """A storage type: a block of `block` elements takes `nbytes` bytes; `id` is ggml's number for it."""

    name: str
    id: int
    block: int
    nbytes: int

    def row_bytes(self, cols: int) -> int:
        """Bytes of a row of `cols` elements, which must be whole blocks (ValueError)."""
        if cols % self.block:
            raise ValueError(f"{cols} columns are not whole {self.name} blocks of {self.block}")
        return cols // self.block * self.nbytes


BLOCK_TYPES = {kind.id: BlockType(kind.name, kind.id, kind.block, kind.nbytes) for kind in WEIGHT_TYPES.values()}
"""Every type of GGUF tensors, by ggml id. Not all can be read: see `can_dequantize`."""

_BY_NAME = {kind.name: kind for kind in BLOCK_TYPES.values()}


def block_type(name: str) -> BlockType:
    """The type of that name; ModelError if there is none."""
    try:
        return _BY_NAME[name]
    except KeyError:
        raise ModelError(f"unknown tensor type {name!r}") from None


# ---------------------------------------------------------------------------------------------------------------------
# Reading. Each function takes blocks, uint8 [n, nbytes], and gives their values, float32 [n, block].

_E2M1 = np.array(WEIGHT_TYPES["MXFP4"].entries, np.float32)  # doubled; scales are halved
_IQ4 = np.array(WEIGHT_TYPES["IQ4_NL"].entries, np.float32)


def _half(blocks: Bytes, start: int) -> Float32:
    """The float16 at byte `start` of every block, float32 [n, 1]."""
    return blocks[:, start : start + 2].view("<f2").astype(np.float32)


def all_numbers(data: Bytes, kind: str) -> bool:
    """Whether no weight of contiguous ones of a type is infinite or NaN: floats, or the float16 scales of blocks, whose
    exponents say so."""
    description = WEIGHT_TYPES[kind]
    if description.floats:
        words, exponent = (data.view("<u4"), 0x7F800000) if kind == "F32" else (data.view("<u2"), _EXPONENTS[kind])
        return not ((words & exponent) == exponent).any()
    blocks = data.reshape(-1, description.nbytes)
    halves = (blocks[:, at : at + 2].copy().view("<u2") for at in description.halves)
    return not any(((half & 0x7C00) == 0x7C00).any() for half in halves)


_EXPONENTS = {"F16": 0x7C00, "BF16": 0x7F80}


def _nibbles(packed: Bytes) -> Bytes:
    """4-bit fields, uint8 [n, bytes] -> [n, 2 * bytes]: all low halves, then all high halves."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=1)


def _fields(packed: Bytes, span: int, shifts: tuple[int, ...], mask: int) -> Bytes:
    """Bit fields of `span`-byte runs: uint8 [n, bytes] -> [n, bytes * len(shifts)], run by run, shift by shift."""
    runs = packed.reshape(len(packed), -1, 1, span)
    shifted = (runs >> np.array(shifts, np.uint8)[:, None]) & np.uint8(mask)
    return shifted.reshape(len(packed), -1)


def _f64(blocks: Bytes) -> Float32:
    with np.errstate(over="ignore"):
        return blocks.view("<f8").astype(np.float32)


def _five_bits(high: Bytes, low: Bytes) -> Float32:
    """5-bit values: bit i of the 4 `high` bytes is bit 4 of value i."""
    top = np.unpackbits(high, axis=1, bitorder="little") << np.uint8(4)
    return (_nibbles(low) | top).astype(np.float32)


def _q2_k(blocks: Bytes) -> Float32:
    scales = blocks[:, :16]
    scale = (_half(blocks, 80) * (scales & 0x0F).astype(np.float32))[:, :, None]
    floor = (_half(blocks, 82) * (scales >> 4).astype(np.float32))[:, :, None]
    values = _fields(blocks[:, 16:80], 32, (0, 2, 4, 6), 3).reshape(-1, 16, 16)
    return (scale * values - floor).reshape(-1, 256)


def _q3_k(blocks: Bytes) -> Float32:
    packed = blocks[:, 96:108]  # 16 scales of 6 bits: 8 bytes of low halves, 4 bytes of high pairs
    scales = _nibbles(packed[:, :8]) | _fields(packed[:, 8:], 4, (0, 2, 4, 6), 3) << np.uint8(4)
    scale = _half(blocks, 108) * (scales.astype(np.float32) - np.float32(32))
    low = _fields(blocks[:, 32:96], 32, (0, 2, 4, 6), 3).astype(np.float32)
    high = _fields(blocks[:, :32], 32, (0, 1, 2, 3, 4, 5, 6, 7), 1).astype(np.float32)
    values = low + np.float32(4) * high - np.float32(4)
    return (scale[:, :, None] * values.reshape(-1, 16, 16)).reshape(-1, 256)


def _k_scales(packed: Bytes) -> tuple[Float32, Float32]:
    """The 8 scales and 8 minima of 6 bits that Q4_K and Q5_K keep in 12 bytes; each float32 [n, 8]."""
    d, m, shared = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([d & 0x3F, (shared & 0x0F) | ((d >> 2) & 0x30)], axis=1)
    floors = np.concatenate([m & 0x3F, (shared >> 4) | ((m >> 2) & 0x30)], axis=1)
    return scales.astype(np.float32), floors.astype(np.float32)


def _k_values(blocks: Bytes, values: Bytes) -> Float32:
    scales, floors = _k_scales(blocks[:, 4:16])
    scale = (_half(blocks, 0) * scales)[:, :, None]
    floor = (_half(blocks, 2) * floors)[:, :, None]
    return (scale * values.reshape(-1, 8, 32) - floor).reshape(-1, 256)


def _q5_k(blocks: Bytes) -> Float32:
    high = _fields(blocks[:, 16:48], 32, (0, 1, 2, 3, 4, 5, 6, 7), 1)
    return _k_values(blocks, _fields(blocks[:, 48:], 32, (0, 4), 0x0F) | high << np.uint8(4))


def _q6_k(blocks: Bytes) -> Float32:
    scale = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    low = _fields(blocks[:, :128], 64, (0, 4), 0x0F)
    high = _fields(blocks[:, 128:192], 32, (0, 2, 4, 6), 3)
    values = (low | high << np.uint8(4)).astype(np.float32) - np.float32(32)
    return (scale[:, :, None] * values.reshape(-1, 16, 16)).reshape(-1, 256)


def _trits(packed: Bytes, powers: tuple[int, ...]) -> Bytes:
    """Base-3 digits of bytes that hold 5 (or 4) of them as a fraction of 256; 0, 1 or 2, digit by digit."""
    digits = packed[:, None, :] * np.array(powers, np.uint8)[:, None]  # wraps modulo 256 on purpose
    return ((digits.astype(np.uint16) * 3) >> 8).astype(np.uint8).reshape(len(packed), -1)


def _tq1_0(blocks: Bytes) -> Float32:
    five = (1, 3, 9, 27, 81)
    digits = [_trits(blocks[:, :32], five), _trits(blocks[:, 32:48], five), _trits(blocks[:, 48:52], five[:4])]
    return _half(blocks, 52) * (np.concatenate(digits, axis=1).astype(np.float32) - np.float32(1))


def _iq4_xs(blocks: Bytes) -> Float32:
    high = (blocks[:, 2:4].view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16)).astype(np.uint8) & 3
    low = _fields(blocks[:, 4:8], 1, (0, 4), 0x0F)
    scale = _half(blocks, 0) * ((low | high << np.uint8(4)).astype(np.float32) - np.float32(32))
    values = _IQ4[_fields(blocks[:, 8:], 16, (0, 4), 0x0F)]
    return (scale[:, :, None] * values.reshape(-1, 8, 32)).reshape(-1, 256)


def half_power(code: Bytes) -> Float32:
    """Half of the power of two that an MXFP4 block has as its exponent."""
    exponent = code.astype(np.uint32)
    tiny = np.uint32(0x00200000) << np.minimum(exponent, 1)  # 2**-128 and 2**-127 are subnormal
    return np.where(exponent < 2, tiny, np.maximum(exponent, 1) - 1 << np.uint32(23)).view(np.float32)


def _mxfp4(blocks: Bytes) -> Float32:
    return half_power(blocks[:, :1]) * _E2M1[_nibbles(blocks[:, 1:])]


def half_ue4m3(code: Bytes) -> Float32:
    """Half of the number of 8 bits that NVFP4 has for each 16 values."""
    exponent, mantissa = (code >> 3 & 15).astype(np.float32), (code & 7).astype(np.float32)
    normal = (1 + mantissa / 8) * np.exp2(exponent - 7)
    scale = np.where(exponent == 0, mantissa * np.float32(2**-9), normal) * np.float32(0.5)
    return np.where(code == 0x7F, np.float32(0), scale)


def _nvfp4(blocks: Bytes) -> Float32:
    scale = half_ue4m3(blocks[:, :4])
    values = _E2M1[_fields(blocks[:, 4:], 8, (0, 4), 0x0F)]
    return (scale[:, :, None] * values.reshape(-1, 4, 16)).reshape(-1, 64)


_READERS: dict[str, Callable[[Bytes], Float32]] = {
    "F32": lambda blocks: blocks.view("<f4").astype(np.float32),
    "F64": _f64,
    "F16": lambda blocks: blocks.view("<f2").astype(np.float32),
    "BF16": lambda blocks: (blocks.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32),
    "Q4_0": lambda blocks: _half(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - np.float32(8)),
    "Q4_1": lambda blocks: _half(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + _half(blocks, 2),
    "Q5_0": lambda blocks: _half(blocks, 0) * (_five_bits(blocks[:, 2:6], blocks[:, 6:]) - np.float32(16)),
    "Q5_1": lambda blocks: _half(blocks, 0) * _five_bits(blocks[:, 4:8], blocks[:, 8:]) + _half(blocks, 2),
    "Q8_0": lambda blocks: blocks[:, 2:].view(np.int8).astype(np.float32) * _half(blocks, 0),
    "Q1_0": lambda blocks: (
        _half(blocks, 0) * (_fields(blocks[:, 2:], 1, tuple(range(8)), 1).astype(np.float32) * 2 - np.float32(1))
    ),
    "Q2_0": lambda blocks: (
        _half(blocks, 0) * (_fields(blocks[:, 2:], 1, (0, 2, 4, 6), 3).astype(np.float32) - np.float32(1))
    ),
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": lambda blocks: _k_values(blocks, _fields(blocks[:, 16:], 32, (0, 4), 0x0F)),
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "TQ1_0": _tq1_0,
    "TQ2_0": lambda blocks: (
        _half(blocks, 64) * (_fields(blocks[:, :64], 32, (0, 2, 4, 6), 3).astype(np.float32) - np.float32(1))
    ),
    "IQ4_NL": lambda blocks: _half(blocks, 0) * _IQ4[_nibbles(blocks[:, 2:])],
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
    **iq_blocks.READERS,
}

_CHUNK = 1 << 17  # elements processed at once: the temporaries stay in the L2 cache


def can_dequantize(type_name: str) -> bool:
    """Whether `dequantize` reads that type."""
    return type_name in _READERS


def dequantize(data: Bytes, type_name: str) -> Float32:
    """Values of quantised rows: uint8 [rows, row_bytes] -> float32 [rows, cols].

    ModelError for a type that cannot be read or a row that is not whole blocks.
    """
    kind = block_type(type_name)
    reader = _READERS.get(kind.name)
    if reader is None:
        raise ModelError(f"tensors of type {kind.name} cannot be read; re-quantise the model to Q4_K, Q8_0 or F16")
    rows, row_bytes = data.shape
    if row_bytes % kind.nbytes:
        raise ModelError(f"a row of {row_bytes} bytes is not whole {kind.name} blocks of {kind.nbytes}")
    cols = row_bytes // kind.nbytes * kind.block
    blocks = np.ascontiguousarray(data).reshape(-1, kind.nbytes)
    if kind.block == 1:
        return reader(blocks.reshape(rows, row_bytes)).reshape(rows, cols)
    out = np.empty((len(blocks), kind.block), np.float32)
    step = _CHUNK // kind.block
    with np.errstate(invalid="ignore", over="ignore"):  # an infinite scale gives NaN, as it should
        for start in range(0, len(blocks), step):
            out[start : start + step] = reader(blocks[start : start + step])
    return out.reshape(rows, cols)


# ---------------------------------------------------------------------------------------------------------------------
# Writing. Each function takes values, float32 [n, block], and gives blocks, uint8 [n, nbytes].

ALMOST_HALF = np.float32(0.5) - np.float32(2**-25)  # trunc(x + this) rounds halves away from zero, exactly


def _inverse(scale: Float32) -> Float32:
    with np.errstate(divide="ignore", over="ignore"):
        return np.where(scale == 0, np.float32(0), np.float32(1) / scale)


def _signed_peak(values: Float32) -> Float32:
    """The value of largest magnitude of each row (the first of equals), [n, 1]."""
    highest, lowest = values.max(axis=1, keepdims=True), values.min(axis=1, keepdims=True)
    peak: Float32 = np.where(highest > -lowest, highest, lowest)
    ties = (highest == -lowest) & (highest != 0)
    if ties.any():  # rare: the slow exact rule, for these rows only
        rows = np.flatnonzero(ties[:, 0])
        first = np.abs(values[rows]).argmax(axis=1)
        peak[rows, 0] = values[rows, first]
    return peak


def _codes(values: Float32, inverse: Float32, shift: float, top: int) -> Bytes:
    """trunc(values * inverse + shift), at most `top`."""
    scaled = values * inverse
    scaled += np.float32(shift)
    codes = scaled.astype(np.uint8)
    return np.minimum(codes, np.uint8(top), out=codes)


def _pack_nibbles(codes: Bytes) -> Bytes:
    half = codes.shape[1] // 2
    return (codes[:, :half] & np.uint8(0x0F)) | (codes[:, half:] << np.uint8(4))


def _fifth_bits(codes: Bytes) -> Bytes:
    return np.packbits(codes >> np.uint8(4), axis=1, bitorder="little")


def _halves(scale: Float32) -> Bytes:
    with np.errstate(over="ignore"):
        half = scale.astype("<f2")
    if not np.isfinite(half).all():
        raise ModelError("a weight is too large, infinite or not a number, so it cannot be quantised")
    return half.view(np.uint8)


def _to_q8_0(values: Float32) -> Bytes:
    scale = np.abs(values).max(axis=1, keepdims=True)
    scale /= np.float32(127)
    scaled = values * _inverse(scale)
    scaled += np.copysign(ALMOST_HALF, values)
    return np.concatenate([_halves(scale), scaled.astype(np.int8).view(np.uint8)], axis=1)


def _to_q4_0(values: Float32) -> Bytes:
    scale = _signed_peak(values) / np.float32(-8)
    codes = _codes(values, _inverse(scale), 8.5, 15)
    return np.concatenate([_halves(scale), _pack_nibbles(codes)], axis=1)


def _to_q5_0(values: Float32) -> Bytes:
    scale = _signed_peak(values) / np.float32(-16)
    codes = _codes(values, _inverse(scale), 16.5, 31)
    return np.concatenate([_halves(scale), _fifth_bits(codes), _pack_nibbles(codes)], axis=1)


def _affine(values: Float32, top: int) -> tuple[Bytes, Bytes]:
    """Scale and floor (4 bytes) and codes 0..top of a type that stores both."""
    floor = values.min(axis=1, keepdims=True)
    scale = (values.max(axis=1, keepdims=True) - floor) / np.float32(top)
    codes = _codes(values - floor, _inverse(scale), 0.5, top)
    return np.concatenate([_halves(scale), _halves(floor)], axis=1), codes


def _to_q4_1(values: Float32) -> Bytes:
    head, codes = _affine(values, 15)
    return np.concatenate([head, _pack_nibbles(codes)], axis=1)


def _to_q5_1(values: Float32) -> Bytes:
    head, codes = _affine(values, 31)
    return np.concatenate([head, _fifth_bits(codes), _pack_nibbles(codes)], axis=1)


_E2M1_BETWEEN = np.array([0.5, 1.5, 2.5, 3.5, 5, 7, 10], np.float32)  # a value halfway takes the smaller code


def _to_mxfp4(values: Float32) -> Bytes:
    peak = np.abs(values).max(axis=1, keepdims=True)
    if not np.isfinite(peak).all():
        raise ModelError("a weight is infinite or not a number, so it cannot be quantised")
    _, exponent = np.frexp(peak)  # 2**(exponent - 1) <= peak
    code = np.where(peak > 0, np.clip(exponent - 3 + 127, 0, 254), 0).astype(np.uint8)
    codes = np.searchsorted(_E2M1_BETWEEN, np.abs(values) / half_power(code)).astype(np.uint8)
    codes |= ((values < 0) & (codes > 0)).astype(np.uint8) << np.uint8(3)
    return np.concatenate([code, _pack_nibbles(codes)], axis=1)


def _to_f16(values: Float32) -> Bytes:
    with np.errstate(over="ignore"):
        return values.astype("<f2").view(np.uint8)


def _to_bf16(values: Float32) -> Bytes:
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    quiet = bits >> np.uint32(16) | np.uint32(64)  # NaN stays NaN
    return np.where(np.isnan(values), quiet, rounded).astype("<u2").view(np.uint8)


_WRITERS: dict[str, Callable[[Float32], Bytes]] = {
    "F32": lambda values: values.astype("<f4").view(np.uint8),
    "F16": _to_f16,
    "BF16": _to_bf16,
    "Q8_0": _to_q8_0,
    "Q4_0": _to_q4_0,
    "Q4_1": _to_q4_1,
    "Q5_0": _to_q5_0,
    "Q5_1": _to_q5_1,
    "MXFP4": _to_mxfp4,
}


def can_quantize(type_name: str) -> bool:
    """Whether `quantize` writes that type."""
    return type_name in _WRITERS


def quantize(x: Float32, type_name: str) -> Bytes:
    """Rows in a block type: float32 [rows, cols] -> uint8 [rows, row_bytes], rounded as ggml's reference code does.

    ModelError for a type that cannot be written (`Q8_0`, `Q4_0`, `Q4_1`, `Q5_0`, `Q5_1`, `MXFP4`, `F16`, `BF16`, `F32`
    can), columns that are not whole blocks, or values that the type cannot hold.
    """
    kind = block_type(type_name)
    writer = _WRITERS.get(kind.name)
    if writer is None:
        raise ModelError(f"cannot quantise to {kind.name}; choose one of {', '.join(sorted(_WRITERS))}")
    rows, cols = x.shape
    if cols % kind.block:
        raise ModelError(f"cannot quantise rows of {cols} elements to {kind.name}: its blocks hold {kind.block}")
    values = np.ascontiguousarray(x, np.float32).reshape(-1, kind.block)
    out = np.empty((len(values), kind.nbytes), np.uint8)
    step = _CHUNK // kind.block
    with np.errstate(invalid="ignore"):  # NaN and infinity show in the scale, and are refused there
        for start in range(0, len(values), step):
            out[start : start + step] = writer(values[start : start + step])
    return out.reshape(rows, cols // kind.block * kind.nbytes)


def as_q8_0(data: Bytes, type_name: str) -> Bytes:
    """Rows of Q4_0 or Q5_0, uint8 [rows, row_bytes], as Q8_0, exactly: all three are a scale times small integers."""
    blocks = data.reshape(-1, block_type(type_name).nbytes).copy()
    scales = blocks[:, :2].copy()
    blocks[:, :2] = np.array([1], "<f2").view(np.uint8)
    codes = dequantize(blocks, type_name).astype(np.int8).view(np.uint8)
    return np.concatenate([scales, codes], axis=1).reshape(len(data), -1)


SHORT_BLOCKS = {**dict.fromkeys(("Q1_0", "Q2_0", "TQ1_0", "TQ2_0"), "Q4_0"), "IQ4_XS": "IQ4_NL"}
"""Types of longer blocks whose codes blocks of 32 of another type hold."""


def as_short_blocks(data: Bytes, type_name: str) -> Bytes:
    """Rows of a type of `SHORT_BLOCKS`, uint8 [rows, row_bytes], with the same codes in blocks of 32: exactly, but for
    IQ4_XS, whose scales are rounded to float16. ModelError for a scale that is none."""
    blocks = data.reshape(-1, block_type(type_name).nbytes).copy()
    if type_name == "IQ4_XS":
        codes = blocks[:, 8:].reshape(-1, 16).copy()
        blocks[:, 8:] = 0x88  # entries of 1
        scales = _halves(dequantize(blocks, type_name).reshape(-1, 32)[:, :1])
        return np.concatenate([scales, codes], axis=1).reshape(len(data), -1)
    (at,) = WEIGHT_TYPES[type_name].halves
    halves = np.repeat(blocks[:, at : at + 2].copy().view("<f2"), block_type(type_name).block // 32, axis=1)
    blocks[:, at : at + 2] = np.array([1], "<f2").view(np.uint8)
    numbers = dequantize(blocks, type_name).astype(np.int8)
    return pack_numbers(numbers, halves, SHORT_BLOCKS[type_name]).reshape(len(data), -1)


_E2M1_CODES = np.array([1, 2, 3, 4, 6, 8, 12], np.float64)


@functools.cache
def _shared_steps() -> Float32:
    """The step of a Q8_0 block by the bytes of the two NVFP4 scales under it, [128, 128]: a fraction of one of them, as
    a whole number of which its half of the block is exact, and the other half nearest to exact."""
    scales = half_ue4m3(np.arange(128, dtype=np.uint8)).astype(np.float64)
    pairs = np.stack(np.broadcast_arrays(scales[:, None], scales[None, :]))
    least = pairs.max(axis=0) * 12 / 127
    best = least.copy()
    errors = np.full(best.shape, np.inf)
    with np.errstate(divide="ignore", invalid="ignore"):
        for scale, part in itertools.product(pairs, range(1, 11)):
            step = np.where(scale / part >= least, scale / part, least)
            units = pairs[..., None] * _E2M1_CODES / step[None, ..., None]
            error = (((units - np.rint(units)) * step[None, ..., None]) ** 2).sum(axis=(0, 3))
            best, errors = np.where(error < errors, step, best), np.fmin(error, errors)
    steps: Float32 = best.astype(np.float32)
    return steps


def nvfp4_as_q8_0(data: Bytes, scales: Float32 | None = None) -> Bytes:
    """Rows of NVFP4, uint8 [rows, row_bytes], times the factors of each, [rows, 1], as Q8_0, rounded less than by
    `quantize`, which does not know that the values are few."""
    blocks = data.reshape(-1, block_type("NVFP4").nbytes)
    pairs = (blocks[:, :4] & np.uint8(0x7F)).reshape(-1, 2)
    steps = _shared_steps()[pairs[:, :1], pairs[:, 1:]]
    values = dequantize(data, "NVFP4").reshape(-1, 32)
    if scales is not None:
        scale_of = np.repeat(scales, len(values) // len(scales), axis=0)
        steps, values = steps * np.abs(scale_of), values * scale_of
    halves = _halves(steps)
    codes = np.rint(values * _inverse(_half(halves, 0))).clip(-127, 127).astype(np.int8).view(np.uint8)
    return np.concatenate([halves, codes], axis=1).reshape(len(data), -1)


_CODES_OFFSET = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 0}


def pack_numbers(numbers: NDArray[np.int8], scales: NDArray[np.float16], type_name: str) -> Bytes:
    """Rows of Q4_0, Q5_0 or Q8_0 of whole numbers in their range, [rows, cols], each of which counts the scale of its
    block, [rows, blocks]."""
    codes = (numbers + np.int8(_CODES_OFFSET[type_name])).view(np.uint8).reshape(-1, 32)
    parts = [np.ascontiguousarray(scales, "<f2").reshape(-1, 1).view(np.uint8)]
    if type_name == "Q5_0":
        parts.append(_fifth_bits(codes))
    parts.append(codes if type_name == "Q8_0" else _pack_nibbles(codes))
    return np.concatenate(parts, axis=1).reshape(len(numbers), -1)
