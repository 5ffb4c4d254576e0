#include "experts.h"

#include <math.h>
#include <unistd.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "repack.h"
#include "resting_experts.h"

// ---- Making one -----------------------------------------------------------------------------------------------------

Experts::Experts(FfnSpec spec, RouterSpec router, std::shared_ptr<Matrix> scores, ExpertMatrices all,
                 SharedExpert shared, std::shared_ptr<Workspace> workspace, ApartNorms separate)
    : spec_(std::move(spec)),
      router_{std::move(router), std::move(scores), all.experts},
      shared_(std::move(shared)),
      separate_(std::move(separate)),
      latent_in_(all.latent_in),
      latent_out_(all.latent_out),
      store_(ExpertStore::make(std::move(all), workspace)),
      workspace_(std::move(workspace)) {}

// The neurons of all experts that a predictor selects among.
static int64_t check_among(const ExpertMatrices& all) {
  if (all.among.empty()) return all.experts * all.neurons;
  const int64_t rows = (int64_t)all.among.size(), of_expert = rows / all.experts;
  check(rows == all.experts * of_expert && of_expert % PI_GROUP == 0,
        "a predictor selects among whole groups, as many of each expert");
  for (int64_t row = 0; row < rows; row++) {
    const int32_t neuron = all.among[(size_t)row];
    const int32_t before = row % of_expert ? all.among[(size_t)row - 1] : -1;
    check(neuron > before && neuron < all.neurons, "the neurons that a predictor selects among must ascend");
  }
  return rows;
}

void Program::reserve_experts(const ExpertMatrices& all, int64_t top_k, int64_t shared, int64_t bundled) {
  const int64_t n = all.experts, d = all.latent_in ? all.latent_in->rows : sizes.d_model;
  check(!all.latent_in == !all.latent_out, "latents of experts have a matrix before and one behind");
  if (all.latent_in) {
    check(d <= sizes.d_model && all.latent_in->k == sizes.d_model && all.latent_out->k == d &&
              all.latent_out->rows == sizes.d_model,
          "a matrix of the experts' latents has a wrong shape");
    workspace->reserve(sizes.max_tokens, d);
  }
  const auto stacked = [&](const Matrix& m, int64_t rows) {
    if (all.slots) return !m.data && m.rows == n * rows;
    return m.data && m.panels == n * (pi_round_up(rows, PI_LANES) / PI_LANES) &&
           (m.rows == n * rows || m.rows == m.panels * PI_LANES);
  };
  check(n > 0 && all.neurons > 0, "experts need neurons");
  workspace->reserve(1, all.neurons);
  check(all.bundled || !all.predictor, "a predictor selects among experts as bundles");
  check(all.among.empty() || (all.predictor && !all.slots), "some neurons are selected by a predictor, in memory");
  if (all.bundled) {
    const Bundles& b = *all.bundled->bundles;
    check(all.bundled->workspace == workspace, "the bundles are of another workspace than the program");
    check(all.gate_bias.empty() && all.up_bias.empty() && all.down_bias.empty(), "experts as bundles have no biases");
    check(!all.slots || !b.gated(), "of experts on disk those without gates are bundles");
    check(!all.slots || !all.predictor || !all.recall_every,
          "a sample of recall computes all neurons, and some rest on disk");
    const auto& first = b.gated() ? all.gate : all.up;
    check(!(b.gated() ? all.up : all.gate) && !all.down && !first == !!all.predictor,
          "experts as bundles have a matrix of their first product or a predictor, and no other matrices");
    check(!first || (first->k == d && stacked(*first, all.neurons)), "gate or up of the experts has a wrong shape");
    const int64_t more = b.neurons - n * all.neurons;  // of the shared expert
    check(b.complete() && (more == 0 || more == shared) && b.up.k == d && all.neurons % PI_GROUP == 0,
          "the bundles are of other experts");
    check(more == 0 || (!b.gated() && more % PI_GROUP == 0),
          "a shared expert with gates, or broken groups, is no bundle");
    const bool reads_up = b.gated() || all.predictor;
    check((!reads_up || ((b.up.stride || b.up.lines) && repacked_type(b.up.type) >= 0)) &&
              (!b.gated() || b.gate.type == b.up.type) && repacked_type(b.down.type) >= 0 && b.down.type != PI_Q4_0,
          "bundles of these types cannot be repacked");
    check(b.spec.activation == all.activation && b.spec.limits.empty(), "the bundles have another activation");
    check(all.recall_every >= 0, "an interval is negative");
    if (all.predictor) {
      all.predictor->check_sizes(sizes.d_model, check_among(all) + b.neurons - n * all.neurons + bundled, true);
      check(all.predictor->floor == 0, "a predictor of experts has no floor");
      workspace->reserve_lists(std::max(b.neurons, bundled), sizes.d_model, all.predictor->rank());
    }
    if (all.slots) reserve_resting(all);
    return reserve_expert_rows(n, top_k, all.neurons, b.neurons);
  }
  check(all.up && all.down, "experts need up and down");
  for (const auto& gate : {all.gate, all.up})
    check(!gate || (gate->k == d && stacked(*gate, all.neurons)), "gate or up of the experts has a wrong shape");
  check(all.down->k == all.neurons && stacked(*all.down, d), "down of the experts has a wrong shape");
  const auto check_biases = [&](const std::vector<Vector>& biases, int64_t rows, const char* of) {
    check(biases.empty() || (int64_t)biases.size() == n, "there are not as many biases as experts");
    for (const Vector& bias : biases) check_bias(bias, pi_round_up(rows, PI_LANES), of);
  };
  check(all.gate || all.gate_bias.empty(), "experts without gates have a bias of gate");
  check_biases(all.gate_bias, all.neurons, "an expert's gate");
  check_biases(all.up_bias, all.neurons, "an expert's up");
  check_biases(all.down_bias, d, "an expert's down");
  if (all.slots) reserve_resting(all);
  reserve_expert_rows(n, top_k, all.neurons);
}

