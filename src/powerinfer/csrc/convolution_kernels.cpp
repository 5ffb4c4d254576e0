// The short causal convolution of layers with states, written once over simd.h and compiled once per level. A channel is
// the same chain of operations whatever tokens or channels a call has.
#include "simd.h"
#include "table.h"

namespace {

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

PI_KERNELS(convolution_kernels) { to->convolve = convolve; }
