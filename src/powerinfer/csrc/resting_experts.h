// Experts of a layer that rest on disk: which of those that a step needs are there, in the order in which they arrive.
#pragma once
#include <string>
#include <vector>

#include "guesses.h"
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
  bool foreseeable() const { return guesses_.worth(); }
  // Begins a step: to read what it needs and is not there. rows: ordered.
  void begin(const ExpertRows& rows);
  // The experts to compute next, in memory until the next call: `active` of the rows; none: that was all.
  void next(ExpertRows& rows);
  // Whether threads must `Workspace::settle` after a product of these.
  bool settles() const { return settles_; }
  // Lets everything go: a read failed, here or elsewhere.
  void end();

  Stats stats() const { return {all_, hits_, guesses_.stats().guessed, guesses_.stats().right}; }
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
  static constexpr int ENOUGH = 64;
  Guesses guesses_;
  int64_t all_ = 0, hits_ = 0;  // of `stats`
};
