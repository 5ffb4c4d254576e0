#include "neuron_lists.h"

#include <algorithm>

#include "pool.h"

namespace {
// Parts of a thread, at most, and neurons of a part that is not alone, at least: each costs a pass over a row of the output.
constexpr int64_t PARTS = 4, LEAST = 128;
}  // namespace

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
      shares((size_t)threads),
      sums_(threads * PARTS * part_floats(PI_NEURON_TOKENS) * (int64_t)sizeof(float)) {
  wave.neurons.resize((size_t)neurons);
  for (Share& s : shares) {
    s.listed.resize((size_t)(ldz + PI_LANES));
    s.taken.resize((size_t)neurons);
    s.part_ends.reserve(PARTS);
  }
}

bool NeuronLists::holds(int64_t n, int64_t d, int64_t r) const { return n <= neurons && d <= d_model && r <= rank; }

std::vector<int64_t> NeuronLists::numbers_listed() const {
  std::vector<int64_t> numbers;
  for (const Share& other : shares) numbers.push_back(other.n);
  return numbers;
}

int NeuronLists::parts() const {
  int64_t total = 0;
  for (const int64_t n : numbers_listed()) total += n;
  const int64_t threads = (int64_t)shares.size();
  return (int)(threads * (threads == 1 ? 1 : std::clamp(total / (LEAST * threads), (int64_t)1, PARTS)));
}

int64_t NeuronLists::take(int i, int parts, bool whole_groups, int32_t* to) const {
  const std::vector<int64_t> numbers = numbers_listed();  // a copy: a thread that is late reads what others write
  int64_t total = 0, begin, end, at = 0, taken = 0;
  for (const int64_t n : numbers) total += n;
  if (total > neurons) return 0;
  share(total, 1, parts, i, &begin, &end);
  if (whole_groups) {
    const auto group = [&](int64_t j) {
      size_t from = 0;
      for (; j >= numbers[from]; from++) j -= numbers[from];
      return shares[from].listed[(size_t)j] / PI_GROUP;
    };
    const auto whole = [&](int64_t j) {
      while (j > 0 && j < total && group(j - 1) == group(j)) j++;
      return j;
    };
    begin = whole(begin);
    end = whole(end);
  }
  for (size_t from = 0; from < numbers.size(); from++) {
    const int64_t first = std::max(begin - at, (int64_t)0), last = std::min(end - at, numbers[from]);
    if (first < last) std::copy_n(shares[from].listed.data() + first, last - first, to + taken);
    taken += std::max(last - first, (int64_t)0);
    at += numbers[from];
  }
  return taken;
}

int64_t NeuronLists::take_parts(int thread, int parts, bool whole_groups) {
  Share& own = shares[(size_t)thread];
  int64_t first, last, n = 0;
  share(parts, 1, (int)shares.size(), thread, &first, &last);
  own.first_part = (int)first;
  own.part_ends.clear();
  for (int64_t i = first; i < last; i++)
    own.part_ends.push_back(n += take((int)i, parts, whole_groups, own.taken.data() + n));
  return own.n_taken = n;
}
