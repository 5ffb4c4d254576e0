// FFNs and their parts, the calls of a GPU, predictors, and what is counted of neurons.
#include <algorithm>

#include "answering_thread.h"
#include "bindings.h"
#include "bundle_panels.h"
#include "dense_neurons.h"
#include "ffn.h"
#include "guesses.h"
#include "neuron_sum.h"
#include "predictor.h"
#include "program.h"
#include "slots.h"
#include "sum_calls.h"
#include "watch.h"

namespace {

const char* const WAYS[N_WAYS] = {"dense", "exact", "predicted"};

void check_neuron_sum(const NeuronSum& sum, const Floats2& x, const OutFloats2& out,
                      const std::optional<Bytes2>& selected) {
  const size_t k = (size_t)sum.bundles->up.k, tokens = x.shape(0), neurons = sum.bundles->members.size();
  require(tokens > 0 && x.shape(1) == k && out.shape(0) == tokens && out.shape(1) == k,
          "x and out must be [tokens, d_model]");
  require(!selected || (selected->shape(0) == tokens && selected->shape(1) == neurons),
          "selected must be [tokens, neurons]");
}

bool neuron_sum(NeuronSum& sum, Floats2 x, OutFloats2 out, std::optional<Bytes2> selected,
                std::optional<Floats> weight) {
  const size_t tokens = x.shape(0);
  check_neuron_sum(sum, x, out, selected);
  require(!weight || weight->shape(0) == tokens, "weight must be [tokens]");
  nb::gil_scoped_release release;
  return sum.sum(x.data(), (int64_t)tokens, selected ? selected->data() : nullptr, weight ? weight->data() : nullptr,
                 out.data());
}

void make_neuron_call(NeuronCall* call, std::shared_ptr<HostCalls> calls, std::shared_ptr<NeuronSum> sum, Floats2 x,
                      OutFloats2 out, std::optional<Bytes2> selected) {
  check_neuron_sum(*sum, x, out, selected);
  const float* const in = x.data();
  new (call) NeuronCall(std::move(calls), std::move(sum), in, (int64_t)x.shape(0),
                        selected ? selected->data() : nullptr, out.data());
}

using Number = nb::ndarray<uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void make_host_flags(HostFlags* flags, Number asked, Number answered, double patience) {
  require(asked.shape(0) == 1 && answered.shape(0) == 1, "a flag is one number");
  require(patience > 0, "a watchdog waits for some time");
  new (flags) HostFlags(asked.data(), answered.data(), patience);
}

Counts sum_counts(const NeuronSum& sum) {
  nb::gil_scoped_release release;
  return counts_of(sum.stats());
}

void take_fired(NeuronSum& sum, nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> out) {
  require(out.shape(0) == sum.bundles->members.size(), "out has another number of neurons");
  nb::gil_scoped_release release;
  sum.take_fired(out.data());
}

int64_t take_ffn_fired(Ffn& ffn, nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> out) {
  require((int64_t)out.shape(0) == ffn.neurons(), "out has another number of neurons");
  nb::gil_scoped_release release;
  return ffn.take_fired(out.data());
}

void set_ways(Ffn& ffn, const std::vector<std::string>& names) {
  require(names.size() == PI_NEURON_TOKENS, "a way is needed for each number of tokens");
  Way ways[PI_NEURON_TOKENS];
  for (size_t i = 0; i < names.size(); i++) ways[i] = (Way)index_of(WAYS, N_WAYS, names[i], "way");
  nb::gil_scoped_release release;
  ffn.set_ways(ways);
}

Counts ffn_counts(const Ffn& ffn) {
  nb::gil_scoped_release release;
  const Ffn::Counts all = ffn.counts();
  Counts counts = counts_of(all.neurons);
  counts["exact_steps"] = all.exact_steps;
  counts["sampled_tokens"] = all.recall.tokens;
  counts["sampled_active"] = all.recall.active;
  counts["sampled_found"] = all.recall.found;
  return counts;
}

}  // namespace

