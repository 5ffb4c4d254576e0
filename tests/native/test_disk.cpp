// Reads of files, and what they fill: slots, the window and the experts of an operator, by every engine that works here,
// with temporary files (checks.h says how). tests/test_reads.py and tests/test_slots.py say what is read when; here the
// memory is exact, and the sanitisers watch.
#include <errno.h>

#include "checks.h"
#include "experts.h"
#include "files.h"
#include "slots.h"
#include "window.h"

namespace {

constexpr int64_t BLOCK = Reads::ALIGN;
constexpr double LONG = 3600;  // seconds

// What is read by. `emulated`: "emulated" takes its time, and fails.
struct Engine {
  const char* kind;
  bool direct;
  std::string name() const { return std::string(kind) + (direct ? ", direct" : ", cached"); }
  // Null where it does not work here.
  std::shared_ptr<Reads> open(const std::vector<Reads::File>& files, EmulatedDisk disk = {}) const {
    try {
      if (std::string(kind) == "emulated") return std::make_shared<Reads>(files, direct, "auto", &disk);
      return std::make_shared<Reads>(files, direct, kind);
    } catch (const std::invalid_argument&) { return nullptr; }
  }
};
const Engine ENGINES[] = {{"uring", false},  {"uring", true},     {"threads", false},
                          {"threads", true}, {"emulated", false}, {"emulated", true}};

template <class F>
bool fails(const F& work) {
  try {
    work();
  } catch (const ReadError&) { return true; }
  return false;
}

// Memory of a read, of which nothing else may be touched: whole blocks past the cache, or exactly its bytes.
struct Memory {
  Read read;
  std::unique_ptr<uint8_t, void (*)(void*)> own{nullptr, free};
  Memory(const Reads& reads, int64_t offset, int64_t bytes, bool small = false) : read{0, offset, bytes, nullptr} {
    void* p = nullptr;
    if (reads.direct() && !small) {
      const int64_t behind = offset % BLOCK;
      if (posix_memalign(&p, BLOCK, (size_t)pi_round_up(behind + std::max<int64_t>(bytes, 1), BLOCK))) abort();
      read.to = (uint8_t*)p + behind;
    } else {
      p = malloc((size_t)std::max<int64_t>(bytes, 1));
      read.to = (uint8_t*)p;
    }
    own.reset((uint8_t*)p);
  }
};

struct Batch {
  std::vector<Memory> memory;
  int64_t ticket;
  Batch(Reads& reads, Random& r, const File& file, int n, int64_t most, bool small) {
    std::vector<Read> all;
    for (int i = 0; i < n; i++) {
      const int64_t size = (int64_t)file.data.size(), offset = (int64_t)(r.uniform() * (double)size);
      const int64_t bytes = std::min(size - offset, (int64_t)(r.uniform() * (double)most));
      memory.emplace_back(reads, offset, bytes, small);
      all.push_back(memory.back().read);
    }
    ticket = small ? reads.begin_small(all.data(), all.size()) : reads.begin(all.data(), all.size());
  }
  bool right(const File& file) const {
    return std::all_of(memory.begin(), memory.end(),
                       [&](const Memory& m) { return file.has(m.read.to, m.read.offset, m.read.bytes); });
  }
};

// ---- Reads -----------------------------------------------------------------------------------------------------------

void test_reads(const Engine& by) {
  Random r(1);
  const File file(random_bytes(r, 5 * (512 << 10) + 4321));
  auto reads = by.open({file.about()});
  if (!reads) return;
  Check bytes("reads, " + by.name());
  for (int round = 0; round < 12; round++) {
    const bool small = round % 2;
    Batch first(*reads, r, file, 1 + round, small ? 9000 : 2 << 20, small), second(*reads, r, file, 5, 70000, !small);
    Batch dropped(*reads, r, file, 20, 1 << 20, false);
    reads->wait(second.ticket);
    bytes.yes(second.right(file), round);
    reads->cancel(dropped.ticket);
    reads->wait(first.ticket);
    bytes.yes(first.right(file) && reads->done(first.ticket), round);
  }
  Memory end(*reads, (int64_t)file.data.size() - 1, 1), none(*reads, 7, 0);
  for (const Memory* one : {&end, &none}) reads->wait(reads->begin(&one->read, 1));
  bytes.yes(*end.read.to == file.data.back(), 0);
  // What is under way is over when the reads are gone: their memory goes after them.
  auto left = std::make_unique<Batch>(*reads, r, file, 40, 1 << 20, false);
  reads.reset();
  left.reset();
}

void test_failures(const Engine& by) {
  Random r(2);
  const File file(random_bytes(r, 1 << 20));
  auto reads = by.open({file.about()});
  if (!reads) return;
  Check told("failing reads, " + by.name());
  Batch before(*reads, r, file, 3, 5000, false);
  told.yes(!fails([&] { reads->wait(before.ticket); }), 0);
  if (truncate(file.path.c_str(), 1000) != 0) abort();
  Memory gone(*reads, 500000, 70000);
  told.yes(fails([&] { reads->wait(reads->begin(&gone.read, 1)); }), 1);
  told.yes(fails([&] { by.open({file.about()}); }), 2);
  if (std::string(by.kind) != "emulated") return;

  const File other(random_bytes(r, 1 << 20));
  auto faulty = by.open({other.about()}, {1e-5, 1e9, 7, 2, EIO});
  int failed = 0;
  for (int i = 0; i < 12; i++) {
    Memory one(*faulty, 4000 * i, 3000);
    if (fails([&] { faulty->wait(faulty->begin(&one.read, 1)); })) failed++;
    else told.yes(other.has(one.read.to, 4000 * i, 3000), i);
  }
  told.yes(failed == 2, failed);
  auto silent = by.open({other.about()}, {LONG});
  silent->patience = 0.01;
  Memory one(*silent, 0, 10);
  const int64_t ticket = silent->begin(&one.read, 1);
  told.yes(fails([&] { silent->wait(ticket); }) && !silent->done(ticket), 0);
  silent->cancel(ticket);
}

// ---- Slots -----------------------------------------------------------------------------------------------------------

constexpr int32_t ITEMS = 40;

struct Layout {
  const char* name;
  std::vector<Resting> parts;
};

std::vector<Layout> layouts(Random& r, int64_t size) {
  Resting apart{0, 0, 3000, 0};
  for (int i = 0; i < ITEMS; i++) apart.places.push_back({0, (int64_t)(r.uniform() * (double)(size - 3000))});
  return {{"small", {{0, 100, 700, 777}}},
          {"large", {{0, 4096, 20000, 20480}, {0, 900001, 5000, 5000}}},
          {"in groups", {{0, 64, 640, 704, 8, 6000}}},
          {"with room before", {{0, 0, 9000, 9001, 1LL << 40, 0, 512}, {0, 500000, 64, 64}}},
          {"places", {apart}}};
}

bool right(Slots& slots, const Layout& layout, const File& file, int32_t item) {
  for (size_t i = 0; i < layout.parts.size(); i++) {
    const Resting& part = layout.parts[i];
    if (!file.has(slots.part(item, i), part.at(item), part.bytes)) return false;
    // The room before belongs to it, too.
    memset(slots.writable(item, i) - part.before, 0x5A, (size_t)part.before);
    if (!file.has(slots.part(item, i), part.at(item), part.bytes)) return false;
  }
  return true;
}

void test_slots(const Engine& by) {
  Random r(3);
  const File file(random_bytes(r, 2 << 20));
  for (const Layout& layout : layouts(r, (int64_t)file.data.size()))
    for (const int64_t n : {1, 5, (int)ITEMS}) {
      const bool faulty = std::string(by.kind) == "emulated";
      auto reads = by.open({file.about()}, {1e-6, 0, 30, 20, EIO});
      if (!reads) return;
      Check bytes("slots, " + by.name() + ", " + layout.name + ", " + std::to_string(n));
      Slots slots(reads, layout.parts, ITEMS, n);
      int failed = 0;
      for (int step = 0; step < 60; step++) {
        std::vector<int32_t> items;
        for (uint32_t i = 0, some = 1 + r.next() % 12; i < some; i++) {
          const int32_t item = (int32_t)(r.next() % ITEMS);
          if (std::find(items.begin(), items.end(), item) == items.end()) items.push_back(item);
        }
        for (float& one : slots.priority) one = (float)(r.next() % 5);
        if (r.next() % 3 == 0) slots.fetch(items.data(), (int64_t)items.size());
        try {
          const int64_t some = slots.want(items.data(), (int64_t)items.size());
          bytes.yes(some == std::min((int64_t)items.size(), n), some);
          if (step % 2) slots.wait();
          for (int64_t i = some; i-- > 0;) {
            const int32_t item = items[(size_t)i];
            if (!slots.arrived(item)) slots.wait(item);
            bytes.yes(slots.held(item) && right(slots, layout, file, item), item);
            slots.let_go(item);
          }
        } catch (const ReadError&) { failed++; }
        slots.let_go();
      }
      bytes.yes(faulty == (failed > 0), failed);
      for (int32_t item = 0; item < ITEMS; item++)
        if (slots.held(item)) bytes.yes(right(slots, layout, file, item), item);
      std::vector<int32_t> last{0, 1, 2, 3};
      slots.want(last.data(), 4);  // under way when the slots go
    }
}

// ---- The window --------------------------------------------------------------------------------------------------------

void test_window(const Engine& by) {
  Random r(4);
  const File file(random_bytes(r, 3 << 20));
  const bool emulated = std::string(by.kind) == "emulated";
  for (const int64_t ring : {560 << 10, 900 << 10, 4 << 20})
    for (const bool faulty : {false, true}) {
      if (faulty && !emulated) continue;
      auto reads = by.open({file.about()}, faulty ? EmulatedDisk{1e-6, 0, 50, 3, EIO} : EmulatedDisk{1e-6});
      if (!reads) return;
      Check bytes("window, " + by.name() + ", " + std::to_string(ring) + (faulty ? ", faulty" : ""));
      std::vector<std::vector<std::shared_ptr<OnDisk>>> ops(9);
      Window window(reads, ring);
      for (size_t op = 0; op < ops.size(); op += 1 + op % 2) {
        for (uint32_t i = 0, n = 1 + r.next() % 3; i < n; i++) {
          const int64_t size = 1 + (int64_t)(r.uniform() * (180 << 10));
          const int64_t offset = (int64_t)(r.uniform() * (double)((int64_t)file.data.size() - size));
          ops[op].push_back(std::make_shared<OnDisk>(OnDisk{0, offset, size, 1, {}}));
        }
        window.add(op, ops[op]);
      }
      int failed = 0;
      for (int step = 0; step < 40; step++) {
        const uint32_t seed = step % 3 ? 0 : r.next();  // what a step uses is often what the last one did
        const auto uses = [&](size_t op) {
          return ops[op].size() - std::min(ops[op].size(), (size_t)(seed >> op) % 3);
        };
        window.begin(uses);
        const size_t last = r.next() % 4 ? ops.size() : r.next() % ops.size();  // steps may be stopped
        for (size_t op = 0; op < last; op++) {
          if (!window.wanted(op)) {
            window.read_ahead();
            continue;
          }
          window.take(op);
          for (size_t i = 0; i < uses(op); i++) {
            const OnDisk& one = *ops[op][i];
            bytes.yes(window.failed() || file.has(one.rows, one.offset, one.bytes), (int64_t)op);
          }
          window.release(op);
        }
        if (fails([&] { window.end(); })) failed++;
      }
      bytes.yes(faulty == (failed > 0), failed);
      bytes.yes(!window.failed(), failed);
    }
}

// ---- Experts -----------------------------------------------------------------------------------------------------------

// An operator of experts, from memory or from a file, of which slots hold some: the same bits, and after reads that fail.
struct ExpertLayer {
  static constexpr int64_t EXPERTS = 12, TOP = 3, D = 64, SIZE = 96, TOKENS = 40;
  int type;
  std::vector<uint8_t> rows[3];  // gate, up, down
  std::vector<float> scores, x;
  ExpertLayer(Random& r, int t) : type(t), scores(r.normals(EXPERTS * D)), x(r.normals(TOKENS * D)) {
    for (int part = 0; part < 3; part++) rows[part] = random_rows(r, type, EXPERTS * height(part), width(part));
  }
  static int64_t height(int part) { return part == 2 ? D : SIZE; }
  static int64_t width(int part) { return part == 2 ? SIZE : D; }
  int64_t bytes(int part) const { return height(part) * stored_row_bytes(type, width(part)); }

