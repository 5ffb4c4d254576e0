// Kernels over the bundles of single neurons, written once over simd.h and compiled once per level. Several rows are
// read at once, as many streams as one core handles best, and the next ones are prefetched, since rows are scattered.
// A dot product and a column's sum are the same chain of operations, independent of the other tokens and rows.
#include "simd.h"
#include "table.h"

namespace {

// Rows read at once, for one token and for more; tokens that a row is multiplied with at once.
#if defined(__AVX512F__)
enum { ROWS = 8, SHARED_ROWS = 4, SHARED_TOKENS = 4 };
#else
enum { ROWS = 4, SHARED_ROWS = 4, SHARED_TOKENS = 1 };
#endif

PI_INLINE int32_t neuron_of(int32_t neuron) { return neuron; }
PI_INLINE int32_t neuron_of(const PiPair& pair) { return pair.neuron; }

// R rows of a list, and those `ahead` rows later.
template <int R>
struct Rows {
  const uint8_t *now[R], *next[R];
  template <class I>
  PI_INLINE_MEMBER Rows(const PiRows* all, const I* list, int64_t left, int64_t ahead = R) {
    for (int r = 0; r < R; r++) {
      now[r] = pi_row(all, neuron_of(list[r]));
      next[r] = r + ahead < left ? pi_row(all, neuron_of(list[r + ahead])) : now[r];
    }
  }
  PI_INLINE_MEMBER void ask(int64_t at) const {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) fetch_line(next[r] + at);
  }
};

// ---- Rows against the activations -------------------------------------------------------------------------

// The tokens that R rows are multiplied with: the same T from t on, or one per row.
template <int R, int N>
struct Same {
  enum { T = N, TOKENS = N };
  int64_t token[TOKENS];
  PI_INLINE_MEMBER explicit Same(int64_t t) {
    for (int i = 0; i < N; i++) token[i] = t + i;
  }
  static PI_INLINE_MEMBER int of(int, int t) { return t; }
};
template <int R>
struct Own {
  enum { T = 1, TOKENS = R };
  int64_t token[TOKENS];
  PI_INLINE_MEMBER explicit Own(const PiPair* pairs) {
    for (int r = 0; r < R; r++) token[r] = pairs[r].token;
  }
  static PI_INLINE_MEMBER int of(int r, int) { return r; }
};

template <int R, int T>
struct Sums {
  f32x16 v[R][T];
  PI_INLINE_MEMBER Sums() {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
      for (int t = 0; t < T; t++) v[r][t] = f_zero();
    }
  }
  PI_INLINE_MEMBER void put(float* out, int64_t ldo) const {
    for (int r = 0; r < R; r++)
      for (int t = 0; t < T; t++) out[t * ldo + r] = f_sum(v[r][t]);
  }
};

struct DotF16 {
  enum { TOKENS = SHARED_TOKENS };
  template <int R, class M>
  static void rows(const Rows<R>& w, const PiActs* x, const M& with, float* out, int64_t ldo) {
    enum { T = M::T };
    Sums<R, T> sum;
    const int64_t k = x->k;
    for (int64_t i = 0; i < k; i += 16) {
      if (i % 32 == 0) w.ask(2 * i);
      f32x16 a[M::TOKENS];
#pragma GCC unroll 8
      for (int m = 0; m < M::TOKENS; m++) {
        const float* f = x->f + with.token[m] * x->ldf + i;
        a[m] = i + 16 <= k ? f_load(f) : f_load_n(f, (int)(k - i));
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const f32x16 c = f_load_f16(w.now[r] + 2 * i);
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) sum.v[r][t] = f_fma(c, a[with.of(r, t)], sum.v[r][t]);
      }
    }
    sum.put(out, ldo);
  }
};

