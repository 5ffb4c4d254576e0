#include "sparse.h"

#include <math.h>

#include <algorithm>
#include <numeric>

namespace {

int plain_act(int act) { return act == PI_DRELU ? PI_RELU : act; }

const Matrix& first_matrix(const FfnInput& in) { return in.gate ? *in.gate : *in.up; }

const Vector& first_bias(const FfnInput& in) { return in.gate ? in.gate_bias : in.up_bias; }

// The columns of a product that this thread makes.
void columns(const Thread& t, const Matrix& w, int64_t* p0, int64_t* p1, int64_t* c0, int64_t* c1) {
  share(w.panels, 1, t.program->pool->threads(), t.id, p0, p1);
  *c0 = *p0 * PI_LANES;
  *c1 = std::max(*c0, std::min(*p1 * PI_LANES, w.rows));
}

}  // namespace

NeuronScratch::NeuronScratch(int threads, int64_t d_ff, int64_t d_model, int64_t rank)
    : ldz(pi_round_up(d_ff, PI_GROUP)),
      ldr(pi_round_up(rank, PI_LANES)),
      wanted((size_t)ldz),
      z((size_t)(ldz * PI_NEURON_TOKENS)),
      hidden((size_t)(ldr * PI_NEURON_TOKENS)),
      shares((size_t)threads) {
  for (Share& s : shares) {
    s.listed.resize((size_t)(ldz + PI_LANES));
    s.part.resize((size_t)d_ff);
    s.sums.resize((size_t)(pi_round_up(d_model, PI_LANES) * PI_NEURON_TOKENS));
  }
}

SparseFfn::SparseFfn(std::shared_ptr<Bundles> b, std::unique_ptr<Predictor> p, float most, int64_t recall_every)
    : bundles(std::move(b)),
      predictor(std::move(p)),
      most_(most),
      above_(predictor ? nextafterf(predictor->threshold, -INFINITY) : 0.0f),
      recall_every_(recall_every) {}

void SparseFfn::run(Thread& t, const Step& step, const FfnInput& in, Way way) {
  Program& p = *t.program;
  NeuronScratch& s = *p.neurons;
  Share& own = s.shares[(size_t)t.id];
  const bool predicted = way == WAY_PREDICTED, named = way == WAY_NAMED,
             sampled = predicted && recall_every_ && stats.steps % recall_every_ == 0;
  std::fill(own.counts, own.counts + PI_NEURON_TOKENS, 0);
  own.sampled_active = own.sampled_found = 0;
  const PiActs* acts = nullptr;
  if (predicted) predict(t, step);
  else if (!named) acts = fire(t, step, in);
  else {
    acts =
        p.prepare(t, p.x + step.first * p.ldx, p.ldx, p.sizes.d_model, step.tokens, nullptr, in.norm, bundles->forms());
    take_named(t, step);
  }
  p.pool->barrier();
  if (predicted) {
    reach_floor(t, step);
    acts = p.prepare(t, p.x + step.first * p.ldx, p.ldx, p.sizes.d_model, step.tokens, nullptr, in.norm,
                     bundles->forms() | (sampled ? pi_form(first_matrix(in).type) | pi_form(in.up->type) : 0));
    if (sampled) sample(t, step, in, acts);
  }
  if (way == WAY_EXACT && many(s, step.tokens)) {
    finish_densely(t, step, in, acts);
    if (t.id == 0) count(step, way, s, sampled);
    p.pool->barrier();
    return;
  }
  const int64_t n = take_part(t);
  const bool several = step.tokens > 1 && (predicted || (named && p.names));  // of one, all that are listed are wanted
  if (several && predicted) mark_candidates(t, step, n);
  std::fill(own.sums.begin(), own.sums.begin() + step.tokens * p.ldx, 0.0f);
  own.done = {};
  add_neurons(p.kernels, *bundles, acts, step.tokens, own.part.data(), n,
              {predicted || named ? nullptr : p.gate, p.ldh, several ? s.wanted.data() : nullptr, most_}, own.block,
              own.sums.data(), p.ldx, own.done, fired.empty() || !step.counted ? nullptr : fired.data());
  p.pool->barrier();
  add_sums(t, step, in);
  if (t.id == 0 && step.counted) count(step, way, s, sampled);
  p.pool->barrier();
  if (in.out_norm) p.add_normalised(t, in.out_norm, p.up, step.first, step.tokens);
}

