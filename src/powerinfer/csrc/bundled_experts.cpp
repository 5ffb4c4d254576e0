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
  const int64_t tokens = piece.x.tokens;
  NeuronSum::Piece counted = piece;
  counted.first_rows = (int64_t)rows.active.size() * neurons + shared_;
  const PiActs inputs = tokens == 1 ? *acts : gather(t.id, rows, acts, d_model, forms_);
  begin_list(t.id);
  if (shared_) list_shared(t, rows, acts, tokens, shared);
  list_firing(t.id, rows, &inputs, tokens);
  workspace_->pool->barrier();
  bundled_->sum_listed(t.id, counted, acts, rows.floats(rows.activations), experts * neurons + shared_, false);
}

// Lists neurons of this thread's share of the active experts, by the products of `matrices` with `inputs`, of rows or of a
// `single` token; null: z has them, as they are compared. prepare(e, z, lanes): before they are compared with `limit`, |z| where `magnitude`; z: [rows][ldh].
// use_listed(e, z, first, listed, n, lanes): n neurons of expert e were listed, of which z has those from `first` on.
template <class F, class G>
void BundledExperts::list(int thread, const ExpertRows& rows, const std::vector<Matrix>& matrices, const PiActs* inputs,
                          bool single, const Limit& limit, F prepare, G use_listed) const {
  NeuronLists::Share& share = workspace_->lists().shares[(size_t)thread];
  share_panels(thread, rows, matrices[0].panels, [&](const Block& block) {
    const size_t e = block.expert;
    const int64_t begin = block.first, n = block.n, c0 = block.c0(), lanes = block.lanes();
    const int64_t first = (int64_t)e * matrices[e].rows + c0;
    float* const z = hidden_rows(rows, block).rows;
    if (inputs) {
      const PiActs x = pi_acts_from(inputs, single ? 0 : begin, 0);
      workspace_->linear(thread, matrices[e], NO_BIAS, &x, z - c0, rows.ldh, n, false, block.p0, block.p1);
      prepare(e, z, lanes);
    }
    int64_t counts[PI_NEURON_TOKENS] = {0};
    int32_t* const listed = share.listed.data() + share.n;
    const int64_t more = workspace_->kernels->neurons.keep(z, rows.ldh, n, lanes, limit.magnitude, limit.value,
                                                           (int32_t)first, listed, counts);
    for (int64_t i = 0; i < n; i++) share.counts[rows.token_of[(size_t)(begin + i)]] += counts[i];
    use_listed(e, z, first, listed, more, lanes);
    share.n += more;
  });
}

// Nothing is listed by this thread.
void BundledExperts::begin_list(int thread) const {
  NeuronLists::Share& share = workspace_->lists().shares[(size_t)thread];
  share.n = 0;
  std::fill(share.counts, share.counts + PI_NEURON_TOKENS, 0);
}

// Activations of an expert's first products, times the weights of its rows.
void BundledExperts::activate(const ExpertRows& rows, size_t e, float* h, int64_t lanes) const {
  for (int64_t i = 0; i < rows.n(e); i++) {
    activation_.apply_first(workspace_->kernels, h + i * rows.ldh, lanes);
    workspace_->kernels->scale(h + i * rows.ldh, rows.weight_of[(size_t)(rows.begin[e] + i)], lanes);
  }
}

// Lists the neurons that fire, of this thread's share of the first products; `activations` gets them, times the weights of
// their experts, for every token. inputs: null: `activate` was called for all.
void BundledExperts::list_firing(int thread, const ExpertRows& rows, const PiActs* inputs, int64_t tokens) const {
  const bool single = tokens == 1;
  float* const activations = rows.floats(rows.activations);
  const int64_t ldk = experts * neurons + shared_;
  const auto prepare = [&](size_t e, float* h, int64_t lanes) { activate(rows, e, h, lanes); };
  const auto know = [&](size_t e, const float* h, int64_t first, const int32_t* listed, int64_t n, int64_t) {
    for (int64_t j = 0; j < n; j++) {
      for (int64_t i = 0; i < tokens && !single; i++) activations[i * ldk + listed[j]] = 0.0f;
      for (int64_t i = 0; i < rows.n(e); i++)
        activations[rows.token_of[(size_t)(rows.begin[e] + i)] * ldk + listed[j]] = h[i * rows.ldh + listed[j] - first];
    }
  };
  list(thread, rows, first_products(), inputs, single, {1, 0.0f}, prepare, know);
}

