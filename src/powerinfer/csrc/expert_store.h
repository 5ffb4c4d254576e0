// The weights of a layer's experts, and the products of a step's rows with them. They have one of three forms: matrices in
// panels, neurons as bundles (bundled_experts.h), or matrices that rest on disk (resting_experts.h).
#pragma once
#include <algorithm>
#include <array>
#include <functional>

#include "ffn.h"

class Experts;
class ExpertStore;
class RestingExperts;

inline const Vector NO_BIAS;

// The experts' matrices: of all experts, one below the other, each padded to whole panels. gate may be null.
// bundled: the neurons of all experts, one expert after another, in place of down and, where there are gates, of up; behind
// them may be those of a shared expert without gates. The rows of their first product (gate, or up without gates) are read
// with a predictor, which selects among all of these neurons and takes the matrix' place; its rows for a shared expert in
// bundles of its own lie behind those of the others.
// among: with a predictor, of each expert the neurons that it selects among, ascending, as many of each and whole groups; it
// has no rows of the others, which someone else computes in steps that leave neurons out. Empty: all.
// slots: the matrices of each expert rest on disk, as they are stored: its parts are gate, up and down. `gate`, `up` and
// `down` say then what they are alone. With `bundled`, of experts without gates, the parts are up, the rows of down, which
// are read later, and the scales that their groups share, if any.
// latent_in, latent_out: the experts read and give latents, which these matrices make of the input, and the output of; null:
// the input and the output themselves.
struct ExpertMatrices {
  int64_t experts, neurons;  // neurons: of each expert
  Activation activation;
  std::shared_ptr<Matrix> gate, up, down;
  std::vector<Vector> gate_bias, up_bias, down_bias;  // of each expert, padded to whole panels; or none at all
  std::shared_ptr<NeuronSum> bundled = nullptr;
  std::shared_ptr<const Predictor> predictor = nullptr;
  std::vector<int32_t> among = {};
  int64_t recall_every = 0;  // steps between samples of its recall, for which all neurons are computed; 0: none
  std::shared_ptr<Slots> slots = nullptr;
  std::shared_ptr<Matrix> latent_in = nullptr, latent_out = nullptr;
};

// The shared expert, and the weights of its own gate: a sigmoid of their product with the input. Either may be absent.
// bundled: its neurons as bundles, too, beside those of experts of another width, or of other types; null: there are none.
struct SharedExpert {
  std::shared_ptr<const DenseNeurons> neurons;
  Vector gate;
  std::shared_ptr<NeuronSum> bundled = nullptr;
};

// Buffers for a step's rows: one for each of a token's experts, those of an expert side by side.
struct ExpertRows {
  struct Sizes {
    int64_t tokens, experts, top_k, neurons, d_model;
    int64_t bundled;  // neurons of all experts of a layer whose neurons are bundles; 0: there is none
    int64_t groups;   // of these, experts and as many neurons of the shared one as an expert has
  };
  static constexpr int64_t GUESSED = PI_NEURON_TOKENS;  // tokens of a step that guesses
  ExpertRows(const Sizes& sizes, int threads);

