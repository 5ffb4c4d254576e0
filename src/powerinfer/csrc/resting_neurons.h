// Experts without gates that rest on disk, up as matrices and down as bundles: of an expert that is not in memory up is
// read, and of down the rows of neurons that fire.
#pragma once
#include "bundled_experts.h"
#include "resting_experts.h"

// The same bits as of `BundledExperts`: activations are computed as experts arrive, and the neurons that fire are added in
// the order of these. An expert keeps the rows that were read as long as it stays in memory.
class RestingNeurons : public BundledExperts, private NeuronSum::Waves {
 public:
  RestingNeurons(ExpertMatrices all, std::shared_ptr<Workspace> workspace);
  ~RestingNeurons() override;  // waits for what is under way

  void begin(const ExpertRows& rows, int64_t tokens) override;
  void end() override { resting_.end(); }
  void expect(const int32_t* expected, int64_t n) override;
  bool foreseeable() const override { return resting_.foreseeable(); }
  RestingExperts* resting() override { return &resting_; }
  bool fetch(const ExpertRows&, int64_t) const override { return false; }
  void sum_some(Thread& t, ExpertRows& rows, const PiActs* acts, const Rows& x, const NeuronSum::Piece& piece,
                int64_t top_k, const SharedExpert& shared, const Attempt& attempt) override;

 private:
  enum { ROWS = 1, SCALES = 2 };  // parts of the slots behind up
  // Rows of down that are being read, and whose they are.
  struct Coming {
    int64_t ticket;
    std::vector<int32_t> experts;
  };
  struct Summed {  // of a step
    const ExpertRows* rows;
    const Attempt* attempt;
    bool fits;  // whether all its experts are in memory at once
  };
  void sum_rows(Thread& t, ExpertRows& rows, const PiActs& acts, bool single, uint16_t* fired,
                const Attempt& attempt) override;
  bool next(NeuronLists& lists) override;
  void take_some(NeuronLists& lists);
  void note_rows(int32_t e, const ExpertRows* fired);
  void read_noted();
  void forget(const std::vector<int32_t>& list);
  void wait_for_rows(const int32_t* e);
  void place(int32_t e);

  const std::shared_ptr<Slots> slots_;
  RestingExperts resting_;
  const int64_t groups_;           // of an expert's neurons
  std::vector<uint32_t> loaded_;   // [experts][groups_]: of each neuron whether its row is there, or being read, a bit
  std::vector<uint32_t> read_at_;  // of each expert the time of `Slots::times_read` that this is of
  std::vector<Coming> coming_;
  std::vector<int32_t> noted_;  // experts of which rows were noted
  Summed step_ = {};
  std::vector<int32_t> active_, chosen_;  // of the step, ascending; of a wave
};
