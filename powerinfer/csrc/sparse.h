// The FFN of a layer for a few tokens, from the neurons that fire: named by the gates themselves or by a predictor.
#pragma once
#include <memory>
#include <vector>

#include "bundles.h"
#include "program.h"

enum Way {
  WAY_DENSE,
  WAY_EXACT,
  WAY_PREDICTED,
  N_WAYS,
  WAY_NAMED = N_WAYS
};  // named: of an FFN that has bundles alone

// Guesses z = out . relu(in . x) from the residual stream before the norm; neurons with z >= threshold are candidates, and if
// these are fewer than `floor`, the `floor` largest.
struct Predictor {
  std::shared_ptr<Matrix> in, out;
  float threshold;
  int64_t floor;
};

// What was done, summed over the tokens of all steps; rows are counted once for the tokens of a step.
struct NeuronStats {
  int64_t steps, exact_steps, tokens, active, candidates, first_rows, up_rows, down_rows, shared_scales;
  int64_t sampled_tokens, sampled_active, sampled_found;  // how many active neurons of sampled tokens were candidates
};

// Lists and values on their way, one set for all layers.
class NeuronScratch {
 public:
  NeuronScratch(int threads, int64_t d_ff, int64_t d_model, int64_t rank);

  struct Share {  // of a thread
    std::vector<int32_t> listed;
    int64_t n;
    int64_t counts[PI_NEURON_TOKENS];
    int64_t sampled_active, sampled_found;
    NeuronCounts done;
    NeuronBlock block;
    std::vector<int32_t> part;  // its part of the list of all threads
    Vector sums;                // what its neurons add, [tokens, d_model]
  };
  const int64_t ldz, ldr;
  std::vector<uint32_t> wanted;  // by place, of what is listed: the tokens that want it, a bit each
  Vector z, hidden;              // [tokens, d_ff], [tokens, rank]
  std::vector<Share> shares;
};

class SparseFfn {
 public:
  SparseFfn(std::shared_ptr<Bundles> bundles, std::unique_ptr<Predictor> predictor, float most, int64_t recall_every);

  // `most`: activations up to this magnitude count as zero (0 for the exact answer).
  void run(Thread& t, const Step& step, const FfnInput& in, Way way);

  Way ways[PI_NEURON_TOKENS + 1] = {};  // for each number of tokens
  bool predicts = true;                 // of an FFN that has bundles alone, and a predictor: whether it is asked
  double dense_above = 1;  // `exact`: of the neurons, the share that may fire until the rest of the step goes densely
  NeuronStats stats = {};
  std::shared_ptr<Bundles> bundles;
  std::vector<int64_t>
      fired;  // by place, tokens that each neuron fired for, as far as `stats` counts; empty: not counted
  const std::unique_ptr<Predictor> predictor;

 private:
  using Share = NeuronScratch::Share;
  const PiActs* fire(Thread& t, const Step& step, const FfnInput& in);
  void predict(Thread& t, const Step& step);
  void take_named(Thread& t, const Step& step);
  bool many(const NeuronScratch& s, int64_t tokens) const;
  void finish_densely(Thread& t, const Step& step, const FfnInput& in, const PiActs* acts);
  void list(Thread& t, const Step& step);
  void mark_candidates(Thread& t, const Step& step, int64_t n);
  void reach_floor(Thread& t, const Step& step);
  void sample(Thread& t, const Step& step, const FfnInput& in, const PiActs* acts);
  int64_t take_part(Thread& t);
  void add_sums(Thread& t, const Step& step, const FfnInput& in);
  void count(const Step& step, Way way, NeuronScratch& s, bool sampled);

  const float most_, above_;
  const int64_t recall_every_;
};
