#include "ffn.h"

#include <algorithm>
#include <numeric>
#include <utility>

std::shared_ptr<Ffn> Program::ffn(FfnSpec spec, std::shared_ptr<const DenseNeurons> dense,
                                  std::shared_ptr<NeuronSum> bundled, std::shared_ptr<const Predictor> predictor) {
  check(dense || bundled, "an FFN needs neurons");
  check_bias(spec.down_bias, sizes.d_model, "down");
  check_norm(spec.norm, sizes.d_model, "the FFN norm");
  check_norm(spec.out_norm, sizes.d_model, "the norm of the FFN's output");
  check(!dense || dense->d_model() == sizes.d_model, "the FFN's matrices have another width than d_model");
  check(!dense || dense->neurons() <= sizes.d_ff, "an FFN has more neurons than d_ff");
  check(!bundled || bundled->bundles->up.k == sizes.d_model, "the bundles have another width than d_model");
  // a narrow matrix can need more scratch than a wide one; rows that are normalised need room
  if (dense) workspace->reserve(dense->normalises() ? sizes.max_tokens : 1, dense->neurons());
  spec.down_bias = padded(std::move(spec.down_bias));
  auto op = std::make_shared<Ffn>(workspace, std::move(spec), dense);
  if (bundled) op->set_bundled(std::move(bundled), std::move(predictor));
  return add(std::move(op), dense ? dense->matrices() : std::vector<std::shared_ptr<Matrix>>());
}

Ffn::Ffn(std::shared_ptr<Workspace> workspace, FfnSpec spec, std::shared_ptr<const DenseNeurons> dense)
    : workspace_(std::move(workspace)), spec_(std::move(spec)), dense_(std::move(dense)) {}

void Ffn::set_bundled(std::shared_ptr<NeuronSum> bundled, std::shared_ptr<const Predictor> predictor,
                      int64_t recall_every) {
  const Bundles& bundles = *bundled->bundles;
  check(bundled->workspace == workspace_, "the neurons are of another workspace than the program");
  check(!dense_ || bundles.up.k == dense_->d_model(), "the bundles have another width than the matrices");
  check(!dense_ || dense_->same_kind(bundles),
        "the bundles are of another kind of FFN, or have other biases or thresholds");
  check(dense_ || !bundles.spec.activation.competes(), "topk and gaussian select by the gates of matrices");
  check(!predictor || !bundles.spec.activation.competes(), "no predictor selects neurons of topk or gaussian");
  check(recall_every >= 0, "an interval is negative");
  check(recall_every == 0 || (dense_ && dense_->is_in_memory()),
        "the recall of a predictor is sampled from matrices in memory");
  check(dense_ || (bundles.firsts && !bundles.slots), "neurons on disk, or without their first rows, have matrices");
  check(!predictor || bundles.firsts, "a predictor selects among whole bundles");
  if (predictor) {
    check(bundles.complete(), "a predictor is for an FFN that has all of its neurons");
    predictor->check_sizes(bundles.up.k, bundles.neurons);
    workspace_->reserve_lists(bundles.neurons, bundles.up.k, predictor->rank());
  }
  const Way way = dense_ ? WAY_DENSE : predictor ? WAY_PREDICTED : WAY_EXACT;
  // What it had before is freed when no job has to wait for that.
  workspace_->pool->between_jobs([&] {
    bundled_.swap(bundled);
    predictor_.swap(predictor);
    std::fill(ways_, ways_ + PI_NEURON_TOKENS + 1, way);
    sampled_.resize((size_t)workspace_->pool->threads());
    recall_every_ = recall_every;
    fired_.clear();
    clear_counts();
  });
}

void Ffn::set_ways(const Way* ways) {
  const auto any = [&](Way way) { return std::find(ways, ways + PI_NEURON_TOKENS, way) != ways + PI_NEURON_TOKENS; };
  workspace_->pool->between_jobs([&] {
    check(!any(WAY_DENSE) || dense_, "that FFN has no matrices");
    check(bundled_ || (!any(WAY_EXACT) && !any(WAY_PREDICTED)), "that FFN has no bundles");
    check(!any(WAY_PREDICTED) || predictor_, "that FFN has no predictor");
    std::copy(ways, ways + PI_NEURON_TOKENS, ways_ + 1);
  });
}

void Ffn::set_dense_above(double share) {
  check(share >= 0 && share <= 1, "a share lies between 0 and 1");
  workspace_->pool->between_jobs([&] { dense_above_ = share; });
}

