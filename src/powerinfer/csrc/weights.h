// Weights: packed matrices, tables of rows, norms.
#pragma once
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "panels.h"
#include "table.h"

// Rows of a matrix that rest in a file of `Reads`, as a model file stores them.
struct OnDisk {
  int file;
  int64_t offset, bytes, stored;  // stored: number of rows there
  std::vector<int32_t> map;       // row r of the matrix is row map[r] there, zeros where it is -1; empty: row r itself
  const uint8_t* rows = nullptr;  // where they are while a step needs them
  uint8_t* panels = nullptr;      // where panels that were made of them stay, over rows, too; null: nowhere
  std::vector<float> factors =
      {};  // of equal parts of the rows, of types that have factors in panels; empty: they are 1
};

// What makes panels of a matrix that rests in another form, up to `at_once` panels of a multiple of it at a time.
class PanelSource {
 public:
  explicit PanelSource(int64_t panels) : at_once(panels) {}
  virtual ~PanelSource() = default;
  // Panels [p, p + n).
  virtual void make(const PiKernels* kernels, int64_t p, int64_t n, uint8_t* out) const = 0;
  // What it reads for panels from p on, asked for by a product of as many panels; false: that is not known.
  virtual bool ahead(int64_t p, PiAhead (&ahead)[8]) const = 0;
  const int64_t at_once;
};

// A weight matrix [rows, k] in panels; without `data` a source makes them, or it rests on disk.
struct Matrix {
  int type;
  int64_t rows, k, panels;
  const uint8_t* data;
  std::shared_ptr<Arena> arena;
  std::shared_ptr<OnDisk> disk = nullptr;
  std::shared_ptr<const PanelSource> source = nullptr;
  bool is_in_memory() const { return data || source; }
  // Panels that one thread had better multiply together.
  int64_t unit(int64_t least = 1) const { return source ? std::max(source->at_once, least) : least; }
  int64_t bytes() const { return panels * pi_panel_bytes(type, k); }
  int form() const { return pi_form(type); }
};

// Of n matrices of that number of rows, which lie one below the other in whole panels, each one.
std::vector<Matrix> cut(const Matrix& all, int64_t n, int64_t rows);

// Rows to look up, as the model file stores them; the owner of the memory is kept alive by the binding.
struct Table {
  int type;
  int64_t rows, k;
  const uint8_t* data;
};

// Float vector. Empty: absent. The biases of matrices are zero-padded to whole panels.
using Vector = std::vector<float>;

Vector padded(Vector v);

// RMS norm; LayerNorm where `layer`, whose bias may be absent; only a product with the weights where `plain`. An absent
// norm leaves rows as they are. order: number i of the result is of number order[i] of the row, and w[i] and b[i] are its
// weight and bias; empty: numbers stay where they are.
struct Norm {
  Vector w, b;
  float eps = 0;
  bool layer = false, plain = false;
  std::vector<int32_t> order = {};
  explicit operator bool() const { return !w.empty(); }
  // out = norm(x), a row of k = w.size(); they may be the same row.
  void apply(const PiKernels* kernels, const float* x, float* out) const;
};

// Checks: std::invalid_argument with message `what` unless `good`; of the length of a norm; of the length of a bias.
void check(bool good, const std::string& what);
void check_norm(const Norm& norm, int64_t n, const std::string& what);
void check_bias(const Vector& bias, int64_t n, const std::string& of);
