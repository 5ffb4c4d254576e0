// The pool where there are more threads than cores, and where threads lose theirs inside a piece: no piece is left out or
// put into place twice, and what late threads read stays. tests/test_pool.py says when threads park.
#include <unistd.h>

#include <chrono>

#include "checks.h"

namespace {

constexpr int THREADS = 8;
constexpr int64_t N = 96;  // numbers of a row, which a phase makes from the row before

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Rows that every phase makes anew from those of the phase before, as a model's operators do, and then adds to, so that a
// piece that is placed twice, or is left out, changes everything that follows. Atomic, since late threads read what
// others write.
struct Rows {
  std::atomic<uint32_t> rows[2][N] = {};
  std::atomic<int64_t> computed{0}, placed{0}, ended{0}, too_early{0};

  static uint32_t mixed(uint32_t a, uint32_t b, uint32_t phase) { return (a * 2654435761u + b) ^ (phase * 40503u); }

  uint32_t next(const std::atomic<uint32_t>* from, int64_t i, uint32_t phase) const {
    return mixed(from[i].load(std::memory_order_relaxed), from[(i * 7 + 3) % N].load(std::memory_order_relaxed), phase);
  }

  // held(begin, aside): called inside a piece.
  template <class Held>
  void phase(Pool& pool, uint32_t number, bool aside_too, const Held& held) {
    const std::atomic<uint32_t>* const from = rows[number % 2];
    std::atomic<uint32_t>* const to = rows[1 - number % 2];
    const auto put = [&](int64_t i, uint32_t x) {
      to[i].store(to[i].load(std::memory_order_relaxed) + x, std::memory_order_relaxed);
      placed.fetch_add(1, std::memory_order_relaxed);
    };
    pool.phase_then(
        N, 3, aside_too ? 1 : 0,
        [&](int64_t begin, int64_t end, float* aside) {
          for (int64_t i = begin; i < end; i++) {
            const uint32_t x = next(from, i, number);
            if (aside) memcpy(aside + i - begin, &x, 4);
            else put(i, x);
          }
          computed.fetch_add(end - begin, std::memory_order_relaxed);
          held(begin, aside);
        },
        [&](int64_t begin, int64_t end, const float* aside) {
          for (int64_t i = begin; aside && i < end; i++) {
            uint32_t x;
            memcpy(&x, aside + i - begin, 4);
            put(i, x);
          }
        },
        [&] { too_early += placed != ++ended * N; });
  }

  // The same with each thread's own part and barriers.
  void together(Pool& pool, int thread, uint32_t number) {
    int64_t begin, end;
    share(N, 1, pool.threads(), thread, &begin, &end);
    for (int64_t i = begin; i < end; i++) rows[1 - number % 2][i].fetch_add(next(rows[number % 2], i, number));
    pool.barrier();
  }

  void alone(uint32_t number) {
    for (int64_t i = 0; i < N; i++) rows[1 - number % 2][i].fetch_add(next(rows[number % 2], i, number));
  }

