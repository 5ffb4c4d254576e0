#include "neuron_sum.h"

#include <math.h>
#include <string.h>

#include <algorithm>

#include "program.h"

namespace {

constexpr int ENOUGH = 1024;  // neurons, after which it is judged whether guesses are worth it
// Up to so many floats for the sums of parts, one for each thread, one thread adds them up: faster than a phase.
constexpr int64_t ALONE = 2048;
const Norm NO_NORM;
const Vector NO_BIASES;

// What a caller gives to be summed.
struct Input {
  const float* x;
  const uint8_t* selected;
  const float* weight;
};

// The same for threads that may be late, when the caller has it no more.
struct Copy {
  Copy(const Input& from, int64_t tokens, int64_t k, int64_t members)
      : x(from.x, from.x + tokens * k),
        weight(from.weight, from.weight + (from.weight ? tokens : 0)),
        selected(from.selected, from.selected + (from.selected ? tokens * members : 0)),
        input{x.data(), from.selected ? selected.data() : nullptr, from.weight ? weight.data() : nullptr} {}
  const std::vector<float> x, weight;
  const std::vector<uint8_t> selected;
  const Input input;
};

}  // namespace

NeuronSum::NeuronSum(std::shared_ptr<Workspace> w, std::shared_ptr<Bundles> b, float threshold_, bool count_fired)
    : workspace(std::move(w)),
      bundles(std::move(b)),
      threshold(threshold_),
      counts_fired(count_fired),
      guesses(bundles->slots ? std::make_unique<Guesses>(bundles->slots, ENOUGH) : nullptr),
      uses((size_t)(bundles->slots ? bundles->neurons : 0)),
      fired_((size_t)(count_fired ? bundles->neurons : 0)) {
  check(threshold >= 0.0f, "a threshold is negative");
  check(!bundles->slots || bundles->slots->slots() >= least_slots(*workspace->pool, bundles->neurons),
        "there are fewer slots than the threads compute at once");
  workspace->reserve_lists(bundles->neurons, bundles->up.k, 0);
}

NeuronSum::~NeuronSum() {
  workspace->pool->between_jobs([] {});
}

bool NeuronSum::sum(const float* x, int64_t tokens, const uint8_t* selected, const float* weight, float* out) {
  check(!bundles->spec.activation.competes(), "topk and gaussian select by the gates of matrices");
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
  check(bundles->firsts || (bundles->own_firsts && bundles->n_firsts == all),
        "the neurons' first rows are not in memory");
  const auto piece_of = [=](const Input& input, int64_t first) -> Piece {
    return {{input.x + first * k, k, k, std::min(tokens - first, (int64_t)PI_NEURON_TOKENS)},
            NO_NORM,
            {out + first * k, k, false, NO_BIASES},
            tokens <= PI_NEURON_TOKENS,
            input.selected ? input.selected + first * all : nullptr,
            input.weight ? input.weight + first : nullptr};
  };
  const Input input{x, selected, weight};
  if (tokens <= PI_NEURON_TOKENS && !bundles->slots) {
    const auto copy = std::make_shared<const Copy>(input, tokens, k, all);
    workspace->pool->run_phases([] {}, [=](int thread) { sum_selected(thread, piece_of(copy->input, 0)); }, nullptr);
    return true;
  }
  Failure failure;
  const auto prepare = [&] {
    if (bundles->slots) workspace->lists().reserve_h(std::min(tokens, (int64_t)PI_NEURON_TOKENS));
  };
  const auto job = [&](int thread) {
    for (int64_t first = 0; first < tokens; first += PI_NEURON_TOKENS) {
      Piece piece = piece_of(input, first);
      piece.failure = &failure;
      sum_selected(thread, piece);
    }
  };
  workspace->pool->run(prepare, job);
  if (!failure.what.empty()) throw ReadError(failure.what);
  return true;
}