void Program::reserve_resting(const ExpertMatrices& all) {
  const Slots& slots = *all.slots;
  check(slots.items() == all.experts, "the slots are of another number of experts");
  size_t part = 0;
  for (const auto& matrix : {all.gate, all.up, all.down}) {
    if (!matrix) continue;
    const int64_t rows_of = matrix->rows / all.experts, excess = packed_excess(matrix->type, rows_of, matrix->k);
    check(part < slots.parts() && slots.part_bytes(part) == rows_of * stored_row_bytes(matrix->type, matrix->k) &&
              slots.before(part) == excess,
          "the slots are of matrices of another size");
    part++;
    workspace->reserve_packed(*matrix, 2 * excess);
  }
  if (all.bundled) {
    const Bundles& b = *all.bundled->bundles;
    const int64_t shared = all.neurons / PI_GROUP * pi_shared_bytes(b.down.type, b.down.k);
    check(slots.parts() == part + 1 + (shared > 0), "the slots have another number of parts than the experts");
    check(
        slots.part_bytes(part) == all.neurons * b.resting_bytes() && (!shared || slots.part_bytes(part + 1) == shared),
        "the slots are of neurons of another size");
    part = slots.parts();
  }
  check(slots.parts() == part, "the slots have another number of matrices than the experts");
}

void Program::reserve_expert_rows(int64_t n, int64_t top_k, int64_t neurons, int64_t bundled) {
  const int64_t groups = (bundled + neurons - 1) / neurons;
  ExpertRows::Sizes all{sizes.max_tokens, n, top_k, neurons, sizes.d_model, bundled, groups};
  if (expert_rows) {
    const auto& had = expert_rows->sizes;
    if (had.experts >= n && had.top_k >= top_k && had.neurons >= neurons && had.bundled >= bundled &&
        had.groups >= groups)
      return;
    all.experts = std::max(n, had.experts);
    all.top_k = std::max(top_k, had.top_k);
    all.neurons = std::max(neurons, had.neurons);
    all.bundled = std::max(bundled, had.bundled);
    all.groups = std::max(groups, had.groups);
  }
  expert_rows = std::make_shared<ExpertRows>(all, workspace->pool->threads());
}

// A shared expert in bundles of its own.
static void check_shared_bundles(const Program& p, const ExpertMatrices& all, const SharedExpert& shared) {
  const NeuronSum& sum = *shared.bundled;
  const Bundles& b = *sum.bundles;
  check(all.bundled && sum.workspace == p.workspace, "bundles of a shared expert are beside those of others");
  check(shared.neurons && shared.neurons->is_in_memory() && !shared.neurons->gated() && shared.neurons->same_kind(b) &&
            b.up.k == p.sizes.d_model && b.neurons % PI_GROUP == 0 && !b.slots && sum.threshold == 0.0f,
        "the bundles of the shared expert are of another one");
  check(!all.predictor || b.up.stride, "a predictor selects among whole bundles");
}

