// Which experts a GPU has copies of, from step to step: the decisions of `placement/experts.py`, of all layers at once.
// In double and in a fixed order: the same use gives the same decisions on every machine.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <vector>

class ExpertPolicy {
 public:
  struct Settings {
    bool recent;         // an expert's priority is when it was selected last; else how often, of late
    double decay;        // of the latter: what a token leaves of earlier selections
    double factor;       // how many times the priority of another one an expert must exceed to take its slot
    double prior;        // share of the priorities at first that counts forever
    bool selected;       // only experts that the step selects may come
    int64_t turn, most;  // a layer exchanges up to `most` experts, in every turn-th step
  };
  struct Swap {
    int32_t layer, slot, expert;
    double gain;  // by how much the priority of the one that comes exceeds
  };

  explicit ExpertPolicy(const Settings& settings) : s_(settings) {}

  // The next layer, by its number from 0 on. start: share of the tokens that select each expert, [experts]; in_slot: the
  // expert in each slot, -1: none; outside: of each expert whether it has none; both are kept up to date.
  void add(const double* start, int64_t experts, int32_t* in_slot, int64_t slots, bool* outside);
  int64_t layers() const { return (int64_t)layers_.size(); }
  int64_t experts(int64_t layer) const { return (int64_t)layers_[(size_t)layer].priority.size(); }

  // The swaps after a step of some tokens. uses: how many of them selected each expert.
  std::vector<Swap> observe(int64_t layer, const int64_t* uses, int64_t tokens);

  // tally: the tokens that selected each expert so far, [experts]; it only grows.
  void watch(int64_t layer, const int64_t* tally);
  // The same of all layers that are watched, by what was added to their tallies since the last time; of more swaps than
  // `limit` those that gain most, of equals those of the first layers.
  std::vector<Swap> decide(int64_t tokens, int64_t limit);
  // What was added so far is no step.
  void forget();

 private:
  struct Layer {
    std::vector<double> priority, prior;
    int32_t* in_slot;
    int64_t slots;
    bool* outside;
    int64_t steps;    // of which every turn-th is its own
    int64_t now = 1;  // number of a step, as a priority
    const int64_t* tally = nullptr;
    std::vector<int64_t> counted;  // of the tally, in earlier steps
  };
  struct Ranked {
    double priority;
    int32_t at;
  };
  void learn(Layer& layer, const int64_t* uses, int64_t tokens) const;
  void rank(int64_t number, const int64_t* uses, int64_t tokens, std::vector<Swap>& swaps);
  void carry_out(const std::vector<Swap>& swaps);

  const Settings s_;
  std::vector<Layer> layers_;
  std::vector<Ranked> coming_, leaving_;
  std::vector<int64_t> uses_;
};
