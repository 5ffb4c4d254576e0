// The operators of a program except its FFNs, each followed by the method that adds it.
#include <math.h>
#include <string.h>

#include <algorithm>

#include "program.h"

namespace {

const Vector NO_BIAS;

// Context of operator code: a thread, its program, and what both use throughout.
struct Here {
  Thread& t;
  Program& p;
  Workspace& w;
  const PiKernels* kernels;
  explicit Here(Thread& thread) : t(thread), p(*thread.program), w(*p.workspace), kernels(w.kernels) {}
  void barrier() const { w.pool->barrier(); }
  void share_of(int64_t n, int64_t* begin, int64_t* end) const { share(n, 1, w.pool->threads(), t.id, begin, end); }
  // This thread's panels of w . acts, to rows of `out`.
  void product(const Matrix& m, const PiActs* acts, float* out, int64_t ldo, int64_t tokens, bool add = false) const {
    const Columns mine(m, *w.pool, t.id);
    w.linear(t.id, m, {}, acts, out, ldo, tokens, add, mine.p0, mine.p1);
  }
};

// ---- Embedding ------------------------------------------------------------------------------------------------------

constexpr int64_t ALONE = 32;  // rows that one thread has looked up before all threads have met

class Embed : public Op {
 public:
  explicit Embed(EmbedInput in) : in_(std::move(in)) {}
  const char* name() const override { return "embed"; }
  void run(Thread& t, const Step& step) override {
    const Here here(t);
    Program& p = here.p;
    here.w.pool->phase(step.tokens, 1, [&](int64_t begin, int64_t end) { look_up(p, step, begin, end); });
    if (!in_.project) return;
    const Matrix& w = *in_.project;
    const PiActs* acts = here.w.prepare(t.id, {p.gate, p.ldh, w.k, step.tokens}, {}, w.form());
    here.w.finish_product(t.id, w, acts, step.tokens, {p.x, p.ldx, in_.positions != nullptr, NO_BIAS});
  }

  bool run_alone(Program& p, const Step& step) override {
    if (in_.project || step.tokens > ALONE) return false;
    look_up(p, step, 0, step.tokens);
    return true;
  }

 private:
  void look_up(Program& p, const Step& step, int64_t begin, int64_t end) const {
    const bool direct = !in_.project && !in_.positions;
    for (int64_t i = begin; i < end; i++) {
      float *x = p.x + i * p.ldx, *row = direct ? x : p.gate + i * p.ldh;
      look_up(*in_.table, step.token[i], row);
      if (in_.scale != 1.0f) p.workspace->kernels->scale(row, in_.scale, in_.table->k);
      if (in_.positions) look_up(*in_.positions, step.position[i] + in_.offset, x);
      if (in_.positions && !in_.project)
        for (int64_t j = 0; j < p.sizes.d_model; j++) x[j] += row[j];
    }
  }
  static void look_up(const Table& table, int64_t row, float* out) {
    unpack_row(table.type, table.data + row * stored_row_bytes(table.type, table.k), table.k, out);
  }

  const EmbedInput in_;
};

}  // namespace

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
  add(std::make_shared<Embed>(std::move(in)));
}

// ---- Attention ------------------------------------------------------------------------------------------------------

float query_scale(const PiAttentionSettings& settings, int64_t position) {
  if (!settings.query_growth) return settings.scale;
  const int64_t intervals = (position + settings.query_offset) / settings.query_interval;
  return settings.scale * (float)(1 + settings.query_growth * log1p((double)intervals));
}

namespace {

class AttentionIn : public Op {
 public:
  AttentionIn(AttentionInput in, int64_t heads, const Cache::Layer& kv)
      : in_(std::move(in)),
        heads_(heads),
        kv_(kv),
        q_norms_(separated(in_.q_norm)),
        k_norms_(separated(in_.k_norm)),
        q_wide_(!in_.separate && (int64_t)in_.q_norm.w.size() > kv.head_dim),
        k_wide_(!in_.separate && (int64_t)in_.k_norm.w.size() > kv.head_dim) {}
  const char* name() const override { return "attention_input"; }

