#include "delta_net.h"

#include <math.h>

#include <algorithm>

namespace {

constexpr float EPSILON = 1e-6f;  // of the L2 norm of queries and keys: no file states it

const Vector NONE;

// From beta to the latents of alpha and of the gate.
int64_t to_latents(const States::Layer& layer) { return pi_round_up(layer.heads, PI_LANES); }

std::vector<InputProduct> products(const DeltaNetSpec& spec, const States::Layer& layer) {
  const int64_t keys = spec.key_heads * layer.key_dim, values = layer.heads * layer.value_dim, gates = layer.channels;
  if (layer.decays) {
    const int64_t beta = gates + layer.to_second(), latents = beta + to_latents(layer), rank = layer.key_dim;
    return {{spec.query, {}, keys, 0, false, "queries"},
            {spec.key, {}, keys, keys, false, "keys"},
            {spec.value, {}, values, 2 * keys, false, "values"},
            {spec.alpha, {}, rank, latents, false, "the latents of decays"},
            {spec.beta, {}, layer.heads, beta, false, "beta"},
            {spec.gate, {}, rank, latents + rank, false, "the latents of the gate"}};
  }
  return {{spec.query, {}, keys, 0, false, "queries"},
          {spec.key, {}, keys, keys, false, "keys"},
          {spec.value, {}, values, 2 * keys, false, "values"},
          {spec.alpha, {}, layer.heads, gates, false, "alpha"},
          {spec.beta, {}, layer.heads, gates + layer.to_second(), false, "beta"},
          {spec.gate, {}, values, 0, true, "the gate"}};
}

// A row of the program's `qkv` holds queries, keys, values, then alpha and beta of the value heads, and latents where
// alpha follows from some; `attended` the gate.
class DeltaNet : public Recurrent {
 public:
  DeltaNet(const DeltaNetSpec& spec, const States::Layer& layer)
      : Recurrent(spec, layer, products(spec, layer),
                  {GateNorm::BEFORE,
                   {spec.out_norm},
                   layer.heads,
                   layer.value_dim,
                   2 * spec.key_heads * layer.key_dim,
                   0,
                   1,
                   layer.decays ? PI_SIGMOID : PI_SILU}),
        gate_b_(spec.gate_b),
        alpha_b_(spec.alpha_b),
        decay_(spec.decay),
        dt_bias_(spec.dt_bias),
        key_heads_(spec.key_heads),
        keys_(spec.key_heads * layer.key_dim),
        tiled_(spec.tiled),
        of_query_(unit_norm(1.0f / sqrtf((float)layer.key_dim))),
        of_key_(unit_norm(1)) {}
  const char* name() const override { return "delta_net"; }

 private:
  Norm unit_norm(float scale) const {  // x / |x| * scale
    const float n = (float)layer_.key_dim;
    return {Vector((size_t)layer_.key_dim, scale / sqrtf(n)), {}, EPSILON / n, false};
  }

  void project_further(Program& p, Workspace& w, int thread, int64_t tokens) const override {
    if (!layer_.decays) return;
    float* const latents = p.qkv + layer_.channels + to_second_ + to_latents(layer_);
    const auto from = [&](const Matrix& matrix, const float* rows, const Destination& to) {
      const PiActs* acts = w.prepare(thread, {rows, p.ldqkv, matrix.k, tokens}, {}, matrix.form());
      w.finish_product(thread, matrix, acts, tokens, to);
    };
    from(*alpha_b_, latents, {p.qkv + layer_.channels, p.ldqkv, false, NONE});
    from(*gate_b_, latents + layer_.key_dim, {p.attended, p.lda, false, NONE});
  }

  void mix(Program& p, Workspace& w, const Step& step) const override {
    w.pool->phase(2 * key_heads_ + layer_.heads, 1,
                  [&](int64_t begin, int64_t end) { mix_heads(p, w, step, begin, end); });
  }

  // Heads of queries and keys, with their norms, and of values, with their gates.
  void mix_heads(Program& p, Workspace& w, const Step& step, int64_t begin, int64_t end) const {
    for (int64_t h = begin; h < end; h++) {
      const int64_t keys = 2 * key_heads_, dim = h < keys ? layer_.key_dim : layer_.value_dim;
      const int64_t at = h < keys ? h * dim : 2 * keys_ + (h - keys) * dim;
      const auto mix_stretch = [&](const Stretch& stretch) {
        convolve(p, w, stretch, at, at + dim);
        for (int64_t i = stretch.first; h < keys && i < stretch.first + stretch.count; i++)
          (h < key_heads_ ? of_query_ : of_key_).apply(w.kernels, p.qkv + i * p.ldqkv + at, p.qkv + i * p.ldqkv + at);
      };
      for (const Run& run : step.runs) visit_stretches(p, run, mix_stretch);
      if (h >= keys)
        make_gates(p, step, h - keys, [&](float* alpha, float* beta) { make_gate(alpha, beta, h - keys); });
    }
  }

