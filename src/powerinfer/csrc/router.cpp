#include "router.h"

#include <math.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "expert_store.h"
#include "program.h"

namespace {

constexpr float NEVER = -INFINITY;

// The index of the largest of x; 0 where none is a number above -infinity.
int64_t largest(const float* x, int64_t n) {
  int64_t best = 0;
  float most = NEVER;
  for (int64_t i = 0; i < n; i++)
    if (x[i] > most) most = x[i], best = i;
  return best;
}

void softmax(float* x, int64_t n) {
  const float most = x[largest(x, n)];
  float sum = 0;
  for (int64_t i = 0; i < n; i++) sum += x[i] = expf(x[i] - most);
  for (int64_t i = 0; i < n; i++) x[i] /= sum;
}

// The sum of the `best` largest of x.
float sum_of_best(const float* x, int64_t n, int64_t best) {
  std::vector<float> sorted(x, x + n);
  for (float& score : sorted)
    if (!(score > NEVER)) score = NEVER;  // NaN has no order
  std::partial_sort(sorted.begin(), sorted.begin() + best, sorted.end(), std::greater<float>());
  return std::accumulate(sorted.begin(), sorted.begin() + best, 0.0f);
}

// Leaves the experts of the best groups; the others can no longer be selected.
void keep_groups(const RouterSpec& spec, float* scores, int64_t experts) {
  const int64_t size = experts / spec.groups;
  std::vector<float> of((size_t)spec.groups);
  std::vector<bool> selectable((size_t)spec.groups);
  for (int64_t g = 0; g < spec.groups; g++) of[(size_t)g] = sum_of_best(scores + g * size, size, spec.group_best);
  for (int64_t i = 0; i < spec.top_groups; i++) {
    const int64_t g = largest(of.data(), spec.groups);
    selectable[(size_t)g] = true;
    of[(size_t)g] = NEVER;
  }
  for (int64_t g = 0; g < spec.groups; g++)
    if (!selectable[(size_t)g]) std::fill(scores + g * size, scores + (g + 1) * size, NEVER);
}

// The `top_k` largest scores, ascending by index. Where too few are numbers, the first of the rest.
void select_best(float* scores, int64_t experts, int64_t top_k, int32_t* selected) {
  for (int64_t i = 0; i < top_k; i++) {
    const int64_t best = largest(scores, experts);
    selected[i] = (int32_t)best;
    if (!(scores[best] > NEVER)) {
      for (int32_t e = 0; i < top_k; e++)
        if (std::find(selected, selected + i, e) == selected + i) selected[i++] = e;
      break;
    }
    scores[best] = NEVER;
  }
  std::sort(selected, selected + top_k);
}

// SparseMixer, as it selects when it is not trained. left: [experts], overwritten.
void mix(const RouterSpec& spec, const float* logits, int64_t experts, float* left, int32_t* selected, float* weights) {
  std::copy(logits, logits + experts, left);
  for (int64_t i = 0; i < spec.top_k; i++) {
    int64_t best = largest(left, experts), place = i;
    const bool any = left[best] > NEVER;
    while (!any && std::find(selected, selected + i, (int32_t)best) != selected + i) best++;
    const float most = left[best];
    float sum = any ? 0 : NAN;
    for (int64_t e = 0; e < experts; e++) {
      const bool far = most - logits[e] > 2 * spec.nearness * std::max(fabsf(logits[e]), most);
      if (!far) sum += expf(left[e] - most);
    }
    for (; place > 0 && selected[place - 1] > best; place--) {
      selected[place] = selected[place - 1];
      weights[place] = weights[place - 1];
    }
    selected[place] = (int32_t)best;
    weights[place] = 1 / sum;
    left[best] = NEVER;
  }
}

}  // namespace

float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

