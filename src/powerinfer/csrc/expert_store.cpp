#include "expert_store.h"

#include <string.h>

#include <atomic>

#include "bundled_experts.h"
#include "resting_experts.h"
#include "resting_neurons.h"

ExpertRows::ExpertRows(const Sizes& s)
    : sizes(s),
      ldl(pi_round_up(s.experts, PI_LANES)),
      ldh(pi_round_up(s.neurons, 2 * PI_LANES)),
      ldy(pi_round_up(s.d_model, PI_LANES)),
      input(s.tokens * s.top_k * pi_round_up(s.d_model, 32)),
      hidden(s.tokens * s.top_k * ldh),
      logits((size_t)(s.tokens * ldl)),
      scores((size_t)(s.tokens * ldl)),
      gate(s.tokens * s.top_k * ldh * 4),
      up(s.tokens * s.top_k * ldh * 4),
      out(s.tokens * s.top_k * ldy * 4),
      shared(s.tokens * ldy * 4),
      selected((size_t)(s.tokens * s.top_k)),
      row_of(selected.size()),
      token_of(selected.size()),
      weights(selected.size()),
      weight_of(selected.size()),
      shared_weights((size_t)s.tokens),
      begin((size_t)s.experts + 1),
      cost((size_t)s.experts + 1),
      activations(PI_NEURON_TOKENS * s.bundled * 4),
      expert_weights((size_t)(PI_NEURON_TOKENS * s.groups)),
      guessed((size_t)(GUESSED * ldl)),
      fired((size_t)(s.bundled ? PI_NEURON_TOKENS * s.top_k * ldh / PI_LANES : 0)) {
  active.reserve((size_t)s.experts);
}

void ExpertRows::compute(const std::vector<int32_t>& experts) {
  active = experts;
  for (size_t i = 0; i < active.size(); i++) {
    const size_t e = (size_t)active[i];
    cost[i + 1] = cost[i] + begin[e + 1] - begin[e] + 2;  // a row each, and to read the weights and to widen them
  }
}

std::unique_ptr<ExpertStore> ExpertStore::make(ExpertMatrices all, std::shared_ptr<Workspace> workspace) {
  if (all.slots && all.bundled) return std::make_unique<RestingNeurons>(std::move(all), std::move(workspace));
  if (all.slots) return std::make_unique<ExpertsOnDisk>(std::move(all), std::move(workspace));
  if (all.bundled) return std::make_unique<BundledExperts>(std::move(all), std::move(workspace));
  Parts parts{std::vector<Matrix>(), cut(*all.up, all.experts, all.neurons), cut(*all.down, all.experts, all.up->k)};
  if (all.gate) parts[GATE] = cut(*all.gate, all.experts, all.neurons);
  return std::make_unique<ExpertStore>(std::move(all), std::move(parts), std::move(workspace));
}

ExpertStore::ExpertStore(ExpertMatrices all, Parts parts, std::shared_ptr<Workspace> workspace)
    : experts(all.experts),
      neurons(all.neurons),
      d_model(parts[UP][0].k),
      parts_(std::move(parts)),
      activation_(all.activation),
      biases_{std::move(all.gate_bias), std::move(all.up_bias), std::move(all.down_bias)},
      workspace_(std::move(workspace)),
      forms_((parts_[GATE].empty() ? 0 : parts_[GATE][0].form()) | parts_[UP][0].form()) {}

PiActs ExpertStore::gather(const Thread& t, const ExpertRows& rows, const PiActs* acts, int64_t k, int forms) const {
  const int64_t nb = k / 32;
  const PiActs to = rows.input.rows(k);
  int64_t begin, end;
  share(rows.begin[(size_t)experts], 1, workspace_->pool->threads(), t.id, &begin, &end);
  for (int64_t r = begin; r < end; r++) {
    const int64_t i = rows.token_of[(size_t)r];
    if (forms & PI_FORM_F32) memcpy(rows.input.floats() + r * to.ldf, acts->f + i * acts->ldf, (size_t)k * 4);
    if (forms & PI_FORM_BF16) memcpy(to.b + r * to.ldb, acts->b + i * acts->ldb, (size_t)to.ldb * 2);
    if (!(forms & PI_FORM_Q8)) continue;
    memcpy(to.q + r * k, acts->q + i * k, (size_t)k);
    memcpy(to.d + r * nb, acts->d + i * nb, (size_t)nb * 4);
    memcpy(to.sd + r * nb, acts->sd + i * nb, (size_t)nb * 4);
    memcpy(to.s + r * 2 * nb, acts->s + i * 2 * nb, (size_t)nb * 4);
  }
  workspace_->pool->barrier();
  return to;
}

void ExpertStore::sum_rows(Thread& t, ExpertRows& rows, const PiActs& acts, bool single, uint16_t* fired,
                           const Attempt&) {
  multiply(t.id, rows, acts, single, true, fired);
  workspace_->pool->barrier();
  add_down(t.id, rows, true);
  workspace_->pool->barrier();
}

