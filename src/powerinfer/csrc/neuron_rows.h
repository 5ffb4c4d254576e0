// Kernels over the bundles of single neurons. Several rows are read at once, as many streams as one core handles best,
// and the next ones are prefetched, since rows are scattered. A dot product and a column's sum are the same chain of
// operations, independent of the other tokens and rows. Included by ISA files only.
#pragma once
#include "simd.h"
#include "table.h"

namespace {

// Rows read at once, for one token and for more; tokens that a row is multiplied with at once.
#if defined(__AVX512F__)
enum { ROWS = 8, SHARED_ROWS = 4, SHARED_TOKENS = 4 };
#else
enum { ROWS = STREAMS, SHARED_ROWS = STREAMS, SHARED_TOKENS = 1 };
#endif

PI_INLINE int32_t neuron_of(int32_t neuron) { return neuron; }
PI_INLINE int32_t neuron_of(const PiPair& pair) { return pair.neuron; }

// R rows of a list, and those `ahead` rows later.
template <int R>
struct Rows {
  const uint8_t *now[R], *next[R];
  template <class I>
  PI_INLINE_MEMBER Rows(const PiRows* all, const I* list, int64_t left, int64_t ahead = R) {
    for (int r = 0; r < R; r++) {
      now[r] = pi_row(all, neuron_of(list[r]));
      next[r] = r + ahead < left ? pi_row(all, neuron_of(list[r + ahead])) : now[r];
    }
  }
  PI_INLINE_MEMBER void ask(int64_t at) const {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) fetch_line(next[r] + at);
  }
};

}  // namespace
