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
#include <fstream>
#include <new>
#include <string>

namespace {
// At most a millisecond of pauses on any CPU: longer than Python needs between two decode steps.
constexpr int SPINS_BEFORE_PARKING = 20000;
// A thread that waits longer than this for the end of a phase waits for one that is not running: it yields the core, and
// after STALL_NS sleeps, so that the scheduler brings that one to the core that is free then. Not at once, since to sleep
// and to wake take longer than most waits; but where threads share cores, spinning takes them from those waited for.
constexpr int SPINS_BEFORE_YIELDING = 4000, SPINS_WHEN_CROWDED = 200;
constexpr int64_t STALL_NS = 500'000;
// A thread that was without its core for as long, or so long that others slept, shares it with a program that computes,
// for CROWDED_NS from then on: daemons need it for less. Only the system knows whether what took as long was interrupted.
constexpr int64_t PREEMPTED_NS = 1'000'000, CROWDED_NS = 100'000'000;
// Where cores are not shared, a thread that takes this long to claim its piece has been kept from it.
constexpr int SPINS_BEFORE_HELPING = 100;
// Jobs are compared for so long; if a thread waits for others for more than a sixth of that, its core is faster, until
// jobs are compared again.
constexpr int64_t COMPARED_NS = 30'000'000, UNEVEN_NS = 2'000'000'000;
// How often a half is halved: the last pieces are an eighth, or a 32nd, of what they would be if each thread had one.
constexpr int ROUNDS = 3, ROUNDS_OF_DEALT = 5;
// A piece is computed aside if it has at most as many floats.
constexpr int64_t ASIDE = 256 << 10;
constexpr uint64_t STOP = ~0ull;   // in place of a job
constexpr int SLOT_BITS = 16;      // of the word that names a job
enum { CROWDED = 1, UNEVEN = 2 };  // of the word that names a phase

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// The processors that this thread may use, and the core of each, as the number of its first processor.
std::vector<Processor> processors() {
  cpu_set_t allowed;
  std::vector<Processor> processors;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return processors;
  for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
    if (!CPU_ISSET(cpu, &allowed)) continue;
    const std::string folder = "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology";
    int core = cpu;
    std::ifstream(folder + "/thread_siblings_list") >> core;
    processors.push_back({cpu, core});
  }
  return processors;
}

// Moves the calling thread to a processor, and unpins it: threads that spin on the core that made the pool would each
// wait for the other's time slice until the scheduler notices.
void begin_on(int cpu) {
  cpu_set_t allowed, place;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  CPU_ZERO(&place);
  CPU_SET(cpu, &place);
  sched_setaffinity(0, sizeof place, &place);
  sched_setaffinity(0, sizeof allowed, &allowed);
}

// In place of a condition variable, which would make threads that wake take its mutex one after another.
void wait_while(std::atomic<uint32_t>& word, uint32_t value) {
  syscall(SYS_futex, (uint32_t*)&word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}
void wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, (uint32_t*)&word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}
static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t) && std::atomic<uint32_t>::is_always_lock_free);

int64_t times_switched() {
  struct rusage usage;
  return getrusage(RUSAGE_THREAD, &usage) == 0 ? usage.ru_nivcsw + usage.ru_nvcsw : 0;
}

}  // namespace

struct Pool::ThreadState {
  int thread = 0;
  Job* job = nullptr;
  uint64_t at = 0;                 // its next phase
  int64_t took = 0, took_for = 0;  // its last piece in order, and of how many of n
  uint64_t took_in = 0;            // that phase
  int64_t switched = 0;            // how often it had lost its core, or waited, when it last looked in this job
};
thread_local Pool::ThreadState Pool::thread_;