  const Sizes sizes;
  const int64_t ldl, ldh, ldy;
  ActMemory input, hidden;                                // [rows] of d_model and of neurons
  std::vector<float> logits, scores;                      // [tokens][ldl]
  Mapping gate, up, out, shared;                          // [rows][ldh] twice, [rows][ldy], [tokens][ldy]
  std::vector<int32_t> selected, row_of, token_of;        // experts and rows [tokens][top_k]; tokens [rows]
  std::vector<float> weights, weight_of, shared_weights;  // [tokens][top_k], [rows], [tokens]
  std::vector<int32_t> begin, active;       // [experts + 1] first row of each expert; the experts that have rows
  std::vector<int64_t> cost;                // [active + 1] of a unit of work of all those before
  Mapping activations;                      // activations of bundled neurons, [PI_NEURON_TOKENS][bundled]
  std::vector<float> expert_weights;        // weights of bundled experts, [PI_NEURON_TOKENS][groups]
  std::vector<float> guessed;               // logits, [GUESSED][ldl]
  std::vector<uint16_t> fired;              // which neurons of bundled experts fire, a bit each, [rows][ldh / 16]
  ExpertStore* ahead = nullptr;             // experts of a further layer that the step expects; null: none
  bool scales_input = false;                // `weight_of` multiplies what experts read, not what they give
  const Experts* ordered = nullptr;         // whose rows `Experts::order` has ordered; null: nobody's
  int64_t ordered_tokens = 0, fetched = 0;  // of these rows; bytes of their weights that each thread has fetched
  // The experts that are computed next, of those that have rows: `active` and `cost`.
  void compute(const std::vector<int32_t>& experts);
  // An active expert: its rows, and what a unit of work of all those before costs.
  struct Active {
    size_t expert;
    int64_t first, n, before;
    int64_t cost() const { return n + ROW_COSTS; }
  };
  // A row each, and to read the weights and to widen them.
  static constexpr int64_t ROW_COSTS = 2;
  // The active experts of a phase: a thread's own copy, since it may be late, when others select experts already.
  const std::vector<Active>& copy(int thread) const;
  int64_t n(size_t expert) const { return begin[expert + 1] - begin[expert]; }

 private:
  mutable std::vector<std::vector<Active>> copies_;  // by thread

 public:
  float* floats(const Mapping& of) const { return (float*)of.data(); }
};

// In panels. By the threads of a job, unless it says otherwise.
class ExpertStore {
 public:
  enum Part { GATE, UP, DOWN };
  // Of each expert; no gates: empty. Matrices that are not in memory in panels have no data, but perhaps a source.
  using Parts = std::array<std::vector<Matrix>, 3>;
  // Counts of steps whose neurons are told apart, as of `NeuronSum` and `Ffn`; rows of the predictor's `out` that were
  // read.
  struct Counts {
    NeuronStats neurons;
    Ffn::Recall recall;
    int64_t predictor_rows;
  };
  // Runs work that may fail to read; false if it, or other work of the step, has failed.
  using Attempt = std::function<bool(const std::function<void()>&)>;
  static std::unique_ptr<ExpertStore> make(ExpertMatrices all, std::shared_ptr<Workspace> workspace);
  ExpertStore(ExpertMatrices all, Parts parts, std::shared_ptr<Workspace> workspace);
  virtual ~ExpertStore() = default;

  const int64_t experts, neurons, d_model;

  // The forms that a step of that many tokens reads its input in.
  virtual int forms(int64_t) const { return forms_; }
  int64_t up_panels() const { return parts_[UP][0].panels; }
  // The outputs of all rows, in phases, of experts on disk with barriers. A row has the same bits whichever rows are computed with it. acts: of
  // the tokens; fired: a bit for each neuron of each row, null: not asked for.
  void sum_tokens(Thread& t, ExpertRows& rows, const PiActs* acts, int64_t tokens, uint16_t* fired,
                  const Attempt& attempt) {
    const bool single = tokens == 1;
    sum_rows(t, rows, single ? *acts : gather_in_phase(rows, acts, d_model, forms_), single, fired, attempt);
  }
  // Whether a step of that many tokens leaves neurons out; then this in place of `sum_rows`. x: what a predictor reads,
  // the input of the layer.
  virtual bool leaves_out(int64_t) const { return false; }
  // Numbers of a token that a predictor reads in place of that input; 0: it reads the input, or there is none.
  virtual int64_t hidden_width() const { return 0; }
  virtual void sum_some(Thread&, ExpertRows&, const PiActs*, const Rows& /*x*/, const NeuronSum::Piece&,
                        int64_t /*top_k*/, const SharedExpert&, const Attempt&) {}
  // Whether the next such step measures the recall of a predictor: between steps.
  virtual bool samples(int64_t) const { return false; }
  // Whether that is the sum of the shared expert, too.
  virtual bool has_shared() const { return false; }
  // Else of such a step, before it, the sum of a shared expert in bundles of its own, without its weight. acts: the input,
  // in the forms of its matrices and in `forms`. Returns it in `forms`. In phases.
  virtual const PiActs* sum_shared(Thread&, const ExpertRows&, const PiActs* acts, const NeuronSum::Piece&,
                                   const SharedExpert&, int /*forms*/) {
    return acts;
  }

