// Gated short convolutions (LFM2): a layer whose state is the last inputs of its convolution alone.
#pragma once
#include "recurrent.h"

// The products of a layer: what it gives is c * convolution(x * b), each with as many channels.
struct ShortConvSpec : RecurrentSpec {
  std::shared_ptr<Matrix> x, b, c;
  Vector x_bias, b_bias, c_bias;  // may be empty
};
