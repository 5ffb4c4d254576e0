#include "program.h"

#include "sparse.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>

namespace {

// Rows of up to this many elements in all are prepared by every thread for itself: cheaper than a meeting.
constexpr int64_t ALONE = 4096;

int form_of(const Matrix& m) { return pi_form(m.type); }

// out = norm(x), a row of k; they may be the same row.
void normalise_row(const PiKernels* kernels, const Norm& norm, const float* x, int64_t k, float* out) {
  if (norm.layer) kernels->layer_norm(x, norm.w.data(), norm.b.empty() ? nullptr : norm.b.data(), k, norm.eps, out);
  else kernels->rms_norm(x, norm.w.data(), k, norm.eps, out);
}

struct Embed : Op {
  EmbedInput in;
  const char* name() const override { return "embed"; }
  void run(Thread& t, const Step& step) const override {
    Program& p = *t.program;
    int64_t begin, end;
    share(step.tokens, 1, p.pool->threads(), t.id, &begin, &end);
    const bool direct = !in.project && !in.positions;
    for (int64_t i = begin; i < end; i++) {
      float *x = p.x + i * p.ldx, *row = direct ? x : p.gate + i * p.ldh;
      look_up(*in.table, step.token[i], row);
      if (in.scale != 1.0f) p.kernels->scale(row, in.scale, in.table->k);
      if (in.positions) look_up(*in.positions, step.position[i] + in.offset, x);
      if (in.positions && !in.project)
        for (int64_t j = 0; j < p.sizes.d_model; j++) x[j] += row[j];
    }
    if (in.project) {
      p.pool->barrier();
      const Matrix& w = *in.project;
      const PiActs* acts = p.prepare(t, p.gate, p.ldh, w.k, step.tokens, nullptr, {}, form_of(w));
      share(w.panels, 1, p.pool->threads(), t.id, &begin, &end);
      p.linear(t, w, {}, acts, p.x, p.ldx, step.tokens, in.positions != nullptr, begin, end);
    }
    p.pool->barrier();
  }

  static void look_up(const Table& table, int64_t row, float* out) {
    unpack_row(table.type, table.data + row * stored_row_bytes(table.type, table.k), table.k, out);
  }
};

struct AttentionIn : Op {
  AttentionInput in;
  const char* name() const override { return "attention_input"; }

  void run(Thread& t, const Step& step) const override {
    Program& p = *t.program;
    const int64_t heads = p.sizes.heads, kv = p.sizes.kv_heads, pad = p.head_pad;
    const PiActs* acts = p.prepare(t, p.x, p.ldx, p.sizes.d_model, step.tokens, nullptr, in.norm,
                                   form_of(*in.q) | form_of(*in.k) | form_of(*in.v));
    // Whole heads to each thread: it can rotate them and store them without waiting for another.
    int64_t begin, end;
    share(heads + 2 * kv, 1, p.pool->threads(), t.id, &begin, &end);
    part(t, *in.q, in.q_bias, acts, step, begin, end, 0, heads);
    part(t, *in.k, in.k_bias, acts, step, begin, end, heads, kv);
    part(t, *in.v, in.v_bias, acts, step, begin, end, heads + kv, kv);
    const bool q_wide = wide(p, in.q_norm), k_wide = wide(p, in.k_norm);
    if (q_wide || k_wide) {
      p.pool->barrier();
      if (q_wide) normalise_heads(t, in.q_norm, step.tokens, 0, heads);
      if (k_wide) normalise_heads(t, in.k_norm, step.tokens, heads, kv);
      p.pool->barrier();
    }
    const Program::Rope* rope = p.rope(in.rope);
    const int64_t half = rope ? (int64_t)rope->frequencies.size() : 0;
    for (const Run& run : step.runs) {
      for (int64_t i = 0; i < run.count; i++) {
        const int64_t token = run.first + i, position = run.position + i;
        const auto rotate = [&](float* head) {
          if (rope) p.kernels->rope(head, rope->cos + token * half, rope->sin + token * half, half);
        };
        uint8_t* page = p.cache->layer(in.layer) + run.pages[position / PI_PAGE] * p.cache->page_bytes;
        for (int64_t h = begin; h < end; h++) {
          float* x = p.qkv + token * p.ldqkv + h * pad;
          if (h < heads) {
            if (in.q_norm && !q_wide) normalise_row(p.kernels, in.q_norm, x, p.sizes.head_dim, x);
            rotate(x);
            p.kernels->scale(x, in.scale, p.sizes.head_dim);
          } else if (h < heads + kv) {
            if (in.k_norm && !k_wide) normalise_row(p.kernels, in.k_norm, x, p.sizes.head_dim, x);
            rotate(x);
            p.kernels->store_kv(p.cache->type, page + (h - heads) * p.cache->head_bytes, (int)(position % PI_PAGE), x,
                                nullptr, (int)pad);
          } else {
            p.kernels->store_kv(p.cache->type, page + (h - heads - kv) * p.cache->head_bytes, (int)(position % PI_PAGE),
                                nullptr, x, (int)pad);
          }
        }
      }
    }
    p.pool->barrier();
  }