// The same of the shared expert. In bundles of its own its activations stay in the program's `gate`, without its weight.
void BundledExperts::list_shared(Thread& t, const ExpertRows& rows, const PiActs* acts, int64_t tokens,
                                 const SharedExpert& shared) const {
  const Program& p = *t.program;
  NeuronLists::Share& share = workspace_->lists().shares[(size_t)t.id];
  const int64_t first = first_shared(), ldk = first + shared_;
  if (shared_) workspace_->pool->barrier();                                 // its weights are there
  const Columns mine = shared.neurons->activate_share(t, acts, tokens, 2);  // two panels: a group of neurons
  float* const h = p.gate + mine.c0;
  for (int64_t i = 0; i < tokens && shared_; i++)
    workspace_->kernels->scale(h + i * p.ldh, rows.shared_weights[(size_t)i], mine.n());
  int32_t* const listed = share.listed.data() + share.n;
  const int64_t more = workspace_->kernels->neurons.keep(h, p.ldh, tokens, mine.n(), 1, 0.0f,
                                                         (int32_t)(first + mine.c0), listed, share.counts);
  for (int64_t j = 0; j < more && shared_; j++)
    for (int64_t i = 0; i < tokens; i++)
      rows.floats(rows.activations)[i * ldk + listed[j]] = h[i * p.ldh + listed[j] - first - mine.c0];
  share.n += more;
}

const PiActs* BundledExperts::sum_shared(Thread& t, const ExpertRows& rows, const PiActs* acts,
                                         const NeuronSum::Piece& piece, const SharedExpert& shared, int forms) {
  const Program& p = *t.program;
  NeuronSum& sum = *shared.bundled;
  const int64_t tokens = piece.x.tokens, n = sum.bundles->neurons;
  begin_list(t.id);
  if (!predictor_) {
    list_shared(t, rows, acts, tokens, shared);
    workspace_->pool->barrier();
    NeuronSum::Piece counted = piece;
    counted.first_rows = n;
    sum.sum_listed(t.id, counted, acts, p.gate, p.ldh, false);
    return acts;
  }
  list_predicted_shared(t.id, predictor_->hide(t.id, *workspace_, piece.x), tokens);
  workspace_->pool->barrier();
  const bool sampled = samples();
  const int of_sample = sampled ? shared.neurons->forms() : 0;
  acts = workspace_->prepare(t.id, piece.x, piece.norm, sum.bundles->forms() | forms | of_sample);
  if (sampled) sample_shared(t, acts, tokens, shared);
  sum.sum_listed(t.id, piece, acts, nullptr, 0, true);
  if (t.id == 0) predictor_rows_ += n;
  return acts;
}

// The neurons that the predictor selects of the experts of up to PI_NEURON_TOKENS tokens.
void BundledExperts::sum_predicted(Thread& t, ExpertRows& rows, const Rows& x, NeuronSum::Piece piece, int64_t top_k,
                                   const SharedExpert& shared) {
  const bool sampled = samples();
  const int64_t selected_among = (int64_t)rows.active.size() * selectable_ + shared_;
  weigh(t, rows, x.tokens, top_k);
  const PiActs* const hidden =
      shared.bundled ? predictor_->hidden(t.id, *workspace_, x.tokens) : predictor_->hide(t.id, *workspace_, x);
  list_predicted(t, rows, hidden, x.tokens, sampled);
  const int forms = bundled_->bundles->forms() | (sampled && shared_ ? shared.neurons->forms() : 0);
  const PiActs* acts = workspace_->prepare(t.id, piece.x, piece.norm, forms);
  if (sampled && shared_) sample_shared(t, acts, x.tokens, shared);
  if (sampled) sample(t, rows, acts, x.tokens);
  piece.groups = {rows.expert_weights.data(), groups(), neurons};
  if (t.id == 0) predictor_rows_ += selected_among;
  bundled_->sum_listed(t.id, piece, acts, nullptr, 0, false);
}

