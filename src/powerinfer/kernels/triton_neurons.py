"""Triton kernels for the neurons of a layer, for few tokens; see `triton_kernels` for the rules and the letters.

Selected neurons -> a list -> products of gate and up -> sums of down, each over a share of the list -> one sum. Without
a selection all products, then a list of the neurons that fire. A list has room for every neuron, and its length is in
device memory, where programs read it. It is made in two stages: programs count their entries; then programs add up the
counts before them and write theirs. Of one token's selection the second stage does without counts: it reads the bytes.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from powerinfer.kernels.gpu_types import GELU_CUBIC, GELU_SCALE, OAI_LIMIT, OAI_SCALE, SHARING
from powerinfer.kernels.triton_kernels import (
    CODED_BLOCKS,
    LOW,
    STAGES,
    Tile,
    add_bias,
    add_up,
    coded,
    columns,
    early,
    either,
    follow,
    for_rows,
    half_scales,
    halved,
    halves,
    in_turn,
    lanes,
    nibbles,
    precision,
    processors,
    put_codes,
    row_dots,
    row_width,
    share,
    small_signed,
    taken,
    taken_width,
    tensor_columns,
    warps,
)
from powerinfer.kernels.triton_launch import launched
from powerinfer.kernels.triton_row_sums import row_sums
from powerinfer.kernels.triton_words import half_float

if TYPE_CHECKING:
    from torch import Tensor

    from powerinfer.kernels.gpu_types import Limit, Neurons, Weight

# Products of listed neurons, for one token and for several: fewer rows than for a whole matrix.
DOT_ONE = {
    **dict.fromkeys(("F32", "F16", "BF16"), Tile(4, 1024, 4)),
    "Q8_0": Tile(4, 4096, 4),
    "Q4_0": Tile(4, 2048, 4),
}
DOT_SEVERAL = {**dict.fromkeys(DOT_ONE, Tile(32, 32, 2)), "F16": Tile(32, 64, 4), "Q8_0": Tile(32, 64, 4)}
# Sums of rows of down, likewise; rows: per iteration.
ADD_ONE = {
    **dict.fromkeys(("F32", "BF16", "Q8_0"), Tile(16, 256, 4)),
    "Q4_0": Tile(16, 128, 4),
    "F16": Tile(32, 64, 8),
    **dict.fromkeys(("Q4_0X32", "Q8_0X32"), Tile(8, 512, 1)),  # sixteen bytes of each row for a thread
}
ADD_SEVERAL = {**dict.fromkeys(ADD_ONE, Tile(16, 128, 4)), "F16": Tile(32, 128, 4)}
ADD_SEVERAL |= dict.fromkeys(("Q4_0", "Q4_0X32"), Tile(16, 64, 4))
# Lists are split for as many programs as a multiprocessor holds, by their registers as compiled for sm_90: one
# more would be a second wave. But in pieces of at least ADD_ROUNDS tiles, if all neurons are listed.
# HELD_PRODUCTS: warps of products with one token, which have even shares of their tiles.
HELD_ONE = dict.fromkeys(ADD_ONE, 6) | dict.fromkeys(("Q4_0X32", "Q8_0X32"), 8)
HELD_SEVERAL = dict.fromkeys(ADD_ONE, 3)
HELD_PRODUCTS = 16
ADD_ROUNDS = 2
SUM = (16, 128)  # splits, and columns, that a program adds up at a time
_GELU_SCALE, _GELU_CUBIC = tl.constexpr(GELU_SCALE), tl.constexpr(GELU_CUBIC)
_LIMIT, _SCALE = tl.constexpr(OAI_LIMIT), tl.constexpr(OAI_SCALE)
_SHARED = tuple(SHARING.values())
LIST = 1024  # neurons that one program lists; a multiple of the rows of tiles
READ = 8192  # bytes of a selection that it reads at a time


# ---------------------------------------------------------------------------------------------------------------------
# Lists


@launched
@triton.jit(do_not_specialize=["tokens"])
def _count_kernel(selected, counts, tokens, n, BLOCK: tl.constexpr):
    """counts: neurons of each block that any token selects."""
    follow()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    chosen = tl.zeros((BLOCK,), tl.int32)
    for t in range(tokens):
        chosen |= (tl.load(selected + t * n + i, mask=i < n, other=0) != 0).to(tl.int32)
    tl.store(counts + tl.program_id(0), tl.sum(chosen, 0))


@launched
@triton.jit(do_not_specialize=["tokens", "pieces", "per"])
def _list_kernel(
    source, before, counts, listed, kept, total, tokens, n, pieces, per,
    LISTED: tl.constexpr, KEEP: tl.constexpr, BYTES: tl.constexpr, BLOCK: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    """List, in the order of their places, the neurons that are not zero for some token in source [tokens, n].

    LISTED: place i of source belongs to neuron before[i], else to neuron i. counts: [pieces] of neurons to list, `per`
    of them in a block; BYTES: of each neuron a byte, zero or not. listed gets neurons; kept [tokens, n], with KEEP,
    their values in source, in the order of the list.
    """
    follow()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = i < n
    neuron = i
    if LISTED:
        neuron = tl.load(before + i, mask=here, other=0)
    chosen = tl.zeros((BLOCK,), tl.int32)
    for t in range(tokens):
        chosen |= (tl.load(source + t * n + i, mask=here, other=0) != 0).to(tl.int32)
    first = tl.minimum(tl.program_id(0) * per, pieces)
    earlier = tl.zeros((COUNTS,), tl.int32)
    for c0 in range(0, first, COUNTS):
        c = c0 + tl.arange(0, COUNTS)
        some = tl.load(counts + c, mask=c < first, other=0)
        earlier += (some != 0).to(tl.int32) if BYTES else some
    base = tl.sum(earlier, 0)
    place = base + tl.cumsum(chosen, 0) - chosen
    tl.store(listed + place, neuron, mask=chosen != 0)
    if KEEP:
        for t in range(tokens):
            tl.store(kept + t * n + place, tl.load(source + t * n + i, mask=here, other=0), mask=chosen != 0)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        tl.store(total, base + tl.sum(chosen, 0))


# ---------------------------------------------------------------------------------------------------------------------
# Products


@triton.jit
def _expm1_less(x):
    """e^x - 1 - x of x up to 0, by the series where digits would cancel."""
    series = ((x / 40320 + 1 / 5040) * x + 1 / 720) * x + 1 / 120
    series = (((series * x + 1 / 24) * x + 1 / 6) * x + 1 / 2) * x * x
    return tl.where(x > -0.5, series, tl.exp(x) - 1 - x)


@triton.jit
def active(a, limit, ACTIVATION: tl.constexpr):
    """The activation; of drelu, the gate's half. NaN propagates. limit: a number, of xielu its curve."""
    if ACTIVATION == "silu":
        return a / (1 + tl.exp(-a))
    if ACTIVATION == "cats":
        a = a / (1 + tl.exp(-a))
        return tl.where(tl.abs(a) <= limit, 0.0, a)
    if ACTIVATION == "gelu_tanh":
        return a / (1 + tl.exp(-_GELU_SCALE * (a + _GELU_CUBIC * a * a * a)))
    if ACTIVATION == "fatrelu":
        return tl.where(a <= limit, 0.0, a)
    if ACTIVATION == "xielu":
        m = tl.where(a > limit[3], limit[3], a)
        more = _expm1_less(m) + (m - a)
        return tl.where(a > 0, limit[0] * a * a + limit[2] * a, limit[1] * more + limit[2] * a)
    a = tl.where(a <= 0, 0.0, a)
    return a * a if ACTIVATION == "relu2" else a