  static bool wide(const Program& p, const Norm& norm) { return (int64_t)norm.w.size() > p.sizes.head_dim; }

  // Heads [first, first + count) of a token, of which each fills whole lanes, normalised as one row. The threads share
  // the tokens.
  void normalise_heads(Thread& t, const Norm& norm, int64_t tokens, int64_t first, int64_t count) const {
    Program& p = *t.program;
    const int64_t dim = p.sizes.head_dim, pad = p.head_pad;
    int64_t begin, end;
    share(tokens, 1, p.pool->threads(), t.id, &begin, &end);
    for (int64_t i = begin; i < end; i++) {
      float *heads = p.qkv + i * p.ldqkv + first * pad, *row = pad == dim ? heads : t.f.data();
      if (pad != dim)
        for (int64_t h = 0; h < count; h++) memcpy(row + h * dim, heads + h * pad, (size_t)dim * 4);
      normalise_row(p.kernels, norm, row, count * dim, row);
      if (pad != dim)
        for (int64_t h = 0; h < count; h++) memcpy(heads + h * pad, row + h * dim, (size_t)dim * 4);
    }
  }

  // The heads of one matrix that fall into this thread's [begin, end) of all heads.
  void part(Thread& t, const Matrix& w, const Vector& bias, const PiActs* acts, const Step& step, int64_t begin,
            int64_t end, int64_t first, int64_t count) const {
    Program& p = *t.program;
    const int64_t b = std::max<int64_t>(begin - first, 0), e = std::min(end - first, count),
                  panels = p.head_pad / PI_LANES;
    if (b < e)
      p.linear(t, w, bias, acts, p.qkv + first * p.head_pad, p.ldqkv, step.tokens, false, b * panels, e * panels);
  }
};

struct Attention : Op {
  int layer, window;
  const char* name() const override { return "attention"; }
  void run(Thread& t, const Step& step) const override {
    Program& p = *t.program;
    const int threads = p.pool->threads();
    const int64_t group = p.sizes.heads / p.sizes.kv_heads, kv = p.sizes.kv_heads;
    if ((int64_t)step.runs.size() == step.tokens) {  // decode: all rows cost about the same, cut them evenly
      int64_t begin, end;
      share(step.tokens * kv * group, 1, threads, t.id, &begin, &end);
      while (begin < end) {
        const int64_t token = begin / (kv * group), g = begin / group % kv, r = begin % group;
        const int64_t rows = std::min(group - r, end - begin);
        rows_of(t, step.runs[token], (int)g, r, r + rows);
        begin += rows;
      }
    } else {  // later rows of a prompt see more: deal the tiles out in turn
      int64_t item = 0;
      for (const Run& run : step.runs) {
        for (int64_t r = 0; r < run.count * group; r += PI_ATTENTION_ROWS) {
          for (int64_t g = 0; g < kv; g++, item++) {
            if (item % threads == t.id)
              rows_of(t, run, (int)g, r, std::min<int64_t>(r + PI_ATTENTION_ROWS, run.count * group));
          }
        }
      }
    }
    p.pool->barrier();
  }

