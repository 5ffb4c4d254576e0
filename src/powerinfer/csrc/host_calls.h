// The CPU's parts of a step as functions that a GPU's stream calls when it gets there: on a thread of the driver, without
// Python, and without exceptions.
#pragma once
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "host_flags.h"

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

// The calls of a recording, in the order in which the GPU asks for them.
class FlaggedCalls {
 public:
  explicit FlaggedCalls(std::shared_ptr<HostFlags> flags) : flags_(std::move(flags)) {}

  // One more; its number must be higher than the last one's.
  void add(uint32_t number, std::shared_ptr<HostCall> call);
  // The recording is replayed.
  void begin() { next_ = 0; }
  // Makes and answers the calls that are left, but those that the GPU has answered. False: it has not asked for the next
  // one for so many seconds, or *stop, as of `HostFlags::wait`. Once the flags are released nothing is left.
  bool answer(double seconds, const std::atomic<bool>* stop = nullptr);
  size_t size() const { return calls_.size(); }

 private:
  const std::shared_ptr<HostFlags> flags_;
  std::vector<std::pair<uint32_t, std::shared_ptr<HostCall>>> calls_;
  size_t next_ = 0;
};