void bind_neuron_sum(nb::module_& m) {
  nb::class_<NeuronSum>(
      m, "NeuronSum",
      "A part of an FFN: some neurons of one layer, and the sum that they add to the output.\n\n"
      "threshold: activations up to this magnitude count as zero; count_fired: for each neuron, too, the\n"
      "tokens that it fires for. Steps of up to NEURON_TOKENS tokens are counted.")
      .def(nb::init<std::shared_ptr<Workspace>, std::shared_ptr<Bundles>, float, bool>(), "workspace"_a, "bundles"_a,
           "threshold"_a = 0.0f, "count_fired"_a = false)
      .def("sum", &neuron_sum, "x"_a, "out"_a.noconvert(), "selected"_a = nb::none(), "weight"_a = nb::none(),
           "out = weight * the sum of the selected neurons; x and out: [tokens, d_model].\n\n"
           "selected: [tokens, neurons], not zero where a token selects a neuron, None: all; weight: [tokens], 0: the\n"
           "token selects none, None: 1. False where no neuron is selected: out is zero, nothing was computed.")
      .def_prop_ro("neurons", [](const NeuronSum& sum) { return sum.bundles->members.size(); })
      .def(
          "matrix",
          [](const NeuronSum& sum, const std::string& part, int64_t first, int64_t neurons) {
            const char* const PARTS[] = {"gate", "up", "down"};
            const auto own = (BundlePart)index_of(PARTS, 3, part, "part");
            return std::make_shared<Matrix>(bundle_matrix(sum.bundles, own, first, neurons));
          },
          "part"_a, "first"_a, "neurons"_a,
          "\"gate\", \"up\" or \"down\" of some neurons as a matrix that is made of the bundles as it is multiplied.")
      .def(
          "keep",
          [](NeuronSum& sum, Ints members) {
            std::vector<int32_t> own(members.data(), members.data() + members.shape(0));
            nb::gil_scoped_release release;
            sum.keep(std::move(own));
          },
          "members"_a,
          "Of neurons on disk: only these, int32 ascending, are summed from now on, and of these are `selected`\n"
          "and `take_fired`. Where their first rows are not read, `add_firsts` gives them before they are summed.")
      .def(
          "add_firsts",
          [](NeuronSum& sum, Bytes2 rows) {
            const PiRows& first = sum.bundles->first();
            require((int64_t)rows.shape(1) == pi_row_bytes(first.type, first.k), "the rows have another length");
            nb::gil_scoped_release release;
            sum.add_firsts(rows.data(), (int64_t)rows.shape(0));
          },
          "rows"_a, "The first rows of the next n that `keep` has, uint8 [n, bytes]: copied.")
      .def_prop_ro(
          "uses",
          [](NeuronSum& sum) {
            return nb::ndarray<nb::numpy, int32_t, nb::ndim<1>>(sum.uses.data(), {sum.uses.size()}, nb::find(sum));
          },
          "Of neurons on disk: steps that summed each, until they are reset here, between steps.")
      .def(
          "disk_counts",
          [](const NeuronSum& sum) {
            require(sum.guesses != nullptr, "the neurons are in memory");
            const Guesses::Stats s = sum.guesses->stats();
            const Slots::Stats all = sum.bundles->slots->stats();
            return std::map<std::string, int64_t>{
                {"wanted", all.wanted}, {"hits", all.hits - all.early}, {"guessed", s.guessed}, {"right", s.right}};
          },
          "Of neurons on disk, not while a step runs: wanted, hits; guessed: read because they were expected; right: "
          "of\n"
          "these, needed.")
      .def("counts", &sum_counts,
           "steps, tokens and, summed over tokens, neurons active and candidates (computed); rows of bundles read.\n\n"
           "Waits until no job runs, like the others that read or reset counters: all of a job is counted, or nothing.")
      .def("take_fired", &take_fired, "out"_a.noconvert(),
           "out = tokens that each neuron fired for since the last call, [neurons].")
      .def("clear", &NeuronSum::clear, nb::call_guard<nb::gil_scoped_release>(), "Reset the counters.");
  m.def(
      "least_slots", [](const Workspace& w, int64_t neurons) { return NeuronSum::least_slots(*w.pool, neurons); },
      "workspace"_a, "neurons"_a, "The fewest slots with which a layer's neurons on disk can be summed.");
}

