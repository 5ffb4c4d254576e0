#include "watch.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include <algorithm>

namespace {

int bin_of(float a) {
  uint32_t raw;
  memcpy(&raw, &a, 4);
  const int bin = (int)((raw & 0x7fffffffu) >> 19) - (127 + Watch::LOW) * Watch::PER_OCTAVE;
  return std::clamp(bin, 0, Watch::BINS - 1);
}

}  // namespace

Watch::Watch(const PiKernels* kernels, int64_t d_ff, int64_t max_tokens, int threads)
    : d_ff(d_ff),
      max_tokens(max_tokens),
      words(pi_round_up(d_ff, 2 * PI_LANES) / PI_LANES),
      counts((size_t)(words * PI_LANES)),
      bits((size_t)(max_tokens * words)),
      magnitudes((size_t)threads * BINS),
      damaged((size_t)threads),
      kernels_(kernels),
      activated_((size_t)threads, Vector((size_t)(words * PI_LANES))) {}

void Watch::clear() {
  std::fill(counts.begin(), counts.end(), 0);
  std::fill(bits.begin(), bits.end(), 0);
  std::fill(magnitudes.begin(), magnitudes.end(), 0);
  std::fill(damaged.begin(), damaged.end(), 0);
}

bool Watch::suits(int64_t neurons, int64_t tokens, int threads) const {
  return d_ff == neurons && max_tokens == tokens && (int)damaged.size() == threads;
}

void Watch::before(const Look& look, int64_t i, const Activation& activation, const float* limits, const float* first,
                   const float* up) {
  int odd = kernels_->neurons.fires(first, look.lanes, FLT_MAX, nullptr);
  if (up) odd |= kernels_->neurons.fires(up, look.lanes, FLT_MAX, nullptr);
  if (odd) damaged[(size_t)look.thread] = 1;
  if (!gate) return;
  float* a = activated_[(size_t)look.thread].data();
  memcpy(a, first, (size_t)look.lanes * 4);
  activation.apply_first(kernels_, a, look.lanes, limits);
  kernels_->neurons.fires(a, look.lanes, threshold, bits_of(look, i));
  if (!measure) return;
  int64_t* bins = magnitudes.data() + look.thread * BINS;
  for (int64_t j = 0; j < look.n; j++) bins[bin_of(a[j])]++;
}

void Watch::after(const Look& look, int64_t i, float* h) {
  if (!gate) kernels_->neurons.fires(h, look.lanes, 0.0f, bits_of(look, i));
  if (!silence) return;
  const float* a = activated_[(size_t)look.thread].data();
  for (int64_t j = 0; j < look.n; j++) h[j] = fabsf(a[j]) <= threshold ? 0.0f : h[j];
}

// Adds up the bits of a column of words: up to 64 counters at once, bit i of each in planes[i].
void Watch::count(const Look& look, int64_t tokens) {
  const int64_t first = look.c0 / PI_LANES, n = look.lanes / PI_LANES;
  for (int64_t w = 0; w < n; w += 4) {
    const int64_t some = std::min<int64_t>(n - w, 4);
    const uint16_t* column = bits.data() + first + w;
    uint64_t planes[32] = {};
    int used = 0;
    for (int64_t i = 0; i < tokens; i++) {
      uint64_t carry = 0;
      if (some == 4) memcpy(&carry, column + i * words, 8);
      else memcpy(&carry, column + i * words, (size_t)some * 2);
      for (int plane = 0; carry; plane++) {
        const uint64_t both = planes[plane] & carry;
        planes[plane] ^= carry;
        carry = both;
        used = std::max(used, plane + 1);
      }
    }
    for (int64_t bit = 0; bit < some * PI_LANES; bit++) {
      int64_t sum = 0;
      for (int plane = 0; plane < used; plane++) sum += (int64_t)(planes[plane] >> bit & 1) << plane;
      counts[(size_t)((first + w) * PI_LANES + bit)] += sum;
    }
  }
}
