"""Quantisation with searched scales: of many scales, and minima, each block gets those with the least squared error.

Blocks stand side by side as columns of float32 [elements, blocks], so that every step works on long rows. Weights have
the same shape, or are None: all elements count the same. The numbers that a file stores are rounded first, and the
codes follow from what was rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from powerinfer.errors import ModelError
from powerinfer.formats.grid_search import GRID_TYPES, to_grid
from powerinfer.formats.quant import Bytes, Float32, block_type, half_power, half_ue4m3, quantize
from powerinfer.formats.weight_types import WEIGHT_TYPES

Weights = Float32 | None

_CHUNK = 1 << 17  # elements at once: the temporaries stay in the L2 cache
_ROUNDS = 2  # of fitting scales to the codes that the scales before gave
_OFFSETS = tuple(np.linspace(-0.9, 0.9, 13))
"""Places around the last code at which the largest element of a block is tried."""


@dataclass(frozen=True)
class Levels:
    """Numbers that codes stand for. entries: them, in order, or None: whole numbers from low to high."""

    low: int
    high: int
    entries: tuple[int, ...] | None = None

    def nearest(self, scaled: Float32) -> Float32:
        """The nearest number to each of these, which may be overwritten."""
        if self.entries is None:
            np.rint(scaled, out=scaled)
            return np.clip(scaled, self.low, self.high, out=scaled)
        half_steps = np.floor(np.clip(scaled, self.low, self.high - 0.5) * np.float32(2)).astype(np.int16)
        nearest: Float32 = _half_step_table(self.entries)[half_steps - 2 * self.low]
        return nearest

    def codes(self, numbers: Float32) -> Bytes:
        """The codes of such numbers, from 0."""
        if self.entries is None:
            return (numbers - np.float32(self.low)).astype(np.uint8)
        return np.searchsorted(np.array(self.entries, np.float32), numbers).astype(np.uint8)


def _half_step_table(entries: tuple[int, ...]) -> Float32:
    """The nearest entry to numbers from each half to the next, from the first entry to the last."""
    table = np.array(entries, np.float32)
    places = np.arange(2 * entries[0], 2 * entries[-1]) / 2 + 0.25
    nearest: Float32 = table[np.abs(places[:, None] - table).argmin(axis=1)]
    return nearest


def _dot(a: Float32, b: Float32) -> Float32:
    """Sums over the elements of each block."""
    sums: Float32 = np.einsum("ij,ij->j", a, b)
    return sums


def _divided(a: Float32, b: Float32) -> Float32:
    """a / b, and 0 where b is 0."""
    return np.divide(a, b, out=np.zeros_like(a), where=b != 0)


def _inverse(scales: Float32) -> Float32:
    return _divided(np.ones_like(scales), scales)


def _half(numbers: Float32) -> Float32:
    """Numbers as float16 holds them. ModelError if one is too large."""
    halves: Float32 = numbers.astype(np.float16).astype(np.float32)
    if not np.isfinite(halves).all():
        raise ModelError("a weight is too large to be quantised: its scale does not fit float16")
    return halves


def _bytes(numbers: Float32) -> Bytes:
    """Numbers that float16 holds, uint8 [n, 2]."""
    return numbers.astype("<f2").reshape(-1, 1).view(np.uint8)


def _weighted(numbers: Float32, weights: Weights) -> Float32:
    return numbers if weights is None else numbers * weights


def _peaks(x: Float32) -> Float32:
    """The element of largest magnitude of each block, with its sign."""
    highest, lowest = x.max(axis=0), x.min(axis=0)
    peaks: Float32 = np.where(highest > -lowest, highest, lowest)
    return peaks


# ---------------------------------------------------------------------------------------------------------------------
# A scale for each block: value = scale * number


def _search_scales(x: Float32, weights: Weights, levels: Levels) -> Float32:
    """The scale of each block with the least error, of those tried."""
    inverse_peaks = _inverse(_peaks(x))
    ends = [levels.low + offset for offset in _OFFSETS]
    if levels.high == 1:  # most elements are far from the largest
        ends += [-2.2, -2.6, -3.1, -3.7]
    if -levels.low != levels.high:
        ends += [levels.high + offset for offset in _OFFSETS[::3]]
    scales, best = np.zeros_like(inverse_peaks), np.zeros_like(inverse_peaks)
    weighted_x = _weighted(x, weights)
    for end in ends:
        numbers = levels.nearest(x * (np.float32(end) * inverse_peaks))
        product = _dot(weighted_x, numbers)
        scale = _divided(product, _dot(_weighted(numbers, weights), numbers))
        gain = product * scale  # the squares that the scale takes off the error
        better = gain > best
        np.copyto(scales, scale, where=better)
        np.copyto(best, gain, where=better)
    return scales


def _scaled_codes(values: Float32, weights: Weights, levels: Levels) -> tuple[Float32, Float32]:
    """(scales as float16 holds them, numbers [elements, blocks]). values, weights: [blocks, elements]."""
    x, w = _columns(values, values.shape[1], weights)
    scales, numbers = np.zeros(x.shape[1], np.float32), np.zeros_like(x)
    errors = np.full(x.shape[1], np.inf, np.float32)

    def attempt(tried: Float32) -> None:
        tried = _half(tried)
        rounded = levels.nearest(x * _inverse(tried))
        rest = x - rounded * tried
        error = _dot(_weighted(rest, w), rest)
        better = error < errors
        np.copyto(scales, tried, where=better)
        np.copyto(numbers, rounded, where=better)
        np.copyto(errors, error, where=better)

    attempt(_peaks(x) / np.float32(levels.low))
    attempt(_search_scales(x, w, levels))
    weighted = _weighted(numbers, w)
    attempt(_divided(_dot(weighted, x), _dot(weighted, numbers)))
    return scales, numbers


def _part_scales(
    values: Float32, weights: Weights, levels: Levels, size: int, lowest: int
) -> tuple[Float32, Float32, Bytes]:
    """(scales [blocks], whole numbers [blocks, parts] that they are multiplied with, codes [blocks, elements]).

    size: elements of a part; lowest: of the whole numbers, up to -lowest - 1.
    """
    blocks, parts = len(values), values.shape[1] // size
    x, w = _columns(values, size, weights)
    best = np.zeros(blocks, np.float32), np.zeros((blocks, parts), np.float32), np.zeros_like(x)
    errors = np.full(blocks, np.inf, np.float32)

    def attempt(fitted: Float32, scales: Float32) -> tuple[Float32, Float32]:
        """Keep what these give where it is better; the scales that suit its codes: of the parts, of the blocks."""
        factors = np.clip(np.rint(fitted * _inverse(scales)[:, None]), lowest, -lowest - 1)
        of_parts = (factors * scales[:, None]).reshape(-1)
        numbers = levels.nearest(x * _inverse(of_parts))
        rest = x - numbers * of_parts
        error = _dot(_weighted(rest, w), rest).reshape(blocks, parts).sum(axis=1)
        _keep_better(error, errors, best, (scales, factors, numbers), parts)
        weighted = _weighted(numbers, w)
        products, squares = (_dot(weighted, a).reshape(blocks, parts) for a in (x, numbers))
        new = _half(_divided((factors * products).sum(axis=1), (factors**2 * squares).sum(axis=1)))
        return np.where(squares > 0, _divided(products, squares), fitted), new

    for fitted in (_peaks(x) / np.float32(levels.low), _search_scales(x, w, levels)):
        fitted = fitted.reshape(blocks, parts)
        scales = _half(_peaks(fitted.T) / np.float32(lowest))
        for _ in range(1 + _ROUNDS):
            fitted, scales = attempt(fitted, scales)
    return best[0], best[1], levels.codes(best[2]).T.reshape(blocks, -1)


def _keep_better(
    error: Float32, errors: Float32, best: tuple[Float32, ...], tried: tuple[Float32, ...], parts: int
) -> None:
    """Replace in `best` the blocks whose error is less: arrays by block, but the last, [elements, parts of all]."""
    better = error < errors
    for to, numbers in zip(best[:-1], tried[:-1], strict=True):
        to[better] = numbers[better]
    np.copyto(best[-1], tried[-1], where=np.repeat(better, parts))
    errors[better] = error[better]


def _stored_scale_codes(
    values: Float32, weights: Weights, levels: Levels, size: int, tried: Callable[[Float32, Float32], list[Bytes]],
    scale_of: Callable[[Bytes], Float32],
) -> tuple[Bytes, Bytes]:
    """(codes of the scales [blocks, parts], codes [blocks, elements]) where a part's scale is of few that are above 0.

    tried: codes of scales to try, from the largest magnitudes and the best scales of the parts; scale_of: what a code
    stands for.
    """
    x, w = _columns(values, size, weights)
    best, numbers = np.zeros(x.shape[1], np.uint8), np.zeros_like(x)
    errors = np.full(x.shape[1], np.inf, np.float32)
    for codes in tried(np.abs(_peaks(x)), np.abs(_search_scales(x, w, levels))):
        scale = scale_of(codes[:, None])[:, 0]
        rounded = levels.nearest(x * _inverse(scale))
        rest = x - rounded * scale
        error = _dot(_weighted(rest, w), rest)
        better = error < errors
        for to, found in ((best, codes), (numbers, rounded), (errors, error)):
            np.copyto(to, found, where=better)
    blocks = len(values)
    return best.reshape(blocks, -1), _FP4_CODES[(numbers - np.float32(_FP4.low)).astype(np.uint8)].T.reshape(blocks, -1)


# ---------------------------------------------------------------------------------------------------------------------
# A scale and a minimum for each block: value = scale * code + minimum


@dataclass(frozen=True)
class _Sums:
    """Sums over the elements x of each block and their codes, from which both numbers are fitted."""

    codes: Float32
    squares: Float32
    products: Float32
    x: Float32
    weights: Float32

    @classmethod
    def from_codes(cls, x: Float32, codes: Float32, weights: Weights) -> _Sums:
        weighted = _weighted(codes, weights)
        total = np.full(x.shape[1], len(x), np.float32) if weights is None else weights.sum(axis=0)
        sum_x = _weighted(x, weights).sum(axis=0)
        return cls(weighted.sum(axis=0), _dot(weighted, codes), _dot(weighted, x), sum_x, total)

    def fit(self, highest: Float32 | None) -> tuple[Float32, Float32]:
        """(scale, minimum) with the least error. highest: of the minimum, None: any."""
        span = self.weights * self.squares - self.codes**2
        span = np.where(span > np.float32(1e-5) * self.weights * self.squares, span, 0)
        scale = _divided(self.weights * self.products - self.x * self.codes, span)
        minimum = _divided(self.squares * self.x - self.codes * self.products, span)
        equal = span == 0  # all codes of a block are the same
        scale = np.where(equal, _divided(self.products, self.squares), scale)
        if highest is not None:
            bound = _divided(self.products - highest * self.codes, self.squares)
            scale, minimum = np.where(minimum > highest, bound, scale), np.minimum(minimum, highest)
        return scale, minimum

    def gain(self, scale: Float32, minimum: Float32) -> Float32:
        """Squares that they take off the error."""
        twice = 2 * (scale * self.products + minimum * self.x - scale * minimum * self.codes)
        gain: Float32 = twice - scale**2 * self.squares - minimum**2 * self.weights
        return gain


def _search_minima(x: Float32, weights: Weights, top: int, up_to_zero: bool) -> tuple[Float32, Float32]:
    """(scale, minimum) of each block with the least error, of those tried. up_to_zero: no minimum is above 0."""
    lowest = x.min(axis=0)
    if up_to_zero:
        lowest = np.minimum(lowest, 0)
    above = x - lowest
    inverse_spans = _inverse(above.max(axis=0))
    best = np.full_like(lowest, -np.inf)
    scales, minima = np.zeros_like(lowest), np.zeros_like(lowest)
    for offset in _OFFSETS:
        codes = np.rint(above * (np.float32(top + offset) * inverse_spans))
        sums = _Sums.from_codes(above, np.clip(codes, 0, top, out=codes), weights)
        scale, minimum = sums.fit(-lowest if up_to_zero else None)
        gain = sums.gain(scale, minimum)
        better = (gain > best) & (scale >= 0)
        for to, numbers in ((best, gain), (scales, scale), (minima, minimum)):
            np.copyto(to, numbers, where=better)
    return scales, minima + lowest


def _minimum_codes(values: Float32, weights: Weights, top: int) -> tuple[Float32, Float32, Bytes]:
    """(scales, minima as float16 holds them, codes [blocks, elements])."""
    x, w = _columns(values, values.shape[1], weights)
    scales, minima, codes = np.zeros(x.shape[1], np.float32), np.zeros(x.shape[1], np.float32), np.zeros_like(x)
    errors = np.full(x.shape[1], np.inf, np.float32)

    def attempt(scale: Float32, minimum: Float32) -> None:
        scale, minimum = _half(scale), _half(minimum)
        rounded = np.clip(np.rint((x - minimum) * _inverse(scale)), 0, top)
        rest = x - (rounded * scale + minimum)
        error = _dot(_weighted(rest, w), rest)
        better = error < errors
        for to, numbers in ((scales, scale), (minima, minimum), (codes, rounded), (errors, error)):
            np.copyto(to, numbers, where=better)

    lowest = x.min(axis=0)
    attempt((x.max(axis=0) - lowest) / np.float32(top), lowest)
    attempt(*_search_minima(x, w, top, up_to_zero=False))
    return scales, minima, codes.T.astype(np.uint8)


def _part_minima(
    values: Float32, weights: Weights, top: int, size: int, highest: int
) -> tuple[Float32, Float32, Bytes, Bytes, Bytes]:
    """(scales, scales of the minima, [blocks]; whole numbers [blocks, parts] that each is multiplied with; codes).

    size: elements of a part; highest: of the whole numbers. The minima are subtracted.
    """
    blocks, parts = len(values), values.shape[1] // size
    x, w = _columns(values, size, weights)
    arrays = [np.zeros((blocks, parts), np.float32) for _ in range(2)]
    best = np.zeros(blocks, np.float32), np.zeros(blocks, np.float32), *arrays, np.zeros_like(x)
    errors = np.full(blocks, np.inf, np.float32)

    def attempt(scale: Float32, minimum: Float32, d: Float32, m: Float32) -> tuple[Float32, ...]:
        """Keep what these give where it is better; what suits its codes, in the same order."""
        factors = np.clip(np.rint(scale * _inverse(d)[:, None]), 0, highest)
        floors = np.clip(np.rint(-minimum * _inverse(m)[:, None]), 0, highest)
        of_parts, below = (factors * d[:, None]).reshape(-1), (floors * m[:, None]).reshape(-1)
        codes = np.clip(np.rint((x + below) * _inverse(of_parts)), 0, top)
        rest = x - (codes * of_parts - below)
        error = _dot(_weighted(rest, w), rest).reshape(blocks, parts).sum(axis=1)
        _keep_better(error, errors, best, (d, m, factors, floors, codes), parts)
        sums = _Sums.from_codes(x, codes, w)
        new_scale, new_minimum = (fit.reshape(blocks, parts) for fit in sums.fit(np.zeros_like(below)))
        fitted = new_scale > 0
        scale, minimum = np.where(fitted, new_scale, scale), np.where(fitted, new_minimum, minimum)
        return scale, minimum, *_fit_both(sums, factors, floors, d, m)

    lowest = np.minimum(x.min(axis=0), 0)
    plain = (x.max(axis=0) - lowest) / np.float32(top), lowest
    for start in (plain, _search_minima(x, w, top, up_to_zero=True)):
        scale, minimum = (numbers.reshape(blocks, parts) for numbers in start)
        d, m = _half(scale.max(axis=1) / np.float32(highest)), _half(-minimum.min(axis=1) / np.float32(highest))
        for _ in range(1 + _ROUNDS):
            scale, minimum, d, m = attempt(scale, minimum, d, m)
    return best[0], best[1], best[2].astype(np.uint8), best[3].astype(np.uint8), _rows(best[4], blocks)


def _fit_both(
    sums: _Sums, factors: Float32, floors: Float32, d: Float32, m: Float32
) -> tuple[Float32, Float32]:
    """The scales of blocks that suit their parts' whole numbers and codes best; d, m: those where none do."""

    def total(numbers: Float32, of_parts: Float32) -> Float32:
        summed: Float32 = (numbers * of_parts.reshape(numbers.shape)).sum(axis=1)
        return summed

    aa, bb = total(factors**2, sums.squares), total(floors**2, sums.weights)
    ab, ax, bx = total(factors * floors, sums.codes), total(factors, sums.products), total(floors, sums.x)
    span = aa * bb - ab * ab
    new_d, new_m = _divided(ax * bb - bx * ab, span), _divided(ab * ax - aa * bx, span)
    fitted = (new_d > 0) & (new_m >= 0) & (span > 0)
    only_d = _divided(ax, aa)
    alone = (bb == 0) & (only_d > 0)
    return _half(np.where(fitted, new_d, np.where(alone, only_d, d))), _half(np.where(fitted, new_m, m))


