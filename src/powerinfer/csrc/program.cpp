#include "program.h"

#include <math.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <chrono>

#include "states.h"
#include "window.h"

namespace {

std::vector<Cache::Layer> lay_out(int type, const std::vector<std::pair<int64_t, int64_t>>& heads,
                                  const std::vector<int64_t>& latents) {
  check(latents.empty() || latents.size() == heads.size(), "not a number of latents for each layer of the cache");
  std::vector<Cache::Layer> layers;
  int64_t at = 0;
  for (size_t i = 0; i < heads.size(); i++) {
    const auto& [kv_heads, head_dim] = heads[i];
    const int64_t of_key = latents.empty() ? 0 : latents[i], pad = pi_round_up(head_dim, PI_LANES);
    check(of_key >= 0 && of_key <= head_dim, "a key has fewer numbers than latents");
    const int64_t bytes = pi_kv_head_bytes(type, pad, of_key > 0);
    layers.push_back({kv_heads, head_dim, pad, bytes, at, of_key});
    at += kv_heads * bytes;
  }
  return layers;
}

// The largest that a layer of the cache, with its query heads, makes of f.
template <class F>
int64_t largest_of(const Cache& cache, const std::vector<int64_t>& heads, F f) {
  int64_t found = 0;
  for (size_t i = 0; i < std::min(heads.size(), cache.layers.size()); i++)
    found = std::max(found, f(cache.layers[i], heads[i]));
  return found;
}

// Of the first n matrices of an operator those on disk.
std::vector<const Matrix*> resting(const Op& op, size_t n) {
  std::vector<const Matrix*> found;
  for (size_t i = 0; i < n; i++)
    if (op.matrices[i] && !op.matrices[i]->is_in_memory()) found.push_back(op.matrices[i].get());
  return found;
}

int64_t widest_row(const States* states) {
  int64_t found = 0;
  if (states)
    for (const States::Layer& layer : states->layers) found = std::max(found, States::row(layer));
  return found;
}

}  // namespace

Cache::Cache(int type, const std::vector<std::pair<int64_t, int64_t>>& heads, int64_t pages,
             const std::vector<int64_t>& latents)
    : type(type),
      layers(lay_out(type, heads, latents)),
      pages(pages),
      page_bytes(layers.back().at + layers.back().kv_heads * layers.back().head_bytes),
      memory_(pages * page_bytes) {}

Program::Program(std::shared_ptr<Workspace> workspace_, std::shared_ptr<Cache> cache_, Sizes s,
                 std::shared_ptr<States> states_)
    : sizes(std::move(s)),
      workspace(std::move(workspace_)),
      cache(std::move(cache_)),
      states(std::move(states_)),
      ldx(pi_round_up(sizes.d_model, PI_LANES)),
      ldqkv(std::max(
          largest_of(*cache, sizes.heads, [](auto& kv, int64_t q) { return (q + 2 * kv.kv_heads) * kv.head_pad; }),
          widest_row(states.get()))),
      lda(std::max(pi_round_up(sizes.attended, PI_LANES),
                   largest_of(*cache, sizes.heads,
                              [](auto& kv, int64_t q) { return pi_round_up(q * kv.value_dim(), PI_LANES); }))),
      ldh(pi_round_up(std::max({sizes.d_ff, sizes.d_model, sizes.embed_dim}), 2 * PI_LANES)),
      qkv_rows(sizes.max_tokens + (states ? states->slots * states->undo_tokens : 0)),
      hidden(sizes.max_tokens * pi_round_up(sizes.d_ff, 32)) {
  check(sizes.heads.size() == cache->layers.size(), "the cache has another number of layers than there are heads for");
  for (size_t i = 0; i < cache->layers.size(); i++) {
    const Cache::Layer& kv = cache->layers[i];
    check(sizes.heads[i] > 0 && (!kv.kv_heads || sizes.heads[i] % kv.kv_heads == 0),
          "the number of heads is not a multiple of the number of key/value heads");
    if (!kv.latents) workspace->reserve(sizes.max_tokens, sizes.heads[i] * kv.head_dim);
  }
  const auto floats = [&](int64_t n) { return (float*)memory_.allocate(n * 4); };
  x = floats(sizes.max_tokens * ldx);
  qkv = floats(qkv_rows * ldqkv);
  attended = floats(sizes.max_tokens * lda);
  gate = floats(sizes.max_tokens * ldh);
  up = floats(sizes.max_tokens * ldh);
  for (int64_t k : {sizes.d_model, sizes.embed_dim}) workspace->reserve(sizes.max_tokens, k);
  workspace->reserve(1, sizes.d_ff);
  const int64_t pad = largest_of(*cache, sizes.heads, [](auto& kv, int64_t) { return kv.head_pad; });
  threads_.resize((size_t)workspace->pool->threads());
  for (size_t i = 0; i < threads_.size(); i++) threads_[i] = {(int)i, this, Vector((size_t)pi_attention_scratch(pad))};
}

