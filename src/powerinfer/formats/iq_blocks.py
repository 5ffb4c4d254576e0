"""The IQ types of GGUF files whose blocks refer to grids: numpy code that reads them, as quant.py reads the others.

Each function takes blocks, uint8 [n, nbytes], and gives their values, float32 [n, 256], in runs of 8: an entry of a
grid (IQ3: two), its signs, and a scale for 8, 16 or 32 elements. Results are bit-identical to ggml's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from powerinfer.formats.iq_grids import grid

Bytes = NDArray[np.uint8]
Float32 = NDArray[np.float32]

MOVED_BY = np.float32(0.125)
"""The distance by which IQ1 moves its grid up or down."""


def _half(blocks: Bytes, start: int = 0) -> Float32:
    """The float16 at byte `start` of every block, float32 [n, 1]."""
    return blocks[:, start : start + 2].view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """4-bit fields in order, the low one of a byte first, uint8 [n, 2 * bytes]."""
    return np.stack([packed & 0x0F, packed >> 4], axis=-1).reshape(len(packed), -1)


def _signs(bits: Bytes) -> Float32:
    """-1 where a bit is set, else 1: uint8 [n, bytes] -> float32 [n, bytes, 8]."""
    signs = np.unpackbits(bits[..., None], axis=-1, bitorder="little")
    return np.where(signs, np.float32(-1), np.float32(1))


def _even(seven: NDArray[Any]) -> Bytes:
    """Seven bits, and an eighth that makes the number of set ones even."""
    low = seven.astype(np.uint8) & np.uint8(127)
    parity = low ^ low >> np.uint8(4)
    parity ^= parity >> np.uint8(2)
    parity ^= parity >> np.uint8(1)
    return low | (parity & np.uint8(1)) << np.uint8(7)


def _scaled(scale: Float32, values: Float32, signs: Float32) -> Float32:
    """scale * values * signs, [n, 32, 8] each; a scale holds for 1, 2 or 4 runs."""
    wide = np.repeat(scale, 32 // scale.shape[1], axis=1)[:, :, None]
    return (wide * values.reshape(len(scale), 32, 8) * signs).reshape(-1, 256)


def _words(blocks: Bytes, start: int, stop: int) -> NDArray[np.uint32]:
    return np.ascontiguousarray(blocks[:, start:stop]).view("<u4").astype(np.uint32)


def _seven_bit_signs(words: NDArray[np.uint32]) -> Float32:
    """The signs of 4 runs and, in its highest bits, something else: uint32 [n, 8] -> float32 [n, 32, 8]."""
    indices = words[:, :, None] >> np.array([0, 7, 14, 21], np.uint32)
    return _signs(_even(indices & np.uint32(127)).reshape(len(words), -1))


def _iq2_xxs(blocks: Bytes) -> Float32:
    words = _words(blocks, 2, 66).reshape(-1, 8, 2)
    of_signs = np.ascontiguousarray(words[:, :, 1])
    scale = _half(blocks) * (np.float32(0.5) + (of_signs >> 28).astype(np.float32)) * np.float32(0.25)
    entries = np.ascontiguousarray(words[:, :, 0]).view(np.uint8)
    return _scaled(scale, grid("IQ2_XXS")[entries], _seven_bit_signs(of_signs))


def _iq2_xs(blocks: Bytes) -> Float32:
    entries = np.ascontiguousarray(blocks[:, 2:66]).view("<u2")
    scale = _half(blocks) * (np.float32(0.5) + _nibbles(blocks[:, 66:74])) * np.float32(0.25)
    return _scaled(scale, grid("IQ2_XS")[entries & np.uint16(511)], _signs(_even(entries >> 9)))


def _iq2_s(blocks: Bytes) -> Float32:
    high = (blocks[:, 66:74, None] >> np.array([0, 2, 4, 6], np.uint8) & np.uint8(3)).reshape(-1, 32)
    entries = blocks[:, 2:34] | high.astype(np.uint16) << np.uint16(8)
    scale = _half(blocks) * (np.float32(0.5) + _nibbles(blocks[:, 74:82])) * np.float32(0.25)
    return _scaled(scale, grid("IQ2_S")[entries], _signs(blocks[:, 34:66]))


def _iq3_xxs(blocks: Bytes) -> Float32:
    words = _words(blocks, 66, 98)
    scale = _half(blocks) * (np.float32(0.5) + (words >> 28).astype(np.float32)) * np.float32(0.5)
    return _scaled(scale, grid("IQ3_XXS")[blocks[:, 2:66]], _seven_bit_signs(words))


def _iq3_s(blocks: Bytes) -> Float32:
    high = np.unpackbits(blocks[:, 66:74], axis=1, bitorder="little").astype(np.uint16)
    entries = blocks[:, 2:66] | high << np.uint16(8)
    scale = _half(blocks) * (1 + 2 * _nibbles(blocks[:, 106:110]))
    return _scaled(scale, grid("IQ3_S")[entries], _signs(blocks[:, 74:106]))


def _iq1(scale: Float32, entries: NDArray[np.uint16], down: NDArray[np.bool_]) -> Float32:
    """scale: [n, 8] or [n, 16]; entries and down, whether the grid moves down: [n, 32]."""
    moved = grid("IQ1")[entries] + np.where(down, -MOVED_BY, MOVED_BY)[:, :, None]
    return (np.repeat(scale, 32 // scale.shape[1], axis=1)[:, :, None] * moved).reshape(-1, 256)


def _iq1_s(blocks: Bytes) -> Float32:
    high = np.ascontiguousarray(blocks[:, 34:50]).view("<u2").astype(np.uint16)
    top = (high[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & np.uint16(7)).reshape(-1, 32)
    scale = _half(blocks) * (2 * (high >> 12 & 7) + 1)
    return _iq1(scale, blocks[:, 2:34] | top << np.uint16(8), np.repeat(high & 0x8000 != 0, 4, axis=1))


def _iq1_m(blocks: Bytes) -> Float32:
    high = _nibbles(blocks[:, 32:48])
    packed = np.ascontiguousarray(blocks[:, 48:56]).view("<u2").astype(np.uint16)
    parts = packed >> np.array([12, 8, 4, 0], np.uint16) & np.array([0xF, 0xF0, 0xF00, 0xF000], np.uint16)
    block_scale = np.bitwise_or.reduce(parts, axis=1, keepdims=True).view(np.float16).astype(np.float32)
    scales = (packed[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & np.uint16(7)).reshape(-1, 16)
    entries = blocks[:, :32] | (high & np.uint8(7)).astype(np.uint16) << np.uint16(8)
    return _iq1(block_scale * (2 * scales + 1), entries, high & 8 != 0)


READERS: dict[str, Callable[[Bytes], Float32]] = {
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
}
