#include "bundles.h"

#include <math.h>
#include <string.h>

#include <algorithm>

#include "panels.h"
#include "weights.h"

namespace {

// Position of the code of element i in a row of k elements (table.h): the byte, and whether its high nibble.
int64_t code_at(int type, int kind, int64_t k, int64_t i, bool* high) {
  *high = false;
  if (type == PI_Q8_0 && kind == PI_ADD) return i;
  const int64_t j = i % 128;
  if (pi_across(type) >= 0) {
    const int64_t l = j % 16;
    if (pi_bits(type) == 8) return i / 64 * 64 + l / 4 * 16 + i % 64 / 16 * 4 + l % 4;
    *high = j / 16 % 2;
    return i / 128 * 64 + l / 4 * 16 + j / 32 * 4 + l % 4;
  }
  if (kind == PI_ADD) {
    *high = j / 16 % 2;
    return i / 128 * 64 + j % 16 * 4 + j / 32;
  }
  const int64_t b = i / 512 * 16, lanes = std::min(k / 32 - b, (int64_t)16), block = i / 32 - b, v = i % 32 / 4;
  *high = type != PI_Q8_0 && v >= 4;
  return b * (type == PI_Q8_0 ? 32 : 16) + lanes * 4 * (type == PI_Q8_0 ? v : v % 4) + block * 4 + i % 4;
}

// Position of the fifth bit of the code of element i: the byte, and its bit there.
int64_t fifth_at(int type, int64_t k, int64_t i, int* bit) {
  const int64_t line = pi_round_up(k, 128) / 2 + i / 512 * 64;
  if (pi_across(type) >= 0) {
    const int64_t l = i % 16;
    *bit = (int)(i % 128 / 16);
    return line + l / 4 * 16 + i % 512 / 128 * 4 + l % 4;
  }
  const int64_t lanes = std::min(k / 32 - i / 512 * 16, (int64_t)16), l = i / 32 % 16, v = i % 32 / 4;
  const int64_t word =
      pi_lanes_close(lanes) ? v % 4 * lanes + l : l;  // of the code, among those of its low or high half
  *bit = (int)(pi_lanes_close(lanes) ? word / 16 + (v >= 4 ? 4 : 0) : v);
  return line + word % 16 * 4 + i % 4;
}

// Words of 4 codes of stored blocks, from `first` on, to a line of a row (table.h); more lines follow.
template <int WORDS>
void put_codes(const uint8_t* first, int64_t bytes, int64_t lanes, uint8_t* line) {
  for (int64_t l = 0; l < lanes; l++, first += bytes)
    for (int64_t v = 0; v < WORDS; v++) memcpy(line + (v * lanes + l) * 4, first + 4 * v, 4);
}

// The fifth bits of a stored block to those of a line, which are zeros at first where lanes lie close. l: which block of
// the line it is.
void put_fifths(const uint8_t* bits, int64_t lanes, int64_t l, uint8_t* line) {
  uint32_t stored, all = 0, word;  // all: of code 4 g + j at bit g of byte j
  memcpy(&stored, bits, 4);
  for (int g = 0; g < 8; g++) all |= bits_as_bytes(stored >> 4 * g & 15) << g;
  if (!pi_lanes_close(lanes)) {
    memcpy(line + 4 * l, &all, 4);
    return;
  }
  for (int64_t g = 0; g < 8; g++) {
    const int64_t at = g % 4 * lanes + l;
    memcpy(&word, line + at % 16 * 4, 4);
    word |= (all >> g & 0x01010101u) << (at / 16 + (g >= 4 ? 4 : 0));
    memcpy(line + at % 16 * 4, &word, 4);
  }
}

// Block b of a stored row as one of down has it.
void put_added(int type, const uint8_t* codes, int64_t b, uint8_t* row) {
  if (pi_bits(type) == 8) {
    memcpy(row + 32 * b, codes, 32);
    return;
  }
  for (int64_t i = 0; i < 16; i++) row[b / 4 * 64 + 4 * i + b % 4] = codes[i];
}

// A stored row of blocks of 32, which lie along it, as one of gate or up, up to 16 blocks at a time.
void put_multiplied(int type, int64_t k, const uint8_t* src, uint8_t* row) {
  const PiTypeFacts& t = pi_facts(type);
  const int64_t blocks = k / 32, fifths = pi_round_up(k, 128) / 2;
  for (int64_t b = 0; b < blocks; b += 16) {
    const int64_t lanes = std::min(blocks - b, (int64_t)16);
    const uint8_t* const first = src + b * t.bytes + t.at;
    if (pi_bits(type) == 8) {
      put_codes<8>(first, t.bytes, lanes, row + b * 32);
      continue;
    }
    put_codes<4>(first + (pi_bits(type) == 5 ? 4 : 0), t.bytes, lanes, row + b * 16);
    for (int64_t l = 0; l < lanes && pi_bits(type) == 5; l++)
      put_fifths(first + l * t.bytes, lanes, l, row + fifths + b * 4);
  }
}

bool wants_lanes(int type) { return pi_block(type) > 1 && !pi_as_stored(type) && pi_row_type(type, PI_DOT); }

// A block in progress: `n` neurons are left of it, as a table of all tokens or, where few of its cells count, as
// `count` pairs.
struct Work {
  const PiKernels* kernels;
  const Bundles& b;
  const PiActs* x;
  int64_t tokens;
  NeuronBlock& block;
  int64_t n;
  int64_t count = 0;
  bool pairs = false;