// How n is divided into pieces that are claimed in order; the same for all threads.
struct Pool::Pieces {
  Pieces(const Phase& phase, uint64_t number, int threads, bool crowded)
      : number(number),
        n(phase.n),
        unit(phase.unit),
        units(std::max((n + unit - 1) / unit, (int64_t)1)),
        threads(threads),
        rounds(phase.dealt ? ROUNDS_OF_DEALT : ROUNDS),
        crowded(crowded),
        room(phase.room) {
    int64_t at = 0;
    for (int round = 1;; round++) {
      const int64_t length = length_at(at), left = (units - at + length - 1) / length;
      if (round == rounds || left <= threads) {
        count += left;
        return;
      }
      count += threads;
      at += length * threads;
    }
  }
  int64_t length_at(int64_t at) const { return (units - at + 2 * threads - 1) / (2 * threads); }
  void piece(int64_t i, int64_t* begin, int64_t* end) const {
    int64_t at = 0;
    for (int round = 1; round < rounds && i >= threads; round++, i -= threads) at += length_at(at) * threads;
    const int64_t length = length_at(at);
    *begin = std::min((at + i * length) * unit, n);
    *end = std::min(*begin + length * unit, n);
  }
  bool is_aside(int64_t begin, int64_t end) const {
    return crowded && room.floats > 0 && (end - begin) * room.floats + room.besides <= ASIDE;
  }
  const uint64_t number;
  const int64_t n, unit, units;
  const int threads, rounds;
  const bool crowded;
  const Room room;
  int64_t count = 0;
};

Pool::Pool(int threads)
    : threads_(threads),
      seats_((size_t)threads),
      pieces_((size_t)(threads * (ROUNDS_OF_DEALT + 1))),
      jobs_((size_t)threads) {
  static_assert(ROUNDS <= ROUNDS_OF_DEALT);
  for (Seat& seat : seats_) {
    seat.aside.reset((float*)aligned_alloc(64, ASIDE * sizeof(float)));  // pages that nobody uses take no memory
    if (!seat.aside) throw std::bad_alloc();
  }
  const int64_t since = now_ns();
  for (int i = 0; i < 1000; i++) cpu_relax();
  pause_ps_ = now_ns() - since;
  const std::vector<int> places = threads > 1 ? spread_out(processors(), sched_getcpu()) : std::vector<int>();
  for (int t = 1; t < threads; t++) {
    const int place = t <= (int)places.size() ? places[(size_t)t - 1] : -1;
    workers_.emplace_back([this, t, place] {
      if (place >= 0) begin_on(place);
      work(t);
    });
  }
}

std::vector<int> spread_out(const std::vector<Processor>& all, int maker) {
  std::vector<int> first, rest, cores;
  for (const Processor& processor : all)
    if (processor.number == maker) cores.push_back(processor.core);
  for (const Processor& processor : all) {
    if (processor.number == maker) continue;
    const bool used = std::find(cores.begin(), cores.end(), processor.core) != cores.end();
    (used ? rest : first).push_back(processor.number);
    if (!used) cores.push_back(processor.core);
  }
  first.insert(first.end(), rest.begin(), rest.end());
  return first;
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
  job.first = phase_.load() >> MODE_BITS;
  job.stop = stop;
  job.stopped_at.store(UINT64_MAX);
  job_.store(++started_ << SLOT_BITS | slot);
  ring();
  thread_.thread = 0;
  thread_.job = &job;
  thread_.at = job.first;
  thread_.switched = times_switched();
  const int64_t since = now_ns();
  job.run(0);
  job_.store(0);  // who has not entered it by now never will: see work()
  if (threads_ > 1) compare_cores(now_ns() - since);
}

