// AltUp (arXiv 2301.13310) and LAuReL (arXiv 2411.07501): several residual streams, of which each layer computes with
// one, after it has predicted all of them, and corrects all of them by what it has made of that one (Gemma 3n).
#pragma once
#include "program.h"

// Coefficients of a layer that follow from a row: w . tanh(router . norm(row) / d_model), in streams and streams again.
struct StreamCoefficients {
  Norm norm;
  Vector router;  // [streams][d_model]
  Vector w;       // [coefficients][streams]
};

// What LAuReL adds to x: norm(x), and out_norm(out . in . norm(x)).
struct LaurelSpec {
  Norm norm, out_norm;
  std::shared_ptr<Matrix> in, out;
};
