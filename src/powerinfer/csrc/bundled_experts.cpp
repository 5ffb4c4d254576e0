#include "bundled_experts.h"

#include "bundle_panels.h"
#include "program.h"
#include "resting_experts.h"

namespace {

// Matrices of the experts, made of their bundles.
std::vector<Matrix> bundle_matrices(const std::shared_ptr<const Bundles>& b, BundlePart part, int64_t experts,
                                    int64_t neurons) {
  std::vector<Matrix> matrices;
  for (int64_t e = 0; e < experts; e++) matrices.push_back(bundle_matrix(b, part, e * neurons, neurons));
  return matrices;
}

// Of gates without a predictor, and of up without gates, the matrices are in memory.
ExpertStore::Parts parts_of(const ExpertMatrices& all) {
  const std::shared_ptr<const Bundles> b = all.bundled->bundles;
  const int64_t n = all.experts, neurons = all.neurons;
  ExpertStore::Parts parts{std::vector<Matrix>(),
                           !all.up     ? bundle_matrices(b, BundlePart::UP, n, neurons)
                           : all.slots ? on_disk(n, *all.up, neurons)
                                       : cut(*all.up, n, neurons),
                           bundle_matrices(b, BundlePart::DOWN, n, neurons)};
  if (all.gate) parts[ExpertStore::GATE] = cut(*all.gate, n, neurons);
  else if (b->gated()) parts[ExpertStore::GATE] = bundle_matrices(b, BundlePart::GATE, n, neurons);
  return parts;
}

// Rows of a matrix from `first` on, whole panels.
Matrix rows_of(const Matrix& all, int64_t first, int64_t rows) {
  const int64_t p0 = first / PI_LANES;
  return {all.type, rows, all.k, rows / PI_LANES, all.data + p0 * pi_panel_bytes(all.type, all.k), all.arena};
}

}  // namespace

BundledExperts::BundledExperts(ExpertMatrices all, std::shared_ptr<Workspace> workspace)
    : ExpertStore(all, parts_of(all), std::move(workspace)),
      bundled_(std::move(all.bundled)),
      shared_(bundled_->bundles->neurons - experts * neurons),
      predictor_(std::move(all.predictor)),
      among_(std::move(all.among)),
      selectable_(among_.empty() ? neurons : (int64_t)among_.size() / experts),
      out_(predictor_ ? cut(rows_of(*predictor_->out, 0, experts * selectable_), experts, selectable_)
                      : std::vector<Matrix>()),
      recall_every_(all.recall_every),
      shared_out_(predictor_
                      ? rows_of(*predictor_->out, experts * selectable_, predictor_->out->rows - experts * selectable_)
                      : Matrix()),
      sampled_((size_t)workspace_->pool->threads()) {
  for (const auto& matrices : parts_)
    if (!matrices.empty() && matrices[0].source) workspace_->reserve_packed(matrices[0]);
  if (among_.empty()) return;
  among_all_.resize((size_t)(experts * neurons));
  for (size_t row = 0; row < among_.size(); row++) among_all_[(size_t)neuron_of((int64_t)row)] = 1;
}

void BundledExperts::sum_some(Thread& t, ExpertRows& rows, const PiActs* acts, const Rows& x,
                              const NeuronSum::Piece& piece, int64_t top_k, const SharedExpert& shared,
                              const Attempt&) {
  if (predictor_) return sum_predicted(t, rows, x, piece, top_k, shared);
  Workspace& w = *workspace_;
  const int64_t tokens = piece.x.tokens;
  const auto prepare_again = [&] {
    if (!w.is_prepared(t.id)) acts = w.prepare(t.id, piece.x, piece.norm, forms_);
  };
  if (shared_) note_shared(t, rows, acts, tokens, shared);
  prepare_again();
  const PiActs inputs = tokens == 1 ? *acts : gather_in_phase(rows, acts, d_model, forms_);
  const std::vector<ExpertRows::Active>& active = rows.copy(t.id);
  NeuronSum::Piece firing = piece;
  firing.noted = noted(t.id, active);
  firing.first_rows = (int64_t)active.size() * neurons + shared_;
  const std::vector<Matrix>& matrices = first_products();
  phase_of_panels(
      rows, Work(active, matrices[0].panels), 1,
      [&](const Block& block, const Output& aside) {
        const size_t e = block.expert;
        const Output to = aside.rows ? aside : hidden_rows(rows, block);
        const PiActs of = pi_acts_from(&inputs, tokens == 1 ? 0 : block.first, 0);
        w.linear(t.id, matrices[e], NO_BIAS, &of, to.rows - block.c0(), to.ld, block.n, false, block.p0, block.p1);
        activate(rows, block, to.rows, to.ld);
      },
      [&](const Block& block, const Output& aside) {
        if (aside.rows)
          copy_rows(aside.rows, aside.ld, hidden_rows(rows, block).rows, rows.ldh, block.lanes(), block.n);
        note_firing(rows, block, tokens);
      });
  prepare_again();
  bundled_->sum_noted(t.id, firing, acts, rows.floats(rows.activations), experts * neurons + shared_, false);
}