  // Each expert's matrices at places that nothing aligns.
  std::vector<uint8_t> stored(std::vector<Resting>& parts) const {
    std::vector<uint8_t> data;
    for (int part = 0; part < 3; part++) {
      Resting one{0, 0, bytes(part), 0};
      one.before = packed_excess(type, height(part), width(part));
      for (int64_t e = 0; e < EXPERTS; e++) {
        data.resize(data.size() + 37);
        one.places.push_back({0, (int64_t)data.size()});
        data.insert(data.end(), rows[part].begin() + e * bytes(part), rows[part].begin() + (e + 1) * bytes(part));
      }
      parts.push_back(one);
    }
    return data;
  }

  struct Wired {
    std::shared_ptr<Workspace> workspace;
    std::unique_ptr<Program> program;
  };
  Wired program(const PiKernels* kernels, int threads, std::shared_ptr<Slots> slots) const {
    auto workspace = std::make_shared<Workspace>(std::make_shared<Pool>(threads), kernels);
    auto arena = std::make_shared<Arena>();
    auto cache = std::make_shared<Cache>(PI_KV_F32, std::vector<std::pair<int64_t, int64_t>>{{1, 16}}, 1);
    auto p = std::make_unique<Program>(workspace, cache, Sizes{TOKENS, D, SIZE, {1}});
    const auto packed = [&](int t, int64_t n, int64_t k, const uint8_t* from) {
      auto m = std::make_shared<Matrix>(Matrix{t, n, k, (n + PI_LANES - 1) / PI_LANES, nullptr, arena});
      uint8_t* data = arena->allocate(m->bytes());
      pack_panels(t, from, n, k, nullptr, 0, data, 0, m->panels);
      m->data = data;
      return m;
    };
    const auto matrix = [&](int part) {
      const int64_t n = EXPERTS * height(part), k = width(part);
      if (!slots) return packed(type, n, k, rows[part].data());
      auto m = std::make_shared<Matrix>(Matrix{type, n, k, (n + PI_LANES - 1) / PI_LANES, nullptr, nullptr});
      m->disk = std::make_shared<OnDisk>(OnDisk{0, 0, n * stored_row_bytes(type, k), n, {}});
      return m;
    };
    ExpertMatrices all{EXPERTS, SIZE, {PI_SILU}, matrix(0), matrix(1), matrix(2), {}, {}, {}};
    all.slots = std::move(slots);
    RouterSpec router{};
    router.top_k = TOP;
    p->experts({}, router, packed(PI_F32, EXPERTS, D, (const uint8_t*)scores.data()), std::move(all), {}, {});
    return {workspace, std::move(p)};
  }

