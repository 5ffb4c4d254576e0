#include "host_flags.h"

#include <sched.h>

#include <chrono>

#include "pool.h"

namespace {

// The watchdog counts its looks rather than seconds: a process that was stopped for a while has looked once meanwhile.
constexpr int LOOKS = 16;
// Seconds between two looks at a release.
constexpr double REPEATED = 0.005;
// About a millisecond on any CPU; then other programs may have the core between two looks.
constexpr int64_t SPINS_BEFORE_YIELDING = 20000, SPINS_PER_CLOCK = 256;

uint32_t load(const uint32_t* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
void store(uint32_t* p, uint32_t value) { __atomic_store_n(p, value, __ATOMIC_RELEASE); }
// As a GPU compares.
bool reaches(uint32_t value, uint32_t number) { return (int32_t)(value - number) >= 0; }

}  // namespace

HostFlags::HostFlags(uint32_t* asked, uint32_t* answered, double patience)
    : asked_(asked), answered_(answered), patience_(patience) {
  begin();
  watchdog_ = std::thread([this] { watch(); });
}

HostFlags::~HostFlags() {
  release();  // a step that nobody ends waits no more
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  watchdog_.join();
}

void HostFlags::begin() {
  std::lock_guard<std::mutex> lock(mutex_);
  steps_++;
  released_ = false;
  store(asked_, 0);
  store(answered_, 0);
}

bool HostFlags::wait(uint32_t number, double seconds, const std::atomic<bool>* stop) const {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point begin = Clock::now();
  const int64_t alone = stop ? 0 : SPINS_BEFORE_YIELDING;
  for (int64_t spins = 0;; spins++) {
    if (stop && stop->load(std::memory_order_relaxed)) return false;
    if (reaches(load(asked_), number)) return true;
    if (spins % SPINS_PER_CLOCK == 0 && std::chrono::duration<double>(Clock::now() - begin).count() >= seconds)
      return false;
    if (spins < alone) cpu_relax();
    else sched_yield();
  }
}

bool HostFlags::is_answered(uint32_t number) const { return reaches(load(answered_), number); }

void HostFlags::answer(uint32_t number) {
  if (released_) return;
  uint32_t before = load(answered_);
  while (before != RELEASED &&
         !__atomic_compare_exchange_n(answered_, &before, number, false, __ATOMIC_RELEASE, __ATOMIC_ACQUIRE)) {}
}

void HostFlags::release() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    released_ = true;
    store(answered_, RELEASED);
  }
  changed_.notify_all();
}

bool HostFlags::is_released() const { return released_ || load(answered_) == RELEASED; }

void HostFlags::set_patience(double seconds) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    patience_ = seconds;
  }
  changed_.notify_all();
}

void HostFlags::watch() {
  std::unique_lock<std::mutex> lock(mutex_);
  uint64_t step = 0;
  uint32_t latest = 0;
  int looks = 0;
  while (!ends_) {
    changed_.wait_for(lock, std::chrono::duration<double>(released_ ? REPEATED : patience_ / LOOKS));
    uint32_t answered = load(answered_);
    if (released_) {
      if (answered != RELEASED) store(answered_, RELEASED);
      continue;
    }
    const bool pending = !reaches(answered, load(asked_));
    looks = pending && step == steps_ && latest == answered ? looks + 1 : 0;
    step = steps_;
    latest = answered;
    if (looks == LOOKS)  // unless the answer has come just now
      released_ =
          __atomic_compare_exchange_n(answered_, &answered, RELEASED, false, __ATOMIC_RELEASE, __ATOMIC_ACQUIRE);
  }
}
