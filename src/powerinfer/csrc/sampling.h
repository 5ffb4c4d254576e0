// The choice of a token out of candidates of its logits, as Python's sampler makes it (runtime/sampling.py).
#pragma once
#include <stdint.h>

// As of kernels/candidates.py: candidates of a row that there always are, and at most; the largest error of their total.
constexpr int LIKELIEST = 64, MOST_CANDIDATES = 128;
constexpr double TOTAL_ERROR = 0x1p-16;

// A row's candidates: the first `count` places have some.
struct Candidates {
  int32_t count;
  float total;
  float values[MOST_CANDIDATES];
  int32_t ids[MOST_CANDIDATES];
};

// How a token is drawn. temperature 0: it is the most likely one; top_k 0: no limit; uniform: in [0, 1).
struct Draw {
  double temperature, top_k, top_p, min_p, uniform;
};
constexpr int DRAW_NUMBERS = sizeof(Draw) / sizeof(double);

// Python's choice, or -1: candidates do not suffice for it, or it depends on how exponentials and sums are rounded, which
// differs between libraries and CPUs.
int32_t drawn_token(const Candidates& candidates, const Draw& draw);
