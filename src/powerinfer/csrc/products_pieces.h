// Products of many tokens with quantised weights where registers are few: tiles of one panel by up to six tokens, whose
// sums stay in memory. Codes and scales are widened in pieces that stay in the L1 cache while all tokens are multiplied
// with them. Included by ISA files only.
#pragma once
#include "products.h"
#include "quants.h"

namespace {

// By how much bytes of widened codes are above their value: signed ones are moved, so that all are unsigned.
template <class W>
constexpr int ABOVE = W::SIGNED ? 128 : W::OFFSET;

// How a sum is told that: by a whole number, or by one for each half of the words in which pairs are summed. In these only
// the last sum has to fit into 16 bits; on the way there it may wrap.
enum { START_NONE, START_WHOLE, START_PAIRS };

// What a tile knows of a type; types that agree share its code. WIDTH: bytes of a widened code: signed ones, whose pairs
// do not fit into 16 bits, become words, the even and the odd ones apart, and so do activations. DEPTH: groups whose
// products are added in 16 bits. MINIMA: of a block; HALVES: as in the traits.
template <int WIDTH_, int DEPTH_, int START_, int MINIMA_, int HALVES_>
struct Piece {
  static constexpr int WIDTH = WIDTH_, DEPTH = DEPTH_, START = START_, HALVES = HALVES_, MINIMA = MINIMA_;
  static constexpr int VECTORS = (HALVES == 2 ? 3 : 1) + MINIMA;  // floats of a row and block: d, store_rest
  static constexpr int BLOCKS = PIECE_BLOCKS / WIDTH;
};

#if defined(PI_PAIRS)
// Whether the sum of a block's pairs, of codes less their offset, fits into 16 bits.
template <class W>
constexpr bool FITS =
    127 * 16 / W::HALVES * (W::OFFSET > W::MOST - W::OFFSET ? W::OFFSET : W::MOST - W::OFFSET) < 32768;
template <class W>
using PieceOf = Piece<W::SIGNED ? 2 : 1, W::SIGNED || FITS<W> ? 8 : pairs_depth(W::MOST),
                      W::SIGNED || W::OFFSET == 0 ? START_NONE
                      : FITS<W>                   ? START_PAIRS
                                                  : START_WHOLE,
                      MINIMA<W>, W::HALVES>;
#else
template <class W>
using PieceOf = Piece<1, 8, ABOVE<W> == 0 ? START_NONE : START_WHOLE, MINIMA<W>, W::HALVES>;
#endif

// Blocks [b0, b0 + n) of a panel, and what it asks for meanwhile: codes as [block][8 groups][64], twice that as words, factors as [block][VECTORS][16].
template <class W>
void widen_piece(const Panels& w, int64_t b0, int64_t n, uint8_t* codes, float* floats) {
  using C = PieceOf<W>;
  for (int64_t i = 0; i < n; i += W::UNROLL) {
    unroll<0, W::UNROLL>([&](auto u) __attribute__((always_inline)) {
      const int64_t b = b0 + i + u.value;
      uint8_t* to = codes + (i + u.value) * C::WIDTH * 512;
      if (BYTES<W> && w.ahead) {
        ask(*w.ahead, b);
      } else {
        for (int64_t line = 0; line < W::BLOCK_BYTES; line += 64)
          fetch_line(w.codes + b * W::BLOCK_BYTES + 4096 + line);
      }
      unroll<0, 8 / TOGETHER<W>>([&](auto n) __attribute__((always_inline)) {
        constexpr int FIRST = n.value * TOGETHER<W>;
        u8x64 codes_of[TOGETHER<W>];
        take<W, FIRST / 4, u.value>(w.codes, b, Index<FIRST % 4>{}, codes_of);
        unroll<0, TOGETHER<W>>([&](auto s) __attribute__((always_inline)) {
          constexpr int g = FIRST + s.value;
          u8x64 c = codes_of[s.value];
#if defined(PI_PAIRS)
          if constexpr (C::WIDTH == 2) {
            b_store(to + 512 + g * 64, odd_words(c));
            c = even_words(c);
          }
#else
          if constexpr (W::SIGNED) c = b_sub(c, b_set(-128));
#endif
          b_store(to + g * 64, c);
        });
      });
      float* f = floats + (i + u.value) * C::VECTORS * 16;
      const Scales s = W::scales(w.scales, b);
      f_store(f, s.d);
      store_rest<W>(w.scales, b, s, f + 16);
    });
  }
}

// Factors of `n` tokens: [block][n] each, with HALVES 2 `start` and `sd` twice as many.
struct Factors {
  int32_t* start;
  float *d, *sd;
  int64_t n;
};

// The integers of groups [G0, G1) of a block by T tokens.
template <class C, int G0, int G1, int T>
PI_INLINE void integers(const uint8_t* codes, const int8_t* const (&q)[T], int64_t at, const int32_t* start,
                        i32x16 (&value)[T]) {
#if defined(PI_PAIRS)
  if constexpr (C::WIDTH == 2) {
#pragma GCC unroll 16
    for (int t = 0; t < T; t++) value[t] = i_set(0);
    unroll<0, 16>([&](auto g) __attribute__((always_inline)) {
      const u8x64 c = b_load(codes + g.value * 64);
#pragma GCC unroll 16
      for (int t = 0; t < T; t++) value[t] = dot_words(value[t], c, word(q[t] + 2 * at + g.value * 4));
    });
  } else {
    unroll<0, (G1 - G0 + C::DEPTH - 1) / C::DEPTH>([&](auto chain) __attribute__((always_inline)) {
      constexpr int FIRST = G0 + chain.value * C::DEPTH, END = FIRST + C::DEPTH < G1 ? FIRST + C::DEPTH : G1;
      u8x64 pairs[T];
      unroll<FIRST, END>([&](auto g) __attribute__((always_inline)) {
        const u8x64 c = b_load(codes + g.value * 64);
#pragma GCC unroll 16
        for (int t = 0; t < T; t++) {
          const u8x64 more = pairs_dot(c, word(q[t] + at + g.value * 4));
          pairs[t] = g.value == FIRST ? more : pairs_add(pairs[t], more);
        }
      });
#pragma GCC unroll 16
      for (int t = 0; t < T; t++) {
        if constexpr (C::START == START_PAIRS) pairs[t] = pairs_add(pairs[t], pairs_set(start[t]));
        const i32x16 more = pairs_sum<1>(pairs[t]);
        value[t] = chain.value == 0 ? more : i_add(value[t], more);
      }
    });
  }
  if constexpr (C::START == START_WHOLE) {
#pragma GCC unroll 16
    for (int t = 0; t < T; t++) value[t] = i_add(value[t], i_set(start[t]));
  }
#else
#pragma GCC unroll 16
  for (int t = 0; t < T; t++) value[t] = i_set(C::START == START_WHOLE ? start[t] : 0);
  unroll<G0, G1>([&](auto g) __attribute__((always_inline)) {
    const u8x64 c = b_load(codes + g.value * 64);
#pragma GCC unroll 16
    for (int t = 0; t < T; t++) value[t] = dot_u(value[t], c, word(q[t] + at + g.value * 4));
  });
#endif
}

// Adds `blocks` blocks, the first of which is b0, to the sums of T tokens, the first of which is t0 of the factors' and x.
template <class C, int T>
void piece_tile(const uint8_t* codes, const float* floats, const int8_t* x, int64_t k, const Factors& a, int64_t b0,
                int64_t t0, int64_t blocks, float* sums) {
  const int8_t* q[T];
#pragma GCC unroll 16
  for (int t = 0; t < T; t++) q[t] = x + ((t0 + t) * k + b0 * 32) * C::WIDTH;
  const int64_t n = a.n;
  const int32_t* start = a.start + b0 * C::HALVES * n + t0;
  const float *d = a.d + b0 * n + t0, *sd = a.sd + b0 * C::MINIMA * n + t0;
  sums += t0 * 16;
  for (int64_t b = 0; b < blocks;
       b++, d += n, sd += C::MINIMA * n, codes += C::WIDTH * 512, floats += C::VECTORS * 16) {
    f32x16 value[T];
    unroll<0, C::HALVES>([&](auto h) __attribute__((always_inline)) {
      i32x16 totals[T];
      integers<C, 8 / C::HALVES * h.value, 8 / C::HALVES*(h.value + 1), T>(codes, q, b * 32, start, totals);
      if constexpr (C::START != START_NONE) start += n;
#pragma GCC unroll 16
      for (int t = 0; t < T; t++) {
        value[t] = C::HALVES == 1 ? i_float(totals[t])
                   : h.value      ? f_fma(i_float(totals[t]), f_load(floats + 32), value[t])
                                  : f_mul(i_float(totals[t]), f_load(floats + 16));
      }
    });
    const f32x16 by = f_load(floats);
#pragma GCC unroll 16
    for (int t = 0; t < T; t++) {
      f32x16 sum = f_fma(f_mul(value[t], f_set(d[t])), by, f_load(sums + t * 16));
      unroll<0, C::MINIMA>([&](auto i) __attribute__((always_inline)) {
        sum = f_fma(f_load(floats + (C::HALVES == 2 ? 48 : 16) + 16 * i.value), f_set(sd[i.value * n + t]), sum);
      });
      f_store(sums + t * 16, sum);
    }
  }
}

template <class W>
void set_factors(const PiActs* x, int64_t t0, const Factors& to) {
  using C = PieceOf<W>;
  const int64_t nb = x->k / 32;
  for (int64_t t = 0; t < to.n; t++) {
    const float *d = x->d + (t0 + t) * nb, *sd = x->sd + (t0 + t) * nb;
    const int16_t* s = x->s + (t0 + t) * 2 * nb;
    for (int64_t b = 0; b < nb; b++) {
      to.d[b * to.n + t] = d[b];
      if constexpr (MINIMA<W> == 1) to.sd[b * to.n + t] = sd[b];
      unroll<0, W::HALVES>([&](auto h) __attribute__((always_inline)) {
        if constexpr (MINIMA<W> == 2)
          to.sd[(2 * b + h.value) * to.n + t] = half_sum(x->d + (t0 + t) * nb, s, 2 * b + h.value);
        int32_t* const start = to.start + (W::HALVES * b + h.value) * to.n + t;
        if constexpr (C::START == START_WHOLE)
          *start = -ABOVE<W> * (W::HALVES == 2 ? s[2 * b + h.value] : s[2 * b] + s[2 * b + 1]);
#if defined(PI_PAIRS)
        if constexpr (C::START == START_PAIRS)
          *start = pairs_start<8 / W::HALVES>(x->q + (t0 + t) * x->k + b * 32 + h.value * 16, W::OFFSET);
#endif
      });
    }
  }
}

template <class W>
void linear_in_pieces(const PiLinear* l, const PiActs* x, int64_t p0, int64_t p1, int64_t tokens, void* scratch) {
  using C = PieceOf<W>;
  static_assert(C::VECTORS <= 5 && (C::MINIMA < 2 || C::START == START_NONE), "the scratch has room for no more");
  const int64_t nb = x->k / 32, fit = tokens_at_once(l, C::WIDTH * x->k, TILE_PIECE),
                chunk = fit < PI_PIECE_TOKENS ? fit : (int64_t)PI_PIECE_TOKENS;
  auto* const codes = (uint8_t*)scratch;
  auto* const floats = (float*)(codes + PIECE_BLOCKS * 512);
  auto* const sums = floats + PIECE_BLOCKS * 80;
  auto* const d = sums + PI_PIECE_TOKENS * 16;
  for (int64_t m = 0; m < tokens; m += chunk) {
    const int64_t n = tokens - m < chunk ? tokens - m : chunk;
    const Factors a{(int32_t*)(d + 2 * n * nb), d, d + n * nb, n};  // of two minima no block has a start
    set_factors<W>(x, m, a);
    const int8_t* q = x->q + m * x->k;
#if defined(PI_PAIRS)
    if constexpr (C::WIDTH == 2) {
      auto* const words = (uint8_t*)(d + (3 * n * nb + 15) / 16 * 16);
      for (int64_t i = 0; i < n * nb; i++) b_store(words + i * 64, words_of(q + i * 32));
      q = (const int8_t*)words;
    }
#endif
    for (int64_t p = p0; p < p1; p++) {
      Panels w = panels_at(l, x->k, p);
      if (l->ahead && m == 0) w.ahead = l->ahead + p;
      memset(sums, 0, (size_t)n * 64);
      for (int64_t b = 0; b < nb; b += C::BLOCKS) {
        const int64_t blocks = nb - b < C::BLOCKS ? nb - b : C::BLOCKS;
        widen_piece<W>(w, b, blocks, codes, floats);
        int64_t t = 0;
        for (; t + 6 <= n; t += 6) piece_tile<C, 6>(codes, floats, q, x->k, a, b, t, blocks, sums);
        if (t + 4 <= n) piece_tile<C, 4>(codes, floats, q, x->k, a, b, t, blocks, sums), t += 4;
        if (t + 2 <= n) piece_tile<C, 2>(codes, floats, q, x->k, a, b, t, blocks, sums), t += 2;
        if (t < n) piece_tile<C, 1>(codes, floats, q, x->k, a, b, t, blocks, sums);
      }
      for (int64_t t = 0; t < n; t++) {
        const f32x16 sum[1][1] = {{f_load(sums + t * 16)}};
        put(l, p, m + t, sum);
      }
    }
  }
}

}  // namespace
