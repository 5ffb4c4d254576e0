// The only file that knows Python.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <math.h>
#include <string.h>

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <thread>

#include "bundles.h"
#include "levels.h"
#include "panels.h"
#include "pool.h"
#include "program.h"
#include "sparse.h"

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
using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ints2 = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

const char* const TYPES[PI_N_TYPES] = {"F32",  "F16",  "BF16", "Q8_0", "Q4_0", "Q4_1",
                                       "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"};
const char* const ACTIVATIONS[PI_N_ACTS] = {"silu", "relu", "relu2", "fatrelu", "drelu", "gelu_tanh"};
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

std::shared_ptr<Matrix> pack(Pool& pool, std::shared_ptr<Arena> arena, const std::string& type_name, int64_t rows,
                             int64_t k, Bytes data, std::optional<Ints> map) {
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
  struct Job {
    Matrix* m;
    const uint8_t* src;
    int64_t rows;
    const int32_t* map;
    uint8_t* dst;
    Pool* pool;
  };
  Job job{m.get(), data.data(), rows, map ? map->data() : nullptr, dst, &pool};
  nb::gil_scoped_release release;
  pool.run(
      [](void* context, int t) {
        const Job& j = *(Job*)context;
        int64_t p0, p1;
        share(j.m->panels, 1, j.pool->threads(), t, &p0, &p1);
        pack_panels(j.m->type, j.src, j.rows, j.m->k, j.map, j.m->rows, j.dst, p0, p1);
      },
      &job);
  return m;
}