  void run(Thread& t, const Step& step) override {
    const Here here(t);
    Program& p = here.p;
    const int64_t heads = heads_, kv = kv_.kv_heads;
    const int forms = in_.q->form() | (in_.k ? in_.k->form() | in_.v->form() : 0);
    const Rows input =
        in_.q->k == p.sizes.d_model ? p.residual(0, step.tokens) : Rows{p.joined, p.ldjoined, in_.q->k, step.tokens};
    const PiActs* acts = here.w.prepare(t.id, input, in_.norm, forms);
    // Whole heads to each thread: it can rotate them and store them without waiting for another.
    const auto multiply = [&](const Heads& to) {
      part(here, *in_.q, in_.q_bias, acts, step, to, 0, heads);
      if (!in_.k) return;
      part(here, *in_.k, in_.k_bias, acts, step, to, heads, kv);
      part(here, *in_.v, in_.v_bias, acts, step, to, heads + kv, kv);
    };
    const auto per_token = [&](const auto& work) {
      for (const Run& run : step.runs)
        for (int64_t i = 0; i < run.count; i++) work(run, i);
    };
    const auto turn = [&](const Heads& of) {
      per_token([&](const Run& run, int64_t i) { turn_heads(here, run.first + i, run.position + i, of); });
    };
    const auto store = [&](const Heads& of) {
      per_token([&](const Run& run, int64_t i) { store_heads(here, run, i, of); });
    };
    const Heads all{p.qkv, p.ldqkv, 0, heads + 2 * kv};
    const bool wide = q_wide_ || k_wide_,
               in_memory = in_.q->is_in_memory() && (!in_.k || (in_.k->is_in_memory() && in_.v->is_in_memory()));
    Pool& pool = *here.w.pool;
    if (in_memory) {
      const int64_t pad = kv_.head_pad;
      const auto heads_at = [&](int64_t begin, int64_t end, float* aside) {
        return aside ? Heads{aside - begin * pad, (end - begin) * pad, begin, end} : all.part(begin, end);
      };
      pool.phase(
          all.end, 1, step.tokens * pad,
          [&](int64_t begin, int64_t end, float* aside) {
            multiply(heads_at(begin, end, aside));
            if (!wide) turn(heads_at(begin, end, aside));
          },
          [&](int64_t begin, int64_t end, float* aside) {
            const int64_t n = (end - begin) * pad;
            if (!wide) store(heads_at(begin, end, aside));
            else if (aside) copy_rows(aside, n, p.qkv + begin * pad, p.ldqkv, n, step.tokens);
          },
          here.w.deals(step.tokens, *in_.q));
      if (!wide) return;
    } else {
      int64_t begin, end;
      here.share_of(all.end, &begin, &end);
      multiply(all.part(begin, end));
      here.barrier();
    }
    if (wide)
      pool.phase(step.tokens, 1, [&](int64_t begin, int64_t end) {
        if (q_wide_) normalise_heads(here, in_.q_norm, begin, end, 0, heads);
        if (k_wide_) normalise_heads(here, in_.k_norm, begin, end, heads, kv);
      });
    pool.phase(all.end, 1, [&](int64_t begin, int64_t end) {
      turn(all.part(begin, end));
      store(all.part(begin, end));
    });
  }

 private:
  struct Heads {  // [begin, end) of those of q, k and v, one behind the other; rows: where head 0 would be, `ld` apart
    float* rows;
    int64_t ld, begin, end;
    Heads part(int64_t b, int64_t e) const { return {rows, ld, b, e}; }
  };

  // A norm of each head, where they have weights of their own.
  std::vector<Norm> separated(const Norm& norm) const {
    std::vector<Norm> norms;
    const auto dim = (size_t)kv_.head_dim;
    for (size_t at = 0; in_.separate && at < norm.w.size(); at += dim)
      norms.push_back({Vector(norm.w.begin() + (ptrdiff_t)at, norm.w.begin() + (ptrdiff_t)(at + dim)),
                       {},
                       norm.eps,
                       norm.layer,
                       norm.plain});
    return norms;
  }

  // Those of the heads that are of one matrix, whose heads are [first, first + count) of all.
  void part(const Here& here, const Matrix& w, const Vector& bias, const PiActs* acts, const Step& step,
            const Heads& to, int64_t first, int64_t count) const {
    const int64_t b = std::max<int64_t>(to.begin - first, 0), e = std::min(to.end - first, count),
                  panels = kv_.head_pad / PI_LANES;
    if (b < e)
      here.w.linear(here.t.id, w, bias, acts, to.rows + first * kv_.head_pad, to.ld, step.tokens, false, b * panels,
                    e * panels);
  }

  // Normalises heads [first, first + count) of tokens [begin, end), of each as one row; each head fills whole lanes.
  void normalise_heads(const Here& here, const Norm& norm, int64_t begin, int64_t end, int64_t first,
                       int64_t count) const {
    const Program& p = here.p;
    const int64_t dim = kv_.head_dim, pad = kv_.head_pad;
    for (int64_t i = begin; i < end; i++) {
      float *heads = p.qkv + i * p.ldqkv + first * pad, *row = pad == dim ? heads : here.w.row(here.t.id);
      if (pad != dim)
        for (int64_t h = 0; h < count; h++) memcpy(row + h * dim, heads + h * pad, (size_t)dim * 4);
      norm.apply(here.kernels, row, row);
      if (pad != dim)
        for (int64_t h = 0; h < count; h++) memcpy(heads + h * pad, row + h * dim, (size_t)dim * 4);
    }
  }

  // A token's heads clamped; those of q and k normalised and rotated, those of q scaled; those of v normalised.
  void turn_heads(const Here& here, int64_t token, int64_t position, const Heads& of) const {
    const Program& p = here.p;
    const int64_t heads = heads_, dim = kv_.head_dim;
    const Program::Rope* rope = p.rope(in_.rope);
    const int64_t half = rope ? (int64_t)rope->frequencies.size() : 0;
    const float scale = query_scale(in_.settings, position), clip = in_.settings.qkv_clip;
    for (int64_t h = of.begin; clip > 0 && h < of.end; h++) {
      float* x = of.rows + token * of.ld + h * kv_.head_pad;
      for (int64_t i = 0; i < dim; i++) x[i] = std::clamp(x[i], -clip, clip);  // NaN stays
    }
    const auto turn = [&](const Norm& norm, bool wide, float* x) {
      const bool normed = norm && !wide;
      if (normed && !in_.rotates_first) norm.apply(here.kernels, x, x);
      if (rope) here.kernels->rope(x, rope->cos + token * half, rope->sin + token * half, half);
      if (normed && in_.rotates_first) norm.apply(here.kernels, x, x);
    };
    for (int64_t h = of.begin; h < std::min(of.end, heads + kv_.kv_heads); h++) {
      float* x = of.rows + token * of.ld + h * kv_.head_pad;
      const Norm& shared = h < heads ? in_.q_norm : in_.k_norm;
      const Norm& norm = !in_.separate || !shared ? shared
                         : h < heads              ? q_norms_[(size_t)h]
                                                  : k_norms_[(size_t)(h - heads)];
      turn(norm, h < heads ? q_wide_ : k_wide_, x);
      if (h < heads) here.kernels->scale(x, scale, dim);
    }
    if (!in_.v_norm) return;
    for (int64_t h = std::max(of.begin, heads + kv_.kv_heads); h < of.end; h++) {
      float* x = of.rows + token * of.ld + h * kv_.head_pad;
      in_.v_norm.apply(here.kernels, x, x);
    }
  }