void bind_host_calls(nb::module_& m) {
  nb::class_<HostCalls>(m, "HostCalls", "What the functions share that a GPU's stream calls. They run one at a time.")
      .def(nb::init<>())
      .def_prop_ro("made", &HostCalls::made, "Calls so far.")
      .def("begin", &HostCalls::begin,
           "A step begins: the CPU waits for its first call, and what failed in earlier ones is void.")
      .def("take_failure", &HostCalls::take_failure,
           "What the first call that failed since said, once; empty: none did.");
  nb::class_<HostCall>(
      m, "HostCall",
      "A function, void (*)(void*), and its argument, for a GPU's stream to call without Python: their\n"
      "addresses, valid as long as this object is there. By itself it computes nothing. It does not\n"
      "throw: after a failure its result is zeros, and HostCalls has what went wrong.")
      .def(nb::init<std::shared_ptr<HostCalls>>(), "calls"_a)
      .def_prop_ro("function", [](const HostCall&) { return (uintptr_t)&HostCall::run; })
      .def_prop_ro("data", [](HostCall& call) { return (uintptr_t)&call; })
      .def(
          "take",
          [](HostCall& call) {
            const HostCall::Done done = call.take();
            return std::make_tuple(done.calls, done.jobs, done.waited, done.worked);
          },
          "Since the last time, not while a step runs: calls, those of them that had something to compute, and "
          "seconds\n"
          "that the CPU waited before them, and that it computed.");
  nb::class_<NeuronCall, HostCall>(m, "NeuronCall", "NeuronSum.sum, of arrays that it keeps.")
      .def("__init__", &make_neuron_call, "calls"_a, "sum"_a, "x"_a.noconvert(), "out"_a.noconvert(),
           "selected"_a.noconvert() = nb::none(), nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>(),
           nb::keep_alive<1, 6>());
  nb::class_<HostFlags>(
      m, "HostFlags",
      "Two numbers, uint32 [1] each, in memory that a GPU sees, too: the last call of the CPU that it asks\n"
      "for in a step, and the last one that is answered. A watchdog releases a GPU that waits for an answer\n"
      "for longer than `patience` seconds.")
      .def("__init__", &make_host_flags, "asked"_a.noconvert(), "answered"_a.noconvert(), "patience"_a,
           nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>())
      .def("begin", &HostFlags::begin, "A step begins; nothing of the last one is under way.")
      .def(
          "wait", [](const HostFlags& flags, uint32_t number, double seconds) { return flags.wait(number, seconds); },
          nb::call_guard<nb::gil_scoped_release>(), "number"_a, "seconds"_a,
          "Wait for the GPU to ask for a call, for so many seconds at most: whether it has.")
      .def("answered", &HostFlags::is_answered, "number"_a, "Whether that call is answered, by the host or a GPU.")
      .def("answer", &HostFlags::answer, "number"_a, "That call's result is written.")
      .def("release", &HostFlags::release, "Let the GPU go on without answers, to the end of a step that has failed.")
      .def_prop_ro("released", &HostFlags::is_released, "Whether the GPU goes on without answers.")
      .def("set_patience", &HostFlags::set_patience, "seconds"_a);
  nb::class_<FlaggedCalls>(m, "FlaggedCalls", "The calls of a recording, in the order in which the GPU asks for them.")
      .def(nb::init<std::shared_ptr<HostFlags>>(), "flags"_a)
      .def("add", &FlaggedCalls::add, "number"_a, "call"_a, "One more, with a higher number than the last one.")
      .def("begin", &FlaggedCalls::begin, "The recording is replayed.")
      .def(
          "answer", [](FlaggedCalls& calls, double seconds) { return calls.answer(seconds); },
          nb::call_guard<nb::gil_scoped_release>(), "seconds"_a,
          "Make and answer the calls that are left, but those that the GPU has answered itself. False: it has not\n"
          "asked for the next one for so many seconds. Once it is released, nothing is left.")
      .def("__len__", &FlaggedCalls::size);
  nb::class_<AnsweringThread>(
      m, "AnsweringThread",
      "A thread that makes and answers the calls of a recording in place of the one that replayed it. It sleeps\n"
      "but between `start` and `take_back`, and ends with this object.")
      .def(nb::init<>())
      .def("start", &AnsweringThread::start, nb::call_guard<nb::gil_scoped_release>(), "calls"_a, "seconds"_a,
           "Let it make and answer those that are left, until the GPU has not asked for so many seconds. Until\n"
           "`take_back` the calls, and the pool that computes them, are its own.")
      .def("take_back", &AnsweringThread::take_back, nb::call_guard<nb::gil_scoped_release>(),
           "Wait for the call that it makes, if it does: whoever calls this answers what is left.")
      .def_prop_ro("answers", &AnsweringThread::answers, "Whether it makes, or waits for, calls.");
}

