// Rows of neurons added up, and lists of neurons.
#include "neuron_rows.h"

namespace {

// ---- Rows added up ------------------------------------------------------------------------------------------------
// Columns run inside, so that the sums stay in the L1 cache. The sum of a column is a plain chain over the rows:
// leaving out a row whose factor is zero does not change a bit.

enum { PIECE = 512 };                // columns whose scales are multiplied at once
constexpr int64_t ADDED_TOKENS = 8;  // to which rows are added at once

struct AddF16 {
  static PI_INLINE_MEMBER f32x16 load(const uint8_t* row, int64_t c) { return f_load_f16(row + 2 * c); }
};
struct AddBF16 {
  static PI_INLINE_MEMBER f32x16 load(const uint8_t* row, int64_t c) { return f_load_bf16(row + 2 * c); }
};

// One token's columns in fours, so that a factor is loaded once for all of them.
template <class A, int R>
PI_INLINE int64_t add_float_to_one(const Rows<R>& w, int64_t begin, int64_t stop, const float* h, float* out) {
  f32x16 by[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) by[r] = f_set(h[r]);
  int64_t c = begin;
  for (; c + 64 <= stop; c += 64) {
    w.ask(2 * c);
    w.ask(2 * c + 64);
    f32x16 v[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) v[i] = f_load(out + c + 16 * i);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) v[i] = f_fma(A::load(w.now[r], c + 16 * i), by[r], v[i]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) f_store(out + c + 16 * i, v[i]);
  }
  return c;
}

template <class A, int R>
PI_INLINE void add_float(const Rows<R>& w, int64_t k, int64_t begin, int64_t stop, const float* h, int64_t ldh,
                         int64_t tokens, float* out, int64_t ldo) {
  if (tokens == 1) begin = add_float_to_one<A>(w, begin, stop, h, out);
  for (int64_t c = begin; c < stop; c += 16) {
    if (c % 32 == 0) w.ask(2 * c);
    f32x16 row[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) row[r] = A::load(w.now[r], c);
    const int n = c + 16 <= k ? 16 : (int)(k - c);
    for (int64_t t = 0; t < tokens; t++) {
      float* o = out + t * ldo + c;
      f32x16 v = n == 16 ? f_load(o) : f_load_n(o, n);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) v = f_fma(row[r], f_set(h[t * ldh + r]), v);
      if (n == 16) f_store(o, v);
      else f_store_n(o, v, n);
    }
  }
}

// h * d of every token and row, for the sixteen blocks from column c on, which is a multiple of 512.
template <int R>
struct Factors {
  alignas(64) float v[ADDED_TOKENS][R][16];
  PI_INLINE_MEMBER Factors(const Rows<R>& w, int64_t codes, int64_t c, const float* h, int64_t ldh, int64_t tokens) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      fetch_line(w.next[r] + codes + c / 16);
      const f32x16 d = f_load_f16(w.now[r] + codes + c / 16);
      for (int64_t t = 0; t < tokens; t++) f_store(v[t][r], f_mul(d, f_set(h[t * ldh + r])));
    }
  }
};

struct AddQ8_0 {
  template <int R>
  static PI_INLINE_MEMBER void rows(const Rows<R>& w, int64_t k, int64_t begin, int64_t stop, const float* h,
                                    int64_t ldh, int64_t tokens, float* out, int64_t ldo) {
    for (int64_t p = begin; p < stop; p += PIECE) {
      const Factors<R> f(w, pi_row_codes(PI_Q8_0, k), p, h, ldh, tokens);
      const int64_t end = p + PIECE < k ? p + PIECE : k;
      for (int64_t c = p; c < end; c += 32) {
        if (c % 64 == 0) w.ask(c);
        const int b = (int)(c - p) / 32;
        f32x16 low[R], high[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
          low[r] = i_float(i_load_s8(w.now[r] + c));
          high[r] = i_float(i_load_s8(w.now[r] + c + 16));
        }
        for (int64_t t = 0; t < tokens; t++) {
          float* o = out + t * ldo + c;
          f32x16 v = f_load(o), u = f_load(o + 16);
#pragma GCC unroll 8
          for (int r = 0; r < R; r++) {
            const f32x16 by = f_set(f.v[t][r][b]);
            v = f_fma(low[r], by, v);
            u = f_fma(high[r], by, u);
          }
          f_store(o, v);
          f_store(o + 16, u);
        }
      }
    }
  }
};