struct DotBF16 {
  enum { TOKENS = SHARED_TOKENS };
  template <int R, class M>
  static void rows(const Rows<R>& w, const PiActs* x, const M& with, float* out, int64_t ldo) {
    enum { T = M::T };
    Sums<R, T> sum;
    for (int64_t i = 0; i < x->k; i += 32) {
      w.ask(2 * i);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) {
          const uint16_t* b = x->b + with.token[with.of(r, t)] * x->ldb + i;
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

// Quantised rows: 16 blocks at a time, one in each lane, so that 512 elements end in one multiplication with their
// scales. Beyond the end of a row all scales are zero.
struct CodesQ8_0 {
  enum { TYPE = PI_Q8_0, BLOCK = 32, VECTORS = 8, MINS = 0 };
  static PI_INLINE_MEMBER i32x16 start(i32x16 sum) { return dot_vs_start(sum); }
  static PI_INLINE_MEMBER i32x16 dot(i32x16 acc, u8x64 raw, const uint8_t* q, int v) {
    return dot_vs(acc, raw, b_load(q + 64 * v));
  }
  template <int M>
  static PI_INLINE_MEMBER i32x16 close(i32x16 acc, u8x64 raw, const uint8_t* q, int v) {
    return dot(acc, raw, q, v);
  }
};
struct Codes4 {
  enum { BLOCK = 16, VECTORS = 4 };
  static PI_INLINE_MEMBER i32x16 dot(i32x16 acc, u8x64 raw, const uint8_t* q, int v, int high = 4) {
    return dot_vu(dot_vu(acc, b_low4(raw), b_load(q + 64 * v)), b_high4(raw), b_load(q + 64 * (v + high)));
  }
  template <int M>
  static PI_INLINE_MEMBER i32x16 close(i32x16 acc, u8x64 raw, const uint8_t* q, int v) {
    return M < 4 ? dot(acc, raw, q + PI_LANES_HALVES, 0, 1) : dot(acc, raw, q, v, M / 4);
  }
};
struct CodesQ4_0 : Codes4 {
  enum { TYPE = PI_Q4_0, MINS = 0 };
  static PI_INLINE_MEMBER i32x16 start(i32x16 sum) { return i_sub(i_set(0), i_shl<3>(sum)); }
};
struct CodesQ4_1 : Codes4 {
  enum { TYPE = PI_Q4_1, MINS = 1 };
  static PI_INLINE_MEMBER i32x16 start(i32x16) { return i_set(0); }
};

// The first M of 16 numbers, again and again.
template <int M>
PI_INLINE f32x16 load_f16_again(const uint8_t* p) {
  alignas(32) uint8_t all[32];
#pragma GCC unroll 16
  for (int i = 0; i < 32; i += 2 * M) memcpy(all + i, p, 2 * M);
  return f_load_f16(all);
}

template <class C>
struct DotQ {
  enum { TOKENS = SHARED_TOKENS > 2 ? 2 : SHARED_TOKENS };

  // Of R rows and their tokens, blocks b and after, up to 16 of them.
  template <int R, class M>
  struct Step {
    enum { T = M::T };
    const Rows<R>& w;
    const M& with;
    const uint8_t* a[M::TOKENS];  // activations of these blocks
    int64_t b, codes, mins;
    i32x16 s[R][T];

    PI_INLINE_MEMBER void start() {
      i32x16 start[M::TOKENS];
#pragma GCC unroll 8
      for (int m = 0; m < M::TOKENS; m++) start[m] = C::start(i_load(a[m] + PI_LANES_SUM));
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) s[r][t] = start[with.of(r, t)];
      }
    }
    // One vector of each row, `apart` bytes behind the one before.
    template <class Dot>
    PI_INLINE_MEMBER void multiply(int v, int64_t apart, const Dot& dot) {
      const int64_t at = C::BLOCK * b + apart * v;
      w.ask(at);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const u8x64 raw = b_load(w.now[r] + at);
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) s[r][t] = dot(s[r][t], raw, a[with.of(r, t)], v);
      }
    }
    template <class Scales>
    PI_INLINE_MEMBER void finish(Sums<R, T>& sum, const Scales& scales) {
      if (b % 32 == 0) w.ask(codes + 2 * b);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const f32x16 d = scales(w.now[r] + codes + 2 * b);
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) {
          const uint8_t* const x = a[with.of(r, t)];
          const f32x16 of_x = f_load((const float*)(x + PI_LANES_D));
          sum.v[r][t] = f_fma(i_float(s[r][t]), f_mul(d, of_x), sum.v[r][t]);
          if constexpr (C::MINS)  // the sums are of the first lanes alone
            sum.v[r][t] =
                f_fma(f_load_f16(w.now[r] + mins + 2 * b), f_mul(of_x, i_float(i_load(x + PI_LANES_SUM))), sum.v[r][t]);
        }
      }
    }
    // One block in each lane; there are `lanes` of them.
    PI_INLINE_MEMBER void apart(Sums<R, T>& sum, int64_t lanes) {
      start();
#pragma GCC unroll 8
      for (int v = 0; v < C::VECTORS; v++)
        multiply(v, 4 * lanes, [](i32x16 acc, u8x64 raw, const uint8_t* q, int v) __attribute__((always_inline)) {
          return C::dot(acc, raw, q, v);
        });
      finish(sum, [](const uint8_t* p) __attribute__((always_inline)) { return f_load_f16(p); });
    }
    // The last N blocks of a row, of each in every Nth lane.
    template <int N>
    PI_INLINE_MEMBER void close(Sums<R, T>& sum) {
      start();
      constexpr int VECTORS = (C::VECTORS * N + 15) / 16;
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++)
        multiply(v, 64, [](i32x16 acc, u8x64 raw, const uint8_t* q, int v) __attribute__((always_inline)) {
          return C::template close<N>(acc, raw, q, v);
        });
      finish(sum, [](const uint8_t* p) __attribute__((always_inline)) { return load_f16_again<N>(p); });
    }
  };

  template <int R, class M>
  static void rows(const Rows<R>& w, const PiActs* x, const M& with, float* out, int64_t ldo) {
    Sums<R, M::T> sum;
    const int64_t nb = x->k / 32, codes = pi_row_codes(C::TYPE, x->k), ld = pi_lanes_bytes(x->k);
    Step<R, M> step{w, with, {}, 0, codes, codes + pi_row_scales(x->k), {}};
#pragma GCC unroll 8
    for (int m = 0; m < M::TOKENS; m++) step.a[m] = x->lanes + with.token[m] * ld;
    for (; step.b + 16 <= nb; step.b += 16) {
      step.apart(sum, 16);
#pragma GCC unroll 8
      for (int m = 0; m < M::TOKENS; m++) step.a[m] += PI_LANES_STEP;
    }
    switch (nb - step.b) {
      case 0: break;
      case 1: step.template close<1>(sum); break;
      case 2: step.template close<2>(sum); break;
      case 4: step.template close<4>(sum); break;
      case 8: step.template close<8>(sum); break;
      default: step.apart(sum, nb - step.b);
    }
    sum.put(out, ldo);
  }
};