# ---------------------------------------------------------------------------------------------------------------------
# Blocks as files have them: uint8 [n, nbytes] of values [n, block]


def _columns(values: Float32, size: int, weights: Weights) -> tuple[Float32, Weights]:
    """Elements of parts of that size as columns, [size, parts of all blocks]; the weights, too."""
    x = np.ascontiguousarray(values.reshape(-1, size).T)
    return x, None if weights is None else np.ascontiguousarray(weights.reshape(-1, size).T)


def _rows(codes: Float32, blocks: int) -> Bytes:
    """Codes of columns, by block."""
    return codes.T.astype(np.uint8).reshape(blocks, -1)


def _packed(codes: Bytes, span: int, shifts: tuple[int, ...]) -> Bytes:
    """Bit fields: of each run of span * len(shifts) codes, the first `span` at the first shift of bytes, and so on."""
    runs = codes.reshape(len(codes), -1, len(shifts), span) << np.array(shifts, np.uint8)[:, None]
    packed: Bytes = np.bitwise_or.reduce(runs, axis=2).reshape(len(codes), -1)
    return packed


_EIGHT = tuple(range(8))


def _halves_of(codes: Bytes) -> Bytes:
    return _packed(codes & np.uint8(15), codes.shape[1] // 2, (0, 4))


def _fifth_bits(codes: Bytes) -> Bytes:
    return np.packbits(codes >> np.uint8(4), axis=1, bitorder="little")


def _plain_writer(levels: Levels) -> Callable[[Float32, Weights], Bytes]:
    """Blocks of Q4_0, Q5_0 and IQ4_NL."""

    def write(values: Float32, weights: Weights) -> Bytes:
        scales, numbers = _scaled_codes(values, weights, levels)
        codes = np.ascontiguousarray(levels.codes(numbers).T)
        high = [_fifth_bits(codes)] if levels.high > 7 and levels.entries is None else []
        return np.concatenate([_bytes(scales), *high, _halves_of(codes)], axis=1)

    return write


def _to_q8_0(values: Float32, weights: Weights) -> Bytes:
    scales, numbers = _scaled_codes(values, weights, Levels(-127, 127))
    return np.concatenate([_bytes(scales), np.ascontiguousarray(numbers.T).astype(np.int8).view(np.uint8)], axis=1)


def _affine_writer(top: int) -> Callable[[Float32, Weights], Bytes]:
    """Blocks of Q4_1 and Q5_1."""

    def write(values: Float32, weights: Weights) -> Bytes:
        scales, minima, codes = _minimum_codes(values, weights, top)
        high = [_fifth_bits(codes)] if top > 15 else []
        return np.concatenate([_bytes(scales), _bytes(minima), *high, _halves_of(codes)], axis=1)

    return write


def _k_factors(factors: Bytes, floors: Bytes) -> Bytes:
    """8 scales and 8 minima of 6 bits in 12 bytes."""
    top = np.uint8(4)
    low = [part[:, :4] | (part[:, 4:] >> top) << np.uint8(6) for part in (factors, floors)]
    return np.concatenate([*low, (factors[:, 4:] & np.uint8(15)) | (floors[:, 4:] & np.uint8(15)) << top], axis=1)


def _to_q2_k(values: Float32, weights: Weights) -> Bytes:
    d, m, factors, floors, codes = _part_minima(values, weights, 3, 16, 15)
    scales = factors | floors << np.uint8(4)
    return np.concatenate([scales, _packed(codes, 32, (0, 2, 4, 6)), _bytes(d), _bytes(m)], axis=1)


def _to_q4_k(values: Float32, weights: Weights) -> Bytes:
    d, m, factors, floors, codes = _part_minima(values, weights, 15, 32, 63)
    return np.concatenate([_bytes(d), _bytes(m), _k_factors(factors, floors), _packed(codes, 32, (0, 4))], axis=1)


def _to_q5_k(values: Float32, weights: Weights) -> Bytes:
    d, m, factors, floors, codes = _part_minima(values, weights, 31, 32, 63)
    bits = _packed(codes >> np.uint8(4), 32, _EIGHT), _packed(codes & np.uint8(15), 32, (0, 4))
    return np.concatenate([_bytes(d), _bytes(m), _k_factors(factors, floors), *bits], axis=1)


def _to_q3_k(values: Float32, weights: Weights) -> Bytes:
    scales, factors, codes = _part_scales(values, weights, Levels(-4, 3), 16, -32)
    stored = (factors + np.float32(32)).astype(np.uint8)
    bits = _packed(codes >> np.uint8(2), 32, _EIGHT), _packed(codes & np.uint8(3), 32, (0, 2, 4, 6))
    small = _halves_of(stored), _packed(stored >> np.uint8(4), 4, (0, 2, 4, 6))
    return np.concatenate([*bits, *small, _bytes(scales)], axis=1)


def _to_q6_k(values: Float32, weights: Weights) -> Bytes:
    scales, factors, codes = _part_scales(values, weights, Levels(-32, 31), 16, -128)
    bits = _packed(codes & np.uint8(15), 64, (0, 4)), _packed(codes >> np.uint8(4), 32, (0, 2, 4, 6))
    return np.concatenate([*bits, factors.astype(np.int8).view(np.uint8), _bytes(scales)], axis=1)


_IQ4 = Levels(-127, 113, tuple(WEIGHT_TYPES["IQ4_NL"].entries))


def _to_iq4_xs(values: Float32, weights: Weights) -> Bytes:
    scales, factors, codes = _part_scales(values, weights, _IQ4, 32, -32)
    stored = (factors + np.float32(32)).astype(np.uint8)
    high = ((stored >> np.uint8(4)).astype(np.uint16) << np.arange(0, 16, 2, dtype=np.uint16)).sum(axis=1)
    small = high.astype("<u2").reshape(-1, 1).view(np.uint8), _packed(stored & np.uint8(15), 1, (0, 4))
    return np.concatenate([_bytes(scales), *small, _packed(codes, 16, (0, 4))], axis=1)


_TERNARY = Levels(-1, 1)


def _to_tq2_0(values: Float32, weights: Weights) -> Bytes:
    scales, numbers = _scaled_codes(values, weights, _TERNARY)
    codes = np.ascontiguousarray(_TERNARY.codes(numbers).T)
    return np.concatenate([_packed(codes, 32, (0, 2, 4, 6)), _bytes(scales)], axis=1)


def _to_tq1_0(values: Float32, weights: Weights) -> Bytes:
    """5 digits in a byte, and at the end 4, as a fraction of 256."""
    scales, numbers = _scaled_codes(values, weights, _TERNARY)
    digits, parts = _TERNARY.codes(numbers).T.astype(np.uint16), []
    for begin, end, span, count in ((0, 160, 32, 5), (160, 240, 16, 5), (240, 256, 4, 4)):
        powers = np.array([81, 27, 9, 3, 1], np.uint16)[:count, None]
        number = (digits[:, begin:end].reshape(len(digits), count, span) * powers).sum(axis=1, dtype=np.uint16)
        parts.append(((number.astype(np.uint32) * 256 + 242) // 243).astype(np.uint8))
    return np.concatenate([*parts, _bytes(scales)], axis=1)


_TWO_BITS = Levels(-1, 2)


def _to_q2_0(values: Float32, weights: Weights) -> Bytes:
    scales, numbers = _scaled_codes(values, weights, _TWO_BITS)
    codes = np.ascontiguousarray(_TWO_BITS.codes(numbers).T)
    return np.concatenate([_bytes(scales), _packed(codes, 1, (0, 2, 4, 6))], axis=1)


def _to_q1_0(values: Float32, weights: Weights) -> Bytes:
    """Signs, and the mean of magnitudes, which no other scale is better than."""
    x, w = _columns(values, values.shape[1], weights)
    unit = np.ones_like(x)
    scales = _half(_divided(_dot(_weighted(np.abs(x), w), unit), _dot(_weighted(unit, w), unit)))
    return np.concatenate([_bytes(scales), np.packbits(values >= 0, axis=1, bitorder="little")], axis=1)


_FP4 = Levels(-12, 12, tuple(sorted({*map(int, WEIGHT_TYPES["MXFP4"].entries)})))
_FP4_CODES = np.array(
    [WEIGHT_TYPES["MXFP4"].entries.index(n) if n in WEIGHT_TYPES["MXFP4"].entries else 0 for n in range(-12, 13)],
    np.uint8,
)
"""Codes of the numbers from the lowest on."""


def _neighbours(codes: NDArray[Any], steps: Sequence[int], top: int) -> list[Bytes]:
    return [np.clip(codes + step, 0, top).astype(np.uint8) for step in steps]


def _to_mxfp4(values: Float32, weights: Weights) -> Bytes:
    def tried(peaks: Float32, _: Float32) -> list[Bytes]:
        exponents = np.frexp(peaks)[1].astype(np.int64) + 124  # the power of two at or below the peak, as 4 of its 6
        return _neighbours(exponents, (0, -1, 1), 254)

    scales, codes = _stored_scale_codes(values, weights, _FP4, 32, tried, half_power)
    return np.concatenate([scales, _packed(codes, 16, (0, 4))], axis=1)


_UE4M3 = half_ue4m3(np.arange(127, dtype=np.uint8))


def _to_nvfp4(values: Float32, weights: Weights) -> Bytes:
    if np.abs(values).max() > _UE4M3[-1] * _FP4.high:
        raise ModelError("a weight is too large for NVFP4")

    def tried(peaks: Float32, fitted: Float32) -> list[Bytes]:
        places = [np.searchsorted(_UE4M3, scale) for scale in (peaks / np.float32(_FP4.high), fitted)]
        return [codes for place in places for codes in _neighbours(place, (0, -1, 1), 126)]

    scales, codes = _stored_scale_codes(values, weights, _FP4, 16, tried, half_ue4m3)
    return np.concatenate([scales, _packed(codes, 8, (0, 4))], axis=1)


_WRITERS: dict[str, Callable[[Float32, Weights], Bytes]] = {
    "Q8_0": _to_q8_0,
    "Q4_0": _plain_writer(Levels(-8, 7)),
    "Q5_0": _plain_writer(Levels(-16, 15)),
    "IQ4_NL": _plain_writer(_IQ4),
    "Q4_1": _affine_writer(15),
    "Q5_1": _affine_writer(31),
    "Q2_K": _to_q2_k,
    "Q3_K": _to_q3_k,
    "Q4_K": _to_q4_k,
    "Q5_K": _to_q5_k,
    "Q6_K": _to_q6_k,
    "IQ4_XS": _to_iq4_xs,
    "MXFP4": _to_mxfp4,
    "NVFP4": _to_nvfp4,
    "TQ1_0": _to_tq1_0,
    "TQ2_0": _to_tq2_0,
    "Q2_0": _to_q2_0,
    "Q1_0": _to_q1_0,
    **{name: partial(to_grid, kind=kind) for name, kind in GRID_TYPES.items()},
}

SEARCHED = tuple(_WRITERS)
"""The types whose scales are searched."""

WRITTEN = ("F32", "F16", "BF16", *SEARCHED)
"""The types that matrices can have."""


def _block_weights(importance: Float32, size: int) -> Float32:
    """Weights of the elements of blocks, the largest of each between 1/2 and 1, so that their sums and products neither
    overflow nor vanish; where all are 0 they count the same."""
    weights = np.ascontiguousarray(importance, np.float32).reshape(-1, size)
    peaks = weights.max(axis=1, keepdims=True)
    scaled: Float32 = np.ldexp(weights, -np.frexp(peaks)[1])
    return np.where(peaks > 0, scaled, np.float32(1))


def searched(values: Float32, type_name: str, importance: Weights = None) -> Bytes:
    """Rows in a type: float32 [rows, cols] -> uint8 [rows, row_bytes], the squared error as small as the search finds.

    Floats are rounded. importance: of the elements' columns, [rows, cols], weighs the errors; None: all count the same.
    ModelError for values that the type cannot hold.
    """
    if not np.isfinite(values).all():
        raise ModelError("a weight is infinite or not a number, so it cannot be quantised")
    if type_name not in _WRITERS:
        data = quantize(values, type_name)
        if type_name == "F16" and np.abs(values).max() >= 65520:
            raise ModelError("a weight is too large for F16; BF16 holds it")
        return data
    kind = block_type(type_name)
    rows, cols = values.shape
    out = np.empty((rows, kind.row_bytes(cols)), np.uint8)
    step = max(1, _CHUNK // cols)
    with np.errstate(all="ignore"):  # sums that overflow belong to scales that are refused
        for start in range(0, rows, step):
            part = np.ascontiguousarray(values[start : start + step], np.float32)
            weights = None
            if importance is not None:
                weights = _block_weights(importance[start : start + step], kind.block)
            blocks = _WRITERS[type_name](part.reshape(-1, kind.block), weights)
            out[start : start + step] = blocks.reshape(len(part), -1)
    return out
