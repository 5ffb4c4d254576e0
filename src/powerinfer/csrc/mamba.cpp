#include "mamba.h"

#include <math.h>
#include <string.h>

#include <algorithm>

#include "program.h"

namespace {

// A row of the program's `qkv` holds x, B and C, then the step and the decay of the heads, then the products of C with B
// of the chunk's tokens, of each group; `attended` the gate, then what the layer gives.
class Mamba : public Op {
 public:
  Mamba(MambaSpec spec, const States::Layer& layer)
      : spec_(std::move(spec)),
        layer_(layer),
        width_(layer.heads * layer.value_dim),
        to_b_(width_),
        to_c_(width_ + layer.key_heads * layer.key_dim),
        to_decay_(pi_round_up(layer.heads, PI_LANES)),
        to_scores_(layer.channels + 2 * to_decay_) {}
  const char* name() const override { return "mamba"; }

  void run(Thread& t, const Step& step) override {
    Program& p = *t.program;
    Workspace& w = *p.workspace;
    project(p, w, t.id, step.tokens);
    w.pool->barrier();
    convolve(p, w, t.id, step);
    gates(p, w, t.id, step.tokens);
    w.pool->barrier();
    score(p, w, t.id, step);
    w.pool->barrier();
    advance(p, w, t.id, step);
    w.pool->barrier();
    keep(p, w, t.id, step);
    finish(p, w, t.id, step.tokens);
    w.pool->barrier();
  }

 private:
  // Consecutive tokens of one chunk of a run: the first of them in the step, their number, and those before in the chunk.
  struct Piece {
    int64_t first, count, before;
    bool begins;  // the run
  };
  // f(piece) for the pieces of a run.
  template <class F>
  static void visit_pieces(const Run& run, F f) {
    for (int64_t i = 0; i < run.count;) {
      const int64_t before = (run.position + i) % PI_CHUNK, n = std::min(PI_CHUNK - before, run.count - i);
      f(Piece{run.first + i, n, before, i == 0});
      i += n;
    }
  }

  // B of the tokens of a chunk, of one group: those before the run are in the state that it reads.
  void rows_of_b(const Program& p, const Run& run, const Piece& piece, int64_t group, const float** b) const {
    const float* before_run = p.states->group(spec_.state, run.read_state, group);
    const int64_t in_run = piece.first - run.first, before = std::min(piece.before, in_run);
    for (int64_t j = 0; j < piece.before - before; j++) b[j] = before_run + j * layer_.key_dim;
    for (int64_t j = piece.before - before; j < piece.before + piece.count; j++)
      b[j] = p.qkv + (piece.first - piece.before + j) * p.ldqkv + to_b_ + group * layer_.key_dim;
  }

  void project(Program& p, Workspace& w, int thread, int64_t tokens) const {
    const PiActs* acts =
        w.prepare(thread, p.residual(0, tokens), spec_.norm, spec_.gate->form() | spec_.xbc->form() | spec_.dt->form());
    w.product(thread, *spec_.xbc, acts, tokens, {p.qkv, p.ldqkv, false, spec_.xbc_bias});
    w.product(thread, *spec_.dt, acts, tokens, {p.qkv + layer_.channels, p.ldqkv, false, spec_.dt_bias});
    w.product(thread, *spec_.gate, acts, tokens, {p.attended + spec_.at, p.lda, false, spec_.gate_bias});
  }

  // This thread's share of the channels.
  void convolve(Program& p, Workspace& w, int thread, const Step& step) const {
    const States& states = *p.states;
    int64_t begin, end;
    share(layer_.channels, PI_LANES, w.pool->threads(), thread, &begin, &end);
    if (begin == end) return;
    for (const Run& run : step.runs) {
      float* x = p.qkv + run.first * p.ldqkv + begin;
      const float* from = run.position ? states.convolution(spec_.state, run.read_state) + begin : nullptr;
      w.kernels->delta.convolve(x, p.ldqkv, run.count, spec_.taps.data() + begin,
                                spec_.taps_bias.empty() ? nullptr : spec_.taps_bias.data() + begin, layer_.channels,
                                layer_.tokens + 1, from, states.convolution(spec_.state, run.state) + begin,
                                layer_.channels, end - begin);
      for (int64_t i = 0; i < run.count; i++)
        w.kernels->activate(spec_.activation, 0, x + i * p.ldqkv, nullptr, end - begin);
    }
  }

