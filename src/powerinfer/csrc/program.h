// A model as a list of fused operators over shared buffers. Python wires the list once; a step runs it, or a part of
// it, with all threads inside one job, synchronised by phases and barriers. Operators hold no state of a step.
#pragma once
#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "watch.h"
#include "workspace.h"

// Keys and values in pages of 32 tokens: [page][layer][kv head], layers of any heads. A layer with latents has keys
// alone, whose first numbers are the values. All layers of a page lie together,
// so that the memory touched grows with the tokens held, in whole huge pages.
class Cache {
 public:
  struct Layer {
    int64_t kv_heads, head_dim, head_pad;  // kv_heads: 0 where nothing is kept; head_pad: head_dim in whole lanes
    int64_t head_bytes, at;                // of a head in a page; where the layer begins in a page
    int64_t latents;                       // of a key, that are its value; 0: values are stored beside keys
    int64_t value_dim() const { return latents ? latents : head_dim; }
  };
  // heads: (kv_heads, head_dim) of each layer; latents: theirs, empty: none have any.
  Cache(int type, const std::vector<std::pair<int64_t, int64_t>>& heads, int64_t pages,
        const std::vector<int64_t>& latents = {});
  const int type;
  const std::vector<Layer> layers;
  const int64_t pages, page_bytes;
  uint8_t* data(const Layer& layer) const { return memory_.data() + layer.at; }  // of page 0
  int64_t bytes() const { return pages * page_bytes; }

 private:
  Mapping memory_;
};

struct Run {  // consecutive tokens of one sequence
  int64_t first, count, position;
  const int32_t* pages;
  int64_t read_state = 0, state = 0;  // slots of the state before the run, not read at position 0, and after it
  // Tokens right before the run that the state in `read_state` lacks, and whose inputs are in `state`: those of the last
  // step that were accepted. Then the run reads `undo_state`, where the state behind them is left. They are rows of `qkv`
  // from `replay_row` on.
  int64_t replayed = 0, replay_row = 0, undo_state = 0;
};

struct Step {
  int64_t tokens = 0, replayed = 0, logit_rows = 0, logit_stride = 0;  // replayed: of all runs
  const int32_t *token = nullptr, *position = nullptr, *logit_row = nullptr;
  float* logits = nullptr;
  const int32_t* stop = nullptr;  // not 0: nobody needs the result any more; null: someone does
  // Where some neurons are left out, each of its tokens, at most PI_NEURON_TOKENS, has the bits of a step of it alone.
  bool alone = false;
  int64_t like() const { return alone ? 1 : tokens; }  // the number of tokens that layers choose their ways by
  std::vector<Run> runs;
  std::vector<size_t> sampled;               // operators that measure the recall of their predictors
  std::atomic<uint64_t>* decided = nullptr;  // of each operator, what it has found in a phase and goes by behind it
  bool samples(size_t op) const { return std::find(sampled.begin(), sampled.end(), op) != sampled.end(); }
};

// The factor of the queries at a position: the scale of the scores, and what grows with the position.
float query_scale(const PiAttentionSettings& settings, int64_t position);

class Program;

struct Thread {
  int id;
  Program* program;
  Vector attention;  // scratch of that kernel
};

class Op {
 public:
  virtual ~Op() = default;
  virtual void run(Thread& t, const Step& step) = 0;
  // The same on the calling thread, while no job runs; false: it is work for all threads.
  virtual bool run_alone(Program&, const Step&) { return false; }
  virtual const char* name() const = 0;
  // How many of `matrices`, from the first on, a step of the program multiplies with.
  virtual size_t wants(const Program&, const Step&) const { return matrices.size(); }
  // Before the step, when all of the one before is computed: whether this one measures the recall of a predictor.
  virtual bool samples(const Program&, const Step&) const { return false; }
  // The step ended before it, as `stop` says.
  virtual void skip() {}
  size_t number = 0;  // in its program
  std::vector<std::shared_ptr<Matrix>> matrices;
};

struct Sizes {
  int64_t max_tokens, d_model, d_ff;  // d_ff: of the largest FFN
  std::vector<int64_t> heads;         // query heads of each layer of the cache
  int64_t embed_dim = d_model;        // width of the embedding and of the head's input
  int64_t attended = 0;               // numbers of a row of `attended`, at least
};

