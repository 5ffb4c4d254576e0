// Experts of a layer that rest on disk: which of those that a step needs are there, in the order in which they arrive.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "slots.h"
#include "weights.h"

struct ExpertRows;

// By thread 0 of a job, but the constructor and `stats`.
class RestingExperts {
 public:
  struct Stats {
    int64_t wanted, hits;    // experts of steps; of these, in memory without a read of this step
    int64_t guessed, right;  // experts that were read because they were expected; of these, needed by the step
  };
  // slots: of experts; their parts are rows of `parts`, the matrices of each expert, with room for their panels. What a
  // step has used stays in panels.
  RestingExperts(std::shared_ptr<Slots> slots, const std::vector<std::vector<Matrix>*>& parts);

  // Begins to read experts that the step is to need, one of them perhaps repeatedly, in place of those that matter least.
  void expect(const int32_t* experts, int64_t n);
  // Whether what was expected of late was needed at least every other time: a read in vain delays others by as much as one
  // in time saves. Where it was not, it is tried again after some steps.
  bool foreseeable() const { return judged_ < ENOUGH || 2 * found_ >= judged_; }
  // Begins a step: to read what it needs and is not there. rows: ordered.
  void begin(const ExpertRows& rows);
  // The experts to compute next, in memory until the next call: `active` of the rows; none: that was all.
  void next(ExpertRows& rows);
  // Whether threads must `Workspace::settle` after a product of these.
  bool settles() const { return settles_; }
  // Lets everything go: a read failed, here or elsewhere.
  void end();

  Stats stats() const { return stats_; }
  std::vector<int32_t> uses;       // tokens that selected each expert, until someone resets them
  std::vector<uint8_t> elsewhere;  // experts that another device computes: they are not expected

 private:
  void read_more();
  void take_arrived(size_t most);
  void place();

  const std::shared_ptr<Slots> slots_;
  std::vector<std::vector<Matrix*>> parts_;  // of each expert
  std::vector<int32_t> wanted_;              // those there, those that are coming, then the others
  size_t pinned_ = 0;                        // the first of these that are not
  std::vector<int32_t> coming_, now_;        // pinned: to be computed, and being computed
  bool settles_ = false;
  std::vector<std::pair<int32_t, float>> raised_;  // expected experts, and their own priorities
  std::vector<int32_t> early_;                     // expected and not there
  static constexpr int ENOUGH = 64, PAUSE = 1024;
  int judged_ = 0, found_ = 0, paused_ = 0;  // expected experts of late, of these needed; steps without any
  Stats stats_ = {};
};
