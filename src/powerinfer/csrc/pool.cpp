#include "pool.h"

#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <new>

namespace {
// At most a millisecond of pauses on any CPU: longer than Python needs between two decode steps.
constexpr int SPINS_BEFORE_PARKING = 20000;
// A thread that waits longer than this for the end of a phase waits for one that is not running: it yields the core, and
// after STALL_NS sleeps, so that the scheduler brings that one to the core that is free then. Not at once, since to sleep
// and to wake take longer than most waits; but where threads share cores, spinning takes them from those waited for.
constexpr int SPINS_BEFORE_YIELDING = 4000, SPINS_WHEN_CROWDED = 200;
constexpr int64_t STALL_NS = 500'000;
// A thread that was without its core for as long shares it with a program that computes, for CROWDED_NS from then on:
// daemons need it for less. A piece that takes as long may have been interrupted, which only the system knows.
constexpr int64_t PREEMPTED_NS = 1'000'000, CROWDED_NS = 100'000'000;
// Where cores are not shared, a thread that takes this long to claim its piece has been kept from it.
constexpr int SPINS_BEFORE_HELPING = 100;
// A piece is computed aside if it has at most as many floats.
constexpr int64_t ASIDE = 256 << 10;
constexpr uint64_t STOP = ~0ull;            // in place of a job
constexpr int SLOT_BITS = 16;               // of the word that names a job
enum { CLAIMED = 1, CLAIMED_ASIDE, DONE };  // of a piece

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

int64_t times_preempted() {
  struct rusage usage;
  return getrusage(RUSAGE_THREAD, &usage) == 0 ? usage.ru_nivcsw : 0;
}

}  // namespace

struct Pool::ThreadState {
  int thread = 0;
  Job* job = nullptr;
  uint64_t at = 0;        // its next phase
  int64_t took = 0;       // its last piece
  int64_t preempted = 0;  // how often, when it last looked
};
thread_local Pool::ThreadState Pool::thread_;

Pool::Pool(int threads) : threads_(threads), seats_((size_t)threads), jobs_((size_t)threads) {
  for (Seat& seat : seats_) {
    seat.aside.reset((float*)aligned_alloc(64, ASIDE * sizeof(float)));  // pages that nobody uses take no memory
    if (!seat.aside) throw std::bad_alloc();
  }
  const int maker = sched_getcpu();
  for (int t = 1; t < threads; t++) {
    workers_.emplace_back([this, t, maker] {
      spread_out(t - 1, maker);
      work(t);
    });
  }
}

Pool::~Pool() {
  job_.store(STOP);
  ring();
  for (auto& worker : workers_) worker.join();
}

void Pool::run_on_all(std::function<void(int)> run, const int32_t* stop) {
  size_t slot = 0;
  while (jobs_[slot].inside.load() > 0) slot = (slot + 1) % jobs_.size();  // who is late holds one
  Job& job = jobs_[slot];
  job.run = std::move(run);
  job.first = phase_.load() >> 1;
  job.stop = stop;
  job.stopped_at.store(UINT64_MAX);
  job_.store(++started_ << SLOT_BITS | slot);
  ring();
  thread_.thread = 0;
  thread_.job = &job;
  thread_.at = job.first;
  job.run(0);
  job_.store(0);  // who has not entered it by now never will: see work()
}

