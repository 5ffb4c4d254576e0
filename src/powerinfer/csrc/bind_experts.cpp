// Mixtures of experts.
#include <string.h>

#include "bindings.h"
#include "expert_policy.h"
#include "experts.h"
#include "neuron_sum.h"
#include "predictor.h"
#include "program.h"
#include "resting_experts.h"
#include "slots.h"
#include "sum_calls.h"

namespace {

// Its rows, padded to whole panels.
std::vector<Vector> vectors_of(const std::optional<Floats2>& a) {
  std::vector<Vector> rows;
  for (size_t i = 0; a && i < a->shape(0); i++)
    rows.push_back(padded(Vector(a->data() + i * a->shape(1), a->data() + (i + 1) * a->shape(1))));
  return rows;
}

void check_expert_sum(const Experts& experts, const Program& program, Floats2 x, OutFloats2 out) {
  const size_t tokens = x.shape(0), k = (size_t)experts.store().d_model;
  require(tokens > 0 && (int64_t)tokens <= program.sizes.max_tokens && x.shape(1) == k && out.shape(0) == tokens &&
              out.shape(1) == k,
          "x and out must be [tokens, d_model], for at most the program's tokens");
}

void check_selected(const Experts& experts, const Program& program, Ints2 selected, Floats2 weights) {
  const size_t tokens = selected.shape(0), some = (size_t)experts.router().spec.top_k;
  require(tokens > 0 && (int64_t)tokens <= program.sizes.max_tokens && selected.shape(1) == some &&
              weights.shape(0) == tokens && weights.shape(1) == some,
          "selected and weights must be [tokens, top_k]");
  for (size_t i = 0; i < tokens * some; i++)
    require(selected.data()[i] >= -1 && selected.data()[i] < experts.store().experts, "no such expert");
}

// What a predictor reads that is given relu(inner . x).
const float* hidden_of(const Experts& experts, size_t tokens, const std::optional<Floats2>& hidden) {
  if (!hidden) return nullptr;
  require(hidden->shape(0) == tokens && (int64_t)hidden->shape(1) == experts.store().hidden_width(),
          "hidden must be [tokens, rank], of a predictor without its first matrix");
  return hidden->data();
}

bool sum_experts(Experts& experts, Program& program, Floats2 x, Ints2 selected, Floats2 weights, OutFloats2 out,
                 std::optional<Floats2> hidden) {
  check_expert_sum(experts, program, x, out);
  check_selected(experts, program, selected, weights);
  require(selected.shape(0) == x.shape(0), "selected and weights must be [tokens, top_k]");
  const float* const of_predictor = hidden_of(experts, x.shape(0), hidden);
  nb::gil_scoped_release release;
  return experts.sum(program, x.data(), (int64_t)x.shape(0), selected.data(), weights.data(), out.data(), of_predictor);
}

void order_experts(Experts& experts, Program& program, Ints2 selected, Floats2 weights) {
  check_selected(experts, program, selected, weights);
  nb::gil_scoped_release release;
  experts.order(program, (int64_t)selected.shape(0), selected.data(), weights.data());
}

bool sum_ordered_experts(Experts& experts, Program& program, Floats2 x, OutFloats2 out, std::optional<Floats2> hidden) {
  check_expert_sum(experts, program, x, out);
  const float* const of_predictor = hidden_of(experts, x.shape(0), hidden);
  nb::gil_scoped_release release;
  return experts.sum_ordered(program, x.data(), (int64_t)x.shape(0), out.data(), of_predictor);
}

void fired_in_experts(const Experts& op, nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu> out) {
  Experts::Selected last;
  {
    nb::gil_scoped_release release;
    last = op.recorded();
  }
  const size_t n = last.rows.size(), words = n ? last.fired.size() / n : 0, bytes = out.shape(1);
  require(n && out.shape(0) == n && bytes <= 2 * words, "out has another shape than what was recorded");
  for (size_t i = 0; i < n; i++)
    memcpy(out.data() + i * bytes, last.fired.data() + (size_t)last.rows[i] * words, bytes);
}

void fired_in_shared(const Experts& op, nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu> out) {
  Experts::Selected last;
  {
    nb::gil_scoped_release release;
    last = op.recorded();
  }
  const size_t tokens = out.shape(0), bytes = out.shape(1), words = tokens ? last.shared.size() / tokens : 0;
  require(words && tokens * words == last.shared.size() && bytes <= 2 * words,
          "out has another shape than what was recorded");
  for (size_t i = 0; i < tokens; i++) memcpy(out.data() + i * bytes, last.shared.data() + i * words, bytes);
}

Counts expert_counts(const Experts& op) {
  nb::gil_scoped_release release;
  const ExpertStore::Counts all = op.counts();
  Counts counts = counts_of(all.neurons);
  counts["sampled_tokens"] = all.recall.tokens;
  counts["sampled_active"] = all.recall.active;
  counts["sampled_found"] = all.recall.found;
  counts["predictor_rows"] = all.predictor_rows;
  return counts;
}

RestingExperts& resting_of(const Experts& op) {
  RestingExperts* const resting = op.store().resting();
  require(resting, "the experts are in memory");
  return *resting;
}

void make_expert_call(ExpertCall* call, std::shared_ptr<HostCalls> calls, std::shared_ptr<Experts> op, Program& program,
                      Floats2 x, Ints2 selected, Floats2 weights, OutFloats2 out, Ints places,
                      nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> tally, const std::string& part,
                      std::optional<Floats2> hidden) {
  const char* const PARTS[] = {"all", "order", "sum_ordered"};
  const size_t tokens = x.shape(0), some = (size_t)op->router().spec.top_k, experts = places.shape(0);
  check_expert_sum(*op, program, x, out);
  require(selected.shape(0) == tokens && selected.shape(1) == some && weights.shape(0) == tokens &&
              weights.shape(1) == some,
          "selected and weights must be [tokens, top_k]");
  require(tally.shape(0) == experts + 1, "tally must be [experts + 1]");
  for (size_t i = 0; i < experts; i++)
    require(places.data()[i] >= -1 && places.data()[i] < op->store().experts, "no such expert");
  const float* const of_predictor = hidden_of(*op, tokens, hidden);
  const auto own = (ExpertCall::Part)index_of(PARTS, 3, part, "part");
  new (call) ExpertCall(std::move(calls), std::move(op), program,
                        {x.data(), (int64_t)tokens, selected.data(), weights.data(), out.data(), (int64_t)experts,
                         places.data(), tally.data(), of_predictor},
                        own);
}

using Tally = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Swaps = std::vector<std::tuple<int32_t, int32_t, int32_t>>;

void check_layer(const ExpertPolicy& policy, int64_t layer, int64_t experts) {
  require(layer >= 0 && layer < policy.layers(), "no such layer");
  require(experts < 0 || experts == policy.experts(layer), "a layer has another number of experts");
}

Swaps swaps_of(const std::vector<ExpertPolicy::Swap>& swaps) {
  Swaps made;
  for (const ExpertPolicy::Swap& swap : swaps) made.emplace_back(swap.layer, swap.slot, swap.expert);
  return made;
}

void add_layer(ExpertPolicy& policy, nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu> start,
               nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> in_slot,
               nb::ndarray<bool, nb::ndim<1>, nb::c_contig, nb::device::cpu> outside) {
  const int64_t experts = (int64_t)start.shape(0);
  require(experts > 0 && (int64_t)outside.shape(0) == experts, "start and outside must be [experts]");
  for (size_t i = 0; i < in_slot.shape(0); i++)
    require(in_slot.data()[i] >= -1 && in_slot.data()[i] < experts, "no such expert");
  policy.add(start.data(), experts, in_slot.data(), (int64_t)in_slot.shape(0), outside.data());
}

Swaps observe_step(ExpertPolicy& policy, int64_t layer,
                   nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> uses, int64_t tokens) {
  check_layer(policy, layer, (int64_t)uses.shape(0));
  require(tokens > 0, "a step has tokens");
  return swaps_of(policy.observe(layer, uses.data(), tokens));
}

}  // namespace