template <class D, int R, int T>
PI_INLINE void dot_tokens(const Rows<R>& w, const PiActs* x, int64_t t, int64_t tokens, float* out, int64_t ldo) {
  for (; t + T <= tokens; t += T) D::rows(w, x, Same<R, T>(t), out + t * ldo, ldo);
  if constexpr (T > 1) dot_tokens<D, R, T / 2>(w, x, t, tokens, out, ldo);
}

template <class D>
void dots_of(const PiRows* all, const int32_t* index, int64_t n, const PiActs* x, int64_t tokens, float* out,
             int64_t ldo) {
  int64_t j = 0;
  if (tokens == 1)
    for (; j + ROWS <= n; j += ROWS)
      dot_tokens<D, ROWS, 1>(Rows<ROWS>(all, index + j, n - j, 2 * ROWS), x, 0, tokens, out + j, ldo);
  for (; j + SHARED_ROWS <= n; j += SHARED_ROWS)
    dot_tokens<D, SHARED_ROWS, D::TOKENS>(Rows<SHARED_ROWS>(all, index + j, n - j), x, 0, tokens, out + j, ldo);
  for (; j < n; j++) dot_tokens<D, 1, D::TOKENS>(Rows<1>(all, index + j, n - j), x, 0, tokens, out + j, ldo);
}