struct AddQ4_0 {
  // Block s of the 128 columns at o.
  template <int s, int R>
  static PI_INLINE_MEMBER void block(const u8x64 (&raw)[R], const float (&f)[R][16], int b, float* o) {
    f32x16 v = f_load(o), u = f_load(o + 16);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const f32x16 by = f_set(f[r][b]);
      v = f_fma(f_code<2 * s>(raw[r]), by, v);
      u = f_fma(f_code<2 * s + 1>(raw[r]), by, u);
    }
    f_store(o, v);
    f_store(o + 16, u);
  }

  template <int R>
  static PI_INLINE_MEMBER void rows(const Rows<R>& w, int64_t k, int64_t begin, int64_t stop, const float* h,
                                    int64_t ldh, int64_t tokens, float* out, int64_t ldo) {
    for (int64_t p = begin; p < stop; p += PIECE) {
      const Factors<R> f(w, pi_row_codes(PI_Q4_0, k), p, h, ldh, tokens);
      const int64_t end = p + PIECE < k ? p + PIECE : k;
      for (int64_t c = p; c < end; c += 128) {
        w.ask(c / 2);
        u8x64 raw[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) raw[r] = b_load(w.now[r] + c / 2);
        const int b = (int)(c - p) / 32;
        for (int64_t t = 0; t < tokens; t++) {
          float* o = out + t * ldo + c;
          block<0>(raw, f.v[t], b, o);
          if (c + 32 < end) block<1>(raw, f.v[t], b + 1, o + 32);
          if (c + 64 < end) block<2>(raw, f.v[t], b + 2, o + 64);
          if (c + 96 < end) block<3>(raw, f.v[t], b + 3, o + 96);
        }
      }
    }
  }
};

template <class A>
struct Float {
  template <int R>
  static PI_INLINE_MEMBER void rows(const Rows<R>& w, int64_t k, int64_t begin, int64_t stop, const float* h,
                                    int64_t ldh, int64_t tokens, float* out, int64_t ldo) {
    add_float<A>(w, k, begin, stop, h, ldh, tokens, out, ldo);
  }
};

template <class A, int R>
void add_rows(const Rows<R>& w, int64_t k, const float* h, int64_t ldh, int64_t tokens, float* out, int64_t ldo) {
  for (int64_t t = 0; t < tokens; t += ADDED_TOKENS)
    A::rows(w, k, 0, k, h + t * ldh, ldh, tokens - t < ADDED_TOKENS ? tokens - t : ADDED_TOKENS, out + t * ldo, ldo);
}

template <class A>
void add_of(const PiRows* all, const int32_t* index, int64_t n, const float* h, int64_t ldh, int64_t tokens, float* out,
            int64_t ldo) {
  int64_t j = 0;
  for (; j + ROWS <= n; j += ROWS) add_rows<A>(Rows<ROWS>(all, index + j, n - j), all->k, h + j, ldh, tokens, out, ldo);
  if constexpr (ROWS > SHARED_ROWS)
    for (; j + SHARED_ROWS <= n; j += SHARED_ROWS)
      add_rows<A>(Rows<SHARED_ROWS>(all, index + j, n - j), all->k, h + j, ldh, tokens, out, ldo);
  for (; j < n; j++) add_rows<A>(Rows<1>(all, index + j, n - j), all->k, h + j, ldh, tokens, out, ldo);
}

