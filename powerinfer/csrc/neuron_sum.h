// A part of an FFN: some neurons of one layer, as bundles, and the sum that they add to the output.
#pragma once
#include <memory>
#include <vector>

#include "bundles.h"
#include "predictor.h"
#include "workspace.h"

// What was done, summed over the tokens of all steps that count; rows are counted once for the tokens of a step.
struct NeuronStats {
  int64_t steps, tokens, active, candidates, first_rows, up_rows, down_rows, shared_scales;
};

class NeuronSum {
 public:
  // threshold: activations up to this magnitude count as zero; count_fired: for each neuron, too, the tokens that it fires
  // for.
  NeuronSum(std::shared_ptr<Workspace> workspace, std::shared_ptr<Bundles> bundles, float threshold, bool count_fired);

  // out[t] = weight[t] * sum of the neurons that token t selects; x and out [tokens, d_model] without gaps.
  // selected: [tokens][members], not zero where a token selects a neuron; null: all. weight: [tokens], null: 1; a token
  // of weight 0 selects none. Returns false where no neuron is selected: out is zero, and no job was run.
  // Steps of up to PI_NEURON_TOKENS tokens are counted.
  bool sum(const float* x, int64_t tokens, const uint8_t* selected, const float* weight, float* out);

  // ---- For the threads of a job
  // Up to PI_NEURON_TOKENS tokens, what they read and where their sums go.
  struct Piece {
    Rows x;            // before the norm
    const Norm& norm;  // may be absent
    float* out;        // [tokens][ldo]
    int64_t ldo;
    bool add;            // out += the sum, else out = the sum
    const Vector& bias;  // of the sum, may be empty
    bool counted;
    const uint8_t* selected = nullptr;  // [tokens][members]
    const float* weight = nullptr;      // [tokens]
  };
  // Sums what is selected; every gate of it is computed.
  void sum_selected(int thread, const Piece& piece);
  // Sums what all threads have listed, the last thing before being a barrier. acts: x normalised, in the forms that the
  // bundles want. known: the activations of the first product, [tokens][ldk], null: to be computed. predictor: that
  // made the lists, or null.
  void sum_listed(int thread, const Piece& piece, const PiActs* acts, const float* known, int64_t ldk,
                  const Predictor* predictor);
  // Adds up what the threads have done in a step: `done`, and what they listed.
  void count(int64_t tokens);

  const std::shared_ptr<Workspace> workspace;
  const std::shared_ptr<Bundles> bundles;
  const float threshold;
  NeuronStats stats = {};
  std::vector<int64_t> fired;  // by place; empty: not counted

 private:
  void list_selected(int thread, const Piece& piece);
  void add_sums(int thread, const Piece& piece);
};
