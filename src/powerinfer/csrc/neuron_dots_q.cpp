// Quantised rows against the activations.
#include "neuron_dots.h"

namespace {

// Quantised rows: 16 blocks at a time, one in each lane, so that 512 elements end in one multiplication with their
// scales. Beyond the end of a row all scales are zero.
struct CodesQ8_0 {
  enum { TYPE = PI_Q8_0, BLOCK = 32, VECTORS = 8, MINS = 0, FIVE = 0 };
  static PI_INLINE_MEMBER i32x16 start(i32x16 sum) { return dot_vs_start(sum); }
  static PI_INLINE_MEMBER i32x16 dot(i32x16 acc, u8x64 raw, u8x64, const uint8_t* q, int v) {
    return dot_vs(acc, raw, b_load(q + 64 * v));
  }
  template <int M>
  static PI_INLINE_MEMBER i32x16 close(i32x16 acc, u8x64 raw, u8x64 fifth, const uint8_t* q, int v) {
    return dot(acc, raw, fifth, q, v);
  }
};
// Codes of 4 bits, or of 5, whose fifths lie apart.
template <int KIND>
struct CodesOf4 {
  enum { TYPE = KIND, BLOCK = 16, VECTORS = 4, MINS = PI_TYPES[KIND].m >= 0, FIVE = pi_bits(KIND) == 5 };
  static constexpr bool SIGNED = PI_TYPES[KIND].values == PI_VALUES_IQ4;
  static PI_INLINE_MEMBER i32x16 start(i32x16 sum) {
    if constexpr (SIGNED) return dot_vs_start(sum);
    constexpr int offset = PI_TYPES[KIND].offset;
    static_assert(offset == 0 || offset == 8 || offset == 16, "a shift");
    if constexpr (offset == 0) return i_set(0);
    else return i_sub(i_set(0), offset == 8 ? i_shl<3>(sum) : i_shl<4>(sum));
  }
  static PI_INLINE_MEMBER i32x16 multiply(i32x16 acc, u8x64 code, const uint8_t* q) {
    if constexpr (SIGNED) return dot_vs(acc, b_lookup(PI_IQ4_ENTRIES, code), b_load(q));
    else return dot_vu(acc, code, b_load(q));
  }
  // fifth: bits v of it belong to the low codes, bits 4 + v to the high ones, which are `high` vectors behind.
  static PI_INLINE_MEMBER i32x16 dot(i32x16 acc, u8x64 raw, u8x64 fifth, const uint8_t* q, int v, int high = 4) {
    u8x64 first = b_low4(raw), second = b_high4(raw);
    if constexpr (FIVE) {
      first = b_or(first, b_and(b_move<4>(fifth, v), b_set(16)));
      second = b_or(second, b_and(b_shr(fifth, v), b_set(16)));
    }
    return multiply(multiply(acc, first, q + 64 * v), second, q + 64 * (v + high));
  }
  template <int M>
  static PI_INLINE_MEMBER i32x16 close(i32x16 acc, u8x64 raw, u8x64 fifth, const uint8_t* q, int v) {
    return M < 4 ? dot(acc, raw, fifth, q + PI_LANES_HALVES, 0, 1) : dot(acc, raw, fifth, q, v, M / 4);
  }
};

// The first M of 16 numbers, again and again.
template <int M>
PI_INLINE f32x16 load_f16_again(const uint8_t* p) {
  alignas(32) uint8_t all[32];
#pragma GCC unroll 16
  for (int i = 0; i < 32; i += 2 * M) memcpy(all + i, p, 2 * M);
  return f_load_f16(all);
}

template <class C>
struct DotQ {
  enum { TOKENS = SHARED_TOKENS > 2 ? 2 : SHARED_TOKENS };

  // Of R rows and their tokens, blocks b and after, up to 16 of them.
  template <int R, class M>
  struct Step {
    enum { T = M::T };
    const Rows<R>& w;
    const M& with;
    const uint8_t* a[M::TOKENS];  // activations of these blocks
    int64_t b, codes, mins, fifths;
    i32x16 s[R][T];