  void rows_of(Thread& t, const Run& run, int g, int64_t r0, int64_t r1) const {
    Program& p = *t.program;
    PiAttention a;
    a.q = p.qkv + run.first * p.ldqkv;
    a.out = p.attended + run.first * p.lda;
    a.kv = p.cache->layer(layer);
    a.pages = run.pages;
    a.q_stride = p.ldqkv;
    a.out_stride = p.lda;
    a.page_bytes = p.cache->page_bytes;
    a.head_bytes = p.cache->head_bytes;
    a.position = run.position;
    a.head_dim = (int)p.sizes.head_dim;
    a.head_pad = (int)p.head_pad;
    a.group = (int)(p.sizes.heads / p.sizes.kv_heads);
    a.window = window;
    p.kernels->attention[p.cache->type](&a, g, r0, r1, t.attention.data());
  }
};

struct Project : Op {
  std::shared_ptr<Matrix> w;
  Vector bias;
  Norm norm;
  const char* name() const override { return "project"; }
  void run(Thread& t, const Step& step) const override {
    Program& p = *t.program;
    const PiActs* acts = p.prepare(t, p.attended, p.lda, w->k, step.tokens, nullptr, {}, form_of(*w));
    p.add_product(t, *w, bias, acts, step.tokens, norm, p.gate);
  }
};

struct Ffn : Op {
  FfnInput in;
  std::unique_ptr<SparseFfn> sparse;
  const char* name() const override { return "ffn"; }
  void run(Thread& t, const Step& step) const override {
    if (!in.up) return in_pieces(t, step);
    const Way way = sparse && step.tokens <= PI_NEURON_TOKENS ? sparse->ways[step.tokens] : WAY_DENSE;
    if (way == WAY_DENSE || t.program->watch) dense(t, step);
    else sparse->run(t, step, in, way);
  }
  void in_pieces(Thread& t, const Step& step) const {
    Step piece;
    piece.counted = step.tokens <= PI_NEURON_TOKENS;
    const Way way = piece.counted && sparse->predictor && sparse->predicts ? WAY_PREDICTED : WAY_NAMED;
    for (; piece.first < step.tokens; piece.first += piece.tokens) {
      piece.tokens = std::min(step.tokens - piece.first, (int64_t)PI_NEURON_TOKENS);
      sparse->run(t, piece, in, way);
    }
  }
  void dense(Thread& t, const Step& step) const {
    Program& p = *t.program;
    const int64_t tokens = step.tokens, k = in.down->k;
    const PiActs* acts = p.prepare(t, p.x, p.ldx, p.sizes.d_model, tokens, nullptr, in.norm,
                                   form_of(*in.up) | (in.gate ? form_of(*in.gate) : 0));
    int64_t p0, p1;
    share(in.up->panels, 2, p.pool->threads(), t.id, &p0, &p1);  // two panels: a whole block of the activations below
    if (in.gate) p.linear(t, *in.gate, in.gate_bias, acts, p.gate, p.ldh, tokens, false, p0, p1);
    p.linear(t, *in.up, in.up_bias, acts, in.gate ? p.up : p.gate, p.ldh, tokens, false, p0, p1);
    const int64_t c0 = p0 * PI_LANES, c1 = std::min(p1 * PI_LANES, k);
    if (c0 < c1) {
      Watch* watch = p.watch.get();
      for (int64_t i = 0; i < tokens; i++) {
        float* row = p.gate + i * p.ldh + c0;
        if (watch) check_inputs(t, *watch, i, c0, (p1 - p0) * PI_LANES);
        if (watch && watch->gate) look_at_gate(t, *watch, i, c0, (p1 - p0) * PI_LANES);
        p.kernels->activate(in.act, in.threshold, row, in.gate ? p.up + i * p.ldh + c0 : nullptr, (p1 - p0) * PI_LANES);
        if (watch && !watch->gate)
          p.kernels->neurons->fires(row, (p1 - p0) * PI_LANES, 0.0f,
                                    watch->bits.data() + i * watch->words + c0 / PI_LANES);
        if (watch && watch->silence) silence(t, *watch, row, c1 - c0);
      }
    }
    if (p.watch && c0 < c1) count(*p.watch, tokens, c0 / PI_LANES, p1 - p0);
    p.multiply_down(t, in, tokens, c0, c1);
  }

  // What the watch sees. Each thread looks at its own columns, n from c0 on, of which the bits are whole words.
  void check_inputs(Thread& t, Watch& watch, int64_t i, int64_t c0, int64_t n) const {
    Program& p = *t.program;
    int odd = p.kernels->neurons->fires(p.gate + i * p.ldh + c0, n, FLT_MAX, nullptr);
    if (in.gate) odd |= p.kernels->neurons->fires(p.up + i * p.ldh + c0, n, FLT_MAX, nullptr);
    if (odd) watch.damaged[(size_t)t.id] = 1;
  }
  // The activations of token i, before they meet up; they stay in t.f.
  void look_at_gate(Thread& t, Watch& watch, int64_t i, int64_t c0, int64_t n) const {
    Program& p = *t.program;
    float* a = t.f.data();
    memcpy(a, p.gate + i * p.ldh + c0, (size_t)n * 4);
    p.kernels->activate(in.act == PI_DRELU ? PI_RELU : in.act, in.threshold, a, nullptr, n);
    p.kernels->neurons->fires(a, n, watch.most, watch.bits.data() + i * watch.words + c0 / PI_LANES);
    if (!watch.measure) return;
    int64_t* bins = watch.magnitudes.data() + t.id * Watch::BINS;
    const int64_t real = std::min(n, in.up->rows - c0);
    for (int64_t j = 0; j < real; j++) bins[bin_of(a[j])]++;
  }
  static int bin_of(float a) {
    uint32_t raw;
    memcpy(&raw, &a, 4);
    const int bin = (int)((raw & 0x7fffffffu) >> 19) - (127 + Watch::LOW) * Watch::PER_OCTAVE;
    return std::clamp(bin, 0, Watch::BINS - 1);
  }
  void silence(Thread& t, const Watch& watch, float* row, int64_t n) const {
    const float* a = t.f.data();
    for (int64_t j = 0; j < n; j++) row[j] = fabsf(a[j]) <= watch.most ? 0.0f : row[j];
  }
  // Adds up the bits of `words` columns of words: up to 64 counters at once, bit i of each in planes[i].
  void count(Watch& watch, int64_t tokens, int64_t first, int64_t words) const {
    for (int64_t w = 0; w < words; w += 4) {
      const int64_t some = std::min<int64_t>(words - w, 4);
      const uint16_t* column = watch.bits.data() + first + w;
      uint64_t planes[32] = {};
      int used = 0;
      for (int64_t i = 0; i < tokens; i++) {
        uint64_t carry = 0;
        if (some == 4) memcpy(&carry, column + i * watch.words, 8);
        else memcpy(&carry, column + i * watch.words, (size_t)some * 2);
        for (int plane = 0; carry; plane++) {
          const uint64_t both = planes[plane] & carry;
          planes[plane] ^= carry;
          carry = both;
          used = std::max(used, plane + 1);
        }
      }
      for (int64_t bit = 0; bit < some * PI_LANES; bit++) {
        int64_t sum = 0;
        for (int plane = 0; plane < used; plane++) sum += (int64_t)(planes[plane] >> bit & 1) << plane;
        watch.counts[(size_t)((first + w) * PI_LANES + bit)] += sum;
      }
    }
  }
};

struct Normalise : Op {
  Norm norm;
  const char* name() const override { return "normalise"; }
  void run(Thread& t, const Step& step) const override {
    Program& p = *t.program;
    int64_t begin, end;
    share(step.tokens, 1, p.pool->threads(), t.id, &begin, &end);
    for (int64_t i = begin; i < end; i++)
      normalise_row(p.kernels, norm, p.x + i * p.ldx, p.sizes.d_model, p.x + i * p.ldx);
    p.pool->barrier();
  }
};

// Logits decide, and few of them are wanted: for quantised weights the activations come in two planes of 8 bits, the
// second holding what the first left, and both meet a weight in one pass.
struct Head : Op {
  Norm norm;
  std::shared_ptr<Matrix> project, w;
  const char* name() const override { return "head"; }
  void run(Thread& t, const Step& step) const override {
    if (step.logit_rows == 0) return;
    Program& p = *t.program;
    const int64_t rows = step.logit_rows;
    const bool planes = form_of(*w) == PI_FORM_Q8;
    const int form = planes ? PI_FORM_F32 : form_of(*w);
    const PiActs* acts =
        p.prepare(t, p.x, p.ldx, p.sizes.d_model, rows, step.logit_row, norm, project ? form_of(*project) : form);
    int64_t p0, p1;
    if (project) {
      share(project->panels, 1, p.pool->threads(), t.id, &p0, &p1);
      p.linear(t, *project, {}, acts, p.gate, p.ldh, rows, false, p0, p1);
      p.pool->barrier();
      acts = p.prepare(t, p.gate, p.ldh, w->k, rows, nullptr, {}, form);
    }
    share(w->panels, 1, p.pool->threads(), t.id, &p0, &p1);
    if (planes) {
      for (int64_t i = 0; i < rows; i += Program::HEAD_ROWS) {
        both_planes(t, acts->f + i * acts->ldf, acts->ldf, std::min(rows - i, Program::HEAD_ROWS),
                    step.logits + i * step.logit_stride, step.logit_stride, p0, p1);
      }
    } else {
      p.linear(t, *w, {}, acts, step.logits, step.logit_stride, rows, false, p0, p1);
    }
    p.pool->barrier();
  }

