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
// whose gate is in `attended` from column `to` on. norms: of each part, or of all parts one.
struct GatedNorm {
  GateNorm kind;
  std::vector<Norm> norms;
  int64_t parts, width, from, to;
  float scale = 1;  // of the gate
};

class Recurrent : public Op {
 public:
  void run(Thread& t, const Step& step) final;
  // Checks the layer against the program's states and buffers. Returns the matrices, in the order of their products.
  std::vector<std::shared_ptr<Matrix>> check(const Program& p) const;

 protected:
  Recurrent(RecurrentSpec spec, const States::Layer& layer, std::vector<InputProduct> products, GatedNorm out);
  // In phases: what precedes the states, as the convolution.
  virtual void mix(Program& p, Workspace& w, const Step& step) const = 0;
  // In phases: the states; what the heads give takes the place of what they were given.
  virtual void advance(Program& p, Workspace& w, const Step& step) const = 0;
  // What is kept for the next step besides, once all states have gone on: how many things, and [begin, end) of these.
  virtual int64_t keeps(const Step&) const { return 0; }
  virtual void keep(Program&, const Step&, int64_t /*begin*/, int64_t /*end*/) const {}
  // Channels [begin, end) of a run: convolution and activation, in place.
  void convolve(Program& p, Workspace& w, const Run& run, int64_t begin, int64_t end) const;

  const RecurrentSpec spec_;
  const States::Layer layer_;

 private:
  void project(Program& p, Workspace& w, int thread, int64_t tokens) const;
  void finish(Program& p, Workspace& w, int64_t begin, int64_t end) const;

  std::vector<InputProduct> products_;
  const GatedNorm out_;
};

// The states' layer that a layer has; std::invalid_argument where there is none.
const States::Layer& states_layer(const Program& p, size_t state);
