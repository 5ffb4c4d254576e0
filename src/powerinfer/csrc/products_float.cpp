// Products with float weights.
#include "products.h"

namespace {

// A trait of float weights loads the values of 16 rows for one k, BYTES of them.
struct WF32 {
  static constexpr int BYTES = 64;
  static PI_INLINE_MEMBER f32x16 load(const uint8_t* w) { return f_load((const float*)w); }
};
struct WF16 {
  static constexpr int BYTES = 32;
  static PI_INLINE_MEMBER f32x16 load(const uint8_t* w) { return f_load_f16(w); }
};

template <class W>
struct Float {
  template <int P, int T>
  static PI_INLINE_MEMBER void sums(const Panels& w, const PiActs* x, int64_t t0, f32x16 (&sum)[P][T]) {
    const float* f[T];
#pragma GCC unroll 16
    for (int t = 0; t < T; t++) {
      f[t] = x->f + (t0 + t) * x->ldf;
#pragma GCC unroll 16
      for (int p = 0; p < P; p++) sum[p][t] = f_zero();
    }
#pragma GCC unroll 2
    for (int64_t k = 0; k < x->k; k++) {
      f32x16 c[P];
#pragma GCC unroll 16
      for (int p = 0; p < P; p++) {
        const uint8_t* at = w.codes + p * w.codes_stride + k * W::BYTES;
        c[p] = W::load(at);
        fetch_line(at + 2048);
      }
#pragma GCC unroll 16
      for (int t = 0; t < T; t++) {
        f32x16 a = f_set(f[t][k]);
#pragma GCC unroll 16
        for (int p = 0; p < P; p++) sum[p][t] = f_fma(c[p], a, sum[p][t]);
      }
    }
  }
};

template <class W>
void linear(const PiLinear* l, const PiActs* x, int64_t p0, int64_t p1, int64_t tokens, void*) {
  product<Float<W>, TILE_F_PANELS, TILE_F>(l, x, p0, p1, tokens);
}

}  // namespace

PI_KERNELS(products_float) {
  to->linear[PI_F32] = linear<WF32>;
  to->linear[PI_F16] = linear<WF16>;
}
