// The paged KV cache and attention over it, written once over simd.h and compiled once per level. A row's bits do not
// depend on the other rows of a call.
#include "simd.h"
#include "table.h"

namespace {

PI_INLINE void f16_saturated(uint16_t* p, f32x16 v) {
  f_store_f16(p, f_max(f_min(v, f_set(65504.0f)), f_set(-65504.0f)));
}

// The codes of block i of a row of n, for Q8_0, and their scale; n % 32 may be 16, whose block is half full.
PI_INLINE int quantised_block(const float* x, int n, int i, int8_t* q, uint16_t* scale) {
  const bool whole = 32 * i + 32 <= n;
  f32x16 lo = f_load(x + 32 * i), hi = whole ? f_load(x + 32 * i + 16) : f_zero();
  uint16_t h[16];
  f16_saturated(h, f_mul(f_set(f_hmax(f_max(f_abs(lo), f_abs(hi)))), f_set(1.0f / 127.0f)));
  float d[16];
  f_store(d, f_load_f16(h));
  f32x16 by = f_set(d[0] > 0.0f ? 1.0f / d[0] : 0.0f);
  i_store_s8(q, i_round(f_mul(lo, by)));
  i_store_s8(q + 16, i_round(f_mul(hi, by)));
  *scale = h[0];
  return whole ? 32 : 16;
}

// Row `slot` of [32][n] values at `rows`, whose scales for Q8_0 are [32][blocks] at `scales`.
PI_INLINE void store_row(int type, uint8_t* rows, uint8_t* scales, int slot, const float* x, int n) {
  const int64_t at = (int64_t)slot * n;
  if (type == PI_KV_F32) memcpy((float*)rows + at, x, (size_t)n * 4);
  else if (type == PI_KV_F16)
    for (int i = 0; i < n; i += 16) f16_saturated((uint16_t*)rows + at + i, f_load(x + i));
  else {
    const int blocks = (n + 31) / 32;
    for (int i = 0; i < blocks; i++) {
      int8_t q[32];
      const int m = quantised_block(x, n, i, q, (uint16_t*)scales + slot * blocks + i);
      memcpy((int8_t*)rows + at + 32 * i, q, (size_t)m);
    }
  }
}

// Column `slot` of [n][32] keys at `columns`, whose scales for Q8_0 are [blocks][32] at `scales`.
PI_INLINE void store_column(int type, uint8_t* columns, uint8_t* scales, int slot, const float* x, int n) {
  if (type == PI_KV_F32)
    for (int i = 0; i < n; i++) ((float*)columns)[i * PI_PAGE + slot] = x[i];
  else if (type == PI_KV_F16)
    for (int i = 0; i < n; i += 16) {
      uint16_t h[16];
      f16_saturated(h, f_load(x + i));
      for (int j = 0; j < 16; j++) ((uint16_t*)columns)[(i + j) * PI_PAGE + slot] = h[j];
    }
  else
    for (int i = 0; 32 * i < n; i++) {
      int8_t q[32];
      const int m = quantised_block(x, n, i, q, (uint16_t*)scales + i * PI_PAGE + slot);
      for (int j = 0; j < m; j++) ((int8_t*)columns)[(32 * i + j) * PI_PAGE + slot] = q[j];
    }
}

PI_INLINE int64_t kv_element(int type) { return type == PI_KV_F32 ? 4 : type == PI_KV_F16 ? 2 : 1; }

void store_kv(int type, uint8_t* head, int slot, const float* k, const float* v, int n) {
  const int64_t bytes = kv_element(type) * n * PI_PAGE, scales = (int64_t)((n + 31) / 32) * PI_PAGE * 2;
  if (k) store_column(type, head, head + 2 * bytes, slot, k, n);
  if (v) store_row(type, head + bytes, head + 2 * bytes + scales, slot, v, n);
}

void store_latent(int type, uint8_t* head, int slot, const float* k, int n) {
  store_row(type, head, head + kv_element(type) * n * PI_PAGE, slot, k, n);
}

// Keys [n][32] and values [32][n] of a page; latent: [32][n], of which both are parts.
template <bool latent>
struct KvF32 {
  static constexpr bool by_slot = latent;
  const float *keys, *values;
  int n;
  PI_INLINE_MEMBER KvF32(const uint8_t* head, int n)
      : keys((const float*)head), values(keys + (latent ? 0 : (int64_t)n * PI_PAGE)), n(n) {}
  PI_INLINE_MEMBER f32x16 key(int i, int half) const { return f_load(keys + i * PI_PAGE + 16 * half); }
  PI_INLINE_MEMBER f32x16 value(int slot, int i) const { return f_load(values + slot * n + i); }
};

template <bool latent>
struct KvF16 {
  static constexpr bool by_slot = latent;
  const uint16_t *keys, *values;
  int n;
  PI_INLINE_MEMBER KvF16(const uint8_t* head, int n)
      : keys((const uint16_t*)head), values(keys + (latent ? 0 : (int64_t)n * PI_PAGE)), n(n) {}
  PI_INLINE_MEMBER f32x16 key(int i, int half) const { return f_load_f16(keys + i * PI_PAGE + 16 * half); }
  PI_INLINE_MEMBER f32x16 value(int slot, int i) const { return f_load_f16(values + slot * n + i); }
};

template <bool latent>
struct KvQ8_0 {
  static constexpr bool by_slot = latent;
  const int8_t *keys, *values;
  const uint16_t *key_scales, *value_scales;
  int n, blocks;
  PI_INLINE_MEMBER KvQ8_0(const uint8_t* head, int n)
      : keys((const int8_t*)head), values(keys + (latent ? 0 : (int64_t)n * PI_PAGE)), n(n), blocks((n + 31) / 32) {
    key_scales = (const uint16_t*)(values + (int64_t)n * PI_PAGE);
    value_scales = key_scales + (latent ? 0 : blocks * PI_PAGE);
  }
  PI_INLINE_MEMBER f32x16 key(int i, int half) const {
    return f_mul(i_float(i_load_s8(keys + i * PI_PAGE + 16 * half)),
                 f_load_f16(key_scales + i / 32 * PI_PAGE + 16 * half));
  }
  PI_INLINE_MEMBER f32x16 value(int slot, int i) const {
    uint16_t h[16];
    for (int j = 0; j < 16; j++) h[j] = value_scales[slot * blocks + i / 32];
    return f_mul(i_float(i_load_s8(values + slot * n + i)), f_load_f16(h));
  }
};

// A query row of a kv head, and the positions that it sees: from `first` to `last`.
struct QueryRow {
  const float* q;
  float* out;
  int64_t first, last;
  PI_INLINE_MEMBER QueryRow() {}
  PI_INLINE_MEMBER QueryRow(const PiAttention* a, int g, int64_t row) {
    const int64_t token = row / a->group, head = (int64_t)g * a->group + row % a->group;
    q = a->q + token * a->q_stride + head * a->head_pad;
    out = a->out + token * a->out_stride + head * a->head_dim;
    last = a->position + token;
    const int window = a->settings.window;
    first = window && last >= window ? last - (a->settings.chunked ? last % window : window - 1) : 0;
  }
};

// Scores of R rows against the keys of a page, one key per lane. The hardware prefetcher stops at the end of a page: few
// rows prefetch the next one, `ahead` bytes of it per iteration.
template <class Kv, int R>
PI_INLINE void score(const Kv& kv, int n, const float* const* q, const uint8_t* next, int64_t ahead, f32x16 (*s)[2]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) s[r][0] = s[r][1] = f_zero();
  for (int i = 0; i < n; i++) {
    f32x16 k0 = kv.key(i, 0), k1 = kv.key(i, 1);
    if constexpr (R <= 4)
      for (int64_t line = 0; line < ahead; line += 64) fetch_line(next + i * ahead + line);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      f32x16 x = f_set(q[r][i]);
      s[r][0] = f_fma(k0, x, s[r][0]);
      s[r][1] = f_fma(k1, x, s[r][1]);
    }
  }
}

