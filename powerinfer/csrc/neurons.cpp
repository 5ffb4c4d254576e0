// Kernels over the bundles of single neurons, written once over simd.h and compiled once per level. Several rows pass by at
// once, which is how many streams feed one core best, and the ones after them are asked for meanwhile: they lie
// anywhere. A dot product and a column's sum are the same chain of operations whatever the tokens and rows beside them.
#include "simd.h"
#include "table.h"

namespace {

// Rows that pass by at once, for one token and for more; tokens that a row meets at once.
#if defined(__AVX512F__)
enum { ROWS = 8, SHARED_ROWS = 4, TOKENS = 4 };
#else
enum { ROWS = 4, SHARED_ROWS = 4, TOKENS = 1 };
#endif

// R rows of a list, and those whose turn is next.
template <int R> struct Rows {
  const uint8_t *now[R], *next[R];
  PI_INLINE_MEMBER Rows(const PiPart* part, const int32_t* index, int64_t left) {
    for (int r = 0; r < R; r++) {
      now[r] = part->rows + index[r] * part->stride;
      next[r] = r + R < left ? part->rows + index[r + R] * part->stride : now[r];
    }
  }
  PI_INLINE_MEMBER void ask(int64_t at) const {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) __builtin_prefetch(next[r] + at);
  }
};

// ---- A row's part against the activations -------------------------------------------------------------------------

template <int R, int T> struct Sums {
  f32x16 v[R][T];
  PI_INLINE_MEMBER Sums() {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
      for (int t = 0; t < T; t++) v[r][t] = f_zero();
    }
  }
  PI_INLINE_MEMBER void put(float* out, int64_t ldo) const {
    for (int r = 0; r < R; r++) for (int t = 0; t < T; t++) out[t * ldo + r] = f_sum(v[r][t]);
  }
};

struct DotF16 {
  template <int R, int T> static void rows(const Rows<R>& w, const PiActs* x, int64_t t0, float* out, int64_t ldo) {
    Sums<R, T> sum;
    const int64_t k = x->k;
    for (int64_t i = 0; i < k; i += 16) {
      if (i % 32 == 0) w.ask(2 * i);
      f32x16 a[T];
#pragma GCC unroll 8
      for (int t = 0; t < T; t++) {
        const float* f = x->f + (t0 + t) * x->ldf + i;
        a[t] = i + 16 <= k ? f_load(f) : f_load_n(f, (int)(k - i));
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const f32x16 c = f_load_f16(w.now[r] + 2 * i);
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) sum.v[r][t] = f_fma(c, a[t], sum.v[r][t]);
      }
    }
    sum.put(out, ldo);
  }
};

struct DotBF16 {
  template <int R, int T> static void rows(const Rows<R>& w, const PiActs* x, int64_t t0, float* out, int64_t ldo) {
    Sums<R, T> sum;
    for (int64_t i = 0; i < x->k; i += 32) {
      w.ask(2 * i);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) {
          const uint16_t* b = x->b + (t0 + t) * x->ldb + i;
#if defined(PI_BF16_UNIT)
          sum.v[r][t] = dot_vbf16(sum.v[r][t], w.now[r] + 2 * i, b);
#else
          f32x16 even, odd, x_even, x_odd;
          f_load_pairs(w.now[r] + 2 * i, &even, &odd);
          f_load_pairs(b, &x_even, &x_odd);
          sum.v[r][t] = f_fma(odd, x_odd, f_fma(even, x_even, sum.v[r][t]));
#endif
        }
      }
    }
    sum.put(out, ldo);
  }
};

// Quantised rows: 512 elements at a time, whose sixteen scales are multiplied with the activations' in one go; in these,
// 64 elements a step, eight lanes for each of their two blocks. Beyond the end of a row all scales are zero.
enum { PIECE = 512 };

