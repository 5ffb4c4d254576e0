// The neurons of one layer as bundles, and what a list of them adds to the output: the part of the FFN that any device
// computes for its own neurons.
#pragma once
#include <vector>

#include "activation.h"
#include "table.h"

// Bytes in which `rows` neurons of a part come to pack_part: stored rows; of Q4_0X32 whole groups, each a run of k
// blocks of Q4_0.
int64_t part_source_bytes(int type, int64_t rows, int64_t k);
// One part of a group of at most PI_GROUP neurons: bundles lie `pitch` apart, and the part at byte `at` of each.
// Neurons that are missing become zeros.
void pack_part(int type, int kind, int64_t rows, int64_t k, const uint8_t* src, uint8_t* group, int64_t pitch,
               int64_t at);
// Where the elements of a part's row lie: the byte of each, of F16 and BF16 the first. Two codes of 4 bits share a byte.
void part_order(int type, int kind, int64_t k, int32_t* out);
// The values of neuron i of a part.
void unpack_part(int kind, const PiPart& part, int64_t i, float* out);

// What the kernels read of activations instead of q and d, pi_lanes_bytes a token.
void fill_lanes(const PiActs* x, int64_t tokens, uint8_t* out);

// An FFN's neurons: h = act(gate . n + gate_bias) * (up . n + up_bias), or without a gate act(up . n + up_bias).
struct Bundles {
  PiPart gate, up, down;  // gate.groups null: no gate
  int64_t neurons;        // places: where groups have fewer bundles, some are empty
  Activation activation;
  std::vector<float> gate_bias, up_bias;  // empty: none
  std::vector<int32_t> members;           // the places that hold a neuron, ascending
  std::vector<int64_t> offsets;           // of groups, where some have fewer bundles; else empty
  bool gated() const { return gate.groups != nullptr; }
  const PiPart& first() const { return gated() ? gate : up; }  // what the activation is on
  const std::vector<float>& first_bias() const { return gated() ? gate_bias : up_bias; }
  int forms() const { return pi_form(gate.groups ? gate.type : up.type) | pi_form(up.type); }
};

// What is needed to work through a list of neurons, a few at a time.
struct NeuronBlock {
  enum { NEURONS = 64 };  // they stay in the L2 cache from their gates to their rows of down
  std::vector<uint8_t> lanes;
  std::vector<int32_t> sums;
  enum { CELLS = PI_NEURON_TOKENS * NEURONS };
  int8_t q[CELLS];
  float d[CELLS];
  int32_t index[NEURONS + PI_LANES], position[NEURONS + PI_LANES];
  float h[CELLS], more[CELLS];
  uint32_t meet[NEURONS];  // the tokens that count for each neuron, a bit each
  PiPair pairs[CELLS];     // neurons with tokens, where few are left; then h has a value of each
};

// Rows of bundles that were read, scales that rows share, and neurons that were not zero, of all tokens.
struct NeuronCounts {
  int64_t first, up, down, shared, active;
};

// How the neurons of a list become active.
struct Firing {
  const float*
      known;  // activations of the first product that are there already: [t * ld + neuron]; null: from the bundles
  int64_t ld;
  const uint32_t* wanted;  // where not null, a neuron counts for token t only if bit t of its word is set
  float threshold;         // activations up to it in magnitude count as zero
};

// out[t * ldo ..] += h * down of the listed neurons, each once: their gates where these are not known, then up where a
// gate fired, then down where h is not zero, in one pass over the list. A row meets the tokens that need it, or, where
// those are many, all. tokens: at most PI_NEURON_TOKENS. fired: by place, to which the tokens that a neuron fired for
// are added.
void add_neurons(const PiKernels* kernels, const Bundles& b, const PiActs* x, int64_t tokens, const int32_t* index,
                 int64_t n, const Firing& firing, NeuronBlock& block, float* out, int64_t ldo, NeuronCounts& counts,
                 int64_t* fired = nullptr);