void check_router(const RouterSpec& router, int64_t n) {
  check(router.top_k > 0 && router.top_k <= n, "a token cannot have more experts than there are");
  check(router.groups > 0 && n % router.groups == 0, "experts cannot be divided into groups evenly");
  const int64_t size = n / router.groups;
  check(router.top_groups > 0 && router.top_groups <= router.groups && router.top_groups * size >= router.top_k,
        "the best groups have too few experts");
  check(router.group_best > 0 && router.group_best <= size, "a group has too few experts for its score");
  check_bias(router.correction, n, "the router's scores");
  check_bias(router.bias, n, "the router");
  check_bias(router.factors, n, "the router's weights");
}

void route(const RouterSpec& spec, float* logits, int64_t experts, float* scratch, int32_t* selected, float* weights) {
  for (size_t i = 0; i < spec.bias.size(); i++) logits[i] += spec.bias[i];
  if (spec.nearness >= 0) return mix(spec, logits, experts, scratch, selected, weights);
  if (spec.sigmoid) std::transform(logits, logits + experts, logits, sigmoid);
  else softmax(logits, experts);
  std::copy(logits, logits + experts, scratch);
  for (size_t i = 0; i < spec.correction.size(); i++) scratch[i] += spec.correction[i];
  if (spec.groups > 1) keep_groups(spec, scratch, experts);
  select_best(scratch, experts, spec.top_k, selected);
  float sum = 0;
  for (int64_t i = 0; i < spec.top_k; i++) sum += weights[i] = logits[selected[i]];
  const float factor = spec.normalise ? spec.scale / (sum + 1e-20f) : spec.scale;
  for (int64_t i = 0; i < spec.top_k; i++) weights[i] *= factor;
  for (int64_t i = 0; i < spec.top_k && !spec.factors.empty(); i++) weights[i] *= spec.factors[(size_t)selected[i]];
}

void Router::select(Thread& t, ExpertRows& rows, const PiActs* acts, int64_t tokens) const {
  Workspace& w = *t.program->workspace;
  w.finish_product(t.id, *scores, acts, tokens, {rows.logits.data(), rows.ldl, false, NO_BIAS});
  w.pool->phase(tokens, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++)
      route(spec, rows.logits.data() + i * rows.ldl, experts, rows.scores.data() + i * rows.ldl,
            rows.selected.data() + i * spec.top_k, rows.weights.data() + i * spec.top_k);
    if (tokens == 1) group(rows, tokens);
  });
  if (tokens > 1) w.pool->phase(1, 1, [&](int64_t, int64_t) { group(rows, tokens); });
}

void Router::group(ExpertRows& rows, int64_t tokens) const {
  const int64_t n = tokens * spec.top_k;
  rows.ordered = nullptr;
  rows.scales_input = spec.scales_input;
  std::vector<int32_t>& begin = rows.begin;
  std::fill(begin.begin(), begin.begin() + experts + 1, 0);
  for (int64_t i = 0; i < n; i++)
    if (rows.selected[(size_t)i] >= 0) begin[(size_t)rows.selected[(size_t)i] + 1]++;
  rows.active.clear();
  for (int64_t e = 0; e < experts; e++) {
    if (const int32_t n_rows = begin[(size_t)e + 1]) {
      rows.cost[rows.active.size() + 1] = rows.cost[rows.active.size()] + n_rows + ExpertRows::ROW_COSTS;
      rows.active.push_back((int32_t)e);
    }
    begin[(size_t)e + 1] += begin[(size_t)e];
  }
  // `begin` moves to the end of each expert's rows, where those of the next one begin, and back
  for (int64_t i = 0; i < n; i++) {
    rows.row_of[(size_t)i] = -1;
    if (rows.selected[(size_t)i] < 0) continue;
    const int32_t row = begin[(size_t)rows.selected[(size_t)i]]++;
    rows.row_of[(size_t)i] = row;
    rows.token_of[(size_t)row] = (int32_t)(i / spec.top_k);
    rows.weight_of[(size_t)row] = rows.weights[(size_t)i];
  }
  std::copy_backward(begin.begin(), begin.begin() + experts, begin.begin() + experts + 1);
  begin[0] = 0;
}