  float* h(int64_t t) const { return block.h + t * NeuronBlock::NEURONS; }
  float* more(int64_t t) const { return block.more + t * NeuronBlock::NEURONS; }

  void dots(const PiRows& rows, const std::vector<float>& bias, float* out) const {
    kernels->neurons.dots[rows.type](&rows, block.index, n, x, tokens, out, NeuronBlock::NEURONS);
    if (bias.empty()) return;
    for (int64_t t = 0; t < tokens; t++)
      for (int64_t j = 0; j < n; j++) out[t * NeuronBlock::NEURONS + j] += bias[(size_t)block.index[j]];
  }

  // The thresholds of `count` listed neurons, in `more`, which is free before up is multiplied; null: none of their own.
  template <class NeuronOf>
  const float* limits(int64_t count, const NeuronOf& neuron_of) const {
    if (b.spec.limits.empty()) return nullptr;
    for (int64_t i = 0; i < count; i++) block.more[i] = b.spec.limits[(size_t)neuron_of(i)];
    return block.more;
  }

  // Activations of the first product; zero where a neuron does not count for a token.
  void activate(const Firing& f) {
    if (!f.known) dots(b.first(), b.first_bias(), block.h);
    const float* const own = f.known ? nullptr : limits(n, [&](int64_t j) { return block.index[j]; });
    for (int64_t t = 0; t < tokens; t++) {
      float* a = h(t);
      if (f.known)
        for (int64_t j = 0; j < n; j++) a[j] = f.known[t * f.ld + block.index[j]];
      else b.spec.activation.apply_first(kernels, a, pi_round_up(n, PI_LANES), own);
      if (!f.known && f.groups.of)
        for (int64_t j = 0; j < n; j++) a[j] *= f.groups.of[t * f.groups.ld + block.index[j] / f.groups.each];
      if (f.selected_by)
        for (int64_t j = 0; j < n; j++)
          if (!(f.selected_by[block.index[j]] >> t & 1)) a[j] = 0.0f;
      if (f.threshold > 0.0f)
        for (int64_t j = 0; j < n; j++)
          if (fabsf(a[j]) <= f.threshold) a[j] = 0.0f;
    }
  }