void bind_expert_policy(nb::module_& m) {
  nb::class_<ExpertPolicy>(
      m, "ExpertPolicy",
      "The decisions of placement.experts.Policy, which says what the settings are, for all layers.\n\n"
      "recent: the priority of an expert is when it was selected last, else how often; decay: of what was counted, a\n"
      "token; factor: by which a priority must exceed that of the expert that leaves; prior: share of the priorities\n"
      "at first that counts forever; selected: only experts that a step selects come; turn, most: a layer exchanges "
      "up\n"
      "to `most` experts, in every turn-th step. A swap is (layer, slot, expert).")
      .def(
          "__init__",
          [](ExpertPolicy* policy, bool recent, double decay, double factor, double prior, bool selected, int64_t turn,
             int64_t most) {
            require(decay > 0 && decay < 1 && factor >= 1 && prior >= 0 && turn > 0 && most > 0,
                    "a policy's settings are out of their range");
            new (policy) ExpertPolicy({recent, decay, factor, prior, selected, turn, most});
          },
          nb::kw_only(), "recent"_a, "decay"_a, "factor"_a, "prior"_a, "selected"_a, "turn"_a, "most"_a)
      .def("add", &add_layer, "start"_a, "in_slot"_a.noconvert(), "outside"_a.noconvert(), nb::keep_alive<1, 3>(),
           nb::keep_alive<1, 4>(),
           "Add the next layer. start: float64 [experts], shares of the tokens; in_slot: int32 [slots], the expert in\n"
           "each, -1: none; outside: bool [experts], those without; both are kept up to date.")
      .def("observe", &observe_step, "layer"_a, "uses"_a, "tokens"_a,
           "The swaps after a step of that many tokens, of which `uses` selected each expert: int64 [experts].")
      .def(
          "watch",
          [](ExpertPolicy& policy, int64_t layer, Tally tally) {
            check_layer(policy, layer, (int64_t)tally.shape(0) - 1);
            policy.watch(layer, tally.data());
          },
          "layer"_a, "tally"_a.noconvert(), nb::keep_alive<1, 3>(),
          "Decide for a layer by its tally, as of ExpertCall, which only grows.")
      .def(
          "decide",
          [](ExpertPolicy& policy, int64_t tokens, int64_t limit) {
            require(tokens > 0 && limit >= 0, "a step has tokens");
            return swaps_of(policy.decide(tokens, limit));
          },
          "tokens"_a, "limit"_a,
          "The swaps after a step, of all layers that are watched, those that gain most; the layers in their order.")
      .def("forget", &ExpertPolicy::forget, "What the tallies got since the last time is no step.");
}

