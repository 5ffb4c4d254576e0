// Memory that threads need for products: activation rows in the forms that weights take, and scratch. Everything that
// runs on one pool shares one workspace, since a pool runs one job at a time.
#pragma once
#include <memory>
#include <utility>
#include <vector>

#include "pool.h"
#include "weights.h"

// Memory for activation rows in every form.
class ActMemory {
 public:
  explicit ActMemory(int64_t elements = 0);  // of all rows together, each padded to 32
  PiActs rows(int64_t k) const;              // laid out for rows of k
  float* floats() const { return (float*)memory_->data(); }
  int64_t elements() const { return elements_; }
  void forget() { give_back(memory_->data(), elements_ * 8); }

 private:
  int64_t elements_;
  std::unique_ptr<Mapping> memory_;
};

// Float rows of k, `ld` apart; index: the row of each token, null: in order.
struct Rows {
  const float* data;
  int64_t ld, k, tokens;
  const int32_t* index = nullptr;
};

// Where the sum of an FFN's neurons goes: out[t * ld ..] += sum + bias, or = where not `add`.
struct Destination {
  float* out;
  int64_t ld;
  bool add;
  const Vector& bias;  // padded to whole panels; may be empty
};

// The panels of a product that one thread computes, in whole units, and their rows.
struct Columns {
  int64_t p0, p1, c0, c1;
  Columns(const Matrix& w, int64_t first, int64_t last) : p0(first), p1(last), c0(first * PI_LANES) {
    c1 = p1 * PI_LANES < w.rows ? p1 * PI_LANES : w.rows > c0 ? w.rows : c0;
  }
  Columns(const Matrix& w, const Pool& pool, int thread, int64_t unit = 1) : Columns(w, 0, 0) {
    int64_t first, last;
    share(w.panels, unit, pool.threads(), thread, &first, &last);
    *this = Columns(w, first, last);
  }
  int64_t n() const { return c1 - c0; }
  int64_t lanes() const { return (p1 - p0) * PI_LANES; }
};

void copy_rows(const float* from, int64_t from_ld, float* to, int64_t to_ld, int64_t n, int64_t rows);

class NeuronLists;

class Workspace {
 public:
  Workspace(std::shared_ptr<Pool> pool, const PiKernels* kernels);
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  // Makes room, waiting until no job runs: for products of `rows` rows of k, of matrices on disk; for lists of `neurons` neurons of a model
  // of width d_model, selected by a predictor of that rank or by none (0).
  void reserve(int64_t tokens, int64_t k);
  // For products of a matrix on disk, see `settle`, or with a source.
  void reserve_packed(const Matrix& w, int64_t waiting = 0);
  void reserve_lists(int64_t neurons, int64_t d_model, int64_t rank);

  void forget() { shared_.forget(); }  // between jobs: rows of many tokens

  // The following are called by the threads of a job.
  // Normalises rows and converts them to the requested forms. Few elements: every thread makes its own copy. Many: the
  // threads divide the work, in a phase.
  const PiActs* prepare(int thread, const Rows& rows, const Norm& norm, int forms);
  // Whether what this thread prepared last serves further phases; false: it was late, and need not have.
  bool is_prepared(int thread) const { return own_[(size_t)thread].prepared; }
  // out[t * ldo ..] = bias + w . acts, or += where `add`: panels [p0, p1). Rows that came from disk are packed into
  // panels, a few at a time, as they are multiplied; so are those that a source makes.
  void linear(int thread, const Matrix& w, const Vector& bias, const PiActs* acts, float* out, int64_t ldo,
              int64_t tokens, bool add, int64_t p0, int64_t p1);
  // Panels that stay (`OnDisk::panels`) could lie over rows that another thread has yet to read: such ones wait. After a
  // barrier each thread puts its own into their places.
  void settle(int thread);
  // w . acts, as a phase.
  void finish_product(int thread, const Matrix& w, const PiActs* acts, int64_t tokens, const Destination& to);
  // Several products with the same rows, in one phase.
  struct Product {
    const Matrix* matrix;
    Destination to;
  };
  void finish_products(int thread, const std::vector<Product>& products, const PiActs* acts, int64_t tokens);
  // bias + w . acts in a phase of pieces of whole units, to rows `ld` apart. Of each piece: after(columns, rows, ld), where
  // it has been computed; use(columns), when it is there, by one thread; then(): as of `Pool::phase_then`.
  template <class After, class Use, class Then>
  void use_product(int thread, const Matrix& w, const Vector& bias, const PiActs* acts, int64_t tokens, float* out,
                   int64_t ld, int64_t unit, const After& after, const Use& use, const Then& then) {
    pool->phase_then(
        w.panels, unit, tokens * PI_LANES,
        [&](int64_t p0, int64_t p1, float* aside) {
          const Columns part(w, p0, p1);
          float* const rows = aside ? aside : out + part.c0;
          const int64_t ldr = aside ? part.lanes() : ld;
          linear(thread, w, bias, acts, rows - part.c0, ldr, tokens, false, p0, p1);
          after(part, rows, ldr);
        },
        [&](int64_t p0, int64_t p1, const float* aside) {
          const Columns part(w, p0, p1);
          if (aside) copy_rows(aside, part.lanes(), out + part.c0, ld, part.lanes(), tokens);
          use(part);
        },
        then);
  }
  // This thread's panels of w . acts.
  void product(int thread, const Matrix& w, const PiActs* acts, int64_t tokens, const Destination& to);
  // Whether products with a number of like matrices, `tokens` in all, are dealt out: from 2^29 multiplications on, which
  // take milliseconds, and where every thread has many panels. Small parts would wait for weights and activations that
  // are in no cache, and with few tokens all wait for the memory. Rows on disk are packed by who reads them.
  bool deals(int64_t tokens, const Matrix& w, int64_t matrices = 1) const {
    return tokens >= 16 * matrices && w.is_in_memory() && tokens * w.rows * w.k >= (int64_t)1 << 29 &&
           w.panels * matrices >= 4 * DEALT * pool->threads();
  }
  static constexpr int64_t DEALT = 2;  // panels of a part, the last one excepted, at least
  float* row(int thread) {
    return own_[(size_t)thread].memory.floats();
  }  // room for one row of any k; `prepare` uses it
  NeuronLists& lists() { return *lists_; }

  const std::shared_ptr<Pool> pool;
  const PiKernels* const kernels;

 private:
  struct Own {  // of a thread
    ActMemory memory;
    PiActs acts;
    bool prepared = false;
    std::vector<uint8_t> scratch;
    std::unique_ptr<Mapping> packed;  // PACKED bytes of panels, or two
    int64_t packed_bytes = 0;
    std::vector<float> factors;                          // of rows on disk
    std::vector<uint8_t> waiting;                        // panels
    std::vector<std::pair<uint8_t*, int64_t>> settling;  // where they go, and their bytes
  };
  static constexpr int64_t PACKED = 256 << 10;  // which stay in a core's cache until they are multiplied
  void* scratch_of(int thread);
  void keep_panels(Own& own, const OnDisk& disk, const Matrix& w, int64_t p0, int64_t p, int64_t n);
  void linear_from_source(int thread, PiLinear l, const Matrix& w, const PiActs* acts, int64_t tokens, int64_t p0,
                          int64_t p1);
  void linear_from_disk(int thread, const PiLinear& l, const Matrix& w, const PiActs* acts, int64_t tokens, int64_t p0,
                        int64_t p1);
  ActMemory shared_;
  std::vector<Own> own_;
  std::unique_ptr<NeuronLists> lists_;
};
