// Predicts which neurons of a layer fire.
#pragma once
#include <memory>

#include "neuron_lists.h"
#include "workspace.h"

// z = out . relu(in . x), of the residual stream before the norm; neurons with z >= threshold are candidates, and if
// these are fewer than `floor`, the `floor` largest. Without `in` what it reads is hidden already: relu(in . x).
class Predictor {
 public:
  Predictor(std::shared_ptr<Matrix> in, std::shared_ptr<Matrix> out, float threshold, int64_t floor);
  // std::invalid_argument if the sizes are not those of the layer. reads_hidden: whether it may be without `in`.
  void check_sizes(int64_t d_model, int64_t neurons, bool reads_hidden = false) const;
  int64_t rank() const { return out->k; }

  // For the threads of a job, and up to PI_NEURON_TOKENS tokens.
  // Each thread lists the candidates among its neurons, and of several tokens those that select each; ends with a barrier.
  void select(int thread, Workspace& w, const Rows& x) const;
  // The first half of that: relu(in . x) in the form that `out` takes.
  const PiActs* hide(int thread, Workspace& w, const Rows& x) const;
  // What `hide` of so many tokens gave, where something else was prepared since.
  const PiActs* hidden(int thread, Workspace& w, int64_t tokens) const;
  // z of candidates exceeds it.
  float limit() const { return above_; }
  // The candidates of x, which is not the layer's own input but near to it, without a floor: listed, with z, as by
  // `select`, but the counts of the lists stay as they are. Ends with a barrier.
  void foresee(int thread, Workspace& w, const Rows& x) const;
  // Sets `selected_by` of n neurons to the tokens for which each is a candidate.
  void mark(NeuronLists& lists, const int32_t* of, int64_t n, int64_t tokens) const;
  bool candidate(float z) const { return !(z <= above_); }

  const std::shared_ptr<Matrix> in, out;
  const float threshold;
  const int64_t floor;

 private:
  void guess(int thread, Workspace& w, const Rows& x) const;
  void list(int thread, Workspace& w, int64_t tokens, int64_t* counts) const;
  void list_marked(int thread, Workspace& w, int64_t tokens) const;
  void reach_floor(int thread, Workspace& w, int64_t tokens) const;

  float above_;
};
