// The kernels over single neurons at every level that runs here, and the sparse FFN made of them, against plain loops
// in double precision (checks.h says how).
#include <float.h>

#include "bundles.h"
#include "checks.h"
#include "files.h"
#include "ffn.h"

#include <chrono>
#include <numeric>
#include <thread>

namespace {

const int ROW_TYPES[] = {PI_F16, PI_BF16, PI_Q8_0, PI_Q4_0},
          DOT_TYPES[] = {PI_F16, PI_BF16, PI_Q8_0, PI_Q4_0, PI_Q4_1, PI_Q5_0, PI_Q5_1, PI_IQ4_NL},
          ACROSS[] = {PI_Q4_0X32, PI_Q4_1X32, PI_Q5_0X32, PI_Q5_1X32, PI_Q8_0X32, PI_IQ4_NLX32, PI_MXFP4X32};
// Those of bundles alone: of topk, the gates are those of matrices; xielu is as any that is never zero.
const char* const ACTIVATIONS[] = {"silu", "relu", "relu2", "fatrelu", "drelu", "gelu_tanh", "cats"};
constexpr int N_ACTS = PI_TOPK;
static_assert(std::size(ACTIVATIONS) == N_ACTS && N_ACTS + 2 == PI_N_ACTS);

// Whether an activation is never exactly zero.
bool never_silent(int act) { return act == PI_SILU || act == PI_GELU_TANH; }
const char* const KINDS[] = {"dot", "add"};

std::string type_name(int type) { return pi_facts(type).name + std::string(pi_across(type) >= 0 ? "X32" : ""); }

bool has_minimum(int type) { return type == PI_Q4_1 || type == PI_Q5_1 || type == PI_Q4_1X32 || type == PI_Q5_1X32; }
bool has_five_bits(int type) { return type == PI_Q5_0 || type == PI_Q5_1 || type == PI_Q5_0X32 || type == PI_Q5_1X32; }

// The code of element i of a stored block of 32, whose codes begin at `first`.
int code_in(int type, const uint8_t* block, int64_t first, int64_t i) {
  if (type == PI_Q8_0 || type == PI_Q8_0X32) return block[first + i];
  const uint8_t* q = block + first + (has_five_bits(type) ? 4 : 0);
  const int low = i < 16 ? q[i] & 15 : q[i - 16] >> 4;
  return has_five_bits(type) ? low | (block[first + i / 8] >> i % 8 & 1) << 4 : low;
}
const std::vector<int64_t> FLOAT_WIDTHS = {1, 3, 7, 8, 15, 16, 17, 31, 32, 33, 64, 100, 576, 4096},
                           BLOCK_WIDTHS = {32, 64, 96, 128, 160, 256, 512, 544, 576, 1056};

const std::vector<int64_t>& widths(int type) { return is_quantised(type) ? BLOCK_WIDTHS : FLOAT_WIDTHS; }

using List = std::vector<int32_t>;

const int64_t STEPS[] = {1, 2, 3, 5, 8, 9, 31, PI_NEURON_TOKENS};  // tokens

List every_one(int64_t n) {
  List all((size_t)n);
  std::iota(all.begin(), all.end(), 0);
  return all;
}

// Empty, whole, single, odd, every other, and in no order.
std::vector<List> lists(int32_t n) {
  List all, odd, back;
  for (int32_t i = 0; i < n; i++) all.push_back(i);
  for (int32_t i = 1; i < n; i += 2) odd.push_back(i);
  for (int32_t i = 0; i < n - 1; i++) back.push_back((i * 7 + 3) % n);
  std::sort(back.begin(), back.end());
  back.erase(std::unique(back.begin(), back.end()), back.end());
  std::reverse(back.begin() + 1, back.end());
  return {{}, all, {n - 1}, {0, n - 1}, {n - 1, 0, n / 2}, odd, back};
}

// ---- Rows --------------------------------------------------------------------------------------------------------------

int64_t groups_of(int64_t neurons) { return (neurons + PI_GROUP - 1) / PI_GROUP; }

// Random rows. Of Q4_1 and Q5_1 d and m have one sign, so that the size of an element is that of its two terms.
std::vector<uint8_t> random_stored(Random& r, int type, int64_t rows, int64_t k) {
  std::vector<uint8_t> stored = random_rows(r, type, rows, k);
  if (has_minimum(type))
    for (size_t at = 0; at < stored.size(); at += type == PI_Q4_1 ? 20 : 24)
      stored[at + 3] = (uint8_t)((stored[at + 3] & 0x7f) | (stored[at + 1] & 0x80));
  return stored;
}

// Stored neurons in the form that pack_bundle_rows takes, and their values.
std::vector<uint8_t> random_bundle_rows(Random& r, int type, int64_t rows, int64_t k, std::vector<float>& values) {
  values.resize((size_t)(rows * k));
  const int across = pi_across(type);
  if (across < 0) {
    const std::vector<uint8_t> stored = random_stored(r, type, rows, k);
    for (int64_t i = 0; i < rows; i++)
      unpack_row(type, stored.data() + i * stored_row_bytes(type, k), k, &values[(size_t)(i * k)]);
    return stored;
  }
  const std::vector<uint8_t> stored = random_stored(r, across, groups_of(rows) * k, PI_GROUP);
  const int64_t size = stored_row_bytes(across, PI_GROUP);
  for (int64_t i = 0; i < rows; i++) {
    for (int64_t c = 0; c < k; c++) {
      float block[PI_GROUP];
      unpack_row(across, stored.data() + (i / PI_GROUP * k + c) * size, PI_GROUP, block);
      values[(size_t)(i * k + c)] = block[i % PI_GROUP];
    }
  }
  return stored;
}

// Packs all groups of some rows; `data` is what its `groups` points to.
void pack_groups(const PiRows& packed, int kind, int64_t rows, const uint8_t* src, uint8_t* data) {
  for (int64_t g = 0; g < groups_of(rows); g++) {
    pack_bundle_rows(packed.type, kind, std::min(rows - g * PI_GROUP, (int64_t)PI_GROUP), packed.k,
                     src + bundle_rows_source_bytes(packed.type, g * PI_GROUP, packed.k), data + g * packed.stride,
                     packed.pitch, packed.at);
  }
}

// A bundle's row as table.h describes it, from a stored row.
std::vector<uint8_t> described(int type, int kind, const uint8_t* row, int64_t k) {
  if (!is_quantised(type)) {
    std::vector<uint8_t> packed((size_t)pi_round_up(2 * k, 64));
    memcpy(packed.data(), row, (size_t)(2 * k));
    return packed;
  }
  const bool five = has_five_bits(type);
  const int64_t nibbles = pi_round_up(k, 128) / 2,
                codes = type == PI_Q8_0 ? pi_round_up(k, 64) : nibbles + (five ? pi_round_up(k, 512) / 8 : 0),
                at_codes = has_minimum(type) ? 4 : 2, each = type == PI_Q8_0 ? 32 : 16,
                size = at_codes + each + (five ? 4 : 0), scales = 2 * pi_round_up(k / 32, 16);
  std::vector<uint8_t> packed((size_t)pi_round_up(codes + (has_minimum(type) ? 2 : 1) * scales, 64));
  for (int64_t i = 0; i < k; i++) {
    const uint8_t* block = row + i / 32 * size;
    memcpy(&packed[(size_t)(codes + i / 32 * 2)], block, 2);
    if (has_minimum(type)) memcpy(&packed[(size_t)(codes + scales + i / 32 * 2)], block + 2, 2);
    // Sixteen blocks, or those that are left: vector v has four elements of each.
    const int64_t first = i / 512 * 16, word = 4 * std::min(k / 32 - first, (int64_t)16), v = i % 32 / 4;
    const int64_t vectors = first * each + 4 * (i / 32 - first) + i % 4;
    const int code = code_in(type, block, at_codes, i % 32);
    if (type == PI_Q8_0) {
      packed[(size_t)(kind == PI_DOT ? vectors + v * word : i)] = (uint8_t)code;
      continue;
    }
    if (five) {  // beside the low codes, or where the vectors of blocks lie side by side, in the order of their words
      const bool close = word == 4 || word == 8 || word == 16 || word == 32;
      const int64_t lane = i / 32 - first, at = close ? v % 4 * word / 4 + lane : lane;
      const int64_t bit = close ? at / 16 + v / 4 * 4 : v;
      uint8_t& byte = packed[(size_t)(nibbles + i / 512 * 64 + at % 16 * 4 + i % 4)];
      byte = (uint8_t)(byte | code >> 4 << bit);
    }
    const int64_t base = i / 128 * 64, e = i % 128, s = e / 16, l = e % 16;
    const int64_t at = kind == PI_DOT ? vectors + v % 4 * word : base + 4 * l + s / 2;
    const bool high = kind == PI_DOT ? v >= 4 : s % 2;
    packed[(size_t)at] = (uint8_t)(packed[(size_t)at] | (code & 15) << (high ? 4 : 0));
  }
  return packed;
}

void test_rows_across(int type) {
  Check check(std::string("rows ") + type_name(type) + " add");
  const bool five = has_five_bits(type), eight = type == PI_Q8_0X32;
  // Bytes of the scales of an element; they come first in a stored block. And all of the block.
  const int64_t first = type == PI_MXFP4X32 ? 1
                        : has_minimum(type) ? 4
                                            : 2,
                size = first + (eight  ? 32
                                : five ? 20
                                       : 16);
  const int64_t each = std::min(first, (int64_t)2);
  for (int64_t k : BLOCK_WIDTHS) {
    Random r((uint64_t)(type + k));
    const int64_t rows = 64, bytes = pi_row_bytes(type, k), scales = pi_round_up(k, 128) * each,
                  nibbles = pi_round_up(k, 128) / 2, stride = PI_GROUP * bytes + first / each * scales;
    check.yes(bytes == (eight ? 2 * nibbles : nibbles + (five ? pi_round_up(k, 512) / 8 : 0)), k);
    check.yes(pi_shared_bytes(type, k) == first / each * scales, k);
    std::vector<float> values;
    const std::vector<uint8_t> random = random_bundle_rows(r, type, rows, k, values);
    const Exact<uint8_t> stored(random.begin(), random.end());
    Exact<uint8_t> data((size_t)(groups_of(rows) * stride), 0xaa);
    const PiRows whole{data.data(), stride, bytes, 0, k, type};
    pack_groups(whole, PI_ADD, rows, stored.data(), data.data());
    for (int64_t g = 0; g < groups_of(rows); g++) {
      const uint8_t* group = data.data() + g * stride;
      std::vector<uint8_t> wanted((size_t)stride);
      for (int64_t c = 0; c < k; c++) {
        const uint8_t* block = stored.data() + (g * k + c) * size;
        for (int64_t s = 0; s < first / each; s++)
          memcpy(&wanted[(size_t)(PI_GROUP * bytes + s * scales + each * c)], block + each * s, (size_t)each);
        for (int64_t i = 0; i < PI_GROUP; i++) {
          const int code = code_in(type, block, first, i);
          const int64_t z = eight ? c % 64 / 16 : c % 128 / 32, l = c % 16, at = l / 4 * 16 + l % 4;
          uint8_t& byte = wanted[(size_t)(i * bytes + (eight ? c / 64 : c / 128) * 64 + at + 4 * z)];
          byte = (uint8_t)(eight ? code : byte | (code & 15) << (c % 32 < 16 ? 0 : 4));
          if (!five) continue;
          uint8_t& fifths = wanted[(size_t)(i * bytes + nibbles + c / 512 * 64 + at + c % 512 / 128 * 4)];
          fifths = (uint8_t)(fifths | code >> 4 << c % 128 / 16);
        }
      }
      check.yes(memcmp(group, wanted.data(), (size_t)stride) == 0, k);
      for (int64_t i = 0; i < PI_GROUP; i++) {
        Exact<float> back((size_t)k, NOT);
        unpack_bundle_row(PI_ADD, whole, g * PI_GROUP + i, back.data());
        for (int64_t c = 0; c < k; c++) check.same(back[(size_t)c], values[(size_t)((g * PI_GROUP + i) * k + c)], c);
      }
    }
  }
}

void test_rows() {
  for (int type : DOT_TYPES) {
    for (int kind : {PI_DOT, PI_ADD}) {
      if (!pi_row_type(type, kind)) continue;
      Check check(std::string("rows ") + PI_TYPES[type].name + " " + KINDS[kind]);
      for (int64_t k : widths(type)) {
        Random r((uint64_t)(type * 1000 + kind * 100000 + k));
        const int64_t rows = 37, bytes = pi_row_bytes(type, k), at = 64, pitch = at + bytes, stride = PI_GROUP * pitch,
                      row_bytes = stored_row_bytes(type, k);
        check.yes(bytes % 64 == 0 && pi_shared_bytes(type, k) == 0, k);
        std::vector<float> values;
        const std::vector<uint8_t> random = random_bundle_rows(r, type, rows, k, values);
        const Exact<uint8_t> stored(random.begin(), random.end());
        Exact<uint8_t> data((size_t)(groups_of(rows) * stride), 0xaa);
        const PiRows whole{data.data(), stride, pitch, at, k, type};
        pack_groups(whole, kind, rows, stored.data(), data.data());
        for (int64_t i = 0; i < groups_of(rows) * PI_GROUP; i++) {
          const uint8_t *bundle = data.data() + i * pitch, *row = bundle + at;
          const std::vector<uint8_t> packed =
              i < rows ? described(type, kind, stored.data() + i * row_bytes, k) : std::vector<uint8_t>((size_t)bytes);
          check.yes((int64_t)packed.size() == bytes && memcmp(row, packed.data(), (size_t)bytes) == 0, k);
          for (int64_t j = 0; j < at; j++) check.yes(bundle[j] == 0xaa, k);
          if (i >= rows) continue;
          Exact<float> back((size_t)k, NOT);
          unpack_bundle_row(kind, whole, i, back.data());
          for (int64_t j = 0; j < k; j++) check.same(back[(size_t)j], values[(size_t)(i * k + j)], j);
        }
      }
    }
  }
  for (int type : ACROSS) test_rows_across(type);
}

// ---- Single kernels -------------------------------------------------------------------------------------------------

// The rows of some neurons, behind 64 bytes that belong to nobody; the last ends where the memory does.
struct BundleRows {
  static constexpr int64_t AT = 64;
  int64_t rows, k;
  int type;
  std::vector<float> values;  // [rows][k]
  Exact<uint8_t> data;
  PiRows packed;