  // Every thread splits the few rows for itself; its own columns of the sums are nobody else's.
  void both_planes(Thread& t, const float* x, int64_t ldx, int64_t rows, float* out, int64_t ldo, int64_t p0,
                   int64_t p1) const {
    Program& p = *t.program;
    const int64_t k = w->k, nb = k / 32;
    const PiActs acts{nullptr, nullptr, t.head.q.data(), t.head.d.data(), t.head.sd.data(), t.head.s.data(), k, 0, 0};
    for (int64_t i = 0; i < 2 * rows; i++) {
      const float* row = x + i / 2 * ldx;
      if (i % 2) {
        const int8_t* q = t.head.q.data() + (i - 1) * k;
        const float* d = t.head.d.data() + (i - 1) * nb;
        for (int64_t j = 0; j < k; j++) t.head.f[(size_t)j] = row[j] - d[j / 32] * (float)q[j];
        row = t.head.f.data();
      }
      const PiActs to = pi_acts_from(&acts, i, 0);
      p.kernels->forms(row, k, PI_FORM_Q8, &to);
    }
    const int64_t c0 = p0 * PI_LANES, c1 = p1 * PI_LANES;
    p.linear(t, *w, {}, &acts, p.planes, ldo, 2 * rows, false, p0, p1);
    for (int64_t i = 0; i < rows; i++) {
      const float *first = p.planes + 2 * i * ldo, *second = first + ldo;
      for (int64_t j = c0; j < c1; j++) out[i * ldo + j] = first[j] + second[j];
    }
  }
};

void check(bool good, const std::string& what) {
  if (!good) throw std::invalid_argument(what);
}

void check_norm(const Norm& norm, int64_t n, const std::string& what) {
  check(!norm || (int64_t)norm.w.size() == n, what + " has another length than its rows");
}

void check_bias(const Vector& bias, int64_t n, const std::string& of) {
  check(bias.empty() || (int64_t)bias.size() == n, "the bias of " + of + " has a wrong length");
}

Vector padded(Vector v) {
  v.resize((size_t)pi_round_up((int64_t)v.size(), PI_LANES), 0.0f);
  return v;
}

}  // namespace

Cache::Cache(int type, int layers, int kv_heads, int head_dim, int64_t pages)
    : type(type),
      layers(layers),
      kv_heads(kv_heads),
      head_dim(head_dim),
      head_pad((int)pi_round_up(head_dim, PI_LANES)),
      pages(pages),
      head_bytes(pi_kv_head_bytes(type, head_pad)),
      layer_bytes(head_bytes * kv_heads),
      page_bytes(layer_bytes * layers),
      memory_(pages * page_bytes) {}

