#include "dense_neurons.h"

#include <math.h>
#include <string.h>

#include <algorithm>

namespace {
// Whether a padded vector is that one, bit by bit.
bool same(const Vector& padded, const Vector& other) {
  return padded.empty() == other.empty() && padded.size() >= other.size() &&
         (other.empty() || memcmp(padded.data(), other.data(), other.size() * sizeof(float)) == 0);
}
}  // namespace

DenseNeurons::DenseNeurons(NeuronSpec spec, std::shared_ptr<Matrix> gate, std::shared_ptr<Matrix> up,
                           std::shared_ptr<Matrix> down, Norm inner)
    : spec_(std::move(spec)),
      gate_(std::move(gate)),
      up_(std::move(up)),
      down_(std::move(down)),
      inner_(std::move(inner)) {
  check(spec_.activation.kind < PI_N_ACTS, "only experts have that activation");
  check(!gate_ || (gate_->rows == up_->rows && gate_->k == up_->k), "gate or up has another width than the other");
  check(down_->rows == up_->k && down_->k == up_->rows, "down has another width than d_model, or than up has neurons");
  check(gate_ || spec_.gate_bias.empty(), "a bias of gate without a gate");
  check_norm(inner_, neurons(), "the norm before down");
  check_bias(spec_.gate_bias, neurons(), "gate");
  check_bias(spec_.up_bias, neurons(), "up");
  for (const Vector* one : {&spec_.limits, &spec_.product_limits})
    check(one->empty() || (int64_t)one->size() == neurons(), "thresholds must be one for every neuron");
  check(gate_ || spec_.product_limits.empty(), "thresholds of products without a gate");
  check(!spec_.activation.in_banks() || neurons() % PI_BANK == 0, "topk needs whole banks of neurons");
  check(!cuts() || gate_, "gaussian needs gates");
  for (Vector* one : {&spec_.gate_bias, &spec_.up_bias, &spec_.limits, &spec_.product_limits})
    *one = padded(std::move(*one));
}

bool DenseNeurons::same_kind(const Bundles& bundles) const {
  return !inner_ && bundles.complete() && bundles.neurons == neurons() && bundles.gated() == gated() &&
         bundles.spec.activation == spec_.activation && same(spec_.gate_bias, bundles.spec.gate_bias) &&
         same(spec_.up_bias, bundles.spec.up_bias) && same(spec_.limits, bundles.spec.limits) &&
         same(spec_.product_limits, bundles.spec.product_limits);
}

void DenseNeurons::sum(Thread& t, const PiActs* acts, int64_t tokens, const Destination& to, int64_t* fired) const {
  Program& p = *t.program;
  Workspace& w = *p.workspace;
  if (p.watch || !is_in_memory()) return add_down(t, tokens, multiply(t, acts, tokens), to, fired);
  const int64_t unit = spec_.activation.panels(Workspace::DEALT);  // a whole block of the activations below
  const int64_t panels = columns_at_once(t, tokens) / PI_LANES;
  w.pool->phase(
      up_->panels, unit, 2 * tokens * PI_LANES,
      [&](int64_t p0, int64_t p1, float* aside) {
        if (!panels || aside) {
          const Columns part(*up_, p0, p1);
          return multiply(t, acts, tokens, part, rows_of(t, tokens, part, aside));
        }
        for (int64_t p2 = p0; p2 < p1; p2 += panels) {
          const Columns part(*up_, p2, std::min(p2 + panels, p1));
          const int64_t from = t.id * tokens * panels * PI_LANES - part.c0;
          const Hidden rows{p.gate + from, p.up + from, panels * PI_LANES};
          multiply(t, acts, tokens, part, rows);
          put_forms(t, tokens, part, rows);
        }
      },
      [&](int64_t p0, int64_t p1, float* aside) {
        const Columns part(*up_, p0, p1);
        if (panels && !aside) return;
        if (panels) return put_forms(t, tokens, part, rows_of(t, tokens, part, aside));
        if (aside) copy_rows(aside, part.lanes(), p.gate + part.c0, p.ldh, part.lanes(), tokens);
        if (!inner_) forms_of_h(t, tokens, part, fired);
        else if (fired) count_fired(t, part.c0, part.c1, tokens, fired);
      },
      w.deals(tokens, *up_));
  if (inner_) return w.finish_product(t.id, *down_, normalised(t, tokens), tokens, to);
  const PiActs h = forms_of_h(t, tokens, Columns(*up_, 0, 0), nullptr);
  w.finish_product(t.id, *down_, &h, tokens, to);
}

