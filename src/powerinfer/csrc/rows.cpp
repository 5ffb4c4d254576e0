// Operators on rows of activations: their forms, norms, activation functions, rotation. Written once over simd.h and
// compiled once per level; each output element is the same chain of operations whatever else a call has.
#include "simd.h"
#include "table.h"

namespace {

PI_INLINE uint16_t to_bf16(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  if ((u & 0x7fffffff) > 0x7f800000) return (uint16_t)(u >> 16 | 64);  // quiet NaN
  return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

void forms(const float* x, int64_t n, int forms, const PiActs* to) {
  if (forms & PI_FORM_BF16) {
    for (int64_t i = 0; i < n; i++) to->b[i] = to_bf16(x[i]);
    for (int64_t i = n; i < pi_round_up(n, 32); i++) to->b[i] = 0;
  }
  if (!(forms & PI_FORM_Q8)) return;
  int8_t* const q = to->q;
  float *const d = to->d, *const sd = to->sd;
  int16_t* const s = to->s;
  for (int64_t i = 0; i < n / 32; i++) {
    f32x16 lo = f_load(x + 32 * i), hi = f_load(x + 32 * i + 16);
    float peak = f_hmax(f_max(f_abs(lo), f_abs(hi)));
    f32x16 by = f_set(peak >= 0x1p-120f ? 127.0f / peak : 0.0f);  // below, the quotient would overflow: zeros
    // Clamped to 127 only for NaN and infinity, so that the sums are those of the bytes.
    const f32x16 top = f_set(127.0f), bottom = f_set(-127.0f);
    i32x16 a = i_round(f_min(f_max(f_mul(lo, by), bottom), top)), c = i_round(f_min(f_max(f_mul(hi, by), bottom), top));
    i_store_s8(q + 32 * i, a);
    i_store_s8(q + 32 * i + 16, c);
    s[2 * i] = (int16_t)i_sum(a);
    s[2 * i + 1] = (int16_t)i_sum(c);
    d[i] = peak / 127.0f;
    sd[i] = d[i] * (float)(s[2 * i] + s[2 * i + 1]);
  }
}

// Sixteen lanes of a row, or its last n.
struct Lanes {
  PI_INLINE_MEMBER f32x16 load(const float* p) const { return f_load(p); }
  PI_INLINE_MEMBER void store(float* p, f32x16 v) const { f_store(p, v); }
};
struct LastLanes {
  int n;
  PI_INLINE_MEMBER f32x16 load(const float* p) const { return f_load_n(p, n); }
  PI_INLINE_MEMBER void store(float* p, f32x16 v) const { f_store_n(p, v, n); }
};

// f(lanes, i) for every i at which lanes of a row of n begin.
template <class F>
PI_INLINE void along_row(int64_t n, F&& f) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) f(Lanes{}, i);
  if (i < n) f(LastLanes{(int)(n - i)}, i);
}

// Mean of a row or of its squares, in two chains of sixteen lanes.
template <bool squares>
PI_INLINE float row_mean(const float* x, int64_t n) {
  const auto more = [](f32x16 v, f32x16 sum)
                        __attribute__((always_inline)) { return squares ? f_fma(v, v, sum) : f_add(v, sum); };
  f32x16 a = f_zero(), b = f_zero();
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    a = more(f_load(x + i), a);
    b = more(f_load(x + i + 16), b);
  }
  for (; i < n; i += 16) a = more(f_load_n(x + i, n - i < 16 ? (int)(n - i) : 16), a);
  return f_sum(f_add(a, b)) / (float)n;
}

void rms_norm(const float* x, const float* w, int64_t n, float eps, float* out) {
  const f32x16 by = f_set(1.0f / __builtin_sqrtf(row_mean<true>(x, n) + eps));
  along_row(n, [&](auto lanes, int64_t i) __attribute__((always_inline)) {
    lanes.store(out + i, f_mul(f_mul(lanes.load(x + i), by), lanes.load(w + i)));
  });
}

// Two passes: the variance is that of the centred row, so a mean far from zero costs no digits.
void layer_norm(const float* x, const float* w, const float* b, int64_t n, float eps, float* out) {
  const f32x16 mean = f_set(row_mean<false>(x, n));
  along_row(n, [&](auto lanes, int64_t i)
                   __attribute__((always_inline)) { lanes.store(out + i, f_sub(lanes.load(x + i), mean)); });
  const f32x16 by = f_set(1.0f / __builtin_sqrtf(row_mean<true>(out, n) + eps));
  along_row(n, [&](auto lanes, int64_t i) __attribute__((always_inline)) {
    const f32x16 v = f_mul(f_mul(lanes.load(out + i), by), lanes.load(w + i));
    lanes.store(out + i, b ? f_add(v, lanes.load(b + i)) : v);
  });
}

// x / (1 + exp(-y))
PI_INLINE f32x16 sigmoid_of(f32x16 y, f32x16 x) { return f_div(x, f_add(f_set(1.0f), f_exp(f_sub(f_zero(), y)))); }

constexpr float SWIGLU_LIMIT = 7.0f;

// The factor of act(gate).
template <int act>
PI_INLINE f32x16 second(f32x16 u, f32x16 threshold) {
  if constexpr (act == PI_DRELU) return f_above(u, threshold);
  if constexpr (act == PI_SWIGLU_OAI)
    return f_add(f_max(f_set(-SWIGLU_LIMIT), f_min(f_set(SWIGLU_LIMIT), u)), f_set(1.0f));
  return u;
}

