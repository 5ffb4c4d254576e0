// What the neurons of an FFN compute with their weights, whatever these are stored in.
#pragma once
#include <math.h>

#include <algorithm>
#include <vector>

#include "table.h"

// x = 0 where its magnitude does not exceed its limit. NaN stays.
inline void drop_small(float* x, const float* limits, int64_t n) {
  for (int64_t i = 0; i < n; i++) x[i] = fabsf(x[i]) <= limits[i] ? 0.0f : x[i];
}

struct Activation {
  int kind = PI_SILU;   // PiAct
  float threshold = 0;  // of FATRELU and CATS; of TOPK how many neurons of a bank are kept
  bool cuts = false;    // it is of what a gate exceeds the cutoff of its token by, see `cut`
  PiXielu curve{};      // of XIELU

  bool has_threshold() const { return kind == PI_FATRELU || kind == PI_CATS; }
  bool in_banks() const { return kind == PI_TOPK; }
  // Whether a neuron fires depends on the gates of others: these are computed first, from matrices.
  bool competes() const { return in_banks() || cuts; }
  // Panels of 16 neurons that a thread must have together.
  int64_t panels(int64_t least) const { return in_banks() ? PI_BANK / PI_LANES : least; }

  // Rows of n elements, a multiple of 16 or whole banks, in place. limits: a threshold for each of them; null:
  // `threshold` of all. gate = h; up may be null.
  void apply(const PiKernels* kernels, float* gate, const float* up, int64_t n, const float* limits = nullptr) const {
    if (!limits && kind != PI_XIELU) return kernels->activate(kind, threshold, gate, up, n);
    apply_first(kernels, gate, n, limits);
    for (int64_t i = 0; i < n && up; i++) gate[i] *= up[i];
  }
  // x = act(x), what up is multiplied with.
  void apply_first(const PiKernels* kernels, float* x, int64_t n, const float* limits = nullptr) const {
    if (cuts) return;
    if (kind == PI_XIELU) return kernels->xielu(&curve, x, n);
    if (!limits) return kernels->activate(kind == PI_DRELU ? PI_RELU : kind, threshold, x, nullptr, n);
    if (kind == PI_TOPK) {
      kernels->activate(PI_TOPK, 0.0f, x, nullptr, n);
      kernels->keep_largest(x, limits, (int64_t)threshold, n);
    } else if (kind == PI_CATS) {
      kernels->activate(PI_SILU, 0.0f, x, nullptr, n);
      drop_small(x, limits, n);
    } else {
      for (int64_t i = 0; i < n; i++) x[i] = x[i] <= limits[i] ? 0.0f : x[i];
    }
  }
  // up = the factor of act(gate): of DRELU relu(up), else up itself.
  void apply_second(const PiKernels* kernels, float* up, int64_t n) const {
    if (kind == PI_DRELU) kernels->activate(PI_RELU, 0.0f, up, nullptr, n);
  }
  // A token's n gates become activations, up to a multiple of 16, behind which are zeros. The cutoff is their mean and
  // `threshold` of their standard deviations.
  void cut(const PiKernels* kernels, float* gates, int64_t n) const {
    const float mean = mean_of<false>(gates, n);
    for (int64_t i = 0; i < n; i++) gates[i] -= mean;
    const float above = threshold * sqrtf(mean_of<true>(gates, n));
    for (int64_t i = 0; i < n; i++) gates[i] = gates[i] <= above ? 0.0f : gates[i] - above;  // NaN stays
    kernels->activate(kind, 0.0f, gates, nullptr, pi_round_up(n, PI_LANES));
  }
  bool operator==(const Activation& other) const {
    const PiXielu &a = curve, &b = other.curve;
    const bool alike = a.above == b.above && a.below == b.below && a.beta == b.beta && a.least == b.least;
    return kind == other.kind && threshold == other.threshold && cuts == other.cuts && alike;
  }

 private:
  // Of a row, or of its squares: in 32 sums, whatever the machine.
  template <bool squares>
  static float mean_of(const float* x, int64_t n) {
    enum { SUMS = 32 };
    float sums[SUMS] = {};
    int64_t i = 0;
    for (; i + SUMS <= n; i += SUMS)
      for (int j = 0; j < SUMS; j++) sums[j] += squares ? x[i + j] * x[i + j] : x[i + j];
    for (int j = 0; i < n; i++, j++) sums[j] += squares ? x[i] * x[i] : x[i];
    double sum = 0;
    for (const float part : sums) sum += part;
    return (float)(sum / (double)n);
  }
};

// h = act(gate . n + gate_bias) * (up . n + up_bias) of the input n, or without a gate act(up . n + up_bias). With
// product_limits it is zero where its magnitude does not exceed its neuron's.
struct NeuronSpec {
  Activation activation;
  std::vector<float> gate_bias, up_bias;  // a value for each neuron; empty: none
  std::vector<float> limits;              // of each neuron, the activation's threshold; empty: that of all
  std::vector<float> product_limits;      // of each neuron; empty: none, as always without a gate
  const std::vector<float>& first_bias(bool gated) const { return gated ? gate_bias : up_bias; }
  const float* limits_from(int64_t neuron) const { return limits.empty() ? nullptr : limits.data() + neuron; }
  // n products h in place, of the neurons from `first` on.
  void drop_products(float* h, int64_t n, int64_t first) const {
    if (!product_limits.empty()) drop_small(h, product_limits.data() + first, n);
  }
  // The same of a list. neuron_of(i): whose h[i] is.
  template <class NeuronOf>
  void drop_products_of(float* h, int64_t n, const NeuronOf& neuron_of) const {
    if (product_limits.empty()) return;
    enum { SOME = 64 };
    float limits[SOME];  // in order: compilers make a branch, which nobody can predict, of one limit at a time
    for (int64_t i = 0, some; i < n; i += some) {
      some = std::min(n - i, (int64_t)SOME);
      for (int64_t j = 0; j < some; j++) limits[j] = product_limits[(size_t)neuron_of(i + j)];
      drop_small(h + i, limits, some);
    }
  }
};
