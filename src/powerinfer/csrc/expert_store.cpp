#include "expert_store.h"

#include <string.h>

#include <atomic>

#include "bundled_experts.h"
#include "resting_experts.h"
#include "resting_neurons.h"

ExpertRows::ExpertRows(const Sizes& s, int threads)
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
      fired((size_t)(s.bundled ? PI_NEURON_TOKENS * s.top_k * ldh / PI_LANES : 0)),
      copies_((size_t)threads) {
  active.reserve((size_t)s.experts);
  for (auto& copy : copies_) copy.reserve((size_t)s.experts);
}

const std::vector<ExpertRows::Active>& ExpertRows::copy(int thread) const {
  std::vector<Active>& copy = copies_[(size_t)thread];
  const size_t n = std::min(active.size(), (size_t)sizes.experts);
  copy.resize(n);
  for (size_t i = 0; i < n; i++) {
    const auto e = (size_t)active.data()[i];
    copy[i] = {e, begin[e], cost[i + 1] - cost[i] - ROW_COSTS, cost[i]};
  }
  return copy;
}

void ExpertRows::compute(const std::vector<int32_t>& experts) {
  active = experts;
  for (size_t i = 0; i < active.size(); i++) {
    const size_t e = (size_t)active[i];
    cost[i + 1] = cost[i] + n(e) + ROW_COSTS;
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

PiActs ExpertStore::gather(int thread, const ExpertRows& rows, const PiActs* acts, int64_t k, int forms) const {
  const PiActs to = rows.input.rows(k);
  int64_t begin, end;
  share(rows.begin[(size_t)experts], 1, workspace_->pool->threads(), thread, &begin, &end);
  gather_rows(rows, acts, to, forms, begin, end);
  workspace_->pool->barrier();
  return to;
}

PiActs ExpertStore::gather_in_phase(const ExpertRows& rows, const PiActs* acts, int64_t k, int forms) const {
  const PiActs to = rows.input.rows(k);
  workspace_->pool->phase(rows.begin[(size_t)experts], 1,
                          [&](int64_t begin, int64_t end) { gather_rows(rows, acts, to, forms, begin, end); });
  return to;
}

void ExpertStore::gather_rows(const ExpertRows& rows, const PiActs* acts, const PiActs& to, int forms, int64_t begin,
                              int64_t end) {
  const int64_t k = to.k, nb = k / 32;
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
}

ExpertStore::Work::Work(const std::vector<ExpertRows::Active>& active, int64_t panels, int64_t unit)
    : active(active), panels(panels), unit(unit), units((panels + unit - 1) / unit) {
  for (const ExpertRows::Active& run : active) most_rows = std::max(most_rows, run.n);
  if (!active.empty()) all = (active.back().before + active.back().cost()) * units;
}

void ExpertStore::sum_rows(Thread& t, ExpertRows& rows, const PiActs& acts, bool single, uint16_t* fired,
                           const Attempt&) {
  const bool gated = !parts_[GATE].empty();
  phase_of_panels(
      rows, Work(rows.copy(t.id), parts_[UP][0].panels), fired ? 0 : 1 + gated,
      [&](const Block& block, const Output& aside) {
        first_products(t.id, rows, block, acts, single, aside.rows ? aside : hidden_rows(rows, block), fired);
      },
      [&](const Block& block, const Output& aside) {
        if (aside.rows)
          copy_rows(aside.rows, aside.ld, hidden_rows(rows, block).rows, rows.ldh, block.lanes(), block.n);
        make_forms(rows, block);
      });
  phase_of_panels(
      rows, Work(rows.copy(t.id), parts_[DOWN][0].panels, parts_[DOWN][0].unit(2)), 1,
      [&](const Block& block, const Output& aside) {
        if (aside.rows) down_products(t.id, rows, block, aside.rows, aside.ld);
        else down_products(t.id, rows, block, out_rows(rows, block), rows.ldy);
      },
      [&](const Block& block, const Output& aside) {
        if (aside.rows) copy_rows(aside.rows, aside.ld, out_rows(rows, block), rows.ldy, block.lanes(), block.n);
      });
}

void ExpertStore::multiply(int thread, const ExpertRows& rows, const PiActs& acts, bool single, uint16_t* fired) const {
  share_panels(thread, rows, parts_[UP][0].panels, [&](const Block& block) {  // two panels: a block of h
    first_products(thread, rows, block, acts, single, hidden_rows(rows, block), fired);
    make_forms(rows, block);
  });
}

void ExpertStore::add_down(int thread, const ExpertRows& rows) const {
  const Matrix& down = parts_[DOWN][0];
  share_panels(
      thread, rows, down.panels,
      [&](const Block& block) { down_products(thread, rows, block, out_rows(rows, block), rows.ldy); }, down.unit(2));
}

void ExpertStore::first_products(int thread, const ExpertRows& rows, const Block& block, const PiActs& acts,
                                 bool single, const Output& to, uint16_t* fired) const {
  const PiKernels* const kernels = workspace_->kernels;
  const bool gated = !parts_[GATE].empty();
  const int64_t panels = parts_[UP][0].panels, columns = std::min(neurons - block.c0(), block.lanes());
  const PiActs x = pi_acts_from(&acts, single ? 0 : block.first, 0);
  if (gated) product(thread, GATE, block, x, to.rows, to.ld);
  product(thread, UP, block, x, gated ? to.more : to.rows, to.ld);
  for (int64_t i = 0; i < block.n; i++) {
    float *const row = to.rows + i * to.ld, *const up = gated ? to.more + i * to.ld : nullptr;
    const float weight = rows.weight_of[(size_t)(block.first + i)];
    if (rows.scales_input) kernels->scale(row, weight, columns);  // products with it are, too
    if (rows.scales_input && up) kernels->scale(up, weight, columns);
    activation_.apply(kernels, row, up, block.lanes());
    if (fired) kernels->neurons.fires(row, block.lanes(), 0.0f, fired + (block.first + i) * panels + block.p0);
    if (!rows.scales_input) kernels->scale(row, weight, columns);
  }
}

void ExpertStore::make_forms(const ExpertRows& rows, const Block& block) const {
  const int form = parts_[DOWN][0].form();
  if (form == PI_FORM_F32) return;
  const PiActs hidden = rows.hidden.rows(neurons);
  const int64_t columns = std::min(neurons - block.c0(), block.lanes());
  const float* const h = hidden_rows(rows, block).rows;
  for (int64_t i = 0; i < block.n; i++) {
    const PiActs to = pi_acts_from(&hidden, block.first + i, block.c0());
    workspace_->kernels->forms(h + i * rows.ldh, columns, form, &to);
  }
}

void ExpertStore::down_products(int thread, const ExpertRows& rows, const Block& block, float* out, int64_t ld) const {
  PiActs hidden = rows.hidden.rows(neurons);
  hidden.f = rows.floats(rows.gate);
  hidden.ldf = rows.ldh;
  product(thread, DOWN, block, pi_acts_from(&hidden, block.first, 0), out, ld);
  if (biases_[DOWN].empty()) return;
  const float* const bias = biases_[DOWN][block.expert].data() + block.c0();
  for (int64_t i = 0; i < block.n; i++, out += ld) {  // times the row's weight, as h is
    const float weight = rows.weight_of[(size_t)(block.first + i)];
    for (int64_t c = 0; c < block.lanes(); c++) out[c] += weight * bias[c];
  }
}

void ExpertStore::product(int thread, Part part, const Block& block, const PiActs& acts, float* out,
                          int64_t ldo) const {
  const Vector& bias = part == DOWN || biases_[part].empty() ? NO_BIAS : biases_[part][block.expert];
  workspace_->linear(thread, parts_[part][block.expert], bias, &acts, out - block.c0(), ldo, block.n, false, block.p0,
                     block.p1);
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
    share_panels(thread, rows, parts_[UP][0].panels, [&](const Block& block) {
      if (!parts_[GATE].empty()) lines(parts_[GATE][block.expert], block.p0, block.p1);
      lines(parts_[UP][block.expert], block.p0, block.p1);
    });
    share_panels(thread, rows, parts_[DOWN][0].panels,
                 [&](const Block& block) { lines(parts_[DOWN][block.expert], block.p0, block.p1); });
    if (at > last) more = true;
  });
  return more;
}

ExpertStore::Counts ExpertStore::counts() const {
  check(false, "that FFN has no bundles");
  return {};
}