    PI_INLINE_MEMBER void start() {
      i32x16 start[M::TOKENS];
#pragma GCC unroll 8
      for (int m = 0; m < M::TOKENS; m++) start[m] = C::start(i_load(a[m] + PI_LANES_SUM));
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) s[r][t] = start[with.of(r, t)];
      }
    }
    // One vector of each row, `apart` bytes behind the one before.
    template <class Dot>
    PI_INLINE_MEMBER void multiply(int v, int64_t apart, const Dot& dot) {
      const int64_t at = C::BLOCK * b + apart * v;
      w.ask(at);
      if constexpr (C::FIVE)
        if (v == 0) w.ask(fifths + 4 * b);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const u8x64 raw = b_load(w.now[r] + at);
        const u8x64 fifth = C::FIVE ? b_load(w.now[r] + fifths + 4 * b) : raw;
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) s[r][t] = dot(s[r][t], raw, fifth, a[with.of(r, t)], v);
      }
    }
    template <class Scales>
    PI_INLINE_MEMBER void finish(Sums<R, T>& sum, const Scales& scales) {
      if (b % 32 == 0) w.ask(codes + 2 * b);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const f32x16 d = scales(w.now[r] + codes + 2 * b);
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) {
          const uint8_t* const x = a[with.of(r, t)];
          const f32x16 of_x = f_load((const float*)(x + PI_LANES_D));
          sum.v[r][t] = f_fma(i_float(s[r][t]), f_mul(d, of_x), sum.v[r][t]);
          if constexpr (C::MINS)  // the sums are of the first lanes alone
            sum.v[r][t] =
                f_fma(f_load_f16(w.now[r] + mins + 2 * b), f_mul(of_x, i_float(i_load(x + PI_LANES_SUM))), sum.v[r][t]);
        }
      }
    }
    // One block in each lane; there are `lanes` of them.
    PI_INLINE_MEMBER void apart(Sums<R, T>& sum, int64_t lanes) {
      start();
#pragma GCC unroll 8
      for (int v = 0; v < C::VECTORS; v++)
        multiply(v, 4 * lanes,
                 [](i32x16 acc, u8x64 raw, u8x64 fifth, const uint8_t* q, int v)
                     __attribute__((always_inline)) { return C::dot(acc, raw, fifth, q, v); });
      finish(sum, [](const uint8_t* p) __attribute__((always_inline)) { return f_load_f16(p); });
    }
    // The last N blocks of a row, of each in every Nth lane.
    template <int N>
    PI_INLINE_MEMBER void close(Sums<R, T>& sum) {
      start();
      constexpr int VECTORS = (C::VECTORS * N + 15) / 16;
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++)
        multiply(v, 64, [](i32x16 acc, u8x64 raw, u8x64 fifth, const uint8_t* q, int v) __attribute__((always_inline)) {
          return C::template close<N>(acc, raw, fifth, q, v);
        });
      finish(sum, [](const uint8_t* p) __attribute__((always_inline)) { return load_f16_again<N>(p); });
    }
  };

  template <int R, class M>
  static void rows(const Rows<R>& w, const PiActs* x, const M& with, float* out, int64_t ldo) {
    Sums<R, M::T> sum;
    const int64_t nb = x->k / 32, codes = pi_row_codes(C::TYPE, x->k), ld = pi_lanes_bytes(x->k);
    Step<R, M> step{w, with, {}, 0, codes, codes + pi_row_scales(x->k), pi_round_up(x->k, 128) / 2, {}};
#pragma GCC unroll 8
    for (int m = 0; m < M::TOKENS; m++) step.a[m] = x->lanes + with.token[m] * ld;
    for (; step.b + 16 <= nb; step.b += 16) {
      step.apart(sum, 16);
#pragma GCC unroll 8
      for (int m = 0; m < M::TOKENS; m++) step.a[m] += PI_LANES_STEP;
    }
    switch (nb - step.b) {
      case 0: break;
      case 1: step.template close<1>(sum); break;
      case 2: step.template close<2>(sum); break;
      case 4: step.template close<4>(sum); break;
      case 8: step.template close<8>(sum); break;
      default: step.apart(sum, nb - step.b);
    }
    sum.put(out, ldo);
  }
};

}  // namespace

PI_KERNELS(neuron_dots_q) {
  use_dots<DotQ<CodesQ8_0>>(to, PI_Q8_0);
  use_dots<DotQ<CodesOf4<PI_Q4_0>>>(to, PI_Q4_0);
  use_dots<DotQ<CodesOf4<PI_Q4_1>>>(to, PI_Q4_1);
  use_dots<DotQ<CodesOf4<PI_Q5_0>>>(to, PI_Q5_0);
  use_dots<DotQ<CodesOf4<PI_Q5_1>>>(to, PI_Q5_1);
  use_dots<DotQ<CodesOf4<PI_IQ4_NL>>>(to, PI_IQ4_NL);
}
