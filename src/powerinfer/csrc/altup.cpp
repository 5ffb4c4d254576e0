#include "altup.h"

#include <math.h>
#include <string.h>

#include <algorithm>

namespace {

constexpr int64_t MOST = 16, COLUMNS = 64;  // streams; of their numbers, what is mixed at once
constexpr float LEAST = 1e-5f;              // mean square of a row that is brought to the magnitude of another

const Vector NO_BIAS;

float dot(const float* a, const float* b, int64_t n) {
  enum { SUMS = 32 };
  float sums[SUMS] = {};
  int64_t i = 0;
  for (; i + SUMS <= n; i += SUMS)
    for (int j = 0; j < SUMS; j++) sums[j] += a[i + j] * b[i + j];
  for (int j = 0; i < n; i++, j++) sums[j] += a[i] * b[i];
  double sum = 0;
  for (const float part : sums) sum += part;
  return (float)sum;
}

float mean_square(const float* row, int64_t n) { return dot(row, row, n) / (float)n; }

void coefficients(const StreamCoefficients& spec, const Program& p, const float* row, float* scratch, float* out) {
  const int64_t n = p.streams.n, k = p.sizes.d_model, count = (int64_t)spec.w.size() / n;
  float routed[MOST];
  spec.norm.apply(p.workspace->kernels, row, scratch);
  for (int64_t i = 0; i < n; i++) routed[i] = tanhf(dot(scratch, spec.router.data() + i * k, k) / (float)k);
  for (int64_t i = 0; i < count; i++) {
    out[i] = 0;
    for (int64_t j = 0; j < n; j++) out[i] += spec.w[(size_t)(i * n + j)] * routed[j];
  }
}

// work(token, a row of scratch) for every token, in a phase.
template <class Work>
void each_token(Thread& t, const Step& step, const Work& work) {
  Workspace& w = *t.program->workspace;
  w.pool->phase(step.tokens, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) work(i, w.row(t.id));
  });
}

class ExpandStreams : public Op {
 public:
  explicit ExpandStreams(std::shared_ptr<Matrix> w) : w_(std::move(w)) {}
  const char* name() const override { return "expand_streams"; }
  void run(Thread& t, const Step& step) override {
    Program& p = *t.program;
    const Streams& s = p.streams;
    const int64_t k = p.sizes.d_model;
    const PiActs* acts = p.workspace->prepare(t.id, p.residual(0, step.tokens), {}, w_->form());
    p.workspace->finish_product(t.id, *w_, acts, step.tokens, {s.rows + p.ldx, s.ld, false, NO_BIAS});
    each_token(t, step, [&](int64_t i, float*) {
      const float *x = p.x + i * p.ldx, magnitude = sqrtf(mean_square(x, k));
      memcpy(s.row(i, 0, p.ldx), x, (size_t)k * 4);
      for (int64_t j = 1; j < s.n; j++) {
        float* to = s.row(i, j, p.ldx);
        p.workspace->kernels->scale(to, magnitude / sqrtf(std::max(mean_square(to, k), LEAST)), k);
      }
    });
  }

 private:
  const std::shared_ptr<Matrix> w_;
};

class PredictStreams : public Op {
 public:
  explicit PredictStreams(StreamCoefficients spec) : spec_(std::move(spec)) {}
  const char* name() const override { return "predict_streams"; }
  void run(Thread& t, const Step& step) override {
    Program& p = *t.program;
    const Streams& s = p.streams;
    each_token(t, step, [&](int64_t i, float* scratch) {
      float by[MOST * MOST], before[MOST][COLUMNS];
      coefficients(spec_, p, s.row(i, s.active, p.ldx), scratch, by);
      for (int64_t at = 0; at < p.ldx; at += COLUMNS) {
        const int64_t some = std::min(COLUMNS, p.ldx - at);
        for (int64_t j = 0; j < s.n; j++) memcpy(before[j], s.row(i, j, p.ldx) + at, (size_t)some * 4);
        for (int64_t j = 0; j < s.n; j++) {
          float* to = s.row(i, j, p.ldx) + at;
          for (int64_t from = 0; from < s.n; from++)
            for (int64_t c = 0; c < some; c++) to[c] += by[j * s.n + from] * before[from][c];
        }
      }
      memcpy(p.x + i * p.ldx, s.row(i, s.active, p.ldx), (size_t)p.ldx * 4);
    });
  }

 private:
  const StreamCoefficients spec_;
};

class AddLaurel : public Op {
 public:
  explicit AddLaurel(LaurelSpec spec) : spec_(std::move(spec)) {}
  const char* name() const override { return "add_laurel"; }
  void run(Thread& t, const Step& step) override {
    Program& p = *t.program;
    Workspace& w = *p.workspace;
    const PiActs* acts = w.prepare(t.id, p.residual(0, step.tokens), spec_.norm, spec_.in->form());
    w.finish_product(t.id, *spec_.in, acts, step.tokens, {p.gate, p.ldh, false, NO_BIAS});
    acts = w.prepare(t.id, {p.gate, p.ldh, spec_.out->k, step.tokens}, {}, spec_.out->form());
    w.finish_product(t.id, *spec_.out, acts, step.tokens, {p.up, p.ldh, false, NO_BIAS});
    each_token(t, step, [&](int64_t i, float* read) {
      float *x = p.x + i * p.ldx, *row = p.up + i * p.ldh;
      spec_.norm.apply(w.kernels, x, read);
      spec_.out_norm.apply(w.kernels, row, row);
      for (int64_t c = 0; c < p.sizes.d_model; c++) x[c] += read[c] + row[c];
    });
  }

