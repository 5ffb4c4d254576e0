// Experts whose neurons are told apart: as bundles, but for their first product (gate, or up without gates), which is of
// matrices, or, with a predictor, of the bundles, too. Behind them may be the neurons of a shared expert without gates; or it
// has bundles of its own.
#pragma once
#include "expert_store.h"

class BundledExperts : public ExpertStore {
 public:
  BundledExperts(ExpertMatrices all, std::shared_ptr<Workspace> workspace);
  int forms(int64_t tokens) const override { return leaves_out(tokens) && predictor_ ? 0 : forms_; }
  bool leaves_out(int64_t tokens) const override { return !computes_whole_ && tokens <= PI_NEURON_TOKENS; }
  int64_t hidden_width() const override { return predictor_ && !predictor_->in ? predictor_->rank() : 0; }
  void sum_some(Thread& t, ExpertRows& rows, const PiActs* acts, const Rows& x, const NeuronSum::Piece& piece,
                int64_t top_k, const SharedExpert& shared, const Attempt& attempt) override;
  bool samples(int64_t tokens) const override {
    return predictor_ && recall_every_ && leaves_out(tokens) && bundled_->stats_of_job().steps % recall_every_ == 0;
  }
  bool has_shared() const override { return shared_ > 0; }
  const PiActs* sum_shared(Thread& t, const ExpertRows& rows, const PiActs* acts, const NeuronSum::Piece& piece,
                           const SharedExpert& shared, int forms) override;
  Counts counts() const override;
  void clear() override;
  void set_whole(bool on) override { computes_whole_ = on; }

 protected:
  const std::vector<Matrix>& first_products() const { return parts_[parts_[GATE].empty() ? UP : GATE]; }
  void activate(const ExpertRows& rows, const Block& block, float* h, int64_t ld) const;
  void note_firing(const ExpertRows& rows, const Block& block, int64_t tokens) const;
  void note_shared(Thread& t, const ExpertRows& rows, const PiActs* acts, int64_t tokens,
                   const SharedExpert& shared) const;
  NeuronLists::Noted noted(int thread, const std::vector<ExpertRows::Active>& active) const;

  void sum_predicted(Thread& t, ExpertRows& rows, const Rows& x, NeuronSum::Piece piece, int64_t top_k,
                     const SharedExpert& shared);

  const std::shared_ptr<NeuronSum> bundled_;
  const int64_t shared_;                              // neurons of the shared expert, behind those of the others
  const std::shared_ptr<const Predictor> predictor_;  // null: gates, or up without these, find what fires
  const std::vector<int32_t> among_;                  // as of `ExpertMatrices`
  const int64_t selectable_;                          // neurons of an expert that it selects among
  const std::vector<Matrix> out_;                     // of each expert, its rows of the predictor's
  bool computes_whole_ = false;

 private:
  void weigh(ExpertRows& rows, int64_t tokens, int64_t top_k) const;
  template <class Then>
  void note_predicted(int thread, const ExpertRows& rows, const std::vector<ExpertRows::Active>& active,
                      const PiActs* hidden, int64_t tokens, bool sampled, const Then& then) const;
  template <class Then>
  void note_predicted_shared(int thread, const PiActs* hidden, int64_t tokens, const Then& then) const;
  void sample(Thread& t, const ExpertRows& rows, const PiActs* acts, int64_t tokens);
  void sample_shared(Thread& t, const PiActs* acts, int64_t tokens, const SharedExpert& shared);
  // The neuron of a row of the experts' `out_`.
  int32_t neuron_of(int64_t row) const {
    return among_.empty() ? (int32_t)row : (int32_t)(row / selectable_ * neurons) + among_[(size_t)row];
  }
  // The first neuron of the shared expert: behind the others, where its bundles are.
  int64_t first_shared() const { return shared_ ? experts * neurons : 0; }
  int64_t groups() const {
    return experts + (shared_ + neurons - 1) / neurons;
  }  // of neurons with weights of their own

  const int64_t recall_every_;
  const Matrix shared_out_;  // the shared expert's rows of the predictor's
  Ffn::Recall recall_ = {};
  std::vector<Ffn::Recall> sampled_;  // of the threads
  int64_t predictor_rows_ = 0;
  std::vector<uint8_t> among_all_;  // of each neuron of the experts, whether it selects among it; empty: all
};