std::shared_ptr<Experts> Program::expert_sum(ExpertMatrices all, RouterSpec router, Norm norm) {
  check(router.top_k > 0, "a token needs experts");
  if (all.slots) check_router(router, all.experts);
  check(!all.latent_in || (norm.w.empty() && !(all.predictor && all.predictor->in)),
        "latents have no norm, and no predictor reads them");
  check_norm(norm, sizes.d_model, "the norm of the experts' input");
  reserve_experts(all, router.top_k);
  all.latent_in = all.latent_out = nullptr;  // the caller multiplies with them
  FfnSpec spec;
  spec.norm = std::move(norm);
  return std::make_shared<Experts>(std::move(spec), std::move(router), nullptr, std::move(all), SharedExpert{},
                                   workspace);
}

std::shared_ptr<Experts> Program::experts(FfnSpec spec, RouterSpec router, std::shared_ptr<Matrix> scores,
                                          ExpertMatrices all, SharedExpert shared, ApartNorms separate) {
  const int64_t n = all.experts, d = sizes.d_model;
  const int64_t of_shared = shared.neurons ? shared.neurons->neurons() : 0;
  check(!all.predictor || all.predictor->in, "the predictor lacks its first matrix");
  check(all.among.empty(), "nobody else computes neurons of these experts");
  reserve_experts(all, router.top_k, of_shared, shared.bundled ? of_shared : 0);
  check(!scores || (scores->rows == n && scores->k == d),
        "the router has another number of rows than there are experts");
  check_router(router, n);
  check(!all.bundled || !shared.neurons || all.bundled->bundles->neurons == n * all.neurons ||
            (shared.neurons->is_in_memory() && !shared.neurons->gated() && !shared.bundled),
        "a shared expert in bundles has matrices, too, and no gates");
  if (shared.bundled) check_shared_bundles(*this, all, shared);
  check_bias(spec.down_bias, d, "down");
  check_bias(shared.gate, shared.neurons ? d : 0, "the shared expert's gate");
  check(!shared.neurons || (shared.neurons->d_model() == d && shared.neurons->neurons() <= sizes.d_ff),
        "the shared expert has a wrong shape");
  check_norm(spec.norm, d, "the FFN norm");
  check_norm(spec.out_norm, d, "the norm of the FFN's output");
  if (separate) {
    check(scores && shared.neurons && shared.gate.empty() && !all.bundled && !all.latent_in && spec.down_bias.empty(),
          "experts apart have a router and a shared one, and are whole");
    for (const Norm* norm : {&separate.router, &separate.shared, &separate.shared_out, &separate.experts_out})
      check_norm(*norm, d, "a norm of experts apart");
  }
  if (shared.neurons) workspace->reserve(1, shared.neurons->neurons());
  spec.down_bias = padded(std::move(spec.down_bias));
  auto matrices = shared.neurons ? shared.neurons->matrices() : std::vector<std::shared_ptr<Matrix>>();
  for (const auto& matrix : matrices)
    if (matrix->source) workspace->reserve_packed(*matrix);
  for (const auto& latents : {all.latent_in, all.latent_out})
    if (latents) matrices.push_back(latents);
  const auto op = std::make_shared<Experts>(std::move(spec), std::move(router), std::move(scores), std::move(all),
                                            std::move(shared), workspace, std::move(separate));
  add(op, std::move(matrices));
  return op;
}

void EarlyRouter::run(Thread& t, const Step& step) {
  Program& p = *t.program;
  ExpertRows& rows = *p.expert_rows;
  const PiActs* acts = p.workspace->prepare(t.id, p.residual(0, step.tokens), {}, router_.scores->form());
  router_.select(t, rows, acts, step.tokens);
  if (!of_) return;
  p.workspace->pool->barrier();
  if (t.id == 0) p.attempt([&] { of_->store().expect(rows.active.data(), (int64_t)rows.active.size()); });
}

void EarlyRouter::foresee(std::shared_ptr<Experts> of) {
  check(of->store().resting() && !of->router().scores && of->store().experts == router_.experts,
        "it does not select these experts");
  of_ = std::move(of);
}

