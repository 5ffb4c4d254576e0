// Programs: caches, states, workspaces, operators and steps.
#include "altup.h"
#include "bindings.h"
#include "delta_net.h"
#include "dense_neurons.h"
#include "experts.h"
#include "ffn.h"
#include "host_flags.h"
#include "latent_attention.h"
#include "levels.h"
#include "mamba.h"
#include "short_conv.h"
#include "predictor.h"
#include "program.h"
#include "sampling.h"
#include "watch.h"
#include "window.h"

#include <cmath>

namespace {

struct SlotsOfRows {
  const std::optional<Ints>&read, &written, &replayed, &undone;
};

// Slots of the runs' states, each written by one run and read by no other then.
void add_states(const States& states, Step& step, const std::vector<int32_t>& row_of, const SlotsOfRows& slots,
                int64_t sequences) {
  require(slots.read && slots.written, "the model's layers have states: their slots are missing");
  require(!slots.replayed == !slots.undone, "tokens that are replayed, and the slots behind them, belong together");
  for (const auto* one : {&slots.read, &slots.written, &slots.replayed, &slots.undone})
    require(!*one || (int64_t)(*one)->shape(0) == sequences,
            "the slots of states differ in length from the page table");
  std::vector<int64_t> writers((size_t)states.slots, -1);
  const auto check_slot = [&](int64_t slot) {
    require(slot >= 0 && slot < states.slots, "the slot of a state is outside its memory");
  };
  const auto write = [&](int64_t slot, size_t run) {
    check_slot(slot);
    require(writers[(size_t)slot] < 0 || writers[(size_t)slot] == (int64_t)run, "two sequences write the same state");
    writers[(size_t)slot] = (int64_t)run;
  };
  for (size_t i = 0; i < step.runs.size(); i++) {
    Run& run = step.runs[i];
    run.read_state = slots.read->data()[row_of[i]];
    run.state = slots.written->data()[row_of[i]];
    run.replayed = slots.replayed ? slots.replayed->data()[row_of[i]] : 0;
    write(run.state, i);
    require(run.replayed >= 0 && run.replayed <= std::min(states.undo_tokens, run.position),
            "more tokens are replayed than were kept");
    if (run.position > run.replayed) check_slot(run.read_state);
    if (!run.replayed) continue;
    run.undo_state = slots.undone->data()[row_of[i]];
    write(run.undo_state, i);
    run.replay_row = step.tokens + step.replayed;
    step.replayed += run.replayed;
  }
  for (size_t i = 0; i < step.runs.size(); i++) {
    const Run& run = step.runs[i];
    const int64_t writer = run.position > run.replayed ? writers[(size_t)run.read_state] : -1;
    require(writer < 0 || writer == (int64_t)i, "a sequence reads a state that another one writes");
  }
}

StreamCoefficients stream_coefficients(const Norm& norm, const Floats2& router, const Floats2& w) {
  return {norm, Vector(router.data(), router.data() + router.size()), Vector(w.data(), w.data() + w.size())};
}

bool run(Program& p, Ints tokens, Ints positions, Ints rows, Ints2 page_table, Ints logit_rows, OutFloats2 logits,
         size_t first, size_t last, int64_t vocab, std::optional<Ints> read_states, std::optional<Ints> states,
         std::optional<Ints> stop, std::optional<Ints> replayed, std::optional<Ints> undo_states, bool alone) {
  Step step;
  step.tokens = (int64_t)tokens.shape(0);
  step.logit_rows = (int64_t)logit_rows.shape(0);
  step.logit_stride = (int64_t)logits.shape(1);
  step.token = tokens.data();
  step.position = positions.data();
  step.logit_row = logit_rows.data();
  step.logits = logits.data();
  const int64_t sequences = (int64_t)page_table.shape(0), width = (int64_t)page_table.shape(1);
  require(step.tokens > 0 && step.tokens <= p.sizes.max_tokens, "a step takes between 1 and max_tokens tokens");
  require((int64_t)positions.shape(0) == step.tokens && (int64_t)rows.shape(0) == step.tokens,
          "tokens, positions and rows differ in length");
  require(step.logit_rows <= (int64_t)logits.shape(0) && step.logit_rows <= step.tokens,
          "more logits are requested than there is room for");
  require(vocab > 0 && (p.table_rows == 0 || vocab <= p.table_rows), "the vocabulary is larger than the embedding");
  require(p.head_panels == 0 || p.head_panels == pi_round_up(vocab, PI_LANES) / PI_LANES,
          "the vocabulary has another size than the output head");
  require(step.logit_stride == pi_round_up(vocab, PI_LANES),
          "the logits have another width than the vocabulary, rounded up to 16");
  const int32_t *row = rows.data(), *table = page_table.data();
  std::vector<int32_t> row_of;  // of the runs
  for (int64_t i = 0; i < step.tokens; i++) {
    require(step.token[i] >= 0 && step.token[i] < vocab, "a token id is outside the vocabulary");
    require(row[i] >= 0 && row[i] < sequences, "a token's row is outside the page table");
    require(step.position[i] >= 0 && step.position[i] < width * PI_PAGE, "a position lies beyond the page table");
    require(p.positions == 0 || step.position[i] < p.positions, "a position lies beyond the table of positions");
    if (i && row[i] == row[i - 1]) {
      require(step.position[i] == step.position[i - 1] + 1, "the tokens of a sequence must follow each other");
      step.runs.back().count++;
    } else {
      step.runs.push_back({i, 1, step.position[i], table + (int64_t)row[i] * width});
      row_of.push_back(row[i]);
    }
  }
  for (const Run& r : step.runs) {
    for (int64_t page = 0; page <= (r.position + r.count - 1) / PI_PAGE; page++) {
      require(r.pages[page] >= 0 && r.pages[page] < p.cache->pages, "a page is outside the cache");
    }
  }
  for (int64_t i = 0; i < step.logit_rows; i++)
    require(step.logit_row[i] >= 0 && step.logit_row[i] < step.tokens, "a logit row is outside the step");
  if (p.states && first < p.draft_from)
    add_states(*p.states, step, row_of, {read_states, states, replayed, undo_states}, sequences);
  require(!stop || stop->shape(0) == 1, "stop is one number");
  step.stop = stop ? stop->data() : nullptr;
  require(!alone || step.tokens <= PI_NEURON_TOKENS, "so many tokens of a step cannot be as if each were alone");
  step.alone = alone;
  nb::gil_scoped_release release;
  return p.run(step, first, last);
}

using Largest = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using OutInts = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// The number of a row's largest logit as an executor returns it (`NOT_FINITE` of devices/batch.py).
int32_t number_of(int64_t token, float logit) {
  if (std::isfinite(logit)) return (int32_t)token;
  return std::isnan(logit) ? -1 : logit > 0 ? -2 : -3;
}

// Tokens of the rows of a step that is launched ahead, and where their embeddings go.
struct LookedUp {
  Program& program;
  Ints positions;
  OutInts numbers;
  OutFloats2 rows;
  std::optional<Bytes> present;

