#include "ffn.h"

#include <math.h>
#include <string.h>

#include <algorithm>
#include <numeric>

namespace {
void check_spec(const FfnSpec& spec, int64_t d_model) {
  check_bias(spec.down_bias, d_model, "down");
  check_norm(spec.norm, d_model, "the FFN norm");
  check_norm(spec.out_norm, d_model, "the norm of the FFN's output");
}

// Whether a padded bias is that one, bit by bit.
bool same(const Vector& padded, const Vector& bias) {
  return padded.empty() == bias.empty() && padded.size() >= bias.size() &&
         (bias.empty() || memcmp(padded.data(), bias.data(), bias.size() * sizeof(float)) == 0);
}
}  // namespace

std::shared_ptr<Ffn> Program::ffn(FfnInput in) {
  const int64_t neurons = in.up->rows;
  check(neurons <= sizes.d_ff, "an FFN has more neurons than d_ff");
  for (const auto& w : {in.gate, in.up})
    check(!w || (w->rows == neurons && w->k == sizes.d_model),
          "gate or up has another width than d_model, or than the other");
  check(in.down->rows == sizes.d_model && in.down->k == neurons,
        "down has another width than d_model, or than up has neurons");
  check(in.gate || in.spec.gate_bias.empty(), "a bias of gate without a gate");
  check_bias(in.spec.gate_bias, neurons, "gate");
  check_bias(in.spec.up_bias, neurons, "up");
  check_spec(in.spec, sizes.d_model);
  for (Vector* bias : {&in.spec.gate_bias, &in.spec.up_bias, &in.spec.down_bias}) *bias = padded(std::move(*bias));
  return add(std::make_shared<Ffn>(workspace, std::move(in)));
}

std::shared_ptr<BundledFfn> Program::bundled_ffn(const FfnSpec& spec, std::shared_ptr<NeuronSum> neurons,
                                                 std::shared_ptr<const Predictor> predictor) {
  const Bundles& bundles = *neurons->bundles;
  const int64_t members = (int64_t)bundles.members.size();
  check(bundles.up.k == sizes.d_model, "the bundles have another width than the model");
  check(neurons->workspace == workspace, "the neurons are of another workspace than the program");
  check_spec(spec, sizes.d_model);
  check(bundles.activation == spec.activation && bundles.gate_bias.empty() == spec.gate_bias.empty() &&
            bundles.up_bias.empty() == spec.up_bias.empty(),
        "the bundles are of another kind of FFN");
  if (predictor) {
    check(members == bundles.neurons, "a predictor is for an FFN that has all of its neurons");
    predictor->check_sizes(sizes.d_model, bundles.neurons);
    workspace->reserve_lists(bundles.neurons, sizes.d_model, predictor->rank());
  }
  return add(std::make_shared<BundledFfn>(spec.norm, spec.out_norm, padded(spec.down_bias), std::move(neurons),
                                          std::move(predictor)));
}

// ---- From matrices -------------------------------------------------------------------------------------------------

void Ffn::sparsify(std::shared_ptr<Bundles> bundles, std::shared_ptr<const Predictor> asked, float threshold,
                   int64_t recall_every) {
  const int64_t d_model = in_.up->k, n = in_.up->rows;
  check(bundles->neurons == n && bundles->up.k == d_model, "the bundles have another shape than the FFN");
  check(bundles->gated() == (bool)in_.gate && bundles->activation == in_.spec.activation,
        "the bundles are of another kind of FFN");
  check(same(in_.spec.gate_bias, bundles->gate_bias) && same(in_.spec.up_bias, bundles->up_bias),
        "the bundles have other biases than the FFN");
  check(recall_every >= 0, "an interval is negative");
  if (asked) asked->check_sizes(d_model, n);
  workspace->reserve_lists(n, d_model, asked ? asked->rank() : 0);
  auto made = std::make_unique<NeuronSum>(workspace, std::move(bundles), threshold, false);
  // What it had before is freed when no job has to wait for that.
  workspace->pool->between_jobs([&] {
    neurons.swap(made);
    predictor.swap(asked);
    std::fill(ways, ways + PI_NEURON_TOKENS + 1, WAY_DENSE);
    sampled_.resize((size_t)workspace->pool->threads());
    recall_every_ = recall_every;
    clear_stats();
  });
}

void Ffn::clear_stats() {
  if (neurons) neurons->stats = {};
  exact_steps = 0;
  recall = {};
}

void Ffn::run(Thread& t, const Step& step) {
  const Way way = neurons && step.tokens <= PI_NEURON_TOKENS && !t.program->watch ? ways[step.tokens] : WAY_DENSE;
  if (way == WAY_DENSE) dense(t, step);
  else if (way == WAY_EXACT) exact(t, step);
  else predicted(t, step);
}

