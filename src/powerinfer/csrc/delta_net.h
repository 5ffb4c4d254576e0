// Gated DeltaNet (arXiv 2412.06464): linear attention whose memory is a state for each sequence instead of keys and
// values for each token.
#pragma once
#include "recurrent.h"

// The products of a layer, and what it does with them. Value heads share key heads: in turn (`tiled`: head i has key
// head i % key_heads), or in groups (i / (heads / key_heads)).
struct DeltaNetSpec : RecurrentSpec {
  std::shared_ptr<Matrix> query, key, value, gate, beta, alpha;
  Vector decay, dt_bias;  // of the value heads: log(decay) = `decay` * softplus(alpha + dt_bias)
  Norm out_norm;          // of each value head
  int64_t key_heads;
  bool tiled;
};
