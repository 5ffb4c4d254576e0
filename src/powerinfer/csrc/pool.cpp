#include "pool.h"

#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

namespace {
// At most a millisecond of pauses on any CPU: longer than Python needs between two decode steps.
constexpr int SPINS_BEFORE_PARKING = 20000;
// A thread that waits longer than this at a barrier waits for one that is not running: it yields the core, and after
// STALL_NS sleeps, so that the scheduler brings that one to the core that is free then. Where that happens again within
// CROWDED_NS, threads share a core, and spinning or yielding takes it from the thread that is waited for: so for as long
// again they sleep early. Not else, since to sleep and to wake take longer than most waits.
constexpr int SPINS_BEFORE_YIELDING = 4000, SPINS_WHEN_CROWDED = 200;
constexpr int64_t STALL_NS = 500'000, CROWDED_NS = 10'000'000;

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Moves the calling thread off the core that made the pool, to the n-th of the others, and unpins it: threads that spin
// on one core would each wait for the other's time slice until the scheduler notices.
void spread_out(int n, int maker) {
  cpu_set_t allowed, one;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
    if (!CPU_ISSET(cpu, &allowed) || cpu == maker || n-- > 0) continue;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    sched_setaffinity(0, sizeof one, &one);
    sched_setaffinity(0, sizeof allowed, &allowed);
    return;
  }
}

// In place of a condition variable, which would make threads that wake take its mutex one after another.
void wait_while(std::atomic<uint32_t>& word, uint32_t value) {
  syscall(SYS_futex, (uint32_t*)&word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}
void wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, (uint32_t*)&word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}
static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t) && std::atomic<uint32_t>::is_always_lock_free);

}  // namespace

Pool::Pool(int threads) : threads_(threads) {
  const int maker = sched_getcpu();
  for (int t = 1; t < threads; t++) {
    workers_.emplace_back([this, t, maker] {
      spread_out(t - 1, maker);
      work(t);
    });
  }
}

Pool::~Pool() {
  stop_.store(true);
  epoch_.fetch_add(1);
  ring();
  for (auto& worker : workers_) worker.join();
}

void Pool::run_on_all(void (*job)(void*, int), void* context) {
  job_ = job;
  context_ = context;
  epoch_.fetch_add(1);
  ring();
  job(context, 0);
  barrier();
}

void Pool::ring() {
  // Sequentially consistent, as what was changed before, and in work(): a thread that is about to park has said so
  // before it looks at that a last time, so it sees the change, or is seen here.
  if (parked_.load() == 0) return;
  bell_.fetch_add(1);
  wake_all(bell_);
}

void Pool::keep_awake() {
  awake_.fetch_add(1);
  ring();
}

bool Pool::crowded() {
  const int64_t until = crowded_until_.load(std::memory_order_relaxed);
  if (until == 0) return false;
  if (now_ns() < until) return true;
  crowded_until_.store(0, std::memory_order_relaxed);
  return false;
}

void Pool::barrier() {
  if (threads_ == 1) return;
  const uint32_t phase = phase_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    dealt_.store(0, std::memory_order_relaxed);
    phase_.store(phase + 1);  // sequentially consistent, as what is asked next: see ring()
    if (asleep_.load() > 0) wake_all(phase_);
    return;
  }
  const bool early = crowded();
  for (int spins = 0; spins < (early ? SPINS_WHEN_CROWDED : SPINS_BEFORE_YIELDING); spins++) {
    if (phase_.load(std::memory_order_acquire) != phase) return;
    cpu_relax();
  }
  const int64_t since = now_ns();
  while (!early && now_ns() - since < STALL_NS) {
    if (phase_.load(std::memory_order_acquire) != phase) return;
    sched_yield();
  }
  asleep_.fetch_add(1);
  while (phase_.load() == phase) wait_while(phase_, phase);
  asleep_.fetch_sub(1);
  const int64_t now = now_ns();
  if (now - since < STALL_NS) return;
  // Threads that waited for the same one are a single stall: the first of them has written a time after `since`.
  const int64_t last = stalled_.exchange(now, std::memory_order_relaxed);
  if (last > 0 && last <= since && since - last < CROWDED_NS)
    crowded_until_.store(now + CROWDED_NS, std::memory_order_relaxed);
}

bool Pool::part(int64_t n, int64_t unit, int64_t i, int64_t* begin, int64_t* end) const {
  const int64_t units = (n + unit - 1) / unit;
  for (int64_t at = 0; at < units; i -= threads_) {
    const int64_t each = std::max((units - at) / (4 * threads_), (int64_t)1);
    if (i < threads_) {
      *begin = (at + i * each) * unit;
      *end = std::min(*begin + each * unit, n);
      return *begin < n;
    }
    at += each * threads_;
  }
  return false;
}

void Pool::work(int thread) {
  uint32_t seen = 0;
  for (;;) {
    int spins = 0, most = crowded() ? SPINS_WHEN_CROWDED : SPINS_BEFORE_PARKING;
    while (epoch_.load(std::memory_order_acquire) == seen) {
      if (spins++ < most) {
        cpu_relax();
        continue;
      }
      spins = 0;
      if (awake_.load() > 0) {
        sched_yield();  // there may be more threads than cores
        continue;
      }
      parked_.fetch_add(1);
      const uint32_t bell = bell_.load();
      if (epoch_.load() == seen && awake_.load() == 0) wait_while(bell_, bell);
      parked_.fetch_sub(1);
    }
    seen++;
    if (stop_.load()) return;
    job_(context_, thread);
    barrier();
  }
}
