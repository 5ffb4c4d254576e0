// A thread that answers the calls of a step that was launched ahead, while the thread that has launched it does something
// else: without it a GPU would wait, in its first layer that both devices compute, until that one is back.
//
// The pool computes for one caller at a time, and so does the rest of the CPU's part of a model. From `start` until
// `take_back` has returned that caller is this thread: nobody else uses them. Otherwise it sleeps. While it waits for the
// GPU it gives its core to whoever needs one; the thread that takes calls back sleeps, too, while one of them is made: so
// the two never spin for each other, though they have one core. It runs where the system puts it, among the processors of
// the thread that has made it.
#pragma once
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

#include "host_calls.h"

class AnsweringThread {
 public:
  AnsweringThread();
  // Ends it, behind the call that it makes. A GPU that waits for the next one must have been released.
  ~AnsweringThread();
  AnsweringThread(const AnsweringThread&) = delete;
  AnsweringThread& operator=(const AnsweringThread&) = delete;

  // Makes and answers what is left of calls, until the GPU has not asked for the next one for so many seconds.
  void start(std::shared_ptr<FlaggedCalls> calls, double seconds);
  // Returns once the call that is being made is answered; what is left of them is the caller's. Nothing if none are made.
  void take_back();
  bool answers() const { return answers_.load(std::memory_order_acquire); }

 private:
  void work();

  std::atomic<bool> answers_{false};  // changed with the mutex
  std::atomic<bool> stop_{false};
  std::mutex mutex_;  // of what follows
  std::condition_variable changed_, back_;
  std::shared_ptr<FlaggedCalls> calls_;
  double seconds_ = 0;
  bool ends_ = false;
  std::thread thread_;
};