// Of equal pieces that are begun together the slower core's ends last. That says nothing while other programs need cores.
void Pool::compare_cores(int64_t took) {
  if (uneven_.load(std::memory_order_relaxed)) {
    if (now_ns() >= uneven_until_) uneven_.store(false, std::memory_order_relaxed);
    return;
  }
  const bool other_programs = crowded_until_.load(std::memory_order_relaxed) != 0;
  compared_ += took;
  if (!other_programs && compared_ < COMPARED_NS) return;
  int64_t least = INT64_MAX, most = 0;
  for (Seat& seat : seats_) {
    const int64_t waited = seat.waited.exchange(0, std::memory_order_relaxed) * pause_ps_ / 1000;
    least = std::min(least, waited);
    most = std::max(most, waited);
  }
  if (!other_programs && most - least > compared_ / 6) {
    uneven_until_ = now_ns() + UNEVEN_NS;
    uneven_.store(true, std::memory_order_relaxed);
  }
  compared_ = 0;
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

bool Pool::is_late() const {
  std::atomic_thread_fence(std::memory_order_acquire);  // what was read before counts if the phase is not over yet
  return threads_ > 1 && is_over(thread_.at);
}

bool Pool::is_void() const {
  std::atomic_thread_fence(std::memory_order_acquire);
  return is_over(thread_.at - 1);
}

int64_t Pool::barriers() {
  int64_t barriers = 0;
  between_jobs([&] { barriers = barriers_; });
  return barriers;
}

bool Pool::stopped() const { return thread_.job->stopped_at.load(std::memory_order_relaxed) < thread_.at; }

void Pool::barrier() {
  const uint64_t phase = thread_.at++;
  finish(phase, threads_, nullptr);
  wait_for_end(phase);
}

void Pool::finish(uint64_t phase, int64_t pieces, const Phase* of) {
  if (finished_.fetch_add(1, std::memory_order_acq_rel) != pieces - 1) return;
  if (of) of->then(of->then_of);
  else barriers_++;
  Job& job = *thread_.job;
  if (job.stop && !stopped() && __atomic_load_n(job.stop, __ATOMIC_RELAXED))
    job.stopped_at.store(phase, std::memory_order_relaxed);
  finished_.store(0, std::memory_order_relaxed);
  next_.store((phase + 1) << INDEX_BITS, std::memory_order_relaxed);
  const uint64_t mode = (crowded() ? CROWDED : 0) | (uneven_.load(std::memory_order_relaxed) ? UNEVEN : 0);
  phase_.store((phase + 1) << MODE_BITS | mode);  // sequentially consistent, as what is asked next: see ring()
  if (asleep_.load() == 0) return;
  look();
  alarm_.fetch_add(1);
  wake_all(alarm_);
}

int64_t Pool::wait_for_end(uint64_t phase) {
  const bool early = crowded();
  const int most = early ? SPINS_WHEN_CROWDED : SPINS_BEFORE_YIELDING;
  for (int spins = 0; spins < most; spins++) {
    if (is_over(phase)) return spins;
    cpu_relax();
  }
  const int64_t since = now_ns();
  while (!early && now_ns() - since < STALL_NS) {
    if (is_over(phase)) break;
    sched_yield();
  }
  if (!is_over(phase)) {
    asleep_.fetch_add(1);
    for (uint32_t alarm = alarm_.load(); !is_over(phase); alarm = alarm_.load()) wait_while(alarm_, alarm);
    asleep_.fetch_sub(1);
  }
  thread_.switched = times_switched();
  return most + (now_ns() - since) * 1000 / std::max(pause_ps_, (int64_t)1);
}

// By a thread that took long: whether it had lost its core.
bool Pool::look() {
  const int64_t before = thread_.switched;
  thread_.switched = times_switched();
  if (thread_.switched == before) return false;
  crowded_until_.store(now_ns() + CROWDED_NS, std::memory_order_relaxed);
  return true;
}

void Pool::go_through(const Phase& phase) {
  const uint64_t number = thread_.at++;
  std::atomic_thread_fence(std::memory_order_acquire);  // as in `is_late`
  const uint64_t word = phase_.load(std::memory_order_acquire);
  if (word >> MODE_BITS != number) return;
  if (threads_ == 1 || (!phase.dealt && (word & (CROWDED | UNEVEN)) == 0)) return take_own(phase, number);
  take_in_order(phase, {phase, number, threads_, (word & CROWDED) != 0});
}

void Pool::take_own(const Phase& phase, uint64_t number) {
  const int64_t units = std::max((phase.n + phase.unit - 1) / phase.unit, (int64_t)1);
  const int64_t count = std::min(units, (int64_t)threads_), seat = thread_.thread;
  const auto claim = [&](int64_t i) {
    std::atomic<uint64_t>& claimed = seats_[(size_t)i].claimed;
    uint64_t had = claimed.load(std::memory_order_relaxed);
    if (had >= number || !claimed.compare_exchange_strong(had, number)) return;
    int64_t begin, end;
    share(phase.n, phase.unit, (int)count, (int)i, &begin, &end);
    phase.compute(phase.compute_of, begin, end, nullptr);
    phase.place(phase.place_of, begin, end, nullptr);
    finish(number, count, &phase);
  };
  if (seat < count) claim(seat);
  int64_t pauses = 0;
  for (; pauses < SPINS_BEFORE_HELPING && !is_over(number); pauses++) cpu_relax();
  if (!is_over(number)) {
    for (int64_t i = 1; i <= count; i++) claim((seat + count - i) % count);  // of others
    pauses += wait_for_end(number);
  }
  std::atomic<int64_t>& waited = seats_[(size_t)seat].waited;
  waited.store(waited.load(std::memory_order_relaxed) + pauses, std::memory_order_relaxed);
}

int64_t Pool::claim(uint64_t phase) {
  uint64_t next = next_.load(std::memory_order_relaxed);
  do
    if (next >> INDEX_BITS != phase) return -1;
  while (!next_.compare_exchange_weak(next, next + 1, std::memory_order_relaxed));
  return (int64_t)(next & ((1 << INDEX_BITS) - 1));
}

void Pool::take_in_order(const Phase& phase, const Pieces& pieces) {
  for (int64_t i; (i = claim(pieces.number)) >= 0 && i < pieces.count;) compute(phase, pieces, i);
  if (pieces.crowded && pieces.room.floats > 0) take_over(phase, pieces);
  if (!is_over(pieces.number)) wait_for_end(pieces.number);
}

// A thread that runs ends a piece within the time that the calling one took: after that this one computes it again.
void Pool::take_over(const Phase& phase, const Pieces& pieces) {
  for (bool left = true; left && !is_over(pieces.number); cpu_relax()) {
    left = false;
    for (int64_t i = 0; i < pieces.count && !is_over(pieces.number); i++) {
      int64_t begin, end;
      pieces.piece(i, &begin, &end);
      const Piece& piece = pieces_[(size_t)i];
      if (!pieces.is_aside(begin, end) || piece.done.load(std::memory_order_relaxed) >= pieces.number) continue;
      left = true;
      const bool comparable = thread_.took_in == pieces.number && thread_.took_for > 0;
      const double usual = (double)thread_.took * (comparable ? (double)(end - begin) / (double)thread_.took_for : 1.0);
      if ((double)(now_ns() - piece.begun_at.load(std::memory_order_relaxed)) > 1.25 * usual) compute(phase, pieces, i);
    }
  }
}

void Pool::compute(const Phase& phase, const Pieces& pieces, int64_t i) {
  int64_t begin, end;
  pieces.piece(i, &begin, &end);
  const bool is_aside = pieces.is_aside(begin, end);
  float* const aside = is_aside ? seats_[(size_t)thread_.thread].aside.get() : nullptr;
  Piece& piece = pieces_[(size_t)i];
  const int64_t since = now_ns();
  if (is_aside) piece.begun_at.store(since, std::memory_order_relaxed);
  phase.compute(phase.compute_of, begin, end, aside);
  uint64_t had = piece.done.load(std::memory_order_relaxed);
  if (!is_aside || (had < pieces.number && piece.done.compare_exchange_strong(had, pieces.number))) {
    phase.place(phase.place_of, begin, end, aside);
    finish(pieces.number, pieces.count, &phase);
  }
  const int64_t took = now_ns() - since;
  const bool first = thread_.took_in != pieces.number;
  const int64_t usual = first ? 0 : 2 * thread_.took;
  // Of a phase that takes milliseconds only a piece that follows another one tells.
  if (took >= PREEMPTED_NS + usual && !(first && phase.dealt) && look()) return;
  thread_.took = took;
  thread_.took_for = end - begin;
  thread_.took_in = pieces.number;
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
      thread_.switched = times_switched();
      job.run(thread);
    }
    job.inside.fetch_sub(1);
  }
}
