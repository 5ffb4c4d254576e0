// Mamba2 (arXiv 2405.21060): a state for each sequence, whose decay follows from the input. A short causal convolution
// precedes it.
#pragma once
#include <memory>
#include <vector>

#include "states.h"
#include "weights.h"

enum class GateNorm { PRODUCT, BEFORE, NONE };  // of the product with the gate, of what the gate multiplies, none

// The products of a layer, and what it does with them. Neighbouring heads share a group.
struct MambaSpec {
  int layer;     // of the cache
  size_t state;  // layer of the states
  int64_t at;    // where in a row of `attended` what it gives is
  Norm norm;
  std::shared_ptr<Matrix> gate, xbc, dt;
  Vector gate_bias, xbc_bias, dt_bias;
  Vector taps, taps_bias;              // [taps][channels] of the convolution: x, B, C; the bias may be empty
  Vector a, d, step_bias;              // of the heads: step = softplus(dt + step_bias), log(decay) = a * step
  float least_step, most_step;         // a step is clamped to
  float gate_scale = 1, dt_scale = 1;  // of the products
  GateNorm kind;
  std::vector<Norm> out_norms;  // of equal parts of what the heads give; empty: there are none
  int activation;               // PiAct, behind the convolution
};
