#include "bindings.h"

#include "cpu.h"
#include "levels.h"

namespace {

void bind_constants(nb::module_& m) {
  m.doc() =
      "The native module: packed weights, kernels of every instruction-set level, and programs of fused operators.\n\n"
      "Arrays are C-contiguous and of exactly the type written here. Wrong shapes, names and numbers are ValueErrors.";
  m.attr("PAGE") = (int)PI_PAGE;
  m.attr("LANES") = (int)PI_LANES;
  m.attr("CHUNK") = (int)PI_CHUNK;  // tokens that Mamba2 computes together
  std::vector<std::string> types;
  for (const PiTypeFacts& type : PI_TYPES) types.push_back(type.name);
  m.attr("TYPES") = nb::cast(types);
  m.attr("ACTIVATIONS") = nb::cast(std::vector<std::string>(ACTIVATIONS, ACTIVATIONS + PI_N_ACTS));
#define PI_NAME(type, name, neutral) #name,
  m.attr("ATTENTION_SETTINGS") = nb::cast(std::vector<std::string>{PI_ATTENTION_SETTINGS(PI_NAME)});
#undef PI_NAME
  m.attr("KV_TYPES") = nb::cast(std::vector<std::string>(KV_TYPES, KV_TYPES + PI_N_KV_TYPES));
}

void bind_levels(nb::module_& m) {
  m.def(
      "levels",
      [] {
        std::vector<std::string> names;
        for (const PiKernels* level : supported_levels()) names.push_back(level->name);
        return names;
      },
      "Instruction-set levels that this build has and this CPU runs, best first.");
  m.def("cpu_levels", &cpu_levels, "Levels that this CPU runs, whether this build has them or not, best first.");
  m.def(
      "find_level", [](const std::string& name) { return std::string(find_level(name)->name); }, "name"_a,
      "The level of that name, the best for an empty one; ValueError if it cannot run here.");
  m.def(
      "panel_bytes", [](const std::string& type, int64_t k) { return pi_panel_bytes(type_of(type), k); }, "type"_a,
      "k"_a, "Bytes of 16 packed rows of k columns.");
  m.def(
      "kv_page_bytes",
      [](const std::string& type, int64_t kv_heads, int64_t head_dim, int64_t latents) {
        return kv_heads * pi_kv_head_bytes(index_of(KV_TYPES, PI_N_KV_TYPES, type, "KV type"),
                                           pi_round_up(head_dim, PI_LANES), latents > 0);
      },
      "type"_a, "kv_heads"_a, "head_dim"_a, "latents"_a = 0,
      "Bytes of one layer in a page of 32 tokens; latents: as of Cache.");
}

void bind_pool(nb::module_& m) {
  nb::class_<Pool>(m, "Pool")
      .def(
          "__init__",
          [](Pool* pool, int threads) {
            require(threads >= 1 && threads <= 1024, "the number of threads must lie between 1 and 1024");
            new (pool) Pool(threads);
          },
          "threads"_a)
      .def("keep_awake", &Pool::keep_awake,
           "Threads do not park until let_park() is called as often: to wake them takes longer than a small job.")
      .def("let_park", &Pool::let_park)
      .def_prop_ro("threads", &Pool::threads)
      .def_prop_ro("barriers", &Pool::barriers, nb::call_guard<nb::gil_scoped_release>(),
                   "The number of times so far that all threads have waited for each other.");
}

}  // namespace

NB_MODULE(_native, m) {
  bind_constants(m);
  bind_levels(m);
  bind_pool(m);
  bind_reads(m);
  bind_slots(m);
  bind_window(m);
  bind_matrix(m);
  bind_bundle_rows(m);
  bind_neuron_spec(m);
  bind_bundles(m);
  bind_table(m);
  bind_norm(m);
  bind_cache(m);
  bind_states(m);
  bind_workspace(m);
  bind_neuron_sum(m);
  bind_host_calls(m);
  bind_predictor(m);
  bind_dense_neurons(m);
  bind_ffn(m);
  bind_experts(m);
  bind_early_router(m);
  bind_watch(m);
  bind_sampling(m);
  bind_program(m);
  bind_expert_call(m);
  bind_expert_policy(m);
}
