// The calls of a GPU that compute sums of neurons and of experts.
#pragma once
#include <memory>
#include <vector>

#include "experts.h"
#include "host_calls.h"
#include "neuron_sum.h"

// out = the sum of the selected neurons, as of `NeuronSum::sum`, of arguments that stay where they are.
class NeuronCall : public HostCall {
 public:
  NeuronCall(std::shared_ptr<HostCalls> all, std::shared_ptr<NeuronSum> sum, const float* x, int64_t tokens,
             const uint8_t* selected, float* out)
      : HostCall(std::move(all)), sum_(std::move(sum)), x_(x), tokens_(tokens), selected_(selected), out_(out) {}

 private:
  bool compute() override { return sum_->sum(x_, tokens_, selected_, nullptr, out_); }
  void write_zeros() noexcept override;

  const std::shared_ptr<NeuronSum> sum_;
  const float* const x_;
  const int64_t tokens_;
  const uint8_t* const selected_;
  float* const out_;
};

// out = the sum of the experts that the CPU has of those that tokens select, as of `Experts::sum`; likewise.
class ExpertCall : public HostCall {
 public:
  // A selection that is known before x takes two calls, of which the first fetches weights, too.
  enum Part { ALL, ORDER, SUM_ORDERED };
  struct Arguments {
    const float* x;
    int64_t tokens;
    const int32_t* selected;  // [tokens][top_k], with the layer's numbers of experts
    const float* weights;
    float* out;
    int64_t experts;        // of the layer
    const int32_t* places;  // [experts] the CPU's own number of each, -1: it does not have it
    int64_t* tally;         // [experts + 1] added to: tokens that select each; selections that the CPU does not have
    const float* hidden;    // as of `Experts::sum`
  };
  ExpertCall(std::shared_ptr<HostCalls> all, std::shared_ptr<Experts> op, Program& program, const Arguments& arguments,
             Part part)
      : HostCall(std::move(all)),
        op_(std::move(op)),
        program_(program),
        a_(arguments),
        part_(part),
        own_((size_t)(arguments.tokens * op_->router().spec.top_k)) {}

 private:
  bool compute() override;
  void note() override;
  void write_zeros() noexcept override;
  void select();

  const std::shared_ptr<Experts> op_;
  Program& program_;
  const Arguments a_;
  const Part part_;
  std::vector<int32_t> own_;  // `selected` with the CPU's numbers
};