class States;
struct DeltaNetSpec;
struct MambaSpec;
struct ShortConvSpec;

struct EmbedInput {
  std::shared_ptr<Table> table, positions;  // positions may be null: nothing is added
  int64_t offset;                           // row of position 0
  std::shared_ptr<Matrix> project;          // from embed_dim to d_model, null where they are the same
  float scale = 1;                          // of the token's row
};

// The first operator of a draft head, whose operators follow the model's.
struct DraftInput {
  std::shared_ptr<Table> table;  // the embedding of the token that follows
  Norm embed_norm, hidden_norm;
  std::shared_ptr<Matrix> w;  // from [embedding, hidden state] to d_model
  float scale = 1;            // of the token's row
};

struct AttentionInput {
  int layer;
  PiAttentionSettings settings;
  Norm norm, q_norm, k_norm;  // those of q and k are over each head, or as wide as all heads
  Vector q_bias, k_bias, v_bias;
  std::shared_ptr<Matrix> q, k, v;  // v may be k; without k and v the layer keeps none, and attends to another one's
  int rope;                         // a table of `add_rope`, -1: q and k are not rotated
  Norm v_norm = {};                 // over each head
  bool rotates_first = false;       // before the norms of heads
  bool separate = false;            // norms as wide as all heads are over each head, with weights of its own
};

// Inputs that every layer has beside the residual stream, of the token and of its embedding.
struct LayerInputsSpec {
  std::shared_ptr<Table> table;  // rows of the inputs of all layers together
  std::shared_ptr<Matrix> w;     // from the embedding to as many
  Norm norm;                     // of what `w` gives for each layer
  float scale, row_scale, factor;
};

// Latent attention (latent_attention.h).
struct LatentInput;
struct LatentOutput;
struct LatentRows;

// AltUp and LAuReL (altup.h).
struct StreamCoefficients;
struct LaurelSpec;

// Residual streams beside x, which is one of them while a layer computes with it.
struct Streams {
  int64_t n = 0, active = 0, ld = 0;  // n: 0 where x is the only one; active: which one layers compute with
  float* rows = nullptr;              // of a token, one stream after another; `ld` apart
  float* row(int64_t token, int64_t stream, int64_t ldx) const { return rows + token * ld + stream * ldx; }
};

struct FfnSpec;
class Ffn;
class DenseNeurons;
class Experts;
class EarlyRouter;
struct RouterSpec;
struct ExpertMatrices;
struct SharedExpert;
struct ApartNorms;
struct ExpertRows;
class NeuronSum;
class Predictor;
class Window;

class Program {
 public:
  // states: null where no layer has any.
  Program(std::shared_ptr<Workspace> workspace, std::shared_ptr<Cache> cache, Sizes sizes,
          std::shared_ptr<States> states = nullptr);
  ~Program();
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  // A table of rotary frequencies, radians per position; factor multiplies sine and cosine. Returns its number.
  int add_rope(Vector frequencies, float factor);