void NeuronSum::keep(std::vector<int32_t> members) {
  check((bool)bundles->slots, "which neurons there are is fixed where they are in memory");
  for (size_t i = 0; i < members.size(); i++)
    check(members[i] >= (i ? members[i - 1] + 1 : 0) && members[i] < bundles->neurons,
          "no such neurons, or in disorder");
  workspace->pool->between_jobs([&] { bundles->keep(std::move(members)); });
}

void NeuronSum::add_firsts(const uint8_t* rows, int64_t n) {
  workspace->pool->between_jobs([&] { bundles->add_firsts(rows, n); });
}

void NeuronSum::sum_selected(int thread, const Piece& piece) {
  const NeuronLists::Run all{0, (bundles->neurons + PI_GROUP - 1) / PI_GROUP};
  Piece selected = piece;
  selected.noted = {&workspace->lists().notes[0], &all, 1};
  note_selected(selected);
  sum_noted(thread, selected, workspace->prepare(thread, piece.x, piece.norm, bundles->forms()), nullptr, 0, false);
}

// Notes the neurons that any token selects, and the tokens that do, in a phase.
void NeuronSum::note_selected(const Piece& piece) {
  enum { SOME = 256 };
  NeuronLists& lists = workspace->lists();
  NeuronLists::Notes& notes = lists.notes[0];
  const std::vector<int32_t>& members = bundles->members;
  const auto first_of = [&](int64_t group) {
    return std::lower_bound(members.begin(), members.end(), (int32_t)(group * PI_GROUP)) - members.begin();
  };
  workspace->pool->phase(piece.noted.groups(), 1, [&](int64_t g0, int64_t g1) {
    std::fill(notes.marks.begin() + g0, notes.marks.begin() + g1, 0u);
    std::fill(notes.numbers.begin() + g0, notes.numbers.begin() + g1, (uint8_t)0);
    std::fill(notes.cells.begin() + g0, notes.cells.begin() + g1, (uint16_t)0);
    const int64_t end = first_of(g1);
    for (int64_t j = first_of(g0), some; j < end; j += some) {
      some = std::min(end - j, (int64_t)SOME);
      uint32_t selected_by[SOME] = {0};
      for (int64_t i = 0; i < piece.x.tokens; i++) {
        if (piece.weight && piece.weight[i] == 0.0f) continue;
        const uint8_t* const selected = piece.selected ? piece.selected + i * (int64_t)members.size() + j : nullptr;
        for (int64_t c = 0; c < some; c++) selected_by[c] |= (uint32_t)(!selected || selected[c]) << i;
      }
      for (int64_t c = 0; c < some; c++) {
        if (!selected_by[c]) continue;
        const size_t place = (size_t)members[(size_t)(j + c)], group = place / PI_GROUP;
        lists.selected_by[place] = selected_by[c];
        notes.marks[group] |= 1u << place % PI_GROUP;
        notes.numbers[group]++;
        notes.cells[group] = (uint16_t)(notes.cells[group] + __builtin_popcount(selected_by[c]));
      }
    }
  });
}

// Each part to a sum of its own, in a phase. Which neurons fire is counted as they are added: then each part is by one
// thread. then: as of `Pool::phase_then`.
template <class Then>
void NeuronSum::add_parts(int thread, const Piece& piece, const PiActs* acts, const Firing& firing, int parts,
                          int64_t* fired, const Then& then) {
  NeuronLists& lists = workspace->lists();
  const int64_t tokens = piece.x.tokens;
  NeuronLists::Share& of_thread = lists.shares[(size_t)thread];
  const int64_t floats = lists.part_floats(tokens);
  const PiActs in =
      firing.multiplied || workspace->pool->is_late() ? *acts : with_lanes(*bundles, *acts, tokens, of_thread.block);
  workspace->pool->phase_then(
      parts, 1, fired ? 0 : floats,
      [&](int64_t begin, int64_t end, float* aside) {
        for (int64_t i = begin; i < end; i++) {
          float* const sums = aside ? aside + (i - begin) * floats : lists.part((int)i, tokens);
          lists.clear_part(sums, tokens);
          const int64_t n = lists.take(piece.noted, (int)i, parts, add_across(), of_thread.taken.data());
          if (workspace->pool->is_void()) return;
          add_neurons(workspace->kernels, *bundles, &in, tokens, of_thread.taken.data(), n, firing, of_thread.block,
                      sums, lists.lds, lists.done(sums, tokens), fired);
        }
      },
      [&](int64_t begin, int64_t end, const float* aside) {
        if (aside) std::copy_n(aside, (end - begin) * floats, lists.part((int)begin, tokens));
      },
      then);
}

