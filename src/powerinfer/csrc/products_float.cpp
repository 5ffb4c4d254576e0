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

#if defined(PI_PIECES)
constexpr int64_t PIECE = 256;  // of k: 16 KB as floats, which stay in the L1 cache

// Adds n products to the sums of T tokens.
template <int T>
void float_tile(const float* w, const float* x, int64_t ldx, int64_t n, float* sums) {
  const float* f[T];
  f32x16 sum[T];
#pragma GCC unroll 16
  for (int t = 0; t < T; t++) {
    f[t] = x + t * ldx;
    sum[t] = f_load(sums + t * 16);
  }
#pragma GCC unroll 4
  for (int64_t k = 0; k < n; k++) {
    const f32x16 c = f_load(w + k * 16);
#pragma GCC unroll 16
    for (int t = 0; t < T; t++) sum[t] = f_fma(c, f_set(f[t][k]), sum[t]);
  }
#pragma GCC unroll 16
  for (int t = 0; t < T; t++) f_store(sums + t * 16, sum[t]);
}

// Many tokens: weights become floats once, a piece of a panel at a time.
void float_pieces(const PiLinear* l, const PiActs* x, int64_t p0, int64_t p1, int64_t tokens, void* scratch) {
  auto* const w = (float*)scratch;
  auto* const sums = w + PIECE * 16;
  const int64_t fit = tokens_at_once(l, x->k, 48),
                chunk = fit < PI_PIECE_TOKENS - FLOATS_FROM ? fit : PI_PIECE_TOKENS - FLOATS_FROM;
  for (int64_t m = 0, n; m < tokens; m += n) {
    n = tokens - m < chunk + FLOATS_FROM ? tokens - m : chunk;
    for (int64_t p = p0; p < p1; p++) {
      const uint8_t* codes = panels_at(l, x->k, p).codes;
      memset(sums, 0, (size_t)n * 64);
      for (int64_t k = 0; k < x->k; k += PIECE) {
        const int64_t ks = x->k - k < PIECE ? x->k - k : PIECE;
        for (int64_t i = 0; i < ks; i++, codes += 32) {
          f_store(w + i * 16, f_load_f16(codes));
          if (i % 2 == 0) fetch_line(codes + 4096);
        }
        const float* f = x->f + m * x->ldf + k;
        int64_t t = 0;
        const auto run = [&](auto of) {
          float_tile<of.value>(w, f + t * x->ldf, x->ldf, ks, sums + t * 16);
          t += of.value;
        };
        // No tile of one or two: its few sums would wait for one another.
        while (n - t > 8 || n - t == 6) run(Index<6>{});
        if (n - t > 6) run(Index<4>{});
        if (n - t == 5) run(Index<5>{});
        if (n - t == 4) run(Index<4>{});
        if (n - t == 3) run(Index<3>{});
      }
      for (int64_t t = 0; t < n; t++) {
        const f32x16 sum[1][1] = {{f_load(sums + t * 16)}};
        put(l, p, m + t, sum);
      }
    }
  }
}
#endif

template <class W>
void linear(const PiLinear* l, const PiActs* x, int64_t p0, int64_t p1, int64_t tokens,
            [[maybe_unused]] void* scratch) {
#if defined(PI_PIECES)
  if (W::BYTES == 32 && tokens >= FLOATS_FROM) return float_pieces(l, x, p0, p1, tokens, scratch);
#endif
  product<Float<W>, TILE_F_PANELS, TILE_F>(l, x, p0, p1, tokens);
}

}  // namespace

PI_KERNELS(products_float) {
  to->linear[PI_F32] = linear<WF32>;
  to->linear[PI_F16] = linear<WF16>;
}