  // Heads of token i of a run: keys and values to the cache, q to where attention reads it.
  void store_heads(const Here& here, const Run& run, int64_t i, const Heads& of) const {
    const Program& p = here.p;
    const int64_t heads = heads_, kv = kv_.kv_heads, pad = kv_.head_pad;
    const int64_t token = run.first + i, position = run.position + i;
    const int type = p.cache->type, slot = (int)(position % PI_PAGE);
    uint8_t* page = p.cache->data(kv_) + run.pages[position / PI_PAGE] * p.cache->page_bytes;
    for (int64_t h = of.begin; h < of.end; h++) {
      const float* x = of.rows + token * of.ld + h * pad;
      if (h < heads) {
        float* const q = p.qkv + token * p.ldqkv + h * pad;
        if (q != x) memcpy(q, x, (size_t)pad * 4);
      } else if (h < heads + kv) {
        here.kernels->store_kv(type, page + (h - heads) * kv_.head_bytes, slot, x, nullptr, (int)pad);
      } else {
        here.kernels->store_kv(type, page + (h - heads - kv) * kv_.head_bytes, slot, nullptr, x, (int)pad);
      }
    }
  }

  const AttentionInput in_;
  const int64_t heads_;
  const Cache::Layer& kv_;
  const std::vector<Norm> q_norms_, k_norms_;  // of each head
  const bool q_wide_, k_wide_;                 // whether their norms are over all heads together
};

class Attention : public Op {
 public:
  Attention(int64_t heads, const Cache::Layer& kv, PiAttentionSettings settings, Vector sinks)
      : heads_(heads), kv_(kv), settings_(settings), sinks_(std::move(sinks)) {}
  const char* name() const override { return "attention"; }
  void run(Thread& t, const Step& step) override {
    const Here here(t);
    const int64_t kv = kv_.kv_heads, group = heads_ / kv;
    if ((int64_t)step.runs.size() == step.tokens) {  // decode: all rows cost about the same, cut them evenly
      const Program& p = here.p;
      const int64_t dim = kv_.value_dim();
      here.w.pool->phase(
          step.tokens * heads_, 1, dim,
          [&](int64_t begin, int64_t end, float* aside) {
            for (int64_t at = begin, rows; at < end; at += rows) {
              const int64_t token = at / heads_, g = at / group % kv, r = at % group;
              rows = std::min(group - r, end - at);
              float* const out = aside ? aside + (token * heads_ - begin) * dim : p.attended + token * p.lda;
              attend(here, step.runs[(size_t)token], (int)g, r, r + rows, out);
            }
          },
          [&](int64_t begin, int64_t end, const float* aside) {
            for (int64_t at = begin; aside && at < end; at++)
              memcpy(p.attended + at / heads_ * p.lda + at % heads_ * dim, aside + (at - begin) * dim, (size_t)dim * 4);
          });
    } else {  // later rows of a prompt attend to more: they come before earlier ones
      int64_t all = 0;
      for (const Run& run : step.runs) all += tiles(run);
      // use(run, tile, its memory) for tiles that are counted from the last one on.
      const int64_t floats = (PI_ATTENTION_ROWS / group + 2) * here.p.lda;
      const auto visit = [&](int64_t begin, int64_t end, float* aside, const auto& use) {
        int64_t before = all;
        for (size_t i = step.runs.size(); i-- > 0;) {
          const Run& run = step.runs[i];
          before -= tiles(run);
          const int64_t first = all - end - before, last = all - begin - before;
          for (int64_t j = std::max(first, (int64_t)0); j < std::min(last, tiles(run)); j++)
            use(run, j, aside ? aside + (j - first) * floats : nullptr);
        }
      };
      here.w.pool->phase(
          all, 1, floats,
          [&](int64_t begin, int64_t end, float* aside) {
            visit(begin, end, aside, [&](const Run& run, int64_t i, float* to) { attend_tile(here, run, i, to); });
          },
          [&](int64_t begin, int64_t end, float* aside) {
            if (aside)
              visit(begin, end, aside, [&](const Run& run, int64_t i, float* from) { place(here.p, run, i, from); });
          },
          true);
    }
  }

