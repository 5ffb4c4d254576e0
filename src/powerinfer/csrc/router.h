// The router of a layer of experts: it selects a few of them for each token, with weights.
#pragma once
#include <memory>

#include "weights.h"

// How a token's experts follow from the router's scores, one for each expert.
struct RouterSpec {
  int64_t top_k;           // experts of a token
  bool sigmoid = false;    // scores are sigmoids of the logits; else their softmax
  bool normalise = false;  // the weights of a token's experts add up to `scale`
  float scale = 1;         // of the weights
  Vector correction;       // added to scores for the selection alone
  Vector bias;             // of the logits
  Vector factors;          // of each expert, of its weight, behind everything else
  // Experts are selected in the `top_groups` best of `groups` equal groups; a group's score is the sum of its
  // `group_best` best experts' (DeepSeek-V2: 1, V3: 2).
  int64_t groups = 1, top_groups = 1, group_best = 1;
  bool scales_input = false;  // weights multiply what experts read, not what they give
  // SparseMixer: experts are selected one after another, and each weighs its share of the softmax over itself and those
  // left whose logits are near its own: within 2 * nearness, in parts of the larger magnitude. Negative: off.
  float nearness = -1;
};

float sigmoid(float x);

// std::invalid_argument where that many experts cannot be selected so.
void check_router(const RouterSpec& spec, int64_t experts);

// Selects a token's experts, in ascending order, and their weights; logits: [experts], overwritten. Every index is valid
// and occurs once, whatever the logits are. scratch: [experts].
void route(const RouterSpec& spec, float* logits, int64_t experts, float* scratch, int32_t* selected, float* weights);

struct ExpertRows;
struct Thread;

// Selects experts and orders the rows that follow, for the threads of a job.
struct Router {
  RouterSpec spec;
  std::shared_ptr<Matrix> scores;  // null: the experts are selected elsewhere
  int64_t experts;
  // In phases. acts: what the router reads, in the form of its matrix.
  void select(Thread& t, ExpertRows& rows, const PiActs* acts, int64_t tokens) const;
  // Orders rows by expert, and by token within an expert. By one thread.
  void group(ExpertRows& rows, int64_t tokens) const;
};