  // Operators, in the order they run. x is the residual stream [tokens, d_model].
  // Attention and the FFN share only x: attention_input, attention, ffn, project is a layer
  // whose FFN reads what its attention reads.
  void embed(EmbedInput in);                // x = project . scale * row of the token + row of the position
  void attention_input(AttentionInput in);  // q, cache = rope(norm(x) . q, k, v)
  // attended = softmax(q k) v; sinks: of each head, a score more that belongs to no value; or empty; kv: the layer whose
  // keys and values it reads, -1: its own
  void attention(int layer, PiAttentionSettings settings, Vector sinks = {}, int kv = -1);
  void delta_net(DeltaNetSpec spec);    // attended = Gated DeltaNet of norm(x), see delta_net.h
  void mamba(MambaSpec spec);           // attended = Mamba2 of norm(x), see mamba.h
  void short_conv(ShortConvSpec spec);  // attended = a gated short convolution of norm(x), see short_conv.h
  // attended *= sigmoid(w . norm(x)); where w has a row for each head, each head's part *= its softplus.
  void gate_attended(int layer, Norm norm, std::shared_ptr<Matrix> w);
  // x += norm(w . reads(attended)); at: where in the row, 0: what attention gives, else what another operator has put
  // there.
  void project(int layer, std::shared_ptr<Matrix> w, Vector bias, Norm norm, int64_t at = 0, Norm reads = {});
  // The same around `attention` of a layer with latents.
  void latent_input(LatentInput in);
  void latent_project(LatentOutput out);
  void normalise(Norm norm);  // x = norm(x)
  // inputs = factor * (norm(scale * w . x) + row_scale * row of the token), behind `embed`; tokens beyond the table have
  // its first row.
  void layer_inputs(LayerInputsSpec spec);
  // n streams: x, and what each matrix of w makes of it, brought to the magnitude of x.
  void expand_streams(int64_t n, int64_t active, std::shared_ptr<Matrix> w);
  // Each stream += a sum of all of them; x = the active one. The coefficients follow from that.
  void predict_streams(StreamCoefficients spec);
  void add_laurel(LaurelSpec spec);
  // Each stream += coefficient * (x - the active one), by 1 more than the coefficients that follow from x; then x = scale
  // * the active one. scale: may be empty.
  void correct_streams(StreamCoefficients spec, Vector scale);
  // x = the mean of the first stream and what each matrix of w makes of another, brought to the first one's magnitude.
  void merge_streams(std::shared_ptr<Matrix> w);
  // x += norm(out . (act(gate . x) * the inputs at `at`)), or where there are streams all of them but the first.
  void add_layer_input(int64_t at, std::shared_ptr<Matrix> gate, std::shared_ptr<Matrix> out, Norm norm,
                       int activation);
  // logits = scale * w . project . norm(x); project may be null. The norm stays, for `hidden_states`. cap: they become
  // cap * tanh(logits / cap), 0: they stay.
  void head(Norm norm, std::shared_ptr<Matrix> project, std::shared_ptr<Matrix> w, float scale = 1, float cap = 0,
            Vector bias = {});
  // x = w . [embed_norm(scale * row of the token), hidden_norm(x)]. A draft head begins: its operators read no states,
  // and are run by themselves.
  void draft_input(DraftInput in);
  // x += FFN(x), see ffn.h. Its neurons as matrices or as bundles, either of which may be null; a predictor, of bundles,
  // or null.
  std::shared_ptr<Ffn> ffn(FfnSpec spec, std::shared_ptr<const DenseNeurons> dense,
                           std::shared_ptr<NeuronSum> bundled = nullptr,
                           std::shared_ptr<const Predictor> predictor = nullptr);
  // x += FFN(x) of experts, see experts.h. scores: the router.
  std::shared_ptr<Experts> experts(FfnSpec spec, RouterSpec router, std::shared_ptr<Matrix> scores, ExpertMatrices all,
                                   SharedExpert shared, ApartNorms separate);
  // Selects the experts of an operator `experts` without scores that follows in the step, from x as it is.
  std::shared_ptr<EarlyRouter> early_router(RouterSpec spec, std::shared_ptr<Matrix> scores);
  // No operator: experts that the caller selects, at most router.top_k for a token. Not while a step runs. router: says
  // which ones a caller would select, for those that are guessed; norm: of what the caller gives, which a predictor reads
  // as it is; may be absent.
  std::shared_ptr<Experts> expert_sum(ExpertMatrices all, RouterSpec router, Norm norm);

  size_t size() const { return ops_.size(); }
  // Matrices without data pass through a window, which reads them. Once, when all operators are there.
  void set_window(std::shared_ptr<Window> window);
  // Between steps: gives back the memory of the rows of a step, until one needs it.
  void forget();
  // Runs operators [first, last) on a step that has been checked. False if it was stopped before their end. ReadError if
  // something could not be read from disk.
  bool run(const Step& step, size_t first, size_t last);
  // out [n, d_model] = what the first operator, the embedding, makes of tokens at positions, on the calling thread. False:
  // that is work for all threads.
  bool embed_alone(const int32_t* tokens, const int32_t* positions, int64_t n, float* out);
  // out [count, d_model] = norm(x), the head's or, where `draft`, the draft head's: rows of the last step.
  void hidden_states(const int32_t* rows, int64_t count, float* out, bool draft = false);
  // Seconds spent in each operator since the last call, while `timed`.
  std::vector<std::pair<std::string, double>> take_times();
  bool timed = false;
  std::shared_ptr<Watch> watch;  // null: none
  // Limits that a step is checked against: rows of the embedding, positions that have a row, panels of the head. 0: no
  // limit.
  int64_t table_rows = 0, positions = 0, head_panels = 0;
  size_t draft_from = SIZE_MAX;  // the number of the first operator of the draft head

