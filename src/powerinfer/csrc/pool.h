// One persistent pool of threads. A job runs on all of them at once (single program, many threads) and meets at
// barriers; between jobs the threads spin briefly, since the next decode step follows soon, and then park. To wake them
// takes many times as long as a small job, so who knows that one will come keeps them awake.
//
// Other programs may need the cores: a thread can lose its own at any instruction, for milliseconds, in which the others
// could compute a token. So the work between two barriers can be a phase: pieces that threads claim, over when all pieces
// are done, wherever the threads are. A thread that finds its phase over goes on to the next. While threads share cores,
// pieces are small and computed aside, in the thread's own memory: whoever has nothing else to do computes the piece of a
// thread that has lost its core again, and the first to end puts the result into place. The other one may read what
// later phases have written meanwhile: what it computes from that goes nowhere.
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
  // Called by all threads inside a job, at most once between two barriers: work(begin, end) for parts of n, in whole
  // units, each by the thread that is free first. So a slow core, or one that others use, holds nobody up. A thread takes
  // large parts at first, which use its cache well, then small ones.
  template <class Work>
  void deal(int64_t n, int64_t unit, const Work& work) {
    int64_t begin, end;
    if (threads_ == 1 && n > 0) return work(0, n);
    while (part(n, unit, dealt_.fetch_add(1, std::memory_order_relaxed), &begin, &end)) work(begin, end);
  }
  // Called by all threads inside a job, in place of work and a barrier: pieces of n, in whole units, each computed by one
  // thread. compute(begin, end, aside) and, after it, place(begin, end, aside). aside: null, or the thread's own memory,
  // `floats` for each of n, where compute() puts what place() copies; then another thread may do the same at the same
  // time, and place() is called by one. floats: 0: compute() writes to where others read, and aside is null. dealt: in
  // parts of `deal` instead, and with a barrier.
  template <class Compute, class Place>
  void phase(int64_t n, int64_t unit, int64_t floats, const Compute& compute, const Place& place, bool dealt = false) {
    const auto call = [](const void* of, int64_t begin, int64_t end, float* aside) {
      (*(const Compute*)of)(begin, end, aside);
    };
    const auto put = [](const void* of, int64_t begin, int64_t end, float* aside) {
      (*(const Place*)of)(begin, end, aside);
    };
    go_through({n, unit, floats, dealt, &compute, &place, call, put});
  }
  template <class Work>
  void phase(int64_t n, int64_t unit, const Work& work) {
    phase(n, unit, 0, [&](int64_t begin, int64_t end, float*) { work(begin, end); }, [](int64_t, int64_t, float*) {});
  }
  // Whether the next phase of this thread is over: it need not prepare for it.
  bool is_late() const;
  // Whether *stop was not 0 when a phase ended that this thread has behind it: the same for all threads.
  bool stopped() const;
  // From here until let_park() is called as often, threads spin until the next job, however late; parked ones wake.
  void keep_awake();
  void let_park() { awake_.fetch_sub(1); }

 private:
  // The i-th part: as many as there are threads make a fourth of n, as many again a fourth of the rest, and so on. False:
  // there are fewer.
  bool part(int64_t n, int64_t unit, int64_t i, int64_t* begin, int64_t* end) const;
  struct alignas(64) Job {
    std::function<void(int)> run;
    uint64_t first = 0;  // phase
    const int32_t* stop = nullptr;
    std::atomic<uint64_t> stopped_at{0};     // the phase at whose end it was seen
    alignas(64) std::atomic<int> inside{0};  // workers that go through it
  };
  struct Phase {
    int64_t n, unit, floats;
    bool dealt;
    const void *compute_of, *place_of;
    void (*compute)(const void*, int64_t, int64_t, float*);
    void (*place)(const void*, int64_t, int64_t, float*);
  };
  static constexpr int PIECES = 4;              // of a thread, where cores are shared
  struct alignas(64) Seat {                     // of a thread
    std::atomic<uint64_t> pieces[PIECES] = {};  // four times the phase, and what has become of the piece in it
    struct Free {
      void operator()(float* p) const { free(p); }
    };
    std::unique_ptr<float, Free> aside;
  };
  struct Pieces {
    uint64_t phase;
    int64_t count;
    int per_seat;
    bool aside;  // computed so
  };
  struct ThreadState;  // of the calling thread, in the job that it goes through
  static thread_local ThreadState thread_;

  void run_on_all(std::function<void(int)> job, const int32_t* stop);  // by the owner of busy_
  void settle();                                                       // waits until all threads have left the last job
  void go_through(const Phase& phase);
  void take_over(const Phase& phase, const Pieces& pieces);
  void compute(const Phase& phase, const Pieces& pieces, int64_t i);
  std::atomic<uint64_t>& state(const Pieces& pieces, int64_t i) {
    return seats_[(size_t)(i / pieces.per_seat)].pieces[i % pieces.per_seat];
  }
  void finish(uint64_t phase, int64_t pieces);  // of which one more is done
  bool is_over(uint64_t phase) const { return phase_.load(std::memory_order_acquire) >> 1 != phase; }
  void wait_for_end(uint64_t phase);
  void work(int thread);
  bool crowded();  // a thread has lost its core, not long ago
  void ring();     // wakes those that are parked

  const int threads_;
  std::vector<Seat> seats_;
  std::vector<Job> jobs_;                         // as many as threads: each of the workers may be late in another one
  uint64_t started_ = 0;                          // jobs so far
  alignas(64) std::atomic<uint64_t> job_{0};      // 0: none; else its number and its place in jobs_
  alignas(64) std::atomic<int64_t> finished_{0};  // pieces of this phase; threads at this barrier
  // Twice the number of barriers and phases that are over, of all jobs, and whether threads share cores.
  alignas(64) std::atomic<uint64_t> phase_{2};
  alignas(64) std::atomic<int64_t> dealt_{0};  // parts, since the last barrier
  alignas(64) std::atomic<int> parked_{0};
  std::atomic<int> asleep_{0};             // until a phase is over
  std::atomic<uint32_t> alarm_{0};         // what they wait for a change of
  std::atomic<int64_t> crowded_until_{0};  // 0: threads have cores of their own
  std::atomic<uint32_t> bell_{0};          // what parked threads wait for a change of
  std::atomic<int> awake_{0};
  std::mutex busy_;  // one job at a time, whoever calls
  std::vector<std::thread> workers_;
};

// The part of n that thread t of `threads` works on, in whole units; always the same split.
inline void share(int64_t n, int64_t unit, int threads, int t, int64_t* begin, int64_t* end) {
  const int64_t units = (n + unit - 1) / unit;
  *begin = units * t / threads * unit;
  *end = units * (t + 1) / threads * unit;
  if (*begin > n) *begin = n;
  if (*end > n) *end = n;
}
