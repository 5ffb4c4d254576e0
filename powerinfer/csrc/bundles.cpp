#include "bundles.h"

#include <math.h>
#include <string.h>

#include <algorithm>

#include "pack.h"

namespace {

// Where the code of element i of a Q4_0 part lies: the byte, and whether in its high nibble.
int64_t nibble(int kind, int64_t i, bool* high) {
  const int64_t base = i / 128 * 64, j = i % 128;
  *high = kind == PI_DOT ? j >= 64 : j / 16 % 2;
  return base + (kind == PI_DOT ? j % 64 : j % 16 * 4 + j / 32);
}

// One block on its way: `n` neurons are left of it.
struct Work {
  const PiKernels* kernels;
  const Bundles& b;
  const PiActs* x;
  int64_t tokens;
  NeuronBlock& block;
  int64_t n;

  float* h(int64_t t) const { return block.h + t * NeuronBlock::NEURONS; }
  float* more(int64_t t) const { return block.more + t * NeuronBlock::NEURONS; }

  void dots(const PiPart& part, const std::vector<float>& bias, float* out) const {
    kernels->neurons->dots(&part, block.index, n, x, tokens, out, NeuronBlock::NEURONS);
    if (bias.empty()) return;
    for (int64_t t = 0; t < tokens; t++) for (int64_t j = 0; j < n; j++) out[t * NeuronBlock::NEURONS + j] += bias[(size_t)block.index[j]];
  }

  // Activations of the first product; zero where a neuron does not count for a token.
  void activate(const Firing& f) {
    if (!f.known) dots(b.first(), b.first_bias(), block.h);
    for (int64_t t = 0; t < tokens; t++) {
      float* a = h(t);
      if (f.known) for (int64_t j = 0; j < n; j++) a[j] = f.known[t * f.ld + block.index[j]];
      else kernels->activate(b.act == PI_DRELU ? PI_RELU : b.act, b.threshold, a, nullptr, pi_round_up(n, PI_LANES));
      if (f.guess) for (int64_t j = 0; j < n; j++) if (f.guess[t * f.ld + block.index[j]] <= f.above) a[j] = 0.0f;
      if (f.most > 0.0f) for (int64_t j = 0; j < n; j++) if (fabsf(a[j]) <= f.most) a[j] = 0.0f;
    }
  }

  void multiply_up() {
    dots(b.up, b.up_bias, block.more);
    for (int64_t t = 0; t < tokens; t++) {
      float *a = h(t), *u = more(t);
      if (b.act == PI_DRELU) kernels->activate(PI_RELU, 0.0f, u, nullptr, pi_round_up(n, PI_LANES));
      for (int64_t j = 0; j < n; j++) a[j] *= u[j];
    }
  }

  // Neurons that are zero for every token leave; returns how many of all tokens' are not zero.
  int64_t drop_zeros() {
    int64_t counts[PI_NEURON_TOKENS] = {0}, sum = 0;
    n = kernels->neurons->keep(block.h, NeuronBlock::NEURONS, tokens, n, 1, 0.0f, 0, block.position, counts);
    for (int64_t j = 0; j < n; j++) block.index[j] = block.index[block.position[j]];
    for (int64_t t = 0; t < tokens; t++) {
      float* a = h(t);
      for (int64_t j = 0; j < n; j++) a[j] = a[block.position[j]];
      sum += counts[t];
    }
    return sum;
  }
};

}  // namespace

void pack_part(int type, int kind, int64_t rows, int64_t k, const uint8_t* src, uint8_t* dst, int64_t stride) {
  const int64_t row_bytes = stored_row_bytes(type, k), codes = pi_part_codes(type, k), bytes = pi_part_bytes(type, k);
  for (int64_t r = 0; r < rows; r++, src += row_bytes, dst += stride) {
    memset(dst, 0, (size_t)bytes);
    if (type == PI_F16 || type == PI_BF16) {
      memcpy(dst, src, (size_t)row_bytes);
      continue;
    }
    for (int64_t b = 0; b < k / 32; b++) {
      const uint8_t* block = src + b * (type == PI_Q8_0 ? 34 : 18);
      memcpy(dst + codes + 2 * b, block, 2);
      if (type == PI_Q8_0) {
        memcpy(dst + 32 * b, block + 2, 32);
        continue;
      }
      for (int i = 0; i < 32; i++) {
        bool high;
        uint8_t* at = dst + nibble(kind, 32 * b + i, &high);
        const int code = i < 16 ? block[2 + i] & 15 : block[2 + i - 16] >> 4;
        *at = (uint8_t)(*at | (high ? code << 4 : code));
      }
    }
  }
}

void unpack_part(int type, int kind, int64_t k, const uint8_t* part, float* out) {
  if (type == PI_F16 || type == PI_BF16) return unpack_row(type, part, k, out);
  std::vector<uint8_t> row((size_t)stored_row_bytes(type, k));
  const int64_t codes = pi_part_codes(type, k);
  for (int64_t b = 0; b < k / 32; b++) {
    uint8_t* block = row.data() + b * (type == PI_Q8_0 ? 34 : 18);
    memcpy(block, part + codes + 2 * b, 2);
    if (type == PI_Q8_0) {
      memcpy(block + 2, part + 32 * b, 32);
      continue;
    }
    for (int i = 0; i < 32; i++) {
      bool high;
      const uint8_t byte = part[nibble(kind, 32 * b + i, &high)];
      const int code = high ? byte >> 4 : byte & 15;
      uint8_t* at = block + 2 + i % 16;
      *at = (uint8_t)(i < 16 ? code : *at | code << 4);
    }
  }
  unpack_row(type, row.data(), k, out);
}

void add_neurons(const PiKernels* kernels, const Bundles& b, const PiActs* x, int64_t tokens, const int32_t* index, int64_t n, const Firing& firing, NeuronBlock& block,
                 float* out, int64_t ldo, NeuronCounts& counts) {
  for (int64_t j = 0; j < n; j += NeuronBlock::NEURONS) {
    Work w{kernels, b, x, tokens, block, std::min(n - j, (int64_t)NeuronBlock::NEURONS)};
    memcpy(block.index, index + j, (size_t)w.n * sizeof *index);
    if (!firing.known) counts.first += w.n;
    w.activate(firing);
    int64_t active = w.drop_zeros();
    if (b.gated()) {
      counts.up += w.n;
      w.multiply_up();
      active = w.drop_zeros();
    }
    counts.active += active;
    counts.down += w.n;
    kernels->neurons->add(&b.down, block.index, w.n, block.h, NeuronBlock::NEURONS, tokens, out, ldo);
  }
}