void DenseNeurons::count_fired(const Thread& t, int64_t begin, int64_t end, int64_t tokens, int64_t* fired) {
  for (int64_t i = 0; i < tokens; i++) {
    const float* h = t.program->gate + i * t.program->ldh;
    for (int64_t j = begin; j < end; j++) fired[j] += h[j] != 0.0f;
  }
}

// Many: they are not counted, and what they touch of the program's rows is memory that small steps never do.
int64_t DenseNeurons::columns_at_once(const Thread& t, int64_t tokens) const {
  constexpr int64_t PANELS = 8;  // which products widen together
  const int64_t columns = spec_.activation.panels(PANELS) * PI_LANES;
  const bool fits = columns * t.program->workspace->pool->threads() <= t.program->ldh;
  return tokens > PI_NEURON_TOKENS && down_->form() != PI_FORM_F32 && !inner_ && fits ? columns : 0;
}

DenseNeurons::Hidden DenseNeurons::program_rows(const Thread& t) {
  return {t.program->gate, t.program->up, t.program->ldh};
}

Columns DenseNeurons::multiply(Thread& t, const PiActs* acts, int64_t tokens) const {
  // two panels: a whole block of the activations below
  const Columns mine(*up_, *t.program->workspace->pool, t.id, spec_.activation.panels(2));
  multiply(t, acts, tokens, mine, program_rows(t));
  return mine;
}

void DenseNeurons::multiply(Thread& t, const PiActs* acts, int64_t tokens, const Columns& mine,
                            const Hidden& to) const {
  Program& p = *t.program;
  Workspace& w = *p.workspace;
  if (gate_) w.linear(t.id, *gate_, spec_.gate_bias, acts, to.h, to.ld, tokens, false, mine.p0, mine.p1);
  w.linear(t.id, *up_, spec_.up_bias, acts, gate_ ? to.up : to.h, to.ld, tokens, false, mine.p0, mine.p1);
  Watch* const watch = p.watch.get();
  const Watch::Look look{t.id, mine.c0, mine.n(), mine.lanes()};
  for (int64_t i = 0; i < tokens && mine.n(); i++) {
    float* h = to.h + i * to.ld + mine.c0;
    const float* up = gate_ ? to.up + i * to.ld + mine.c0 : nullptr;
    const float* limits = spec_.limits_from(mine.c0);
    if (watch) watch->before(look, i, spec_.activation, limits, h, up);
    spec_.activation.apply(w.kernels, h, up, mine.lanes(), limits);
    spec_.drop_products(h, mine.lanes(), mine.c0);
    if (watch) watch->after(look, i, h);
  }
  if (watch && mine.n()) watch->count(look, tokens);
}

void DenseNeurons::activate(Thread& t, int64_t tokens, const Columns& part, float* h, int64_t ld) const {
  for (int64_t i = 0; i < tokens; i++)
    spec_.activation.apply_first(t.program->workspace->kernels, h + i * ld, part.lanes(), spec_.limits_from(part.c0));
}

Columns DenseNeurons::activate_share(Thread& t, const PiActs* acts, int64_t tokens, int64_t unit) const {
  const Program& p = *t.program;
  Workspace& w = *p.workspace;
  const Columns mine(first(), *w.pool, t.id, spec_.activation.panels(unit));
  w.linear(t.id, first(), spec_.first_bias(gated()), acts, p.gate, p.ldh, tokens, false, mine.p0, mine.p1);
  activate(t, tokens, mine, p.gate + mine.c0, p.ldh);
  return mine;
}