  bool same(const Rows& other) const {
    for (int which = 0; which < 2; which++)
      for (int64_t i = 0; i < N; i++)
        if (rows[which][i].load() != other.rows[which][i].load()) return false;
    return true;
  }
};

// What a step of a program is: it ends while threads may still go through it.
struct Step {
  explicit Step(uint32_t first, uint32_t phases) : first(first), phases(phases) {}
  ~Step() { gone = true; }
  const uint32_t first, phases;
  std::atomic<bool> gone{false};
};

void test_steps(int threads) {
  Check check("steps of phases, of barriers and of both, " + std::to_string(threads) + " threads");
  Pool pool(threads);
  Rows got, wanted;
  std::atomic<int> read_late{0};
  uint32_t number = 0, phases = 0;
  const int rounds = 400;
  for (int round = 0; round < rounds; round++) {
    const auto step = std::make_shared<Step>(number, 5 + (uint32_t)round % 7);
    const auto job = [&pool, &got, &read_late, step](int thread) {
      for (uint32_t i = step->first; i < step->first + step->phases; i++) {
        read_late += step->gone;
        if (i % 11 == 5) got.together(pool, thread, i);
        else if (!pool.is_late() || i % 2) got.phase(pool, i, i % 3 != 0, [](int64_t, const float*) {});
        else got.phase(pool, i, true, [&](int64_t, const float*) { read_late++; });
      }
    };
    if (round % 10 == 3) pool.run([] {}, job);
    else pool.run_phases([] {}, job, nullptr);
    for (uint32_t i = number; i < number + step->phases; i++) {
      wanted.alone(i);
      phases += i % 11 != 5;
    }
    number += step->phases;
    if (round % 16 == 0) pool.between_jobs([&] { check.yes(step.use_count() >= 1, round); });
    if (round % 50 == 0) check.yes(got.same(wanted), round);
  }
  pool.between_jobs([] {});
  check.yes(got.same(wanted), rounds);
  check.yes(got.placed.load() <= got.computed.load(), rounds);
  check.yes(got.too_early.load() == 0 && got.ended.load() == (int64_t)phases, got.ended.load());
  check.yes(read_late.load() == 0, rounds);
}

// One thread after the other sleeps inside a piece, as if another program had its core. Once that has been noticed, what
// it had begun is computed by others, and the step ends without it.
void test_late_threads() {
  Check check("a piece whose thread has lost its core is computed by another one");
  Pool pool(4);
  Rows got, wanted;
  uint32_t number = 0;
  std::atomic<int> sleeps{0};
  const double give_up = seconds() + 60;
  int64_t overtaken = 0;
  while (overtaken < 20 && seconds() < give_up) {
    const uint32_t first = number;
    const int64_t before = got.computed.load();
    pool.run_phases([] {},
                    [&, first](int) {
                      for (uint32_t i = first; i < first + 6; i++)
                        got.phase(pool, i, true, [&](int64_t begin, const float*) {
                          if (i % 6 == 3 && begin == (int64_t)(i % N) / 3 * 3 && ++sleeps % 2) usleep(2000);
                        });
                    },
                    nullptr);
    for (uint32_t i = 0; i < 6; i++) wanted.alone(number++);
    check.yes(got.same(wanted), number);
    overtaken += got.computed.load() - before > 6 * N;
  }
  pool.between_jobs([] {});
  check.yes(overtaken >= 20, overtaken);
  check.yes(got.placed.load() == (int64_t)number * N, number);
  check.yes(got.too_early.load() == 0 && got.ended.load() == (int64_t)number, number);
}

// Phases that take long are divided so whatever the cores do: half of the work in one piece for each thread, half of the
// rest, and so on.
void test_sizes() {
  Check check("pieces become smaller toward the end");
  for (const int threads : {2, 3, THREADS}) {
    Pool pool(threads);
    for (const int64_t n : {1, 7, 100, 10000}) {
      std::vector<std::atomic<int64_t>> lengths((size_t)n);
      const auto work = [&](int64_t begin, int64_t end) { lengths[(size_t)begin] = end - begin; };
      pool.run([&](int) { pool.phase(n, 1, work, true); });
      int64_t at = 0, before = n, count = 0;
      for (; at < n && lengths[(size_t)at] > 0; count++) {
        check.yes(lengths[(size_t)at] <= before, at);
        before = lengths[(size_t)at];
        at += before;
      }
      check.yes(at == n && lengths[0] == (n + 2 * threads - 1) / (2 * threads), n);
      check.yes(n < 10000 || (before <= n / (16 * threads) + 1 && count <= 6 * threads), count);
    }
  }
}

// A thread sleeps twice as long for a unit of work as the other one: once that has been noticed it does a third of it.
// Sleeping threads leave the cores to those of other tests.
void test_slow_core() {
  Check check("a core of half the speed is given less work");
  Pool pool(2);
  std::atomic<int64_t> done[2];
  const auto steps = [&](int n) {
    done[0] = done[1] = 0;
    for (int i = 0; i < n; i++) {
      const auto job = [&](int thread) {
        for (int phase = 0; phase < 2; phase++)
          pool.phase(64, 1, [&](int64_t begin, int64_t end) {
            usleep((useconds_t)((end - begin) * (thread ? 40 : 20)));
            done[thread] += end - begin;
          });
      };
      pool.run_phases([] {}, job, nullptr);
    }
    pool.between_jobs([] {});
    return (double)done[1] / (double)(done[0] + done[1]);
  };
  const double give_up = seconds() + 30;
  double share = steps(4);
  while (share > 0.42 && seconds() < give_up) share = steps(8);
  check.yes(share <= 0.42, (int64_t)(100 * share));
}

void test_places() {
  Check check("threads begin on one processor of each core first");
  const auto same = [](const std::vector<int>& got, const std::vector<int>& wanted) { return got == wanted; };
  check.yes(same(spread_out({{0, 0}, {1, 1}, {2, 2}}, 1), {0, 2}), 0);
  check.yes(same(spread_out({{0, 0}, {1, 0}, {2, 2}, {3, 2}, {4, 4}, {5, 5}}, 0), {2, 4, 5, 1, 3}), 1);
  check.yes(same(spread_out({{0, 0}, {1, 1}, {2, 0}, {3, 1}}, 2), {1, 0, 3}), 2);
  check.yes(same(spread_out({{1, 0}, {3, 2}}, 7), {1, 3}), 3);
  check.yes(spread_out({}, 0).empty(), 4);
}

// All threads leave a job behind the same operator, whichever of them sees when that it is to stop.
void test_stop() {
  Check check("a job that is stopped ends at the same phase for all threads");
  Pool pool(THREADS);
  for (int round = 0; round < 100; round++) {
    int32_t stop = 0;
    std::atomic<int> least{1 << 30}, most{0};
    Rows rows;
    const auto job = [&](int thread) {
      int i = 0;
      do {
        if (thread == round % THREADS && i == round % 13) __atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
        rows.phase(pool, (uint32_t)i, i % 2, [](int64_t, const float*) {});
        if (i % 5 == 4) pool.barrier();
        i++;
      } while (!pool.stopped() && i < 1000);
      for (int had = least; i < had && !least.compare_exchange_weak(had, i);) {}
      for (int had = most; i > had && !most.compare_exchange_weak(had, i);) {}
    };
    pool.run([] {}, job, &stop);
    check.yes(least == most && most < 1000 && most > round % 13, round);
  }
}

}  // namespace

int main() {
  watch_fences();
  for (const int threads : {1, 2, 3, THREADS}) test_steps(threads);
  test_late_threads();
  test_sizes();
  test_slow_core();
  test_places();
  test_stop();
  printf("%d passed, %d failed\n", passed, failed);
  return failed > 0;
}
