// Every kernel, written once over simd.h and compiled once per level (PI_LEVEL names it). Each output element is the
// same chain of operations for any number of tokens, panels or threads of a call: a token gets the same bits in a
// prompt, in a batch and alone.
#include "simd.h"
#include "table.h"

namespace {

template <int n>
struct Index {
  static constexpr int value = n;
};
template <int i, int n, class F>
__attribute__((always_inline)) inline void unroll(F&& f) {
  if constexpr (i < n) {
    f(Index<i>{});
    unroll<i + 1, n>(f);
  }
}

PI_INLINE int32_t word(const int8_t* p) {
  int32_t w;
  memcpy(&w, p, 4);
  return w;
}

// ---- Quantised weights -------------------------------------------------------------------------------------------
// A weight trait reads one 32-k block of BLOCK_BYTES, and of SCALE_BYTES (in the mean) behind all codes: group<g>()
// gives the codes of four k of 16 rows; scales() the factor of the block and, with MIN, what is added per unit of
// activation. Signed codes have OFFSET added, which the integer sum subtracts again, or are SIGNED bytes. HALVES 2: each
// 16 k have a factor of their own (Q6_K).

struct Scales {
  f32x16 d, m;
};

struct WQ4_0 {
  static constexpr int OFFSET = 8, UNROLL = 1, HALVES = 1, BLOCK_BYTES = 256, SCALE_BYTES = 32;
  static constexpr bool SIGNED = false, MIN = false, WIDE = false;
  template <int g, int>
  static PI_INLINE_MEMBER u8x64 group(const uint8_t* codes, int64_t b) {
    u8x64 raw = b_load(codes + b * 256 + (g & 3) * 64);
    return g < 4 ? b_low4(raw) : b_high4(raw);
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
  static constexpr int OFFSET = 16, UNROLL = 1, HALVES = 1, BLOCK_BYTES = 320, SCALE_BYTES = 32;
  static constexpr bool SIGNED = false, MIN = false, WIDE = false;
  template <int g, int>
  static PI_INLINE_MEMBER u8x64 group(const uint8_t* codes, int64_t b) {
    const uint8_t* q = codes + b * 320;
    u8x64 raw = b_load(q + (g & 3) * 64), low = g < 4 ? b_low4(raw) : b_high4(raw), bits = b_load(q + 256);
    u8x64 bit;
    if constexpr (g < 4) bit = b_shl<4 - g>(bits);
    else if constexpr (g == 4) bit = bits;
    else bit = b_shr<g - 4>(bits);
    return b_or(low, b_and(bit, b_set(16)));
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
  static constexpr int OFFSET = 0, UNROLL = 1, HALVES = 1, BLOCK_BYTES = 512, SCALE_BYTES = 32;
  static constexpr bool SIGNED = true, MIN = false, WIDE = false;
  template <int g, int>
  static PI_INLINE_MEMBER u8x64 group(const uint8_t* codes, int64_t b) {
    return b_load(codes + b * 512 + g * 64);
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
  static constexpr int OFFSET = 0, UNROLL = 2, HALVES = 1, BLOCK_BYTES = 256, SCALE_BYTES = 40;
  static constexpr bool SIGNED = false, MIN = true, WIDE = false;
  template <int g, int i>
  static PI_INLINE_MEMBER u8x64 group(const uint8_t* codes, int64_t b) {
    u8x64 raw = b_load(codes + b / 2 * 512 + g * 64);
    return i ? b_high4(raw) : b_low4(raw);
  }
  static PI_INLINE_MEMBER Scales scales(const uint8_t* meta, int64_t b) { return k_scales(meta, b); }
};

struct WQ5_K : WQ4_K {
  static constexpr int BLOCK_BYTES = 320;
  template <int g, int i>
  static PI_INLINE_MEMBER u8x64 group(const uint8_t* codes, int64_t b) {
    const uint8_t* q = codes + b / 8 * 2560;
    u8x64 raw = b_load(q + b % 8 / 2 * 512 + g * 64), low = i ? b_high4(raw) : b_low4(raw);
    return b_or(low, b_shl<4>(b_and(b_shr(b_load(q + 2048 + g * 64), (int)(b % 8)), b_set(1))));
  }
};

struct WQ6_K {
  static constexpr int OFFSET = 32, UNROLL = 4, HALVES = 2, BLOCK_BYTES = 384, SCALE_BYTES = 36;
  static constexpr bool SIGNED = false, MIN = false, WIDE = false;
  template <int g, int i>
  static PI_INLINE_MEMBER u8x64 group(const uint8_t* codes, int64_t b) {
    const uint8_t* q = codes + b / 4 * 1536;
    u8x64 raw = b_load(q + (i & 1) * 512 + g * 64), low = i < 2 ? b_low4(raw) : b_high4(raw),
          bits = b_load(q + 1024 + g * 64);
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

// Codes that stand for sixteen values, with OFFSET added where they are not SIGNED.
alignas(16) constexpr int8_t IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                               1,    13,   25,  38,  53,  69,  89,  113};
alignas(16) constexpr int8_t E2M1_VALUES[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

template <const int8_t (&VALUES)[16]>
struct WTable : WQ4_0 {
  template <int g, int i>
  static PI_INLINE_MEMBER u8x64 group(const uint8_t* codes, int64_t b) {
    return b_lookup(VALUES, WQ4_0::group<g, i>(codes, b));
  }
};

struct WIQ4_NL : WTable<IQ4_VALUES> {
  static constexpr int OFFSET = 0;
  static constexpr bool SIGNED = true;
};

struct WIQ4_XS : WIQ4_NL {
  static constexpr int SCALE_BYTES = 20;
  static PI_INLINE_MEMBER Scales scales(const uint8_t* meta, int64_t b) {
    const uint8_t* s = meta + b / 8 * 160;
    return {f_mul(f_load_f16(s), i_float(i_load_s8(s + 32 + b % 8 * 16))), f_zero()};
  }
};

struct WMXFP4 : WTable<E2M1_VALUES> {
  static constexpr int OFFSET = 12, SCALE_BYTES = 16;
  // Half of 2^(e - 127), since the values are doubled: as the bits of a float e - 1 above its mantissa; where that is
  // less, for e = 0 and 1, a subnormal number.
  static PI_INLINE_MEMBER Scales scales(const uint8_t* meta, int64_t b) {
    const i32x16 e = i_load_u8(meta + b * 16);
    return {f_max(f_bits(i_shl<23>(i_add(e, i_set(-1)))), f_bits(i_shl<21>(i_add(e, i_set(1))))), f_zero()};
  }
};

// Whether codes are a byte each as they are stored.
template <class W>
constexpr bool BYTES = W::BLOCK_BYTES == 512;

template <class W>
PI_INLINE i32x16 start(int32_t sum) {
  if constexpr (W::SIGNED) return dot_s_start(sum);
  return i_set(-W::OFFSET * sum);
}

// Codes of a panel widened to a byte each, [block][8 groups][64]: unpacking once pays when many tokens follow.
template <class W>
struct Wide : W {
  static constexpr bool WIDE = true;
  static constexpr int UNROLL = W::HALVES == 2 ? 1 : W::UNROLL;
  template <int g, int>
  static PI_INLINE_MEMBER u8x64 group(const uint8_t* codes, int64_t b) {
    return b_load(codes + b * 512 + g * 64);
  }
};

template <class W>
void widen(const uint8_t* codes, int64_t nb, uint8_t* out, int offset) {
  for (int64_t b0 = 0; b0 < nb; b0 += W::UNROLL) {
    unroll<0, W::UNROLL>([&](auto i) __attribute__((always_inline)) {
      unroll<0, 8>([&](auto g) __attribute__((always_inline)) {
        b_store(out + (b0 + i.value) * 512 + g.value * 64,
                b_sub(W::template group<g.value, i.value>(codes, b0 + i.value), b_set(offset)));
      });
    });
  }
}

// The panels of a call: codes and scales of panel p at p times their strides. The panels after these start `next`
// bytes later.
struct Panels {
  const uint8_t *codes, *scales;
  int64_t codes_stride, scales_stride, next = 0;
};

template <class W, int P, int T>
PI_INLINE void tile_q(const Panels& w, const PiActs* x, int64_t t0, f32x16 (&sum)[P][T]) {
  const int64_t k = x->k, nb = k / 32;
  const int8_t* q[T];
  const float *d[T], *sd[T];
  const int16_t* s[T];
#pragma GCC unroll 16
  for (int t = 0; t < T; t++) {
    q[t] = x->q + (t0 + t) * k;
    d[t] = x->d + (t0 + t) * nb;
    sd[t] = x->sd + (t0 + t) * nb;
    s[t] = x->s + (t0 + t) * 2 * nb;
#pragma GCC unroll 16
    for (int p = 0; p < P; p++) sum[p][t] = f_zero();
  }
  for (int64_t b0 = 0; b0 < nb; b0 += W::UNROLL) {
    unroll<0, W::UNROLL>([&](auto i) __attribute__((always_inline)) {
      const int64_t b = b0 + i.value;
      // Prefetch the block that is 4 KB of codes later, here or in the panels after these.
      constexpr int64_t SOON = 4096 / W::BLOCK_BYTES;
      const bool here = b + SOON < nb;
      const int64_t soon = here ? b + SOON : b + SOON - nb, jump = here ? 0 : w.next;
      if constexpr (!W::WIDE) {
#pragma GCC unroll 16
        for (int p = 0; p < P; p++) fetch_line(w.scales + p * w.scales_stride + soon * W::SCALE_BYTES + jump);
      }
      f32x16 value[P][T];
      unroll<0, W::HALVES>([&](auto h) __attribute__((always_inline)) {
        i32x16 acc[P][T];
#pragma GCC unroll 16
        for (int t = 0; t < T; t++) {
          i32x16 first = start<W>(W::HALVES == 2 ? s[t][2 * b + h.value] : s[t][2 * b] + s[t][2 * b + 1]);
#pragma GCC unroll 16
          for (int p = 0; p < P; p++) acc[p][t] = first;
        }
        unroll<0, 8 / W::HALVES>([&](auto j) __attribute__((always_inline)) {
          // Low and high nibbles of one load are used in turn if they belong to the same block.
          constexpr int g = W::HALVES == 2                ? h.value * 4 + j.value
                            : W::UNROLL == 1 && !BYTES<W> ? j.value / 2 + j.value % 2 * 4
                                                          : j.value;
          int32_t a[T];
#pragma GCC unroll 16
          for (int t = 0; t < T; t++) a[t] = word(q[t] + b * 32 + g * 4);
#pragma GCC unroll 16
          for (int p = 0; p < P; p++) {
            u8x64 c = W::template group<g, i.value>(w.codes + p * w.codes_stride, b);
            // One line of it per group, until all are prefetched.
            constexpr int line = (h.value * (8 / W::HALVES) + j.value) * 64;
            if constexpr (!W::WIDE && line < W::BLOCK_BYTES)
              fetch_line(w.codes + p * w.codes_stride + soon * W::BLOCK_BYTES + line + jump);
#pragma GCC unroll 16
            for (int t = 0; t < T; t++) acc[p][t] = W::SIGNED ? dot_s(acc[p][t], c, a[t]) : dot_u(acc[p][t], c, a[t]);
          }
        });
#pragma GCC unroll 16
        for (int p = 0; p < P; p++) {
          if constexpr (W::HALVES == 2) {
            f32x16 f = WQ6_K::half(w.scales + p * w.scales_stride, b, h.value);
#pragma GCC unroll 16
            for (int t = 0; t < T; t++)
              value[p][t] = h.value ? f_fma(i_float(acc[p][t]), f, value[p][t]) : f_mul(i_float(acc[p][t]), f);
          } else {
#pragma GCC unroll 16
            for (int t = 0; t < T; t++) value[p][t] = i_float(acc[p][t]);
          }
        }
      });
#pragma GCC unroll 16
      for (int p = 0; p < P; p++) {
        Scales f = W::scales(w.scales + p * w.scales_stride, b);
#pragma GCC unroll 16
        for (int t = 0; t < T; t++) {
          sum[p][t] = f_fma(f_mul(value[p][t], f_set(d[t][b])), f.d, sum[p][t]);
          if constexpr (W::MIN) sum[p][t] = f_fma(f.m, f_set(sd[t][b]), sum[p][t]);
        }
      }
    });
  }
}

// ---- Float weights -----------------------------------------------------------------------------------------------

struct WF32 {
  static constexpr int BYTES = 64;
  static PI_INLINE_MEMBER f32x16 load(const uint8_t* w) { return f_load((const float*)w); }
};
struct WF16 {
  static constexpr int BYTES = 32;
  static PI_INLINE_MEMBER f32x16 load(const uint8_t* w) { return f_load_f16(w); }
};

template <class W, int P, int T>
PI_INLINE void tile_f(const uint8_t* w, int64_t stride, const PiActs* x, int64_t t0, f32x16 (&sum)[P][T]) {
  const float* f[T];
#pragma GCC unroll 16
  for (int t = 0; t < T; t++) {
    f[t] = x->f + (t0 + t) * x->ldf;
#pragma GCC unroll 16
    for (int p = 0; p < P; p++) sum[p][t] = f_zero();
  }
#pragma GCC unroll 2
  for (int64_t k = 0; k < x->k; k++) {
    f32x16 c[P];
#pragma GCC unroll 16
    for (int p = 0; p < P; p++) {
      c[p] = W::load(w + p * stride + k * W::BYTES);
      fetch_line(w + p * stride + k * W::BYTES + 2048);
    }
#pragma GCC unroll 16
    for (int t = 0; t < T; t++) {
      f32x16 a = f_set(f[t][k]);
#pragma GCC unroll 16
      for (int p = 0; p < P; p++) sum[p][t] = f_fma(c[p], a, sum[p][t]);
    }
  }
}

struct WBF16 {};

template <int P, int T>
PI_INLINE void tile_bf16(const uint8_t* w, int64_t stride, const PiActs* x, int64_t t0, f32x16 (&sum)[P][T]) {
  const uint16_t* b[T];
#pragma GCC unroll 16
  for (int t = 0; t < T; t++) {
    b[t] = x->b + (t0 + t) * x->ldb;
#pragma GCC unroll 16
    for (int p = 0; p < P; p++) sum[p][t] = f_zero();
  }
  const int64_t pairs = (x->k + 1) / 2;
#pragma GCC unroll 2
  for (int64_t k = 0; k < pairs; k++) {
    uint32_t a[T];
#pragma GCC unroll 16
    for (int t = 0; t < T; t++) memcpy(&a[t], b[t] + 2 * k, 4);
#pragma GCC unroll 16
    for (int p = 0; p < P; p++) {
      const uint8_t* c = w + p * stride + k * 64;
      fetch_line(c + 2048);
#if defined(PI_BF16_UNIT)
#pragma GCC unroll 16
      for (int t = 0; t < T; t++) sum[p][t] = dot_bf16(sum[p][t], c, a[t]);
#else
      f32x16 even, odd;
      f_load_pairs(c, &even, &odd);
#pragma GCC unroll 16
      for (int t = 0; t < T; t++) {
        uint32_t e = a[t] << 16, o = a[t] & 0xffff0000u;
        float fe, fo;
        memcpy(&fe, &e, 4);
        memcpy(&fo, &o, 4);
        sum[p][t] = f_fma(odd, f_set(fo), f_fma(even, f_set(fe), sum[p][t]));
      }
#endif
    }
  }
}

// ---- The matrix product: tiles of P panels by T tokens ------------------------------------------------------------

template <int P, int T>
PI_INLINE void put(const PiLinear* l, int64_t p0, int64_t t0, const f32x16 (&sum)[P][T]) {
#pragma GCC unroll 16
  for (int p = 0; p < P; p++) {
#pragma GCC unroll 16
    for (int t = 0; t < T; t++) {
      float* o = l->out + (t0 + t) * l->ldo + (p0 + p) * 16;
      f32x16 v = sum[p][t];
      if (l->bias) v = f_add(v, f_load(l->bias + (p0 + p) * 16));
      if (l->add) v = f_add(v, f_load(o));
      f_store(o, v);
    }
  }
}

// Panels [p0, p0 + P) of the matrix, which are the first of `w`.
template <class W, int P, int T>
void tile(const PiLinear* l, const Panels& w, const PiActs* x, int64_t p0, int64_t t0) {
  f32x16 sum[P][T];
  if constexpr (__is_same(W, WBF16)) tile_bf16<P, T>(w.codes, w.codes_stride, x, t0, sum);
  else if constexpr (__is_same(W, WF32) || __is_same(W, WF16)) tile_f<W, P, T>(w.codes, w.codes_stride, x, t0, sum);
  else tile_q<W, P, T>(w, x, t0, sum);
  put(l, p0, t0, sum);
}

PI_INLINE Panels panels_at(const PiLinear* l, int64_t k, int64_t p, int64_t some = 1) {
  const int64_t stride = pi_panel_bytes(l->type, k);
  const uint8_t* codes = l->w + p * stride;
  return {codes, codes + pi_codes_bytes(l->type, k), stride, stride, some * stride};
}

template <class W, int P, int T>
PI_INLINE void sweep(const PiLinear* l, const PiActs* x, int64_t p0, int64_t p1) {
  int64_t p = p0;
  for (; p + P <= p1; p += P) tile<W, P, T>(l, panels_at(l, x->k, p, P), x, p, 0);
  if constexpr (P > 2)
    for (; p + 2 <= p1; p += 2) tile<W, 2, T>(l, panels_at(l, x->k, p, 2), x, p, 0);
  if constexpr (P > 1)
    for (; p < p1; p++) tile<W, 1, T>(l, panels_at(l, x->k, p), x, p, 0);
}

// Tokens [t, end) by P panels, in the largest tiles that fit.
template <class W, int P, int T>
PI_INLINE int64_t along(const PiLinear* l, const Panels& w, const PiActs* x, int64_t p, int64_t t, int64_t end) {
  for (; t + T <= end; t += T) tile<W, P, T>(l, w, x, p, t);
  if constexpr (T > 8) return along<W, P, 8>(l, w, x, p, t, end);
  else if constexpr (T > 4) return along<W, P, 4>(l, w, x, p, t, end);
  else if constexpr (T > 2) return along<W, P, 2>(l, w, x, p, t, end);
  else if constexpr (T > 1) return along<W, P, 1>(l, w, x, p, t, end);
  return t;
}

// Tokens whose activations stay in the L2 cache while the panels of the matrix are read.
PI_INLINE int64_t tokens_at_once(const PiLinear* l, int64_t k, int64_t tile) {
  const int form = pi_form(l->type);
  const int64_t some = 393216 / (k * (form == PI_FORM_F32 ? 4 : form == PI_FORM_BF16 ? 2 : 1));
  return some < tile ? tile : some / tile * tile;
}

template <class W, int P, int T>
void product(const PiLinear* l, const PiActs* x, int64_t p0, int64_t p1, int64_t tokens) {
  // Few tokens: the matrix is read once, in four address streams, the best number for one core, or in two if the sums
  // need the registers.
  if (tokens == 1) return sweep<W, 4, 1>(l, x, p0, p1);
  if constexpr (T > 1)
    if (tokens == 2) return sweep<W, T >= 4 ? 4 : P, 2>(l, x, p0, p1);
  if constexpr (T >= 8) {
    switch (tokens) {
      case 3: return sweep<W, 4, 3>(l, x, p0, p1);
      case 4: return sweep<W, 4, 4>(l, x, p0, p1);
      case 5: return sweep<W, 2, 5>(l, x, p0, p1);
      case 6: return sweep<W, 2, 6>(l, x, p0, p1);
      case 7: return sweep<W, 2, 7>(l, x, p0, p1);
      case 8: return sweep<W, 2, 8>(l, x, p0, p1);
    }
  }
  const int64_t some = tokens_at_once(l, x->k, T);
  for (int64_t m = 0; m < tokens; m += some) {
    const int64_t end = m + some < tokens ? m + some : tokens;
    int64_t p = p0;
    for (; p + P <= p1; p += P) along<W, P, T>(l, panels_at(l, x->k, p, P), x, p, m, end);
    if constexpr (P > 1)
      for (; p < p1; p++) along<W, 1, T>(l, panels_at(l, x->k, p), x, p, m, end);
  }
}

// The same for quantised weights and many tokens: codes are widened once, then used for all tokens.
template <class W>
void product_q(const PiLinear* l, const PiActs* x, int64_t p0, int64_t p1, int64_t tokens, void* scratch) {
  if (tokens < WIDE_FROM) return product<W, TILE_Q_PANELS, TILE_Q>(l, x, p0, p1, tokens);
  constexpr int P = TILE_WIDE_PANELS, T = TILE_WIDE;
  const int64_t nb = x->k / 32, some = tokens_at_once(l, x->k, T);
  uint8_t* wide = (uint8_t*)scratch;
  for (int64_t m = 0; m < tokens; m += some) {
    const int64_t end = m + some < tokens ? m + some : tokens;
    for (int64_t p = p0; p < p1; p += P) {
      const Panels own = panels_at(l, x->k, p);
      const Panels w = {BYTES<W> ? own.codes : wide, own.scales, BYTES<W> ? own.codes_stride : nb * 512,
                        own.scales_stride};
      const bool whole = p + P <= p1;
      if constexpr (!BYTES<W>)
        for (int i = 0; i < (whole ? P : 1); i++)
          widen<W>(own.codes + i * own.codes_stride, nb, wide + i * nb * 512, 0);
      if (whole) along<Wide<W>, P, T>(l, w, x, p, m, end);
      else along<Wide<W>, 1, T>(l, w, x, p, m, end);
    }
  }
}

#if defined(__AMX_INT8__)
#include "amx.h"
#endif

void linear(const PiLinear* l, const PiActs* x, int64_t p0, int64_t p1, int64_t tokens, void* scratch) {
#if defined(__AMX_INT8__)
  if (amx_linear(l, x, p0, p1, tokens, scratch)) return;
#endif
  switch (l->type) {
    case PI_F32: return product<WF32, TILE_F_PANELS, TILE_F>(l, x, p0, p1, tokens);
    case PI_F16: return product<WF16, TILE_F_PANELS, TILE_F>(l, x, p0, p1, tokens);
    case PI_BF16: return product<WBF16, TILE_F_PANELS, TILE_F>(l, x, p0, p1, tokens);
    case PI_Q8_0: return product_q<WQ8_0>(l, x, p0, p1, tokens, scratch);
    case PI_Q4_0: return product_q<WQ4_0>(l, x, p0, p1, tokens, scratch);
    case PI_Q4_1: return product_q<WQ4_1>(l, x, p0, p1, tokens, scratch);
    case PI_Q5_0: return product_q<WQ5_0>(l, x, p0, p1, tokens, scratch);
    case PI_Q5_1: return product_q<WQ5_1>(l, x, p0, p1, tokens, scratch);
    case PI_Q4_K: return product_q<WQ4_K>(l, x, p0, p1, tokens, scratch);
    case PI_Q5_K: return product_q<WQ5_K>(l, x, p0, p1, tokens, scratch);
    case PI_Q6_K: return product_q<WQ6_K>(l, x, p0, p1, tokens, scratch);
    case PI_IQ4_NL: return product_q<WIQ4_NL>(l, x, p0, p1, tokens, scratch);
    case PI_IQ4_XS: return product_q<WIQ4_XS>(l, x, p0, p1, tokens, scratch);
    case PI_MXFP4: return product_q<WMXFP4>(l, x, p0, p1, tokens, scratch);
  }
}

// ---- Activations -------------------------------------------------------------------------------------------------

PI_INLINE uint16_t to_bf16(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  if ((u & 0x7fffffff) > 0x7f800000) return (uint16_t)(u >> 16 | 64);  // quiet NaN
  return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

void forms(const float* x, int64_t n, int forms, const PiActs* to) {
  if (forms & PI_FORM_BF16) {
    for (int64_t i = 0; i < n; i++) to->b[i] = to_bf16(x[i]);
    for (int64_t i = n; i < pi_round_up(n, 32); i++) to->b[i] = 0;
  }
  if (!(forms & PI_FORM_Q8)) return;
  int8_t* const q = to->q;
  float *const d = to->d, *const sd = to->sd;
  int16_t* const s = to->s;
  for (int64_t i = 0; i < n / 32; i++) {
    f32x16 lo = f_load(x + 32 * i), hi = f_load(x + 32 * i + 16);
    float peak = f_hmax(f_max(f_abs(lo), f_abs(hi)));
    f32x16 by = f_set(peak >= 0x1p-120f ? 127.0f / peak : 0.0f);  // below, the quotient would overflow: zeros
    // Clamped to 127 only for NaN and infinity, so that the sums are those of the bytes.
    const f32x16 top = f_set(127.0f), bottom = f_set(-127.0f);
    i32x16 a = i_round(f_min(f_max(f_mul(lo, by), bottom), top)), c = i_round(f_min(f_max(f_mul(hi, by), bottom), top));
    i_store_s8(q + 32 * i, a);
    i_store_s8(q + 32 * i + 16, c);
    s[2 * i] = (int16_t)i_sum(a);
    s[2 * i + 1] = (int16_t)i_sum(c);
    d[i] = peak / 127.0f;
    sd[i] = d[i] * (float)(s[2 * i] + s[2 * i + 1]);
  }
}

// Sixteen lanes of a row, or its last n.
struct Lanes {
  PI_INLINE_MEMBER f32x16 load(const float* p) const { return f_load(p); }
  PI_INLINE_MEMBER void store(float* p, f32x16 v) const { f_store(p, v); }
};
struct LastLanes {
  int n;
  PI_INLINE_MEMBER f32x16 load(const float* p) const { return f_load_n(p, n); }
  PI_INLINE_MEMBER void store(float* p, f32x16 v) const { f_store_n(p, v, n); }
};

// f(lanes, i) for every i at which lanes of a row of n begin.
template <class F>
PI_INLINE void along_row(int64_t n, F&& f) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) f(Lanes{}, i);
  if (i < n) f(LastLanes{(int)(n - i)}, i);
}

// Mean of a row or of its squares, in two chains of sixteen lanes.
template <bool squares>
PI_INLINE float row_mean(const float* x, int64_t n) {
  const auto more = [](f32x16 v, f32x16 sum)
                        __attribute__((always_inline)) { return squares ? f_fma(v, v, sum) : f_add(v, sum); };
  f32x16 a = f_zero(), b = f_zero();
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    a = more(f_load(x + i), a);
    b = more(f_load(x + i + 16), b);
  }
  for (; i < n; i += 16) a = more(f_load_n(x + i, n - i < 16 ? (int)(n - i) : 16), a);
  return f_sum(f_add(a, b)) / (float)n;
}

void rms_norm(const float* x, const float* w, int64_t n, float eps, float* out) {
  const f32x16 by = f_set(1.0f / __builtin_sqrtf(row_mean<true>(x, n) + eps));
  along_row(n, [&](auto lanes, int64_t i) __attribute__((always_inline)) {
    lanes.store(out + i, f_mul(f_mul(lanes.load(x + i), by), lanes.load(w + i)));
  });
}

// Two passes: the variance is that of the centred row, so a mean far from zero costs no digits.
void layer_norm(const float* x, const float* w, const float* b, int64_t n, float eps, float* out) {
  const f32x16 mean = f_set(row_mean<false>(x, n));
  along_row(n, [&](auto lanes, int64_t i)
                   __attribute__((always_inline)) { lanes.store(out + i, f_sub(lanes.load(x + i), mean)); });
  const f32x16 by = f_set(1.0f / __builtin_sqrtf(row_mean<true>(out, n) + eps));
  along_row(n, [&](auto lanes, int64_t i) __attribute__((always_inline)) {
    const f32x16 v = f_mul(f_mul(lanes.load(out + i), by), lanes.load(w + i));
    lanes.store(out + i, b ? f_add(v, lanes.load(b + i)) : v);
  });
}

// x / (1 + exp(-y))
PI_INLINE f32x16 sigmoid_of(f32x16 y, f32x16 x) { return f_div(x, f_add(f_set(1.0f), f_exp(f_sub(f_zero(), y)))); }

constexpr float SWIGLU_LIMIT = 7.0f;

// The factor of act(gate).
template <int act>
PI_INLINE f32x16 second(f32x16 u, f32x16 threshold) {
  if constexpr (act == PI_DRELU) return f_above(u, threshold);
  if constexpr (act == PI_SWIGLU_OAI)
    return f_add(f_max(f_set(-SWIGLU_LIMIT), f_min(f_set(SWIGLU_LIMIT), u)), f_set(1.0f));
  return u;
}

template <int act>
PI_INLINE f32x16 activated(f32x16 x, f32x16 threshold) {
  if constexpr (act == PI_SILU) return sigmoid_of(x, x);
  if constexpr (act == PI_CATS) {
    const f32x16 s = sigmoid_of(x, x);
    return f_sub(f_above(s, threshold), f_above(f_sub(f_zero(), s), threshold));  // NaN stays
  }
  if constexpr (act == PI_SIGMOID) return sigmoid_of(x, f_set(1.0f));
  if constexpr (act ==
                PI_GELU_TANH) {  // x / 2 * (1 + tanh(u)) = x / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3)
    const f32x16 by = f_fma(f_mul(x, x), f_set(0.07135481627f), f_set(1.59576912161f));
    return sigmoid_of(f_mul(x, by), x);
  }
  if constexpr (act == PI_SWIGLU_OAI) {
    const f32x16 g = f_min(f_set(SWIGLU_LIMIT), x);  // in this order NaN stays
    return sigmoid_of(f_mul(g, f_set(1.702f)), g);
  }
  const f32x16 kept = f_above(x, threshold);
  return act == PI_RELU2 ? f_mul(kept, kept) : kept;
}

template <int act>
void activate_as(float threshold, float* gate, const float* up, int64_t n) {
  const f32x16 t = f_set(act == PI_FATRELU || act == PI_CATS ? threshold : 0.0f);
  for (int64_t i = 0; i < n; i += 16) {
    f32x16 a = activated<act>(f_load(gate + i), t);
    if (up) a = f_mul(a, second<act>(f_load(up + i), t));
    f_store(gate + i, a);
  }
}

void activate(int act, float threshold, float* gate, const float* up, int64_t n) {
  switch (act) {
    case PI_TOPK:  // its selection comes after
    case PI_SILU: return activate_as<PI_SILU>(threshold, gate, up, n);
    case PI_RELU: return activate_as<PI_RELU>(threshold, gate, up, n);
    case PI_RELU2: return activate_as<PI_RELU2>(threshold, gate, up, n);
    case PI_FATRELU: return activate_as<PI_FATRELU>(threshold, gate, up, n);
    case PI_DRELU: return activate_as<PI_DRELU>(threshold, gate, up, n);
    case PI_GELU_TANH: return activate_as<PI_GELU_TANH>(threshold, gate, up, n);
    case PI_CATS: return activate_as<PI_CATS>(threshold, gate, up, n);
    case PI_SWIGLU_OAI: return activate_as<PI_SWIGLU_OAI>(threshold, gate, up, n);
    case PI_SIGMOID: return activate_as<PI_SIGMOID>(threshold, gate, up, n);
  }
}

void keep_largest(float* x, const float* unit, int64_t kept, int64_t n) {
  for (; n > 0; n -= PI_BANK, x += PI_BANK, unit += PI_BANK) {
    int32_t rank[PI_BANK];  // bits of floats that are not negative: in their order, and NaN is the largest
    for (int i = 0; i < PI_BANK; i++) {
      const float quotient = x[i] / unit[i];
      memcpy(rank + i, &quotient, 4);
      rank[i] &= 0x7fffffff;  // its magnitude
    }
    int32_t least = 0;  // the largest value that at least `kept` reach, bit by bit
    for (int32_t bit = 1 << 30; bit; bit >>= 1) {
      int32_t reach = 0;
      for (int i = 0; i < PI_BANK; i++) reach += rank[i] >= (least | bit);
      if (reach >= kept) least |= bit;
    }
    int32_t above = 0;
    for (int i = 0; i < PI_BANK; i++) above += rank[i] > least;
    int64_t equal = kept - above;
    for (int i = 0; i < PI_BANK; i++) {
      if (rank[i] < least || (rank[i] == least && equal-- <= 0)) x[i] = 0.0f;
    }
  }
}

void rope(float* x, const float* cos, const float* sin, int64_t half) {
  int64_t i = 0;
  for (; i + 16 <= half; i += 16) {
    f32x16 a = f_load(x + i), b = f_load(x + half + i), c = f_load(cos + i), s = f_load(sin + i);
    f_store(x + i, f_sub(f_mul(a, c), f_mul(b, s)));
    f_store(x + half + i, f_add(f_mul(a, s), f_mul(b, c)));
  }
  for (; i < half; i++) {
    float a = x[i], b = x[half + i];
    x[i] = a * cos[i] - b * sin[i];
    x[half + i] = a * sin[i] + b * cos[i];
  }
}

void scale(float* x, float by, int64_t n) {
  for (int64_t i = 0; i < n; i++) x[i] *= by;
}

// ---- The paged cache and attention over it --------------------------------------------------------------------------

PI_INLINE void f16_saturated(uint16_t* p, f32x16 v) {
  f_store_f16(p, f_max(f_min(v, f_set(65504.0f)), f_set(-65504.0f)));
}

// The codes of block i of a row of n, for Q8_0, and their scale; n % 32 may be 16, whose block is half full.
PI_INLINE int quantised_block(const float* x, int n, int i, int8_t* q, uint16_t* scale) {
  const bool whole = 32 * i + 32 <= n;
  f32x16 lo = f_load(x + 32 * i), hi = whole ? f_load(x + 32 * i + 16) : f_zero();
  uint16_t h[16];
  f16_saturated(h, f_mul(f_set(f_hmax(f_max(f_abs(lo), f_abs(hi)))), f_set(1.0f / 127.0f)));
  float d[16];
  f_store(d, f_load_f16(h));
  f32x16 by = f_set(d[0] > 0.0f ? 1.0f / d[0] : 0.0f);
  i_store_s8(q, i_round(f_mul(lo, by)));
  i_store_s8(q + 16, i_round(f_mul(hi, by)));
  *scale = h[0];
  return whole ? 32 : 16;
}

// Row `slot` of [32][n] values at `rows`, whose scales for Q8_0 are [32][blocks] at `scales`.
PI_INLINE void store_row(int type, uint8_t* rows, uint8_t* scales, int slot, const float* x, int n) {
  const int64_t at = (int64_t)slot * n;
  if (type == PI_KV_F32) memcpy((float*)rows + at, x, (size_t)n * 4);
  else if (type == PI_KV_F16)
    for (int i = 0; i < n; i += 16) f16_saturated((uint16_t*)rows + at + i, f_load(x + i));
  else {
    const int blocks = (n + 31) / 32;
    for (int i = 0; i < blocks; i++) {
      int8_t q[32];
      const int m = quantised_block(x, n, i, q, (uint16_t*)scales + slot * blocks + i);
      memcpy((int8_t*)rows + at + 32 * i, q, (size_t)m);
    }
  }
}

// Column `slot` of [n][32] keys at `columns`, whose scales for Q8_0 are [blocks][32] at `scales`.
PI_INLINE void store_column(int type, uint8_t* columns, uint8_t* scales, int slot, const float* x, int n) {
  if (type == PI_KV_F32)
    for (int i = 0; i < n; i++) ((float*)columns)[i * PI_PAGE + slot] = x[i];
  else if (type == PI_KV_F16)
    for (int i = 0; i < n; i += 16) {
      uint16_t h[16];
      f16_saturated(h, f_load(x + i));
      for (int j = 0; j < 16; j++) ((uint16_t*)columns)[(i + j) * PI_PAGE + slot] = h[j];
    }
  else
    for (int i = 0; 32 * i < n; i++) {
      int8_t q[32];
      const int m = quantised_block(x, n, i, q, (uint16_t*)scales + i * PI_PAGE + slot);
      for (int j = 0; j < m; j++) ((int8_t*)columns)[(32 * i + j) * PI_PAGE + slot] = q[j];
    }
}

PI_INLINE int64_t kv_element(int type) { return type == PI_KV_F32 ? 4 : type == PI_KV_F16 ? 2 : 1; }

void store_kv(int type, uint8_t* head, int slot, const float* k, const float* v, int n) {
  const int64_t bytes = kv_element(type) * n * PI_PAGE, scales = (int64_t)((n + 31) / 32) * PI_PAGE * 2;
  if (k) store_column(type, head, head + 2 * bytes, slot, k, n);
  if (v) store_row(type, head + bytes, head + 2 * bytes + scales, slot, v, n);
}

void store_latent(int type, uint8_t* head, int slot, const float* k, int n) {
  store_row(type, head, head + kv_element(type) * n * PI_PAGE, slot, k, n);
}

// Keys [n][32] and values [32][n] of a page; latent: [32][n], of which both are parts.
template <bool latent>
struct KvF32 {
  static constexpr bool by_slot = latent;
  const float *keys, *values;
  int n;
  PI_INLINE_MEMBER KvF32(const uint8_t* head, int n)
      : keys((const float*)head), values(keys + (latent ? 0 : (int64_t)n * PI_PAGE)), n(n) {}
  PI_INLINE_MEMBER f32x16 key(int i, int half) const { return f_load(keys + i * PI_PAGE + 16 * half); }
  PI_INLINE_MEMBER f32x16 value(int slot, int i) const { return f_load(values + slot * n + i); }
};

template <bool latent>
struct KvF16 {
  static constexpr bool by_slot = latent;
  const uint16_t *keys, *values;
  int n;
  PI_INLINE_MEMBER KvF16(const uint8_t* head, int n)
      : keys((const uint16_t*)head), values(keys + (latent ? 0 : (int64_t)n * PI_PAGE)), n(n) {}
  PI_INLINE_MEMBER f32x16 key(int i, int half) const { return f_load_f16(keys + i * PI_PAGE + 16 * half); }
  PI_INLINE_MEMBER f32x16 value(int slot, int i) const { return f_load_f16(values + slot * n + i); }
};

template <bool latent>
struct KvQ8_0 {
  static constexpr bool by_slot = latent;
  const int8_t *keys, *values;
  const uint16_t *key_scales, *value_scales;
  int n, blocks;
  PI_INLINE_MEMBER KvQ8_0(const uint8_t* head, int n)
      : keys((const int8_t*)head), values(keys + (latent ? 0 : (int64_t)n * PI_PAGE)), n(n), blocks((n + 31) / 32) {
    key_scales = (const uint16_t*)(values + (int64_t)n * PI_PAGE);
    value_scales = key_scales + (latent ? 0 : blocks * PI_PAGE);
  }
  PI_INLINE_MEMBER f32x16 key(int i, int half) const {
    return f_mul(i_float(i_load_s8(keys + i * PI_PAGE + 16 * half)),
                 f_load_f16(key_scales + i / 32 * PI_PAGE + 16 * half));
  }
  PI_INLINE_MEMBER f32x16 value(int slot, int i) const {
    uint16_t h[16];
    for (int j = 0; j < 16; j++) h[j] = value_scales[slot * blocks + i / 32];
    return f_mul(i_float(i_load_s8(values + slot * n + i)), f_load_f16(h));
  }
};

// A query row of a kv head, and the positions that it sees: from `first` to `last`.
struct QueryRow {
  const float* q;
  float* out;
  int64_t first, last;
  PI_INLINE_MEMBER QueryRow() {}
  PI_INLINE_MEMBER QueryRow(const PiAttention* a, int g, int64_t row) {
    const int64_t token = row / a->group, head = (int64_t)g * a->group + row % a->group;
    q = a->q + token * a->q_stride + head * a->head_pad;
    out = a->out + token * a->out_stride + head * a->head_dim;
    last = a->position + token;
    first = a->window && last >= a->window ? last - a->window + 1 : 0;
  }
};

// Scores of R rows against the keys of a page, one key per lane. The hardware prefetcher stops at the end of a page: few
// rows prefetch the next one, `ahead` bytes of it per iteration.
template <class Kv, int R>
PI_INLINE void score(const Kv& kv, int n, const float* const* q, const uint8_t* next, int64_t ahead, f32x16 (*s)[2]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) s[r][0] = s[r][1] = f_zero();
  for (int i = 0; i < n; i++) {
    f32x16 k0 = kv.key(i, 0), k1 = kv.key(i, 1);
    if constexpr (R <= 4)
      for (int64_t line = 0; line < ahead; line += 64) fetch_line(next + i * ahead + line);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      f32x16 x = f_set(q[r][i]);
      s[r][0] = f_fma(k0, x, s[r][0]);
      s[r][1] = f_fma(k1, x, s[r][1]);
    }
  }
}

// The same where keys are [slot][n]: products of whole rows, two keys at a time. A score has the same bits whatever R is.
// Those behind the first `slots` are zero. sums: room for R * 32.
template <class Kv, int R>
PI_INLINE void score_rows(const Kv& kv, int n, int slots, const float* const* q, float* sums, f32x16 (*s)[2]) {
  const f32x16 none = f_zero();
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
    f_store(sums + r * PI_PAGE, none);
    f_store(sums + r * PI_PAGE + 16, none);
  }
  for (int j = 0; j < slots; j += 2) {
    const int other = j + 1 < slots ? j + 1 : j;
    f32x16 a[R][2];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) a[r][0] = a[r][1] = f_zero();
    for (int i = 0; i < n; i += 16) {
      const f32x16 k0 = kv.value(j, i), k1 = kv.value(other, i);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        const f32x16 x = f_load(q[r] + i);
        a[r][0] = f_fma(k0, x, a[r][0]);
        a[r][1] = f_fma(k1, x, a[r][1]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      sums[r * PI_PAGE + j] = f_sum(a[r][0]);
      sums[r * PI_PAGE + other] = f_sum(a[r][1]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
    s[r][0] = f_load(sums + r * PI_PAGE);
    s[r][1] = f_load(sums + r * PI_PAGE + 16);
  }
}

// Scores of a page, from position `base` on, that a row does not see: as good as minus infinity.
PI_INLINE void mask(const QueryRow& row, int64_t base, f32x16* s) {
  const int end = row.last - base + 1 < PI_PAGE ? (int)(row.last - base + 1) : (int)PI_PAGE;
  const int begin = row.first > base ? (row.first - base < PI_PAGE ? (int)(row.first - base) : (int)PI_PAGE) : 0;
  f32x16 none = f_set(-3e38f);
#pragma GCC unroll 2
  for (int h = 0; h < 2; h++) {
    s[h] = f_keep_below(s[h], end - 16 * h, none);
    if (begin) s[h] = f_keep_below(none, begin - 16 * h, s[h]);
  }
}

// Online softmax of R rows: their weights of a page from its scores. largest, total: of a row's scores and weights so
// far; shrink: the factor of what was added up before, whose weights were relative to a smaller score.
template <int R>
PI_INLINE void weigh(f32x16 (*s)[2], float* largest, float* total, float* shrink, float* weights) {
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
    float top = f_hmax(f_max(s[r][0], s[r][1]));
    top = top > largest[r] ? top : largest[r];
    shrink[r] = largest[r] - top;
    largest[r] = top;
  }
  f_store(shrink, f_exp(f_load(shrink)));
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
    f32x16 m = f_set(largest[r]), w0 = f_exp(f_sub(s[r][0], m)), w1 = f_exp(f_sub(s[r][1], m));
    total[r] = total[r] * shrink[r] + f_sum(f_add(w0, w1));
    f_store(weights + r * PI_PAGE, w0);
    f_store(weights + r * PI_PAGE + 16, w1);
  }
}

// acc = shrink * acc + weights . the values of a page's first `slots`, one dimension per lane, 16 * `Blocks` of them.
template <class Kv, int R, int Blocks>
PI_INLINE void add_values(const Kv& kv, int n, int i, int slots, const float* weights, const float* shrink,
                          float* acc) {
  f32x16 o[R][Blocks];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
    f32x16 by = f_set(shrink[r]);
#pragma GCC unroll 2
    for (int b = 0; b < Blocks; b++) o[r][b] = f_mul(f_load(acc + r * n + i + 16 * b), by);
  }
  for (int j = 0; j < slots; j++) {
    f32x16 v[Blocks];
#pragma GCC unroll 2
    for (int b = 0; b < Blocks; b++) v[b] = kv.value(j, i + 16 * b);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      f32x16 w = f_set(weights[r * PI_PAGE + j]);
#pragma GCC unroll 2
      for (int b = 0; b < Blocks; b++) o[r][b] = f_fma(v[b], w, o[r][b]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 2
    for (int b = 0; b < Blocks; b++) f_store(acc + r * n + i + 16 * b, o[r][b]);
  }
}

// out = acc / total.
PI_INLINE void divide(const float* acc, float total, float* out, int head_dim) {
  f32x16 by = f_set(total);
  for (int i = 0; i < head_dim; i += 16) {
    f32x16 v = f_div(f_load(acc + i), by);
    if (i + 16 <= head_dim) f_store(out + i, v);
    else f_store_n(out + i, v, head_dim - i);
  }
}

// R query rows against every page they see. Masked keys have weight exactly 0, so a row's bits do not depend on the
// other rows.
template <class Kv, int R>
void attend(const PiAttention* a, int g, int64_t r0, float* scratch) {
  const int n = a->head_pad, wide = Kv::by_slot ? (int)pi_round_up(a->head_dim, PI_LANES) : n;  // of keys, of values
  QueryRow rows[R];
  const float* q[R];
  float *acc = scratch, *weights = scratch + PI_ATTENTION_ROWS * wide, largest[R], total[R];
  int64_t page = INT64_MAX, last = 0;
  for (int r = 0; r < R; r++) {
    rows[r] = QueryRow(a, g, r0 + r);
    q[r] = rows[r].q;
    if (rows[r].first / PI_PAGE < page) page = rows[r].first / PI_PAGE;
    if (rows[r].last > last) last = rows[r].last;
    largest[r] = a->sinks ? a->sinks[g * a->group + (r0 + r) % a->group] : -1e30f;
    total[r] = a->sinks ? 1.0f : 0.0f;  // e^(sink - largest)
  }
  for (int64_t i = 0; i < (int64_t)R * wide; i += 16) f_store(acc + i, f_zero());
  for (; page <= last / PI_PAGE; page++) {
    const auto head_of = [&](int64_t of) { return a->kv + a->pages[of] * a->page_bytes + g * a->head_bytes; };
    const Kv kv(head_of(page), n);
    const int64_t base = page * PI_PAGE;
    const int slots = last - base + 1 < PI_PAGE ? (int)(last - base + 1) : (int)PI_PAGE;
    f32x16 s[R][2];
    if constexpr (Kv::by_slot) score_rows<Kv, R>(kv, n, slots, q, weights, s);
    else score<Kv, R>(kv, n, q, head_of(page < last / PI_PAGE ? page + 1 : page), a->head_bytes / n, s);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) mask(rows[r], base, s[r]);
    float shrink[16] = {0};
    weigh<R>(s, largest, total, shrink, weights);
    int i = 0;
    for (; i + 16 < wide; i += 32) add_values<Kv, R, 2>(kv, wide, i, slots, weights, shrink, acc);
    if (i < wide) add_values<Kv, R, 1>(kv, wide, i, slots, weights, shrink, acc);
  }
  for (int r = 0; r < R; r++) divide(acc + r * wide, total[r], rows[r].out, a->head_dim);
}