// Every gate, densely; those that fire are listed, with their activations in p.gate.
const PiActs* SparseFfn::fire(Thread& t, const Step& step, const FfnInput& in) {
  Program& p = *t.program;
  Share& own = p.neurons->shares[(size_t)t.id];
  const Matrix& w = first_matrix(in);
  const PiActs* acts = p.prepare(t, p.x, p.ldx, p.sizes.d_model, step.tokens, nullptr, in.norm,
                                 pi_form(w.type) | pi_form(in.up->type) | bundles->forms());
  int64_t p0, p1, c0, c1;
  columns(t, w, &p0, &p1, &c0, &c1);
  p.linear(t, w, first_bias(in), acts, p.gate, p.ldh, step.tokens, false, p0, p1);
  for (int64_t i = 0; i < step.tokens; i++)
    p.kernels->activate(plain_act(in.act), in.threshold, p.gate + i * p.ldh + c0, nullptr, (p1 - p0) * PI_LANES);
  own.n = p.kernels->neurons->keep(p.gate + c0, p.ldh, step.tokens, c1 - c0, 1, most_, (int32_t)c0, own.listed.data(),
                                   own.counts);
  return acts;
}

// Whether so many neurons fire that reading a matrix from end to end is faster than their rows. Of many tokens each must have
// some share in it: what fires for few of them is quick to multiply, though it be read.
bool SparseFfn::many(const NeuronScratch& s, int64_t tokens) const {
  int64_t listed = 0, cells = 0;
  for (const Share& share : s.shares)
    listed += share.n, cells += std::accumulate(share.counts, share.counts + tokens, (int64_t)0);
  const double least = dense_above * (double)bundles->neurons;
  return (double)listed > least && 4.0 * (double)cells > least * (double)tokens;
}

// The activations are known: up and down from the dense matrices.
void SparseFfn::finish_densely(Thread& t, const Step& step, const FfnInput& in, const PiActs* acts) {
  Program& p = *t.program;
  Share& own = p.neurons->shares[(size_t)t.id];
  int64_t p0, p1;
  share(in.up->panels, 2, p.pool->threads(), t.id, &p0, &p1);  // two panels: a whole block of h
  const int64_t c0 = p0 * PI_LANES, c1 = std::min(p1 * PI_LANES, in.up->rows), n = std::max(c1 - c0, (int64_t)0);
  if (in.gate) p.linear(t, *in.up, in.up_bias, acts, p.up, p.ldh, step.tokens, false, p0, p1);
  own.done = {0, in.gate ? n : 0, n, 0, 0};
  for (int64_t i = 0; i < step.tokens && n; i++) {
    float *h = p.gate + i * p.ldh + c0, *up = p.up + i * p.ldh + c0;
    if (most_ > 0.0f)
      for (int64_t j = 0; j < n; j++)
        if (fabsf(h[j]) <= most_) h[j] = 0.0f;
    if (in.gate) {
      if (in.act == PI_DRELU) p.kernels->activate(PI_RELU, 0.0f, up, nullptr, (p1 - p0) * PI_LANES);
      for (int64_t j = 0; j < n; j++) h[j] *= up[j];
    }
    for (int64_t j = 0; j < n; j++) own.done.active += h[j] != 0.0f;
  }
  p.multiply_down(t, in, step.tokens, c0, c1);
}

// Of this thread's part of all neurons, those that some token names, and which do.
void SparseFfn::take_named(Thread& t, const Step& step) {
  enum { SOME = 256 };
  Program& p = *t.program;
  NeuronScratch& s = *p.neurons;
  Share& own = s.shares[(size_t)t.id];
  const int64_t all = (int64_t)bundles->members.size();
  int64_t begin, end;
  share(all, 1, p.pool->threads(), t.id, &begin, &end);
  own.n = 0;
  for (int64_t j = begin, some; j < end; j += some) {
    some = std::min(end - j, (int64_t)SOME);
    uint32_t wanted[SOME] = {0};
    for (int64_t i = 0; i < step.tokens; i++) {
      uint32_t sum = 0;
      for (int64_t c = 0; c < some; c++) {
        const uint32_t one = !p.names || p.names[(step.first + i) * all + j + c];
        wanted[c] |= one << i;
        sum += one;
      }
      own.counts[i] += sum;
    }
    for (int64_t c = 0; c < some; c++) {
      if (!wanted[c]) continue;
      const int32_t place = bundles->members[(size_t)(j + c)];
      s.wanted[(size_t)place] = wanted[c];
      own.listed[(size_t)own.n++] = place;
    }
  }
}

