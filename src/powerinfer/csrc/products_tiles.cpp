// Products on the tile unit, of many tokens.
//
// Quantised weights: integer tiles give the same sums of 32 as the vector kernels, and the factors are applied in the
// same order, so a token's bits do not depend on which of the two computed it. BF16 weights: tiles for every number of
// tokens, one included, for the same reason.
#include "products_quantised.h"
#include "quants_grids.h"

namespace {

struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {0};
  uint16_t bytes[16] = {0};
  uint8_t rows[16] = {0};
};

// Tiles 0-3: sums of `tokens` x 16; 4-5: activations, `tokens` rows of a_bytes; 6-7: weights, b_rows of 64 bytes.
PI_INLINE void configure(int tokens, int a_bytes, int b_rows) {
  TileConfig c;
  for (int i = 0; i < 8; i++) {
    c.rows[i] = (uint8_t)(i < 6 ? tokens : b_rows);
    c.bytes[i] = (uint16_t)(i < 4 || i > 5 ? 64 : a_bytes);
  }
  __asm__ volatile("" : : "r"(&c) : "memory");  // gcc 12 assumes that ldtilecfg reads 8 bytes, and drops the others
  _tile_loadconfig(&c);
}

constexpr int64_t TILE_TOKENS = 16;

// A barrier for the compiler between stores and the tile load that reads them: gcc must not reorder the two.
PI_INLINE void settle() { __asm__ volatile("" : : : "memory"); }

// tile c = activations at `at` . weights at `bt`, stored as 16 x 16 sums.
#define PI_TILE_PRODUCT(c, a, b, at, bt, to) \
  _tile_zero(c);                             \
  _tile_loadd(a, at, (long)k);               \
  _tile_loadd(b, bt, 64l);                   \
  _tile_dpbssd(c, a, b);                     \
  _tile_stored(c, to, 64l)

// Two products, of 32 k each or the halves of one block. Tiles are named in the instruction: hence macros.
#define PI_TILE_PAIR(c0, c1, pair, to)                                       \
  PI_TILE_PRODUCT(c0, 4, 6, q + (pair) * 2 * A, codes + (pair) * 2 * B, to); \
  PI_TILE_PRODUCT(c1, 5, 7, q + (pair) * 2 * A + A, codes + (pair) * 2 * B + B, (to) + 256)

// Scales of the activations of one token tile, [block][16 tokens]; sd of types with two minima [half block][16 tokens].
struct TileScales {
  const float *d, *sd;
};

// Adds a block's sums. many: of more than 8 tokens.
template <class W>
PI_INLINE void add_block(f32x16 (&sum)[16], const int32_t* tile, const uint8_t* meta, int64_t b, const TileScales& a,
                         bool many) {
  const Scales f = W::scales(meta, b);
  f32x16 first = f.d, second = f.d;
  if constexpr (W::HALVES == 2) {
    first = W::half(meta, b, 0);
    second = W::half(meta, b, 1);
  }
  [[maybe_unused]] f32x16 m[2];
  if constexpr (MINIMA<W> == 2)
    for (int h = 0; h < 2; h++) m[h] = W::minimum(meta, b, h);
  const auto add = [&](auto t) __attribute__((always_inline)) {
    f32x16 value = _mm512_cvtepi32_ps(_mm512_load_si512(tile + t.value * 16));
    if constexpr (W::HALVES == 2)
      value = f_fma(_mm512_cvtepi32_ps(_mm512_load_si512(tile + 256 + t.value * 16)), second, f_mul(value, first));
    sum[t.value] = f_fma(f_mul(value, f_set(a.d[b * 16 + t.value])), f.d, sum[t.value]);
    if constexpr (MINIMA<W> == 1) sum[t.value] = f_fma(f.m, f_set(a.sd[b * 16 + t.value]), sum[t.value]);
    if constexpr (MINIMA<W> == 2)
      for (int h = 0; h < 2; h++) sum[t.value] = f_fma(m[h], f_set(a.sd[(2 * b + h) * 16 + t.value]), sum[t.value]);
  };
  unroll<0, 8>(add);
  if (many) unroll<8, 16>(add);
}