struct CodesQ8_0 {
  enum { STEP = 64 };  // elements in 64 bytes of codes
  static constexpr bool SIGNED = true;
  template <int> static PI_INLINE_MEMBER u8x64 part(u8x64 raw) { return raw; }
};
struct CodesQ4_0 {
  enum { STEP = 128 };
  static constexpr bool SIGNED = false;
  template <int i> static PI_INLINE_MEMBER u8x64 part(u8x64 raw) { return i ? b_high4(raw) : b_low4(raw); }
};

template <class C> struct DotQ {
  // One step: STEP elements of every row and token. q: their activations; p: the products of their scales.
  template <int i, int R, int T> static PI_INLINE_MEMBER void half(const u8x64 (&raw)[R], const int8_t* const (&q)[T], const float (&p)[R][T][16], int block, Sums<R, T>& sum) {
    u8x64 a[T];
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) a[t] = b_load(q[t] + 64 * i);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const u8x64 c = C::template part<i>(raw[r]);
#pragma GCC unroll 8
      for (int t = 0; t < T; t++) {
        i32x16 s;
        if constexpr (C::SIGNED) s = dot_vs(c, a[t]);
        else s = i_sub(dot_vu(c, a[t]), i_shl<3>(dot_vu(b_set(1), a[t])));
        sum.v[r][t] = f_fma(i_float(s), f_two(p[r][t] + block + 2 * i), sum.v[r][t]);
      }
    }
  }

  template <int R, int T> static void rows(const Rows<R>& w, const PiActs* x, int64_t t0, float* out, int64_t ldo) {
    Sums<R, T> sum;
    const int64_t k = x->k, nb = k / 32, codes = C::STEP == 128 ? pi_part_codes(PI_Q4_0, k) : pi_part_codes(PI_Q8_0, k);
    alignas(64) float p[R][T][16];
    alignas(64) int8_t tail[T][128];
    for (int64_t i0 = 0; i0 < k; i0 += PIECE) {
      const int64_t end = i0 + PIECE < k ? i0 + PIECE : k, blocks = nb - i0 / 32;
      f32x16 d[T];
#pragma GCC unroll 8
      for (int t = 0; t < T; t++) {
        const float* xd = x->d + (t0 + t) * nb + i0 / 32;
        d[t] = blocks >= 16 ? f_load(xd) : f_load_n(xd, (int)blocks);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        __builtin_prefetch(w.next[r] + codes + i0 / 16);
        const f32x16 by = f_load_f16(w.now[r] + codes + i0 / 16);
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) f_store(p[r][t], f_mul(by, d[t]));
      }
      for (int64_t i = i0; i < end; i += C::STEP) {
        const int64_t at = i / C::STEP * 64;
        w.ask(at);
        const int8_t* q[T];
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) q[t] = x->q + (t0 + t) * k + i;
        if (i + C::STEP > k) {
          for (int t = 0; t < T; t++) {
            memset(tail[t], 0, sizeof tail[t]);
            memcpy(tail[t], q[t], (size_t)(k - i));
            q[t] = tail[t];
          }
        }
        u8x64 raw[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) raw[r] = b_load(w.now[r] + at);
        half<0>(raw, q, p, (int)(i - i0) / 32, sum);
        if constexpr (C::STEP == 128) half<1>(raw, q, p, (int)(i - i0) / 32, sum);
      }
    }
    sum.put(out, ldo);
  }
};

template <class D, int R, int T> PI_INLINE void dot_tokens(const Rows<R>& w, const PiActs* x, int64_t t, int64_t tokens, float* out, int64_t ldo) {
  for (; t + T <= tokens; t += T) D::template rows<R, T>(w, x, t, out + t * ldo, ldo);
  if constexpr (T > 1) dot_tokens<D, R, T / 2>(w, x, t, tokens, out, ldo);
}

