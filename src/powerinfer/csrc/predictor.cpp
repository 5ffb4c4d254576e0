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

const PiActs* Predictor::hide(int thread, Workspace& w, const Rows& x) const {
  if (!in) return hidden(thread, w, x);
  NeuronLists& lists = w.lists();
  const auto rectify = [&](const Columns& part, float* rows, int64_t ld) {
    for (int64_t i = 0; i < x.tokens; i++) w.kernels->activate(PI_RELU, 0.0f, rows + i * ld, nullptr, part.lanes());
  };
  w.use_product(
      thread, *in, {}, w.prepare(thread, x, {}, in->form()), x.tokens, lists.hidden.data(), lists.ldr, 1, rectify,
      [](const Columns&) {}, [] {});
  return hidden(thread, w, x);
}

const PiActs* Predictor::hidden(int thread, Workspace& w, const Rows& x) const {
  const NeuronLists& lists = w.lists();
  return w.prepare(thread, in ? Rows{lists.hidden.data(), lists.ldr, rank(), x.tokens} : x, {}, out->form());
}

// selected_by: of each neuron; null: not asked for. then: as of `Pool::phase_then`.
template <class Then>
void Predictor::note(int thread, Workspace& w, const Rows& x, NeuronLists::Notes& to, uint32_t* selected_by,
                     const Then& then) const {
  NeuronLists& lists = w.lists();
  const PiActs* acts = hide(thread, w, x);
  w.use_product(
      thread, *out, {}, acts, x.tokens, lists.z.data(), lists.ldz, PI_GROUP / PI_LANES,
      [](const Columns&, float*, int64_t) {},
      [&](const Columns& part) {
        NeuronLists::note(w.kernels, to, part.c0 / PI_GROUP, lists.z.data() + part.c0, lists.ldz, x.tokens, part.n(),
                          limit(), selected_by ? selected_by + part.c0 : nullptr);
      },
      then);
}

void Predictor::select(int thread, Workspace& w, const Rows& x) const {
  NeuronLists& lists = w.lists();
  note(thread, w, x, lists.notes[0], x.tokens > 1 ? lists.selected_by.data() : nullptr, [&] {
    if (floor > 0) reach_floor(w, 0, x.tokens);
  });
}

void Predictor::score(int thread, Workspace& w, const Rows& x) const {
  NeuronLists& lists = w.lists();
  w.use_product(
      thread, *out, {}, hide(thread, w, x), x.tokens, lists.z.data(), lists.ldz, PI_GROUP / PI_LANES,
      [](const Columns&, float*, int64_t) {}, [](const Columns&) {}, [] {});
}

void Predictor::select_scored(Workspace& w, int64_t token) const {
  NeuronLists& lists = w.lists();
  const float* const z = lists.z.data() + token * lists.ldz;
  w.pool->phase_then(
      out->rows, PI_GROUP, 0,
      [&](int64_t begin, int64_t end, float*) {
        NeuronLists::note(w.kernels, lists.notes[0], begin / PI_GROUP, z + begin, lists.ldz, 1, end - begin, limit());
      },
      [](int64_t, int64_t, float*) {},
      [&] {
        if (floor > 0) reach_floor(w, token, 1);
      });
}

void Predictor::foresee(int thread, Workspace& w, const Rows& x) const {
  note(thread, w, x, w.lists().notes[1], nullptr, [] {});
}

// If one of the tokens from `first` on has fewer candidates than the floor, its largest become candidates. By one
// thread.
void Predictor::reach_floor(Workspace& w, int64_t first, int64_t tokens) const {
  NeuronLists& lists = w.lists();
  float* const scored = lists.z.data() + first * lists.ldz;
  const int64_t neurons = out->rows, least = std::min(floor, neurons);
  const NeuronLists::Run all = neurons_noted();
  if (tokens == 1 && NeuronLists::Noted{&lists.notes[0], &all, 1}.neurons() >= least) return;
  std::vector<int32_t> order;
  for (int64_t i = 0; i < tokens; i++) {
    float* const z = scored + i * lists.ldz;
    if (std::count_if(z, z + neurons, [this](float z_of) { return candidate(z_of); }) >= least) continue;
    order.resize((size_t)neurons);
    std::iota(order.begin(), order.end(), 0);
    const auto guess = [z](int32_t at) { return isnan(z[at]) ? INFINITY : z[at]; };  // an order even among NaNs
    std::nth_element(order.begin(), order.begin() + (least - 1), order.end(),
                     [guess](int32_t a, int32_t b) { return guess(a) > guess(b) || (guess(a) == guess(b) && a < b); });
    for (int64_t j = 0; j < least; j++) z[order[(size_t)j]] = INFINITY;
  }
  if (order.empty()) return;
  NeuronLists::note(w.kernels, lists.notes[0], 0, scored, lists.ldz, tokens, neurons, limit(),
                    tokens > 1 ? lists.selected_by.data() : nullptr);
}
