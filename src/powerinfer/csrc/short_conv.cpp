#include "short_conv.h"

#include <algorithm>

namespace {

constexpr int64_t TILE = 16;  // tokens whose channels are in a core's cache from the first product to the second

std::vector<InputProduct> products(const ShortConvSpec& spec, const States::Layer& layer) {
  const int64_t n = layer.channels;
  return {{spec.x, spec.x_bias, n, 0, false, "x"},
          {spec.b, spec.b_bias, n, n, false, "b"},
          {spec.c, spec.c_bias, n, 0, true, "c"}};
}

void multiply(float* x, const float* by, int64_t n) {
  for (int64_t i = 0; i < n; i++) x[i] *= by[i];
}

// A row of the program's `qkv` holds x, then b; `attended` c, then what the layer gives.
class ShortConv : public Recurrent {
 public:
  ShortConv(const ShortConvSpec& spec, const States::Layer& layer)
      : Recurrent(spec, layer, products(spec, layer), {GateNorm::NONE, {}, 0, 0, 0, 0}) {}
  const char* name() const override { return "short_conv"; }

 private:
  void mix(Program& p, Workspace& w, const Step& step) const override {
    w.pool->phase(layer_.channels, PI_LANES, [&](int64_t begin, int64_t end) {
      for (const Run& run : step.runs)
        visit_stretches(p, run, [&](const Stretch& stretch) {
          if (stretch.replayed) convolve(p, w, stretch, begin, end);  // for the state alone
          else
            for (int64_t i = 0; i < stretch.count; i += TILE) mix_tile(p, w, stretch, i, begin, end);
        });
    });
  }

  // Channels [begin, end) of tokens i to i + TILE of a run.
  void mix_tile(Program& p, Workspace& w, const Stretch& run, int64_t i, int64_t begin, int64_t end) const {
    Stretch tile = run;
    tile.first += i;
    tile.count = std::min(run.count - i, TILE);
    tile.position += i;
    if (i) tile.read_state = run.state;
    const int64_t last = tile.first + tile.count, n = end - begin;
    for (int64_t t = tile.first; t < last; t++) {
      float* x = p.qkv + t * p.ldqkv + begin;
      multiply(x, x + layer_.channels, n);
    }
    convolve(p, w, tile, begin, end);
    for (int64_t t = tile.first; t < last; t++)
      multiply(p.attended + t * p.lda + begin, p.qkv + t * p.ldqkv + begin, n);
  }

  void advance(Program&, Workspace&, const Step&) const override {}
};

}  // namespace

void Program::short_conv(ShortConvSpec spec) {
  check_layer(spec.layer);
  const States::Layer& layer = states_layer(*this, spec.state);
  check(!layer.key_heads, "the layer of the states is not one of short convolutions");
  check(lda >= layer.channels, "the program has no room for what the layer gives");
  check_bias(spec.x_bias, layer.channels, "x");
  check_bias(spec.b_bias, layer.channels, "b");
  check_bias(spec.c_bias, layer.channels, "c");
  auto op = std::make_shared<ShortConv>(spec, layer);
  auto matrices = op->check(*this);
  add(std::move(op), std::move(matrices));
}
