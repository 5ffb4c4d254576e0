// Products with BF16 weights, in a file of its own for the levels that have an instruction for them.
#include "products.h"

namespace {

// Weights by activations of bfloat16 (where there is an instruction), or by the same numbers as floats.
struct WBF16 {
  template <int P, int T>
  static PI_INLINE_MEMBER void sums(const Panels& w, const PiActs* x, int64_t t0, f32x16 (&sum)[P][T]) {
#if defined(PI_BF16_UNIT)
    const uint16_t* a[T];
#else
    const float* a[T];
#endif
#pragma GCC unroll 16
    for (int t = 0; t < T; t++) {
#if defined(PI_BF16_UNIT)
      a[t] = x->b + (t0 + t) * x->ldb;
#else
      a[t] = x->f + (t0 + t) * x->ldf;
#endif
#pragma GCC unroll 16
      for (int p = 0; p < P; p++) sum[p][t] = f_zero();
    }
    const int64_t pairs = (x->k + 1) / 2;
#pragma GCC unroll 2
    for (int64_t k = 0; k < pairs; k++) {
#if defined(PI_BF16_UNIT)
      uint32_t pair[T];
#pragma GCC unroll 16
      for (int t = 0; t < T; t++) memcpy(&pair[t], a[t] + 2 * k, 4);
#endif
#pragma GCC unroll 16
      for (int p = 0; p < P; p++) {
        const uint8_t* c = w.codes + p * w.codes_stride + k * 64;
        fetch_line(c + 2048);
#if defined(PI_BF16_UNIT)
#pragma GCC unroll 16
        for (int t = 0; t < T; t++) sum[p][t] = dot_bf16(sum[p][t], c, pair[t]);
#else
        f32x16 even, odd;
        f_load_pairs(c, &even, &odd);
#pragma GCC unroll 16
        for (int t = 0; t < T; t++) sum[p][t] = f_fma(even, f_set(a[t][2 * k]), sum[p][t]);
#pragma GCC unroll 16
        for (int t = 0; t < T; t++) sum[p][t] = f_fma(odd, f_set(a[t][2 * k + 1]), sum[p][t]);
#endif
      }
    }
  }
};

#if defined(PI_BF16_UNIT)
void linear(const PiLinear* l, const PiActs* x, int64_t p0, int64_t p1, int64_t tokens, void*) {
  product<WBF16, TILE_F_PANELS, TILE_F>(l, x, p0, p1, tokens);
}
#else
void linear(const PiLinear* l, const PiActs* x, int64_t p0, int64_t p1, int64_t tokens, void* scratch) {
  const int64_t row = pi_round_up(x->k, 32), chunk = pi_floats_at_once(row);
  PiActs a = *x;
  a.f = (float*)scratch;
  a.ldf = row;
  PiLinear part = *l;
  for (int64_t m = 0; m < tokens; m += chunk, part.out += chunk * l->ldo) {
    const int64_t n = tokens - m < chunk ? tokens - m : chunk;
    for (int64_t t = 0; t < n; t++)
      for (int64_t i = 0; i < row; i += 16)
        f_store((float*)scratch + t * row + i, f_load_bf16(x->b + (m + t) * x->ldb + i));
    product<WBF16, TILE_F_PANELS, TILE_F>(&part, &a, p0, p1, n);
  }
}
#endif

}  // namespace

PI_KERNELS(products_bf16) { to->linear[PI_BF16] = linear; }