std::shared_ptr<EarlyRouter> Program::early_router(RouterSpec spec, std::shared_ptr<Matrix> scores) {
  const int64_t n = scores->rows;
  check(scores->k == sizes.d_model, "the router has another width than d_model");
  check_router(spec, n);
  reserve_expert_rows(n, spec.top_k, 1);
  return add(std::make_shared<EarlyRouter>(Router{std::move(spec), std::move(scores), n}));
}

// ---- A step ---------------------------------------------------------------------------------------------------------

void Experts::run(Thread& t, const Step& step) {
  if (separate_) return run_apart(t, step.tokens);
  const bool sampled = step.samples(number);
  if (!step.alone || !store_->leaves_out(1)) return run_rows(t, 0, step.tokens, sampled, false);
  ExpertRows& rows = *t.program->expert_rows;
  const auto take_selected = [&](int64_t token) {
    const int64_t k = router_.spec.top_k;
    std::copy_n(rows.selected.begin() + token * k, k, rows.selected.begin());
    std::copy_n(rows.weights.begin() + token * k, k, rows.weights.begin());
    router_.group(rows, 1);
  };
  for (int64_t i = 0; i < step.tokens; i++) {
    if (!router_.scores)  // all of them have selected theirs
      workspace_->pool->phase(1, 1, [&](int64_t, int64_t) { take_selected(i); });
    run_rows(t, i, 1, sampled, true);
  }
}

// Tokens of a step from `first` on. alone: one of several, with the bits of a step of its own.
void Experts::run_rows(Thread& t, int64_t first, int64_t tokens, bool sampled, bool alone) {
  Program& p = *t.program;
  Workspace& w = *p.workspace;
  ExpertRows& rows = *p.expert_rows;
  const bool leaves_out = store_->leaves_out(tokens);
  const Rows x = p.residual(first, tokens);
  const bool early = !alone && guesses(tokens);
  if (early) guess(t, rows, x);
  const int other_forms =
      (router_.scores ? router_.scores->form() : 0) | (shared_.neurons ? shared_.neurons->forms() : 0);
  const int forms = input_forms(tokens), all = forms | other_forms | (shared_.gate.empty() ? 0 : PI_FORM_F32);
  const PiActs* acts = w.prepare(t.id, x, spec_.norm, all);
  const auto prepare_again = [&] {
    if (!w.is_prepared(t.id)) acts = w.prepare(t.id, x, spec_.norm, all);
  };
  if (router_.scores) router_.select(t, rows, acts, tokens);
  if (shared_.neurons && (leaves_out || !shared_.gate.empty())) {
    prepare_again();
    w.pool->phase(tokens, 1, [&](int64_t begin, int64_t end) { weigh_shared(rows, acts, begin, end); });
  }
  if (store_->resting() || early || records_) {
    prepare_again();
    begin(t, tokens, early);
  }
  const bool shared_apart = shared_.neurons && !(leaves_out && store_->has_shared());
  const bool whole_shared = shared_apart && !(leaves_out && shared_.bundled);
  if (records_) w.pool->barrier();  // there is room for what fires
  prepare_again();
  if (whole_shared)
    shared_.neurons->sum(t, acts, tokens, {rows.floats(rows.shared), rows.ldy, false, NO_BIAS}, nullptr);
  if (shared_apart && records_fired_) keep_shared(t, tokens);
  const Destination to = p.added_to(first, spec_.out_norm, spec_.down_bias, p.up);
  prepare_again();
  if (leaves_out) {
    sum_some(t, rows, acts, x, to, forms, sampled);
    if (shared_apart) add_shared(t, rows, tokens, to);
    return p.add_normalised(spec_.out_norm, p.up, first, tokens);
  }
  uint16_t* const fired = records_fired_ ? recorded_.fired.data() : nullptr;
  if (latent_in_) acts = make_latents(t, acts, tokens);
  store_->sum_tokens(t, rows, acts, tokens, fired, [&](const auto& work) { return p.attempt(work); });
  if (latent_in_) {
    merge(t, rows, tokens, {p.gate, p.ldh, false, NO_BIAS});
    add_latents(t, tokens, to);
    if (shared_.neurons) add_shared(t, rows, tokens, to);
  } else {
    merge(t, rows, tokens, to);
  }
  p.add_normalised(spec_.out_norm, p.up, first, tokens);
}