// The same where keys are [slot][n]: products of whole rows, two keys at a time. A score has the same bits whatever R is.
// Those behind the first `slots` are zero. sums: room for R * 32.
template <class Kv, int R>
PI_INLINE void score_rows(const Kv& kv, int n, int slots, const float* const* q, float* sums, f32x16 (*s)[2]) {
  const f32x16 none = f_zero();
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
    f_store(sums + r * PI_PAGE, none);
    f_store(sums + r * PI_PAGE + 16, none);
  }
  for (int j = 0; j < slots; j += 2) {
    const int other = j + 1 < slots ? j + 1 : j;
    f32x16 a[R][2];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) a[r][0] = a[r][1] = f_zero();
    for (int i = 0; i < n; i += 16) {
      const f32x16 k0 = kv.value(j, i), k1 = kv.value(other, i);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        const f32x16 x = f_load(q[r] + i);
        a[r][0] = f_fma(k0, x, a[r][0]);
        a[r][1] = f_fma(k1, x, a[r][1]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      sums[r * PI_PAGE + j] = f_sum(a[r][0]);
      sums[r * PI_PAGE + other] = f_sum(a[r][1]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
    s[r][0] = f_load(sums + r * PI_PAGE);
    s[r][1] = f_load(sums + r * PI_PAGE + 16);
  }
}

// Out of line: few models cap their scores.
__attribute__((noinline)) void cap_all(float* x, int n, float limit) {
  for (int i = 0; i < n; i += 16) f_store(x + i, f_capped(f_load(x + i), limit));
}

// Scores of a page become limit * tanh(score / limit). aside: room for R * 32.
template <int R>
PI_INLINE void cap_scores(float limit, float* aside, f32x16 (*s)[2]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
    f_store(aside + r * PI_PAGE, s[r][0]);
    f_store(aside + r * PI_PAGE + 16, s[r][1]);
  }
  cap_all(aside, R * PI_PAGE, limit);
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
    s[r][0] = f_load(aside + r * PI_PAGE);
    s[r][1] = f_load(aside + r * PI_PAGE + 16);
  }
}

