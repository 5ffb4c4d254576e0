// The only file that knows Python.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <string.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <stdexcept>

#include "bundles.h"
#include "delta_net.h"
#include "experts.h"
#include "ffn.h"
#include "host_calls.h"
#include "latent_attention.h"
#include "levels.h"
#include "neuron_sum.h"
#include "panels.h"
#include "pool.h"
#include "program.h"
#include "reads.h"
#include "slots.h"
#include "window.h"
#include "workspace.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

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
using Ints2 = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

const char* const TYPES[PI_N_TYPES] = {"F32",  "F16",  "BF16", "Q8_0", "Q4_0",   "Q4_1",   "Q5_0",
                                       "Q5_1", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"};
const char* const ACTIVATIONS[PI_N_ACTS + 1] = {
    "silu",      "relu", "relu2", "fatrelu",   "drelu",
    "gelu_tanh", "cats", "topk",  "swiglu_oai"};  // the last is of experts alone
const char* const KV_TYPES[PI_N_KV_TYPES] = {"f32", "f16", "q8_0"};

int index_of(const char* const* names, int n, const std::string& name, const char* what) {
  for (int i = 0; i < n; i++)
    if (name == names[i]) return i;
  throw std::invalid_argument(std::string(what) + " '" + name + "' has no native kernel");
}

int type_of(const std::string& name) { return index_of(TYPES, PI_N_TYPES, name, "type"); }

void require(bool good, const std::string& what) {
  if (!good) throw std::invalid_argument(what);
}

void check_stored(int type, int64_t rows, int64_t k, int64_t bytes) {
  require(rows > 0 && k > 0 && rows < (int64_t)1 << 31 && k < (int64_t)1 << 31,
          "a matrix needs between 1 and 2^31 rows and columns");
  require(k % pi_block(type) == 0, "the columns of a quantised matrix must be whole blocks");
  require(bytes == rows * stored_row_bytes(type, k), "the data has another size than its shape and type say");
}

Norm norm_of(const Norm* norm) { return norm ? *norm : Norm(); }

Vector vector_of(const std::optional<Floats>& a) { return a ? Vector(a->data(), a->data() + a->shape(0)) : Vector(); }

// Its rows, padded to whole panels.
std::vector<Vector> vectors_of(const std::optional<Floats2>& a) {
  std::vector<Vector> rows;
  for (size_t i = 0; a && i < a->shape(0); i++)
    rows.push_back(padded(Vector(a->data() + i * a->shape(1), a->data() + (i + 1) * a->shape(1))));
  return rows;
}

std::shared_ptr<Matrix> pack_matrix(Pool& pool, std::shared_ptr<Arena> arena, const std::string& type_name,
                                    int64_t rows, int64_t k, Bytes data, std::optional<Ints> map) {
  const int type = type_of(type_name);
  check_stored(type, rows, k, (int64_t)data.shape(0));
  auto m = std::make_shared<Matrix>();
  m->type = type;
  m->rows = map ? (int64_t)map->shape(0) : rows;
  m->k = k;
  m->panels = (m->rows + PI_LANES - 1) / PI_LANES;
  uint8_t* dst = arena->allocate(m->bytes());
  m->data = dst;
  m->arena = std::move(arena);
  nb::gil_scoped_release release;
  pool.run([&](int thread) {
    const Columns mine(*m, pool, thread);
    pack_panels(type, data.data(), rows, k, map ? map->data() : nullptr, m->rows, dst, mine.p0, mine.p1);
  });
  return m;
}

std::shared_ptr<Matrix> disk_matrix(const std::string& type_name, int64_t rows, int64_t k, int file, int64_t offset,
                                    std::optional<Ints> map) {
  const int type = type_of(type_name);
  const int64_t bytes = rows * stored_row_bytes(type, k);
  check_stored(type, rows, k, bytes);
  auto m = std::make_shared<Matrix>();
  m->type = type;
  m->rows = map ? (int64_t)map->shape(0) : rows;
  m->k = k;
  m->panels = (m->rows + PI_LANES - 1) / PI_LANES;
  m->data = nullptr;
  std::vector<int32_t> of_rows;
  if (map) of_rows.assign(map->data(), map->data() + map->shape(0));
  m->disk = std::make_shared<OnDisk>(OnDisk{file, offset, bytes, rows, std::move(of_rows)});
  return m;
}

// Packs other rows in the place of those from `first` on, which begins a panel.
void repack(Pool& pool, Matrix& m, int64_t first, int64_t rows, Bytes data) {
  require(m.data, "the matrix rests on disk");
  check_stored(m.type, rows, m.k, (int64_t)data.shape(0));
  const int64_t panels = (rows + PI_LANES - 1) / PI_LANES;
  require(first >= 0 && first % PI_LANES == 0 && first / PI_LANES + panels <= m.panels, "rows beyond the matrix");
  Matrix part = {m.type, rows, m.k, panels, m.data + first / PI_LANES * pi_panel_bytes(m.type, m.k), nullptr};
  nb::gil_scoped_release release;
  pool.run([&](int thread) {
    const Columns mine(part, pool, thread);
    pack_panels(m.type, data.data(), rows, m.k, nullptr, rows, (uint8_t*)part.data, mine.p0, mine.p1);
  });
}

// Rows of activations in the requested forms.
struct Acts {
  ActMemory memory;
  PiActs acts;
  Acts(const PiKernels* kernels, const float* x, int64_t tokens, int64_t k, int forms)
      : memory(tokens * pi_round_up(k, 32)), acts(memory.rows(k)) {
    acts.f = x;
    acts.ldf = k;
    for (int64_t i = 0; i < tokens; i++) {
      const PiActs row = pi_acts_from(&acts, i, 0);
      kernels->forms(row.f, k, forms, &row);
    }
  }
};

// y = x . w^T through a level's own kernels, whole matrix: for tests and measurements.
void matmul(Pool& pool, const Matrix& w, const std::string& level, Floats2 x, OutFloats2 out) {
  const PiKernels* kernels = find_level(level);
  const int64_t tokens = (int64_t)x.shape(0), k = w.k;
  require((int64_t)x.shape(1) == k, "x has another number of columns than the matrix");
  require((int64_t)out.shape(0) == tokens && (int64_t)out.shape(1) == w.panels * PI_LANES,
          "out must be [tokens, rows rounded up to 16]");
  const Acts own(kernels, x.data(), tokens, k, pi_form(w.type));
  const PiLinear l{w.data, nullptr, out.data(), w.panels * PI_LANES, w.type, 0};
  nb::gil_scoped_release release;
  pool.run([&](int thread) {
    const Columns mine(w, pool, thread);
    std::vector<uint8_t> scratch((size_t)pi_linear_scratch(k) + 64);
    if (mine.lanes())
      kernels->linear(&l, &own.acts, mine.p0, mine.p1, tokens,
                      (void*)(((uintptr_t)scratch.data() + 63) & ~(uintptr_t)63));
  });
}

int row_type(const std::string& name) {
  const int type = name == "Q4_0X32" ? (int)PI_Q4_0X32 : name == "Q4_1X32" ? (int)PI_Q4_1X32 : type_of(name);
  require(pi_row_type(type, PI_DOT) || pi_row_type(type, PI_ADD),
          "bundles hold F16, BF16, Q8_0, Q4_0, Q4_1, Q4_0X32 and Q4_1X32, not " + name);
  return type;
}

int kind_of(const std::string& name) {
  require(name == "dot" || name == "add", "rows are for 'dot' or for 'add'");
  return name == "dot" ? PI_DOT : PI_ADD;
}

void check_row(int type, int kind, int64_t k) {
  require(k > 0 && k < (int64_t)1 << 30 && (type <= PI_BF16 || k % 32 == 0), "a quantised row must hold whole blocks");
  require(pi_row_type(type, kind),
          kind == PI_ADD ? "Q4_1 is for 'dot' alone" : "blocks across neurons are for 'add' alone");
}

// Rows of the bundles of `rows` neurons, [groups, bytes of a group], which lie `pitch` apart.
PiRows rows_of(const std::string& type_name, int kind, int64_t k, int64_t rows, const uint8_t* data, size_t groups,
               size_t bytes, int64_t pitch, int64_t at) {
  const int type = row_type(type_name);
  const int64_t stride = (int64_t)bytes;
  check_row(type, kind, k);
  require(rows > 0 && (rows + PI_GROUP - 1) / PI_GROUP == (int64_t)groups,
          "the number of bundles does not match the number of rows");
  require(pitch > 0 && pitch % 64 == 0 && pitch <= stride / PI_GROUP && stride % 64 == 0 &&
              pi_shared_bytes(type, k) <= stride - PI_GROUP * pitch && at >= 0 && at % 64 == 0 && at <= pitch &&
              pi_row_bytes(type, k) <= pitch - at,
          "a row does not fit into its bundle, or is not aligned");
  return {data, stride, pitch, at, k, type};
}

void pack_rows(Pool& pool, const std::string& type_name, const std::string& kind_name, int64_t rows, int64_t k,
               Bytes data, OutBytes2 out, int64_t pitch, int64_t at) {
  const int kind = kind_of(kind_name);
  const PiRows all = rows_of(type_name, kind, k, rows, out.data(), out.shape(0), out.shape(1), pitch, at);
  require((int64_t)data.shape(0) == bundle_rows_source_bytes(all.type, rows, k),
          "the data has another size than its shape and type say");
  nb::gil_scoped_release release;
  pool.run([&](int thread) {
    int64_t begin, end;
    share((rows + PI_GROUP - 1) / PI_GROUP, 1, pool.threads(), thread, &begin, &end);
    for (int64_t g = begin; g < end; g++)
      pack_bundle_rows(all.type, kind, std::min(rows - g * PI_GROUP, (int64_t)PI_GROUP), k,
                       data.data() + bundle_rows_source_bytes(all.type, g * PI_GROUP, k), out.data() + g * all.stride,
                       pitch, at);
  });
}

void unpack_rows(const std::string& type_name, const std::string& kind_name, int64_t k, Bytes2 data, int64_t pitch,
                 int64_t at, OutFloats2 out) {
  const int kind = kind_of(kind_name);
  const int64_t rows = (int64_t)out.shape(0);
  const PiRows all = rows_of(type_name, kind, k, rows, data.data(), data.shape(0), data.shape(1), pitch, at);
  require((int64_t)out.shape(1) == k, "out must be [rows, k]");
  for (int64_t r = 0; r < rows; r++) unpack_bundle_row(kind, all, r, out.data() + r * k);
}

nb::ndarray<nb::numpy, int32_t, nb::ndim<1>> row_order_of(const std::string& type_name, const std::string& kind_name,
                                                          int64_t k) {
  const int type = row_type(type_name), kind = kind_of(kind_name);
  check_row(type, kind, k);
  auto order = std::make_unique<int32_t[]>((size_t)k);
  bundle_row_order(type, kind, k, order.get());
  nb::capsule owner(order.get(), [](void* p) noexcept { delete[] (int32_t*)p; });
  return {order.release(), {(size_t)k}, owner};
}

void check_vectors(const Bundles& b) {
  for (const Vector* one : {&b.spec.gate_bias, &b.spec.up_bias, &b.spec.limits, &b.spec.product_limits})
    require(one->empty() || (int64_t)one->size() == b.neurons,
            "biases and thresholds must have one value for every neuron");
  require(b.gated() || b.spec.gate_bias.empty(), "a bias of gate, but no gate");
  require(b.gated() || b.spec.product_limits.empty(), "thresholds of products, but no gate");
}

constexpr int64_t LINE = 64;  // bytes, in which `PiRows` says where bundles lie

std::shared_ptr<Bundles> make_bundles(Bytes2 data, int64_t neurons, int64_t d_model,
                                      const std::optional<std::string>& gate_type, const std::string& up_type,
                                      const std::string& down_type, int64_t pitch, int64_t gate_at, int64_t up_at,
                                      int64_t down_at, const NeuronSpec& spec, std::optional<Ints> counts) {
  require(spec.activation.kind < PI_N_ACTS, "only experts have that activation");
  auto b = std::make_shared<Bundles>();
  const int64_t groups = counts ? (int64_t)counts->shape(0) : (int64_t)data.shape(0);
  int64_t group_bytes = (int64_t)data.shape(1);
  if (counts) {
    const int64_t shared = pi_shared_bytes(row_type(down_type), d_model);
    require(data.shape(0) == 1 && pitch > 0 && groups > 0, "groups of different sizes must be contiguous");
    require(pitch % LINE == 0 && (int64_t)data.shape(1) / LINE <= UINT32_MAX, "bundles are of whole cache lines");
    int64_t at = 0;
    for (int64_t g = 0; g < groups; g++) {
      const int64_t n = counts->data()[g];
      require(n >= 0 && n <= PI_GROUP, "a group has between 0 and 32 bundles");
      for (int64_t i = 0; i < n; i++) b->members.push_back((int32_t)(g * PI_GROUP + i));
      for (int64_t i = 0; i < PI_GROUP; i++) b->lines.push_back((uint32_t)(i < n ? (at + i * pitch) / LINE : 0));
      at += n * pitch;
      b->shared_lines.push_back((uint32_t)(n ? at / LINE : 0));
      at += n ? shared : 0;
    }
    require(at == (int64_t)data.shape(1), "the number of bundles does not match the number of rows");
    require((int64_t)b->members.size() == neurons, "the groups do not hold the stated number of neurons");
    neurons = groups * PI_GROUP;
    group_bytes = PI_GROUP * pitch + shared;
  } else {
    b->members.resize((size_t)std::max(neurons, (int64_t)0));
    std::iota(b->members.begin(), b->members.end(), 0);
  }
  const auto rows = [&](const std::string& name, int kind, int64_t at) {
    PiRows whole = rows_of(name, kind, d_model, neurons, data.data(), (size_t)groups, (size_t)group_bytes, pitch, at);
    if (!counts) return whole;
    whole.lines = b->lines.data();
    whole.shared = data.data();
    whole.shared_lines = b->shared_lines.data();
    return whole;
  };
  b->gate = gate_type ? rows(*gate_type, PI_DOT, gate_at) : PiRows{nullptr, 0, 0, 0, d_model, 0};
  b->up = rows(up_type, PI_DOT, up_at);
  b->down = rows(down_type, PI_ADD, down_at);
  b->neurons = neurons;
  b->spec = spec;
  check_vectors(*b);
  return b;
}

// Rows of the first product are a matrix's: of a plain FFN those of up, else those of gate. The others lie apart from
// them, those of up and those of down each one behind the other.
std::shared_ptr<Bundles> make_apart_bundles(int64_t neurons, int64_t d_model,
                                            const std::optional<std::string>& gate_type, const std::string& up_type,
                                            const std::string& down_type, const NeuronSpec& spec,
                                            std::optional<Bytes2> up, Bytes2 down) {
  require(spec.activation.kind < PI_N_ACTS, "only experts have that activation");
  require(up.has_value() == gate_type.has_value(), "rows of up go with gates");
  auto b = std::make_shared<Bundles>();
  const auto rows = [&](const std::string& name, int kind, Bytes2 data) {
    const int64_t bytes = pi_row_bytes(row_type(name), d_model);
    return rows_of(name, kind, d_model, neurons, data.data(), data.shape(0), data.shape(1), bytes, 0);
  };
  const auto elsewhere = [&](const std::string& name) {
    check_row(row_type(name), PI_DOT, d_model);
    return PiRows{down.data(), 0, 0, 0, d_model, row_type(name)};  // not null: else there would be no gate
  };
  b->down = rows(down_type, PI_ADD, down);
  b->up = up ? rows(up_type, PI_DOT, *up) : elsewhere(up_type);
  b->gate = gate_type ? elsewhere(*gate_type) : PiRows{nullptr, 0, 0, 0, d_model, 0};
  b->firsts = false;
  b->neurons = neurons;
  b->members.resize((size_t)neurons);
  std::iota(b->members.begin(), b->members.end(), 0);
  b->spec = spec;
  check_vectors(*b);
  return b;
}

std::shared_ptr<Bundles> make_resting_bundles(std::shared_ptr<Slots> slots, int64_t d_model,
                                              const std::optional<std::string>& gate_type, const std::string& up_type,
                                              const std::string& down_type, std::optional<int64_t> gate_at,
                                              std::optional<int64_t> up_at, int64_t down_at, const NeuronSpec& spec,
                                              std::optional<Bytes2> shared) {
  require(spec.activation.kind < PI_N_ACTS, "only experts have that activation");
  require(slots->parts() == 1, "the slots of neurons hold one part of each");
  require(slots->lines(), "the neurons do not begin with cache lines of their file");
  auto b = std::make_shared<Bundles>();
  b->neurons = slots->items();
  b->members.resize((size_t)b->neurons);
  std::iota(b->members.begin(), b->members.end(), 0);
  const int64_t groups = (b->neurons + PI_GROUP - 1) / PI_GROUP;
  const auto rows = [&](const std::string& name, int kind, std::optional<int64_t> at) {
    const int type = row_type(name);
    check_row(type, kind, d_model);
    require(!at || (*at >= 0 && *at % 64 == 0 && *at <= slots->part_bytes(0) - pi_row_bytes(type, d_model)),
            "a row does not fit into what is read of a neuron, or is not aligned");
    const int64_t bytes = pi_shared_bytes(type, d_model);
    require(!bytes || (shared && (int64_t)shared->shape(0) == groups && (int64_t)shared->shape(1) == bytes),
            "the scales that groups share must be [groups, their bytes]");
    for (int64_t g = 0; bytes && g < groups; g++) b->shared_lines.push_back((uint32_t)(g * bytes / LINE));
    return PiRows{
        slots->memory(),       0, 0, at.value_or(0), d_model, type, slots->lines(), bytes ? shared->data() : nullptr,
        b->shared_lines.data()};
  };
  b->firsts = gate_type ? gate_at.has_value() : up_at.has_value();
  require(up_at || !gate_type, "rows of up are missing");
  b->gate = gate_type ? rows(*gate_type, PI_DOT, gate_at) : PiRows{nullptr, 0, 0, 0, d_model, 0};
  b->up = rows(up_type, PI_DOT, up_at);
  b->down = rows(down_type, PI_ADD, down_at);
  b->spec = spec;
  b->slots = std::move(slots);
  check_vectors(*b);
  return b;
}

// What listed neurons add to the output, by one thread.
void add_listed(const Bundles& b, const std::string& level, Floats2 x, Ints index, OutFloats2 out, float threshold) {
  const PiKernels* kernels = find_level(level);
  const int64_t tokens = (int64_t)x.shape(0), k = b.up.k, n = (int64_t)index.shape(0);
  require(tokens > 0 && tokens <= PI_NEURON_TOKENS, "bundles take between 1 and 32 tokens");
  require(!b.spec.activation.in_banks(), "topk selects by the gates of matrices");
  require(!b.slots && b.firsts, "neurons without their first rows are summed in the steps of a program");
  require((int64_t)x.shape(1) == k && out.shape(0) == x.shape(0) && (int64_t)out.shape(1) == k,
          "x and out must be [tokens, d_model]");
  std::vector<bool> listed((size_t)b.neurons, true);  // places that are empty count as listed
  for (const int32_t i : b.members) listed[(size_t)i] = false;
  for (int64_t j = 0; j < n; j++) {
    const int32_t i = index.data()[j];
    require(i >= 0 && i < b.neurons, "no such neuron");
    require(!listed[(size_t)i], "a neuron is listed twice, or its place is empty");
    listed[(size_t)i] = true;
  }
  const Acts own(kernels, x.data(), tokens, k, b.forms());
  NeuronBlock block;
  NeuronCounts counts = {};
  nb::gil_scoped_release release;
  add_neurons(kernels, b, &own.acts, tokens, index.data(), n, {nullptr, 0, nullptr, threshold}, block, out.data(), k,
              counts);
}

const char* const WAYS[N_WAYS] = {"dense", "exact", "predicted"};

// Calls work(), which touches what jobs use, while no job runs; other threads of Python run while it waits.
template <class Work>
void between_jobs(const Workspace& workspace, const Work& work) {
  nb::gil_scoped_release release;
  workspace.pool->between_jobs(work);
}

using Counts = std::map<std::string, int64_t>;

Counts counts_of(const NeuronStats& s) {
  return {{"steps", s.steps},           {"tokens", s.tokens},
          {"active", s.active},         {"candidates", s.candidates},
          {"first_rows", s.first_rows}, {"up_rows", s.up_rows},
          {"down_rows", s.down_rows},   {"shared_scales", s.shared_scales}};
}

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

// Slots of the runs' states, each written by one run and read by no other then.
void add_states(const States& states, std::vector<Run>& runs, const std::vector<int32_t>& row_of,
                const std::optional<Ints>& read, const std::optional<Ints>& written, int64_t sequences) {
  require(read && written, "the model's layers have states: their slots are missing");
  require((int64_t)read->shape(0) == sequences && (int64_t)written->shape(0) == sequences,
          "the slots of states differ in length from the page table");
  std::vector<int64_t> writers((size_t)states.slots, -1);
  for (size_t i = 0; i < runs.size(); i++) {
    Run& run = runs[i];
    run.read_state = read->data()[row_of[i]];
    run.state = written->data()[row_of[i]];
    require(run.state >= 0 && run.state < states.slots, "the slot of a state is outside its memory");
    require(!run.position || (run.read_state >= 0 && run.read_state < states.slots),
            "the slot of a state is outside its memory");
    require(writers[(size_t)run.state] < 0, "two sequences write the same state");
    writers[(size_t)run.state] = (int64_t)i;
  }
  for (size_t i = 0; i < runs.size(); i++) {
    const int64_t writer = runs[i].position ? writers[(size_t)runs[i].read_state] : -1;
    require(writer < 0 || writer == (int64_t)i, "a sequence reads a state that another one writes");
  }
}

bool run(Program& p, Ints tokens, Ints positions, Ints rows, Ints2 page_table, Ints logit_rows, OutFloats2 logits,
         size_t first, size_t last, int64_t vocab, std::optional<Ints> read_states, std::optional<Ints> states,
         std::optional<Ints> stop) {
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
  if (p.states) add_states(*p.states, step.runs, row_of, read_states, states, sequences);
  require(!stop || stop->shape(0) == 1, "stop is one number");
  step.stop = stop ? stop->data() : nullptr;
  nb::gil_scoped_release release;
  return p.run(step, first, last);
}

void hidden_states(Program& p, Ints rows, OutFloats2 out) {
  require((int64_t)out.shape(1) == p.sizes.d_model && out.shape(0) == rows.shape(0),
          "the hidden states have another shape than (rows, d_model)");
  for (size_t i = 0; i < rows.shape(0); i++)
    require(rows.data()[i] >= 0 && rows.data()[i] < p.sizes.max_tokens, "a row is outside the step");
  nb::gil_scoped_release release;
  p.hidden_states(rows.data(), (int64_t)rows.shape(0), out.data());
}

void bind_constants(nb::module_& m) {
  m.doc() =
      "The native module: packed weights, kernels of every instruction-set level, and programs of fused operators.\n\n"
      "Arrays are C-contiguous and of exactly the type written here. Wrong shapes, names and numbers are ValueErrors.";
  m.attr("PAGE") = (int)PI_PAGE;
  m.attr("LANES") = (int)PI_LANES;
  m.attr("TYPES") = nb::cast(std::vector<std::string>(TYPES, TYPES + PI_N_TYPES));
  m.attr("ACTIVATIONS") = nb::cast(std::vector<std::string>(ACTIVATIONS, ACTIVATIONS + PI_N_ACTS));
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
      .def_prop_ro("threads", &Pool::threads);
}

void bind_matrix(nb::module_& m) {
  nb::class_<Arena>(m, "Arena").def(nb::init<>());
  nb::class_<Matrix>(m, "Matrix")
      .def_ro("rows", &Matrix::rows)
      .def_ro("k", &Matrix::k)
      .def_prop_ro("type", [](const Matrix& w) { return std::string(TYPES[w.type]); })
      .def_prop_ro("nbytes", &Matrix::bytes)
      .def_prop_ro(
          "panels",
          [](nb::handle self) -> std::optional<PanelBytes> {
            const Matrix& w = nb::cast<const Matrix&>(self);
            if (!w.data) return std::nullopt;
            return PanelBytes(w.data, {(size_t)w.panels, (size_t)pi_panel_bytes(w.type, w.k)}, self);
          },
          "Its memory, uint8 [panels, bytes of a panel] (csrc/table.h); None if it stays on disk.");
  m.def(
      "pack_matrix", &pack_matrix, "pool"_a, "arena"_a, "type"_a, "rows"_a, "k"_a, "data"_a, "row_map"_a = nb::none(),
      "A matrix [rows, k] from the blocks of a model file, uint8 1-D. row_map: packed row r is row row_map[r], zeros\n"
      "where that is -1.");
  m.def(
      "disk_matrix", &disk_matrix, "type"_a, "rows"_a, "k"_a, "file"_a, "offset"_a, "row_map"_a = nb::none(),
      "A matrix that stays on disk, as of `pack_matrix`: [rows, k] as stored in a file of `Reads` from `offset`\non. A "
      "program that uses it needs a window.");
  m.def("repack", &repack, "pool"_a, "matrix"_a, "first"_a, "rows"_a, "data"_a,
        "Replace rows from `first` on, a multiple of LANES, by [rows, k] as in `pack_matrix`. Not while a step runs.");
  m.def("matmul", &matmul, "pool"_a, "matrix"_a, "level"_a, "x"_a, "out"_a.noconvert(),
        "out = x . matrix^T: x [tokens, k], out [tokens, rows rounded up to LANES].");
}

void bind_bundle_rows(nb::module_& m) {
  m.attr("NEURON_TOKENS") = (int)PI_NEURON_TOKENS;
  m.def(
      "bundle_row_bytes",
      [](const std::string& type, int64_t k) {
        const int t = row_type(type);
        require(k > 0 && (t <= PI_BF16 || k % 32 == 0), "a quantised row must hold whole blocks");
        return pi_row_bytes(t, k);
      },
      "type"_a, "k"_a, "Bytes of one row of a bundle.");
  m.def(
      "shared_bytes", [](const std::string& type, int64_t k) { return pi_shared_bytes(row_type(type), k); }, "type"_a,
      "k"_a, "Bytes of the scales that the rows of a group share.");
  m.attr("GROUP") = (int)PI_GROUP;
  m.def("pack_bundle_rows", &pack_rows, "pool"_a, "type"_a, "kind"_a, "rows"_a, "k"_a, "data"_a, "out"_a.noconvert(),
        "pitch"_a, "at"_a,
        "Write the gate, up or down rows of bundles, at byte `at` of each; they lie `pitch` bytes apart.\n\n"
        "data: rows as a model file stores them; out: [groups, bytes of a group]; kind: \"dot\" (gate, up) or \"add\"\n"
        "(down).");
  m.def(
      "code_bytes",
      [](const std::string& type, int64_t k) {
        const int t = row_type(type);
        require(k > 0, "a row needs columns");
        return pi_row_codes(t, k);
      },
      "type"_a, "k"_a, "Bytes of the codes of one row of a bundle, behind which its own scales lie.");
  m.def("bundle_row_order", &row_order_of, "type"_a, "kind"_a, "k"_a,
        "The byte of a bundle's row at which each of its k elements lies, int32; two codes of 4 bits share a byte.");
  m.def("unpack_bundle_rows", &unpack_rows, "type"_a, "kind"_a, "k"_a, "data"_a, "pitch"_a, "at"_a, "out"_a.noconvert(),
        "The values of the gate, up or down rows of bundles: data [groups, bytes of a group], out [rows, k].");
}

void bind_neuron_spec(nb::module_& m) {
  nb::class_<NeuronSpec>(
      m, "NeuronSpec",
      "What neurons compute with their weights: activation, a name of ACTIVATIONS; threshold, of\n"
      "fatrelu and cats; biases of gate and up, a value for each neuron; limits, in place of threshold\n"
      "one for each neuron. Of topk, threshold is how many neurons of a bank are kept, and limits the units\n"
      "in which their magnitudes are compared. product_limits, beside limits of fatrelu and cats and with a\n"
      "gate: what the magnitude of each neuron's product of gate and up must exceed, or it is zero.")
      .def(
          "__init__",
          [](NeuronSpec* spec, const std::string& activation, float threshold, std::optional<Floats> gate_bias,
             std::optional<Floats> up_bias, std::optional<Floats> limits, std::optional<Floats> product_limits) {
            const Activation own{index_of(ACTIVATIONS, PI_N_ACTS + 1, activation, "activation"), threshold};
            if (own.in_banks())
              require(limits && threshold >= 1 && threshold <= PI_BANK && threshold == floorf(threshold),
                      "topk keeps a whole number of a bank's neurons, and has thresholds of neurons");
            else
              require(!limits || (own.has_threshold() && threshold == 0),
                      "thresholds of neurons are for fatrelu and cats, and in place of one of all");
            require(!product_limits || (limits && own.has_threshold()),
                    "thresholds of products go with thresholds of neurons, of fatrelu and cats");
            new (spec)
                NeuronSpec{own, vector_of(gate_bias), vector_of(up_bias), vector_of(limits), vector_of(product_limits)};
          },
          "activation"_a = ACTIVATIONS[PI_SILU], "threshold"_a = 0.0f, "gate_bias"_a = nb::none(),
          "up_bias"_a = nb::none(), "limits"_a = nb::none(), "product_limits"_a = nb::none());
}

void bind_bundles(nb::module_& m) {
  nb::class_<Bundles>(m, "Bundles",
                      "Neurons of a layer, each with its rows of gate and up and its column of down.\n\n"
                      "data: [groups, bytes of a group], kept; or, with counts (bundles of each group), [1, bytes] of\n"
                      "groups that differ; then spec's vectors have a value for every place of a group.")
      .def(nb::new_(&make_bundles), "data"_a.noconvert(), "neurons"_a, "d_model"_a, "gate_type"_a.none(), "up_type"_a,
           "down_type"_a, "pitch"_a, "gate_at"_a, "up_at"_a, "down_at"_a, "spec"_a, "counts"_a = nb::none(),
           nb::keep_alive<0, 2>())  // 1 is the class
      .def_ro("neurons", &Bundles::neurons)
      .def("add", &add_listed, "level"_a, "x"_a, "index"_a, "out"_a.noconvert(), "threshold"_a = 0.0f,
           "Add the sum of the listed neurons of x to out, both [tokens, d_model], by one thread.");
  m.def(
      "apart_bundles", &make_apart_bundles, "neurons"_a, "d_model"_a, "gate_type"_a.none(), "up_type"_a, "down_type"_a,
      "spec"_a, "up"_a.noconvert().none(), "down"_a.noconvert(), nb::keep_alive<0, 7>(), nb::keep_alive<0, 8>(),
      "Neurons of a layer beside a matrix with their first product, of gate or in a plain FFN of up: their rows of\n"
      "up, [groups, bytes of 32], None in a plain FFN, and of down, [groups, bytes of 32 and what they share]; kept.");
  m.def(
      "resting_bundles", &make_resting_bundles, "slots"_a, "d_model"_a, "gate_type"_a.none(), "up_type"_a,
      "down_type"_a, "gate_at"_a.none(), "up_at"_a.none(), "down_at"_a, "spec"_a, "shared"_a.noconvert() = nb::none(),
      nb::keep_alive<0, 10>(),
      "Bundles of neurons on disk, the items of the slots, whose one part is what a step reads of each. The place of\n"
      "a row is None where it is no part of that: a matrix has it, or `add_firsts` gives it. shared: the scales of "
      "all\n"
      "groups of down, [groups, bytes], kept.");
}

void bind_table(nb::module_& m) {
  nb::class_<Table>(m, "Table")
      .def(
          "__init__",
          [](Table* table, const std::string& type, int64_t rows, int64_t k, Bytes data) {
            check_stored(type_of(type), rows, k, (int64_t)data.shape(0));
            new (table) Table{type_of(type), rows, k, data.data()};
          },
          "type"_a, "rows"_a, "k"_a, "data"_a.noconvert(), nb::keep_alive<1, 5>())
      .def(
          "row",
          [](const Table& t, int64_t i, nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu> out) {
            require(i >= 0 && i < t.rows && (int64_t)out.shape(0) == t.k, "no such row, or out has another length");
            unpack_row(t.type, t.data + i * stored_row_bytes(t.type, t.k), t.k, out.data());
          },
          "index"_a, "out"_a.noconvert());
}

void bind_norm(nb::module_& m) {
  nb::class_<Norm>(m, "Norm").def(
      "__init__",
      [](Norm* norm, Floats weight, float eps, std::optional<Floats> bias, bool layer, bool plain) {
        require(weight.shape(0) > 0, "a norm needs weights");
        require(!plain || !layer, "a norm is either plain or a LayerNorm");
        require(!bias || (layer && bias->shape(0) == weight.shape(0)),
                "only a LayerNorm has a bias, as long as its weights");
        new (norm) Norm{vector_of(weight), vector_of(bias), eps, layer, plain};
      },
      "weight"_a, "eps"_a, "bias"_a = nb::none(), "layer"_a = false, "plain"_a = false,
      "RMS norm; LayerNorm where `layer`; only a product with the weights where `plain`.");
}

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
          [](States* states, const std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>>& layers,
             int64_t slots) {
            std::vector<States::Layer> all;
            for (const auto& [taps, key_heads, key_dim, heads, value_dim] : layers) {
              require(taps >= 2 && taps <= PI_MOST_TAPS, "a convolution has between 2 and 8 taps");
              require(key_heads > 0 && heads > 0, "states need heads");
              require(key_dim > 0 && value_dim > 0 && key_dim % PI_LANES == 0 && value_dim % PI_LANES == 0,
                      "heads of states must have multiples of 16 dimensions");
              all.push_back({taps - 1, 2 * key_heads * key_dim + heads * value_dim, heads, key_dim, value_dim});
            }
            require(slots > 0, "states need slots");
            new (states) States(std::move(all), slots);
          },
          "layers"_a, "slots"_a,
          "layers: (taps of the convolution, key heads, their dimensions, value heads, their dimensions) of each\n"
          "on the CPU.")
      .def_ro("slots", &States::slots)
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
}