 private:
  // Of a prompt: rows of a group of heads, as many as are attended to at once.
  int64_t tiles(const Run& run) const {
    return (run.count * (heads_ / kv_.kv_heads) + PI_ATTENTION_ROWS - 1) / PI_ATTENTION_ROWS * kv_.kv_heads;
  }
  struct Tile {  // rows [begin, end) of a group of heads, the first of which is of that token
    int64_t group, begin, end, token;
  };
  Tile tile(const Run& run, int64_t i) const {
    const int64_t kv = kv_.kv_heads, group = heads_ / kv, r = i / kv * PI_ATTENTION_ROWS;
    return {i % kv, r, std::min<int64_t>(r + PI_ATTENTION_ROWS, run.count * group), r / group};
  }
  // To the program's rows, or aside, where rows of tokens from the tile's first on are as far apart.
  void attend_tile(const Here& here, const Run& run, int64_t i, float* aside) const {
    const Tile of = tile(run, i);
    float* const out = aside ? aside - of.token * here.p.lda : here.p.attended + run.first * here.p.lda;
    attend(here, run, (int)of.group, of.begin, of.end, out);
  }
  void place(const Program& p, const Run& run, int64_t i, const float* aside) const {
    const Tile of = tile(run, i);
    const int64_t group = heads_ / kv_.kv_heads, dim = kv_.value_dim();
    for (int64_t r = of.begin; r < of.end; r++) {
      const int64_t column = (of.group * group + r % group) * dim;
      memcpy(p.attended + (run.first + r / group) * p.lda + column, aside + (r / group - of.token) * p.lda + column,
             (size_t)dim * 4);
    }
  }
  void attend(const Here& here, const Run& run, int g, int64_t r0, int64_t r1, float* out) const {
    const Program& p = here.p;
    PiAttention a;
    a.q = p.qkv + run.first * p.ldqkv;
    a.out = out;
    a.kv = p.cache->data(kv_);
    a.pages = run.pages;
    a.q_stride = p.ldqkv;
    a.out_stride = p.lda;
    a.page_bytes = p.cache->page_bytes;
    a.head_bytes = kv_.head_bytes;
    a.position = run.position;
    a.head_dim = (int)kv_.value_dim();
    a.head_pad = (int)kv_.head_pad;
    a.group = (int)(heads_ / kv_.kv_heads);
    a.settings = settings_;
    a.sinks = sinks_.empty() ? nullptr : sinks_.data();
    const auto& kernels = kv_.latents ? here.kernels->latent_attention : here.kernels->attention;
    kernels[p.cache->type](&a, g, r0, r1, here.t.attention.data());
  }

  const int64_t heads_;
  const Cache::Layer& kv_;
  const PiAttentionSettings settings_;
  const Vector sinks_;
};

// Each head's part of attended *= softplus(w . norm(x))
class GateHeads : public Op {
 public:
  GateHeads(Norm norm, std::shared_ptr<Matrix> w, int64_t head_dim)
      : norm_(std::move(norm)), w_(std::move(w)), head_dim_(head_dim) {}
  const char* name() const override { return "attention_gate"; }
  void run(Thread& t, const Step& step) override {
    const Here here(t);
    const Program& p = here.p;
    const PiActs* acts = here.w.prepare(t.id, p.residual(0, step.tokens), norm_, w_->form());
    here.w.finish_product(t.id, *w_, acts, step.tokens, {p.qkv, p.ldqkv, false, NO_BIAS});
    here.w.pool->phase(step.tokens, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++)
        for (int64_t h = 0; h < w_->rows; h++) {
          const float x = p.qkv[i * p.ldqkv + h];
          const float softplus = x > 20.0f ? x : log1pf(expf(x));
          here.kernels->scale(p.attended + i * p.lda + h * head_dim_, softplus, head_dim_);
        }
    });
  }

 private:
  const Norm norm_;
  const std::shared_ptr<Matrix> w_;
  const int64_t head_dim_;
};

// attended *= sigmoid(w . norm(x))
class GateAttended : public Op {
 public:
  GateAttended(Norm norm, std::shared_ptr<Matrix> w) : norm_(std::move(norm)), w_(std::move(w)) {}
  const char* name() const override { return "attention_gate"; }
  void run(Thread& t, const Step& step) override {
    const Here here(t);
    const Program& p = here.p;
    const PiActs* acts = here.w.prepare(t.id, p.residual(0, step.tokens), norm_, w_->form());
    const auto compute = [&](int64_t p0, int64_t p1, float* aside) {
      const Columns of(*w_, p0, p1);
      const int64_t ld = aside ? of.lanes() : p.ldqkv;
      float* const gate = aside ? aside : p.qkv + of.c0;
      here.w.linear(t.id, *w_, {}, acts, gate - of.c0, ld, step.tokens, false, p0, p1);
      for (int64_t i = 0; i < step.tokens; i++)
        here.kernels->activate(PI_SIGMOID, 0, gate + i * ld, p.attended + i * p.lda + of.c0, of.lanes());
    };
    const auto place = [&](int64_t p0, int64_t p1, const float* aside) {
      const Columns of(*w_, p0, p1);
      copy_rows(aside ? aside : p.qkv + of.c0, aside ? of.lanes() : p.ldqkv, p.attended + of.c0, p.lda, of.n(),
                step.tokens);
    };
    if (w_->is_in_memory())
      return here.w.pool->phase(w_->panels, w_->unit(), step.tokens * PI_LANES, compute, place,
                                here.w.deals(step.tokens, *w_));
    const Columns own(*w_, *here.w.pool, t.id);
    compute(own.p0, own.p1, nullptr);
    place(own.p0, own.p1, nullptr);
    here.barrier();
  }

 private:
  const Norm norm_;
  const std::shared_ptr<Matrix> w_;
};

class Project : public Op {
 public:
  Project(std::shared_ptr<Matrix> w, Vector bias, Norm norm, int64_t at, Norm reads)
      : w_(std::move(w)), bias_(std::move(bias)), norm_(std::move(norm)), reads_(std::move(reads)), at_(at) {}
  const char* name() const override { return "project"; }
  void run(Thread& t, const Step& step) override {
    Program& p = *t.program;
    const Rows rows{p.attended + at_, p.lda, w_->k, step.tokens};
    const PiActs* acts = p.workspace->prepare(t.id, rows, reads_, w_->form());
    p.workspace->finish_product(t.id, *w_, acts, step.tokens, p.added_to(0, norm_, bias_, p.gate));
    p.add_normalised(norm_, p.gate, 0, step.tokens);
  }

 private:
  const std::shared_ptr<Matrix> w_;
  const Vector bias_;
  const Norm norm_, reads_;
  const int64_t at_;
};

}  // namespace