  void check(size_t n) const {
    require(positions.shape(0) == n && numbers.shape(0) == n && rows.shape(0) == n,
            "tokens, positions, numbers and rows differ in length");
    require((int64_t)n <= program.sizes.max_tokens && (int64_t)rows.shape(1) == program.sizes.d_model,
            "the rows have another shape than (tokens, d_model)");
    for (size_t i = 0; i < n; i++)
      require(positions.data()[i] >= 0 && (program.positions == 0 || positions.data()[i] < program.positions),
              "a position lies beyond the table of positions");
  }
  // False: a row is not in memory.
  bool embed(const std::vector<int32_t>& tokens) const {
    const int64_t vocabulary = present ? (int64_t)present->shape(0) : program.table_rows;
    bool complete = true;
    for (int32_t token : tokens) {
      require(token >= 0 && token < vocabulary, "a token id is outside the embedding");
      complete = complete && (!present || present->data()[token]);
    }
    if (complete)
      require(program.embed_alone(tokens.data(), positions.data(), (int64_t)tokens.size(), rows.data()),
              "the embedding is not that of one thread");
    return complete;
  }
};

// None: not within these seconds; false: a row is not in memory; true: answered.
std::optional<bool> answer_tokens(Program& p, HostFlags& flags, uint32_t number, double seconds, Largest largest,
                                  Floats logits, Ints positions, OutInts numbers, OutFloats2 rows,
                                  std::optional<Bytes> present) {
  const size_t n = largest.shape(0);
  const LookedUp next{p, positions, numbers, rows, present};
  require(logits.shape(0) == n, "tokens and logits differ in length");
  next.check(n);
  nb::gil_scoped_release release;
  if (!flags.wait(number, seconds)) return {};
  for (size_t i = 0; i < n; i++) numbers.data()[i] = number_of(largest.data()[i], logits.data()[i]);
  if (!next.embed({largest.data(), largest.data() + n})) return false;
  flags.answer(number);
  return true;
}

using DrawNumbers = std::tuple<double, double, double, double, double>;

Draw draw_of(const DrawNumbers& numbers) {
  const auto& [temperature, top_k, top_p, min_p, uniform] = numbers;
  return {temperature, top_k, top_p, min_p, uniform};
}

int32_t drawn_of(int32_t count, float total, Floats values, Ints ids, const DrawNumbers& draw) {
  require(values.shape(0) == MOST_CANDIDATES && ids.shape(0) == MOST_CANDIDATES, "candidates have another number");
  Candidates candidates{count, total, {}, {}};
  std::copy_n(values.data(), MOST_CANDIDATES, candidates.values);
  std::copy_n(ids.data(), MOST_CANDIDATES, candidates.ids);
  return drawn_token(candidates, draw_of(draw));
}

// The same; where not all tokens are drawn, those of the others are -1, and it is not answered.
std::optional<bool> answer_draws(Program& p, HostFlags& flags, uint32_t number, double seconds, Ints2 records,
                                 Doubles2 draws, Ints positions, OutInts numbers, OutFloats2 rows,
                                 std::optional<Bytes> present) {
  const size_t n = records.shape(0);
  const LookedUp next{p, positions, numbers, rows, present};
  require(records.shape(1) * sizeof(int32_t) == sizeof(Candidates), "records of candidates have another length");
  require(draws.shape(0) == n && draws.shape(1) == DRAW_NUMBERS, "each token has a draw of its own");
  const auto* candidates = reinterpret_cast<const Candidates*>(records.data());
  const auto* draw = reinterpret_cast<const Draw*>(draws.data());
  next.check(n);
  nb::gil_scoped_release release;
  if (!flags.wait(number, seconds)) return {};
  std::vector<int32_t> tokens;
  bool all = true;
  for (size_t i = 0; i < n; i++) {
    const int32_t token = numbers.data()[i] = drawn_token(candidates[i], draw[i]);
    all = all && token >= 0;
    tokens.push_back(token >= 0 ? token : candidates[i].ids[0]);
  }
  if (!next.embed(tokens)) return false;
  if (all) flags.answer(number);
  return true;
}

void hidden_states(Program& p, Ints rows, OutFloats2 out, bool draft) {
  require((int64_t)out.shape(1) == p.sizes.d_model && out.shape(0) == rows.shape(0),
          "the hidden states have another shape than (rows, d_model)");
  for (size_t i = 0; i < rows.shape(0); i++)
    require(rows.data()[i] >= 0 && rows.data()[i] < p.sizes.max_tokens, "a row is outside the step");
  nb::gil_scoped_release release;
  p.hidden_states(rows.data(), (int64_t)rows.shape(0), out.data(), draft);
}

int convolution_activation(const std::string& name) {
  const int act = index_of(ACTIVATIONS, PI_N_ACTS, name, "activation");
  require(act == PI_SILU || act == PI_RELU || act == PI_RELU2, "behind a convolution: silu, relu or relu2");
  return act;
}

void bind_operators(nb::class_<Program>& program) {
  program
      .def(
          "add_rope",
          [](Program& p, Floats frequencies, float factor) { return p.add_rope(vector_of(frequencies), factor); },
          "frequencies"_a, "factor"_a,
          "Add a table of rotary frequencies, radians per position; factor multiplies sine and cosine. Its index.")
      .def(
          "embed",
          [](Program& p, std::shared_ptr<Table> table, std::shared_ptr<Table> positions, int64_t offset,
             std::shared_ptr<Matrix> project,
             float scale) { p.embed({std::move(table), std::move(positions), offset, std::move(project), scale}); },
          "table"_a, "positions"_a = nb::none(), "offset"_a = 0, "project"_a = nb::none(), "scale"_a = 1.0f,
          nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(),
          "x = project . scale * row of the token + row of the position; that of position 0 is row `offset`.")
      .def(
          "attention_input",
          [](Program& p, int layer, PiAttentionSettings settings, const Norm* norm, std::shared_ptr<Matrix> q,
             std::shared_ptr<Matrix> k, std::shared_ptr<Matrix> v, std::optional<Floats> q_bias,
             std::optional<Floats> k_bias, std::optional<Floats> v_bias, const Norm* q_norm, const Norm* k_norm,
             int rope, const Norm* v_norm, bool rotates_first, bool separate) {
            p.attention_input({layer, settings, norm_of(norm), norm_of(q_norm), norm_of(k_norm), vector_of(q_bias),
                               vector_of(k_bias), vector_of(v_bias), std::move(q), std::move(k), std::move(v), rope,
                               norm_of(v_norm), rotates_first, separate});
          },
          "layer"_a, "settings"_a, "norm"_a.none(), "q"_a, "k"_a.none(), "v"_a.none(), "q_bias"_a = nb::none(),
          "k_bias"_a = nb::none(), "v_bias"_a = nb::none(), "q_norm"_a = nb::none(), "k_norm"_a = nb::none(),
          "rope"_a = -1, "v_norm"_a = nb::none(), "rotates_first"_a = false, "separate"_a = false,
          "q, cache = rope(norm(x) . q, k, v).\n\n"
          "settings: the layer's configuration. q_norm, k_norm: over each head, or as wide as all heads of q (k)\n"
          "together; v_norm: over each head of v, which may be k. rope: an index from `add_rope`, -1: q and k are not\n"
          "rotated; rotates_first: before the norms of heads; separate: norms as wide as all heads are over each head.")
      .def(
          "attention",
          [](Program& p, int layer, PiAttentionSettings settings, std::optional<Floats> sinks, int kv) {
            p.attention(layer, settings, vector_of(sinks), kv);
          },
          "layer"_a, "settings"_a, "sinks"_a = nb::none(), "kv"_a = -1,
          "attended = softmax(q k) v.\n\n"
          "settings: the layer's configuration. sinks: of each head, a score more, which belongs to no value. kv: the\n"
          "layer whose keys and values it reads, -1: its own.")
      .def(
          "delta_net",
          [](Program& p, int layer, size_t state, const Norm* norm, std::vector<std::shared_ptr<Matrix>> matrices,
             Floats2 taps, Floats decay, Floats dt_bias, const Norm& out_norm, int64_t key_heads, bool tiled,
             const std::string& activation) {
            const bool latent = matrices.size() == 8;
            require((latent || matrices.size() == 6) &&
                        std::all_of(matrices.begin(), matrices.end(), [](auto& m) { return !!m; }),
                    "Gated DeltaNet has six matrices, or eight");
            Vector all(taps.data(), taps.data() + taps.size());
            const int act = convolution_activation(activation);
            p.delta_net({{layer, state, norm_of(norm), std::move(all), {}, act},
                         matrices[0],
                         matrices[1],
                         matrices[2],
                         matrices[3],
                         matrices[4],
                         matrices[5],
                         latent ? matrices[6] : nullptr,
                         latent ? matrices[7] : nullptr,
                         vector_of(decay),
                         vector_of(dt_bias),
                         out_norm,
                         key_heads,
                         tiled});
          },
          "layer"_a, "state"_a, "norm"_a.none(), "matrices"_a, "taps"_a, "decay"_a, "dt_bias"_a, "out_norm"_a,
          "key_heads"_a, "tiled"_a, "activation"_a,
          "attended = Gated DeltaNet of norm(x).\n\n"
          "layer, state: of the cache and of the states; matrices: query, key, value, gate, beta, alpha, and, where\n"
          "each channel of a key decays by itself, what makes the gate and alpha of what these give; taps: of the\n"
          "convolution, [taps, channels]; decay: the logarithm of a head's decay is decay * softplus(alpha + "
          "dt_bias);\n"
          "tiled: value head i has key head i % key_heads, else i // (value heads / key_heads); activation: behind "
          "the\n"
          "convolution, silu, relu or relu2.")
      .def(
          "mamba",
          [](Program& p, int layer, size_t state, const Norm* norm, std::vector<std::shared_ptr<Matrix>> matrices,
             std::vector<std::optional<Floats>> biases, Floats2 taps, std::optional<Floats> taps_bias,
             std::vector<Floats> of_heads, std::pair<float, float> steps, std::pair<float, float> scales,
             std::vector<const Norm*> out_norms, bool gated, const std::string& activation, int64_t at) {
            require(matrices.size() == 3 && std::all_of(matrices.begin(), matrices.end(), [](auto& m) { return !!m; }),
                    "Mamba2 has three matrices");
            require(biases.size() == 3 && of_heads.size() == 3,
                    "Mamba2 has three biases, and a, d and the step's bias");
            const int act = convolution_activation(activation);
            std::vector<Norm> norms;
            for (const Norm* one : out_norms) norms.push_back(norm_of(one));
            const GateNorm kind = norms.empty() ? GateNorm::NONE : gated ? GateNorm::PRODUCT : GateNorm::BEFORE;
            Vector all(taps.data(), taps.data() + taps.size());
            p.mamba({{layer, state, norm_of(norm), std::move(all), vector_of(taps_bias), act},
                     at,
                     matrices[0],
                     matrices[1],
                     matrices[2],
                     vector_of(biases[0]),
                     vector_of(biases[1]),
                     vector_of(biases[2]),
                     vector_of(of_heads[0]),
                     vector_of(of_heads[1]),
                     vector_of(of_heads[2]),
                     steps.first,
                     steps.second,
                     scales.first,
                     scales.second,
                     kind,
                     std::move(norms)});
          },
          "layer"_a, "state"_a, "norm"_a.none(), "matrices"_a, "biases"_a, "taps"_a, "taps_bias"_a.none(), "of_heads"_a,
          "steps"_a, "scales"_a, "out_norms"_a, "gated"_a, "activation"_a, "at"_a = 0,
          "attended = Mamba2 of norm(x).\n\n"
          "layer, state: of the cache and of the states; matrices, biases: gate, x with B and C, dt; taps: of the\n"
          "convolution, [taps, channels]; of_heads: a, d, the bias of the step; steps: limits of softplus(dt + bias);\n"
          "scales: of the gate and of dt; out_norms: of equal parts of what the heads give, of its product with the "
          "gate\n"
          "where `gated`; activation: behind the convolution, silu, relu or relu2; at: where in a row of what is "
          "attended.")
      .def(
          "short_conv",
          [](Program& p, int layer, size_t state, const Norm* norm, std::vector<std::shared_ptr<Matrix>> matrices,
             std::vector<std::optional<Floats>> biases, Floats2 taps, std::optional<Floats> taps_bias) {
            require(matrices.size() == 3 && std::all_of(matrices.begin(), matrices.end(), [](auto& m) { return !!m; }),
                    "a short convolution has three matrices");
            require(biases.size() == 3, "a short convolution has three biases");
            Vector all(taps.data(), taps.data() + taps.size());
            p.short_conv({{layer, state, norm_of(norm), std::move(all), vector_of(taps_bias), NO_ACTIVATION},
                          matrices[0],
                          matrices[1],
                          matrices[2],
                          vector_of(biases[0]),
                          vector_of(biases[1]),
                          vector_of(biases[2])});
          },
          "layer"_a, "state"_a, "norm"_a.none(), "matrices"_a, "biases"_a, "taps"_a, "taps_bias"_a.none(),
          "attended = third * convolution(first * second), of three products with norm(x).\n\n"
          "layer, state: of the cache and of the states; matrices, biases: of the products; taps: of the convolution,\n"
          "[taps, channels], and its bias.")
      .def(
          "gate_attended",
          [](Program& p, int layer, const Norm* norm, std::shared_ptr<Matrix> w) {
            p.gate_attended(layer, norm_of(norm), std::move(w));
          },
          "layer"_a, "norm"_a.none(), "w"_a,
          "attended *= sigmoid(w . norm(x)); where w has a row for each head, each head's part *= its softplus.")
      .def(
          "project",
          [](Program& p, int layer, std::shared_ptr<Matrix> w, std::optional<Floats> bias, const Norm* norm, int64_t at,
             const Norm* reads) { p.project(layer, std::move(w), vector_of(bias), norm_of(norm), at, norm_of(reads)); },
          "layer"_a, "w"_a, "bias"_a = nb::none(), "norm"_a = nb::none(), "at"_a = 0, "reads"_a = nb::none(),
          "x += norm(w . reads(attended) + bias); at: where in a row of what is attended.")
      .def(
          "latent_input",
          [](Program& p, int layer, PiAttentionSettings settings, const Norm* norm, std::shared_ptr<Matrix> q_latent,
             const Norm* q_norm, std::shared_ptr<Matrix> q, std::shared_ptr<Matrix> kv, const Norm* kv_norm,
             std::shared_ptr<Matrix> k_b, int rope) {
            p.latent_input({layer, settings, norm_of(norm), std::move(q_latent), norm_of(q_norm), std::move(q),
                            std::move(kv), norm_of(kv_norm), std::move(k_b), rope});
          },
          "layer"_a, "settings"_a, "norm"_a.none(), "q_latent"_a.none(), "q_norm"_a.none(), "q"_a, "kv"_a, "kv_norm"_a,
          "k_b"_a, "rope"_a,
          "q, cache = (rope(q . q_norm(q_latent . n)) . k_b, rope(kv_norm(kv . n))), n = norm(x), of latent "
          "attention.\n\n"
          "q: of all heads; without q_latent of n itself. k_b: of all heads, one below the other, each padded to "
          "LANES.")
      .def(
          "latent_project",
          [](Program& p, int layer, std::shared_ptr<Matrix> v_b, std::shared_ptr<Matrix> o, const Norm* norm) {
            p.latent_project({layer, std::move(v_b), std::move(o), norm_of(norm)});
          },
          "layer"_a, "v_b"_a, "o"_a, "norm"_a = nb::none(),
          "x += norm(o . each head's v_b . attended), of latent attention.")
      .def(
          "ffn",
          [](Program& p, const FfnSpec& spec, std::shared_ptr<DenseNeurons> dense, std::shared_ptr<NeuronSum> bundled,
             std::shared_ptr<Predictor> predictor) {
            return p.ffn(spec, std::move(dense), std::move(bundled), std::move(predictor));
          },
          "spec"_a, "dense"_a = nb::none(), "bundled"_a = nb::none(), "predictor"_a = nb::none(),
          "x += out_norm(sum of the neurons of norm(x) + down_bias).\n\n"
          "The neurons as matrices, as bundles, or both. predictor: selects among bundles, in steps of up to\n"
          "NEURON_TOKENS tokens.")
      .def(
          "experts",
          [](Program& p, const FfnSpec& spec, const RouterSpec& router, std::shared_ptr<Matrix> scores,
             const ExpertMatrices& all, std::shared_ptr<DenseNeurons> shared, std::optional<Floats> shared_gate,
             std::shared_ptr<NeuronSum> shared_bundled, const std::vector<const Norm*>& separate) {
            require(separate.empty() || separate.size() == 4, "separate experts have four norms");
            ApartNorms norms;
            if (!separate.empty())
              norms = {norm_of(separate[0]), norm_of(separate[1]), norm_of(separate[2]), norm_of(separate[3])};
            return p.experts(spec, router, std::move(scores), all,
                             {std::move(shared), vector_of(shared_gate), std::move(shared_bundled)}, std::move(norms));
          },
          "spec"_a, "router"_a, "scores"_a.none(), "experts"_a, "shared"_a = nb::none(), "shared_gate"_a = nb::none(),
          "shared_bundled"_a = nb::none(), "separate"_a = std::vector<const Norm*>(),
          "x += out_norm(sum of the weighted experts of norm(x) + shared expert + down_bias).\n\n"
          "scores: the router, [experts, d_model], None: `early_router` comes before; shared_gate: [d_model], whose\n"
          "product with norm(x), a sigmoid of it, is the shared expert's weight; shared_bundled: its neurons, where\n"
          "experts are bundles without them. separate: norms of what the router reads, of what the shared expert reads "
          "and\n"
          "gives, of what the experts give, or none of them.")
      .def(
          "expert_sum",
          [](Program& p, ExpertMatrices experts, RouterSpec router, const Norm* norm) {
            return p.expert_sum(std::move(experts), std::move(router), norm_of(norm));
          },
          "experts"_a, "router"_a, "norm"_a = nb::none(),
          "Experts that the caller selects, at most router.top_k for a token. Not while a step runs. router: how they\n"
          "are selected, for those that are guessed; norm: of the input, which a predictor reads as it is.")
      .def("early_router", &Program::early_router, "router"_a, "scores"_a,
           "Select the experts of the next operator `experts` from x as it is; scores: [experts, d_model].")
      .def("normalise", &Program::normalise, "norm"_a, "x = norm(x).")
      .def(
          "layer_inputs",
          [](Program& p, std::shared_ptr<Table> table, std::shared_ptr<Matrix> w, const Norm& norm, float scale,
             float row_scale,
             float factor) { p.layer_inputs({std::move(table), std::move(w), norm, scale, row_scale, factor}); },
          "table"_a, "w"_a, "norm"_a, "scale"_a, "row_scale"_a, "factor"_a, nb::keep_alive<1, 2>(),
          "Of every layer, behind `embed`: inputs = factor * (norm(scale * w . x) + row_scale * row of the token).\n\n"
          "table, w: of all layers, one after another; norm: of one.")
      .def(
          "add_layer_input",
          [](Program& p, int64_t at, std::shared_ptr<Matrix> gate, std::shared_ptr<Matrix> out, const Norm* norm,
             const std::string& activation) {
            const int act = index_of(ACTIVATIONS, PI_N_ACTS, activation, "activation");
            require(act < PI_TOPK, "of a layer's input: no activation with numbers of its own");
            p.add_layer_input(at, std::move(gate), std::move(out), norm_of(norm), act);
          },
          "at"_a, "gate"_a, "out"_a, "norm"_a.none(), "activation"_a,
          "x += norm(out . (activation(gate . x) * inputs)), or where there are streams all but the first; at: where "
          "in\n"
          "the inputs of all layers.")
      .def("expand_streams", &Program::expand_streams, "streams"_a, "active"_a, "w"_a,
           "Residual streams: x, and what each matrix of w, one below the other in whole panels, makes of it, brought "
           "to\n"
           "the magnitude of x. active: the one that layers compute with.")
      .def(
          "predict_streams",
          [](Program& p, const Norm& norm, Floats2 router, Floats2 w) {
            p.predict_streams(stream_coefficients(norm, router, w));
          },
          "norm"_a, "router"_a, "w"_a,
          "Each stream += a sum of all of them with coefficients w . tanh(router . norm(the active one) / d_model);\n"
          "x = the active one. router: [streams, d_model], w: [streams * streams, streams].")
      .def(
          "add_laurel",
          [](Program& p, const Norm& norm, std::shared_ptr<Matrix> in, std::shared_ptr<Matrix> out,
             const Norm& out_norm) { p.add_laurel({norm, out_norm, std::move(in), std::move(out)}); },
          "norm"_a, "inner"_a, "outer"_a, "out_norm"_a, "x += norm(x) + out_norm(outer . inner . norm(x)).")
      .def(
          "correct_streams",
          [](Program& p, const Norm& norm, Floats2 router, Floats2 w, std::optional<Floats> scale) {
            p.correct_streams(stream_coefficients(norm, router, w), vector_of(scale));
          },
          "norm"_a, "router"_a, "w"_a, "scale"_a = nb::none(),
          "Each stream += (1 + w . tanh(router . norm(x) / d_model)) * (x - the active one); x = scale * the active\n"
          "one. router: [streams, d_model], w: [streams, streams], scale: [d_model].")
      .def("merge_streams", &Program::merge_streams, "w"_a,
           "x = the mean of the first stream and what each matrix of w, as of expand_streams, makes of another one,\n"
           "brought to the first one's magnitude.")
      .def(
          "head",
          [](Program& p, const Norm* norm, std::shared_ptr<Matrix> w, std::shared_ptr<Matrix> project, float scale,
             float cap, std::optional<Floats> bias) {
            p.head(norm_of(norm), std::move(project), std::move(w), scale, cap, vector_of(bias));
          },
          "norm"_a.none(), "w"_a, "project"_a = nb::none(), "scale"_a = 1.0f, "cap"_a = 0.0f, "bias"_a = nb::none(),
          "logits = scale * (w . project . norm(x) + bias); cap: they become cap * tanh(logits / cap), 0: they stay.")
      .def(
          "draft_input",
          [](Program& p, std::shared_ptr<Table> table, const Norm& embed_norm, const Norm& hidden_norm,
             std::shared_ptr<Matrix> w, float scale,
             bool normed) { p.draft_input({std::move(table), embed_norm, hidden_norm, std::move(w), scale, normed}); },
          "table"_a, "embed_norm"_a, "hidden_norm"_a, "w"_a.none(), "scale"_a = 1.0f, "normed"_a = false,
          nb::keep_alive<1, 2>(),
          "x = w . [embed_norm(scale * row of the token), hidden_norm(x)]: a draft head begins, behind the model's "
          "head.\n\n"
          "Its operators are run by themselves, with any states or none. w: None behind `fuse`, where the next\n"
          "attention reads both; normed: x = hidden_norm(x) then.")
      .def("keep_feature", &Program::keep_feature, "place"_a, "places"_a,
           "The features that an EAGLE head reads, d_model numbers at each of `places`: those at `place` = x.")
      .def(
          "fuse",
          [](Program& p, const std::vector<const Norm*>& norms, std::shared_ptr<Matrix> w) {
            std::vector<Norm> all;
            for (const Norm* one : norms) all.push_back(norm_of(one));
            p.fuse(std::move(all), std::move(w));
          },
          "norms"_a, "w"_a,
          "x = w . norms(features): an EAGLE head begins, and `draft_input` follows. norms: none, one as wide as all "
          "places,\n"
          "or one of each.");
}

}  // namespace