void bind_predictor(nb::module_& m) {
  nb::class_<Predictor>(
      m, "Predictor",
      "Predicts which neurons of an FFN fire: candidates are those with z >= threshold, or the `floor`\n"
      "largest where these are fewer; z = outer . relu(inner . x), x before the FFN's norm.\n\n"
      "inner: [rank, d_model]; outer: [neurons, rank].")
      .def(nb::init<std::shared_ptr<Matrix>, std::shared_ptr<Matrix>, float, int64_t>(), "inner"_a, "outer"_a,
           "threshold"_a = 0.0f, "floor"_a = 0)
      .def_prop_ro("inner_nbytes", [](const Predictor& p) { return p.in->bytes(); })
      .def_prop_ro("outer_nbytes", [](const Predictor& p) { return p.out->bytes(); })
      .def_prop_ro("nbytes", [](const Predictor& p) { return p.in->bytes() + p.out->bytes(); });
}

void bind_dense_neurons(nb::module_& m) {
  nb::class_<DenseNeurons>(m, "DenseNeurons", "A part of an FFN: neurons of one layer as matrices.")
      .def(
          "__init__",
          [](DenseNeurons* neurons, const NeuronSpec& spec, std::shared_ptr<Matrix> gate, std::shared_ptr<Matrix> up,
             std::shared_ptr<Matrix> down) {
            new (neurons) DenseNeurons(spec, std::move(gate), std::move(up), std::move(down));
          },
          "spec"_a, "gate"_a.none(), "up"_a, "down"_a);
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

void check_expert_sum(const Experts& experts, const Program& program, Floats2 x, OutFloats2 out) {
  const size_t tokens = x.shape(0), k = (size_t)experts.d_model();
  require(tokens > 0 && (int64_t)tokens <= program.sizes.max_tokens && x.shape(1) == k && out.shape(0) == tokens &&
              out.shape(1) == k,
          "x and out must be [tokens, d_model], for at most the program's tokens");
}

void check_selected(const Experts& experts, const Program& program, Ints2 selected, Floats2 weights) {
  const size_t tokens = selected.shape(0), some = (size_t)experts.top_k();
  require(tokens > 0 && (int64_t)tokens <= program.sizes.max_tokens && selected.shape(1) == some &&
              weights.shape(0) == tokens && weights.shape(1) == some,
          "selected and weights must be [tokens, top_k]");
  for (size_t i = 0; i < tokens * some; i++)
    require(selected.data()[i] >= -1 && selected.data()[i] < experts.experts(), "no such expert");
}

bool sum_experts(Experts& experts, Program& program, Floats2 x, Ints2 selected, Floats2 weights, OutFloats2 out) {
  check_expert_sum(experts, program, x, out);
  check_selected(experts, program, selected, weights);
  require(selected.shape(0) == x.shape(0), "selected and weights must be [tokens, top_k]");
  nb::gil_scoped_release release;
  return experts.sum(program, x.data(), (int64_t)x.shape(0), selected.data(), weights.data(), out.data());
}

void order_experts(Experts& experts, Program& program, Ints2 selected, Floats2 weights) {
  check_selected(experts, program, selected, weights);
  nb::gil_scoped_release release;
  experts.order(program, (int64_t)selected.shape(0), selected.data(), weights.data());
}

bool sum_ordered_experts(Experts& experts, Program& program, Floats2 x, OutFloats2 out) {
  check_expert_sum(experts, program, x, out);
  nb::gil_scoped_release release;
  return experts.sum_ordered(program, x.data(), (int64_t)x.shape(0), out.data());
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

Counts expert_counts(const Experts& op) {
  nb::gil_scoped_release release;
  const Experts::Counts all = op.counts();
  Counts counts = counts_of(all.neurons);
  counts["sampled_tokens"] = all.recall.tokens;
  counts["sampled_active"] = all.recall.active;
  counts["sampled_found"] = all.recall.found;
  counts["predictor_rows"] = all.predictor_rows;
  return counts;
}

RestingExperts& resting_of(const Experts& op) {
  require(op.resting(), "the experts are in memory");
  return *op.resting();
}

void bind_experts(nb::module_& m) {
  nb::class_<RouterSpec>(m, "RouterSpec", "How a token's experts, and their weights, follow from the router's logits.")
      .def(
          "__init__",
          [](RouterSpec* spec, int64_t top_k, const std::string& scoring, bool normalise, float scale,
             std::optional<Floats> correction, int64_t groups, int64_t top_groups, int64_t group_best,
             std::optional<Floats> bias) {
            require(scoring == "softmax" || scoring == "sigmoid", "a router's scoring is softmax or sigmoid");
            new (spec)
                RouterSpec{top_k,  scoring == "sigmoid", normalise, scale, vector_of(correction), vector_of(bias),
                           groups, top_groups,           group_best};
          },
          "top_k"_a, "scoring"_a = "softmax", "normalise"_a = false, "scale"_a = 1.0f, "correction"_a = nb::none(),
          "groups"_a = 1, "top_groups"_a = 1, "group_best"_a = 1, "bias"_a = nb::none(),
          "correction: added to scores for the selection alone; bias: to the logits. Experts are selected in the\n"
          "top_groups best of `groups`; a group's score is the sum of its group_best best experts'.");
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
             std::shared_ptr<Slots> slots) {
            require(spec.gate_bias.empty() && spec.up_bias.empty(), "biases of experts are not those of neurons");
            require(spec.limits.empty(), "neurons of experts have no thresholds of their own");
            require(bundled || (up && down), "experts need up and down, or bundles");
            new (all) ExpertMatrices{experts,
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
                                     recall_every,
                                     std::move(slots)};
          },
          "experts"_a, "neurons"_a, "spec"_a, "gate"_a.none(), "up"_a.none(), "down"_a.none(),
          "gate_bias"_a = nb::none(), "up_bias"_a = nb::none(), "down_bias"_a = nb::none(), "bundled"_a = nb::none(),
          "predictor"_a = nb::none(), "recall_every"_a = 0, "slots"_a = nb::none(),
          "neurons: of each; rows of each are padded to LANES. spec: without biases, which are [experts, rows]. "
          "bundled:\n"
          "all neurons, one expert after another, in place of up and down; their gates are not read, but with a "
          "predictor,\n"
          "which selects among all of these neurons and takes the place of the matrix of gates. recall_every: steps "
          "between\n"
          "samples of its recall, 0: none. slots: the experts rest on disk, their matrices are the parts; the three "
          "are\n"
          "of `disk_matrix` then, [experts * rows, k].");
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
                {"wanted", s.wanted}, {"hits", s.hits}, {"guessed", s.guessed}, {"right", s.right}};
          },
          "Of experts on disk, not while a step runs: wanted, hits; guessed: read because they were expected;\n"
          "right: of these, needed.")
      .def("sum", &sum_experts, "program"_a, "x"_a, "selected"_a, "weights"_a, "out"_a,
           "out = the weighted sum of each token's experts; x and out: [tokens, d_model].\n\n"
           "selected, weights: [tokens, top_k]; -1 selects none. False where no expert is selected: out is zero, and\n"
           "nothing was computed.")
      .def("order", &order_experts, "program"_a, "selected"_a, "weights"_a,
           "The first part of `sum`, which does not need x; nothing else of the program may run before sum_ordered.")
      .def("fetch", &Experts::fetch, "program"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Between the two: read a part of the weights into the caches. False once they hold what they can.")
      .def("sum_ordered", &sum_ordered_experts, "program"_a, "x"_a, "out"_a, "The second part of `sum`.");
}