  // alpha of a head, or of its channels, becomes the decay, beta its sigmoid.
  void make_gate(float* alpha, float* beta, int64_t h) const {
    const int64_t n = layer_.decaying();
    for (int64_t c = 0; c < n; c++) {
      const float x = alpha[c] + dt_bias_[(size_t)(h * n + c)];
      alpha[c] = expf(decay_[(size_t)h] * (x > 20 ? x : log1pf(expf(x))));
    }
    *beta = 1.0f / (1.0f + expf(-*beta));
  }

  void advance(Program& p, Workspace& w, const Step& step) const override {
    w.pool->phase(layer_.heads * layer_.value_dim, PI_LANES,
                  [&](int64_t begin, int64_t end) { advance_columns(p, w, step, begin, end); });
  }

  // Columns [begin, end) of all states.
  void advance_columns(Program& p, Workspace& w, const Step& step, int64_t begin, int64_t end) const {
    const States& states = *p.states;
    const int64_t columns = layer_.value_dim;
    for (int64_t h = begin / columns; h * columns < end; h++) {
      const int64_t c0 = std::max(begin - h * columns, (int64_t)0), c1 = std::min(end - h * columns, columns);
      const int64_t key_head = tiled_ ? h % key_heads_ : h / (layer_.heads / key_heads_);
      const auto advance_stretch = [&](const Stretch& stretch) {
        float* row = p.qkv + stretch.first * p.ldqkv;
        PiDelta a;
        a.query = row + key_head * layer_.key_dim;
        a.key = a.query + keys_;
        a.value = row + 2 * keys_ + h * columns;
        a.gates = row + layer_.channels + h;
        a.decays = layer_.decays ? row + layer_.channels + key_head * layer_.key_dim : nullptr;
        a.ld = a.ldg = p.ldqkv;
        a.to_beta = to_second_;
        a.from = stretch.position ? states.head(spec_.state, stretch.read_state, h) : nullptr;
        a.to = states.head(spec_.state, stretch.state, h);
        a.key_dim = layer_.key_dim;
        a.tokens = stretch.count;
        w.kernels->delta.rule(&a, c0, c1);
      };
      for (const Run& run : step.runs) visit_stretches(p, run, advance_stretch);
    }
  }

  const std::shared_ptr<Matrix> gate_b_, alpha_b_;
  const Vector decay_, dt_bias_;
  const int64_t key_heads_, keys_;  // keys_: of a row: elements of all queries
  const bool tiled_;
  const Norm of_query_, of_key_;
};

}  // namespace

void Program::delta_net(DeltaNetSpec spec) {
  check_layer(spec.layer);
  const States::Layer& layer = states_layer(*this, spec.state);
  const int64_t values = layer.heads * layer.value_dim;
  check(!layer.chunked && layer.key_heads, "the layer of the states is not one of Gated DeltaNet");
  check(spec.key_heads > 0 && layer.heads % spec.key_heads == 0, "key heads cannot be shared by value heads evenly");
  check(layer.channels == 2 * spec.key_heads * layer.key_dim + values,
        "the convolution has another number of channels than q, k and v together");
  check(cache->layers[(size_t)spec.layer].head_dim * sizes.heads[(size_t)spec.layer] == values,
        "the layer of the cache has other heads");
  check((int64_t)spec.decay.size() == layer.heads &&
            (int64_t)spec.dt_bias.size() == layer.heads * (layer.decays ? layer.key_dim : 1),
        "there is not one decay and one bias for each value head");
  check(!layer.decays == !spec.alpha_b && !layer.decays == !spec.gate_b,
        "matrices of the decays of channels, without these, or none with them");
  if (layer.decays) {
    check(spec.key_heads == layer.heads && spec.alpha_b->rows == layer.heads * layer.key_dim &&
              spec.alpha_b->k == layer.key_dim && spec.gate_b->rows == values && spec.gate_b->k == layer.key_dim,
          "a matrix of latents has a wrong shape");
    workspace->reserve(sizes.max_tokens, layer.key_dim);
  }
  auto op = std::make_shared<DeltaNet>(spec, layer);
  auto matrices = op->check(*this);
  for (const auto& matrix : {spec.alpha_b, spec.gate_b})
    if (matrix) matrices.push_back(matrix);
  add(std::move(op), std::move(matrices));
}
