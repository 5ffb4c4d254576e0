// Experts without gates that rest on disk and whose neurons are told apart. Of an expert that is not in memory a step reads
// up as a matrix and, of down, the rows of neurons that fire; or, with a predictor, up and down as bundles, and of these
// the ones that it selects.
#pragma once
#include "bundled_experts.h"
#include "resting_experts.h"

// The same bits as of `BundledExperts`: activations are computed as experts arrive, and neurons are added in the order of
// these. An expert keeps the rows that were read as long as it stays in memory.
class RestingNeurons : public BundledExperts, private NeuronSum::Waves {
 public:
  RestingNeurons(ExpertMatrices all, std::shared_ptr<Workspace> workspace);
  ~RestingNeurons() override;  // waits for what is under way

  void begin(const ExpertRows& rows, int64_t tokens) override;
  void end() override { resting_.end(); }
  void expect(const int32_t* expected, int64_t n) override;
  bool foreseeable() const override { return resting_.foreseeable(); }
  bool foresee(int thread, const Rows& x, const Attempt& attempt) override;
  RestingExperts* resting() override { return &resting_; }
  bool fetch(const ExpertRows&, int64_t) const override { return false; }
  void sum_some(Thread& t, ExpertRows& rows, const PiActs* acts, const Rows& x, const NeuronSum::Piece& piece,
                int64_t top_k, const SharedExpert& shared, const Attempt& attempt) override;

 private:
  // Rows of an expert that are being read; guessed: before it was known what a step needs.
  struct Coming {
    int64_t ticket;
    int32_t expert;
    bool guessed;
  };
  struct Summed {  // of a step
    const ExpertRows* rows;
    const Attempt* attempt;
    Rows x;     // the layer's input
    bool fits;  // whether all its experts are in memory at once
  };
  void begin_sum(const ExpertRows& rows, const Rows& x, const Attempt& attempt);
  bool begin(int thread, const NeuronLists& lists) override;
  void sum_rows(Thread& t, ExpertRows& rows, const PiActs& acts, bool single, uint16_t* fired,
                const Attempt& attempt) override;
  bool next(NeuronLists& lists) override;
  bool take_some(NeuronLists& lists);
  void need_fired(int32_t e);
  void need_listed(const NeuronLists& lists);
  void read_rows(int32_t e, bool all, bool guessed = false);
  void forget(int32_t e) { read_at_[(size_t)e] = slots_->times_read(e) - 1; }  // nothing is there of its rows
  bool coming(int32_t e) const;
  void wait_for_rows(const int32_t* e, bool* lost = nullptr);
  void wait_for_needed(int32_t e);
  void place(int32_t e);

  const std::shared_ptr<Slots> slots_;
  RestingExperts resting_;
  const size_t rows_part_;  // of the slots; behind it the scales
  const int64_t groups_;    // of an expert's neurons
  std::vector<uint32_t> loaded_,
      needed_;                     // [experts][groups_]: of each neuron whether its row is there, or being read; in
                                   // this step, whether it is needed: a bit
  std::vector<uint32_t> read_at_;  // of each expert the time of `Slots::times_read` that this is of
  std::vector<Coming> coming_;
  Summed step_ = {};
  std::vector<int32_t> active_, chosen_;  // of the step, ascending; of a wave
  std::vector<int32_t> expected_;         // by the layer before, ascending
};