  void multiply_up() {
    dots(b.up, b.spec.up_bias, block.more);
    for (int64_t t = 0; t < tokens; t++) {
      float *a = h(t), *u = more(t);
      b.spec.activation.apply_second(kernels, u, pi_round_up(n, PI_LANES));
      for (int64_t j = 0; j < n; j++) a[j] *= u[j];
      b.spec.drop_products_of(a, n, [&](int64_t j) { return block.index[j]; });
    }
  }

  // Drops neurons that are zero for every token; returns the number of nonzero (neuron, token) cells.
  int64_t drop_zeros() {
    int64_t counts[PI_NEURON_TOKENS] = {0}, sum = 0;
    n = kernels->neurons.keep(block.h, NeuronBlock::NEURONS, tokens, n, 1, 0.0f, 0, block.position, counts);
    for (int64_t j = 0; j < n; j++) block.index[j] = block.index[block.position[j]];
    for (int64_t t = 0; t < tokens; t++) {
      float* a = h(t);
      for (int64_t j = 0; j < n; j++) a[j] = a[block.position[j]];
      sum += counts[t];
    }
    return sum;
  }

  // Whether this number of cells is faster as pairs than as a table.
  bool few(int64_t cells) const { return tokens > 1 && 3 * cells <= n * tokens; }

  // Makes pairs of the cells in `tokens_of`, those of a neuron together.
  void list_pairs() {
    count = 0;
    for (int64_t j = 0; j < n; j++)
      for (uint32_t left = block.tokens_of[j]; left; left &= left - 1)
        block.pairs[count++] = {block.index[j], __builtin_ctz(left)};
  }

  // Makes pairs of the selected cells, if they are few.
  bool take_selected(const Firing& f) {
    int64_t cells = 0;
    const uint32_t all = UINT32_MAX >> (PI_NEURON_TOKENS - tokens);  // who is late may read what is of another step
    for (int64_t j = 0; j < n; j++)
      cells += __builtin_popcount(block.tokens_of[j] = f.selected_by[block.index[j]] & all);
    if (!few(cells)) return false;
    list_pairs();
    return true;
  }

  // Makes pairs of the nonzero cells of the table.
  void take_active() {
    std::fill(block.tokens_of, block.tokens_of + n, 0u);
    for (int64_t t = 0; t < tokens; t++) {
      int64_t own = 0;
      kernels->neurons.keep(h(t), 0, 1, n, 1, 0.0f, 0, block.position, &own);
      for (int64_t i = 0; i < own; i++) block.tokens_of[block.position[i]] |= 1u << t;
    }
    for (int64_t j = 0, i = 0; j < n; j++)
      for (uint32_t left = block.tokens_of[j]; left; left &= left - 1) block.more[i++] = h(__builtin_ctz(left))[j];
    list_pairs();
    memcpy(block.h, block.more, (size_t)count * sizeof(float));
  }

  void dot_pairs(const PiRows& rows, const std::vector<float>& bias, float* out) const {
    kernels->neurons.dot_pairs[rows.type](&rows, block.pairs, count, x, out);
    if (!bias.empty())
      for (int64_t i = 0; i < count; i++) out[i] += bias[(size_t)block.pairs[i].neuron];
  }

  void activate_pairs(const Firing& f) {
    float* a = block.h;
    if (f.known) {
      for (int64_t i = 0; i < count; i++) a[i] = f.known[block.pairs[i].token * f.ld + block.pairs[i].neuron];
    } else {
      dot_pairs(b.first(), b.first_bias(), a);
      const float* const own = limits(count, [&](int64_t i) { return block.pairs[i].neuron; });
      b.spec.activation.apply_first(kernels, a, pi_round_up(count, PI_LANES), own);
      for (int64_t i = 0; i < count && f.groups.of; i++)
        a[i] *= f.groups.of[block.pairs[i].token * f.groups.ld + block.pairs[i].neuron / f.groups.each];
    }
    if (f.threshold > 0.0f)
      for (int64_t i = 0; i < count; i++)
        if (fabsf(a[i]) <= f.threshold) a[i] = 0.0f;
  }

