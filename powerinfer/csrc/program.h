// A model as a list of fused operators over shared buffers. Python wires the list once; a step runs it, or a part of
// it, with all threads inside one job, meeting at barriers. Operators hold no state of a step.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "panels.h"
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

// Float vector. Empty: absent. The biases of matrices are zero-padded to whole panels.
using Vector = std::vector<float>;

// RMS norm, or LayerNorm where `layer`, whose bias may be absent. An absent norm leaves rows as they are.
struct Norm {
  Vector w, b;
  float eps = 0;
  bool layer = false;
  explicit operator bool() const { return !w.empty(); }
};

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
  // An FFN from bundles alone takes a step in pieces: the row of x with which they begin, and whether the step is small.
  int64_t first = 0;
  bool counted = true;
};

class Program;

struct Thread {
  int id;
  Program* program;
  PiActs acts;  // forms that this thread makes for itself alone
  Vector f, d, sd, attention;
  std::vector<uint16_t> b;
  std::vector<int8_t> q;
  std::vector<int16_t> s;
  std::vector<uint8_t> scratch;
  struct {
    Vector f, d, sd;
    std::vector<int8_t> q;
    std::vector<int16_t> s;
  } head;  // two planes of few rows
};

struct Op {
  virtual ~Op() = default;
  virtual void run(Thread& t, const Step& step) const = 0;
  virtual const char* name() const = 0;
};

struct Sizes {
  int64_t max_tokens, d_model, d_ff, heads, kv_heads, head_dim;
  int64_t embed_dim = d_model;  // width of the embedding and of the head's input
};

struct EmbedInput {
  std::shared_ptr<Table> table, positions;  // positions may be null: nothing is added
  int64_t offset;                           // row of position 0
  std::shared_ptr<Matrix> project;          // from embed_dim to d_model, null where they are the same
  float scale = 1;                          // of the token's row
};

struct AttentionInput {
  int layer;
  Norm norm, q_norm, k_norm;  // those of q and k are over each head, or as wide as all heads together
  Vector q_bias, k_bias, v_bias;
  std::shared_ptr<Matrix> q, k, v;
  int rope;     // a table of `add_rope`, -1: q and k are not rotated
  float scale;  // of the scores
};

struct FfnInput {
  Norm norm, out_norm;
  std::shared_ptr<Matrix> gate, up, down;  // gate may be null: the activation is on up
  Vector gate_bias, up_bias, down_bias;
  int act;  // PiAct
  float threshold;
  bool replace = false;  // x = what the neurons give, not x +=
};

// What is seen at the FFNs of a program while a text is run densely: which neurons fire, those whose product is not zero.
// By `gate`: those whose activation (of the gate; plain: of up), before it meets up, exceeds `most` in magnitude. It
// keeps what it saw until it is cleared, as it must be before each FFN.
struct Watch {
  Watch(int64_t d_ff, int64_t max_tokens, int threads);
  void clear();
  bool gate = false;
  bool silence = false;  // leave out of the sum what does not fire
  bool measure = false;  // count magnitudes of activations
  float most = 0;
  const int64_t d_ff, max_tokens, words;  // words of 16 bits for a token
  std::vector<int64_t> counts;            // [words * 16] tokens that a neuron fired for
  std::vector<uint16_t> bits;             // [max_tokens][words]
  std::vector<int64_t> magnitudes;        // [threads][BINS]
  std::vector<char> damaged;              // [threads] an input of the activation was NaN or infinite
  // Bins of equal width within an octave: those from 2^LOW on, the outermost take what lies beyond.
  static constexpr int PER_OCTAVE = 16, LOW = -30, BINS = 48 * PER_OCTAVE;
};

struct Bundles;
struct Predictor;
class NeuronScratch;
class SparseFfn;

class Program {
 public:
  Program(std::shared_ptr<Pool> pool, std::shared_ptr<Cache> cache, const PiKernels* kernels, Sizes sizes);
  ~Program();
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  // A table of rotary frequencies, radians per position; factor multiplies sine and cosine. Returns its number.
  int add_rope(Vector frequencies, float factor);