// Rows of activations in the forms asked for.
struct Acts {
  std::vector<uint16_t> b;
  std::vector<int8_t> q;
  std::vector<float> d, sd;
  std::vector<int16_t> s;
  PiActs acts;
  Acts(const PiKernels* kernels, const float* x, int64_t tokens, int64_t k, int forms)
      : b((size_t)(tokens * pi_round_up(k, 32))),
        q((size_t)(tokens * k + 64)),
        d((size_t)(tokens * (k / 32 + 1))),
        sd(d.size()),
        s((size_t)(tokens * (k / 16 + 1))) {
    acts = {x, b.data(), q.data(), d.data(), sd.data(), s.data(), k, k, pi_round_up(k, 32)};
    for (int64_t i = 0; i < tokens; i++) {
      const PiActs row = pi_acts_from(&acts, i, 0);
      kernels->forms(x + i * k, k, forms, &row);
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
  const PiActs& acts = own.acts;
  const PiLinear l{w.data, nullptr, out.data(), w.panels * PI_LANES, w.type, 0};
  struct Job {
    const PiKernels* kernels;
    const PiLinear* l;
    const PiActs* acts;
    int64_t panels, tokens;
    Pool* pool;
  };
  Job job{kernels, &l, &acts, w.panels, tokens, &pool};
  nb::gil_scoped_release release;
  pool.run(
      [](void* context, int t) {
        const Job& j = *(Job*)context;
        int64_t p0, p1;
        share(j.panels, 1, j.pool->threads(), t, &p0, &p1);
        std::vector<uint8_t> scratch((size_t)pi_linear_scratch(j.acts->k) + 64);
        if (p0 < p1)
          j.kernels->linear(j.l, j.acts, p0, p1, j.tokens, (void*)(((uintptr_t)scratch.data() + 63) & ~(uintptr_t)63));
      },
      &job);
}

int part_type(const std::string& name) {
  const int type = name == "Q4_0X32" ? (int)PI_Q4_0X32 : type_of(name);
  require(pi_part_type(type), "bundles hold F16, BF16, Q8_0, Q4_0 and Q4_0X32, not " + name);
  return type;
}

int kind_of(const std::string& name) {
  require(name == "dot" || name == "add", "a part is for 'dot' or for 'add'");
  return name == "dot" ? PI_DOT : PI_ADD;
}

// One part of bundles of `rows` neurons, [groups, bytes of a group], which lie `pitch` apart.
PiPart part_of(const std::string& type_name, int kind, int64_t k, int64_t rows, const uint8_t* data, size_t groups,
               size_t bytes, int64_t pitch, int64_t at) {
  const int type = part_type(type_name);
  const int64_t stride = (int64_t)bytes;
  require(k > 0 && (type <= PI_BF16 || k % 32 == 0), "a quantised part must hold whole blocks");
  require(type != PI_Q4_0X32 || kind == PI_ADD, "Q4_0X32 is for 'add' alone");
  require(rows > 0 && (rows + PI_GROUP - 1) / PI_GROUP == (int64_t)groups, "the bundles are not those of so many rows");
  require(pitch > 0 && pitch % 64 == 0 && pitch <= stride / PI_GROUP && stride % 64 == 0 &&
              pi_shared_bytes(type, k) <= stride - PI_GROUP * pitch && at >= 0 && at % 64 == 0 && at <= pitch &&
              pi_part_bytes(type, k) <= pitch - at,
          "a part does not fit into its bundle, or is not aligned");
  return {data, stride, pitch, at, k, type};
}

void pack_parts(Pool& pool, const std::string& type_name, const std::string& kind_name, int64_t rows, int64_t k,
                Bytes data, OutBytes2 out, int64_t pitch, int64_t at) {
  const int kind = kind_of(kind_name);
  const PiPart part = part_of(type_name, kind, k, rows, out.data(), out.shape(0), out.shape(1), pitch, at);
  require((int64_t)data.shape(0) == part_source_bytes(part.type, rows, k),
          "the data has another size than its shape and type say");
  struct Job {
    const PiPart& part;
    int kind;
    int64_t rows;
    const uint8_t* src;
    uint8_t* dst;
    Pool* pool;
  };
  Job job{part, kind, rows, data.data(), out.data(), &pool};
  nb::gil_scoped_release release;
  pool.run(
      [](void* context, int t) {
        const Job& j = *(Job*)context;
        int64_t begin, end;
        share((j.rows + PI_GROUP - 1) / PI_GROUP, 1, j.pool->threads(), t, &begin, &end);
        for (int64_t g = begin; g < end; g++) {
          pack_part(j.part.type, j.kind, std::min(j.rows - g * PI_GROUP, (int64_t)PI_GROUP), j.part.k,
                    j.src + part_source_bytes(j.part.type, g * PI_GROUP, j.part.k), j.dst + g * j.part.stride,
                    j.part.pitch, j.part.at);
        }
      },
      &job);
}

void unpack_parts(const std::string& type_name, const std::string& kind_name, int64_t k, Bytes2 data, int64_t pitch,
                  int64_t at, OutFloats2 out) {
  const int kind = kind_of(kind_name);
  const int64_t rows = (int64_t)out.shape(0);
  const PiPart part = part_of(type_name, kind, k, rows, data.data(), data.shape(0), data.shape(1), pitch, at);
  require((int64_t)out.shape(1) == k, "out must be [rows, k]");
  for (int64_t r = 0; r < rows; r++) unpack_part(kind, part, r, out.data() + r * k);
}

std::shared_ptr<Bundles> make_bundles(Bytes2 data, int64_t neurons, int64_t d_model,
                                      const std::optional<std::string>& gate_type, const std::string& up_type,
                                      const std::string& down_type, int64_t pitch, int64_t gate_at, int64_t up_at,
                                      int64_t down_at, const std::string& activation, float threshold,
                                      std::optional<Floats> gate_bias, std::optional<Floats> up_bias,
                                      std::optional<Ints> counts) {
  auto b = std::make_shared<Bundles>();
  const int64_t groups = counts ? (int64_t)counts->shape(0) : (int64_t)data.shape(0);
  int64_t group_bytes = (int64_t)data.shape(1);
  if (counts) {
    const int64_t shared = pi_shared_bytes(part_type(down_type), d_model);
    require(data.shape(0) == 1 && pitch > 0 && groups > 0, "bundles of groups that differ come one behind the other");
    b->offsets.push_back(0);
    for (int64_t g = 0; g < groups; g++) {
      const int64_t n = counts->data()[g];
      require(n >= 0 && n <= PI_GROUP, "a group has between 0 and 32 bundles");
      for (int64_t i = 0; i < n; i++) b->members.push_back((int32_t)(g * PI_GROUP + i));
      b->offsets.push_back(b->offsets.back() + (n ? n * pitch + shared : 0));
    }
    require(b->offsets.back() == (int64_t)data.shape(1), "the bundles are not those of so many rows");
    require((int64_t)b->members.size() == neurons, "the groups do not hold so many neurons");
    neurons = groups * PI_GROUP;
    group_bytes = PI_GROUP * pitch + shared;
  } else {
    b->members.resize((size_t)std::max(neurons, (int64_t)0));
    std::iota(b->members.begin(), b->members.end(), 0);
  }
  const auto part = [&](const std::string& name, int kind, int64_t at) {
    PiPart whole = part_of(name, kind, d_model, neurons, data.data(), (size_t)groups, (size_t)group_bytes, pitch, at);
    if (counts) whole.offsets = b->offsets.data();
    return whole;
  };
  b->gate = gate_type ? part(*gate_type, PI_DOT, gate_at) : PiPart{nullptr, 0, 0, 0, d_model, 0};
  b->up = part(up_type, PI_DOT, up_at);
  b->down = part(down_type, PI_ADD, down_at);
  b->neurons = neurons;
  b->act = index_of(ACTIVATIONS, PI_N_ACTS, activation, "activation");
  b->threshold = threshold;
  b->gate_bias = vector_of(gate_bias);
  b->up_bias = vector_of(up_bias);
  require(b->neurons > 0 && (b->gate_bias.empty() || (int64_t)b->gate_bias.size() == b->neurons) &&
              (b->up_bias.empty() || (int64_t)b->up_bias.size() == b->neurons),
          "biases must have one value for every neuron");
  require(b->gated() || b->gate_bias.empty(), "a bias of gate, but no gate");
  return b;
}

// What listed neurons add to the output, by one thread.
void bundles_part(const Bundles& b, const std::string& level, Floats2 x, Ints index, OutFloats2 out, float most) {
  const PiKernels* kernels = find_level(level);
  const int64_t tokens = (int64_t)x.shape(0), k = b.up.k, n = (int64_t)index.shape(0);
  require(tokens > 0 && tokens <= PI_NEURON_TOKENS, "bundles take between 1 and 32 tokens");
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
  add_neurons(kernels, b, &own.acts, tokens, index.data(), n, {nullptr, 0, nullptr, most}, block, out.data(), k,
              counts);
}

const char* const WAYS[N_WAYS] = {"dense", "exact", "predicted"};

std::unique_ptr<Predictor> predictor_of(std::shared_ptr<Matrix> in, std::shared_ptr<Matrix> out, float threshold,
                                        int64_t floor) {
  require((bool)in == (bool)out, "a predictor has two matrices");
  return in ? std::make_unique<Predictor>(Predictor{std::move(in), std::move(out), threshold, floor}) : nullptr;
}

void sparsify(Program& p, size_t op, std::shared_ptr<Bundles> bundles, std::shared_ptr<Matrix> in,
              std::shared_ptr<Matrix> out, float threshold, int64_t floor, float most, int64_t recall_every) {
  p.sparsify(op, std::move(bundles), predictor_of(std::move(in), std::move(out), threshold, floor), most, recall_every);
}

void neurons_ffn(Program& p, const Norm* norm, std::shared_ptr<Bundles> bundles, std::optional<Floats> down_bias,
                 bool replace, float most, std::shared_ptr<Matrix> inner, std::shared_ptr<Matrix> outer,
                 float threshold, int64_t floor, const Norm* out_norm) {
  FfnInput in;
  in.norm = norm_of(norm);
  in.out_norm = norm_of(out_norm);
  in.down_bias = vector_of(down_bias);
  in.act = bundles->act;
  in.threshold = bundles->threshold;
  in.replace = replace;
  p.neurons_ffn(std::move(in), std::move(bundles), predictor_of(std::move(inner), std::move(outer), threshold, floor),
                most);
}

// out = what an FFN that has bundles alone makes of x.
bool neuron_sum(Program& p, size_t op, Floats2 x, std::optional<Bytes2> names, OutFloats2 out) {
  const Bundles& b = *p.sparse(op).bundles;
  const int64_t k = p.sizes.d_model;
  Step step;
  step.tokens = (int64_t)x.shape(0);
  require(step.tokens > 0 && step.tokens <= p.sizes.max_tokens, "a step takes between 1 and max_tokens tokens");
  require((int64_t)x.shape(1) == k && out.shape(0) == x.shape(0) && (int64_t)out.shape(1) == k,
          "x and out must be [tokens, d_model]");
  require(!names || (names->shape(0) == x.shape(0) && names->shape(1) == b.members.size()),
          "names must be [tokens, neurons]");
  nb::gil_scoped_release release;
  if (names) {
    uint8_t any = 0;
    for (size_t i = 0; i < names->size(); i++) any |= names->data()[i];
    if (!any) {
      memset(out.data(), 0, out.size() * sizeof(float));
      return false;
    }
  }
  for (int64_t i = 0; i < step.tokens; i++) memcpy(p.x + i * p.ldx, x.data() + i * k, (size_t)k * sizeof(float));
  p.names = names ? names->data() : nullptr;
  p.run_alone(step, op);
  p.names = nullptr;
  for (int64_t i = 0; i < step.tokens; i++) memcpy(out.data() + i * k, p.x + i * p.ldx, (size_t)k * sizeof(float));
  return true;
}

void set_ways(Program& p, size_t op, const std::vector<std::string>& names) {
  SparseFfn& s = p.sparse(op);
  require(names.size() == PI_NEURON_TOKENS, "a way is needed for each number of tokens");
  Way ways[PI_NEURON_TOKENS];
  for (size_t i = 0; i < names.size(); i++) {
    ways[i] = (Way)index_of(WAYS, N_WAYS, names[i], "way");
    require(ways[i] != WAY_PREDICTED || s.predictor, "that operator has no predictor");
  }
  std::copy(ways, ways + PI_NEURON_TOKENS, s.ways + 1);
}

std::vector<std::pair<std::string, int64_t>> neuron_stats(const Program& p, size_t op) {
  const NeuronStats& s = p.sparse(op).stats;
  return {{"steps", s.steps},
          {"exact_steps", s.exact_steps},
          {"tokens", s.tokens},
          {"active", s.active},
          {"candidates", s.candidates},
          {"first_rows", s.first_rows},
          {"up_rows", s.up_rows},
          {"down_rows", s.down_rows},
          {"shared_scales", s.shared_scales},
          {"sampled_tokens", s.sampled_tokens},
          {"sampled_active", s.sampled_active},
          {"sampled_found", s.sampled_found}};
}

void run(Program& p, Ints tokens, Ints positions, Ints rows, Ints2 page_table, Ints logit_rows, OutFloats2 logits,
         size_t first, size_t last, int64_t vocab) {
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
          "more logits are asked for than there is room for");
  require(vocab > 0 && (p.table_rows == 0 || vocab <= p.table_rows), "the vocabulary is larger than the embedding");
  require(p.head_panels == 0 || p.head_panels == pi_round_up(vocab, PI_LANES) / PI_LANES,
          "the vocabulary has another size than the output head");
  require(step.logit_stride == pi_round_up(vocab, PI_LANES),
          "the logits have another width than the vocabulary, rounded up to 16");
  const int32_t *row = rows.data(), *table = page_table.data();
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
    }
  }
  for (const Run& r : step.runs) {
    for (int64_t page = 0; page <= (r.position + r.count - 1) / PI_PAGE; page++) {
      require(r.pages[page] >= 0 && r.pages[page] < p.cache->pages, "a page is outside the cache");
    }
  }
  for (int64_t i = 0; i < step.logit_rows; i++)
    require(step.logit_row[i] >= 0 && step.logit_row[i] < step.tokens, "a logit row is outside the step");
  nb::gil_scoped_release release;
  p.run(step, first, last);
}

}  // namespace

