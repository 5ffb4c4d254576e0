// The FFN of a layer whose neurons are experts: groups of neurons of one size, of which a router selects a few for each
// token. Beside them may be a shared expert, which every token has.
#pragma once
#include "ffn.h"
#include "resting_experts.h"

// How a token's experts follow from the router's scores, one for each expert.
struct RouterSpec {
  int64_t top_k;           // experts of a token
  bool sigmoid = false;    // scores are sigmoids of the logits; else their softmax
  bool normalise = false;  // the weights of a token's experts add up to `scale`
  float scale = 1;         // of the weights
  Vector correction;       // added to scores for the selection alone
  Vector bias;             // of the logits
  // Experts are selected in the `top_groups` best of `groups` equal groups; a group's score is the sum of its
  // `group_best` best experts' (DeepSeek-V2: 1, V3: 2).
  int64_t groups = 1, top_groups = 1, group_best = 1;
};

// std::invalid_argument where that many experts cannot be selected so.
void check_router(const RouterSpec& spec, int64_t experts);

// Selects a token's experts, in ascending order, and their weights; logits: [experts], overwritten. Every index is valid
// and occurs once, whatever the logits are. scratch: [experts].
void route(const RouterSpec& spec, float* logits, int64_t experts, float* scratch, int32_t* selected, float* weights);

class Experts;
struct ExpertRows;

// Selects experts and orders the rows that follow, for the threads of a job.
struct Router {
  RouterSpec spec;
  std::shared_ptr<Matrix> scores;  // null: the experts are selected elsewhere
  int64_t experts;
  // acts: what the router reads, in the form of its matrix. Ends with a barrier.
  void select(Thread& t, ExpertRows& rows, const PiActs* acts, int64_t tokens) const;
  // Orders rows by expert, and by token within an expert. By one thread.
  void group(ExpertRows& rows, int64_t tokens) const;
};

// The experts' matrices: of all experts, one below the other, each padded to whole panels. gate may be null.
// bundled: the neurons of all experts, one expert after another, in place of down and, where there are gates, of up; behind
// them may be those of a shared expert. The rows of their first product (gate, or up without gates) are read with a
// predictor, which selects among all of these neurons and takes the matrix' place.
// slots: the matrices of each expert rest on disk, as they are stored: its parts are gate, up and down. `gate`, `up` and
// `down` say then what they are alone.
struct ExpertMatrices {
  int64_t experts, neurons;  // neurons: of each expert
  Activation activation;
  std::shared_ptr<Matrix> gate, up, down;
  std::vector<Vector> gate_bias, up_bias, down_bias;  // of each expert, padded to whole panels; or none at all
  std::shared_ptr<NeuronSum> bundled = nullptr;
  std::shared_ptr<const Predictor> predictor = nullptr;
  int64_t recall_every = 0;  // steps between samples of its recall, for which all neurons are computed; 0: none
  std::shared_ptr<Slots> slots = nullptr;
};

// The shared expert, and the weights of its own gate: a sigmoid of their product with the input. Either may be absent.
struct SharedExpert {
  std::shared_ptr<const DenseNeurons> neurons;
  Vector gate;
};

// Buffers for a step's rows: one for each of a token's experts, those of an expert side by side.
struct ExpertRows {
  struct Sizes {
    int64_t tokens, experts, top_k, neurons, d_model;
    int64_t bundled;  // neurons of all experts of a layer whose neurons are bundles; 0: there is none
    int threads;
  };
  static constexpr int64_t GUESSED = PI_NEURON_TOKENS;  // tokens of a step that guesses
  explicit ExpertRows(const Sizes& sizes);