  void multiply_up_pairs() {
    dot_pairs(b.up, b.spec.up_bias, block.more);
    b.spec.activation.apply_second(kernels, block.more, pi_round_up(count, PI_LANES));
    for (int64_t i = 0; i < count; i++) block.h[i] *= block.more[i];
    b.spec.drop_products_of(block.h, count, [&](int64_t i) { return block.pairs[i].neuron; });
  }

  // Drops pairs that are zero; returns the number of the others.
  int64_t drop_zero_pairs() {
    int64_t left = 0;
    n = 0;
    for (int64_t i = 0; i < count; i++) {
      if (block.h[i] == 0.0f) continue;
      n += left == 0 || block.pairs[left - 1].neuron != block.pairs[i].neuron;
      block.pairs[left] = block.pairs[i];
      block.h[left++] = block.h[i];
    }
    return count = left;
  }

  // Activations of the first `n` of a list. Returns the number of cells that are not zero; the others are left out.
  __attribute__((always_inline)) int64_t fire(const int32_t* list, const Firing& f, NeuronCounts& counts) {
    memcpy(block.index, list, (size_t)n * sizeof *list);
    if (!f.known) counts.first += n;
    pairs = f.selected_by && take_selected(f);
    if (pairs) activate_pairs(f);
    else activate(f);
    return drop();
  }

  // The same of h.
  __attribute__((always_inline)) int64_t multiply(const int32_t* list, const Firing& f, NeuronCounts& counts) {
    const int64_t active = fire(list, f, counts);
    if (!b.gated() || f.multiplied) return active;
    counts.up += n;
    if (pairs) multiply_up_pairs();
    else multiply_up();
    return drop();
  }

  int64_t drop() {
    if (pairs) return drop_zero_pairs();
    const int64_t cells = drop_zeros();
    pairs = few(cells);
    if (pairs) take_active();
    return cells;
  }

  // Puts what is left of a list of `all` in its places.
  void put(const int32_t* list, int64_t all, float* to, int64_t ld) const {
    for (int64_t t = 0; t < tokens; t++)
      for (int64_t i = 0; i < all; i++) to[t * ld + list[i]] = 0.0f;
    if (pairs)
      for (int64_t i = 0; i < count; i++) to[block.pairs[i].token * ld + block.pairs[i].neuron] = block.h[i];
    else
      for (int64_t t = 0; t < tokens; t++)
        for (int64_t i = 0; i < n; i++) to[t * ld + block.index[i]] = h(t)[i];
  }

  // Lists what is left; returns how many neurons.
  int64_t list(int32_t* out) const {
    if (!pairs) memcpy(out, block.index, (size_t)n * sizeof *out);
    for (int64_t i = 0, at = 0; pairs && i < count; i++)
      if (i == 0 || block.pairs[i - 1].neuron != block.pairs[i].neuron) out[at++] = block.pairs[i].neuron;
    return n;
  }

  // Adds the neurons of each group at once, with h in 8 bits as on the dense path. Returns the number of groups.
  int64_t add_groups(float* out, int64_t ldo) const {
    int64_t groups = 0;
    for (int64_t j = 0, end; j < n; j = end, groups++) {
      for (end = j + 1; end < n && block.index[end] / PI_GROUP == block.index[j] / PI_GROUP;) end++;
      for (int64_t t = 0; t < tokens; t++) {
        float whole[PI_GROUP] = {0}, sum;
        int8_t codes[PI_GROUP];
        int16_t sums[2];
        PiActs to;
        to.q = codes;
        to.d = block.d + t * NeuronBlock::NEURONS + groups;
        to.sd = &sum;
        to.s = sums;
        for (int64_t i = j; i < end; i++) whole[block.index[i] % PI_GROUP] = h(t)[i];
        kernels->forms(whole, PI_GROUP, PI_FORM_Q8, &to);
        for (int64_t i = j; i < end; i++) block.q[t * NeuronBlock::NEURONS + i] = codes[block.index[i] % PI_GROUP];
      }
    }
    kernels->neurons.add_groups(&b.down, block.index, n, block.q, NeuronBlock::NEURONS, block.d, NeuronBlock::NEURONS,
                                tokens, out, ldo);
    return groups;
  }