  BundleRows(Random& r, int type, int kind, int64_t rows, int64_t k) : rows(rows), k(k), type(type) {
    const std::vector<uint8_t> stored = random_bundle_rows(r, type, rows, k, values);
    const int64_t pitch = AT + pi_row_bytes(type, k), stride = PI_GROUP * pitch + pi_shared_bytes(type, k);
    data.assign((size_t)(groups_of(rows) * stride), 0xff);
    packed = {data.data(), stride, pitch, AT, k, type};
    pack_groups(packed, kind, rows, stored.data(), data.data());
  }
  const float* row(int64_t i) const { return &values[(size_t)(i * k)]; }
};

// Activations with the form that quantised rows need.
struct Lanes {
  Exact<uint8_t> data;
  PiActs acts;
  Lanes(const PiActs& x, int type, int64_t tokens)
      : data(is_quantised(type) ? (size_t)(tokens * pi_lanes_bytes(x.k)) : 0, 0xff), acts(x) {
    if (is_quantised(type)) fill_lanes(&x, tokens, data.data());
    acts.lanes = data.empty() ? nullptr : data.data();
  }
};

// Roundings on the longest path of a term to a dot product, two for a step that is not fused: lanes of 16 elements;
// pairs of them; 512 codes a step, whose two factors are multiplied first. Four more bring sixteen lanes together.
double dot_chain(int type, int64_t k) {
  switch (type) {
    case PI_F16: return 2.0 * (double)((k + 15) / 16) + 4;
    case PI_BF16: return 4.0 * (double)((k + 31) / 32) + 4;
    case PI_Q4_1:
    case PI_Q5_1: return 4.0 * (double)((k + 511) / 512) + 7;  // two products a step, and d * code + m is rounded here
    default: return 2.0 * (double)((k + 511) / 512) + 6;
  }
}

// Pairs in any order, some of them twice.
Exact<PiPair> random_pairs(Random& r, int64_t n, int64_t neurons, int64_t tokens) {
  Exact<PiPair> pairs((size_t)n);
  for (PiPair& one : pairs) one = {(int32_t)(r.next() % (unsigned)neurons), (int32_t)(r.next() % (unsigned)tokens)};
  return pairs;
}

void test_dots(const PiKernels* kernels) {
  for (int type : DOT_TYPES) {
    for (int64_t k : widths(type)) {
      const std::string name = std::string(kernels->name) + " dots " + PI_TYPES[type].name + " k=" + std::to_string(k);
      Random r((uint64_t)(type * 100000 + k));
      const int64_t rows = PI_GROUP, most = PI_NEURON_TOKENS;
      const BundleRows packed(r, type, PI_DOT, rows, k);
      const Acts acts(kernels, pi_form(type), most, k, r.normals(most * k));
      Check values(name), bits(name + " bits for any tokens and rows"), outside(name + " writes its own only");
      std::vector<float> alone((size_t)(most * rows), NOT);
      for (int64_t t = 0; t < most; t++) {
        const Lanes x(acts.from(t), type, 1);
        for (int32_t i = 0; i < rows; i++)
          kernels->neurons.dots[packed.packed.type](&packed.packed, &i, 1, &x.acts, 1, &alone[(size_t)(t * rows + i)],
                                                    1);
      }
      for (int64_t t = 0; t < most; t++) {
        for (int64_t i = 0; i < rows; i++) {
          double sum = 0, size = 0;
          for (int64_t j = 0; j < k; j++) {
            const double term = packed.row(i)[j] * acts.value(type, t, j);
            sum += term;
            size += fabs(term);
          }
          values.near(alone[(size_t)(t * rows + i)], sum, gamma_of(dot_chain(type, k)) * size, t * rows + i);
        }
      }
      for (int64_t tokens : STEPS) {
        const Lanes x(acts.from(most - tokens), type, tokens);
        for (const List& list : lists((int32_t)rows)) {
          const Exact<int32_t> index(list.begin(), list.end());
          const int64_t n = (int64_t)index.size(), ldo = n + tokens % 3;
          Exact<float> out((size_t)((tokens - 1) * ldo + n), NOT);
          kernels->neurons.dots[packed.packed.type](&packed.packed, index.data(), n, &x.acts, tokens, out.data(), ldo);
          for (int64_t i = 0; i < (int64_t)out.size(); i++) {
            if (i % ldo < n)
              bits.same(out[(size_t)i], alone[(size_t)((most - tokens + i / ldo) * rows + index[(size_t)(i % ldo)])],
                        i);
            else outside.yes(isnan(out[(size_t)i]), i);
          }
        }
      }
      const Lanes x(acts.from(0), type, most);
      for (int64_t n : {0, 1, 3, 8, 13, 100}) {
        const Exact<PiPair> pairs = random_pairs(r, n, rows, most);
        Exact<float> out((size_t)n, NOT);
        kernels->neurons.dot_pairs[packed.packed.type](&packed.packed, pairs.data(), n, &x.acts, out.data());
        for (int64_t i = 0; i < n; i++)
          bits.same(out[(size_t)i], alone[(size_t)(pairs[(size_t)i].token * rows + pairs[(size_t)i].neuron)], i);
      }
    }
  }
}

void test_add(const PiKernels* kernels) {
  for (int type : ROW_TYPES) {
    for (int64_t k : widths(type)) {
      const std::string name = std::string(kernels->name) + " add " + PI_TYPES[type].name + " k=" + std::to_string(k);
      Random r((uint64_t)(type * 100000 + k + 7));
      const int64_t rows = PI_GROUP, most = PI_NEURON_TOKENS;
      const BundleRows packed(r, type, PI_ADD, rows, k);
      const std::vector<float> before = r.normals(most * k), factors = r.normals(most * rows);
      Check values(name), bits(name + " bits for any tokens, in two parts, without zeros"),
          outside(name + " writes its own only");
      for (int64_t tokens : STEPS) {
        for (const List& list : lists((int32_t)rows)) {
          const Exact<int32_t> index(list.begin(), list.end());
          const int64_t n = (int64_t)index.size(), ldh = n + tokens % 2, ldo = k + tokens % 3,
                        size = (tokens - 1) * ldo + k;
          Exact<float> h(n ? (size_t)((tokens - 1) * ldh + n) : 0, NOT), start((size_t)size, NOT);
          for (int64_t t = 0; t < tokens; t++) {
            for (int64_t j = 0; j < n; j++) {
              const int64_t i = index[(size_t)j];
              h[(size_t)(t * ldh + j)] = i % 3 == 0 || (i + t) % 5 == 0 ? 0.0f : factors[(size_t)(t * rows + i)];
            }
            std::copy_n(&before[(size_t)(t * k)], k, &start[(size_t)(t * ldo)]);
          }
          Exact<float> out = start, parts = start, dropped = start;
          kernels->neurons.add(&packed.packed, index.data(), n, h.data(), ldh, tokens, out.data(), ldo);
          const int64_t cut = n / 3;
          kernels->neurons.add(&packed.packed, index.data(), cut, h.data(), ldh, tokens, parts.data(), ldo);
          kernels->neurons.add(&packed.packed, index.data() + cut, n - cut, h.data() + cut, ldh, tokens, parts.data(),
                               ldo);
          Exact<int32_t> fewer;
          Exact<float> few_h;
          for (int64_t j = 0; j < n; j++)
            if (index[(size_t)j] % 3) fewer.push_back(index[(size_t)j]);
          for (int64_t t = 0; t < tokens; t++)
            for (int64_t j = 0; j < n; j++)
              if (index[(size_t)j] % 3) few_h.push_back(h[(size_t)(t * ldh + j)]);
          fewer.shrink_to_fit();
          few_h.shrink_to_fit();
          kernels->neurons.add(&packed.packed, fewer.data(), (int64_t)fewer.size(), few_h.data(), (int64_t)fewer.size(),
                               tokens, dropped.data(), ldo);
          for (int64_t i = 0; i < size; i++) {
            if (i % ldo >= k) {
              outside.yes(isnan(out[(size_t)i]), i);
              continue;
            }
            bits.same(parts[(size_t)i], out[(size_t)i], i);
            bits.same(dropped[(size_t)i], out[(size_t)i], i);
          }
          for (int64_t t = 0; t < tokens; t++) {
            Exact<float> alone(before.begin() + t * k, before.begin() + (t + 1) * k);
            kernels->neurons.add(&packed.packed, index.data(), n, h.data() + t * ldh, ldh, 1, alone.data(), k);
            for (int64_t c = 0; c < k; c++) bits.same(alone[(size_t)c], out[(size_t)(t * ldo + c)], t * k + c);
          }
          if (tokens > 1 && tokens < most) continue;  // their bits are known by now
          // A factor is a product first where the row has scales; then two roundings a row that is not fused.
          const double g = gamma_of(2.0 * (double)n + 1);
          for (int64_t t = 0; t < tokens; t++) {
            for (int64_t c = 0; c < k; c++) {
              double sum = start[(size_t)(t * ldo + c)], all = fabs(sum);
              for (int64_t j = 0; j < n; j++) {
                const double term = (double)h[(size_t)(t * ldh + j)] * packed.row(index[(size_t)j])[c];
                sum += term;
                all += fabs(term);
              }
              values.near(out[(size_t)(t * ldo + c)], sum, g * all, t * k + c);
            }
          }
        }
      }
      if (outside.all == 0) outside.yes(true, 0);
      for (int64_t n : {0, 1, 9, 100}) {
        const Exact<PiPair> pairs = random_pairs(r, n, rows, most);
        const std::vector<float> by = r.normals(n);
        const Exact<float> h(by.begin(), by.end());
        const int64_t ldo = k + 3;
        Exact<float> out((size_t)((most - 1) * ldo + k), NOT);
        for (int64_t t = 0; t < most; t++) std::copy_n(&before[(size_t)(t * k)], k, &out[(size_t)(t * ldo)]);
        Exact<float> wanted = out;
        kernels->neurons.add_pairs(&packed.packed, pairs.data(), n, h.data(), out.data(), ldo);
        for (int64_t i = 0; i < n; i++)
          kernels->neurons.add(&packed.packed, &pairs[(size_t)i].neuron, 1, &h[(size_t)i], 1, 1,
                               &wanted[(size_t)(pairs[(size_t)i].token * ldo)], k);
        for (int64_t i = 0; i < (int64_t)out.size(); i++)
          if (i % ldo < k) bits.same(out[(size_t)i], wanted[(size_t)i], i);
          else outside.yes(isnan(out[(size_t)i]), i);
      }
    }
  }
}

// Of types across neurons, whole numbers by group.
void test_add_groups(const PiKernels* kernels, int type) {
  for (int64_t k : BLOCK_WIDTHS) {
    const std::string name = std::string(kernels->name) + " add_groups " + type_name(type) + " k=" + std::to_string(k);
    Random r((uint64_t)(k + 99));
    const int64_t rows = 150;
    const BundleRows packed(r, type, PI_ADD, rows, k);
    Check values(name), bits(name + " bits for any tokens"), outside(name + " writes its own only");
    for (int64_t tokens : {1, 2, 3, 8}) {
      for (const List& list : lists((int32_t)rows)) {
        const Exact<int32_t> index(list.begin(), list.end());
        const int64_t n = (int64_t)index.size(), ldq = n + tokens % 2, ldo = k + tokens % 3,
                      size = (tokens - 1) * ldo + k;
        std::vector<int64_t> group;  // of each of the list
        for (int64_t j = 0; j < n; j++)
          group.push_back(j == 0 ? 0
                                 : group.back() + (index[(size_t)j] / PI_GROUP != index[(size_t)(j - 1)] / PI_GROUP));
        const int64_t groups = n ? group.back() + 1 : 0, ldd = groups + tokens % 3;
        Exact<int8_t> q(n ? (size_t)((tokens - 1) * ldq + n) : 0, 77);
        Exact<float> d(n ? (size_t)((tokens - 1) * ldd + groups) : 0, NOT), out((size_t)size, NOT);
        for (int64_t t = 0; t < tokens; t++) {
          for (int64_t j = 0; j < n; j++)
            q[(size_t)(t * ldq + j)] = (int8_t)(r.next() % 8 == 0   ? 127
                                                : r.next() % 8 == 0 ? -127
                                                                    : (int)(r.next() % 255) - 127);
          for (int64_t g = 0; g < groups; g++) d[(size_t)(t * ldd + g)] = fabsf(r.normal());
          for (int64_t c = 0; c < k; c++) out[(size_t)(t * ldo + c)] = r.normal();
        }
        const Exact<float> start = out;
        kernels->neurons.add_groups(&packed.packed, index.data(), n, q.data(), ldq, d.data(), ldd, tokens, out.data(),
                                    ldo);
        for (int64_t t = 0; t < tokens; t++) {
          Exact<float> alone(start.begin() + t * ldo, start.begin() + t * ldo + k);
          kernels->neurons.add_groups(&packed.packed, index.data(), n, q.data() + t * ldq, ldq, d.data() + t * ldd, ldd,
                                      1, alone.data(), k);
          for (int64_t c = 0; c < k; c++) {
            double sum = start[(size_t)(t * ldo + c)], all = fabs(sum), whole = 0, size = 0;
            // A group's sum is exact; the product of its two scales rounds, and each group's step. With m there are two of
            // these, and an element is rounded here.
            for (int64_t j = 0; j < n; j++) {
              const double term = (double)q[(size_t)(t * ldq + j)] * packed.row(index[(size_t)j])[c];
              whole += term;
              size += has_minimum(type) ? fabs(term) : 0;
              if (j + 1 < n && group[(size_t)(j + 1)] == group[(size_t)j]) continue;
              const double by = d[(size_t)(t * ldd + group[(size_t)j])];
              sum += whole * by;
              all += std::max(fabs(whole), size) * by;
              whole = size = 0;
            }
            const double steps = (has_minimum(type) ? 4.0 : 2.0) * (double)groups + 3;
            values.near(out[(size_t)(t * ldo + c)], sum, gamma_of(steps) * all, t * k + c);
            bits.same(alone[(size_t)c], out[(size_t)(t * ldo + c)], t * k + c);
          }
        }
        for (int64_t i = 0; i < size; i++)
          if (i % ldo >= k) outside.yes(isnan(out[(size_t)i]), i);
      }
    }
  }
}

void test_keep(const PiKernels* kernels) {
  Check check(std::string(kernels->name) + " keep");
  const float odd[] = {NAN, INFINITY, -INFINITY, 0.0f, -0.0f, 0.5f, -0.5f, 1e-45f, -1e-45f, 0.50000006f, -0.50000006f};
  Random r(5);
  for (int64_t tokens : STEPS) {
    for (int64_t n : {0, 1, 7, 15, 16, 17, 31, 32, 33, 64, 100}) {
      for (int absolute : {0, 1}) {
        for (float most : {0.0f, 0.5f, -0.5f, INFINITY}) {
          const int64_t ldx = n + 5, size = n ? (tokens - 1) * ldx + n : 0;
          const int32_t first = (int32_t)(r.next() % 1000);
          Exact<float> x((size_t)size, NOT);
          for (float& v : x)
            v = r.next() % 4 == 0 ? odd[r.next() % (sizeof odd / sizeof *odd)]
                : r.next() % 3    ? -fabsf(r.normal()) / 8
                                  : r.normal();
          List kept;
          Exact<int64_t> counts((size_t)tokens, 100), wanted((size_t)tokens, 100);
          for (int64_t j = 0; j < n; j++) {
            bool any = false;
            for (int64_t t = 0; t < tokens; t++) {
              const float v = x[(size_t)(t * ldx + j)];
              const bool counts_here = !((absolute ? fabsf(v) : v) <= most);
              wanted[(size_t)t] += counts_here;
              any |= counts_here;
            }
            if (any) kept.push_back(first + (int32_t)j);
          }
          Exact<int32_t> out(kept.size() + 16, -1);
          check.yes(kernels->neurons.keep(x.data(), ldx, tokens, n, absolute, most, first, out.data(), counts.data()) ==
                        (int64_t)kept.size(),
                    n);
          check.yes(std::equal(kept.begin(), kept.end(), out.begin()), n);
          check.yes(counts == wanted, n);
        }
      }
    }
  }
}

void test_fires(const PiKernels* kernels) {
  Check check(std::string(kernels->name) + " fires");
  const float odd[] = {NAN, INFINITY, -INFINITY, 0.0f, -0.0f, 0.5f, -0.5f, 1e-45f, -1e-45f, 0.50000006f, -0.50000006f};
  Random r(6);
  for (int64_t n : {0, 16, 32, 48, 160}) {
    for (float most : {0.0f, 0.5f, FLT_MAX, INFINITY}) {
      for (int quiet : {0, 1, 16}) {  // one in so many is not zero
        Exact<float> x((size_t)n, 0.0f);
        if (quiet)
          for (float& v : x)
            if (r.next() % (unsigned)quiet == 0)
              v = r.next() % 4 == 0 ? odd[r.next() % (sizeof odd / sizeof *odd)] : r.normal();
        Exact<uint16_t> wanted((size_t)(n / 16), 0), bits((size_t)(n / 16), 0xaaaa);
        bool any = false;
        for (int64_t j = 0; j < n; j++) {
          if (fabsf(x[(size_t)j]) <= most) continue;
          wanted[(size_t)(j / 16)] = (uint16_t)(wanted[(size_t)(j / 16)] | 1 << j % 16);
          any = true;
        }
        check.yes((kernels->neurons.fires(x.data(), n, most, bits.data()) != 0) == any, n);
        check.yes((kernels->neurons.fires(x.data(), n, most, nullptr) != 0) == any, n);
        check.yes(bits == wanted, n);
      }
    }
  }
}

// ---- What neurons add -----------------------------------------------------------------------------------------------

// A number, and how far from it a kernel's may lie.
struct Near {
  double value, off;
};

enum Sure { NO, MAYBE, YES };

Sure above(Near x, double limit) { return x.value - x.off > limit ? YES : x.value + x.off > limit ? MAYBE : NO; }

// x, or nothing: what is not sure may be either.
Near where(Sure sure, Near x) {
  return sure == NO ? Near{0, 0} : sure == YES ? x : Near{x.value, fabs(x.value) + x.off};
}

Near times(Near a, Near b) {
  const double product = a.value * b.value, off = a.off * fabs(b.value) + fabs(a.value) * b.off + a.off * b.off;
  return {product, off + U * (fabs(product) + off)};
}

// How many of some there are.
struct Range {
  int64_t least = 0, most = 0;
  void add(Sure s) {
    least += s == YES;
    most += s != NO;
  }
  bool holds(int64_t n) const { return least <= n && n <= most; }
};

// The weights of one layer, as bundles and as numbers.
struct Layer {
  int64_t k, neurons;
  int type, down_type, act;
  float threshold;
  bool gated;
  std::vector<uint8_t> gate_rows, up_rows, down_rows;  // stored, [neurons][k]
  std::vector<float> gate, up, down, gate_bias, up_bias;
  Exact<uint8_t> data;
  std::shared_ptr<Bundles> bundles;  // over `data`