// The weights of this thread's tokens for each expert.
void BundledExperts::weigh(const Thread& t, ExpertRows& rows, int64_t tokens, int64_t k) const {
  const int64_t ldw = groups();
  int64_t t0, t1;
  share(tokens, 1, workspace_->pool->threads(), t.id, &t0, &t1);
  for (int64_t i = t0; i < t1; i++) {
    float* const weights = rows.expert_weights.data() + i * ldw;
    std::fill(weights, weights + experts, 0.0f);
    for (int64_t j = i * k; j < (i + 1) * k; j++)
      if (rows.selected[(size_t)j] >= 0) weights[rows.selected[(size_t)j]] = rows.weights[(size_t)j];
    std::fill(weights + experts, weights + ldw, rows.shared_weights[(size_t)i]);
  }
}

// Lists the candidates, of this thread's share of the selected experts' neurons, and the tokens that select each. Ends
// with a barrier.
void BundledExperts::list_predicted(Thread& t, ExpertRows& rows, const PiActs* hidden, int64_t tokens,
                                    bool sampled) const {
  NeuronLists& lists = workspace_->lists();
  const PiActs inputs = tokens == 1 ? *hidden : gather(t.id, rows, hidden, predictor_->rank(), out_[0].form());
  const auto select = [&](size_t e, const float* z, int64_t first, int32_t* listed, int64_t n, int64_t lanes) {
    const auto token = [&](int64_t i) { return rows.token_of[(size_t)(rows.begin[e] + i)]; };
    for (int64_t j = 0; j < n; j++) {
      uint32_t selects = 0;
      for (int64_t i = 0; i < rows.n(e) && tokens > 1; i++)
        selects |= (uint32_t)predictor_->candidate(z[i * rows.ldh + listed[j] - first]) << token(i);
      listed[j] = neuron_of(listed[j]);
      if (tokens > 1) lists.selected_by[(size_t)listed[j]] = selects;
    }
    for (int64_t i = 0; i < rows.n(e) && sampled; i++)
      for (int64_t c = 0; c < lanes; c++)
        lists.z[(size_t)(token(i) * lists.ldz + neuron_of(first + c))] = z[i * rows.ldh + c];
  };
  begin_list(t.id);
  if (shared_) list_predicted_shared(t.id, hidden, tokens);
  list(t.id, rows, out_, &inputs, tokens == 1, {0, predictor_->limit()}, [](size_t, float*, int64_t) {}, select);
  workspace_->pool->barrier();
}

// The same of the shared expert, whose z stays in the lists.
void BundledExperts::list_predicted_shared(int thread, const PiActs* hidden, int64_t tokens) const {
  NeuronLists& lists = workspace_->lists();
  NeuronLists::Share& own = lists.shares[(size_t)thread];
  const Columns mine(shared_out_, *workspace_->pool, thread, 2);  // two panels: a group of neurons
  const int64_t first = first_shared();
  float* const z = lists.z.data() + first;
  workspace_->linear(thread, shared_out_, NO_BIAS, hidden, z, lists.ldz, tokens, false, mine.p0, mine.p1);
  int32_t* const listed = own.listed.data() + own.n;
  const int64_t more = workspace_->kernels->neurons.keep(
      z + mine.c0, lists.ldz, tokens, mine.n(), 0, predictor_->limit(), (int32_t)(first + mine.c0), listed, own.counts);
  if (tokens > 1) predictor_->mark(lists, listed, more, tokens);
  own.n += more;
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
