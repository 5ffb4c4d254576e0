// Mamba2 (arXiv 2405.21060): a state for each sequence, whose decay follows from the input.
#pragma once
#include "recurrent.h"

// The products of a layer, and what it does with them. Neighbouring heads share a group.
struct MambaSpec : RecurrentSpec {
  int64_t at;                             // where in a row of `attended` what it gives is
  std::shared_ptr<Matrix> gate, xbc, dt;  // xbc: x, B and C, the channels of the convolution
  Vector gate_bias, xbc_bias, dt_bias;
  Vector a, d, step_bias;              // of the heads: step = softplus(dt + step_bias), log(decay) = a * step
  float least_step, most_step;         // a step is clamped to
  float gate_scale = 1, dt_scale = 1;  // of the products
  GateNorm kind;
  std::vector<Norm> out_norms;  // of equal parts of what the heads give; empty: there are none
};