void ExpertStore::multiply(int thread, const ExpertRows& rows, const PiActs& acts, bool single, bool dealt,
                           uint16_t* fired) const {
  const PiKernels* const kernels = workspace_->kernels;
  const bool gated = !parts_[GATE].empty();
  float *const gate = rows.floats(rows.gate), *const up = rows.floats(rows.up);
  const int form = parts_[DOWN][0].form();
  PiActs hidden = rows.hidden.rows(neurons);
  hidden.f = gate;
  hidden.ldf = rows.ldh;
  const int64_t panels = parts_[UP][0].panels;
  share_panels(thread, rows, panels, dealt, [&](size_t e, int64_t p0, int64_t p1) {  // two panels: a block of h
    const int64_t begin = rows.begin[e], n = rows.begin[e + 1] - begin, c0 = p0 * PI_LANES;
    const int64_t lanes = (p1 - p0) * PI_LANES, columns = std::min(neurons - c0, lanes);
    const PiActs x = pi_acts_from(&acts, single ? 0 : begin, 0);
    float *const h = gate + begin * rows.ldh, *const more = up + begin * rows.ldh;
    if (gated) product(thread, rows, GATE, e, x, h, rows.ldh, p0, p1);
    product(thread, rows, UP, e, x, gated ? more : h, rows.ldh, p0, p1);
    for (int64_t i = 0; i < n; i++) {
      float* row = h + i * rows.ldh + c0;
      activation_.apply(kernels, row, gated ? more + i * rows.ldh + c0 : nullptr, lanes);
      if (fired) kernels->neurons.fires(row, lanes, 0.0f, fired + (begin + i) * panels + p0);
      kernels->scale(row, rows.weight_of[(size_t)(begin + i)], columns);
      if (form == PI_FORM_F32) continue;
      const PiActs to = pi_acts_from(&hidden, begin + i, c0);
      kernels->forms(row, columns, form, &to);
    }
  });
}

void ExpertStore::add_down(int thread, const ExpertRows& rows, bool dealt) const {
  PiActs hidden = rows.hidden.rows(neurons);
  hidden.f = rows.floats(rows.gate);
  hidden.ldf = rows.ldh;
  const auto add = [&](size_t e, int64_t p0, int64_t p1) {
    const int64_t begin = rows.begin[e], n = rows.begin[e + 1] - begin;
    float* out = rows.floats(rows.out) + begin * rows.ldy;
    product(thread, rows, DOWN, e, pi_acts_from(&hidden, begin, 0), out, rows.ldy, p0, p1);
    if (biases_[DOWN].empty()) return;
    for (int64_t i = 0; i < n; i++, out += rows.ldy) {  // times the row's weight, as h is
      const float weight = rows.weight_of[(size_t)(begin + i)];
      for (int64_t c = p0 * PI_LANES; c < p1 * PI_LANES; c++) out[c] += weight * biases_[DOWN][e][(size_t)c];
    }
  };
  share_panels(thread, rows, parts_[DOWN][0].panels, dealt, add, parts_[DOWN][0].unit(2));
}

void ExpertStore::product(int thread, const ExpertRows& rows, Part part, size_t e, const PiActs& acts, float* out,
                          int64_t ldo, int64_t p0, int64_t p1) const {
  const Vector& bias = part == DOWN || biases_[part].empty() ? NO_BIAS : biases_[part][e];
  workspace_->linear(thread, parts_[part][e], bias, &acts, out, ldo, rows.n(e), false, p0, p1);
}

bool ExpertStore::fetch(const ExpertRows& rows, int64_t last) const {
  std::atomic<bool> more{false};
  workspace_->pool->run([&](int thread) {
    int64_t at = 0;  // of what this thread reads, in the order in which it does
    const auto lines = [&](const Matrix& m, int64_t p0, int64_t p1) {
      if (!m.data) return;  // bundles: which of their rows are read is not known yet
      const int64_t panel_bytes = pi_panel_bytes(m.type, m.k), n = (p1 - p0) * panel_bytes;
      const uint8_t* const data = m.data + p0 * panel_bytes;
      for (int64_t i = std::max<int64_t>(rows.fetched - at, 0); i < std::min(last - at, n); i += 64)
        fetch_line(data + i);
      at += n;
    };
    share_panels(thread, rows, parts_[UP][0].panels, false, [&](size_t e, int64_t p0, int64_t p1) {
      if (!parts_[GATE].empty()) lines(parts_[GATE][e], p0, p1);
      lines(parts_[UP][e], p0, p1);
    });
    share_panels(thread, rows, parts_[DOWN][0].panels, false,
                 [&](size_t e, int64_t p0, int64_t p1) { lines(parts_[DOWN][e], p0, p1); });
    if (at > last) more = true;
  });
  return more;
}

ExpertStore::Counts ExpertStore::counts() const {
  check(false, "that FFN has no bundles");
  return {};
}