  Layer(const Layer&) = delete;
  Layer(Random& r, int64_t k, int64_t neurons, int type, int down_type, int act, bool gated, bool biases)
      : k(k),
        neurons(neurons),
        type(type),
        down_type(down_type),
        act(act),
        threshold(act == PI_FATRELU || act == PI_CATS ? 0.125f : 0.0f),
        gated(gated) {
    const int64_t packed = pi_row_bytes(type, k), down_at = gated ? 2 * packed : packed,
                  pitch = down_at + pi_row_bytes(down_type, k);
    const int64_t stride = PI_GROUP * pitch + pi_shared_bytes(down_type, k);
    data.assign((size_t)(groups_of(neurons) * stride), 0xff);
    const auto make = [&](int t, int kind, std::vector<uint8_t>& rows, std::vector<float>& values, int64_t at) {
      rows = random_bundle_rows(r, t, neurons, k, values);
      pack_groups({data.data(), stride, pitch, at, k, t}, kind, neurons, rows.data(), data.data());
    };
    if (gated) make(type, PI_DOT, gate_rows, gate, 0);
    make(type, PI_DOT, up_rows, up, gated ? packed : 0);
    make(down_type, PI_ADD, down_rows, down, down_at);
    if (biases && gated) gate_bias = r.normals(neurons, 0.1f);
    if (biases) up_bias = r.normals(neurons, 0.1f);
    const PiRows none{nullptr, 0, 0, 0, k, 0};
    const auto of = [&](int t, int64_t at) { return PiRows{data.data(), stride, pitch, at, k, t}; };
    bundles = std::make_shared<Bundles>(Bundles{gated ? of(type, 0) : none,
                                                of(type, gated ? packed : 0),
                                                of(down_type, down_at),
                                                neurons,
                                                {{act, threshold, {}}, gate_bias, up_bias, {}, {}},
                                                every_one(neurons),
                                                {},
                                                {}});
  }
};

// What every neuron of a layer makes of some tokens.
struct Activity {
  const Layer& layer;
  std::vector<Near> first, up;  // [token][neuron], with biases

