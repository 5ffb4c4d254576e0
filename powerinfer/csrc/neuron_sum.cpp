#include "neuron_sum.h"

#include <string.h>

#include <algorithm>

NeuronSum::NeuronSum(std::shared_ptr<Workspace> w, std::shared_ptr<Bundles> b, float threshold_, bool count_fired)
    : workspace(std::move(w)),
      bundles(std::move(b)),
      threshold(threshold_),
      counts_fired(count_fired),
      fired_((size_t)(count_fired ? bundles->neurons : 0)) {
  check(threshold >= 0.0f, "a threshold is negative");
  workspace->reserve_lists(bundles->neurons, bundles->up.k, 0);
}

bool NeuronSum::sum(const float* x, int64_t tokens, const uint8_t* selected, const float* weight, float* out) {
  check(!bundles->spec.activation.in_banks(), "topk selects by the gates of matrices");
  const int64_t k = bundles->up.k, all = (int64_t)bundles->members.size();
  bool any = false;
  for (int64_t t = 0; t < tokens && !any; t++) {
    if (weight && weight[t] == 0.0f) continue;
    any = !selected || std::any_of(selected + t * all, selected + (t + 1) * all, [](uint8_t one) { return one != 0; });
  }
  if (!any) {
    memset(out, 0, (size_t)(tokens * k) * sizeof(float));
    return false;
  }
  const auto job = [&](int thread) {
    for (int64_t first = 0; first < tokens; first += PI_NEURON_TOKENS) {
      const int64_t some = std::min(tokens - first, (int64_t)PI_NEURON_TOKENS);
      sum_selected(thread, {{x + first * k, k, k, some},
                            {},
                            {out + first * k, k, false, {}},
                            tokens <= PI_NEURON_TOKENS,
                            selected ? selected + first * all : nullptr,
                            weight ? weight + first : nullptr});
    }
  };
  workspace->pool->run(job);
  return true;
}

void NeuronSum::sum_selected(int thread, const Piece& piece) {
  const PiActs* acts = workspace->prepare(thread, piece.x, piece.norm, bundles->forms());
  list_selected(thread, piece);
  workspace->pool->barrier();
  sum_listed(thread, piece, acts, nullptr, 0, nullptr);
}

// Lists the neurons of this thread's share that any token selects, and the tokens that do.
void NeuronSum::list_selected(int thread, const Piece& piece) {
  enum { SOME = 256 };
  NeuronLists& lists = workspace->lists();
  NeuronLists::Share& own = lists.shares[(size_t)thread];
  const int64_t all = (int64_t)bundles->members.size();
  int64_t begin, end;
  share(all, 1, workspace->pool->threads(), thread, &begin, &end);
  own.n = 0;
  std::fill(own.counts, own.counts + PI_NEURON_TOKENS, 0);
  for (int64_t j = begin, some; j < end; j += some) {
    some = std::min(end - j, (int64_t)SOME);
    uint32_t selected_by[SOME] = {0};
    for (int64_t i = 0; i < piece.x.tokens; i++) {
      if (piece.weight && piece.weight[i] == 0.0f) continue;
      uint32_t sum = 0;
      for (int64_t c = 0; c < some; c++) {
        const uint32_t one = !piece.selected || piece.selected[i * all + j + c];
        selected_by[c] |= one << i;
        sum += one;
      }
      own.counts[i] += sum;
    }
    for (int64_t c = 0; c < some; c++) {
      if (!selected_by[c]) continue;
      const int32_t place = bundles->members[(size_t)(j + c)];
      lists.selected_by[(size_t)place] = selected_by[c];
      own.listed[(size_t)own.n++] = place;
    }
  }
}

void NeuronSum::sum_listed(int thread, const Piece& piece, const PiActs* acts, const float* known, int64_t ldk,
                           const Predictor* predictor) {
  NeuronLists& lists = workspace->lists();
  NeuronLists::Share& own = lists.shares[(size_t)thread];
  const int64_t tokens = piece.x.tokens, n = lists.take(thread, bundles->down.type == PI_Q4_0X32);
  // With one token, every listed neuron is selected by it.
  const bool some = tokens > 1 && (predictor || piece.selected || piece.weight || piece.groups.of);
  if (some && predictor) predictor->mark(lists, own.taken.data(), n, tokens);
  std::fill(own.sums.begin(), own.sums.begin() + tokens * lists.lds, 0.0f);
  own.done = {};
  int64_t* const fired = piece.fired || !piece.counted || !counts_fired ? piece.fired : fired_.data();
  add_neurons(workspace->kernels, *bundles, acts, tokens, own.taken.data(), n,
              {known, ldk, some ? lists.selected_by.data() : nullptr, threshold, piece.groups}, own.block,
              own.sums.data(), lists.lds, own.done, fired);
  workspace->pool->barrier();
  add_sums(thread, piece);
  if (thread == 0 && piece.counted) count(tokens);
  workspace->pool->barrier();
}

// Adds the sums of all threads to the output, in the order of the threads.
void NeuronSum::add_sums(int thread, const Piece& piece) {
  NeuronLists& lists = workspace->lists();
  int64_t c0, c1;
  share(bundles->up.k, PI_LANES, workspace->pool->threads(), thread, &c0, &c1);
  for (int64_t i = 0; i < piece.x.tokens; i++) {
    float *sum = lists.shares[0].sums.data() + i * lists.lds, *out = piece.to.out + i * piece.to.ld;
    for (size_t other = 1; other < lists.shares.size(); other++) {
      const float* more = lists.shares[other].sums.data() + i * lists.lds;
      for (int64_t c = c0; c < c1; c++) sum[c] += more[c];
    }
    if (piece.weight)
      for (int64_t c = c0; c < c1; c++) sum[c] *= piece.weight[i];
    if (!piece.to.bias.empty())
      for (int64_t c = c0; c < c1; c++) sum[c] += piece.to.bias[(size_t)c];
    if (!piece.to.add) std::fill(out + c0, out + c1, 0.0f);
    for (int64_t c = c0; c < c1; c++) out[c] += sum[c];
  }
}

void NeuronSum::count(int64_t tokens) {
  stats_.steps++;
  stats_.tokens += tokens;
  for (const NeuronLists::Share& share : workspace->lists().shares) {
    for (int64_t i = 0; i < tokens; i++) stats_.candidates += share.counts[i];
    stats_.active += share.done.active;
    stats_.first_rows += share.done.first;
    stats_.up_rows += share.done.up;
    stats_.down_rows += share.done.down;
    stats_.shared_scales += share.done.shared;
  }
}

NeuronStats NeuronSum::stats() const {
  NeuronStats stats;
  workspace->pool->between_jobs([&] { stats = stats_; });
  return stats;
}

void NeuronSum::take_fired(int64_t* out) {
  check(counts_fired, "firings are not counted");
  workspace->pool->between_jobs([&] {
    for (const int32_t place : bundles->members) *out++ = fired_[(size_t)place];
    std::fill(fired_.begin(), fired_.end(), 0);
  });
}

void NeuronSum::clear() {
  workspace->pool->between_jobs([&] { clear_counts(); });
}

void NeuronSum::clear_counts() {
  stats_ = {};
  std::fill(fired_.begin(), fired_.end(), 0);
}
