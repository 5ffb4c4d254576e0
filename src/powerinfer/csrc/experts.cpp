#include "experts.h"

#include <math.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <utility>

#include "repack.h"

// ---- The router -----------------------------------------------------------------------------------------------------

namespace {

constexpr float NEVER = -INFINITY;
const Vector NONE;  // no bias

// The index of the largest of x; 0 where none is a number above -infinity.
int64_t largest(const float* x, int64_t n) {
  int64_t best = 0;
  float most = NEVER;
  for (int64_t i = 0; i < n; i++)
    if (x[i] > most) most = x[i], best = i;
  return best;
}

void softmax(float* x, int64_t n) {
  const float most = x[largest(x, n)];
  float sum = 0;
  for (int64_t i = 0; i < n; i++) sum += x[i] = expf(x[i] - most);
  for (int64_t i = 0; i < n; i++) x[i] /= sum;
}

float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// The sum of the `best` largest of x.
float sum_of_best(const float* x, int64_t n, int64_t best) {
  std::vector<float> sorted(x, x + n);
  for (float& one : sorted)
    if (!(one > NEVER)) one = NEVER;  // NaN has no order
  std::partial_sort(sorted.begin(), sorted.begin() + best, sorted.end(), std::greater<float>());
  return std::accumulate(sorted.begin(), sorted.begin() + best, 0.0f);
}

// Leaves the experts of the best groups; the others can no longer be selected.
void keep_groups(const RouterSpec& spec, float* scores, int64_t experts) {
  const int64_t each = experts / spec.groups;
  std::vector<float> of((size_t)spec.groups);
  std::vector<bool> kept((size_t)spec.groups);
  for (int64_t g = 0; g < spec.groups; g++) of[(size_t)g] = sum_of_best(scores + g * each, each, spec.group_best);
  for (int64_t i = 0; i < spec.top_groups; i++) {
    const int64_t g = largest(of.data(), spec.groups);
    kept[(size_t)g] = true;
    of[(size_t)g] = NEVER;
  }
  for (int64_t g = 0; g < spec.groups; g++)
    if (!kept[(size_t)g]) std::fill(scores + g * each, scores + (g + 1) * each, NEVER);
}

// The `top_k` largest scores, ascending by index. Where too few are numbers, the first of the rest.
void select_best(float* scores, int64_t experts, int64_t top_k, int32_t* selected) {
  for (int64_t i = 0; i < top_k; i++) {
    const int64_t best = largest(scores, experts);
    selected[i] = (int32_t)best;
    if (!(scores[best] > NEVER)) {
      for (int32_t e = 0; i < top_k; e++)
        if (std::find(selected, selected + i, e) == selected + i) selected[i++] = e;
      break;
    }
    scores[best] = NEVER;
  }
  std::sort(selected, selected + top_k);
}

}  // namespace

void check_router(const RouterSpec& router, int64_t n) {
  check(router.top_k > 0 && router.top_k <= n, "a token cannot have more experts than there are");
  check(router.groups > 0 && n % router.groups == 0, "experts cannot be divided into groups evenly");
  const int64_t each = n / router.groups;
  check(router.top_groups > 0 && router.top_groups <= router.groups && router.top_groups * each >= router.top_k,
        "the best groups have too few experts");
  check(router.group_best > 0 && router.group_best <= each, "a group has too few experts for its score");
  check_bias(router.correction, n, "the router's scores");
  check_bias(router.bias, n, "the router");
}

void route(const RouterSpec& spec, float* logits, int64_t experts, float* scratch, int32_t* selected, float* weights) {
  for (size_t i = 0; i < spec.bias.size(); i++) logits[i] += spec.bias[i];
  if (spec.sigmoid) std::transform(logits, logits + experts, logits, sigmoid);
  else softmax(logits, experts);
  std::copy(logits, logits + experts, scratch);
  for (size_t i = 0; i < spec.correction.size(); i++) scratch[i] += spec.correction[i];
  if (spec.groups > 1) keep_groups(spec, scratch, experts);
  select_best(scratch, experts, spec.top_k, selected);
  float sum = 0;
  for (int64_t i = 0; i < spec.top_k; i++) sum += weights[i] = logits[selected[i]];
  const float factor = spec.normalise ? spec.scale / (sum + 1e-20f) : spec.scale;
  for (int64_t i = 0; i < spec.top_k; i++) weights[i] *= factor;
}

// ---- Making one -----------------------------------------------------------------------------------------------------

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
      of_shared((size_t)s.tokens),
      begin((size_t)s.experts + 1),
      cost((size_t)s.experts + 1),
      known(PI_NEURON_TOKENS * s.bundled * 4),
      of_expert((size_t)(s.bundled ? PI_NEURON_TOKENS * s.experts : 0)),
      guessed((size_t)(GUESSED * ldl)),
      panels(s.bundled ? s.threads * panel_bytes(s) : 0) {
  active.reserve((size_t)s.experts);
}

void ExpertRows::compute(const std::vector<int32_t>& experts) {
  active = experts;
  for (size_t i = 0; i < active.size(); i++) {
    const size_t e = (size_t)active[i];
    cost[i + 1] = cost[i] + begin[e + 1] - begin[e] + 2;  // a row each, and to read the weights and to widen them
  }
}

