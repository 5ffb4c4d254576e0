#include "pool.h"

#include <sched.h>

namespace {
// At most a millisecond of pauses on any CPU: longer than Python needs between two decode steps.
constexpr int SPINS_BEFORE_PARKING = 20000;
// A thread that waits longer than this at a barrier waits for one that is not running: yield the core.
constexpr int SPINS_BEFORE_YIELDING = 4000;
#if defined(__linux__)
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
int this_core() { return sched_getcpu(); }
#else
void spread_out(int, int) {}
int this_core() { return -1; }
#endif

}  // namespace

Pool::Pool(int threads) : threads_(threads) {
  const int maker = this_core();
  for (int t = 1; t < threads; t++) {
    workers_.emplace_back([this, t, maker] {
      spread_out(t - 1, maker);
      work(t);
    });
  }
}

Pool::~Pool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_.store(true);
    epoch_.fetch_add(1);
  }
  wake_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void Pool::run_on_all(void (*job)(void*, int), void* context) {
  job_ = job;
  context_ = context;
  epoch_.fetch_add(1);  // sequentially consistent, as is the worker's parked_: one of the two sees the other
  if (parked_.load() > 0) {
    { std::lock_guard<std::mutex> lock(mutex_); }
    wake_.notify_all();
  }
  job(context, 0);
  barrier();
}

void Pool::barrier() {
  if (threads_ == 1) return;
  const uint32_t phase = phase_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    phase_.store(phase + 1, std::memory_order_release);
    return;
  }
  for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; spins++) {
    if (spins < SPINS_BEFORE_YIELDING) cpu_relax();
    else sched_yield();
  }
}

void Pool::work(int thread) {
  uint32_t seen = 0;
  for (;;) {
    int spins = 0;
    while (epoch_.load(std::memory_order_acquire) == seen && spins++ < SPINS_BEFORE_PARKING) cpu_relax();
    if (epoch_.load() == seen) {
      std::unique_lock<std::mutex> lock(mutex_);
      parked_.fetch_add(1);
      wake_.wait(lock, [&] { return epoch_.load() != seen; });
      parked_.fetch_sub(1);
    }
    seen++;
    if (stop_.load()) return;
    job_(context_, thread);
    barrier();
  }
}
