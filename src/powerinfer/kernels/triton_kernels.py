"""Triton kernels of `gpu`: each program writes only its own outputs and adds nothing by atomics: the same bits again.

Launches depend only on shapes, never on data, and nothing waits for the host: a step can be recorded as a CUDA graph.
Only `gpu` imports this file, and only to run its kernels: that takes a second and needs Triton.

In the kernels TYPE is the type of a Weight, T the columns of a product with several tokens (0: there is one token, 1:
they are computed in turn), R and C the rows and columns of a tile, and PRECISION how tensor cores multiply. Kernels are
not specialised on numbers or addresses that change from step to step: otherwise they would be compiled while a request
waits.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import cuda_capability_geq

from powerinfer.kernels.gpu_types import FEW, FOUR_BITS, INTEGERS, K_CODES, MADE_CODES, UNPACKED
from powerinfer.kernels.gpu_types import Q8_STEP as Q8
from powerinfer.kernels.gpu_words import table
from powerinfer.kernels.triton_launch import launched
from powerinfer.kernels.triton_words import (
    INTERPRETED,
    NIBBLES,
    ONE_BIT,
    TWO_BITS,
    code_bytes,
    fours,
    half_float,
    piece_minimum,
    piece_scales,
    pieces_from,
    unpacked,
    unpacks,
    with_minimum,
)

if TYPE_CHECKING:
    from torch import Tensor

    from powerinfer.config import AttentionConfig, LatentAttentionConfig
    from powerinfer.kernels.gpu_types import Cached, CallAnswer, Contexts, HeadNorms, NewHeads, Weight


class Tile(NamedTuple):
    """The tile of a program: rows of a matrix, columns (of `FOUR_BITS` bytes, two columns each), and its warps."""

    rows: int
    columns: int
    warps: int


# One token: every thread loads some bytes of each of several rows, so that a program has 8 KB and more in flight. Of
# types in `INTEGERS` sixteen, and no other layout of threads, or x would have to pass through shared memory.
ONE = {
    "F32": Tile(4, 512, 4),
    **dict.fromkeys(("F16", "BF16", "MXFP4"), Tile(4, 1024, 4)),
    **dict.fromkeys(("Q4_0", *K_CODES, *UNPACKED), Tile(4, 2048, 4)),
    "Q8_0": Tile(4, 4096, 4),
    "Q2_0": Tile(2, 2048, 4),
}
# Several tokens: tiles for tensor cores, whose operands come in stages.
SEVERAL = {**dict.fromkeys(ONE, Tile(32, 128, 4)), **dict.fromkeys(("F32", "BF16"), Tile(64, 64, 4))}
SEVERAL |= {**dict.fromkeys(FOUR_BITS, Tile(32, 64, 4)), "Q8_0": Tile(16, 128, 4), "Q4_0": Tile(32, 32, 2)}
# Several tokens whose products are of float32, not of halves: experts' and those with latents.
WIDE = {**dict.fromkeys(ONE, Tile(64, 64, 4)), **dict.fromkeys((*FOUR_BITS, "NVFP4"), Tile(64, 32, 4))}

# Warps of products with one token that a multiprocessor holds, by their registers as compiled for sm_90: so many fill
# a GPU. HELD_TOGETHER: with up to `TOGETHER` tokens.
HELD = {
    "F32": 40, "F16": 24, "BF16": 24, "Q8_0": 40, "Q4_0": 40, "MXFP4": 16, "Q4_K": 20, "Q5_K": 24, "Q6_K": 24,
    "Q3_K": 16, "Q2_K": 32, "TQ2_0": 32, "TQ1_0": 20, "IQ3_S": 20, "IQ3_XXS": 24, "IQ2_XS": 28, "IQ2_XXS": 32,
    "IQ2_S": 24, "IQ1_S": 24, "IQ1_M": 24, "IQ4_XS": 32, "NVFP4": 32, "Q2_0": 40, "Q1_0": 32,
}  # fmt: skip
HELD_TOGETHER = {"Q8_0": 20, "Q4_0": 20, "Q4_K": 12, "Q5_K": 12, "Q6_K": 16} | dict.fromkeys(UNPACKED, 16)
HELD_TOGETHER |= {**dict.fromkeys(("TQ2_0", "IQ2_XS", "IQ2_XXS"), 20), "Q2_0": 24}
TOGETHER = 4  # tokens whose sums a program has at a time
PROGRAMS = 24  # that a multiprocessor holds at most, however small they are
IN_TURN = 8  # tokens at most whose products are of integers
LEAST_SEVERAL = 1.5  # at least so many for each multiprocessor, where a matrix has the rows for smaller tiles
LEAST_TILES = 4  # of a row for each program, where several share it
SPLITS = (8, 128)  # splits, and numbers, that a program adds up at a time
NEARLY = 0.9  # of what the best tile fills suffices
LEAST_ROWS = 16  # of a tile for tensor cores
SUMMED = 4096  # counts of selected neurons at a time
NUMBER_BITS = tl.constexpr(20)  # of a neuron's number: a layer has fewer than a million

LINE = tl.constexpr(128)  # bytes of a cache
ASKED = 32 << 10  # bytes that a program asks for before it begins: of all programs of an H100 together 35 MB
WORDS = tl.constexpr(20)  # that `codes` makes of a block
CODED_BLOCKS = 64  # blocks of which a program makes them
LEAST = tl.constexpr(2.0**-120)  # blocks with nothing larger become zeros: their quotients would overflow
SIXTEENS = tl.constexpr(int.from_bytes(bytes([0xF0] * 4), "little", signed=True))  # of each byte the high four bits
Q8_STEP = tl.constexpr(Q8)  # of 32 values in 8 bits, by their largest
_MANTISSA, _BIG = tl.constexpr(0x4B000000), tl.constexpr(2.0**23)
LOW = tl.constexpr(2.0**11)  # that low halves are larger
HALVED = 8192  # values that a program splits at a time
STAGES = 4  # of the operands of tensor cores
ROUNDS = tl.constexpr(1.5 * 2**23)  # added and subtracted again, it rounds to an integer, ties to even
VALUES = 64  # blocks of a row that a program dequantises
ATTENTION_ROWS = 32  # of a tile of scores in float32, in prompts: tokens times heads that share keys
# The same in F16: rows, places of keys at a time, and warps, by the most dimensions of a head that they are for. A
# multiprocessor holds one program. No registers spill: they would with 128 rows of 256 dimensions and, but on Hopper,
# with 64 places of 128, or of Q8_0.
PROMPT_TILES = {64: (128, 64, 8), 128: (128, 64, 8), 256: (64, 32, 8), 512: (32, 16, 8)}
AMPERE_TILE = 128, 32, 8
ATTENTION_HELD = 2  # a context is split for this many programs of each multiprocessor, which holds no more (`held`),
ATTENTION_SPLIT_PAGES = 4  # but into none of fewer pages,
JOINED = 8  # unless it is in so many parts at most, which need no kernel of their own to be joined
WIDEST = 256  # dimensions of heads whose keys are read by whole pages; of wider ones half of them, and half a tile
WIDE_HEADS = 140 << 10  # bytes of shared memory for two programs whose heads have 256 dimensions

# ---------------------------------------------------------------------------------------------------------------------
# One kernel after another


@triton.jit
def follow():
    """Where a kernel begins that may be launched `early`: lets the next one be launched, and waits until the one before
    has ended, which waited likewise. A kernel without this is launched when all has ended."""
    if not INTERPRETED:  # noqa: SIM102 - known when it is compiled
        if cuda_capability_geq(9, 0):
            gdc_launch_dependents()
            gdc_wait()


@triton.jit
def settle(cold, counters, answered, number):
    """Note how many selections are the CPU's, and answer its call if none is; see `CallAnswer`."""
    tl.store(counters, cold)
    if cold == 0:
        tl.store(answered, number, cache_modifier=".wt")


@triton.jit
def settle_together(cold, counters, answered, number, programs):
    """The same of so many programs, each of which has some of them: whichever finishes last does it."""
    tl.atomic_add(counters + 1, cold)
    if tl.atomic_add(counters + 2, 1, sem="acq_rel") == programs - 1:
        tl.store(counters + 2, 0)
        settle(tl.atomic_xchg(counters + 1, 0), counters, answered, number)


@triton.jit
def share(total):
    """Of so many in turn those of this program, from .. to: shares differ by one at most."""
    program, each, more = tl.program_id(0), total // tl.num_programs(0), total % tl.num_programs(0)
    begin = program * each + tl.minimum(program, more)
    return begin, begin + each + (program < more).to(tl.int32)


@triton.jit
def ask_for(data, row, rows, k, TYPE: tl.constexpr, LINES: tl.constexpr):
    """Asks for the first LINES lines of rows [R] of a matrix of `rows` to be brought into the L2 cache. Before a kernel
    waits, for weights do not depend on the one before, whose end would otherwise leave the memory idle."""
    if not INTERPRETED:  # noqa: SIM102 - as above
        if cuda_capability_geq(9, 0):
            width = stored_width(k, TYPE)
            begin = data.to(tl.int64) + tl.minimum(row, rows - 1).to(tl.int64) * width
            line = tl.minimum(tl.arange(0, LINES) * LINE, width - 1)
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [begin[:, None] + line[None, :]], dtype=tl.int32,
                is_pure=False, pack=1,
            )  # fmt: skip


@triton.jit
def stored_width(k, TYPE: tl.constexpr):
    """Bytes of a row of k elements, without the scales that are beside it."""
    if TYPE == "F32":
        width = 4 * k
    elif TYPE == "F16" or TYPE == "BF16":
        width = 2 * k
    elif TYPE == "Q8_0":
        width = k
    elif unpacks(TYPE):
        width = k // 32 * code_bytes(TYPE) // 8
    elif TYPE == "Q6_K":
        width = k // 4 * 3
    elif TYPE == "Q5_K":
        width = k // 8 * 5
    else:
        width = k // 2
    return width


