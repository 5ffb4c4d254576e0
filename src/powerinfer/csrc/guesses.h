// Items on disk that a layer is expected to need before it is known what it does need, such as experts and neurons: they
// are read early.
#pragma once
#include <memory>
#include <utility>
#include <vector>

#include "slots.h"

// By thread 0 of a job, or between jobs; but `worth` by all threads, while none expects or judges.
class Guesses {
 public:
  struct Stats {
    int64_t guessed, right;  // items that were read because they were expected; of these, needed by the step
  };
  // enough: after so many reads it is judged whether they were worth it.
  Guesses(std::shared_ptr<Slots> slots, int enough) : slots_(std::move(slots)), enough_(enough) {}

  // Begins to read items that the step is to need, one of them perhaps repeatedly, in place of those that matter least.
  void expect(const int32_t* items, int64_t n);
  // Whether anything may be lacking, and what was expected of late was needed at least every other time: a read in vain
  // delays others by as much as one in time saves. Where it was not, it is tried again after some steps.
  bool worth() const { return slots_->slots() < slots_->items() && (judged_ < enough_ || 2 * found_ >= judged_); }
  bool expects() const { return !raised_.empty(); }
  // The step is about to take what it needs. needs(item) says whether an item is among it. Nothing is expected any more.
  // Returns how many items it needs of those that were read early and are there.
  template <class F>
  int64_t judge(const F& needs) {
    int64_t there = 0;
    for (const int32_t item : early_) {
      if (!slots_->held(item) && !slots_->coming(item)) continue;  // there was no room
      const bool needed = needs(item);
      stats_.guessed++;
      stats_.right += needed;
      there += needed && slots_->held(item);
      judged_++;
      found_ += needed;
    }
    if (judged_ >= 4 * enough_) judged_ /= 2, found_ /= 2;
    if (!worth() && ++paused_ == PAUSE) judged_ = found_ = paused_ = 0;
    end();
    return there;
  }
  // Nothing is expected any more.
  void end();
  Stats stats() const { return stats_; }

 private:
  static constexpr int PAUSE = 1024;
  const std::shared_ptr<Slots> slots_;
  const int enough_;
  std::vector<std::pair<int32_t, float>> raised_;  // expected items, and their own priorities
  std::vector<int32_t> early_;                     // expected and not there
  int judged_ = 0, found_ = 0, paused_ = 0;        // expected items of late, of these needed; steps without any
  Stats stats_ = {};
};
