#include "mamba.h"

#include <math.h>
#include <string.h>

#include <algorithm>

namespace {

std::vector<InputProduct> products(const MambaSpec& spec, const States::Layer& layer) {
  return {{spec.xbc, spec.xbc_bias, layer.channels, 0, false, "x, B and C"},
          {spec.dt, spec.dt_bias, layer.heads, layer.channels, false, "dt"},
          {spec.gate, spec.gate_bias, layer.heads * layer.value_dim, 0, true, "the gate"}};
}

GatedNorm gated_norm(const MambaSpec& spec, const States::Layer& layer) {
  const int64_t parts = std::max((int64_t)spec.out_norms.size(), (int64_t)1);
  return {spec.kind, spec.out_norms, parts, layer.heads * layer.value_dim / parts, 0, spec.at, spec.gate_scale};
}

// A row of the program's `qkv` holds x, B and C, then the step and the decay of the heads, then the products of C with B
// of the chunk's tokens, of each group; `attended` the gate, then what the layer gives.
class Mamba : public Recurrent {
 public:
  Mamba(const MambaSpec& spec, const States::Layer& layer)
      : Recurrent(spec, layer, products(spec, layer), gated_norm(spec, layer)),
        a_(spec.a),
        d_(spec.d),
        step_bias_(spec.step_bias),
        least_step_(spec.least_step),
        most_step_(spec.most_step),
        dt_scale_(spec.dt_scale),
        to_b_(layer.heads * layer.value_dim),
        to_c_(to_b_ + layer.key_heads * layer.key_dim),
        to_scores_(layer.inputs()) {}
  const char* name() const override { return "mamba"; }

 private:
  // Consecutive tokens of one chunk of a stretch: the first of them in the step, their number, and those before in the
  // chunk; the slot that is read, -1: none is, and that is written.
  struct Piece {
    int64_t first, count, before, position, read_state, state;
  };
  // f(piece) for the pieces of a run.
  template <class F>
  static void visit_pieces(const Program& p, const Run& run, F f) {
    visit_stretches(p, run, [&](const Stretch& stretch) {
      for (int64_t i = 0; i < stretch.count;) {
        const int64_t at = stretch.position + i, before = at % PI_CHUNK;
        const int64_t n = std::min(PI_CHUNK - before, stretch.count - i);
        f(Piece{stretch.first + i, n, before, at, i ? stretch.state : at ? stretch.read_state : -1, stretch.state});
        i += n;
      }
    });
  }

  // B of the token at a position, of one group: of those before the run, and before what it replays, it is in the state
  // that is read.
  const float* row_of_b(const Program& p, const Run& run, int64_t group, int64_t position) const {
    const int64_t in_run = position - run.position, in_replay = in_run + run.replayed;
    if (in_replay < 0)
      return p.states->group(spec_.state, run.read_state, group) + position % PI_CHUNK * layer_.key_dim;
    const int64_t row = in_run < 0 ? run.replay_row + in_replay : run.first + in_run;
    return p.qkv + row * p.ldqkv + to_b_ + group * layer_.key_dim;
  }

  // The same of the tokens of a piece's chunk.
  void rows_of_b(const Program& p, const Run& run, const Piece& piece, int64_t group, const float** b) const {
    for (int64_t j = 0; j < piece.before + piece.count; j++)
      b[j] = row_of_b(p, run, group, piece.position - piece.before + j);
  }

  void mix(Program& p, Workspace& w, const Step& step) const override {
    w.pool->phase(layer_.channels, PI_LANES, [&](int64_t begin, int64_t end) {
      for (const Run& run : step.runs)
        visit_stretches(p, run, [&](const Stretch& stretch) { convolve(p, w, stretch, begin, end); });
    });
  }

  // dt of a head becomes the step, beside the decay.
  void make_gate(float* row, size_t h) const {
    const float x = row[0] * dt_scale_ + step_bias_[h];
    const float step = x > 20 ? x : log1pf(expf(x));
    row[0] = step < least_step_ ? least_step_ : step > most_step_ ? most_step_ : step;
    row[to_second_] = expf(a_[h] * row[0]);
  }

