// Experts of a layer that rest on disk: which of those that a step needs are there, in the order in which they arrive.
#pragma once
#include "expert_store.h"
#include "guesses.h"

class RestingExperts : public ExpertStore {
 public:
  struct Stats {
    int64_t wanted, hits;    // experts of steps; of these, in memory without a read of this step
    int64_t guessed, right;  // experts that were read because they were expected; of these, needed by the step
  };
  // What a step has used stays in panels.
  RestingExperts(ExpertMatrices all, std::shared_ptr<Workspace> workspace);

  void begin(const ExpertRows& rows) override;
  void end() override;
  void expect(const int32_t* experts, int64_t n) override;
  bool foreseeable() const override { return guesses_.worth(); }
  RestingExperts* resting() override { return this; }
  bool fetch(const ExpertRows&, int64_t) const override { return false; }

  Stats stats() const { return {all_, hits_, guesses_.stats().guessed, guesses_.stats().right}; }
  std::vector<int32_t> uses;       // tokens that selected each expert, until someone resets them
  std::vector<uint8_t> elsewhere;  // experts that another device computes: they are not expected

 private:
  void sum_rows(Thread& t, ExpertRows& rows, const PiActs& acts, bool single, uint16_t* fired,
                const Attempt& attempt) override;
  void next(ExpertRows& rows);
  void read_more();
  void take_arrived(size_t most);
  void place();

  const std::shared_ptr<Slots> slots_;
  std::vector<std::vector<Matrix*>> matrices_;  // of each expert
  std::vector<int32_t> wanted_;                 // those there, those that are coming, then the others
  size_t pinned_ = 0;                           // the first of these that are not
  std::vector<int32_t> coming_, now_;           // pinned: to be computed, and being computed
  bool settles_ = false;
  static constexpr int ENOUGH = 64;
  Guesses guesses_;
  int64_t all_ = 0, hits_ = 0;  // of `stats`
};