  // dt becomes the step, beside the decay: this thread's share of the tokens' heads.
  void gates(Program& p, Workspace& w, int thread, int64_t tokens) const {
    int64_t begin, end;
    share(tokens * layer_.heads, 1, w.pool->threads(), thread, &begin, &end);
    for (int64_t i = begin; i < end; i++) {
      const int64_t h = i % layer_.heads;
      float* row = p.qkv + i / layer_.heads * p.ldqkv + layer_.channels + h;
      const float x = row[0] * spec_.dt_scale + spec_.step_bias[(size_t)h];
      const float step = x > 20 ? x : log1pf(expf(x));
      row[0] = step < spec_.least_step ? spec_.least_step : step > spec_.most_step ? spec_.most_step : step;
      row[to_decay_] = expf(spec_.a[(size_t)h] * row[0]);
    }
  }

  // C of a token with B of its chunk: this thread's share of the tokens' groups.
  void score(Program& p, Workspace& w, int thread, const Step& step) const {
    int64_t begin, end;
    share(step.tokens * layer_.key_heads, 1, w.pool->threads(), thread, &begin, &end);
    const float* b[PI_CHUNK];
    for (const Run& run : step.runs)
      visit_pieces(run, [&](const Piece& piece) {
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

  // This thread's share of the heads.
  void advance(Program& p, Workspace& w, int thread, const Step& step) const {
    const States& states = *p.states;
    int64_t begin, end;
    share(layer_.heads, 1, w.pool->threads(), thread, &begin, &end);
    PiMamba a;
    a.ld = p.ldqkv;
    a.to_decay = to_decay_;
    a.head_dim = layer_.value_dim;
    a.state_dim = layer_.key_dim;
    for (int64_t h = begin; h < end; h++) {
      const int64_t g = h / (layer_.heads / layer_.key_heads);
      a.d = spec_.d[(size_t)h];
      for (const Run& run : step.runs)
        visit_pieces(run, [&](const Piece& piece) {
          float* row = p.qkv + piece.first * p.ldqkv;
          a.x = row + h * layer_.value_dim;
          a.c = row + to_c_ + g * layer_.key_dim;
          a.gates = row + layer_.channels + h;
          a.scores = row + to_scores_ + g * PI_CHUNK;
          rows_of_b(p, run, piece, g, a.b);
          a.to = states.head(spec_.state, run.state, h);
          a.from = !piece.begins ? a.to : run.position ? states.head(spec_.state, run.read_state, h) : nullptr;
          a.before = piece.before;
          a.tokens = piece.count;
          w.kernels->mamba.advance(&a);
        });
    }
  }

  // B of the tokens of a chunk that has begun: this thread's share of the runs' groups. All that read them are done.
  void keep(Program& p, Workspace& w, int thread, const Step& step) const {
    const States& states = *p.states;
    int64_t begin, end;
    share((int64_t)step.runs.size() * layer_.key_heads, 1, w.pool->threads(), thread, &begin, &end);
    for (int64_t i = begin; i < end; i++) {
      const Run& run = step.runs[(size_t)(i / layer_.key_heads)];
      const int64_t g = i % layer_.key_heads, pending = (run.position + run.count) % PI_CHUNK;
      const int64_t old = std::max(pending - run.count, (int64_t)0);  // from before the run
      float* to = states.group(spec_.state, run.state, g);
      const size_t bytes = (size_t)layer_.key_dim * 4;
      if (old && run.read_state != run.state)
        memcpy(to, states.group(spec_.state, run.read_state, g), (size_t)old * bytes);
      for (int64_t j = old; j < pending; j++)
        memcpy(to + j * layer_.key_dim,
               p.qkv + (run.first + run.count - pending + j) * p.ldqkv + to_b_ + g * layer_.key_dim, bytes);
    }
  }

  // attended = norm(y * silu(gate)), or another order: this thread's share of the tokens' parts.
  void finish(Program& p, Workspace& w, int thread, int64_t tokens) const {
    const int64_t parts = std::max((int64_t)spec_.out_norms.size(), (int64_t)1), dim = width_ / parts;
    int64_t begin, end;
    share(tokens * parts, 1, w.pool->threads(), thread, &begin, &end);
    for (int64_t i = begin; i < end; i++) {
      const int64_t token = i / parts, part = i % parts;
      float* y = p.qkv + token * p.ldqkv + part * dim;
      float* gate = p.attended + token * p.lda + spec_.at + part * dim;
      if (spec_.gate_scale != 1) w.kernels->scale(gate, spec_.gate_scale, dim);
      if (spec_.kind == GateNorm::BEFORE) spec_.out_norms[(size_t)part].apply(w.kernels, y, y);
      w.kernels->activate(PI_SILU, 0, gate, y, dim);
      if (spec_.kind == GateNorm::PRODUCT) spec_.out_norms[(size_t)part].apply(w.kernels, gate, gate);
    }
  }

  const MambaSpec spec_;
  const States::Layer layer_;
  const int64_t width_, to_b_, to_c_, to_decay_, to_scores_;  // of a row
};

}  // namespace

void Program::mamba(MambaSpec spec) {
  check_layer(spec.layer);
  check(states && spec.state < states->layers.size(), "no such layer in the states");
  const States::Layer& layer = states->layers[spec.state];
  const int64_t width = layer.heads * layer.value_dim;
  check(layer.chunked, "the layer of the states is not one of Mamba2");
  check(layer.heads % layer.key_heads == 0, "heads cannot share groups evenly");
  check(ldqkv >= States::row(layer) && spec.at >= 0 && spec.at % PI_LANES == 0 && lda >= spec.at + width,
        "the program has no room for rows of the states' layer");
  const auto check_matrix = [&](const Matrix& m, const Vector& bias, int64_t rows, const char* part) {
    check(m.rows == rows && m.k == sizes.d_model, std::string("the matrix of ") + part + " has a wrong shape");
    check_bias(bias, rows, part);
  };
  check_matrix(*spec.gate, spec.gate_bias, width, "the gate");
  check_matrix(*spec.xbc, spec.xbc_bias, layer.channels, "x, B and C");
  check_matrix(*spec.dt, spec.dt_bias, layer.heads, "dt");
  check((int64_t)spec.taps.size() == (layer.tokens + 1) * layer.channels &&
            (spec.taps_bias.empty() || (int64_t)spec.taps_bias.size() == layer.channels),
        "the convolution has a wrong shape");
  for (const Vector* of_heads : {&spec.a, &spec.d, &spec.step_bias})
    check((int64_t)of_heads->size() == layer.heads,
          "there is not one number of a, d and the step's bias for each head");
  check(spec.least_step < spec.most_step, "the limits of steps are none");
  check_norm(spec.norm, sizes.d_model, "the attention norm");
  check(spec.out_norms.empty() == (spec.kind == GateNorm::NONE),
        "norms behind Mamba2, or none, do not go with their kind");
  for (const Norm& norm : spec.out_norms)
    check(norm && (int64_t)(norm.w.size() * spec.out_norms.size()) == width,
          "the norm behind Mamba2 has a wrong width");
  for (Vector* bias : {&spec.gate_bias, &spec.xbc_bias, &spec.dt_bias}) *bias = padded(std::move(*bias));
  std::vector<std::shared_ptr<Matrix>> matrices = {spec.xbc, spec.dt, spec.gate};
  add(std::make_shared<Mamba>(std::move(spec), layer), std::move(matrices));
}