void Ffn::dense(Thread& t, const Step& step) {
  Program& p = *t.program;
  Workspace& w = *p.workspace;
  const PiActs* acts =
      w.prepare(t.id, p.residual(0, step.tokens), in_.spec.norm, in_.up->form() | (in_.gate ? in_.gate->form() : 0));
  const Columns mine(*in_.up, *w.pool, t.id, 2);  // two panels: a whole block of the activations below
  if (in_.gate)
    w.linear(t.id, *in_.gate, in_.spec.gate_bias, acts, p.gate, p.ldh, step.tokens, false, mine.p0, mine.p1);
  w.linear(t.id, *in_.up, in_.spec.up_bias, acts, in_.gate ? p.up : p.gate, p.ldh, step.tokens, false, mine.p0,
           mine.p1);
  Watch* const watch = p.watch.get();
  const Watch::Look look{t.id, mine.c0, mine.n(), mine.lanes()};
  for (int64_t i = 0; i < step.tokens && mine.n(); i++) {
    float* h = p.gate + i * p.ldh + mine.c0;
    const float* up = in_.gate ? p.up + i * p.ldh + mine.c0 : nullptr;
    if (watch) watch->before(look, i, in_.spec.activation, h, up);
    in_.spec.activation.apply(w.kernels, h, up, mine.lanes());
    if (watch) watch->after(look, i, h);
  }
  if (watch && mine.n()) watch->count(look, step.tokens);
  multiply_down(t, step.tokens, mine);
}

// x += out_norm(down . h), where this thread has made its columns of h, in `gate`.
void Ffn::multiply_down(Thread& t, int64_t tokens, const Columns& mine) {
  Program& p = *t.program;
  const int form = in_.down->form();
  PiActs hidden = p.hidden.rows(in_.down->k);
  hidden.f = p.gate;
  hidden.ldf = p.ldh;
  if (form != PI_FORM_F32) {
    for (int64_t i = 0; i < tokens && mine.n(); i++) {
      const PiActs to = pi_acts_from(&hidden, i, mine.c0);
      p.workspace->kernels->forms(to.f, mine.n(), form, &to);
    }
  }
  p.workspace->pool->barrier();
  p.add_product(t, *in_.down, in_.spec.down_bias, &hidden, tokens, in_.spec.out_norm, p.up);
}

// ---- From the neurons that fire -------------------------------------------------------------------------------------

NeuronSum::Piece Ffn::piece(Program& p, const Step& step) const {
  return p.piece(0, step.tokens, in_.spec.norm, in_.spec.out_norm, in_.spec.down_bias, true);
}

void Ffn::exact(Thread& t, const Step& step) {
  Program& p = *t.program;
  Workspace& w = *p.workspace;
  const PiActs* acts = w.prepare(t.id, p.residual(0, step.tokens), in_.spec.norm,
                                 in_.first().form() | in_.up->form() | neurons->bundles->forms());
  fire(t, step, acts);
  w.pool->barrier();
  if (t.id == 0) exact_steps++;
  if (many(w.lists(), step.tokens)) {
    finish_densely(t, step, acts);
    if (t.id == 0) neurons->count(step.tokens);
    w.pool->barrier();
    return;
  }
  neurons->sum_listed(t.id, piece(p, step), acts, p.gate, p.ldh, nullptr);
  if (in_.spec.out_norm) p.add_normalised(t, in_.spec.out_norm, p.up, 0, step.tokens);
}

// Every gate, densely; those that fire are listed, with their activations in `gate`.
void Ffn::fire(Thread& t, const Step& step, const PiActs* acts) {
  Program& p = *t.program;
  Workspace& w = *p.workspace;
  NeuronLists::Share& own = w.lists().shares[(size_t)t.id];
  const Columns mine(in_.first(), *w.pool, t.id);
  w.linear(t.id, in_.first(), in_.first_bias(), acts, p.gate, p.ldh, step.tokens, false, mine.p0, mine.p1);
  for (int64_t i = 0; i < step.tokens; i++)
    in_.spec.activation.apply_first(w.kernels, p.gate + i * p.ldh + mine.c0, mine.lanes());
  std::fill(own.counts, own.counts + PI_NEURON_TOKENS, 0);
  own.n = w.kernels->neurons->keep(p.gate + mine.c0, p.ldh, step.tokens, mine.n(), 1, neurons->threshold,
                                   (int32_t)mine.c0, own.listed.data(), own.counts);
}

// Whether so many neurons fire that reading a whole matrix is faster than reading their rows. With many tokens, each
// must contribute its share: a neuron that fires for few tokens is read, but quick to multiply.
bool Ffn::many(const NeuronLists& lists, int64_t tokens) const {
  int64_t listed = 0, cells = 0;
  for (const NeuronLists::Share& share : lists.shares) {
    listed += share.n;
    cells += std::accumulate(share.counts, share.counts + tokens, (int64_t)0);
  }
  const double least = dense_above * (double)in_.up->rows;
  return (double)listed > least && 4.0 * (double)cells > least * (double)tokens;
}

