// Experts of a layer that rest on disk: which of those that a step needs are there, in the order in which they arrive, and
// the experts that are computed so as matrices.
#pragma once
#include "expert_store.h"
#include "guesses.h"

// By thread 0 of a step, or between steps; `settles` by all threads.
class RestingExperts {
 public:
  struct Stats {
    int64_t wanted, hits;    // experts of steps; of these, in memory without a read of this step
    int64_t guessed, right;  // experts that were read because they were expected; of these, needed by the step
    int64_t later;           // bytes that were read of what is needed of an expert only when it is computed
  };
  // parts: the matrices of each expert, in the order of the first parts of the slots, as `next` leaves them; those with
  // nothing on disk are not among these. What a step has used stays in panels.
  RestingExperts(std::shared_ptr<Slots> slots, ExpertStore::Parts& parts);

  void begin(const ExpertRows& rows);  // begins to read what the step needs and is not there
  void end();
  void expect(const int32_t* experts, int64_t n);
  bool foreseeable() const { return guesses_.worth(); }
  // The experts to compute next, in memory until the next call: `active` of the rows; none: that was all. stay: they are
  // in memory until `end`; the slots hold all that the step needs.
  void next(ExpertRows& rows, bool stay = false);
  // Those, and the ones that are being read.
  const std::vector<int32_t>& now() const { return now_; }
  const std::vector<int32_t>& coming() const { return coming_; }
  bool settles() const { return settles_; }  // whether threads must settle after a product of these

  Stats stats() const { return {all_, hits_, guesses_.stats().guessed, guesses_.stats().right, slots_->stats().later}; }
  std::function<void(int32_t)> pinned;  // called with an expert whose reads have begun, or that is there; may be empty
  std::vector<int32_t> uses;            // tokens that selected each expert, until someone resets them
  std::vector<uint8_t> elsewhere;       // experts that another device computes: they are not expected

 private:
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

// Of each expert a matrix on disk as `all` is of all of them, one below the other, each of `rows` rows.
std::vector<Matrix> on_disk(int64_t experts, const Matrix& all, int64_t rows);

class ExpertsOnDisk : public ExpertStore {
 public:
  ExpertsOnDisk(ExpertMatrices all, std::shared_ptr<Workspace> workspace);

  void begin(const ExpertRows& rows, int64_t) override { resting_.begin(rows); }
  void end() override { resting_.end(); }
  void expect(const int32_t* expected, int64_t n) override { resting_.expect(expected, n); }
  bool foreseeable() const override { return resting_.foreseeable(); }
  RestingExperts* resting() override { return &resting_; }
  bool fetch(const ExpertRows&, int64_t) const override { return false; }

 private:
  void sum_rows(Thread& t, ExpertRows& rows, const PiActs& acts, bool single, uint16_t* fired,
                const Attempt& attempt) override;
  RestingExperts resting_;
};
