#include "answering_thread.h"

#include <utility>

#include "pool.h"

namespace {

// Some ten microseconds: a thread that waits for the GPU has seen by then that it is to stop.
constexpr int SPINS_BEFORE_SLEEPING = 200;

}  // namespace

AnsweringThread::AnsweringThread() : thread_([this] { work(); }) {}

AnsweringThread::~AnsweringThread() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ends_ = true;
    stop_.store(true, std::memory_order_relaxed);
  }
  changed_.notify_all();
  thread_.join();
}

void AnsweringThread::start(std::shared_ptr<FlaggedCalls> calls, double seconds) {
  take_back();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    calls_ = std::move(calls);
    seconds_ = seconds;
    stop_.store(false, std::memory_order_relaxed);
    answers_.store(true, std::memory_order_relaxed);
  }
  changed_.notify_all();
}

void AnsweringThread::take_back() {
  std::shared_ptr<FlaggedCalls> calls;  // which are let go without the mutex: that may take a lock of Python's
  stop_.store(true, std::memory_order_relaxed);
  for (int spins = 0; answers() && spins < SPINS_BEFORE_SLEEPING; spins++) cpu_relax();
  std::unique_lock<std::mutex> lock(mutex_);
  back_.wait(lock, [&] { return !answers(); });
  calls = std::move(calls_);
}

void AnsweringThread::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return answers() || ends_; });
    if (ends_) return;
    lock.unlock();
    calls_->answer(seconds_, &stop_);
    lock.lock();
    answers_.store(false, std::memory_order_release);
    back_.notify_all();
  }
}