void Program::attention_input(AttentionInput in) {
  check_layer(in.layer);
  const Cache::Layer& own = cache->layers[(size_t)in.layer];
  const int64_t heads = sizes.heads[(size_t)in.layer], q = heads * own.head_pad, kv = own.kv_heads * own.head_pad;
  check(!own.latents, "the layer's cache has latents");
  check(!in.k == !in.v && !in.k == !kv, "a layer has keys and values, or neither and no room for them");
  check(in.q->rows == q && (!in.k || (in.k->rows == kv && in.v->rows == kv)),
        "q, k or v has another number of rows than its heads need");
  const bool joins = joined && !in.norm && in.q->k == 2 * sizes.d_model;
  check((joins || in.q->k == sizes.d_model) && (!in.k || (in.k->k == in.q->k && in.v->k == in.q->k)),
        "q, k or v has another number of columns than d_model");
  check_norm(in.norm, sizes.d_model, "the attention norm");
  check_bias(in.q_bias, q, "q");
  check_bias(in.k_bias, kv, "k");
  check_bias(in.v_bias, kv, "v");
  const auto check_heads = [&](const Norm& norm, int64_t n, const char* what) {
    if ((int64_t)norm.w.size() != n * own.head_dim) check_norm(norm, own.head_dim, what);
  };
  check_heads(in.q_norm, heads, "the norm of q");
  check_heads(in.k_norm, own.kv_heads, "the norm of k");
  const auto is_whole = [&](const Norm& norm, int64_t n) {
    return !norm || (int64_t)norm.w.size() == n * own.head_dim;
  };
  check(!in.separate || (is_whole(in.q_norm, heads) && is_whole(in.k_norm, own.kv_heads)),
        "norms of heads with weights of their own are not as wide as all heads");
  check_norm(in.v_norm, own.head_dim, "the norm of v");
  check_rope(in.rope, own.head_dim);
  check_settings(in.settings);
  if (!in.settings.scale) in.settings.scale = 1.0f / sqrtf((float)own.head_dim);
  std::vector<std::shared_ptr<Matrix>> matrices = {in.q};
  if (in.k) matrices.push_back(in.k);
  if (in.v != in.k) matrices.push_back(in.v);
  add(std::make_shared<AttentionIn>(std::move(in), heads, own), std::move(matrices));
}

void Program::attention(int layer, PiAttentionSettings settings, Vector sinks, int kv) {
  check_layer(layer);
  check_settings(settings);
  if (kv >= 0) check_layer(kv);
  const Cache::Layer &own = cache->layers[(size_t)layer], &source = kv < 0 ? own : cache->layers[(size_t)kv];
  check(source.kv_heads > 0, "the layer keeps no keys and values");
  const int64_t heads = sizes.heads[(size_t)layer];
  check(source.head_dim == own.head_dim && heads % source.kv_heads == 0 && (kv < 0 || !source.latents),
        "the keys and values of another layer have other heads");
  check(sinks.empty() || (int64_t)sinks.size() == heads, "there are not as many sinks as heads");
  add(std::make_shared<Attention>(heads, source, settings, std::move(sinks)));
}

void Program::gate_attended(int layer, Norm norm, std::shared_ptr<Matrix> w) {
  check_layer(layer);
  const int64_t heads = sizes.heads[(size_t)layer], head_dim = cache->layers[(size_t)layer].head_dim;
  const int64_t width = heads * head_dim;
  check((w->rows == width || w->rows == heads) && w->k == sizes.d_model && ldqkv >= w->panels * PI_LANES,
        "the gate has a wrong shape");
  check_norm(norm, sizes.d_model, "the attention norm");
  if (w->rows == width) add(std::make_shared<GateAttended>(std::move(norm), w), {w});
  else add(std::make_shared<GateHeads>(std::move(norm), w, head_dim), {w});
}

void Program::project(int layer, std::shared_ptr<Matrix> w, Vector bias, Norm norm, int64_t at, Norm reads) {
  check_layer(layer);
  check(!cache->layers[(size_t)layer].latents, "the layer's cache has latents");
  const int64_t attention = sizes.heads[(size_t)layer] * cache->layers[(size_t)layer].head_dim;
  check(w->rows == sizes.d_model && (at ? at % PI_LANES == 0 && at > 0 && at + w->k <= lda : w->k == attention),
        "the output projection has a wrong shape");
  if (at) workspace->reserve(sizes.max_tokens, w->k);
  check_bias(bias, sizes.d_model, "the output projection");
  check_norm(norm, sizes.d_model, "the norm of the output projection");
  check_norm(reads, w->k, "the order of what is attended");
  add(std::make_shared<Project>(w, padded(std::move(bias)), std::move(norm), at, std::move(reads)), {w});
}

// ---- A norm by itself -----------------------------------------------------------------------------------------------

namespace {

class Normalise : public Op {
 public:
  explicit Normalise(Norm norm) : norm_(std::move(norm)) {}
  const char* name() const override { return "normalise"; }
  void run(Thread& t, const Step& step) override {
    const Here here(t);
    here.w.pool->phase(step.tokens, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        float* x = here.p.x + i * here.p.ldx;
        norm_.apply(here.kernels, x, x);
      }
    });
  }

 private:
  const Norm norm_;
};

}  // namespace

void Program::normalise(Norm norm) {
  check((bool)norm, "there is no norm");
  check_norm(norm, sizes.d_model, "the norm");
  add(std::make_shared<Normalise>(std::move(norm)));
}

// ---- Inputs of layers ---------------------------------------------------------------------------------------------