  // roundings: on the way of a term to a dot product, the bias apart.
  Activity(const Layer& l, const Acts& x, double roundings) : layer(l) {
    for (int64_t t = 0; t < x.tokens; t++) {
      for (int64_t i = 0; i < l.neurons; i++) {
        first.push_back(dot(l.gated ? l.gate : l.up, l.gated ? l.gate_bias : l.up_bias, x, t, i, roundings));
        if (l.gated) up.push_back(dot(l.up, l.up_bias, x, t, i, roundings));
      }
    }
  }

  struct Neuron {
    Near h;
    Sure fires, active;  // the first activation, and h, are not zero
  };
  // counts: whether the neuron counts for the token; activations up to `most` are nothing.
  Neuron neuron(int64_t t, int64_t i, Sure counts, double most) const {
    const size_t at = (size_t)(t * layer.neurons + i);
    Sure fires;
    const Near a = activated(first[at], &fires);
    return finish(at, a, fires, counts, most);
  }
  // The same from an activation that is known.
  Neuron neuron_of(int64_t t, int64_t i, float activation, Sure counts, double most) const {
    return finish((size_t)(t * layer.neurons + i), {activation, 0}, activation != 0 ? YES : NO, counts, most);
  }

 private:
  Near dot(const std::vector<float>& w, const std::vector<float>& bias, const Acts& x, int64_t t, int64_t i,
           double roundings) const {
    double sum = 0, size = 0;
    for (int64_t j = 0; j < layer.k; j++) {
      const double term = w[(size_t)(i * layer.k + j)] * x.value(layer.type, t, j);
      sum += term;
      size += fabs(term);
    }
    const double more = bias.empty() ? 0 : bias[(size_t)i];
    return {sum + more, gamma_of(roundings + 1) * (size + fabs(more))};
  }

