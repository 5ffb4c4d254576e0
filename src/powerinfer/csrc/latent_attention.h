// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): the cache has one key for all heads of a layer, the token's
// latents followed by a rotated part; its value are the latents. Keys and values of heads are never made: what would make
// them is multiplied with queries, and with what attention gives, instead.
#pragma once
#include "program.h"

struct LatentInput {
  int layer;
  PiAttentionSettings settings;
  Norm norm;                         // of x
  std::shared_ptr<Matrix> q_latent;  // null: queries are made from x
  Norm q_norm;                       // of their latents
  std::shared_ptr<Matrix> q;         // of all heads: a part [width of k_b] that is not rotated, then one that is
  std::shared_ptr<Matrix> kv;        // latents, then the rotated part of the key
  Norm kv_norm;                      // of the latents
  std::shared_ptr<Matrix> k_b;       // of all heads, one below the other, each in whole panels: [latents, its width]
  int rope;                          // a table of `add_rope`, -1: nothing is rotated
};

struct LatentOutput {
  int layer;
  std::shared_ptr<Matrix> v_b;  // of all heads, one below the other: [a head's values, latents]
  std::shared_ptr<Matrix> o;
  Norm norm;  // of what is added to x
};

// Buffers for a step's rows.
struct LatentRows {
  struct Sizes {
    int64_t tokens, q_latent, heads, kv, widest;  // heads: of queries or values; widest: columns of a head's matrix
  };
  LatentRows(const Sizes& sizes, int threads);

  const Sizes sizes;
  const int64_t ldq, ldh, ldk;
  Mapping q_latents, heads, keys;  // [tokens][ldq], [tokens][ldh], [tokens][ldk]
  std::vector<ActMemory> own;      // of the threads
  float* floats(const Mapping& of) const { return (float*)of.data(); }
};
