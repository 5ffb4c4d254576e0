// A part of an FFN: some neurons of one layer, as bundles, and the sum that they add to the output.
#pragma once
#include <memory>
#include <vector>

#include "bundles.h"
#include "guesses.h"
#include "predictor.h"
#include "workspace.h"

// Work done, summed over the tokens of all counted steps; a row read for several tokens of a step counts once.
struct NeuronStats {
  int64_t steps, tokens, active, candidates, first_rows, up_rows, down_rows, shared_scales;
};

class Program;

class NeuronSum {
 public:
  // threshold: activations up to this magnitude count as zero; count_fired: also count, for each neuron, the tokens
  // that it fires for.
  NeuronSum(std::shared_ptr<Workspace> workspace, std::shared_ptr<Bundles> bundles, float threshold, bool count_fired);
  ~NeuronSum();  // waits for threads that are late
  NeuronSum(const NeuronSum&) = delete;
  NeuronSum& operator=(const NeuronSum&) = delete;

  // out[t] = weight[t] * sum of the neurons that token t selects; x and out [tokens, d_model] without gaps.
  // selected: [tokens][members], not zero where a token selects a neuron; null: all. weight: [tokens], null: 1; a token
  // of weight 0 selects none. Returns false where no neuron is selected: out is zero, and no job was run.
  // Steps of up to PI_NEURON_TOKENS tokens are counted; where the neurons are in memory these are phases alone.
  // ReadError if neurons could not be read from disk: out is void.
  bool sum(const float* x, int64_t tokens, const uint8_t* selected, const float* weight, float* out);

  // Of neurons on disk: only these, places in ascending order, are summed from now on. Where their first rows are not
  // read from there, `add_firsts` gives them, those of the next n members at a time, before they are summed.
  void keep(std::vector<int32_t> members);
  void add_firsts(const uint8_t* rows, int64_t n);

  // ---- Counters. Jobs write them, so these wait until none runs: a job counts as a whole or not at all.
  NeuronStats stats() const;
  // out: for each member the tokens that it fired for; resets that.
  void take_fired(int64_t* out);
  void clear();

  // ---- For the threads of a job
  // Neurons on disk of a further layer, which are guessed by what its predictor makes of this one's input.
  struct Ahead {
    NeuronSum* neurons;
    const Predictor* predictor;
  };
  // Neurons whose rows come into memory while others are added: `begin` by all threads, behind a barrier, when all have
  // taken theirs; whether what was prepared is lost. By thread 0, `next` chooses which of `taken` the threads add now, each
  // the next of its own, which are there until it is called again. False: these are the last.
  struct Waves {
    virtual ~Waves() = default;
    virtual bool begin(int /*thread*/, const NeuronLists&) { return false; }
    virtual bool next(NeuronLists& lists) = 0;
  };
  // The input of up to PI_NEURON_TOKENS tokens, and where their sums go.
  struct Piece {
    Rows x;            // before the norm
    const Norm& norm;  // may be absent
    Destination to;
    bool counted;
    const uint8_t* selected = nullptr;   // [tokens][members]
    const float* weight = nullptr;       // [tokens]
    int64_t* fired = nullptr;            // by place, if the caller counts the tokens that neurons fire for
    GroupWeights groups = {};            // if given, `selected_by` of the lists says which tokens select a neuron
    Program* program = nullptr;          // of the step; `gate` is overwritten with the h of neurons on disk
    Failure* failure = nullptr;          // where these are summed without a program: what could not be read
    Ahead ahead = {};                    // of neurons on disk: read behind those of this layer
    Waves* waves = nullptr;              // of neurons whose activations are known; null: all are in memory, or in slots
    NeuronLists::Noted noted = {};       // the neurons that are summed
    NeuronLists::Noted candidates = {};  // which of them are counted as such; without notes: these
    int64_t first_rows = 0, up_rows = 0;  // that the caller has computed from elsewhere, of the first product and of up
    bool sampled = false;                 // the recall of the predictor is measured
    bool goes_on = false;                 // its step was counted with other tokens
  };
  // Sums the selected neurons; all their gates are computed.
  void sum_selected(int thread, const Piece& piece);
  // Sums the neurons that are noted. In phases where they are in memory, else ends with a barrier. acts: x normalised, in
  // the forms that the bundles require. known: the activations of the first product, [tokens][ldk], null: to be computed;
  // multiplied: they are h, and the neurons are in memory. predicted: a predictor made the notes, and `selected_by`.
  void sum_noted(int thread, const Piece& piece, const PiActs* acts, const float* known, int64_t ldk, bool predicted,
                 bool multiplied = false);
  // Counts a step in which so many cells were candidates, and what was done. By one thread.
  void count(const Piece& piece, int64_t candidates, const NeuronCounts& done);
  // The fewest slots of neurons on disk.
  static int64_t least_slots(const Pool& pool, int64_t neurons);
  // The counters as they are, and their reset; also for who has the pool between jobs.
  const NeuronStats& stats_of_job() const { return stats_; }
  void clear_counts();

  const std::shared_ptr<Workspace> workspace;
  const std::shared_ptr<Bundles> bundles;
  const float threshold;
  const bool counts_fired;
  const std::unique_ptr<Guesses> guesses;  // of neurons on disk; null: they are in memory
  std::vector<int32_t> uses;  // of neurons on disk: counted steps that summed each, until someone resets them

 private:
  void note_selected(const Piece& piece);
  template <class Then>
  void add_parts(int thread, const Piece& piece, const PiActs* acts, const Firing& firing, int parts, int64_t* fired,
                 const Then& then);
  void add_taken(int thread, const PiActs* acts, int64_t tokens, const Firing& firing, int64_t* fired);
  void add_in_waves(int thread, const Piece& piece, const PiActs* acts, const Firing& firing, int64_t* fired);
  void add_from_disk(int thread, const Piece& piece, const PiActs* acts, Firing firing, int64_t* fired);
  int64_t activate_taken(int thread, const PiActs& acts, int64_t tokens, const Firing& firing, float* h, int64_t ldh);
  bool add_across() const { return pi_across(bundles->down.type) >= 0; }
  void next_wave(bool counted);
  void judge_guesses();
  void expect_guessed(const Ahead& ahead, int64_t tokens) const;
  void add_sums(const Piece& piece, int parts, bool phases);
  void add_columns(const Piece& piece, int parts, int64_t c0, int64_t c1, float* out, int64_t ld) const;
  void count_sum(const Piece& piece, int parts, bool phases);

  NeuronStats stats_ = {};
  std::vector<int64_t> fired_;  // by place; empty: not counted
};