 private:
  const LaurelSpec spec_;
};

class CorrectStreams : public Op {
 public:
  CorrectStreams(StreamCoefficients spec, Vector scale) : spec_(std::move(spec)), scale_(std::move(scale)) {}
  const char* name() const override { return "correct_streams"; }
  void run(Thread& t, const Step& step) override {
    Program& p = *t.program;
    const Streams& s = p.streams;
    each_token(t, step, [&](int64_t i, float* made) {
      float by[MOST], *x = p.x + i * p.ldx, *active = s.row(i, s.active, p.ldx);
      coefficients(spec_, p, x, made, by);
      for (int64_t c = 0; c < p.sizes.d_model; c++) made[c] = x[c] - active[c];
      for (int64_t j = 0; j < s.n; j++) {
        float* to = s.row(i, j, p.ldx);
        for (int64_t c = 0; c < p.sizes.d_model; c++) to[c] += made[c] * (by[j] + 1.0f);
      }
      for (int64_t c = 0; c < p.sizes.d_model; c++) x[c] = scale_.empty() ? active[c] : active[c] * scale_[(size_t)c];
    });
  }

 private:
  const StreamCoefficients spec_;
  const Vector scale_;
};

class MergeStreams : public Op {
 public:
  explicit MergeStreams(std::vector<Matrix> w) : w_(std::move(w)) {}
  const char* name() const override { return "merge_streams"; }
  void run(Thread& t, const Step& step) override {
    Program& p = *t.program;
    const Streams& s = p.streams;
    const int64_t k = p.sizes.d_model;
    for (int64_t j = 1; j < s.n; j++) {
      const Matrix& w = w_[(size_t)j - 1];
      const PiActs* acts = p.workspace->prepare(t.id, {s.rows + j * p.ldx, s.ld, k, step.tokens}, {}, w.form());
      p.workspace->finish_product(t.id, w, acts, step.tokens, {p.up, p.ldh, false, NO_BIAS});
      each_token(t, step, [&](int64_t i, float*) {
        const float *first = s.row(i, 0, p.ldx), *row = p.up + i * p.ldh;
        const float by = sqrtf(mean_square(first, k)) / sqrtf(std::max(mean_square(row, k), LEAST));
        float* x = p.x + i * p.ldx;
        if (j == 1) memcpy(x, first, (size_t)k * 4);
        for (int64_t c = 0; c < k; c++) x[c] += row[c] * by;
        if (j == s.n - 1) p.workspace->kernels->scale(x, 1.0f / (float)s.n, k);
      });
    }
  }

 private:
  const std::vector<Matrix> w_;
};

void check_coefficients(const Program& p, const StreamCoefficients& spec, int64_t count) {
  check(p.streams.n > 0, "there are no residual streams but x");
  check((bool)spec.norm, "coefficients of streams need a norm");
  check_norm(spec.norm, p.sizes.d_model, "the norm of streams' coefficients");
  check((int64_t)spec.router.size() == p.streams.n * p.sizes.d_model && (int64_t)spec.w.size() == count * p.streams.n,
        "coefficients of streams have a wrong shape");
}

}  // namespace

void Program::expand_streams(int64_t n, int64_t active, std::shared_ptr<Matrix> w) {
  check(!streams.n, "there are residual streams already");
  check(n >= 2 && n <= MOST && active >= 0 && active < n, "a number of residual streams that is not supported");
  check(w->k == sizes.d_model && w->panels * PI_LANES == (n - 1) * ldx,
        "the matrices of residual streams have a wrong shape");
  streams.n = n;
  streams.active = active;
  streams.ld = n * ldx;
  streams.rows = (float*)memory_.allocate(sizes.max_tokens * streams.ld * 4);
  add(std::make_shared<ExpandStreams>(w), {w});
}

void Program::predict_streams(StreamCoefficients spec) {
  check_coefficients(*this, spec, streams.n * streams.n);
  add(std::make_shared<PredictStreams>(std::move(spec)));
}

void Program::add_laurel(LaurelSpec spec) {
  check(spec.norm && spec.out_norm, "LAuReL needs norms");
  check_norm(spec.norm, sizes.d_model, "the norm of what LAuReL reads");
  check_norm(spec.out_norm, sizes.d_model, "the norm of what LAuReL gives");
  const auto in = spec.in, out = spec.out;
  check(in->k == sizes.d_model && out->rows == sizes.d_model && out->k == in->rows && out->k <= ldh,
        "a matrix of LAuReL has a wrong shape");
  workspace->reserve(sizes.max_tokens, out->k);
  add(std::make_shared<AddLaurel>(std::move(spec)), {in, out});
}

void Program::correct_streams(StreamCoefficients spec, Vector scale) {
  check_coefficients(*this, spec, streams.n);
  check(scale.empty() || (int64_t)scale.size() == sizes.d_model, "the scale of a stream has another length than x");
  add(std::make_shared<CorrectStreams>(std::move(spec), std::move(scale)));
}

void Program::merge_streams(std::shared_ptr<Matrix> w) {
  check(streams.n && w->k == sizes.d_model && w->panels * PI_LANES == (streams.n - 1) * ldx,
        "the matrices of residual streams have a wrong shape");
  check(w->data, "the matrices of residual streams are not in memory");
  add(std::make_shared<MergeStreams>(cut(*w, streams.n - 1, sizes.d_model)), {w});
}