Program::Program(std::shared_ptr<Pool> pool_, std::shared_ptr<Cache> cache_, const PiKernels* kernels_, Sizes s)
    : sizes(s),
      cache(std::move(cache_)),
      kernels(kernels_),
      pool(std::move(pool_)),
      head_pad(pi_round_up(s.head_dim, PI_LANES)),
      ldx(pi_round_up(s.d_model, PI_LANES)),
      ldqkv((s.heads + 2 * s.kv_heads) * head_pad),
      lda(pi_round_up(s.heads * s.head_dim, PI_LANES)),
      ldh(pi_round_up(std::max({s.d_ff, s.d_model, s.embed_dim}), 2 * PI_LANES)) {
  check(s.heads % s.kv_heads == 0, "the number of heads is not a multiple of the number of key/value heads");
  check(s.kv_heads == cache->kv_heads && s.head_dim == cache->head_dim, "the cache was made for other heads");
  const auto floats = [&](int64_t n) { return (float*)memory_.allocate(n * 4); };
  x = floats(s.max_tokens * ldx);
  qkv = floats(s.max_tokens * ldqkv);
  attended = floats(s.max_tokens * lda);
  gate = floats(s.max_tokens * ldh);
  up = floats(s.max_tokens * ldh);
  const int64_t wide = std::max({s.d_model, s.heads * s.head_dim, s.embed_dim});
  input = make_shared(wide);
  middle = make_shared(s.d_ff);
  const int64_t alone = std::max(ALONE, std::max(wide, s.d_ff)) + 32 * 64;
  // The scratch of a smaller k may be the larger one: it holds more tokens.
  int64_t scratch = 0;
  for (int64_t k : {s.d_model, s.heads * s.head_dim, s.d_ff, s.embed_dim})
    scratch = std::max(scratch, pi_linear_scratch(k));
  threads_.resize((size_t)pool->threads());
  for (int i = 0; i < pool->threads(); i++) {
    Thread& t = threads_[(size_t)i];
    t.id = i;
    t.program = this;
    t.f.resize((size_t)alone);
    t.b.resize((size_t)alone * 2);
    t.q.resize((size_t)alone);
    t.d.resize((size_t)alone / 32 + 1);
    t.sd.resize((size_t)alone / 32 + 1);
    t.s.resize((size_t)alone / 16 + 1);
    t.attention.resize((size_t)pi_attention_scratch(head_pad));
    t.scratch.resize((size_t)scratch + 64);
  }
}

Program::~Program() = default;

Watch::Watch(int64_t d_ff, int64_t max_tokens, int threads)
    : d_ff(d_ff),
      max_tokens(max_tokens),
      words(pi_round_up(d_ff, 2 * PI_LANES) / PI_LANES),
      counts((size_t)(words * PI_LANES)),
      bits((size_t)(max_tokens * words)),
      magnitudes((size_t)threads * BINS),
      damaged((size_t)threads) {}

void Watch::clear() {
  std::fill(counts.begin(), counts.end(), 0);
  std::fill(bits.begin(), bits.end(), 0);
  std::fill(magnitudes.begin(), magnitudes.end(), 0);
  std::fill(damaged.begin(), damaged.end(), 0);
}

Program::Shared Program::make_shared(int64_t k) {
  const int64_t n = sizes.max_tokens;
  Shared s;
  s.f = (float*)memory_.allocate(n * pi_round_up(k, PI_LANES) * 4);
  s.b = (uint16_t*)memory_.allocate(n * pi_round_up(k, 32) * 2);
  s.q = (int8_t*)memory_.allocate(n * k + 64);
  s.d = (float*)memory_.allocate(n * (k / 32 + 1) * 4);
  s.sd = (float*)memory_.allocate(n * (k / 32 + 1) * 4);
  s.s = (int16_t*)memory_.allocate(n * (k / 16 + 1) * 2);
  return s;
}

int Program::add_rope(Vector frequencies, float factor) {
  const int64_t pairs = (int64_t)frequencies.size();
  check(2 * pairs <= sizes.head_dim, "more rotary frequencies than a head has pairs");
  const auto angles = [&] { return (float*)memory_.allocate(sizes.max_tokens * pairs * 4); };
  ropes_.push_back({std::move(frequencies), factor, angles(), angles()});
  rotated_.clear();
  return (int)ropes_.size() - 1;
}

void Program::embed(EmbedInput in) {
  check(in.table->k == sizes.embed_dim, "the embedding table has rows of another width than embed_dim");
  check(in.project ? in.project->rows == sizes.d_model && in.project->k == sizes.embed_dim
                   : sizes.embed_dim == sizes.d_model,
        "the embedding's projection does not lead from embed_dim to the width of the model");
  table_rows = in.table->rows;
  if (in.positions) {
    check(in.positions->k == sizes.d_model, "the table of positions has rows of another width than d_model");
    check(in.offset >= 0 && in.offset < in.positions->rows, "the table of positions has no row for position 0");
    positions = in.positions->rows - in.offset;
  }
  auto op = std::make_unique<Embed>();
  op->in = std::move(in);
  ops_.push_back(std::move(op));
}