Program::~Program() {
  workspace->pool->between_jobs([] {});
}

// Part of a step, which threads may go through after its end: it has copies of what the caller gave.
struct Program::Walk {
  Walk(const Step& from, size_t first, size_t last) : step(from), decided(last), first(first), last(last), end(last) {
    step.decided = decided.data();
    token.assign(from.token, from.token + from.tokens);
    position.assign(from.position, from.position + from.tokens);
    logit_row.assign(from.logit_row, from.logit_row + from.logit_rows);
    const auto pages_of = [](const Run& run) { return (run.position + run.count - 1) / PI_PAGE + 1; };
    for (const Run& run : from.runs) pages.insert(pages.end(), run.pages, run.pages + pages_of(run));
    step.token = token.data();
    step.position = position.data();
    step.logit_row = logit_row.data();
    const int32_t* at = pages.data();
    for (Run& run : step.runs) {
      run.pages = at;
      at += pages_of(run);
    }
  }
  Step step;
  std::vector<int32_t> token, position, logit_row, pages;
  std::vector<std::atomic<uint64_t>> decided;
  const size_t first, last;
  size_t end;  // where the step ended; thread 0's
  bool moved = false;
};

int Program::add_rope(Vector frequencies, float factor) {
  const int64_t pairs = (int64_t)frequencies.size();
  const auto angles = [&] { return (float*)memory_.allocate(sizes.max_tokens * pairs * 4); };
  ropes_.push_back({std::move(frequencies), factor, angles(), angles()});
  rotated_.clear();
  return (int)ropes_.size() - 1;
}

void Program::check_layer(int layer) const {
  check(layer >= 0 && layer < (int)cache->layers.size(), "no such layer in the cache");
}

void Program::check_rope(int table, int64_t dims) const {
  check(table >= -1 && table < (int)ropes_.size(), "no such table of rotary frequencies");
  check(table < 0 || 2 * (int64_t)ropes_[(size_t)table].frequencies.size() <= dims,
        "more rotary frequencies than a head has pairs");
}

void Program::check_settings(const PiAttentionSettings& settings) {
  check(settings.window >= 0, "a negative window");
  check(settings.query_interval > 0 && settings.query_offset >= 0, "positions that queries cannot grow with");
}

void Program::rotate(const Step& step, int64_t begin, int64_t end) {
  for (const Rope& rope : ropes_) {
    const int64_t half = (int64_t)rope.frequencies.size();
    for (int64_t i = begin; i < end; i++) {
      for (int64_t j = 0; j < half; j++) {
        const float angle = (float)step.position[i] * rope.frequencies[(size_t)j];  // in fp32, as in training
        rope.cos[i * half + j] = cosf(angle) * rope.factor;
        rope.sin[i * half + j] = sinf(angle) * rope.factor;
      }
    }
  }
}

void Program::add_normalised(const Norm& norm, float* rows, int64_t first, int64_t tokens) {
  if (!norm) return;
  workspace->pool->phase(tokens, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      float *row = rows + i * ldh, *to = x + (first + i) * ldx;
      norm.apply(workspace->kernels, row, row);
      for (int64_t j = 0; j < sizes.d_model; j++) to[j] += row[j];
    }
  });
}

bool Program::run_alone(const Step& step, size_t op) {
  bool done = false;
  workspace->pool->between_jobs([&] {
    if (window_) return;
    times_.resize(ops_.size(), 0.0);
    const auto start = std::chrono::steady_clock::now();
    done = ops_[op]->run_alone(*this, step);
    if (timed) times_[op] += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  });
  return done;
}

bool Program::embed_alone(const int32_t* tokens, const int32_t* positions, int64_t n, float* out) {
  Step step;
  step.tokens = n;
  step.token = tokens;
  step.position = positions;
  if (ops_.empty() || !run_alone(step, 0)) return false;
  for (int64_t i = 0; i < n; i++) memcpy(out + i * sizes.d_model, x + i * ldx, (size_t)sizes.d_model * sizeof(float));
  return true;
}