namespace {

class LayerInputs : public Op {
 public:
  explicit LayerInputs(LayerInputsSpec spec) : spec_(std::move(spec)) {}
  const char* name() const override { return "layer_inputs"; }
  void run(Thread& t, const Step& step) override {
    const Here here(t);
    const Program& p = here.p;
    const PiActs* acts = here.w.prepare(t.id, p.residual(0, step.tokens), {}, spec_.w->form());
    here.w.finish_product(t.id, *spec_.w, acts, step.tokens, {p.inputs, p.ldinputs, false, NO_BIAS});
    const Table& table = *spec_.table;
    const int64_t width = (int64_t)spec_.norm.w.size();
    here.w.pool->phase(step.tokens, 1, [&](int64_t begin, int64_t end) {
      float* const row = here.w.row(t.id);
      for (int64_t i = begin; i < end; i++) {
        float* const to = p.inputs + i * p.ldinputs;
        const int64_t at = step.token[i] < table.rows ? step.token[i] : 0;
        unpack_row(table.type, table.data + at * stored_row_bytes(table.type, table.k), table.k, row);
        here.kernels->scale(to, spec_.scale, table.k);
        for (int64_t j = 0; j < table.k; j += width) spec_.norm.apply(here.kernels, to + j, to + j);
        for (int64_t j = 0; j < table.k; j++) to[j] = (to[j] + row[j] * spec_.row_scale) * spec_.factor;
      }
    });
  }

 private:
  const LayerInputsSpec spec_;
};

class AddLayerInput : public Op {
 public:
  AddLayerInput(int64_t at, std::shared_ptr<Matrix> gate, std::shared_ptr<Matrix> out, Norm norm, int activation)
      : at_(at), gate_(std::move(gate)), out_(std::move(out)), norm_(std::move(norm)), activation_(activation) {}
  const char* name() const override { return "add_layer_input"; }
  void run(Thread& t, const Step& step) override {
    const Here here(t);
    Program& p = here.p;
    const PiActs* acts = here.w.prepare(t.id, p.residual(0, step.tokens), {}, gate_->form());
    here.w.finish_product(t.id, *gate_, acts, step.tokens, {p.gate, p.ldh, false, NO_BIAS});
    here.w.pool->phase(step.tokens, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++)
        here.kernels->activate(activation_, 0, p.gate + i * p.ldh, p.inputs + i * p.ldinputs + at_, gate_->rows);
    });
    acts = here.w.prepare(t.id, {p.gate, p.ldh, out_->k, step.tokens}, {}, out_->form());
    here.w.finish_product(t.id, *out_, acts, step.tokens, p.added_to(0, norm_, NO_BIAS, p.up));
    if (!p.streams.n) return p.add_normalised(norm_, p.up, 0, step.tokens);
    here.w.pool->phase(step.tokens, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        float* const row = p.up + i * p.ldh;
        norm_.apply(here.kernels, row, row);
        for (int64_t s = 1; s < p.streams.n; s++)
          for (int64_t j = 0; j < p.sizes.d_model; j++) p.streams.row(i, s, p.ldx)[j] += row[j];
      }
    });
  }

 private:
  const int64_t at_;
  const std::shared_ptr<Matrix> gate_, out_;
  const Norm norm_;
  const int activation_;
};

}  // namespace

void Program::layer_inputs(LayerInputsSpec spec) {
  const int64_t k = spec.table->k, width = (int64_t)spec.norm.w.size();
  check(!inputs && width > 0 && width % PI_LANES == 0 && k % width == 0, "inputs of layers have an odd width");
  check(spec.w->rows == k && spec.w->k == sizes.d_model, "the projection of layers' inputs has a wrong shape");
  ldinputs = pi_round_up(k, PI_LANES);
  inputs = (float*)memory_.allocate(sizes.max_tokens * ldinputs * 4);
  workspace->reserve(1, k);
  const auto w = spec.w;
  add(std::make_shared<LayerInputs>(std::move(spec)), {w});
}

void Program::add_layer_input(int64_t at, std::shared_ptr<Matrix> gate, std::shared_ptr<Matrix> out, Norm norm,
                              int activation) {
  const int64_t width = gate->rows;
  check(inputs && width % PI_LANES == 0 && at >= 0 && at % PI_LANES == 0 && at + width <= ldinputs,
        "there is no such input of a layer");
  check(gate->k == sizes.d_model && out->rows == sizes.d_model && out->k == width && width <= ldh,
        "a matrix of a layer's input has a wrong shape");
  check_norm(norm, sizes.d_model, "the norm of a layer's input");
  check(norm || !streams.n, "what is added to several streams needs a norm");
  workspace->reserve(sizes.max_tokens, width);
  add(std::make_shared<AddLayerInput>(at, gate, out, std::move(norm), activation), {gate, out});
}

// ---- Output head ----------------------------------------------------------------------------------------------------

namespace {

// Logits decide the answer and few rows of them are computed, so precision is cheap: for quantised weights the
// activations are two planes of 8 bits, the second the remainder of the first, multiplied in one pass over a weight.
class Head : public Op {
 public:
  Head(Norm norm, std::shared_ptr<Matrix> project, std::shared_ptr<Matrix> w, float scale, float cap, Vector bias,
       int threads)
      : norm_(std::move(norm)),
        project_(std::move(project)),
        w_(std::move(w)),
        scale_(scale),
        cap_(cap),
        bias_(std::move(bias)) {
    if (w_->form() != PI_FORM_Q8) return;
    planes_ = std::make_unique<Mapping>(2 * ROWS * w_->panels * PI_LANES * 4);
    for (int t = 0; t < threads; t++) forms_.emplace_back(2 * ROWS * w_->k);
  }
  const char* name() const override { return "head"; }
  size_t wants(const Program&, const Step& step) const override { return step.logit_rows > 0 ? matrices.size() : 0; }
  void run(Thread& t, const Step& step) override {
    for (int64_t i = 0; i < step.logit_rows; i += ROWS) run_rows(Here(t), step, i, std::min(step.logit_rows - i, ROWS));
  }