template <int act>
PI_INLINE f32x16 activated(f32x16 x, f32x16 threshold) {
  if constexpr (act == PI_SILU) return sigmoid_of(x, x);
  if constexpr (act == PI_CATS) {
    const f32x16 s = sigmoid_of(x, x);
    return f_sub(f_above(s, threshold), f_above(f_sub(f_zero(), s), threshold));  // NaN stays
  }
  if constexpr (act == PI_SIGMOID) return sigmoid_of(x, f_set(1.0f));
  if constexpr (act ==
                PI_GELU_TANH) {  // x / 2 * (1 + tanh(u)) = x / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3)
    const f32x16 by = f_fma(f_mul(x, x), f_set(0.07135481627f), f_set(1.59576912161f));
    return sigmoid_of(f_mul(x, by), x);
  }
  if constexpr (act == PI_SWIGLU_OAI) {
    const f32x16 g = f_min(f_set(SWIGLU_LIMIT), x);  // in this order NaN stays
    return sigmoid_of(f_mul(g, f_set(1.702f)), g);
  }
  const f32x16 kept = f_above(x, threshold);
  return act == PI_RELU2 ? f_mul(kept, kept) : kept;
}

template <int act>
void activate_as(float threshold, float* gate, const float* up, int64_t n) {
  const f32x16 t = f_set(act == PI_FATRELU || act == PI_CATS ? threshold : 0.0f);
  for (int64_t i = 0; i < n; i += 16) {
    f32x16 a = activated<act>(f_load(gate + i), t);
    if (up) a = f_mul(a, second<act>(f_load(up + i), t));
    f_store(gate + i, a);
  }
}

void activate(int act, float threshold, float* gate, const float* up, int64_t n) {
  switch (act) {
    case PI_XIELU: return;  // has a kernel of its own
    case PI_TOPK:           // its selection comes after
    case PI_SILU: return activate_as<PI_SILU>(threshold, gate, up, n);
    case PI_RELU: return activate_as<PI_RELU>(threshold, gate, up, n);
    case PI_RELU2: return activate_as<PI_RELU2>(threshold, gate, up, n);
    case PI_FATRELU: return activate_as<PI_FATRELU>(threshold, gate, up, n);
    case PI_DRELU: return activate_as<PI_DRELU>(threshold, gate, up, n);
    case PI_GELU_TANH: return activate_as<PI_GELU_TANH>(threshold, gate, up, n);
    case PI_CATS: return activate_as<PI_CATS>(threshold, gate, up, n);
    case PI_SWIGLU_OAI: return activate_as<PI_SWIGLU_OAI>(threshold, gate, up, n);
    case PI_SIGMOID: return activate_as<PI_SIGMOID>(threshold, gate, up, n);
  }
}

// The exponential's reduction leaves e^m - 1 - m of small m without what it has in common with m, so no digit cancels.
void xielu(const PiXielu* by, float* x, int64_t n) {
  const f32x16 above = f_set(by->above), below = f_set(by->below), beta = f_set(by->beta), least = f_set(by->least);
  for (int64_t i = 0; i < n; i += 16) {
    const f32x16 v = f_load(x + i), m = f_min(least, v), line = f_mul(beta, v);  // in this order NaN stays
    const f32x16 beyond = f_add(f_expm1_less(m), f_sub(m, v));
    f_store(x + i, f_choose(v, f_fma(f_mul(above, v), v, line), f_fma(below, beyond, line)));
  }
}

void keep_largest(float* x, const float* unit, int64_t kept, int64_t n) {
  for (; n > 0; n -= PI_BANK, x += PI_BANK, unit += PI_BANK) {
    int32_t rank[PI_BANK];  // bits of floats that are not negative: in their order, and NaN is the largest
    for (int i = 0; i < PI_BANK; i++) {
      const float quotient = x[i] / unit[i];
      memcpy(rank + i, &quotient, 4);
      rank[i] &= 0x7fffffff;  // its magnitude
    }
    int32_t least = 0;  // the largest value that at least `kept` reach, bit by bit
    for (int32_t bit = 1 << 30; bit; bit >>= 1) {
      int32_t reach = 0;
      for (int i = 0; i < PI_BANK; i++) reach += rank[i] >= (least | bit);
      if (reach >= kept) least |= bit;
    }
    int32_t above = 0;
    for (int i = 0; i < PI_BANK; i++) above += rank[i] > least;
    int64_t equal = kept - above;
    for (int i = 0; i < PI_BANK; i++) {
      if (rank[i] < least || (rank[i] == least && equal-- <= 0)) x[i] = 0.0f;
    }
  }
}

void rope(float* x, const float* cos, const float* sin, int64_t half) {
  int64_t i = 0;
  for (; i + 16 <= half; i += 16) {
    f32x16 a = f_load(x + i), b = f_load(x + half + i), c = f_load(cos + i), s = f_load(sin + i);
    f_store(x + i, f_sub(f_mul(a, c), f_mul(b, s)));
    f_store(x + half + i, f_add(f_mul(a, s), f_mul(b, c)));
  }
  for (; i < half; i++) {
    float a = x[i], b = x[half + i];
    x[i] = a * cos[i] - b * sin[i];
    x[half + i] = a * sin[i] + b * cos[i];
  }
}

void scale(float* x, float by, int64_t n) {
  for (int64_t i = 0; i < n; i++) x[i] *= by;
}

void cap(float* x, float limit, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) f_store(x + i, f_capped(f_load(x + i), limit));
}

}  // namespace

PI_KERNELS(rows) {
  to->forms = forms;
  to->rms_norm = rms_norm;
  to->layer_norm = layer_norm;
  to->activate = activate;
  to->xielu = xielu;
  to->keep_largest = keep_largest;
  to->rope = rope;
  to->scale = scale;
  to->cap = cap;
}
