#include "neuron_lists.h"

#include <algorithm>

#include "pool.h"

NeuronLists::NeuronLists(int threads, int64_t n, int64_t d, int64_t r, const NeuronLists* smaller)
    : neurons(std::max(n, smaller ? smaller->neurons : 0)),
      d_model(std::max(d, smaller ? smaller->d_model : 0)),
      rank(std::max(r, smaller ? smaller->rank : 0)),
      ldz(pi_round_up(neurons, PI_GROUP)),
      ldr(pi_round_up(rank, PI_LANES)),
      lds(pi_round_up(d_model, PI_LANES)),
      selected_by((size_t)ldz),
      z((size_t)(rank ? ldz * PI_NEURON_TOKENS : 0)),
      hidden((size_t)(ldr * PI_NEURON_TOKENS)),
      shares((size_t)threads) {
  wave.neurons.resize((size_t)neurons);
  for (Share& s : shares) {
    s.listed.resize((size_t)(ldz + PI_LANES));
    s.taken.resize((size_t)neurons);
    s.sums.resize((size_t)(lds * PI_NEURON_TOKENS));
  }
}

bool NeuronLists::holds(int64_t n, int64_t d, int64_t r) const { return n <= neurons && d <= d_model && r <= rank; }

int64_t NeuronLists::take(int thread, bool whole_groups) {
  std::vector<int32_t>& taken = shares[(size_t)thread].taken;
  int64_t total = 0, begin, end, at = 0, n = 0;
  for (const Share& other : shares) total += other.n;
  share(total, 1, (int)shares.size(), thread, &begin, &end);
  if (whole_groups) {
    const auto listed = [this](int64_t i) {
      const Share* from = shares.data();
      for (; i >= from->n; from++) i -= from->n;
      return from->listed[(size_t)i];
    };
    const auto whole = [&](int64_t i) {
      while (i > 0 && i < total && listed(i - 1) / PI_GROUP == listed(i) / PI_GROUP) i++;
      return i;
    };
    begin = whole(begin);
    end = whole(end);
  }
  for (const Share& other : shares) {
    const int64_t from = std::max(begin - at, (int64_t)0), to = std::min(end - at, other.n);
    for (int64_t j = from; j < to; j++) taken[(size_t)n++] = other.listed[(size_t)j];
    at += other.n;
  }
  return n;
}
