// What layers that keep a state for each sequence share (Gated DeltaNet, Mamba2, short convolutions): products with the
// layer's input, a short causal convolution, and a norm with a gate around the rule by which a layer's states go on.
#pragma once
#include <memory>
#include <vector>

#include "program.h"
#include "states.h"

enum class GateNorm { PRODUCT, BEFORE, NONE };  // of the product with the gate, of what the gate multiplies, none

constexpr int NO_ACTIVATION = -1;

struct RecurrentSpec {
  int layer;         // of the cache
  size_t state;      // layer of the states
  Norm norm;         // of the layer's input
  Vector taps;       // [taps][channels] of the convolution
  Vector taps_bias;  // may be empty
  int activation;    // PiAct, behind the convolution; NO_ACTIVATION: none
};

// A product with the layer's input, whose rows go to `qkv` from column `at` on, or, of the gate, to `attended`.
struct InputProduct {
  std::shared_ptr<Matrix> matrix;
  Vector bias;
  int64_t rows, at;
  bool gate;
  const char* name;
};

// Of what a layer gives, in `parts` equal parts of `width` (0: nothing is left to do): columns of `qkv` from `from` on,
// whose gate is in `attended` from column `to` on. norms: of each part, or of all parts one. activation: of the gate.
struct GatedNorm {
  GateNorm kind;
  std::vector<Norm> norms;
  int64_t parts, width, from, to;
  float scale = 1;  // of the gate
  int activation = PI_SILU;
};

// Tokens of a run that the rule goes through one after another: those that it replays, or its own.
struct Stretch {
  int64_t first, count, position;  // first: row of `qkv`
  int64_t read_state, state;       // as of a run
  bool replayed;
  int64_t inputs;  // slot where their inputs are, or, of the run's own, are put; -1: they are not kept
};

class Recurrent : public Op {
 public:
  void run(Thread& t, const Step& step) final;
  // Checks the layer against the program's states and buffers. Returns the matrices, in the order of their products.
  std::vector<std::shared_ptr<Matrix>> check(const Program& p) const;

 protected:
  Recurrent(RecurrentSpec spec, const States::Layer& layer, std::vector<InputProduct> products, GatedNorm out);
  // Products with what the layer's input became.
  virtual void project_further(Program&, Workspace&, int /*thread*/, int64_t /*tokens*/) const {}
  // In phases: what precedes the states, as the convolution.
  virtual void mix(Program& p, Workspace& w, const Step& step) const = 0;
  // In phases: the states; what the heads give takes the place of what they were given.
  virtual void advance(Program& p, Workspace& w, const Step& step) const = 0;
  // What is kept for the next step besides, once all states have gone on: how many things, and [begin, end) of these.
  virtual int64_t keeps(const Step&) const { return 0; }
  virtual void keep(Program&, const Step&, int64_t /*begin*/, int64_t /*end*/) const {}
  // f(stretch) for those of a run, in their order: so what is computed of the same channels, columns or heads of both
  // needs no phase between them.
  template <class F>
  static void visit_stretches(const Program& p, const Run& run, F f) {
    if (run.replayed)
      f(Stretch{run.replay_row, run.replayed, run.position - run.replayed, run.read_state, run.undo_state, true,
                run.state});
    const int64_t read = run.replayed ? run.undo_state : run.read_state;
    const bool undoable = run.count <= p.states->undo_tokens && (!run.position || read != run.state);
    f(Stretch{run.first, run.count, run.position, read, run.state, false, undoable ? run.state : -1});
  }
  // Channels [begin, end) of a stretch: convolution and activation, in place. Those of tokens that are replayed come from
  // where they were kept.
  void convolve(Program& p, Workspace& w, const Stretch& stretch, int64_t begin, int64_t end) const;
  // f(first, second) for the rows of a step: what of head h's numbers f makes, the first ones and the second. Those of
  // tokens that are replayed come from where they were kept.
  template <class F>
  void make_gates(Program& p, const Step& step, int64_t h, F f) const {
    const int64_t n = layer_.decaying(), at = layer_.channels + h * n, second = layer_.channels + to_second_ + h;
    for (const Run& run : step.runs)
      visit_stretches(p, run, [&](const Stretch& stretch) {
        for (int64_t i = 0; i < stretch.count; i++) {
          float* row = p.qkv + (stretch.first + i) * p.ldqkv;
          if (!stretch.replayed) f(row + at, row + second);
          if (stretch.inputs < 0) continue;
          float* inputs = p.states->inputs(spec_.state, stretch.inputs, i);
          const float* from = stretch.replayed ? inputs : row;
          float* to = stretch.replayed ? row : inputs;
          std::copy(from + at, from + at + n, to + at);
          to[second] = from[second];
        }
      });
  }

  const RecurrentSpec spec_;
  const States::Layer layer_;
  const int64_t to_second_;  // of a row: from all heads' first numbers to their second one

 private:
  void project(Program& p, Workspace& w, int thread, int64_t tokens) const;
  void finish(Program& p, Workspace& w, int64_t begin, int64_t end) const;

  std::vector<InputProduct> products_;
  const GatedNorm out_;
};

// The states' layer that a layer has; std::invalid_argument where there is none.
const States::Layer& states_layer(const Program& p, size_t state);
