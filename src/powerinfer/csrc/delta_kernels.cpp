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

// A token's decays: of all rows of the state one, or ROWS of them, one for each.
template <bool ROWS>
struct Decay {
  float all;
  const float* of_rows;
};

template <bool ROWS>
PI_INLINE float row_decay(const Decay<ROWS>& decay, int64_t i) {
  return ROWS ? decay.of_rows[i] : decay.all;
}

// Updates N blocks, if there is a token to update them with, and reads them for the next one, if there is one: as they
// will be when they have decayed for it, where each row has a decay.
template <int N, bool UPDATE, bool READ, bool ROWS>
PI_INLINE void pass(const float* from, float* to, int64_t n, Decay<ROWS> decay, const float* key, const f32x16* delta,
                    Decay<ROWS> next_decay, const float* next_key, const float* next_query, Read<N>* read) {
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
          s = f_fma(f_set(key[i + p]), delta[b], f_mul(s, f_set(row_decay(decay, i + p))));
          f_store(to + at, s);
        }
        if constexpr (READ) {
          if constexpr (ROWS) s = f_mul(s, f_set(row_decay(next_decay, i + p)));
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

// N blocks from column c on. ROWS: of the state, each has a decay.
template <int N, bool ROWS>
void rule_of(const PiDelta* a, int64_t c) {
  const int64_t n = a->key_dim;
  float* const to = a->to + c * n;
  if (!a->from) memset(to, 0, (size_t)(N * n * 16) * 4);
  const float* from = a->from ? a->from + c * n : to;
  Read<N> read;
  const auto decay_of = [&](int64_t t) {
    return Decay<ROWS>{a->gates[t * a->ldg], ROWS ? a->decays + t * a->ld : nullptr};
  };
  pass<N, false, true>(from, to, n, Decay<ROWS>{}, nullptr, nullptr, decay_of(0), a->key, a->query, &read);
  for (int64_t t = 0; t < a->tokens; t++) {
    const float *key = a->key + t * a->ld, *query = a->query + t * a->ld, *gates = a->gates + t * a->ldg;
    const Decay<ROWS> decays = decay_of(t);
    const float decay = ROWS ? 1.0f : decays.all, beta = gates[a->to_beta], both = dot(key, query, n);
    float* value = a->value + t * a->ld + c;
    f32x16 delta[N];
#pragma GCC unroll 4
    for (int b = 0; b < N; b++) {
      const f32x16 old = f_mul(f_set(decay), read.key[b]);
      delta[b] = f_mul(f_set(beta), f_sub(f_load(value + 16 * b), old));
      f_store(value + 16 * b, f_fma(f_set(both), delta[b], f_mul(f_set(decay), read.query[b])));
    }
    if (t + 1 < a->tokens)
      pass<N, true, true>(from, to, n, decays, key, delta, decay_of(t + 1), key + a->ld, query + a->ld, &read);
    else pass<N, true, false>(from, to, n, decays, key, delta, decays, nullptr, nullptr, &read);
    from = to;
  }
}

template <bool ROWS>
void columns(const PiDelta* a, int64_t c0, int64_t c1) {
  int64_t c = c0;
  for (; c + 16 * BLOCKS <= c1; c += 16 * BLOCKS) rule_of<BLOCKS, ROWS>(a, c);
  for (; c < c1; c += 16) rule_of<1, ROWS>(a, c);
}

void rule(const PiDelta* a, int64_t c0, int64_t c1) { (a->decays ? columns<true> : columns<false>)(a, c0, c1); }

}  // namespace

PI_KERNELS(delta_kernels) { to->delta.rule = rule; }