// Activations of whole rows of gates, which are there.
void DenseNeurons::cut_rows(const Thread& t, int64_t tokens) const {
  const Program& p = *t.program;
  p.workspace->pool->phase(tokens, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) spec_.activation.cut(p.workspace->kernels, p.gate + i * p.ldh, neurons());
  });
}

void DenseNeurons::multiply_up(Thread& t, const PiActs* acts, int64_t tokens, float threshold, const Columns& part,
                               const Hidden& to) const {
  Workspace& w = *t.program->workspace;
  const int64_t n = part.n();
  if (gate_) w.linear(t.id, *up_, spec_.up_bias, acts, to.up, to.ld, tokens, false, part.p0, part.p1);
  Watch* const watch = t.program->watch.get();  // only where neurons are cut: a program is watched densely
  const Watch::Look look{t.id, part.c0, n, part.lanes()};
  for (int64_t i = 0; i < tokens && n; i++) {
    float *h = to.h + i * to.ld + part.c0, *up = to.up + i * to.ld + part.c0;
    if (watch) watch->before(look, i, spec_.activation, nullptr, h, up);
    if (threshold > 0.0f)
      for (int64_t j = 0; j < n; j++)
        if (fabsf(h[j]) <= threshold) h[j] = 0.0f;
    if (!gate_) continue;
    spec_.activation.apply_second(w.kernels, up, part.lanes());
    for (int64_t j = 0; j < n; j++) h[j] *= up[j];
    spec_.drop_products(h, n, part.c0);
    if (watch) watch->after(look, i, h);
  }
  if (watch && n) watch->count(look, tokens);
}

void DenseNeurons::finish(Thread& t, int64_t tokens, const Destination& to) const {
  const PiActs h = forms_of_h(t, tokens, Columns(*up_, 0, 0), nullptr);
  t.program->workspace->finish_product(t.id, *down_, &h, tokens, to);
}

void DenseNeurons::add_down(Thread& t, int64_t tokens, const Columns& mine, const Destination& to,
                            int64_t* fired) const {
  Workspace& w = *t.program->workspace;
  if (inner_) {
    if (fired) count_fired(t, mine.c0, mine.c1, tokens, fired);
    w.pool->barrier();
    w.product(t.id, *down_, normalised(t, tokens), tokens, to);
    return w.pool->barrier();
  }
  const PiActs h = forms_of_h(t, tokens, mine, fired);
  w.pool->barrier();
  w.product(t.id, *down_, &h, tokens, to);
  w.pool->barrier();
}

// The input of down where it is normalised, of which all columns are written.
const PiActs* DenseNeurons::normalised(Thread& t, int64_t tokens) const {
  const Program& p = *t.program;
  return p.workspace->prepare(t.id, {p.gate, p.ldh, down_->k, tokens}, inner_, down_->form());
}

// The input of down, of which these columns are written.
PiActs DenseNeurons::forms_of_h(Thread& t, int64_t tokens, const Columns& mine, int64_t* fired) const {
  if (fired) count_fired(t, mine.c0, mine.c1, tokens, fired);
  Program& p = *t.program;
  PiActs h = p.hidden.rows(down_->k);
  h.f = p.gate;
  h.ldf = p.ldh;
  if (down_->form() != PI_FORM_F32 && mine.n()) put_forms(t, tokens, mine, program_rows(t));
  return h;
}

void DenseNeurons::put_forms(Thread& t, int64_t tokens, const Columns& part, const Hidden& from) const {
  const Program& p = *t.program;
  const PiActs h = p.hidden.rows(down_->k);
  for (int64_t i = 0; i < tokens; i++) {
    const PiActs own = pi_acts_from(&h, i, part.c0);
    p.workspace->kernels->forms(from.h + i * from.ld + part.c0, part.n(), down_->form(), &own);
  }
}