void NeuronSum::sum_noted(int thread, const Piece& piece, const PiActs* acts, const float* known, int64_t ldk,
                          bool predicted, bool multiplied) {
  NeuronLists& lists = workspace->lists();
  NeuronLists::Share& own = lists.shares[(size_t)thread];
  const int64_t tokens = piece.x.tokens;
  const int parts = lists.parts(piece.noted);
  // With one token, every noted neuron is selected by it.
  const bool some = tokens > 1 && (predicted || piece.selected || piece.weight || piece.groups.of);
  int64_t* const fired = piece.fired || !piece.counted || !counts_fired ? piece.fired : fired_.data();
  const float limit = multiplied ? 0.0f : threshold;  // which is of activations
  const Firing firing = {known, ldk, some ? lists.selected_by.data() : nullptr, limit, piece.groups, multiplied};
  const bool phases = !bundles->slots && !piece.waves;
  if (phases && (int64_t)lists.shares.size() * tokens * bundles->up.k <= ALONE)
    return add_parts(thread, piece, acts, firing, parts, fired, [&] {
      add_columns(piece, parts, 0, bundles->up.k, piece.to.out, piece.to.ld);
      if (piece.counted) count_sum(piece, parts, true);
    });
  if (phases) {
    add_parts(thread, piece, acts, firing, parts, fired, [] {});
    return add_sums(piece, parts, true);
  }
  lists.take_parts(piece.noted, thread, parts, add_across());
  for (size_t i = 0; i < own.part_ends.size(); i++)
    lists.clear_part(lists.part(own.first_part + (int)i, tokens), tokens);
  own.done = {};
  if (bundles->slots) add_from_disk(thread, piece, acts, firing, fired);
  else add_in_waves(thread, piece, acts, firing, fired);
  workspace->pool->barrier();
  if (thread == 0 && bundles->slots) bundles->slots->settle();
  add_sums(piece, parts, false);
  workspace->pool->barrier();
}

// Of what this thread has taken, the neurons of the wave, each to the sum of its part.
void NeuronSum::add_taken(int thread, const PiActs* acts, int64_t tokens, const Firing& firing, int64_t* fired) {
  NeuronLists& lists = workspace->lists();
  NeuronLists::Share& of_thread = lists.shares[(size_t)thread];
  int64_t begin = of_thread.begin;
  for (size_t i = 0; i < of_thread.part_ends.size(); i++) {
    const int64_t end = std::min(of_thread.end, of_thread.part_ends[i]);
    if (begin >= end) continue;
    add_neurons(workspace->kernels, *bundles, acts, tokens, of_thread.taken.data() + begin, end - begin, firing,
                of_thread.block, lists.part(of_thread.first_part + (int)i, tokens), lists.lds, of_thread.done, fired);
    begin = end;
  }
}

