// The block formats of quantised weights, as kernels read them from panels. Included by ISA files only.
#pragma once
#include "simd.h"
#include "table.h"

namespace {

template <int i, int n, class F>
__attribute__((always_inline)) inline void unroll(F&& f) {
  if constexpr (i < n) {
    f(Index<i>{});
    unroll<i + 1, n>(f);
  }
}

// ---- Quantised weights -------------------------------------------------------------------------------------------
// A weight trait reads one 32-k block of BLOCK_BYTES, and of SCALE_BYTES (in the mean) behind all codes: group<upper, i>(j)
// gives the codes of four k of 16 rows, group 4 upper + j of the eight of a block, j an Index or a number; i is the
// block's number modulo UNROLL. scales() gives the factor of the block and, with MIN, what is added per unit of
// activation. Signed codes have OFFSET added, which the integer sum subtracts again, or are SIGNED bytes. MOST: the largest
// code, as an unsigned byte. HALVES 2: each 16 k have a factor of their own (Q6_K).

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
    return b_or(low, b_and(upper ? b_shr(bits, j) : move_to_4(bits, j), b_set(16)));
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
  static PI_INLINE_MEMBER f32x16 half(const uint8_t* meta, int64_t b, int h) {
    return i_float(i_load_s8(meta + b / 8 * 288 + 32 + b % 8 * 32 + 16 * h));
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

// Whether codes are a byte each as they are stored.
template <class W>
constexpr bool BYTES = W::BLOCK_BYTES == 512;

// The codes of a panel, less `offset`, a byte each: [block][8 groups][64].
template <class W>
void widen(const uint8_t* codes, int64_t nb, uint8_t* out, int offset) {
  for (int64_t b0 = 0; b0 < nb; b0 += W::UNROLL) {
    unroll<0, W::UNROLL>([&](auto i) __attribute__((always_inline)) {
      unroll<0, 8>([&](auto g) __attribute__((always_inline)) {
        b_store(
            out + (b0 + i.value) * 512 + g.value * 64,
            b_sub(W::template group<g.value / 4, i.value>(codes, b0 + i.value, Index<g.value % 4>{}), b_set(offset)));
      });
    });
  }
}

}  // namespace