  // The same for pairs: group by group, for each token its neurons.
  int64_t add_groups_of_pairs(float* out, int64_t ldo) const {
    float* const all = block.more;
    memcpy(all, block.h, (size_t)count * sizeof(float));
    int64_t groups = 0;
    for (int64_t i = 0, end; i < count; i = end, groups++) {
      uint32_t left = 0;
      for (end = i; end < count && block.pairs[end].neuron / PI_GROUP == block.pairs[i].neuron / PI_GROUP; end++)
        left |= 1u << block.pairs[end].token;
      for (; left; left &= left - 1) {
        const int32_t t = __builtin_ctz(left);
        Work one{kernels, b, x, 1, block, 0};
        for (int64_t j = i; j < end; j++) {
          if (block.pairs[j].token != t) continue;
          block.index[one.n] = block.pairs[j].neuron;
          block.h[one.n++] = all[j];
        }
        one.add_groups(out + t * ldo, ldo);
      }
    }
    return groups;
  }
};

// How many of `left` listed neurons to take at once: where rows of down share scales, whole groups.
int64_t block_of(const Bundles& b, const int32_t* index, int64_t left, int64_t tokens) {
  int64_t n = NeuronBlock::most(tokens);
  if (left <= n) return left;
  if (pi_across(b.down.type) >= 0)
    while (index[n - 1] / PI_GROUP == index[n] / PI_GROUP) n--;
  return n;
}

}  // namespace

void Bundles::keep(std::vector<int32_t> own) {
  PiRows& rows = gated() ? gate : up;
  const int64_t bytes = pi_row_bytes(rows.type, rows.k), n = (int64_t)own.size();
  check(firsts || n * bytes / 64 <= UINT32_MAX, "so many first rows cannot be had");
  members = std::move(own);
  if (firsts) return;
  n_firsts = 0;
  rows.groups = slots->memory();  // not null: else there would be no gate
  own_firsts.reset();
  own_firsts = std::make_shared<Mapping>(std::max(n, (int64_t)1) * bytes);
  first_lines.assign((size_t)neurons, 0);
  for (int64_t i = 0; i < n; i++) first_lines[(size_t)members[(size_t)i]] = (uint32_t)(i * bytes / 64);
  rows = {own_firsts->data(), 0, bytes, 0, rows.k, rows.type, first_lines.data()};
}

void Bundles::add_firsts(const uint8_t* rows, int64_t n) {
  const int64_t bytes = pi_row_bytes(first().type, first().k);
  check((bool)own_firsts, "the first rows of these neurons are elsewhere");
  check(n >= 0 && n <= (int64_t)members.size() - n_firsts, "there are not so many neurons");
  memcpy(own_firsts->data() + n_firsts * bytes, rows, (size_t)(n * bytes));
  n_firsts += n;
}