void bind_cache(nb::module_& m) {
  nb::class_<Cache>(m, "Cache")
      .def(
          "__init__",
          [](Cache* cache, const std::string& type, const std::vector<std::pair<int64_t, int64_t>>& heads,
             int64_t pages, const std::vector<int64_t>& latents) {
            const bool right = std::all_of(heads.begin(), heads.end(),
                                           [](const auto& one) { return one.first >= 0 && one.second > 0; });
            require(!heads.empty() && right && pages > 0, "a cache needs layers, heads and pages");
            new (cache) Cache(index_of(KV_TYPES, PI_N_KV_TYPES, type, "KV type"), heads, pages, latents);
          },
          "type"_a, "heads"_a, "pages"_a, "latents"_a = std::vector<int64_t>(),
          "heads: of each layer the number for keys and values, 0: none, and their dimensions. latents: of each layer "
          "the\n"
          "numbers of a key, its first, that are its value too; 0, or none given: values are stored beside keys.")
      .def_ro("pages", &Cache::pages)
      .def_prop_ro("nbytes", &Cache::bytes)
      .def(
          "heads",
          [](nb::handle self, size_t layer) {
            const Cache& cache = nb::cast<const Cache&>(self);
            require(layer < cache.layers.size(), "no such layer in the cache");
            const Cache::Layer& own = cache.layers[layer];
            return CacheBytes(cache.data(own), {(size_t)cache.pages, (size_t)own.kv_heads, (size_t)own.head_bytes},
                              self, {cache.page_bytes, own.head_bytes, 1});
          },
          "layer"_a,
          "The memory of a layer, uint8 [pages, kv heads, bytes], which may be written while no step runs. A head of "
          "a\n"
          "page: keys [head_dim][32], values [32][head_dim], head_dim in whole LANES; of q8_0 followed by the scales "
          "of\n"
          "32 dimensions, float16, in the same order.");
}