void Pool::settle() {
  for (Job& job : jobs_)
    for (int spins = 0; job.inside.load() > 0; spins++) {
      if (spins < SPINS_BEFORE_YIELDING) cpu_relax();
      else std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
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
  if (until == 0 || threads_ == 1) return false;
  if (now_ns() < until) return true;
  crowded_until_.store(0, std::memory_order_relaxed);
  return false;
}

bool Pool::is_late() const { return threads_ > 1 && is_over(thread_.at); }

bool Pool::stopped() const { return thread_.job->stopped_at.load(std::memory_order_relaxed) < thread_.at; }

void Pool::barrier() {
  const uint64_t phase = thread_.at++;
  finish(phase, threads_);
  wait_for_end(phase);
}

void Pool::finish(uint64_t phase, int64_t pieces) {
  if (finished_.fetch_add(1, std::memory_order_acq_rel) != pieces - 1) return;
  Job& job = *thread_.job;
  if (job.stop && !stopped() && __atomic_load_n(job.stop, __ATOMIC_RELAXED))
    job.stopped_at.store(phase, std::memory_order_relaxed);
  finished_.store(0, std::memory_order_relaxed);
  dealt_.store(0, std::memory_order_relaxed);
  phase_.store((phase + 1) << 1 | crowded());  // sequentially consistent, as what is asked next: see ring()
  if (asleep_.load() == 0) return;
  alarm_.fetch_add(1);
  wake_all(alarm_);
}

void Pool::wait_for_end(uint64_t phase) {
  const bool early = crowded();
  for (int spins = 0; spins < (early ? SPINS_WHEN_CROWDED : SPINS_BEFORE_YIELDING); spins++) {
    if (is_over(phase)) return;
    cpu_relax();
  }
  const int64_t since = now_ns();
  while (!early && now_ns() - since < STALL_NS) {
    if (is_over(phase)) return;
    sched_yield();
  }
  asleep_.fetch_add(1);
  for (uint32_t alarm = alarm_.load(); phase_.load() >> 1 == phase; alarm = alarm_.load()) wait_while(alarm_, alarm);
  asleep_.fetch_sub(1);
  const int64_t now = now_ns();
  if (now - since >= PREEMPTED_NS) crowded_until_.store(now + CROWDED_NS, std::memory_order_relaxed);
}

void Pool::go_through(const Phase& phase) {
  const uint64_t number = thread_.at++;
  const uint64_t word = phase_.load(std::memory_order_acquire);
  if (word >> 1 != number) return;
  const bool shared = word & 1;
  if (phase.dealt) {
    deal(phase.n, phase.unit, [&](int64_t begin, int64_t end) {
      phase.compute(phase.compute_of, begin, end, nullptr);
      phase.place(phase.place_of, begin, end, nullptr);
    });
    finish(number, threads_);
    return wait_for_end(number);
  }
  const int per_seat = shared ? PIECES : 1;
  const int64_t units = std::max((phase.n + phase.unit - 1) / phase.unit, (int64_t)1);
  const int64_t count = std::min(units, (int64_t)threads_ * per_seat), most = (units + count - 1) / count * phase.unit;
  const Pieces pieces{number, count, per_seat, shared && phase.floats > 0 && most * phase.floats <= ASIDE};
  const auto claim = [&](int64_t i) {
    uint64_t had = state(pieces, i).load(std::memory_order_relaxed);
    const uint64_t claimed = 4 * number + (pieces.aside ? CLAIMED_ASIDE : CLAIMED);
    if (had < 4 * number && state(pieces, i).compare_exchange_strong(had, claimed)) compute(phase, pieces, i);
  };
  const int64_t first = thread_.thread * per_seat;
  for (int64_t i = first; i < std::min(first + per_seat, count); i++) claim(i);
  for (int spins = 0; !shared && spins < SPINS_BEFORE_HELPING; spins++) {
    if (is_over(number)) return;
    cpu_relax();
  }
  for (int64_t i = 1; i <= count; i++) claim((first + count - i) % count);  // of others, their last ones first
  if (pieces.aside) take_over(phase, pieces);
  wait_for_end(number);
}

// A thread that runs ends its piece within the time of another one: after that the calling thread computes it again.
void Pool::take_over(const Phase& phase, const Pieces& pieces) {
  const int64_t since = now_ns();
  while (now_ns() - since < thread_.took) {
    if (is_over(pieces.phase)) return;
    cpu_relax();
  }
  for (int64_t i = 0; i < pieces.count && !is_over(pieces.phase); i++)
    if (state(pieces, i).load() == 4 * pieces.phase + CLAIMED_ASIDE) compute(phase, pieces, i);
}

void Pool::compute(const Phase& phase, const Pieces& pieces, int64_t i) {
  int64_t begin, end;
  share(phase.n, phase.unit, (int)pieces.count, (int)i, &begin, &end);
  if (!pieces.aside) {
    phase.compute(phase.compute_of, begin, end, nullptr);
    phase.place(phase.place_of, begin, end, nullptr);
    return finish(pieces.phase, pieces.count);
  }
  float* const aside = seats_[(size_t)thread_.thread].aside.get();
  const int64_t since = now_ns();
  phase.compute(phase.compute_of, begin, end, aside);
  uint64_t claimed = 4 * pieces.phase + CLAIMED_ASIDE;
  if (state(pieces, i).compare_exchange_strong(claimed, 4 * pieces.phase + DONE)) {
    phase.place(phase.place_of, begin, end, aside);
    finish(pieces.phase, pieces.count);
  }
  const int64_t now = now_ns();
  thread_.took = now - since;
  if (thread_.took < PREEMPTED_NS) return;
  const int64_t preempted = times_preempted();
  if (preempted == thread_.preempted) return;
  thread_.preempted = preempted;
  thread_.took = 0;
  crowded_until_.store(now + CROWDED_NS, std::memory_order_relaxed);
}

bool Pool::part(int64_t n, int64_t unit, int64_t i, int64_t* begin, int64_t* end) const {
  const int64_t units = (n + unit - 1) / unit;
  for (int64_t at = 0; at < units; i -= threads_) {
    const int64_t length = std::max((units - at) / (4 * threads_), (int64_t)1);
    if (i < threads_) {
      *begin = (at + i * length) * unit;
      *end = std::min(*begin + length * unit, n);
      return *begin < n;
    }
    at += length * threads_;
  }
  return false;
}

void Pool::work(int thread) {
  uint64_t seen = 0, word;
  const auto waits = [&] {
    word = job_.load();
    return word == 0 || word == seen;
  };
  for (;;) {
    int spins = 0, most = crowded() ? SPINS_WHEN_CROWDED : SPINS_BEFORE_PARKING;
    while (waits()) {
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
      if (waits() && awake_.load() == 0) wait_while(bell_, bell);
      parked_.fetch_sub(1);
    }
    if (word == STOP) return;
    seen = word;
    // Sequentially consistent, as in run_on_all() and settle(): a thread that finds the job unchanged after it has said
    // that it is inside is seen there by whoever ends the job.
    Job& job = jobs_[word & ((1 << SLOT_BITS) - 1)];
    job.inside.fetch_add(1);
    if (job_.load() == word) {
      thread_.thread = thread;
      thread_.job = &job;
      thread_.at = job.first;
      job.run(thread);
    }
    job.inside.fetch_sub(1);
  }
}