// In the order in which they are added if all are there.
void NeuronSum::add_in_waves(int thread, const Piece& piece, const PiActs* acts, const Firing& firing, int64_t* fired) {
  NeuronLists& lists = workspace->lists();
  NeuronLists::Share& own = lists.shares[(size_t)thread];
  own.begin = own.end = 0;
  workspace->pool->barrier();  // all have taken theirs
  if (piece.waves->begin(thread, lists)) acts = workspace->prepare(thread, piece.x, piece.norm, bundles->forms());
  do {
    workspace->pool->barrier();  // all have added those of the wave before
    if (thread == 0) lists.wave.last = !piece.waves->next(lists);
    workspace->pool->barrier();
    add_taken(thread, acts, piece.x.tokens, firing, fired);
  } while (!lists.wave.last);
}

// ---- Neurons on disk ------------------------------------------------------------------------------------------------
// Each thread adds the same neurons in the same order as if all were in memory, in waves that the slots hold, so many of
// every thread. While those that are not there are read, the others are multiplied, by whichever thread is free.

int64_t NeuronSum::least_slots(const Pool& pool, int64_t neurons) {
  return std::min(neurons, pool.threads() * (int64_t)(2 * PI_GROUP));
}

void NeuronSum::add_from_disk(int thread, const Piece& piece, const PiActs* acts, Firing firing, int64_t* fired) {
  NeuronLists& lists = workspace->lists();
  NeuronLists::Share& own = lists.shares[(size_t)thread];
  NeuronLists::Wave& wave = lists.wave;
  Program* const program = piece.program;
  float* const h = program ? program->gate : lists.h.data();
  const int64_t ldh = program ? program->ldh : lists.ldz;
  const auto attempt = [&](const auto& work) {
    if (program) program->attempt(work);
    else piece.failure->attempt(work);
  };
  PiActs in = with_lanes(*bundles, *acts, piece.x.tokens, own.block);
  Firing multiplied = {h, ldh, nullptr, 0.0f};
  multiplied.multiplied = true;
  const auto multiply = [&](int kind) {
    const int64_t begin = kind ? wave.there : 0, end = kind ? wave.n : wave.there;
    const int64_t most = NeuronBlock::NEURONS, some = pi_round_up((end - begin) / (4 * workspace->pool->threads()), 8);
    const int64_t step = std::min(std::max(some, (int64_t)8), most);
    for (int64_t j; (j = begin + wave.done[kind].fetch_add(step, std::memory_order_relaxed)) < end;)
      multiply_neurons(workspace->kernels, *bundles, &in, piece.x.tokens, wave.neurons.data() + j,
                       std::min(step, end - j), firing, own.block, h, ldh, own.done);
    if (thread == 0 && kind == 0) attempt([&] { bundles->slots->wait(); });
    workspace->pool->barrier();
  };
  if (bundles->own_firsts && !firing.known) {  // what does not fire is not read
    own.n_taken = activate_taken(thread, in, piece.x.tokens, firing, h, ldh);
    firing = {h, ldh, nullptr, 0.0f};
  }
  own.end = 0;
  bool first = true;
  do {
    workspace->pool->barrier();  // all have taken theirs, or added those of the wave before
    if (thread == 0 && first) judge_guesses();
    if (thread == 0) next_wave(piece.counted);
    workspace->pool->barrier();
    const bool all_there = wave.there == wave.n;
    if (thread == 0)
      attempt([&] {
        const int64_t n = bundles->slots->want(wave.neurons.data(), wave.n);
        check(n == wave.n, "the slots have no room for the neurons of a step");
      });
    if (first && piece.ahead.neurons) {
      piece.ahead.predictor->foresee(thread, *workspace, piece.x);
      if (thread == 0) attempt([&] { expect_guessed(piece.ahead, piece.x.tokens); });
      acts = workspace->prepare(thread, piece.x, piece.norm, bundles->forms());
      in = with_lanes(*bundles, *acts, piece.x.tokens, own.block);
    }
    first = false;
    if (!all_there) {
      multiply(0);
      multiply(1);
    }
    add_taken(thread, &in, piece.x.tokens, all_there ? firing : multiplied, fired);
  } while (!wave.last);
}