 private:
  static constexpr int64_t ROWS = 8;  // of logits, computed together
  static inline const std::vector<int32_t> ALL;

  void run_rows(const Here& here, const Step& step, int64_t first, int64_t rows) {
    const Program& p = here.p;
    const int thread = here.t.id, form = planes_ ? PI_FORM_F32 : w_->form();
    Rows x = p.residual(0, rows);
    x.index = step.logit_row + first;
    const PiActs* acts = here.w.prepare(thread, x, norm_, project_ ? project_->form() : form);
    if (project_) {
      here.w.finish_product(thread, *project_, acts, rows, {p.gate, p.ldh, false, NO_BIAS});
      acts = here.w.prepare(thread, {p.gate, p.ldh, w_->k, rows}, {}, form);
    }
    const PiActs two_planes = planes_ && !here.w.pool->is_late() ? split(here, acts, rows) : PiActs();
    float* const logits = step.logits + first * step.logit_stride;
    const int64_t planes = planes_ ? 2 : 1;
    const std::vector<int32_t>& list = this == p.drafting_head() ? p.draft_panels : ALL;
    // Panels [p0, p1) of the matrix, or of the list.
    const auto compute = [&](int64_t p0, int64_t p1, float* aside) {
      const int64_t c0 = p0 * PI_LANES, n = (p1 - p0) * PI_LANES, ld = aside ? n : step.logit_stride;
      float* const sums = aside ? aside : (planes_ ? (float*)planes_->data() : logits) + c0;
      float* const out = aside ? aside : logits + c0;
      for (int64_t entry = p0; entry < p1;) {
        const int64_t panel = list.empty() ? entry : list[(size_t)entry];
        int64_t end = list.empty() ? p1 : entry + 1;
        while (end < p1 && list[(size_t)end] == panel + end - entry) end++;
        const int64_t column = (entry - p0) * PI_LANES, numbers = (end - entry) * PI_LANES;
        here.w.linear(thread, *w_, {}, planes_ ? &two_planes : acts, sums + column - panel * PI_LANES, ld,
                      planes * rows, false, panel, panel + end - entry);
        for (int64_t i = 0; i < rows; i++) {
          float* const to = out + i * ld + column;
          const float *one = sums + 2 * i * ld + column, *other = one + ld;
          if (planes_)
            for (int64_t j = 0; j < numbers; j++) to[j] = one[j] + other[j];
          for (int64_t j = 0; j < numbers && !bias_.empty(); j++) to[j] += bias_[(size_t)(panel * PI_LANES + j)];
        }
        entry = end;
      }
      for (int64_t i = 0; i < rows; i++) {
        if (scale_ != 1.0f) here.kernels->scale(out + i * ld, scale_, n);
        if (cap_ != 0.0f) here.kernels->cap(out + i * ld, cap_, n);
      }
    };
    if (!w_->is_in_memory()) {
      const Columns own(*w_, *here.w.pool, thread);
      compute(own.p0, own.p1, nullptr);
      return here.barrier();
    }
    here.w.pool->phase(list.empty() ? w_->panels : (int64_t)list.size(), 1, planes * rows * PI_LANES, compute,
                       [&](int64_t p0, int64_t p1, const float* aside) {
                         const int64_t n = (p1 - p0) * PI_LANES;
                         if (aside) copy_rows(aside, n, logits + p0 * PI_LANES, step.logit_stride, n, rows);
                       });
  }

  // Every thread splits the few rows for itself.
  PiActs split(const Here& here, const PiActs* x, int64_t rows) const {
    const int64_t k = w_->k, nb = k / 32;
    const ActMemory& memory = forms_[(size_t)here.t.id];
    const PiActs acts = memory.rows(k);
    for (int64_t i = 0; i < 2 * rows; i++) {
      const float* row = x->f + i / 2 * x->ldf;
      if (i % 2) {
        const int8_t* q = acts.q + (i - 1) * k;
        const float* d = acts.d + (i - 1) * nb;
        float* left = memory.floats();
        for (int64_t j = 0; j < k; j++) left[j] = row[j] - d[j / 32] * (float)q[j];
        row = left;
      }
      const PiActs to = pi_acts_from(&acts, i, 0);
      here.kernels->forms(row, k, PI_FORM_Q8, &to);
    }
    return acts;
  }

  const Norm norm_;
  const std::shared_ptr<Matrix> project_, w_;
  const float scale_, cap_;
  const Vector bias_;                // of the logits, before their scale, padded to whole panels; may be empty
  std::unique_ptr<Mapping> planes_;  // [2 ROWS][rows of w]; null: there is one plane
  std::vector<ActMemory> forms_;     // of the threads
};

}  // namespace

void Program::head(Norm norm, std::shared_ptr<Matrix> project, std::shared_ptr<Matrix> w, float scale, float cap,
                   Vector bias) {
  check(w->k == sizes.embed_dim, "the output head has another width than embed_dim");
  check(project ? project->rows == sizes.embed_dim && project->k == sizes.d_model : sizes.embed_dim == sizes.d_model,
        "the head's projection does not lead from the width of the model to embed_dim");
  check_norm(norm, sizes.d_model, "the final norm");
  (draft_from < ops_.size() ? draft_norm_ : final_norm_) = std::make_shared<const Norm>(norm);
  head_panels = std::max(head_panels, w->panels);  // a draft head may have fewer
  check(cap >= 0, "a cap of the logits is negative");
  check_bias(bias, w->rows, "the head");
  bias = padded(std::move(bias));
  const auto op =
      std::make_shared<Head>(std::move(norm), project, w, scale, cap, std::move(bias), workspace->pool->threads());
  drafting_head_ = op.get();
  add(op, {project, w});
}