void Program::attention_input(AttentionInput in) {
  const int64_t q = sizes.heads * head_pad, kv = sizes.kv_heads * head_pad;
  check(in.q->rows == q && in.k->rows == kv && in.v->rows == kv,
        "q, k or v has another number of rows than its heads need");
  check(in.q->k == sizes.d_model && in.k->k == sizes.d_model && in.v->k == sizes.d_model,
        "q, k or v has another number of columns than d_model");
  check_norm(in.norm, sizes.d_model, "the attention norm");
  check_bias(in.q_bias, q, "q");
  check_bias(in.k_bias, kv, "k");
  check_bias(in.v_bias, kv, "v");
  check_head_norm(in.q_norm, sizes.heads, "the norm of q");
  check_head_norm(in.k_norm, sizes.kv_heads, "the norm of k");
  check(in.layer >= 0 && in.layer < cache->layers, "no such layer in the cache");
  check(in.rope >= -1 && in.rope < (int)ropes_.size(), "no such table of rotary frequencies");
  auto op = std::make_unique<AttentionIn>();
  op->in = std::move(in);
  ops_.push_back(std::move(op));
}

void Program::attention(int layer, int window) {
  check(layer >= 0 && layer < cache->layers && window >= 0, "no such layer in the cache, or a negative window");
  auto op = std::make_unique<Attention>();
  op->layer = layer;
  op->window = window;
  ops_.push_back(std::move(op));
}

void Program::check_head_norm(const Norm& norm, int64_t heads, const std::string& what) const {
  if ((int64_t)norm.w.size() != heads * sizes.head_dim) check_norm(norm, sizes.head_dim, what);
}

void Program::project(std::shared_ptr<Matrix> w, Vector bias, Norm norm) {
  check(w->rows == sizes.d_model && w->k == sizes.heads * sizes.head_dim, "the output projection has a wrong shape");
  check_bias(bias, sizes.d_model, "the output projection");
  check_norm(norm, sizes.d_model, "the norm of the output projection");
  auto op = std::make_unique<Project>();
  op->w = std::move(w);
  op->norm = std::move(norm);
  op->bias = padded(std::move(bias));
  ops_.push_back(std::move(op));
}

void Program::ffn(FfnInput in) {
  const int64_t neurons = in.up->rows;  // those of the layer that rest here
  check(neurons <= sizes.d_ff, "an FFN has more neurons than d_ff");
  for (const auto& w : {in.gate, in.up})
    check(!w || (w->rows == neurons && w->k == sizes.d_model),
          "gate or up has another width than d_model, or than the other");
  check(in.down->rows == sizes.d_model && in.down->k == neurons,
        "down has another width than d_model, or than up has neurons");
  check(in.gate || in.gate_bias.empty(), "a bias of gate without a gate");
  check_bias(in.gate_bias, neurons, "gate");
  check_bias(in.up_bias, neurons, "up");
  check_bias(in.down_bias, sizes.d_model, "down");
  check_norm(in.norm, sizes.d_model, "the FFN norm");
  check_norm(in.out_norm, sizes.d_model, "the norm of the FFN's output");
  for (Vector* bias : {&in.gate_bias, &in.up_bias, &in.down_bias}) *bias = padded(std::move(*bias));
  auto op = std::make_unique<Ffn>();
  op->in = std::move(in);
  ops_.push_back(std::move(op));
}

void Program::sparsify(size_t op, std::shared_ptr<Bundles> bundles, std::unique_ptr<Predictor> predictor, float most,
                       int64_t recall_every) {
  auto* ffn = op < ops_.size() ? dynamic_cast<Ffn*>(ops_[op].get()) : nullptr;
  check(ffn && ffn->in.up, "that operator is not an FFN with matrices");
  check(bundles->neurons == ffn->in.up->rows && bundles->up.k == sizes.d_model,
        "the bundles have another shape than the FFN");
  check(
      bundles->gated() == (bool)ffn->in.gate && bundles->act == ffn->in.act && bundles->threshold == ffn->in.threshold,
      "the bundles are of another kind of FFN");
  check(most >= 0.0f && recall_every >= 0, "a threshold or an interval is negative");
  make_neuron_scratch(predictor.get(), bundles->neurons);
  bundles->gate_bias = ffn->in.gate_bias;
  bundles->up_bias = ffn->in.up_bias;
  ffn->sparse = std::make_unique<SparseFfn>(std::move(bundles), std::move(predictor), most, recall_every);
}

// Room for the lists of sparse FFNs, whose predictor, where there is one, is of so many neurons.
void Program::make_neuron_scratch(const Predictor* predictor, int64_t of) {
  int64_t rank = 0;
  if (predictor) {
    rank = predictor->in->rows;
    check(predictor->in->k == sizes.d_model && predictor->out->k == rank && predictor->out->rows == of,
          "the predictor has another shape than the FFN");
    check(predictor->floor >= 0, "the floor of a predictor is negative");
    check(rank <= sizes.d_model, "the predictor's rank exceeds the width of the model");
    for (Thread& t : threads_) t.scratch.resize(std::max(t.scratch.size(), (size_t)pi_linear_scratch(rank) + 64));
  }
  if (!neurons || neurons->ldr < pi_round_up(rank, PI_LANES))
    neurons = std::make_unique<NeuronScratch>(pool->threads(), sizes.d_ff, sizes.d_model, rank);
}