  Near activated(Near x, Sure* fires) const {
    *fires = YES;
    if (layer.act == PI_SILU || layer.act == PI_CATS) {  // its slope is 1.1 at most, and it is made by 8 operations
      const double a = x.value / (1 + exp(-x.value));
      const Near s = {a, 1.1 * x.off + gamma_of(8) * (fabs(a) + 1.1 * x.off)};
      if (layer.act == PI_SILU) return s;
      *fires = above({fabs(s.value), s.off}, layer.threshold);
      return where(*fires, s);
    }
    if (layer.act == PI_GELU_TANH) {  // 1.13 at most; 8 operations, behind 6 whose roundings the exponent multiplies
      const double y = sqrt(8 / M_PI) * (x.value + 0.044715 * x.value * x.value * x.value), a = x.value / (1 + exp(-y));
      return {a, 1.13 * x.off + gamma_of(8 + 6 * std::min(fabs(y), 88.0)) * (fabs(a) + 1.13 * x.off)};
    }
    *fires = above(x, layer.act == PI_FATRELU ? layer.threshold : 0);
    const Near kept = where(*fires, x);
    return layer.act == PI_RELU2 ? times(kept, kept) : kept;
  }

  Neuron finish(size_t at, Near a, Sure fires, Sure counts, double most) const {
    fires = std::min(fires, counts);
    if (most > 0) fires = std::min(fires, above({fabs(a.value), a.off}, most));
    a = where(fires, a);
    if (!layer.gated) return {a, fires, fires};
    Near u = up[at];
    Sure some = above({fabs(u.value), u.off}, 0);
    if (layer.act == PI_DRELU) u = where(some = above(u, 0), u);
    return {where(std::min(fires, some), times(a, u)), fires, std::min(fires, some)};
  }
};

// The sum over listed neurons; `of` gives the Neuron of (token, neuron).
struct Wanted {
  std::vector<double> sum, size, off;  // [token][column]; size: of the absolute terms
  Range up, down, active;

  template <class F>
  Wanted(const Layer& l, int64_t tokens, const List& list, const F& of)
      : sum((size_t)(tokens * l.k)), size(sum), off(sum) {
    std::vector<double> largest((size_t)tokens);
    for (int32_t i : list)
      for (int64_t t = 0; t < tokens; t++) {
        const Near h = of(t, i).h;
        largest[(size_t)t] = std::max(largest[(size_t)t], fabs(h.value) + h.off);
      }
    for (int32_t i : list) {
      Sure fires = NO, some = NO;
      for (int64_t t = 0; t < tokens; t++) {
        const Activity::Neuron n = of(t, i);
        fires = std::max(fires, n.fires);
        some = std::max(some, n.active);
        active.add(n.active);
        if (n.h.value == 0 && n.h.off == 0) continue;
        // h in 8 bits of the largest of its group, none of which is larger than the largest of all
        const double in_8_bits = pi_across(l.down_type) >= 0 ? 1.001 * largest[(size_t)t] / 254 : 0;
        for (int64_t c = 0; c < l.k; c++) {
          const double w = l.down[(size_t)(i * l.k + c)];
          sum[(size_t)(t * l.k + c)] += n.h.value * w;
          size[(size_t)(t * l.k + c)] += (fabs(n.h.value) + n.h.off) * fabs(w);
          off[(size_t)(t * l.k + c)] += (n.h.off + in_8_bits) * fabs(w);
        }
      }
      if (l.gated) up.add(fires);
      down.add(some);
    }
  }
  // That out is before + sum + more, by so many roundings.
  void check(Check& check, const float* out, int64_t ldo, int64_t k, const std::vector<float>& before,
             const std::vector<float>& more, double roundings) const {
    for (size_t i = 0; i < sum.size(); i++) {
      const int64_t t = (int64_t)i / k, c = (int64_t)i % k;
      const double was = before[i], plus = more.empty() ? 0 : more[(size_t)c];
      check.near(out[t * ldo + c], was + sum[i] + plus,
                 off[i] + gamma_of(roundings) * (fabs(was) + size[i] + fabs(plus)), (int64_t)i);
    }
  }
};

void add_case(const PiKernels* kernels, int type, int down_type, int act, bool gated, bool biases) {
  const std::string name = std::string(kernels->name) + " add_neurons " + PI_TYPES[type].name + " " +
                           type_name(down_type) + " " + ACTIVATIONS[act] + (gated ? " gated" : " plain") +
                           (biases ? " with biases" : "");
  // Lists in no order may have a group's neurons apart; where all between them are silent for a token they are added as one
  // group, with another rounding of h. The engine lists groups whole; these seeds have no such token.
  const int number = pi_across(down_type) < 0 ? down_type : PI_N_TYPES + (down_type != PI_Q4_0X32);
  Random r((uint64_t)(type * 1000 + number * 100 + act * 4 + gated * 2 + biases));
  const int64_t k = 96, neurons = 150, most_tokens = PI_NEURON_TOKENS;  // three blocks, the last of them odd
  const Layer layer(r, k, neurons, type, down_type, act, gated, biases);
  const Acts acts(kernels, layer.bundles->forms(), most_tokens, k, r.normals(most_tokens * k));
  const Activity activity(layer, acts, dot_chain(type, k));
  const std::vector<float> before = r.normals(most_tokens * k);
  // Activations of the last tokens; of other neurons nothing may be read.
  std::vector<float> known = r.normals(most_tokens * neurons);
  for (float& a : known)
    if (r.next() % 2) a = 0;
  Check sums(name), counted(name + " counts"), bits(name + " bits of a token alone");
  const auto block = std::make_unique<NeuronBlock>();
  enum { PLAIN, KNOWN, FEW, MANY, KNOWN_FEW, MOST, N_VARIANTS };
  for (int variant = 0; variant < N_VARIANTS; variant++) {
    const bool is_known = variant == KNOWN || variant == KNOWN_FEW, few = variant == FEW || variant == KNOWN_FEW,
               named = few || variant == MANY;
    const float most = variant == MOST ? 0.3f : 0.0f;
    std::vector<uint32_t> names((size_t)neurons);  // by token
    for (uint32_t& word : names)
      for (int t = 0; t < most_tokens; t++) word |= (uint32_t)(r.next() % 8 < (few ? 1u : 6u)) << t;
    for (int64_t tokens : STEPS) {
      const int64_t first = most_tokens - tokens, ld = neurons + 2;
      const PiActs x = acts.from(first);
      Exact<float> given((size_t)((tokens - 1) * ld + neurons), NOT);
      for (int64_t t = 0; t < tokens; t++)
        std::copy_n(&known[(size_t)((first + t) * neurons)], neurons, &given[(size_t)(t * ld)]);
      const auto of = [&](int64_t t, int64_t i) {
        const Sure counts = !named || names[(size_t)i] >> (first + t) & 1 ? YES : NO;
        return is_known ? activity.neuron_of(first + t, i, given[(size_t)(t * ld + i)], counts, most)
                        : activity.neuron(first + t, i, counts, most);
      };
      // From token t on, so many.
      Exact<uint32_t> wanted_by((size_t)neurons);
      const auto firing = [&](int64_t t, int64_t n) {
        for (size_t i = 0; i < wanted_by.size(); i++)
          wanted_by[i] = (uint32_t)(names[i] >> (first + t) & ((uint64_t{1} << n) - 1));
        return Firing{is_known ? given.data() + t * ld : nullptr, ld, named ? wanted_by.data() : nullptr, most};
      };
      for (const List& list : lists((int32_t)neurons)) {
        const Exact<int32_t> index(list.begin(), list.end());
        const Wanted wanted(layer, tokens, list, of);
        const std::vector<float> was(before.begin() + first * k, before.end());
        Exact<float> out(was.begin(), was.end());
        NeuronCounts counts = {5, 6, 7, 9, 8};
        std::vector<int64_t> fired((size_t)neurons);
        add_neurons(kernels, *layer.bundles, &x, tokens, index.data(), (int64_t)index.size(), firing(0, tokens), *block,
                    out.data(), k, counts, fired.data());
        wanted.check(sums, out.data(), k, k, was, {}, 2.0 * (double)list.size() + 1);
        counted.yes(counts.first == 5 + (is_known ? 0 : (int64_t)list.size()), 1);
        counted.yes(wanted.up.holds(counts.up - 6), 2);
        counted.yes(wanted.down.holds(counts.down - 7), 3);
        counted.yes(wanted.active.holds(counts.active - 8), 4);
        counted.yes(std::accumulate(fired.begin(), fired.end(), int64_t{8}) == counts.active, 5);
        if (tokens == 1) continue;
        for (int64_t t = 0; t < tokens; t++) {
          const PiActs one = acts.from(first + t);
          Exact<float> alone(was.begin() + t * k, was.begin() + (t + 1) * k);
          add_neurons(kernels, *layer.bundles, &one, 1, index.data(), (int64_t)index.size(), firing(t, 1), *block,
                      alone.data(), k, counts);
          for (int64_t c = 0; c < k; c++) bits.same(alone[(size_t)c], out[(size_t)(t * k + c)], t * k + c);
        }
      }
    }
  }
}

void test_add_neurons(const PiKernels* kernels) {
  const int types[][2] = {{PI_F16, PI_F16},   {PI_Q8_0, PI_Q8_0},    {PI_BF16, PI_Q4_0},
                          {PI_Q4_0, PI_BF16}, {PI_Q4_0, PI_Q4_0X32}, {PI_Q4_1, PI_Q4_1X32}};
  for (int act = 0; act < N_ACTS; act++) {
    for (bool gated : {false, true}) {
      if (act == PI_DRELU && !gated) continue;  // it is on gate and up
      for (const auto& t : types)
        for (bool biases : {false, true}) add_case(kernels, t[0], t[1], act, gated, biases);
    }
  }
}

// Any bytes as bundles, behind the last element too, and activations that are no numbers: no operation is undefined,
// nothing else is touched, and a token's results do not depend on what is beside it.
void test_hostile(const PiKernels* kernels) {
  std::vector<std::pair<int, int>> types = {{PI_Q4_0, PI_Q4_0X32}, {PI_Q4_1, PI_Q4_1X32}};
  for (int type : ROW_TYPES) types.push_back({type, type});
  for (const auto& [type, down_type] : types) {
    for (int act = 0; act < N_ACTS; act++) {
      Check check(std::string(kernels->name) + " any bundles " + PI_TYPES[type].name + " " + type_name(down_type) +
                  " " + ACTIVATIONS[act]);
      Random r((uint64_t)(type * 10 + act));
      const int64_t k = 96, neurons = 70, tokens = PI_NEURON_TOKENS;
      Layer layer(r, k, neurons, type, down_type, act, true, false);
      for (uint8_t& b : layer.data) b = (uint8_t)r.next();
      std::vector<float> x = r.normals(tokens * k);
      const float odd[] = {NAN, INFINITY, -INFINITY, 3e38f, -3e38f, 1e-45f};
      for (int i = 0; i < 6; i++) x[(size_t)(i * k + 40)] = odd[i];
      const Acts acts(kernels, layer.bundles->forms(), tokens, k, x);
      const List list = lists((int32_t)neurons)[1];
      const Exact<int32_t> index(list.begin(), list.end());
      const auto block = std::make_unique<NeuronBlock>();
      NeuronCounts counts = {};
      Exact<float> out((size_t)(tokens * k), 1.0f);
      const PiActs all = acts.from(0);
      add_neurons(kernels, *layer.bundles, &all, tokens, index.data(), neurons, {nullptr, 0, nullptr, 0}, *block,
                  out.data(), k, counts);
      for (int64_t t = 0; t < tokens; t++) {
        const PiActs one = acts.from(t);
        Exact<float> alone((size_t)k, 1.0f);
        add_neurons(kernels, *layer.bundles, &one, 1, index.data(), neurons, {nullptr, 0, nullptr, 0}, *block,
                    alone.data(), k, counts);
        std::vector<float> h((size_t)neurons);
        multiply_neurons(kernels, *layer.bundles, &one, 1, index.data(), neurons, {nullptr, 0, nullptr, 0}, *block,
                         h.data(), neurons, counts);
        // A group's factor is any number where one of its h is none.
        const bool any = pi_across(down_type) >= 0 && std::any_of(h.begin(), h.end(), [](float v) { return isnan(v); });
        for (int64_t c = 0; c < k; c++) {
          // Beside a token whose number is none, rows of zeros are no longer left out: zero times infinity.
          const float a = alone[(size_t)c], b = out[(size_t)(t * k + c)];
          check.yes(a == b || isnan(b) || any, t * k + c);
        }
      }
    }
  }
}

// ---- The sparse FFN -------------------------------------------------------------------------------------------------

std::shared_ptr<Matrix> matrix_of(const std::shared_ptr<Arena>& arena, int type, int64_t rows, int64_t k,
                                  const std::vector<uint8_t>& stored) {
  auto m = std::make_shared<Matrix>(Matrix{type, rows, k, (rows + 15) / 16, nullptr, arena});
  uint8_t* data = arena->allocate(m->bytes());
  pack_panels(type, stored.data(), rows, k, nullptr, 0, data, 0, m->panels);
  m->data = data;
  return m;
}

struct FfnCase {
  int64_t k, neurons;
  int type, act;
  bool gated, biases, norm;
  float most;
};

// One FFN as a program, its down in F16.
struct FfnModel {
  static constexpr int64_t RANK = 8;
  Random r;
  FfnCase what;
  Layer layer;
  Norm norm;
  std::vector<float> down_bias, x;
  std::vector<uint8_t> predictor_in, predictor_out;