void bind_experts(nb::module_& m) {
  nb::class_<RouterSpec>(m, "RouterSpec", "How a token's experts, and their weights, follow from the router's logits.")
      .def(
          "__init__",
          [](RouterSpec* spec, int64_t top_k, const std::string& scoring, bool normalise, float scale,
             std::optional<Floats> correction, int64_t groups, int64_t top_groups, int64_t group_best,
             std::optional<Floats> bias, std::optional<Floats> factors, bool scales_input, float nearness) {
            const bool mixes = scoring == "sparsemixer";
            require(scoring == "softmax" || scoring == "sigmoid" || mixes,
                    "a router's scoring is softmax, sigmoid or sparsemixer");
            require(!mixes || (nearness >= 0 && !correction && groups == 1 && !normalise && scale == 1 && !factors),
                    "sparsemixer goes with no other setting of a router's weights");
            new (spec)
                RouterSpec{top_k,           scoring == "sigmoid",    normalise, scale,      vector_of(correction),
                           vector_of(bias), vector_of(factors),      groups,    top_groups, group_best,
                           scales_input,    mixes ? nearness : -1.0f};
          },
          "top_k"_a, "scoring"_a = "softmax", "normalise"_a = false, "scale"_a = 1.0f, "correction"_a = nb::none(),
          "groups"_a = 1, "top_groups"_a = 1, "group_best"_a = 1, "bias"_a = nb::none(), "factors"_a = nb::none(),
          "scales_input"_a = false, "nearness"_a = 0.0f,
          "correction: added to scores for the selection alone; bias: to the logits. Experts are selected in the\n"
          "top_groups best of `groups`; a group's score is the sum of its group_best best experts'. factors: of each\n"
          "expert, what its weight is multiplied by in the end. scales_input: weights multiply what experts\n"
          "read, not what they give. sparsemixer: nearness is what logits near each other differ by at most, half of\n"
          "it, in parts of the larger.");
  m.def(
      "route",
      [](const RouterSpec& spec, Floats logits) {
        const int64_t n = (int64_t)logits.shape(0);
        check_router(spec, n);
        Vector copy = vector_of(logits), scratch((size_t)n), weights((size_t)spec.top_k);
        std::vector<int32_t> selected((size_t)spec.top_k);
        route(spec, copy.data(), n, scratch.data(), selected.data(), weights.data());
        return std::make_pair(selected, weights);
      },
      "spec"_a, "logits"_a, "The experts of a token, in ascending order, and their weights; logits: [experts].");
  nb::class_<ExpertMatrices>(m, "ExpertMatrices", "Experts of one layer: matrices of all of them, one below the other.")
      .def(
          "__init__",
          [](ExpertMatrices* all, int64_t experts, int64_t neurons, const NeuronSpec& spec,
             std::shared_ptr<Matrix> gate, std::shared_ptr<Matrix> up, std::shared_ptr<Matrix> down,
             std::optional<Floats2> gate_bias, std::optional<Floats2> up_bias, std::optional<Floats2> down_bias,
             std::shared_ptr<NeuronSum> bundled, std::shared_ptr<Predictor> predictor, int64_t recall_every,
             std::optional<Ints> among, std::shared_ptr<Slots> slots, std::shared_ptr<Matrix> latent_in,
             std::shared_ptr<Matrix> latent_out) {
            require(spec.gate_bias.empty() && spec.up_bias.empty(), "biases of experts are not those of neurons");
            require(spec.limits.empty(), "neurons of experts have no thresholds of their own");
            require(bundled || (up && down), "experts need up and down, or bundles");
            new (all) ExpertMatrices{
                experts,
                neurons,
                spec.activation,
                std::move(gate),
                std::move(up),
                std::move(down),
                vectors_of(gate_bias),
                vectors_of(up_bias),
                vectors_of(down_bias),
                std::move(bundled),
                std::move(predictor),
                among ? std::vector<int32_t>(among->data(), among->data() + among->size()) : std::vector<int32_t>(),
                recall_every,
                std::move(slots),
                std::move(latent_in),
                std::move(latent_out)};
          },
          "experts"_a, "neurons"_a, "spec"_a, "gate"_a.none(), "up"_a.none(), "down"_a.none(),
          "gate_bias"_a = nb::none(), "up_bias"_a = nb::none(), "down_bias"_a = nb::none(), "bundled"_a = nb::none(),
          "predictor"_a = nb::none(), "recall_every"_a = 0, "among"_a = nb::none(), "slots"_a = nb::none(),
          "latent_in"_a = nb::none(), "latent_out"_a = nb::none(),
          "neurons: of each; rows of each are padded to LANES. spec: without biases, which are [experts, rows]. "
          "bundled:\n"
          "all neurons, one expert after another, in place of up and down; their gates are not read, but with a "
          "predictor,\n"
          "which selects among all of these neurons and takes the place of the matrix of gates. recall_every: steps "
          "between\n"
          "samples of its recall, 0: none. among: [experts * some], of each the neurons that it selects among, of "
          "which "
          "alone\n"
          "it has rows. slots: the experts rest on disk, their matrices are the parts; the three "
          "are\n"
          "of `disk_matrix` then, [experts * rows, k]; with `bundled`, of `expert_rows`, up alone. latent_in, "
          "latent_out: the experts read and give latents, which "
          "these\n"
          "make of the input, and the output of.");
  nb::class_<Experts, Op>(m, "Experts", "An FFN of experts.")
      .def("set_whole", &Experts::set_whole, "on"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Whether steps compute every neuron of the selected experts, where they could skip some.")
      .def("record", &Experts::record, "on"_a, "fired"_a = false, nb::call_guard<nb::gil_scoped_release>(),
           "Start or stop keeping what steps select; fired: and which neurons of it fired, of whole experts.")
      .def(
          "selected",
          [](const Experts& op) {
            Experts::Selected last;
            {
              nb::gil_scoped_release release;
              last = op.recorded();
            }
            return std::make_pair(std::move(last.experts), last.damaged);
          },
          "The experts of the last step's tokens, [tokens * top_k], those of a token ascending; empty before the\n"
          "first recorded one. And whether a weight was NaN or infinite.")
      .def("fired", &fired_in_experts, "out"_a.noconvert(),
           "out [tokens * top_k, bytes of an expert's neurons] = the neurons that fired in the last step, a bit each, "
           "in\n"
           "the order of `selected`.")
      .def("fired_shared", &fired_in_shared, "out"_a.noconvert(),
           "The same of the shared expert: out [tokens, bytes of its neurons].")
      .def("counts", &expert_counts,
           "As of NeuronSum; sampled_tokens, sampled_active, sampled_found; rows of the predictor's outer read.")
      .def("clear", &Experts::clear, nb::call_guard<nb::gil_scoped_release>(), "Reset the counters.")
      .def("foresee", &Experts::foresee, "after"_a, "router"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Small steps begin to read what `router`, about that of `after`, whose experts rest on disk, would select "
           "of\n"
           "this one's input.")
      .def_prop_ro(
          "uses",
          [](Experts& op) {
            std::vector<int32_t>& uses = resting_of(op).uses;
            return nb::ndarray<nb::numpy, int32_t, nb::ndim<1>>(uses.data(), {uses.size()}, nb::find(op));
          },
          "Of experts on disk: the tokens that selected each since someone wrote zeros; not while a step runs.")
      .def_prop_ro(
          "elsewhere",
          [](Experts& op) {
            std::vector<uint8_t>& elsewhere = resting_of(op).elsewhere;
            return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(elsewhere.data(), {elsewhere.size()}, nb::find(op));
          },
          "The same: not 0 for those that the caller computes elsewhere, which are not expected; to be written.")
      .def(
          "disk_counts",
          [](const Experts& op) {
            const RestingExperts::Stats s = resting_of(op).stats();
            return std::map<std::string, int64_t>{
                {"wanted", s.wanted}, {"hits", s.hits}, {"guessed", s.guessed}, {"right", s.right}, {"rows", s.later}};
          },
          "Of experts on disk, not while a step runs: wanted, hits; guessed: read because they were expected;\n"
          "right: of these, needed; rows: bytes of rows of down that were read, of those told apart.")
      .def("sum", &sum_experts, "program"_a, "x"_a, "selected"_a, "weights"_a, "out"_a, "hidden"_a = nb::none(),
           "out = the weighted sum of each token's experts; x and out: [tokens, d_model].\n\n"
           "selected, weights: [tokens, top_k]; -1 selects none; hidden: [tokens, rank], for a predictor without its\n"
           "first matrix. False where no expert is selected: out is zero, and nothing was computed.")
      .def("order", &order_experts, "program"_a, "selected"_a, "weights"_a,
           "The first part of `sum`, which does not need x; nothing else of the program may run before sum_ordered.")
      .def("fetch", &Experts::fetch, "program"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Between the two: read a part of the weights into the caches. False once they hold what they can.")
      .def("sum_ordered", &sum_ordered_experts, "program"_a, "x"_a, "out"_a, "hidden"_a = nb::none(),
           "The second part of `sum`.");
}

void bind_expert_call(nb::module_& m) {
  nb::class_<ExpertCall, HostCall>(
      m, "ExpertCall",
      "Experts.sum, of arrays that it keeps: of those that the CPU has.\n\n"
      "selected: [tokens, top_k], with the layer's numbers; places: [experts], of each its\n"
      "number among the CPU's, -1: it is not there; tally: int64 [experts + 1], added to:\n"
      "tokens that select each, and selections that the CPU does not have. part: \"all\", or\n"
      "\"order\" and \"sum_ordered\" as of Experts, of which the first fetches, too.")
      .def("__init__", &make_expert_call, "calls"_a, "experts"_a, "program"_a, "x"_a.noconvert(),
           "selected"_a.noconvert(), "weights"_a.noconvert(), "out"_a.noconvert(), "places"_a.noconvert(),
           "tally"_a.noconvert(), "part"_a, "hidden"_a.noconvert() = nb::none(), nb::keep_alive<1, 4>(),
           nb::keep_alive<1, 5>(), nb::keep_alive<1, 6>(), nb::keep_alive<1, 7>(), nb::keep_alive<1, 8>(),
           nb::keep_alive<1, 9>(), nb::keep_alive<1, 10>(), nb::keep_alive<1, 12>());
}

void bind_early_router(nb::module_& m) {
  nb::class_<EarlyRouter, Op>(m, "EarlyRouter", "Selects experts before attention.")
      .def("foresee", &EarlyRouter::foresee, "of"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Begin to read what it selects, of experts on disk.");
}