void make_expert_call(ExpertCall* call, std::shared_ptr<HostCalls> calls, std::shared_ptr<Experts> op, Program& program,
                      Floats2 x, Ints2 selected, Floats2 weights, OutFloats2 out, Ints places,
                      nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> tally, const std::string& part) {
  const char* const PARTS[] = {"all", "order", "sum_ordered"};
  const size_t tokens = x.shape(0), some = (size_t)op->top_k(), experts = places.shape(0);
  check_expert_sum(*op, program, x, out);
  require(selected.shape(0) == tokens && selected.shape(1) == some && weights.shape(0) == tokens &&
              weights.shape(1) == some,
          "selected and weights must be [tokens, top_k]");
  require(tally.shape(0) == experts + 1, "tally must be [experts + 1]");
  for (size_t i = 0; i < experts; i++)
    require(places.data()[i] >= -1 && places.data()[i] < op->experts(), "no such expert");
  const auto own = (ExpertCall::Part)index_of(PARTS, 3, part, "part");
  new (call) ExpertCall(std::move(calls), std::move(op), program,
                        {x.data(), (int64_t)tokens, selected.data(), weights.data(), out.data(), (int64_t)experts,
                         places.data(), tally.data()},
                        own);
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
           "tally"_a.noconvert(), "part"_a, nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>(), nb::keep_alive<1, 6>(),
           nb::keep_alive<1, 7>(), nb::keep_alive<1, 8>(), nb::keep_alive<1, 9>(), nb::keep_alive<1, 10>());
}