// The notes of a step: the shared expert's neurons, then those of the active experts.
NeuronLists::Noted BundledExperts::noted(int thread, const std::vector<ExpertRows::Active>& active) const {
  NeuronLists& lists = workspace_->lists();
  std::vector<NeuronLists::Run>& runs = lists.shares[(size_t)thread].runs;
  runs.clear();
  if (shared_) runs.push_back({first_shared(), shared_ / PI_GROUP});
  for (const ExpertRows::Active& run : active) {
    if ((int64_t)runs.size() > experts) break;  // of a layer of more, which who is late may see
    const int32_t* const places = among_.empty() ? nullptr : among_.data() + (int64_t)run.expert * selectable_;
    runs.push_back({(int64_t)run.expert * neurons, selectable_ / PI_GROUP, places});
  }
  return {&lists.notes[0], runs.data(), (int64_t)runs.size()};
}

// Activations of a block of first products, times the weights of its rows.
void BundledExperts::activate(const ExpertRows& rows, const Block& block, float* h, int64_t ld) const {
  for (int64_t i = 0; i < block.n; i++) {
    activation_.apply_first(workspace_->kernels, h + i * ld, block.lanes());
    workspace_->kernels->scale(h + i * ld, rows.weight_of[(size_t)(block.first + i)], block.lanes());
  }
}

// Notes the neurons that fire, of a block of activations; `activations` gets these for every token.
void BundledExperts::note_firing(const ExpertRows& rows, const Block& block, int64_t tokens) const {
  NeuronLists& lists = workspace_->lists();
  const int64_t ldk = experts * neurons + shared_, lanes = block.lanes();
  const int64_t group = shared_ / PI_GROUP + (block.order * neurons + block.c0()) / PI_GROUP;
  const float* const h = hidden_rows(rows, block).rows;
  float* const to = rows.floats(rows.activations) + (int64_t)block.expert * neurons + block.c0();
  lists.note(workspace_->kernels, lists.notes[0], group, h, rows.ldh, block.n, lanes, {0.0f});
  for (int64_t i = 0; i < tokens && tokens > 1; i++) std::fill_n(to + i * ldk, lanes, 0.0f);
  for (int64_t i = 0; i < block.n; i++)
    std::copy_n(h + i * rows.ldh, lanes, to + rows.token_of[(size_t)(block.first + i)] * ldk);
}

// The same of the shared expert, whose activations are computed, in a phase. In bundles of its own they stay in the
// program's `gate`, without its weight.
void BundledExperts::note_shared(Thread& t, const ExpertRows& rows, const PiActs* acts, int64_t tokens,
                                 const SharedExpert& shared) const {
  const Program& p = *t.program;
  NeuronLists& lists = workspace_->lists();
  const int64_t first = first_shared(), ldk = first + shared_;
  const auto note = [&](const Columns& part) {
    float* const h = p.gate + part.c0;
    for (int64_t i = 0; i < tokens && shared_; i++) {
      workspace_->kernels->scale(h + i * p.ldh, rows.shared_weights[(size_t)i], part.n());
      std::copy_n(h + i * p.ldh, part.n(), rows.floats(rows.activations) + i * ldk + first + part.c0);
    }
    lists.note(workspace_->kernels, lists.notes[0], part.c0 / PI_GROUP, h, p.ldh, tokens, part.n(), {0.0f});
  };
  shared.neurons->activate(t, acts, tokens, note, [] {});
}