// Once the experts are selected, by all threads: thread 0 begins to read what rests on disk, and keeps the selection.
void Experts::begin(Thread& t, int64_t tokens, bool early) {
  Program& p = *t.program;
  ExpertRows& rows = *p.expert_rows;
  p.workspace->pool->barrier();
  if (t.id != 0) return;
  p.attempt([&] { store_->begin(rows, tokens); });
  rows.ahead = early ? &after_->store() : nullptr;
  if (early) p.attempt([&] { after_->expect_guessed(rows, tokens); });
  if (records_) keep(rows, tokens);
}

// x += out_norm(shared_out(shared expert of shared(x)) + experts_out(experts of norm(x))).
void Experts::run_apart(Thread& t, int64_t tokens) {
  Program& p = *t.program;
  Workspace& w = *p.workspace;
  ExpertRows& rows = *p.expert_rows;
  const Rows x = p.residual(0, tokens);
  const bool early = guesses(tokens);
  if (early) guess(t, rows, x);
  router_.select(t, rows, w.prepare(t.id, x, separate_.router, router_.scores->form()), tokens);
  const PiActs* acts = w.prepare(t.id, x, separate_.shared, shared_.neurons->forms());
  if (store_->resting() || early || records_) begin(t, tokens, early);
  if (records_) w.pool->barrier();  // there is room for what fires
  shared_.neurons->sum(t, acts, tokens, {rows.floats(rows.shared), rows.ldy, false, NO_BIAS}, nullptr);
  if (records_fired_) keep_shared(t, tokens);
  acts = w.prepare(t.id, x, spec_.norm, store_->forms(tokens));
  uint16_t* const fired = records_fired_ ? recorded_.fired.data() : nullptr;
  store_->sum_tokens(t, rows, acts, tokens, fired, [&](const auto& work) { return p.attempt(work); });
  merge(t, rows, tokens, {p.up, p.ldh, false, NO_BIAS});
  w.pool->phase(tokens, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) {
      float *sum = p.up + i * p.ldh, *shared = rows.floats(rows.shared) + i * rows.ldy, *to = p.x + i * p.ldx;
      separate_.experts_out.apply(w.kernels, sum, sum);
      separate_.shared_out.apply(w.kernels, shared, shared);
      for (int64_t j = 0; j < p.sizes.d_model; j++) sum[j] += shared[j];
      spec_.out_norm.apply(w.kernels, sum, sum);
      for (int64_t j = 0; j < p.sizes.d_model; j++) to[j] += sum[j];
    }
  });
}

// What a step that leaves neurons out computes, but that a shared expert in bundles of its own remains in `shared`; ends
// with a barrier or a phase.
void Experts::sum_some(Thread& t, ExpertRows& rows, const PiActs* acts, const Rows& x, const Destination& to, int forms,
                       bool sampled) const {
  const Program& p = *t.program;
  const int64_t tokens = x.tokens, k = router_.spec.top_k;
  const Destination beside{rows.floats(rows.shared), rows.ldy, false, NO_BIAS}, into{p.gate, p.ldh, false, NO_BIAS};
  const auto attempt = [&](const auto& work) { return t.program->attempt(work); };
  const auto piece = [&](const Rows& of, const Norm& norm, const Destination& sum) {
    NeuronSum::Piece piece{of, norm, sum, true};
    piece.sampled = sampled;
    return piece;
  };
  if (shared_.bundled) acts = store_->sum_shared(t, rows, acts, piece(x, spec_.norm, beside), shared_, forms);
  if (!latent_in_) return store_->sum_some(t, rows, acts, x, piece(x, spec_.norm, to), k, shared_, attempt);
  acts = make_latents(t, acts, tokens);
  const Norm none;
  store_->sum_some(t, rows, acts, x, piece(latents(p, tokens), none, into), k, shared_, attempt);
  add_latents(t, tokens, to);
}

// What was read early was for another step.
void Experts::skip() { store_->end(); }

void Experts::foresee(std::shared_ptr<Experts> after, std::shared_ptr<Matrix> router) {
  check(after->store().resting(), "there is nothing on disk that a router could guess");
  const int64_t width = latent_in_ ? latent_in_->k : store_->d_model;
  check(router->rows == after->store().experts && router->k == width, "the router is of other experts");
  workspace_->pool->between_jobs([&] {
    after_ = std::move(after);
    after_router_ = std::move(router);
  });
}

