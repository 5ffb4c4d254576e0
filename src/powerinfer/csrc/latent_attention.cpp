#include "latent_attention.h"

#include <string.h>

#include <algorithm>

namespace {

const Vector NONE;

// Rows of a head that a thread converts, and multiplies with the head's matrix, at a time.
constexpr int64_t BLOCK = 64;

// For rows of `tokens` that are `ld` apart, and of each the numbers of every head, `apart` from one to the next.
struct HeadRows {
  float* data;
  int64_t ld, apart;
  float* of(int64_t head) const { return data + head * apart; }
};

// to = each head's matrix . from, in a phase. then(head, p0, p1) is called when panels [p0, p1) of a head are done.
template <class F>
void multiply(const Thread& t, const std::vector<Matrix>& matrices, const HeadRows& from, const HeadRows& to,
              int64_t tokens, F then) {
  Workspace& w = *t.program->workspace;
  const ActMemory& memory = t.program->latent_rows->own[(size_t)t.id];
  const int64_t panels = matrices[0].panels, k = matrices[0].k;
  const int form = matrices[0].form();
  PiActs acts = memory.rows(k);
  const auto work = [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t h = begin / panels, p0 = begin % panels, p1 = std::min(panels, p0 + end - begin);
      for (int64_t first = 0; first < tokens; first += BLOCK) {
        const int64_t n = std::min(BLOCK, tokens - first);
        const float* rows = from.of(h) + first * from.ld;
        for (int64_t i = 0; i < n && form != PI_FORM_F32; i++) {
          const PiActs row = pi_acts_from(&acts, i, 0);
          w.kernels->forms(rows + i * from.ld, k, form, &row);
        }
        PiActs block = acts;
        block.f = rows;
        block.ldf = from.ld;
        w.linear(t.id, matrices[(size_t)h], NONE, &block, to.of(h) + first * to.ld, to.ld, n, false, p0, p1);
      }
      then(h, p0, p1);
      begin += p1 - p0;
    }
  };
  w.pool->phase((int64_t)matrices.size() * panels, 1, work);
}

class LatentIn : public Op {
 public:
  LatentIn(LatentInput in, int64_t heads, const Cache::Layer& kv)
      : in_(std::move(in)), heads_(heads), kv_(kv), k_b_(cut(*in_.k_b, heads, in_.k_b->panels / heads * PI_LANES)) {}
  const char* name() const override { return "attention_input"; }

  void run(Thread& t, const Step& step) override {
    Program& p = *t.program;
    Workspace& w = *p.workspace;
    LatentRows& rows = *p.latent_rows;
    const int64_t tokens = step.tokens;
    float* const heads = rows.floats(rows.heads);
    const Matrix& first = in_.q_latent ? *in_.q_latent : *in_.q;
    const PiActs* acts = w.prepare(t.id, p.residual(0, tokens), in_.norm, in_.kv->form() | first.form());
    float* const latents = rows.floats(rows.q_latents);
    const Destination keys{rows.floats(rows.keys), rows.ldk, false, NONE}, queries{heads, rows.ldh, false, NONE};
    w.finish_products(
        t.id, {{in_.kv.get(), keys}, {&first, in_.q_latent ? Destination{latents, rows.ldq, false, NONE} : queries}},
        acts, tokens);
    if (in_.q_latent) {
      acts = w.prepare(t.id, {latents, rows.ldq, in_.q->k, tokens}, in_.q_norm, in_.q->form());
      w.finish_product(t.id, *in_.q, acts, tokens, queries);
    }
    w.pool->phase(tokens, 1, [&](int64_t begin, int64_t end) { store_keys(p, step, begin, end); });
    // Queries for keys of the cache: their first part times the matrix that would make keys from latents.
    const int64_t plain = in_.k_b->k, width = in_.q->rows / heads_;
    multiply(t, k_b_, {heads, rows.ldh, width}, {p.qkv, p.ldqkv, kv_.head_pad}, tokens,
             [&](int64_t h, int64_t p0, int64_t p1) {
               for (int64_t i = 0; i < tokens; i++) {
                 float* q = p.qkv + i * p.ldqkv + h * kv_.head_pad;
                 const float scale = query_scale(in_.settings, step.position[i]);
                 w.kernels->scale(q + p0 * PI_LANES, scale, std::min(p1 * PI_LANES, kv_.latents) - p0 * PI_LANES);
                 if (p1 < k_b_[0].panels) continue;  // the last panel may reach into what follows
                 memcpy(q + kv_.latents, heads + i * rows.ldh + h * width + plain, (size_t)(width - plain) * 4);
                 rotate(p, q, i);
                 w.kernels->scale(q + kv_.latents, scale, width - plain);
               }
             });
  }

 private:
  // The rotated part of a query or key, of a token of the step; zeros behind it.
  void rotate(const Program& p, float* row, int64_t token) const {
    std::fill(row + kv_.head_dim, row + kv_.head_pad, 0.0f);
    const Program::Rope* rope = p.rope(in_.rope);
    if (!rope) return;
    const int64_t half = (int64_t)rope->frequencies.size();
    p.workspace->kernels->rope(row + kv_.latents, rope->cos + token * half, rope->sin + token * half, half);
  }

  // Of tokens [begin, end).
  void store_keys(const Program& p, const Step& step, int64_t begin, int64_t end) const {
    const LatentRows& rows = *p.latent_rows;
    const PiKernels* kernels = p.workspace->kernels;
    for (const Run& run : step.runs) {
      for (int64_t i = std::max(begin, run.first); i < std::min(end, run.first + run.count); i++) {
        const int64_t position = run.position + i - run.first;
        float* key = rows.floats(rows.keys) + i * rows.ldk;
        in_.kv_norm.apply(kernels, key, key);
        rotate(p, key, i);
        kernels->store_latent(p.cache->type, p.cache->data(kv_) + run.pages[position / PI_PAGE] * p.cache->page_bytes,
                              (int)(position % PI_PAGE), key, (int)kv_.head_pad);
      }
    }
  }