const PiActs* BundledExperts::sum_shared(Thread& t, const ExpertRows& rows, const PiActs* acts,
                                         const NeuronSum::Piece& piece, const SharedExpert& shared, int forms) {
  const Program& p = *t.program;
  NeuronSum& sum = *shared.bundled;
  const int64_t tokens = piece.x.tokens, n = sum.bundles->neurons;
  const bool reads_matrix = piece.sampled || !predictor_;
  const int all = sum.bundles->forms() | forms | (reads_matrix ? shared.neurons->forms() : 0);
  const auto prepare_again = [&] {
    if (!workspace_->is_prepared(t.id)) acts = workspace_->prepare(t.id, piece.x, piece.norm, all);
  };
  const NeuronLists::Run run{0, n / PI_GROUP};
  NeuronSum::Piece candidates = piece;
  candidates.noted = {&workspace_->lists().notes[0], &run, 1};
  if (!predictor_) {
    candidates.first_rows = n;
    note_shared(t, rows, acts, tokens, shared);
    prepare_again();
    sum.sum_noted(t.id, candidates, acts, p.gate, p.ldh, false);
    prepare_again();
    return acts;
  }
  note_predicted_shared(t.id, predictor_->hide(t.id, *workspace_, piece.x), tokens, [&] { predictor_rows_ += n; });
  acts = workspace_->prepare(t.id, piece.x, piece.norm, all);
  if (piece.sampled) {
    sample_shared(t, acts, tokens, shared);
    workspace_->pool->barrier();  // others use that memory next
  }
  sum.sum_noted(t.id, candidates, acts, nullptr, 0, true);
  prepare_again();
  return acts;
}

// The neurons that the predictor selects of the experts of up to PI_NEURON_TOKENS tokens.
void BundledExperts::sum_predicted(Thread& t, ExpertRows& rows, const Rows& x, NeuronSum::Piece piece, int64_t top_k,
                                   const SharedExpert& shared) {
  Workspace& w = *workspace_;
  const int64_t tokens = x.tokens;
  const std::vector<ExpertRows::Active>& active = rows.copy(t.id);
  const PiActs* hidden = shared.bundled ? predictor_->hidden(t.id, w, x) : predictor_->hide(t.id, w, x);
  if (shared_) note_predicted_shared(t.id, hidden, tokens, [] {});
  if (!w.is_prepared(t.id)) hidden = predictor_->hidden(t.id, w, x);
  note_predicted(t.id, rows, active, hidden, tokens, piece.sampled, [&] {
    weigh(rows, tokens, top_k);
    predictor_rows_ += (int64_t)active.size() * selectable_ + shared_;
  });
  piece.noted = noted(t.id, active);
  piece.groups = {rows.expert_weights.data(), groups(), neurons};
  const bool samples_shared = piece.sampled && shared_;
  const int forms = bundled_->bundles->forms() | (samples_shared ? shared.neurons->forms() : 0);
  const PiActs* acts = w.prepare(t.id, piece.x, piece.norm, forms);
  if (samples_shared) sample_shared(t, acts, tokens, shared);
  if (piece.sampled) sample(t, rows, acts, tokens);
  bundled_->sum_noted(t.id, piece, acts, nullptr, 0, false);
}

// The weights of tokens for each expert.
void BundledExperts::weigh(ExpertRows& rows, int64_t tokens, int64_t k) const {
  const int64_t ldw = groups();
  for (int64_t i = 0; i < tokens; i++) {
    float* const weights = rows.expert_weights.data() + i * ldw;
    std::fill(weights, weights + experts, 0.0f);
    for (int64_t j = i * k; j < (i + 1) * k; j++)
      if (rows.selected[(size_t)j] >= 0) weights[rows.selected[(size_t)j]] = rows.weights[(size_t)j];
    std::fill(weights + experts, weights + ldw, rows.shared_weights[(size_t)i]);
  }
}

// Notes the candidates of the active experts' neurons, and the tokens that select each, in a phase. then: as of
// `Pool::phase_then`.
template <class Then>
void BundledExperts::note_predicted(int thread, const ExpertRows& rows, const std::vector<ExpertRows::Active>& active,
                                    const PiActs* hidden, int64_t tokens, bool sampled, const Then& then) const {
  enum { COLUMNS = 256 };
  NeuronLists& lists = workspace_->lists();
  const PiActs inputs = tokens == 1 ? *hidden : gather_in_phase(rows, hidden, predictor_->rank(), out_[0].form());
  const auto note = [&](const Block& block) {
    const float* const z = hidden_rows(rows, block).rows;
    const int64_t first = block.order * selectable_ + block.c0();
    const auto neuron = [&](int64_t c) { return neuron_of((int64_t)block.expert * selectable_ + block.c0() + c); };
    const auto token = [&](int64_t i) { return rows.token_of[(size_t)(block.first + i)]; };
    for (int64_t c = 0; c < block.lanes(); c += COLUMNS) {
      uint32_t rows_of[COLUMNS];
      const int64_t n = std::min(block.lanes() - c, (int64_t)COLUMNS);
      NeuronLists::note(workspace_->kernels, lists.notes[0], (shared_ + first + c) / PI_GROUP, z + c, rows.ldh, block.n,
                        n, predictor_->limit(), tokens > 1 ? rows_of : nullptr);
      for (int64_t j = 0; j < n && tokens > 1; j++) {
        uint32_t selects = 0;
        for (uint32_t rest = rows_of[j]; rest; rest &= rest - 1) selects |= 1u << token(__builtin_ctz(rest));
        if (selects) lists.selected_by[(size_t)neuron(c + j)] = selects;
      }
    }
    for (int64_t i = 0; i < block.n && sampled; i++)
      for (int64_t c = 0; c < block.lanes(); c++)
        lists.z[(size_t)(token(i) * lists.ldz + neuron(c))] = z[i * rows.ldh + c];
  };
  phase_of_panels(
      rows, Work(active, out_[0].panels), 1,
      [&](const Block& block, const Output& aside) {
        const Output to = aside.rows ? aside : hidden_rows(rows, block);
        const PiActs of = pi_acts_from(&inputs, tokens == 1 ? 0 : block.first, 0);
        workspace_->linear(thread, out_[block.expert], NO_BIAS, &of, to.rows - block.c0(), to.ld, block.n, false,
                           block.p0, block.p1);
      },
      [&](const Block& block, const Output& aside) {
        if (aside.rows)
          copy_rows(aside.rows, aside.ld, hidden_rows(rows, block).rows, rows.ldh, block.lanes(), block.n);
        note(block);
      },
      then);
}