bool Program::run(const Step& step, size_t first, size_t last) {
  // The embedding alone, beside a GPU: to wake threads that have parked takes many times as long as its rows.
  if (last == first + 1 && first < ops_.size() && run_alone(step, first)) return true;
  last = std::min(last, ops_.size());
  const auto walk = std::make_shared<Walk>(step, first, last);
  const auto prepare = [&] {
    times_.resize(ops_.size(), 0.0);
    // A step that is run in parts keeps its angles.
    if (window_) window_->begin([&](size_t op) { return resting(*ops_[op], ops_[op]->wants(*this, step)).size(); });
    walk->moved = !std::equal(rotated_.begin(), rotated_.end(), step.position, step.position + step.tokens);
    if (walk->moved) rotated_.assign(step.position, step.position + step.tokens);
    for (size_t i = first; i < last; i++)
      if (ops_[i]->samples(*this, step)) walk->step.sampled.push_back(i);
  };
  const auto job = [this, walk](int thread) { run(thread, *walk); };
  std::string failure;
  if (window_) workspace->pool->run(prepare, job, step.stop);  // thread 0 reads what the others multiply with
  else workspace->pool->run_phases(prepare, job, step.stop);
  failure.swap(failure_);
  if (window_) window_->end();
  for (size_t i = walk->end; i < last; i++) ops_[i]->skip();
  if (!failure.empty()) throw ReadError(failure);
  return walk->end == last;
}

void Program::run(int thread, Walk& walk) {
  const Step& step = walk.step;
  Pool& pool = *workspace->pool;
  if (walk.moved) pool.phase(step.tokens, 1, [&](int64_t begin, int64_t end) { rotate(step, begin, end); });
  const bool clock = timed && thread == 0;
  size_t i = walk.first;
  while (i < walk.last) {
    const auto start = clock ? std::chrono::steady_clock::now() : std::chrono::steady_clock::time_point();
    const bool reads = window_ && window_->wanted(i);
    if (reads) {
      if (thread == 0) window_->take(i);
      pool.barrier();
    }
    ops_[i]->run(threads_[(size_t)thread], step);  // it ends with a barrier or a phase
    if (window_ && thread == 0) reads ? window_->release(i) : window_->read_ahead();
    if (clock) times_[i] += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    i++;
    if (pool.stopped()) break;
  }
  if (thread == 0) walk.end = i;
}

void Program::forget() {
  workspace->pool->between_jobs([&] {
    const std::pair<float*, int64_t> all[] = {{x, ldx}, {attended, lda}, {gate, ldh}, {up, ldh}};
    for (const auto& [rows, ld] : all) give_back(rows, sizes.max_tokens * ld * 4);
    give_back(qkv, qkv_rows * ldqkv * 4);
    if (streams.n) give_back(streams.rows, sizes.max_tokens * streams.ld * 4);
    hidden.forget();
    workspace->forget();
  });
}

bool Program::failed() const { return !failure_.empty() || (window_ && window_->failed()); }

void Program::set_window(std::shared_ptr<Window> window) {
  for (size_t i = 0; i < ops_.size(); i++) {
    std::vector<std::shared_ptr<OnDisk>> unit;
    for (const Matrix* one : resting(*ops_[i], ops_[i]->matrices.size())) {
      unit.push_back(one->disk);
      workspace->reserve_packed(*one);
    }
    if (!unit.empty()) window->add(i, unit);
  }
  workspace->pool->between_jobs([&] { window_ = std::move(window); });
}

void Program::hidden_states(const int32_t* rows, int64_t count, float* out, bool draft) {
  const std::shared_ptr<const Norm> norm = draft ? draft_norm_ : final_norm_;
  check((bool)norm, "a program without a head has no hidden states");
  const auto make = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const float* row = x + rows[i] * ldx;
      float* to = out + i * sizes.d_model;
      if (*norm) norm->apply(workspace->kernels, row, to);
      else std::copy(row, row + sizes.d_model, to);
    }
  };
  // Waking the other threads takes longer than the rows of a step of decoding.
  if (count <= PI_NEURON_TOKENS) return workspace->pool->between_jobs([&] { make(0, count); });
  workspace->pool->run([&](int thread) {
    int64_t begin, end;
    share(count, 1, workspace->pool->threads(), thread, &begin, &end);
    make(begin, end);
  });
}

std::vector<std::pair<std::string, double>> Program::take_times() {
  std::vector<std::pair<std::string, double>> taken;
  workspace->pool->between_jobs([&] {
    for (size_t i = 0; i < times_.size(); i++) taken.emplace_back(ops_[i]->name(), times_[i]);
    std::fill(times_.begin(), times_.end(), 0.0);
  });
  return taken;
}