// Activations of what this thread has taken, to h; of each part it keeps those that fire. Returns their number.
int64_t NeuronSum::activate_taken(int thread, const PiActs& acts, int64_t tokens, const Firing& firing, float* h,
                                  int64_t ldh) {
  NeuronLists::Share& of_thread = workspace->lists().shares[(size_t)thread];
  int64_t n = 0, begin = 0;
  for (int64_t& end : of_thread.part_ends) {
    int32_t* const part = of_thread.taken.data() + begin;
    const int64_t left = activate_neurons(workspace->kernels, *bundles, &acts, tokens, part, end - begin, firing,
                                          of_thread.block, h, ldh, of_thread.done);
    std::copy_n(part, left, of_thread.taken.data() + n);
    begin = end;
    end = n += left;
  }
  return n;
}

// Which of the guessed neurons the step needs: those that any thread has taken.
void NeuronSum::judge_guesses() {
  if (!guesses->expects()) return;
  NeuronLists& lists = workspace->lists();
  std::vector<uint8_t> taken((size_t)bundles->neurons);
  for (const NeuronLists::Share& share : lists.shares)
    for (int64_t j = 0; j < share.n_taken; j++) taken[(size_t)share.taken[(size_t)j]] = 1;
  guesses->judge([&](int32_t i) { return taken[(size_t)i] != 0; });
}

// Begins to read what is noted of a further layer, the likelier ones first.
void NeuronSum::expect_guessed(const Ahead& ahead, int64_t tokens) const {
  const NeuronLists& lists = workspace->lists();
  const NeuronLists::Run all = ahead.predictor->neurons_noted();
  std::vector<int32_t> noted(lists.shares[0].taken.size());
  noted.resize((size_t)lists.take({&lists.notes[1], &all, 1}, 0, 1, false, noted.data()));
  std::vector<std::pair<float, int32_t>> ranked;
  for (const int32_t i : noted) {
    float most = -INFINITY;
    for (int64_t t = 0; t < tokens; t++) most = std::max(most, lists.z[(size_t)(t * lists.ldz + i)]);
    ranked.emplace_back(-most, i);
  }
  std::sort(ranked.begin(), ranked.end());
  ranked.resize(ranked.size() - ranked.size() / 4);  // the others are wrong more often
  std::vector<int32_t> items;
  for (const auto& one : ranked) items.push_back(one.second);
  ahead.neurons->guesses->expect(items.data(), (int64_t)items.size());
}

// Chooses what each thread adds next, and lists all of it.
void NeuronSum::next_wave(bool counted) {
  Slots& slots = *bundles->slots;
  NeuronLists& lists = workspace->lists();
  NeuronLists::Wave& wave = lists.wave;
  const bool whole_groups = pi_across(bundles->down.type) >= 0;
  int64_t left = 0;
  for (const NeuronLists::Share& share : lists.shares) left += share.n_taken - share.end;
  // Of more than the slots hold half as many at a time: then half of those that are there stay.
  const int64_t threads = (int64_t)lists.shares.size();
  const int64_t most = left <= slots.most() ? left : slots.most() / (2 * threads * PI_GROUP) * PI_GROUP;
  wave.n = 0;
  wave.last = true;
  for (NeuronLists::Share& share : lists.shares) {
    const int32_t* const taken = share.taken.data();
    share.begin = share.end;
    share.end = std::min(share.n_taken, share.begin + most);
    while (whole_groups && share.end < share.n_taken && share.end > share.begin &&
           taken[share.end - 1] / PI_GROUP == taken[share.end] / PI_GROUP)
      share.end--;
    wave.last = wave.last && share.end == share.n_taken;
    std::copy(taken + share.begin, taken + share.end, wave.neurons.data() + wave.n);
    wave.n += share.end - share.begin;
  }
  for (int64_t j = 0; counted && j < wave.n; j++) uses[(size_t)wave.neurons[(size_t)j]]++;
  slots.let_go();
  slots.fetch(nullptr, 0);  // takes in what has arrived
  int32_t* const all = wave.neurons.data();
  wave.there = std::stable_partition(all, all + wave.n, [&](int32_t i) { return slots.held(i); }) - all;
  for (auto& done : wave.done) done.store(0, std::memory_order_relaxed);
}

