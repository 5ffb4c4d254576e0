// The FFN of a layer whose neurons are experts: groups of neurons of one size, of which a router selects a few for each
// token. Beside them may be a shared expert, which every token has.
#pragma once
#include "expert_store.h"
#include "router.h"

// Norms of a layer whose shared expert and whose others are apart: each reads the layer's input through a norm of its own,
// the others through that of `FfnSpec`, and gives through another one; so does the router, which must have one. The sum of
// the two then goes through `FfnSpec::out_norm`.
struct ApartNorms {
  Norm router, shared, shared_out, experts_out;
  explicit operator bool() const { return (bool)router; }
};

class Experts : public Op {
 public:
  // Made by Program::experts and Program::expert_sum, which check the sizes. Without scores, an operator before it in
  // the step, or the caller, selects the experts.
  Experts(FfnSpec spec, RouterSpec router, std::shared_ptr<Matrix> scores, ExpertMatrices experts, SharedExpert shared,
          std::shared_ptr<Workspace> workspace, ApartNorms separate = {});

  const char* name() const override { return "experts"; }
  void run(Thread& t, const Step& step) override;
  void skip() override;
  bool samples(const Program&, const Step& step) const override { return store_->samples(step.like()); }

  // Whether steps keep what they selected, until the next one: for profiles and for policies that place experts.
  // fired: and which neurons of these fired, in steps that compute whole experts.
  void record(bool on, bool fired = false);
  // Of the last step.
  struct Selected {
    std::vector<int32_t> experts;  // [tokens][top_k], ascending for each token
    bool damaged = false;          // a weight was NaN or infinite
    std::vector<int32_t> rows;     // of `fired`, for each of `experts`
    std::vector<uint16_t> fired;   // [rows][panels of up], a bit for each neuron
    std::vector<uint16_t> shared;  // the same of the shared expert, [tokens][its panels]
  };
  Selected recorded() const;
  ExpertStore::Counts counts() const;
  void clear();
  // out [tokens, d_model] = the sum of experts that the caller selects, outside of a program's steps. selected, weights:
  // [tokens][top_k]; -1 selects none. Returns false where no expert is selected: out is zero, and no job was run.
  // hidden: [tokens][rank] what a predictor without its first matrix reads, in steps that leave neurons out.
  // ReadError, here and of the parts, if experts could not be read from disk: out is void.
  bool sum(Program& program, const float* x, int64_t tokens, const int32_t* selected, const float* weights, float* out,
           const float* hidden = nullptr);
  // The same in parts, for a selection that is known before x: `order`, which begins to read what rests on disk, then
  // `fetch` as often as there is time, then `sum_ordered`, with nothing else of the program in between. Without
  // `order`: std::invalid_argument.
  void order(Program& program, int64_t tokens, const int32_t* selected, const float* weights);
  // Reads the next part of the weights that each thread multiplies first into the caches of its core. False once they
  // hold what they can, or all of it, and of experts on disk.
  bool fetch(Program& program);
  bool sum_ordered(Program& program, const float* x, int64_t tokens, float* out, const float* hidden = nullptr);
  // Whether steps compute every neuron of the selected experts, where they could skip some.
  void set_whole(bool on);
  // Small steps begin to read what `router`, about that of `after`, whose experts rest on disk, would select of this one's
  // input.
  void foresee(std::shared_ptr<Experts> after, std::shared_ptr<Matrix> router);
  const Router& router() const { return router_; }
  ExpertStore& store() const { return *store_; }

 private:
  bool guesses(int64_t tokens) const;
  void guess(Thread& t, ExpertRows& rows, const Rows& x) const;
  void expect_guessed(ExpertRows& rows, int64_t tokens);
  void weigh_shared(ExpertRows& rows, const PiActs* acts, int64_t begin, int64_t end) const;
  float shared_weight(const ExpertRows& rows, int64_t token) const {
    return shared_.gate.empty() ? 1 : rows.shared_weights[(size_t)token];
  }
  void run_rows(Thread& t, int64_t first, int64_t tokens, bool sampled, bool alone);
  void run_apart(Thread& t, int64_t tokens);
  void begin(Thread& t, int64_t tokens, bool early);
  void keep(const ExpertRows& rows, int64_t tokens);
  void keep_shared(const Thread& t, int64_t tokens);
  int64_t shared_panels() const { return (shared_.neurons->neurons() + PI_LANES - 1) / PI_LANES; }
  void order_rows(ExpertRows& rows, int64_t tokens, const int32_t* selected, const float* weights);
  template <class P>
  void sum_rows(Program& program, const float* x, int64_t tokens, float* out, const float* hidden, P prepare);
  // The forms in which a step of that many tokens has the experts' input, or what makes latents of it.
  int input_forms(int64_t tokens) const { return latent_in_ ? latent_in_->form() : store_->forms(tokens); }
  void sum_some(Thread& t, ExpertRows& rows, const PiActs* acts, const Rows& x, const Destination& to, int forms,
                bool sampled) const;
  void add_shared(Thread& t, const ExpertRows& rows, int64_t tokens, const Destination& to) const;
  void merge(Thread& t, const ExpertRows& rows, int64_t tokens, const Destination& to) const;
  // The latents of the input, in the forms of the experts; the output of those in their place.
  const PiActs* make_latents(Thread& t, const PiActs* acts, int64_t tokens) const;
  void add_latents(Thread& t, int64_t tokens, const Destination& to) const;
  Rows latents(const Program& p, int64_t tokens) const { return {p.gate, p.ldh, store_->d_model, tokens}; }

  const FfnSpec spec_;
  const Router router_;
  const SharedExpert shared_;
  const ApartNorms separate_;
  const std::shared_ptr<Matrix> latent_in_, latent_out_;  // null: experts read and give rows of d_model
  const std::unique_ptr<ExpertStore> store_;
  const std::shared_ptr<Workspace> workspace_;
  std::shared_ptr<Experts> after_;  // whose experts are guessed; null: nobody's
  std::shared_ptr<Matrix> after_router_;
  bool records_ = false, records_fired_ = false;
  Selected recorded_;
};

// A router that reads the residual stream as it is, before attention, for experts further on in the step.
class EarlyRouter : public Op {
 public:
  explicit EarlyRouter(Router router) : router_(std::move(router)) {}
  const char* name() const override { return "router"; }
  void run(Thread& t, const Step& step) override;
  // Begins to read what it selects, of experts on disk.
  void foresee(std::shared_ptr<Experts> of);

 private:
  const Router router_;
  std::shared_ptr<Experts> of_;  // null: they are in memory
};
