// What the stand-alone tests share: results, random data, exact memory, activations. No framework and no Python, so
// that they also run under an emulator and under the sanitisers. A test prints one line a failure and 'N passed, N
// failed' at the end.
//
// Tolerances are bounds on rounding: a chain of n operations is off by at most n u / (1 - n u) of the sum of the
// absolute terms, u = 2^-24. Buffers have exactly the size that the contract in table.h asks for, and outputs start as
// NaN, so that what is not written is seen.
#pragma once
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "levels.h"
#include "panels.h"
#include "pool.h"
#include "program.h"

namespace {

constexpr double U = 1.0 / (1 << 24);
const float NOT = std::numeric_limits<float>::quiet_NaN();

[[maybe_unused]] double gamma_of(double n) { return n * U / (1 - n * U); }

// ---- Results -----------------------------------------------------------------------------------------------------

int passed = 0, failed = 0;
char begun[200] = "";  // the last check that was begun

void result(bool good, const std::string& what) {
  if (good) {
    passed++;
    return;
  }
  failed++;
  if (failed <= 50) printf("FAILED %s\n", what.c_str());
}

// Many values that make one check: the worst one is told. NaN is a failure.
struct Check {
  std::string name, first;
  int64_t wrong = 0, all = 0;
  explicit Check(std::string n) : name(std::move(n)) { snprintf(begun, sizeof begun, "%s", name.c_str()); }
  void near(double got, double wanted, double bound, int64_t at) {
    all++;
    if (fabs(got - wanted) <= bound) return;
    note("at %lld: got %.9g, wanted %.9g within %.3g", at, got, wanted, bound);
  }
  void same(float got, float wanted, int64_t at) {
    all++;
    uint32_t a, b;
    memcpy(&a, &got, 4);
    memcpy(&b, &wanted, 4);
    if (a != b) note("at %lld: got %.9g, wanted exactly %.9g, %g", at, got, wanted, 0.0);
  }
  void yes(bool good, int64_t at) {
    all++;
    if (!good) note("at %lld: %g %g %g", at, 0, 0, 0);
  }
  ~Check() {
    result(wrong == 0 && all > 0,
           name + ": " + std::to_string(wrong) + " of " + std::to_string(all) + " wrong, the first " + first);
  }

