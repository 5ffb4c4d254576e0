// The block formats of quantised weights, as kernels read them from panels. Included by ISA files only.
#pragma once
#include "simd.h"
#include "table.h"

namespace {

// f(Index<j>{}) for j in [i, n), at most 16 of them. Not by recursion: the compiler optimises a function before it inlines it,
// hence each one around another has all that is in it optimised once more.
template <int i, int n, class F>
PI_INLINE void unroll(F&& f) {
  static_assert(n - i <= 16, "a step below for each");
#define PI_STEP(j) \
  if constexpr (i + j < n) f(Index<i + j>{})
  PI_STEP(0);
  PI_STEP(1);
  PI_STEP(2);
  PI_STEP(3);
  PI_STEP(4);
  PI_STEP(5);
  PI_STEP(6);
  PI_STEP(7);
  PI_STEP(8);
  PI_STEP(9);
  PI_STEP(10);
  PI_STEP(11);
  PI_STEP(12);
  PI_STEP(13);
  PI_STEP(14);
  PI_STEP(15);
#undef PI_STEP
}

// The same of [0, n) where n may be 1, which needs no function around f.
#define PI_UNROLL(n, f)                  \
  if constexpr ((n) == 1) f(Index<0>{}); \
  else unroll<0, n>(f)

// ---- Quantised weights -------------------------------------------------------------------------------------------
// A weight trait reads one 32-k block of BLOCK_BYTES, and of SCALE_BYTES (in the mean) behind all codes: group<upper, i>(j)
// gives the codes of four k of 16 rows, group 4 upper + j of the eight of a block, j an Index or a number; i is the
// block's number modulo UNROLL. scales() gives the factor of the block and, with MIN, what is added per unit of
// activation. Signed codes have OFFSET added, which the integer sum subtracts again, or are SIGNED bytes. MOST: the largest
// code, as an unsigned byte. HALVES 2: each 16 k have a factor of their own, half() (Q6_K), and with MIN a minimum(), what
// is added per unit of their activation (Q2_K). BYTE_PRODUCTS: codes less OFFSET times the factor() of their half, a whole
// number, fit signed bytes; -1: negated they do.

// Minima of a block.
template <class W>
constexpr int MINIMA = W::MIN ? W::HALVES : 0;

struct Scales {
  f32x16 d, m;
};

struct WQ4_0 {
  static constexpr int MOST = 15, OFFSET = 8, UNROLL = 1, HALVES = 1, BLOCK_BYTES = 256, SCALE_BYTES = 32;
  static constexpr bool SIGNED = false, MIN = false, WIDE = false;
  template <int upper>
  static PI_INLINE_MEMBER u8x64 half_bytes(const uint8_t* p) {
    return upper ? b_high4(b_load(p)) : b_low4(b_load(p));
  }
  template <int upper, int, class J>
  static PI_INLINE_MEMBER u8x64 group(const uint8_t* codes, int64_t b, J j) {
    return half_bytes<upper>(codes + b * 256 + j * 64);
  }
  static PI_INLINE_MEMBER Scales scales(const uint8_t* meta, int64_t b) {
    return {f_load_f16(meta + b * 32), f_zero()};
  }
};

struct WQ4_1 : WQ4_0 {
  static constexpr int OFFSET = 0, SCALE_BYTES = 64;
  static constexpr bool MIN = true;
  static PI_INLINE_MEMBER Scales scales(const uint8_t* meta, int64_t b) {
    return {f_load_f16(meta + b * 64), f_load_f16(meta + b * 64 + 32)};
  }
};

struct WQ5_0 {
  static constexpr int MOST = 31, OFFSET = 16, UNROLL = 1, HALVES = 1, BLOCK_BYTES = 320, SCALE_BYTES = 32;
  static constexpr bool SIGNED = false, MIN = false, WIDE = false;
  template <int upper, int, class J>
  static PI_INLINE_MEMBER u8x64 group(const uint8_t* codes, int64_t b, J j) {
    const uint8_t* q = codes + b * 320;
    u8x64 low = WQ4_0::half_bytes<upper>(q + j * 64), bits = b_load(q + 256);  // bit 4 upper + j is moved to bit 4
    return b_or(low, b_and(upper ? b_shr(bits, j) : b_move<4>(bits, j), b_set(16)));
  }
  static PI_INLINE_MEMBER Scales scales(const uint8_t* meta, int64_t b) {
    return {f_load_f16(meta + b * 32), f_zero()};
  }
};

struct WQ5_1 : WQ5_0 {
  static constexpr int OFFSET = 0, SCALE_BYTES = 64;
  static constexpr bool MIN = true;
  static PI_INLINE_MEMBER Scales scales(const uint8_t* meta, int64_t b) { return WQ4_1::scales(meta, b); }
};

struct WQ8_0 {
  static constexpr int MOST = 255, OFFSET = 0, UNROLL = 1, HALVES = 1, BLOCK_BYTES = 512, SCALE_BYTES = 32;
  static constexpr bool SIGNED = true, MIN = false, WIDE = false;
  template <int upper, int, class J>
  static PI_INLINE_MEMBER u8x64 group(const uint8_t* codes, int64_t b, J j) {
    return b_load(codes + b * 512 + upper * 256 + j * 64);
  }
  static PI_INLINE_MEMBER Scales scales(const uint8_t* meta, int64_t b) {
    return {f_load_f16(meta + b * 32), f_zero()};
  }
};

// Per 256 k: d, dmin, then sc and m of each 32.
PI_INLINE Scales k_scales(const uint8_t* meta, int64_t b) {
  const uint8_t* s = meta + b / 8 * 320;
  f32x16 d = f_load_f16(s), dmin = f_load_f16(s + 32);
  s += 64 + b % 8 * 32;
  return {f_mul(d, i_float(i_load_u8(s))), f_sub(f_zero(), f_mul(dmin, i_float(i_load_u8(s + 16))))};
}

struct WQ4_K {
  static constexpr int MOST = 15, OFFSET = 0, UNROLL = 2, HALVES = 1, BLOCK_BYTES = 256, SCALE_BYTES = 40;
  static constexpr bool SIGNED = false, MIN = true, WIDE = false;
  template <int upper, int i, class J>
  static PI_INLINE_MEMBER u8x64 group(const uint8_t* codes, int64_t b, J j) {
    return WQ4_0::half_bytes<i>(codes + b / 2 * 512 + upper * 256 + j * 64);
  }
  static PI_INLINE_MEMBER Scales scales(const uint8_t* meta, int64_t b) { return k_scales(meta, b); }
};

struct WQ5_K : WQ4_K {
  static constexpr int MOST = 31, BLOCK_BYTES = 320;
  template <int upper, int i, class J>
  static PI_INLINE_MEMBER u8x64 group(const uint8_t* codes, int64_t b, J j) {
    const uint8_t* q = codes + b / 8 * 2560 + upper * 256 + j * 64;
    return b_or(WQ4_0::half_bytes<i>(q + b % 8 / 2 * 512),
                b_shl<4>(b_and(b_shr(b_load(q + 2048), (int)(b % 8)), b_set(1))));
  }
};

struct WQ6_K {
  static constexpr int MOST = 63, OFFSET = 32, UNROLL = 4, HALVES = 2, BLOCK_BYTES = 384, SCALE_BYTES = 36;
  static constexpr bool SIGNED = false, MIN = false, WIDE = false;
  template <int upper, int i, class J>
  static PI_INLINE_MEMBER u8x64 group(const uint8_t* codes, int64_t b, J j) {
    const uint8_t* q = codes + b / 4 * 1536 + upper * 256 + j * 64;
    u8x64 low = WQ4_0::half_bytes<i / 2>(q + (i & 1) * 512), bits = b_load(q + 1024);
    if constexpr (i < 2) bits = b_shl<4 - 2 * i>(bits);
    else if constexpr (i == 3) bits = b_shr<2>(bits);
    return b_or(low, b_and(bits, b_set(0x30)));
  }
  static PI_INLINE_MEMBER Scales scales(const uint8_t* meta, int64_t b) {
    return {f_load_f16(meta + b / 8 * 288), f_zero()};
  }
  static PI_INLINE_MEMBER i32x16 factor(const uint8_t* meta, int64_t b, int h) {
    return i_load_s8(meta + b / 8 * 288 + 32 + b % 8 * 32 + 16 * h);
  }
  static PI_INLINE_MEMBER f32x16 half(const uint8_t* meta, int64_t b, int h) { return i_float(factor(meta, b, h)); }
};

struct WQ3_K : WQ6_K {
  static constexpr int MOST = 7, OFFSET = 4, UNROLL = 1, BLOCK_BYTES = 192;
  static constexpr int BYTE_PRODUCTS = -1;  // -4 times -32 does not fit
  template <int upper, int, class J>
  static PI_INLINE_MEMBER u8x64 group(const uint8_t* codes, int64_t b, J j) {
    return three_bits(codes + b * 192, plus<4 * upper>(j));
  }
  template <int g>
  static PI_INLINE_MEMBER u8x64 three_bits(const uint8_t* q, Index<g>) {
    if constexpr (g < 6) return b_and(b_shr(b_load(q + g / 2 * 64), Index<g % 2 * 3>{}), b_set(7));
    else return nibbles_joined(b_shr<6>(b_load(q + (g - 6) * 64)), b_shr<g - 2>(b_load(q + 128)));
  }
  static PI_INLINE_MEMBER u8x64 three_bits(const uint8_t* q, int g) {
    if (g < 6) return b_and(b_shr(b_load(q + g / 2 * 64), g % 2 * 3), b_set(7));
    return nibbles_joined(b_shr<6>(b_load(q + (g - 6) * 64)), b_shr(b_load(q + 128), g - 2));
  }
  static PI_INLINE_MEMBER u8x64 nibbles_joined(u8x64 low, u8x64 high) {
    return b_or(b_and(low, b_set(3)), b_and(high, b_set(4)));
  }
};

struct WQ2_K {
  static constexpr int MOST = 3, OFFSET = 0, UNROLL = 1, HALVES = 2, BLOCK_BYTES = 128, SCALE_BYTES = 40;
  static constexpr int BYTE_PRODUCTS = 1;
  static constexpr bool SIGNED = false, MIN = true, WIDE = false;
  template <int upper, int, class J>
  static PI_INLINE_MEMBER u8x64 group(const uint8_t* codes, int64_t b, J j) {
    return b_and(b_shr(b_load(codes + b * 128 + upper * 64), twice(j)), b_set(3));
  }
  static PI_INLINE_MEMBER Scales scales(const uint8_t* meta, int64_t b) {
    return {f_load_f16(meta + b / 8 * 320), f_zero()};
  }
  static PI_INLINE_MEMBER i32x16 nibbles(const uint8_t* meta, int64_t b, int h) {
    return i_load_u8(meta + b / 8 * 320 + 64 + b % 8 * 32 + 16 * h);
  }
  static PI_INLINE_MEMBER i32x16 factor(const uint8_t* meta, int64_t b, int h) { return i_low4(nibbles(meta, b, h)); }
  static PI_INLINE_MEMBER f32x16 half(const uint8_t* meta, int64_t b, int h) { return i_float(factor(meta, b, h)); }
  static PI_INLINE_MEMBER f32x16 minimum(const uint8_t* meta, int64_t b, int h) {
    const f32x16 dmin = f_load_f16(meta + b / 8 * 320 + 32);
    return f_mul(f_sub(f_zero(), dmin), i_float(i_shr<4>(nibbles(meta, b, h))));
  }
};

struct WTQ2_0 : WQ2_K {
  static constexpr int OFFSET = 1, HALVES = 1, SCALE_BYTES = 4;
  static constexpr bool MIN = false;
  static PI_INLINE_MEMBER Scales scales(const uint8_t* meta, int64_t b) {
    return {f_load_f16(meta + b / 8 * 32), f_zero()};
  }
};

struct WQ2_0 : WTQ2_0 {
  static constexpr int SCALE_BYTES = 16;
  static PI_INLINE_MEMBER Scales scales(const uint8_t* meta, int64_t b) {
    return {f_load_f16(meta + b / 2 * 32), f_zero()};
  }
};

// A bit is 0 or 2, one above its value.
struct WQ1_0 : WTQ2_0 {
  static constexpr int MOST = 2, BLOCK_BYTES = 64, SCALE_BYTES = 8;
  template <int upper, int, class J>
  static PI_INLINE_MEMBER u8x64 group(const uint8_t* codes, int64_t b, J j) {
    const u8x64 bits = b_load(codes + b * 64);  // bit 4 upper + j is moved to bit 1
    return b_and(upper ? b_shr(bits, plus<3>(j)) : b_move<1>(bits, j), b_set(2));
  }
  static PI_INLINE_MEMBER Scales scales(const uint8_t* meta, int64_t b) {
    return {f_load_f16(meta + b / 4 * 32), f_zero()};
  }
};

// Where a panel has each of the 64 groups of a block of TQ1_0.
struct Digits {
  uint8_t line[64] = {}, digit[64] = {};
  constexpr Digits() {
    for (int g = 0; g < 64; g++) {
      line[g] = (uint8_t)(g < 40 ? g % 8 : g < 60 ? 8 + g % 4 : 12);
      digit[g] = (uint8_t)(g < 40 ? g / 8 : g < 60 ? (g - 40) / 4 : g - 60);
    }
  }
};
constexpr Digits DIGITS;

struct WTQ1_0 : WTQ2_0 {
  static constexpr int MOST = 2, BLOCK_BYTES = 104;
  template <int upper, int, class J>
  static PI_INLINE_MEMBER u8x64 group(const uint8_t* codes, int64_t b, J j) {
    const int64_t at = b % 8 * 8 + 4 * upper + j;
    return b_digit(b_load(codes + b / 8 * 832 + DIGITS.line[at] * 64), DIGITS.digit[at]);
  }
};

// Codes that stand for sixteen values, with OFFSET added where they are not SIGNED, as E2M1's are not.
alignas(16) constexpr int8_t E2M1_ABOVE[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

template <const int8_t (&VALUES)[16]>
struct WTable : WQ4_0 {
  template <int upper, int i, class J>
  static PI_INLINE_MEMBER u8x64 group(const uint8_t* codes, int64_t b, J j) {
    return b_lookup(VALUES, WQ4_0::group<upper, i>(codes, b, j));
  }
};

struct WIQ4_NL : WTable<PI_IQ4_ENTRIES> {
  static constexpr int MOST = 255, OFFSET = 0;
  static constexpr bool SIGNED = true;
};

struct WIQ4_XS : WIQ4_NL {
  static constexpr int SCALE_BYTES = 20;
  static PI_INLINE_MEMBER Scales scales(const uint8_t* meta, int64_t b) {
    const uint8_t* s = meta + b / 8 * 160;
    return {f_mul(f_load_f16(s), i_float(i_load_s8(s + 32 + b % 8 * 16))), f_zero()};
  }
};

// Halves of 2^(e - 127), since the values of E2M1 are doubled: as the bits of a float e - 1 above its mantissa; where that
// is less, for e = 0 and 1, a subnormal number.
PI_INLINE f32x16 half_powers(const uint8_t* p) {
  const i32x16 e = i_load_u8(p);
  return f_max(f_bits(i_shl<23>(i_add(e, i_set(-1)))), f_bits(i_shl<21>(i_add(e, i_set(1)))));
}

struct WMXFP4 : WTable<E2M1_ABOVE> {
  static constexpr int MOST = 24, OFFSET = 12, SCALE_BYTES = 16;
  static PI_INLINE_MEMBER Scales scales(const uint8_t* meta, int64_t b) {
    return {half_powers(meta + b * 16), f_zero()};
  }
};

// What a block has besides d as floats: m, or the factors of both halves and their minima.
template <class W>
PI_INLINE void store_rest(const uint8_t* meta, int64_t b, const Scales& of_block, float* out) {
  if constexpr (MINIMA<W> == 1) f_store(out, of_block.m);
  if constexpr (W::HALVES == 2) {
    for (int h = 0; h < 2; h++) {
      f_store(out + 16 * h, W::half(meta, b, h));
      if constexpr (MINIMA<W> == 2) f_store(out + 32 + 16 * h, W::minimum(meta, b, h));
    }
  }
}

// d * sum of the i-th 16 q of a row of activations.
PI_INLINE float half_sum(const float* d, const int16_t* s, int64_t i) { return d[i / 2] * (float)s[i]; }

// Half of each number of 4 bits of exponent, which is 7 above its value, and 3 of mantissa; without an exponent the number
// is 1/512 of the mantissa, which is less than what its bits are otherwise.
PI_INLINE f32x16 half_e4m3(const uint8_t* p) {
  const f32x16 plain = f_bits(i_add(i_shl<20>(i_load_u8(p)), i_set(119 << 23)));
  return f_min(plain, f_fma(plain, f_set(2), f_set(-0.0078125f)));
}

struct WNVFP4 : WTable<E2M1_ABOVE> {
  static constexpr int MOST = 24, OFFSET = 12, HALVES = 2, SCALE_BYTES = 32;
  template <int upper, int, class J>
  static PI_INLINE_MEMBER u8x64 group(const uint8_t* codes, int64_t b, J j) {
    return b_lookup(E2M1_ABOVE, b_low4(b_shr(b_load(codes + b * 256 + upper * 128 + j % 2 * 64), four_if_2(j))));
  }
  static PI_INLINE_MEMBER Scales scales(const uint8_t* meta, int64_t) { return {f_load((const float*)meta), f_zero()}; }
  static PI_INLINE_MEMBER f32x16 half(const uint8_t* meta, int64_t b, int h) {
    return half_e4m3(meta + 64 + b * 32 + 16 * h);
  }
};

// Groups that a trait makes TOGETHER, by groups<upper, i>(codes, b, j, to), j the first: those of entries of grids.
template <class W, class = void>
constexpr int TOGETHER = 1;
template <class W>
constexpr int TOGETHER<W, decltype((void)W::TOGETHER)> = W::WIDE ? 1 : W::TOGETHER;
template <class W, class = void>
constexpr bool OF_GRID = false;
template <class W>
constexpr bool OF_GRID<W, decltype((void)W::TOGETHER)> = true;

// Whether activations may take the signs of a type's codes (GridOfFour).
#if defined(PI_SIGNS)
template <class W, class = void>
constexpr bool SIGNS_APART = false;
template <class W>
constexpr bool SIGNS_APART<W, decltype((void)W::SIGNS_APART)> = true;
#else
template <class W>
constexpr bool SIGNS_APART = false;
#endif

template <class W, int upper, int i, class J>
PI_INLINE void take(const uint8_t* codes, int64_t b, J j, u8x64 (&to)[TOGETHER<W>]) {
  if constexpr (TOGETHER<W> == 1) to[0] = W::template group<upper, i>(codes, b, j);
  else W::template groups<upper, i>(codes, b, j, to);
}

template <class W, class = void>
constexpr int BYTE_PRODUCTS = 0;
template <class W>
constexpr int BYTE_PRODUCTS<W, decltype((void)W::BYTE_PRODUCTS)> = W::HALVES == 2 ? W::BYTE_PRODUCTS : 0;

// Whether codes are a byte each as they are stored.
template <class W>
constexpr bool BYTES = W::BLOCK_BYTES == 512;

// The codes of a panel, a byte each, [block][8 groups][64]: what of_block(b) makes of those of a group, and its number.
template <class W, class OfBlock>
PI_INLINE void widen(const uint8_t* codes, int64_t nb, uint8_t* out, const OfBlock& of_block) {
  for (int64_t b0 = 0; b0 < nb; b0 += W::UNROLL) {
    unroll<0, W::UNROLL>([&](auto i) __attribute__((always_inline)) {
      const int64_t b = b0 + i.value;
      const auto made = of_block(b);
      unroll<0, 8 / TOGETHER<W>>([&](auto n) __attribute__((always_inline)) {
        constexpr int g = n.value * TOGETHER<W>;
        u8x64 c[TOGETHER<W>];
        take<W, g / 4, i.value>(codes, b, Index<g % 4>{}, c);
#pragma GCC unroll 8
        for (int s = 0; s < TOGETHER<W>; s++) b_store(out + b * 512 + (g + s) * 64, made(c[s], g + s));
      });
    });
  }
}

// These less `offset`.
template <class W>
void widen(const uint8_t* codes, int64_t nb, uint8_t* out, int offset) {
  widen<W>(codes, nb, out, [&](int64_t) __attribute__((always_inline)) {
    return [offset](u8x64 c, int) __attribute__((always_inline)) { return b_sub(c, b_set(offset)); };
  });
}

// Their products with the factors of halves (BYTE_PRODUCTS), plus `above`.
template <class W>
void widen_products(const uint8_t* codes, const uint8_t* scales, int64_t nb, uint8_t* out, int above) {
  widen<W>(codes, nb, out, [&](int64_t b) __attribute__((always_inline)) {
    const u8x64 first = b_repeat(W::factor(scales, b, 0)), second = b_repeat(W::factor(scales, b, 1));
    return [first, second, above](u8x64 c, int g) __attribute__((always_inline)) {
      const u8x64 product = b_times(b_sub(c, b_set(W::OFFSET)), g < 4 ? first : second);
      return W::BYTE_PRODUCTS > 0 ? b_sub(product, b_set(-above)) : b_sub(b_set(above), product);
    };
  });
}

}  // namespace