void bind_predictor(nb::module_& m) {
  nb::class_<Predictor>(
      m, "Predictor",
      "Predicts which neurons of an FFN fire: candidates are those with z >= threshold, or the `floor`\n"
      "largest where these are fewer; z = outer . relu(inner . x), x before the FFN's norm.\n\n"
      "inner: [rank, d_model], None: it is given relu(inner . x); outer: [neurons, rank].")
      .def(nb::init<std::shared_ptr<Matrix>, std::shared_ptr<Matrix>, float, int64_t>(), "inner"_a.none(), "outer"_a,
           "threshold"_a = 0.0f, "floor"_a = 0)
      .def_prop_ro("inner_nbytes", [](const Predictor& p) { return p.in ? p.in->bytes() : 0; })
      .def_prop_ro("outer_nbytes", [](const Predictor& p) { return p.out->bytes(); })
      .def_prop_ro("nbytes", [](const Predictor& p) { return (p.in ? p.in->bytes() : 0) + p.out->bytes(); });
}

void bind_dense_neurons(nb::module_& m) {
  nb::class_<DenseNeurons>(m, "DenseNeurons", "A part of an FFN: neurons of one layer as matrices.")
      .def(
          "__init__",
          [](DenseNeurons* neurons, const NeuronSpec& spec, std::shared_ptr<Matrix> gate, std::shared_ptr<Matrix> up,
             std::shared_ptr<Matrix> down, const Norm* inner) {
            new (neurons) DenseNeurons(spec, std::move(gate), std::move(up), std::move(down), norm_of(inner));
          },
          "spec"_a, "gate"_a.none(), "up"_a, "down"_a, "inner"_a = nb::none(), "inner: norm of h, before down.");
}