// The same of the shared expert, whose z stays in the lists.
template <class Then>
void BundledExperts::note_predicted_shared(int thread, const PiActs* hidden, int64_t tokens, const Then& then) const {
  NeuronLists& lists = workspace_->lists();
  float* const z = lists.z.data() + first_shared();
  uint32_t* const selected_by = lists.selected_by.data() + first_shared();
  workspace_->use_product(
      thread, shared_out_, NO_BIAS, hidden, tokens, z, lists.ldz, PI_GROUP / PI_LANES,
      [](const Columns&, float*, int64_t) {},
      [&](const Columns& part) {
        NeuronLists::note(workspace_->kernels, lists.notes[0], part.c0 / PI_GROUP, z + part.c0, lists.ldz, tokens,
                          part.n(), predictor_->limit(), tokens > 1 ? selected_by + part.c0 : nullptr);
      },
      then);
}

// How many of the shared expert's neurons that fire the predictor selected: computes all of them.
void BundledExperts::sample_shared(Thread& t, const PiActs* acts, int64_t tokens, const SharedExpert& shared) {
  const Program& p = *t.program;
  const NeuronLists& lists = workspace_->lists();
  Ffn::Recall& recall = sampled_[(size_t)t.id];
  const Columns mine = shared.neurons->activate_share(t, acts, tokens, 2);
  for (int64_t i = 0; i < tokens; i++)
    for (int64_t c = mine.c0; c < mine.c1; c++) {
      const bool fires = p.gate[i * p.ldh + c] != 0.0f;
      recall.active += fires;
      recall.found += fires && predictor_->candidate(lists.z[(size_t)(i * lists.ldz + first_shared() + c)]);
    }
}

// The same of the other experts: computes them whole. Ends with a barrier.
void BundledExperts::sample(Thread& t, const ExpertRows& rows, const PiActs* acts, int64_t tokens) {
  const NeuronLists& lists = workspace_->lists();
  Ffn::Recall& recall = sampled_[(size_t)t.id];
  const bool single = tokens == 1;
  multiply(t.id, rows, single ? *acts : gather(t.id, rows, acts, d_model, forms_), single, nullptr);
  share_panels(t.id, rows, parts_[UP][0].panels, [&](const Block& block) {  // as those of `multiply`
    for (int64_t r = block.first; r < block.first + block.n; r++) {
      const float* const h = rows.floats(rows.gate) + r * rows.ldh + block.c0();
      const float* const z =
          lists.z.data() + rows.token_of[(size_t)r] * lists.ldz + (int64_t)block.expert * neurons + block.c0();
      for (int64_t c = 0; c < block.lanes(); c++) {
        if (!among_all_.empty() && !among_all_[block.expert * (size_t)neurons + (size_t)(block.c0() + c)]) continue;
        recall.active += h[c] != 0.0f;
        recall.found += h[c] != 0.0f && predictor_->candidate(z[c]);
      }
    }
  });
  workspace_->pool->barrier();
  if (t.id != 0) return;
  recall_.tokens += tokens;
  for (Ffn::Recall& of_thread : sampled_) {
    recall_.active += of_thread.active, recall_.found += of_thread.found;
    of_thread = {};
  }
}

ExpertStore::Counts BundledExperts::counts() const { return {bundled_->stats_of_job(), recall_, predictor_rows_}; }

void BundledExperts::clear() {
  bundled_->clear_counts();
  recall_ = {};
  predictor_rows_ = 0;
}