  explicit FfnModel(const FfnCase& c)
      : r((uint64_t)(c.k * 31 + c.neurons * 7 + c.type * 3 + c.act)),
        what(c),
        layer(r, c.k, c.neurons, c.type, PI_F16, c.act, c.gated, c.biases) {
    if (c.norm) norm = {r.normals(c.k), {}, 1e-5f, false};
    if (c.biases) down_bias = r.normals(c.k);
    x = r.normals(PI_NEURON_TOKENS * c.k);
    predictor_in = random_rows(r, PI_F16, RANK, c.k);
    predictor_out = random_rows(r, PI_F16, c.neurons, RANK);
  }

  struct Wired {
    std::unique_ptr<Program> program;
    std::shared_ptr<Ffn> ffn;
  };

  // The dense operator; its bundles are there, and its predictor where one is described. bundles: null: the layer's.
  Wired program(const PiKernels* kernels, int threads, const Predictor* about, int64_t recall_every,
                std::shared_ptr<Bundles> bundles = nullptr) const {
    auto workspace = std::make_shared<Workspace>(std::make_shared<Pool>(threads), kernels);
    auto arena = std::make_shared<Arena>();
    auto cache = std::make_shared<Cache>(PI_KV_F32, std::vector<std::pair<int64_t, int64_t>>{{1, 16}}, 1);
    auto p = std::make_unique<Program>(workspace, cache, Sizes{PI_NEURON_TOKENS, what.k, what.neurons, {1}});
    std::vector<uint8_t> columns((size_t)(2 * what.k * what.neurons));
    for (int64_t i = 0; i < what.neurons; i++)
      for (int64_t c = 0; c < what.k; c++)
        memcpy(&columns[(size_t)(2 * (c * what.neurons + i))], &layer.down_rows[(size_t)(2 * (i * what.k + c))], 2);
    auto dense = std::make_shared<DenseNeurons>(
        layer.bundles->spec, what.gated ? matrix_of(arena, what.type, what.neurons, what.k, layer.gate_rows) : nullptr,
        matrix_of(arena, what.type, what.neurons, what.k, layer.up_rows),
        matrix_of(arena, PI_F16, what.k, what.neurons, columns));
    auto ffn = p->ffn({norm, {}, down_bias}, std::move(dense));
    std::shared_ptr<Predictor> predictor;
    if (about) {
      predictor = std::make_shared<Predictor>(matrix_of(arena, PI_F16, RANK, what.k, predictor_in),
                                              matrix_of(arena, PI_F16, what.neurons, RANK, predictor_out),
                                              about->threshold, about->floor);
    }
    auto bundled = std::make_shared<NeuronSum>(workspace, bundles ? bundles : layer.bundles, what.most, false);
    ffn->set_bundled(std::move(bundled), std::move(predictor), recall_every);
    return {std::move(p), std::move(ffn)};
  }

  // x of the last tokens after one step.
  std::vector<float> run(const Wired& wired, int64_t tokens, Way way) const {
    Program& p = *wired.program;
    Way ways[PI_NEURON_TOKENS];
    std::fill(ways, ways + PI_NEURON_TOKENS, way);
    wired.ffn->set_ways(ways);
    const int64_t first = PI_NEURON_TOKENS - tokens;
    for (int64_t t = 0; t < tokens; t++) std::copy_n(&x[(size_t)((first + t) * what.k)], what.k, p.x + t * p.ldx);
    const std::vector<int32_t> zeros((size_t)tokens, 0);
    Step step;
    step.tokens = tokens;
    step.token = step.position = zeros.data();
    p.run(step, 0, 1);
    std::vector<float> out;
    for (int64_t t = 0; t < tokens; t++) out.insert(out.end(), p.x + t * p.ldx, p.x + t * p.ldx + what.k);
    return out;
  }

