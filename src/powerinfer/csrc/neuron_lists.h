// The neurons of the current step: those that are selected are noted, a bit each, by whoever finds them; then all of them are
// divided evenly into parts, each of which has a sum of its own. One set of buffers serves all layers.
#pragma once
#include <algorithm>
#include <atomic>
#include <vector>

#include "bundles.h"
#include "weights.h"

class NeuronLists {
 public:
  // Room for `neurons` neurons and a predictor of that rank (0: none), and for the contents of `smaller`, if not null.
  NeuronLists(int threads, int64_t neurons, int64_t d_model, int64_t rank, const NeuronLists* smaller);
  bool holds(int64_t neurons, int64_t d_model, int64_t rank) const;

  // Consecutive groups, of the neurons from `first` on; places: of these behind `first`, null: one after another.
  struct Run {
    int64_t first, groups;
    const int32_t* places = nullptr;
  };
  struct Share {  // of a thread
    NeuronCounts done;
    NeuronBlock block;
    std::vector<int32_t> taken;                          // what it sums
    int64_t n_taken, begin, end;                         // the number of these; which of them are in the current wave
    int32_t next() const { return taken[(size_t)end]; }  // behind the current wave
    int first_part;                                      // where it has parts of its own: these,
    std::vector<int64_t> part_ends;                      // and where each ends in `taken`
    std::vector<Run> runs;                               // of the step
  };
  const int64_t neurons, d_model, rank, ldz, ldr, lds;
  std::vector<uint32_t> selected_by;  // by place of a noted neuron: the tokens that select it, a bit each
  Vector z, hidden;                   // of a predictor, [tokens][ldz] and [tokens][ldr]
  Vector h;                           // of neurons on disk that are summed without a program, [tokens][ldz]
  std::vector<Share> shares;
  // A wave of neurons that rest on disk: first those that are there at once; how many were multiplied of either kind.
  struct Wave {
    std::vector<int32_t> neurons;
    int64_t n, there;
    bool last;
    std::atomic<int64_t> done[2];
  } wave;

  // Room for `h` of so many tokens.
  void reserve_h(int64_t tokens) {
    if ((int64_t)h.size() < tokens * ldz) h.resize((size_t)(tokens * ldz));
  }
  // Neurons that are noted: by group a bit for each that is selected for any token, their number, and how often that is.
  struct Notes {
    std::vector<uint32_t> marks;
    std::vector<uint8_t> numbers;
    std::vector<uint16_t> cells;
  } notes[2];
  // The notes of a step, run after run; none where `notes` is null.
  struct Noted {
    const Notes* notes = nullptr;
    const Run* runs = nullptr;
    int64_t n = 0;  // runs
    int64_t groups() const;
    int64_t neurons() const;
    int64_t cells() const;
    int64_t cells(int64_t group, int64_t neurons) const;  // of so many neurons of groups from that one on
  };
  // What a number exceeds, or its magnitude, if it counts. NaN does.
  struct Limit {
    float value;
    bool of_magnitude = true;
  };
  // Notes neurons of groups from `group` on: those of n columns, in any of up to PI_NEURON_TOKENS rows `ld` apart, that
  // exceed the limit. counts_in: for every column, whole groups, the rows in which it does, a bit each; or null. Rows have
  // whole lanes.
  static void note(const PiKernels* kernels, Notes& to, int64_t group, const float* columns, int64_t ld, int64_t rows,
                   int64_t n, Limit limit, uint32_t* counts_in = nullptr);

  // How many parts there are: as many for each thread, more than one where many neurons are noted. Then a thread that
  // has lost its core holds up a small one.
  int parts(const Noted& noted) const;
  // The neurons of part i, in the order of the runs; cut between groups of neurons if `whole_groups`, but for those that
  // have places. Returns their number.
  int64_t take(const Noted& noted, int i, int parts, bool whole_groups, int32_t* to) const;
  // The same of all parts of a thread, to `taken`.
  int64_t take_parts(const Noted& noted, int thread, int parts, bool whole_groups);
  // What the neurons of part i add, [tokens][lds]; behind it the work that this took.
  int64_t part_floats(int64_t tokens) const { return tokens * lds + PI_LANES; }
  float* part(int i, int64_t tokens) const { return (float*)sums_.data() + i * part_floats(tokens); }
  NeuronCounts& done(float* part, int64_t tokens) const { return *(NeuronCounts*)(part + tokens * lds); }
  void clear_part(float* part, int64_t tokens) const { std::fill(part, part + part_floats(tokens), 0.0f); }

 private:
  static_assert(sizeof(NeuronCounts) <= PI_LANES * sizeof(float));
  Mapping sums_;  // of all parts; memory that nobody used is none
};