void dots(const PiRows* all, const int32_t* index, int64_t n, const PiActs* x, int64_t tokens, float* out,
          int64_t ldo) {
  switch (all->type) {
    case PI_F16: return dots_of<DotF16>(all, index, n, x, tokens, out, ldo);
    case PI_BF16: return dots_of<DotBF16>(all, index, n, x, tokens, out, ldo);
    case PI_Q8_0: return dots_of<DotQ<CodesQ8_0>>(all, index, n, x, tokens, out, ldo);
    case PI_Q4_0: return dots_of<DotQ<CodesQ4_0>>(all, index, n, x, tokens, out, ldo);
    case PI_Q4_1: return dots_of<DotQ<CodesQ4_1>>(all, index, n, x, tokens, out, ldo);
  }
}

template <class D, int R>
int64_t some_pairs(const PiRows* all, const PiPair* pairs, int64_t j, int64_t n, const PiActs* x, float* out) {
  for (; j + R <= n; j += R) D::rows(Rows<R>(all, pairs + j, n - j), x, Own<R>(pairs + j), out + j, 1);
  return j;
}

template <class D>
void dot_pairs_of(const PiRows* all, const PiPair* pairs, int64_t n, const PiActs* x, float* out) {
  int64_t j = some_pairs<D, ROWS>(all, pairs, 0, n, x, out);
  if constexpr (ROWS > SHARED_ROWS) j = some_pairs<D, SHARED_ROWS>(all, pairs, j, n, x, out);
  some_pairs<D, 1>(all, pairs, j, n, x, out);
}

void dot_pairs(const PiRows* all, const PiPair* pairs, int64_t n, const PiActs* x, float* out) {
  switch (all->type) {
    case PI_F16: return dot_pairs_of<DotF16>(all, pairs, n, x, out);
    case PI_BF16: return dot_pairs_of<DotBF16>(all, pairs, n, x, out);
    case PI_Q8_0: return dot_pairs_of<DotQ<CodesQ8_0>>(all, pairs, n, x, out);
    case PI_Q4_0: return dot_pairs_of<DotQ<CodesQ4_0>>(all, pairs, n, x, out);
    case PI_Q4_1: return dot_pairs_of<DotQ<CodesQ4_1>>(all, pairs, n, x, out);
  }
}

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

// The reads of add_groups, line by line in the order of addresses within a group, so that the hardware prefetcher
// helps. Rows of the groups in turn, each group's scales after its rows.
struct Ahead {
  const PiRows* all;
  const int32_t* index;
  int64_t n, j = 0, line = 0, lines;
  const uint8_t* at;
  bool scales = false;
  PI_INLINE_MEMBER Ahead(const PiRows* p, const int32_t* list, int64_t count)
      : all(p), index(list), n(count), lines(pi_row_bytes(p->type, p->k) / 64), at(pi_row(p, list[0])) {}
  PI_INLINE_MEMBER void ask(int64_t count) {
    while (count > 0 && at) {
      const int64_t end = line + count < lines ? line + count : lines;
      count -= end - line;
      for (; line < end; line++) fetch_line(at + 64 * line);
      if (line == lines) next();
    }
  }
  void next() {
    const int32_t group = index[j] / PI_GROUP;
    const bool more = j + 1 < n;
    line = 0;
    scales = !scales && !(more && index[j + 1] / PI_GROUP == group);
    if (scales) {
      at = pi_shared(all, index[j]);
      lines = pi_shared_bytes(all->type, all->k) / 64;
    } else {
      at = more ? pi_row(all, index[++j]) : nullptr;
      lines = pi_row_bytes(all->type, all->k) / 64;
    }
  }
};

// Rows of a group, in quads, and the factors by which they are added to a token's output, zeros where a quad has fewer.
struct GroupStep {
  const uint8_t* row[PI_GROUP];
  int32_t by[PI_GROUP / 4], sum;  // sum: of the factors
  int quads;
};

