#include "states.h"

#include <utility>

States::States(std::vector<Layer> l, int64_t n, int64_t undo) : layers(std::move(l)), slots(n), undo_tokens(undo) {
  for (const Layer& layer : layers) {
    at_.push_back(slot_floats_);
    slot_floats_ += pi_round_up(layer.convolution(), PI_LANES) + layer.heads * layer.head() +
                    layer.key_heads * layer.group() + undo_tokens * layer.inputs();
  }
  memory_ = std::make_unique<Mapping>(slots * slot_bytes());
}

int64_t States::row(const Layer& layer) {
  if (!layer.key_heads) return 2 * layer.channels;  // what is multiplied with each other
  const int64_t scores = layer.chunked ? layer.key_heads * PI_CHUNK : 0;
  const int64_t latents = layer.decays ? 2 * layer.key_dim : 0;  // of decays and of the gate
  return layer.inputs() + scores + latents;
}