namespace {

// As of matrices that `Experts::product` makes of bundles, a few panels at a time.
std::vector<Matrix> repacked(int row_type, int64_t experts, int64_t rows, int64_t k) {
  return std::vector<Matrix>(
      (size_t)experts, {repacked_type(row_type), rows, k, pi_round_up(rows, PI_LANES) / PI_LANES, nullptr, nullptr});
}

// Of each expert the matrix that `all` has of all of them, one below the other.
std::vector<Matrix> of_each(const ExpertMatrices& about, const Matrix& all, int64_t rows) {
  if (!about.slots) return cut(all, about.experts, rows);
  const OnDisk disk{0, 0, rows * stored_row_bytes(all.type, all.k), rows, {}};
  const int64_t panels = pi_round_up(rows, PI_LANES) / PI_LANES;
  return std::vector<Matrix>((size_t)about.experts,
                             {all.type, rows, all.k, panels, nullptr, nullptr, std::make_shared<OnDisk>(disk)});
}

std::unique_ptr<RestingExperts> make_resting(std::shared_ptr<Slots> slots, std::vector<Matrix>& gate,
                                             std::vector<Matrix>& up, std::vector<Matrix>& down) {
  if (!slots) return nullptr;
  std::vector<std::vector<Matrix>*> parts{&up, &down};
  if (!gate.empty()) parts.insert(parts.begin(), &gate);
  return std::make_unique<RestingExperts>(std::move(slots), parts);
}

}  // namespace

Experts::Experts(FfnSpec spec, RouterSpec router, std::shared_ptr<Matrix> scores, ExpertMatrices all,
                 SharedExpert shared, std::shared_ptr<Workspace> workspace)
    : spec_(std::move(spec)),
      router_{std::move(router), std::move(scores), all.experts},
      shared_(std::move(shared)),
      n_(all.experts),
      neurons_(all.neurons),
      d_model_(all.bundled ? all.bundled->bundles->up.k : all.up->k),
      more_(all.bundled ? all.bundled->bundles->neurons - n_ * neurons_ : 0),
      activation_(all.activation),
      bundled_(all.bundled),
      gate_(all.gate                                 ? of_each(all, *all.gate, neurons_)
            : bundled_ && bundled_->bundles->gated() ? repacked(bundled_->bundles->gate.type, n_, neurons_, d_model_)
                                                     : std::vector<Matrix>()),
      up_(all.up ? of_each(all, *all.up, neurons_) : repacked(bundled_->bundles->up.type, n_, neurons_, d_model_)),
      down_(bundled_ ? repacked(bundled_->bundles->down.type, n_, d_model_, neurons_)
                     : of_each(all, *all.down, d_model_)),
      gate_bias_(std::move(all.gate_bias)),
      up_bias_(std::move(all.up_bias)),
      down_bias_(std::move(all.down_bias)),
      resting_(make_resting(all.slots, gate_, up_, down_)),
      workspace_(std::move(workspace)),
      predictor_(std::move(all.predictor)),
      out_(predictor_ ? cut(*predictor_->out, n_, neurons_) : std::vector<Matrix>()),
      recall_every_(all.recall_every),
      sampled_((size_t)workspace_->pool->threads()) {}

