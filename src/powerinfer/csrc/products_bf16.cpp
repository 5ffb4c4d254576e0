// Products with BF16 weights, in a file of its own for the levels that have an instruction for them.
#include "products.h"

namespace {

struct WBF16 {
  template <int P, int T>
  static PI_INLINE_MEMBER void sums(const Panels& w, const PiActs* x, int64_t t0, f32x16 (&sum)[P][T]) {
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
        const uint8_t* c = w.codes + p * w.codes_stride + k * 64;
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
};

void linear(const PiLinear* l, const PiActs* x, int64_t p0, int64_t p1, int64_t tokens, void*) {
  product<WBF16, TILE_F_PANELS, TILE_F>(l, x, p0, p1, tokens);
}

}  // namespace

PI_KERNELS(products_bf16) { to->linear[PI_BF16] = linear; }
