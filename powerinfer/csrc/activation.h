// What the neurons of an FFN compute with their weights, whatever these are stored in.
#pragma once
#include <vector>

#include "table.h"

struct Activation {
  int kind = PI_SILU;   // PiAct
  float threshold = 0;  // of FATRELU and CATS

  // Rows of n elements, a multiple of 16, in place.
  // gate = h; up may be null.
  void apply(const PiKernels* kernels, float* gate, const float* up, int64_t n) const {
    kernels->activate(kind, threshold, gate, up, n);
  }
  // x = act(x), what up is multiplied with.
  void apply_first(const PiKernels* kernels, float* x, int64_t n) const {
    kernels->activate(kind == PI_DRELU ? PI_RELU : kind, threshold, x, nullptr, n);
  }
  // up = the factor of act(gate): of DRELU relu(up), else up itself.
  void apply_second(const PiKernels* kernels, float* up, int64_t n) const {
    if (kind == PI_DRELU) kernels->activate(PI_RELU, 0.0f, up, nullptr, n);
  }
  bool operator==(const Activation& other) const { return kind == other.kind && threshold == other.threshold; }
};

// h = act(gate . n + gate_bias) * (up . n + up_bias) of the input n, or without a gate act(up . n + up_bias).
struct NeuronSpec {
  Activation activation;
  std::vector<float> gate_bias, up_bias;  // a value for each neuron; empty: none
  const std::vector<float>& first_bias(bool gated) const { return gated ? gate_bias : up_bias; }
};
