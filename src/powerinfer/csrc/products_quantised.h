// Products with quantised weights: activations are quantised to 8 bits per 32, and a block's products are summed up as
// integers. Included by ISA files only.
#pragma once
#include "products.h"
#include "quants.h"
#if defined(PI_PIECES)
#include "products_pieces.h"
#endif

namespace {

// An integer sum begins so low that the codes may be above their value.
template <class W>
PI_INLINE i32x16 start(int32_t sum) {
  if constexpr (SIGNS_APART<W>) return i_set(0);
  if constexpr (W::SIGNED) return dot_s_start(sum);
  return i_set(-W::OFFSET * sum);
}

// Panels that many tokens are multiplied with: codes widened to a byte each, and scales, where making them takes several
// operations (K-quants, grids), to floats: d of each row, then the factors of both halves, and the minima. Where codes
// times these factors fit a byte they are multiplied with them, exactly, and the block has no halves any more.
//
// Sums of halves begin with FIRST besides, whose float's last bit is worth 1, so that their bits are those of FIRST plus
// the sum: less FIRST times the half's factor their product is exact, by one instruction in place of two.
template <class W>
struct Wide : W {
  static constexpr bool WIDE = true, FLOATS = W::UNROLL > 1 || W::HALVES == 2 || OF_GRID<W>;
  static constexpr bool PRODUCTS = BYTE_PRODUCTS<W> != 0, NEGATIVE = W::SIGNED || (PRODUCTS && W::OFFSET > 0);
  static constexpr bool SIGNED = NEGATIVE && (BYTES<W> || SIGNED_ABOVE == 0);
  static constexpr int ABOVE = NEGATIVE ? SIGNED_ABOVE : 0, OFFSET = NEGATIVE ? ABOVE : W::OFFSET;
  static constexpr int UNROLL = W::HALVES == 2 ? 1 : W::UNROLL, HALVES = PRODUCTS ? 1 : W::HALVES;
  static constexpr bool FROM_FIRST = HALVES == 2 && FUSED;
  static constexpr int FIRST = 3 << 22, FIRST_BITS = 0x4b400000;  // between 2^23 and 2^24; as a float
  // Floats of a row and block, and which of them the minima are.
  static constexpr int MINIMA_AT = 1 + (HALVES == 2 ? 2 + FROM_FIRST : 0), VECTORS = MINIMA_AT + MINIMA<W>;
  // Whether a sum's start is made once for all panels.
  static constexpr bool STARTS = !BYTES<W> && (OFFSET > 0 || FROM_FIRST);
  template <int upper, int i, class J>
  static PI_INLINE_MEMBER u8x64 group(const uint8_t* codes, int64_t b, J j) {
    return WQ8_0::group<upper, i>(codes, b, j);
  }
  static PI_INLINE_MEMBER f32x16 floats(const uint8_t* scales, int64_t b, int vector) {
    return f_load((const float*)scales + (b * VECTORS + vector) * 16);
  }
  static PI_INLINE_MEMBER Scales scales(const uint8_t* scales, int64_t b) {
    if constexpr (FLOATS) return {floats(scales, b, 0), MINIMA<W> == 1 ? floats(scales, b, MINIMA_AT) : f_zero()};
    else return W::scales(scales, b);
  }
  static PI_INLINE_MEMBER f32x16 half(const uint8_t* scales, int64_t b, int h) { return floats(scales, b, 1 + h); }
  static PI_INLINE_MEMBER f32x16 less_first(const uint8_t* scales, int64_t b) { return floats(scales, b, 3); }
  static PI_INLINE_MEMBER f32x16 minimum(const uint8_t* scales, int64_t b, int h) {
    return floats(scales, b, MINIMA_AT + h);
  }
};
template <class W>
constexpr int MINIMA<Wide<W>> = MINIMA<W>;

template <class W>
void widen_scales(const uint8_t* scales, int64_t nb, float* out) {
  using To = Wide<W>;
  for (int64_t b = 0; b < nb; b++, out += To::VECTORS * 16) {
    const Scales f = W::scales(scales, b);
    f_store(out, BYTE_PRODUCTS<W> < 0 ? f_sub(f_zero(), f.d) : f.d);
    if constexpr (To::HALVES == 2) {
      for (int h = 0; h < 2; h++) f_store(out + 16 + 16 * h, W::half(scales, b, h));
      if constexpr (To::FROM_FIRST) f_store(out + 48, f_mul(f_set(-To::FIRST), W::half(scales, b, 0)));
    }
    if constexpr (MINIMA<W> == 1) f_store(out + To::MINIMA_AT * 16, f.m);
    if constexpr (MINIMA<W> == 2)
      for (int h = 0; h < 2; h++) f_store(out + (To::MINIMA_AT + h) * 16, W::minimum(scales, b, h));
  }
}

// What the sums of a row of activations begin with, for each block or half.
template <class W>
void set_starts(const int16_t* s, int64_t nb, int32_t* out) {
  using To = Wide<W>;
  if constexpr (To::HALVES == 2) {
    for (int64_t i = 0; i < 2 * nb; i++)
      out[i] = (To::FROM_FIRST && i % 2 == 0 ? To::FIRST_BITS : 0) - To::OFFSET * s[i];
  } else {
    for (int64_t b = 0; b < nb; b++) out[b] = -To::OFFSET * (s[2 * b] + s[2 * b + 1]);
  }
}

template <class W>
constexpr bool has_starts() {
  if constexpr (W::WIDE) return W::STARTS;
  else return false;
}

template <class W>
struct Quantised {
  // Whether several groups are added in 16 bits (simd.h).
#if defined(PI_PAIRS)
  static constexpr bool PAIRS = !W::SIGNED;
#else
  static constexpr bool PAIRS = false;
#endif
  // Of widened codes.
  static constexpr bool STARTS = has_starts<W>(), FROM_FIRST = STARTS && W::HALVES == 2 && FUSED;
  // Codes of two and three bits take most shifts, which take longer by a number than by a constant; NVFP4's do, too.
  static constexpr bool SHIFTS =
      !W::WIDE && !OF_GRID<W> && (W::BLOCK_BYTES <= 192 || (W::HALVES == 2 && W::UNROLL == 1));
  // Whether a block's groups are unrolled: for one and two tokens, and for widened codes. Other tiles have a loop, since
  // there are many of them, and the compiler's time grows with the code.
  template <int P, int T>
  static constexpr bool UNROLLED = PAIRS || (P == 4 ? T <= 2 || SHIFTS : W::WIDE || (P == 2 && SHIFTS));