void bind_early_router(nb::module_& m) {
  nb::class_<EarlyRouter, Op>(m, "EarlyRouter", "Selects experts before attention.")
      .def("foresee", &EarlyRouter::foresee, "of"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Begin to read what it selects, of experts on disk.");
}

void bind_window(nb::module_& m) {
  nb::class_<Window>(m, "Window", "A ring of memory through which matrices on disk pass, in the order of operators.")
      .def(nb::init<std::shared_ptr<Reads>, int64_t>(), "reads"_a, "nbytes"_a)
      .def("forget", &Window::forget, nb::call_guard<nb::gil_scoped_release>(),
           "Between steps: drop what was read ahead, and give the ring's memory back until it is needed.");
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
          [](Program& p, int layer, const Norm* norm, std::shared_ptr<Matrix> q, std::shared_ptr<Matrix> k,
             std::shared_ptr<Matrix> v, std::optional<Floats> q_bias, std::optional<Floats> k_bias,
             std::optional<Floats> v_bias, const Norm* q_norm, const Norm* k_norm, int rope,
             std::optional<float> scale) {
            p.attention_input({layer, norm_of(norm), norm_of(q_norm), norm_of(k_norm), vector_of(q_bias),
                               vector_of(k_bias), vector_of(v_bias), std::move(q), std::move(k), std::move(v), rope,
                               scale});
          },
          "layer"_a, "norm"_a.none(), "q"_a, "k"_a, "v"_a, "q_bias"_a = nb::none(), "k_bias"_a = nb::none(),
          "v_bias"_a = nb::none(), "q_norm"_a = nb::none(), "k_norm"_a = nb::none(), "rope"_a = -1,
          "scale"_a = nb::none(),
          "q, cache = rope(norm(x) . q, k, v).\n\n"
          "q_norm, k_norm: over each head, or as wide as all heads of q (k) together. rope: an index from `add_rope`,\n"
          "-1: q and k are not rotated. scale: of the scores, None: head_dim ** -0.5.")
      .def(
          "attention",
          [](Program& p, int layer, int window, std::optional<Floats> sinks) {
            p.attention(layer, window, vector_of(sinks));
          },
          "layer"_a, "window"_a, "sinks"_a = nb::none(),
          "attended = softmax(q k) v; window 0: none. sinks: of each head, a score more, which belongs to no value.")
      .def(
          "delta_net",
          [](Program& p, int layer, size_t state, const Norm* norm, std::vector<std::shared_ptr<Matrix>> matrices,
             Floats2 taps, Floats decay, Floats dt_bias, const Norm& out_norm, int64_t key_heads, bool tiled) {
            require(matrices.size() == 6 && std::all_of(matrices.begin(), matrices.end(), [](auto& m) { return !!m; }),
                    "Gated DeltaNet has six matrices");
            Vector all(taps.data(), taps.data() + taps.size());
            p.delta_net({layer, state, norm_of(norm), matrices[0], matrices[1], matrices[2], matrices[3], matrices[4],
                         matrices[5], std::move(all), vector_of(decay), vector_of(dt_bias), out_norm, key_heads,
                         tiled});
          },
          "layer"_a, "state"_a, "norm"_a.none(), "matrices"_a, "taps"_a, "decay"_a, "dt_bias"_a, "out_norm"_a,
          "key_heads"_a, "tiled"_a,
          "attended = Gated DeltaNet of norm(x).\n\n"
          "layer, state: of the cache and of the states; matrices: query, key, value, gate, beta, alpha; taps: of the\n"
          "convolution, [taps, channels]; decay: the logarithm of a head's decay is decay * softplus(alpha + "
          "dt_bias);\n"
          "tiled: value head i has key head i % key_heads, else i // (value heads / key_heads).")
      .def(
          "gate_attended",
          [](Program& p, int layer, const Norm* norm, std::shared_ptr<Matrix> w) {
            p.gate_attended(layer, norm_of(norm), std::move(w));
          },
          "layer"_a, "norm"_a.none(), "w"_a, "attended *= sigmoid(w . norm(x)).")
      .def(
          "project",
          [](Program& p, int layer, std::shared_ptr<Matrix> w, std::optional<Floats> bias, const Norm* norm) {
            p.project(layer, std::move(w), vector_of(bias), norm_of(norm));
          },
          "layer"_a, "w"_a, "bias"_a = nb::none(), "norm"_a = nb::none(), "x += norm(w . attended + bias).")
      .def(
          "latent_input",
          [](Program& p, int layer, const Norm* norm, std::shared_ptr<Matrix> q_latent, const Norm* q_norm,
             std::shared_ptr<Matrix> q, std::shared_ptr<Matrix> kv, const Norm* kv_norm, std::shared_ptr<Matrix> k_b,
             int rope, float scale) {
            p.latent_input({layer, norm_of(norm), std::move(q_latent), norm_of(q_norm), std::move(q), std::move(kv),
                            norm_of(kv_norm), std::move(k_b), rope, scale});
          },
          "layer"_a, "norm"_a.none(), "q_latent"_a.none(), "q_norm"_a.none(), "q"_a, "kv"_a, "kv_norm"_a, "k_b"_a,
          "rope"_a, "scale"_a,
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
             const ExpertMatrices& all, std::shared_ptr<DenseNeurons> shared, std::optional<Floats> shared_gate) {
            return p.experts(spec, router, std::move(scores), all, {std::move(shared), vector_of(shared_gate)});
          },
          "spec"_a, "router"_a, "scores"_a.none(), "experts"_a, "shared"_a = nb::none(), "shared_gate"_a = nb::none(),
          "x += out_norm(sum of the weighted experts of norm(x) + shared expert + down_bias).\n\n"
          "scores: the router, [experts, d_model], None: `early_router` comes before; shared_gate: [d_model], whose\n"
          "product with norm(x), a sigmoid of it, is the shared expert's weight.")
      .def(
          "expert_sum", &Program::expert_sum, "experts"_a, "router"_a,
          "Experts that the caller selects, at most router.top_k for a token. Not while a step runs. router: how they\n"
          "are selected, for those that are guessed.")
      .def("early_router", &Program::early_router, "router"_a, "scores"_a,
           "Select the experts of the next operator `experts` from x as it is; scores: [experts, d_model].")
      .def("normalise", &Program::normalise, "norm"_a, "x = norm(x).")
      .def(
          "head",
          [](Program& p, const Norm* norm, std::shared_ptr<Matrix> w, std::shared_ptr<Matrix> project, float scale) {
            p.head(norm_of(norm), std::move(project), std::move(w), scale);
          },
          "norm"_a.none(), "w"_a, "project"_a = nb::none(), "scale"_a = 1.0f,
          "logits = scale * w . project . norm(x).");
}