@triton.jit
def activated(a, u, limit, ACTIVATION: tl.constexpr, GATED: tl.constexpr):
    """h of gate (unless GATED: any) and up."""
    if ACTIVATION == "swiglu_oai":
        a = tl.where(a > _LIMIT, _LIMIT, a)  # NaN stays
        u = tl.where(u > _LIMIT, _LIMIT, tl.where(u < -_LIMIT, -_LIMIT, u))
        h = a / (1 + tl.exp(-_SCALE * a)) * (u + 1)
    elif GATED:
        if ACTIVATION == "drelu":
            u = tl.where(u <= 0, 0.0, u)
        h = active(a, limit, ACTIVATION) * u
    else:
        h = active(u, limit, ACTIVATION)
    return h


@launched
@triton.jit
def _activate_kernel(
    x, up, out, made, x_stride, up_stride, k, limit, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
    CODED: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """32 * B elements of a row of h; CODED: made are its `codes`."""
    follow()
    row, b = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    c = b[:, None] * 32 + tl.arange(0, 32)[None, :]
    here = c < k
    u = tl.load(up + row * up_stride + c, mask=here, other=0)
    a = u
    if GATED:
        a = tl.load(x + row * x_stride + c, mask=here, other=0)
    h = activated(a, u, limit, ACTIVATION, GATED)
    tl.store(out + row * k + c, h, mask=here)
    if CODED:
        put_codes(made, row, h, b, b * 32 < k, k, B)


def activate(activation: str, x: Tensor, up: Tensor | None, limit: Limit, for_codes: bool) -> Tensor:
    """`gpu.activate` with one threshold; x and up may be parts of a larger tensor."""
    rows, k = x.shape
    assert x.stride(1) == 1
    out = torch.empty((rows, k), dtype=torch.float32, device=x.device)
    if out.numel():
        other = x if up is None else up
        made = coded(out, rows, k) if for_codes else None
        block = min(CODED_BLOCKS, int(triton.next_power_of_2(triton.cdiv(k, 32))))
        _activate_kernel[(rows, triton.cdiv(k, 32 * block))](
            x, other, out, either(made, out), x.stride(0), other.stride(0), k, limit, GATED=up is not None,
            ACTIVATION=activation, CODED=made is not None, B=block, num_warps=warps(32 * block, 8),
            enable_fp_fusion=made is None, launch_pdl=early(x),
        )  # fmt: skip
    return out


@triton.jit
def _tokens_of(a, T: tl.constexpr):
    """Number of tokens for which each row of a is not zero, int32 [R]."""
    fires = (a != 0).to(tl.int32)
    return tl.sum(fires, 1) if T > 1 else fires


@triton.jit
def product(
    x, gate, gate_scales, gate_bias, up, up_scales, up_bias, limits, product_limits, row, live, mine, tokens, k, limit,
    threshold,
    GATED: tl.constexpr, ACTIVATION: tl.constexpr, TYPE: tl.constexpr, GATE_BIAS: tl.constexpr, UP_BIAS: tl.constexpr,
    LIMITS: tl.constexpr, PRODUCT_LIMITS: tl.constexpr, THRESHOLD: tl.constexpr, T: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, PRECISION: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """h of rows [R] that are live, with T > 1 [R, T]: zero where not `mine`."""
    a = row_dots(x, gate, gate_scales, row, live, tokens, k, TYPE, T, R, C, PRECISION, HALVES)
    a = add_bias(a, gate_bias, row, live, GATE_BIAS, T)
    if LIMITS:
        own = tl.load(limits + row, mask=live, other=0)
        a = active(a, own[:, None] if T > 1 else own, ACTIVATION)
    else:
        a = active(a, limit, ACTIVATION)
    if THRESHOLD:
        a = tl.where(tl.abs(a) <= threshold, 0.0, a)
    a = tl.where(mine, a, 0.0)
    if GATED:
        fires = _tokens_of(a, T)
        if tl.max(fires, 0) > 0:
            u = row_dots(x, up, up_scales, row, fires > 0, tokens, k, TYPE, T, R, C, PRECISION, HALVES)
            u = add_bias(u, up_bias, row, live, UP_BIAS, T)
            if ACTIVATION == "drelu":
                u = tl.where(u <= 0, 0.0, u)
            a = tl.where(a == 0, 0.0, a * u)
            if PRODUCT_LIMITS:
                least = tl.load(product_limits + row, mask=live, other=0)
                a = tl.where(tl.abs(a) <= (least[:, None] if T > 1 else least), 0.0, a)
    return a


@launched
@triton.jit(do_not_specialize=["tokens"])
def _products_kernel(
    x, gate, gate_scales, gate_bias, up, up_scales, up_bias, limits, product_limits, selected, listed, length, h,
    fired, counts, tokens, n, k, limit, threshold,
    GATED: tl.constexpr, ACTIVATION: tl.constexpr, TYPE: tl.constexpr, LISTED: tl.constexpr, GATE_BIAS: tl.constexpr,
    UP_BIAS: tl.constexpr, LIMITS: tl.constexpr, PRODUCT_LIMITS: tl.constexpr, THRESHOLD: tl.constexpr,
    CHOSEN: tl.constexpr, T: tl.constexpr, R: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
    HALVES: tl.constexpr,
):  # fmt: skip
    """h [tokens, n] at places of the list, of R neurons at a time: rows of up are read only where gate is not zero.

    fired, by neuron, grows by the tokens; counts: of each R neurons, the number that fire. Without GATED, the gate
    arguments are up's. LIMITS: the activation's threshold is not `limit` but each neuron's own; PRODUCT_LIMITS: h has
    one, too. CHOSEN: h is zero where `selected` is; without LISTED all neurons have their own places.
    """
    follow()
    many = n
    if LISTED:
        many = tl.load(length)
    begin, end = share(tl.cdiv(many, R))
    for tile in range(begin, end):
        place = tile * R + tl.arange(0, R)
        live = place < many
        neuron = place
        if LISTED:
            neuron = tl.load(listed + place, mask=live, other=0)
        row = tl.where(live, neuron, 0).to(tl.int64)
        fires = tl.zeros((R,), tl.int32)
        if T > 1:
            t = tl.arange(0, T)
            mine = live[:, None] & (t < tokens)[None, :]
            if CHOSEN:
                mine &= tl.load(selected + t[None, :] * n + row[:, None], mask=mine, other=0) != 0
            a = product(
                x, gate, gate_scales, gate_bias, up, up_scales, up_bias, limits, product_limits, row, live, mine,
                tokens, k, limit, threshold, GATED, ACTIVATION, TYPE, GATE_BIAS, UP_BIAS, LIMITS, PRODUCT_LIMITS,
                THRESHOLD, T, R, C, PRECISION, HALVES,
            )  # fmt: skip
            tl.store(h + t[None, :] * n + place[:, None], a, mask=live[:, None] & (t < tokens)[None, :])
            fires += _tokens_of(a, T)
        else:
            for t in range(tokens if T else 1):
                mine = live
                if CHOSEN and T:
                    mine &= tl.load(selected + t * n + row, mask=live, other=0) != 0
                a = tl.zeros((R,), tl.float32)
                if tl.max(mine.to(tl.int32), 0) > 0:
                    a = product(
                        x + t * taken_width(k, TYPE), gate, gate_scales, gate_bias, up, up_scales, up_bias, limits,
                        product_limits, row, mine, mine, 1, k, limit, threshold, GATED, ACTIVATION, TYPE, GATE_BIAS,
                        UP_BIAS, LIMITS, PRODUCT_LIMITS, THRESHOLD, T, R, C, PRECISION, False,
                    )  # fmt: skip
                tl.store(h + t * n + place, a, mask=live)
                fires += _tokens_of(a, T)
        before = tl.load(fired + row, mask=live, other=0)
        tl.store(fired + row, before + fires.to(fired.dtype.element_ty), mask=live)
        tl.store(counts + tile, tl.sum((fires > 0).to(tl.int32), 0))


# ---------------------------------------------------------------------------------------------------------------------
# Sums


@triton.jit
def _entries(
    listed, group, h, first, end, tokens, n, TYPE: tl.constexpr, T: tl.constexpr, R: tl.constexpr, HALVES: tl.constexpr
):  # fmt: skip
    """Of R places of the list: rows of down, rows of their shared scales, h [R], of several tokens [T, R], of halves
    [2 T, R], and whether it is not zero for all of them."""
    i = first + tl.arange(0, R)
    live = i < end
    row = tl.load(listed + i, mask=live, other=0).to(tl.int64)
    if T:
        t, real = lanes(tokens, T, HALVES)
        by = tl.load(h + t[:, None] * n + i[None, :], mask=real[:, None] & live[None, :], other=0)
        live = tl.max((by != 0).to(tl.int32), 0) > 0
    else:
        by = tl.load(h + i, mask=live, other=0)
        live = by != 0
    of = row
    if shares(TYPE):
        of = _group_of(group, row, live)
    return row, of, by, live


@triton.constexpr_function
def shares(kind):
    """Whether rows of a type share their scales with others."""
    return kind in _SHARED


@triton.jit
def _group_of(group, row, live):
    """The row of the shared scales of a row of down."""
    if group is None:  # noqa: SIM108 - known when it is compiled
        of = row // 32
    else:
        of = tl.load(group + row, mask=live, other=0).to(tl.int64)
    return of


@triton.jit
def _joined(acc, h, tokens, n, T: tl.constexpr, C: tl.constexpr, HALVES: tl.constexpr):
    """Sums of halves [2 T, C] as those of their tokens [T, C]."""
    if HALVES:
        low = tl.arange(0, 2)[:, None, None]
        acc = tl.sum(tl.reshape(acc, (2, T, C)) * tl.where(low == 0, 1.0, 1 / LOW), 0)
        acc *= half_scales(h, tokens, n, T)[:, None]
    return acc


@triton.jit
def _add_floats(
    data, group, listed, h, parts, begin, end, tokens, n, k, across,
    TYPE: tl.constexpr, T: tl.constexpr, R: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
    HALVES: tl.constexpr,
):  # fmt: skip
    """`_add_kernel` of F32, F16 and BF16."""
    t = tl.arange(0, T if T else 1)[:, None]
    c = across * C + tl.arange(0, C)
    acc = tl.zeros(((2 * T if HALVES else T) if T else R, C), tl.float32)
    row, _of, by, live = _entries(listed, group, h, begin, end, tokens, n, TYPE, T, R, HALVES)
    for i in range(begin, end, R):
        here = live[:, None] & (c < k)[None, :]
        w = tl.load(data + row[:, None] * k + c[None, :], mask=here, other=0)
        row, _of, then, live = _entries(listed, group, h, i + R, end, tokens, n, TYPE, T, R, HALVES)
        if T:
            acc = tl.dot(by, w.to(tl.float16 if HALVES else tl.float32), acc, input_precision=PRECISION)
        else:
            acc += w.to(tl.float32) * by[:, None]
        by = then
    if T:
        acc = _joined(acc, h, tokens, n, T, C, HALVES)
        tl.store(parts + t * k + c[None, :], acc, mask=(t < tokens) & (c < k)[None, :])
    else:
        tl.store(parts + c, tl.sum(acc, 0), mask=c < k)


@triton.jit
def _weighted(codes, d, d_high, by, TYPE: tl.constexpr, T: tl.constexpr):
    """Codes [R, B, E] times their scales and, for one token, times h [R]: the low and the high ones, of Q8_0 all twice.
    Of Q4_0 they are sixteen times as large for one token.

    d: scales [R, B]; of types that share scales, with several tokens, [R, B, E], and d_high those of the high codes.
    """
    if TYPE == "Q8_0" or TYPE == "Q8_0X32":
        low = small_signed(codes)
        high = low
    else:
        low, high = nibbles(codes)  # sixteen times the codes
        if T:
            low *= 0.0625
            high *= 0.0625
    if shares(TYPE):
        low *= d.to(tl.float32)
        high *= d_high.to(tl.float32)
    else:
        if not T:
            d *= by[:, None]
        low *= d[:, :, None]
        if TYPE != "Q8_0":
            high *= d[:, :, None]
    return low, high


@triton.jit
def _add_blocks(
    data, scales, shared, group, listed, h, parts, begin, end, tokens, n, k, across,
    TYPE: tl.constexpr, T: tl.constexpr, R: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
    HALVES: tl.constexpr,
):  # fmt: skip
    """`_add_kernel` of quantised types, in blocks of 32 columns.

    Of 4 bits, first[b, j] is the column of a byte's low nibble; that of its high one is 16 further on.
    """
    PAIRS: tl.constexpr = TYPE != "Q8_0" and TYPE != "Q8_0X32"
    E: tl.constexpr = 16 if PAIRS else 32
    B: tl.constexpr = C // E
    blocks = k // 32
    b = across * B + tl.arange(0, B)
    j = tl.arange(0, E)[None, :]
    first = b[:, None] * 32 + j
    NARROW: tl.constexpr = tl.float16 if HALVES else tl.float32
    acc = tl.zeros((2 * T if HALVES else T, C) if T else (R, B, E), tl.float32)
    acc_high = tl.zeros((2 * T if HALVES else T, C) if T else (R, B, E), tl.float32)
    row, of, by, live = _entries(listed, group, h, begin, end, tokens, n, TYPE, T, R, HALVES)
    for i in range(begin, end, R):
        here = live[:, None] & (b < blocks)[None, :]
        codes_at = data + row[:, None, None] * (blocks * E) + (b[:, None] * E + j)[None]
        codes = tl.load(codes_at, mask=here[:, :, None], other=0)
        if shares(TYPE):
            d_at = shared + of[:, None, None] * k + first[None]
            d = tl.load(d_at, mask=here[:, :, None], other=0)
            d_high = tl.load(d_at + 16, mask=here[:, :, None], other=0) if PAIRS else d
        else:
            d = tl.load(scales + row[:, None] * blocks + b[None, :], mask=here, other=0).to(tl.float32)
            d_high = d
        row, of, then, live = _entries(listed, group, h, i + R, end, tokens, n, TYPE, T, R, HALVES)
        low, high = _weighted(codes, d, d_high, by, TYPE, T)
        if T:
            acc = tl.dot(by, tl.reshape(low, (R, C)).to(NARROW), acc, input_precision=PRECISION)
            if PAIRS:
                acc_high = tl.dot(by, tl.reshape(high, (R, C)).to(NARROW), acc_high, input_precision=PRECISION)
        else:
            acc += low
            if PAIRS:
                acc_high += high
        by = then
    if T:
        t = tl.arange(0, T)[:, None]
        c = across * (B * 32) + tl.arange(0, C) // E * 32 + tl.arange(0, C) % E
        ok = (t < tokens) & (c < k)[None, :]
        tl.store(parts + t * k + c[None, :], _joined(acc, h, tokens, n, T, C, HALVES), mask=ok)
        if PAIRS:
            acc_high = _joined(acc_high, h, tokens, n, T, C, HALVES)
            tl.store(parts + t * k + c[None, :] + 16, acc_high, mask=ok)
    else:
        low_sum = tl.sum(acc, 0)
        if PAIRS:
            low_sum *= 0.0625
            tl.store(parts + first + 16, tl.sum(acc_high, 0) * 0.0625, mask=(b < blocks)[:, None])
        tl.store(parts + first, low_sum, mask=(b < blocks)[:, None])


@triton.constexpr_function
def _code_bits(kind):
    return 4 if kind == "Q4_0X32" else 8


@triton.constexpr_function
def _moved(kind, i):
    """Bits by which words are moved to the right for code number i of each, in the order of its columns: so that all of
    it is in the mantissa of a float."""
    bits = _code_bits(kind)
    return 0 if 8 * (i % 4) + i // 4 * 4 + bits <= 23 else 12 if bits == 4 else 16


@triton.constexpr_function
def _bit(kind, i):
    """The bit from which on that code then is."""
    return 8 * (i % 4) + i // 4 * 4 - _moved(kind, i)


@triton.jit
def _codes_of(words, i: tl.constexpr, TYPE: tl.constexpr):
    """Code number i of words, as float32, times 2 to the power of its `_bit`: without a conversion of integers."""
    SIGN: tl.constexpr = 1 << (_code_bits(TYPE) - 1 + _bit(TYPE, i))
    MASK: tl.constexpr = 2 * SIGN - (1 << _bit(TYPE, i))
    MANTISSA: tl.constexpr = SIGN | 0x4B000000
    LESS: tl.constexpr = 2.0**23 + SIGN
    return (((words >> _moved(TYPE, i)) & MASK) ^ MANTISSA).to(tl.float32, bitcast=True) - LESS


@triton.jit
def _with_group(acc, sums, shared, of, w, valid, k, TYPE: tl.constexpr, N: tl.constexpr):
    """acc and sums, N of float32 [W] each, times the scales of row `of` of shared; none if it is negative."""
    rows = shared.to(tl.pointer_type(tl.int64)) + of * (k // 32 * 8)
    real = valid & (of >= 0)
    at = _fours(w, TYPE)
    low = tl.load(rows + at, mask=real, other=0)
    high = low
    if TYPE == "Q4_0X32":
        high = tl.load(rows + at + 4, mask=real, other=0)
    more = ()
    for i in tl.static_range(N):
        d = half_float((low if i < 4 else high) >> (16 * (i % 4)))
        more = more + (acc[i] + sums[i] * d,)  # type: ignore[assignment]  # noqa: RUF005
    return more


@triton.jit
def _fours(w, TYPE: tl.constexpr):
    """The number of the four columns that words w of a row, of Q4_0X32 their low nibbles, have."""
    at = w
    if TYPE == "Q4_0X32":
        at = w // 4 * 8 + w % 4
    return at


@triton.jit
def _put_fours(to, at, sums, valid, first: tl.constexpr, TYPE: tl.constexpr):
    """Store four sums from number `first` on, as they are of `_codes_of`, side by side."""
    scaled = ()
    for i in tl.static_range(4):
        scaled = scaled + (sums[first + i] * (1 / (1 << _bit(TYPE, first + i))),)  # type: ignore[assignment]  # noqa: RUF005
    four = tl.join(tl.join(scaled[0], scaled[2]), tl.join(scaled[1], scaled[3]))  # type: ignore[misc]
    W: tl.constexpr = at.shape[0]
    c = at[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(to + c, tl.reshape(four, (W, 4)), mask=valid[:, None])


@triton.jit
def _listed_rows(listed, group, h, first, end, R: tl.constexpr):
    """Of R places of the list, one by one: rows of down, -1 where h is zero, of the shared scales, and h."""
    rows, groups, factors = (), (), ()
    for r in tl.static_range(R):
        live = first + r < end
        row = tl.load(listed + first + r, mask=live, other=0).to(tl.int64)
        by = tl.load(h + first + r, mask=live, other=0)
        rows = rows + (tl.where(by != 0, row, -1),)  # type: ignore[assignment]  # noqa: RUF005
        groups = groups + (_group_of(group, row, live),)  # type: ignore[assignment]  # noqa: RUF005
        factors = factors + (by,)  # type: ignore[assignment]  # noqa: RUF005
    return rows, groups, factors


@triton.jit
def _add_groups(
    data, shared, group, listed, h, parts, begin, end, k, across, TYPE: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """`_add_kernel` of one token and types that share scales: what rows in turn of one group give is added up, and
    multiplied by their scales at the last of them. A thread has sixteen bytes of each of R rows on their way."""
    N: tl.constexpr = 32 // _code_bits(TYPE)
    W: tl.constexpr = C // 4
    w = across * W + tl.arange(0, W)
    valid = w < k // N
    acc, nothing = (), ()
    for _ in tl.static_range(N):
        acc = acc + (tl.zeros((W,), tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
        nothing = nothing + (tl.zeros((W,), tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    sums = nothing
    of = tl.full((), -1, tl.int64)
    rows, groups, factors = _listed_rows(listed, group, h, begin, end, R)
    for i in range(begin, end, R):
        words = ()
        for r in tl.static_range(R):
            codes_at = data.to(tl.pointer_type(tl.int32)) + rows[r] * (k // 32 * (128 // N // 4))
            words = words + (tl.load(codes_at + w, mask=valid & (rows[r] >= 0), other=0),)  # type: ignore[assignment]  # noqa: RUF005
        read_rows, read_groups, by = rows, groups, factors
        rows, groups, factors = _listed_rows(listed, group, h, i + R, end, R)
        for r in tl.static_range(R):
            if (read_rows[r] >= 0) & (read_groups[r] != of):
                acc = _with_group(acc, sums, shared, of, w, valid, k, TYPE, N)
                sums = nothing
                of = read_groups[r]
            more = ()
            for j in tl.static_range(N):
                more = more + (sums[j] + by[r] * _codes_of(words[r], j, TYPE),)  # type: ignore[assignment]  # noqa: RUF005
            sums = more
    acc = _with_group(acc, sums, shared, of, w, valid, k, TYPE, N)
    at = _fours(w, TYPE)
    _put_fours(parts, at, acc, valid, 0, TYPE)
    if TYPE == "Q4_0X32":
        _put_fours(parts, at + 4, acc, valid, 4, TYPE)


@launched
@triton.jit(do_not_specialize=["tokens", "splits"])
def _add_kernel(
    data, scales, shared, group, listed, total, h, parts, tokens, n, k, splits,
    TYPE: tl.constexpr, T: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Sum of h [tokens, n] times the listed rows of down over a share of the list, in C columns of parts [splits,
    tokens, k]. Rows with an h of zero are not read.

    The next rows are looked up while the last ones are being loaded, so that they need not wait for it. HALVES: h is
    what `halves` makes of it.
    """
    follow()
    count = tl.load(total)
    length = (count + splits - 1) // splits
    begin = tl.program_id(1) * length
    end = tl.minimum(begin + length, count)
    parts += tl.program_id(1).to(tl.int64) * tokens * k
    add_rows(
        data, scales, shared, group, listed, h, parts, begin, end, tokens, n, k, tl.program_id(0), TYPE, T, R, C,
        PRECISION, HALVES,
    )  # fmt: skip


@triton.jit
def add_rows(
    data, scales, shared, group, listed, h, parts, begin, end, tokens, n, k, across,
    TYPE: tl.constexpr, T: tl.constexpr, R: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
    HALVES: tl.constexpr,
):  # fmt: skip
    """Sum over the places begin .. end of the list, in the columns of tile number `across`, to parts [tokens, k]."""
    if TYPE == "F32" or TYPE == "F16" or TYPE == "BF16":
        _add_floats(data, group, listed, h, parts, begin, end, tokens, n, k, across, TYPE, T, R, C, PRECISION, HALVES)
    elif not T and shares(TYPE):
        _add_groups(data, shared, group, listed, h, parts, begin, end, k, across, TYPE, R, C)
    else:
        _add_blocks(
            data, scales, shared, group, listed, h, parts, begin, end, tokens, n, k, across, TYPE, T, R, C, PRECISION,
            HALVES,
        )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------


def product_operands(
    neurons: Neurons, x: Tensor, other: Tensor, listed: bool, threshold: float
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """What kernels with `product` take: the arguments from x to product_limits, `other` for those that are not read,
    and what they are compiled for. listed: neurons are."""
    gate, up = neurons.gate, neurons.up
    first, bias = (up, neurons.up_bias) if gate is None else (gate, neurons.gate_bias)
    vectors = either(neurons.up_bias, other), either(neurons.limits, other), either(neurons.product_limits, other)
    operands = taken(x, up.type), first.data, either(first.scales, other), either(bias, other)
    return (*operands, up.data, either(up.scales, other), *vectors), {
        "GATED": gate is not None,
        "ACTIVATION": neurons.activation,
        "TYPE": up.type,
        "LISTED": listed,
        "GATE_BIAS": bias is not None,
        "UP_BIAS": neurons.up_bias is not None,
        "LIMITS": neurons.limits is not None,
        "PRODUCT_LIMITS": neurons.product_limits is not None,
        "THRESHOLD": threshold > 0,
    }


def neuron_sum(
    neurons: Neurons,
    x: Tensor,
    selected: Tensor | None,
    threshold: float,
    into: Tensor | None,
    fired: Tensor,
    dense: bool = False,
) -> Tensor:
    """`gpu.neuron_sum` of one to `gpu.FEW` tokens and at least one neuron. fired: grows; dense: down is quantised."""
    x = x.contiguous()
    tokens, n = x.shape[0], neurons.n
    kind = neurons.up.type
    tile = for_rows(DOT_ONE[kind], kind, neurons.up.k) if in_turn(kind, tokens) else DOT_SEVERAL[kind]
    selected = None if selected is None else selected.contiguous()
    to_list = None if dense else selected
    if tokens > 1 and in_turn(kind, tokens) and to_list is not None:
        tile = tile._replace(rows=1)  # of those that some token selects another one skips no part of a tile
    blocks, tiles = triton.cdiv(n, LIST), triton.cdiv(n, tile.rows)
    programs = tiles
    if tokens == 1:
        programs = min(tiles, HELD_PRODUCTS // tile.warps * processors(x))

    def numbers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=x.device)

    listed, length = fired, fired
    if to_list is not None:
        listed, length = numbers(n), numbers(1)
        counts, pieces, per = to_list, n, LIST
        if tokens > 1:
            counts, pieces, per = numbers(blocks), blocks, 1
            _count_kernel[(blocks,)](to_list, counts, tokens, n, BLOCK=LIST, launch_pdl=early(x))
        _list_kernel[(blocks,)](
            to_list, listed, counts, listed, listed, length, tokens, n, pieces, per,
            LISTED=False, KEEP=False, BYTES=tokens == 1, BLOCK=LIST, COUNTS=READ if tokens == 1 else LIST,
            launch_pdl=early(x),
        )  # fmt: skip
    h = torch.empty((tokens, n), dtype=torch.float32, device=x.device)
    counts = numbers(tiles)
    operands, flags = product_operands(neurons, x, h, to_list is not None, threshold)
    _products_kernel[(programs,)](
        *operands, either(selected, h), listed, length, h, fired, counts, tokens, n, neurons.up.k, neurons.threshold,
        threshold, **flags, CHOSEN=selected is not None, T=columns(kind, tokens), R=tile.rows, C=tile.columns,
        PRECISION=precision(x), HALVES=halved(kind, tokens), num_warps=tile.warps, num_stages=STAGES,
        launch_pdl=early(x),
    )  # fmt: skip
    if dense:
        return row_sums(neurons.down, neurons.shared, h, into)
    down = neurons.down, neurons.shared, neurons.group
    if selected is not None:  # most of what a selector selects fires: not worth another list
        return _down(*down, h, listed, length, into)
    return sum_firing(*down, h, None, counts, tile.rows, into)


def sum_firing(
    down: Weight,
    shared: Tensor | None,
    group: Tensor | None,
    h: Tensor,
    at: Tensor | None,
    counts: Tensor,
    each: int,
    into: Tensor | None = None,
) -> Tensor:
    """Sum of h [T, n] times the rows of down where it is not zero, float32 [T, d_model], or `into`, that much more.

    down, shared, group: as `Neurons` has them; without groups they are of 32 rows. at: int32 [n], the row of each place
    in h, None: the place itself. counts: int32, of every `each` places those that are not zero for some token.
    """
    (tokens, n), numbers = h.shape, partial(torch.empty, dtype=torch.int32, device=h.device)
    rows, total, kept = numbers(n), numbers(1), torch.empty_like(h)
    _list_kernel[(triton.cdiv(n, LIST),)](
        h, either(at, rows), counts, rows, kept, total, tokens, n, len(counts), LIST // each,
        LISTED=at is not None, KEEP=True, BYTES=False, BLOCK=LIST, COUNTS=LIST,
        launch_pdl=early(h),
    )  # fmt: skip
    return _down(down, shared, group, kept, rows, total, into)


def add_grid(down: Weight, n: int, tokens: int, multiprocessors: int) -> tuple[int, int]:
    """Programs across the columns of n rows of down, and along the list."""
    tile = (ADD_SEVERAL if tokens > 1 else ADD_ONE)[down.type]
    across = triton.cdiv(row_width(down.type, down.k), tile.columns)
    slots = (HELD_SEVERAL if tokens > 1 else HELD_ONE)[down.type] * multiprocessors
    return across, max(1, min(slots // across, triton.cdiv(n, ADD_ROUNDS * tile.rows)))


def _down(
    down: Weight,
    shared: Tensor | None,
    group: Tensor | None,
    h: Tensor,
    rows: Tensor,
    total: Tensor,
    into: Tensor | None,
) -> Tensor:
    """Sum of h [T, n] times the listed rows of down, float32 [T, d_model], or `into`, that much more."""
    tokens, n = h.shape
    tile = (ADD_SEVERAL if tokens > 1 else ADD_ONE)[down.type]
    across, splits = add_grid(down, n, tokens, processors(h))
    parts = torch.empty((splits, tokens, down.k), dtype=torch.float32, device=h.device)
    two = tokens > 1 and down.type not in ("F32", "BF16")
    _add_kernel[(across, splits)](
        down.data, either(down.scales, h), either(shared, h), group, rows, total, halves(h, total) if two else h,
        parts, tokens, n, down.k, splits,
        TYPE=down.type, T=tensor_columns(tokens, two) if tokens > 1 else 0, R=tile.rows, C=tile.columns,
        PRECISION=precision(h), HALVES=two, num_warps=tile.warps, num_stages=STAGES,
        launch_pdl=early(h),
    )  # fmt: skip
    if splits == 1 and into is None:
        return parts[0]
    out = torch.empty((tokens, down.k), dtype=torch.float32, device=h.device) if into is None else into
    add_up(parts, out, into is not None, SUM)
    return out
