"""Triton kernels of `gpu_candidates`; see `triton_kernels` for the rules.

The largest logits of disjoint parts of a row are themselves logits of it, so the 64th largest of them is at most the
64th largest logit. Parts are interleaved, since likely tokens are often neighbours; those whose largest logit reaches
that bound, mostly 64, are looked through for all others that do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from powerinfer.kernels.candidates import LARGE, LIKELIEST, MOST, WORDS
from powerinfer.kernels.triton_kernels import early, follow
from powerinfer.kernels.triton_launch import launched

if TYPE_CHECKING:
    from torch import Tensor

PARTS = 2048  # of a row
COLUMNS = 32  # parts of a program
DEPTH = 32  # logits of a part that a program reads at a time
LISTED = 128  # parts that may reach the bound
PLACES = 2048  # logits of these that are looked at at a time

_LEAST = tl.constexpr(-(2**31))
_LARGE = tl.constexpr(LARGE)
_NOT_SIGN = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _reorder(bits):
    """Integers in the order of floats with these bits, and back."""
    return bits ^ ((bits >> 31) & _NOT_SIGN)


@triton.jit
def _key(value):
    """An integer in the order of floats, of which NaN is the largest."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    return tl.where(value != value, _NOT_SIGN, _reorder(bits))


@launched
@triton.jit(do_not_specialize_on_alignment=["inverse_temperatures"])
def _maxima_kernel(
    logits, inverse_temperatures, maxima, tops, sums, vocab, depth,
    P: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """The largest keys of C parts of a row, int32 [P]; the largest logit of these parts, and their part of the sum of
    exponentials, by that."""
    follow()
    row, program = tl.program_id(0), tl.program_id(1)
    column = program * C + tl.arange(0, C)
    logits += row.to(tl.int64) * vocab
    largest = tl.full((D, C), _LEAST, tl.int32)
    for begin in range(0, depth, D):
        token = (begin + tl.arange(0, D))[:, None] * P + column[None, :]
        value = tl.load(logits + token, mask=token < vocab, other=float("-inf"))
        largest = tl.maximum(largest, _key(value))
    of_parts = tl.max(largest, 0)
    tl.store(maxima + row * P + column, of_parts)
    top = _reorder(tl.max(of_parts, 0)).to(tl.float32, bitcast=True)
    top = tl.minimum(tl.maximum(top, -_LARGE), _LARGE)
    sharpness = tl.load(inverse_temperatures + row)
    total = tl.zeros((D, C), tl.float32)
    for begin in range(0, depth, D):
        token = (begin + tl.arange(0, D))[:, None] * P + column[None, :]
        value = tl.load(logits + token, mask=token < vocab, other=float("-inf"))
        total += tl.exp((value - top) * sharpness)
    place = row * tl.num_programs(1) + program
    tl.store(tops + place, top)
    tl.store(sums + place, tl.sum(tl.sum(total, 0), 0))


@launched
@triton.jit(do_not_specialize_on_alignment=["inverse_temperatures"])
def _candidates_kernel(
    logits, inverse_temperatures, maxima, tops, sums, parts, out, vocab, depth,
    P: tl.constexpr, PROGRAMS: tl.constexpr, LIKELIEST: tl.constexpr, LISTED: tl.constexpr, PLACES: tl.constexpr,
    MOST: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """The candidates of a row. parts: int32 [R, LISTED], for this kernel alone."""
    follow()
    row = tl.program_id(0)
    logits += row.to(tl.int64) * vocab
    parts += row * LISTED
    out += row * WORDS
    part = tl.arange(0, P)
    largest = tl.load(maxima + row * P + part).to(tl.int64) - _LEAST
    # The largest number that so many reach, bit by bit.
    bound = tl.full((), 0, tl.int64)
    bit = tl.full((), 1 << 31, tl.int64)
    for _ in range(32):
        enough = tl.sum((largest >= bound + bit).to(tl.int32), 0) >= LIKELIEST
        bound += tl.where(enough, bit, 0)
        bit = bit >> 1
    reaches = ((largest >= bound) & (part < vocab)).to(tl.int32)
    place, listed = tl.cumsum(reaches, 0) - reaches, tl.sum(reaches, 0)
    tl.store(parts + place, part, mask=(reaches != 0) & (place < LISTED))
    tl.debug_barrier()  # what other threads of the program listed
    entry = tl.arange(0, PLACES) % LISTED
    of_entry = tl.load(parts + entry, mask=entry < listed, other=0)
    level = tl.arange(0, PLACES) // LISTED
    count = tl.full((), 0, tl.int32)
    for begin in range(0, depth, PLACES // LISTED):
        token = (begin + level) * P + of_entry
        valid = (entry < listed) & (token < vocab)
        value = tl.load(logits + token, mask=valid, other=float("-inf"))
        reaches = (valid & (_key(value).to(tl.int64) - _LEAST >= bound)).to(tl.int32)
        place = count + tl.cumsum(reaches, 0) - reaches
        fits = (reaches != 0) & (place < MOST)
        tl.store(out + 2 + place, value.to(tl.int32, bitcast=True), mask=fits)
        tl.store(out + 2 + MOST + place, token, mask=fits)
        count += tl.sum(reaches, 0)
    tl.store(out, tl.where(listed > LISTED, MOST + 1, count))
    program = row * PROGRAMS + tl.arange(0, PROGRAMS)
    top, total, sharpness = tl.load(tops + program), tl.load(sums + program), tl.load(inverse_temperatures + row)
    total *= tl.exp((top - tl.max(top, 0)) * sharpness)
    tl.store(out + 1, tl.sum(total, 0).to(tl.int32, bitcast=True))


def select(logits: Tensor, inverse_temperatures: Tensor, out: Tensor) -> None:
    """`gpu_candidates.select`."""
    logits = logits.contiguous()
    rows, vocab = logits.shape
    programs, depth = PARTS // COLUMNS, triton.cdiv(vocab, PARTS)
    maxima, parts = (torch.empty((rows, n), dtype=torch.int32, device=logits.device) for n in (PARTS, LISTED))
    tops, sums = (torch.empty((rows, programs), dtype=torch.float32, device=logits.device) for _ in range(2))
    options = {"num_warps": 4, "launch_pdl": early(logits)}
    _maxima_kernel[(rows, programs)](
        logits, inverse_temperatures, maxima, tops, sums, vocab, depth, P=PARTS, C=COLUMNS, D=DEPTH, **options
    )
    _candidates_kernel[(rows,)](
        logits, inverse_temperatures, maxima, tops, sums, parts, out, vocab, depth,
        P=PARTS, PROGRAMS=programs, LIKELIEST=LIKELIEST, LISTED=LISTED, PLACES=PLACES, MOST=MOST, WORDS=WORDS,
        **(options | {"num_warps": 8}),
    )  # fmt: skip
