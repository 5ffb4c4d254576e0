// The states of sequences, of layers that keep one for each sequence: Gated DeltaNet, Mamba2, short convolutions.
#pragma once
#include <memory>
#include <vector>

#include "panels.h"

// In slots: [slot][layer]. A layer's is the inputs of the convolution for the last tokens, [taps - 1][channels], the
// memory of every head (`PiDelta`, or, of Mamba2, `PiMamba`), and, of Mamba2, B of the tokens of a chunk that has begun,
// [groups][PI_CHUNK][key_dim]; float32. Where steps are to be undone, the inputs of the last step's tokens lie behind it,
// [undo_tokens][inputs]: of a step of no more tokens, that read another slot.
class States {
 public:
  struct Layer {
    // tokens: taps - 1; key_heads: the groups of Mamba2, whose state_dim is key_dim, and whose head_dim is value_dim; a
    // layer of short convolutions has no keys, and its channels as heads
    int64_t tokens, channels, key_heads, heads, key_dim, value_dim;
    bool chunked;  // Mamba2
    bool decays;   // of each channel of a key
    int64_t convolution() const { return tokens * channels; }
    int64_t head() const { return chunked ? pi_mamba_head(value_dim, key_dim) : key_dim * value_dim; }
    int64_t group() const { return chunked ? PI_CHUNK * key_dim : 0; }
    int64_t decaying() const { return decays ? key_dim : 1; }  // the first numbers of a head that a token has
    // From all heads' first numbers to their second one.
    int64_t to_second() const { return pi_round_up(heads * decaying(), PI_LANES); }
    // What the convolution reads of a token, and the numbers of each head; the first of its floats.
    int64_t inputs() const { return channels + (key_heads ? to_second() + pi_round_up(heads, PI_LANES) : 0); }
  };
  States(std::vector<Layer> layers, int64_t slots, int64_t undo_tokens = 0);
  const std::vector<Layer> layers;
  const int64_t slots, undo_tokens;
  float* convolution(size_t layer, int64_t slot) const { return data_() + slot * slot_floats_ + at_[layer]; }
  float* head(size_t layer, int64_t slot, int64_t head) const {
    return convolution(layer, slot) + pi_round_up(layers[layer].convolution(), PI_LANES) + head * layers[layer].head();
  }
  float* group(size_t layer, int64_t slot, int64_t group) const {
    return head(layer, slot, layers[layer].heads) + group * layers[layer].group();
  }
  float* inputs(size_t layer, int64_t slot, int64_t token) const {
    return group(layer, slot, layers[layer].key_heads) + token * layers[layer].inputs();
  }
  int64_t slot_bytes() const { return slot_floats_ * 4; }
  static int64_t row(const Layer& layer);  // floats of a token while it is computed

 private:
  float* data_() const { return (float*)memory_->data(); }
  std::vector<int64_t> at_;  // of the layers in a slot
  int64_t slot_floats_ = 0;
  std::unique_ptr<Mapping> memory_;
};