template <class Kv>
void attention(const PiAttention* a, int g, int64_t r0, int64_t r1, float* scratch) {
  int64_t r = r0;
  for (; r + TILE_A <= r1; r += TILE_A) attend<Kv, TILE_A>(a, g, r, scratch);
  if constexpr (TILE_A > 6)
    for (; r + 6 <= r1; r += 6) attend<Kv, 6>(a, g, r, scratch);
  if constexpr (TILE_A > 4)
    for (; r + 4 <= r1; r += 4) attend<Kv, 4>(a, g, r, scratch);
  if constexpr (TILE_A > 3)
    for (; r + 3 <= r1; r += 3) attend<Kv, 3>(a, g, r, scratch);
  if constexpr (TILE_A > 2)
    for (; r + 2 <= r1; r += 2) attend<Kv, 2>(a, g, r, scratch);
  for (; r < r1; r++) attend<Kv, 1>(a, g, r, scratch);
}

#define PI_STRING_(x) #x
#define PI_STRING(x) PI_STRING_(x)
#define PI_JOIN_(a, b) a##b
#define PI_JOIN(a, b) PI_JOIN_(a, b)

}  // namespace

extern "C" const PiNeuronKernels PI_JOIN(pi_neurons_, PI_LEVEL);
extern "C" const PiDeltaKernels PI_JOIN(pi_delta_, PI_LEVEL);

namespace {

const PiKernels kernels = {
    PI_STRING(PI_LEVEL),
    linear,
    forms,
    rms_norm,
    layer_norm,
    activate,
    keep_largest,
    rope,
    scale,
    store_kv,
    store_latent,
    {attention<KvF32<false>>, attention<KvF16<false>>, attention<KvQ8_0<false>>},
    {attention<KvF32<true>>, attention<KvF16<true>>, attention<KvQ8_0<true>>},
    &PI_JOIN(pi_neurons_, PI_LEVEL),
    &PI_JOIN(pi_delta_, PI_LEVEL),
};

}  // namespace

extern "C" const PiKernels* PI_JOIN(pi_kernels_, PI_LEVEL)() { return &kernels; }