template <class D> void dots_of(const PiPart* part, const int32_t* index, int64_t n, const PiActs* x, int64_t tokens, float* out, int64_t ldo) {
  int64_t j = 0;
  if (tokens == 1) for (; j + ROWS <= n; j += ROWS) dot_tokens<D, ROWS, 1>(Rows<ROWS>(part, index + j, n - j), x, 0, tokens, out + j, ldo);
  for (; j + SHARED_ROWS <= n; j += SHARED_ROWS) dot_tokens<D, SHARED_ROWS, TOKENS>(Rows<SHARED_ROWS>(part, index + j, n - j), x, 0, tokens, out + j, ldo);
  for (; j < n; j++) dot_tokens<D, 1, TOKENS>(Rows<1>(part, index + j, n - j), x, 0, tokens, out + j, ldo);
}

void dots(const PiPart* part, const int32_t* index, int64_t n, const PiActs* x, int64_t tokens, float* out, int64_t ldo) {
  switch (part->type) {
    case PI_F16: return dots_of<DotF16>(part, index, n, x, tokens, out, ldo);
    case PI_BF16: return dots_of<DotBF16>(part, index, n, x, tokens, out, ldo);
    case PI_Q8_0: return dots_of<DotQ<CodesQ8_0>>(part, index, n, x, tokens, out, ldo);
    case PI_Q4_0: return dots_of<DotQ<CodesQ4_0>>(part, index, n, x, tokens, out, ldo);
  }
}

// ---- Rows added up ------------------------------------------------------------------------------------------------
// Columns run inside, so that the sums stay in the L1 cache. The sum of a column is a plain chain over the rows: leaving
// out a row whose factor is zero does not change a bit.

struct AddF16 {
  static PI_INLINE_MEMBER f32x16 load(const uint8_t* row, int64_t c) { return f_load_f16(row + 2 * c); }
};
struct AddBF16 {
  static PI_INLINE_MEMBER f32x16 load(const uint8_t* row, int64_t c) { return f_load_bf16(row + 2 * c); }
};

template <class A, int R> PI_INLINE void add_float(const Rows<R>& w, int64_t k, const float* h, int64_t ldh, int64_t tokens, float* out, int64_t ldo) {
  for (int64_t c = 0; c < k; c += 16) {
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
      if (n == 16) f_store(o, v); else f_store_n(o, v, n);
    }
  }
}

// h * d of every token and row, for the sixteen blocks from column c on, which is a multiple of 512.
template <int R> struct Factors {
  alignas(64) float v[PI_NEURON_TOKENS][R][16];
  PI_INLINE_MEMBER Factors(const Rows<R>& w, int64_t codes, int64_t c, const float* h, int64_t ldh, int64_t tokens) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      __builtin_prefetch(w.next[r] + codes + c / 16);
      const f32x16 d = f_load_f16(w.now[r] + codes + c / 16);
      for (int64_t t = 0; t < tokens; t++) f_store(v[t][r], f_mul(d, f_set(h[t * ldh + r])));
    }
  }
};

