// Lists of neurons on their way: each thread lists those of its share of a layer that are wanted, then takes an even
// part of all that are listed and sums it. One set serves all layers.
#pragma once
#include <vector>

#include "bundles.h"
#include "weights.h"

class NeuronLists {
 public:
  // For so many neurons and a predictor of that rank (0: none); what `smaller` holds fits too, which may be null.
  NeuronLists(int threads, int64_t neurons, int64_t d_model, int64_t rank, const NeuronLists* smaller);
  bool holds(int64_t neurons, int64_t d_model, int64_t rank) const;

  struct Share {  // of a thread
    std::vector<int32_t> listed;
    int64_t n;                         // how many are listed
    int64_t counts[PI_NEURON_TOKENS];  // and for each token
    NeuronCounts done;
    NeuronBlock block;
    std::vector<int32_t> part;  // its part of the lists of all threads
    Vector sums;                // what its neurons add, [tokens][lds]
  };
  const int64_t neurons, d_model, rank, ldz, ldr, lds;
  std::vector<uint32_t> wanted;  // by place, of what is listed: the tokens that want it, a bit each
  Vector z, hidden;              // of a predictor, [tokens][ldz] and [tokens][ldr]
  std::vector<Share> shares;

  // Makes the thread's part, in the order of the lists; cut between groups of neurons if `whole_groups`. Its length.
  int64_t take_part(int thread, bool whole_groups);
};