def asked_lines(w: Weight, rows: int) -> int:
    """Lines of each row that a program of that many `rows` asks for: a power of two."""
    width = w.data.nbytes // w.rows
    return int(triton.next_power_of_2(max(1, min(-(-width // LINE.value), ASKED // (LINE.value * rows)))))


def early(x: Tensor) -> bool:
    """Whether x's device can launch a kernel's programs while the last ones of the kernel before still run (CUDA's
    programmatic dependent launch; Hopper and later): a step of one token has hundreds of kernels of a few us."""
    return x.is_cuda and _early(x.device.index)


@cache
def _early(device: int) -> bool:
    return bool(torch.cuda.get_device_capability(device) >= (9, 0))


# ---------------------------------------------------------------------------------------------------------------------
# Rows of a matrix against the activations


@triton.constexpr_function
def of_integers(kind):
    return kind in INTEGERS


@triton.constexpr_function
def tile_columns(kind, columns):
    """Elements of a row in so many columns of a tile, as `Tile` counts them."""
    return columns * (2 if kind in FOUR_BITS or kind == "Q4_0X32" else 1)


@triton.constexpr_function
def k_quant(kind):
    return kind in K_CODES


@triton.jit
def small(i):
    """Integers below 2 ** 23, not negative, int32, as float32: as bits of a float that is 2 ** 23 more. A GPU has an
    eighth of the rate for converting integers, and that would bound products of quantised weights."""
    return (i | _MANTISSA).to(tl.float32, bitcast=True) - _BIG


@triton.jit
def small_signed(c):
    """int8, or the bytes of it, as float32, see `small`."""
    return small((c.to(tl.uint8, bitcast=True) ^ 128).to(tl.int32)) - 128


@triton.jit
def nibbles(pairs):
    """The low and the high values in bytes of Q4_0 codes, sixteen times as large, as float32."""
    p = pairs.to(tl.int32)  # see `small`; of numbers in two's complement the sign counts 128 after it is flipped
    low = ((p << 4 & 0xF0) ^ (_MANTISSA | 128)).to(tl.float32, bitcast=True) - (_BIG + 128)
    return low, ((p & 0xF0) ^ (_MANTISSA | 128)).to(tl.float32, bitcast=True) - (_BIG + 128)


@triton.jit
def _e2m1(codes):
    """Sixteen times the values of MXFP4 codes, as float32."""
    c = small((codes & 7).to(tl.int32))
    size = tl.where(c < 4, 8 * c, tl.where(c < 6, 16 * c - 32, 32 * c - 128))
    return tl.where((codes & 8) != 0, -size, size)


@triton.jit
def pair_values(pairs, TYPE: tl.constexpr):
    """The low and the high values in bytes of 4-bit codes, sixteen times as large, as float32."""
    if TYPE == "MXFP4":
        low, high = _e2m1(pairs), _e2m1(pairs >> 4)
    else:
        low, high = nibbles(pairs)
    return low, high


@triton.jit
def scale_values(d, TYPE: tl.constexpr):
    """Scales as float32; of MXFP4 powers of two, the least of which count as zero."""
    return (d.to(tl.int32) << 23).to(tl.float32, bitcast=True) if TYPE == "MXFP4" else d.to(tl.float32)


@triton.jit
def _half_step(most):
    """The scale of `halves` of which the largest is that large, and what they are multiplied with before."""
    exponent = tl.minimum(most, 3e38).to(tl.int32, bitcast=True) >> 23
    exponent = tl.maximum(exponent - 14, 1)
    return (exponent << 23).to(tl.float32, bitcast=True), ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _two_halves(v):
    """The high and the low halves of values below 2 ** 16."""
    high = v.to(tl.float16)
    return high, ((v - high.to(tl.float32)) * LOW).to(tl.float16)


@launched
@triton.jit(do_not_specialize=["tokens"])
def _halves_kernel(x, out, length, tokens, k, LIMITED: tl.constexpr, BLOCK: tl.constexpr):
    """A token's row of x [tokens, k] as halves, see `halves`; LIMITED: the first `length` columns alone."""
    follow()
    t = tl.program_id(0)
    n = k
    if LIMITED:
        n = tl.load(length)
    x += t.to(tl.int64) * k
    most = tl.zeros((BLOCK,), tl.float32)
    for i0 in range(0, n, BLOCK):
        i = i0 + tl.arange(0, BLOCK)
        most = tl.maximum(most, tl.abs(tl.load(x + i, mask=i < n, other=0)))
    scale, inverse = _half_step(tl.max(most, 0))
    for i0 in range(0, n, BLOCK):
        i = i0 + tl.arange(0, BLOCK)
        high, low = _two_halves(tl.load(x + i, mask=i < n, other=0) * inverse)
        tl.store(out + t * k + i, high, mask=i < n)
        tl.store(out + (tokens + t) * k + i, low, mask=i < n)
    tl.store((out + 2 * tokens * k).to(tl.pointer_type(tl.float32)) + t, scale)


def halves(x: Tensor, length: Tensor | None = None) -> Tensor:
    """x float32 [tokens, k] = scale * (high + low / 2 ** 11), to 22 bits of a token's largest value: float16 [2,
    tokens, k], the high and the low halves, and behind them a float32 scale a token, a power of two, as bytes.

    Tensor cores multiply halves with weights of float16 without rounding. length: int32 [1], the columns that count.
    """
    tokens, k = x.shape
    out = torch.empty(2 * tokens * (k + 1), dtype=torch.float16, device=x.device)
    block = min(HALVED, triton.next_power_of_2(k))
    _halves_kernel[(tokens,)](
        x.contiguous(), out, either(length, out), tokens, k, LIMITED=length is not None, BLOCK=block, num_warps=8,
        launch_pdl=early(x),
    )  # fmt: skip
    return out


@launched
@triton.jit
def _narrow_kernel(x, out, scales, k, BLOCK: tl.constexpr):
    """A row of x [rows, k] as float16, see `Activations.narrowed`."""
    narrow_row(x, out, scales, tl.program_id(0).to(tl.int64), k, BLOCK)


@triton.jit
def narrow_row(x, out, scales, t, k, BLOCK: tl.constexpr):
    """Row t of x [rows, k] as float16, see `Activations.narrowed`."""
    most = tl.zeros((BLOCK,), tl.float32)
    for i0 in range(0, k, BLOCK):
        i = i0 + tl.arange(0, BLOCK)
        most = tl.maximum(most, tl.abs(tl.load(x + t * k + i, mask=i < k, other=0)))
    exponent = (tl.minimum(tl.max(most, 0), 3e38).to(tl.int32, bitcast=True) >> 23) + 1
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    for i0 in range(0, k, BLOCK):
        i = i0 + tl.arange(0, BLOCK)
        v = tl.load(x + t * k + i, mask=i < k, other=0) * inverse
        tl.store(out + t * k + i, v.to(tl.float16), mask=i < k)
    tl.store(scales + t, (exponent << 23).to(tl.float32, bitcast=True))


def narrowed(x: Tensor) -> tuple[Tensor, Tensor]:
    """`Activations.narrowed` of float16."""
    *rows, k = x.shape
    out = torch.empty(x.shape, dtype=torch.float16, device=x.device)
    scales = torch.empty((*rows, 1), dtype=torch.float32, device=x.device)
    if out.numel():
        block = min(HALVED, triton.next_power_of_2(k))
        _narrow_kernel[(scales.numel(),)](x.contiguous(), out, scales, k, BLOCK=block, num_warps=8)
    return out, scales


@triton.jit
def lanes(tokens, T: tl.constexpr, HALVES: tl.constexpr):
    """Rows of x [tokens, k] that a product with T tokens reads, and which of them there are; of halves, two a token."""
    n = tl.arange(0, (2 * T if HALVES else T) if T else 1)
    at = n
    if HALVES:
        at = n // T * tokens + n % T
        n = n % T
    return at, n < tokens


@triton.jit
def half_scales(x, tokens, k, T: tl.constexpr):
    """Those behind the halves of x, float32 [T]."""
    t = tl.arange(0, T)
    return tl.load((x + 2 * tokens * k).to(tl.pointer_type(tl.float32)) + t, mask=t < tokens, other=0)


@launched
@triton.jit
def _codes_kernel(x, out, stride, k, B: tl.constexpr):
    """B blocks of a row of x [rows, k], rows `stride` apart, as `codes`."""
    follow()
    row, b = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    c = b[:, None] * 32 + tl.arange(0, 32)[None, :]
    v = tl.load(x + row * stride + c, mask=(b < k // 32)[:, None], other=0)
    put_codes(out, row, v, b, b < k // 32, k, B)


@triton.jit
def put_codes(out, row, v, b, here, k, B: tl.constexpr):
    """Store those of blocks b [B] of a row, or of row [B] each, of k values: v [B, 32], as `codes`."""
    blocks = k // 32
    finite = tl.abs(v) < float("inf")
    wrong = tl.max(tl.where(finite, 0, 1), 1) > 0
    v = tl.where(finite, v, 0.0)
    peak = tl.max(tl.abs(v), 1)
    some = peak >= LEAST
    by = tl.where(some, tl.div_rn(tl.full((B,), 127.0, tl.float32), tl.where(some, peak, 1.0)), 0.0)
    step = tl.where(wrong, float("nan"), peak * Q8_STEP)
    scaled = v * by[:, None]
    high = (scaled + ROUNDS) - ROUNDS
    low = ((scaled - high) * 256.0 + ROUNDS) - ROUNDS
    low = tl.where(low > 127.0, 127.0, low)
    first = row * (WORDS * blocks) + b * 0
    word = (first + b * 8)[:, None] + tl.arange(0, 8)[None, :]
    tl.store(out + word, _packed(high.to(tl.int32), B), mask=here[:, None])
    tl.store(out + blocks * 8 + word, _packed(low.to(tl.int32), B), mask=here[:, None])
    behind = (out + blocks * 16).to(tl.pointer_type(tl.float32))
    tl.store(behind + first + b, step * (1 / 256), mask=here)
    sums = tl.sum(tl.reshape(high * 256.0 + low, (B, 2, 16)), 2)
    tl.store(behind + blocks + (first + b * 2)[:, None] + tl.arange(0, 2)[None, :], sums, mask=here[:, None])


@triton.jit
def _packed(q, B: tl.constexpr):
    """int8 [B, 32] as words [B, 8] of four, the first of which is the lowest."""
    return tl.sum((tl.reshape(q, (B, 8, 4)) & 255) << (8 * tl.arange(0, 4))[None, None, :], 2)


def codes(x: Tensor) -> Tensor:
    """Rows of x, float32 [rows, k] with rows that may be further apart, to 15 bits of the largest of each 32 values:
    value i of a block is step * (256 * high[i] + low[i]). int32 [rows, WORDS * k / 32], and of each row:

    high: int8 [k], low: int8 [k], steps: float32 [k / 32], sums of 256 * high + low over 16 values: float32 [k / 16],
    and k / 32 words that say nothing, so that rows are aligned.

    Where the kernel that wrote x has made them, they are those.
    """
    rows, k = x.shape
    assert x.stride(1) == 1
    if (made := getattr(x, MADE_CODES, None)) is not None:
        assert made.shape == (rows, WORDS * k // 32)
        return cast("Tensor", made)
    out = _empty_codes(x, rows, k)
    block = min(CODED_BLOCKS, triton.next_power_of_2(k // 32))
    _codes_kernel[(rows, triton.cdiv(k // 32, block))](
        x,
        out,
        x.stride(0),
        k,
        B=block,
        num_warps=warps(32 * block, 8),
        enable_fp_fusion=False,
        launch_pdl=early(x),
    )
    return out


def coded(x: Tensor, rows: int, k: int, most: int = IN_TURN) -> Tensor | None:
    """Room for `codes` that a kernel makes beside x, its result, which is float32 [rows, k] to those that follow; None
    where these do not take any. It takes fewer launches. Nobody may write to x any more, or they are of other values.
    most: rows of which a kernel makes them.
    """
    vars(x).pop(MADE_CODES, None)  # of an earlier result
    if rows > most or k % 32:
        return None
    made = _empty_codes(x, rows, k)
    setattr(x, MADE_CODES, made)
    return made


def _empty_codes(x: Tensor, rows: int, k: int) -> Tensor:
    return torch.empty((rows, WORDS * k // 32), dtype=torch.int32, device=x.device)


@triton.jit
def _dot_bytes(a, b, c):
    """c + the sum of four products: of int8 in a with those in b."""
    if INTERPRETED:
        for i in tl.static_range(4):
            c += ((a << (24 - 8 * i)) >> 24) * ((b << (24 - 8 * i)) >> 24)
    else:
        c = tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
        )
    return c


@triton.jit
def _dots_of_fours(four, x, at, mask, sums, R: tl.constexpr, W: tl.constexpr):
    """sums int32 [R, W / 4] and the products of four words of codes each, as `fours` gives them, with those at `at`
    [W]."""
    of_x = fours(tl.load(x + at, mask=mask, other=0)[None, :], 1, W)
    for i in tl.static_range(4):
        sums = _dot_bytes(four[i], tl.broadcast_to(of_x[i], (R, W // 4)), sums)
    return sums


@triton.jit
def _dots_of_words(words, x, at, mask, sums, R: tl.constexpr, W: tl.constexpr):
    """`_dots_of_fours` of words [R, W]."""
    return _dots_of_fours(fours(words, R, W), x, at, mask, sums, R, W)


@triton.jit
def _word_dots(left, right, x, at, then, here, blocks, R: tl.constexpr, W: tl.constexpr):
    """Sums of products, int32 [R, W / 4], of words of codes [R, W] with x's, see `codes`: of left with those at `at`
    [W], and of right with those at `then`; right: None, there are none."""
    sums = tl.zeros((R, W // 4), tl.int32)
    for plane in tl.static_range(2):
        own = x + plane * blocks * 8
        sums = _dots_of_words(left, own, at, here, sums << 8 if plane else sums, R, W)
        if right is not None:
            sums = _dots_of_words(right, own, then, here, sums, R, W)
    return sums


@triton.jit
def _zeros(G: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """G sums [R, C] of nothing."""
    sums = ()
    for _ in tl.static_range(G):
        sums = sums + (tl.zeros((R, C), tl.float32),)  # type: ignore[assignment]  # noqa: RUF005 - the compiler knows no other form
    return sums


@triton.jit
def _coded_dots(
    x, data, scales, row, live, tokens, k, TYPE: tl.constexpr, G: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """`dots_together` of Q8_0 and Q4_0, before the last sum: C columns of a row at a time, of Q4_0 bytes.

    A thread has sixteen bytes of each row, which are in the order of x's.
    """
    B: tl.constexpr = C // (32 if TYPE == "Q8_0" else 16)
    W: tl.constexpr = 4 * B
    blocks = k // 32
    words = data.to(tl.pointer_type(tl.int32))
    sums = _zeros(G, R, B)
    for b0 in range(0, blocks, B):
        w = b0 * 4 + tl.arange(0, W)
        there = w < blocks * 4
        own = live[:, None] & there[None, :]
        first = w // 4 * 8 + w % 4  # of the words of the first half of a block; those of the second are 4 further on
        if TYPE == "Q8_0":
            at = row[:, None] * (blocks * 8) + first[None, :]
            left, right = tl.load(words + at, mask=own, other=0), tl.load(words + at + 4, mask=own, other=0)
        else:  # sixteen times the codes
            pairs = tl.load(words + row[:, None] * (blocks * 4) + w[None, :], mask=own, other=0)
            left, right = (pairs << 4) & SIXTEENS, pairs & SIXTEENS
        b = b0 + tl.arange(0, B)
        more = ()
        for t in tl.static_range(G):
            own = x + tl.minimum(t, tokens - 1) * taken_width(k, TYPE)
            dots = _word_dots(left, right, own, first, first + 4, there, blocks, R, W)
            if t == 0:
                here = live[:, None] & (b < blocks)[None, :]
                d = tl.load(scales + row[:, None] * blocks + b[None, :], mask=here, other=0).to(tl.float32)
                if TYPE == "Q4_0":
                    d *= 0.0625
            step = tl.load((own + blocks * 16).to(tl.pointer_type(tl.float32)) + b, mask=b < blocks, other=0)
            value = dots.to(tl.float32) * (d * step[None, :])
            more = more + (sums[t] + value,)  # type: ignore[assignment]  # noqa: RUF005
        sums = more
    return sums


@triton.jit
def _steps(first, last, width, step: tl.constexpr):
    """Where the tiles `first` to `last` of a row begin and end, of `step` each; first: None, all of its width."""
    if first is None:
        return 0, width
    else:  # the compiler goes on behind a return
        return first * step, tl.minimum(last * step, width)


@triton.jit
def _dots_4bit(
    x, data, scales, row, live, t, real, k, first, last,
    TYPE: tl.constexpr, T: tl.constexpr, R: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
    HALVES: tl.constexpr,
):  # fmt: skip
    """`row_dots` of Q4_0, several tokens, and MXFP4: C bytes of a row at a time."""
    B: tl.constexpr = C // 16
    NARROW: tl.constexpr = x.dtype.element_ty
    acc = tl.zeros((R, (2 * T if HALVES else T) if T else B), tl.float32)
    blocks = k // 32
    begin, end = _steps(first, last, blocks, B)
    for b0 in range(begin, end, B):
        b = b0 + tl.arange(0, B)
        j = tl.arange(0, 16)[None, :]
        here = live[:, None] & (b < blocks)[None, :]
        at = row[:, None, None] * (blocks * 16) + (b[:, None] * 16 + j)[None]
        pairs = tl.load(data + at, mask=here[:, :, None], other=0)
        d = scale_values(tl.load(scales + row[:, None] * blocks + b[None, :], mask=here, other=0), TYPE) * 0.0625
        low, high = pair_values(pairs, TYPE)
        if T:
            c = b0 * 32 + tl.arange(0, C) // 16 * 32 + tl.arange(0, C) % 16
            ok = (c < k)[:, None] & real[None, :]
            x_at = x + t[None, :] * k + c[:, None]
            low, high = tl.reshape(low * d[:, :, None], (R, C)), tl.reshape(high * d[:, :, None], (R, C))
            acc = tl.dot(low.to(NARROW), tl.load(x_at, mask=ok, other=0), acc, input_precision=PRECISION)
            acc = tl.dot(high.to(NARROW), tl.load(x_at + 16, mask=ok, other=0), acc, input_precision=PRECISION)
        else:
            x_at = x + b[:, None] * 32 + j
            x_low = tl.load(x_at, mask=(b < blocks)[:, None], other=0)
            x_high = tl.load(x_at + 16, mask=(b < blocks)[:, None], other=0)
            acc += tl.sum(low * x_low[None] + high * x_high[None], 2) * d
    return acc


@triton.jit
def _six_bits(first, second, third, j):
    """Scale and minimum of blocks of 32 elements, number j of 256: Q4_K and Q5_K have 8 of each in three words."""
    shift = 8 * (j % 4)
    first, second, third = first >> shift & 255, second >> shift & 255, third >> shift & 255
    scale = tl.where(j < 4, first & 63, (third & 15) | (first >> 6 << 4))
    least = tl.where(j < 4, second & 63, (third >> 4) | (second >> 6 << 4))
    return small(scale), small(least)


@triton.jit
def _k_scales(scales, row, u, here, k, TYPE: tl.constexpr):
    """Of each row [R] the scale and what is subtracted, of the low and of the high codes of pieces u [U] of sixteen
    bytes of four bits: float32 [R, U] each. Of Q6_K nothing is subtracted, but codes have an offset of 32."""
    HEADER: tl.constexpr = 18 if TYPE == "Q6_K" else 16
    s, v = u // 8, u % 8
    # Threads lie along the pieces in this order of the axes, and need not pass on what they decode.
    here = tl.trans(here)
    header = scales + (s * HEADER)[:, None] + row[None, :] * (k // 256 * HEADER)
    if TYPE == "Q6_K":
        d = half_float(tl.load((header + 16).to(tl.pointer_type(tl.int16)), mask=here, other=0))
        own = header + (v // 4 * 8 + v % 4 // 2 * 2 + v % 2)[:, None]
        low_scale = d * small_signed(tl.load(own, mask=here, other=0))
        high_scale = d * small_signed(tl.load(own + 4, mask=here, other=0))
        low_least = tl.zeros_like(low_scale)
        high_least = tl.zeros_like(low_scale)
    else:
        chunk = (v // 2)[:, None]
        words = header.to(tl.pointer_type(tl.int32))
        both = tl.load(words, mask=here, other=0)
        d, least = half_float(both), half_float(both >> 16)
        first = tl.load(words + 1, mask=here, other=0)
        second = tl.load(words + 2, mask=here, other=0)
        third = tl.load(words + 3, mask=here, other=0)
        low_scale, low_least = _six_bits(first, second, third, 2 * chunk)
        high_scale, high_least = _six_bits(first, second, third, 2 * chunk + 1)
        low_scale *= d
        high_scale *= d
        low_least *= least
        high_least *= least
    return tl.trans(low_scale), tl.trans(high_scale), tl.trans(low_least), tl.trans(high_least)


@triton.jit
def _k_pieces(data, scales, row, u, here, k, TYPE: tl.constexpr):
    """Of each row [R] the codes in low and high nibbles of pieces u [U], float32 [R, U, 16], and `_k_scales`."""
    CODES: tl.constexpr = 192 if TYPE == "Q6_K" else 160 if TYPE == "Q5_K" else 128  # bytes of 256 elements
    j = tl.arange(0, 16)[None, None, :]
    s, v = u // 8, u % 8
    begin = data + row[:, None, None] * (k // 256 * CODES) + (s * CODES)[None, :, None]
    wide = here[:, :, None]
    if TYPE == "Q6_K":
        half, p, part = v // 4, v % 4 // 2, v % 2
        pairs = tl.load(begin + (v * 16)[None, :, None] + j, mask=wide, other=0).to(tl.int32)
        two = tl.load(begin + (128 + half * 32 + part * 16)[None, :, None] + j, mask=wide, other=0).to(tl.int32)
        shift = (2 * p)[None, :, None]
        low = small((pairs & 15) | ((two >> shift & 3) << 4)) - 32
        high = small((pairs >> 4) | ((two >> (shift + 4) & 3) << 4)) - 32
    else:
        chunk, part = v // 2, v % 2
        pairs = tl.load(begin + (CODES - 128 + v * 16)[None, :, None] + j, mask=wide, other=0).to(tl.int32)
        low, high = pairs & 15, pairs >> 4
        if TYPE == "Q5_K":
            one = tl.load(begin + (part * 16)[None, :, None] + j, mask=wide, other=0).to(tl.int32)
            shift = (2 * chunk)[None, :, None]
            low |= (one >> shift & 1) << 4
            high |= (one >> (shift + 1) & 1) << 4
        low, high = small(low), small(high)
    low_scale, high_scale, low_least, high_least = _k_scales(scales, row, u, here, k, TYPE)
    return low, high, low_scale, high_scale, low_least, high_least


@triton.jit
def _k_columns(u, TYPE: tl.constexpr):
    """The first column of the low nibbles of a piece; those of the high ones are 64 (Q6_K) or 32 behind them."""
    s, v = u // 8, u % 8
    if TYPE == "Q6_K":
        first = s * 256 + v // 4 * 128 + v % 4 // 2 * 32 + v % 2 * 16
    else:
        first = s * 256 + v // 2 * 64 + v % 2 * 16
    return first


@triton.jit
def _k_words(data, row, w, own, k, TYPE: tl.constexpr):
    """Words w [W] of four bits of each row [R]: the low and the high codes, four to a word, int32 [R, W]."""
    CODES: tl.constexpr = 48 if TYPE == "Q6_K" else 40 if TYPE == "Q5_K" else 32  # words of 256 elements
    of, i = w // 32 * CODES, w % 32
    words = data.to(tl.pointer_type(tl.int32)) + row[:, None] * (k // 256 * CODES)
    if TYPE == "Q6_K":
        pairs = tl.load(words + (of + i)[None, :], mask=own, other=0)
        two = tl.load(words + (of + 32 + (w // 16 * 8 - w // 32 * 16) + w % 8)[None, :], mask=own, other=0)
        shift = (i % 16 // 8 * 2)[None, :]
        low = (pairs & NIBBLES) | (two >> shift & TWO_BITS) << 4
        high = (pairs >> 4 & NIBBLES) | (two >> (shift + 4) & TWO_BITS) << 4
    else:
        pairs = tl.load(words + (of + (CODES - 32) + i)[None, :], mask=own, other=0)
        low, high = pairs & NIBBLES, pairs >> 4 & NIBBLES
        if TYPE == "Q5_K":
            one = tl.load(words + (of + w % 8)[None, :], mask=own, other=0)
            shift = (i // 8 * 2)[None, :]
            low |= (one >> shift & ONE_BIT) << 4
            high |= (one >> (shift + 1) & ONE_BIT) << 4
    return low, high


@triton.jit
def _coded_dots_k(
    x, data, scales, row, live, tokens, k, TYPE: tl.constexpr, G: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """`dots_together` of Q4_K, Q5_K and Q6_K, before the last sum: C bytes of four bits at a time."""
    U: tl.constexpr = C // 16
    W: tl.constexpr = 4 * U
    NEXT: tl.constexpr = 4 if TYPE == "Q6_K" else 2  # pieces in turn whose low codes are of columns in turn
    blocks = k // 32
    sums = _zeros(G, R, U)
    for u0 in range(0, blocks, U):
        w = u0 * 4 + tl.arange(0, W)
        there = w < blocks * 4
        low, high = _k_words(data, row, w, live[:, None] & there[None, :], k, TYPE)
        at = w // (4 * NEXT) * (8 * NEXT) + w % (4 * NEXT)
        u = u0 + tl.arange(0, U)
        some = u < blocks
        here = live[:, None] & some[None, :]
        half = u // NEXT * (2 * NEXT) + u % NEXT  # of a block, whose codes are the low ones
        more = ()
        for t in tl.static_range(G):
            own = x + tl.minimum(t, tokens - 1) * taken_width(k, TYPE)
            steps = (own + blocks * 16).to(tl.pointer_type(tl.float32))
            low_dots = _word_dots(low, None, own, at, at, there, blocks, R, W)
            high_dots = _word_dots(high, None, own, at + 4 * NEXT, at, there, blocks, R, W)
            if t == 0:
                low_scale, high_scale, low_least, high_least = _k_scales(scales, row, u, here, k, TYPE)
            low_sum = tl.load(steps + blocks + half, mask=some, other=0)[None, :]
            high_sum = tl.load(steps + blocks + half + NEXT, mask=some, other=0)[None, :]
            low_value, high_value = low_dots.to(tl.float32), high_dots.to(tl.float32)
            if TYPE == "Q6_K":
                low_value = (low_value - 32 * low_sum) * low_scale
                high_value = (high_value - 32 * high_sum) * high_scale
            else:
                low_value = low_value * low_scale - low_least * low_sum
                high_value = high_value * high_scale - high_least * high_sum
            value = low_value * tl.load(steps + half // 2, mask=some, other=0)[None, :]
            value += high_value * tl.load(steps + (half + NEXT) // 2, mask=some, other=0)[None, :]
            more = more + (sums[t] + value,)  # type: ignore[assignment]  # noqa: RUF005
        sums = more
    return sums


@triton.jit
def _dots_k(
    x, data, scales, row, live, t, real, k, first, last,
    TYPE: tl.constexpr, T: tl.constexpr, R: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
    HALVES: tl.constexpr,
):  # fmt: skip
    """`row_dots` of Q4_K, Q5_K and Q6_K, several tokens: C bytes of four bits of a row at a time."""
    U: tl.constexpr = C // 16
    APART: tl.constexpr = 64 if TYPE == "Q6_K" else 32
    NARROW: tl.constexpr = x.dtype.element_ty
    acc = tl.zeros((R, 2 * T if HALVES else T), tl.float32)
    pieces = k // 32
    begin, end = _steps(first, last, pieces, U)
    for u0 in range(begin, end, U):
        u = u0 + tl.arange(0, U)
        here = live[:, None] & (u < pieces)[None, :]
        low, high, low_scale, high_scale, low_least, high_least = _k_pieces(data, scales, row, u, here, k, TYPE)
        at = u0 + tl.arange(0, C) // 16
        c = _k_columns(at, TYPE) + tl.arange(0, C) % 16
        ok = (at < pieces)[:, None] & real[None, :]
        x_at = x + t[None, :] * k + c[:, None]
        low = tl.reshape(low * low_scale[:, :, None] - low_least[:, :, None], (R, C))
        high = tl.reshape(high * high_scale[:, :, None] - high_least[:, :, None], (R, C))
        acc = tl.dot(low.to(NARROW), tl.load(x_at, mask=ok, other=0), acc, input_precision=PRECISION)
        acc = tl.dot(high.to(NARROW), tl.load(x_at + APART, mask=ok, other=0), acc, input_precision=PRECISION)
    return acc


@triton.jit
def _coded_dots_words(
    x, data, scales, row, live, tokens, k, TYPE: tl.constexpr, G: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """`dots_together` of types that are unpacked to words, before the last sum: C elements at a time."""
    U: tl.constexpr = C // 16
    W: tl.constexpr = 4 * U
    blocks = k // 32
    sums = _zeros(G, R, U)
    for u0 in range(0, blocks * 2, U):
        u, w = pieces_from(u0, U), u0 * 4 + tl.arange(0, W)
        valid, real = u < blocks * 2, w < blocks * 8
        four = unpacked(data, scales, row, live, u0, k, TYPE, R, U)
        next_sums = ()
        for t in tl.static_range(G):
            x_row = x + tl.minimum(t, tokens - 1) * taken_width(k, TYPE)
            steps = (x_row + blocks * 16).to(tl.pointer_type(tl.float32))
            dots = _dots_of_fours(four, x_row, w, real, tl.zeros((R, U), tl.int32), R, W)
            dots = _dots_of_fours(four, x_row + blocks * 8, w, real, dots << 8, R, W)
            if t == 0:
                scale = piece_scales(data, scales, row, live, u0, k, TYPE, U)
                if with_minimum(TYPE):
                    least = piece_minimum(scales, row, live, u0, k, U)
            value = dots.to(tl.float32) * scale
            if with_minimum(TYPE):
                value -= least * tl.load(steps + blocks + u, mask=valid, other=0)[None, :]
            value *= tl.load(steps + u // 2, mask=valid, other=0)[None, :]
            next_sums = next_sums + (sums[t] + value,)  # type: ignore[assignment]  # noqa: RUF005
        sums = next_sums
    return sums


@triton.jit
def _unpacked_values(data, scales, row, live, u0, k, TYPE: tl.constexpr, R: tl.constexpr, U: tl.constexpr):
    """Pieces u0 .. u0 + U of rows [R] of a type that is unpacked to words, float32 [R, U, 16]."""
    four = unpacked(data, scales, row, live, u0, k, TYPE, R, U)
    words = tl.join(tl.join(four[0], four[2]), tl.join(four[1], four[3]))  # [R, U, 2, 2], in their order
    codes_ = tl.reshape(words, (R, U, 4))[:, :, :, None] >> (8 * tl.arange(0, 4))[None, None, None, :]
    scale = piece_scales(data, scales, row, live, u0, k, TYPE, U)
    values = tl.reshape(small_signed(codes_.to(tl.int8)), (R, U, 16)) * scale[:, :, None]
    if with_minimum(TYPE):
        values -= piece_minimum(scales, row, live, u0, k, U)[:, :, None]
    return values


@triton.jit
def _dots_words(
    x, data, scales, row, live, t, real, k, first, last,
    TYPE: tl.constexpr, T: tl.constexpr, R: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
    HALVES: tl.constexpr,
):  # fmt: skip
    """`row_dots` of types that are unpacked to words, several tokens."""
    U: tl.constexpr = C // 16
    NARROW: tl.constexpr = x.dtype.element_ty
    acc = tl.zeros((R, 2 * T if HALVES else T), tl.float32)
    begin, end = _steps(first, last, k // 16, U)
    for u0 in range(begin, end, U):
        c = u0 * 16 + tl.arange(0, C)
        ok = (c < k)[:, None] & real[None, :]
        w = tl.reshape(_unpacked_values(data, scales, row, live, u0, k, TYPE, R, U), (R, C)).to(NARROW)
        acc = tl.dot(w, tl.load(x + t[None, :] * k + c[:, None], mask=ok, other=0), acc, input_precision=PRECISION)
    return acc


@triton.jit
def _dots_8bit(
    x, data, scales, row, live, t, real, k, first, last,
    T: tl.constexpr, R: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """`row_dots` of Q8_0, several tokens."""
    B: tl.constexpr = C // 32
    NARROW: tl.constexpr = x.dtype.element_ty
    acc = tl.zeros((R, 2 * T if HALVES else T), tl.float32)
    blocks = k // 32
    begin, end = _steps(first, last, blocks, B)
    for b0 in range(begin, end, B):
        b = b0 + tl.arange(0, B)
        c = b[:, None] * 32 + tl.arange(0, 32)[None, :]
        here = live[:, None] & (b < blocks)[None, :]
        codes = small_signed(tl.load(data + row[:, None, None] * k + c[None], mask=here[:, :, None], other=0))
        d = tl.load(scales + row[:, None] * blocks + b[None, :], mask=here, other=0).to(tl.float32)
        c = b0 * 32 + tl.arange(0, C)
        ok = (c < k)[:, None] & real[None, :]
        v = tl.load(x + t[None, :] * k + c[:, None], mask=ok, other=0)
        w = tl.reshape(codes * d[:, :, None], (R, C)).to(NARROW)
        acc = tl.dot(w, v, acc, input_precision=PRECISION)
    return acc


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """a . b + acc. The interpreter, in which bfloat16 is bits, multiplies it as float32."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def _dots_float(
    x, data, row, live, t, real, k, first, last,
    T: tl.constexpr, R: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """`row_dots` of F32, F16 and BF16."""
    NARROW: tl.constexpr = x.dtype.element_ty
    acc = tl.zeros((R, (2 * T if HALVES else T) if T else C), tl.float32)
    begin, end = _steps(first, last, k, C)
    for k0 in range(begin, end, C):
        c = k0 + tl.arange(0, C)
        here = live[:, None] & (c < k)[None, :]
        w = tl.load(data + row[:, None] * k + c[None, :], mask=here, other=0).to(NARROW)
        if T:
            ok = (c < k)[:, None] & real[None, :]
            acc = dot(w, tl.load(x + t[None, :] * k + c[:, None], mask=ok, other=0), acc, PRECISION)
        else:
            acc += w * tl.load(x + c, mask=c < k, other=0)[None, :]
    return acc


@triton.jit
def row_dots(
    x, data, scales, row, live, tokens, k,
    TYPE: tl.constexpr, T: tl.constexpr, R: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
    HALVES: tl.constexpr = False, first=None, last=None, rows=None,
):  # fmt: skip
    """Products of rows, int64 [R], with x [tokens, k]: float32 [R], with T > 1 [R, T]. Not live: 0 or NaN.

    x is what `taken` makes of it. first, last: with T > 1, of the tiles of a row from one to the other alone. HALVES:
    halves; weights are then rounded to float16, if they are of more bits. With T > 1 x may be of a narrow type, to
    which weights are rounded. rows: with T > 1, int [T], those of x, of which `tokens` mean something; None: the first.
    """
    N: tl.constexpr = T if T > 1 else 0
    if N == 0 and of_integers(TYPE):
        sums = dots_together(x, data, scales, row, live, 1, k, TYPE, 1, R, C)
        return sums[0]
    else:  # the compiler goes on behind a return
        if rows is None:
            t, real = lanes(tokens, N, HALVES)
        else:
            t, real = rows, tl.arange(0, T) < tokens
        if TYPE == "Q4_0" or TYPE == "MXFP4":
            acc = _dots_4bit(x, data, scales, row, live, t, real, k, first, last, TYPE, N, R, C, PRECISION, HALVES)
        elif unpacks(TYPE):
            acc = _dots_words(x, data, scales, row, live, t, real, k, first, last, TYPE, N, R, C, PRECISION, HALVES)
        elif k_quant(TYPE):
            acc = _dots_k(x, data, scales, row, live, t, real, k, first, last, TYPE, N, R, C, PRECISION, HALVES)
        elif TYPE == "Q8_0":
            acc = _dots_8bit(x, data, scales, row, live, t, real, k, first, last, N, R, C, PRECISION, HALVES)
        else:
            acc = _dots_float(x, data, row, live, t, real, k, first, last, N, R, C, PRECISION, HALVES)
        if HALVES:
            low = tl.arange(0, 2)[None, :, None]
            acc = tl.sum(tl.reshape(acc, (R, 2, T)) * tl.where(low == 0, 1.0, 1 / LOW), 1)
            acc *= half_scales(x, tokens, k, T)[None, :]
        return acc if N else tl.sum(acc, 1)


@triton.jit
def dots_together(
    x, data, scales, row, live, tokens, k, TYPE: tl.constexpr, G: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Products of rows, int64 [R], of a type in `INTEGERS` with each of up to G tokens, which `codes` made x of: G of
    float32 [R], of which `tokens` mean something. Weights are decoded once for all tokens, and the products of each
    have the bits that they have alone."""
    if unpacks(TYPE):
        sums = _coded_dots_words(x, data, scales, row, live, tokens, k, TYPE, G, R, C)
    elif k_quant(TYPE):
        sums = _coded_dots_k(x, data, scales, row, live, tokens, k, TYPE, G, R, C)
    else:
        sums = _coded_dots(x, data, scales, row, live, tokens, k, TYPE, G, R, C)
    dots = ()
    for t in tl.static_range(G):
        dots = dots + (tl.sum(sums[t], 1),)  # type: ignore[assignment]  # noqa: RUF005
    return dots


@triton.jit
def taken_width(k, TYPE: tl.constexpr):
    """Elements of a token of k activations as `taken` makes it for products of one token, or of these in turn."""
    return k // 32 * WORDS if of_integers(TYPE) else k


@triton.jit
def add_bias(sums, bias, row, live, BIAS: tl.constexpr, T: tl.constexpr):
    """Adds the bias, if any, to the rows of `row_dots`."""
    if BIAS:
        b = tl.load(bias + row, mask=live, other=0)
        sums += b[:, None] if T > 1 else b
    return sums


@triton.jit
def _finished(y, bias, row, live, BIAS: tl.constexpr, RELU: tl.constexpr):
    """Products of one token as a matrix gives them."""
    y = add_bias(y, bias, row, live, BIAS, 0)
    return tl.where(y <= 0, 0.0, y) if RELU else y


@launched
@triton.jit(do_not_specialize=["tokens"])
def _linear_kernel(
    x, data, scales, bias, out, tokens, rows, k,
    TYPE: tl.constexpr, BIAS: tl.constexpr, RELU: tl.constexpr, T: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    G: tl.constexpr, PRECISION: tl.constexpr, HALVES: tl.constexpr, ADD: tl.constexpr, LINES: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """out [tokens, rows] = x times the rows of a matrix; with ADD it grows by that. G: tokens of `dots_together`, of
    other products 1. TILES: None, or those of a row that a program multiplies: out [splits, tokens, rows] is then what
    each gets."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    live = row < rows
    first, last = None, None
    if TILES is None:
        ask_for(data, row, rows, k, TYPE, LINES)  # the beginning of rows, which others would not read
    follow()
    if T > 1:
        if TILES is not None:
            first = tl.program_id(1) * TILES
            last = first + TILES
            out += tl.program_id(1) * tokens * rows
        y = row_dots(x, data, scales, row.to(tl.int64), live, tokens, k, TYPE, T, R, C, PRECISION, HALVES, first, last)
        y = add_bias(y, bias, row, live, BIAS, T)
        if RELU:
            y = tl.where(y <= 0, 0.0, y)
        t = tl.arange(0, T)
        put(out + t[None, :] * rows + row[:, None], y, live[:, None] & (t < tokens)[None, :], ADD)
    else:
        if of_integers(TYPE):
            for t0 in range(0, tokens if T else 1, G):
                own = x + t0 * taken_width(k, TYPE)
                sums = dots_together(own, data, scales, row.to(tl.int64), live, tokens - t0, k, TYPE, G, R, C)
                for t in tl.static_range(G):
                    y = _finished(sums[t], bias, row, live, BIAS, RELU)
                    put(out + (t0 + t) * rows + row, y, live & (t0 + t < tokens), ADD)
        else:
            y = row_dots(x, data, scales, row.to(tl.int64), live, 1, k, TYPE, T, R, C, PRECISION)
            put(out + row, _finished(y, bias, row, live, BIAS, RELU), live, ADD)


@triton.jit
def put(at, y, here, ADD: tl.constexpr):
    """Store y, with ADD the sum with what is there."""
    if ADD:
        y += tl.load(at, mask=here, other=0)
    tl.store(at, y, mask=here)


def filled(programs: int, slots: int) -> float:
    """The share of a GPU's slots for programs that have one, over all waves of them."""
    return programs / (-(-programs // slots) * slots)


def fitting(w: Weight, tokens: int, multiprocessors: int) -> Tile:
    """The tile for a matrix. For one token as large as any, no wider than a row, and lower, and wider if it can be,
    where it would leave more of the GPU empty, in its last wave. For several tokens lower until every multiprocessor
    has some."""
    if not in_turn(w.type, tokens):
        rows, columns, warps = SEVERAL[w.type]
        while triton.cdiv(w.rows, rows) < LEAST_SEVERAL * multiprocessors and rows > LEAST_ROWS:
            rows //= 2
        return Tile(rows, columns, warps)
    tile, width = for_rows(ONE[w.type], w.type, w.k), row_width(w.type, w.k)
    if tokens > 1:
        tile = tile._replace(rows=max(1, tile.rows // 2))  # there are registers for so many
    tiles, slots = [tile], held_programs(w.type, tokens, tile) * multiprocessors
    while tile.rows > 1 and (tile.columns < width or triton.cdiv(w.rows, tile.rows) < 2 * slots):
        tile = Tile(tile.rows // 2, tile.columns * (2 if tile.columns < width else 1), tile.warps)
        tiles.append(tile)
    fills = [filled(triton.cdiv(w.rows, tile.rows), slots) for tile in tiles]
    return next(tile for tile, fill in zip(tiles, fills, strict=True) if fill >= NEARLY * max(fills))


def held_programs(kind: str, tokens: int, tile: Tile) -> int:
    """Programs of products with tokens in turn that a multiprocessor holds."""
    return min((HELD if tokens == 1 else HELD_TOGETHER)[kind] // tile.warps, PROGRAMS)


def row_width(kind: str, k: int) -> int:
    """Columns of tiles, as `Tile` counts them, that k elements of a row fill."""
    return k // 2 if kind in FOUR_BITS or kind == "Q4_0X32" else k


def for_rows(tile: Tile, kind: str, k: int) -> Tile:
    """A tile for one token no wider than rows of k elements: with fewer warps, of types in `INTEGERS`, else with more
    rows."""
    rows, columns, warps = tile
    while columns // 2 >= row_width(kind, k) and columns > 64:
        columns //= 2
        if kind in INTEGERS and warps > 1:
            warps //= 2
        else:
            rows *= 2
    return Tile(rows, columns, warps)


def shared_rows(w: Weight, tile: Tile, tokens: int, multiprocessors: int) -> tuple[int | None, int]:
    """Of the tiles of a matrix's row with several tokens those that a program multiplies, None: all, and how many
    programs share it. A matrix of few rows has few programs, each of which goes through all of its rows, tile after
    tile; with several for the same rows, a kernel more adds up what they get."""
    if in_turn(w.type, tokens):
        return None, 1
    programs, tiles = triton.cdiv(w.rows, tile.rows), triton.cdiv(row_width(w.type, w.k), tile.columns)
    most = min(int(LEAST_SEVERAL * multiprocessors) // programs, tiles // LEAST_TILES)
    if most < 2:
        return None, 1
    each = triton.cdiv(tiles, most)
    return each, triton.cdiv(tiles, each)


def linear(w: Weight, x: Tensor, bias: Tensor | None = None, into: Tensor | None = None, relu: bool = False) -> Tensor:
    """`gpu.linear` of at most `gpu.FEW` tokens; relu: of the product."""
    tokens = x.shape[0]
    out = torch.empty((tokens, w.rows), dtype=torch.float32, device=x.device) if into is None else into
    if not out.numel():
        return out
    tile, two = fitting(w, tokens, processors(x)), halved(w.type, tokens)
    each, splits = shared_rows(w, tile, tokens, processors(x))
    alone = each is None
    parts = out if alone else torch.empty((splits, *out.shape), dtype=torch.float32, device=x.device)
    _linear_kernel[(triton.cdiv(w.rows, tile.rows), splits)](
        taken(x, w.type), w.data, scales_of(w), either(bias, out), parts, tokens,
        w.rows, w.k, TYPE=w.type, BIAS=alone and bias is not None, RELU=alone and relu, T=columns(w.type, tokens),
        R=tile.rows, C=tile.columns, G=together(w.type, tokens), PRECISION=precision(x), HALVES=two,
        ADD=alone and into is not None,
        LINES=asked_lines(w, tile.rows), TILES=each, num_warps=tile.warps, num_stages=STAGES, launch_pdl=early(x),
    )  # fmt: skip
    if not alone:
        add_up(parts, out, into is not None, SPLITS, bias, relu)
    return out


@launched
@triton.jit(do_not_specialize=["splits"])
def _sum_kernel(
    parts, bias, out, size, splits, rows,
    ADD: tl.constexpr, BIAS: tl.constexpr, RELU: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum of the splits, S at a time; ADD: added to out."""
    follow()
    i, s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, S)
    acc = tl.zeros((S, BLOCK), tl.float32)
    for first in range(0, splits, S):
        split = (first + s)[:, None]
        here = (split < splits) & (i < size)[None, :]
        acc += tl.load(parts + split.to(tl.int64) * size + i[None, :], mask=here, other=0)
    total = _finished(tl.sum(acc, 0), bias, i % rows, i < size, BIAS, RELU)
    put(out + i, total, i < size, ADD)


def add_up(
    parts: Tensor,
    out: Tensor,
    grows: bool,
    sizes: tuple[int, int],
    bias: Tensor | None = None,
    relu: bool = False,
) -> None:
    """out, float32 [tokens, rows], becomes the sum of parts [splits, tokens, rows], or `grows` by it. sizes: of splits
    and of numbers, that a program adds at a time. bias, relu: as a matrix's product has them."""
    splits = parts.shape[0]
    at_a_time, block = min(sizes[0], int(triton.next_power_of_2(splits))), sizes[1]
    _sum_kernel[(triton.cdiv(out.numel(), block),)](
        parts, either(bias, out), out, out.numel(), splits, out.shape[1], ADD=grows, BIAS=bias is not None, RELU=relu,
        S=at_a_time, BLOCK=block, num_warps=warps(at_a_time * block, 16), launch_pdl=early(out),
    )  # fmt: skip


@launched
@triton.jit(do_not_specialize=["first"])
def _k_values_kernel(data, scales, out, first, k, TYPE: tl.constexpr, U: tl.constexpr):
    """U pieces of a row of K-quants, as float16."""
    APART: tl.constexpr = 64 if TYPE == "Q6_K" else 32
    row = first + tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    u = tl.program_id(1) * U + tl.arange(0, U)
    here = (u < k // 32)[None, :]
    low, high, low_scale, high_scale, low_least, high_least = _k_pieces(data, scales, row, u, here, k, TYPE)
    to = out + tl.program_id(0).to(tl.int64) * k + _k_columns(u, TYPE)[None, :, None] + tl.arange(0, 16)[None, None, :]
    low = low * low_scale[:, :, None] - low_least[:, :, None]
    high = high * high_scale[:, :, None] - high_least[:, :, None]
    tl.store(to, low.to(tl.float16), mask=here[:, :, None])
    tl.store(to + APART, high.to(tl.float16), mask=here[:, :, None])


@launched
@triton.jit(do_not_specialize=["first"])
def _word_values_kernel(data, scales, out, first, k, TYPE: tl.constexpr, U: tl.constexpr):
    """U pieces of a row of a type that is unpacked to words, as float16."""
    row = first + tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    u0 = tl.program_id(1) * U
    wide = _unpacked_values(data, scales, row, row >= 0, u0, k, TYPE, 1, U)
    c = (u0 + tl.arange(0, U))[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]
    tl.store(out + tl.program_id(0).to(tl.int64) * k + c, wide.to(tl.float16), mask=c < k)


@launched
@triton.jit(do_not_specialize=["first"])
def _values_kernel(
    data, scales, shared, group, out, first, k, TYPE: tl.constexpr, B: tl.constexpr
):  # fmt: skip
    """B blocks of a row of codes, as float16."""
    row = first + tl.program_id(0).to(tl.int64)
    b = tl.program_id(1) * B + tl.arange(0, B)
    blocks = k // 32
    here = (b < blocks)[:, None]
    out += tl.program_id(0).to(tl.int64) * k
    if TYPE != "Q4_0X32":
        d = scale_values(tl.load(scales + row * blocks + b, mask=b < blocks, other=0), TYPE)[:, None]
    if TYPE == "Q8_0":
        c = b[:, None] * 32 + tl.arange(0, 32)[None, :]
        tl.store(
            out + c, (tl.load(data + row * k + c, mask=here, other=0).to(tl.float32) * d).to(tl.float16), mask=here
        )
    else:
        j = tl.arange(0, 16)[None, :]
        c = b[:, None] * 32 + j
        pairs = tl.load(data + row * (blocks * 16) + b[:, None] * 16 + j, mask=here, other=0)
        low, high = pair_values(pairs, TYPE)
        low *= 0.0625
        high *= 0.0625
        if TYPE == "Q4_0X32":
            d_at = shared + tl.load(group + row).to(tl.int64) * k + c
            low *= tl.load(d_at, mask=here, other=0).to(tl.float32)
            high *= tl.load(d_at + 16, mask=here, other=0).to(tl.float32)
        else:
            low *= d
            high *= d
        tl.store(out + c, low.to(tl.float16), mask=here)
        tl.store(out + c + 16, high.to(tl.float16), mask=here)


def values(w: Weight, begin: int, end: int, shared: Tensor | None, group: Tensor | None) -> Tensor:
    """Rows begin .. end of a quantised weight, float16 [end - begin, k]; shared, group: of Q4_0X32, see `Neurons`."""
    out = torch.empty((end - begin, w.k), dtype=torch.float16, device=w.data.device)
    if out.numel() and w.type in UNPACKED:
        _word_values_kernel[(end - begin, triton.cdiv(w.k, 32 * VALUES))](
            w.data, scales_of(w), out, begin, w.k, TYPE=w.type, U=2 * VALUES, num_warps=4
        )
    elif out.numel() and w.type in K_CODES:
        _k_values_kernel[(end - begin, triton.cdiv(w.k, 32 * VALUES))](
            w.data, w.scales, out, begin, w.k, TYPE=w.type, U=VALUES, num_warps=4
        )
    elif out.numel():
        _values_kernel[(end - begin, triton.cdiv(w.k, 32 * VALUES))](
            w.data, either(w.scales, w.data), either(shared, w.data), either(group, w.data), out, begin, w.k,
            TYPE=w.type, B=VALUES, num_warps=4,
        )  # fmt: skip
    return out


def in_turn(kind: str, tokens: int) -> bool:
    """Whether products of weights of a type with so many tokens are those of one token after the other: then a row is
    in a cache from the second one on, if not so many are read that it is lost (`cached_rows`). Products of integers are
    expected to be faster so than tensor cores, to which weights must be handed as float16."""
    return tokens == 1 or (kind in INTEGERS and tokens <= IN_TURN)


def halved(kind: str, tokens: int) -> bool:
    """Whether products of weights of a type with so many tokens take the activations as `halves`."""
    return not in_turn(kind, tokens) and kind not in ("F32", "BF16")


def taken(x: Tensor, kind: str) -> Tensor:
    """x [tokens, k] as products with weights of a type take it."""
    if kind in INTEGERS and in_turn(kind, len(x)):
        return codes(x)
    return halves(x) if halved(kind, len(x)) else x.contiguous()


def columns(kind: str, tokens: int) -> int:
    """Columns of a product of weights of a type with that number of tokens: 0 of one, 1 if they are `in_turn`,
    otherwise a size for tensor cores."""
    if tokens == 1:
        return 0
    return 1 if in_turn(kind, tokens) else tensor_columns(tokens, halved(kind, tokens))


def together(kind: str, tokens: int) -> int:
    """Tokens that meet a matrix's weights together, in registers: a power of two; 1 if they are not `in_turn`."""
    return min(TOGETHER, int(triton.next_power_of_2(tokens))) if in_turn(kind, tokens) else 1


def tensor_columns(tokens: int, two: bool) -> int:
    """Columns of a product of several tokens by tensor cores; two: of `halves`."""
    return max(8 if two else 16, int(triton.next_power_of_2(tokens)))


def either(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A valid pointer for an argument that is not read."""
    return other if tensor is None else tensor


def scales_of(w: Weight) -> Tensor | tuple[Tensor, Tensor]:
    """Scales of a weight as kernels take them: of a type with a grid that, too."""
    grid = table(w.type, w.data.device) if w.type in UNPACKED else None
    scales = either(w.scales, w.data)
    return scales if grid is None else (scales, grid)


def precision(x: Tensor) -> str:
    """How tensor cores multiply float32: as three products of TF32, nearly as exact. Not available before Ampere."""
    return "tf32x3" if not x.is_cuda or _capability(x.device.index) >= 8 else "ieee"


@cache
def _capability(device: int) -> int:
    return int(torch.cuda.get_device_capability(device)[0])


def processors(x: Tensor) -> int:
    """Multiprocessors of x's device; of the interpreter an H100's."""
    return _processors(x.device.index) if x.is_cuda else 132


@cache
def _processors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def shared_memory(x: Tensor) -> int:
    """Bytes of shared memory of a multiprocessor of x's device; of the interpreter an H100's."""
    return _shared_memory(x.device.index) if x.is_cuda else 228 << 10


@cache
def _shared_memory(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor)


def held(block: int, memory: int) -> int:
    """Programs of attention that a multiprocessor holds. block: dimensions of a head, padded; memory: as
    `shared_memory`. Heads of 256 dimensions take 69 KiB a program, of which an Ada GPU has room for one."""
    return 1 if block > 128 and memory < WIDE_HEADS else ATTENTION_HELD


def context_splits(pages: int, least: int, programs: int, slots: int, joined: int = 1) -> int:
    """Number of parts of a context, none of fewer than `least` pages, or in at most `joined`, for that many
    programs each: as many as there are slots for, since one more would wait for another."""
    return max(1, min(max(pages // least, min(pages, joined)), slots // programs))


# ---------------------------------------------------------------------------------------------------------------------
# Norms, rotary embedding, cache


@launched
@triton.jit
def _norm_kernel(
    x, weight, bias, out, made, sent, width, eps, LAYER: tl.constexpr, BIAS: tl.constexpr, CODED: tl.constexpr,
    SENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row of x, normalised; CODED: made are its `codes`; SENT: the host gets it, too."""
    follow()
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    here = c < width
    v = tl.load(x + row * width + c, mask=here, other=0)
    if LAYER:
        v = tl.where(here, v - tl.sum(v, 0) / width, 0.0)
    y = v * (1 / tl.sqrt_rn(tl.sum(v * v, 0) / width + eps)) * tl.load(weight + c, mask=here, other=0)
    if BIAS:
        y += tl.load(bias + c, mask=here, other=0)
    tl.store(out + row * width + c, y, mask=here)
    if SENT:
        tl.store(sent + row * width + c, y, mask=here, cache_modifier=".wt")
    if CODED:
        b = tl.arange(0, BLOCK // 32)
        put_codes(made, row, tl.reshape(y, (BLOCK // 32, 32)), b, b * 32 < width, width, BLOCK // 32)


def norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, layer: bool, into: Tensor | None = None,
    for_codes: bool = False, sent: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`gpu.norm`."""
    x = x.contiguous()
    out = torch.empty_like(x) if into is None else into
    width = x.shape[-1]
    if out.numel():
        block, rows = triton.next_power_of_2(width), x.numel() // width
        made = coded(out, rows, width) if for_codes else None
        _norm_kernel[(rows,)](
            x, weight, either(bias, weight), out, either(made, out), either(sent, out), width, eps, LAYER=layer,
            BIAS=bias is not None, CODED=made is not None, SENT=sent is not None, BLOCK=block,
            num_warps=warps(block, 8), enable_fp_fusion=made is None, launch_pdl=early(x),
        )  # fmt: skip
    return out


def warps(elements: int, each: int) -> int:
    """Warps for a block whose threads are to hold about `each` elements: a power of two up to 32."""
    return min(32, max(1, int(triton.next_power_of_2(elements // (32 * each)))))


@triton.jit
def turned_head(x, dim, position, frequencies, factor, pairs, dims, weight=None, eps=0.0):
    """Elements dim [BLOCK] of a head at x, or [1, BLOCK] of heads at x [heads, 1], turned by their position. weight: of
    the norm before that, [dims]."""
    i = tl.where(dim < pairs, dim, dim - pairs)
    turns = dim < 2 * pairs
    angle = position.to(tl.float32) * tl.load(frequencies + i, mask=turns, other=0)
    c = tl.where(turns, tl.cos(angle) * factor, 1.0)
    s = tl.where(turns, tl.sin(angle) * factor, 0.0)
    other = tl.where(dim < pairs, dim + pairs, dim - pairs)
    own = tl.load(x + dim, mask=dim < dims, other=0)
    pair = tl.load(x + other, mask=turns, other=0)
    if weight is not None:
        if len(own.shape) == 1:  # noqa: SIM108 - known when it is compiled
            squares = tl.sum(own * own, 0)
        else:
            squares = tl.sum(own * own, 1)[:, None]
        by = 1 / tl.sqrt_rn(squares / dims + eps)
        own = own * by * tl.load(weight + dim, mask=dim < dims, other=0)
        pair = pair * by * tl.load(weight + other, mask=turns, other=0)
    return own * c + tl.where(dim < pairs, -pair, pair) * s


@launched
@triton.jit(do_not_specialize_on_alignment=["x", "positions"])
def _rotate_kernel(x, positions, frequencies, factor, pairs, dims, token_stride, head_stride, BLOCK: tl.constexpr):
    follow()
    t, dim = tl.program_id(0), tl.arange(0, BLOCK)
    head = x + t.to(tl.int64) * token_stride + tl.program_id(1) * head_stride
    y = turned_head(head, dim, tl.load(positions + t), frequencies, factor, pairs, dims)
    tl.debug_barrier()  # every thread has read its pair
    tl.store(head + dim, y, mask=dim < 2 * pairs)


def rotate(x: Tensor, positions: Tensor, frequencies: Tensor, factor: float) -> Tensor:
    """`gpu.rotate`; x may be a part of a larger tensor."""
    tokens, heads, dims = x.shape
    assert x.stride(2) == 1
    if x.numel():
        block = triton.next_power_of_2(dims)
        _rotate_kernel[(tokens, heads)](
            x, positions, frequencies, factor, frequencies.shape[0], dims, x.stride(0), x.stride(1), BLOCK=block,
            num_warps=warps(block, 2),
            launch_pdl=early(x),
        )  # fmt: skip
    return x


@triton.jit
def half(y):
    """Clipped to float16."""
    return tl.where(y > 65504.0, 65504.0, tl.where(y < -65504.0, -65504.0, y))


@triton.jit
def stored_head(cache, scales, slot, head, heads, dims, dim, y, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Store a head's key or value in its slot; y [BLOCK] is zero from `dims` on."""
    row = slot * heads + head
    there = tl.where(slot >= 0, dims, 0)
    if KIND == "Q8_0":  # as `gpu.quantised`
        b = tl.arange(0, BLOCK // 32)
        each = b[:, None] * 32 + tl.arange(0, 32)[None, :]
        y = tl.reshape(y, (BLOCK // 32, 32))
        scale = half(tl.max(tl.abs(y), 1) * Q8_STEP).to(tl.float16)
        step = scale.to(tl.float32)
        by = tl.where(step > 0, tl.div_rn(tl.full((BLOCK // 32,), 1.0, tl.float32), tl.where(step > 0, step, 1.0)), 0.0)
        codes = (y * by[:, None] + ROUNDS) - ROUNDS
        codes = tl.where(codes > 127.0, 127.0, tl.where(codes < -128.0, -128.0, codes))
        tl.store(cache + row * dims + each, codes.to(tl.int8), mask=each < there)
        tl.store(scales + row * tl.cdiv(dims, 32) + b, scale, mask=b * 32 < there)
    else:
        if KIND == "F16":
            y = half(y)
        tl.store(cache + row * dims + dim, y.to(cache.dtype.element_ty), mask=dim < there)


def cache_kind(cache: Cached) -> str:
    return "Q8_0" if cache.scales is not None else "F16" if cache.data.dtype == torch.float16 else "F32"


def _block(dims: int, cache: Cached) -> int:
    """Of a head's elements: a power of two, whole blocks of 8 bits."""
    return max(int(triton.next_power_of_2(dims)), 1 if cache.scales is None else 32)


def _parts(cache_k: Cached, cache_v: Cached) -> tuple[Tensor, ...]:
    k, v = cache_k, cache_v
    return k.data, either(k.scales, k.data), v.data, either(v.scales, v.data)


@launched
@triton.jit(do_not_specialize_on_alignment=["slots"])
def _store_kernel(
    k, v, cache_k, scales_k, cache_v, scales_v, slots, dims, k_token, k_head, v_token, v_head,
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    follow()
    t, head, dim = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    slot, heads = tl.load(slots + t), tl.num_programs(1)
    key = tl.load(k + t * k_token + head * k_head + dim, mask=dim < dims, other=0)
    value = tl.load(v + t * v_token + head * v_head + dim, mask=dim < dims, other=0)
    stored_head(cache_k, scales_k, slot, head, heads, dims, dim, key, KIND, BLOCK)
    stored_head(cache_v, scales_v, slot, head, heads, dims, dim, value, KIND, BLOCK)


def store_kv(cache_k: Cached, cache_v: Cached, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """`gpu.store_kv`; k and v may be parts of a larger tensor."""
    tokens, heads, dims = k.shape
    assert k.stride(2) == v.stride(2) == 1
    if k.numel():
        block, kind = _block(dims, cache_k), cache_kind(cache_k)
        _store_kernel[(tokens, heads)](
            k, v, *_parts(cache_k, cache_v), slots, dims, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            KIND=kind, BLOCK=block, num_warps=warps(block, 2), enable_fp_fusion=kind != "Q8_0",
            launch_pdl=early(k),
        )  # fmt: skip


@launched
@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def _rotate_and_store_kernel(
    q, k, v, positions, frequencies, factor, pairs, cache_k, scales_k, cache_v, scales_v, slots, heads, kv_heads, dims,
    q_token, q_head, k_token, k_head, v_token, v_head, q_norm, k_norm, eps, NORMS: tl.constexpr, KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """NORMS: heads of q and k are normalised before they turn."""
    follow()
    t, head, dim = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    slot, position = tl.load(slots + t), tl.load(positions + t)
    own, its = q_norm if NORMS else None, k_norm if NORMS else None
    if head < heads:
        x = q + t * q_token + head * q_head
        y = turned_head(x, dim, position, frequencies, factor, pairs, dims, own, eps)
        tl.debug_barrier()
        tl.store(x + dim, y, mask=dim < (dims if NORMS else 2 * pairs))
    elif head < heads + kv_heads:
        head -= heads
        y = turned_head(k + t * k_token + head * k_head, dim, position, frequencies, factor, pairs, dims, its, eps)
        stored_head(cache_k, scales_k, slot, head, kv_heads, dims, dim, y, KIND, BLOCK)
    else:
        head -= heads + kv_heads
        y = tl.load(v + t * v_token + head * v_head + dim, mask=dim < dims, other=0)
        stored_head(cache_v, scales_v, slot, head, kv_heads, dims, dim, y, KIND, BLOCK)


def rotate_and_store(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, rotation: tuple[Tensor, float],
    cache: tuple[Cached, Cached], slots: Tensor, norms: HeadNorms | None = None,
) -> None:  # fmt: skip
    """`gpu.rotate_and_store` in one launch."""
    (tokens, heads, dims), kv_heads = q.shape, k.shape[1]
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1
    if tokens:
        block, kind = _block(dims, cache[0]), cache_kind(cache[0])
        frequencies = rotation[0]
        strides = (q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1))
        _rotate_and_store_kernel[(tokens, heads + 2 * kv_heads)](
            q, k, v, positions, *rotation, frequencies.shape[0], *_parts(*cache), slots, heads, kv_heads, dims,
            *strides, *(norms or (frequencies, frequencies, 0.0)), NORMS=norms is not None, KIND=kind,
            BLOCK=block, num_warps=warps(block, 2), enable_fp_fusion=kind != "Q8_0",
            launch_pdl=early(q),
        )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Attention


@triton.jit
def _loaded(
    cache, scales, row, live, dims, dim,
    KIND: tl.constexpr, HALF: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Keys or values [PLACES, BLOCK] of a page: zeros for rows that are not live."""
    if KIND == "Q8_0":
        b = tl.arange(0, BLOCK // 32)
        each = b[:, None] * 32 + tl.arange(0, 32)[None, :]
        here = live[:, None, None] & (each < dims)[None]
        codes = tl.load(cache + row[:, None, None] * dims + each[None], mask=here, other=0).to(tl.float32)
        here = live[:, None] & (b * 32 < dims)[None, :]
        d = tl.load(scales + row[:, None] * tl.cdiv(dims, 32) + b[None, :], mask=here, other=0).to(tl.float32)
        y = tl.reshape(codes * d[:, :, None], (PLACES, BLOCK))
        return half(y).to(tl.float16) if HALF else y
    y = tl.load(cache + row[:, None] * dims + dim[None, :], mask=live[:, None] & (dim < dims)[None, :], other=0)
    return y.to(tl.float16 if HALF else tl.float32)


@triton.jit
def _pages_of(table, slot, part, live, begin, end, PLACES: tl.constexpr):
    """The page of the slots of a part of a context, or of each of them, and which of these are live and in pages
    begin .. end."""
    if PLACES > 32:  # the first or the last page may be another split's
        live &= (slot >= begin * 32) & (slot < end * 32)
        page = tl.load(table + slot // 32, mask=live, other=0)
    else:
        page = tl.load(table + part * PLACES // 32)
    return page, live


@triton.jit
def query_growth(position, growth, interval, offset):
    """Factors of the queries at some positions, -1: of nothing (`AttentionConfig.query_growth`)."""
    return 1 + growth * tl.log(1 + ((tl.maximum(position, 0) + offset) // interval).to(tl.float32))


@triton.jit
def _tanh(x):
    """tanh x: up to 0.625 a polynomial (Cephes), above it 1 - 2 / (e^(2 |x|) + 1), with the sign of x."""
    size = tl.abs(x)
    z = size * size
    p = (((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z + 1.33314422036e-1) * z
    near = (p - 3.33332819422e-1) * z * size + size
    far = 1 - 2 / (tl.exp(2 * tl.minimum(size, 20.0)) + 1)
    y = tl.where(size > 0.625, far, near)
    return tl.where(x < 0, -y, y)


@launched
@triton.jit(
    do_not_specialize=["tokens", "pages", "per"],
    do_not_specialize_on_alignment=["table", "rows", "positions", "slots"],
)
def _attention_kernel(
    q, cache_k, scales_k, cache_v, scales_v, table, rows, positions, out, peaks, sums, made, tokens, heads, kv_heads,
    dims, pages, per, window, scale, growth, interval, offset, q_token, q_head, sinks, cap,
    k, v, k_head, v_head, frequencies, factor, pairs, slots, q_norm, k_norm, eps, joined, arrived,
    TURNS: tl.constexpr, NORMS: tl.constexpr, CHUNKED: tl.constexpr, GROWN: tl.constexpr, SINKS: tl.constexpr,
    CAPPED: tl.constexpr, CODED: tl.constexpr,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, TILE: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
    SPLIT: tl.constexpr, JOINED: tl.constexpr, KIND: tl.constexpr, HALF: tl.constexpr, TWO: tl.constexpr,
    PLACES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of tokens, with the heads that share keys, against one split of their contexts: online softmax.

    HALF: products of float16; TWO: of two halves of q, and of the weights, which is as exact as float32. JOINED: at
    most so many splits, which the program joins that finishes last, by the counter of its tile in `arrived`, which is
    zero before and behind; 0: another kernel does. CODED: made are `codes` of a token's heads. PLACES: of a page, or of
    two, read at a time. TURNS: there is one token, whose heads turn first, as `_rotate_and_store_kernel` has them:
    those of q in each program, and the one of k, which is stored, with that of v, in the program that has its place.
    """
    follow()
    NARROW: tl.constexpr = tl.float16 if HALF else tl.float32
    g, split = tl.program_id(1), tl.program_id(2)
    m, dim, place = tl.arange(0, M), tl.arange(0, BLOCK), tl.arange(0, PLACES)
    token, head = tl.program_id(0) * TILE + m // GROUP_PAD, m % GROUP_PAD
    live = (m // GROUP_PAD < TILE) & (token < tokens) & (head < GROUP)
    head += g * GROUP
    position = tl.load(positions + token, mask=live, other=-1)
    row = tl.load(rows + token, mask=live, other=0)
    real = (dim < dims)[None, :]
    if GROWN:
        scale *= query_growth(position, growth, interval, offset)[:, None]
    if TURNS:
        query = _turned_query(
            q + tl.where(live, head, 0)[:, None] * q_head, k + g * k_head, v + g * v_head, cache_k, scales_k, cache_v,
            scales_v, positions, slots, frequencies, factor, pairs, q_norm, k_norm, eps, g, kv_heads, dims,
            split * per * 32, (split + 1) * per * 32, NORMS, KIND, BLOCK,
        )  # fmt: skip
    else:
        at = token.to(tl.int64)[:, None] * q_token + head[:, None] * q_head + dim[None, :]
        query = tl.load(q + at, mask=live[:, None] & real, other=0)
    query = (query * scale).to(NARROW)
    if TWO:
        step, inverse = _half_step(tl.max(tl.abs(query), 1))
        query, query_low = _two_halves(query * inverse[:, None])
    acc = tl.zeros((M, BLOCK), tl.float32)
    peak = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    if SINKS:  # noqa: SIM102 - known when it is compiled
        if split == 0:  # as if a score had been seen already; its weight is 1
            peak = tl.load(sinks + head, mask=live & (position >= 0), other=float("-inf"))
            total = tl.where(live & (position >= 0), 1.0, 0.0)
    earliest = position // window * window if CHUNKED else position - window + 1
    left = live & (position >= 0)
    while tl.max(left.to(tl.int32), 0) > 0:  # the sequences of the tile in turn
        one = tl.min(tl.where(left, row, 0x7FFFFFFF), 0)
        mine = left & (row == one)
        last = tl.max(tl.where(mine, position, -1), 0)
        first = tl.maximum(tl.min(tl.where(mine, earliest, 0x7FFFFFFF), 0), 0)
        begin = tl.maximum(first // 32, split * per)
        end = tl.minimum(last // 32 + 1, split * per + per)
        for part in range(begin * 32 // PLACES, tl.cdiv(end * 32, PLACES)):
            slot = part * PLACES + place
            there = (slot >= first) & (slot <= last)
            page, there = _pages_of(table + one * pages, slot, part, there, begin, end, PLACES)
            from_ = (page.to(tl.int64) * 32 + slot % 32) * kv_heads + g
            keys = _loaded(cache_k, scales_k, from_, there, dims, dim, KIND, HALF or TWO, PLACES, BLOCK)
            seen = mine[:, None] & (slot[None, :] <= position[:, None]) & (slot[None, :] >= earliest[:, None])
            if PLACES > 32:
                seen &= there[None, :]
            scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION)
            if TWO:
                scores = (scores + tl.dot(query_low, tl.trans(keys)) * (1 / LOW)) * step[:, None]
            if CAPPED:
                scores = cap * _tanh(scores / cap)
            scores = tl.where(seen, scores, float("-inf"))
            higher = tl.maximum(peak, tl.max(scores, 1))
            level = tl.where(higher == float("-inf"), 0.0, higher)
            shrink = tl.exp(peak - level)
            weights = tl.exp(scores - level[:, None])
            values = _loaded(cache_v, scales_v, from_, there, dims, dim, KIND, HALF or TWO, PLACES, BLOCK)
            if TWO:
                high, low = _two_halves(weights)
                summed = tl.dot(high, values, acc * shrink[:, None]) + tl.dot(low, values) * (1 / LOW)
            else:
                summed = tl.dot(weights.to(NARROW), values, acc * shrink[:, None], input_precision=PRECISION)
            acc = tl.where(mine[:, None], summed, acc) if TILE > 1 else summed  # 0 * NaN of another sequence is NaN
            total = total * shrink + tl.sum(weights, 1)
            peak = higher
        left = left & (row != one)
    where_ = token.to(tl.int64) * heads + head
    if not SPLIT:
        result = acc / tl.where(total == 0, 1.0, total)[:, None]
        _put_heads(out, made, result, token, head, live, heads, dims, CODED, M, BLOCK)
    else:
        stride = tokens.to(tl.int64) * heads
        of = where_ + split * stride
        tl.store(out + of[:, None] * dims + dim[None, :], acc, mask=live[:, None] & real)
        tl.store(peaks + of, peak, mask=live)
        tl.store(sums + of, total, mask=live)
        if JOINED:
            tl.debug_barrier()  # all threads of the program have stored theirs
            arrived += tl.program_id(0) * kv_heads + g
            if tl.atomic_add(arrived, 1, sem="acq_rel") == tl.num_programs(2) - 1:
                tl.store(arrived, 0)
                result = _joined_heads(out, peaks, sums, where_, live, stride, dims, JOINED, M, BLOCK)
                _put_heads(joined, made, result, token, head, live, heads, dims, CODED, M, BLOCK)


@triton.jit
def _turned_query(
    q, k, v, cache_k, scales_k, cache_v, scales_v, positions, slots, frequencies, factor, pairs, q_norm, k_norm, eps, g,
    kv_heads, dims, begin, end, NORMS: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Heads at q [M, 1] of one token, turned: [M, BLOCK]. Where its position is in begin .. end, the heads at k and v
    are stored as head g."""
    dim = tl.arange(0, BLOCK)
    position, slot = tl.load(positions), tl.load(slots)
    of_q, of_k = q_norm if NORMS else None, k_norm if NORMS else None
    query = turned_head(q, dim[None, :], position, frequencies, factor, pairs, dims, of_q, eps)
    if (position >= begin) & (position < end):
        y = turned_head(k, dim, position, frequencies, factor, pairs, dims, of_k, eps)
        stored_head(cache_k, scales_k, slot, g, kv_heads, dims, dim, y, KIND, BLOCK)
        y = tl.load(v + dim, mask=dim < dims, other=0)
        stored_head(cache_v, scales_v, slot, g, kv_heads, dims, dim, y, KIND, BLOCK)
        tl.debug_barrier()  # the program's other threads read it
    return query


@triton.jit
def _joined_heads(
    parts, peaks, sums, first, live, stride, dims, SPLITS: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Heads [M, BLOCK] of the splits of a context, at most so many, `stride` from each other, in their order."""
    dim = tl.arange(0, BLOCK)
    level = tl.full((M,), float("-inf"), tl.float32)
    for s in tl.static_range(SPLITS):
        real = live & (s < tl.num_programs(2))
        peak = tl.load(peaks + first + s * stride, mask=real, other=float("-inf"), cache_modifier=".cg")
        level = tl.maximum(level, peak)
    level = tl.where(level == float("-inf"), 0.0, level)
    acc = tl.zeros((M, BLOCK), tl.float32)
    total = tl.zeros((M,), tl.float32)
    for s in tl.static_range(SPLITS):
        real = live & (s < tl.num_programs(2))
        of = first + s * stride
        weight = tl.exp(tl.load(peaks + of, mask=real, other=float("-inf"), cache_modifier=".cg") - level)
        at = parts + of[:, None] * dims + dim[None, :]
        part = tl.load(at, mask=real[:, None] & (dim < dims)[None, :], other=0, cache_modifier=".cg")
        acc += part * weight[:, None]
        total += weight * tl.load(sums + of, mask=real, other=0, cache_modifier=".cg")
    return acc / tl.where(total == 0, 1.0, total)[:, None]


@triton.jit
def _put_heads(
    out, made, result, token, head, live, heads, dims, CODED: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Store heads [M, BLOCK] of tokens; CODED: made are `codes` of a token's heads."""
    dim = tl.arange(0, BLOCK)
    at = (token.to(tl.int64) * heads + head)[:, None] * dims + dim[None, :]
    tl.store(out + at, result, mask=live[:, None] & (dim < dims)[None, :])
    if CODED:
        B: tl.constexpr = BLOCK // 32
        each = tl.arange(0, B)[None, :]
        b = tl.reshape(head[:, None] * (dims // 32) + each, (M * B,))
        here = tl.reshape(live[:, None] & (each * 32 < dims), (M * B,))
        of = tl.reshape(token.to(tl.int64)[:, None] + 0 * each, (M * B,))
        put_codes(made, of, tl.reshape(result, (M * B, 32)), b, here, heads * dims, M * B)


@launched
@triton.jit(do_not_specialize=["splits"])
def _join_kernel(
    parts, peaks, sums, out, made, heads, dims, splits, CODED: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The splits of one head of one token, in their order; CODED: made are `codes` of a token's heads."""
    follow()
    at, of = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    s, dim = tl.arange(0, PAD), tl.arange(0, BLOCK)
    split = s < splits
    peak = tl.load(peaks + s * of + at, mask=split, other=float("-inf"))
    level = tl.max(peak, 0)
    level = tl.where(level == float("-inf"), 0.0, level)
    weight = tl.exp(peak - level)
    total = tl.sum(weight * tl.load(sums + s * of + at, mask=split, other=0), 0)
    here = split[:, None] & (dim < dims)[None, :]
    part = tl.load(parts + (s[:, None] * of + at) * dims + dim[None, :], mask=here, other=0)
    y = tl.sum(part * weight[:, None], 0) / tl.where(total == 0, 1.0, total)
    tl.store(out + at * dims + dim, y, mask=dim < dims)
    if CODED:
        each = tl.arange(0, BLOCK // 32)
        b = at % heads * (dims // 32) + each
        put_codes(made, at // heads, tl.reshape(y, (BLOCK // 32, 32)), b, each * 32 < dims, heads * dims, BLOCK // 32)


def growth_of(settings: AttentionConfig | LatentAttentionConfig) -> tuple[float, int, int]:
    """Arguments of `query_growth`."""
    return settings.query_growth, settings.query_interval, settings.query_offset


def _turning(new: NewHeads | None, q: Tensor, contexts: Contexts) -> tuple[tuple[Any, ...], dict[str, bool]]:
    """Arguments of the kernel of attention from k to eps, and what it is compiled for; None: nothing turns."""
    if new is None:
        return (q, q, 0, 0, q, 0.0, 0, contexts.rows, q, q, 0.0), {"TURNS": False, "NORMS": False}
    assert len(q) == 1 and new.k.stride(2) == new.v.stride(2) == 1
    frequencies, factor = new.rotation
    of_heads = new.k, new.v, new.k.stride(1), new.v.stride(1), frequencies, factor, frequencies.shape[0], new.slots
    norms = new.norms is not None
    return (*of_heads, *(new.norms or (q, q, 0.0))), {"TURNS": True, "NORMS": norms}


def _attention_tile(q: Tensor, block: int, kind: str, half: bool, wide: bool) -> tuple[int, int, int]:
    """Rows, places and warps of attention of heads of so many dimensions in that type, in F16 or not."""
    if not half:
        return ATTENTION_ROWS >> wide, 16 if wide else 32, 4 << wide
    last = list(PROMPT_TILES.values())[-1]
    tile = next((tile for dims, tile in PROMPT_TILES.items() if block <= dims), last)
    return tile if is_hopper(q) or block > 128 or (block < 128 and kind != "Q8_0") else AMPERE_TILE


def is_hopper(x: Tensor) -> bool:
    """Whether x's device, or the interpreter's, is of Hopper."""
    return not x.is_cuda or _capability(x.device.index) == 9


def attention(
    q: Tensor, cache: tuple[Cached, Cached], contexts: Contexts, settings: AttentionConfig,
    sinks: Tensor | None = None, for_codes: bool = False, arrived: Tensor | None = None, new: NewHeads | None = None,
) -> Tensor:  # fmt: skip
    """`gpu.attention`, with `new` of one token `gpu.attend`; q may be a part of a larger tensor."""
    tokens, heads, dims = q.shape
    kv_heads, pages = cache[0].data.shape[2], contexts.pages.shape[1]
    assert q.stride(2) == 1
    out = torch.empty((tokens, heads * dims), dtype=torch.float32, device=q.device)
    if not out.numel():
        return out
    # Of all small steps, also of those that do not need them: fewer kernels are compiled.
    made = coded(out, tokens, heads * dims, FEW) if for_codes and dims % 32 == 0 else None
    group = heads // kv_heads
    padded = triton.next_power_of_2(group)
    kind = cache_kind(cache[0])
    few, wide = tokens <= FEW, dims > WIDEST
    half = not few and kind != "F32"
    block = max(16, _block(dims, cache[0]))
    rows, places, many = _attention_tile(q, block, kind, half, wide)
    tile = 1 if few else max(1, rows // padded)
    tiles = triton.cdiv(tokens, tile)
    slots = (1 if half else held(block, shared_memory(q))) * processors(q)
    most = 1 if arrived is None or not few else JOINED
    splits = context_splits(pages, ATTENTION_SPLIT_PAGES, tiles * kv_heads, slots, most)
    per = triton.cdiv(pages, splits)
    splits = triton.cdiv(pages, per)
    alone = splits <= most  # without a kernel that joins
    parts, peaks, sums = out, out, out
    if splits > 1:
        parts = torch.empty((splits, tokens, heads, dims), dtype=torch.float32, device=q.device)
        peaks, sums = (torch.empty((splits, tokens, heads), dtype=torch.float32, device=q.device) for _ in range(2))
    new_heads, turns = _turning(new, q, contexts)
    pad, codes_here = int(triton.next_power_of_2(splits)), alone and made is not None
    _attention_kernel[(tiles, kv_heads, splits)](
        q, *_parts(*cache), *contexts, parts, peaks, sums, either(made, out), tokens, heads, kv_heads, dims, pages, per,
        settings.window or 1 << 30, settings.score_scale, *growth_of(settings), q.stride(0), q.stride(1),
        either(sinks, q), settings.score_cap or 0.0, *new_heads, out, either(arrived, contexts.rows), **turns,
        CHUNKED=settings.chunked, GROWN=settings.query_growth != 0, SINKS=sinks is not None,
        CAPPED=settings.score_cap is not None, CODED=codes_here, GROUP=group, GROUP_PAD=padded, TILE=tile,
        M=max(16, tile * padded), BLOCK=block, SPLIT=splits > 1, JOINED=pad if 1 < splits <= most else 0, KIND=kind,
        HALF=half, TWO=few and kind == "F16", PLACES=places, PRECISION=precision(q),
        num_warps=many, enable_fp_fusion=not codes_here and (new is None or kind != "Q8_0"),
        launch_pdl=early(q),
    )  # fmt: skip
    if not alone:
        _join_kernel[(tokens * heads,)](
            parts, peaks, sums, out, either(made, out), heads, dims, splits, CODED=made is not None, PAD=pad,
            BLOCK=block, num_warps=4, enable_fp_fusion=made is None, launch_pdl=early(q),
        )  # fmt: skip
    return out


# ---------------------------------------------------------------------------------------------------------------------
# The predictor


@triton.jit
def _put_selection(chosen, first, others, t, row, here, n, split):
    """Store what is selected of some rows: those before `split` into first, the others behind it."""
    tl.store(first + t * split + row, chosen.to(tl.uint8), mask=here & (row < split))
    tl.store(others + t * (n - split) + row - split, chosen.to(tl.uint8), mask=here & (row >= split))


@triton.jit
def _put_guess(
    y, threshold, z, first, others, counts, t, tokens, row, here, n, split, tile, tiles, FLOOR: tl.constexpr
):  # fmt: skip
    """Store what a tile of rows of the second matrix says of token t, see `_outer_kernel`. Returns which rows from
    `split` on are selected."""
    chosen = here & ((y >= threshold) | (y != y))
    _put_selection(chosen, first, others, t, row, here, n, split)
    if FLOOR:
        tl.store(z + t * n + row, y, mask=here)
        own = tl.sum(chosen.to(tl.int32), 0)
        tl.store(counts + t * tiles + tile, own, mask=t < tokens)
    return (chosen & (row >= split)).to(tl.int32)


@launched
@triton.jit(do_not_specialize=["tokens", "number"])
def _outer_kernel(
    x, data, scales, z, first, others, counts, counters, answered, number, tokens, n, k, split, threshold,
    FLOOR: tl.constexpr, ANSWERS: tl.constexpr, TYPE: tl.constexpr, T: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    G: tl.constexpr, PRECISION: tl.constexpr, HALVES: tl.constexpr, ASKED_FOR: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Rows of a predictor's second matrix, R at a time, and which of them each token selects: those whose z reaches the
    threshold. A program has an even share of them, ASKED_FOR rows at most, and asks for these before it waits.

    first: of the rows before `split`, others: of those from it on. With FLOOR z [tokens, n] is kept, and in counts
    [tokens, tiles] how many of each R rows are selected. ANSWERS: `settle_together`, of `others`, but with FLOOR the
    kernel that follows does.
    """
    tiles = tl.cdiv(n, R)
    cold = tl.zeros((R,), tl.int32)
    begin, end = share(tiles)
    ask_for(data, begin * R + tl.arange(0, ASKED_FOR), n, k, TYPE, LINES)
    follow()
    for tile in range(begin, end):
        row = tile * R + tl.arange(0, R)
        live = row < n
        if T > 1:
            y = row_dots(x, data, scales, row.to(tl.int64), live, tokens, k, TYPE, T, R, C, PRECISION, HALVES)
            t = tl.arange(0, T)
            here = live[:, None] & (t < tokens)[None, :]
            chosen = here & ((y >= threshold) | (y != y))
            _put_selection(chosen, first, others, t[None, :], row[:, None], here, n, split)
            cold += tl.sum((chosen & (row[:, None] >= split)).to(tl.int32), 1)
            if FLOOR:
                tl.store(z + t[None, :] * n + row[:, None], y, mask=here)
                tl.store(counts + t * tiles + tile, tl.sum(chosen.to(tl.int32), 0), mask=t < tokens)
        elif of_integers(TYPE):
            for t0 in range(0, tokens if T else 1, G):
                own = x + t0 * taken_width(k, TYPE)
                sums = dots_together(own, data, scales, row.to(tl.int64), live, tokens - t0, k, TYPE, G, R, C)
                for t in tl.static_range(G):
                    here = live & (t0 + t < tokens)
                    cold += _put_guess(
                        sums[t], threshold, z, first, others, counts, t0 + t, tokens, row, here, n, split, tile, tiles,
                        FLOOR,
                    )  # fmt: skip
        else:
            y = row_dots(x, data, scales, row.to(tl.int64), live, 1, k, TYPE, T, R, C, PRECISION)
            cold += _put_guess(y, threshold, z, first, others, counts, 0, 1, row, live, n, split, tile, tiles, FLOOR)
    if ANSWERS:
        if FLOOR:
            tl.atomic_add(counters + 1, tl.sum(cold, 0))
        else:
            settle_together(tl.sum(cold, 0), counters, answered, number, tl.num_programs(0))


@launched
@triton.jit(do_not_specialize=["number"])
def _floor_kernel(
    z, numbers, counts, first, others, counters, answered, number, n, split, floor, tiles, threshold,
    ANSWERS: tl.constexpr, BLOCK: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    """One token: if fewer than `floor` are selected, select the `floor` largest of z instead, of equal ones those of
    least number. Otherwise it only adds up the counts."""
    follow()
    t = tl.program_id(0)
    more = tl.full((), 0, tl.int32)
    selected = tl.zeros((COUNTS,), tl.int32)
    for c0 in range(0, tiles, COUNTS):
        c = c0 + tl.arange(0, COUNTS)
        selected += tl.load(counts + t * tiles + c, mask=c < tiles, other=0)
    if tl.sum(selected, 0) < floor:
        i = tl.arange(0, BLOCK)
        here = i < n
        guess = tl.load(z + t * n + i, mask=here, other=float("-inf"))
        # Integers in the order of z, NaN above all.
        bits = (guess + 0.0).to(tl.int32, bitcast=True)
        key = tl.where(guess != guess, 0x7FFFFFFF, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))
        # The largest key that `floor` of them reach, by bisection.
        low, high = tl.full((), -0x80000000, tl.int64), tl.full((), 0x7FFFFFFF, tl.int64)
        for _ in range(32):
            middle = (low + high + 1) >> 1
            enough = tl.sum((here & (key >= middle.to(tl.int32))).to(tl.int32), 0) >= floor
            low, high = tl.where(enough, middle, low), tl.where(enough, high, middle - 1)
        last = low.to(tl.int32)
        above, equal = here & (key > last), here & (key == last)
        # Of those that are equal to it the first, by bisection of their numbers.
        lacking = floor - tl.sum(above.to(tl.int32), 0)
        neuron = tl.load(numbers + i, mask=here, other=0)
        low, high = tl.full((), 0, tl.int32), tl.full((), BLOCK - 1, tl.int32)
        for _ in range(NUMBER_BITS):
            middle = (low + high) >> 1
            enough = tl.sum((equal & (neuron <= middle)).to(tl.int32), 0) >= lacking
            low, high = tl.where(enough, low, middle + 1), tl.where(enough, middle, high)
        chosen = above | (equal & (neuron <= high))
        _put_selection(chosen, first, others, t, i, here, n, split)
        reached = (guess >= threshold) | (guess != guess)  # those were counted
        more += tl.sum((chosen & (reached == 0) & (i >= split)).to(tl.int32), 0)
    if ANSWERS:
        settle_together(more, counters, answered, number, tl.num_programs(0))


def predict(
    inner: Weight, outer: Weight, numbers: Tensor, x: Tensor, threshold: float, floor: int, into: tuple[Tensor, Tensor],
    answer: CallAnswer | None,
) -> None:  # fmt: skip
    """`gpu.predict` of at most `gpu.FEW` tokens."""
    hidden = linear(inner, x, relu=True)
    tokens, n, split, floor = x.shape[0], outer.rows, into[0].shape[1], min(floor, outer.rows)
    if not tokens or not n:
        return
    tile, two = fitting(outer, tokens, processors(x)), halved(outer.type, tokens)
    tiles = triton.cdiv(n, tile.rows)
    programs = tiles
    if in_turn(outer.type, tokens):
        programs = min(tiles, held_programs(outer.type, tokens, tile) * processors(x))
    asked = int(triton.next_power_of_2(tile.rows * triton.cdiv(tiles, programs)))
    z, counts = hidden, hidden
    if floor:
        z = torch.empty((tokens, n), dtype=torch.float32, device=x.device)
        counts = torch.empty((tokens, tiles), dtype=torch.int32, device=x.device)
    settled = answer or (numbers, numbers, 0)
    _outer_kernel[(programs,)](
        taken(hidden, outer.type), outer.data, scales_of(outer), z, *into, counts, *settled, tokens, n, outer.k, split,
        threshold, FLOOR=floor > 0, ANSWERS=answer is not None, TYPE=outer.type, T=columns(outer.type, tokens),
        R=tile.rows, C=tile.columns, G=together(outer.type, tokens), PRECISION=precision(x), HALVES=two,
        ASKED_FOR=asked, LINES=asked_lines(outer, asked), num_warps=tile.warps, num_stages=STAGES, launch_pdl=early(x),
    )  # fmt: skip
    if floor:
        block = triton.next_power_of_2(n)
        _floor_kernel[(tokens,)](
            z, numbers, counts, *into, *settled, n, split, floor, tiles, threshold, ANSWERS=answer is not None,
            BLOCK=block, COUNTS=SUMMED, num_warps=warps(block, 16), launch_pdl=early(x),
        )  # fmt: skip
