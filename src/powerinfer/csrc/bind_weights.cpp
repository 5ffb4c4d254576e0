// Weights: matrices, bundles of neurons, tables and norms.
#include <algorithm>
#include <atomic>
#include <functional>
#include <numeric>
#include <stdexcept>

#include "bindings.h"
#include "grids.h"
#include "levels.h"
#include "reads.h"
#include "slots.h"

namespace {

// The factors of rows of a type that has them; null: there are none.
const float* factors_of(int type, int64_t rows, const std::optional<Floats>& factors) {
  if (!factors) return nullptr;
  require(pi_factors_bytes(type) > 0, "rows of this type have no factors");
  require((int64_t)factors->shape(0) == rows, "a factor for each row is needed");
  return factors->data();
}

constexpr int64_t AT_ONCE = 1 << 20;  // bytes of a file that are packed, then checked and, if mapped, given back

std::shared_ptr<Matrix> pack_matrix(Pool& pool, std::shared_ptr<Arena> arena, const std::string& type_name,
                                    int64_t rows, int64_t k, Bytes data, std::optional<Ints> map,
                                    std::optional<Floats> factors, bool mapped) {
  const int type = type_of(type_name);
  check_stored(type, rows, k, (int64_t)data.shape(0));
  const float* const of_rows = factors_of(type, rows, factors);
  auto m = std::make_shared<Matrix>();
  m->type = type;
  m->rows = map ? (int64_t)map->shape(0) : rows;
  m->k = k;
  m->panels = (m->rows + PI_LANES - 1) / PI_LANES;
  uint8_t* dst = arena->allocate(m->bytes());
  m->data = dst;
  m->arena = std::move(arena);
  nb::gil_scoped_release release;
  const int64_t panel = PI_LANES * stored_row_bytes(type, k);
  const bool gives_back = mapped && !map;  // rows in their order
  const int64_t at_once = std::max((int64_t)1, AT_ONCE / panel);
  std::atomic<bool> finite = true;
  pool.run([&](int thread) {
    const Columns mine(*m, pool, thread);
    for (int64_t p = mine.p0, end; p < mine.p1; p = end) {
      end = std::min(p + at_once, mine.p1);
      pack_panels(type, data.data(), rows, k, map ? map->data() : nullptr, m->rows, dst, p, end, 0, of_rows);
      if (!panels_are_finite(type, k, dst + p * pi_panel_bytes(type, k), end - p)) finite = false;
      if (gives_back)
        give_back((void*)(data.data() + p * panel), std::min((int64_t)data.shape(0), end * panel) - p * panel);
    }
  });
  if (!finite) throw std::overflow_error("scales of blocks are infinite or not numbers");
  return m;
}

std::shared_ptr<Matrix> disk_matrix(const std::string& type_name, int64_t rows, int64_t k, int file, int64_t offset,
                                    std::optional<Ints> map, std::optional<Floats> factors) {
  const int type = type_of(type_name);
  const int64_t parts = factors ? (int64_t)factors->shape(0) : 1;
  require(parts > 0 && rows % parts == 0, "there are other factors than of equal parts of the rows");
  require(!factors || pi_factors_bytes(type) > 0, "rows of this type have no factors");
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
  m->disk->factors = vector_of(factors);
  return m;
}

// Packs other rows in the place of those from `first` on, which begins a panel.
void repack(Pool& pool, Matrix& m, int64_t first, int64_t rows, Bytes data, std::optional<Floats> factors) {
  require(m.data, "the matrix rests on disk");
  check_stored(m.type, rows, m.k, (int64_t)data.shape(0));
  const float* const of_rows = factors_of(m.type, rows, factors);
  const int64_t panels = (rows + PI_LANES - 1) / PI_LANES;
  require(first >= 0 && first % PI_LANES == 0 && first / PI_LANES + panels <= m.panels, "rows beyond the matrix");
  Matrix part = {m.type, rows, m.k, panels, m.data + first / PI_LANES * pi_panel_bytes(m.type, m.k), nullptr};
  nb::gil_scoped_release release;
  pool.run([&](int thread) {
    const Columns mine(part, pool, thread);
    pack_panels(m.type, data.data(), rows, m.k, nullptr, rows, (uint8_t*)part.data, mine.p0, mine.p1, 0, of_rows);
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
  require(w.data, "the panels of the matrix are not in memory");
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
      kernels->linear[l.type](&l, &own.acts, mine.p0, mine.p1, tokens,
                              (void*)(((uintptr_t)scratch.data() + 63) & ~(uintptr_t)63));
  });
}

// The types of rows for a use, by name: "F16, BF16, ...".
std::string row_types(int kind) {
  std::string names;
  for (int type = 0; type < PI_END_X32; type++) {
    if (!pi_row_type(type, kind)) continue;
    if (!names.empty()) names += ", ";
    names += pi_facts(type).name;
    if (pi_across(type) >= 0) names += "X32";
  }
  return names;
}

int row_type(const std::string& name) {
  const bool across = name.size() > 3 && name.compare(name.size() - 3, 3, "X32") == 0;
  const int type = type_of(across ? name.substr(0, name.size() - 3) : name) + (across ? (int)PI_N_TYPES : 0);
  require(pi_row_type(type, PI_DOT) || pi_row_type(type, PI_ADD),
          "bundles hold " + row_types(PI_DOT) + " of gate and up, " + row_types(PI_ADD) + " of down, not " + name);
  return type;
}

int kind_of(const std::string& name) {
  require(name == "dot" || name == "add", "rows are for 'dot' or for 'add'");
  return name == "dot" ? PI_DOT : PI_ADD;
}

void check_blocks(int type, int64_t k) {
  require(k > 0 && k < (int64_t)1 << 30 && k % (pi_across(type) >= 0 ? PI_GROUP : pi_block(type)) == 0,
          "a quantised row must hold whole blocks");
}

void check_row(int type, int kind, int64_t k) {
  check_blocks(type, k);
  require(pi_row_type(type, kind),
          std::string(pi_facts(type).name) + (kind == PI_ADD ? " is for 'dot' alone" : "X32 is for 'add' alone"));
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

// Down of experts, whose blocks lie across neurons.
void pack_down_of(Pool& pool, const std::string& type_name, int64_t k, int64_t neurons, Bytes data, OutBytes2 out,
                  int64_t pitch, int64_t at) {
  const int64_t groups = (int64_t)out.shape(0), per_expert = neurons / PI_GROUP;
  const PiRows all =
      rows_of(type_name, PI_ADD, k, groups * PI_GROUP, out.data(), out.shape(0), out.shape(1), pitch, at);
  require(pi_across(all.type) >= 0, "blocks of this type do not lie across neurons");
  require(neurons > 0 && neurons % PI_GROUP == 0 && groups % per_expert == 0, "experts have whole groups of neurons");
  const int64_t block = pi_facts(all.type).bytes, row = per_expert * block;
  require((int64_t)data.shape(0) == groups / per_expert * k * row, "the data has another size than these experts");
  nb::gil_scoped_release release;
  pool.run([&](int thread) {
    int64_t begin, end;
    share(groups, 1, pool.threads(), thread, &begin, &end);
    for (int64_t g = begin; g < end; g++)
      pack_group_across(all.type, k, data.data() + g / per_expert * k * row + g % per_expert * block, row,
                        out.data() + g * all.stride, pitch, at);
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
  require(!pi_as_stored(type), "rows of this type lie as model files have them");
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
    require(d_model % pi_block(type_of(name)) == 0, "a quantised row must hold whole blocks");
    return PiRows{down.data(), 0, 0, 0, d_model, type_of(name)};  // not null: else there would be no gate
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

// Rows of experts in slots and behind them of a shared one. The operator that reads them says where those lie.
std::shared_ptr<Bundles> make_expert_rows(const std::shared_ptr<Slots>& slots, int64_t experts, int64_t neurons,
                                          int64_t d_model, const std::string& up_type, const std::string& down_type,
                                          const NeuronSpec& spec, bool has_up, std::optional<Bytes2> shared) {
  require(spec.activation.kind < PI_N_ACTS, "only experts have that activation");
  require(experts > 0 && neurons > 0 && neurons % PI_GROUP == 0, "experts have whole groups of neurons");
  require(experts == slots->items(), "the slots are of another number of experts");
  for (size_t part = has_up ? 0 : 1; part < slots->parts(); part++)
    require(slots->aligned(part), "the neurons do not begin with cache lines of their file");
  const int type = row_type(down_type), of_up = has_up ? row_type(up_type) : type_of(up_type);
  check_row(type, PI_ADD, d_model);
  if (has_up) check_row(of_up, PI_DOT, d_model);
  require(d_model % pi_block(of_up) == 0, "a quantised row must hold whole blocks");
  const int64_t down_at = has_up ? pi_row_bytes(of_up, d_model) : 0, row = down_at + pi_row_bytes(type, d_model);
  const int64_t group = PI_GROUP * row + pi_shared_bytes(type, d_model);
  require(!shared || (int64_t)shared->shape(1) == group, "the groups of the shared expert have another size");
  const int64_t more = shared ? (int64_t)shared->shape(0) : 0, all = experts * neurons + more * PI_GROUP;
  const uint8_t* const memory = slots->memory();
  const auto [base, last] = std::minmax({memory, shared ? shared->data() : memory}, std::less<const uint8_t*>());
  const int64_t bytes = std::max(slots->shared()->slots() * slots->slot_bytes(), more * group);
  require((uintptr_t)base % LINE == 0 && (uintptr_t)last % LINE == 0, "the rows do not begin with cache lines");
  require(all <= INT32_MAX && (last - base + bytes) / LINE <= UINT32_MAX, "so many neurons cannot be had");
  auto b = std::make_shared<Bundles>();
  b->neurons = all;
  b->members.resize((size_t)all);
  std::iota(b->members.begin(), b->members.end(), 0);
  b->lines.resize((size_t)all);
  b->shared_lines.resize((size_t)(all / PI_GROUP));
  for (int64_t g = 0; g < more; g++) {
    const int64_t at = shared->data() - base + g * group, first = experts * neurons + g * PI_GROUP;
    for (int64_t i = 0; i < PI_GROUP; i++) b->lines[(size_t)(first + i)] = (uint32_t)((at + i * row) / LINE);
    b->shared_lines[(size_t)(first / PI_GROUP)] = (uint32_t)((at + PI_GROUP * row) / LINE);
  }
  b->gate = PiRows{nullptr, 0, 0, 0, d_model, 0};
  b->up = PiRows{base, 0, 0, 0, d_model, of_up, has_up ? b->lines.data() : nullptr};
  b->down = PiRows{base, 0, 0, down_at, d_model, type, b->lines.data(), base, b->shared_lines.data()};
  b->firsts = has_up;
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
  require(!b.spec.activation.competes(), "topk and gaussian select by the gates of matrices");
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

}  // namespace

void bind_matrix(nb::module_& m) {
  nb::class_<Arena>(m, "Arena").def(nb::init<>());
  nb::class_<Matrix>(m, "Matrix")
      .def_ro("rows", &Matrix::rows)
      .def_ro("k", &Matrix::k)
      .def_prop_ro("type", [](const Matrix& w) { return std::string(PI_TYPES[w.type].name); })
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
      "factors"_a = nb::none(), "mapped"_a = false,
      "A matrix [rows, k] from the blocks of a model file, uint8 1-D. row_map: packed row r is row row_map[r], zeros\n"
      "where that is -1; factors: of NVFP4, float32 [rows], what the values of each row are multiplied with. mapped: "
      "the\n"
      "data are pages of a file, whose memory is given back as they are packed. OverflowError for scales of\n"
      "blocks that are infinite or NaN.");
  m.def(
      "disk_matrix", &disk_matrix, "type"_a, "rows"_a, "k"_a, "file"_a, "offset"_a, "row_map"_a = nb::none(),
      "factors"_a = nb::none(),
      "A matrix that stays on disk, as of `pack_matrix`: [rows, k] as stored in a file of `Reads` from `offset`\non. A "
      "program that uses it needs a window. factors: of equal parts of the rows, such as experts, or one of all.");
  m.def("repack", &repack, "pool"_a, "matrix"_a, "first"_a, "rows"_a, "data"_a, "factors"_a = nb::none(),
        "Replace rows from `first` on, a multiple of LANES, by [rows, k] as in `pack_matrix`. Not while a step runs.");
  m.def("matmul", &matmul, "pool"_a, "matrix"_a, "level"_a, "x"_a, "out"_a.noconvert(),
        "out = x . matrix^T: x [tokens, k], out [tokens, rows rounded up to LANES].");
}

// What Python knows of a type: its row of POWERINFER_TYPES, or of a type without kernels its name and sizes.
struct TypeOfWeights {
  PiTypeFacts of;
  bool native;
};

std::vector<TypeOfWeights> every_type() {
  std::vector<TypeOfWeights> types;
  for (const PiTypeFacts& of : PI_TYPES) types.push_back({of, true});
  for (const PiTypeFacts& of : PI_STORED_TYPES) types.push_back({of, false});
  return types;
}

std::vector<int> entries_of(int values) {
  const int8_t* entries = values == PI_VALUES_IQ4    ? PI_IQ4_ENTRIES
                          : values == PI_VALUES_E2M1 ? PI_E2M1_ENTRIES
                                                     : nullptr;
  return entries ? std::vector<int>(entries, entries + 16) : std::vector<int>();
}

std::vector<int> grid_values(const std::string& name) {
  const Grid* grid = find_grid(name.c_str());
  if (!grid) throw std::invalid_argument("there is no grid " + name);
  std::vector<int> values;
  for (int i = 0; i < grid->n * grid->of; i++) values.push_back(grid->value(i / grid->of, i % grid->of));
  return values;
}

void bind_types(nb::module_& m) {
  nb::class_<TypeOfWeights>(
      m, "WeightType",
      "A type of weights: a row of the table that the kernels are compiled with (csrc/types.h).\n\n"
      "native: whether matrices of it have kernels; of a type without, only name, id, block and\n"
      "nbytes are known.")
      .def_prop_ro("name", [](const TypeOfWeights& t) { return std::string(t.of.name); })
      .def_prop_ro(
          "id", [](const TypeOfWeights& t) { return t.of.id; }, "ggml's number.")
      .def_prop_ro(
          "block", [](const TypeOfWeights& t) { return t.of.block; }, "Elements of a stored block.")
      .def_prop_ro(
          "nbytes", [](const TypeOfWeights& t) { return t.of.bytes; }, "Bytes of a stored block.")
      .def_ro("native", &TypeOfWeights::native)
      .def_prop_ro(
          "codes_at", [](const TypeOfWeights& t) { return t.of.at; }, "The byte of a block at which codes begin.")
      .def_prop_ro(
          "codes", [](const TypeOfWeights& t) { return t.of.codes; }, "Bytes of a block's codes.")
      .def_prop_ro(
          "panel_scales", [](const TypeOfWeights& t) { return t.of.scales; },
          "Bytes of the scales of a row in a panel, for each block.")
      .def_prop_ro(
          "halves",
          [](const TypeOfWeights& t) {
            std::vector<int> at;
            for (int place : {t.of.d, t.of.m})
              if (place >= 0) at.push_back(place);
            return at;
          },
          "The bytes of a block at which its float16 scale and its minimum are, of types that have them.")
      .def_prop_ro(
          "offset", [](const TypeOfWeights& t) { return t.of.offset; }, "How far codes are above their values.")
      .def_prop_ro("floats", [](const TypeOfWeights& t) { return t.native && t.of.values == PI_VALUES_FLOATS; })
      .def_prop_ro(
          "entries", [](const TypeOfWeights& t) { return entries_of(t.of.values); },
          "What each code stands for, of E2M1 twice that; empty where codes are numbers.")
      .def_prop_ro(
          "grid", [](const TypeOfWeights& t) { return t.of.values == PI_VALUES_GRID; },
          "Whether blocks refer to entries of a grid.")
      .def_prop_ro(
          "dots", [](const TypeOfWeights& t) { return (t.of.rows & PI_ROWS_DOT) != 0; }, "Of gate and up.")
      .def_prop_ro(
          "adds", [](const TypeOfWeights& t) { return (t.of.rows & PI_ROWS_ADD) != 0; }, "Of down.")
      .def_prop_ro(
          "across", [](const TypeOfWeights& t) { return (t.of.rows & PI_ROWS_X32) != 0; },
          "Whether rows of down may have their blocks across the neurons of a group.")
      .def_prop_ro(
          "gpu", [](const TypeOfWeights& t) { return std::string(t.of.gpu); }, "The type of its matrices on a GPU.");
  m.def("grid", &grid_values, "name"_a,
        "The values of the entries of a grid of the IQ types, one entry after the other.");
  m.def("types", &every_type, "The types of weights: those with kernels, then the others of GGUF files.");
}

void bind_bundle_rows(nb::module_& m) {
  bind_types(m);
  m.attr("NEURON_TOKENS") = (int)PI_NEURON_TOKENS;
  m.def(
      "bundle_row_bytes",
      [](const std::string& type, int64_t k) {
        const int t = row_type(type);
        check_blocks(t, k);
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
  m.def("pack_down", &pack_down_of, "pool"_a, "type"_a, "k"_a, "neurons"_a, "data"_a, "out"_a.noconvert(), "pitch"_a,
        "at"_a,
        "Write the down rows of bundles, of a type across neurons, from matrices [k, neurons] of experts as a model "
        "file\n"
        "stores them: data, one after another; out: [groups, bytes of a group].");
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
      "in which their magnitudes are compared; of gaussian, how many standard deviations above the mean the\n"
      "cutoff of a token's gates is, beyond which gelu_tanh is of what exceeds it. product_limits, beside limits of "
      "fatrelu and cats and with a\n"
      "gate: what the magnitude of each neuron's product of gate and up must exceed, or it is zero. curve, of\n"
      "xielu: factors of x^2 above zero, of e^x - 1 - x below, of x, and the largest x of that exponential.")
      .def(
          "__init__",
          [](NeuronSpec* spec, const std::string& activation, float threshold, std::optional<Floats> gate_bias,
             std::optional<Floats> up_bias, std::optional<Floats> limits, std::optional<Floats> product_limits,
             const std::vector<float>& curve) {
            Activation own{PI_GELU_TANH, threshold, activation == "gaussian", {}};
            if (!own.cuts) own.kind = index_of(ACTIVATIONS, PI_N_ACTS + 1, activation, "activation");
            require(curve.size() == (own.kind == PI_XIELU ? 4 : 0), "a curve of four numbers goes with xielu");
            if (!curve.empty()) own.curve = {curve[0], curve[1], curve[2], curve[3]};
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
          "up_bias"_a = nb::none(), "limits"_a = nb::none(), "product_limits"_a = nb::none(),
          "curve"_a = std::vector<float>());
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
      "expert_rows", &make_expert_rows, "slots"_a, "experts"_a, "neurons"_a, "d_model"_a, "up_type"_a, "down_type"_a,
      "spec"_a, "has_up"_a, "shared"_a.noconvert() = nb::none(), nb::keep_alive<0, 1>(), nb::keep_alive<0, 9>(),
      "Bundles of experts on disk, `neurons` of each: down, and up before it if has_up. The parts of the slots' items\n"
      "are up unless the bundles have it, the rows, read later, and the scales that their groups share, if any.\n"
      "shared: the bundles of a shared expert behind them, [groups, bytes of 32 rows and what they share], kept.");
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

Vector ordered(const Vector& numbers, const std::vector<int32_t>& order) {
  Vector moved(numbers);
  for (size_t i = 0; i < order.size() && !numbers.empty(); i++) moved[i] = numbers[(size_t)order[i]];
  return moved;
}

void bind_norm(nb::module_& m) {
  nb::class_<Norm>(m, "Norm").def(
      "__init__",
      [](Norm* norm, Floats weight, float eps, std::optional<Floats> bias, bool layer, bool plain,
         std::optional<Ints> order) {
        require(weight.shape(0) > 0, "a norm needs weights");
        require(!plain || !layer, "a norm is either plain or a LayerNorm");
        require(!bias || (layer && bias->shape(0) == weight.shape(0)),
                "only a LayerNorm has a bias, as long as its weights");
        std::vector<int32_t> from = order_of(order, (int64_t)weight.shape(0));
        new (norm) Norm{ordered(vector_of(weight), from), ordered(vector_of(bias), from), eps, layer, plain, from};
      },
      "weight"_a, "eps"_a, "bias"_a = nb::none(), "layer"_a = false, "plain"_a = false, "order"_a = nb::none(),
      "RMS norm; LayerNorm where `layer`; only a product with the weights where `plain`.\n\n"
      "order: number i of the result is that of number order[i]; weight and bias are of the rows as they come.");
}
