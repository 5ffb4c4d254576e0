// Gated DeltaNet (arXiv 2412.06464): linear attention whose memory is a state for each sequence instead of keys and
// values for each token.
#pragma once
#include "recurrent.h"

// The products of a layer, and what it does with them. Where each channel of a key decays by itself (Kimi Delta
// Attention, arXiv 2510.26692), `gate` and `alpha` give latents, of which `gate_b` and `alpha_b` make the gate, whose
// sigmoid counts, and alpha of each channel. Value heads share key heads: in turn (`tiled`: head i has key
// head i % key_heads), or in groups (i / (heads / key_heads)).
struct DeltaNetSpec : RecurrentSpec {
  std::shared_ptr<Matrix> query, key, value, gate, beta, alpha, gate_b, alpha_b;  // the last two may be null
  Vector decay, dt_bias;  // of the value heads, or dt_bias of each channel: log(decay) = decay * softplus(alpha + bias)
  Norm out_norm;          // of each value head
  int64_t key_heads;
  bool tiled;
};