// Four rows and four factors form the operands of one integer product, so a column's sum over the group is an integer,
// and the scales that its rows share are read and multiplied once.
template <int TYPE>
PI_INLINE void add_some(const GroupStep& g, const uint8_t* scales, float d, int64_t k, int64_t lines, Ahead& ahead,
                        float* out) {
  const f32x16 by = f_set(d), of_mins = f_set(d * (float)g.sum);
  const uint8_t* const mins = scales + 2 * pi_round_up(k, 128);
  for (int64_t c = 0; c < k; c += 128) {
    ahead.ask(lines);
    i32x16 s[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) s[i] = i_set(TYPE == PI_Q4_0X32 ? -8 * g.sum : 0);
    for (int r = 0; r < g.quads; r++) {
      const uint8_t* const* row = g.row + 4 * r;
      u8x64 z[4];
      b_quads(b_load(row[0] + c / 2), b_load(row[1] + c / 2), b_load(row[2] + c / 2), b_load(row[3] + c / 2), z);
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        s[2 * i] = dot_u(s[2 * i], b_low4(z[i]), g.by[r]);
        s[2 * i + 1] = dot_u(s[2 * i + 1], b_high4(z[i]), g.by[r]);
      }
    }
    const auto finish = [&](int i) __attribute__((always_inline)) {
      const int64_t column = c + 16 * i;
      f32x16 v = f_fma(i_float(s[i]), f_mul(f_load_f16(scales + 2 * column), by), f_load(out + column));
      if constexpr (TYPE == PI_Q4_1X32) v = f_fma(f_load_f16(mins + 2 * column), of_mins, v);
      f_store(out + column, v);
    };
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
      if (16 * i < k - c) finish(i);
  }
}

template <int TYPE>
void add_groups_of(const PiRows* all, const int32_t* index, int64_t n, const int8_t* q, int64_t ldq, const float* d,
                   int64_t ldd, int64_t tokens, float* out, int64_t ldo) {
  enum { AHEAD = 256, SCALES = TYPE == PI_Q4_1X32 ? 8 : 4 };  // lines; rows that are as long as the scales of a group
  if (n == 0) return;
  Ahead ahead(all, index, n);
  ahead.ask(AHEAD);
  for (int64_t begin = 0, end; begin < n; begin = end, d++) {
    const int32_t group = index[begin] / PI_GROUP;
    GroupStep g{};
    for (end = begin; end < n && index[end] / PI_GROUP == group; end++) g.row[end - begin] = pi_row(all, index[end]);
    const int rows = (int)(end - begin);
    g.quads = (rows + 3) / 4;
    for (int r = rows; r < 4 * g.quads; r++) g.row[r] = g.row[0];
    for (int64_t t = 0; t < tokens; t++) {
      memcpy(g.by, q + t * ldq + begin, (size_t)rows);
      g.sum = 0;
      for (int64_t j = begin; j < end; j++) g.sum += q[t * ldq + j];
      add_some<TYPE>(g, pi_shared(all, index[begin]), d[t * ldd], all->k, t ? 0 : rows + SCALES, ahead, out + t * ldo);
    }
  }
}

void add_groups(const PiRows* all, const int32_t* index, int64_t n, const int8_t* q, int64_t ldq, const float* d,
                int64_t ldd, int64_t tokens, float* out, int64_t ldo) {
  const auto add = all->type == PI_Q4_0X32 ? add_groups_of<PI_Q4_0X32> : add_groups_of<PI_Q4_1X32>;
  add(all, index, n, q, ldq, d, ldd, tokens, out, ldo);
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

#define PI_JOIN_(a, b) a##b
#define PI_JOIN(a, b) PI_JOIN_(a, b)

}  // namespace

extern "C" {
extern const PiNeuronKernels PI_JOIN(pi_neurons_, PI_LEVEL);
const PiNeuronKernels PI_JOIN(pi_neurons_, PI_LEVEL) = {dots, dot_pairs, add, add_pairs, add_groups, keep, fires};
}
