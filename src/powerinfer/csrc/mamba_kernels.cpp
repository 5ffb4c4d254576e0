// The kernels of Mamba2 (arXiv 2405.21060) in its matrix form, written once over simd.h and compiled once per level. What
// a token gets is the same chain of operations whether it comes alone or with others of its chunk: the chunk begins at
// the same position in any case, and every sum goes through the same terms in the same order.
#include "simd.h"
#include "table.h"

namespace {

// Blocks of 16 columns, and tokens, that are computed at once; rows of the state that are updated at once. A sum over the
// rows of the state is the sum of PARTS sums over every PARTS-th row, so that additions need not wait for each other.
#if defined(__AVX512F__)
enum { BLOCKS = 2, ALONE = 4, TOKENS = 4, STATE_ROWS = 8 };
#else
enum { BLOCKS = 1, ALONE = 2, TOKENS = 2, STATE_ROWS = 4 };
#endif
enum { PARTS = 2 };

// Of the tokens of a call: what tokens of the chunk count for them, and the decay of the state.
struct Weights {
  float score[PI_CHUNK][PI_CHUNK], decay[PI_CHUNK];
  float last[PI_CHUNK];                // weights for the newest token
  const float* x[PI_CHUNK];            // rows of the whole chunk
  float scaled[PI_CHUNK][16 * ALONE];  // some columns of x times `last`
};

void weigh(const PiMamba* a, Weights* w) {
  const int64_t state_floats = a->head_dim * a->state_dim;
  const float* rows = a->from ? a->from + state_floats : nullptr;
  const float* weights = rows ? rows + PI_CHUNK * a->head_dim : nullptr;
  f32x16 last = a->before ? f_load(weights) : f_zero();
  float decay = a->before ? weights[PI_CHUNK] : 1.0f;
  for (int64_t t = 0; t < a->tokens; t++) {
    const float *gates = a->gates + t * a->ld, now = gates[a->to_decay];
    const int64_t j = a->before + t;
    f_store(w->last, f_mul(last, f_set(now)));
    w->last[j] = gates[0];
    last = f_load(w->last);
    f_store(w->score[t], f_mul(f_load(a->scores + t * a->ld), last));
    w->score[t][j] += a->d;
    w->decay[t] = decay *= now;
  }
  for (int64_t j = 0; j < a->before; j++) w->x[j] = rows + j * a->head_dim;
  for (int64_t t = 0; t < a->tokens; t++) w->x[a->before + t] = a->x + t * a->ld;
}

// y of T tokens from token t on, N blocks from column c on.
template <int T, int N>
PI_INLINE void answer(const PiMamba* a, const Weights* w, const float* state, int64_t t, int64_t c, float* y) {
  f32x16 sum[PARTS][T][N];
#pragma GCC unroll 4
  for (int p = 0; p < PARTS; p++)
#pragma GCC unroll 4
    for (int i = 0; i < T; i++)
#pragma GCC unroll 4
      for (int b = 0; b < N; b++) sum[p][i][b] = f_zero();
  const int64_t n = a->state_dim;
  const float* read = a->c + t * a->ld;
  for (int64_t k = 0; k < n; k += PARTS) {
#pragma GCC unroll 4
    for (int p = 0; p < PARTS; p++) {
      f32x16 s[N];
#pragma GCC unroll 4
      for (int b = 0; b < N; b++) s[b] = f_load(state + (b * n + k + p) * 16);
#pragma GCC unroll 4
      for (int i = 0; i < T; i++) {
        const f32x16 by = f_set(read[i * a->ld + k + p]);
#pragma GCC unroll 4
        for (int b = 0; b < N; b++) sum[p][i][b] = f_fma(by, s[b], sum[p][i][b]);
      }
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < T; i++) {
    f32x16 out[N];
#pragma GCC unroll 4
    for (int b = 0; b < N; b++) out[b] = f_mul(f_set(w->decay[t + i]), f_add(sum[0][i][b], sum[1][i][b]));
    for (int64_t j = 0; j <= a->before + t + i; j++) {
      const f32x16 by = f_set(w->score[t + i][j]);
#pragma GCC unroll 4
      for (int b = 0; b < N; b++) out[b] = f_fma(by, f_load(w->x[j] + c + 16 * b), out[b]);
    }
#pragma GCC unroll 4
    for (int b = 0; b < N; b++) f_store(y + i * 16 * ALONE + 16 * b, out[b]);
  }
}

// The state at the end of a chunk, of N blocks from column c on.
template <int N>
PI_INLINE void close(const PiMamba* a, Weights* w, const float* from, float* to, int64_t c) {
  const f32x16 decay = f_set(w->decay[a->tokens - 1]);
  const int64_t n = a->state_dim;
  for (int j = 0; j < PI_CHUNK; j++)
#pragma GCC unroll 4
    for (int b = 0; b < N; b++) f_store(w->scaled[j] + 16 * b, f_mul(f_set(w->last[j]), f_load(w->x[j] + c + 16 * b)));
  for (int64_t k = 0; k < n; k += STATE_ROWS) {
    f32x16 s[STATE_ROWS][N];
#pragma GCC unroll 8
    for (int r = 0; r < STATE_ROWS; r++)
#pragma GCC unroll 4
      for (int b = 0; b < N; b++) s[r][b] = f_mul(decay, f_load(from + (b * n + k + r) * 16));
    for (int j = 0; j < PI_CHUNK; j++) {
      f32x16 x[N];
#pragma GCC unroll 4
      for (int b = 0; b < N; b++) x[b] = f_load(w->scaled[j] + 16 * b);
#pragma GCC unroll 8
      for (int r = 0; r < STATE_ROWS; r++) {
        const f32x16 by = f_set(a->b[j][k + r]);
#pragma GCC unroll 4
        for (int b = 0; b < N; b++) s[r][b] = f_fma(by, x[b], s[r][b]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < STATE_ROWS; r++)
#pragma GCC unroll 4
      for (int b = 0; b < N; b++) f_store(to + (b * n + k + r) * 16, s[r][b]);
  }
}

// All that N blocks from column c on need.
template <int N>
void columns(const PiMamba* a, Weights* w, int64_t c) {
  const int64_t n = a->state_dim, state_floats = a->head_dim * n;
  float y[PI_CHUNK][16 * ALONE];
  float* const to = a->to + c * n;
  if (!a->from) memset(to, 0, (size_t)(N * n * 16) * 4);
  const float* from = a->from ? a->from + c * n : to;
  int64_t t = 0;
  if constexpr (N <= BLOCKS)
    for (; t + TOKENS <= a->tokens; t += TOKENS) answer<TOKENS, N>(a, w, from, t, c, y[t]);
  for (; t < a->tokens; t++) answer<1, N>(a, w, from, t, c, y[t]);
  if (a->before + a->tokens == PI_CHUNK) {
    if constexpr (N <= BLOCKS) close<N>(a, w, from, to, c);
    else
      for (int b = 0; b < N; b += BLOCKS) close<BLOCKS>(a, w, from + b * n * 16, to + b * n * 16, c + 16 * b);
  } else {
    if (from != to) memcpy(to, from, (size_t)(N * n * 16) * 4);
    float* rows = a->to + state_floats + c;
    for (int64_t j = a->from == a->to ? a->before : 0; j < a->before + a->tokens; j++)
      memcpy(rows + j * a->head_dim, w->x[j] + c, (size_t)(N * 16) * 4);
  }
  for (t = 0; t < a->tokens; t++) memcpy(a->x + t * a->ld + c, y[t], (size_t)(N * 16) * 4);
}

void advance(const PiMamba* a) {
  Weights w;
  weigh(a, &w);
  int64_t c = 0;
  if (a->tokens < TOKENS)
    for (; c + 16 * ALONE <= a->head_dim; c += 16 * ALONE) columns<ALONE>(a, &w, c);
  for (; c + 16 * BLOCKS <= a->head_dim; c += 16 * BLOCKS) columns<BLOCKS>(a, &w, c);
  for (; c < a->head_dim; c += 16) columns<1>(a, &w, c);
  if (a->before + a->tokens == PI_CHUNK) return;
  float* weights = a->to + a->head_dim * (a->state_dim + PI_CHUNK);
  f_store(weights, f_load(w.last));
  weights[PI_CHUNK] = w.decay[a->tokens - 1];
}

void scores(const float* c, const float* const* b, int64_t n, int64_t state_dim, float* out) {
  f_store(out, f_zero());
  for (int64_t j = 0; j < n; j++) {
    f32x16 sum = f_zero();
    for (int64_t k = 0; k < state_dim; k += 16) sum = f_fma(f_load(c + k), f_load(b[j] + k), sum);
    out[j] = f_sum(sum);
  }
}

}  // namespace

PI_KERNELS(mamba_kernels) {
  to->mamba.advance = advance;
  to->mamba.scores = scores;
}