// What says why a file cannot be read may quote any name of a file.
void bind_read_error(nb::module_& m) {
  const nb::object type = nb::steal(PyErr_NewException("powerinfer._native.ReadError", PyExc_OSError, nullptr));
  m.attr("ReadError") = type;
  nb::register_exception_translator(
      [](const std::exception_ptr& thrown, void* known) {
        try {
          std::rethrow_exception(thrown);
        } catch (const ReadError& error) {
          const nb::object text = nb::steal(PyUnicode_DecodeFSDefault(error.what()));
          PyErr_SetObject((PyObject*)known, text.ptr());
        }
      },
      type.ptr());
}

void make_reads(Reads* reads, const std::vector<std::pair<nb::str, int64_t>>& files, bool direct,
                const std::string& engine, std::optional<double> latency, std::optional<double> rate,
                std::optional<int64_t> fail_at, std::optional<int64_t> failures, std::optional<int> error) {
  std::vector<Reads::File> all;
  for (const auto& [path, bytes] : files) {
    const nb::object name = nb::steal(PyUnicode_EncodeFSDefault(path.ptr()));
    if (!name) nb::raise_python_error();
    all.push_back({PyBytes_AsString(name.ptr()), bytes});
  }
  const EmulatedDisk disk{latency.value_or(0), rate.value_or(0), fail_at.value_or(-1), failures.value_or(-1),
                          error.value_or(0)};
  require(disk.latency >= 0 && disk.rate >= 0 && disk.error >= 0, "a disk has a latency, a rate and an errno");
  const bool emulated = latency || rate || fail_at || failures || error;
  nb::gil_scoped_release release;
  new (reads) Reads(std::move(all), direct, engine, emulated ? &disk : nullptr);
}

