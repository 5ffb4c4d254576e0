"""Codes of quantised weights, unpacked to words of four by Triton kernels: types of few bits, of grids and of tables.

A piece is sixteen elements of a row, one after another. `unpacked` gives the codes of pieces as integers of 8 bits,
four words for each, and `piece_scales` what they are multiplied with; products, sums and dequantised rows are the same
for all these types (`triton_kernels`). Rows lie as `gpu_types.UNPACKED` says: the codes of a block as in a file, beside
them the rest of it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from powerinfer.formats.weight_types import WEIGHT_TYPES
from powerinfer.kernels.gpu_types import UNPACKED

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


def _repeat_byte(byte: int) -> tl.constexpr:
    return tl.constexpr(int.from_bytes(bytes([byte] * 4), "little", signed=True))


# Of each byte of a word its low four bits, or two or one; its sign; what makes codes signed, see `_signed_by`.
NIBBLES, TWO_BITS, ONE_BIT, SIGN = (_repeat_byte(byte) for byte in (0x0F, 3, 1, 0x80))
_LESS_ONE, _LESS_FOUR, _TWO = (_repeat_byte(byte) for byte in (0x7F, 0x7C, 2))
_EVEN, _EVEN_DIGITS = tl.constexpr(0x00FF00FF), tl.constexpr(0x00030003)  # of each half of a word a byte, and two bits
_FIRST_BITS = tl.constexpr(0x00204081)  # times four bits: each at the beginning of a byte
_ENTRIES = {
    kind: [int.from_bytes(bytes(entry & 255 for entry in facts.entries[i : i + 4]), "little") for i in (0, 4, 8, 12)]
    for kind, facts in WEIGHT_TYPES.items()
    if facts.entries
}


@triton.constexpr_function
def unpacks(kind):
    """Whether this file reads a type."""
    return kind in UNPACKED


@triton.constexpr_function
def has_grid(kind):
    """Whether a type's codes refer to a table: its scales are (scales, table) then, see `gpu_words.table`."""
    return kind.startswith(("IQ1", "IQ2", "IQ3"))


@triton.constexpr_function
def in_order(kind):
    """Whether the codes of a type lie in their order, each block's behind a scale and nothing else."""
    return kind in ("Q2_0", "Q1_0")


@triton.constexpr_function
def _block(kind):
    return WEIGHT_TYPES[kind].block


@triton.constexpr_function
def _entries(kind, i):
    """Word i of the sixteen entries that codes of four bits stand for."""
    word = _ENTRIES[kind][i]
    return word - (word >> 31 << 32)


@triton.constexpr_function
def code_bytes(kind):
    """Bytes of the codes of 256 elements."""
    begin, end = UNPACKED[kind]
    return (end - begin) * 256 // WEIGHT_TYPES[kind].block


@triton.constexpr_function
def _header_bytes(kind):
    """Bytes beside the codes of 256 elements."""
    facts = WEIGHT_TYPES[kind]
    begin, end = UNPACKED[kind]
    return (facts.nbytes - (end - begin)) * 256 // facts.block