void add(const PiRows* all, const int32_t* index, int64_t n, const float* h, int64_t ldh, int64_t tokens, float* out,
         int64_t ldo) {
  switch (all->type) {
    case PI_F16: return add_of<Float<AddF16>>(all, index, n, h, ldh, tokens, out, ldo);
    case PI_BF16: return add_of<Float<AddBF16>>(all, index, n, h, ldh, tokens, out, ldo);
    case PI_Q8_0: return add_of<AddQ8_0>(all, index, n, h, ldh, tokens, out, ldo);
    case PI_Q4_0: return add_of<AddQ4_0>(all, index, n, h, ldh, tokens, out, ldo);
  }
}

// Columns in pieces, so that those of many tokens stay in the L1 cache.
template <class A>
void add_pairs_of(const PiRows* all, const PiPair* pairs, int64_t n, const float* h, float* out, int64_t ldo) {
  for (int64_t c = 0; c < all->k; c += PIECE) {
    const int64_t stop = c + PIECE < all->k ? c + PIECE : all->k;
    for (int64_t j = 0; j < n; j++)
      A::rows(Rows<1>(all, pairs + j, n - j, ROWS), all->k, c, stop, h + j, 0, 1, out + pairs[j].token * ldo, 0);
  }
}

void add_pairs(const PiRows* all, const PiPair* pairs, int64_t n, const float* h, float* out, int64_t ldo) {
  switch (all->type) {
    case PI_F16: return add_pairs_of<Float<AddF16>>(all, pairs, n, h, out, ldo);
    case PI_BF16: return add_pairs_of<Float<AddBF16>>(all, pairs, n, h, out, ldo);
    case PI_Q8_0: return add_pairs_of<AddQ8_0>(all, pairs, n, h, out, ldo);
    case PI_Q4_0: return add_pairs_of<AddQ4_0>(all, pairs, n, h, out, ldo);
  }
}

// ---- Lists --------------------------------------------------------------------------------------------------------

// Writes first + i for every bit i of the mask.
PI_INLINE void append(uint32_t mask, int32_t first, int32_t* out) {
#if defined(__AVX512F__)
  const __m512i at = _mm512_add_epi32(_mm512_set1_epi32(first),
                                      _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  _mm512_storeu_si512(out, _mm512_maskz_compress_epi32((__mmask16)mask, at));
#else
  for (; mask; mask &= mask - 1) *out++ = first + __builtin_ctz(mask);
#endif
}

int64_t keep(const float* x, int64_t ldx, int64_t tokens, int64_t n, int absolute, float limit, int32_t first,
             int32_t* out, int64_t* counts) {
  int64_t kept = 0;
  const f32x16 above = f_set(limit);
  for (int64_t j = 0; j < n; j += 16) {
    const uint32_t whole = n - j >= 16 ? 0xffffu : (1u << (n - j)) - 1;
    uint32_t any = 0;
    for (int64_t t = 0; t < tokens; t++) {
      const float* p = x + t * ldx + j;
      const f32x16 v = whole == 0xffffu ? f_load(p) : f_load_n(p, (int)(n - j));
      const uint32_t mask = f_not_le(absolute ? f_abs(v) : v, above) & whole;
      counts[t] += __builtin_popcount(mask);
      any |= mask;
    }
    append(any, first + (int32_t)j, out + kept);
    kept += __builtin_popcount(any);
  }
  return kept;
}

int fires(const float* x, int64_t n, float limit, uint16_t* bits) {
  const f32x16 above = f_set(limit);
  uint32_t any = 0;
  for (int64_t j = 0; j < n; j += 16) {
    const uint32_t mask = f_not_le(f_abs(f_load(x + j)), above);
    if (bits) bits[j / 16] = (uint16_t)mask;
    any |= mask;
  }
  return any != 0;
}

}  // namespace

PI_KERNELS(neurons) {
  to->neurons.add = add;
  to->neurons.add_pairs = add_pairs;
  to->neurons.keep = keep;
  to->neurons.fires = fires;
}