void bind_states(nb::module_& m) {
  nb::class_<States>(m, "States")
      .def(
          "__init__",
          [](States* states,
             const std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, bool, bool>>& layers,
             int64_t slots, int64_t undo_tokens) {
            std::vector<States::Layer> all;
            for (const auto& [taps, key_heads, key_dim, heads, value_dim, chunked, decays] : layers) {
              require(taps >= 2 && taps <= PI_MOST_TAPS, "a convolution has between 2 and 8 taps");
              const bool keyless = !key_heads && !key_dim && !chunked;
              require((key_heads > 0 || keyless) && heads > 0, "states need heads");
              require((key_dim > 0 || keyless) && value_dim > 0 && key_dim % PI_LANES == 0 && value_dim % PI_LANES == 0,
                      "heads of states must have multiples of 16 dimensions");
              all.push_back({taps - 1, 2 * key_heads * key_dim + heads * value_dim, key_heads, heads, key_dim,
                             value_dim, chunked, decays});
            }
            require(slots > 0, "states need slots");
            require(undo_tokens >= 0 && undo_tokens <= PI_CHUNK, "inputs are kept of at most 16 tokens of a step");
            new (states) States(std::move(all), slots, undo_tokens);
          },
          "layers"_a, "slots"_a, "undo_tokens"_a = 0,
          "layers: (taps of the convolution, key heads, their dimensions, value heads, their dimensions, whether it "
          "is\n"
          "Mamba2, whose groups are key heads, whether each channel of a key decays by itself) of each on the CPU; "
          "without\n"
          "keys, a short convolution. undo_tokens: of so many tokens of a step the inputs are kept, for `Program.run`\n"
          "to replay.")
      .def_ro("slots", &States::slots)
      .def_ro("undo_tokens", &States::undo_tokens)
      .def_prop_ro("slot_bytes", &States::slot_bytes);
}

