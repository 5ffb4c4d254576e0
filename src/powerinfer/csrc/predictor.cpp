#include "predictor.h"

#include <math.h>

#include <algorithm>
#include <numeric>

Predictor::Predictor(std::shared_ptr<Matrix> in_, std::shared_ptr<Matrix> out_, float threshold_, int64_t floor_)
    : in(std::move(in_)),
      out(std::move(out_)),
      threshold(threshold_),
      floor(floor_),
      above_(nextafterf(threshold_, -INFINITY)) {}

void Predictor::check_sizes(int64_t d_model, int64_t neurons, bool reads_hidden) const {
  check(in || reads_hidden, "the predictor lacks its first matrix");
  check((!in || (in->k == d_model && in->rows == rank())) && out->rows == neurons,
        "the predictor has another shape than the FFN");
  check(floor >= 0, "the floor of a predictor is negative");
  check(rank() <= d_model, "the predictor's rank exceeds the width of the model");
}

void Predictor::select(int thread, Workspace& w, const Rows& x) const {
  guess(thread, w, x);
  list_marked(thread, w, x.tokens);
  w.pool->barrier();
  reach_floor(thread, w, x.tokens);
}

void Predictor::foresee(int thread, Workspace& w, const Rows& x) const {
  int64_t counts[PI_NEURON_TOKENS];
  guess(thread, w, x);
  list(thread, w, x.tokens, counts);
  w.pool->barrier();
}

const PiActs* Predictor::hide(int thread, Workspace& w, const Rows& x) const {
  if (!in) return w.prepare(thread, x, {}, out->form());
  NeuronLists& s = w.lists();
  const PiActs* acts = w.prepare(thread, x, {}, in->form());
  const Columns inner(*in, *w.pool, thread);
  w.linear(thread, *in, {}, acts, s.hidden.data(), s.ldr, x.tokens, false, inner.p0, inner.p1);
  for (int64_t i = 0; i < x.tokens; i++)
    w.kernels->activate(PI_RELU, 0.0f, s.hidden.data() + i * s.ldr + inner.c0, nullptr, inner.lanes());
  w.pool->barrier();
  return hidden(thread, w, x.tokens);
}

const PiActs* Predictor::hidden(int thread, Workspace& w, int64_t tokens) const {
  const NeuronLists& s = w.lists();
  return w.prepare(thread, {s.hidden.data(), s.ldr, rank(), tokens}, {}, out->form());
}

void Predictor::guess(int thread, Workspace& w, const Rows& x) const {
  NeuronLists& s = w.lists();
  const PiActs* acts = hide(thread, w, x);
  const Columns outer(*out, *w.pool, thread);
  w.linear(thread, *out, {}, acts, s.z.data(), s.ldz, x.tokens, false, outer.p0, outer.p1);
}

// The candidates among this thread's neurons; counts: for each token.
void Predictor::list(int thread, Workspace& w, int64_t tokens, int64_t* counts) const {
  NeuronLists& s = w.lists();
  NeuronLists::Share& own = s.shares[(size_t)thread];
  const Columns mine(*out, *w.pool, thread);
  std::fill(counts, counts + PI_NEURON_TOKENS, 0);
  own.n = w.kernels->neurons.keep(s.z.data() + mine.c0, s.ldz, tokens, mine.n(), 0, above_, (int32_t)mine.c0,
                                  own.listed.data(), counts);
}

void Predictor::list_marked(int thread, Workspace& w, int64_t tokens) const {
  NeuronLists& s = w.lists();
  NeuronLists::Share& of_thread = s.shares[(size_t)thread];
  list(thread, w, tokens, of_thread.counts);
  if (tokens > 1) mark(s, of_thread.listed.data(), of_thread.n, tokens);
}

void Predictor::mark(NeuronLists& s, const int32_t* of, int64_t n, int64_t tokens) const {
  for (int64_t j = 0; j < n; j++) s.selected_by[(size_t)of[j]] = 0;
  for (int64_t i = 0; i < tokens; i++) {
    const float* z = s.z.data() + i * s.ldz;
    for (int64_t j = 0; j < n; j++) s.selected_by[(size_t)of[j]] |= (uint32_t)candidate(z[of[j]]) << i;
  }
}

// If a token has fewer candidates than the floor, its largest become candidates. All threads reach the same result.
void Predictor::reach_floor(int thread, Workspace& w, int64_t tokens) const {
  NeuronLists& s = w.lists();
  const int64_t neurons = out->rows, least = std::min(floor, neurons);
  std::vector<int64_t> few;
  for (int64_t i = 0; i < tokens; i++) {
    int64_t n = 0;
    for (const NeuronLists::Share& share : s.shares) n += share.counts[i];
    if (n < least) few.push_back(i);
  }
  if (few.empty()) return;
  w.pool->barrier();  // the counts have been read
  if (thread == 0) {
    std::vector<int32_t> order((size_t)neurons);
    for (int64_t i : few) {
      float* z = s.z.data() + i * s.ldz;
      std::iota(order.begin(), order.end(), 0);
      const auto guess = [z](int32_t at) { return isnan(z[at]) ? INFINITY : z[at]; };  // an order even among NaNs
      std::nth_element(order.begin(), order.begin() + (least - 1), order.end(), [guess](int32_t a, int32_t b) {
        return guess(a) > guess(b) || (guess(a) == guess(b) && a < b);
      });
      for (int64_t j = 0; j < least; j++) z[order[(size_t)j]] = INFINITY;
    }
  }
  w.pool->barrier();
  list_marked(thread, w, tokens);
  w.pool->barrier();
}
