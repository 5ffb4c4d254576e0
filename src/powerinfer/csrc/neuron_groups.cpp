// Rows added up in groups of neurons that share their scales.
#include "neuron_codes.h"

namespace {

// The reads of add_groups, line by line in the order of addresses within a group, so that the hardware prefetcher
// helps. Rows of the groups in turn, each group's scales after its rows.
struct Ahead {
  const PiRows* all;
  const int32_t* index;
  int64_t n, j = 0, line = 0, lines;
  const uint8_t* at;
  bool scales = false;
  PI_INLINE_MEMBER Ahead(const PiRows* p, const int32_t* list, int64_t count)
      : all(p), index(list), n(count), lines(pi_row_bytes(p->type, p->k) / 64), at(pi_row(p, list[0])) {}
  PI_INLINE_MEMBER void ask(int64_t count) {
    while (count > 0 && at) {
      const int64_t end = line + count < lines ? line + count : lines;
      count -= end - line;
      for (; line < end; line++) fetch_line(at + 64 * line);
      if (line == lines) next();
    }
  }
  void next() {
    const int32_t group = index[j] / PI_GROUP;
    const bool more = j + 1 < n;
    line = 0;
    scales = !scales && !(more && index[j + 1] / PI_GROUP == group);
    if (scales) {
      at = pi_shared(all, index[j]);
      lines = pi_shared_bytes(all->type, all->k) / 64;
    } else {
      at = more ? pi_row(all, index[++j]) : nullptr;
      lines = pi_row_bytes(all->type, all->k) / 64;
    }
  }
};

// Rows of a group, in quads, and the factors by which they are added to a token's output, zeros where a quad has fewer.
struct GroupStep {
  const uint8_t* row[PI_GROUP];
  int32_t by[PI_GROUP / 4], sum;  // sum: of the factors
  int quads;
};

// Four rows and four factors form the operands of one integer product, so a column's sum over the group is an integer,
// and the scales that its rows share are read and multiplied once.
template <int TYPE>
PI_INLINE void add_some(const GroupStep& g, const uint8_t* scales, float d, int64_t k, int64_t lines, Ahead& ahead,
                        float* out) {
  using C = Codes<TYPE>;
  const f32x16 by = f_set(d), of_mins = f_set(d * (float)g.sum);
  const uint8_t* const mins = scales + 2 * pi_round_up(k, 128);
  const int64_t fifths = pi_round_up(k, 128) / 2;
  u8x64 bits[C::FIVE ? PI_GROUP / 4 : 1][4];  // of 512 columns
  for (int64_t c = 0; c < k; c += 128) {
    ahead.ask(C::FIVE && c % 512 == 0 ? lines + 4 * g.quads : lines);
    if constexpr (C::FIVE)
      if (c % 512 == 0)
        for (int r = 0; r < g.quads; r++) load_quads(g.row + 4 * r, fifths + c / 8, bits[r]);
    i32x16 s[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) s[i] = C::start(g.sum);
    for (int r = 0; r < g.quads; r++) {
      const uint8_t* const* row = g.row + 4 * r;
      u8x64 z[C::LINES][4];
#pragma GCC unroll 2
      for (int l = 0; l < C::LINES; l++) load_quads(row, C::EIGHT ? c + 64 * l : c / 2, z[l]);
      const u8x64 fifth = bits[C::FIVE ? r : 0][C::FIVE ? c % 512 / 128 : 0];
      unroll<0, 8>([&](auto i) __attribute__((always_inline)) {
        constexpr int I = i.value;
        const u8x64 codes = C::EIGHT ? z[I / 4 % C::LINES][I % 4] : z[0][I / 2];
        s[I] = C::dot(s[I], C::template columns<I>(codes, fifth), g.by[r]);
      });
    }
    const auto finish = [&](int i) __attribute__((always_inline)) {
      const int64_t column = c + 16 * i;
      f32x16 v = f_fma(i_float(s[i]), f_mul(C::scale(scales, column), by), f_load(out + column));
      if constexpr (C::FACTS.m >= 0) v = f_fma(f_load_f16(mins + 2 * column), of_mins, v);
      f_store(out + column, v);
    };
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
      if (16 * i < k - c) finish(i);
  }
}

template <int TYPE>
void add_groups_of(const PiRows* all, const int32_t* index, int64_t n, const int8_t* q, int64_t ldq, const float* d,
                   int64_t ldd, int64_t tokens, float* out, int64_t ldo) {
  using C = Codes<TYPE>;
  enum { AHEAD = 256 };  // lines
  if (n == 0) return;
  Ahead ahead(all, index, n);
  ahead.ask(AHEAD);
  for (int64_t begin = 0, end; begin < n; begin = end, d++) {
    const int32_t group = index[begin] / PI_GROUP;
    GroupStep g{};
    for (end = begin; end < n && index[end] / PI_GROUP == group; end++) g.row[end - begin] = pi_row(all, index[end]);
    const int rows = (int)(end - begin);
    g.quads = (rows + 3) / 4;
    for (int r = rows; r < 4 * g.quads; r++) g.row[r] = g.row[0];
    for (int64_t t = 0; t < tokens; t++) {
      memcpy(g.by, q + t * ldq + begin, (size_t)rows);
      g.sum = 0;
      for (int64_t j = begin; j < end; j++) g.sum += q[t * ldq + j];
      add_some<TYPE>(g, pi_shared(all, index[begin]), d[t * ldd], all->k, t ? 0 : rows * C::LINES + C::SCALES, ahead,
                     out + t * ldo);
    }
  }
}

template <int TYPE>
void add_type(const PiRows* all, const int32_t* index, int64_t n, const int8_t* q, int64_t ldq, const float* d,
              int64_t ldd, int64_t tokens, float* out, int64_t ldo) {
  if constexpr (PI_TYPES[TYPE].rows & PI_ROWS_X32) add_groups_of<TYPE>(all, index, n, q, ldq, d, ldd, tokens, out, ldo);
}

void add_groups(const PiRows* all, const int32_t* index, int64_t n, const int8_t* q, int64_t ldq, const float* d,
                int64_t ldd, int64_t tokens, float* out, int64_t ldo) {
#define PI_ADD_TYPE(name, ...) \
  case PI_##name##X32: return add_type<PI_##name>(all, index, n, q, ldq, d, ldd, tokens, out, ldo);
  switch (all->type) { POWERINFER_TYPES(PI_ADD_TYPE) }
#undef PI_ADD_TYPE
}

}  // namespace

PI_KERNELS(neuron_groups) { to->neurons.add_groups = add_groups; }