bool Experts::guesses(int64_t tokens) const {
  return after_ && tokens <= ExpertRows::GUESSED && after_->store().foreseeable();
}

// The logits that the next layer's router would have of x.
void Experts::guess(Thread& t, ExpertRows& rows, const Rows& x) const {
  Workspace& w = *t.program->workspace;
  const Norm& norm = after_->separate_ ? after_->separate_.router : after_->spec_.norm;
  const PiActs* acts = w.prepare(t.id, x, norm, after_router_->form());
  w.finish_product(t.id, *after_router_, acts, x.tokens, {rows.guessed.data(), rows.ldl, false, NO_BIAS});
}

void Experts::expect_guessed(ExpertRows& rows, int64_t tokens) {
  const int64_t k = router_.spec.top_k;
  std::vector<float> scores((size_t)router_.experts), weights((size_t)k);
  std::vector<int32_t> selected((size_t)k), best;
  std::vector<std::pair<float, int32_t>> ranked((size_t)k);
  for (int64_t i = 0; i < tokens; i++) {
    route(router_.spec, rows.guessed.data() + i * rows.ldl, router_.experts, scores.data(), selected.data(),
          weights.data());
    for (size_t j = 0; j < ranked.size(); j++) ranked[j] = {-weights[j], selected[j]};
    std::sort(ranked.begin(), ranked.end());
    ranked.resize((size_t)(k - k / 4));  // of the lightest ones every third guess is wrong
    for (const auto& guess : ranked) best.push_back(guess.second);
    ranked.resize((size_t)k);
  }
  store_->expect(best.data(), (int64_t)best.size());
}

bool Experts::sum(Program& program, const float* x, int64_t tokens, const int32_t* selected, const float* weights,
                  float* out, const float* hidden) {
  const auto prepare = [&] { order_rows(*program.expert_rows, tokens, selected, weights); };
  if (std::all_of(selected, selected + tokens * router_.spec.top_k, [](int32_t e) { return e < 0; })) {
    std::fill(out, out + tokens * store_->d_model, 0.0f);
    if (store_->resting()) workspace_->pool->between_jobs(prepare);  // none of those that were expected was needed
    return false;
  }
  sum_rows(program, x, tokens, out, hidden, prepare);
  return true;
}

void Experts::order(Program& program, int64_t tokens, const int32_t* selected, const float* weights) {
  workspace_->pool->between_jobs([&] {
    ExpertRows& rows = *program.expert_rows;
    order_rows(rows, tokens, selected, weights);
    rows.ordered = this;
    rows.ordered_tokens = tokens;
    rows.fetched = 0;
  });
}

bool Experts::sum_ordered(Program& program, const float* x, int64_t tokens, float* out, const float* hidden) {
  ExpertRows& rows = *program.expert_rows;
  check(rows.ordered == this && rows.ordered_tokens == tokens, "the rows of these experts are not ordered");
  rows.ordered = nullptr;
  if (rows.active.empty()) {
    std::fill(out, out + tokens * store_->d_model, 0.0f);
    return false;
  }
  sum_rows(program, x, tokens, out, hidden, [] {});
  return true;
}

void Experts::order_rows(ExpertRows& rows, int64_t tokens, const int32_t* selected, const float* weights) {
  const int64_t n = tokens * router_.spec.top_k;
  std::copy(selected, selected + n, rows.selected.begin());
  std::copy(weights, weights + n, rows.weights.begin());
  router_.group(rows, tokens);
  store_->begin(rows, tokens);
}

namespace {

constexpr int64_t FETCHED = 256 << 10;  // bytes of a call for each thread: some ten microseconds

// Bytes that a core may hold of weights: half of its own second cache and of its share of the third one.
int64_t cached_bytes(int threads) {
  const int64_t second = sysconf(_SC_LEVEL2_CACHE_SIZE), third = sysconf(_SC_LEVEL3_CACHE_SIZE);  // 0 or -1: not known
  return (std::max<int64_t>(second, 2 * FETCHED) + std::max<int64_t>(third, 0) / threads) / 2;
}

}  // namespace