void Program::reserve_experts(const ExpertMatrices& all, int64_t top_k, int64_t shared) {
  const int64_t n = all.experts, d = sizes.d_model;
  const auto stacked = [&](const Matrix& m, int64_t rows) {
    if (all.slots) return !m.data && m.rows == n * rows;
    return m.data && m.panels == n * (pi_round_up(rows, PI_LANES) / PI_LANES) &&
           (m.rows == n * rows || m.rows == m.panels * PI_LANES);
  };
  check(n > 0 && all.neurons > 0, "experts need neurons");
  workspace->reserve(1, all.neurons);
  check(all.bundled || !all.predictor, "a predictor selects among experts as bundles");
  check(!all.bundled || !all.slots, "experts as bundles are in memory");
  if (all.bundled) {
    const Bundles& b = *all.bundled->bundles;
    check(all.bundled->workspace == workspace, "the bundles are of another workspace than the program");
    check(all.gate_bias.empty() && all.up_bias.empty() && all.down_bias.empty(), "experts as bundles have no biases");
    const auto& first = b.gated() ? all.gate : all.up;
    check(!(b.gated() ? all.up : all.gate) && !all.down && !first == !!all.predictor,
          "experts as bundles have a matrix of their first product or a predictor, and no other matrices");
    check(!first || (first->k == d && stacked(*first, all.neurons)), "gate or up of the experts has a wrong shape");
    const int64_t more = b.neurons - n * all.neurons;  // of the shared expert
    check(b.complete() && (more == 0 || more == shared) && b.up.k == d && all.neurons % PI_GROUP == 0,
          "the bundles are of other experts");
    check(more == 0 || (!b.gated() && !all.predictor), "a shared expert with gates, or a predictor, is no bundle");
    const bool reads_up = b.gated() || all.predictor;
    check((!reads_up || (b.up.stride && repacked_type(b.up.type) >= 0)) && (!b.gated() || b.gate.type == b.up.type) &&
              repacked_type(b.down.type) >= 0 && b.down.type != PI_Q4_0,
          "bundles of these types cannot be repacked");
    check(b.spec.activation == all.activation && b.spec.limits.empty(), "the bundles have another activation");
    check(all.recall_every >= 0, "an interval is negative");
    if (all.predictor) {
      all.predictor->check_sizes(d, b.neurons);
      check(all.predictor->floor == 0, "a predictor of experts has no floor");
      workspace->reserve_lists(b.neurons, d, all.predictor->rank());
    }
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
  check(all.slots->items() == all.experts, "the slots are of another number of experts");
  check(all.slots->parts() == (all.gate ? 3 : 2), "the slots have another number of matrices than the experts");
  size_t part = 0;
  for (const auto& one : {all.gate, all.up, all.down}) {
    if (!one) continue;
    const int64_t rows_of = one->rows / all.experts, excess = packed_excess(one->type, rows_of, one->k);
    check(all.slots->part_bytes(part) == rows_of * stored_row_bytes(one->type, one->k) &&
              all.slots->before(part) == excess,
          "the slots are of matrices of another size");
    part++;
    workspace->reserve_packed(*one, 2 * excess);
  }
}

void Program::reserve_expert_rows(int64_t n, int64_t top_k, int64_t neurons, int64_t bundled) {
  ExpertRows::Sizes all{sizes.max_tokens, n, top_k, neurons, sizes.d_model, bundled, workspace->pool->threads()};
  if (expert_rows) {
    const auto& had = expert_rows->sizes;
    if (had.experts >= n && had.top_k >= top_k && had.neurons >= neurons && had.bundled >= bundled) return;
    all.experts = std::max(n, had.experts);
    all.top_k = std::max(top_k, had.top_k);
    all.neurons = std::max(neurons, had.neurons);
    all.bundled = std::max(bundled, had.bundled);
  }
  expert_rows = std::make_shared<ExpertRows>(all);
}

std::shared_ptr<Experts> Program::expert_sum(ExpertMatrices all, RouterSpec router) {
  check(router.top_k > 0, "a token needs experts");
  if (all.slots) check_router(router, all.experts);
  check(!all.predictor, "predictors are for experts that a program's router selects");
  reserve_experts(all, router.top_k);
  return std::make_shared<Experts>(FfnSpec{}, std::move(router), nullptr, std::move(all), SharedExpert{}, workspace);
}

std::shared_ptr<Experts> Program::experts(FfnSpec spec, RouterSpec router, std::shared_ptr<Matrix> scores,
                                          ExpertMatrices all, SharedExpert shared) {
  const int64_t n = all.experts, d = sizes.d_model;
  reserve_experts(all, router.top_k, shared.neurons ? shared.neurons->neurons() : 0);
  check(!scores || (scores->rows == n && scores->k == d),
        "the router has another number of rows than there are experts");
  check_router(router, n);
  check(!all.bundled || !shared.neurons || all.bundled->bundles->neurons == n * all.neurons ||
            (shared.neurons->in_memory() && !shared.neurons->gated()),
        "a shared expert in bundles has matrices, too, and no gates");
  check_bias(spec.down_bias, d, "down");
  check_bias(shared.gate, shared.neurons ? d : 0, "the shared expert's gate");
  check(!shared.neurons || (shared.neurons->d_model() == d && shared.neurons->neurons() <= sizes.d_ff),
        "the shared expert has a wrong shape");
  check_norm(spec.norm, d, "the FFN norm");
  check_norm(spec.out_norm, d, "the norm of the FFN's output");
  if (shared.neurons) workspace->reserve(1, shared.neurons->neurons());
  spec.down_bias = padded(std::move(spec.down_bias));
  auto matrices = shared.neurons ? shared.neurons->matrices() : std::vector<std::shared_ptr<Matrix>>();
  const auto op = std::make_shared<Experts>(std::move(spec), std::move(router), std::move(scores), std::move(all),
                                            std::move(shared), workspace);
  add(op, std::move(matrices));
  return op;
}

void EarlyRouter::run(Thread& t, const Step& step) {
  Program& p = *t.program;
  ExpertRows& rows = *p.expert_rows;
  const PiActs* acts = p.workspace->prepare(t.id, p.residual(0, step.tokens), {}, router_.scores->form());
  router_.select(t, rows, acts, step.tokens);
  if (of_ && t.id == 0) p.attempt([&] { of_->resting_->expect(rows.active.data(), (int64_t)rows.active.size()); });
}

void EarlyRouter::foresee(std::shared_ptr<Experts> of) {
  check(of->resting_ && !of->router_.scores && of->experts() == router_.experts, "it does not select these experts");
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
  Program& p = *t.program;
  Workspace& w = *p.workspace;
  ExpertRows& rows = *p.expert_rows;
  const int64_t tokens = step.tokens;
  const bool some = bundled_ && !whole_ && tokens <= PI_NEURON_TOKENS;
  const int own = some && predictor_ ? 0 : (gate_.empty() ? 0 : gate_[0].form()) | up_[0].form();
  const Rows x = p.residual(0, tokens);
  const bool early = guesses(tokens);
  if (early) guess(t, rows, x);
  const int others = (router_.scores ? router_.scores->form() : 0) | (shared_.neurons ? shared_.neurons->forms() : 0);
  const PiActs* acts = w.prepare(t.id, x, spec_.norm, own | others | (shared_.gate.empty() ? 0 : PI_FORM_F32));
  if (router_.scores) router_.select(t, rows, acts, tokens);
  if (t.id == 0 && resting_) p.attempt([&] { resting_->begin(rows); });
  if (t.id == 0 && early) p.attempt([&] { after_->expect_guessed(rows, tokens); });
  if (t.id == 0 && records_) keep(rows, tokens);
  weigh_shared(t, rows, acts, tokens);
  if (records_fired_) w.pool->barrier();  // there is room for what fires
  if (shared_.neurons && !(some && more_))
    shared_.neurons->sum(t, acts, tokens, {rows.floats(rows.shared), rows.ldy, false, NONE}, nullptr);
  if (some) {
    const Destination to = p.added_to(0, spec_.out_norm, spec_.down_bias, p.up);
    if (predictor_) sum_predicted(t, rows, x, to);
    else sum_firing(t, rows, acts, {x, spec_.norm, to, true});
    if (shared_.neurons && !more_) add_shared(t, rows, tokens, to);
    return p.add_normalised(t, spec_.out_norm, p.up, 0, tokens);
  }
  const PiActs in = tokens == 1 ? *acts : gather(t, rows, acts);
  multiply_all(t, rows, in, tokens == 1, [&] { return p.attempt([&] { resting_->next(rows); }); });
  merge(t, rows, tokens, p.added_to(0, spec_.out_norm, spec_.down_bias, p.up));
  w.pool->barrier();
  p.add_normalised(t, spec_.out_norm, p.up, 0, tokens);
}

// What was read early was for another step.
void Experts::skip() {
  if (resting_) resting_->end();
}

// The outputs of all rows; ends with a barrier. Experts on disk some after others, those first that are in memory. A row
// has the same bits whichever are computed with it. next: makes the next ones `active`, by thread 0; false if it fails.
template <class F>
void Experts::multiply_all(Thread& t, ExpertRows& rows, const PiActs& acts, bool one, F next) {
  Workspace& w = *t.program->workspace;
  for (;;) {
    if (resting_) {
      if (t.id == 0 && !next()) rows.compute({});
      w.pool->barrier();
      if (rows.active.empty()) return;
    }
    const bool settles = resting_ && resting_->settles();
    multiply(t, rows, acts, one, true);
    w.pool->barrier();
    if (settles) w.settle(t.id);
    add_down(t, rows);
    w.pool->barrier();
    if (!resting_) return;
    if (!settles) continue;
    w.settle(t.id);
    w.pool->barrier();
  }
}

void Experts::foresee(std::shared_ptr<Experts> after, std::shared_ptr<Matrix> router) {
  check((bool)after->resting_, "there is nothing on disk that a router could guess");
  check(router->rows == after->experts() && router->k == d_model_, "the router is of other experts");
  workspace_->pool->between_jobs([&] {
    after_ = std::move(after);
    after_router_ = std::move(router);
  });
}

bool Experts::guesses(int64_t tokens) const {
  return after_ && tokens <= ExpertRows::GUESSED && after_->resting_->foreseeable();
}

// The logits that the next layer's router would have of x.
void Experts::guess(Thread& t, ExpertRows& rows, const Rows& x) const {
  Workspace& w = *t.program->workspace;
  const PiActs* acts = w.prepare(t.id, x, after_->spec_.norm, after_router_->form());
  w.product(t.id, *after_router_, acts, x.tokens, {rows.guessed.data(), rows.ldl, false, NONE});
  if (x.tokens > 1) w.pool->barrier();  // what is prepared next may be in the same memory
}

void Experts::expect_guessed(ExpertRows& rows, int64_t tokens) {
  const int64_t k = router_.spec.top_k;
  std::vector<float> scores((size_t)n_), weights((size_t)k);
  std::vector<int32_t> selected((size_t)k), best;
  std::vector<std::pair<float, int32_t>> ranked((size_t)k);
  for (int64_t i = 0; i < tokens; i++) {
    route(router_.spec, rows.guessed.data() + i * rows.ldl, n_, scores.data(), selected.data(), weights.data());
    for (size_t j = 0; j < ranked.size(); j++) ranked[j] = {-weights[j], selected[j]};
    std::sort(ranked.begin(), ranked.end());
    ranked.resize((size_t)(k - k / 4));  // of the lightest ones every third guess is wrong
    for (const auto& one : ranked) best.push_back(one.second);
    ranked.resize((size_t)k);
  }
  resting_->expect(best.data(), (int64_t)best.size());
}

bool Experts::sum(Program& program, const float* x, int64_t tokens, const int32_t* selected, const float* weights,
                  float* out) {
  const int64_t n = tokens * router_.spec.top_k;
  const auto prepare = [&] {
    order_rows(*program.expert_rows, tokens, selected, weights);
    if (resting_) resting_->begin(*program.expert_rows);
  };
  if (std::all_of(selected, selected + n, [](int32_t e) { return e < 0; })) {
    std::fill(out, out + tokens * d_model_, 0.0f);
    if (resting_) workspace_->pool->between_jobs(prepare);  // none of those that were expected was needed
    return false;
  }
  sum_rows(program, x, tokens, out, prepare);
  return true;
}

void Experts::order(Program& program, int64_t tokens, const int32_t* selected, const float* weights) {
  workspace_->pool->between_jobs([&] {
    ExpertRows& rows = *program.expert_rows;
    order_rows(rows, tokens, selected, weights);
    if (resting_) resting_->begin(rows);
    rows.ordered = this;
    rows.ordered_tokens = tokens;
    rows.fetched = 0;
  });
}

bool Experts::sum_ordered(Program& program, const float* x, int64_t tokens, float* out) {
  ExpertRows& rows = *program.expert_rows;
  check(rows.ordered == this && rows.ordered_tokens == tokens, "the rows of these experts are not ordered");
  rows.ordered = nullptr;
  if (rows.active.empty()) {
    std::fill(out, out + tokens * d_model_, 0.0f);
    return false;
  }
  sum_rows(program, x, tokens, out, [] {});
  return true;
}

void Experts::order_rows(ExpertRows& rows, int64_t tokens, const int32_t* selected, const float* weights) const {
  const int64_t n = tokens * router_.spec.top_k;
  std::copy(selected, selected + n, rows.selected.begin());
  std::copy(weights, weights + n, rows.weights.begin());
  router_.group(rows, tokens);
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
  const int threads = workspace_->pool->threads();
  check(rows.ordered == this, "the rows of these experts are not ordered");
  if (resting_) return false;
  const int64_t first = rows.fetched, most = cached_bytes(threads);
  const int64_t last = std::min(first + FETCHED, most);
  std::atomic<bool> more{false};
  if (first < last)
    workspace_->pool->run([&](int thread) {
      Thread t{thread, &program, {}};
      int64_t at = 0;  // of what this thread reads, in the order in which it does
      const auto lines = [&](const Matrix& m, int64_t p0, int64_t p1) {
        if (!m.data) return;  // bundles: which of their rows are read is not known yet
        const int64_t each = pi_panel_bytes(m.type, m.k), n = (p1 - p0) * each;
        const uint8_t* const data = m.data + p0 * each;
        for (int64_t i = std::max<int64_t>(first - at, 0); i < std::min(last - at, n); i += 64) fetch_line(data + i);
        at += n;
      };
      each_share(t, rows, up_[0].panels, 2, false, [&](size_t e, int64_t p0, int64_t p1) {
        if (!gate_.empty()) lines(gate_[e], p0, p1);
        lines(up_[e], p0, p1);
      });
      each_share(t, rows, down_[0].panels, 2, false,
                 [&](size_t e, int64_t p0, int64_t p1) { lines(down_[e], p0, p1); });
      if (at > last) more = true;
    });
  rows.fetched = last;
  return more && last < most;
}

template <class P>
void Experts::sum_rows(Program& program, const float* x, int64_t tokens, float* out, P prepare) {
  Workspace& w = *program.workspace;
  ExpertRows& rows = *program.expert_rows;
  Failure failure;  // what follows is void, but must be computed
  const auto job = [&](int thread) {
    Thread t{thread, &program, {}};
    const int forms = (gate_.empty() ? 0 : gate_[0].form()) | up_[0].form();
    const Rows in{x, d_model_, d_model_, tokens};
    const Destination to{out, d_model_, false, NONE};
    if (guesses(tokens)) {
      guess(t, rows, in);
      w.pool->barrier();
      if (thread == 0) failure.attempt([&] { after_->expect_guessed(rows, tokens); });
    }
    const PiActs* acts = w.prepare(thread, in, {}, forms);
    if (bundled_ && !whole_ && tokens <= PI_NEURON_TOKENS) return sum_firing(t, rows, acts, {in, {}, to, true});
    multiply_all(t, rows, tokens == 1 ? *acts : gather(t, rows, acts), tokens == 1,
                 [&] { return failure.attempt([&] { resting_->next(rows); }); });
    merge(t, rows, tokens, to);
  };
  w.pool->run(prepare, job);
  if (failure.what.empty()) return;
  if (resting_) resting_->end();
  throw ReadError(failure.what);
}

void Router::select(Thread& t, ExpertRows& rows, const PiActs* acts, int64_t tokens) const {
  Workspace& w = *t.program->workspace;
  const auto route_token = [&](int64_t i) {
    route(spec, rows.logits.data() + i * rows.ldl, experts, rows.scores.data() + i * rows.ldl,
          rows.selected.data() + i * spec.top_k, rows.weights.data() + i * spec.top_k);
  };
  w.product(t.id, *scores, acts, tokens, {rows.logits.data(), rows.ldl, false, NONE});
  w.pool->barrier();
  if (tokens > 1) {
    int64_t begin, end;
    share(tokens, 1, w.pool->threads(), t.id, &begin, &end);
    for (int64_t i = begin; i < end; i++) route_token(i);
    w.pool->barrier();
  } else if (t.id == 0) route_token(0);
  if (t.id == 0) group(rows, tokens);
  w.pool->barrier();
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
  recorded_.fired.assign((size_t)(n * up_[0].panels), 0);
}

// The weight of the shared expert for each token of this thread's share; a barrier comes before it is used.
void Experts::weigh_shared(const Thread& t, ExpertRows& rows, const PiActs* acts, int64_t tokens) const {
  int64_t begin, end;
  share(tokens, 1, t.program->workspace->pool->threads(), t.id, &begin, &end);
  for (int64_t i = begin; i < end; i++) {
    rows.of_shared[(size_t)i] = 1;
    if (shared_.gate.empty()) continue;
    const float* x = acts->f + i * acts->ldf;
    float sums[PI_LANES] = {0};  // of every sixteenth product, so that the compiler can use vectors
    for (int64_t c = 0; c < d_model_; c++) sums[c % PI_LANES] += x[c] * shared_.gate[(size_t)c];
    rows.of_shared[(size_t)i] = sigmoid(std::accumulate(sums, sums + PI_LANES, 0.0f));
  }
}

void Router::group(ExpertRows& rows, int64_t tokens) const {
  const int64_t n = tokens * spec.top_k;
  rows.ordered = nullptr;
  std::vector<int32_t>& begin = rows.begin;
  std::fill(begin.begin(), begin.begin() + experts + 1, 0);
  for (int64_t i = 0; i < n; i++)
    if (rows.selected[(size_t)i] >= 0) begin[(size_t)rows.selected[(size_t)i] + 1]++;
  rows.active.clear();
  for (int64_t e = 0; e < experts; e++) {
    if (const int32_t own = begin[(size_t)e + 1]) {
      // what a row costs, and what it costs to read the weights and to widen them
      rows.cost[rows.active.size() + 1] = rows.cost[rows.active.size()] + own + 2;
      rows.active.push_back((int32_t)e);
    }
    begin[(size_t)e + 1] += begin[(size_t)e];
  }
  // `begin` moves to the end of each expert's rows, where those of the next one begin, and back
  for (int64_t i = 0; i < n; i++) {
    rows.row_of[(size_t)i] = -1;
    if (rows.selected[(size_t)i] < 0) continue;
    const int32_t row = begin[(size_t)rows.selected[(size_t)i]]++;
    rows.row_of[(size_t)i] = row;
    rows.token_of[(size_t)row] = (int32_t)(i / spec.top_k);
    rows.weight_of[(size_t)row] = rows.weights[(size_t)i];
  }
  std::copy_backward(begin.begin(), begin.begin() + experts, begin.begin() + experts + 1);
  begin[0] = 0;
}

// For each row its token's, of k elements.
PiActs Experts::gather(Thread& t, const ExpertRows& rows, const PiActs* acts, int64_t k, int forms) const {
  Workspace& w = *t.program->workspace;
  const int64_t nb = k / 32;
  const PiActs to = rows.input.rows(k);
  int64_t begin, end;
  share(rows.begin[(size_t)n_], 1, w.pool->threads(), t.id, &begin, &end);
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
  w.pool->barrier();
  return to;
}

// Calls work(expert, first panel, last panel) for this thread's share of the panels of all active experts, in whole
// units: shares cost about the same however the rows are distributed. dealt: of many rows what a free thread takes.
template <class F>
void Experts::each_share(const Thread& t, const ExpertRows& rows, int64_t panels, int64_t unit, bool dealt,
                         F work) const {
  const size_t n = rows.active.size();
  if (n == 0) return;
  const int64_t units = (panels + unit - 1) / unit, all = rows.cost[n] * units;
  const auto part = [&](int64_t from, int64_t to) {
    for (size_t i = 0; i < n; i++) {
      const int64_t each = rows.cost[i + 1] - rows.cost[i], before = rows.cost[i] * units;
      const auto first = [&](int64_t cost) {  // the unit that begins there or next
        return std::clamp((cost - before + each - 1) / each, (int64_t)0, units) * unit;
      };
      const int64_t p0 = std::min(first(std::max(from, before)), panels),
                    p1 = std::min(first(std::max(to, before)), panels);
      if (p0 < p1) work(rows.active[i], p0, p1);
    }
  };
  const Workspace& w = *t.program->workspace;
  Pool& pool = *w.pool;
  if (dealt && !resting_ && w.deals(rows.begin[(size_t)n_], up_[0], (int64_t)n))
    return pool.deal(all, std::max(all / (16 * pool.threads()), (int64_t)1), part);
  int64_t from, to;
  share(all, 1, pool.threads(), t.id, &from, &to);
  part(from, to);
}

namespace {

const Vector& bias_of(const std::vector<Vector>& biases, size_t e) { return biases.empty() ? NONE : biases[e]; }

}  // namespace

// h of all rows: this thread's share, times the weights of the rows, in the form that down takes.
void Experts::multiply(Thread& t, const ExpertRows& rows, const PiActs& acts, bool one, bool dealt) {
  Workspace& w = *t.program->workspace;
  float *const gate = rows.floats(rows.gate), *const up = rows.floats(rows.up);
  const int form = down_[0].form();
  PiActs hidden = rows.hidden.rows(neurons_);
  hidden.f = gate;
  hidden.ldf = rows.ldh;
  each_share(t, rows, up_[0].panels, 2, dealt, [&](size_t e, int64_t p0, int64_t p1) {  // two panels: a block of h
    const int64_t begin = rows.begin[e], n = rows.begin[e + 1] - begin, c0 = p0 * PI_LANES;
    const int64_t lanes = (p1 - p0) * PI_LANES, columns = std::min(neurons_ - c0, lanes);
    const PiActs x = pi_acts_from(&acts, one ? 0 : begin, 0);
    float *const h = gate + begin * rows.ldh, *const more = up + begin * rows.ldh;
    const auto from = [&](PiRows Bundles::* part) {
      return [&, part](int64_t p, int count, uint8_t* to) {
        panels_of_neurons((*bundled_->bundles).*part, (int64_t)e * neurons_ + p * PI_LANES, count, to);
      };
    };
    if (!gate_.empty())
      product(t, rows, gate_[e], bias_of(gate_bias_, e), x, h, rows.ldh, n, p0, p1, from(&Bundles::gate));
    product(t, rows, up_[e], bias_of(up_bias_, e), x, gate_.empty() ? h : more, rows.ldh, n, p0, p1,
            from(&Bundles::up));
    for (int64_t i = 0; i < n; i++) {
      float* row = h + i * rows.ldh + c0;
      activation_.apply(w.kernels, row, gate_.empty() ? nullptr : more + i * rows.ldh + c0, lanes);
      if (records_fired_)
        w.kernels->neurons.fires(row, lanes, 0.0f, recorded_.fired.data() + (begin + i) * up_[0].panels + p0);
      w.kernels->scale(row, rows.weight_of[(size_t)(begin + i)], columns);
      if (form == PI_FORM_F32) continue;
      const PiActs to = pi_acts_from(&hidden, begin + i, c0);
      w.kernels->forms(row, columns, form, &to);
    }
  });
}

// The output of every row: this thread's share.
void Experts::add_down(Thread& t, const ExpertRows& rows) const {
  PiActs hidden = rows.hidden.rows(neurons_);
  hidden.f = rows.floats(rows.gate);
  hidden.ldf = rows.ldh;
  each_share(t, rows, down_[0].panels, 2, true, [&](size_t e, int64_t p0, int64_t p1) {
    const int64_t begin = rows.begin[e], n = rows.begin[e + 1] - begin;
    const PiActs h = pi_acts_from(&hidden, begin, 0);
    float* out = rows.floats(rows.out) + begin * rows.ldy;
    const auto repack = [&](int64_t p, int count, uint8_t* to) {
      panels_of_outputs(bundled_->bundles->down, (int64_t)e * neurons_, neurons_, p * PI_LANES, count, to);
    };
    product(t, rows, down_[e], {}, h, out, rows.ldy, n, p0, p1, repack);
    const float* bias = down_bias_.empty() ? nullptr : down_bias_[e].data();  // times the row's weight, as h is
    for (int64_t i = 0; bias && i < n; i++, out += rows.ldy) {
      const float weight = rows.weight_of[(size_t)(begin + i)];
      for (int64_t c = p0 * PI_LANES; c < p1 * PI_LANES; c++) out[c] += weight * bias[c];
    }
  });
}

// repack(first panel, their number, to): writes one or two panels from an even one on.
template <class R>
void Experts::product(const Thread& t, const ExpertRows& rows, const Matrix& matrix, const Vector& bias,
                      const PiActs& acts, float* out, int64_t ldo, int64_t tokens, int64_t p0, int64_t p1,
                      R repack) const {
  Workspace& w = *t.program->workspace;
  if (matrix.data || matrix.disk) return w.linear(t.id, matrix, bias, &acts, out, ldo, tokens, false, p0, p1);
  Matrix some = matrix;
  some.data = rows.panels_of(t.id);
  for (int64_t p = p0; p < p1; p += 2) {
    const int count = (int)std::min<int64_t>(p1 - p, 2);
    repack(p, count, rows.panels_of(t.id));
    w.linear(t.id, some, {}, &acts, out + p * PI_LANES, ldo, tokens, false, 0, count);
  }
}

// ---- The neurons that fire, of experts as bundles -------------------------------------------------------------------

// Of up to PI_NEURON_TOKENS tokens: the first product of all neurons of their experts, and the rest where they fire.
void Experts::sum_firing(Thread& t, ExpertRows& rows, const PiActs* acts, const NeuronSum::Piece& piece) const {
  list_firing(t, rows, acts, piece.x.tokens);
  workspace_->pool->barrier();
  bundled_->sum_listed(t.id, piece, acts, rows.floats(rows.known), n_ * neurons_ + more_, nullptr);
  if (t.id == 0) bundled_->count_gates((int64_t)rows.active.size() * neurons_ + more_);
}

void Experts::set_whole(bool on) {
  workspace_->pool->between_jobs([&] { whole_ = on; });
}

// Lists the neurons that fire, of this thread's share of the first products; `known` gets their activations, times the
// weights of their experts, for every token.
void Experts::list_firing(Thread& t, ExpertRows& rows, const PiActs* acts, int64_t tokens) const {
  Workspace& w = *t.program->workspace;
  NeuronLists::Share& own = w.lists().shares[(size_t)t.id];
  const PiActs inputs = tokens == 1 ? *acts : gather(t, rows, acts);
  float* const known = rows.floats(rows.known);
  const int64_t ldk = n_ * neurons_ + more_;
  own.n = 0;
  std::fill(own.counts, own.counts + PI_NEURON_TOKENS, 0);
  if (more_) list_shared(t, rows, acts, tokens);
  each_share(t, rows, firsts()[0].panels, 2, false, [&](size_t e, int64_t p0, int64_t p1) {
    const int64_t begin = rows.begin[e], n = rows.begin[e + 1] - begin, c0 = p0 * PI_LANES;
    const int64_t lanes = (p1 - p0) * PI_LANES, first = (int64_t)e * neurons_ + c0;
    const PiActs x = pi_acts_from(&inputs, tokens == 1 ? 0 : begin, 0);
    float* const h = rows.floats(rows.gate) + begin * rows.ldh + c0;
    w.linear(t.id, firsts()[e], {}, &x, h - c0, rows.ldh, n, false, p0, p1);
    for (int64_t i = 0; i < n; i++) {
      activation_.apply_first(w.kernels, h + i * rows.ldh, lanes);
      w.kernels->scale(h + i * rows.ldh, rows.weight_of[(size_t)(begin + i)], lanes);
    }
    int64_t counts[PI_NEURON_TOKENS] = {0};
    int32_t* const listed = own.listed.data() + own.n;
    const int64_t found = w.kernels->neurons.keep(h, rows.ldh, n, lanes, 1, 0.0f, (int32_t)first, listed, counts);
    for (int64_t i = 0; i < n; i++) own.counts[rows.token_of[(size_t)(begin + i)]] += counts[i];
    for (int64_t j = 0; j < found; j++) {
      for (int64_t i = 0; i < tokens && tokens > 1; i++) known[i * ldk + listed[j]] = 0.0f;
      for (int64_t i = 0; i < n; i++)
        known[rows.token_of[(size_t)(begin + i)] * ldk + listed[j]] = h[i * rows.ldh + listed[j] - first];
    }
    own.n += found;
  });
}

// The same of the shared expert, whose neurons lie behind all others in the bundles.
void Experts::list_shared(Thread& t, ExpertRows& rows, const PiActs* acts, int64_t tokens) const {
  const Program& p = *t.program;
  NeuronLists::Share& own = p.workspace->lists().shares[(size_t)t.id];
  const int64_t first = n_ * neurons_, ldk = first + more_;
  if (!shared_.gate.empty()) p.workspace->pool->barrier();             // its weights are there
  const Columns mine = shared_.neurons->activate(t, acts, tokens, 2);  // two panels: a group of neurons
  float* const h = p.gate + mine.c0;
  for (int64_t i = 0; i < tokens; i++) p.workspace->kernels->scale(h + i * p.ldh, rows.of_shared[(size_t)i], mine.n());
  int32_t* const listed = own.listed.data() + own.n;
  const int64_t found = p.workspace->kernels->neurons.keep(h, p.ldh, tokens, mine.n(), 1, 0.0f,
                                                           (int32_t)(first + mine.c0), listed, own.counts);
  for (int64_t j = 0; j < found; j++)
    for (int64_t i = 0; i < tokens; i++)
      rows.floats(rows.known)[i * ldk + listed[j]] = h[i * p.ldh + listed[j] - first - mine.c0];
  own.n += found;
}

// Adds the shared expert's output, which is in `shared`, to that of the others; ends with a barrier.
void Experts::add_shared(Thread& t, const ExpertRows& rows, int64_t tokens, const Destination& to) const {
  Workspace& w = *t.program->workspace;
  int64_t c0, c1;
  share(d_model_, PI_LANES, w.pool->threads(), t.id, &c0, &c1);
  for (int64_t i = 0; i < tokens; i++) {
    const float *row = rows.floats(rows.shared) + i * rows.ldy, weight = rows.of_shared[(size_t)i];
    for (int64_t c = c0; c < c1; c++) to.out[i * to.ld + c] += weight * row[c];
  }
  w.pool->barrier();
}

// Of up to PI_NEURON_TOKENS tokens: the neurons that the predictor selects of their experts.
void Experts::sum_predicted(Thread& t, ExpertRows& rows, const Rows& x, const Destination& to) {
  Program& p = *t.program;
  const bool sampled = recall_every_ && bundled_->stats_of_job().steps % recall_every_ == 0;
  list_predicted(t, rows, x, sampled);
  const PiActs* acts = p.workspace->prepare(t.id, x, spec_.norm, bundled_->bundles->forms());
  if (sampled) sample(t, rows, acts, x.tokens);
  NeuronSum::Piece piece{x, spec_.norm, to, true};
  piece.groups = {rows.of_expert.data(), n_, neurons_};
  bundled_->sum_listed(t.id, piece, acts, nullptr, 0, nullptr);
  if (t.id == 0) {
    predictor_rows_ += (int64_t)rows.active.size() * neurons_;
    recall_.tokens += sampled ? x.tokens : 0;
    for (const Ffn::Recall& one : sampled_)
      if (sampled) recall_.active += one.active, recall_.found += one.found;
  }
}

// Lists the candidates, of this thread's share of the selected experts' neurons, and the tokens that select each. Ends
// with a barrier.
void Experts::list_predicted(Thread& t, ExpertRows& rows, const Rows& x, bool sampled) const {
  Workspace& w = *t.program->workspace;
  NeuronLists& lists = w.lists();
  NeuronLists::Share& own = lists.shares[(size_t)t.id];
  const int64_t tokens = x.tokens, k = router_.spec.top_k;
  int64_t t0, t1;
  share(tokens, 1, w.pool->threads(), t.id, &t0, &t1);
  std::fill(rows.of_expert.begin() + t0 * n_, rows.of_expert.begin() + t1 * n_, 0.0f);
  for (int64_t j = t0 * k; j < t1 * k; j++)
    rows.of_expert[(size_t)(j / k * n_ + rows.selected[(size_t)j])] = rows.weights[(size_t)j];
  const PiActs* hidden = predictor_->hide(t.id, w, x);
  const PiActs inputs = tokens == 1 ? *hidden : gather(t, rows, hidden, predictor_->rank(), out_[0].form());
  own.n = 0;
  std::fill(own.counts, own.counts + PI_NEURON_TOKENS, 0);
  each_share(t, rows, out_[0].panels, 2, false, [&](size_t e, int64_t p0, int64_t p1) {
    const int64_t begin = rows.begin[e], n = rows.begin[e + 1] - begin, c0 = p0 * PI_LANES;
    const int64_t lanes = (p1 - p0) * PI_LANES, first = (int64_t)e * neurons_ + c0;
    const PiActs acts = pi_acts_from(&inputs, tokens == 1 ? 0 : begin, 0);
    const auto token = [&](int64_t i) { return rows.token_of[(size_t)(begin + i)]; };
    float* const z = rows.floats(rows.gate) + begin * rows.ldh + c0;
    w.linear(t.id, out_[e], {}, &acts, z - c0, rows.ldh, n, false, p0, p1);
    int64_t counts[PI_NEURON_TOKENS] = {0};
    int32_t* const listed = own.listed.data() + own.n;
    const int64_t found =
        w.kernels->neurons.keep(z, rows.ldh, n, lanes, 0, predictor_->limit(), (int32_t)first, listed, counts);
    for (int64_t i = 0; i < n; i++) own.counts[token(i)] += counts[i];
    for (int64_t j = 0; j < found && tokens > 1; j++) {
      uint32_t selects = 0;
      for (int64_t i = 0; i < n; i++)
        selects |= (uint32_t)predictor_->candidate(z[i * rows.ldh + listed[j] - first]) << token(i);
      lists.selected_by[(size_t)listed[j]] = selects;
    }
    for (int64_t i = 0; i < n && sampled; i++)
      std::copy(z + i * rows.ldh, z + i * rows.ldh + lanes, lists.z.begin() + token(i) * lists.ldz + first);
    own.n += found;
  });
  w.pool->barrier();
}

// How many of the neurons that fire the predictor selected: computes whole experts.
void Experts::sample(Thread& t, const ExpertRows& rows, const PiActs* acts, int64_t tokens) {
  const NeuronLists& lists = t.program->workspace->lists();
  Ffn::Recall& own = sampled_[(size_t)t.id];
  own = {};
  multiply(t, rows, tokens == 1 ? *acts : gather(t, rows, acts), tokens == 1, false);
  each_share(t, rows, up_[0].panels, 2, false, [&](size_t e, int64_t p0, int64_t p1) {  // as those of `multiply`
    for (int64_t r = rows.begin[e]; r < rows.begin[e + 1]; r++) {
      const float* const h = rows.floats(rows.gate) + r * rows.ldh;
      const float* const z = lists.z.data() + rows.token_of[(size_t)r] * lists.ldz + (int64_t)e * neurons_;
      for (int64_t c = p0 * PI_LANES; c < p1 * PI_LANES; c++) {
        own.active += h[c] != 0.0f;
        own.found += h[c] != 0.0f && predictor_->candidate(z[c]);
      }
    }
  });
}

Experts::Counts Experts::counts() const {
  Counts counts;
  workspace_->pool->between_jobs([&] {
    check((bool)bundled_, "that FFN has no bundles");
    counts = {bundled_->stats_of_job(), recall_, predictor_rows_};
  });
  return counts;
}

void Experts::clear() {
  workspace_->pool->between_jobs([&] {
    if (bundled_) bundled_->clear_counts();
    recall_ = {};
    predictor_rows_ = 0;
  });
}

// Each token's sum: the shared expert, then its own experts in ascending order.
void Experts::merge(Thread& t, const ExpertRows& rows, int64_t tokens, const Destination& to) const {
  const int64_t k = router_.spec.top_k;
  int64_t c0, c1;
  share(d_model_, PI_LANES, t.program->workspace->pool->threads(), t.id, &c0, &c1);
  for (int64_t i = 0; i < tokens; i++) {
    float* const out = to.out + i * to.ld;
    if (!to.add) std::fill(out + c0, out + c1, 0.0f);
    if (!to.bias.empty())
      for (int64_t c = c0; c < c1; c++) out[c] += to.bias[(size_t)c];
    if (shared_.neurons) {
      const float *row = rows.floats(rows.shared) + i * rows.ldy, weight = rows.of_shared[(size_t)i];
      for (int64_t c = c0; c < c1; c++) out[c] += weight * row[c];
    }
    for (int64_t j = i * k; j < (i + 1) * k; j++) {
      if (rows.row_of[(size_t)j] < 0) continue;
      const float* row = rows.floats(rows.out) + rows.row_of[(size_t)j] * rows.ldy;
      for (int64_t c = c0; c < c1; c++) out[c] += row[c];
    }
  }
}