  template <int P, int T>
  static PI_INLINE_MEMBER void sums(const Panels& w, const PiActs* x, int64_t t0, f32x16 (&sum)[P][T]) {
    const int64_t k = x->k, nb = k / 32;
    const int8_t* q[T];
    const float *d[T], *sd[T];
    const int16_t* s[T];
#pragma GCC unroll 16
    for (int t = 0; t < T; t++) {
      q[t] = x->q + (t0 + t) * k;
      d[t] = x->d + (t0 + t) * nb;
      sd[t] = x->sd + (t0 + t) * nb;
      s[t] = x->s + (t0 + t) * 2 * nb;
#pragma GCC unroll 16
      for (int p = 0; p < P; p++) sum[p][t] = f_zero();
    }
    [[maybe_unused]] const auto activation_sum = [&](int t, int64_t b, int h) __attribute__((always_inline)) {
      if constexpr (W::WIDE) return x->sh[(t0 + t) * 2 * nb + 2 * b + h];
      else return half_sum(d[t], s[t], 2 * b + h);
    };
    for (int64_t b0 = 0; b0 < nb; b0 += W::UNROLL) {
      const auto add_block = [&](auto i) __attribute__((always_inline)) {
        const int64_t b = b0 + i.value;
        // Prefetch the block that is 4 KB of codes later, here or in the panels after these.
        constexpr int64_t SOON = 4096 / W::BLOCK_BYTES, LINES = W::WIDE ? 0 : (W::BLOCK_BYTES + 63) / 64;
        const bool here = b + SOON < nb;
        const int64_t soon = here ? b + SOON : b + SOON - nb, jump = here ? 0 : w.next;
        if constexpr (!W::WIDE) {
#pragma GCC unroll 16
          for (int p = 0; p < P; p++) fetch_line(w.scales + p * w.scales_stride + soon * W::SCALE_BYTES + jump);
        } else if (BYTES<W> && w.ahead) {
          for (int p = 0; p < P; p++) ask(w.ahead[p], b);
        }
        f32x16 value[P][T];
        const auto add_half = [&](auto h) __attribute__((always_inline)) {
          i32x16 acc[P][T];
          [[maybe_unused]] u8x64 pairs[P][T];
#pragma GCC unroll 16
          for (int t = 0; t < T; t++) {
            i32x16 first;
            if constexpr (STARTS) first = i_set(x->starts[((t0 + t) * nb + b) * W::HALVES + h.value]);
            else first = start<W>(W::HALVES == 2 ? s[t][2 * b + h.value] : s[t][2 * b] + s[t][2 * b + 1]);
#pragma GCC unroll 16
            for (int p = 0; p < P; p++) acc[p][t] = first;
          }
          // Group 4 upper + j of the block, and those that are made together with it: the n-th such of its half. Line
          // `line` of the later block, if it has so many, and the next ones.
          constexpr int N = TOGETHER<W>;
          const auto multiply = [&](auto upper, auto j, int line,
                                    [[maybe_unused]] auto n) __attribute__((always_inline)) {
            int32_t a[N][T];
#pragma GCC unroll 4
            for (int s = 0; s < N; s++) {
#pragma GCC unroll 16
              for (int t = 0; t < T; t++) a[s][t] = word(q[t] + b * 32 + upper.value * 16 + (j + s) * 4);
            }
#pragma GCC unroll 16
            for (int p = 0; p < P; p++) {
              u8x64 c[N];
              [[maybe_unused]] u8x64 signs;
              if constexpr (SIGNS_APART<W>) {
                c[0] = W::template magnitudes<upper.value>(w.codes + p * w.codes_stride, b, j);
                signs = W::template signs_of<upper.value>(w.codes + p * w.codes_stride, b, j);
              } else {
                take<W, upper.value, i.value>(w.codes + p * w.codes_stride, b, j, c);
              }
              const auto add_group = [&](auto s) __attribute__((always_inline)) {
                if (line + s.value < LINES)
                  fetch_line(w.codes + p * w.codes_stride + soon * W::BLOCK_BYTES + (line + s.value) * 64 + jump);
#if defined(PI_PAIRS)
                if constexpr (PAIRS) {
                  constexpr int DEPTH = pairs_depth(SIGNS_APART<W> ? W::OFFSET : W::MOST), AT = n.value * N + s.value;
#pragma GCC unroll 16
                  for (int t = 0; t < T; t++) {
                    u8x64 more;
                    if constexpr (SIGNS_APART<W>) more = pairs_dot(c[0], b_signed(a[0][t], signs));
                    else more = pairs_dot(c[s.value], a[s.value][t]);
                    pairs[p][t] = AT % DEPTH ? pairs_add(pairs[p][t], more) : more;
                    if constexpr ((AT + 1) % DEPTH == 0 || AT + 1 == 8 / W::HALVES)
                      acc[p][t] = i_add(acc[p][t], pairs_sum<1>(pairs[p][t]));
                  }
                  return;
                }
#endif
#pragma GCC unroll 16
                for (int t = 0; t < T; t++) {
#if defined(PI_SIGNS)
                  if constexpr (SIGNS_APART<W>) {
                    acc[p][t] = dot_vu(acc[p][t], c[0], b_signed(a[0][t], signs));
                    continue;
                  }
#endif
                  acc[p][t] = W::SIGNED ? dot_s(acc[p][t], c[s.value], a[s.value][t])
                                        : dot_u(acc[p][t], c[s.value], a[s.value][t]);
                }
              };
              PI_UNROLL(N, add_group);
            }
          };
          if constexpr (UNROLLED<P, T>) {
            unroll<0, 8 / W::HALVES / N>([&](auto n) __attribute__((always_inline)) {
              // Low and high nibbles of one load are used in turn if they belong to the same block.
              constexpr int g = W::HALVES == 2                          ? h.value * 4 + n.value * N
                                : W::UNROLL == 1 && !BYTES<W> && N == 1 ? n.value / 2 + n.value % 2 * 4
                                                                        : n.value * N;
              multiply(Index<g / 4>{}, Index<g % 4>{}, h.value * 4 + n.value * N, n);
            });
          } else {
#pragma GCC unroll 1
            for (int j = 0; j < 4; j += N) {
              multiply(Index<h.value>{}, j, h.value * 4 + j, j);
              if constexpr (W::HALVES == 1) multiply(Index<1>{}, j, 4 + j, j);
            }
          }
#pragma GCC unroll 16
          for (int p = 0; p < P; p++) {
            if constexpr (W::HALVES == 2) {
              const uint8_t* const scales = w.scales + p * w.scales_stride;
              const f32x16 f = W::half(scales, b, h.value);
#pragma GCC unroll 16
              for (int t = 0; t < T; t++) {
                if constexpr (h.value) value[p][t] = f_fma(i_float(acc[p][t]), f, value[p][t]);
                else if constexpr (FROM_FIRST) value[p][t] = f_fma(f_bits(acc[p][t]), f, W::less_first(scales, b));
                else value[p][t] = f_mul(i_float(acc[p][t]), f);
              }
            } else {
#pragma GCC unroll 16
              for (int t = 0; t < T; t++) value[p][t] = i_float(acc[p][t]);
            }
          }
        };
        PI_UNROLL(W::HALVES, add_half);
#pragma GCC unroll 16
        for (int p = 0; p < P; p++) {
          Scales f = W::scales(w.scales + p * w.scales_stride, b);
#pragma GCC unroll 16
          for (int t = 0; t < T; t++) {
            sum[p][t] = f_fma(f_mul(value[p][t], f_set(d[t][b])), f.d, sum[p][t]);
            if constexpr (MINIMA<W> == 1) sum[p][t] = f_fma(f.m, f_set(sd[t][b]), sum[p][t]);
          }
          if constexpr (MINIMA<W> == 2)
            unroll<0, 2>([&](auto h) __attribute__((always_inline)) {
              const f32x16 m = W::minimum(w.scales + p * w.scales_stride, b, h.value);
#pragma GCC unroll 16
              for (int t = 0; t < T; t++) sum[p][t] = f_fma(m, f_set(activation_sum(t, b, h.value)), sum[p][t]);
            });
        }
      };
      PI_UNROLL(W::UNROLL, add_block);
    }
  }
};

#if defined(PI_PIECES)
template <class W>
void linear(const PiLinear* l, const PiActs* x, int64_t p0, int64_t p1, int64_t tokens, void* scratch) {
  // Codes of a byte each gain less from pieces.
  if (!l->ahead && tokens < (BYTES<W> ? 4 * WIDE_FROM : WIDE_FROM))
    return product<Quantised<W>, TILE_Q_PANELS, TILE_Q>(l, x, p0, p1, tokens);
  linear_in_pieces<W>(l, x, p0, p1, tokens, scratch);
}
#else
// Of codes that are a byte each, in panels that are in a cache: asks for other lines.
template <class W>
void linear_ahead(const PiLinear* l, const PiActs* x, int64_t p0, int64_t p1, int64_t tokens) {
  constexpr int P = TILE_WIDE_PANELS, T = TILE_WIDE;
  const auto along_tokens = [&](auto panels, int64_t p) __attribute__((always_inline)) {
    constexpr int N = panels.value;
    Panels w = panels_at(l, x->k, p, N);
    w.ahead = l->ahead + p;
    const int64_t first = tokens < T ? tokens : T;
    along<Quantised<Wide<W>>, N, T>(l, w, x, p, 0, first);
    w.ahead = nullptr;
    along<Quantised<Wide<W>>, N, T>(l, w, x, p, first, tokens);
  };
  int64_t p = p0;
  for (; p + P <= p1; p += P) along_tokens(Index<P>{}, p);
  if constexpr (P > 1)
    for (; p < p1; p++) along_tokens(Index<1>{}, p);
}

template <class W>
void widen_panels(const Panels& w, int64_t panels, int64_t nb, uint8_t* codes, float* floats) {
  using To = Wide<W>;
  for (int64_t i = 0; i < panels; i++) {
    const uint8_t *from = w.codes + i * w.codes_stride, *scales = w.scales + i * w.scales_stride;
    if constexpr (To::PRODUCTS) widen_products<W>(from, scales, nb, codes + i * nb * 512, To::ABOVE);
    else if constexpr (!BYTES<W>) widen<W>(from, nb, codes + i * nb * 512, -To::ABOVE);
    if constexpr (To::FLOATS) widen_scales<W>(scales, nb, floats + i * nb * To::VECTORS * 16);
  }
}

// For many tokens some panels are widened once, then used for all tokens but the last few; where codes or scales take many
// operations, for fewer tokens and all of them. Of tokens whose activations do not fit into the L2 cache together some are
// multiplied with all of these panels, then the next.
template <class W>
void linear(const PiLinear* l, const PiActs* x, int64_t p0, int64_t p1, int64_t tokens, void* scratch) {
  using To = Wide<W>;
  constexpr int P = TILE_WIDE_PANELS, T = To::HALVES == 2 ? TILE_HALVES : TILE_WIDE;
  static_assert(P <= 2 && To::VECTORS <= 5 && !(To::STARTS && MINIMA<W> == 2),
                "pi_linear_scratch has no room for more");
  if constexpr (BYTES<W>)
    if (l->ahead) return linear_ahead<W>(l, x, p0, p1, tokens);
  constexpr bool SOON = OF_GRID<W> || W::HALVES == 2;
  if (tokens < (SOON ? TILE_Q + 1 : WIDE_FROM))
    return product<Quantised<W>, TILE_Q_PANELS, TILE_Q, SOON>(l, x, p0, p1, tokens);
  const int64_t nb = x->k / 32, some = tokens_at_once(l, x->k, T), whole = p0 + (p1 - p0) / P * P;
  const int64_t most = tokens > some ? pi_wide_panels(x->k) : P, floats_of_panel = nb * To::VECTORS * 16;
  auto* const codes = (uint8_t*)scratch;
  auto* const floats = (float*)(codes + most * nb * 512);
  float* const sums = floats + most * floats_of_panel;
  PiActs acts = *x;
  // What the sums of tokens [m, end) have for all panels.
  const auto prepare = [&](int64_t m, int64_t end) {
    for (int64_t t = m; t < end; t++) {
      const int16_t* const s = x->s + t * 2 * nb;
      if constexpr (To::STARTS) set_starts<W>(s, nb, (int32_t*)sums + (t - m) * To::HALVES * nb);
      if constexpr (MINIMA<W> == 2)
        for (int64_t i = 0; i < 2 * nb; i++) sums[(t - m) * 2 * nb + i] = half_sum(x->d + t * nb, s, i);
    }
    acts.starts = (const int32_t*)sums - m * To::HALVES * nb;
    acts.sh = sums - m * 2 * nb;
  };
  for (int64_t g = p0; g < whole; g += most) {
    const int64_t end_of_group = whole - g < most ? whole : g + most;
    widen_panels<W>(panels_at(l, x->k, g), end_of_group - g, nb, codes, floats);
    for (int64_t m = 0; m < tokens; m += some) {
      const int64_t end = m + some < tokens ? m + some : tokens;
      if (g == p0 || some < tokens) prepare(m, end);
      for (int64_t p = g; p < end_of_group; p += P) {
        const Panels stored = panels_at(l, x->k, p, P);
        Panels w = stored;
        if constexpr (!BYTES<W>) {
          w.codes = codes + (p - g) * nb * 512;
          w.codes_stride = nb * 512;
        }
        if constexpr (To::FLOATS) {
          w.scales = (const uint8_t*)(floats + (p - g) * floats_of_panel);
          w.scales_stride = floats_of_panel * 4;
        }
        int64_t t = m;
        if constexpr (T == 5)  // some tiles of four, so that none of two or one is left
          for (; (end - t) % 5 && end - t >= 8; t += 4) tile<Quantised<To>, P, 4>(l, w, &acts, p, t);
        for (; t + T <= end; t += T) tile<Quantised<To>, P, T>(l, w, &acts, p, t);
        if constexpr (SOON) along<Quantised<To>, P, T >= 4 ? 4 : T>(l, w, &acts, p, t, end);
        else along<Quantised<W>, P, T >= 4 ? 4 : T>(l, stored, x, p, t, end);
      }
    }
  }
  if (whole < p1) along<Quantised<W>, 1, TILE_Q>(l, panels_at(l, x->k, whole), x, whole, 0, tokens);
}
#endif

}  // namespace

// Enters the product of a type (types.h) in the table of a level.
#define PI_USE(name, ...) to->linear[PI_##name] = linear<W##name>;
