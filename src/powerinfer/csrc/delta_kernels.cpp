// The rule of Gated DeltaNet (arXiv 2412.06464), written once over simd.h and compiled once per level. A column of the
// state is the same chain of operations whatever tokens or columns a call has, so a token gets the same bits in a
// prompt, in a batch and alone.
#include "simd.h"
#include "table.h"

namespace {

// Blocks of 16 columns that are computed at once, and partial sums over the rows of the state, so that additions need
// not wait for each other. The state is read and written once for each token: it is updated for one token while it is
// multiplied with the key and the query of the next one.
#if defined(__AVX512F__)
enum { BLOCKS = 2 };
#else
enum { BLOCKS = 1 };
#endif
enum { PARTS = 2 };

PI_INLINE float dot(const float* a, const float* b, int64_t n) {
  f32x16 sum = f_zero();
  for (int64_t i = 0; i < n; i += 16) sum = f_fma(f_load(a + i), f_load(b + i), sum);
  return f_sum(sum);
}

// What a state gives for a key and a query.
template <int N>
struct Read {
  f32x16 key[N], query[N];
};

// Updates N blocks, if there is a token to update them with, and reads them for the next one, if there is one.
template <int N, bool UPDATE, bool READ>
PI_INLINE void pass(const float* from, float* to, int64_t n, float decay, const float* key, const f32x16* delta,
                    const float* next_key, const float* next_query, Read<N>* read) {
  f32x16 of_key[PARTS][N], of_query[PARTS][N];
#pragma GCC unroll 4
  for (int p = 0; p < PARTS; p++)
#pragma GCC unroll 4
    for (int b = 0; b < N; b++) of_key[p][b] = of_query[p][b] = f_zero();
  for (int64_t i = 0; i < n; i += PARTS) {
#pragma GCC unroll 4
    for (int p = 0; p < PARTS; p++) {
#pragma GCC unroll 4
      for (int b = 0; b < N; b++) {
        const int64_t at = (b * n + i + p) * 16;
        f32x16 s = f_load(from + at);
        if constexpr (UPDATE) {
          s = f_fma(f_set(key[i + p]), delta[b], f_mul(s, f_set(decay)));
          f_store(to + at, s);
        }
        if constexpr (READ) {
          of_key[p][b] = f_fma(f_set(next_key[i + p]), s, of_key[p][b]);
          of_query[p][b] = f_fma(f_set(next_query[i + p]), s, of_query[p][b]);
        }
      }
    }
  }
  if constexpr (READ) {
#pragma GCC unroll 4
    for (int b = 0; b < N; b++) {
      read->key[b] = f_add(of_key[0][b], of_key[1][b]);
      read->query[b] = f_add(of_query[0][b], of_query[1][b]);
    }
  }
}

// N blocks from column c on.
template <int N>
void rule_of(const PiDelta* a, int64_t c) {
  const int64_t n = a->key_dim;
  float* const to = a->to + c * n;
  if (!a->from) memset(to, 0, (size_t)(N * n * 16) * 4);
  const float* from = a->from ? a->from + c * n : to;
  Read<N> read;
  pass<N, false, true>(from, to, n, 0, nullptr, nullptr, a->key, a->query, &read);
  for (int64_t t = 0; t < a->tokens; t++) {
    const float *key = a->key + t * a->ld, *query = a->query + t * a->ld, *gates = a->gates + t * a->ldg;
    const float decay = gates[0], beta = gates[a->to_beta], both = dot(key, query, n);
    float* value = a->value + t * a->ld + c;
    f32x16 delta[N];
#pragma GCC unroll 4
    for (int b = 0; b < N; b++) {
      const f32x16 old = f_mul(f_set(decay), read.key[b]);
      delta[b] = f_mul(f_set(beta), f_sub(f_load(value + 16 * b), old));
      f_store(value + 16 * b, f_fma(f_set(both), delta[b], f_mul(f_set(decay), read.query[b])));
    }
    if (t + 1 < a->tokens) pass<N, true, true>(from, to, n, decay, key, delta, key + a->ld, query + a->ld, &read);
    else pass<N, true, false>(from, to, n, decay, key, delta, nullptr, nullptr, &read);
    from = to;
  }
}

void rule(const PiDelta* a, int64_t c0, int64_t c1) {
  int64_t c = c0;
  for (; c + 16 * BLOCKS <= c1; c += 16 * BLOCKS) rule_of<BLOCKS>(a, c);
  for (; c < c1; c += 16) rule_of<1>(a, c);
}

}  // namespace

PI_KERNELS(delta_kernels) { to->delta.rule = rule; }