using Buffer = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

int64_t begin_reads(Reads& reads, const std::vector<std::tuple<int, int64_t, int64_t, int64_t>>& list, Buffer buffer) {
  std::vector<Read> all;
  const int64_t room = (int64_t)buffer.shape(0);
  for (const auto& [file, offset, bytes, at] : list) {
    reads.check(file, offset, bytes);
    require(at >= 0 && bytes <= room - at, "the buffer has no room for a read");
    const int64_t align = reads.direct() ? (int64_t)Reads::ALIGN : 1, before = offset % align;
    require(at >= before && pi_round_up(before + bytes, align) <= room - (at - before),
            "the buffer has no room for the whole blocks of a read past the cache");
    all.push_back({file, offset, bytes, buffer.data() + at});
  }
  nb::gil_scoped_release release;
  return reads.begin(all.data(), all.size());
}

void bind_reads(nb::module_& m) {
  bind_read_error(m);
  nb::class_<Reads::Stats>(
      m, "ReadStats",
      "What was read: reads, bytes: as it was asked for; small: of the reads those of small parts\n"
      "of `Slots` past the cache, joined: in how many the disk reads them; waited: seconds in\n"
      "`wait`; active: seconds in which any read was under way, as far as the calls of `Reads` saw.")
      .def_ro("reads", &Reads::Stats::reads)
      .def_ro("bytes", &Reads::Stats::bytes)
      .def_ro("small", &Reads::Stats::small)
      .def_ro("joined", &Reads::Stats::joined)
      .def_ro("waited", &Reads::Stats::waited)
      .def_ro("active", &Reads::Stats::active);
  nb::class_<Reads>(
      m, "Reads",
      "Reads of files that go on while the caller computes. For one thread at a time.\n\n"
      "files: their paths and bytes. direct: past the system's cache, if the file systems allow it.\n"
      "engine: \"uring\", \"threads\", or \"auto\": the first that works here. ReadError for a file that\n"
      "cannot be opened, or has another size.\n\n"
      "If any of the others is given, the disk is emulated, for tests: it serves one read after another,\n"
      "in latency seconds and at rate bytes a second (0: at once). The read number fail_at, from 0, and\n"
      "those after it, `failures` in all (None: every one), fail with the errno `error`, 0: as if the\n"
      "file ended.")
      .def("__init__", &make_reads, "files"_a, "direct"_a, "engine"_a = "auto", nb::kw_only(), "latency"_a = nb::none(),
           "rate"_a = nb::none(), "fail_at"_a = nb::none(), "failures"_a = nb::none(), "error"_a = nb::none())
      .def("begin", &begin_reads, "reads"_a, "buffer"_a.noconvert(), nb::keep_alive<1, 3>(),
           "Begin reads, (file, offset, bytes, place in the buffer) each, and return what to wait for.\n\n"
           "Where `direct`, the memory at that place must lie in a block of ALIGN bytes as the offset does, and the\n"
           "rest of the blocks that a read touches must be in the buffer: it is overwritten, too.")
      .def("wait", &Reads::wait, "ticket"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Wait until all of them are there; ReadError if one failed, or the file has changed. They are all over\n"
           "then, but of a disk that has not answered for `patience` seconds they can be waited for again.")
      .def("done", &Reads::done, "ticket"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Whether `wait` would return, or fail, at once.")
      .def("cancel", &Reads::cancel, "ticket"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Return when none of them is under way; some may not have been begun.")
      .def("stats", &Reads::stats)
      .def_prop_ro("engine", &Reads::engine, "Which one: \"uring\", \"threads\" or \"emulated\".")
      .def_prop_ro("direct", &Reads::direct)
      .def_prop_rw(
          "patience", [](const Reads& reads) { return reads.patience; },
          [](Reads& reads, double seconds) {
            require(seconds >= 0, "patience is a number of seconds");
            reads.patience = seconds;
          })
      .def_prop_rw(
          "gap", [](const Reads& reads) { return reads.gap; },
          [](Reads& reads, int64_t bytes) {
            require(bytes >= 0, "a gap has some bytes");
            reads.gap = bytes;
          },
          "Bytes between small parts of `Slots` up to which they are read past the cache as one.")
      .attr("ALIGN") = (int)Reads::ALIGN;
  m.attr("READ_COPIES") = Reads::COPIES;
}

void bind_slots(nb::module_& m) {
  nb::class_<Resting>(m, "Resting",
                      "Where a part of each of equal items rests in a file: item i at offset + i // each * outer\n"
                      "+ i % each * stride.")
      .def(
          "__init__",
          [](Resting* resting, int file, int64_t offset, int64_t bytes, int64_t stride, std::optional<int64_t> each,
             int64_t outer) { new (resting) Resting{file, offset, bytes, stride, each.value_or(1LL << 40), outer}; },
          "file"_a, "offset"_a, "bytes"_a, "stride"_a, "each"_a = nb::none(), "outer"_a = 0)
      .def_static(
          "matrices",
          [](const std::string& type, int64_t rows, int64_t k, const std::vector<std::pair<int, int64_t>>& places) {
            Resting resting{0, 0, rows * stored_row_bytes(type_of(type), k), 0};
            check_stored(type_of(type), rows, k, resting.bytes);
            resting.before = packed_excess(type_of(type), rows, k);
            for (const auto& [file, offset] : places) resting.places.push_back({file, offset});
            return resting;
          },
          "type"_a, "rows"_a, "k"_a, "places"_a,
          "A matrix [rows, k] of each item, at (file, offset), with room for its panels.");
  nb::class_<SlotMemory>(m, "SlotMemory",
                         "Memory for slots of equal size, which several `Slots` may share: each has its own number of\n"
                         "them, and of the rest, `common`, whichever needs more for a while. For one thread at a time.")
      .def(nb::init<int64_t, int64_t, int64_t>(), "slots"_a, "slot_bytes"_a, "common"_a = 0)
      .def(
          "use", &SlotMemory::use, "n"_a, nb::call_guard<nb::gil_scoped_release>(),
          "From now on only the first n slots have items; the memory of the others is given back, and all are let go.\n"
          "Between steps. ReadError: what was being read is not over.")
      .def_prop_ro("slots", &SlotMemory::slots);
  nb::class_<Slots>(m, "Slots",
                    "Items of equal size that rest on disk, and memory for some of them. For one thread at a time.\n\n"
                    "parts: of each item. What has least `priority` is replaced first, of equals the lowest item.\n"
                    "memory: which has as many slots left, and as large ones; None: of its own.")
      .def(nb::init<std::shared_ptr<Reads>, std::vector<Resting>, int64_t, int64_t, std::shared_ptr<SlotMemory>>(),
           "reads"_a, "parts"_a, "items"_a, "slots"_a, "memory"_a = nb::none())
      .def(
          "want",
          [](Slots& slots, Ints items) {
            nb::gil_scoped_release release;
            return slots.want(items.data(), (int64_t)items.shape(0));
          },
          "items"_a,
          "Pin these items, from the first on as many as there is room for beside those pinned, and begin to read\n"
          "those that are not there. How many.")
      .def(
          "fetch",
          [](Slots& slots, Ints items) {
            nb::gil_scoped_release release;
            return slots.fetch(items.data(), (int64_t)items.shape(0));
          },
          "items"_a,
          "Begin to read items that may be wanted later, in place of others of less priority. For how many there\n"
          "was room.")
      .def("wait", nb::overload_cast<>(&Slots::wait), nb::call_guard<nb::gil_scoped_release>(),
           "Wait for what is pinned. ReadError: an item that could not be read is not there, and all are let go.")
      .def("let_go", nb::overload_cast<>(&Slots::let_go), "Of all that is pinned.")
      .def("settle", &Slots::settle, "The same, and common slots are free again: what has least `priority` leaves.")
      .def(
          "held",
          [](const Slots& slots, int64_t item) {
            require(item >= 0 && item < slots.items(), "no such item");
            return slots.held(item);
          },
          "item"_a, "Whether it is in memory.")
      .def(
          "part",
          [](const Slots& slots, int64_t item, size_t part) {
            require(item >= 0 && item < slots.items() && part < slots.parts(), "no such item, or part");
            require(slots.held(item), "that item is not in memory");
            return nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>(
                slots.part(item, part), {(size_t)slots.part_bytes(part)}, nb::find(slots));
          },
          "item"_a, "part"_a, "A part of an item in memory, uint8; it is the item's while that is pinned.")
      .def_prop_ro(
          "lines",
          [](const Slots& slots) -> std::optional<nb::ndarray<nb::numpy, const uint32_t, nb::ndim<1>>> {
            if (!slots.lines()) return {};
            return nb::ndarray<nb::numpy, const uint32_t, nb::ndim<1>>(slots.lines(), {(size_t)slots.items()},
                                                                       nb::find(slots));
          },
          "Where part 0 of each item in memory lies, in units of 64 bytes; None if they do not begin at such.")
      .def_prop_ro(
          "priority",
          [](Slots& slots) {
            return nb::ndarray<nb::numpy, float, nb::ndim<1>>(slots.priority.data(), {slots.priority.size()},
                                                              nb::find(slots));
          },
          "Of each item: the slots' own memory, to be written between steps.")
      .def(
          "stats",
          [](const Slots& slots) {
            const Slots::Stats s = slots.stats();
            return Counts{{"wanted", s.wanted}, {"hits", s.hits}, {"bytes", s.bytes}, {"early", s.early}};
          },
          "wanted: items that were pinned; hits: of those, that needed no read; bytes: read for the others; early: of\n"
          "the hits those that `fetch` has read since they were last pinned, and since `settle`.")
      .def("clear", &Slots::clear, "Reset the counters.")
      .def_prop_ro("memory", &Slots::shared)
      .def_prop_ro("items", &Slots::items)
      .def_prop_ro("slots", &Slots::slots)
      .def_prop_ro("slot_bytes", &Slots::slot_bytes);
}

void bind_program(nb::module_& m) {
  auto program =
      nb::class_<Program>(m, "Program")
          .def(
              "__init__",
              [](Program* p, std::shared_ptr<Workspace> workspace, std::shared_ptr<Cache> cache, int64_t max_tokens,
                 int64_t d_model, int64_t d_ff, std::vector<int64_t> heads, std::optional<int64_t> embed_dim,
                 std::shared_ptr<States> states) {
                Sizes sizes{max_tokens, d_model, d_ff, std::move(heads), embed_dim.value_or(d_model)};
                require(max_tokens > 0 && d_model > 0 && d_ff > 0 && sizes.embed_dim > 0, "sizes must be positive");
                new (p) Program(std::move(workspace), std::move(cache), std::move(sizes), std::move(states));
              },
              "workspace"_a, "cache"_a, "max_tokens"_a, "d_model"_a, "d_ff"_a, "heads"_a, "embed_dim"_a = nb::none(),
              "states"_a = nb::none(), "heads: query heads of each layer of the cache.");
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
      .def("hidden_states", &hidden_states, "rows"_a, "out"_a.noconvert(),
           "out [rows, d_model] = norm(x) with the head's norm: rows of the last step.")
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
           "stop"_a.noconvert() = nb::none(),
           "Run operators [first, last) on a step: tokens, their positions and rows of the page table; the logits of\n"
           "logit_rows go to logits [rows, vocab rounded up to LANES]. read_states, states: for each row of the page\n"
           "table the slots of its state before the step, not read at position 0, and after it. stop: one number;\n"
           "once it is not 0 the run ends with the operator that is under way. False if that was not the last one.");
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
  bind_program(m);
  bind_expert_call(m);
}
