// The CPU's parts of a step as functions that a GPU's stream calls when it gets there: on a thread of the driver, without
// Python, and without exceptions.
#pragma once
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "experts.h"
#include "host_flags.h"
#include "neuron_sum.h"

// What the calls of a GPU share. They run one at a time.
class HostCalls {
 public:
  using Clock = std::chrono::steady_clock;
  // A step begins: the CPU waits for its first call, and what failed in earlier ones is void.
  void begin();
  // What the first call that failed since said, once; empty: none did.
  std::string take_failure();
  // Calls so far.
  int64_t made();

 private:
  friend class HostCall;
  std::mutex mutex_;
  Clock::time_point waits_since_ = Clock::now();
  char failure_[256] = "";
  int64_t made_ = 0;
};

// A function and its argument. By itself it computes nothing.
class HostCall {
 public:
  explicit HostCall(std::shared_ptr<HostCalls> all) : all_(std::move(all)) {}
  virtual ~HostCall() = default;
  HostCall(const HostCall&) = delete;
  HostCall& operator=(const HostCall&) = delete;

  // What a stream calls, with the address of a HostCall: it must outlive all calls.
  static void run(void* call) noexcept;
  // Notes a call that needs nothing of the CPU, in place of `run`: there is no result.
  static void skip(HostCall& call) noexcept;
  // jobs: calls that had something to compute; seconds that the CPU waited before calls, and that it computed.
  struct Done {
    int64_t calls, jobs;
    double waited, worked;
  };
  // Since the last time; not while a step runs.
  Done take();

 private:
  static void make(HostCall& call, bool skipped) noexcept;
  virtual bool compute() { return false; }  // whether there was something to
  virtual void note() {}                    // all else that `compute` does
  virtual void write_zeros() noexcept {}    // after a failure

  const std::shared_ptr<HostCalls> all_;
  Done done_ = {};
};

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

// The calls of a recording, in the order in which the GPU asks for them.
class FlaggedCalls {
 public:
  explicit FlaggedCalls(std::shared_ptr<HostFlags> flags) : flags_(std::move(flags)) {}

  // One more; its number must be higher than the last one's.
  void add(uint32_t number, std::shared_ptr<HostCall> call);
  // The recording is replayed.
  void begin() { next_ = 0; }
  // Makes and answers the calls that are left, but those that the GPU has answered. False: it has not asked for the next
  // one for so many seconds. Once the flags are released nothing is left.
  bool answer(double seconds);
  size_t size() const { return calls_.size(); }

 private:
  const std::shared_ptr<HostFlags> flags_;
  std::vector<std::pair<uint32_t, std::shared_ptr<HostCall>>> calls_;
  size_t next_ = 0;
};
