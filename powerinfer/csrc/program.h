// A model as a list of fused operators over shared buffers. Python wires the list once; a step runs it, or a part of
// it, with all threads inside one job, meeting at barriers. Operators hold no state of a step.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "pack.h"
#include "pool.h"
#include "table.h"

// A weight matrix [rows, k] in panels.
struct Matrix {
  int type;
  int64_t rows, k, panels;
  const uint8_t* data;
  std::shared_ptr<Arena> arena;
  int64_t bytes() const { return panels * pi_panel_bytes(type, k); }
};

// Rows to look up, as the model file stores them; the owner of the memory is kept alive by the binding.
struct Table {
  int type;
  int64_t rows, k;
  const uint8_t* data;
};

// Float vector, zero-padded to whole vectors of lanes. Empty: absent.
using Vector = std::vector<float>;

// Keys and values in pages of 32 tokens: [page][layer][kv head]. All layers of a page lie together, so that the memory
// touched grows with the tokens held, in whole huge pages.
class Cache {
 public:
  Cache(int type, int layers, int kv_heads, int head_dim, int64_t pages);
  const int type, layers, kv_heads, head_dim, head_pad;
  const int64_t pages, head_bytes, layer_bytes, page_bytes;
  uint8_t* layer(int i) const { return memory_.data() + i * layer_bytes; }  // of page 0
  int64_t bytes() const { return pages * page_bytes; }

 private:
  Mapping memory_;
};

struct Run {  // consecutive tokens of one sequence
  int64_t first, count, position;
  const int32_t* pages;
};

struct Step {
  int64_t tokens = 0, logit_rows = 0, logit_stride = 0;
  const int32_t *token = nullptr, *position = nullptr, *logit_row = nullptr;
  float* logits = nullptr;
  std::vector<Run> runs;
};

class Program;

struct Thread {
  int id;
  Program* program;
  PiActs acts;                // forms that this thread makes for itself alone
  Vector f, d, sd, attention;
  std::vector<uint16_t> b;
  std::vector<int8_t> q;
  std::vector<int16_t> s;
  std::vector<uint8_t> scratch;
  struct { Vector f, d, sd; std::vector<int8_t> q; std::vector<int16_t> s; } head;  // two planes of few rows
};

struct Op {
  virtual ~Op() = default;
  virtual void run(Thread& t, const Step& step) const = 0;
  virtual const char* name() const = 0;
};

struct Sizes {
  int64_t max_tokens, d_model, d_ff, heads, kv_heads, head_dim;
};

struct AttentionInput {
  int layer;
  float eps;
  Vector norm, q_bias, k_bias, v_bias, q_norm, k_norm;
  std::shared_ptr<Matrix> q, k, v;
};

class Program {
 public:
  Program(std::shared_ptr<Pool> pool, std::shared_ptr<Cache> cache, const PiKernels* kernels, Sizes sizes, Vector frequencies, float rope_factor);
  ~Program();
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  // Operators, in the order they run. x is the residual stream [tokens, d_model].
  void embed(std::shared_ptr<Table> table);                                    // x = rows of the table
  void attention_input(AttentionInput in);                                     // q, cache = rope(norm(x) . q, k, v)
  void attention(int layer, int window);                                       // attended = softmax(q k) v
  void project(std::shared_ptr<Matrix> w, Vector bias);                        // x += w . attended
  void ffn(Vector norm, float eps, std::shared_ptr<Matrix> gate, std::shared_ptr<Matrix> up, std::shared_ptr<Matrix> down, Vector gate_bias, Vector up_bias,
           Vector down_bias);                                                    // x += down . (silu(gate . n) * (up . n)), n = norm(x)
  void head(Vector norm, float eps, std::shared_ptr<Matrix> w);                // logits = w . norm(x)

  size_t size() const { return ops_.size(); }
  // Runs operators [first, last) on a step that has been checked.
  void run(const Step& step, size_t first, size_t last);
  // Seconds spent in each kind of operator since the last call, while `timed`.
  std::vector<std::pair<std::string, double>> take_times();
  bool timed = false;
  // What a step's vocabulary must agree with: rows of the embedding, panels of the head. 0: there is none.
  int64_t table_rows = 0, head_panels = 0;

  const Sizes sizes;
  const std::shared_ptr<Cache> cache;
  const PiKernels* const kernels;
  const std::shared_ptr<Pool> pool;

  // The buffers that operators share. Strides are padded to whole lanes.
  const int64_t head_pad, ldx, ldqkv, lda, ldh;
  static constexpr int64_t HEAD_ROWS = 8;  // rows of logits computed together from two planes
  float *x, *qkv, *attended, *gate, *up, *cos, *sin, *planes = nullptr;
  struct Shared {
    PiActs acts;
    float* f;
    uint16_t* b;
    int8_t* q;
    float *d, *sd;
    int16_t* s;
  } input, middle;

  // Brings rows of src into the forms asked for, normalised first where norm is given; index names the rows, null: all
  // in order. Few elements: every thread makes its own copy. Many: the threads share the work and meet.
  const PiActs* prepare(Thread& t, const float* src, int64_t ld, int64_t k, int64_t tokens, const int32_t* index, const Vector* norm, float eps, int forms);
  int64_t rope_half() const;  // rotary pairs of a head
  void linear(Thread& t, const Matrix& w, const Vector& bias, const PiActs* acts, float* out, int64_t ldo, int64_t tokens, bool add, int64_t p0, int64_t p1);

 private:
  friend struct RunOps;
  void rotations(Thread& t, const Step& step);
  Shared make_shared(int64_t k);

  Vector frequencies_;
  float rope_factor_;
  Arena memory_;
  std::vector<std::unique_ptr<Op>> ops_;
  std::vector<Thread> threads_;
  std::vector<double> times_;
};
