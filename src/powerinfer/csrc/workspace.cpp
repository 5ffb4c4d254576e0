#include "workspace.h"

#include <string.h>

#include <algorithm>

#include "neuron_lists.h"

namespace {

// Rows of up to this many elements in all are prepared by every thread for itself: cheaper than a barrier.
constexpr int64_t ALONE = 4096;

}  // namespace

void copy_rows(const float* from, int64_t from_ld, float* to, int64_t to_ld, int64_t n, int64_t rows) {
  for (int64_t i = 0; i < rows; i++) memcpy(to + i * to_ld, from + i * from_ld, (size_t)n * 4);
}

ActMemory::ActMemory(int64_t elements)
    : elements_(pi_round_up(elements, 512)), memory_(std::make_unique<Mapping>(elements_ * 8)) {}

PiActs ActMemory::rows(int64_t k) const {
  PiActs acts;
  uint8_t* at = memory_->data();
  const auto take = [&](int64_t bytes) {
    uint8_t* const taken = at;
    at += bytes;
    return taken;
  };
  acts.f = (float*)take(4 * elements_);
  acts.b = (uint16_t*)take(2 * elements_);
  acts.q = (int8_t*)take(elements_);
  acts.d = (float*)take(elements_ / 8);
  acts.sd = (float*)take(elements_ / 8);
  acts.s = (int16_t*)take(elements_ / 8);
  acts.k = k;
  acts.ldf = pi_round_up(k, PI_LANES);
  acts.ldb = pi_round_up(k, 32);
  return acts;
}

Workspace::Workspace(std::shared_ptr<Pool> pool_, const PiKernels* kernels_)
    : pool(std::move(pool_)), kernels(kernels_), own_((size_t)pool->threads()) {}

Workspace::~Workspace() = default;

void Workspace::reserve(int64_t tokens, int64_t k) {
  const int64_t row = pi_round_up(k, 32);
  pool->between_jobs([&] {
    if (shared_.elements() < tokens * row) shared_ = ActMemory(tokens * row);
    for (Own& own : own_) {
      if (own.memory.elements() < std::max(ALONE, row)) own.memory = ActMemory(std::max(ALONE, row));
      own.scratch.resize(std::max(own.scratch.size(), (size_t)pi_linear_scratch(k) + 64));
    }
  });
}

void Workspace::reserve_packed(const Matrix& w, int64_t waiting) {
  const int64_t bytes = std::max(PACKED, w.unit(2) * pi_panel_bytes(w.type, w.k));
  pool->between_jobs([&] {
    for (Own& own : own_) {
      own.waiting.reserve((size_t)(waiting ? waiting + 2 * bytes : 0));
      if (own.packed_bytes >= bytes) continue;
      own.packed = std::make_unique<Mapping>(bytes);
      own.packed_bytes = bytes;
    }
  });
}

void Workspace::reserve_lists(int64_t neurons, int64_t d_model, int64_t rank) {
  reserve(PI_NEURON_TOKENS, d_model);
  if (rank) reserve(PI_NEURON_TOKENS, rank);
  pool->between_jobs([&] {
    if (!lists_ || !lists_->holds(neurons, d_model, rank))
      lists_ = std::make_unique<NeuronLists>(pool->threads(), neurons, d_model, rank, lists_.get());
  });
}

const PiActs* Workspace::prepare(int thread, const Rows& rows, const Norm& norm, int forms) {
  Own& own = own_[(size_t)thread];
  const int64_t k = rows.k;
  const bool alone = rows.tokens == 1 || rows.tokens * pi_round_up(k, 32) <= ALONE, moved = norm || rows.index;
  const ActMemory& memory = alone ? own.memory : shared_;
  PiActs acts = memory.rows(k);
  const auto prepare_rows = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const float* row = rows.data + (rows.index ? rows.index[i] : i) * rows.ld;
      if (moved) {
        float* f = memory.floats() + i * acts.ldf;
        if (norm) norm.apply(kernels, row, f);
        else memcpy(f, row, (size_t)k * 4);
        row = f;
      }
      if (forms & ~PI_FORM_F32) {
        const PiActs to = pi_acts_from(&acts, i, 0);
        kernels->forms(row, k, forms, &to);
      }
    }
  };
  if (!alone) pool->phase(rows.tokens, 1, prepare_rows);
  else if (!pool->is_late()) prepare_rows(0, rows.tokens);
  own.prepared = !alone || !pool->is_late();  // of rows that others change meanwhile it would be void
  if (!moved) {
    acts.f = rows.data;
    acts.ldf = rows.ld;
  }
  own.acts = acts;
  return &own.acts;
}

void Workspace::linear(int thread, const Matrix& w, const Vector& bias, const PiActs* acts, float* out, int64_t ldo,
                       int64_t tokens, bool add, int64_t p0, int64_t p1) {
  if (p0 >= p1) return;
  const PiLinear l{w.data, bias.empty() ? nullptr : bias.data(), out, ldo, w.type, add, nullptr};
  if (w.source) return linear_from_source(thread, l, w, acts, tokens, p0, p1);
  if (!w.data) return linear_from_disk(thread, l, w, acts, tokens, p0, p1);
  kernels->linear[l.type](&l, acts, p0, p1, tokens, scratch_of(thread));
}

void Workspace::linear_from_source(int thread, PiLinear l, const Matrix& w, const PiActs* acts, int64_t tokens,
                                   int64_t p0, int64_t p1) {
  const PanelSource& source = *w.source;
  uint8_t* const panels = own_[(size_t)thread].packed->data();
  const float* const bias = l.bias;
  float* const out = l.out;
  l.w = panels;
  for (int64_t p = p0, n; p < p1; p += n) {
    n = std::min(p1 - p, source.at_once - p % source.at_once);
    source.make(kernels, p, n, panels);
    PiAhead ahead[8];
    l.ahead = n == source.at_once && p + n < p1 && source.ahead(p + n, ahead) ? ahead : nullptr;
    l.bias = bias ? bias + p * PI_LANES : nullptr;
    l.out = out + p * PI_LANES;
    kernels->linear[l.type](&l, acts, 0, n, tokens, scratch_of(thread));
  }
}

