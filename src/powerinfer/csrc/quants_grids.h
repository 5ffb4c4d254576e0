// The types whose codes are entries of grids, as kernels read them from panels (table.h). Included by ISA files only.
//
// A gather looks entries up: of IQ3 it gives a group, of IQ2 and IQ1 two, as halves of bytes. Of 16 words it takes 8.2
// cycles (Sapphire Rapids), loads and inserts one by one 20. Permutations of tables in registers would take as long for
// IQ3_S: of 64 entries 8 by vpermi2b at 2 cycles each, and as many steps to bring the bytes of an entry together; more
// entries take longer. Products by tables of sums are out of reach: an entry with its signs is one of 2^15 or more. So
// one token is bound by look-ups, at 1.7 (IQ2_XXS) to 2.9 ns (IQ3_S) a group of a core, 9 to 10 GB/s; up to
// TILE_Q tokens share them, more take widened panels (of 47 tokens IQ3_S then takes 16 ns a group in place of 38), on
// AVX2 from WIDE_FROM on.
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

PI_INLINE i32x16 with_high(const uint8_t* low, const uint8_t* high, int shift, int mask) {
  return i_add(i_load_u8(low), i_shl<8>(i_field(i_load_u8(high), shift, mask)));
}

struct WIQ3_S : Grid {
  static constexpr int MOST = 30, OFFSET = 15, BLOCK_BYTES = 208, TOGETHER = 1;
  template <int upper, int, class J>
  static PI_INLINE_MEMBER u8x64 group(const uint8_t* codes, int64_t b, J j) {
    const uint8_t* p = codes + b / 8 * 1664;
    const int g = 4 * upper + j;
    const u8x64 c = b_gather(PI_ENTRIES_IQ3_S.of, with_high(p + b % 8 * 128 + g * 16, p + 1024 + b % 8 * 16, g, 1));
    return b_mirrored(c, b_load(p + 1152 + b % 8 * 64), 1 << g, 2 * OFFSET);
  }
  static PI_INLINE_MEMBER Scales scales(const uint8_t* meta, int64_t b) { return grid_scales(meta, b, 1); }
};

struct WIQ3_XXS : Grid {
  static constexpr int MOST = 124, OFFSET = 62, BLOCK_BYTES = 192, TOGETHER = 1;
  template <int upper, int, class J>
  static PI_INLINE_MEMBER u8x64 group(const uint8_t* codes, int64_t b, J j) {
    const uint8_t* p = codes + b / 8 * 1536;
    const int g = 4 * upper + j;
    const u8x64 c = b_gather(PI_ENTRIES_IQ3_XXS.of, i_load_u8(p + b % 8 * 128 + g * 16));
    return b_mirrored(c, b_load(p + 1024 + b % 8 * 64), 1 << g, 2 * OFFSET);
  }
  static PI_INLINE_MEMBER Scales scales(const uint8_t* meta, int64_t b) { return grid_scales(meta, b, 0.25f); }
};

// The codes of IQ2 by the numbers of their values.
#define PI_ABOVE(a, b, c) 43 + a, 43 + b, 43 + c
#define PI_ABOVE_ALL(...) PI_ABOVE(__VA_ARGS__)
alignas(16) constexpr int8_t IQ2_ABOVE[16] = {PI_ABOVE_ALL(PI_IQ2_VALUES)};

// The groups 2 n and 2 n + 1 of entries of eight values, with their signs.
PI_INLINE void iq2_groups(const uint32_t* table, i32x16 entries, const uint8_t* signs, int n, u8x64 (&c)[2]) {
  const u8x64 v = b_gather(table, entries), negative = b_load(signs);
  c[0] = b_mirrored(b_lookup_low(IQ2_ABOVE, v), negative, 1 << 2 * n, 86);
  c[1] = b_mirrored(b_lookup_low(IQ2_ABOVE, b_shr<4>(v)), negative, 2 << 2 * n, 86);
}

struct WIQ2_XXS : Grid {
  static constexpr int MOST = 86, OFFSET = 43, BLOCK_BYTES = 128, TOGETHER = 2;
  template <int upper, int, class J>
  static PI_INLINE_MEMBER void groups(const uint8_t* codes, int64_t b, J j, u8x64 (&c)[2]) {
    const uint8_t* p = codes + b / 8 * 1024;
    const int n = 2 * upper + j / 2;
    iq2_groups(PI_ENTRIES_IQ2_XXS.of, i_load_u8(p + b % 8 * 64 + n * 16), p + 512 + b % 8 * 64, n, c);
  }
  static PI_INLINE_MEMBER Scales scales(const uint8_t* meta, int64_t b) { return grid_scales(meta, b, 0.125f); }
};

struct WIQ2_XS : GridHalves<86, 43> {
  static constexpr int BLOCK_BYTES = 136;
  template <int upper, int, class J>
  static PI_INLINE_MEMBER void groups(const uint8_t* codes, int64_t b, J j, u8x64 (&c)[2]) {
    const uint8_t* p = codes + b / 8 * 1088;
    const int n = 2 * upper + j / 2;
    const i32x16 entries = with_high(p + b % 8 * 64 + n * 16, p + 512 + b % 8 / 2 * 16, (int)(b % 2) * 4 + n, 1);
    iq2_groups(PI_ENTRIES_IQ2_XS.of, entries, p + 576 + b % 8 * 64, n, c);
  }
};

struct WIQ2_S : GridHalves<86, 43> {
  static constexpr int BLOCK_BYTES = 144;
  template <int upper, int, class J>
  static PI_INLINE_MEMBER void groups(const uint8_t* codes, int64_t b, J j, u8x64 (&c)[2]) {
    const uint8_t* p = codes + b / 8 * 1152;
    const int n = 2 * upper + j / 2;
    const i32x16 entries = with_high(p + b % 8 * 64 + n * 16, p + 512 + b % 8 * 16, 2 * n, 3);
    iq2_groups(PI_ENTRIES_IQ2_S.of, entries, p + 640 + b % 8 * 64, n, c);
  }
};

// An eighth of a grid's step, by which all of a block move, is its minimum.
struct WIQ1_S : Grid {
  static constexpr int MOST = 2, OFFSET = 1, BLOCK_BYTES = 88, TOGETHER = 2;
  static constexpr bool MIN = true;
  template <int upper, int, class J>
  static PI_INLINE_MEMBER void groups(const uint8_t* codes, int64_t b, J j, u8x64 (&c)[2]) {
    const uint8_t* p = codes + b / 8 * 704;
    const int n = 2 * upper + j / 2;
    const i32x16 last = i_field(i_load_u8(p + 640 + b % 8 / 2 * 16), (int)(b % 2) * 4 + n, 1);
    const i32x16 entries = with_high(p + b % 8 * 64 + n * 16, p + 512 + b % 8 * 16, 2 * n, 3);
    const u8x64 v = b_gather(PI_ENTRIES_IQ1.of, i_add(entries, i_shl<10>(last)));
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
    const i32x16 high = i_field(i_load_u8(p + 512 + b % 8 * 32 + upper * 16), n % 2 * 4, 15),
                 entries = i_add(i_load_u8(p + b % 8 * 64 + n * 16), i_shl<8>(i_field(high, 0, 7)));
    const u8x64 down = b_bits(i_sub(i_set(0), i_field(high, 3, 1))),
                v = b_or(b_gather(PI_ENTRIES_IQ1.of, entries), b_and(down, b_set(0x44)));
    c[0] = b_lookup_low(IQ1_M_ABOVE, v);
    c[1] = b_lookup_low(IQ1_M_ABOVE, b_shr<4>(v));
  }
};

}  // namespace