Ffn::Counts Ffn::counts() const {
  Counts counts;
  workspace_->pool->between_jobs([&] {
    check((bool)bundled_, "that FFN has no bundles");
    counts = {bundled_->stats_of_job(), exact_steps_, recall_};
  });
  return counts;
}

void Ffn::count_fired(bool on) {
  workspace_->pool->between_jobs([&] {
    const size_t places = (size_t)(bundled_ ? bundled_->bundles->neurons : dense_->neurons());
    fired_.assign(on ? places : 0, 0);
    fired_tokens_ = 0;
  });
}

int64_t Ffn::neurons() const { return bundled_ ? (int64_t)bundled_->bundles->members.size() : dense_->neurons(); }

int64_t Ffn::take_fired(int64_t* out) {
  int64_t tokens = 0;
  workspace_->pool->between_jobs([&] {
    check(!fired_.empty(), "firings are not counted");
    if (bundled_)
      for (const int32_t place : bundled_->bundles->members) *out++ = fired_[(size_t)place];
    else std::copy(fired_.begin(), fired_.end(), out);
    std::fill(fired_.begin(), fired_.end(), 0);
    tokens = std::exchange(fired_tokens_, 0);
  });
  return tokens;
}

void Ffn::clear() {
  workspace_->pool->between_jobs([&] { clear_counts(); });
}

void Ffn::clear_counts() {
  if (bundled_) bundled_->clear_counts();
  exact_steps_ = 0;
  recall_ = {};
}

size_t Ffn::wants(const Program& p, const Step& step) const {
  const Way chosen = way(p, step.like());
  if (chosen == WAY_DENSE || (chosen == WAY_EXACT && dense_ && falls_back())) return matrices.size();
  return chosen == WAY_EXACT && dense_ ? 1 : 0;  // the gates; what fires is read as neurons
}

// A program is watched on its matrices.
Way Ffn::way(const Program& p, int64_t tokens) const {
  if (dense_ && (!bundled_ || p.watch || tokens > PI_NEURON_TOKENS)) return WAY_DENSE;
  return tokens > PI_NEURON_TOKENS ? WAY_EXACT : ways_[tokens];
}

void Ffn::foresee(std::shared_ptr<Ffn> after) {
  check(after->workspace_ == workspace_, "the layers are of different programs");
  workspace_->pool->between_jobs([&] { after_ = std::move(after); });
}

bool Ffn::samples(const Program& p, const Step& step) const {
  return recall_every_ && way(p, step.like()) == WAY_PREDICTED && bundled_->stats_of_job().steps % recall_every_ == 0;
}

NeuronSum::Ahead Ffn::ahead(const Program& p, int64_t tokens) const {
  if (!after_ || !after_->bundled_ || after_->way(p, tokens) != WAY_PREDICTED) return {};
  NeuronSum& other = *after_->bundled_;
  if (other.bundles->up.k != bundled_->bundles->up.k || !other.guesses || !other.guesses->worth()) return {};
  return {&other, after_->predictor_.get()};
}

// What was guessed for this layer counts no more.
void Ffn::skip() {
  if (!bundled_ || !bundled_->guesses) return;
  bundled_->guesses->end();
  bundled_->bundles->slots->settle();
}

void Ffn::run(Thread& t, const Step& step) {
  Program& p = *t.program;
  const Way chosen = way(p, step.like());
  const bool alone = step.alone && chosen != WAY_DENSE;
  const int64_t at_once = alone ? 1 : chosen == WAY_DENSE ? step.tokens : (int64_t)PI_NEURON_TOKENS;
  const bool counted = step.tokens <= PI_NEURON_TOKENS;
  if (t.id == 0 && chosen == WAY_EXACT && counted) exact_steps_++;
  int64_t* const fired = counted && !fired_.empty() ? fired_.data() : nullptr;
  if (t.id == 0 && fired) fired_tokens_ += step.tokens;
  if (alone) select_alone(t, step.tokens, chosen);
  for (int64_t first = 0; first < step.tokens; first += at_once) {
    const Rows x = p.residual(first, std::min(step.tokens - first, at_once));
    const Destination to = p.added_to(first, spec_.out_norm, spec_.down_bias, p.up);
    NeuronSum::Piece piece{x, spec_.norm, to, counted, nullptr, nullptr, fired, {}, &p};
    if (chosen == WAY_PREDICTED && !alone) piece.ahead = ahead(p, step.tokens);
    piece.sampled = step.samples(number);
    piece.goes_on = alone && first > 0;
    const int64_t token = alone ? first : -1;
    if (chosen == WAY_DENSE && dense_->cuts()) cut(t, piece);
    else if (chosen == WAY_DENSE)
      dense_->sum(t, p.workspace->prepare(t.id, x, spec_.norm, dense_->forms()), x.tokens, to, fired);
    else if (chosen == WAY_PREDICTED) predicted(t, piece, token);
    else if (dense_) exact(t, piece, step.decided[number], token);
    else bundled_->sum_selected(t.id, piece);
    p.add_normalised(spec_.out_norm, p.up, first, x.tokens);
  }
}