@triton.jit
def fours(words, R: tl.constexpr, W: tl.constexpr):
    """Words [R, W] of which a thread has four in turn, as four of [R, W / 4]."""
    even, odd = tl.split(tl.reshape(words, (R, W // 4, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def pieces_from(u0, U: tl.constexpr):
    """u0 .. u0 + U, of which the compiler does not see that they are adjacent: a thread has one after the other."""
    u = u0 + tl.arange(0, U)
    return u // 2 * 2 + (u & 1)


@triton.jit
def half_float(bits):
    """The float16 in the lowest 16 bits, as float32."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _permuted(a, b, selector):
    """Bytes of a (0 to 3) and b (4 to 7), four of them by the lowest three bits of the selector's lowest four halves of
    a byte, whose highest bits are zero."""
    if INTERPRETED:
        word = a & 0
        for i in tl.static_range(4):
            number = selector >> (4 * i) & 7
            byte = tl.where(number < 4, a, b) >> (8 * (number & 3)) & 255
            word |= byte << (8 * i)
    else:
        word = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, selector], dtype=tl.int32, is_pure=True, pack=1
        )
    return word


@triton.jit
def _looked_up(codes, TYPE: tl.constexpr):
    """Four codes of four bits in the bytes of each word, as the entries that they stand for."""
    pairs = codes | codes >> 4
    selector = (pairs & 0xFF) | (pairs >> 8 & 0xFF00)
    among, zero = selector & 0x7777, codes & 0
    low = _permuted(zero + _entries(TYPE, 0), zero + _entries(TYPE, 1), among)
    high = _permuted(zero + _entries(TYPE, 2), zero + _entries(TYPE, 3), among)
    return _permuted(low, high, (selector >> 1 & 0x4444) | 0x3210)


@triton.jit
def _packed(words, high, shift, bit, TYPE: tl.constexpr):
    """Codes of words [R, U] that have them from bit `shift` of every byte on; high: of Q3_K the words with their third
    bits, each the one from `bit` on."""
    if TYPE == "IQ4_XS":
        codes = _looked_up(words >> shift & NIBBLES, TYPE)
    else:
        codes = words >> shift & TWO_BITS
        if TYPE == "Q3_K":
            codes = ((codes | (high >> bit & ONE_BIT) << 2) + _LESS_FOUR) ^ SIGN
        elif TYPE == "TQ2_0":
            codes = (codes + _LESS_ONE) ^ SIGN
    return codes


@triton.jit
def _unpack_runs(data, row, live, u0, k, TYPE: tl.constexpr, R: tl.constexpr, U: tl.constexpr):
    """`unpacked` of types whose pieces have sixteen bytes in turn, at the same bits of each."""
    w, u = u0 * 4 + tl.arange(0, 4 * U), pieces_from(u0, U)
    mask = live[:, None] & (w < k // 4)[None, :]
    words = data.to(tl.pointer_type(tl.int32))
    WIDTH: tl.constexpr = code_bytes(TYPE) // 4
    if TYPE == "IQ4_XS":
        first = row[:, None] * (k // 32 * 4) + (w // 8 * 4 + w % 4)[None, :]
        at, shift = first, u % 2 * 4
    else:  # the compiler sees from these terms that a thread's words are adjacent, and aligned
        first = row[:, None] * (k // 256 * WIDTH) + (w // 64 * WIDTH + w % 8)[None, :]
        at, shift = first + (w // 32 * 8 - w // 64 * 16)[None, :], u // 2 % 4 * 2
        if TYPE == "Q3_K":
            at += 8
    low = fours(tl.load(words + at, mask=mask, other=0), R, 4 * U)
    high = low
    if TYPE == "Q3_K":
        high = fours(tl.load(words + first, mask=mask, other=0), R, 4 * U)
    shift, bit = shift[None, :], (u // 2 % 8)[None, :]
    a, b = _packed(low[0], high[0], shift, bit, TYPE), _packed(low[1], high[1], shift, bit, TYPE)
    return a, b, _packed(low[2], high[2], shift, bit, TYPE), _packed(low[3], high[3], shift, bit, TYPE)


@triton.jit
def _digits(words, power):
    """Digits of base 3 in the bytes of words, less one, of which `power` says which."""
    even = ((words & _EVEN) * power & _EVEN) * 3 >> 8 & _EVEN_DIGITS
    odd = ((words >> 8 & _EVEN) * power & _EVEN) * 3 >> 8 & _EVEN_DIGITS
    return ((even | odd << 8) + _LESS_ONE) ^ SIGN


@triton.jit
def _power(n):
    """3 ** n, n from 0 to 4."""
    return tl.where(n == 0, 1, tl.where(n == 1, 3, tl.where(n == 2, 9, tl.where(n == 3, 27, 81))))


@triton.jit
def _unpack_ternary(data, row, u, mask, k):
    """`unpacked` of TQ1_0."""
    v = u % 16
    last = v == 15  # whose words are the same one's digits
    words = data.to(tl.pointer_type(tl.int32)) + row[None, :] * (k // 256 * 13)
    first = u // 16 * 13 + tl.where(v < 10, v % 2 * 4, tl.where(last, 12, 8))
    power, step = _power(tl.where(v < 10, v // 2, v - 10)), tl.where(last, 0, 1)
    four = ()
    for i in tl.static_range(4):
        of = tl.load(words + (first + step * i)[:, None], mask=mask, other=0)
        four = four + (_digits(of, tl.where(last, _power(i), power)[:, None]),)  # noqa: RUF005
    return four


@triton.jit
def _parity(seven):
    """Seven bits, and an eighth that makes the number of set bits even."""
    seven &= 127
    odd = seven ^ seven >> 4
    odd ^= odd >> 2
    return seven | (odd ^ odd >> 1) << 7 & 128


@triton.jit
def _signed_by(entries, signs):
    """Words of four numbers above zero, those negative whose bit is set in the lowest four of `signs`."""
    bits = (signs & 15) * _FIRST_BITS & ONE_BIT
    return (entries ^ bits * 255) + bits


@triton.jit
def _read_entry(table, number):
    """Both words of an entry of eight."""
    word = tl.load(table + number)
    return word.to(tl.int32), (word >> 32).to(tl.int32)


@triton.jit
def _grid_pairs(data, row, u, mask, k, TYPE: tl.constexpr):
    """Numbers of the two entries of eight of each piece, and its sixteen signs; of IQ1 in place of these whether the
    first, or the second, is moved down (bits 0 and 1)."""
    WIDTH: tl.constexpr = code_bytes(TYPE)
    s, v = u // 16, u % 16
    part = (v % 2)[:, None]
    bytes_ = data + row[None, :] * (k // 256 * WIDTH) + (s * WIDTH)[:, None]
    halves = bytes_.to(tl.pointer_type(tl.int16))
    words = bytes_.to(tl.pointer_type(tl.int32))
    if TYPE == "IQ2_XXS":
        numbers = tl.load(words + (v // 2 * 2)[:, None], mask=mask, other=0) >> 16 * part
        word = tl.load(words + (v // 2 * 2 + 1)[:, None], mask=mask, other=0) >> 14 * part
        first, second = numbers & 255, numbers >> 8 & 255
        signs = _parity(word) | _parity(word >> 7) << 8
    elif TYPE == "IQ2_XS":
        word = tl.load(words + v[:, None], mask=mask, other=0)
        first, second = word & 511, word >> 16 & 511
        signs = _parity(word >> 9) | _parity(word >> 25) << 8
    else:
        numbers = tl.load(halves + v[:, None], mask=mask, other=0).to(tl.int32)
        first, second = numbers & 255, numbers >> 8 & 255
        if TYPE == "IQ2_S":
            signs = tl.load(halves + (16 + v)[:, None], mask=mask, other=0).to(tl.int32)
            more = tl.load(bytes_ + (64 + v // 2)[:, None], mask=mask, other=0).to(tl.int32) >> 4 * part
            first |= (more & 3) << 8
            second |= (more >> 2 & 3) << 8
        elif TYPE == "IQ1_S":
            more = tl.load(halves + (16 + v // 2)[:, None], mask=mask, other=0).to(tl.int32)
            first |= (more >> 6 * part & 7) << 8
            second |= (more >> (6 * part + 3) & 7) << 8
            signs = (more >> 15 & 1) * 3
        else:
            more = tl.load(bytes_ + (32 + v)[:, None], mask=mask, other=0).to(tl.int32)
            first |= (more & 7) << 8
            second |= (more >> 4 & 7) << 8
            signs = (more >> 3 & 1) | (more >> 7 & 1) << 1
    return first, second, signs


@triton.jit
def _unpack_pairs(data, table, row, u, mask, k, TYPE: tl.constexpr):
    """`unpacked` of IQ2 and IQ1."""
    first, second, signs = _grid_pairs(data, row, u, mask, k, TYPE)
    a, b = _read_entry(table, first)
    c, d = _read_entry(table, second)
    if TYPE == "IQ1_S" or TYPE == "IQ1_M":  # from an eighth above to one below; no byte is less than -7
        less, then = (signs & 1) * _TWO, (signs >> 1) * _TWO
        a, b = ((a ^ SIGN) - less) ^ SIGN, ((b ^ SIGN) - less) ^ SIGN
        c, d = ((c ^ SIGN) - then) ^ SIGN, ((d ^ SIGN) - then) ^ SIGN
    else:
        a, b = _signed_by(a, signs), _signed_by(b, signs >> 4)
        c, d = _signed_by(c, signs >> 8), _signed_by(d, signs >> 12)
    return a, b, c, d


@triton.jit
def _unpack_quarters(data, table, row, u, mask, k, TYPE: tl.constexpr):
    """`unpacked` of IQ3, which has an entry for each four elements."""
    WIDTH: tl.constexpr = code_bytes(TYPE)
    s, v = u // 16, u % 16
    part = (v % 2)[:, None]
    bytes_ = data + row[None, :] * (k // 256 * WIDTH) + (s * WIDTH)[:, None]
    words = bytes_.to(tl.pointer_type(tl.int32))
    low = tl.load(words + v[:, None], mask=mask, other=0)
    if TYPE == "IQ3_S":
        high = tl.load(bytes_ + (64 + v // 2)[:, None], mask=mask, other=0).to(tl.int32) >> 4 * part
        halves = bytes_.to(tl.pointer_type(tl.int16))
        signs = tl.load(halves + (36 + v)[:, None], mask=mask, other=0).to(tl.int32)
    else:
        high = tl.zeros_like(low)
        word = tl.load(words + (16 + v // 2)[:, None], mask=mask, other=0) >> 14 * part
        signs = _parity(word) | _parity(word >> 7) << 8
    four = ()
    for i in tl.static_range(4):
        number = (low >> 8 * i & 255) | (high >> i & 1) << 8
        four = four + (_signed_by(tl.load(table + number), signs >> 4 * i),)  # type: ignore[assignment]  # noqa: RUF005
    return four


@triton.jit
def _unpack_nvfp4(data, row, u, mask, k):
    """`unpacked` of NVFP4, whose pieces have eight bytes in turn."""
    word = tl.load(data.to(tl.pointer_type(tl.int64)) + row[None, :] * (k // 16) + u[:, None], mask=mask, other=0)
    first, second = word.to(tl.int32), (word >> 32).to(tl.int32)
    low = _looked_up(first & NIBBLES, "NVFP4"), _looked_up(second & NIBBLES, "NVFP4")
    return low[0], low[1], _looked_up(first >> 4 & NIBBLES, "NVFP4"), _looked_up(second >> 4 & NIBBLES, "NVFP4")


@triton.jit
def _unpack_in_order(data, row, u, mask, k, TYPE: tl.constexpr):
    """`unpacked` of Q2_0 and Q1_0, whose bytes have codes in their order: of a piece a word, or half of one."""
    at = row[None, :] * (k // 16) + u[:, None]
    if TYPE == "Q2_0":
        word = tl.load(data.to(tl.pointer_type(tl.int32)) + at, mask=mask, other=0)
    else:
        word = tl.load(data.to(tl.pointer_type(tl.int16)) + at, mask=mask, other=0).to(tl.int32)
    four = ()
    for i in tl.static_range(4):
        if TYPE == "Q2_0":
            both = word >> 8 * i & 255
            both |= both << 12
            codes = (both | both << 6) & TWO_BITS
        else:
            codes = ((word >> 4 * i & 15) * _FIRST_BITS & ONE_BIT) * 2
        four = four + ((codes + _LESS_ONE) ^ SIGN,)  # type: ignore[assignment]  # noqa: RUF005
    return four


@triton.jit
def _unpack_turned(data, scales, row, live, u0, k, TYPE: tl.constexpr, U: tl.constexpr):
    """`unpacked` of types whose pieces are read one by one, [U, R]: so threads lie along the pieces, as those of x."""
    u = pieces_from(u0, U)
    mask = (u < k // 16)[:, None] & live[None, :]
    if TYPE == "TQ1_0":
        four = _unpack_ternary(data, row, u, mask, k)
    elif TYPE == "NVFP4":
        four = _unpack_nvfp4(data, row, u, mask, k)
    elif in_order(TYPE):
        four = _unpack_in_order(data, row, u, mask, k, TYPE)
    elif TYPE == "IQ3_S" or TYPE == "IQ3_XXS":
        four = _unpack_quarters(data, scales[1], row, u, mask, k, TYPE)
    else:
        four = _unpack_pairs(data, scales[1], row, u, mask, k, TYPE)
    return tl.trans(four[0]), tl.trans(four[1]), tl.trans(four[2]), tl.trans(four[3])


@triton.jit
def unpacked(data, scales, row, live, u0, k, TYPE: tl.constexpr, R: tl.constexpr, U: tl.constexpr):
    """The codes of pieces u0 .. u0 + U of rows [R] that are live: four int32 [R, U], each of four int8."""
    if has_grid(TYPE) or TYPE == "TQ1_0" or TYPE == "NVFP4" or in_order(TYPE):
        four = _unpack_turned(data, scales, row, live, u0, k, TYPE, U)
    else:
        four = _unpack_runs(data, row, live, u0, k, TYPE, R, U)
    return four


@triton.jit
def _part_scale(header, of, v, mask, TYPE: tl.constexpr):
    """Numbers that the block's factor is multiplied with for pieces v [U] of 256 elements; header: the bytes beside the
    codes of these, of: the words of codes, where IQ2_XXS, IQ3_XXS and IQ1_S have them."""
    if TYPE == "IQ2_XXS" or TYPE == "IQ3_XXS":
        at = v // 2 * 2 + 1 if TYPE == "IQ2_XXS" else 16 + v // 2
        word = tl.load(of + at[:, None], mask=mask, other=0)
        part = ((word >> 28 & 15).to(tl.float32) + 0.5) * (0.25 if TYPE == "IQ2_XXS" else 0.5)
    elif TYPE == "IQ1_S":
        word = tl.load(of + (8 + v // 4)[:, None], mask=mask, other=0) >> (v // 2 % 2 * 16 + 12)[:, None]
        part = (2 * (word & 7) + 1).to(tl.float32) * 0.125
    elif TYPE == "IQ1_M":
        word = tl.load(header.to(tl.pointer_type(tl.int16)) + (v // 4)[:, None], mask=mask, other=0).to(tl.int32)
        part = (2 * (word >> (v % 4 * 3)[:, None] & 7) + 1).to(tl.float32) * 0.125
    elif TYPE == "IQ4_XS":
        low = tl.load(header + (4 + v // 4)[:, None], mask=mask, other=0).to(tl.int32) >> (v // 2 % 2 * 4)[:, None]
        high = tl.load((header + 2).to(tl.pointer_type(tl.int16)), mask=mask, other=0).to(tl.int32)
        part = ((low & 15) | (high >> (v // 2 * 2)[:, None] & 3) << 4).to(tl.float32) - 32
    elif TYPE == "Q3_K":
        low = tl.load(header + (v % 8)[:, None], mask=mask, other=0).to(tl.int32) >> (v // 8 * 4)[:, None]
        high = tl.load(header + (8 + v % 4)[:, None], mask=mask, other=0).to(tl.int32) >> (v // 4 * 2)[:, None]
        part = ((low & 15) | (high & 3) << 4).to(tl.float32) - 32
    else:  # four bits each, of 32 elements in IQ3_S
        n = v // 2 if TYPE == "IQ3_S" else v
        small = tl.load(header + (2 + n // 2)[:, None], mask=mask, other=0).to(tl.int32) >> (n % 2 * 4)[:, None]
        part = (2 * (small & 15) + 1).to(tl.float32) * (1.0 if TYPE == "IQ3_S" else 0.125)
    return part


@triton.jit
def _factor(header, mask, TYPE: tl.constexpr):
    """The factor of a block; header: the bytes beside its codes."""
    if TYPE == "IQ1_M":  # four bits of each of four words
        words = header.to(tl.pointer_type(tl.int16))
        bits = tl.load(words, mask=mask, other=0).to(tl.int32) >> 12 & 15
        for i in tl.static_range(1, 4):
            bits |= (tl.load(words + i, mask=mask, other=0).to(tl.int32) >> 12 & 15) << 4 * i
    else:
        at: tl.constexpr = 16 if TYPE == "Q2_K" else 12 if TYPE == "Q3_K" else 0
        bits = tl.load((header + at).to(tl.pointer_type(tl.int16)), mask=mask, other=0)
    return half_float(bits)


@triton.jit
def _half_ue4m3(code):
    """Half of the numbers of 8 bits that NVFP4 has as scales; 0x7F counts as zero."""
    exponent, mantissa = code >> 3 & 15, (code & 7).to(tl.float32)
    power = ((tl.maximum(exponent, 1) + (127 - 11)) << 23).to(tl.float32, bitcast=True)
    number = tl.where(exponent == 0, mantissa, mantissa + 8) * power
    return tl.where(code == 0x7F, 0.0, number)


@triton.jit
def piece_scales(data, scales, row, live, u0, k, TYPE: tl.constexpr, U: tl.constexpr):
    """Scales of the codes of pieces u0 .. u0 + U of rows [R], float32 [R, U]."""
    u = pieces_from(u0, U)
    mask = (u < k // 16)[:, None] & live[None, :]
    headers = scales[0] if has_grid(TYPE) else scales
    if TYPE == "NVFP4":
        of_row = headers + row * (k // 16 + 4)  # the row's factor is behind the scales
        factor = tl.load((of_row + k // 16).to(tl.pointer_type(tl.float32)), mask=live, other=0)
        code = tl.load(of_row[None, :] + u[:, None], mask=mask, other=0).to(tl.int32)
        scale = _half_ue4m3(code) * factor[None, :]
    elif in_order(TYPE):
        BLOCK: tl.constexpr = _block(TYPE)
        at = row[None, :] * (k // BLOCK) + (u // (BLOCK // 16))[:, None]
        scale = half_float(tl.load(headers.to(tl.pointer_type(tl.int16)) + at, mask=mask, other=0))
    else:
        HEADER: tl.constexpr = _header_bytes(TYPE)
        WIDTH: tl.constexpr = code_bytes(TYPE) // 4
        s, v = u // 16, u % 16
        header = headers + row[None, :] * (k // 256 * HEADER) + (s * HEADER)[:, None]
        scale = _factor(header, mask, TYPE)
        if TYPE == "Q2_K":
            scale *= (tl.load(header + v[:, None], mask=mask, other=0) & 15).to(tl.float32)
        elif TYPE != "TQ1_0" and TYPE != "TQ2_0":
            of = data.to(tl.pointer_type(tl.int32)) + row[None, :] * (k // 256 * WIDTH) + (s * WIDTH)[:, None]
            scale *= _part_scale(header, of, v, mask, TYPE)
    return tl.trans(scale)


@triton.constexpr_function
def with_minimum(kind):
    """Whether `piece_minimum` is subtracted from the products of codes and scales."""
    return kind == "Q2_K"


@triton.jit
def piece_minimum(scales, row, live, u0, k, U: tl.constexpr):
    """Numbers that are subtracted of Q2_K, float32 [R, U]."""
    u = pieces_from(u0, U)
    mask = (u < k // 16)[:, None] & live[None, :]
    header = scales + row[None, :] * (k // 256 * 20) + (u // 16 * 20)[:, None]
    small = tl.load(header + (u % 16)[:, None], mask=mask, other=0) >> 4
    least = half_float(tl.load((header + 18).to(tl.pointer_type(tl.int16)), mask=mask, other=0)) * small.to(tl.float32)
    return tl.trans(least)
