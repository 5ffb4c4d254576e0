#include "neuron_lists.h"

#include <algorithm>
#include <numeric>

#include "pool.h"

namespace {
// Parts of a thread, at most, and neurons of a part that is not alone, at least: each costs a pass over a row of the output.
constexpr int64_t PARTS = 4, LEAST = 128;

// That of the baseline is a call.
int64_t ones(uint32_t x) {
  x -= x >> 1 & 0x55555555u;
  x = (x & 0x33333333u) + (x >> 2 & 0x33333333u);
  return ((x + (x >> 4)) & 0x0f0f0f0fu) * 0x01010101u >> 24;
}
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
  for (Notes& to : notes) {
    to.marks.resize((size_t)(ldz / PI_GROUP));
    to.numbers.resize(to.marks.size());
    to.cells.resize(to.marks.size());
  }
  for (Share& s : shares) {
    s.listed.resize((size_t)(ldz + PI_LANES));
    s.taken.resize((size_t)ldz);
    s.part_ends.reserve(PARTS);
  }
}

bool NeuronLists::holds(int64_t n, int64_t d, int64_t r) const { return n <= neurons && d <= d_model && r <= rank; }

std::vector<int64_t> NeuronLists::numbers_listed() const {
  std::vector<int64_t> numbers;
  for (const Share& other : shares) numbers.push_back(other.n);
  return numbers;
}

void NeuronLists::note(const PiKernels* kernels, Notes& to, int64_t group, const float* h, int64_t ld, int64_t tokens,
                       int64_t n, float limit) {
  enum { GROUPS = 32 };  // groups
  for (int64_t j = 0; j < n; j += GROUPS * PI_GROUP, group += GROUPS) {
    const int64_t length = std::min(n - j, (int64_t)(GROUPS * PI_GROUP)), groups = (length + PI_GROUP - 1) / PI_GROUP;
    uint32_t* const marks = to.marks.data() + group;
    std::fill_n(marks, groups, 0u);
    std::fill_n(to.cells.data() + group, groups, (uint16_t)0);
    for (int64_t i = 0; i < tokens; i++) {
      uint16_t bits[2 * GROUPS];
      bits[2 * groups - 1] = 0;
      kernels->neurons.fires(h + i * ld + j, pi_round_up(length, PI_LANES), limit, bits);
      for (int64_t g = 0; g < groups; g++) {
        const uint32_t left = (uint32_t)std::min(length - g * PI_GROUP, (int64_t)PI_GROUP);
        const uint32_t fires = (bits[2 * g] | (uint32_t)bits[2 * g + 1] << PI_LANES) & UINT32_MAX >> (PI_GROUP - left);
        marks[g] |= fires;
        to.cells[(size_t)(group + g)] = (uint16_t)(to.cells[(size_t)(group + g)] + ones(fires));
      }
    }
    for (int64_t g = 0; g < groups; g++) to.numbers[(size_t)(group + g)] = (uint8_t)ones(marks[g]);
  }
}

int64_t NeuronLists::Noted::groups() const {
  return std::accumulate(runs, runs + n, (int64_t)0, [](int64_t sum, const Run& run) { return sum + run.groups; });
}

int64_t NeuronLists::Noted::neurons() const {
  return std::accumulate(notes->numbers.begin(), notes->numbers.begin() + groups(), (int64_t)0);
}

int64_t NeuronLists::Noted::cells() const { return cells(0, groups() * PI_GROUP); }

int64_t NeuronLists::Noted::cells(int64_t group, int64_t neurons) const {
  const auto first = notes->cells.begin() + group;
  return std::accumulate(first, first + (neurons + PI_GROUP - 1) / PI_GROUP, (int64_t)0);
}

int NeuronLists::parts(const Noted& noted) const {
  int64_t total = noted.notes ? noted.neurons() : 0;
  if (!noted.notes)
    for (const int64_t n : numbers_listed()) total += n;
  const int64_t threads = (int64_t)shares.size();
  return (int)(threads * (threads == 1 ? 1 : std::clamp(total / (LEAST * threads), (int64_t)1, PARTS)));
}

int64_t NeuronLists::take(const Noted& noted, int i, int parts, bool whole_groups, int32_t* to) const {
  return noted.notes ? take_noted(noted, i, parts, whole_groups, to) : take_listed(i, parts, whole_groups, to);
}

int64_t NeuronLists::take_noted(const Noted& noted, int i, int parts, bool whole_groups, int32_t* to) const {
  int64_t begin, end, at = 0, taken = 0;
  share(noted.neurons(), 1, parts, i, &begin, &end);
  const uint32_t* marks = noted.notes->marks.data();
  const uint8_t* numbers = noted.notes->numbers.data();
  for (const NeuronLists::Run* run = noted.runs; run != noted.runs + noted.n; run++)
    for (int64_t g = 0, n; g < run->groups; g++, at += n) {
      n = *numbers++;
      uint32_t left = *marks++;
      if (at + n <= begin || (whole_groups && at < begin)) continue;
      if (at >= end) return taken;
      const int64_t skipped = std::max(begin - at, (int64_t)0), last = whole_groups ? n : std::min(n, end - at);
      for (int64_t j = 0; j < skipped; j++) left &= left - 1;
      for (int64_t j = skipped; j < last && left; j++, left &= left - 1)
        to[taken++] = (int32_t)(run->first + g * PI_GROUP + __builtin_ctz(left));
    }
  return taken;
}

int64_t NeuronLists::take_listed(int i, int parts, bool whole_groups, int32_t* to) const {
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

int64_t NeuronLists::take_parts(const Noted& noted, int thread, int parts, bool whole_groups) {
  Share& of_thread = shares[(size_t)thread];
  int64_t first, last, n = 0;
  share(parts, 1, (int)shares.size(), thread, &first, &last);
  of_thread.first_part = (int)first;
  of_thread.part_ends.clear();
  for (int64_t i = first; i < last; i++)
    of_thread.part_ends.push_back(n += take(noted, (int)i, parts, whole_groups, of_thread.taken.data() + n));
  return of_thread.n_taken = n;
}