void Program::neurons_ffn(FfnInput in, std::shared_ptr<Bundles> bundles, std::unique_ptr<Predictor> predictor,
                          float most) {
  check(bundles->up.k == sizes.d_model && (int64_t)bundles->members.size() <= sizes.d_ff,
        "the bundles have another shape than the model's FFNs");
  check_bias(in.down_bias, sizes.d_model, "down");
  check_norm(in.norm, sizes.d_model, "the FFN norm");
  check_norm(in.out_norm, sizes.d_model, "the norm of the FFN's output");
  check(!in.replace || !in.out_norm, "a norm of what is added, where nothing is added");
  check(most >= 0.0f, "a threshold is negative");
  check(!predictor || (!in.replace && (int64_t)bundles->members.size() == bundles->neurons),
        "a predictor is for an FFN that has all of its neurons");
  in.down_bias = padded(std::move(in.down_bias));
  make_neuron_scratch(predictor.get(), bundles->neurons);
  auto op = std::make_unique<Ffn>();
  op->in = std::move(in);
  op->sparse = std::make_unique<SparseFfn>(std::move(bundles), std::move(predictor), most, 0);
  ops_.push_back(std::move(op));
}

void Program::replace_bundles(size_t op, std::shared_ptr<Bundles> bundles) {
  auto* ffn = op < ops_.size() ? dynamic_cast<Ffn*>(ops_[op].get()) : nullptr;
  check(ffn && ffn->sparse && !ffn->in.up && !ffn->sparse->predictor, "that operator is not an FFN of bundles alone");
  const Bundles& old = *ffn->sparse->bundles;
  check(bundles->up.k == old.up.k && (int64_t)bundles->members.size() <= sizes.d_ff && bundles->act == old.act &&
            bundles->threshold == old.threshold && bundles->gated() == old.gated(),
        "the bundles are of another kind of FFN");
  ffn->sparse->stats = {};
  if (!ffn->sparse->fired.empty()) ffn->sparse->fired.assign((size_t)bundles->neurons, 0);
  ffn->sparse->bundles = std::move(bundles);
}

SparseFfn& Program::sparse(size_t op) const {
  const auto* ffn = op < ops_.size() ? dynamic_cast<const Ffn*>(ops_[op].get()) : nullptr;
  check(ffn && ffn->sparse, "that operator has no bundles");
  return *ffn->sparse;
}

void Program::normalise(Norm norm) {
  check((bool)norm, "there is no norm");
  check_norm(norm, sizes.d_model, "the norm");
  auto op = std::make_unique<Normalise>();
  op->norm = std::move(norm);
  ops_.push_back(std::move(op));
}

void Program::head(Norm norm, std::shared_ptr<Matrix> project, std::shared_ptr<Matrix> w) {
  check(w->k == sizes.embed_dim, "the output head has another width than embed_dim");
  check(project ? project->rows == sizes.embed_dim && project->k == sizes.d_model : sizes.embed_dim == sizes.d_model,
        "the head's projection does not lead from the width of the model to embed_dim");
  check_norm(norm, sizes.d_model, "the final norm");
  head_panels = w->panels;
  auto op = std::make_unique<Head>();
  op->norm = std::move(norm);
  op->project = std::move(project);
  op->w = std::move(w);
  if (form_of(*op->w) == PI_FORM_Q8) {
    const size_t k = (size_t)op->w->k, rows = 2 * (size_t)HEAD_ROWS;
    planes = (float*)memory_.allocate((int64_t)rows * op->w->panels * PI_LANES * 4);
    for (Thread& t : threads_)
      t.head = {Vector(k), Vector(rows * k / 32), Vector(rows * k / 32), std::vector<int8_t>(rows * k),
                std::vector<int16_t>(rows * k / 16)};
  }
  ops_.push_back(std::move(op));
}

void Program::rotations(Thread& t, const Step& step) {
  int64_t begin, end;
  share(step.tokens, 1, pool->threads(), t.id, &begin, &end);
  for (const Rope& rope : ropes_) {
    const int64_t half = (int64_t)rope.frequencies.size();
    for (int64_t i = begin; i < end; i++) {
      for (int64_t j = 0; j < half; j++) {
        const float angle =
            (float)step.position[i] * rope.frequencies[(size_t)j];  // in fp32, as the models were trained
        rope.cos[i * half + j] = cosf(angle) * rope.factor;
        rope.sin[i * half + j] = sinf(angle) * rope.factor;
      }
    }
  }
}

