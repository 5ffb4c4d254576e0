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

constexpr int64_t NOTED = 32;    // groups at once
constexpr int64_t UNROLLED = 8;  // neurons of a group

// Of a row of n numbers, up to NOTED groups, a bit for each that exceeds the limit, in words of whole groups.
void mark(const PiKernels* kernels, const float* row, int64_t n, NeuronLists::Limit limit, uint32_t* words) {
  const int64_t groups = (n + PI_GROUP - 1) / PI_GROUP;
  if (limit.of_magnitude) {
    uint16_t bits[2 * NOTED];
    bits[2 * groups - 1] = 0;
    kernels->neurons.fires(row, pi_round_up(n, PI_LANES), limit.value, bits);
    for (int64_t g = 0; g < groups; g++) words[g] = bits[2 * g] | (uint32_t)bits[2 * g + 1] << PI_LANES;
    if (n % PI_GROUP) words[groups - 1] &= UINT32_MAX >> (PI_GROUP - n % PI_GROUP);
    return;
  }
  int32_t places[NOTED * PI_GROUP + PI_LANES];
  int64_t count = 0;
  kernels->neurons.keep(row, 0, 1, n, 0, limit.value, 0, places, &count);
  std::fill_n(words, groups, 0u);
  for (int64_t i = 0; i < count; i++) words[places[i] / PI_GROUP] |= 1u << places[i] % PI_GROUP;
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
    s.taken.resize((size_t)(ldz + UNROLLED));
    s.part_ends.reserve(PARTS);
  }
}

bool NeuronLists::holds(int64_t n, int64_t d, int64_t r) const { return n <= neurons && d <= d_model && r <= rank; }

void NeuronLists::note(const PiKernels* kernels, Notes& to, int64_t group, const float* columns, int64_t ld,
                       int64_t rows, int64_t n, Limit limit, uint32_t* counts_in) {
  for (int64_t j = 0; j < n; j += NOTED * PI_GROUP, group += NOTED) {
    const int64_t length = std::min(n - j, (int64_t)(NOTED * PI_GROUP)), groups = (length + PI_GROUP - 1) / PI_GROUP;
    uint32_t* const marks = to.marks.data() + group;
    std::fill_n(marks, groups, 0u);
    std::fill_n(to.cells.data() + group, groups, (uint16_t)0);
    if (counts_in) std::fill_n(counts_in + j, groups * PI_GROUP, 0u);
    for (int64_t i = 0; i < rows; i++) {
      uint32_t counting[NOTED];
      mark(kernels, columns + i * ld + j, length, limit, counting);
      for (int64_t g = 0; g < groups; g++) {
        marks[g] |= counting[g];
        if (rows > 1) to.cells[(size_t)(group + g)] = (uint16_t)(to.cells[(size_t)(group + g)] + ones(counting[g]));
        for (uint32_t rest = counts_in ? counting[g] : 0; rest; rest &= rest - 1)
          counts_in[j + g * PI_GROUP + __builtin_ctz(rest)] |= 1u << i;
      }
    }
    for (int64_t g = 0; g < groups; g++) {
      const int64_t number = ones(marks[g]);
      to.numbers[(size_t)(group + g)] = (uint8_t)number;
      if (rows == 1) to.cells[(size_t)(group + g)] = (uint16_t)number;
    }
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
  const int64_t threads = (int64_t)shares.size();
  return (int)(threads * (threads == 1 ? 1 : std::clamp(noted.neurons() / (LEAST * threads), (int64_t)1, PARTS)));
}

int64_t NeuronLists::take(const Noted& noted, int i, int parts, bool whole_groups, int32_t* to) const {
  int64_t begin, end, at = 0, taken = 0;
  share(noted.neurons(), 1, parts, i, &begin, &end);
  const uint32_t* marks = noted.notes->marks.data();
  const uint8_t* numbers = noted.notes->numbers.data();
  for (const NeuronLists::Run* run = noted.runs; run != noted.runs + noted.n; run++) {
    const bool cuts_none = whole_groups && !run->places;
    for (int64_t g = 0, n; g < run->groups; g++, at += n) {
      n = *numbers++;
      uint32_t left = *marks++;
      if (at + n <= begin || (cuts_none && at < begin)) continue;
      if (at >= end) return taken;
      const int64_t skipped = std::max(begin - at, (int64_t)0), last = cuts_none ? n : std::min(n, end - at);
      for (int64_t j = 0; j < skipped; j++) left &= left - 1;
      const int32_t first = (int32_t)(run->places ? g * PI_GROUP : run->first + g * PI_GROUP);
      for (int64_t j = skipped; j < last; j += UNROLLED)  // whole ones of these: how often is no surprise to the CPU
        for (int64_t i = 0; i < UNROLLED; i++, left &= left - 1)
          to[taken + j - skipped + i] = first + __builtin_ctz(left | 1u << (PI_GROUP - 1));
      for (int64_t j = skipped; j < last && run->places; j++) {
        int32_t& place = to[taken + j - skipped];
        place = (int32_t)run->first + run->places[place];
      }
      taken += std::max(last - skipped, (int64_t)0);
    }
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