 private:
  void note(const char* format, int64_t at, double a, double b, double c) {
    if (wrong++ > 0) return;
    char line[200];
    snprintf(line, sizeof line, format, (long long)at, a, b, c);
    first = line;
  }
};

// ---- Exact memory ------------------------------------------------------------------------------------------------

// Memory whose end nothing may cross: AddressSanitizer watches over it, or else a page behind it that cannot be
// touched. The page also stops what that sanitiser does not see: loads of tiles, and every machine that lacks it.
template <class T>
struct Fence {
  using value_type = T;
  Fence() = default;
  template <class U>
  Fence(const Fence<U>&) {}
  bool operator==(const Fence&) const { return true; }
  bool operator!=(const Fence&) const { return false; }
#if defined(__SANITIZE_ADDRESS__)
  T* allocate(size_t n) {
    void* p;
    if (posix_memalign(&p, 64, n * sizeof(T)) != 0) throw std::bad_alloc();
    return (T*)p;
  }
  void deallocate(T* p, size_t) { free(p); }
#else
  static size_t page() { return (size_t)sysconf(_SC_PAGESIZE); }
  static size_t whole_pages(size_t n) { return (n * sizeof(T) + page() - 1) / page() * page(); }
  T* allocate(size_t n) {
    const size_t size = whole_pages(n);
    void* p = mmap(nullptr, size + page(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    mprotect((uint8_t*)p + size, page(), PROT_NONE);
    return (T*)((uint8_t*)p + size - n * sizeof(T));
  }
  void deallocate(T* p, size_t n) {
    const size_t size = whole_pages(n);
    munmap((uint8_t*)p + n * sizeof(T) - size, size + page());
  }
#endif
};

// Aligned to 64 bytes where its size is a multiple of them.
template <class T>
using Exact = std::vector<T, Fence<T>>;

[[maybe_unused]] void beyond(int) {
  char line[300];
  const int n = snprintf(line, sizeof line,
                         "FAILED touched memory that is not its own; the last check that had begun: %s\n", begun);
  if (write(STDOUT_FILENO, line, (size_t)n) != n) _exit(2);
  _exit(1);
}

// To be called first: tells which check it was that crossed a fence.
void watch_fences() {
#if !defined(__SANITIZE_ADDRESS__)
  signal(SIGSEGV, beyond);
  signal(SIGBUS, beyond);
#endif
}

// ---- Random data ---------------------------------------------------------------------------------------------------

struct Random {
  uint64_t state;
  explicit Random(uint64_t seed) : state(seed * 0x9e3779b97f4a7c15u + 1) {}
  uint32_t next() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    uint64_t x = state;
    x ^= x >> 29;
    x *= 0xbf58476d1ce4e5b9u;
    return (uint32_t)(x >> 32);
  }
  double uniform() { return ((double)next() + 0.5) / 4294967296.0; }
  float normal() { return (float)(sqrt(-2 * log(uniform())) * cos(6.283185307179586 * uniform())); }
  std::vector<float> normals(int64_t n, float scale = 1) {
    std::vector<float> v((size_t)n);
    for (float& x : v) x = scale * normal();
    return v;
  }
};

bool is_quantised(int type) { return type >= PI_Q8_0; }

// Random stored rows: every code occurs, scales have both signs where the type has signs.
[[maybe_unused]] std::vector<uint8_t> random_rows(Random& r, int type, int64_t rows, int64_t k) {
  std::vector<uint8_t> out((size_t)(rows * stored_row_bytes(type, k)));
  const auto put_half = [&](uint8_t* p) {
    const uint16_t h = (uint16_t)((r.next() & 1) << 15 | (6 + r.next() % 6) << 10 | (r.next() & 1023));
    memcpy(p, &h, 2);
  };
  if (!is_quantised(type)) {
    for (int64_t i = 0; i < rows * k; i++) {
      const float x = r.normal();
      if (type == PI_F32) memcpy(&out[(size_t)i * 4], &x, 4);
      else if (type == PI_F16) put_half(&out[(size_t)i * 2]);
      else memcpy(&out[(size_t)i * 2], (const uint8_t*)&x + 2, 2);  // the upper half of a little-endian float
    }
    return out;
  }
  for (uint8_t& b : out) b = (uint8_t)r.next();
  const int64_t size = stored_row_bytes(type, pi_block(type));
  for (size_t at = 0; at < out.size(); at += (size_t)size) {
    if (type == PI_MXFP4) {
      out[at] = (uint8_t)(118 + r.next() % 8);
      continue;
    }
    if (type == PI_IQ1_M) {  // four bits in each of four words
      uint8_t half[2];
      put_half(half);
      for (size_t i = 0; i < 4; i++)
        out[at + 49 + 2 * i] = (uint8_t)((out[at + 49 + 2 * i] & 15) | (half[i / 2] >> i % 2 * 4 & 15) << 4);
      continue;
    }
    if (type == PI_NVFP4) {
      for (size_t i = 0; i < 4; i++) out[at + i] = (uint8_t)(8 + r.next() % 80);
      continue;
    }
    for (const int field : {pi_facts(type).d, pi_facts(type).m})
      if (field >= 0) put_half(&out[at + (size_t)field]);
  }
  return out;
}

// ---- Activations ----------------------------------------------------------------------------------------------------

struct Acts {
  int64_t tokens, k, ldb;
  Exact<float> f, d, sd;
  Exact<uint16_t> b;
  Exact<int8_t> q;
  Exact<int16_t> s;
  PiActs rows;

  Acts(const PiKernels* kernels, int forms, int64_t tokens, int64_t k, const std::vector<float>& x)
      : tokens(tokens), k(k), ldb(pi_round_up(k, 32)), f(x.begin(), x.end()) {
    if (forms & PI_FORM_BF16) b.assign((size_t)(tokens * ldb), 0x7fc0);
    if (forms & PI_FORM_Q8) {
      q.assign((size_t)(tokens * k), -128);
      d.assign((size_t)(tokens * (k / 32)), NOT);
      sd = d;
      s.assign((size_t)(tokens * (k / 16)), -30000);
    }
    // Null where the form was not asked for.
    const auto data = [](auto& v) { return v.empty() ? nullptr : v.data(); };
    rows = {f.data(), data(b), data(q), data(d), data(sd), data(s), nullptr, k, k, ldb};
    for (int64_t t = 0; t < tokens; t++) {
      const PiActs to = from(t);
      kernels->forms(to.f, k, forms, &to);
    }
  }
  Acts(const Acts&) = delete;
  Acts& operator=(const Acts&) = delete;
  // The forms from token t on.
  PiActs from(int64_t t) const { return pi_acts_from(&rows, t, 0); }
  // What the weights are multiplied with.
  double value(int type, int64_t t, int64_t i) const {
    const int form = pi_form(type);
    if (form == PI_FORM_F32) return f[(size_t)(t * k + i)];
    if (form == PI_FORM_Q8) return (double)d[(size_t)(t * (k / 32) + i / 32)] * q[(size_t)(t * k + i)];
    const uint32_t u = (uint32_t)b[(size_t)(t * ldb + i)] << 16;
    float v;
    memcpy(&v, &u, 4);
    return v;
  }
};

}  // namespace