bool Experts::fetch(Program& program) {
  ExpertRows& rows = *program.expert_rows;
  check(rows.ordered == this, "the rows of these experts are not ordered");
  const int64_t most = cached_bytes(workspace_->pool->threads()), last = std::min(rows.fetched + FETCHED, most);
  const bool more = rows.fetched < last && store_->fetch(rows, last);
  rows.fetched = last;
  return more && last < most;
}

template <class P>
void Experts::sum_rows(Program& program, const float* x, int64_t tokens, float* out, const float* hidden, P prepare) {
  const int64_t width = store_->hidden_width();
  check(hidden || !width || !store_->leaves_out(tokens), "what the predictor reads is missing");
  Workspace& w = *program.workspace;
  ExpertRows& rows = *program.expert_rows;
  const int64_t d_model = store_->d_model;
  Failure failure;  // what follows is void, but must be computed
  bool sampled = false;
  const auto job = [&](int thread) {
    Thread t{thread, &program, {}};
    const Rows in{x, d_model, d_model, tokens};
    const Destination to{out, d_model, false, NO_BIAS};
    if (guesses(tokens)) {
      guess(t, rows, in);
      if (thread == 0) failure.attempt([&] { after_->expect_guessed(rows, tokens); });
    }
    if (thread == 0) rows.ahead = nullptr;
    const PiActs* acts = w.prepare(thread, in, spec_.norm, store_->forms(tokens));
    const auto attempt = [&](const auto& work) { return failure.attempt(work); };
    if (store_->leaves_out(tokens)) {
      const Rows read = width ? Rows{hidden, width, width, tokens} : in;
      NeuronSum::Piece piece{in, spec_.norm, to, true};
      piece.sampled = sampled;
      return store_->sum_some(t, rows, acts, read, piece, router_.spec.top_k, shared_, attempt);
    }
    store_->sum_tokens(t, rows, acts, tokens, nullptr, attempt);
    merge(t, rows, tokens, to);
  };
  const auto prepare_all = [&] {
    prepare();
    sampled = store_->samples(tokens);
  };
  w.pool->run(prepare_all, job);
  if (failure.what.empty()) return;
  store_->end();
  throw ReadError(failure.what);
}

void Experts::record(bool on, bool fired) {
  workspace_->pool->between_jobs([&] {
    records_ = on;
    records_fired_ = on && fired;
    recorded_ = {};
  });
}

Experts::Selected Experts::recorded() const {
  Selected copy;
  workspace_->pool->between_jobs([&] { copy = recorded_; });
  return copy;
}

void Experts::keep(const ExpertRows& rows, int64_t tokens) {
  const int64_t n = tokens * router_.spec.top_k;
  recorded_.experts.assign(rows.selected.begin(), rows.selected.begin() + n);
  recorded_.damaged =
      std::any_of(rows.weights.begin(), rows.weights.begin() + n, [](float weight) { return !isfinite(weight); });
  if (!records_fired_) return;
  recorded_.rows.assign(rows.row_of.begin(), rows.row_of.begin() + n);
  recorded_.fired.assign((size_t)(n * store_->up_panels()), 0);
  if (shared_.neurons) recorded_.shared.assign((size_t)(tokens * shared_panels()), 0);
}

// Which neurons of the shared expert fired, whose h the program still has: of this thread's share of the tokens.
void Experts::keep_shared(const Thread& t, int64_t tokens) {
  const Program& p = *t.program;
  const int64_t panels = shared_panels();
  int64_t begin, end;
  share(tokens, 1, p.workspace->pool->threads(), t.id, &begin, &end);
  for (int64_t i = begin; i < end; i++)
    p.workspace->kernels->neurons.fires(p.gate + i * p.ldh, panels * PI_LANES, 0.0f,
                                        recorded_.shared.data() + i * panels);
}

// The weight of the shared expert for tokens [begin, end).
void Experts::weigh_shared(ExpertRows& rows, const PiActs* acts, int64_t begin, int64_t end) const {
  for (int64_t i = begin; i < end; i++) {
    rows.shared_weights[(size_t)i] = 1;
    if (shared_.gate.empty()) continue;
    const float* x = acts->f + i * acts->ldf;
    float sums[PI_LANES] = {0};  // of every sixteenth product, so that the compiler can use vectors
    for (size_t c = 0; c < shared_.gate.size(); c++) sums[c % PI_LANES] += x[c] * shared_.gate[c];
    rows.shared_weights[(size_t)i] = sigmoid(std::accumulate(sums, sums + PI_LANES, 0.0f));
  }
}