void fill_lanes(const PiActs* x, int64_t tokens, uint8_t* out) {
  const int64_t nb = x->k / 32;
  for (int64_t t = 0; t < tokens; t++) {
    for (int64_t b = 0; b < nb; b += 16, out += PI_LANES_STEP) {
      const int64_t lanes = std::min(nb - b, (int64_t)16);
      if (lanes < 16) memset(out, 0, PI_LANES_STEP);
      const bool close = pi_lanes_close(lanes);
      const int64_t apart = 4 * (close ? lanes : 16);
      for (int64_t l = 0; l < lanes; l++) {
        const int64_t block = t * nb + b + l;
        for (int64_t v = 0; v < 8; v++) memcpy(out + apart * v + 4 * l, x->q + 32 * block + 4 * v, 4);
        const int32_t sum = x->s[2 * block] + x->s[2 * block + 1];
        memcpy(out + PI_LANES_SUM + 4 * l, &sum, 4);
        for (int64_t i = l; i < (close ? 16 : l + 1); i += lanes) memcpy(out + PI_LANES_D + 4 * i, x->d + block, 4);
      }
      if (lanes <= 2)
        for (int64_t half = 0; half < 2; half++)
          memcpy(out + PI_LANES_HALVES + 64 * half, out + 4 * apart * half, (size_t)(4 * apart));
    }
  }
}

int64_t bundle_rows_source_bytes(int type, int64_t rows, int64_t k) {
  const int across = pi_across(type);
  return across < 0 ? rows * stored_row_bytes(type, k)
                    : (rows + PI_GROUP - 1) / PI_GROUP * stored_row_bytes(across, PI_GROUP * k);
}

void pack_bundle_rows(int type, int kind, int64_t rows, int64_t k, const uint8_t* src, uint8_t* group, int64_t pitch,
                      int64_t at) {
  const PiTypeFacts& t = pi_facts(type);
  if (pi_across(type) >= 0) return pack_group_across(type, k, src, t.bytes, group, pitch, at);
  const int64_t codes = pi_row_codes(type, k), bytes = stored_row_bytes(type, k);
  for (int64_t r = 0; r < PI_GROUP; r++) memset(group + r * pitch + at, 0, (size_t)pi_row_bytes(type, k));
  for (int64_t r = 0; r < rows; r++, src += bytes) {
    uint8_t* row = group + r * pitch + at;
    if (type == PI_F16 || type == PI_BF16 || pi_as_stored(type)) {
      memcpy(row, src, (size_t)bytes);
      continue;
    }
    if (kind == PI_DOT) put_multiplied(type, k, src, row);
    for (int64_t b = 0; b < k / 32; b++) {
      const uint8_t* block = src + b * t.bytes;
      if (kind == PI_ADD) put_added(type, block + t.at, b, row);
      memcpy(row + codes + 2 * b, block + t.d, 2);
      if (t.m >= 0) memcpy(row + codes + pi_row_scales(k) + 2 * b, block + t.m, 2);
    }
  }
}

void bundle_row_order(int type, int kind, int64_t k, int32_t* out) {
  bool high;
  for (int64_t i = 0; i < k; i++)
    out[i] = (int32_t)(type == PI_F16 || type == PI_BF16 ? 2 * i : code_at(type, kind, k, i, &high));
}

void unpack_bundle_row(int kind, const PiRows& rows, int64_t i, float* out) {
  const int type = rows.type;
  const int64_t k = rows.k, codes = pi_row_codes(type, k);
  const uint8_t* row = pi_row(&rows, (int32_t)i);
  if (type == PI_F16 || type == PI_BF16 || pi_as_stored(type)) return unpack_row(type, row, k, out);
  const PiTypeFacts& t = pi_facts(type);
  const bool across = pi_across(type) >= 0;
  const uint8_t* const scales = across ? pi_shared(&rows, (int32_t)i) : row + codes;
  for (int64_t c = 0; c < k; c++) {
    bool high;
    const uint8_t byte = row[code_at(type, kind, k, c, &high)];
    int code = pi_bits(type) == 8 ? (int8_t)byte : high ? byte >> 4 : byte & 15;
    if (pi_bits(type) == 5) {
      int bit;
      const uint8_t fifths = row[fifth_at(type, k, c, &bit)];
      code |= (fifths >> bit & 1) << 4;
    }
    code = t.values == PI_VALUES_IQ4    ? PI_IQ4_ENTRIES[code]
           : t.values == PI_VALUES_E2M1 ? PI_E2M1_ENTRIES[code]
                                        : code - t.offset;
    const uint8_t* const at = scales + 2 * (across ? c : c / 32);
    float d, m;
    if (t.d < 0) d = half_power(scales[c]);
    else unpack_row(PI_F16, at, 1, &d);
    out[c] = d * (float)code;
    if (t.m < 0) continue;  // zero added to minus zero would be plus zero
    unpack_row(PI_F16, at + (across ? 2 * pi_round_up(k, 128) : pi_row_scales(k)), 1, &m);
    out[c] += m;
  }
}