const PiActs* Program::prepare(Thread& t, const float* src, int64_t ld, int64_t k, int64_t tokens, const int32_t* index,
                               const Norm& norm, int forms) {
  const int64_t ldf = pi_round_up(k, PI_LANES), ldb = pi_round_up(k, 32);
  const bool alone = tokens == 1 || tokens * ldb <= ALONE, moved = norm || index;
  float* f = alone ? t.f.data() : input.f;
  const PiActs rows = alone ? PiActs{f, t.b.data(), t.q.data(), t.d.data(), t.sd.data(), t.s.data(), k, ldf, ldb}
                            : PiActs{f, input.b, input.q, input.d, input.sd, input.s, k, ldf, ldb};
  int64_t begin = 0, end = tokens;
  if (!alone) share(tokens, 1, pool->threads(), t.id, &begin, &end);
  for (int64_t i = begin; i < end; i++) {
    const float* row = src + (index ? index[i] : i) * ld;
    if (norm) normalise_row(kernels, norm, row, k, f + i * ldf);
    else if (index) memcpy(f + i * ldf, row, (size_t)k * 4);
    if (moved) row = f + i * ldf;
    if (forms & ~PI_FORM_F32) {
      const PiActs to = pi_acts_from(&rows, i, 0);
      kernels->forms(row, k, forms, &to);
    }
  }
  PiActs* acts = alone ? &t.acts : &input.acts;
  if (alone || t.id == 0) {
    *acts = rows;
    if (!moved) acts->f = src, acts->ldf = ld;
  }
  if (!alone) pool->barrier();
  return acts;
}

void Program::linear(Thread& t, const Matrix& w, const Vector& bias, const PiActs* acts, float* out, int64_t ldo,
                     int64_t tokens, bool add, int64_t p0, int64_t p1) {
  if (p0 >= p1) return;
  PiLinear l{w.data, bias.empty() ? nullptr : bias.data(), out, ldo, w.type, add};
  kernels->linear(&l, acts, p0, p1, tokens, (void*)(((uintptr_t)t.scratch.data() + 63) & ~(uintptr_t)63));
}

void Program::multiply_down(Thread& t, const FfnInput& in, int64_t tokens, int64_t c0, int64_t c1) {
  const int64_t k = in.down->k;
  const int form = pi_form(in.down->type);
  const auto& m = middle;
  const PiActs hidden{gate, m.b, m.q, m.d, m.sd, m.s, k, ldh, pi_round_up(k, 32)};
  if (form != PI_FORM_F32) {
    for (int64_t i = 0; i < tokens && c0 < c1; i++) {
      const PiActs to = pi_acts_from(&hidden, i, c0);
      kernels->forms(gate + i * ldh + c0, c1 - c0, form, &to);
    }
  }
  pool->barrier();
  add_product(t, *in.down, in.down_bias, &hidden, tokens, in.out_norm, up);
}

void Program::add_product(Thread& t, const Matrix& w, const Vector& bias, const PiActs* acts, int64_t tokens,
                          const Norm& norm, float* buffer) {
  int64_t p0, p1;
  share(w.panels, 1, pool->threads(), t.id, &p0, &p1);
  linear(t, w, bias, acts, norm ? buffer : x, norm ? ldh : ldx, tokens, !norm, p0, p1);
  pool->barrier();
  if (norm) add_normalised(t, norm, buffer, 0, tokens);
}

void Program::add_normalised(Thread& t, const Norm& norm, float* rows, int64_t first, int64_t tokens) {
  int64_t begin, end;
  share(tokens, 1, pool->threads(), t.id, &begin, &end);
  for (int64_t i = begin; i < end; i++) {
    float *row = rows + i * ldh, *to = x + (first + i) * ldx;
    normalise_row(kernels, norm, row, sizes.d_model, row);
    for (int64_t j = 0; j < sizes.d_model; j++) to[j] += row[j];
  }
  pool->barrier();
}

struct RunOps {
  Program* program;
  const Step* step;
  size_t first, last;
  bool rotate;
  static void job(void* context, int thread) {
    const RunOps& r = *(const RunOps*)context;
    Program& p = *r.program;
    Thread& t = p.threads_[(size_t)thread];
    if (r.rotate) {
      p.rotations(t, *r.step);
      if (r.first > 0) p.pool->barrier();  // else the embedding's barrier comes before any use
    }
    const bool timed = p.timed && thread == 0;
    for (size_t i = r.first; i < r.last; i++) {
      const auto start = timed ? std::chrono::steady_clock::now() : std::chrono::steady_clock::time_point();
      p.ops_[i]->run(t, *r.step);
      if (timed) p.times_[i] += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    }
  }
};

void Program::run(const Step& step, size_t first, size_t last) {
  times_.resize(ops_.size(), 0.0);
  // A step that is run in parts keeps its angles.
  const bool rotate = !std::equal(rotated_.begin(), rotated_.end(), step.position, step.position + step.tokens);
  if (rotate) rotated_.assign(step.position, step.position + step.tokens);
  RunOps r{this, &step, first, std::min(last, ops_.size()), rotate};
  pool->run(RunOps::job, &r);
}

void Program::run_alone(const Step& step, size_t op) {
  times_.resize(ops_.size(), 0.0);
  RunOps r{this, &step, op, op + 1, false};
  pool->run(RunOps::job, &r);
}

std::vector<std::pair<std::string, double>> Program::take_times() {
  std::vector<std::pair<std::string, double>> taken;
  for (size_t i = 0; i < times_.size(); i++) taken.emplace_back(ops_[i]->name(), times_[i]);
  std::fill(times_.begin(), times_.end(), 0.0);
  return taken;
}