  const Sizes sizes;
  const std::shared_ptr<Workspace> workspace;
  const std::shared_ptr<Cache> cache;
  const std::shared_ptr<States> states;

  // ---- For operators
  // The buffers that they share. Strides are padded to whole lanes. Rows of `gate` and `up` hold any row of the model:
  // between layers they are scratch.
  const int64_t ldx, ldqkv, lda, ldh;
  const int64_t qkv_rows;  // more than a step has tokens, where some of the last step are replayed
  float *x, *qkv, *attended, *gate, *up;
  float* inputs = nullptr;  // of layers, rows of `ldinputs`; null: they have none
  int64_t ldinputs = 0;
  float* joined = nullptr;  // of the draft head, rows of `ldjoined`; null: there is none
  int64_t ldjoined = 0;
  Streams streams;
  ActMemory hidden;                         // forms of an FFN's activations, whose floats are in `gate`
  std::shared_ptr<ExpertRows> expert_rows;  // null: there are no experts
  std::shared_ptr<LatentRows> latent_rows;  // null: there is no latent attention

  Rows residual(int64_t first, int64_t tokens) const { return {x + first * ldx, ldx, sizes.d_model, tokens}; }
  // Where what is added to x from row `first` on goes: to x, or, if there is a norm, to rows that are `ldh` apart, for
  // `add_normalised`.
  Destination added_to(int64_t first, const Norm& norm, const Vector& bias, float* rows) const {
    return norm ? Destination{rows, ldh, false, bias} : Destination{x + first * ldx, ldx, true, bias};
  }
  // By thread 0 of a step: work with files. False if it fails, or something did before in this step: then what follows
  // is void, but must be computed, since threads wait for each other.
  template <class F>
  bool attempt(F work) {
    if (failed()) return false;
    try {
      work();
    } catch (const std::exception& error) { failure_ = error.what(); }
    return failure_.empty();
  }
  bool failed() const;  // this step, by what it could not read
  // x, from row `first` on, += norm(row), by all threads, if there is a norm; the rows are overwritten.
  void add_normalised(const Norm& norm, float* rows, int64_t first, int64_t tokens);
  // Rotary frequencies, and the angles' cosine and sine [tokens, pairs] of the step.
  struct Rope {
    Vector frequencies;
    float factor, *cos, *sin;
  };
  const Rope* rope(int table) const { return table < 0 ? nullptr : &ropes_[(size_t)table]; }

 private:
  template <class T>
  std::shared_ptr<T> add(std::shared_ptr<T> op, std::vector<std::shared_ptr<Matrix>> matrices = {}) {
    op->number = ops_.size();
    op->matrices = std::move(matrices);
    ops_.push_back(op);
    return op;
  }
  void rotate(const Step& step, int64_t begin, int64_t end);
  bool run_alone(const Step& step, size_t op);  // false: it was not
  struct Walk;
  void run(int thread, Walk& walk);
  // Checks the shapes of experts, and makes room for the rows of a step. shared: neurons of a shared one; bundled: of
  // these, those in bundles of their own.
  void reserve_experts(const ExpertMatrices& all, int64_t top_k, int64_t shared = 0, int64_t bundled = 0);
  void reserve_resting(const ExpertMatrices& all);
  void reserve_expert_rows(int64_t experts, int64_t top_k, int64_t neurons, int64_t bundled = 0);
  void check_layer(int layer) const;
  void check_rope(int table, int64_t dims) const;
  static void check_settings(const PiAttentionSettings& settings);
  void reserve_latents(int64_t q_latent, int64_t heads, int64_t kv, int64_t widest);

  std::shared_ptr<const Norm> final_norm_, draft_norm_;  // null: there is no such head
  std::vector<Rope> ropes_;
  std::vector<int32_t> rotated_;  // the positions that their angles are of
  Arena memory_;
  std::vector<std::shared_ptr<Op>> ops_;
  std::shared_ptr<Window> window_;  // null: every matrix is in memory
  std::string failure_;             // of this step
  std::vector<Thread> threads_;
  std::vector<double> times_;
};
