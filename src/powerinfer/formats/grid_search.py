"""Quantisation to the IQ types whose blocks refer to vectors of a grid: of each vector of weights the nearest one, with
several scales for each part of a block.

Of an entry g and a scale s the error is a constant and s (s w.g^2 - 2 w.|x|.g): products with all entries are made
once, whatever the scales. Signs are stored beside. Where only seven of eight are, their number is even: where it is
not, the sign changes that costs least. The grid of IQ1 has signs itself, and moves up or down by an eighth of its step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from powerinfer.errors import ModelError
from powerinfer.formats.iq_blocks import MOVED_BY
from powerinfer.formats.iq_grids import grid
from powerinfer.formats.quant import Bytes, Float32

Indices = NDArray[np.uint16]

_BLOCKS = 8  # at once: the products stay in the L2 cache
_ROUNDS = 2  # of fitting a block's scale to the entries that the scale before gave
_REACH = np.linspace(0.6, 1.5, 13, dtype=np.float32)  # of the largest entry, by the part's largest weight
_AROUND = (0.92, 1.0, 1.09)  # of the scale that would be best if all vectors of the levels were in the grid


@dataclass(frozen=True)
class GridType:
    """A type. part: elements with a scale, unit * (1 + 2 * code) times the block's; even: seven of eight signs are
    stored; pack: (scales [n, 2] bytes, codes of the parts' scales, entries, signs [n, 32]) -> blocks. top: the largest
    code; moved: vectors that the grid moves for together, up or, 2048 entries on, down; 0: it stays."""

    name: str
    part: int
    unit: float
    even: bool
    pack: Callable[[Bytes, Bytes, Indices, Bytes], Bytes]
    top: int = 15
    moved: int = 0


def to_grid(values: Float32, weights: Float32 | None, kind: GridType) -> Bytes:
    """Blocks of values [n, 256]; weights: of the errors."""
    out = []
    for start in range(0, len(values), _BLOCKS):
        part = slice(start, start + _BLOCKS)
        out.append(_to_grid(values[part], None if weights is None else weights[part], kind))
    return np.concatenate(out)


def _to_grid(values: Float32, weights: Float32 | None, kind: GridType) -> Bytes:
    blocks, entries = len(values), grid("IQ1" if kind.moved else kind.name)
    magnitudes, signs = (values, np.empty(0, np.uint8)) if kind.moved else _signs(values, weights, kind.even)
    parts = magnitudes.reshape(-1, kind.part)
    w = np.ones_like(parts) if weights is None else weights.reshape(-1, kind.part)
    search: _Search = _MovedSearch(parts, w, entries, kind.moved) if kind.moved else _Search(parts, w, entries)
    levels = np.unique(np.abs(entries))
    scales = search.best_scales(_free_scales(np.abs(parts) if kind.moved else parts, w, levels)).reshape(blocks, -1)
    peaks = scales.max(axis=1)
    scale = _half(peaks / np.float32(kind.unit * (1 + 2 * kind.top)))
    best = _BestBlocks(blocks, scales.shape[1], values.shape[1] // entries.shape[1])
    for _ in range(1 + _ROUNDS):
        units = scale * np.float32(kind.unit)
        inverse = np.divide(1, units, out=np.zeros_like(units), where=units > 0)
        codes = np.clip(np.rint((scales * inverse[:, None] - 1) / 2), 0, kind.top).astype(np.float32)
        factors = np.float32(kind.unit) * (1 + 2 * codes)
        picked = search.picked((factors * scale[:, None]).reshape(-1))
        products, squares = (sums.reshape(blocks, -1) for sums in search.sums(picked))
        errors = (squares * (factors * scale[:, None]) ** 2 - 2 * factors * scale[:, None] * products).sum(axis=1)
        best.keep(errors, scale, codes, picked.reshape(blocks, -1))
        span = (factors**2 * squares).sum(axis=1)
        fitted = np.divide((factors * products).sum(axis=1), span, out=np.zeros_like(span), where=span > 0)
        scale = _half(np.maximum(fitted, 0))
    stored = best.scales.astype("<f2").reshape(-1, 1).view(np.uint8)
    return kind.pack(stored, best.codes.astype(np.uint8), best.entries, signs)


def _half(numbers: Float32) -> Float32:
    halves: Float32 = numbers.astype(np.float16).astype(np.float32)
    if not np.isfinite(halves).all():
        raise ModelError("a weight is too large to be quantised: its scale does not fit float16")
    return halves


def _signs(values: Float32, weights: Float32 | None, even: bool) -> tuple[Float32, Bytes]:
    """(magnitudes, below 0 where the sign that is stored is the wrong one; signs, a byte for 8 elements)."""
    runs = values.reshape(-1, 8)
    negative, magnitudes = runs < 0, np.abs(runs)
    if even:
        odd = np.flatnonzero(negative.sum(axis=1) % 2)
        costs = magnitudes[odd] ** 2 * (1 if weights is None else weights.reshape(-1, 8)[odd])
        least = costs.argmin(axis=1)
        negative[odd, least] ^= True
        magnitudes[odd, least] *= -1
    bits = np.packbits(negative, axis=1, bitorder="little")
    signed: Float32 = magnitudes.reshape(values.shape)
    return signed, bits.reshape(len(values), -1)


def _free_scales(parts: Float32, weights: Float32, levels: Float32) -> Float32:
    """The scale of each part with the least error, of those tried, if each element could have any of the levels."""
    peaks = parts.max(axis=1)
    middles = (levels[1:] + levels[:-1]) / 2
    scales: Float32 = np.zeros_like(peaks)
    best = np.zeros_like(peaks)
    weighted = parts * weights
    for reach in _REACH:
        inverse = np.divide(levels[-1] * reach, peaks, out=np.zeros_like(peaks), where=peaks > 0)
        nearest = levels[np.searchsorted(middles, parts * inverse[:, None])]
        products = np.einsum("ij,ij->i", weighted, nearest)
        squares = np.einsum("ij,ij,ij->i", weights, nearest, nearest)
        scale = np.divide(products, squares, out=np.zeros_like(peaks), where=squares > 0)
        better = products * scale > best
        scales[better], best[better] = scale[better], (products * scale)[better]
    return scales


class _Search:
    """Entries of a grid for parts [n, elements], whose products with all of them are made once."""

    def __init__(self, parts: Float32, weights: Float32, entries: Float32) -> None:
        width = entries.shape[1]
        self._vectors = parts.shape[1] // width
        columns = np.ascontiguousarray(entries.T)  # not by `@`, whose library would start threads of its own
        self._products = np.einsum("ik,kj->ij", (parts * weights).reshape(-1, width), 2 * columns)
        self._squares = np.einsum("ik,kj->ij", weights.reshape(-1, width), columns * columns)
        self._costs: Float32 = np.empty_like(self._squares)

    def picked(self, scales: Float32) -> Indices:
        """The nearest entry of each vector with the scale of its part."""
        nearest: Indices = self._errors(scales).argmin(axis=1).astype(np.uint16)
        return nearest

    def _errors(self, scales: Float32) -> Float32:
        """Errors of every entry for each vector, but for what all of them share; until the next call."""
        np.multiply(self._squares, np.repeat(scales, self._vectors)[:, None], out=self._costs)
        np.subtract(self._costs, self._products, out=self._costs)
        return self._costs

    def sums(self, picked: Indices) -> tuple[Float32, Float32]:
        """(weighted products of elements and entries, weighted squares of these) of each part."""
        rows = np.arange(len(picked))
        products, squares = self._products[rows, picked] / 2, self._squares[rows, picked]
        return products.reshape(-1, self._vectors).sum(axis=1), squares.reshape(-1, self._vectors).sum(axis=1)

    def best_scales(self, near: Float32) -> Float32:
        """The scale of each part with the least error, of some near these."""
        scales, best = near.copy(), np.full_like(near, -np.inf)
        for factor in _AROUND:
            products, squares = self.sums(self.picked(near * np.float32(factor)))
            scale = np.divide(products, squares, out=np.zeros_like(near), where=squares > 0)
            gain = products * scale
            better = (gain > best) & (scale >= 0)
            scales[better], best[better] = scale[better], gain[better]
        return scales


class _MovedSearch(_Search):
    """The same of a grid that moves up or down, for `together` vectors at a time: entries and, behind all of them, the
    same ones moved down."""

    def __init__(self, parts: Float32, weights: Float32, entries: Float32, together: int) -> None:
        super().__init__(parts, weights, np.concatenate([entries + MOVED_BY, entries - MOVED_BY]))
        self._together = together

    def picked(self, scales: Float32) -> Indices:
        errors = self._errors(scales)
        ways = errors.reshape(len(errors), 2, -1)
        nearest = ways.argmin(axis=2)
        least = np.take_along_axis(ways, nearest[..., None], axis=2)
        down = least.reshape(-1, self._together, 2).sum(axis=1).argmin(axis=1).repeat(self._together)
        entries: Indices = (nearest[np.arange(len(down)), down] + down * ways.shape[2]).astype(np.uint16)
        return entries


class _BestBlocks:
    """The best of each block so far."""

    def __init__(self, blocks: int, parts: int, vectors: int) -> None:
        self._errors = np.full(blocks, np.inf, np.float32)
        self.scales = np.zeros(blocks, np.float32)
        self.codes = np.zeros((blocks, parts), np.float32)
        self.entries = np.zeros((blocks, vectors), np.uint16)

    def keep(self, errors: Float32, scales: Float32, codes: Float32, entries: Indices) -> None:
        """Replace the blocks whose error is less."""
        better = errors < self._errors
        self._errors[better], self.scales[better] = errors[better], scales[better]
        self.codes[better], self.entries[better] = codes[better], entries[better]


# ---------------------------------------------------------------------------------------------------------------------
# Blocks as files have them


def _pairs(codes: Bytes) -> Bytes:
    """4-bit fields in order, the low one of a byte first."""
    packed: Bytes = codes[:, ::2] | codes[:, 1::2] << np.uint8(4)
    return packed


def _words(signs: Bytes, codes: Bytes) -> Bytes:
    """Seven signs of 4 runs and the code of a scale, uint32 [n, 8] as bytes."""
    seven = (signs & np.uint8(127)).astype("<u4").reshape(len(signs), 8, 4)
    words = (seven << np.array([0, 7, 14, 21], np.uint32)).sum(axis=2, dtype=np.uint32) | codes.astype("<u4") << 28
    raw: Bytes = words.astype("<u4").view(np.uint8)
    return raw.reshape(len(signs), 8, 4)


def _pack_iq2_xxs(scales: Bytes, codes: Bytes, entries: Indices, signs: Bytes) -> Bytes:
    low = entries.astype(np.uint8).reshape(len(scales), 8, 4)
    parts = np.concatenate([low, _words(signs, codes)], axis=2)
    return np.concatenate([scales, parts.reshape(len(scales), -1)], axis=1)


def _pack_iq2_xs(scales: Bytes, codes: Bytes, entries: Indices, signs: Bytes) -> Bytes:
    words = (entries | (signs & np.uint8(127)).astype(np.uint16) << np.uint16(9)).astype("<u2")
    return np.concatenate([scales, words.view(np.uint8), _pairs(codes)], axis=1)


def _pack_iq2_s(scales: Bytes, codes: Bytes, entries: Indices, signs: Bytes) -> Bytes:
    high = (entries >> np.uint16(8)).astype(np.uint8).reshape(len(scales), -1, 4) << np.array([0, 2, 4, 6], np.uint8)
    packed = np.bitwise_or.reduce(high, axis=2)
    return np.concatenate([scales, entries.astype(np.uint8), signs, packed, _pairs(codes)], axis=1)


def _pack_iq3_xxs(scales: Bytes, codes: Bytes, entries: Indices, signs: Bytes) -> Bytes:
    return np.concatenate([scales, entries.astype(np.uint8), _words(signs, codes).reshape(len(scales), -1)], axis=1)


def _pack_iq3_s(scales: Bytes, codes: Bytes, entries: Indices, signs: Bytes) -> Bytes:
    high = np.packbits((entries >> np.uint16(8)).astype(np.uint8), axis=1, bitorder="little")
    return np.concatenate([scales, entries.astype(np.uint8), high, signs, _pairs(codes)], axis=1)


def _pack_iq1_s(scales: Bytes, codes: Bytes, entries: Indices, _: Bytes) -> Bytes:
    runs = entries.reshape(len(scales), 8, 4)
    high = ((runs >> np.uint16(8) & np.uint16(7)) << np.array([0, 3, 6, 9], np.uint16)).sum(axis=2, dtype=np.uint16)
    high |= codes.astype(np.uint16) << np.uint16(12) | runs[:, :, 0] >> np.uint16(11) << np.uint16(15)
    return np.concatenate([scales, entries.astype(np.uint8), high.astype("<u2").view(np.uint8)], axis=1)


def _pack_iq1_m(scales: Bytes, codes: Bytes, entries: Indices, _: Bytes) -> Bytes:
    fours = codes.astype(np.uint16).reshape(len(scales), 4, 4) << np.array([0, 3, 6, 9], np.uint16)
    of_block = scales.copy().view("<u2") >> np.array([0, 4, 8, 12], np.uint16) & np.uint16(15)
    words = (fours.sum(axis=2, dtype=np.uint16) | of_block << np.uint16(12)).astype("<u2")
    high = _pairs((entries >> np.uint16(8)).astype(np.uint8))
    return np.concatenate([entries.astype(np.uint8), high, words.view(np.uint8)], axis=1)


GRID_TYPES = {
    "IQ3_S": GridType("IQ3_S", 32, 1, False, _pack_iq3_s),
    "IQ3_XXS": GridType("IQ3_XXS", 32, 1 / 4, True, _pack_iq3_xxs),
    "IQ2_S": GridType("IQ2_S", 16, 1 / 8, False, _pack_iq2_s),
    "IQ2_XS": GridType("IQ2_XS", 16, 1 / 8, True, _pack_iq2_xs),
    "IQ2_XXS": GridType("IQ2_XXS", 32, 1 / 8, True, _pack_iq2_xxs),
    "IQ1_S": GridType("IQ1_S", 32, 1, False, _pack_iq1_s, top=7, moved=4),
    "IQ1_M": GridType("IQ1_M", 16, 1, False, _pack_iq1_m, top=7, moved=1),
}