void bind_workspace(nb::module_& m) {
  nb::class_<Workspace>(m, "Workspace",
                        "Kernels of a level, and the scratch memory of everything that runs on a pool with them.")
      .def(
          "__init__",
          [](Workspace* w, std::shared_ptr<Pool> pool, const std::string& level) {
            new (w) Workspace(std::move(pool), find_level(level));
          },
          "pool"_a, "level"_a);
}

void bind_sampling(nb::module_& m) {
  m.attr("LIKELIEST") = LIKELIEST;
  m.attr("MOST_CANDIDATES") = MOST_CANDIDATES;
  m.attr("TOTAL_ERROR") = TOTAL_ERROR;
  m.attr("DRAW_NUMBERS") = DRAW_NUMBERS;
  m.def("drawn_token", &drawn_of, "count"_a, "total"_a, "values"_a, "ids"_a, "draw"_a,
        "The token that Python's sampler draws out of candidates (kernels/candidates.py); -1: they do not suffice, or\n"
        "it depends on how exponentials are rounded. draw: temperature, 0: the most likely token; top_k, 0: no limit;\n"
        "top_p, min_p; a uniform number.");
}

void bind_program(nb::module_& m) {
  auto program =
      nb::class_<Program>(m, "Program")
          .def(
              "__init__",
              [](Program* p, std::shared_ptr<Workspace> workspace, std::shared_ptr<Cache> cache, int64_t max_tokens,
                 int64_t d_model, int64_t d_ff, std::vector<int64_t> heads, std::optional<int64_t> embed_dim,
                 std::shared_ptr<States> states, int64_t attended) {
                Sizes sizes{max_tokens, d_model, d_ff, std::move(heads), embed_dim.value_or(d_model), attended};
                require(attended >= 0 && max_tokens > 0 && d_model > 0 && d_ff > 0 && sizes.embed_dim > 0,
                        "sizes must be positive");
                new (p) Program(std::move(workspace), std::move(cache), std::move(sizes), std::move(states));
              },
              "workspace"_a, "cache"_a, "max_tokens"_a, "d_model"_a, "d_ff"_a, "heads"_a, "embed_dim"_a = nb::none(),
              "states"_a = nb::none(), "attended"_a = 0,
              "heads: query heads of each layer of the cache; attended: least numbers that a token attends to.");
  bind_operators(program);
  program
      .def(
          "set_watch",
          [](Program& p, std::shared_ptr<Watch> watch) {
            require(!watch || watch->suits(p.sizes.d_ff, p.sizes.max_tokens, p.workspace->pool->threads()),
                    "a watch for another program");
            between_jobs(*p.workspace, [&] { p.watch.swap(watch); });
          },
          "watch"_a.none())
      .def(
          "residual",
          [](Program& p, int64_t tokens) {
            require(tokens > 0 && tokens <= p.sizes.max_tokens, "a step takes between 1 and max_tokens tokens");
            return nb::ndarray<nb::numpy, float, nb::ndim<2>>(p.x, {(size_t)tokens, (size_t)p.sizes.d_model},
                                                              nb::find(p), {p.ldx, 1});
          },
          "tokens"_a, "The residual stream x, [tokens, d_model]: the program's own memory, which may be written.")
      .def(
          "layer_input_rows",
          [](Program& p, int64_t tokens) {
            require(p.inputs && tokens > 0 && tokens <= p.sizes.max_tokens, "there are no such inputs of layers");
            return nb::ndarray<nb::numpy, float, nb::ndim<2>>(p.inputs, {(size_t)tokens, (size_t)p.ldinputs},
                                                              nb::find(p), {p.ldinputs, 1});
          },
          "tokens"_a, "The inputs of layers of the last step, [tokens, layers * numbers]: the program's own memory.")
      .def_prop_ro("lists_draft_panels", &Program::lists_draft_panels)
      .def(
          "list_draft_panels",
          [](Program& p, Ints panels) {
            p.list_draft_panels(std::vector<int32_t>(panels.data(), panels.data() + panels.shape(0)));
          },
          "panels"_a, nb::call_guard<nb::gil_scoped_release>(),
          "The panels of LANES tokens whose logits the last head makes from now on, int32 [n], ascending, one behind\n"
          "the other; none: all. Where it `lists_draft_panels`, as its output head is in memory.")
      .def(
          "features",
          [](Program& p, int64_t tokens) {
            require(p.features && tokens > 0 && tokens <= p.sizes.max_tokens, "there is no EAGLE head");
            return nb::ndarray<nb::numpy, float, nb::ndim<2>>(p.features, {(size_t)tokens, (size_t)p.feature_width},
                                                              nb::find(p), {p.ldfeatures, 1});
          },
          "tokens"_a,
          "The features of the last step, [tokens, places * d_model]: the program's own memory, which may be\n"
          "written.")
      .def("hidden_states", &hidden_states, "rows"_a, "out"_a.noconvert(), "draft"_a = false,
           "out [rows, d_model] = norm(x) with the norm of the head, or of the draft head: rows of the last step.")
      .def(
          "set_window", &Program::set_window, "window"_a,
          "What matrices on disk pass through; once, when all operators are there. Then `run` raises ReadError if one\n"
          "could not be read: what it computed is void.")
      .def("forget", &Program::forget, nb::call_guard<nb::gil_scoped_release>(),
           "Between steps: give back the memory of the rows of a step, until one needs it.")
      .def_prop_ro("size", &Program::size)
      .def_prop_rw(
          "timed", [](const Program& p) { return p.timed; },
          [](Program& p, bool on) { between_jobs(*p.workspace, [&] { p.timed = on; }); })
      .def("take_times", &Program::take_times, nb::call_guard<nb::gil_scoped_release>(),
           "Seconds spent in each operator since the last call, while `timed`.")
      .def("run", &run, "tokens"_a, "positions"_a, "rows"_a, "page_table"_a, "logit_rows"_a, "logits"_a.noconvert(),
           "first"_a, "last"_a, "vocab"_a, "read_states"_a = nb::none(), "states"_a = nb::none(),
           "stop"_a.noconvert() = nb::none(), "replayed"_a = nb::none(), "undo_states"_a = nb::none(),
           "alone"_a = false,
           "Run operators [first, last) on a step: tokens, their positions and rows of the page table; the logits of\n"
           "logit_rows go to logits [rows, vocab rounded up to LANES]. read_states, states: for each row of the page\n"
           "table the slots of its state before the step, not read at position 0, and after it. stop: one number;\n"
           "once it is not 0 the run ends with the operator that is under way. False if that was not the last one.\n"
           "replayed, undo_states: for each row the tokens right before it whose inputs the slot that it writes has, "
           "since\n"
           "a step before wrote it, and that the state that it reads lacks; and the slot that gets the state behind "
           "them.\n"
           "alone: where neurons are left out, each of up to NEURON_TOKENS tokens has the bits of a step of it alone.")
      .def(
          "answer_tokens", &answer_tokens, "flags"_a, "number"_a, "seconds"_a, "largest"_a.noconvert(),
          "logits"_a.noconvert(), "positions"_a, "numbers"_a.noconvert(), "rows"_a.noconvert(),
          "present"_a.noconvert() = nb::none(),
          "Wait until the GPU has written a number and, before it, the tokens of the largest logits, int64 [T], and\n"
          "these, float32 [T]; put the tokens into `numbers`, int32 [T], -1, -2 and -3 for NaN and infinite logits, "
          "and\n"
          "their embeddings at these positions into `rows`, float32 [T, d_model]; answer the number. None: it has not\n"
          "within these seconds; False: `present`, uint8 [vocab], says that a row of the table is not in memory, so "
          "that\n"
          "it was not answered.")
      .def(
          "answer_draws", &answer_draws, "flags"_a, "number"_a, "seconds"_a, "records"_a.noconvert(),
          "draws"_a.noconvert(), "positions"_a, "numbers"_a.noconvert(), "rows"_a.noconvert(),
          "present"_a.noconvert() = nb::none(),
          "The same with tokens that are drawn: records, int32 [T, WORDS], of the candidates, as the GPU brings them,\n"
          "and draws, float64 [T, 5], as of `drawn_token`. Where not all are drawn, the others are -1, have a row of\n"
          "some token, and the number is not answered.");
}