struct AddQ8_0 {
  template <int R> static PI_INLINE_MEMBER void rows(const Rows<R>& w, int64_t k, const float* h, int64_t ldh, int64_t tokens, float* out, int64_t ldo) {
    for (int64_t p = 0; p < k; p += PIECE) {
      const Factors<R> f(w, pi_part_codes(PI_Q8_0, k), p, h, ldh, tokens);
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
  template <int s, int R> static PI_INLINE_MEMBER void block(const u8x64 (&raw)[R], const float (&f)[R][16], int b, float* o) {
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

  template <int R> static PI_INLINE_MEMBER void rows(const Rows<R>& w, int64_t k, const float* h, int64_t ldh, int64_t tokens, float* out, int64_t ldo) {
    for (int64_t p = 0; p < k; p += PIECE) {
      const Factors<R> f(w, pi_part_codes(PI_Q4_0, k), p, h, ldh, tokens);
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

template <class A> struct Float {
  template <int R> static PI_INLINE_MEMBER void rows(const Rows<R>& w, int64_t k, const float* h, int64_t ldh, int64_t tokens, float* out, int64_t ldo) {
    add_float<A>(w, k, h, ldh, tokens, out, ldo);
  }
};

template <class A, int R> void add_rows(const Rows<R>& w, int64_t k, const float* h, int64_t ldh, int64_t tokens, float* out, int64_t ldo) {
  A::rows(w, k, h, ldh, tokens, out, ldo);
}

template <class A> void add_of(const PiPart* part, const int32_t* index, int64_t n, const float* h, int64_t ldh, int64_t tokens, float* out, int64_t ldo) {
  int64_t j = 0;
  for (; j + ROWS <= n; j += ROWS) add_rows<A>(Rows<ROWS>(part, index + j, n - j), part->k, h + j, ldh, tokens, out, ldo);
  if constexpr (ROWS > SHARED_ROWS) for (; j + SHARED_ROWS <= n; j += SHARED_ROWS) add_rows<A>(Rows<SHARED_ROWS>(part, index + j, n - j), part->k, h + j, ldh, tokens, out, ldo);
  for (; j < n; j++) add_rows<A>(Rows<1>(part, index + j, n - j), part->k, h + j, ldh, tokens, out, ldo);
}

void add(const PiPart* part, const int32_t* index, int64_t n, const float* h, int64_t ldh, int64_t tokens, float* out, int64_t ldo) {
  switch (part->type) {
    case PI_F16: return add_of<Float<AddF16>>(part, index, n, h, ldh, tokens, out, ldo);
    case PI_BF16: return add_of<Float<AddBF16>>(part, index, n, h, ldh, tokens, out, ldo);
    case PI_Q8_0: return add_of<AddQ8_0>(part, index, n, h, ldh, tokens, out, ldo);
    case PI_Q4_0: return add_of<AddQ4_0>(part, index, n, h, ldh, tokens, out, ldo);
  }
}

// ---- Lists --------------------------------------------------------------------------------------------------------

// Writes first + i for every bit i of the mask.
PI_INLINE void append(uint32_t mask, int32_t first, int32_t* out) {
#if defined(__AVX512F__)
  const __m512i at = _mm512_add_epi32(_mm512_set1_epi32(first), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  _mm512_storeu_si512(out, _mm512_maskz_compress_epi32((__mmask16)mask, at));
#else
  for (; mask; mask &= mask - 1) *out++ = first + __builtin_ctz(mask);
#endif
}

int64_t keep(const float* x, int64_t ldx, int64_t tokens, int64_t n, int absolute, float most, int32_t first, int32_t* out, int64_t* counts) {
  int64_t kept = 0;
  const f32x16 limit = f_set(most);
  for (int64_t j = 0; j < n; j += 16) {
    const uint32_t whole = n - j >= 16 ? 0xffffu : (1u << (n - j)) - 1;
    uint32_t any = 0;
    for (int64_t t = 0; t < tokens; t++) {
      const float* p = x + t * ldx + j;
      const f32x16 v = whole == 0xffffu ? f_load(p) : f_load_n(p, (int)(n - j));
      const uint32_t mask = f_not_le(absolute ? f_abs(v) : v, limit) & whole;
      counts[t] += __builtin_popcount(mask);
      any |= mask;
    }
    append(any, first + (int32_t)j, out + kept);
    kept += __builtin_popcount(any);
  }
  return kept;
}

int fires(const float* x, int64_t n, float most, uint16_t* bits) {
  const f32x16 limit = f_set(most);
  uint32_t any = 0;
  for (int64_t j = 0; j < n; j += 16) {
    const uint32_t mask = f_not_le(f_abs(f_load(x + j)), limit);
    if (bits) bits[j / 16] = (uint16_t)mask;
    any |= mask;
  }
  return any != 0;
}

#define PI_JOIN_(a, b) a##b
#define PI_JOIN(a, b) PI_JOIN_(a, b)

}  // namespace

extern "C" {
extern const PiNeuronKernels PI_JOIN(pi_neurons_, PI_LEVEL);
const PiNeuronKernels PI_JOIN(pi_neurons_, PI_LEVEL) = {dots, add, keep, fires};
}
