// The types whose codes are entries of grids, as kernels read them from panels (table.h). Included by ISA files only.
//
// A gather looks entries up: of IQ3 it gives a group, of IQ2 and IQ1 two, as halves of bytes. Of 16 words it takes 2.5 ns
// (Sapphire Rapids), two of AVX2 as long, loads and inserts one by one 3.3, and on AVX2 as many cycles of the vector units
// as 16 other instructions, which is why signs cost none there but a look-up and a vpsignb for a group, and of IQ2 come
// with the look-up of values. Permutations of tables in registers take 1.6 ns of 256 entries, but then as many steps as
// they save to bring the bytes of an entry together; more entries take longer. Products by tables of sums are out of
// reach: an entry with its signs is one of 2^15 or more. Up to TILE_Q tokens share look-ups, more take widened panels (of
// 47 tokens IQ3_S then takes 16 ns a group in place of 38), on AVX2 from WIDE_FROM on.
#pragma once
#include "grid_entries.h"
#include "quants.h"

namespace {

struct Grid {
  static constexpr int UNROLL = 1, HALVES = 1, SCALE_BYTES = 12;
  static constexpr bool SIGNED = false, MIN = false, WIDE = false;
};

// Of the two numbers of each byte the low one, or for `high` the other: what they stand for.
PI_INLINE f32x16 odd(const uint8_t* p, int high) {
  return f_fma(i_float(i_field(i_load_u8(p), 4 * high, 15)), f_set(2), f_set(1));
}

// The scales of 32 k: d, a power of two and a number of four bits.
PI_INLINE Scales grid_scales(const uint8_t* meta, int64_t b, float unit) {
  const uint8_t* s = meta + b / 8 * 96;
  return {f_mul(f_mul(f_load_f16(s), f_set(unit)), odd(s + 32 + b % 8 / 2 * 16, (int)(b % 2))), f_zero()};
}

// Of 16 k each the number of four bits, and the rest.
template <int MOST_, int OFFSET_>
struct GridHalves : Grid {
  static constexpr int MOST = MOST_, OFFSET = OFFSET_, HALVES = 2, SCALE_BYTES = 20, TOGETHER = 2;
  static PI_INLINE_MEMBER Scales scales(const uint8_t* meta, int64_t b) {
    return {f_mul(f_load_f16(meta + b / 8 * 160), f_set(0.125f)), f_zero()};
  }
  static PI_INLINE_MEMBER f32x16 half(const uint8_t* meta, int64_t b, int h) {
    return odd(meta + b / 8 * 160 + 32 + b % 8 * 16, h);
  }
};

// Bits of entries above the lowest eight: `bits` of each, from bit `from` of a byte on.
template <int bits, class N>
PI_INLINE i32x16 above_8(const i32x16& bytes, N from) {
  return i_and(i_move<8>(bytes, from), i_set(((1 << bits) - 1) << 8));
}

// Of groups 2 n and 2 n + 1 the signs are bits n and n + 4 of bytes; bytes of 1 and -1 by the bits of a half.
alignas(16) constexpr int8_t SIGNS_BY_BIT[4][16] = {{1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1},
                                                    {1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1},
                                                    {1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1},
                                                    {1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1}};

// Entries of four values, a group each, with signs: W::magnitudes<upper>(codes, b, j), and W::signs(codes, b) says where the
// signs of a block are. Codes have them, or, with PI_SIGNS and few tokens, activations.
template <class W, int OFFSET_>
struct GridOfFour : Grid {
  static constexpr int OFFSET = OFFSET_, MOST = 2 * OFFSET, TOGETHER = 1;
  static constexpr bool SIGNS_APART = true;
  template <int upper, int, class J>
  static PI_INLINE_MEMBER u8x64 group(const uint8_t* codes, int64_t b, J j) {
    const int bit = j % 2 * 4 + 2 * upper + j / 2;
    return b_mirrored(W::template magnitudes<upper>(codes, b, j), b_load(W::signs(codes, b)), 1 << bit, OFFSET);
  }
  template <int upper, class J>
  static PI_INLINE_MEMBER u8x64 signs_of(const uint8_t* codes, int64_t b, J j) {
    const u8x64 bits = b_load(W::signs(codes, b));
    return b_lookup(SIGNS_BY_BIT[2 * upper + j / 2], j % 2 ? b_high4(bits) : b_low4(bits));
  }
};

struct WIQ3_S : GridOfFour<WIQ3_S, 15> {
  static constexpr int BLOCK_BYTES = 208;
  template <int upper, class J>
  static PI_INLINE_MEMBER u8x64 magnitudes(const uint8_t* codes, int64_t b, J j) {
    const uint8_t* p = codes + b / 8 * 1664;
    const i32x16 ninth = above_8<1>(i_load_u8(p + 1024 + b % 8 * 16), plus<4 * upper>(j));
    return b_gather(PI_ENTRIES_IQ3_S.of, i_add(i_load_u8(p + b % 8 * 128 + upper * 64 + j * 16), ninth));
  }
  static PI_INLINE_MEMBER const uint8_t* signs(const uint8_t* codes, int64_t b) {
    return codes + b / 8 * 1664 + 1152 + b % 8 * 64;
  }
  static PI_INLINE_MEMBER Scales scales(const uint8_t* meta, int64_t b) { return grid_scales(meta, b, 1); }
};

// Codes are halves of the grid's values.
struct WIQ3_XXS : GridOfFour<WIQ3_XXS, 31> {
  static constexpr int BLOCK_BYTES = 192;
  template <int upper, class J>
  static PI_INLINE_MEMBER u8x64 magnitudes(const uint8_t* codes, int64_t b, J j) {
    return b_gather(PI_ENTRIES_IQ3_XXS.of, i_load_u8(codes + b / 8 * 1536 + b % 8 * 128 + upper * 64 + j * 16));
  }
  static PI_INLINE_MEMBER const uint8_t* signs(const uint8_t* codes, int64_t b) {
    return codes + b / 8 * 1536 + 1024 + b % 8 * 64;
  }
  static PI_INLINE_MEMBER Scales scales(const uint8_t* meta, int64_t b) { return grid_scales(meta, b, 0.5f); }
};

// The codes of IQ2 by the numbers of their values, 4 more where they are negative.
#define PI_IQ2_CODES(a, b, c) 43 + a, 43 + b, 43 + c, 0, 43 - a, 43 - b, 43 - c
#define PI_IQ2_CODES_OF(...) PI_IQ2_CODES(__VA_ARGS__)
alignas(16) constexpr int8_t IQ2_CODES[16] = {PI_IQ2_CODES_OF(PI_IQ2_VALUES)};

// The groups 2 n and 2 n + 1 of entries of eight values, with their signs.
template <class N>
PI_INLINE void iq2_groups(const uint32_t* table, const i32x16& entries, const uint8_t* signs, N n, u8x64 (&c)[2]) {
  const u8x64 v = b_or(b_gather(table, entries), b_and(b_move<2>(b_load(signs), n), b_set(0x44)));
  c[0] = b_lookup_low(IQ2_CODES, v);
  c[1] = b_lookup_low(IQ2_CODES, b_shr<4>(v));
}

struct WIQ2_XXS : Grid {
  static constexpr int MOST = 86, OFFSET = 43, BLOCK_BYTES = 128, TOGETHER = 2;
  template <int upper, int, class J>
  static PI_INLINE_MEMBER void groups(const uint8_t* codes, int64_t b, J j, u8x64 (&c)[2]) {
    const uint8_t* p = codes + b / 8 * 1024;
    const auto n = plus_half<2 * upper>(j);
    iq2_groups(PI_ENTRIES_IQ2_XXS.of, i_load_u8(p + b % 8 * 64 + n * 16), p + 512 + b % 8 * 64, n, c);
  }
  static PI_INLINE_MEMBER Scales scales(const uint8_t* meta, int64_t b) { return grid_scales(meta, b, 0.125f); }
};

struct WIQ2_XS : GridHalves<86, 43> {
  static constexpr int BLOCK_BYTES = 136;
  template <int upper, int, class J>
  static PI_INLINE_MEMBER void groups(const uint8_t* codes, int64_t b, J j, u8x64 (&c)[2]) {
    const uint8_t* p = codes + b / 8 * 1088;
    const auto n = plus_half<2 * upper>(j);
    const i32x16 ninth = i_field(i_load_u8(p + 512 + b % 8 / 2 * 16), (int)(b % 2) * 4, 15),
                 entries = i_add(i_load_u8(p + b % 8 * 64 + n * 16), above_8<1>(ninth, n));
    iq2_groups(PI_ENTRIES_IQ2_XS.of, entries, p + 576 + b % 8 * 64, n, c);
  }
};

struct WIQ2_S : GridHalves<86, 43> {
  static constexpr int BLOCK_BYTES = 144;
  template <int upper, int, class J>
  static PI_INLINE_MEMBER void groups(const uint8_t* codes, int64_t b, J j, u8x64 (&c)[2]) {
    const uint8_t* p = codes + b / 8 * 1152;
    const auto n = plus_half<2 * upper>(j);
    const i32x16 more = above_8<2>(i_load_u8(p + 512 + b % 8 * 16), twice(n));
    iq2_groups(PI_ENTRIES_IQ2_S.of, i_add(i_load_u8(p + b % 8 * 64 + n * 16), more), p + 640 + b % 8 * 64, n, c);
  }
};

// An eighth of a grid's step, by which all of a block move, is its minimum.
struct WIQ1_S : Grid {
  static constexpr int MOST = 2, OFFSET = 1, BLOCK_BYTES = 88, TOGETHER = 2;
  static constexpr bool MIN = true;
  template <int upper, int, class J>
  static PI_INLINE_MEMBER void groups(const uint8_t* codes, int64_t b, J j, u8x64 (&c)[2]) {
    const uint8_t* p = codes + b / 8 * 704;
    const auto n = plus_half<2 * upper>(j);
    const i32x16 last = i_field(i_load_u8(p + 640 + b % 8 / 2 * 16), (int)(b % 2) * 4, 15),
                 more = i_add(above_8<2>(i_load_u8(p + 512 + b % 8 * 16), twice(n)),
                              i_and(i_move<10>(last, n), i_set(1 << 10)));
    const u8x64 v = b_gather(PI_ENTRIES_IQ1.of, i_add(i_load_u8(p + b % 8 * 64 + n * 16), more));
    c[0] = b_low4(v);
    c[1] = b_high4(v);
  }
  static PI_INLINE_MEMBER Scales scales(const uint8_t* meta, int64_t b) {
    const uint8_t* s = meta + b / 8 * 96;
    const i32x16 pair = i_field(i_load_u8(s + 32 + b % 8 / 2 * 16), (int)(b % 2) * 4, 15);
    const f32x16 d = f_mul(f_load_f16(s), f_fma(i_float(i_field(pair, 0, 7)), f_set(2), f_set(1)));
    return {d, f_mul(d, f_fma(i_float(i_field(pair, 3, 1)), f_set(-0.25f), f_set(0.125f)))};
  }
};

// Codes are eight times the grid, one more or less and 9: by the numbers of its values, 4 more where it moves down.
alignas(16) constexpr int8_t IQ1_M_ABOVE[16] = {2, 10, 18, 0, 0, 8, 16};

struct WIQ1_M : GridHalves<18, 9> {
  static constexpr int BLOCK_BYTES = 96;
  template <int upper, int, class J>
  static PI_INLINE_MEMBER void groups(const uint8_t* codes, int64_t b, J j, u8x64 (&c)[2]) {
    const uint8_t* p = codes + b / 8 * 768;
    const int n = 2 * upper + j / 2;
    const i32x16 more = i_load_u8(p + 512 + b % 8 * 32 + upper * 16);
    const auto from = twice(j);  // 0 or 4
    const i32x16 entries = i_add(i_load_u8(p + b % 8 * 64 + n * 16), above_8<3>(more, from));
    const u8x64 down = b_bits(i_sub(i_set(0), i_and(i_move<0>(more, plus<3>(from)), i_set(1)))),
                v = b_or(b_gather(PI_ENTRIES_IQ1.of, entries), b_and(down, b_set(0x44)));
    c[0] = b_lookup_low(IQ1_M_ABOVE, v);
    c[1] = b_lookup_low(IQ1_M_ABOVE, b_shr<4>(v));
  }
};

}  // namespace
