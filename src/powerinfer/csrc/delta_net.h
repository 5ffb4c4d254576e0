// Gated DeltaNet (arXiv 2412.06464): linear attention whose memory is a state for each sequence instead of keys and
// values for each token. A short causal convolution precedes it.
#pragma once
#include <memory>
#include <vector>

#include "panels.h"
#include "weights.h"

// The states of the sequences, in slots: [slot][layer]. A layer's is the inputs of the convolution for the last tokens,
// [taps - 1][channels], and the state of every value head (`PiDelta`), float32.
class States {
 public:
  struct Layer {
    int64_t tokens, channels, heads, key_dim, value_dim;  // tokens: taps - 1
    int64_t convolution() const { return tokens * channels; }
    int64_t head() const { return key_dim * value_dim; }
  };
  States(std::vector<Layer> layers, int64_t slots);
  const std::vector<Layer> layers;
  const int64_t slots;
  float* convolution(size_t layer, int64_t slot) const { return data_() + slot * slot_floats_ + at_[layer]; }
  float* head(size_t layer, int64_t slot, int64_t head) const {
    return convolution(layer, slot) + pi_round_up(layers[layer].convolution(), PI_LANES) + head * layers[layer].head();
  }
  int64_t slot_bytes() const { return slot_floats_ * 4; }
  static int64_t row(const Layer& layer);  // floats of a token while it is computed

 private:
  float* data_() const { return (float*)memory_->data(); }
  std::vector<int64_t> at_;  // of the layers in a slot
  int64_t slot_floats_ = 0;
  std::unique_ptr<Mapping> memory_;
};

// The products of a layer, and what it does with them. Value heads share key heads: in turn (`tiled`: head i has key
// head i % key_heads), or in groups (i / (heads / key_heads)).
struct DeltaNetSpec {
  int layer;     // of the cache
  size_t state;  // layer of the states
  Norm norm;
  std::shared_ptr<Matrix> query, key, value, gate, beta, alpha;
  Vector taps;            // [taps][channels] of the convolution: queries, keys, values
  Vector decay, dt_bias;  // of the value heads: log(decay) = `decay` * softplus(alpha + dt_bias)
  Norm out_norm;          // of each value head
  int64_t key_heads;
  bool tiled;
  int activation;  // PiAct, behind the convolution
};
