#include "expert_policy.h"

#include <math.h>

#include <algorithm>

namespace {

constexpr int64_t STEPS = 1 << 16;  // after which priorities that are numbers of steps begin anew

}  // namespace

void ExpertPolicy::add(const double* start, int64_t experts, int32_t* in_slot, int64_t slots, bool* outside) {
  Layer layer;
  layer.priority.assign(start, start + experts);
  if (!s_.recent)
    for (double& priority : layer.priority) priority /= 1 - s_.decay;
  if (s_.prior > 0)
    for (const double priority : layer.priority) layer.prior.push_back(s_.prior * priority);
  layer.in_slot = in_slot;
  layer.slots = slots;
  layer.outside = outside;
  layer.steps = layers();
  layers_.push_back(std::move(layer));
}

void ExpertPolicy::learn(Layer& layer, const int64_t* uses, int64_t tokens) const {
  const size_t experts = layer.priority.size();
  double* const priority = layer.priority.data();
  if (!s_.recent) {
    const double decay = pow(s_.decay, (double)tokens);
    for (size_t i = 0; i < experts; i++) priority[i] = priority[i] * decay + (double)uses[i];
    return;
  }
  if (layer.now == STEPS) {
    for (size_t i = 0; i < experts; i++) priority[i] -= (double)STEPS;
    layer.now = 0;
  }
  layer.now++;
  for (size_t i = 0; i < experts; i++)
    if (uses[i]) {
      const double part = (double)i / (double)experts;
      priority[i] = (double)layer.now + ((double)uses[i] + part) / (double)(tokens + 1);
    }
}

void ExpertPolicy::rank(int64_t number, const int64_t* uses, int64_t tokens, std::vector<Swap>& swaps) {
  Layer& layer = layers_[(size_t)number];
  if (!layer.slots) return;
  learn(layer, uses, tokens);
  if (++layer.steps % s_.turn) return;
  const auto priority_of = [&](int64_t i) {
    return layer.prior.empty() ? layer.priority[(size_t)i] : layer.priority[(size_t)i] + layer.prior[(size_t)i];
  };
  coming_.clear();
  for (int32_t i = 0; i < (int32_t)layer.priority.size(); i++)
    if (layer.outside[i] && (uses[i] || !s_.selected)) coming_.push_back({priority_of(i), i});
  if (coming_.empty()) return;
  leaving_.clear();
  for (int32_t slot = 0; slot < (int32_t)layer.slots; slot++) {
    const int32_t expert = layer.in_slot[slot];
    leaving_.push_back({expert < 0 ? 0.0 : s_.factor * priority_of(expert), slot});
  }
  const size_t count = std::min({coming_.size(), leaving_.size(), (size_t)s_.most});
  std::partial_sort(coming_.begin(), coming_.begin() + (ptrdiff_t)count, coming_.end(),
                    [](const Ranked& a, const Ranked& b) {
                      return a.priority != b.priority ? a.priority > b.priority : a.at < b.at;
                    });
  std::partial_sort(leaving_.begin(), leaving_.begin() + (ptrdiff_t)count, leaving_.end(),
                    [](const Ranked& a, const Ranked& b) {
                      return a.priority != b.priority ? a.priority < b.priority : a.at < b.at;
                    });
  for (size_t i = 0; i < count && coming_[i].priority > leaving_[i].priority; i++)
    swaps.push_back({(int32_t)number, leaving_[i].at, coming_[i].at, coming_[i].priority - leaving_[i].priority});
}

void ExpertPolicy::carry_out(const std::vector<Swap>& swaps) {
  for (const Swap& swap : swaps) {
    Layer& layer = layers_[(size_t)swap.layer];
    if (layer.in_slot[swap.slot] >= 0) layer.outside[layer.in_slot[swap.slot]] = true;
    layer.in_slot[swap.slot] = swap.expert;
    layer.outside[swap.expert] = false;
  }
}

std::vector<ExpertPolicy::Swap> ExpertPolicy::observe(int64_t layer, const int64_t* uses, int64_t tokens) {
  std::vector<Swap> swaps;
  rank(layer, uses, tokens, swaps);
  carry_out(swaps);
  return swaps;
}

void ExpertPolicy::watch(int64_t layer, const int64_t* tally) {
  Layer& watched = layers_[(size_t)layer];
  watched.tally = tally;
  watched.counted.assign(tally, tally + watched.priority.size());
}

std::vector<ExpertPolicy::Swap> ExpertPolicy::decide(int64_t tokens, int64_t limit) {
  std::vector<Swap> swaps;
  for (int64_t number = 0; number < layers(); number++) {
    Layer& layer = layers_[(size_t)number];
    if (!layer.tally) continue;
    uses_.resize(layer.counted.size());
    for (size_t i = 0; i < uses_.size(); i++) {
      uses_[i] = layer.tally[i] - layer.counted[i];
      layer.counted[i] = layer.tally[i];
    }
    rank(number, uses_.data(), tokens, swaps);
  }
  if ((int64_t)swaps.size() > limit) {
    std::stable_sort(swaps.begin(), swaps.end(), [](const Swap& a, const Swap& b) { return a.gain > b.gain; });
    swaps.resize((size_t)limit);
    std::stable_sort(swaps.begin(), swaps.end(), [](const Swap& a, const Swap& b) { return a.layer < b.layer; });
  }
  carry_out(swaps);
  return swaps;
}

void ExpertPolicy::forget() {
  for (Layer& layer : layers_)
    if (layer.tally) layer.counted.assign(layer.tally, layer.tally + layer.counted.size());
}
