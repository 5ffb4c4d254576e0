// Rows added up in groups of neurons that share their scales.
#include "neuron_rows.h"

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
  const f32x16 by = f_set(d), of_mins = f_set(d * (float)g.sum);
  const uint8_t* const mins = scales + 2 * pi_round_up(k, 128);
  for (int64_t c = 0; c < k; c += 128) {
    ahead.ask(lines);
    i32x16 s[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) s[i] = i_set(TYPE == PI_Q4_0X32 ? -8 * g.sum : 0);
    for (int r = 0; r < g.quads; r++) {
      const uint8_t* const* row = g.row + 4 * r;
      u8x64 z[4];
      b_quads(b_load(row[0] + c / 2), b_load(row[1] + c / 2), b_load(row[2] + c / 2), b_load(row[3] + c / 2), z);
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        s[2 * i] = dot_u(s[2 * i], b_low4(z[i]), g.by[r]);
        s[2 * i + 1] = dot_u(s[2 * i + 1], b_high4(z[i]), g.by[r]);
      }
    }
    const auto finish = [&](int i) __attribute__((always_inline)) {
      const int64_t column = c + 16 * i;
      f32x16 v = f_fma(i_float(s[i]), f_mul(f_load_f16(scales + 2 * column), by), f_load(out + column));
      if constexpr (TYPE == PI_Q4_1X32) v = f_fma(f_load_f16(mins + 2 * column), of_mins, v);
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
  enum { AHEAD = 256, SCALES = TYPE == PI_Q4_1X32 ? 8 : 4 };  // lines; rows that are as long as the scales of a group
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
      add_some<TYPE>(g, pi_shared(all, index[begin]), d[t * ldd], all->k, t ? 0 : rows + SCALES, ahead, out + t * ldo);
    }
  }
}

void add_groups(const PiRows* all, const int32_t* index, int64_t n, const int8_t* q, int64_t ldq, const float* d,
                int64_t ldd, int64_t tokens, float* out, int64_t ldo) {
  const auto add = all->type == PI_Q4_0X32 ? add_groups_of<PI_Q4_0X32> : add_groups_of<PI_Q4_1X32>;
  add(all, index, n, q, ldq, d, ldd, tokens, out, ldo);
}

}  // namespace

PI_KERNELS(neuron_groups) { to->neurons.add_groups = add_groups; }
