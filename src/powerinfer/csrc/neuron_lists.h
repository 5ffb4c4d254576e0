// Lists of neurons of the current step: each thread lists the selected neurons of its share of a layer, then sums an
// even part of all that are listed. One set of buffers serves all layers.
#pragma once
#include <atomic>
#include <vector>

#include "bundles.h"
#include "weights.h"

class NeuronLists {
 public:
  // Room for `neurons` neurons and a predictor of that rank (0: none), and for the contents of `smaller`, if not null.
  NeuronLists(int threads, int64_t neurons, int64_t d_model, int64_t rank, const NeuronLists* smaller);
  bool holds(int64_t neurons, int64_t d_model, int64_t rank) const;

  struct Share {  // of a thread
    std::vector<int32_t> listed;
    int64_t n;                         // number listed
    int64_t counts[PI_NEURON_TOKENS];  // and for each token
    int64_t cells;                     // of the last list, in all
    NeuronCounts done;
    NeuronBlock block;
    std::vector<int32_t> taken;                          // what it sums of the lists of all threads
    int64_t n_taken, begin, end;                         // the number of these; which of them are in the current wave
    int32_t next() const { return taken[(size_t)end]; }  // behind the current wave
    Vector sums;                                         // what its neurons add, [tokens][lds]
  };
  const int64_t neurons, d_model, rank, ldz, ldr, lds;
  std::vector<uint32_t> selected_by;  // by place of a listed neuron: the tokens that select it, a bit each
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
  // Makes `taken` of the thread, in the order of the lists; cut between groups of neurons if `whole_groups`. Returns its
  // length.
  int64_t take(int thread, bool whole_groups);
};
