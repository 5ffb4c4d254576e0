// Calls of the CPU by a GPU without the driver's threads: two numbers in memory that both of them see.
//
// Calls have numbers that grow within a step. A GPU's stream writes a call's number into `asked` once what the call reads
// has arrived, goes on, and waits, where it needs the result, until `answered` is at least as high. The thread that has
// launched the step, or one that does so in its place (`AnsweringThread`), looks at `asked` until it is, makes the call,
// and writes `answered`. A call that would compute nothing
// the GPU answers itself, before it asks for it.
//
// A GPU that waits for a CPU that never answers would wait for ever, so a watchdog ends that: it looks on from a thread of
// its own, and where a call that was asked for stays unanswered for too long, it releases whoever waits. Such a step has
// failed. A GPU that goes on then may write answers of its own over the release, so the watchdog looks again, and repeats
// it until a step begins.
#pragma once
#include <stdint.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

class HostFlags {
 public:
  // In place of an answer: no call has so high a number, so nothing waits any more.
  static constexpr uint32_t RELEASED = 0x7fffffff;
  // The numbers must outlive the object. patience: seconds until the watchdog releases.
  HostFlags(uint32_t* asked, uint32_t* answered, double patience);
  ~HostFlags();
  HostFlags(const HostFlags&) = delete;
  HostFlags& operator=(const HostFlags&) = delete;

  // A step begins: no call of it was asked for, and nothing of the last one is under way.
  void begin();
  // Waits for the GPU to ask for a call, for so many seconds at most. False: it has not, or *stop, which others set. Who
  // can be stopped waits beside threads that work, so it gives its core to whoever wants it after each look.
  bool wait(uint32_t number, double seconds, const std::atomic<bool>* stop = nullptr) const;
  // Whether the call is answered: one that was asked for, and that the CPU has not answered, the GPU has.
  bool is_answered(uint32_t number) const;
  // The call's result is written. Nothing after `release`.
  void answer(uint32_t number);
  // What was broken off is not answered any more: whoever waits goes on.
  void release();
  // Whether someone has called `release` in this step, or the watchdog has.
  bool is_released() const;
  // From now on.
  void set_patience(double seconds);

 private:
  void watch();

  uint32_t* const asked_;
  uint32_t* const answered_;
  std::atomic<bool> released_ = false;
  std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  double patience_;
  uint64_t steps_ = 0;
  bool ends_ = false;
  std::thread watchdog_;
};
