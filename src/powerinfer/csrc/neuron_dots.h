// Rows of neurons against the activations. Included by ISA files only.
#pragma once
#include "neuron_rows.h"

namespace {

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

// D::rows<R>(rows, activations, tokens, out, ldo) sets the dot products of R rows, of a type of weights.
template <class D, int R, int T>
PI_INLINE void dot_tokens(const Rows<R>& w, const PiActs* x, int64_t t, int64_t tokens, float* out, int64_t ldo) {
  for (; t + T <= tokens; t += T) D::rows(w, x, Same<R, T>(t), out + t * ldo, ldo);
  if constexpr (T > 1) dot_tokens<D, R, T / 2>(w, x, t, tokens, out, ldo);
}

template <class D>
void dots(const PiRows* all, const int32_t* index, int64_t n, const PiActs* x, int64_t tokens, float* out,
          int64_t ldo) {
  int64_t j = 0;
  if (tokens == 1)
    for (; j + ROWS <= n; j += ROWS)
      dot_tokens<D, ROWS, 1>(Rows<ROWS>(all, index + j, n - j, 2 * ROWS), x, 0, tokens, out + j, ldo);
  for (; j + SHARED_ROWS <= n; j += SHARED_ROWS)
    dot_tokens<D, SHARED_ROWS, D::TOKENS>(Rows<SHARED_ROWS>(all, index + j, n - j), x, 0, tokens, out + j, ldo);
  for (; j < n; j++) dot_tokens<D, 1, D::TOKENS>(Rows<1>(all, index + j, n - j), x, 0, tokens, out + j, ldo);
}

template <class D, int R>
int64_t some_pairs(const PiRows* all, const PiPair* pairs, int64_t j, int64_t n, const PiActs* x, float* out) {
  for (; j + R <= n; j += R) D::rows(Rows<R>(all, pairs + j, n - j), x, Own<R>(pairs + j), out + j, 1);
  return j;
}

template <class D>
void dot_pairs(const PiRows* all, const PiPair* pairs, int64_t n, const PiActs* x, float* out) {
  int64_t j = some_pairs<D, ROWS>(all, pairs, 0, n, x, out);
  if constexpr (ROWS > SHARED_ROWS) j = some_pairs<D, SHARED_ROWS>(all, pairs, j, n, x, out);
  some_pairs<D, 1>(all, pairs, j, n, x, out);
}

template <class D>
void use_dots(PiKernels* to, int type) {
  to->neurons.dots[type] = dots<D>;
  to->neurons.dot_pairs[type] = dot_pairs<D>;
}

}  // namespace