// One panel by up to 16 tokens.
template <class W>
void amx_tile(const PiLinear* l, const PiActs* x, const uint8_t* codes, const uint8_t* meta, int64_t p, int64_t t0,
              int tokens, const TileScales& a, int32_t* sums, const PiAhead* ahead) {
  const int64_t k = x->k, nb = k / 32;
  const bool many = tokens > 8;
  const int8_t* q = x->q + t0 * k;
  f32x16 sum[16];
  unroll<0, 16>([&](auto t) __attribute__((always_inline)) { sum[t.value] = f_zero(); });
  // The tiles of the next pair are computed while the sums of this one are scaled.
  constexpr int A = W::HALVES == 2 ? 16 : 32, B = A * 16;
  const int64_t pairs = W::HALVES == 2 ? nb : nb / 2;
#define PI_ADD_PAIR(pair, from)                                      \
  if constexpr (BYTES<W>)                                            \
    if (ahead) ask(*ahead, 2 * (pair)), ask(*ahead, 2 * (pair) + 1); \
  if constexpr (W::HALVES == 2) {                                    \
    add_block<W>(sum, from, meta, pair, a, many);                    \
  } else {                                                           \
    add_block<W>(sum, from, meta, 2 * (pair), a, many);              \
    add_block<W>(sum, (from) + 256, meta, 2 * (pair) + 1, a, many);  \
  }
  int64_t i = 0;
  if (pairs > 0) { PI_TILE_PAIR(0, 1, 0, sums); }
  for (; i + 2 < pairs; i += 2) {
    PI_TILE_PAIR(2, 3, i + 1, sums + 512);
    PI_ADD_PAIR(i, sums);
    PI_TILE_PAIR(0, 1, i + 2, sums);
    PI_ADD_PAIR(i + 1, sums + 512);
  }
  if (i + 1 < pairs) { PI_TILE_PAIR(2, 3, i + 1, sums + 512); }
  if (i < pairs) { PI_ADD_PAIR(i, sums); }
  if (i + 1 < pairs) { PI_ADD_PAIR(i + 1, sums + 512); }
  if constexpr (W::HALVES == 1) {
    if (nb % 2) {
      PI_TILE_PRODUCT(0, 4, 6, q + (nb - 1) * 32, codes + (nb - 1) * 512, sums);
      add_block<W>(sum, sums, meta, nb - 1, a, many);
    }
  }
  unroll<0, 16>([&](auto t) __attribute__((always_inline)) {
    if (t.value < tokens) {
      float* o = l->out + (t0 + t.value) * l->ldo + p * 16;
      f32x16 v = sum[t.value];
      if (l->bias) v = f_add(v, f_load(l->bias + p * 16));
      if (l->add) v = f_add(v, f_load(o));
      f_store(o, v);
    }
  });
}

// The products of the level below.
PiProduct vector_product[PI_N_TYPES];

template <class W>
void amx_product(const PiLinear* l, const PiActs* x, int64_t p0, int64_t p1, int64_t tokens, void* scratch) {
  // The vector kernels stream weights better than a mostly empty tile.
  if (tokens <= 24) return vector_product[l->type](l, x, p0, p1, tokens, scratch);
  const int64_t k = x->k, nb = k / 32, stride = pi_panel_bytes(l->type, k), codes_bytes = pi_codes_bytes(l->type, k);
  using To = Wide<W>;
  constexpr int A = To::HALVES == 2 ? 16 : 32, B = To::HALVES == 2 ? 4 : 8;
  const int64_t some = PI_AMX_ACTS / k / TILE_TOKENS * TILE_TOKENS, at_once = some < TILE_TOKENS ? TILE_TOKENS : some;
  int32_t* sums = (int32_t*)scratch;
  float* d = (float*)((uint8_t*)scratch + 4096);
  float* sd = d + at_once * nb;
  constexpr int N = MINIMA<W> > 1 ? MINIMA<W> : 1;
  uint8_t* wide = (uint8_t*)(sd + N * at_once * nb);
  float* floats = (float*)(wide + nb * 512);
  int configured = 0;
  for (int64_t m = 0; m < tokens; m += at_once) {
    const int64_t end = m + at_once < tokens ? m + at_once : tokens;
    for (int64_t t = m; t < end; t++) {
      const int64_t first = (t - m) / 16 * 16 * nb, lane = (t - m) % 16;
      float *to = d + first + lane, *sums_to = sd + N * first + lane;
      for (int64_t b = 0; b < nb; b++) {
        to[b * 16] = x->d[t * nb + b];
        if constexpr (MINIMA<W> == 1) sums_to[b * 16] = x->sd[t * nb + b];
        for (int64_t i = 2 * b; MINIMA<W> == 2 && i < 2 * b + 2; i++)
          sums_to[i * 16] = half_sum(x->d + t * nb, x->s + t * 2 * nb, i);
      }
    }
    for (int64_t p = p0; p < p1; p++) {
      const uint8_t *codes = l->w + p * stride, *meta = codes + codes_bytes;
      if constexpr (To::PRODUCTS) widen_products<W>(codes, meta, nb, wide, 0);
      else if constexpr (!BYTES<W>) widen<W>(codes, nb, wide, W::OFFSET);
      if constexpr (!BYTES<W>) codes = wide;
      if constexpr (To::FLOATS) {
        widen_scales<W>(meta, nb, floats);
        meta = (const uint8_t*)floats;
      }
      settle();
      for (int64_t t = m; t < end; t += TILE_TOKENS) {
        const int n = (int)(end - t < TILE_TOKENS ? end - t : TILE_TOKENS);
        if (n != configured) configure(configured = n, A, B);
        amx_tile<To>(l, x, codes, meta, p, t, n, {d + (t - m) * nb, sd + N * (t - m) * nb}, sums,
                     l->ahead && t == 0 ? l->ahead + p : nullptr);
      }
    }
  }
  _tile_release();
}

