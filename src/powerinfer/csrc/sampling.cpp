#include "sampling.h"

#include <algorithm>
#include <cmath>

namespace {

// Far above what any library's exponential, and a sum of 64 of them, are off by, and so small that a choice hardly ever
// depends on it: about once in 10^10 tokens.
constexpr double ROUNDED = 0x1p-40;
constexpr double UNDERFLOW_ERROR = 1e-300;

struct Range {
  double low, high;
};

struct Candidate {
  float logit;
  int32_t id;
};

// Weights, the largest first, of which the first is 1, with bounds of what others compute. Those of equal logits, and of
// logits -inf, are exact, and so are their sums.
class Weights {
 public:
  Weights(const Candidate* sorted, int n, double temperature) : n_(n) {
    double sum = 0;
    bool exact = true;
    for (int i = 0; i < n; i++) {
      const double x = (double)sorted[i].logit - (double)sorted[0].logit;
      const double w = std::exp(x / temperature);
      const bool sure = x == 0 || std::isinf(x);
      exact = exact && sure;
      sum += w;
      weights_[i] = around(w, sure ? 0 : w * ROUNDED + UNDERFLOW_ERROR);
      sums_[i] = around(sum, exact ? 0 : sum * ROUNDED);
    }
  }

  Range sum() const { return sums_[n_ - 1]; }
  Range sum(int count) const { return sums_[count - 1]; }

  // The first place, before `end`, whose sum reaches the goal, or, if `beyond`, is greater; `end`: none does. -1: it is
  // not certain.
  int place(Range goal, int end, bool beyond) const {
    int i = 0;
    while (i < end && !(beyond ? sums_[i].low > goal.high : sums_[i].low >= goal.high)) i++;
    if (i == 0 || (beyond ? sums_[i - 1].high <= goal.low : sums_[i - 1].high < goal.low)) return i;
    return -1;
  }

  // Number of weights that are at least so large; -1: it is not certain.
  int likely(double least) const {
    int count = 0;
    for (int i = 0; i < n_; i++) {
      if (weights_[i].low >= least) count++;
      else if (weights_[i].high >= least) return -1;
    }
    return count;
  }

 private:
  static Range around(double value, double error) { return {value - error, value + error}; }

  const int n_;
  Range weights_[LIKELIEST], sums_[LIKELIEST];
};

// Number of the n tokens that top_p and min_p leave, of which the limit is n if `limited`; -1: it is not certain, or they
// leave others, too.
int tokens_left(const Weights& weights, int n, const Draw& draw, bool limited, Range total) {
  int left = n + 1;
  if (draw.top_p < 1) {
    // Where the last one is all that is left to take, it does not matter whether the sum reaches the goal with it.
    const int at = weights.place({draw.top_p * total.low, draw.top_p * total.high}, limited ? n - 1 : n, false);
    if (at < 0) return -1;
    left = at + 1;
  }
  if (draw.min_p > 0) {
    const int likely = weights.likely(draw.min_p);
    if (likely < 0) return -1;
    if (likely < n) left = std::max(1, std::min(left, likely));
  }
  if (limited) return std::min(left, n);
  return left <= n ? left : -1;
}

}  // namespace

int32_t drawn_token(const Candidates& candidates, const Draw& draw) {
  const int count = candidates.count;
  if (count < 1 || count > MOST_CANDIDATES) return -1;
  Candidate sorted[MOST_CANDIDATES];
  for (int i = 0; i < count; i++) {
    if (std::isnan(candidates.values[i])) return -1;
    sorted[i] = {candidates.values[i], candidates.ids[i]};
  }
  std::sort(sorted, sorted + count, [](const Candidate& a, const Candidate& b) {
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
  });
  if (!std::isfinite(sorted[0].logit)) return -1;
  if (draw.temperature == 0) return sorted[0].id;
  const bool limited = draw.top_k > 0;
  int n = std::min(count, LIKELIEST);
  if (limited && draw.top_k < n) n = (int)draw.top_k;
  const Weights weights(sorted, n, draw.temperature);
  Range total = weights.sum();
  if (!limited) {
    const double all = candidates.total;
    if (!(1 - TOTAL_ERROR <= all && std::isfinite(all))) return -1;
    total = {(1 - 2 * TOTAL_ERROR) * all, (1 + 2 * TOTAL_ERROR) * all};
  }
  const int left = tokens_left(weights, n, draw, limited, total);
  if (left < 0) return -1;
  const Range sum = weights.sum(left);
  // Nothing is behind the last one, whatever its sum.
  const int at = weights.place({draw.uniform * sum.low, draw.uniform * sum.high}, left - 1, true);
  return at < 0 ? -1 : sorted[at].id;
}
