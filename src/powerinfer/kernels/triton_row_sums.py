"""The Triton kernel that sums all rows of a quantised matrix, each times a number of every token, by tensor cores.

It is for down, where several tokens together need nearly all of its rows: nothing is looked up, and the 32 rows that
share scales are multiplied as they are before their sum is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from powerinfer.kernels.triton_kernels import (
    STAGES,
    add_up,
    early,
    follow,
    narrowed,
    processors,
    row_width,
    tensor_columns,
)
from powerinfer.kernels.triton_launch import launched

if TYPE_CHECKING:
    from torch import Tensor

    from powerinfer.kernels.gpu_types import Weight

ROWS, WARPS = 32, 4  # at a time: of one group
BYTES = {"Q4_0": 64, "Q4_0X32": 64, "Q8_0": 128}  # of each
PROGRAMS = 3  # of a multiprocessor, by their registers
ROUNDS = 2  # tiles of rows of a program at least
SUM = 16, 128  # splits, and columns, that a program adds up at a time
CODE = tl.constexpr(0x6400)  # the bits of 1024 in float16, whose last ones are integers


@triton.jit
def _half_codes(codes, TYPE: tl.constexpr):
    """Values of bytes of codes as float16, the low and the high ones; of 8 bits all twice."""
    c = codes.to(tl.uint8, bitcast=True).to(tl.int16)
    if TYPE == "Q8_0":
        low = (c ^ (CODE | 128)).to(tl.float16, bitcast=True) - 1152.0
        high = low
    else:  # two's complement
        low = ((c & 15) ^ (CODE | 8)).to(tl.float16, bitcast=True) - 1032.0
        high = ((c >> 4) ^ (CODE | 8)).to(tl.float16, bitcast=True) - 1032.0
    return low, high


@launched
@triton.jit(do_not_specialize=["tokens", "tiles"])
def _row_sums_kernel(
    data, scales, x, x_scales, parts, tokens, n, k, tiles,
    TYPE: tl.constexpr, SHARED: tl.constexpr, T: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Sum over `tiles` of R rows, of n, each times a number of every token in x [tokens, n], which `narrowed` made, in
    the columns of C bytes of parts [splits, tokens, k]. scales: of the rows or, SHARED, of their groups."""
    follow()
    PAIRS: tl.constexpr = TYPE != "Q8_0"
    E: tl.constexpr = 16 if PAIRS else 32
    B: tl.constexpr = C // E
    at = tl.program_id(0) * C + tl.arange(0, C)
    b = tl.program_id(0) * B + tl.arange(0, B)
    width = k // 32 * E
    real, c = at < width, at // E * 32 + at % E
    t = tl.arange(0, T)
    begin = tl.program_id(1) * tiles * R
    end = tl.minimum(begin + tiles * R, n)
    low_sum = tl.zeros((T, C), tl.float32)
    high_sum = tl.zeros((T, C), tl.float32)
    for i in range(begin, end, R):
        row = i + tl.arange(0, R)
        live = row < end
        by = tl.load(x + t[:, None] * n + row[None, :], mask=(t < tokens)[:, None] & live[None, :], other=0)
        row_at = row.to(tl.int64)[:, None]
        codes = tl.load(data + row_at * width + at[None, :], mask=live[:, None] & real[None, :], other=0)
        low, high = _half_codes(codes, TYPE)
        if SHARED:
            d_at = scales + i // 32 * k + c
            low_sum += tl.dot(by, low) * tl.load(d_at, mask=real, other=0).to(tl.float32)[None, :]
            high_sum += tl.dot(by, high) * tl.load(d_at + 16, mask=real, other=0).to(tl.float32)[None, :]
        else:
            blocks = live[:, None] & (b < k // 32)[None, :]
            d = tl.load(scales + row_at * (k // 32) + b[None, :], mask=blocks, other=0)[:, :, None]
            low_sum = tl.dot(by, tl.reshape(tl.reshape(low, (R, B, E)) * d, (R, C)), low_sum)
            if PAIRS:
                high_sum = tl.dot(by, tl.reshape(tl.reshape(high, (R, B, E)) * d, (R, C)), high_sum)
    factor = tl.load(x_scales + t, mask=t < tokens, other=0)[:, None]
    out = parts + (tl.program_id(1).to(tl.int64) * tokens + t[:, None]) * k + c[None, :]
    ok = (t < tokens)[:, None] & real[None, :]
    tl.store(out, low_sum * factor, mask=ok)
    if PAIRS:
        tl.store(out + 16, high_sum * factor, mask=ok)


def row_sums(w: Weight, shared: Tensor | None, x: Tensor, into: Tensor | None) -> Tensor:
    """Sum of x [T, rows] times the rows of a weight of 4 or 8 bits, float32 [T, k], or `into`, that much more.

    x is rounded to float16, beside a scale for each token. shared: of Q4_0X32 the scales, a row for 32 rows one after
    another. T: up to `gpu.FEW`.
    """
    tokens, n = x.shape
    scales = w.scales if shared is None else shared
    assert scales is not None
    across = triton.cdiv(row_width(w.type, w.k), BYTES[w.type])
    splits = max(1, min(PROGRAMS * processors(x) // across, triton.cdiv(n, ROUNDS * ROWS)))
    tiles = triton.cdiv(triton.cdiv(n, splits), ROWS)
    splits = triton.cdiv(n, tiles * ROWS)
    parts = torch.empty((splits, tokens, w.k), dtype=torch.float32, device=x.device)
    rows, factors = narrowed(x)
    _row_sums_kernel[(across, splits)](
        w.data, scales, rows, factors, parts, tokens, n, w.k, tiles,
        TYPE=w.type, SHARED=shared is not None, T=tensor_columns(tokens, False), R=ROWS, C=BYTES[w.type],
        num_warps=WARPS, num_stages=STAGES, launch_pdl=early(x),
    )  # fmt: skip
    if splits == 1 and into is None:
        return parts[0]
    out = torch.empty((tokens, w.k), dtype=torch.float32, device=x.device) if into is None else into
    add_up(parts, out, into is not None, SUM)
    return out
