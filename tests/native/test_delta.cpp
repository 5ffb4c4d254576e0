// The kernels of Gated DeltaNet at every level that runs here, against plain loops in double precision (checks.h says
// how).
#include "checks.h"

namespace {

using Floats = Exact<float>;

Floats exact(const std::vector<float>& v) { return Floats(v.begin(), v.end()); }

// A token is a row of query, key, value, then decay and beta of this head, and, of_rows, a decay of each row of the state.
struct Rows {
  int64_t key, value, tokens, ld;
  bool of_rows;
  Floats data;
  Rows(Random& r, int64_t k, int64_t v, int64_t n, bool rows)
      : key(k), value(v), tokens(n), ld(2 * k + v + 2 + (rows ? k : 0)), of_rows(rows) {
    data = exact(r.normals(n * ld, 1 / sqrtf((float)k)));
    for (int64_t t = 0; t < n; t++) {
      for (int64_t i = 2 * k + v; i < ld; i++) data[(size_t)(t * ld + i)] = (float)(0.5 + 0.5 * r.uniform());
      data[(size_t)(t * ld + 2 * k + v + 1)] = (float)r.uniform();
    }
  }
  double decay(int64_t t, int64_t row) const {
    return data[(size_t)(t * ld + 2 * key + value + (of_rows ? 2 + row : 0))];
  }
  PiDelta call(int64_t first, int64_t n, const float* from, float* to) {
    float* row = data.data() + first * ld;
    const float* decays = of_rows ? row + 2 * key + value + 2 : nullptr;
    return {row, row + key, row + 2 * key + value, decays, row + 2 * key, ld, ld, 1, from, to, key, n};
  }
};

// Element (row of the key, column of the value) of a state in blocks of 16 columns.
size_t place(int64_t n, int64_t k, int64_t c) { return (size_t)((c / 16 * n + k) * 16 + c % 16); }

// The rule in double precision, into a copy of the rows. Returns the state.
std::vector<double> expected(const Rows& rows, const Floats& from, std::vector<double>* out) {
  std::vector<double> state(from.begin(), from.end());
  for (int64_t t = 0; t < rows.tokens; t++) {
    const float* row = rows.data.data() + t * rows.ld;
    const double beta = row[2 * rows.key + rows.value + 1];
    for (int64_t c = 0; c < rows.value; c++) {
      double known = 0, answer = 0;
      for (int64_t k = 0; k < rows.key; k++)
        known += rows.decay(t, k) * state[place(rows.key, k, c)] * row[rows.key + k];
      const double delta = beta * (row[2 * rows.key + c] - known);
      for (int64_t k = 0; k < rows.key; k++) {
        double& s = state[place(rows.key, k, c)];
        s = rows.decay(t, k) * s + row[rows.key + k] * delta;
        answer += s * row[k];
      }
      out->push_back(answer);
    }
  }
  return state;
}

void test_rule(const PiKernels* kernels, bool of_rows) {
  Random r(11);
  for (const int64_t key : {16, 48, 128})
    for (const int64_t value : {16, 48, 128})
      for (const int64_t tokens : {1, 2, 3, 40}) {
        Rows rows(r, key, value, tokens, of_rows);
        const Floats before = exact(r.normals(key * value));
        Floats state(before.size(), NOT);
        std::vector<double> out;
        const std::vector<double> wanted = expected(rows, before, &out);
        Rows pieces = rows, fresh = rows;
        Floats other = before;
        {
          const PiDelta all = rows.call(0, tokens, before.data(), state.data());
          kernels->delta.rule(&all, 0, value);
        }
        const std::string name = std::string(kernels->name) + (of_rows ? " rule of rows " : " rule ") +
                                 std::to_string(key) + " x " + std::to_string(value) + ", " + std::to_string(tokens) +
                                 " tokens";
        // A chain of additions as long as a key for each token, and values that shrink from token to token.
        const double bound = gamma_of((double)(4 * (key + 8) * tokens)) * 8;
        {
          Check near(name);
          for (size_t i = 0; i < wanted.size(); i++) near.near(state[i], wanted[i], bound, (int64_t)i);
          for (size_t i = 0; i < out.size(); i++)
            near.near(rows.data[i / (size_t)value * (size_t)rows.ld + (size_t)(2 * key) + i % (size_t)value], out[i],
                      bound, (int64_t)i);
        }
        Check same(name + ", in pieces, in place");
        for (int64_t t = 0; t < tokens; t++)
          for (int64_t c = 0; c < value; c += 16) {
            const PiDelta one = pieces.call(t, 1, other.data(), other.data());
            kernels->delta.rule(&one, c, c + 16);
          }
        for (size_t i = 0; i < state.size(); i++) same.same(other[i], state[i], (int64_t)i);
        for (size_t i = 0; i < rows.data.size(); i++) same.same(pieces.data[i], rows.data[i], (int64_t)i);
        Check zeros(name + ", from nothing");
        Floats nothing(before.size(), 0.0f), to(before.size(), NOT);
        Rows again = fresh;
        const PiDelta a = fresh.call(0, tokens, nullptr, to.data()),
                      b = again.call(0, tokens, nothing.data(), nothing.data());
        kernels->delta.rule(&a, 0, value);
        kernels->delta.rule(&b, 0, value);
        for (size_t i = 0; i < to.size(); i++) zeros.same(to[i], nothing[i], (int64_t)i);
      }
}

void test_convolve(const PiKernels* kernels) {
  Random r(12);
  for (int64_t taps = 2; taps <= PI_MOST_TAPS; taps++)
    for (const int64_t tokens : {1, 2, 5, 20}) {
      const int64_t n = 48, before = taps - 1;
      const Floats w = exact(r.normals(taps * n)), from = exact(r.normals(before * n)),
                   x = exact(r.normals(tokens * n));
      const Floats bias = exact(r.normals(n));
      const bool biased = tokens % 2;
      Floats out = x, to((size_t)(before * n), NOT), pieces = x, state = from;
      kernels->convolve(out.data(), n, tokens, w.data(), biased ? bias.data() : nullptr, n, taps, from.data(),
                        to.data(), n, n);
      const auto at = [&](int64_t t, int64_t c) {
        return t < 0 ? from[(size_t)((before + t) * n + c)] : x[(size_t)(t * n + c)];
      };
      const std::string name =
          std::string(kernels->name) + " convolution of " + std::to_string(taps) + ", " + std::to_string(tokens);
      Check near(name);
      for (int64_t t = 0; t < tokens; t++)
        for (int64_t c = 0; c < n; c++) {
          double sum = biased ? bias[(size_t)c] : 0, size = fabs(sum);
          for (int64_t j = 0; j < taps; j++) {
            const double term = (double)w[(size_t)(j * n + c)] * at(t - taps + 1 + j, c);
            sum += term;
            size += fabs(term);
          }
          near.near(out[(size_t)(t * n + c)], sum, gamma_of((double)taps + 2) * size, t * n + c);
        }
      for (int64_t j = 0; j < before; j++)
        for (int64_t c = 0; c < n; c++) near.same(to[(size_t)(j * n + c)], at(tokens - before + j, c), j);
      Check same(name + ", in pieces, in place");
      for (int64_t t = 0; t < tokens; t++)
        for (int64_t c = 0; c < n; c += 16)
          kernels->convolve(pieces.data() + t * n + c, n, 1, w.data() + c, biased ? bias.data() + c : nullptr, n, taps,
                            state.data() + c, state.data() + c, n, 16);
      for (size_t i = 0; i < out.size(); i++) same.same(pieces[i], out[i], (int64_t)i);
      for (size_t i = 0; i < to.size(); i++) same.same(state[i], to[i], (int64_t)i);
    }
}

}  // namespace

int main() {
  watch_fences();
  for (const PiKernels* kernels : supported_levels()) {
    const int before = passed, wrong = failed;
    test_rule(kernels, false);
    test_rule(kernels, true);
    test_convolve(kernels);
    printf("%-12s %d passed, %d failed\n", kernels->name, passed - before, failed - wrong);
    fflush(stdout);
  }
  printf("%d passed, %d failed\n", passed, failed);
  return failed ? 1 : 0;
}