void SparseFfn::predict(Thread& t, const Step& step) {
  Program& p = *t.program;
  NeuronScratch& s = *p.neurons;
  const Matrix &in = *predictor->in, &out = *predictor->out;
  const Norm none;
  const PiActs* acts =
      p.prepare(t, p.x + step.first * p.ldx, p.ldx, p.sizes.d_model, step.tokens, nullptr, none, pi_form(in.type));
  int64_t p0, p1, c0, c1;
  columns(t, in, &p0, &p1, &c0, &c1);
  p.linear(t, in, {}, acts, s.hidden.data(), s.ldr, step.tokens, false, p0, p1);
  for (int64_t i = 0; i < step.tokens; i++)
    p.kernels->activate(PI_RELU, 0.0f, s.hidden.data() + i * s.ldr + c0, nullptr, (p1 - p0) * PI_LANES);
  p.pool->barrier();
  acts = p.prepare(t, s.hidden.data(), s.ldr, in.rows, step.tokens, nullptr, none, pi_form(out.type));
  columns(t, out, &p0, &p1, &c0, &c1);
  p.linear(t, out, {}, acts, s.z.data(), s.ldz, step.tokens, false, p0, p1);
  list(t, step);
}

// The candidates among this thread's neurons.
void SparseFfn::list(Thread& t, const Step& step) {
  Program& p = *t.program;
  NeuronScratch& s = *p.neurons;
  Share& own = s.shares[(size_t)t.id];
  int64_t p0, p1, c0, c1;
  columns(t, *predictor->out, &p0, &p1, &c0, &c1);
  std::fill(own.counts, own.counts + PI_NEURON_TOKENS, 0);
  own.n = p.kernels->neurons->keep(s.z.data() + c0, s.ldz, step.tokens, c1 - c0, 0, above_, (int32_t)c0,
                                   own.listed.data(), own.counts);
}

// Which tokens each neuron of this thread's part is a candidate of.
void SparseFfn::mark_candidates(Thread& t, const Step& step, int64_t n) {
  NeuronScratch& s = *t.program->neurons;
  const std::vector<int32_t>& part = s.shares[(size_t)t.id].part;
  for (int64_t j = 0; j < n; j++) s.wanted[(size_t)part[(size_t)j]] = 0;
  for (int64_t i = 0; i < step.tokens; i++) {
    const float* z = s.z.data() + i * s.ldz;
    for (int64_t j = 0; j < n; j++) s.wanted[(size_t)part[(size_t)j]] |= (uint32_t)!(z[part[(size_t)j]] <= above_) << i;
  }
}

// Where a token has fewer candidates than the floor, its largest are made candidates. All threads come to the same decision.
void SparseFfn::reach_floor(Thread& t, const Step& step) {
  Program& p = *t.program;
  NeuronScratch& s = *p.neurons;
  const int64_t floor = std::min(predictor->floor, bundles->neurons);
  std::vector<int64_t> few;
  for (int64_t i = 0; i < step.tokens; i++) {
    int64_t n = 0;
    for (const Share& share : s.shares) n += share.counts[i];
    if (n < floor) few.push_back(i);
  }
  if (few.empty()) return;
  p.pool->barrier();  // the counts have been read
  if (t.id == 0) {
    std::vector<int32_t> order((size_t)bundles->neurons);
    for (int64_t i : few) {
      float* z = s.z.data() + i * s.ldz;
      std::iota(order.begin(), order.end(), 0);
      const auto guess = [z](int32_t i) {
        return isnan(z[i]) ? INFINITY : z[i];
      };  // an order even where weights are no numbers
      std::nth_element(order.begin(), order.begin() + (floor - 1), order.end(), [guess](int32_t a, int32_t b) {
        return guess(a) > guess(b) || (guess(a) == guess(b) && a < b);
      });
      for (int64_t j = 0; j < floor; j++) z[order[(size_t)j]] = INFINITY;
    }
  }
  p.pool->barrier();
  list(t, step);
  p.pool->barrier();
}

