// Rows of F16 against the activations.
#include "neuron_dots.h"

namespace {

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

}  // namespace

PI_KERNELS(neuron_dots_float) { use_dots<DotF16>(to, PI_F16); }
