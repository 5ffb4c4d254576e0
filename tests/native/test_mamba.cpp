// The kernels of Mamba2 at every level that runs here, against the recurrence in double precision, token by token (checks.h
// says how).
#include "checks.h"

namespace {

using Floats = Exact<float>;

Floats exact(const std::vector<float>& v) { return Floats(v.begin(), v.end()); }

// A token is a row of x, B, C, then the step and the decay of this head, then scores.
struct Rows {
  int64_t dim, state, tokens, ld;
  Floats data;
  Rows(Random& r, int64_t p, int64_t n, int64_t count) : dim(p), state(n), tokens(count), ld(p + 2 * n + 2 + PI_CHUNK) {
    data = exact(r.normals(tokens * ld, 1 / sqrtf(sqrtf((float)n))));
    for (int64_t t = 0; t < tokens; t++) {
      float* gates = data.data() + t * ld + p + 2 * n;
      gates[0] = (float)r.uniform();
      gates[1] = (float)(0.5 + 0.5 * r.uniform());
    }
  }
  float* row(int64_t t) { return data.data() + t * ld; }
};

constexpr float D = 0.75f;

// Runs the tokens [t, t + n) of one chunk, or of several.
void advance(const PiKernels* kernels, Rows& rows, int64_t t, int64_t n, const float* from, float* to) {
  for (int64_t end = t + n; t < end;) {
    const int64_t before = t % PI_CHUNK, count = std::min(PI_CHUNK - before, end - t);
    PiMamba a;
    a.x = rows.row(t);
    a.c = a.x + rows.dim + rows.state;
    a.gates = a.x + rows.dim + 2 * rows.state;
    a.scores = a.gates + 2;
    for (int64_t j = 0; j < before + count; j++) a.b[j] = rows.row(t - before + j) + rows.dim;
    a.ld = rows.ld;
    a.to_decay = 1;
    a.from = from;
    a.to = to;
    a.head_dim = rows.dim;
    a.state_dim = rows.state;
    a.before = before;
    a.tokens = count;
    a.d = D;
    for (int64_t i = 0; i < count; i++)
      kernels->mamba.scores(a.c + i * rows.ld, a.b, before + i + 1, rows.state,
                            rows.row(t + i) + rows.dim + 2 * rows.state + 2);
    kernels->mamba.advance(&a);
    from = to;
    t += count;
  }
}

size_t place(int64_t n, int64_t k, int64_t c) { return (size_t)((c / 16 * n + k) * 16 + c % 16); }

// The recurrence in double precision. sizes: what the absolute terms of each answer add up to. Returns the state.
std::vector<double> expected(Rows& rows, std::vector<double>* out, std::vector<double>* sizes) {
  std::vector<double> state((size_t)(rows.dim * rows.state), 0.0), size = state;
  for (int64_t t = 0; t < rows.tokens; t++) {
    const float *x = rows.row(t), *b = x + rows.dim, *c = b + rows.state, *gates = c + rows.state;
    for (int64_t p = 0; p < rows.dim; p++) {
      double y = (double)D * x[p], all = fabs(y);
      for (int64_t k = 0; k < rows.state; k++) {
        const size_t at = place(rows.state, k, p);
        const double term = (double)gates[0] * x[p] * b[k];
        state[at] = (double)gates[1] * state[at] + term;
        size[at] = (double)gates[1] * size[at] + fabs(term);
        y += state[at] * c[k];
        all += size[at] * fabs((double)c[k]);
      }
      out->push_back(y);
      sizes->push_back(all);
    }
  }
  return state;
}

// Whatever is left of a head's memory that counts for a sequence of that length.
void same_memory(Check& check, const Floats& a, const Floats& b, int64_t dim, int64_t state, int64_t tokens) {
  const int64_t held = tokens % PI_CHUNK, rows = dim * state, weights = rows + dim * PI_CHUNK;
  for (int64_t i = 0; i < rows + held * dim; i++) check.same(a[(size_t)i], b[(size_t)i], i);
  for (int64_t i = weights; held && i <= weights + PI_CHUNK; i++) check.same(a[(size_t)i], b[(size_t)i], i);
}

void test_advance(const PiKernels* kernels) {
  Random r(21);
  for (const int64_t dim : {16, 48, 80, 128})
    for (const int64_t n : {16, 48, 128})
      for (const int64_t tokens : {1, 2, 5, 16, 31, 50}) {
        Rows rows(r, dim, n, tokens);
        std::vector<double> out, sizes;
        const std::vector<double> wanted = expected(rows, &out, &sizes);
        const size_t memory = (size_t)pi_mamba_head(dim, n);
        const std::string name = std::string(kernels->name) + " mamba " + std::to_string(dim) + " x " +
                                 std::to_string(n) + ", " + std::to_string(tokens) + " tokens";
        Rows all = rows;
        Floats state(memory, NOT);
        advance(kernels, all, 0, tokens, nullptr, state.data());
        {
          // Decays multiply once a token; a sum has the state's rows, then the chunk's tokens.
          const double bound = gamma_of((double)(2 * tokens + n + 2 * PI_CHUNK + 8));
          Check near(name);
          for (size_t i = 0; i < out.size(); i++)
            near.near(all.row((int64_t)i / dim)[i % (size_t)dim], out[i], bound * sizes[i], (int64_t)i);
          if (tokens % PI_CHUNK == 0)
            for (size_t i = 0; i < wanted.size(); i++)
              near.near(state[i], wanted[i], bound * (double)tokens * 8, (int64_t)i);
        }
        for (const int64_t piece : {1, 3, 7, 16}) {
          Check same(name + ", in pieces of " + std::to_string(piece));
          Rows pieces = rows;
          Floats here(memory, NOT), there(memory, NOT);
          for (int64_t t = 0; t < tokens; t += piece) {  // in place, and from one memory to another
            const bool moves = t / piece % 3 == 2;
            float* from = here.data();
            if (moves) std::swap(here, there);
            advance(kernels, pieces, t, std::min(piece, tokens - t), t ? from : nullptr, here.data());
          }
          same_memory(same, here, state, dim, n, tokens);
          for (int64_t t = 0; t < tokens; t++)
            for (int64_t c = 0; c < dim; c++) same.same(pieces.row(t)[c], all.row(t)[c], t * dim + c);
        }
      }
}

void test_scores(const PiKernels* kernels) {
  Random r(22);
  for (const int64_t n : {16, 48, 256}) {
    const Floats c = exact(r.normals(n)), b = exact(r.normals(PI_CHUNK * n));
    const float* rows[PI_CHUNK];
    for (int64_t j = 0; j < PI_CHUNK; j++) rows[j] = b.data() + j * n;
    for (const int64_t count : {1, 5, 16}) {
      Floats out(PI_CHUNK, NOT);
      kernels->mamba.scores(c.data(), rows, count, n, out.data());
      Check near(std::string(kernels->name) + " scores of " + std::to_string(n) + ", " + std::to_string(count));
      for (int64_t j = 0; j < PI_CHUNK; j++) {
        double sum = 0, size = 0;
        for (int64_t k = 0; k < n && j < count; k++) {
          sum += (double)c[(size_t)k] * rows[j][k];
          size += fabs((double)c[(size_t)k] * rows[j][k]);
        }
        near.near(out[(size_t)j], sum, gamma_of((double)n + 4) * size, j);
      }
    }
  }
}

}  // namespace

int main() {
  watch_fences();
  for (const PiKernels* kernels : supported_levels()) {
    const int before = passed, wrong = failed;
    test_advance(kernels);
    test_scores(kernels);
    printf("%-12s %d passed, %d failed\n", kernels->name, passed - before, failed - wrong);
    fflush(stdout);
  }
  printf("%d passed, %d failed\n", passed, failed);
  return failed ? 1 : 0;
}