ExpertStore::Counts Experts::counts() const {
  ExpertStore::Counts counts;
  workspace_->pool->between_jobs([&] { counts = store_->counts(); });
  return counts;
}

void Experts::clear() {
  workspace_->pool->between_jobs([&] {
    store_->clear();
    if (shared_.bundled) shared_.bundled->clear_counts();
  });
}

void Experts::set_whole(bool on) {
  workspace_->pool->between_jobs([&] { store_->set_whole(on); });
}

namespace {

// Calls add(c0, c1, out, ld) for columns of rows that begin as those of `to`, or as zeros where not `add`, in a phase.
template <class F>
void phase_of_columns(Pool& pool, int64_t columns, int64_t tokens, const Destination& to, bool add, const F& work) {
  pool.phase(
      columns, PI_LANES, tokens,
      [&](int64_t c0, int64_t c1, float* aside) {
        const int64_t n = c1 - c0, ld = aside ? n : to.ld;
        float* const out = aside ? aside - c0 : to.out;
        if (aside && add) copy_rows(to.out + c0, to.ld, aside, n, n, tokens);
        for (int64_t i = 0; i < tokens && !add; i++) std::fill(out + i * ld + c0, out + i * ld + c1, 0.0f);
        work(c0, c1, out, ld);
      },
      [&](int64_t c0, int64_t c1, const float* aside) {
        if (aside) copy_rows(aside, c1 - c0, to.out + c0, to.ld, c1 - c0, tokens);
      });
}

}  // namespace

// Adds the shared expert's output, which is in `shared`, to that of the others, in a phase.
void Experts::add_shared(Thread& t, const ExpertRows& rows, int64_t tokens, const Destination& to) const {
  const auto add = [&](int64_t c0, int64_t c1, float* out, int64_t ld) {
    for (int64_t i = 0; i < tokens; i++, out += ld) {
      const float *row = rows.floats(rows.shared) + i * rows.ldy, weight = shared_weight(rows, i);
      for (int64_t c = c0; c < c1; c++) out[c] += weight * row[c];
    }
  };
  phase_of_columns(*workspace_->pool, t.program->sizes.d_model, tokens, to, true, add);
}

// Each token's sum: the shared expert, then its own experts in ascending order. In a phase.
void Experts::merge(Thread& t, const ExpertRows& rows, int64_t tokens, const Destination& to) const {
  const int64_t k = router_.spec.top_k;
  const auto add = [&](int64_t c0, int64_t c1, float* out, int64_t ld) {
    for (int64_t i = 0; i < tokens; i++, out += ld) {
      if (!to.bias.empty())
        for (int64_t c = c0; c < c1; c++) out[c] += to.bias[(size_t)c];
      if (shared_.neurons && !latent_in_ && !separate_) {
        const float *row = rows.floats(rows.shared) + i * rows.ldy, weight = shared_weight(rows, i);
        for (int64_t c = c0; c < c1; c++) out[c] += weight * row[c];
      }
      for (int64_t j = i * k; j < (i + 1) * k; j++) {
        if (rows.row_of[(size_t)j] < 0) continue;
        const float* row = rows.floats(rows.out) + rows.row_of[(size_t)j] * rows.ldy;
        for (int64_t c = c0; c < c1; c++) out[c] += row[c];
      }
    }
  };
  phase_of_columns(*t.program->workspace->pool, store_->d_model, tokens, to, to.add, add);
}

// ---- Latents --------------------------------------------------------------------------------------------------------

const PiActs* Experts::make_latents(Thread& t, const PiActs* acts, int64_t tokens) const {
  Program& p = *t.program;
  Workspace& w = *p.workspace;
  if (records_fired_) w.pool->barrier();  // the shared expert's neurons lie where the latents go
  w.finish_product(t.id, *latent_in_, acts, tokens, {p.gate, p.ldh, false, NO_BIAS});
  return w.prepare(t.id, latents(p, tokens), {}, store_->forms(tokens));
}

void Experts::add_latents(Thread& t, int64_t tokens, const Destination& to) const {
  const Program& p = *t.program;
  Workspace& w = *p.workspace;
  const PiActs* acts = w.prepare(t.id, latents(p, tokens), {}, latent_out_->form());
  w.finish_product(t.id, *latent_out_, acts, tokens, to);
}
