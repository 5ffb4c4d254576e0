// A part of an FFN: neurons of one layer as matrices in panels, and the sum that they add to the output.
#pragma once
#include "activation.h"
#include "bundles.h"
#include "program.h"

class DenseNeurons {
 public:
  // gate may be null: the activation is on up. inner: of h, before down; then bundles have no part in it.
  // std::invalid_argument where their sizes do not go together.
  DenseNeurons(NeuronSpec spec, std::shared_ptr<Matrix> gate, std::shared_ptr<Matrix> up, std::shared_ptr<Matrix> down,
               Norm inner = {});
  int64_t neurons() const { return up_->rows; }
  // In the order in which a step uses them.
  std::vector<std::shared_ptr<Matrix>> matrices() const {
    return gate_ ? std::vector{gate_, up_, down_} : std::vector{up_, down_};
  }
  int64_t d_model() const { return up_->k; }
  bool normalises() const { return (bool)inner_; }
  bool gated() const { return (bool)gate_; }
  bool is_in_memory() const { return first().is_in_memory() && up_->is_in_memory() && down_->is_in_memory(); }
  // Whether bundles hold neurons of the same kind: as many, with the same activation, biases and thresholds.
  bool same_kind(const Bundles& bundles) const;
  int forms() const { return first().form() | up_->form(); }  // of the input

  // ---- For the threads of a job of a program. acts: the input, normalised, in `forms`.
  // The sum of all of them, in phases where all are in memory, else with barriers. fired: if not null, [neurons], counts the tokens that each fires for.
  void sum(Thread& t, const PiActs* acts, int64_t tokens, const Destination& to, int64_t* fired) const;
  // The same in two steps: `multiply` writes this thread's columns of h to the program's `gate` and returns which these
  // are; `add_down` does the rest.
  Columns multiply(Thread& t, const PiActs* acts, int64_t tokens) const;
  void add_down(Thread& t, int64_t tokens, const Columns& mine, const Destination& to, int64_t* fired) const;
  // `sum` in three steps, phases where all are in memory: `activate` writes the first product's activations to `gate`;
  // `multiply_up` makes them h, where activations up to `threshold` count as zero; `finish` is the sum of these. use: called
  // for columns that are there, whole groups of neurons, by whoever put them there; then: once, behind that, by one thread.
  template <class Use, class Then>
  void activate(Thread& t, const PiActs* acts, int64_t tokens, const Use& use, const Then& then) const;
  template <class Use, class Then>
  void multiply_up(Thread& t, const PiActs* acts, int64_t tokens, float threshold, const Use& use,
                   const Then& then) const;
  void finish(Thread& t, int64_t tokens, const Destination& to) const;
  // Adds the tokens that neurons [begin, end) of h fire for.
  static void count_fired(const Thread& t, int64_t begin, int64_t end, int64_t tokens, int64_t* fired);
  // Of the first step, this thread's columns, whole units of panels. Without a barrier.
  Columns activate_share(Thread& t, const PiActs* acts, int64_t tokens, int64_t unit) const;
  // Whether activations are of what gates exceed a cutoff by: `sum` and `multiply` cannot be called then.
  bool cuts() const { return spec_.activation.cuts; }
  // Whether far fewer products may be nonzero than activations.
  bool drops_products() const { return !spec_.product_limits.empty(); }

 private:
  const Matrix& first() const { return gate_ ? *gate_ : *up_; }  // what the activation is on
  struct Hidden {  // rows of h, `ld` apart, and of what up gives, where there are gates
    float *h, *up;
    int64_t ld;
  };
  // Columns of h at a time that many tokens need in floats for a moment alone, in whole units; 0: all of them.
  int64_t columns_at_once(const Thread& t, int64_t tokens) const;
  static Hidden program_rows(const Thread& t);
  void multiply(Thread& t, const PiActs* acts, int64_t tokens, const Columns& mine, const Hidden& to) const;
  void activate(Thread& t, int64_t tokens, const Columns& part, float* h, int64_t ld) const;
  void cut_rows(const Thread& t, int64_t tokens) const;
  void multiply_up(Thread& t, const PiActs* acts, int64_t tokens, float threshold, const Columns& part,
                   const Hidden& to) const;
  Hidden rows_of(const Thread& t, int64_t tokens, const Columns& part, float* aside) const {
    return aside ? Hidden{aside - part.c0, aside - part.c0 + tokens * part.lanes(), part.lanes()} : program_rows(t);
  }
  PiActs forms_of_h(Thread& t, int64_t tokens, const Columns& mine, int64_t* fired) const;
  const PiActs* normalised(Thread& t, int64_t tokens) const;
  void put_forms(Thread& t, int64_t tokens, const Columns& part,
                 const Hidden& from) const;  // the same of rows elsewhere

  NeuronSpec spec_;  // biases and thresholds padded to whole panels
  const std::shared_ptr<Matrix> gate_, up_, down_;
  const Norm inner_;
};

template <class Use, class Then>
void DenseNeurons::activate(Thread& t, const PiActs* acts, int64_t tokens, const Use& use, const Then& then) const {
  const Program& p = *t.program;
  Workspace& w = *p.workspace;
  if (!is_in_memory()) {
    const Columns mine = activate_share(t, acts, tokens, 2);
    if (cuts()) w.pool->barrier(), cut_rows(t, tokens);
    use(mine);
    w.pool->barrier();
    return w.pool->phase(1, 1, [&](int64_t, int64_t) { then(); });
  }
  const auto activate_part = [&](const Columns& part, float* h, int64_t ld) { activate(t, tokens, part, h, ld); };
  const auto multiply_first = [&](const auto& use_part, const auto& then_all) {
    w.use_product(t.id, first(), spec_.first_bias(gated()), acts, tokens, p.gate, p.ldh, spec_.activation.panels(2),
                  activate_part, use_part, then_all);
  };
  if (!cuts()) return multiply_first(use, then);
  multiply_first([](const Columns&) {}, [] {});
  cut_rows(t, tokens);
  w.pool->phase_then(
      first().panels, 2, 0, [&](int64_t p0, int64_t p1, float*) { use(Columns(first(), p0, p1)); },
      [](int64_t, int64_t, float*) {}, then);
}

template <class Use, class Then>
void DenseNeurons::multiply_up(Thread& t, const PiActs* acts, int64_t tokens, float threshold, const Use& use,
                               const Then& then) const {
  const Program& p = *t.program;
  Workspace& w = *p.workspace;
  const auto finished = [&](const Columns& part) {
    forms_of_h(t, tokens, part, nullptr);
    use(part);
  };
  if (p.watch || !is_in_memory()) {
    const Columns mine(*up_, *w.pool, t.id, 2);
    multiply_up(t, acts, tokens, threshold, mine, program_rows(t));
    finished(mine);
    w.pool->barrier();
    return w.pool->phase(1, 1, [&](int64_t, int64_t) { then(); });
  }
  w.pool->phase_then(
      up_->panels, 2, 2 * tokens * PI_LANES,
      [&](int64_t p0, int64_t p1, float* aside) {
        const Columns part(*up_, p0, p1);
        if (aside) copy_rows(p.gate + part.c0, p.ldh, aside, part.lanes(), part.lanes(), tokens);
        multiply_up(t, acts, tokens, threshold, part, rows_of(t, tokens, part, aside));
      },
      [&](int64_t p0, int64_t p1, const float* aside) {
        const Columns part(*up_, p0, p1);
        if (aside) copy_rows(aside, part.lanes(), p.gate + part.c0, p.ldh, part.lanes(), tokens);
        finished(part);
      },
      then);
}