// Scores of a page, from position `base` on, that a row does not see: as good as minus infinity.
PI_INLINE void mask(const QueryRow& row, int64_t base, f32x16* s) {
  const int end = row.last - base + 1 < PI_PAGE ? (int)(row.last - base + 1) : (int)PI_PAGE;
  const int begin = row.first > base ? (row.first - base < PI_PAGE ? (int)(row.first - base) : (int)PI_PAGE) : 0;
  f32x16 none = f_set(-3e38f);
#pragma GCC unroll 2
  for (int h = 0; h < 2; h++) {
    s[h] = f_keep_below(s[h], end - 16 * h, none);
    if (begin) s[h] = f_keep_below(none, begin - 16 * h, s[h]);
  }
}

// Online softmax of R rows: their weights of a page from its scores. largest, total: of a row's scores and weights so
// far; shrink: the factor of what was added up before, whose weights were relative to a smaller score.
template <int R>
PI_INLINE void weigh(f32x16 (*s)[2], float* largest, float* total, float* shrink, float* weights) {
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
    float top = f_hmax(f_max(s[r][0], s[r][1]));
    top = top > largest[r] ? top : largest[r];
    shrink[r] = largest[r] - top;
    largest[r] = top;
  }
  f_store(shrink, f_exp(f_load(shrink)));
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
    f32x16 m = f_set(largest[r]), w0 = f_exp(f_sub(s[r][0], m)), w1 = f_exp(f_sub(s[r][1], m));
    total[r] = total[r] * shrink[r] + f_sum(f_add(w0, w1));
    f_store(weights + r * PI_PAGE, w0);
    f_store(weights + r * PI_PAGE + 16, w1);
  }
}

// acc = shrink * acc + weights . the values of a page's first `slots`, one dimension per lane, 16 * `Blocks` of them.
template <class Kv, int R, int Blocks>
PI_INLINE void add_values(const Kv& kv, int n, int i, int slots, const float* weights, const float* shrink,
                          float* acc) {
  f32x16 o[R][Blocks];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
    f32x16 by = f_set(shrink[r]);
#pragma GCC unroll 2
    for (int b = 0; b < Blocks; b++) o[r][b] = f_mul(f_load(acc + r * n + i + 16 * b), by);
  }
  for (int j = 0; j < slots; j++) {
    f32x16 v[Blocks];
#pragma GCC unroll 2
    for (int b = 0; b < Blocks; b++) v[b] = kv.value(j, i + 16 * b);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      f32x16 w = f_set(weights[r * PI_PAGE + j]);
#pragma GCC unroll 2
      for (int b = 0; b < Blocks; b++) o[r][b] = f_fma(v[b], w, o[r][b]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 2
    for (int b = 0; b < Blocks; b++) f_store(acc + r * n + i + 16 * b, o[r][b]);
  }
}

// out = acc / total.
PI_INLINE void divide(const float* acc, float total, float* out, int head_dim) {
  f32x16 by = f_set(total);
  for (int i = 0; i < head_dim; i += 16) {
    f32x16 v = f_div(f_load(acc + i), by);
    if (i + 16 <= head_dim) f_store(out + i, v);
    else f_store_n(out + i, v, head_dim - i);
  }
}

