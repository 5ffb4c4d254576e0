#include "program.h"

#include <math.h>

#include <algorithm>
#include <chrono>

Cache::Cache(int type, int layers, int kv_heads, int head_dim, int64_t pages)
    : type(type),
      layers(layers),
      kv_heads(kv_heads),
      head_dim(head_dim),
      head_pad((int)pi_round_up(head_dim, PI_LANES)),
      pages(pages),
      head_bytes(pi_kv_head_bytes(type, head_pad)),
      layer_bytes(head_bytes * kv_heads),
      page_bytes(layer_bytes * layers),
      memory_(pages * page_bytes) {}

Program::Program(std::shared_ptr<Workspace> workspace_, std::shared_ptr<Cache> cache_, Sizes s)
    : sizes(s),
      workspace(std::move(workspace_)),
      cache(std::move(cache_)),
      head_pad(pi_round_up(s.head_dim, PI_LANES)),
      ldx(pi_round_up(s.d_model, PI_LANES)),
      ldqkv((s.heads + 2 * s.kv_heads) * head_pad),
      lda(pi_round_up(s.heads * s.head_dim, PI_LANES)),
      ldh(pi_round_up(std::max({s.d_ff, s.d_model, s.embed_dim}), 2 * PI_LANES)),
      hidden(s.max_tokens * pi_round_up(s.d_ff, 32)) {
  check(s.heads % s.kv_heads == 0, "the number of heads is not a multiple of the number of key/value heads");
  check(s.kv_heads == cache->kv_heads && s.head_dim == cache->head_dim, "the cache was made for other heads");
  const auto floats = [&](int64_t n) { return (float*)memory_.allocate(n * 4); };
  x = floats(s.max_tokens * ldx);
  qkv = floats(s.max_tokens * ldqkv);
  attended = floats(s.max_tokens * lda);
  gate = floats(s.max_tokens * ldh);
  up = floats(s.max_tokens * ldh);
  for (int64_t k : {s.d_model, s.heads * s.head_dim, s.embed_dim}) workspace->reserve(s.max_tokens, k);
  workspace->reserve(1, s.d_ff);
  threads_.resize((size_t)workspace->pool->threads());
  for (size_t i = 0; i < threads_.size(); i++)
    threads_[i] = {(int)i, this, Vector((size_t)pi_attention_scratch(head_pad))};
}

Program::~Program() = default;

int Program::add_rope(Vector frequencies, float factor) {
  const int64_t pairs = (int64_t)frequencies.size();
  check(2 * pairs <= sizes.head_dim, "more rotary frequencies than a head has pairs");
  const auto angles = [&] { return (float*)memory_.allocate(sizes.max_tokens * pairs * 4); };
  ropes_.push_back({std::move(frequencies), factor, angles(), angles()});
  rotated_.clear();
  return (int)ropes_.size() - 1;
}

void Program::rotate(int thread, const Step& step) {
  int64_t begin, end;
  share(step.tokens, 1, workspace->pool->threads(), thread, &begin, &end);
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

void Program::add_normalised(Thread& t, const Norm& norm, float* rows, int64_t first, int64_t tokens) {
  if (!norm) return;
  int64_t begin, end;
  share(tokens, 1, workspace->pool->threads(), t.id, &begin, &end);
  for (int64_t i = begin; i < end; i++) {
    float *row = rows + i * ldh, *to = x + (first + i) * ldx;
    norm.apply(workspace->kernels, row, row);
    for (int64_t j = 0; j < sizes.d_model; j++) to[j] += row[j];
  }
  workspace->pool->barrier();
}

void Program::run(const Step& step, size_t first, size_t last) {
  bool moved = false;
  const auto prepare = [&] {
    times_.resize(ops_.size(), 0.0);
    last = std::min(last, ops_.size());
    // A step that is run in parts keeps its angles.
    moved = !std::equal(rotated_.begin(), rotated_.end(), step.position, step.position + step.tokens);
    if (moved) rotated_.assign(step.position, step.position + step.tokens);
  };
  const auto job = [&](int thread) {
    if (moved) {
      rotate(thread, step);
      if (first > 0) workspace->pool->barrier();  // else the embedding's barrier comes before any use
    }
    const bool clock = timed && thread == 0;
    for (size_t i = first; i < last; i++) {
      const auto start = clock ? std::chrono::steady_clock::now() : std::chrono::steady_clock::time_point();
      ops_[i]->run(threads_[(size_t)thread], step);
      if (clock) times_[i] += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    }
  };
  workspace->pool->run(prepare, job);
}

std::vector<std::pair<std::string, double>> Program::take_times() {
  std::vector<std::pair<std::string, double>> taken;
  workspace->pool->between_jobs([&] {
    for (size_t i = 0; i < times_.size(); i++) taken.emplace_back(ops_[i]->name(), times_[i]);
    std::fill(times_.begin(), times_.end(), 0.0);
  });
  return taken;
}
