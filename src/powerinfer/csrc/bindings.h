// The files bind*.cpp alone know Python; this is what they share.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <stdexcept>
#include <string>

#include "bundles.h"
#include "neuron_sum.h"
#include "panels.h"
#include "pool.h"
#include "weights.h"
#include "workspace.h"

namespace nb = nanobind;
using namespace nb::literals;

// An array of another type or layout is copied on its way in. Where the copy would be written to, or kept, its argument
// says noconvert.
using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes2 = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using OutBytes2 = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats2 = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using OutFloats2 = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using PanelBytes = nb::ndarray<nb::numpy, const uint8_t, nb::ndim<2>>;
using CacheBytes = nb::ndarray<nb::numpy, uint8_t, nb::ndim<3>>;
using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Doubles2 = nb::ndarray<const double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Ints2 = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

inline const char* const ACTIVATIONS[PI_N_ACTS + 1] = {
    "silu",      "relu", "relu2", "fatrelu", "drelu",
    "gelu_tanh", "cats", "topk",  "xielu",   "swiglu_oai"};  // the last is of experts alone
inline const char* const KV_TYPES[PI_N_KV_TYPES] = {"f32", "f16", "q8_0"};

inline int index_of(const char* const* names, int n, const std::string& name, const char* what) {
  for (int i = 0; i < n; i++)
    if (name == names[i]) return i;
  throw std::invalid_argument(std::string(what) + " '" + name + "' has no native kernel");
}

inline int type_of(const std::string& name) {
  for (int i = 0; i < PI_N_TYPES; i++)
    if (name == PI_TYPES[i].name) return i;
  throw std::invalid_argument("type '" + name + "' has no native kernel");
}

inline void require(bool good, const std::string& what) {
  if (!good) throw std::invalid_argument(what);
}

inline void check_stored(int type, int64_t rows, int64_t k, int64_t bytes) {
  require(rows > 0 && k > 0 && rows < (int64_t)1 << 31 && k < (int64_t)1 << 31,
          "a matrix needs between 1 and 2^31 rows and columns");
  require(k % pi_block(type) == 0, "the columns of a quantised matrix must be whole blocks");
  require(bytes == rows * stored_row_bytes(type, k), "the data has another size than its shape and type say");
}

// Reads settings of attention off a configuration, which has one of them at least.
template <>
struct nanobind::detail::type_caster<PiAttentionSettings> {
  NB_TYPE_CASTER(PiAttentionSettings, const_name("powerinfer.config.AttentionKind"))

  bool from_python(handle config, uint8_t flags, cleanup_list* cleanup) noexcept {
    bool any = false;
#define PI_READ(type, name, neutral) any |= hasattr(config, #name);
    PI_ATTENTION_SETTINGS(PI_READ)
#undef PI_READ
#define PI_READ(type, name, neutral) any = any && read(config, #name, value.name, flags, cleanup);
    PI_ATTENTION_SETTINGS(PI_READ)
#undef PI_READ
    return any;
  }

 private:
  // False if the attribute is of another type; the setting stays as it is where there is none.
  template <class T>
  static bool read(handle config, const char* name, T& setting, uint8_t flags, cleanup_list* cleanup) noexcept {
    const object attribute = getattr(config, name, none());
    make_caster<T> caster;
    if (attribute.is_none()) return true;
    if (!caster.from_python(attribute, flags, cleanup)) return false;
    setting = caster.value;
    return true;
  }
};

inline Norm norm_of(const Norm* norm) { return norm ? *norm : Norm(); }

inline Vector vector_of(const std::optional<Floats>& a) {
  return a ? Vector(a->data(), a->data() + a->shape(0)) : Vector();
}

// Numbers 0 to n - 1 in another order; empty where there is none.
inline std::vector<int32_t> order_of(const std::optional<Ints>& order, int64_t n) {
  if (!order) return {};
  require((int64_t)order->shape(0) == n, "an order has another length than its rows");
  std::vector<bool> used((size_t)n);
  for (int64_t i = 0; i < n; i++) {
    const int32_t at = order->data()[i];
    require(at >= 0 && at < n && !used[(size_t)at], "an order has every number once");
    used[(size_t)at] = true;
  }
  return {order->data(), order->data() + n};
}

// Calls work(), which touches what jobs use, while no job runs; other threads of Python run while it waits.
template <class Work>
inline void between_jobs(const Workspace& workspace, const Work& work) {
  nb::gil_scoped_release release;
  workspace.pool->between_jobs(work);
}

using Counts = std::map<std::string, int64_t>;

inline Counts counts_of(const NeuronStats& s) {
  return {{"steps", s.steps},           {"tokens", s.tokens},
          {"active", s.active},         {"candidates", s.candidates},
          {"first_rows", s.first_rows}, {"up_rows", s.up_rows},
          {"down_rows", s.down_rows},   {"shared_scales", s.shared_scales}};
}

// Classes are bound before what takes them as arguments, so that docstrings name them.
void bind_reads(nb::module_& m);
void bind_slots(nb::module_& m);
void bind_window(nb::module_& m);
void bind_matrix(nb::module_& m);
void bind_bundle_rows(nb::module_& m);
void bind_neuron_spec(nb::module_& m);
void bind_bundles(nb::module_& m);
void bind_table(nb::module_& m);
void bind_norm(nb::module_& m);
void bind_cache(nb::module_& m);
void bind_states(nb::module_& m);
void bind_workspace(nb::module_& m);
void bind_neuron_sum(nb::module_& m);
void bind_host_calls(nb::module_& m);
void bind_predictor(nb::module_& m);
void bind_dense_neurons(nb::module_& m);
void bind_ffn(nb::module_& m);
void bind_experts(nb::module_& m);
void bind_early_router(nb::module_& m);
void bind_watch(nb::module_& m);
void bind_program(nb::module_& m);
void bind_sampling(nb::module_& m);
void bind_expert_call(nb::module_& m);
void bind_expert_policy(nb::module_& m);
