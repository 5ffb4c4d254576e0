// The kernels of Gated DeltaNet (arXiv 2412.06464), and the convolution of Mamba2 too, written once over simd.h and compiled once per level. A column of
// the state and a channel of the convolution are the same chain of operations whatever tokens, columns or channels a
// call has, so a token gets the same bits in a prompt, in a batch and alone.
#include "simd.h"
#include "table.h"

namespace {

// ---- The delta rule ------------------------------------------------------------------------------------------------
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

// ---- The convolution -----------------------------------------------------------------------------------------------

// 16 channels; `before`: the inputs that precede the current token.
template <int TAPS>
PI_INLINE void convolve_16(float* x, int64_t ld, int64_t tokens, const float* w, const float* bias, int64_t ldw,
                           const float* from, float* to, int64_t lds) {
  f32x16 before[TAPS - 1], weight[TAPS];
#pragma GCC unroll 8
  for (int j = 0; j < TAPS; j++) weight[j] = f_load(w + j * ldw);
#pragma GCC unroll 8
  for (int j = 0; j < TAPS - 1; j++) before[j] = from ? f_load(from + j * lds) : f_zero();
  for (int64_t t = 0; t < tokens; t++) {
    const f32x16 now = f_load(x + t * ld);
    f32x16 sum = f_mul(weight[0], before[0]);
#pragma GCC unroll 8
    for (int j = 1; j < TAPS - 1; j++) sum = f_fma(weight[j], before[j], sum);
    sum = f_fma(weight[TAPS - 1], now, sum);
    f_store(x + t * ld, bias ? f_add(sum, f_load(bias)) : sum);
#pragma GCC unroll 8
    for (int j = 0; j < TAPS - 2; j++) before[j] = before[j + 1];
    before[TAPS - 2] = now;
  }
#pragma GCC unroll 8
  for (int j = 0; j < TAPS - 1; j++) f_store(to + j * lds, before[j]);
}

template <int TAPS>
void convolve_by(float* x, int64_t ld, int64_t tokens, const float* w, const float* bias, int64_t ldw,
                 const float* from, float* to, int64_t lds, int64_t n) {
  for (int64_t c = 0; c < n; c += 16)
    convolve_16<TAPS>(x + c, ld, tokens, w + c, bias ? bias + c : nullptr, ldw, from ? from + c : nullptr, to + c, lds);
}

void convolve(float* x, int64_t ld, int64_t tokens, const float* w, const float* bias, int64_t ldw, int64_t taps,
              const float* from, float* to, int64_t lds, int64_t n) {
  switch (taps) {
    case 2: return convolve_by<2>(x, ld, tokens, w, bias, ldw, from, to, lds, n);
    case 3: return convolve_by<3>(x, ld, tokens, w, bias, ldw, from, to, lds, n);
    case 4: return convolve_by<4>(x, ld, tokens, w, bias, ldw, from, to, lds, n);
    case 5: return convolve_by<5>(x, ld, tokens, w, bias, ldw, from, to, lds, n);
    case 6: return convolve_by<6>(x, ld, tokens, w, bias, ldw, from, to, lds, n);
    case 7: return convolve_by<7>(x, ld, tokens, w, bias, ldw, from, to, lds, n);
    case 8: return convolve_by<8>(x, ld, tokens, w, bias, ldw, from, to, lds, n);
  }
}

}  // namespace

PI_KERNELS(delta_kernels) {
  to->delta.rule = rule;
  to->delta.convolve = convolve;
}
