// Matrices that RAM does not hold, in the order in which a step uses them: a ring of memory through which they pass,
// filled from disk ahead of the step, and across steps.
#pragma once
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "reads.h"
#include "weights.h"

// By one thread at a time.
class Window {
 public:
  // bytes: of the ring.
  Window(std::shared_ptr<Reads> reads, int64_t bytes);
  ~Window();
  // What the operator of that number, larger than the last one's, reads. std::invalid_argument if the ring is too small.
  void add(size_t op, const std::vector<std::shared_ptr<OnDisk>>& matrices);
  // Begins a step. wanted: how many of its matrices an operator uses, from the first on; also assumed of the next step.
  void begin(const std::function<size_t(size_t)>& wanted);
  // Whether the step uses any of an operator's.
  bool wanted(size_t op) const { return op < unit_of_.size() && unit_of_[op] >= 0 && of(op).wanted > 0; }
  // Waits for an operator's matrices, which are in memory until `release`; what was read ahead in vain is dropped.
  void take(size_t op);
  void release(size_t op);
  // Begins as many reads as there is room for.
  void read_ahead();
  // Ends a step. ReadError if one of its reads failed: then what was computed is void.
  void end();
  bool failed() const { return !failure_.empty(); }
  // Between steps: what was read ahead is dropped, and the ring's memory given back until it is needed. ReadError if the
  // disk does not answer.
  void forget();

 private:
  struct Unit {
    size_t op;
    std::vector<std::shared_ptr<OnDisk>> matrices;
    size_t wanted;  // of them, by this step
  };
  struct Loaded {
    size_t unit, matrices;
    int64_t begin, end;  // in the ring
    int64_t ticket;
  };
  // Nothing is thrown in a step, where threads wait for each other: `end` tells of it.
  template <class F>
  void attempt(F work) {
    if (failed()) return;
    try {
      work();
    } catch (const std::exception& error) { failure_ = error.what(); }
  }
  const Unit& of(size_t op) const { return units_[(size_t)unit_of_[op]]; }
  bool load(size_t unit);
  void load_next();
  bool over();
  int64_t room_for(int64_t bytes) const;
  size_t after(size_t unit) const { return (unit + 1) % units_.size(); }

  const std::shared_ptr<Reads> reads_;
  const int64_t size_;
  Mapping ring_;
  std::vector<Unit> units_;
  std::vector<int> unit_of_;   // by operator, -1: none
  std::deque<Loaded> loaded_;  // in the order of the ring
  size_t next_ = 0;            // the unit to load
  std::string failure_;        // of this step
  bool silent_ = false;        // the disk has not answered
};