void bind_ffn(nb::module_& m) {
  nb::class_<FfnSpec>(m, "FfnSpec", "What an FFN does around the sum of its neurons.")
      .def(
          "__init__",
          [](FfnSpec* spec, const Norm* norm, const Norm* out_norm, std::optional<Floats> down_bias) {
            new (spec) FfnSpec{norm_of(norm), norm_of(out_norm), vector_of(down_bias)};
          },
          "norm"_a = nb::none(), "out_norm"_a = nb::none(), "down_bias"_a = nb::none());

  nb::class_<Op>(m, "Operator", "An operator of a program, the number-th that it runs.").def_ro("number", &Op::number);
  nb::class_<Ffn, Op>(m, "Ffn", "An FFN that has its neurons as matrices, as bundles, or both.")
      .def(
          "set_bundled",
          [](Ffn& ffn, std::shared_ptr<NeuronSum> bundled, std::shared_ptr<Predictor> predictor, int64_t recall_every) {
            nb::gil_scoped_release release;
            ffn.set_bundled(std::move(bundled), std::move(predictor), recall_every);
          },
          "bundled"_a, "predictor"_a = nb::none(), "recall_every"_a = 0,
          "Replace its neurons as bundles, and the predictor that selects among them; counters and ways are reset.\n\n"
          "recall_every: steps between samples of the predictor's recall, 0: none.")
      .def_prop_rw(
          "dense_above", &Ffn::dense_above,
          [](Ffn& ffn, double share) {
            nb::gil_scoped_release release;
            ffn.set_dense_above(share);
          },
          "The share of firing neurons above which an exact step reads up and down from the matrices.")
      .def("foresee", &Ffn::foresee, "after"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Steps in which both use predictors begin to read neurons of `after` that rest on disk, those that its\n"
           "predictor selects of this one's input.")
      .def("set_ways", &set_ways, "ways"_a,
           "How steps of 1, 2, .. NEURON_TOKENS tokens run: \"dense\" (the default where there are matrices),\n"
           "\"exact\" or \"predicted\".")
      .def("counts", &ffn_counts, "As of NeuronSum, and exact_steps, sampled_tokens, sampled_active, sampled_found.")
      .def("count_fired", &Ffn::count_fired, "on"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Start or stop counting, for each neuron, the tokens that it fires for, in steps of up to NEURON_TOKENS.")
      .def("take_fired", &take_ffn_fired, "out"_a.noconvert(),
           "out = tokens that each neuron fired for since the last call, [neurons]; returns the number of tokens.")
      .def("clear", &Ffn::clear, nb::call_guard<nb::gil_scoped_release>(), "Reset the counters.");
}

void bind_watch(nb::module_& m) {
  auto watch =
      nb::class_<Watch>(m, "Watch",
                        "Records of a program's FFNs: views of its own memory, overwritten when the next FFN runs.")
          .def(
              "__init__",
              [](Watch* watch, const Program& p) {
                new (watch) Watch(p.workspace->kernels, p.sizes.d_ff, p.sizes.max_tokens, p.workspace->pool->threads());
              },
              "program"_a)
          .def_rw("gate", &Watch::gate)
          .def_rw("silence", &Watch::silence)
          .def_rw("measure", &Watch::measure)
          .def_prop_rw(
              "threshold", [](const Watch& w) { return w.threshold; },
              [](Watch& w, float threshold) {
                require(threshold >= 0, "a threshold is negative or NaN");
                w.threshold = threshold;
              })
          .def("clear", &Watch::clear)
          .def_prop_ro("damaged",
                       [](const Watch& w) {
                         return std::any_of(w.damaged.begin(), w.damaged.end(), [](char one) { return one != 0; });
                       })
          .def_prop_ro("counts",
                       [](Watch& w) {
                         return nb::ndarray<nb::numpy, const int64_t, nb::ndim<1>>(w.counts.data(), {(size_t)w.d_ff},
                                                                                   nb::find(w));
                       })
          .def_prop_ro("magnitudes",
                       [](Watch& w) {
                         return nb::ndarray<nb::numpy, const int64_t, nb::ndim<2>>(
                             w.magnitudes.data(), {w.damaged.size(), (size_t)Watch::BINS}, nb::find(w));
                       })
          .def(
              "active",
              [](Watch& w, int64_t tokens) {
                require(tokens > 0 && tokens <= w.max_tokens, "a step takes between 1 and max_tokens tokens");
                return nb::ndarray<nb::numpy, const uint8_t, nb::ndim<2>>(
                    w.bits.data(), {(size_t)tokens, (size_t)((w.d_ff + 7) / 8)}, nb::find(w), {2 * w.words, 1});
              },
              "tokens"_a);
  watch.attr("BINS_PER_OCTAVE") = (int)Watch::PER_OCTAVE;
  watch.attr("LOWEST_OCTAVE") = (int)Watch::LOW;
}
