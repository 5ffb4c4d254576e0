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

  // For the threads of a job, and up to PI_NEURON_TOKENS tokens. In phases.
  // Notes the candidates, as the first notes of the lists, and of several tokens those that select each; their z stay.
  void select(int thread, Workspace& w, const Rows& x) const;
  // The same in two parts: z of all tokens, then the candidates of one of these alone.
  void score(int thread, Workspace& w, const Rows& x) const;
  void select_scored(Workspace& w, int64_t token) const;
  // The first half of `score`: relu(in . x) in the form that `out` takes.
  const PiActs* hide(int thread, Workspace& w, const Rows& x) const;
  // What `hide` gave, where something else was prepared since.
  const PiActs* hidden(int thread, Workspace& w, const Rows& x) const;
  // z of candidates exceeds it.
  NeuronLists::Limit limit() const { return {above_, false}; }
  // Notes the candidates of x, which is not the layer's own input but near to it, without a floor, as the second notes.
  void foresee(int thread, Workspace& w, const Rows& x) const;
  NeuronLists::Run neurons_noted() const { return {0, (out->rows + PI_GROUP - 1) / PI_GROUP}; }
  bool candidate(float z) const { return !(z <= above_); }

  const std::shared_ptr<Matrix> in, out;
  const float threshold;
  const int64_t floor;

 private:
  template <class Then>
  void note(int thread, Workspace& w, const Rows& x, NeuronLists::Notes& to, uint32_t* selected_by,
            const Then& then) const;
  void reach_floor(Workspace& w, int64_t first, int64_t tokens) const;

  float above_;
};
