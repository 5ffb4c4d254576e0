// The FFN of a layer. It has all its neurons as one part or two, as matrices (dense_neurons.h), as bundles
// (neuron_sum.h) or as both, and for each number of tokens a way, which says which part is used and for which neurons.
#pragma once
#include "dense_neurons.h"
#include "neuron_sum.h"
#include "program.h"

// dense: all neurons, from the matrices. exact: those whose gates fire; gates come from the matrices where there are
// any, else from bundles. predicted: those that a predictor selects, from bundles.
enum Way { WAY_DENSE, WAY_EXACT, WAY_PREDICTED, N_WAYS };

// What an FFN does around the sum of its neurons.
struct FfnSpec {
  Norm norm, out_norm;  // of what it reads, and of what it adds
  Vector down_bias;     // of the sum
};

// x += out_norm(sum of the neurons + down_bias), of norm(x).
class Ffn : public Op {
 public:
  // dense may be null; then `set_bundled` must follow. Made by Program::ffn, which checks the sizes.
  Ffn(std::shared_ptr<Workspace> workspace, FfnSpec spec, std::shared_ptr<const DenseNeurons> dense);

  // Replaces its neurons as bundles, and the predictor, which may be null; resets its counters and its ways: dense
  // where it has matrices. recall_every: steps between samples of the predictor's recall, for which all gates are
  // computed from the matrices; 0: none. Neurons that rest on disk have matrices beside them, which may rest
  // there, too.
  void set_bundled(std::shared_ptr<NeuronSum> bundled, std::shared_ptr<const Predictor> predictor,
                   int64_t recall_every = 0);
  // Steps in which both use predictors begin to read neurons of `after` that rest on disk, those that its predictor
  // selects of this one's input.
  void foresee(std::shared_ptr<Ffn> after);
  // The ways of steps of 1, 2, .. PI_NEURON_TOKENS tokens. Larger steps are dense, or without matrices exact.
  void set_ways(const Way* ways);
  // `exact`: of the neurons, the share above which a step computes the rest from the matrices.
  void set_dense_above(double share);
  double dense_above() const { return dense_above_; }
  const std::shared_ptr<NeuronSum>& bundled() const { return bundled_; }

  const char* name() const override { return "ffn"; }
  size_t wants(const Program& p, const Step& step) const override;
  void run(Thread& t, const Step& step) override;
  void skip() override;
  bool samples(const Program& p, const Step& step) const override;

  // How many active neurons of sampled tokens were candidates.
  struct Recall {
    int64_t tokens, active, found;
  };
  struct Counts {
    NeuronStats neurons;
    int64_t exact_steps;
    Recall recall;
  };
  // Starts or stops counting, for each neuron, the tokens of small steps that it fires for: to which its product is
  // not zero.
  void count_fired(bool on);
  int64_t neurons() const;
  // out: [neurons]; returns the number of tokens; resets both.
  int64_t take_fired(int64_t* out);
  // Since they were cleared; as those of a NeuronSum, read and cleared between jobs.
  Counts counts() const;
  void clear();

 private:
  Way way(const Program& p, int64_t tokens) const;
  NeuronSum::Ahead ahead(const Program& p, int64_t tokens) const;
  void cut(Thread& t, const NeuronSum::Piece& piece);
  void select_alone(Thread& t, int64_t tokens, Way chosen) const;
  void exact(Thread& t, const NeuronSum::Piece& piece, std::atomic<uint64_t>& decided, int64_t token = -1);
  void predicted(Thread& t, const NeuronSum::Piece& piece, int64_t token = -1);
  bool falls_back() const { return dense_above_ < 1 && !bundled_->bundles->slots; }
  bool many(const NeuronLists::Noted& noted, int64_t tokens) const;
  void sample(Thread& t, const PiActs* acts, int64_t tokens, const float* z);
  void clear_counts();

  const std::shared_ptr<Workspace> workspace_;  // of its program
  const FfnSpec spec_;
  const std::shared_ptr<const DenseNeurons> dense_;
  // The following change between jobs only.
  std::shared_ptr<NeuronSum> bundled_;
  std::shared_ptr<const Predictor> predictor_;
  std::shared_ptr<Ffn> after_;           // whose neurons are guessed; null: nobody's
  Way ways_[PI_NEURON_TOKENS + 1] = {};  // by tokens
  double dense_above_ = 1;
  int64_t recall_every_ = 0, exact_steps_ = 0;
  Recall recall_ = {};
  std::vector<Recall> sampled_;  // of the threads
  std::vector<int64_t> fired_;   // by place, which is the column of matrices; empty: not counted
  int64_t fired_tokens_ = 0;
};
