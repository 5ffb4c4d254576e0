// One persistent pool of threads. A job runs on all of them at once (single program, many threads) and meets at
// barriers; between jobs the threads spin briefly, since the next decode step follows soon, and then park. To wake them
// takes many times as long as a small job, so who knows that one will come keeps them awake.
//
// Other programs may need the cores: a thread can lose its own at any instruction, for milliseconds, in which the others
// could compute a token. So the work between two barriers can be a phase: pieces that threads claim, over when all pieces
// are done, wherever the threads are. A thread that finds its phase over goes on to the next.
//
// Where cores are equally fast and nobody else needs them, each thread has one piece. Else, and for long phases always,
// pieces are claimed in order and become smaller: half of the work in one for each thread, half of the rest, and so on. So
// a slow core, or one that others use, holds up a small piece. While threads share cores, pieces are computed aside, in
// the thread's own memory: whoever has nothing else to do computes the piece of a thread that has lost its core again, and
// the first to end puts the result into place. The other one may read what later phases have written meanwhile: what it
// computes from that goes nowhere.
#pragma once
#include <stdint.h>
#include <stdlib.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }
  // Runs job(thread) on every thread, the caller being thread 0, and returns when all are done.
  template <class Job>
  void run(const Job& job) {
    run([] {}, job);
  }
  // Calls prepare() first, on the calling thread, when no other job runs any more.
  // stop: see `stopped`, may be null.
  template <class Prepare, class Job>
  void run(const Prepare& prepare, const Job& job, const int32_t* stop = nullptr) {
    std::lock_guard<std::mutex> one(busy_);
    settle();
    prepare();
    run_on_all(
        [this, &job](int thread) {
          job(thread);
          barrier();
        },
        stop);
  }
  // The same of a job that ends with a phase: returns when all its phases are over, though threads may still go through
  // them. So what the job reads must stay as it is, or memory, until `run` or `between_jobs` has been called; what it
  // captures is copied.
  template <class Prepare, class Job>
  void run_phases(const Prepare& prepare, const Job& job, const int32_t* stop) {
    std::lock_guard<std::mutex> one(busy_);
    prepare();
    run_on_all(job, stop);
  }
  // Calls work() while no job runs.
  template <class Work>
  void between_jobs(const Work& work) {
    std::lock_guard<std::mutex> one(busy_);
    settle();
    work();
  }
  // Called by all threads inside a job: none returns before all have arrived. A thread that waits long sleeps.
  void barrier();
  // Called by all threads inside a job, in place of work and a barrier: pieces of n, in whole units, each computed by one
  // thread. compute(begin, end, aside) and, after it, place(begin, end, aside). aside: null, or the thread's own memory,
  // as `room` says, where compute() puts what place() copies; then another thread may do the same at the same time, and
  // place() is called by one. No room: compute() writes to where others read, and aside is null. dealt: the phase takes
  // milliseconds.
  struct Room {
    int64_t floats = 0, besides = 0;  // of each of n; of a piece
    Room(int64_t floats, int64_t besides = 0) : floats(floats), besides(besides) {}
  };
  template <class Compute, class Place>
  void phase(int64_t n, int64_t unit, Room room, const Compute& compute, const Place& place, bool dealt = false) {
    phase_then(n, unit, room, compute, place, [] {}, dealt);
  }
  // then(): once, by whoever ends the last piece, before the phase is over.
  template <class Compute, class Place, class Then>
  void phase_then(int64_t n, int64_t unit, Room room, const Compute& compute, const Place& place, const Then& then,
                  bool dealt = false) {
    const auto call = [](const void* of, int64_t begin, int64_t end, float* aside) {
      (*(const Compute*)of)(begin, end, aside);
    };
    const auto put = [](const void* of, int64_t begin, int64_t end, float* aside) {
      (*(const Place*)of)(begin, end, aside);
    };
    const auto end = [](const void* of) { (*(const Then*)of)(); };
    go_through({n, unit, room, dealt, &compute, &place, &then, call, put, end});
  }
  template <class Work>
  void phase(int64_t n, int64_t unit, const Work& work, bool dealt = false) {
    phase(
        n, unit, 0, [&](int64_t begin, int64_t end, float*) { work(begin, end); }, [](int64_t, int64_t, float*) {},
        dealt);
  }
  // Whether the next phase of this thread is over: it need not prepare for it.
  bool is_late() const;
  // The same of the phase whose compute() calls it: if not, what was read before is what the phase was to read.
  bool is_void() const;
  // Whether *stop was not 0 when a phase ended that this thread has behind it: the same for all threads.
  bool stopped() const;
  int64_t barriers();  // of all jobs so far; waits until none runs
  // From here until let_park() is called as often, threads spin until the next job, however late; parked ones wake.
  void keep_awake();
  void let_park() { awake_.fetch_sub(1); }

 private:
  struct alignas(64) Job {
    std::function<void(int)> run;
    uint64_t first = 0;  // phase
    const int32_t* stop = nullptr;
    std::atomic<uint64_t> stopped_at{0};     // the phase at whose end it was seen
    alignas(64) std::atomic<int> inside{0};  // workers that go through it
  };
  struct Phase {
    int64_t n, unit;
    Room room;
    bool dealt;
    const void *compute_of, *place_of, *then_of;
    void (*compute)(const void*, int64_t, int64_t, float*);
    void (*place)(const void*, int64_t, int64_t, float*);
    void (*then)(const void*);
  };
  struct Pieces;
  struct alignas(64) Seat {            // of a thread
    std::atomic<uint64_t> claimed{0};  // the last phase whose one piece of this thread was
    std::atomic<int64_t> waited{0};    // pauses, in such phases, until others had done theirs
    struct Free {
      void operator()(float* p) const { free(p); }
    };
    std::unique_ptr<float, Free> aside;
  };
  struct alignas(64) Piece {           // of pieces that are claimed in order
    std::atomic<uint64_t> done{0};     // the last phase in which it was
    std::atomic<int64_t> begun_at{0};  // in that phase, or one before
  };
  struct ThreadState;  // of the calling thread, in the job that it goes through
  static thread_local ThreadState thread_;
  static constexpr int MODE_BITS = 2, INDEX_BITS = 16;

  void run_on_all(std::function<void(int)> job, const int32_t* stop);  // by the owner of busy_
  void settle();                                                       // waits until all threads have left the last job
  void go_through(const Phase& phase);
  void take_own(const Phase& phase, uint64_t number);
  void take_in_order(const Phase& phase, const Pieces& pieces);
  void take_over(const Phase& phase, const Pieces& pieces);
  void compute(const Phase& phase, const Pieces& pieces, int64_t i);
  int64_t claim(uint64_t phase);  // the next piece in order; -1: the phase is over
  // One more of its pieces is done; of: null: it is a barrier, and these are threads.
  void finish(uint64_t phase, int64_t pieces, const Phase* of);
  bool is_over(uint64_t phase) const { return phase_.load(std::memory_order_acquire) >> MODE_BITS != phase; }
  int64_t wait_for_end(uint64_t phase);  // returns the pauses that it made
  void work(int thread);
  bool crowded();  // a thread has lost its core, not long ago
  bool look();
  void compare_cores(int64_t took);
  void ring();  // wakes those that are parked

  const int threads_;
  std::vector<Seat> seats_;
  std::vector<Piece> pieces_;
  std::vector<Job> jobs_;                         // as many as threads: each of the workers may be late in another one
  uint64_t started_ = 0;                          // jobs so far
  alignas(64) std::atomic<uint64_t> job_{0};      // 0: none; else its number and its place in jobs_
  alignas(64) std::atomic<int64_t> finished_{0};  // pieces of this phase; threads at this barrier
  std::atomic<uint64_t> next_{1 << INDEX_BITS};   // the phase, and the next piece in order
  // The number of barriers and phases that are over, of all jobs, and how the next one is divided.
  alignas(64) std::atomic<uint64_t> phase_{1 << MODE_BITS};
  alignas(64) std::atomic<int> parked_{0};
  std::atomic<int> asleep_{0};             // until a phase is over
  std::atomic<uint32_t> alarm_{0};         // what they wait for a change of
  std::atomic<int64_t> crowded_until_{0};  // 0: threads have cores of their own
  std::atomic<bool> uneven_{false};        // some cores are faster than others
  int64_t barriers_ = 0;
  int64_t compared_ = 0, uneven_until_ = 0;  // nanoseconds of jobs, a time
  int64_t pause_ps_;                         // what a pause takes
  std::atomic<uint32_t> bell_{0};            // what parked threads wait for a change of
  std::atomic<int> awake_{0};
  std::mutex busy_;  // one job at a time, whoever calls
  std::vector<std::thread> workers_;
};

// The processors that the other threads of a pool begin on, in their order: one of each core, but of that of the one who
// makes it, before cores that are in use.
struct Processor {
  int number, core;
};
std::vector<int> spread_out(const std::vector<Processor>& all, int maker);

// The part of n that thread t of `threads` works on, in whole units; always the same split.
inline void share(int64_t n, int64_t unit, int threads, int t, int64_t* begin, int64_t* end) {
  const int64_t units = (n + unit - 1) / unit;
  *begin = units * t / threads * unit;
  *end = units * (t + 1) / threads * unit;
  if (*begin > n) *begin = n;
  if (*end > n) *end = n;
}