// How many neurons that fire the predictor named: all gates, densely.
void SparseFfn::sample(Thread& t, const Step& step, const FfnInput& in, const PiActs* acts) {
  Program& p = *t.program;
  NeuronScratch& s = *p.neurons;
  Share& own = s.shares[(size_t)t.id];
  const Matrix& w = first_matrix(in);
  int64_t p0, p1, c0, c1;
  columns(t, w, &p0, &p1, &c0, &c1);
  p.linear(t, w, first_bias(in), acts, p.gate, p.ldh, step.tokens, false, p0, p1);
  if (in.gate) p.linear(t, *in.up, in.up_bias, acts, p.up, p.ldh, step.tokens, false, p0, p1);
  for (int64_t i = 0; i < step.tokens; i++) {
    float* h = p.gate + i * p.ldh;
    p.kernels->activate(in.act, in.threshold, h + c0, in.gate ? p.up + i * p.ldh + c0 : nullptr, (p1 - p0) * PI_LANES);
    for (int64_t j = c0; j < c1; j++) {
      own.sampled_active += h[j] != 0.0f;
      own.sampled_found += h[j] != 0.0f && s.z[(size_t)(i * s.ldz + j)] > above_;
    }
  }
}

// An even part of the list of all threads, in its order, cut where a group of neurons ends if they share scales.
int64_t SparseFfn::take_part(Thread& t) {
  Program& p = *t.program;
  NeuronScratch& s = *p.neurons;
  std::vector<int32_t>& part = s.shares[(size_t)t.id].part;
  int64_t total = 0, begin, end, at = 0, n = 0;
  for (const Share& other : s.shares) total += other.n;
  share(total, 1, p.pool->threads(), t.id, &begin, &end);
  if (bundles->down.type == PI_Q4_0X32) {
    const auto listed = [&s](int64_t i) {
      const Share* from = s.shares.data();
      for (; i >= from->n; from++) i -= from->n;
      return from->listed[(size_t)i];
    };
    const auto whole = [&](int64_t i) {
      while (i > 0 && i < total && listed(i - 1) / PI_GROUP == listed(i) / PI_GROUP) i++;
      return i;
    };
    begin = whole(begin);
    end = whole(end);
  }
  for (const Share& other : s.shares) {
    const int64_t from = std::max(begin - at, (int64_t)0), to = std::min(end - at, other.n);
    for (int64_t j = from; j < to; j++) part[(size_t)n++] = other.listed[(size_t)j];
    at += other.n;
  }
  return n;
}

// x += what the neurons of all threads add, in the order of the threads.
void SparseFfn::add_sums(Thread& t, const Step& step, const FfnInput& in) {
  Program& p = *t.program;
  int64_t c0, c1;
  share(p.sizes.d_model, PI_LANES, p.pool->threads(), t.id, &c0, &c1);
  for (int64_t i = 0; i < step.tokens; i++) {
    float* x = in.out_norm ? p.up + i * p.ldh : p.x + (step.first + i) * p.ldx;
    if (in.replace || in.out_norm) std::fill(x + c0, x + c1, 0.0f);
    float* sum = p.neurons->shares[0].sums.data() + i * p.ldx;
    for (size_t other = 1; other < p.neurons->shares.size(); other++) {
      const float* more = p.neurons->shares[other].sums.data() + i * p.ldx;
      for (int64_t c = c0; c < c1; c++) sum[c] += more[c];
    }
    if (in.down_bias.empty())
      for (int64_t c = c0; c < c1; c++) x[c] += sum[c];
    else
      for (int64_t c = c0; c < c1; c++) x[c] += sum[c] + in.down_bias[(size_t)c];
  }
}

void SparseFfn::count(const Step& step, Way way, NeuronScratch& s, bool sampled) {
  stats.steps++;
  stats.exact_steps += way == WAY_EXACT;
  stats.tokens += step.tokens;
  stats.sampled_tokens += sampled ? step.tokens : 0;
  for (const Share& share : s.shares) {
    for (int64_t i = 0; i < step.tokens; i++) stats.candidates += share.counts[i];
    stats.active += share.done.active;
    stats.first_rows += share.done.first;
    stats.up_rows += share.done.up;
    stats.down_rows += share.done.down;
    stats.shared_scales += share.done.shared;
    stats.sampled_active += share.sampled_active;
    stats.sampled_found += share.sampled_found;
  }
}