  const Sizes sizes;
  const int64_t ldl, ldh, ldy;
  ActMemory input, hidden;                           // [rows] of d_model and of neurons
  std::vector<float> logits, scores;                 // [tokens][ldl]
  Mapping gate, up, out, shared;                     // [rows][ldh] twice, [rows][ldy], [tokens][ldy]
  std::vector<int32_t> selected, row_of, token_of;   // experts and rows [tokens][top_k]; tokens [rows]
  std::vector<float> weights, weight_of, of_shared;  // [tokens][top_k], [rows], [tokens]
  std::vector<int32_t> begin, active;       // [experts + 1] first row of each expert; the experts that have rows
  std::vector<int64_t> cost;                // [active + 1] of a unit of work of all those before
  Mapping known;                            // activations of bundled neurons, [PI_NEURON_TOKENS][bundled]
  std::vector<float> of_expert;             // weights of bundled experts, [PI_NEURON_TOKENS][experts]
  std::vector<float> guessed;               // logits, [GUESSED][ldl]
  Mapping panels;                           // two for each thread, repacked
  const Experts* ordered = nullptr;         // whose rows `Experts::order` has ordered; null: nobody's
  int64_t ordered_tokens = 0, fetched = 0;  // of these rows; bytes of their weights that each thread has fetched
  // The experts that are computed next, of those that have rows: `active` and `cost`.
  void compute(const std::vector<int32_t>& experts);
  float* floats(const Mapping& of) const { return (float*)of.data(); }
  uint8_t* panels_of(int thread) const { return panels.data() + thread * panel_bytes(sizes); }
  static int64_t panel_bytes(const Sizes& s) {
    return 2 * PI_LANES * 2 * pi_round_up(std::max(s.neurons, s.d_model), 32);
  }
};

class Experts : public Op {
 public:
  // Made by Program::experts and Program::expert_sum, which check the sizes. Without scores, an operator before it in
  // the step, or the caller, selects the experts.
  Experts(FfnSpec spec, RouterSpec router, std::shared_ptr<Matrix> scores, ExpertMatrices experts, SharedExpert shared,
          std::shared_ptr<Workspace> workspace);

  const char* name() const override { return "experts"; }
  void run(Thread& t, const Step& step) override;
  void skip() override;

  // Whether steps keep what they selected, until the next one: for profiles and for policies that place experts.
  // fired: and which neurons of these fired, in steps that compute whole experts.
  void record(bool on, bool fired = false);
  // Of the last step.
  struct Selected {
    std::vector<int32_t> experts;  // [tokens][top_k], ascending for each token
    bool damaged = false;          // a weight was NaN or infinite
    std::vector<int32_t> rows;     // of `fired`, for each of `experts`
    std::vector<uint16_t> fired;   // [rows][panels of up], a bit for each neuron
  };
  Selected recorded() const;
  // Of steps whose neurons are told apart, as of `NeuronSum` and `Ffn`; rows of the predictor's `out` that were read.
  struct Counts {
    NeuronStats neurons;
    Ffn::Recall recall;
    int64_t predictor_rows;
  };
  Counts counts() const;
  void clear();
  // out [tokens, d_model] = the sum of experts that the caller selects, outside of a program's steps. selected, weights:
  // [tokens][top_k]; -1 selects none. Returns false where no expert is selected: out is zero, and no job was run.
  // ReadError, here and of the parts, if experts could not be read from disk: out is void.
  bool sum(Program& program, const float* x, int64_t tokens, const int32_t* selected, const float* weights, float* out);
  // The same in parts, for a selection that is known before x: `order`, which begins to read what rests on disk, then
  // `fetch` as often as there is time, then `sum_ordered`, with nothing else of the program in between. Without
  // `order`: std::invalid_argument.
  void order(Program& program, int64_t tokens, const int32_t* selected, const float* weights);
  // Reads the next part of the weights that each thread multiplies first into the caches of its core. False once they
  // hold what they can, or all of it, and of experts on disk.
  bool fetch(Program& program);
  bool sum_ordered(Program& program, const float* x, int64_t tokens, float* out);
  // Whether steps compute every neuron of the selected experts, where they could skip some.
  void set_whole(bool on);
  // Small steps begin to read what `router`, about that of `after`, whose experts rest on disk, would select of this one's
  // input.
  void foresee(std::shared_ptr<Experts> after, std::shared_ptr<Matrix> router);
  // Of experts on disk, or null.
  RestingExperts* resting() const { return resting_.get(); }
  int64_t experts() const { return n_; }
  int64_t top_k() const { return router_.spec.top_k; }
  int64_t d_model() const { return d_model_; }

