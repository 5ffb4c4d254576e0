// The FFN of a layer, as a choice over its neurons: all of them from matrices (dense), those whose gates fire (exact)
// or those that a predictor selects (predicted); and FFNs that have their neurons only as bundles.
#pragma once
#include "activation.h"
#include "neuron_sum.h"
#include "program.h"

enum Way { WAY_DENSE, WAY_EXACT, WAY_PREDICTED, N_WAYS };

// An FFN without its weights.
struct FfnSpec {
  Norm norm, out_norm;  // of what it reads, and of what it adds
  Vector gate_bias, up_bias, down_bias;
  Activation activation;
};

struct FfnInput {
  FfnSpec spec;
  std::shared_ptr<Matrix> gate, up, down;                     // gate may be null: the activation is on up
  const Matrix& first() const { return gate ? *gate : *up; }  // what the activation is on
  const Vector& first_bias() const { return gate ? spec.gate_bias : spec.up_bias; }
};

// x += out_norm(down . (act(gate . n) * (up . n))), n = norm(x), or without a gate down . act(up . n).
class Ffn : public Op {
 public:
  Ffn(std::shared_ptr<Workspace> of, FfnInput in) : workspace(std::move(of)), in_(std::move(in)) {}
  // Gives it its neurons as bundles, with the biases of gate and up, and a predictor or null; it is dense until `ways`
  // are set. threshold: activations up to this magnitude count as zero; recall_every: steps between samples of the
  // predictor's recall, 0: none.
  void sparsify(std::shared_ptr<Bundles> bundles, std::shared_ptr<const Predictor> predictor, float threshold,
                int64_t recall_every);

  const char* name() const override { return "ffn"; }
  void run(Thread& t, const Step& step) override;

  const std::shared_ptr<Workspace> workspace;  // of its program

  // Of a sparsified one; changed between jobs only.
  Way ways[PI_NEURON_TOKENS + 1] = {};  // for each number of tokens
  double dense_above = 1;               // `exact`: of the neurons, the share above which the step continues densely
  std::unique_ptr<NeuronSum> neurons;   // null: it is dense
  std::shared_ptr<const Predictor> predictor;
  int64_t exact_steps = 0;
  // How many active neurons of sampled tokens were candidates.
  struct Recall {
    int64_t tokens, active, found;
  } recall = {};
  void clear_stats();

 private:
  void dense(Thread& t, const Step& step);
  void exact(Thread& t, const Step& step);
  void predicted(Thread& t, const Step& step);
  void fire(Thread& t, const Step& step, const PiActs* acts);
  bool many(const NeuronLists& lists, int64_t tokens) const;
  void finish_densely(Thread& t, const Step& step, const PiActs* acts);
  void sample(Thread& t, const Step& step, const PiActs* acts);
  void multiply_down(Thread& t, int64_t tokens, const Columns& mine);
  NeuronSum::Piece piece(Program& p, const Step& step) const;

  const FfnInput in_;
  int64_t recall_every_ = 0;
  std::vector<Recall> sampled_;  // of the threads
};

// x += out_norm(sum of the neurons + bias), of norm(x), for steps of any size, in pieces.
class BundledFfn : public Op {
 public:
  BundledFfn(Norm norm, Norm out_norm, Vector down_bias, std::shared_ptr<NeuronSum> neurons,
             std::shared_ptr<const Predictor> predictor);
  const char* name() const override { return "ffn"; }
  void run(Thread& t, const Step& step) override;

  const std::shared_ptr<NeuronSum> neurons;
  const std::shared_ptr<const Predictor> predictor;  // selects the neurons of small steps; null: computes every gate
  bool predicts = true;                              // whether it is used; changed between jobs only

 private:
  const Norm norm_, out_norm_;
  const Vector down_bias_;
};