// ---- All neurons, of which each fires by the gates of all -----------------------------------------------------------

void Ffn::cut(Thread& t, const NeuronSum::Piece& piece) {
  Workspace& w = *t.program->workspace;
  const PiActs* acts = w.prepare(t.id, piece.x, spec_.norm, dense_->forms());
  dense_->activate(t, acts, piece.x.tokens, [](const Columns&) {}, [] {});
  if (!w.is_prepared(t.id)) acts = w.prepare(t.id, piece.x, spec_.norm, dense_->forms());
  const auto count_fired = [&](const Columns& part) {
    if (piece.fired) dense_->count_fired(t, part.c0, part.c1, piece.x.tokens, piece.fired);
  };
  dense_->multiply_up(t, acts, piece.x.tokens, 0.0f, count_fired, [] {});
  dense_->finish(t, piece.x.tokens, piece.to);
}

// ---- The neurons that fire ------------------------------------------------------------------------------------------

// Of tokens that have the bits of steps of each alone, in one product what each of them selects by: its gates, or what
// the predictor makes of it. Of neurons on disk a predictor's numbers do not stay.
void Ffn::select_alone(Thread& t, int64_t tokens, Way chosen) const {
  Workspace& w = *t.program->workspace;
  const Rows x = t.program->residual(0, tokens);
  if (chosen == WAY_PREDICTED && !bundled_->bundles->slots) predictor_->score(t.id, w, x);
  if (chosen == WAY_PREDICTED || !dense_) return;
  const PiActs* acts = w.prepare(t.id, x, spec_.norm, dense_->forms());
  dense_->activate(t, acts, tokens, [](const Columns&) {}, [] {});
}

// The gates from the matrices, the rest from bundles, or, where many fire, from the matrices too. Where products have
// thresholds, down is decided on again: few products may be left of many gates. One thread decides for all, of which one
// that is late may see what another step has noted. token: the piece is that token of its step, whose gates are in its
// row; -1: it is the step.
void Ffn::exact(Thread& t, const NeuronSum::Piece& piece, std::atomic<uint64_t>& decided, int64_t token) {
  const int64_t row = std::max(token, (int64_t)0);
  const uint64_t UP_WHOLE = (uint64_t)1 << row, DOWN_WHOLE = UP_WHOLE << PI_NEURON_TOKENS;
  const Program& p = *t.program;
  Workspace& w = *p.workspace;
  NeuronLists& lists = w.lists();
  const int64_t tokens = piece.x.tokens;
  const int forms = dense_->forms() | bundled_->bundles->forms();
  const PiActs* acts = w.prepare(t.id, piece.x, spec_.norm, forms);
  const auto prepare_again = [&] {
    if (!w.is_prepared(t.id)) acts = w.prepare(t.id, piece.x, spec_.norm, forms);
  };
  float* const known = p.gate + row * p.ldh;
  const auto note = [&](int i, const float* rows, float limit) {
    return [&, i, rows, limit](int64_t c0, int64_t n) {
      lists.note(w.kernels, lists.notes[i], c0 / PI_GROUP, rows + c0, p.ldh, tokens, n, {limit});
    };
  };
  const auto note_gates = note(0, known, bundled_->threshold), note_products = note(1, p.gate, 0.0f);
  const NeuronLists::Run all{0, (dense_->neurons() + PI_GROUP - 1) / PI_GROUP};
  const NeuronLists::Noted gates{&lists.notes[0], &all, 1}, products{&lists.notes[1], &all, 1};
  const auto decide = [&](uint64_t what, const NeuronLists::Noted& noted) {
    return [&, what] {
      if (falls_back() && many(noted, tokens)) decided.fetch_or(what, std::memory_order_relaxed);
    };
  };
  const auto is_decided = [&](uint64_t what) { return (decided.load(std::memory_order_relaxed) & what) != 0; };
  const auto count = [&](int64_t active) {
    const int64_t neurons = dense_->neurons();
    if (piece.counted) bundled_->count(piece, gates.cells(), {0, dense_->gated() ? neurons : 0, neurons, 0, active});
  };
  const auto count_fired = [&](int64_t begin, int64_t end) {
    if (piece.fired) dense_->count_fired(t, begin, end, tokens, piece.fired);
  };
  NeuronSum::Piece rest = piece;
  rest.noted = gates;
  if (token < 0)
    dense_->activate(
        t, acts, tokens, [&](const Columns& part) { note_gates(part.c0, part.n()); }, decide(UP_WHOLE, gates));
  else
    w.pool->phase_then(
        dense_->neurons(), PI_GROUP, 0, [&](int64_t begin, int64_t end, float*) { note_gates(begin, end - begin); },
        [](int64_t, int64_t, float*) {}, decide(UP_WHOLE, gates));
  prepare_again();
  const bool up_whole = is_decided(UP_WHOLE);
  if (!up_whole) return bundled_->sum_noted(t.id, rest, acts, known, p.ldh, false);
  if (row > 0) {  // products take the place of gates in the first row
    w.pool->phase(pi_round_up(dense_->neurons(), PI_LANES), PI_LANES,
                  [&](int64_t begin, int64_t end) { std::copy(known + begin, known + end, p.gate + begin); });
    prepare_again();
  }
  const auto use = [&](const Columns& part) {
    note_products(part.c0, part.n());
    if (!dense_->drops_products()) count_fired(part.c0, part.c1);
  };
  dense_->multiply_up(t, acts, tokens, bundled_->threshold, use, [&] {
    if (!dense_->drops_products() || many(products, tokens)) decided.fetch_or(DOWN_WHOLE, std::memory_order_relaxed);
    if (!dense_->drops_products()) count(products.cells());
  });
  if (!is_decided(DOWN_WHOLE)) {
    prepare_again();
    rest.noted = products;
    rest.candidates = gates;
    rest.up_rows = dense_->neurons();
    return bundled_->sum_noted(t.id, rest, acts, p.gate, p.ldh, false, true);
  }
  dense_->finish(t, tokens, piece.to);
  if (!dense_->drops_products()) return;
  w.pool->phase(dense_->neurons(), 1, [&](int64_t begin, int64_t end) {
    count_fired(begin, end);
    if (begin == 0) count(products.cells());
  });
}