  // Experts on disk, by thread 0: begins a step, rows are ordered; the step ends before it is computed; begins to read
  // experts that the step is to need, one of them perhaps repeatedly; whether that is worth it, by all threads.
  virtual void begin(const ExpertRows&, int64_t /*tokens*/) {}
  virtual void end() {}
  virtual void expect(const int32_t* /*experts*/, int64_t /*n*/) {}
  virtual bool foreseeable() const { return false; }
  // By all threads, once reads of the step's own experts have begun: begins to read, of those that it expects, neurons
  // that a predictor selects for x, which is near to the layer's input. Whether it did: then nothing is prepared any more.
  virtual bool foresee(int /*thread*/, const Rows& /*x*/, const Attempt&) { return false; }
  virtual RestingExperts* resting() { return nullptr; }

  // Outside of jobs, of rows that are ordered: reads bytes [rows.fetched, last) of the weights that each thread
  // multiplies first into the caches of its core. False if there are no more.
  virtual bool fetch(const ExpertRows& rows, int64_t last) const;
  // Between jobs.
  virtual Counts counts() const;
  virtual void clear() {}
  virtual void set_whole(bool) {}

 protected:
  // acts: of rows, or of a `single` token.
  virtual void sum_rows(Thread& t, ExpertRows& rows, const PiActs& acts, bool single, uint16_t* fired,
                        const Attempt& attempt);
  // The same of experts on disk, some after others: `next`, by thread 0, says which.
  void sum_arriving(Thread& t, ExpertRows& rows, const PiActs& acts, bool single, uint16_t* fired,
                    const std::function<void()>& next, const RestingExperts& resting) const;
  // For each row its token's input, of k elements. With a barrier; `gather_in_phase`: in a phase.
  PiActs gather(int thread, const ExpertRows& rows, const PiActs* acts, int64_t k, int forms) const;
  PiActs gather_in_phase(const ExpertRows& rows, const PiActs* acts, int64_t k, int forms) const;
  static void gather_rows(const ExpertRows& rows, const PiActs* acts, const PiActs& to, int forms, int64_t begin,
                          int64_t end);
  // Rows of an expert by panels of one of its matrices.
  struct Block {
    size_t expert;
    int64_t first, n, p0, p1;  // the first row and their number; panels
    int64_t order;             // of the expert among the active ones
    int64_t c0() const { return p0 * PI_LANES; }
    int64_t lanes() const { return (p1 - p0) * PI_LANES; }
  };
  // The panels of all active experts, `unit` at a time, as numbers up to `all`: equal parts of these cost about the same
  // however the rows are distributed.
  struct Work {
    Work(const std::vector<ExpertRows::Active>& active, int64_t panels, int64_t unit = 2);
    // Calls f(block) for what begins in [from, to).
    template <class F>
    void visit(int64_t from, int64_t to, const F& f) const {
      for (const ExpertRows::Active& run : active) {
        const int64_t order = &run - active.data();
        const auto first = [&](int64_t cost) {  // the unit that begins there or next
          const int64_t before = run.before * units;
          return std::min(
              std::clamp((std::max(cost, before) - before + run.cost() - 1) / run.cost(), (int64_t)0, units) * unit,
              panels);
        };
        if (const int64_t p0 = first(from), p1 = first(to); p0 < p1)
          f(Block{run.expert, run.first, run.n, p0, p1, order});
      }
    }
    const std::vector<ExpertRows::Active>& active;
    const int64_t panels, unit, units;
    int64_t all = 0, most_rows = 0;  // of an expert
  };
  // Calls work(block) for this thread's share of the panels of all active experts.
  template <class F>
  void share_panels(int thread, const ExpertRows& rows, int64_t panels, F work, int64_t unit = 2) const {
    const Work all(rows.copy(thread), panels, unit);
    int64_t from, to;
    share(all.all, 1, workspace_->pool->threads(), thread, &from, &to);
    all.visit(from, to, work);
  }
  // The same in a phase, to `columns` rows, `ld` apart, which may lie aside: compute(block, columns, ld), then, for blocks
  // that are there, place(block). As many floats for a row and panel as `floats`; 0: not aside. then: as of
  // `Pool::phase_then`.
  struct Output {
    float *rows, *more;  // of the block's first row and panel
    int64_t ld;
  };
  template <class C, class P, class Then>
  void phase_of_panels(const ExpertRows& rows, const Work& all, int64_t floats, const C& compute, const P& place,
                       const Then& then) const;
  template <class C, class P>
  void phase_of_panels(const ExpertRows& rows, const Work& all, int64_t floats, const C& compute,
                       const P& place) const {
    phase_of_panels(rows, all, floats, compute, place, [] {});
  }
  // h of a block, times the weights of the rows.
  void first_products(int thread, const ExpertRows& rows, const Block& block, const PiActs& acts, bool single,
                      const Output& to, uint16_t* fired) const;
  // That in the form that down takes.
  void make_forms(const ExpertRows& rows, const Block& block) const;
  void down_products(int thread, const ExpertRows& rows, const Block& block, float* out, int64_t ld) const;
  Output hidden_rows(const ExpertRows& rows, const Block& block) const {
    const int64_t at = block.first * rows.ldh + block.c0();
    return {rows.floats(rows.gate) + at, rows.floats(rows.up) + at, rows.ldh};
  }
  float* out_rows(const ExpertRows& rows, const Block& block) const {
    return rows.floats(rows.out) + block.first * rows.ldy + block.c0();
  }
  // h of all rows, in the form that down takes: this thread's share.
  void multiply(int thread, const ExpertRows& rows, const PiActs& acts, bool single, uint16_t* fired) const;
  // The output of every row: this thread's share.
  void add_down(int thread, const ExpertRows& rows) const;
  // A block of the product with one of an expert's matrices, with its bias but for down; out: of its first row and panel.
  void product(int thread, Part part, const Block& block, const PiActs& acts, float* out, int64_t ldo) const;

