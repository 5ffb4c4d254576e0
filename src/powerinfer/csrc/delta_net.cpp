#include "delta_net.h"

#include <math.h>

#include <algorithm>

#include "program.h"

namespace {

constexpr float EPSILON = 1e-6f;  // of the L2 norm of queries and keys: no file states it

// A row of the program's `qkv` holds queries, keys, values, then alpha and beta of the value heads; `attended` the gate.
class DeltaNet : public Op {
 public:
  DeltaNet(DeltaNetSpec spec, const States::Layer& about)
      : spec_(std::move(spec)),
        about_(about),
        keys_(spec_.key_heads * about.key_dim),
        to_beta_(pi_round_up(about.heads, PI_LANES)),
        of_query_(unit_norm(1.0f / sqrtf((float)about.key_dim))),
        of_key_(unit_norm(1)) {}
  const char* name() const override { return "delta_net"; }

  void run(Thread& t, const Step& step) override {
    Program& p = *t.program;
    Workspace& w = *p.workspace;
    project(p, w, t.id, step.tokens);
    w.pool->barrier();
    convolve(p, w, t.id, step);
    gates(p, w, t.id, step.tokens);
    w.pool->barrier();
    apply_rule(p, w, t.id, step);
    w.pool->barrier();
    finish(p, w, t.id, step.tokens);
    w.pool->barrier();
  }

 private:
  Norm unit_norm(float scale) const {  // x / |x| * scale
    const float n = (float)about_.key_dim;
    return {Vector((size_t)about_.key_dim, scale / sqrtf(n)), {}, EPSILON / n, false};
  }

  void project(Program& p, Workspace& w, int thread, int64_t tokens) const {
    int forms = 0;
    for (const auto* m : {&spec_.query, &spec_.key, &spec_.value, &spec_.gate, &spec_.alpha, &spec_.beta})
      forms |= (*m)->form();
    const PiActs* acts = w.prepare(thread, p.residual(0, tokens), spec_.norm, forms);
    const auto product = [&](const Matrix& m, float* out, int64_t ld) {
      w.product(thread, m, acts, tokens, {out, ld, false, none_});
    };
    product(*spec_.query, p.qkv, p.ldqkv);
    product(*spec_.key, p.qkv + keys_, p.ldqkv);
    product(*spec_.value, p.qkv + 2 * keys_, p.ldqkv);
    product(*spec_.alpha, p.qkv + about_.channels, p.ldqkv);
    product(*spec_.beta, p.qkv + about_.channels + to_beta_, p.ldqkv);
    product(*spec_.gate, p.attended, p.lda);
  }

  // This thread's share of the heads of queries, keys and values: convolution, activation, and the norms of the first
  // two.
  void convolve(Program& p, Workspace& w, int thread, const Step& step) const {
    const States& states = *p.states;
    const int64_t heads = 2 * spec_.key_heads + about_.heads;
    int64_t begin, end;
    share(heads, 1, w.pool->threads(), thread, &begin, &end);
    for (int64_t h = begin; h < end; h++) {
      const int64_t keys = 2 * spec_.key_heads, dim = h < keys ? about_.key_dim : about_.value_dim;
      const int64_t at = h < keys ? h * dim : 2 * keys_ + (h - keys) * dim;
      for (const Run& run : step.runs) {
        float* x = p.qkv + run.first * p.ldqkv + at;
        const float* from = run.position ? states.convolution(spec_.state, run.read_state) + at : nullptr;
        w.kernels->delta.convolve(x, p.ldqkv, run.count, spec_.taps.data() + at, nullptr, about_.channels,
                                  about_.tokens + 1, from, states.convolution(spec_.state, run.state) + at,
                                  about_.channels, dim);
        for (int64_t i = 0; i < run.count; i++) {
          float* row = x + i * p.ldqkv;
          w.kernels->activate(spec_.activation, 0, row, nullptr, dim);
          if (h < keys) (h < spec_.key_heads ? of_query_ : of_key_).apply(w.kernels, row, row);
        }
      }
    }
  }

  // alpha becomes the decay, beta its sigmoid: this thread's share of the tokens' heads.
  void gates(Program& p, Workspace& w, int thread, int64_t tokens) const {
    int64_t begin, end;
    share(tokens * about_.heads, 1, w.pool->threads(), thread, &begin, &end);
    for (int64_t i = begin; i < end; i++) {
      const int64_t h = i % about_.heads;
      float* row = p.qkv + i / about_.heads * p.ldqkv + about_.channels + h;
      const float x = row[0] + spec_.dt_bias[(size_t)h];
      row[0] = expf(spec_.decay[(size_t)h] * (x > 20 ? x : log1pf(expf(x))));
      row[to_beta_] = 1.0f / (1.0f + expf(-row[to_beta_]));
    }
  }