// Adds the sums of all parts to the output, in the order of the parts, in a phase. phases: as in `sum_noted`.
void NeuronSum::add_sums(const Piece& piece, int parts, bool phases) {
  const int64_t tokens = piece.x.tokens;
  const Destination& to = piece.to;
  workspace->pool->phase(
      bundles->up.k, PI_LANES, tokens,
      [&](int64_t c0, int64_t c1, float* aside) {
        if (aside) add_columns(piece, parts, c0, c1, aside - c0, c1 - c0);
        else add_columns(piece, parts, c0, c1, to.out, to.ld);
      },
      [&](int64_t c0, int64_t c1, const float* aside) {
        if (aside) copy_rows(aside, c1 - c0, to.out + c0, to.ld, c1 - c0, tokens);
        if (c0 == 0 && piece.counted) count_sum(piece, parts, phases);
      });
}

// The same of columns [c0, c1), to rows `ld` apart.
void NeuronSum::add_columns(const Piece& piece, int parts, int64_t c0, int64_t c1, float* out, int64_t ld) const {
  enum { SOME = 128 };  // columns, whose sum stays in the L1 cache
  const NeuronLists& lists = workspace->lists();
  const int64_t tokens = piece.x.tokens;
  const Destination& to = piece.to;
  for (int64_t i = 0; i < tokens; i++)
    for (int64_t c = c0, n; c < c1; c += n) {
      float sum[SOME];
      n = std::min(c1 - c, (int64_t)SOME);
      std::copy_n(lists.part(0, tokens) + i * lists.lds + c, n, sum);
      for (int part = 1; part < parts; part++) {
        const float* const more = lists.part(part, tokens) + i * lists.lds + c;
        for (int64_t j = 0; j < n; j++) sum[j] += more[j];
      }
      if (piece.weight)
        for (int64_t j = 0; j < n; j++) sum[j] *= piece.weight[i];
      if (!to.bias.empty())
        for (int64_t j = 0; j < n; j++) sum[j] += to.bias[(size_t)(c + j)];
      const float* const before = to.out + i * to.ld + c;
      for (int64_t j = 0; j < n; j++) out[i * ld + c + j] = (to.add ? before[j] : 0.0f) + sum[j];
    }
}

void NeuronSum::count_sum(const Piece& piece, int parts, bool phases) {
  const NeuronLists& lists = workspace->lists();
  const int64_t tokens = piece.x.tokens;
  NeuronCounts done = {piece.first_rows, piece.up_rows, 0, 0, 0};
  const auto add = [&](const NeuronCounts& more) {
    done.active += more.active;
    done.first += more.first;
    done.up += more.up;
    done.down += more.down;
    done.shared += more.shared;
  };
  const NeuronLists::Noted& noted = piece.candidates.notes ? piece.candidates : piece.noted;
  for (const NeuronLists::Share& share : lists.shares)
    if (!phases) add(share.done);
  for (int i = 0; i < parts && phases; i++) add(lists.done(lists.part(i, tokens), tokens));
  count(piece, noted.cells(), done);
}

void NeuronSum::count(const Piece& piece, int64_t candidates, const NeuronCounts& done) {
  stats_.steps += !piece.goes_on;
  stats_.tokens += piece.x.tokens;
  stats_.candidates += candidates;
  stats_.active += done.active;
  stats_.first_rows += done.first;
  stats_.up_rows += done.up;
  stats_.down_rows += done.down;
  stats_.shared_scales += done.shared;
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