PiActs with_lanes(const Bundles& b, const PiActs& x, int64_t tokens, NeuronBlock& block) {
  PiActs acts = x;
  if (!acts.lanes && (wants_lanes(b.up.type) || (b.gated() && wants_lanes(b.gate.type)))) {
    block.lanes.resize((size_t)(pi_lanes_bytes(x.k) * tokens));
    fill_lanes(&x, tokens, block.lanes.data());
    acts.lanes = block.lanes.data();
  }
  return acts;
}

void add_neurons(const PiKernels* kernels, const Bundles& b, const PiActs* x, int64_t tokens, const int32_t* index,
                 int64_t n, const Firing& firing, NeuronBlock& block, float* out, int64_t ldo, NeuronCounts& counts,
                 int64_t* fired) {
  const PiActs acts = firing.multiplied ? *x : with_lanes(b, *x, tokens, block);
  for (int64_t j = 0, take; j < n; j += take) {
    take = block_of(b, index + j, n - j, tokens);
    Work w{kernels, b, &acts, tokens, block, take};
    const int64_t active = w.multiply(index + j, firing, counts);
    const bool pairs = w.pairs;
    counts.active += active;
    counts.down += w.n;
    if (fired && pairs)
      for (int64_t i = 0; i < w.count; i++) fired[block.pairs[i].neuron]++;
    else if (fired)
      for (int64_t t = 0; t < tokens; t++)
        for (int64_t i = 0; i < w.n; i++) fired[block.index[i]] += w.h(t)[i] != 0.0f;
    if (pi_across(b.down.type) >= 0) counts.shared += pairs ? w.add_groups_of_pairs(out, ldo) : w.add_groups(out, ldo);
    else if (pairs) kernels->neurons.add_pairs(&b.down, block.pairs, w.count, block.h, out, ldo);
    else kernels->neurons.add(&b.down, block.index, w.n, block.h, NeuronBlock::NEURONS, tokens, out, ldo);
  }
}

void multiply_neurons(const PiKernels* kernels, const Bundles& b, const PiActs* x, int64_t tokens, const int32_t* index,
                      int64_t n, const Firing& firing, NeuronBlock& block, float* h, int64_t ldh,
                      NeuronCounts& counts) {
  const PiActs acts = with_lanes(b, *x, tokens, block);
  for (int64_t j = 0, take; j < n; j += take) {
    take = std::min(n - j, NeuronBlock::most(tokens));
    Work w{kernels, b, &acts, tokens, block, take};
    w.multiply(index + j, firing, counts);
    w.put(index + j, take, h, ldh);
  }
}

int64_t activate_neurons(const PiKernels* kernels, const Bundles& b, const PiActs* x, int64_t tokens, int32_t* index,
                         int64_t n, const Firing& firing, NeuronBlock& block, float* h, int64_t ldh,
                         NeuronCounts& counts) {
  const PiActs acts = with_lanes(b, *x, tokens, block);
  int64_t left = 0;
  for (int64_t j = 0, take; j < n; j += take) {
    take = std::min(n - j, NeuronBlock::most(tokens));
    Work w{kernels, b, &acts, tokens, block, take};
    w.fire(index + j, firing, counts);
    w.put(index + j, take, h, ldh);
    left += w.list(index + left);
  }
  return left;
}