  // Operators, in the order they run. x is the residual stream [tokens, d_model].
  // Attention and the FFN touch nothing of each other's but x: attention_input, attention, ffn, project is a layer whose
  // FFN reads what its attention reads.
  void embed(EmbedInput in);                // x = project . scale * row of the token + row of the position
  void attention_input(AttentionInput in);  // q, cache = rope(norm(x) . q, k, v)
  void attention(int layer, int window);    // attended = softmax(q k) v
  void project(std::shared_ptr<Matrix> w, Vector bias, Norm norm);  // x += norm(w . attended)
  void ffn(FfnInput in);  // x += out_norm(down . (act(gate . n) * (up . n))), n = norm(x); plain: act(up . n)
  // Gives operator `op`, an FFN, its neurons as bundles, and a predictor or null; it runs as before until its `ways` say else.
  void sparsify(size_t op, std::shared_ptr<Bundles> bundles, std::unique_ptr<Predictor> predictor, float most,
                int64_t recall_every);
  SparseFfn& sparse(size_t op) const;  // invalid_argument where there is none
  // An FFN that has its neurons as bundles alone, all of them or some: every gate is computed, or, of neurons that
  // `names` tells, only those. in: norm, down_bias and replace; steps of any size. predictor: of an FFN that has all of
  // them and adds to x, or null; it names the neurons of small steps.
  void neurons_ffn(FfnInput in, std::shared_ptr<Bundles> bundles, std::unique_ptr<Predictor> predictor, float most);
  // Other neurons for such an FFN; it begins to count anew.
  void replace_bundles(size_t op, std::shared_ptr<Bundles> bundles);
  void normalise(Norm norm);  // x = norm(x)
  void head(Norm norm, std::shared_ptr<Matrix> project,
            std::shared_ptr<Matrix> w);  // logits = w . project . norm(x); project may be null

  size_t size() const { return ops_.size(); }
  // Runs operators [first, last) on a step that has been checked.
  void run(const Step& step, size_t first, size_t last);
  // Runs one operator on rows of x that belong to no sequence; it must not be one of attention.
  void run_alone(const Step& step, size_t op);
  // Seconds spent in each operator since the last call, while `timed`.
  std::vector<std::pair<std::string, double>> take_times();
  bool timed = false;
  std::shared_ptr<Watch> watch;  // null: nobody looks
  // For FFNs of bundles alone: [tokens][members], not zero where a token names a neuron; null: all are wanted.
  const uint8_t* names = nullptr;
  // What a step must agree with: rows of the embedding, positions that have a row, panels of the head. 0: there is none.
  int64_t table_rows = 0, positions = 0, head_panels = 0;

  const Sizes sizes;
  const std::shared_ptr<Cache> cache;
  const PiKernels* const kernels;
  const std::shared_ptr<Pool> pool;

  // The buffers that operators share. Strides are padded to whole lanes. Rows of `gate` and `up` hold any row of the
  // model: between layers they are scratch.
  const int64_t head_pad, ldx, ldqkv, lda, ldh;
  static constexpr int64_t HEAD_ROWS = 8;  // rows of logits computed together from two planes
  std::unique_ptr<NeuronScratch> neurons;  // of the sparse FFNs, null without any
  float *x, *qkv, *attended, *gate, *up, *planes = nullptr;
  struct Shared {
    PiActs acts;
    float* f;
    uint16_t* b;
    int8_t* q;
    float *d, *sd;
    int16_t* s;
  } input, middle;

  // Brings rows of src into the forms asked for, normalised first; index names the rows, null: all
  // in order. Few elements: every thread makes its own copy. Many: the threads share the work and meet.
  const PiActs* prepare(Thread& t, const float* src, int64_t ld, int64_t k, int64_t tokens, const int32_t* index,
                        const Norm& norm, int forms);
  // x += out_norm(down . h), where this thread has made columns [c0, c1) of h, in `gate`; whole blocks of 32 but at the
  // end.
  void multiply_down(Thread& t, const FfnInput& in, int64_t tokens, int64_t c0, int64_t c1);
  // x += norm(w . acts), or without a norm x += w . acts, by all threads; `buffer` holds rows of `ldh` meanwhile.
  void add_product(Thread& t, const Matrix& w, const Vector& bias, const PiActs* acts, int64_t tokens, const Norm& norm,
                   float* buffer);
  // x, from row `first` on, += norm(row), by all threads; rows are `ldh` apart and overwritten.
  void add_normalised(Thread& t, const Norm& norm, float* rows, int64_t first, int64_t tokens);
  // Rotary frequencies, and the angles' cosine and sine [tokens, pairs] of the step.
  struct Rope {
    Vector frequencies;
    float factor, *cos, *sin;
  };
  const Rope* rope(int table) const { return table < 0 ? nullptr : &ropes_[(size_t)table]; }
  void linear(Thread& t, const Matrix& w, const Vector& bias, const PiActs* acts, float* out, int64_t ldo,
              int64_t tokens, bool add, int64_t p0, int64_t p1);

 private:
  friend struct RunOps;
  void rotations(Thread& t, const Step& step);
  void check_head_norm(const Norm& norm, int64_t heads, const std::string& what) const;
  void make_neuron_scratch(const Predictor* predictor, int64_t of);
  Shared make_shared(int64_t k);

  std::vector<Rope> ropes_;
  std::vector<int32_t> rotated_;  // the positions that their angles are of
  Arena memory_;
  std::vector<std::unique_ptr<Op>> ops_;
  std::vector<Thread> threads_;
  std::vector<double> times_;
};