// Whether so many neurons fire that reading a whole matrix is faster than reading their rows. With many tokens, each
// must contribute its share: a neuron that fires for few tokens is read, but quick to multiply.
bool Ffn::many(const NeuronLists::Noted& noted, int64_t tokens) const {
  const double least = dense_above_ * (double)dense_->neurons();
  return (double)noted.neurons() > least && 4.0 * (double)noted.cells() > least * (double)tokens;
}

// ---- The neurons that a predictor selects ---------------------------------------------------------------------------

// token: as of `exact`, scored; -1: it is the step.
void Ffn::predicted(Thread& t, const NeuronSum::Piece& piece, int64_t token) {
  Workspace& w = *t.program->workspace;
  const bool scored = token >= 0 && !bundled_->bundles->slots;
  if (scored) predictor_->select_scored(w, token);
  else predictor_->select(t.id, w, piece.x);
  const int forms = bundled_->bundles->forms() | (piece.sampled ? dense_->forms() : 0);
  const PiActs* acts = w.prepare(t.id, piece.x, spec_.norm, forms);
  if (piece.sampled) sample(t, acts, piece.x.tokens, w.lists().z.data() + (scored ? token : 0) * w.lists().ldz);
  const NeuronLists::Run all = predictor_->neurons_noted();
  NeuronSum::Piece candidates = piece;
  candidates.noted = {&w.lists().notes[0], &all, 1};
  bundled_->sum_noted(t.id, candidates, acts, nullptr, 0, true);
}

// How many of the neurons that fire the predictor selected: computes all gates densely. z: of the tokens. Ends with a
// barrier.
void Ffn::sample(Thread& t, const PiActs* acts, int64_t tokens, const float* z) {
  const Program& p = *t.program;
  const NeuronLists& lists = p.workspace->lists();
  const Columns mine = dense_->multiply(t, acts, tokens);
  Recall& own = sampled_[(size_t)t.id];
  own = {};
  for (int64_t i = 0; i < tokens; i++) {
    const float *h = p.gate + i * p.ldh, *z_of = z + i * lists.ldz;
    for (int64_t j = mine.c0; j < mine.c1; j++) {
      own.active += h[j] != 0.0f;
      own.found += h[j] != 0.0f && predictor_->candidate(z_of[j]);
    }
  }
  p.workspace->pool->barrier();
  if (t.id != 0) return;
  recall_.tokens += tokens;
  for (const Recall& one : sampled_) recall_.active += one.active, recall_.found += one.found;
}
