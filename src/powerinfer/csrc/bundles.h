// The neurons of one layer as bundles, and the sum of listed neurons: what each device computes for its own part of
// an FFN.
#pragma once
#include <memory>
#include <vector>

#include "activation.h"
#include "slots.h"
#include "table.h"

// Bytes of the input of pack_bundle_rows for `rows` neurons: rows as stored; for types across neurons whole groups, each k
// consecutive blocks.
int64_t bundle_rows_source_bytes(int type, int64_t rows, int64_t k);
// The gate, up or down rows of a group of at most PI_GROUP neurons: bundles lie `pitch` apart, the row at byte `at`.
// Neurons that are missing become zeros.
void pack_bundle_rows(int type, int kind, int64_t rows, int64_t k, const uint8_t* src, uint8_t* group, int64_t pitch,
                      int64_t at);
// The same of a group of a type across neurons, whose blocks lie `stride` bytes apart, one for each of k columns.
void pack_group_across(int type, int64_t k, const uint8_t* blocks, int64_t stride, uint8_t* group, int64_t pitch,
                       int64_t at);
// Where the elements of a row lie: the byte of each, of F16 and BF16 the first. Two codes of 4 bits share a byte.
void bundle_row_order(int type, int kind, int64_t k, int32_t* out);
// The values of the row of neuron i.
void unpack_bundle_row(int kind, const PiRows& rows, int64_t i, float* out);

// The form of activations that the kernels read instead of q and d, pi_lanes_bytes per token.
void fill_lanes(const PiActs* x, int64_t tokens, uint8_t* out);

// Neurons of one layer.
struct Bundles {
  PiRows gate, up, down;                      // gate.groups null: no gate
  int64_t neurons;                            // places: where groups have fewer bundles, some are empty
  NeuronSpec spec;                            // biases and limits have a value for every place
  std::vector<int32_t> members;               // the places that hold a neuron, ascending
  std::vector<uint32_t> lines, shared_lines;  // of rows, where these do not lie group by group, or are in `slots`
  // Where they rest on disk: items are neurons, with all that is read of them. firsts: the rows of `first` are there;
  // else a matrix or `own_firsts` has them, and the groups of `first` are not null but not to be read.
  std::shared_ptr<Slots> slots = nullptr;
  bool firsts = true;
  // Where they are not, and no matrix has them either: the first rows of the members, one after another, of which
  // n_firsts are there; by place, where in it a neuron's row begins, in lines.
  std::shared_ptr<Mapping> own_firsts = nullptr;
  int64_t n_firsts = 0;
  std::vector<uint32_t> first_lines = {};
  bool gated() const { return gate.groups != nullptr; }
  const PiRows& first() const { return gated() ? gate : up; }  // what the activation is on
  const std::vector<float>& first_bias() const { return spec.first_bias(gated()); }
  bool complete() const { return (int64_t)members.size() == neurons; }  // whether every place holds a neuron
  int forms() const { return pi_form(gate.groups ? gate.type : up.type) | pi_form(up.type); }
  // Bytes of the rows of a neuron of an expert on disk: of down, behind those of up unless a matrix has these.
  int64_t resting_bytes() const { return down.at + pi_row_bytes(down.type, down.k); }
  // Of neurons on disk: only these are members from now on, with room for their first rows where these are not read.
  void keep(std::vector<int32_t> members);
  void add_firsts(const uint8_t* rows, int64_t n);  // of the next members
};

// Buffers for processing a list of neurons, a block at a time.
struct NeuronBlock {
  // For several tokens few, so that a row stays in the L2 cache until all have been multiplied with it; for one, which
  // reads each row once, more: every change from gates to up and to down starts with rows that nothing asked for.
  enum { NEURONS = 64, NEURONS_OF_ONE = 256 };
  static int64_t most(int64_t tokens) { return tokens == 1 ? NEURONS_OF_ONE : NEURONS; }
  std::vector<uint8_t> lanes;
  enum { CELLS = PI_NEURON_TOKENS * NEURONS };
  int8_t q[CELLS];
  float d[CELLS];
  int32_t index[NEURONS_OF_ONE + PI_LANES], position[NEURONS_OF_ONE + PI_LANES];
  float h[CELLS], more[CELLS];
  uint32_t tokens_of[NEURONS_OF_ONE];  // the tokens that count for each neuron, a bit each
  PiPair pairs[CELLS];                 // (neuron, token) pairs, if few are left; then h has one value per pair
};

// Numbers of rows of bundles read, of shared scales read, and of nonzero neurons, over all tokens.
struct NeuronCounts {
  int64_t first, up, down, shared, active;
};

// Of neurons in groups of `each`, what the activations of token t are multiplied with: of[t * ld + neuron / each]. Null:
// nothing.
struct GroupWeights {
  const float* of = nullptr;
  int64_t ld = 0, each = 1;
};

// Which neurons of a list are active.
struct Firing {
  const float* known;  // activations already computed, [t * ld + neuron]; null: computed from the bundles
  int64_t ld;
  const uint32_t* selected_by;  // where not null, a neuron counts for token t only if bit t of its word is set
  float threshold;              // activations up to it in magnitude count as zero
  GroupWeights groups = {};     // of activations that are not known
  bool multiplied = false;      // `known` are h, as gate and up make it
};

// out[t * ldo ..] += h * down of the listed neurons, each once: their gates where these are not known, then up where a
// gate fired, then down where h is not zero, in one pass over the list. A row is multiplied for the tokens that need it
// or, if these are many, for all. tokens: at most PI_NEURON_TOKENS. fired: by place, incremented by the tokens that a
// neuron fires for.
void add_neurons(const PiKernels* kernels, const Bundles& b, const PiActs* x, int64_t tokens, const int32_t* index,
                 int64_t n, const Firing& firing, NeuronBlock& block, float* out, int64_t ldo, NeuronCounts& counts,
                 int64_t* fired = nullptr);
// The same in two steps, of which the first may take the neurons in any order: h[t * ldh + neuron], which may be `known`;
// then add_neurons where they are known and `multiplied`.
void multiply_neurons(const PiKernels* kernels, const Bundles& b, const PiActs* x, int64_t tokens, const int32_t* index,
                      int64_t n, const Firing& firing, NeuronBlock& block, float* h, int64_t ldh, NeuronCounts& counts);
// The first product alone: its activations, h[t * ldh + neuron]. The list keeps those that fire for any token; returns
// their number.
int64_t activate_neurons(const PiKernels* kernels, const Bundles& b, const PiActs* x, int64_t tokens, int32_t* index,
                         int64_t n, const Firing& firing, NeuronBlock& block, float* h, int64_t ldh,
                         NeuronCounts& counts);
// x with the `lanes` that quantised bundles take, which are in the block's memory.
PiActs with_lanes(const Bundles& b, const PiActs& x, int64_t tokens, NeuronBlock& block);