  // C of a token with B of its chunk, of groups [begin, end) of the tokens, those that are replayed behind the step's.
  void score(Program& p, Workspace& w, const Step& step, int64_t begin, int64_t end) const {
    const float* b[PI_CHUNK];
    for (const Run& run : step.runs)
      visit_pieces(p, run, [&](const Piece& piece) {
        if ((piece.first + piece.count) * layer_.key_heads <= begin || piece.first * layer_.key_heads >= end) return;
        for (int64_t g = 0; g < layer_.key_heads; g++) {
          rows_of_b(p, run, piece, g, b);
          for (int64_t t = 0; t < piece.count; t++) {
            const int64_t i = (piece.first + t) * layer_.key_heads + g;
            if (i < begin || i >= end) continue;
            float* row = p.qkv + (piece.first + t) * p.ldqkv;
            w.kernels->mamba.scores(row + to_c_ + g * layer_.key_dim, b, piece.before + t + 1, layer_.key_dim,
                                    row + to_scores_ + g * PI_CHUNK);
          }
        }
      });
  }

  void advance(Program& p, Workspace& w, const Step& step) const override {
    w.pool->phase((step.tokens + step.replayed) * layer_.key_heads, 1,
                  [&](int64_t begin, int64_t end) { score(p, w, step, begin, end); });
    w.pool->phase(layer_.heads, 1, [&](int64_t begin, int64_t end) { advance_heads(p, w, step, begin, end); });
  }

  void advance_heads(Program& p, Workspace& w, const Step& step, int64_t begin, int64_t end) const {
    const States& states = *p.states;
    PiMamba a;
    a.ld = p.ldqkv;
    a.to_decay = to_second_;
    a.head_dim = layer_.value_dim;
    a.state_dim = layer_.key_dim;
    for (int64_t h = begin; h < end; h++) {
      const int64_t g = h / (layer_.heads / layer_.key_heads);
      make_gates(p, step, h, [&](float* row, float*) { make_gate(row, (size_t)h); });
      a.d = d_[(size_t)h];
      for (const Run& run : step.runs)
        visit_pieces(p, run, [&](const Piece& piece) {
          float* row = p.qkv + piece.first * p.ldqkv;
          a.x = row + h * layer_.value_dim;
          a.c = row + to_c_ + g * layer_.key_dim;
          a.gates = row + layer_.channels + h;
          a.scores = row + to_scores_ + g * PI_CHUNK;
          rows_of_b(p, run, piece, g, a.b);
          a.to = states.head(spec_.state, piece.state, h);
          a.from = piece.read_state < 0 ? nullptr : states.head(spec_.state, piece.read_state, h);
          a.before = piece.before;
          a.tokens = piece.count;
          w.kernels->mamba.advance(&a);
        });
    }
  }

  // B of the tokens of a chunk that has begun, of the runs' groups. All that read them are done.
  int64_t keeps(const Step& step) const override { return (int64_t)step.runs.size() * layer_.key_heads; }
  void keep(Program& p, const Step& step, int64_t begin, int64_t end) const override {
    const States& states = *p.states;
    for (int64_t i = begin; i < end; i++) {
      const Run& run = step.runs[(size_t)(i / layer_.key_heads)];
      const int64_t g = i % layer_.key_heads;
      visit_stretches(p, run, [&](const Stretch& stretch) {
        const int64_t end = stretch.position + stretch.count, pending = end % PI_CHUNK;
        float* const rows = states.group(spec_.state, stretch.state, g);
        for (int64_t j = 0; j < pending; j++) {
          const float* from = row_of_b(p, run, g, end - pending + j);
          float* const to = rows + j * layer_.key_dim;
          if (from != to) memcpy(to, from, (size_t)layer_.key_dim * 4);
        }
      });
    }
  }

  const Vector a_, d_, step_bias_;
  const float least_step_, most_step_, dt_scale_;
  const int64_t to_b_, to_c_, to_scores_;  // of a row
};

}  // namespace

void Program::mamba(MambaSpec spec) {
  check_layer(spec.layer);
  const States::Layer& layer = states_layer(*this, spec.state);
  const int64_t width = layer.heads * layer.value_dim, parts = std::max((int64_t)spec.out_norms.size(), (int64_t)1);
  check(layer.chunked, "the layer of the states is not one of Mamba2");
  check(layer.heads % layer.key_heads == 0, "heads cannot share groups evenly");
  check(width % parts == 0, "norms do not divide what the heads give evenly");
  check_bias(spec.gate_bias, width, "the gate");
  check_bias(spec.xbc_bias, layer.channels, "x, B and C");
  check_bias(spec.dt_bias, layer.heads, "dt");
  for (const Vector* of_heads : {&spec.a, &spec.d, &spec.step_bias})
    check((int64_t)of_heads->size() == layer.heads,
          "there is not one number of a, d and the step's bias for each head");
  check(spec.least_step < spec.most_step, "the limits of steps are none");
  auto op = std::make_shared<Mamba>(spec, layer);
  auto matrices = op->check(*this);
  add(std::move(op), std::move(matrices));
}