  // x of the last tokens after a step. ReadError as of Program.
  std::vector<float> run(const Wired& wired, int64_t tokens) const {
    Program& p = *wired.program;
    for (int64_t t = 0; t < tokens; t++) std::copy_n(&x[(size_t)((TOKENS - tokens + t) * D)], D, p.x + t * p.ldx);
    const std::vector<int32_t> zeros((size_t)tokens, 0);
    Step step;
    step.tokens = tokens;
    step.token = step.position = zeros.data();
    p.run(step, 0, 1);
    std::vector<float> out;
    for (int64_t t = 0; t < tokens; t++) out.insert(out.end(), p.x + t * p.ldx, p.x + t * p.ldx + D);
    return out;
  }
};

void test_experts(const Engine& by) {
  Random r(5);
  const PiKernels* const kernels = supported_levels().front();
  for (const int type : {PI_F32, PI_Q8_0, PI_Q4_0, PI_Q5_1}) {
    const ExpertLayer layer(r, type);
    std::vector<Resting> parts;
    const File file(layer.stored(parts));
    for (const bool faulty : {false, true})
      for (const int threads : {1, 3})
        for (const int64_t n : {(int64_t)1, (int64_t)5, ExpertLayer::EXPERTS}) {
          if (faulty && std::string(by.kind) != "emulated") continue;
          auto reads = by.open({file.about()}, {1e-6, 0, faulty ? 6 : -1, 2, EIO});
          if (!reads) return;
          Check bits("experts, " + by.name() + ", " + PI_TYPES[type].name + ", " + std::to_string(n) + " slots");
          auto slots = std::make_shared<Slots>(reads, parts, ExpertLayer::EXPERTS, n);
          const ExpertLayer::Wired here = layer.program(kernels, threads, nullptr),
                                   there = layer.program(kernels, threads, slots);
          int failed = 0;
          for (const int64_t tokens : {1, 2, 7, (int)ExpertLayer::TOKENS, 1, 3}) {
            const std::vector<float> wanted = layer.run(here, tokens);
            std::vector<float> got;
            while (fails([&] { got = layer.run(there, tokens); }) && failed++ < 10) {}
            for (size_t i = 0; i < wanted.size(); i++) bits.same(got[i], wanted[i], (int64_t)i);
          }
          bits.yes(faulty == (failed > 0), failed);
        }
  }
}

}  // namespace

int main() {
  watch_fences();
  for (const Engine& by : ENGINES) {
    const int before = passed, wrong = failed;
    test_reads(by);
    test_failures(by);
    test_slots(by);
    test_window(by);
    test_experts(by);
    printf("%-18s %d passed, %d failed\n", by.name().c_str(), passed - before, failed - wrong);
    fflush(stdout);
  }
  printf("%d passed, %d failed\n", passed, failed);
  return failed ? 1 : 0;
}