void* Workspace::scratch_of(int thread) {
  return (void*)(((uintptr_t)own_[(size_t)thread].scratch.data() + 63) & ~(uintptr_t)63);
}

void Workspace::linear_from_disk(int thread, const PiLinear& l, const Matrix& w, const PiActs* acts, int64_t tokens,
                                 int64_t p0, int64_t p1) {
  const OnDisk& disk = *w.disk;
  Own& own = own_[(size_t)thread];
  const int64_t some = own.packed_bytes / pi_panel_bytes(w.type, w.k) / 2 * 2;
  const int32_t* const map = disk.map.empty() ? nullptr : disk.map.data();
  if (!disk.factors.empty()) own.factors.assign((size_t)disk.stored, disk.factors[0]);
  const float* const factors = disk.factors.empty() ? nullptr : own.factors.data();
  PiLinear part = l;
  part.w = own.packed->data();
  for (int64_t p = p0, n; p < p1; p += n) {
    n = std::min(some, p1 - p);
    pack_panels(w.type, disk.rows, disk.stored, w.k, map, w.rows, own.packed->data(), p, p + n, p, factors);
    part.bias = l.bias ? l.bias + p * PI_LANES : nullptr;
    part.out = l.out + p * PI_LANES;
    kernels->linear[part.type](&part, acts, 0, n, tokens, scratch_of(thread));
    if (disk.panels) keep_panels(own, disk, w, p0, p, n);
  }
}

// Panels [p, p + n), just packed, of those from p0 on that are this thread's. They end before the rows of those that
// follow, but may begin before the rows of those before p0 end.
void Workspace::keep_panels(Own& own, const OnDisk& disk, const Matrix& w, int64_t p0, int64_t p, int64_t n) {
  const int64_t each = pi_panel_bytes(w.type, w.k);
  const uint8_t* const others = disk.rows + p0 * PI_LANES * stored_row_bytes(w.type, w.k);
  uint8_t* const to = disk.panels + p * each;
  if (p0 == 0 || to >= others) {
    memcpy(to, own.packed->data(), (size_t)(n * each));
    return;
  }
  own.settling.emplace_back(to, n * each);
  own.waiting.insert(own.waiting.end(), own.packed->data(), own.packed->data() + n * each);
}

void Workspace::settle(int thread) {
  Own& own = own_[(size_t)thread];
  const uint8_t* from = own.waiting.data();
  for (const auto& [to, bytes] : own.settling) {
    memcpy(to, from, (size_t)bytes);
    from += bytes;
  }
  own.settling.clear();
  own.waiting.clear();
}

void Workspace::product(int thread, const Matrix& w, const PiActs* acts, int64_t tokens, const Destination& to) {
  const Columns mine(w, *pool, thread, w.unit());
  linear(thread, w, to.bias, acts, to.out, to.ld, tokens, to.add, mine.p0, mine.p1);
}

void Workspace::finish_product(int thread, const Matrix& w, const PiActs* acts, int64_t tokens, const Destination& to) {
  finish_products(thread, {{&w, to}}, acts, tokens);
}

void Workspace::finish_products(int thread, const std::vector<Product>& products, const PiActs* acts, int64_t tokens) {
  bool in_memory = true, dealt = false;
  int64_t panels = 0, unit = 1;
  for (const Product& item : products) {
    in_memory = in_memory && item.matrix->is_in_memory();
    dealt = dealt || deals(tokens, *item.matrix);
    panels += item.matrix->panels;
    unit = item.matrix->unit(unit);
  }
  if (!in_memory) {
    for (const Product& item : products) product(thread, *item.matrix, acts, tokens, item.to);
    return pool->barrier();
  }
  // Calls f(product, first panel, last panel, its memory aside) for panels of all, one matrix behind the other.
  const auto visit = [&](int64_t p0, int64_t p1, float* aside, const auto& f) {
    int64_t before = 0;
    for (const Product& item : products) {
      const int64_t first = std::max(p0 - before, (int64_t)0), last = std::min(p1 - before, item.matrix->panels);
      if (first < last) f(item, first, last, aside);
      if (first < last && aside) aside += (last - first) * PI_LANES * tokens;
      before += item.matrix->panels;
    }
  };
  pool->phase(
      panels, dealt ? std::max(unit, DEALT) : unit, tokens * PI_LANES,
      [&](int64_t p0, int64_t p1, float* aside) {
        visit(p0, p1, aside, [&](const Product& item, int64_t first, int64_t last, float* memory) {
          const Destination& to = item.to;
          const int64_t n = (last - first) * PI_LANES, ld = memory ? n : to.ld;
          if (memory && to.add) copy_rows(to.out + first * PI_LANES, to.ld, memory, n, n, tokens);
          float* const out = memory ? memory - first * PI_LANES : to.out;
          linear(thread, *item.matrix, to.bias, acts, out, ld, tokens, to.add, first, last);
        });
      },
      [&](int64_t p0, int64_t p1, float* aside) {
        if (!aside) return;
        visit(p0, p1, aside, [&](const Product& item, int64_t first, int64_t last, const float* memory) {
          const int64_t n = (last - first) * PI_LANES;
          copy_rows(memory, n, item.to.out + first * PI_LANES, item.to.ld, n, tokens);
        });
      },
      dealt);
}