 private:
  friend class EarlyRouter;
  bool guesses(int64_t tokens) const;
  void guess(Thread& t, ExpertRows& rows, const Rows& x) const;
  void expect_guessed(ExpertRows& rows, int64_t tokens);
  template <class F>
  void multiply_all(Thread& t, ExpertRows& rows, const PiActs& acts, bool one, F next);
  template <class F>
  void each_share(const Thread& t, const ExpertRows& rows, int64_t panels, int64_t unit, bool dealt, F work) const;
  void weigh_shared(const Thread& t, ExpertRows& rows, const PiActs* acts, int64_t tokens) const;
  void keep(const ExpertRows& rows, int64_t tokens);
  void order_rows(ExpertRows& rows, int64_t tokens, const int32_t* selected, const float* weights) const;
  template <class P>
  void sum_rows(Program& program, const float* x, int64_t tokens, float* out, P prepare);
  PiActs gather(Thread& t, const ExpertRows& rows, const PiActs* acts) const {
    return gather(t, rows, acts, d_model_, (gate_.empty() ? 0 : gate_[0].form()) | up_[0].form());
  }
  PiActs gather(Thread& t, const ExpertRows& rows, const PiActs* acts, int64_t k, int forms) const;
  void multiply(Thread& t, const ExpertRows& rows, const PiActs& acts, bool one, bool dealt);
  // A product of one expert's gate, up or down, from matrices or from bundles.
  template <class R>
  void product(const Thread& t, const ExpertRows& rows, const Matrix& matrix, const Vector& bias, const PiActs& acts,
               float* out, int64_t ldo, int64_t tokens, int64_t p0, int64_t p1, R repack) const;
  const std::vector<Matrix>& firsts() const { return gate_.empty() ? up_ : gate_; }
  void sum_firing(Thread& t, ExpertRows& rows, const PiActs* acts, const NeuronSum::Piece& piece) const;
  void list_firing(Thread& t, ExpertRows& rows, const PiActs* acts, int64_t tokens) const;
  void list_shared(Thread& t, ExpertRows& rows, const PiActs* acts, int64_t tokens) const;
  void sum_predicted(Thread& t, ExpertRows& rows, const Rows& x, const Destination& to);
  void list_predicted(Thread& t, ExpertRows& rows, const Rows& x, bool sampled) const;
  void sample(Thread& t, const ExpertRows& rows, const PiActs* acts, int64_t tokens);
  void add_down(Thread& t, const ExpertRows& rows) const;
  void add_shared(Thread& t, const ExpertRows& rows, int64_t tokens, const Destination& to) const;
  void merge(Thread& t, const ExpertRows& rows, int64_t tokens, const Destination& to) const;

  const FfnSpec spec_;
  const Router router_;
  const SharedExpert shared_;
  const int64_t n_, neurons_, d_model_, more_;  // more: neurons of the shared expert that are in bundles, too
  const Activation activation_;
  bool whole_ = false;
  const std::shared_ptr<NeuronSum> bundled_;  // null: there are matrices
  std::vector<Matrix> gate_, up_, down_;      // of each expert; no gates: empty; what is in bundles has no data
  const std::vector<Vector> gate_bias_, up_bias_, down_bias_;
  const std::unique_ptr<RestingExperts> resting_;  // null: they are in memory
  std::shared_ptr<Experts> after_;                 // whose experts are guessed; null: nobody's
  std::shared_ptr<Matrix> after_router_;
  const std::shared_ptr<Workspace> workspace_;
  const std::shared_ptr<const Predictor> predictor_;  // null: gates find what fires
  const std::vector<Matrix> out_;                     // of each expert, its rows of the predictor's
  const int64_t recall_every_;
  bool records_ = false, records_fired_ = false;
  Selected recorded_;
  Ffn::Recall recall_ = {};
  std::vector<Ffn::Recall> sampled_;  // of the threads
  int64_t predictor_rows_ = 0;
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