NB_MODULE(_native, m) {
  m.attr("PAGE") = (int)PI_PAGE;
  m.attr("LANES") = (int)PI_LANES;
  m.attr("TYPES") = nb::cast(std::vector<std::string>(TYPES, TYPES + PI_N_TYPES));
  m.attr("ACTIVATIONS") = nb::cast(std::vector<std::string>(ACTIVATIONS, ACTIVATIONS + PI_N_ACTS));
  m.attr("KV_TYPES") = nb::cast(std::vector<std::string>(KV_TYPES, KV_TYPES + PI_N_KV_TYPES));

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
      "The level of that name, the best for an empty one; ValueError when it cannot run here.");
  m.def(
      "panel_bytes", [](const std::string& type, int64_t k) { return pi_panel_bytes(type_of(type), k); }, "type"_a,
      "k"_a, "Bytes of 16 packed rows of k columns.");
  m.def(
      "kv_page_bytes",
      [](const std::string& type, int layers, int kv_heads, int head_dim) {
        return (int64_t)layers * kv_heads *
               pi_kv_head_bytes(index_of(KV_TYPES, PI_N_KV_TYPES, type, "KV type"), pi_round_up(head_dim, PI_LANES));
      },
      "type"_a, "layers"_a, "kv_heads"_a, "head_dim"_a, "Bytes of one page of 32 tokens of all layers.");

  nb::class_<Pool>(m, "Pool")
      .def(
          "__init__",
          [](Pool* pool, int threads) {
            require(threads >= 1 && threads <= 1024, "the number of threads must lie between 1 and 1024");
            new (pool) Pool(threads);
          },
          "threads"_a)
      .def_prop_ro("threads", &Pool::threads);
  nb::class_<Arena>(m, "Arena").def(nb::init<>());
  nb::class_<Matrix>(m, "Matrix")
      .def_ro("rows", &Matrix::rows)
      .def_ro("k", &Matrix::k)
      .def_prop_ro("type", [](const Matrix& w) { return std::string(TYPES[w.type]); })
      .def_prop_ro("nbytes", &Matrix::bytes);
  m.def("pack", &pack, "pool"_a, "arena"_a, "type"_a, "rows"_a, "k"_a, "data"_a, "row_map"_a = nb::none());
  m.def("matmul", &matmul, "pool"_a, "matrix"_a, "level"_a, "x"_a, "out"_a.noconvert());

  m.attr("NEURON_TOKENS") = (int)PI_NEURON_TOKENS;
  m.def(
      "part_bytes",
      [](const std::string& type, int64_t k) {
        const int t = part_type(type);
        require(k > 0 && (t <= PI_BF16 || k % 32 == 0), "a quantised part must hold whole blocks");
        return pi_part_bytes(t, k);
      },
      "type"_a, "k"_a, "Bytes of one neuron's row of a part.");
  m.def(
      "shared_bytes", [](const std::string& type, int64_t k) { return pi_shared_bytes(part_type(type), k); }, "type"_a,
      "k"_a, "Bytes of the scales that the rows of a group share.");
  m.attr("GROUP") = (int)PI_GROUP;
  m.def("pack_part", &pack_parts, "pool"_a, "type"_a, "kind"_a, "rows"_a, "k"_a, "data"_a, "out"_a.noconvert(),
        "pitch"_a, "at"_a);
  m.def("unpack_part", &unpack_parts, "type"_a, "kind"_a, "k"_a, "data"_a, "pitch"_a, "at"_a, "out"_a.noconvert());
  nb::class_<Bundles>(m, "Bundles")
      .def(nb::new_(&make_bundles), "data"_a.noconvert(), "neurons"_a, "d_model"_a, "gate_type"_a.none(), "up_type"_a,
           "down_type"_a, "pitch"_a, "gate_at"_a, "up_at"_a, "down_at"_a, "activation"_a, "threshold"_a,
           "gate_bias"_a = nb::none(), "up_bias"_a = nb::none(), "counts"_a = nb::none(),
           nb::keep_alive<0, 2>())  // 1 is the class
      .def_ro("neurons", &Bundles::neurons)
      .def("part", &bundles_part, "level"_a, "x"_a, "index"_a, "out"_a.noconvert(), "most"_a = 0.0f);

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

  nb::class_<Norm>(m, "Norm").def(
      "__init__",
      [](Norm* norm, Floats weight, float eps, std::optional<Floats> bias, bool layer) {
        require(weight.shape(0) > 0, "a norm needs weights");
        require(!bias || (layer && bias->shape(0) == weight.shape(0)),
                "only a LayerNorm has a bias, as long as its weights");
        new (norm) Norm{vector_of(weight), vector_of(bias), eps, layer};
      },
      "weight"_a, "eps"_a, "bias"_a = nb::none(), "layer"_a = false);

  nb::class_<Cache>(m, "Cache")
      .def(
          "__init__",
          [](Cache* cache, const std::string& type, int layers, int kv_heads, int head_dim, int64_t pages) {
            require(layers > 0 && kv_heads > 0 && head_dim > 0 && pages > 0, "a cache needs layers, heads and pages");
            new (cache) Cache(index_of(KV_TYPES, PI_N_KV_TYPES, type, "KV type"), layers, kv_heads, head_dim, pages);
          },
          "type"_a, "layers"_a, "kv_heads"_a, "head_dim"_a, "pages"_a)
      .def_ro("pages", &Cache::pages)
      .def_prop_ro("nbytes", &Cache::bytes);

  nb::class_<Watch>(m, "Watch")
      .def(
          "__init__",
          [](Watch* watch, const Program& p) {
            new (watch) Watch(p.sizes.d_ff, p.sizes.max_tokens, p.pool->threads());
          },
          "program"_a)
      .def_rw("gate", &Watch::gate)
      .def_rw("silence", &Watch::silence)
      .def_rw("measure", &Watch::measure)
      .def_prop_rw(
          "most", [](const Watch& w) { return w.most; },
          [](Watch& w, float most) {
            require(most >= 0, "a threshold is negative or no number");
            w.most = most;
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
          "tokens"_a)
      .def_prop_ro_static("BINS_PER_OCTAVE", [](nb::handle) { return (int)Watch::PER_OCTAVE; })
      .def_prop_ro_static("LOWEST_OCTAVE", [](nb::handle) { return (int)Watch::LOW; });

  nb::class_<Program>(m, "Program")
      .def(
          "__init__",
          [](Program* p, std::shared_ptr<Pool> pool, std::shared_ptr<Cache> cache, const std::string& level,
             int64_t max_tokens, int64_t d_model, int64_t d_ff, int64_t heads, int64_t kv_heads, int64_t head_dim,
             std::optional<int64_t> embed_dim) {
            const Sizes sizes{max_tokens, d_model, d_ff, heads, kv_heads, head_dim, embed_dim.value_or(d_model)};
            require(max_tokens > 0 && d_model > 0 && d_ff > 0 && heads > 0 && kv_heads > 0 && head_dim > 0 &&
                        sizes.embed_dim > 0,
                    "sizes must be positive");
            new (p) Program(std::move(pool), std::move(cache), find_level(level), sizes);
          },
          "pool"_a, "cache"_a, "level"_a, "max_tokens"_a, "d_model"_a, "d_ff"_a, "heads"_a, "kv_heads"_a, "head_dim"_a,
          "embed_dim"_a = nb::none())
      .def(
          "add_rope",
          [](Program& p, Floats frequencies, float factor) { return p.add_rope(vector_of(frequencies), factor); },
          "frequencies"_a, "factor"_a)
      .def(
          "embed",
          [](Program& p, std::shared_ptr<Table> table, std::shared_ptr<Table> positions, int64_t offset,
             std::shared_ptr<Matrix> project,
             float scale) { p.embed({std::move(table), std::move(positions), offset, std::move(project), scale}); },
          "table"_a, "positions"_a = nb::none(), "offset"_a = 0, "project"_a = nb::none(), "scale"_a = 1.0f,
          nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>())
      .def(
          "attention_input",
          [](Program& p, int layer, const Norm* norm, std::shared_ptr<Matrix> q, std::shared_ptr<Matrix> k,
             std::shared_ptr<Matrix> v, std::optional<Floats> q_bias, std::optional<Floats> k_bias,
             std::optional<Floats> v_bias, const Norm* q_norm, const Norm* k_norm, int rope,
             std::optional<float> scale) {
            p.attention_input({layer, norm_of(norm), norm_of(q_norm), norm_of(k_norm), vector_of(q_bias),
                               vector_of(k_bias), vector_of(v_bias), std::move(q), std::move(k), std::move(v), rope,
                               scale.value_or(1.0f / sqrtf((float)p.sizes.head_dim))});
          },
          "layer"_a, "norm"_a.none(), "q"_a, "k"_a, "v"_a, "q_bias"_a = nb::none(), "k_bias"_a = nb::none(),
          "v_bias"_a = nb::none(), "q_norm"_a = nb::none(), "k_norm"_a = nb::none(), "rope"_a = -1,
          "scale"_a = nb::none())
      .def("attention", &Program::attention, "layer"_a, "window"_a)
      .def(
          "project",
          [](Program& p, std::shared_ptr<Matrix> w, std::optional<Floats> bias, const Norm* norm) {
            p.project(std::move(w), vector_of(bias), norm_of(norm));
          },
          "w"_a, "bias"_a = nb::none(), "norm"_a = nb::none())
      .def(
          "ffn",
          [](Program& p, const Norm* norm, std::shared_ptr<Matrix> gate, std::shared_ptr<Matrix> up,
             std::shared_ptr<Matrix> down, std::optional<Floats> gate_bias, std::optional<Floats> up_bias,
             std::optional<Floats> down_bias, const std::string& activation, float threshold, const Norm* out_norm) {
            p.ffn({norm_of(norm), norm_of(out_norm), std::move(gate), std::move(up), std::move(down),
                   vector_of(gate_bias), vector_of(up_bias), vector_of(down_bias),
                   index_of(ACTIVATIONS, PI_N_ACTS, activation, "activation"), threshold});
          },
          "norm"_a.none(), "gate"_a.none(), "up"_a, "down"_a, "gate_bias"_a = nb::none(), "up_bias"_a = nb::none(),
          "down_bias"_a = nb::none(), "activation"_a = ACTIVATIONS[PI_SILU], "threshold"_a = 0.0f,
          "out_norm"_a = nb::none())
      .def("neurons_ffn", &neurons_ffn, "norm"_a.none(), "bundles"_a, "down_bias"_a = nb::none(), "replace"_a = false,
           "most"_a = 0.0f, "predictor_in"_a = nb::none(), "predictor_out"_a = nb::none(),
           "predictor_threshold"_a = 0.0f, "floor"_a = 0, "out_norm"_a = nb::none())
      .def(
          "set_predicts", [](Program& p, size_t op, bool on) { p.sparse(op).predicts = on; }, "op"_a, "on"_a)
      .def("replace_bundles", &Program::replace_bundles, "op"_a, "bundles"_a)
      .def(
          "count_fired",
          [](Program& p, size_t op, bool on) {
            SparseFfn& s = p.sparse(op);
            s.fired.assign(on ? (size_t)s.bundles->neurons : 0, 0);
          },
          "op"_a, "on"_a)
      .def(
          "fired",
          [](Program& p, size_t op, nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> out) {
            const SparseFfn& s = p.sparse(op);
            require(!s.fired.empty() && out.shape(0) == s.bundles->members.size(),
                    "what fires is not counted, or of another number of neurons");
            for (size_t j = 0; j < out.shape(0); j++) out.data()[j] = s.fired[(size_t)s.bundles->members[j]];
          },
          "op"_a, "out"_a.noconvert())
      .def("neuron_sum", &neuron_sum, "op"_a, "x"_a, "names"_a.none(), "out"_a.noconvert())
      .def("sparsify", &sparsify, "op"_a, "bundles"_a, "predictor_in"_a.none(), "predictor_out"_a.none(), "threshold"_a,
           "floor"_a, "most"_a, "recall_every"_a)
      .def("set_ways", &set_ways, "op"_a, "ways"_a)
      .def(
          "set_dense_above",
          [](Program& p, size_t op, double share) {
            require(share >= 0 && share <= 1, "a share lies between 0 and 1");
            p.sparse(op).dense_above = share;
          },
          "op"_a, "share"_a)
      .def("neuron_stats", &neuron_stats, "op"_a)
      .def(
          "clear_neuron_stats", [](Program& p, size_t op) { p.sparse(op).stats = {}; }, "op"_a)
      .def("normalise", &Program::normalise, "norm"_a)
      .def(
          "head",
          [](Program& p, const Norm* norm, std::shared_ptr<Matrix> w, std::shared_ptr<Matrix> project) {
            p.head(norm_of(norm), std::move(project), std::move(w));
          },
          "norm"_a.none(), "w"_a, "project"_a = nb::none())
      .def(
          "set_watch",
          [](Program& p, std::shared_ptr<Watch> watch) {
            require(!watch || (watch->d_ff == p.sizes.d_ff && watch->max_tokens == p.sizes.max_tokens &&
                               (int)watch->damaged.size() == p.pool->threads()),
                    "a watch for another program");
            p.watch = std::move(watch);
          },
          "watch"_a.none())
      .def(
          "residual",
          [](Program& p, int64_t tokens) {
            require(tokens > 0 && tokens <= p.sizes.max_tokens, "a step takes between 1 and max_tokens tokens");
            return nb::ndarray<nb::numpy, float, nb::ndim<2>>(p.x, {(size_t)tokens, (size_t)p.sizes.d_model},
                                                              nb::find(p), {p.ldx, 1});
          },
          "tokens"_a)
      .def_prop_ro("size", &Program::size)
      .def_rw("timed", &Program::timed)
      .def("take_times", &Program::take_times)
      .def("run", &run, "tokens"_a, "positions"_a, "rows"_a, "page_table"_a, "logit_rows"_a, "logits"_a.noconvert(),
           "first"_a, "last"_a, "vocab"_a);
}
