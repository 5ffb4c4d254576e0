// Rows of BF16 against the activations, in a file of its own for the levels that have an instruction for them.
#include "neuron_dots.h"

namespace {

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

}  // namespace

PI_KERNELS(neuron_dots_bf16) { use_dots<DotBF16>(to, PI_BF16); }