// R query rows against every page they see. Masked keys have weight exactly 0, so a row's bits do not depend on the
// other rows.
template <class Kv, int R>
void attend(const PiAttention* a, int g, int64_t r0, float* scratch) {
  const int n = a->head_pad, wide = Kv::by_slot ? (int)pi_round_up(a->head_dim, PI_LANES) : n;  // of keys, of values
  QueryRow rows[R];
  const float* q[R];
  float *acc = scratch, *weights = scratch + PI_ATTENTION_ROWS * wide, largest[R], total[R];
  int64_t page = INT64_MAX, last = 0;
  for (int r = 0; r < R; r++) {
    rows[r] = QueryRow(a, g, r0 + r);
    q[r] = rows[r].q;
    if (rows[r].first / PI_PAGE < page) page = rows[r].first / PI_PAGE;
    if (rows[r].last > last) last = rows[r].last;
    largest[r] = a->sinks ? a->sinks[g * a->group + (r0 + r) % a->group] : -1e30f;
    total[r] = a->sinks ? 1.0f : 0.0f;  // e^(sink - largest)
  }
  for (int64_t i = 0; i < (int64_t)R * wide; i += 16) f_store(acc + i, f_zero());
  for (; page <= last / PI_PAGE; page++) {
    const auto head_of = [&](int64_t of) { return a->kv + a->pages[of] * a->page_bytes + g * a->head_bytes; };
    const Kv kv(head_of(page), n);
    const int64_t base = page * PI_PAGE;
    const int slots = last - base + 1 < PI_PAGE ? (int)(last - base + 1) : (int)PI_PAGE;
    f32x16 s[R][2];
    if constexpr (Kv::by_slot) score_rows<Kv, R>(kv, n, slots, q, weights, s);
    else score<Kv, R>(kv, n, q, head_of(page < last / PI_PAGE ? page + 1 : page), a->head_bytes / n, s);
    if (a->settings.score_cap) cap_scores<R>(a->settings.score_cap, weights, s);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) mask(rows[r], base, s[r]);
    float shrink[16] = {0};
    weigh<R>(s, largest, total, shrink, weights);
    int i = 0;
    for (; i + 16 < wide; i += 32) add_values<Kv, R, 2>(kv, wide, i, slots, weights, shrink, acc);
    if (i < wide) add_values<Kv, R, 1>(kv, wide, i, slots, weights, shrink, acc);
  }
  for (int r = 0; r < R; r++) divide(acc + r * wide, total[r], rows[r].out, a->head_dim);
}

// Rows in tiles of the sizes R..., largest first.
template <class Kv, int... R>
void attend_in_tiles(const PiAttention* a, int g, int64_t r, int64_t r1, float* scratch) {
  const auto tiles_of = [&](auto rows) {
    if constexpr (rows.value <= TILE_A)
      for (; r + rows.value <= r1; r += rows.value) attend<Kv, rows.value>(a, g, r, scratch);
  };
  (tiles_of(Index<R>{}), ...);
}

template <class Kv>
void attention(const PiAttention* a, int g, int64_t r0, int64_t r1, float* scratch) {
  attend_in_tiles<Kv, 12, 6, 4, 3, 2, 1>(a, g, r0, r1, scratch);
}

// The heads that share a latent are many, and a cache in F32 is read by few: for these fewer sizes do.
template <class Kv>
void attention_in_few_tiles(const PiAttention* a, int g, int64_t r0, int64_t r1, float* scratch) {
  attend_in_tiles<Kv, 12, 4, 3, 1>(a, g, r0, r1, scratch);
}

}  // namespace

PI_KERNELS(attention) {
  to->store_kv = store_kv;
  to->store_latent = store_latent;
  to->attention[PI_KV_F32] = attention_in_few_tiles<KvF32<false>>;
  to->attention[PI_KV_F16] = attention<KvF16<false>>;
  to->attention[PI_KV_Q8_0] = attention<KvQ8_0<false>>;
  to->latent_attention[PI_KV_F32] = attention_in_few_tiles<KvF32<true>>;
  to->latent_attention[PI_KV_F16] = attention_in_few_tiles<KvF16<true>>;
  to->latent_attention[PI_KV_Q8_0] = attention_in_few_tiles<KvQ8_0<true>>;
}
