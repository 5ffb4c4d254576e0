// One persistent pool of threads. A job runs on all of them at once (single program, many threads) and meets at
// barriers; between jobs the threads spin briefly, since the next decode step follows soon, and then park. To wake them
// takes many times as long as a small job, so who knows that one will come keeps them awake.
#pragma once
#include <stdint.h>

#include <atomic>
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
  template <class Prepare, class Job>
  void run(const Prepare& prepare, const Job& job) {
    std::lock_guard<std::mutex> one(busy_);
    prepare();
    run_on_all([](void* context, int thread) { (*(const Job*)context)(thread); }, (void*)&job);
  }
  // Calls work() while no job runs.
  template <class Work>
  void between_jobs(const Work& work) {
    std::lock_guard<std::mutex> one(busy_);
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
  // From here until let_park() is called as often, threads spin until the next job, however late; parked ones wake.
  void keep_awake();
  void let_park() { awake_.fetch_sub(1); }

 private:
  // The i-th part: as many as there are threads make a fourth of n, as many again a fourth of the rest, and so on. False:
  // there are fewer.
  bool part(int64_t n, int64_t unit, int64_t i, int64_t* begin, int64_t* end) const;
  void run_on_all(void (*job)(void* context, int thread), void* context);  // by the owner of busy_
  void work(int thread);
  bool crowded();  // a thread had to wait for one that was not running, not long ago
  void ring();     // wakes those that are parked

  const int threads_;
  void (*job_)(void*, int) = nullptr;
  void* context_ = nullptr;
  alignas(64) std::atomic<uint32_t> epoch_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
  alignas(64) std::atomic<int64_t> dealt_{0};  // parts, since the last barrier
  alignas(64) std::atomic<int> parked_{0};
  std::atomic<int> asleep_{0};             // at a barrier
  std::atomic<int64_t> stalled_{0};        // when a thread last waited for one that was not running
  std::atomic<int64_t> crowded_until_{0};  // 0: threads have cores of their own
  std::atomic<uint32_t> bell_{0};          // what parked threads wait for a change of
  std::atomic<int> awake_{0};
  std::atomic<bool> stop_{false};
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
