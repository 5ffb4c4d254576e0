#include "recurrent.h"

#include <string.h>

#include <algorithm>
#include <string>

namespace {

constexpr int64_t TILE = 16;  // tokens that are convolved before they are activated, while they are in a core's cache

}  // namespace

const States::Layer& states_layer(const Program& p, size_t state) {
  check(p.states && state < p.states->layers.size(), "no such layer in the states");
  return p.states->layers[state];
}

Recurrent::Recurrent(RecurrentSpec spec, const States::Layer& layer, std::vector<InputProduct> products, GatedNorm out)
    : spec_(std::move(spec)),
      layer_(layer),
      to_second_(layer.to_second()),
      products_(std::move(products)),
      out_(std::move(out)) {
  for (InputProduct& one : products_) one.bias = padded(std::move(one.bias));
}

std::vector<std::shared_ptr<Matrix>> Recurrent::check(const Program& p) const {
  ::check(p.ldqkv >= States::row(layer_) && out_.to >= 0 && out_.to % PI_LANES == 0 &&
              p.lda >= out_.to + out_.parts * out_.width,
          "the program has no room for rows of the states' layer");
  std::vector<std::shared_ptr<Matrix>> matrices;
  for (const InputProduct& one : products_) {
    ::check(one.matrix->rows == one.rows && one.matrix->k == p.sizes.d_model,
            std::string("the matrix of ") + one.name + " has a wrong shape");
    matrices.push_back(one.matrix);
  }
  const auto channels = (size_t)layer_.channels;
  ::check(spec_.taps.size() == (size_t)(layer_.tokens + 1) * channels &&
              (spec_.taps_bias.empty() || spec_.taps_bias.size() == channels),
          "the convolution has a wrong shape");
  check_norm(spec_.norm, p.sizes.d_model, "the attention norm");
  ::check(out_.norms.empty() == (out_.kind == GateNorm::NONE),
          "norms of what heads give, or none, are not of their kind");
  for (const Norm& norm : out_.norms)
    ::check(norm && (int64_t)norm.w.size() == out_.width, "the norm of what heads give has a wrong width");
  return matrices;
}

void Recurrent::run(Thread& t, const Step& step) {
  Program& p = *t.program;
  Workspace& w = *p.workspace;
  project(p, w, t.id, step.tokens);
  project_further(p, w, t.id, step.tokens);
  mix(p, w, step);
  advance(p, w, step);
  const int64_t keeping = keeps(step), parts = step.tokens * out_.parts;
  if (keeping + parts == 0) return;
  w.pool->phase(keeping + parts, 1, [&](int64_t begin, int64_t end) {
    if (begin < keeping) keep(p, step, begin, std::min(end, keeping));
    if (end > keeping) finish(p, w, std::max(begin - keeping, (int64_t)0), end - keeping);
  });
}

void Recurrent::project(Program& p, Workspace& w, int thread, int64_t tokens) const {
  int forms = 0;
  for (const InputProduct& one : products_) forms |= one.matrix->form();
  const PiActs* acts = w.prepare(thread, p.residual(0, tokens), spec_.norm, forms);
  std::vector<Workspace::Product> products;
  products.reserve(products_.size());
  for (const InputProduct& one : products_)
    products.push_back({one.matrix.get(), one.gate ? Destination{p.attended + out_.to, p.lda, false, one.bias}
                                                   : Destination{p.qkv + one.at, p.ldqkv, false, one.bias}});
  w.finish_products(thread, products, acts, tokens);
}

void Recurrent::convolve(Program& p, Workspace& w, const Stretch& stretch, int64_t begin, int64_t end) const {
  const States& states = *p.states;
  for (int64_t i = 0; i < stretch.count && stretch.inputs >= 0; i++) {
    float* const x = p.qkv + (stretch.first + i) * p.ldqkv + begin;
    float* const inputs = states.inputs(spec_.state, stretch.inputs, i) + begin;
    memcpy(stretch.replayed ? x : inputs, stretch.replayed ? inputs : x, (size_t)(end - begin) * 4);
  }
  float* const to = states.convolution(spec_.state, stretch.state) + begin;
  const float* from = stretch.position ? states.convolution(spec_.state, stretch.read_state) + begin : nullptr;
  const float* const bias = spec_.taps_bias.empty() ? nullptr : spec_.taps_bias.data() + begin;
  for (int64_t i = 0; i < stretch.count; i += TILE) {
    float* x = p.qkv + (stretch.first + i) * p.ldqkv + begin;
    const int64_t tokens = std::min(stretch.count - i, TILE);
    w.kernels->convolve(x, p.ldqkv, tokens, spec_.taps.data() + begin, bias, layer_.channels, layer_.tokens + 1, from,
                        to, layer_.channels, end - begin);
    for (int64_t t = 0; t < tokens && spec_.activation != NO_ACTIVATION; t++)
      w.kernels->activate(spec_.activation, 0, x + t * p.ldqkv, nullptr, end - begin);
    from = to;
  }
}

// attended = norm(y * act(gate)), or another order, of parts [begin, end) of the tokens.
void Recurrent::finish(Program& p, Workspace& w, int64_t begin, int64_t end) const {
  for (int64_t i = begin; i < end; i++) {
    const int64_t token = i / out_.parts, part = i % out_.parts, at = part * out_.width;
    float* y = p.qkv + token * p.ldqkv + out_.from + at;
    float* gate = p.attended + token * p.lda + out_.to + at;
    const Norm* norm = out_.norms.empty() ? nullptr : &out_.norms[out_.norms.size() == 1 ? 0 : (size_t)part];
    if (out_.scale != 1) w.kernels->scale(gate, out_.scale, out_.width);
    if (out_.kind == GateNorm::BEFORE) norm->apply(w.kernels, y, y);
    w.kernels->activate(out_.activation, 0, gate, y, out_.width);
    if (out_.kind == GateNorm::PRODUCT) norm->apply(w.kernels, gate, gate);
  }
}