// P panels by up to 32 tokens, sums kept in the tiles over all of k.
template <int P>
void amx_bf16_tiles(const PiLinear* l, const PiActs* x, int64_t p, int64_t t0, int tokens, float* sums) {
  const int64_t steps = (x->k + 31) / 32, stride = pi_panel_bytes(l->type, x->k);
  const long lda = (long)(x->ldb * 2);
  const uint16_t *a0 = x->b + t0 * x->ldb, *a1 = a0 + 16 * x->ldb;
  const uint8_t *w0 = l->w + p * stride, *w1 = w0 + stride;
  const bool two = tokens > 16;  // then both token tiles are full
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t i = 0; i < steps; i++) {
    // Prefetch 2 KB ahead, here or in the panels after these.
    const int64_t soon = i + 2 < steps ? (i + 2) * 1024 : (i + 2 - steps) * 1024 + P * stride;
    for (int line = 0; line < 1024; line += 64) {
      __builtin_prefetch(w0 + soon + line);
      if constexpr (P == 2) __builtin_prefetch(w1 + soon + line);
    }
    _tile_loadd(4, a0 + i * 32, lda);
    _tile_loadd(6, w0 + i * 1024, 64l);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (P == 2) {
      _tile_loadd(7, w1 + i * 1024, 64l);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (two) {
      _tile_loadd(5, a1 + i * 32, lda);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (P == 2) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, 64l);
  _tile_stored(1, sums + 256, 64l);
  _tile_stored(2, sums + 512, 64l);
  _tile_stored(3, sums + 768, 64l);
  for (int t = 0; t < tokens; t++) {
    for (int j = 0; j < P; j++) {
      float* o = l->out + (t0 + t) * l->ldo + (p + j) * 16;
      f32x16 v = f_load(sums + (t / 16 * 2 + j) * 256 + t % 16 * 16);
      if (l->bias) v = f_add(v, f_load(l->bias + (p + j) * 16));
      if (l->add) v = f_add(v, f_load(o));
      f_store(o, v);
    }
  }
}

void amx_bf16(const PiLinear* l, const PiActs* x, int64_t p0, int64_t p1, int64_t tokens, void* scratch) {
  const int64_t some = 393216 / x->k / 32 * 32, at_once = some < 32 ? 32 : some;
  int configured = 0;
  for (int64_t m = 0; m < tokens; m += at_once) {
    const int64_t end = m + at_once < tokens ? m + at_once : tokens;
    for (int64_t p = p0; p < p1; p += 2) {
      for (int64_t t = m; t < end;) {
        const int64_t left = end - t;
        const int n = left >= 32 ? 32 : left > 16 ? 16 : (int)left, rows = n == 32 ? 16 : n;
        if (rows != configured) configure(configured = rows, 64, 16);
        if (p + 2 <= p1) amx_bf16_tiles<2>(l, x, p, t, n, (float*)scratch);
        else amx_bf16_tiles<1>(l, x, p, t, n, (float*)scratch);
        t += n;
      }
    }
  }
  _tile_release();
}

template <class W>
void use_tiles(PiKernels* to, int type) {
  vector_product[type] = to->linear[type];
  to->linear[type] = amx_product<W>;
}

}  // namespace

#define PI_USE_TILES(name, ...) use_tiles<W##name>(to, PI_##name);
PI_KERNELS(products_tiles) {
  to->linear[PI_BF16] = amx_bf16;
  PI_QUANTISED_TYPES(PI_USE_TILES)
}