  const LatentInput in_;
  const int64_t heads_;
  const Cache::Layer& kv_;
  const std::vector<Matrix> k_b_;
};

class LatentOut : public Op {
 public:
  LatentOut(LatentOutput out, int64_t heads, const Cache::Layer& kv)
      : out_(std::move(out)),
        heads_(heads),
        kv_(kv),
        v_b_(cut(*out_.v_b, heads, out_.v_b->panels / heads * PI_LANES)) {}
  const char* name() const override { return "project"; }

  void run(Thread& t, const Step& step) override {
    Program& p = *t.program;
    Workspace& w = *p.workspace;
    const LatentRows& rows = *p.latent_rows;
    float* const values = rows.floats(rows.heads);
    multiply(t, v_b_, {p.attended, p.lda, kv_.latents}, {values, rows.ldh, out_.o->k / heads_}, step.tokens,
             [](int64_t, int64_t, int64_t) {});
    const PiActs* acts = w.prepare(t.id, {values, rows.ldh, out_.o->k, step.tokens}, {}, out_.o->form());
    w.finish_product(t.id, *out_.o, acts, step.tokens, p.added_to(0, out_.norm, NONE, p.gate));
    p.add_normalised(out_.norm, p.gate, 0, step.tokens);
  }

 private:
  const LatentOutput out_;
  const int64_t heads_;
  const Cache::Layer& kv_;
  const std::vector<Matrix> v_b_;
};

}  // namespace

LatentRows::LatentRows(const Sizes& s, int threads)
    : sizes(s),
      ldq(pi_round_up(s.q_latent, PI_LANES)),
      ldh(pi_round_up(s.heads, PI_LANES)),
      ldk(pi_round_up(s.kv, PI_LANES)),
      q_latents(std::max<int64_t>(1, s.tokens * ldq * 4)),
      heads(s.tokens * ldh * 4),
      keys(s.tokens * ldk * 4) {
  for (int t = 0; t < threads; t++) own.emplace_back(BLOCK * pi_round_up(s.widest, 32));
}

void Program::latent_input(LatentInput in) {
  check_layer(in.layer);
  const Cache::Layer& own = cache->layers[(size_t)in.layer];
  const int64_t heads = sizes.heads[(size_t)in.layer], rotated = own.head_dim - own.latents;
  check(own.latents > 0 && own.kv_heads == 1, "the layer's cache has no latents");
  check(in.kv->rows == own.head_dim && in.kv->k == sizes.d_model, "kv has another shape than the layer's cache needs");
  check(in.k_b->panels == heads * (pi_round_up(own.latents, PI_LANES) / PI_LANES), "k_b has another number of rows");
  check(in.q->rows == heads * (in.k_b->k + rotated), "q has another number of rows than its heads need");
  check(in.q->k == (in.q_latent ? in.q_latent->rows : sizes.d_model), "q has another number of columns than its input");
  check(!in.q_latent || in.q_latent->k == sizes.d_model, "the latents of q have another width than d_model");
  check_norm(in.norm, sizes.d_model, "the attention norm");
  check_norm(in.q_norm, in.q_latent ? in.q->k : 0, "the norm of the latents of q");
  check_norm(in.kv_norm, own.latents, "the norm of the latents");
  check_rope(in.rope, rotated);
  check_settings(in.settings);
  workspace->reserve(sizes.max_tokens, in.q->k);
  reserve_latents(in.q_latent ? in.q_latent->rows : 0, in.q->rows, own.head_dim, in.k_b->k);
  std::vector<std::shared_ptr<Matrix>> matrices = {in.q_latent, in.q, in.kv};
  add(std::make_shared<LatentIn>(std::move(in), heads, own), std::move(matrices));
}

void Program::latent_project(LatentOutput out) {
  check_layer(out.layer);
  const Cache::Layer& own = cache->layers[(size_t)out.layer];
  const int64_t heads = sizes.heads[(size_t)out.layer];
  check(own.latents > 0, "the layer's cache has no latents");
  check(out.o->rows == sizes.d_model && out.o->k % (heads * PI_LANES) == 0 && out.v_b->k == own.latents &&
            out.v_b->panels * PI_LANES == out.o->k,
        "v_b or the output projection has a wrong shape");
  check_norm(out.norm, sizes.d_model, "the norm of the output projection");
  workspace->reserve(sizes.max_tokens, out.o->k);
  reserve_latents(0, out.o->k, own.head_dim, own.latents);
  std::shared_ptr<Matrix> o = out.o;
  add(std::make_shared<LatentOut>(std::move(out), heads, own), {o});
}

// Buffers for the widest layer, as of `LatentRows::Sizes`.
void Program::reserve_latents(int64_t q_latent, int64_t heads, int64_t kv, int64_t widest) {
  workspace->reserve(BLOCK, widest);
  const auto had = latent_rows ? latent_rows->sizes : LatentRows::Sizes{0, 0, 0, 0, 0};
  if (q_latent <= had.q_latent && heads <= had.heads && kv <= had.kv && widest <= had.widest) return;
  latent_rows = std::make_shared<LatentRows>(
      LatentRows::Sizes{sizes.max_tokens, std::max(q_latent, had.q_latent), std::max(heads, had.heads),
                        std::max(kv, had.kv), std::max(widest, had.widest)},
      workspace->pool->threads());
}