  Parts parts_;
  const Activation activation_;
  const std::vector<Vector> biases_[3];  // of each expert, by part; or none
  const std::shared_ptr<Workspace> workspace_;
  const int forms_;
};

template <class C, class P, class Then>
void ExpertStore::phase_of_panels(const ExpertRows& rows, const Work& all, int64_t floats, const C& compute,
                                  const P& place, const Then& then) const {
  Pool& pool = *workspace_->pool;
  const bool dealt = workspace_->deals(rows.begin[(size_t)experts], parts_[UP][0], (int64_t)all.active.size());
  const int64_t of_unit = all.unit * PI_LANES * floats;  // and row; one may begin in a piece and end behind it
  const auto aside_at = [&](float*& aside, const Block& block) {
    const int64_t ld = block.lanes(), n = block.n * ld;
    const Output at{aside, aside + n, ld};
    aside += floats * n;
    return at;
  };
  pool.phase_then(
      all.all, dealt ? std::max(all.all / (32 * pool.threads()), (int64_t)1) : 1, {of_unit, of_unit * all.most_rows},
      [&](int64_t from, int64_t to, float* aside) {
        const bool is_aside = aside;
        all.visit(from, to, [&](const Block& block) {
          compute(block, is_aside ? aside_at(aside, block) : Output{nullptr, nullptr, 0});
        });
      },
      [&](int64_t from, int64_t to, float* aside) {
        const bool is_aside = aside;
        all.visit(from, to, [&](const Block& block) {
          place(block, is_aside ? aside_at(aside, block) : Output{nullptr, nullptr, 0});
        });
      },
      then, dealt);
}