  // What the predictor guesses, [token][neuron].
  std::vector<Near> guesses() const {
    std::vector<float> in((size_t)(RANK * what.k)), out((size_t)(what.neurons * RANK));
    unpack_row(PI_F16, predictor_in.data(), (int64_t)in.size(), in.data());
    unpack_row(PI_F16, predictor_out.data(), (int64_t)out.size(), out.data());
    std::vector<Near> z;
    for (int64_t t = 0; t < PI_NEURON_TOKENS; t++) {
      Near hidden[RANK];
      for (int64_t j = 0; j < RANK; j++) {
        double sum = 0, size = 0;
        for (int64_t c = 0; c < what.k; c++) {
          const double term = (double)in[(size_t)(j * what.k + c)] * x[(size_t)(t * what.k + c)];
          sum += term;
          size += fabs(term);
        }
        const Near s{sum, gamma_of(2.0 * (double)what.k) * size};
        hidden[j] = where(above(s, 0), s);
      }
      for (int64_t i = 0; i < what.neurons; i++) {
        double sum = 0, size = 0, off = 0;
        for (int64_t j = 0; j < RANK; j++) {
          const double w = out[(size_t)(i * RANK + j)];
          sum += w * hidden[j].value;
          size += fabs(w) * (fabs(hidden[j].value) + hidden[j].off);
          off += fabs(w) * hidden[j].off;
        }
        z.push_back({sum, off + gamma_of(2.0 * (double)RANK) * size});
      }
    }
    return z;
  }
};

// Which neurons are candidates, [token][neuron]; clear: whether it is sure that the floor was needed or not.
std::vector<Sure> candidates(const std::vector<Near>& z, int64_t neurons, const Predictor& about, Check& clear) {
  std::vector<Sure> sure(z.size());
  for (int64_t t = 0; t < PI_NEURON_TOKENS; t++) {
    const Near* own = &z[(size_t)(t * neurons)];
    Sure* named = &sure[(size_t)(t * neurons)];
    const int64_t floor = std::min(about.floor, neurons);
    Range n;
    for (int64_t i = 0; i < neurons; i++) {
      named[i] = own[i].value - own[i].off >= about.threshold   ? YES
                 : own[i].value + own[i].off >= about.threshold ? MAYBE
                                                                : NO;
      n.add(named[i]);
    }
    clear.yes(n.least >= floor || n.most < floor, t);
    if (n.least >= floor) continue;
    // The largest, and of equals the first.
    std::vector<int64_t> order;
    for (int64_t i = 0; i < neurons; i++) order.push_back(i);
    std::stable_sort(order.begin(), order.end(), [own](int64_t a, int64_t b) { return own[a].value > own[b].value; });
    for (int64_t at = 0; at < neurons; at++) {
      const bool taken = at < floor;
      if (taken && floor == neurons) {
        named[order[(size_t)at]] = YES;
        continue;
      }
      const Near one = own[order[(size_t)at]], other = own[order[(size_t)(taken ? floor : floor - 1)]];
      const bool sure_of_it = fabs(one.value - other.value) > one.off + other.off || (one.off == 0 && other.off == 0);
      named[order[(size_t)at]] = !sure_of_it ? MAYBE : taken ? YES : NO;
    }
  }
  return sure;
}

void ffn_case(const PiKernels* kernels, const FfnCase& c) {
  const std::string name = std::string(kernels->name) + " sparse FFN " + PI_TYPES[c.type].name + " " +
                           ACTIVATIONS[c.act] + (c.gated ? " gated" : " plain") + (c.biases ? " with biases" : "") +
                           " k=" + std::to_string(c.k) + " neurons=" + std::to_string(c.neurons);
  const FfnModel model(c);
  const Layer& layer = model.layer;
  std::vector<float> normed = model.x;
  if (c.norm)
    for (int64_t t = 0; t < PI_NEURON_TOKENS; t++)
      kernels->rms_norm(&model.x[(size_t)(t * c.k)], model.norm.w.data(), c.k, model.norm.eps,
                        &normed[(size_t)(t * c.k)]);
  const Acts acts(kernels, pi_form(c.type), PI_NEURON_TOKENS, c.k, normed);
  // Panels add up all k one after the other; blocks, as bundles do, two roundings each and one for the factors.
  const Activity activity(layer, acts, 2.0 * (double)c.k + 12);
  const std::vector<Near> z = model.guesses();
  std::vector<double> middle;
  for (const Near& one : z) middle.push_back(one.value);
  std::nth_element(middle.begin(), middle.begin() + (int64_t)middle.size() / 2, middle.end());
  const float median = (float)middle[middle.size() / 2];
  List all;
  for (int32_t i = 0; i < c.neurons; i++) all.push_back(i);
  // A sum over the neurons in parts, then those of the threads, the bias and x.
  const double roundings = 2.0 * (double)c.neurons + 6;
  Check dense(name + " dense"), exact(name + " exact"), predicted(name + " predicted"), counted(name + " counts"),
      again(name + " bits again, sampled or not"), clear(name + " floor is clear");
  const Predictor plans[] = {{nullptr, nullptr, median, 0},
                             {nullptr, nullptr, 1e6f, 7},
                             {nullptr, nullptr, median, c.neurons * 19 / 32},
                             {nullptr, nullptr, 1e6f, c.neurons},
                             {nullptr, nullptr, 1e6f, 0}};
  for (int plan = 0; plan < 5; plan++) {
    if (never_silent(c.act) && plan) break;  // no predictor names what is never silent
    const std::vector<Sure> named = candidates(z, c.neurons, plans[plan], clear);
    for (int threads : {1, 2, 3}) {
      const FfnModel::Wired wired = model.program(kernels, threads, &plans[plan], 2);
      const Ffn& ffn = *wired.ffn;
      for (int64_t tokens : STEPS) {
        if (plan && tokens != 1 && tokens != 2 && tokens != 9) continue;
        const int64_t first = PI_NEURON_TOKENS - tokens;
        const std::vector<float> was(model.x.begin() + first * c.k, model.x.end());
        wired.ffn->clear();
        Range fires, some;
        for (int64_t t = 0; t < tokens; t++)
          for (int64_t i = 0; i < c.neurons; i++) fires.add(activity.neuron(first + t, i, YES, c.most).fires);
        if (plan == 0) {
          const Wanted every(layer, tokens, all,
                             [&](int64_t t, int64_t i) { return activity.neuron(first + t, i, YES, 0); });
          every.check(dense, model.run(wired, tokens, WAY_DENSE).data(), c.k, c.k, was, model.down_bias, roundings);
          const Wanted wanted(layer, tokens, all,
                              [&](int64_t t, int64_t i) { return activity.neuron(first + t, i, YES, c.most); });
          const std::vector<float> out = model.run(wired, tokens, WAY_EXACT);
          wanted.check(exact, out.data(), c.k, c.k, was, model.down_bias, roundings);
          const Ffn::Counts counts = ffn.counts();
          const NeuronStats& stats = counts.neurons;
          counted.yes(stats.steps == 1 && counts.exact_steps == 1 && stats.tokens == tokens && stats.first_rows == 0 &&
                          counts.recall.tokens == 0,
                      1);
          counted.yes(fires.holds(stats.candidates), 2);
          counted.yes(
              wanted.active.holds(stats.active) && wanted.up.holds(stats.up_rows) && wanted.down.holds(stats.down_rows),
              3);
          const std::vector<float> twice = model.run(wired, tokens, WAY_EXACT);
          for (size_t i = 0; i < out.size(); i++) again.same(twice[i], out[i], (int64_t)i);
          wired.ffn->clear();
        }
        if (never_silent(c.act)) continue;
        const auto is_named = [&](int64_t t, int64_t i) { return named[(size_t)((first + t) * c.neurons + i)]; };
        const Wanted wanted(layer, tokens, all, [&](int64_t t, int64_t i) {
          return activity.neuron(first + t, i, is_named(t, i), c.most);
        });
        Range listed, rows, active, found;
        for (int64_t i = 0; i < c.neurons; i++) {
          Sure any = NO;
          for (int64_t t = 0; t < tokens; t++) {
            const Sure one = is_named(t, i), lives = activity.neuron(first + t, i, YES, 0).active;
            any = std::max(any, one);
            listed.add(one);
            active.add(lives);
            found.add(std::min(one, lives));
          }
          rows.add(any);
        }
        const std::vector<float> out =
            model.run(wired, tokens, WAY_PREDICTED);  // the first step is sampled, the next is not
        wanted.check(predicted, out.data(), c.k, c.k, was, model.down_bias, roundings);
        const Ffn::Counts counts = ffn.counts();
        const NeuronStats& stats = counts.neurons;
        counted.yes(
            stats.steps == 1 && counts.exact_steps == 0 && stats.tokens == tokens && counts.recall.tokens == tokens, 4);
        counted.yes(listed.holds(stats.candidates) && rows.holds(stats.first_rows), 5);
        counted.yes(
            wanted.active.holds(stats.active) && wanted.up.holds(stats.up_rows) && wanted.down.holds(stats.down_rows),
            6);
        counted.yes(active.holds(counts.recall.active) && found.holds(counts.recall.found), 7);
        const std::vector<float> twice = model.run(wired, tokens, WAY_PREDICTED);
        for (size_t i = 0; i < out.size(); i++) again.same(twice[i], out[i], (int64_t)i);
        const Ffn::Counts later = ffn.counts();
        counted.yes(
            later.neurons.steps == 2 && later.recall.tokens == tokens && later.recall.active == counts.recall.active,
            8);
      }
    }
  }
  if (predicted.all == 0) predicted.yes(never_silent(c.act), 0);
}

// Counters are read while a job that has counted one of its two steps waits for the reader: the reader sees both.
void counters_between_jobs(const PiKernels* kernels) {
  Check check(std::string(kernels->name) + " counters between jobs");
  Random r(5);
  const int64_t k = 64, neurons = 70, tokens = 3;
  Layer layer(r, k, neurons, PI_F16, PI_F16, PI_RELU, true, false);
  const std::vector<float> x = r.normals(tokens * k);
  for (int threads : {1, 2}) {
    const auto workspace = std::make_shared<Workspace>(std::make_shared<Pool>(threads), kernels);
    NeuronSum sum(workspace, layer.bundles, 0, true);
    std::vector<float> out((size_t)(tokens * k));
    std::atomic<int64_t> reads{0};
    std::atomic<bool> halfway{false}, over{false};
    std::thread reader([&] {
      while (!over) {
        if (!halfway) {
          std::this_thread::yield();
          continue;
        }
        const NeuronStats stats = sum.stats();
        check.yes(stats.steps % 2 == 0 && stats.tokens == tokens * stats.steps, stats.steps);
        reads++;
      }
    });
    const auto step = [&](int thread) {
      sum.sum_selected(thread, {{x.data(), k, k, tokens}, {}, {out.data(), k, false, {}}, true});
    };
    const int64_t jobs = 20;
    for (int64_t job = 0; job < jobs; job++) {
      workspace->pool->run([&](int thread) {
        step(thread);
        if (thread == 0) {
          const int64_t before = reads;
          halfway = true;
          // A reader that does not wait for the job reads now. By time: on a busy machine a turn takes many milliseconds.
          const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(2);
          while (reads == before && std::chrono::steady_clock::now() < until) std::this_thread::yield();
        }
        step(thread);
      });
    }
    over = true;
    reader.join();
    check.yes(sum.stats().steps == 2 * jobs, jobs);
    std::vector<int64_t> fired((size_t)neurons), none = fired;
    const int64_t active = sum.stats().active;
    sum.take_fired(fired.data());
    check.yes(active > 0 && std::accumulate(fired.begin(), fired.end(), int64_t{0}) == active, 0);
    sum.take_fired(fired.data());
    check.yes(fired == none, 1);
  }
}

// A predictor of any bytes: its guesses may be no numbers, and there is still an order among them.
void hostile_predictor(const PiKernels* kernels) {
  Check check(std::string(kernels->name) + " any predictor");
  FfnModel model({100, 150, PI_F16, PI_RELU, true, false, true, 0});
  for (uint8_t& b : model.predictor_out) b = (uint8_t)model.r.next();
  for (int64_t floor : {1, 40, 150}) {
    const Predictor about{nullptr, nullptr, 1e6f, floor};
    for (int64_t tokens : {1, 8}) {
      int64_t candidates = 0;
      for (int threads : {1, 2, 3}) {
        const FfnModel::Wired wired = model.program(kernels, threads, &about, 0);
        model.run(wired, tokens, WAY_PREDICTED);
        const int64_t now = wired.ffn->counts().neurons.candidates;
        check.yes(now >= floor * tokens && now <= 150 * tokens && (threads == 1 || now == candidates), floor);
        candidates = now;
      }
    }
  }
}

// The layer's bundles in a file, of which memory has some: the same bits, whatever is there already.
void neurons_on_disk(const PiKernels* kernels, int type) {
  Check check(std::string(kernels->name) + " neurons on disk " + PI_TYPES[type].name);
  FfnModel model({160, 333, type, PI_RELU, true, true, true, 0});
  const Layer& layer = model.layer;
  const PiRows& up = layer.bundles->up;
  const File file(std::vector<uint8_t>(layer.data.begin(), layer.data.end()));
  const Predictor about{nullptr, nullptr, 0.0f, 40};
  for (int threads : {1, 3})
    for (const bool direct : {false, true})
      for (const int64_t n : {NeuronSum::least_slots(Pool(threads), layer.neurons), layer.neurons}) {
        const Resting part{0, 0, up.pitch, up.pitch, PI_GROUP, up.stride};
        auto reads = std::make_shared<Reads>(std::vector<Reads::File>{file.about()}, direct);
        auto bundles = std::make_shared<Bundles>(*layer.bundles);
        bundles->slots = std::make_shared<Slots>(reads, std::vector<Resting>{part}, layer.neurons, n);
        for (PiRows* rows : {&bundles->gate, &bundles->up, &bundles->down})
          *rows = {bundles->slots->memory(), 0,       0,      rows->at, rows->k, rows->type,
                   bundles->slots->lines(),  nullptr, nullptr};
        const FfnModel::Wired here = model.program(kernels, threads, &about, 0),
                              there = model.program(kernels, threads, &about, 0, bundles);
        for (int round = 0; round < 2; round++)
          for (int64_t tokens : STEPS)
            for (const Way way : {WAY_PREDICTED, WAY_EXACT}) {
              const std::vector<float> wanted = model.run(here, tokens, way), got = model.run(there, tokens, way);
              for (size_t i = 0; i < wanted.size(); i++) check.same(got[i], wanted[i], (int64_t)i);
            }
        const Slots::Stats stats = bundles->slots->stats();
        check.yes(stats.hits > 0 && stats.hits < stats.wanted, n);
      }
}

template <class Call>
bool is_refused(const Call& call) {
  try {
    call();
  } catch (const std::invalid_argument&) { return true; }
  return false;
}

// The same where memory has the first rows of some neurons, and the disk what else those that fire need.
void firing_neurons_on_disk(const PiKernels* kernels, int type, bool gated) {
  Check check(std::string(kernels->name) + " firing neurons on disk " + PI_TYPES[type].name);
  FfnModel model({160, 333, type, PI_RELU, gated, true, true, 0.1f});
  const Layer& layer = model.layer;
  const PiRows &up = layer.bundles->up, &first = layer.bundles->first();
  const int64_t k = up.k, bytes = pi_row_bytes(first.type, k), n = layer.neurons;
  const File file(std::vector<uint8_t>(layer.data.begin(), layer.data.end()));
  for (int threads : {1, 3}) {
    auto workspace = std::make_shared<Workspace>(std::make_shared<Pool>(threads), kernels);
    workspace->reserve(PI_NEURON_TOKENS, k);
    for (const bool direct : {false, true})
      for (const int64_t slots : {NeuronSum::least_slots(Pool(threads), n), n}) {
        // First rows lie at the beginning of each bundle.
        const Resting part{0, bytes, up.pitch - bytes, up.pitch, PI_GROUP, up.stride};
        auto reads = std::make_shared<Reads>(std::vector<Reads::File>{file.about()}, direct);
        auto bundles = std::make_shared<Bundles>(*layer.bundles);
        bundles->slots = std::make_shared<Slots>(reads, std::vector<Resting>{part}, n, slots);
        bundles->firsts = false;
        for (PiRows* rows : {&bundles->gate, &bundles->up, &bundles->down})
          if (rows->groups)
            *rows = {bundles->slots->memory(), 0,       0,      std::max(rows->at - bytes, (int64_t)0), k, rows->type,
                     bundles->slots->lines(),  nullptr, nullptr};
        NeuronSum here(workspace, layer.bundles, model.what.most, true),
            there(workspace, bundles, model.what.most, true);
        std::vector<float> wanted((size_t)(PI_NEURON_TOKENS * k)), got = wanted;
        check.yes(is_refused([&] { there.sum(model.x.data(), 1, nullptr, nullptr, got.data()); }), slots);
        for (const int64_t every : {1, 3}) {
          std::vector<int32_t> members;
          for (int64_t i = 0; i < n; i += every) members.push_back((int32_t)i);
          there.keep(members);
          for (const int32_t i : members) {
            check.yes(is_refused([&] { there.sum(model.x.data(), 1, nullptr, nullptr, got.data()); }), i);
            there.add_firsts(pi_row(&first, i), 1);
          }
          check.yes(is_refused([&] { there.add_firsts(layer.data.data(), 1); }), every);
          for (int64_t tokens : STEPS) {
            for (const bool all : {true, false}) {
              std::vector<uint8_t> selected((size_t)(tokens * n)), of_members;
              std::vector<float> weight((size_t)tokens, 1.0f);
              for (int64_t t = 0; t < tokens; t++) {
                if (!all) weight[(size_t)t] = (float)(t % 3);
                for (const int32_t i : members)
                  of_members.push_back(selected[(size_t)(t * n + i)] = all || (i / every + t) % 2);
              }
              here.clear();
              there.clear();
              here.sum(model.x.data(), tokens, selected.data(), weight.data(), wanted.data());
              there.sum(model.x.data(), tokens, all ? nullptr : of_members.data(), all ? nullptr : weight.data(),
                        got.data());
              for (int64_t i = 0; i < tokens * k; i++) check.same(got[(size_t)i], wanted[(size_t)i], i);
            }
            const NeuronStats own = there.stats(), other = here.stats();
            check.yes(own.active == other.active && own.first_rows == other.first_rows &&
                          own.up_rows == other.up_rows && own.down_rows == other.down_rows &&
                          (own.active > 0 || tokens == 1),
                      tokens);
          }
        }
        const Slots::Stats stats = bundles->slots->stats();
        check.yes(stats.hits > 0 && stats.hits < stats.wanted, slots);
      }
  }
}

void test_sparse_ffn(const PiKernels* kernels) {
  const FfnCase cases[] = {
      {100, 150, PI_F16, PI_RELU, true, false, true, 0},      {576, 333, PI_F16, PI_DRELU, true, true, true, 0},
      {17, 5, PI_F16, PI_RELU, false, true, false, 0},        {100, 150, PI_F16, PI_FATRELU, true, true, true, 0},
      {100, 150, PI_F16, PI_RELU2, false, false, true, 0},    {100, 150, PI_F16, PI_SILU, true, false, true, 0.05f},
      {576, 150, PI_Q8_0, PI_RELU, true, false, true, 0},     {96, 150, PI_Q4_0, PI_RELU2, false, true, true, 0},
      {100, 150, PI_BF16, PI_FATRELU, true, false, false, 0},
  };
  for (const FfnCase& c : cases) ffn_case(kernels, c);
  counters_between_jobs(kernels);
  hostile_predictor(kernels);
  for (int type : ROW_TYPES) neurons_on_disk(kernels, type);
  for (int type : ROW_TYPES)
    for (const bool gated : {false, true}) firing_neurons_on_disk(kernels, type, gated);
}

}  // namespace

int main() {
  watch_fences();
  test_rows();
  for (const PiKernels* kernels : supported_levels()) {
    const int before = passed, wrong = failed;
    test_dots(kernels);
    test_add(kernels);
    for (int type : ACROSS) test_add_groups(kernels, type);
    test_keep(kernels);
    test_fires(kernels);
    test_add_neurons(kernels);
    test_hostile(kernels);
    test_sparse_ffn(kernels);
    printf("%-12s %d passed, %d failed\n", kernels->name, passed - before, failed - wrong);
    fflush(stdout);
  }
  printf("%d passed, %d failed\n", passed, failed);
  return failed ? 1 : 0;
}