// ---- Draft head -----------------------------------------------------------------------------------------------------

namespace {

class DraftIn : public Op {
 public:
  explicit DraftIn(DraftInput in) : in_(std::move(in)) {}
  const char* name() const override { return "draft_input"; }
  void run(Thread& t, const Step& step) override {
    const Here here(t);
    Program& p = here.p;
    const Table& table = *in_.table;
    here.w.pool->phase(step.tokens, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        float *row = p.joined + i * p.ldjoined, *hidden = row + p.sizes.d_model;
        unpack_row(table.type, table.data + step.token[i] * stored_row_bytes(table.type, table.k), table.k, row);
        if (in_.scale != 1.0f) here.kernels->scale(row, in_.scale, table.k);
        in_.embed_norm.apply(here.kernels, row, row);
        in_.hidden_norm.apply(here.kernels, p.x + i * p.ldx, hidden);
        if (in_.normed) memcpy(p.x + i * p.ldx, hidden, (size_t)p.sizes.d_model * 4);
      }
    });
    if (!in_.w) return;
    const PiActs* acts = here.w.prepare(t.id, {p.joined, p.ldjoined, in_.w->k, step.tokens}, {}, in_.w->form());
    here.w.finish_product(t.id, *in_.w, acts, step.tokens, {p.x, p.ldx, false, NO_BIAS});
  }

 private:
  const DraftInput in_;
};

class KeepFeature : public Op {
 public:
  explicit KeepFeature(int64_t place) : place_(place) {}
  const char* name() const override { return "feature"; }
  void run(Thread& t, const Step& step) override {
    const Here here(t);
    const Program& p = here.p;
    here.w.pool->phase(step.tokens, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++)
        memcpy(p.features + i * p.ldfeatures + place_ * p.sizes.d_model, p.x + i * p.ldx, (size_t)p.sizes.d_model * 4);
    });
  }

 private:
  const int64_t place_;
};

class Fuse : public Op {
 public:
  Fuse(std::vector<Norm> norms, std::shared_ptr<Matrix> w) : norms_(std::move(norms)), w_(std::move(w)) {}
  const char* name() const override { return "fuse"; }
  void run(Thread& t, const Step& step) override {
    const Here here(t);
    const Program& p = here.p;
    const int64_t width = norms_.empty() ? 0 : p.feature_width / (int64_t)norms_.size();
    if (width)
      here.w.pool->phase(step.tokens, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++)
          for (size_t n = 0; n < norms_.size(); n++) {
            float* const row = p.features + i * p.ldfeatures + (int64_t)n * width;
            norms_[n].apply(here.kernels, row, row);
          }
      });
    const PiActs* acts = here.w.prepare(t.id, {p.features, p.ldfeatures, w_->k, step.tokens}, {}, w_->form());
    here.w.finish_product(t.id, *w_, acts, step.tokens, {p.x, p.ldx, false, NO_BIAS});
  }

 private:
  const std::vector<Norm> norms_;
  const std::shared_ptr<Matrix> w_;
};

}  // namespace

void Program::keep_feature(int64_t place, int64_t places) {
  check(place >= 0 && place < places && places <= 64, "there is no such place among the features");
  check(!features || feature_width == places * sizes.d_model, "a program has one draft head");
  if (!features) {
    feature_width = places * sizes.d_model;
    ldfeatures = pi_round_up(feature_width, PI_LANES);
    features = (float*)memory_.allocate(sizes.max_tokens * ldfeatures * 4);
    workspace->reserve(sizes.max_tokens, feature_width);
  }
  add(std::make_shared<KeepFeature>(place));
}

void Program::fuse(std::vector<Norm> norms, std::shared_ptr<Matrix> w) {
  check(features && draft_from > ops_.size(), "an EAGLE head without features, or a second one");
  check(w->rows == sizes.d_model && w->k == feature_width, "the draft head's projection has a wrong shape");
  check(norms.size() <= 1 || (int64_t)norms.size() * sizes.d_model == feature_width,
        "there is not a norm of each feature");
  for (const Norm& norm : norms) {
    check((bool)norm, "there is no norm");
    check_norm(norm, feature_width / (int64_t)norms.size(), "the norm of features");
  }
  draft_from = ops_.size();
  add(std::make_shared<Fuse>(std::move(norms), w), {w});
}

void Program::draft_input(DraftInput in) {
  const int64_t d = sizes.d_model;
  check(!joined, "a program has one draft head");
  check(in.table->k == d && sizes.embed_dim == d, "the draft head's embedding has rows of another width than d_model");
  check(in.w ? in.w->rows == d && in.w->k == 2 * d : draft_from < ops_.size(),
        "the draft head's projection has a wrong shape");
  check(in.embed_norm && in.hidden_norm, "a draft head has norms of what it reads");
  check_norm(in.embed_norm, d, "the norm of the draft head's embedding");
  check_norm(in.hidden_norm, d, "the norm of the draft head's hidden states");
  table_rows = std::min(table_rows, in.table->rows);
  ldjoined = pi_round_up(2 * d, PI_LANES);
  joined = (float*)memory_.allocate(sizes.max_tokens * ldjoined * 4);
  workspace->reserve(sizes.max_tokens, 2 * d);
  draft_from = std::min(draft_from, ops_.size());
  const auto w = in.w;
  add(std::make_shared<DraftIn>(std::move(in)),
      w ? std::vector<std::shared_ptr<Matrix>>{w} : std::vector<std::shared_ptr<Matrix>>{});
}
