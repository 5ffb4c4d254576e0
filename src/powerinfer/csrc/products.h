// The product of a matrix in panels with rows of activations, in tiles of P panels by T tokens. Each output element is the
// same chain of operations for any number of tokens, panels or threads of a call: a token gets the same bits in a prompt,
// in a batch and alone. Included by ISA files only.
#pragma once
#include "simd.h"
#include "table.h"

namespace {

// The panels of a call: codes and scales of panel p at p times their strides. The panels after these start `next`
// bytes later.
struct Panels {
  const uint8_t *codes, *scales;
  int64_t codes_stride, scales_stride, next = 0;
  const PiAhead* ahead = nullptr;  // of each of these panels
};

template <int P, int T>
PI_INLINE void put(const PiLinear* l, int64_t p0, int64_t t0, const f32x16 (&sum)[P][T]) {
#pragma GCC unroll 16
  for (int p = 0; p < P; p++) {
#pragma GCC unroll 16
    for (int t = 0; t < T; t++) {
      float* o = l->out + (t0 + t) * l->ldo + (p0 + p) * 16;
      f32x16 v = sum[p][t];
      if (l->bias) v = f_add(v, f_load(l->bias + (p0 + p) * 16));
      if (l->add) v = f_add(v, f_load(o));
      f_store(o, v);
    }
  }
}

// Panels [p0, p0 + P) of the matrix, which are the first of `w`.
template <class W, int P, int T>
void tile(const PiLinear* l, const Panels& w, const PiActs* x, int64_t p0, int64_t t0) {
  f32x16 sum[P][T];
  if constexpr (P * T >= 8)  // stores that wait for their line hold up those of the next tile
    for (int t = 0; t < T; t++)
      for (int p = 0; p < P; p++) fetch_line((const uint8_t*)(l->out + (t0 + t) * l->ldo + (p0 + p) * 16));
  W::template sums<P, T>(w, x, t0, sum);
  put(l, p0, t0, sum);
}

PI_INLINE Panels panels_at(const PiLinear* l, int64_t k, int64_t p, int64_t some = 1) {
  const int64_t stride = pi_panel_bytes(l->type, k);
  const uint8_t* codes = l->w + p * stride;
  return {codes, codes + pi_codes_bytes(l->type, k), stride, stride, some * stride};
}

// Tokens [t, end) by P panels, in the largest tiles that fit.
template <class W, int P, int T>
PI_INLINE int64_t along(const PiLinear* l, const Panels& w, const PiActs* x, int64_t p, int64_t t, int64_t end) {
  // Eight in two tiles of four rather than six and two, whose few sums would wait for one another.
  for (; t + T <= end && (T != 6 || T != TILE_F || end - t != 8); t += T) tile<W, P, T>(l, w, x, p, t);
  if constexpr (T > 8) return along<W, P, 8>(l, w, x, p, t, end);
  else if constexpr (T > 4) return along<W, P, 4>(l, w, x, p, t, end);
  else if constexpr (T > 2) return along<W, P, 2>(l, w, x, p, t, end);
  else if constexpr (T > 1) return along<W, P, 1>(l, w, x, p, t, end);
  return t;
}

// All T tokens, P panels at a time. What is left of the panels is computed in the tiles that many tokens need anyway:
// of two panels unless FEW, when there never are many.
template <class W, int P, int T, bool FEW>
PI_INLINE void sweep(const PiLinear* l, const PiActs* x, int64_t p0, int64_t p1) {
  constexpr int TOKENS = T >= 8 ? 8 : T >= 4 ? 4 : T >= 2 ? 2 : 1;
  int64_t p = p0;
  for (; p + P <= p1; p += P) tile<W, P, T>(l, panels_at(l, x->k, p, P), x, p, 0);
  if constexpr (P > 2 && !FEW)
    for (; p + 2 <= p1; p += 2) along<W, 2, TOKENS>(l, panels_at(l, x->k, p, 2), x, p, 0, T);
  if constexpr (P > 1)
    for (; p < p1; p++) along<W, 1, TOKENS>(l, panels_at(l, x->k, p), x, p, 0, T);
}

PI_INLINE void ask(const PiAhead& ahead, int64_t block) {
#pragma GCC unroll 8
  for (int i = 0; i < PiAhead::LINES; i++) fetch_line(ahead.line[i] + block * ahead.stride);
}

// Four bytes of a row of activations.
PI_INLINE int32_t word(const int8_t* p) {
  int32_t w;
  memcpy(&w, p, 4);
  return w;
}

// Tokens whose activations stay in the L2 cache while the panels of the matrix are read.
PI_INLINE int64_t tokens_at_once(const PiLinear* l, int64_t k, int64_t tile) {
  const int form = pi_form(l->type);
  const int64_t some = 393216 / (k * (form == PI_FORM_F32 ? 4 : form == PI_FORM_BF16 ? 2 : 1));
  return some < tile ? tile : some / tile * tile;
}

// W::sums<P, T>(panels, x, t, sum) sets the sums of P panels by the tokens from t on. FEW: there are at most T.
template <class W, int P, int T, bool FEW = false>
void product(const PiLinear* l, const PiActs* x, int64_t p0, int64_t p1, int64_t tokens) {
  // Few tokens: the matrix is read once, in four address streams, the best number for one core, or in two if the sums
  // need the registers.
  if (tokens == 1) return sweep<W, STREAMS, 1, FEW>(l, x, p0, p1);
  if constexpr (T > 1)
    if (tokens == 2) return sweep<W, T >= 8 ? 4 : T >= 4 ? 2 : P, 2, FEW>(l, x, p0, p1);
  if constexpr (T >= 8) {
    switch (tokens) {
      case 3: return sweep<W, 4, 3, FEW>(l, x, p0, p1);
      case 4: return sweep<W, 4, 4, FEW>(l, x, p0, p1);
      case 5: return sweep<W, 2, 5, FEW>(l, x, p0, p1);
      case 6: return sweep<W, 2, 6, FEW>(l, x, p0, p1);
      case 7: return sweep<W, 2, 7, FEW>(l, x, p0, p1);
      case 8: return sweep<W, 2, 8, FEW>(l, x, p0, p1);
    }
  }
  if constexpr (!FEW) {
    const int64_t some = tokens_at_once(l, x->k, T);
    for (int64_t m = 0; m < tokens; m += some) {
      const int64_t end = m + some < tokens ? m + some : tokens;
      int64_t p = p0;
      for (; p + P <= p1; p += P) along<W, P, T>(l, panels_at(l, x->k, p, P), x, p, m, end);
      if constexpr (P > 1)
        for (; p < p1; p++) along<W, 1, T>(l, panels_at(l, x->k, p), x, p, m, end);
    }
  }
}

}  // namespace