// The first product is computed: up and down from the dense matrices.
void Ffn::finish_densely(Thread& t, const Step& step, const PiActs* acts) {
  Program& p = *t.program;
  Workspace& w = *p.workspace;
  NeuronLists::Share& own = w.lists().shares[(size_t)t.id];
  const Columns mine(*in_.up, *w.pool, t.id, 2);  // two panels: a whole block of h
  const int64_t n = mine.n();
  const float threshold = neurons->threshold;
  if (in_.gate) w.linear(t.id, *in_.up, in_.spec.up_bias, acts, p.up, p.ldh, step.tokens, false, mine.p0, mine.p1);
  own.done = {0, in_.gate ? n : 0, n, 0, 0};
  for (int64_t i = 0; i < step.tokens && n; i++) {
    float *h = p.gate + i * p.ldh + mine.c0, *up = p.up + i * p.ldh + mine.c0;
    if (threshold > 0.0f)
      for (int64_t j = 0; j < n; j++)
        if (fabsf(h[j]) <= threshold) h[j] = 0.0f;
    if (in_.gate) {
      in_.spec.activation.apply_second(w.kernels, up, mine.lanes());
      for (int64_t j = 0; j < n; j++) h[j] *= up[j];
    }
    for (int64_t j = 0; j < n; j++) own.done.active += h[j] != 0.0f;
  }
  multiply_down(t, step.tokens, mine);
}

void Ffn::predicted(Thread& t, const Step& step) {
  Program& p = *t.program;
  Workspace& w = *p.workspace;
  const bool sampled = recall_every_ && neurons->stats.steps % recall_every_ == 0;
  const Rows x = p.residual(0, step.tokens);
  predictor->select(t.id, w, x);
  const PiActs* acts = w.prepare(t.id, x, in_.spec.norm,
                                 neurons->bundles->forms() | (sampled ? in_.first().form() | in_.up->form() : 0));
  if (sampled) sample(t, step, acts);
  neurons->sum_listed(t.id, piece(p, step), acts, nullptr, 0, predictor.get());
  if (sampled && t.id == 0) {
    recall.tokens += step.tokens;
    for (const Recall& one : sampled_) recall.active += one.active, recall.found += one.found;
  }
  if (in_.spec.out_norm) p.add_normalised(t, in_.spec.out_norm, p.up, 0, step.tokens);
}

// How many of the neurons that fire the predictor selected: computes all gates densely.
void Ffn::sample(Thread& t, const Step& step, const PiActs* acts) {
  Program& p = *t.program;
  Workspace& w = *p.workspace;
  const NeuronLists& lists = w.lists();
  const Columns mine(in_.first(), *w.pool, t.id);
  Recall& own = sampled_[(size_t)t.id];
  own = {};
  w.linear(t.id, in_.first(), in_.first_bias(), acts, p.gate, p.ldh, step.tokens, false, mine.p0, mine.p1);
  if (in_.gate) w.linear(t.id, *in_.up, in_.spec.up_bias, acts, p.up, p.ldh, step.tokens, false, mine.p0, mine.p1);
  for (int64_t i = 0; i < step.tokens; i++) {
    const float *h = p.gate + i * p.ldh, *z = lists.z.data() + i * lists.ldz;
    in_.spec.activation.apply(w.kernels, p.gate + i * p.ldh + mine.c0, in_.gate ? p.up + i * p.ldh + mine.c0 : nullptr,
                              mine.lanes());
    for (int64_t j = mine.c0; j < mine.c1; j++) {
      own.active += h[j] != 0.0f;
      own.found += h[j] != 0.0f && predictor->candidate(z[j]);
    }
  }
}

// ---- From bundles only ----------------------------------------------------------------------------------------------

BundledFfn::BundledFfn(Norm norm, Norm out_norm, Vector down_bias, std::shared_ptr<NeuronSum> of,
                       std::shared_ptr<const Predictor> asked)
    : neurons(std::move(of)),
      predictor(std::move(asked)),
      norm_(std::move(norm)),
      out_norm_(std::move(out_norm)),
      down_bias_(std::move(down_bias)) {}

void BundledFfn::run(Thread& t, const Step& step) {
  Program& p = *t.program;
  const bool few = step.tokens <= PI_NEURON_TOKENS, predicted = few && predictor && predicts;
  for (int64_t first = 0; first < step.tokens; first += PI_NEURON_TOKENS) {
    const int64_t tokens = std::min(step.tokens - first, (int64_t)PI_NEURON_TOKENS);
    const NeuronSum::Piece piece = p.piece(first, tokens, norm_, out_norm_, down_bias_, few);
    if (predicted) {
      predictor->select(t.id, *p.workspace, piece.x);
      const PiActs* acts = p.workspace->prepare(t.id, piece.x, norm_, neurons->bundles->forms());
      neurons->sum_listed(t.id, piece, acts, nullptr, 0, predictor.get());
    } else {
      neurons->sum_selected(t.id, piece);
    }
    if (out_norm_) p.add_normalised(t, out_norm_, p.up, first, tokens);
  }
}