  // This thread's share of the columns of all states.
  void apply_rule(Program& p, Workspace& w, int thread, const Step& step) const {
    const States& states = *p.states;
    const int64_t columns = about_.value_dim;
    int64_t begin, end;
    share(about_.heads * columns, PI_LANES, w.pool->threads(), thread, &begin, &end);
    for (int64_t h = begin / columns; h * columns < end; h++) {
      const int64_t c0 = std::max(begin - h * columns, (int64_t)0), c1 = std::min(end - h * columns, columns);
      const int64_t key_head = spec_.tiled ? h % spec_.key_heads : h / (about_.heads / spec_.key_heads);
      for (const Run& run : step.runs) {
        float* row = p.qkv + run.first * p.ldqkv;
        PiDelta a;
        a.query = row + key_head * about_.key_dim;
        a.key = a.query + keys_;
        a.value = row + 2 * keys_ + h * columns;
        a.gates = row + about_.channels + h;
        a.ld = a.ldg = p.ldqkv;
        a.to_beta = to_beta_;
        a.from = run.position ? states.head(spec_.state, run.read_state, h) : nullptr;
        a.to = states.head(spec_.state, run.state, h);
        a.key_dim = about_.key_dim;
        a.tokens = run.count;
        w.kernels->delta.rule(&a, c0, c1);
      }
    }
  }

  // attended = norm(out) * silu(gate), head by head.
  void finish(Program& p, Workspace& w, int thread, int64_t tokens) const {
    const int64_t dim = about_.value_dim;
    int64_t begin, end;
    share(tokens * about_.heads, 1, w.pool->threads(), thread, &begin, &end);
    for (int64_t i = begin; i < end; i++) {
      const int64_t token = i / about_.heads, h = i % about_.heads;
      float* out = p.qkv + token * p.ldqkv + 2 * keys_ + h * dim;
      spec_.out_norm.apply(w.kernels, out, out);
      w.kernels->activate(PI_SILU, 0, p.attended + token * p.lda + h * dim, out, dim);
    }
  }

  const DeltaNetSpec spec_;
  const States::Layer about_;
  const int64_t keys_, to_beta_;  // of a row: elements of all queries (or keys); from alpha to beta
  const Norm of_query_, of_key_;
  const Vector none_;
};

}  // namespace

void Program::delta_net(DeltaNetSpec spec) {
  check_layer(spec.layer);
  check(states && spec.state < states->layers.size(), "no such layer in the states");
  const States::Layer& about = states->layers[spec.state];
  const int64_t keys = spec.key_heads * about.key_dim, values = about.heads * about.value_dim;
  check(spec.key_heads > 0 && about.heads % spec.key_heads == 0, "key heads cannot be shared by value heads evenly");
  check(about.channels == 2 * keys + values, "the convolution has another number of channels than q, k and v together");
  check(ldqkv >= States::row(about) && lda >= values, "the program has no room for rows of the states' layer");
  check(cache->layers[(size_t)spec.layer].head_dim * sizes.heads[(size_t)spec.layer] == values,
        "the layer of the cache has other heads");
  const auto check_matrix = [&](const Matrix& m, int64_t rows, const char* what) {
    check(m.rows == rows && m.k == sizes.d_model, std::string(what) + " has a wrong shape");
  };
  check_matrix(*spec.query, keys, "the matrix of queries");
  check_matrix(*spec.key, keys, "the matrix of keys");
  check_matrix(*spec.value, values, "the matrix of values");
  check_matrix(*spec.gate, values, "the matrix of the gate");
  check_matrix(*spec.alpha, about.heads, "the matrix of alpha");
  check_matrix(*spec.beta, about.heads, "the matrix of beta");
  check((int64_t)spec.taps.size() == (about.tokens + 1) * about.channels, "the convolution has a wrong shape");
  check((int64_t)spec.decay.size() == about.heads && (int64_t)spec.dt_bias.size() == about.heads,
        "there is not one decay and one bias for each value head");
  check_norm(spec.norm, sizes.d_model, "the attention norm");
  check(spec.out_norm && (int64_t)spec.out_norm.w.size() == about.value_dim,
        "the norm of the values has a wrong width");
  std::vector<std::shared_ptr<Matrix>> matrices = {spec.query, spec.key, spec.value, spec.gate, spec.beta, spec.alpha};
  add(std::make_shared<DeltaNet>(std::move(spec), about), std::move(matrices));
}
