#include "host_calls.h"

#include <stdio.h>

#include <exception>
#include <stdexcept>

void HostCalls::begin() {
  std::lock_guard<std::mutex> one(mutex_);
  waits_since_ = Clock::now();
  failure_[0] = 0;
}

std::string HostCalls::take_failure() {
  std::lock_guard<std::mutex> one(mutex_);
  const std::string failure = failure_;
  failure_[0] = 0;
  return failure;
}

int64_t HostCalls::made() {
  std::lock_guard<std::mutex> one(mutex_);
  return made_;
}

void HostCall::run(void* call) noexcept { make(*(HostCall*)call, false); }

void HostCall::skip(HostCall& call) noexcept { make(call, true); }

void HostCall::make(HostCall& own, bool skipped) noexcept {
  using Clock = HostCalls::Clock;
  HostCalls& all = *own.all_;
  const Clock::time_point begin = Clock::now();
  bool job = false;
  const char* failure = nullptr;
  char said[sizeof all.failure_];
  try {
    if (skipped) own.note();
    else job = own.compute();
  } catch (const std::exception& error) {
    snprintf(said, sizeof said, "%s", *error.what() ? error.what() : "an exception");
    failure = said;
  } catch (...) { failure = "an exception"; }
  if (failure && !skipped) own.write_zeros();
  std::lock_guard<std::mutex> one(all.mutex_);
  if (failure && !*all.failure_) snprintf(all.failure_, sizeof all.failure_, "%s", failure);
  const Clock::time_point end = Clock::now();
  own.done_.calls++;
  own.done_.jobs += job;
  own.done_.waited += std::chrono::duration<double>(begin - all.waits_since_).count();
  own.done_.worked += std::chrono::duration<double>(end - begin).count();
  all.waits_since_ = end;
  all.made_ += !skipped;
}

HostCall::Done HostCall::take() {
  std::lock_guard<std::mutex> one(all_->mutex_);
  const Done done = done_;
  done_ = {};
  return done;
}

void FlaggedCalls::add(uint32_t number, std::shared_ptr<HostCall> call) {
  const uint32_t last = calls_.empty() ? 0 : calls_.back().first;
  if (number <= last || number >= HostFlags::RELEASED) throw std::runtime_error("calls have numbers that grow");
  calls_.emplace_back(number, std::move(call));
}

bool FlaggedCalls::answer(double seconds, const std::atomic<bool>* stop) {
  for (; next_ < calls_.size() && !flags_->is_released(); next_++) {
    const auto& [number, call] = calls_[next_];
    if (!flags_->wait(number, seconds, stop)) return flags_->is_released();
    if (flags_->is_released()) break;
    if (flags_->is_answered(number)) {
      HostCall::skip(*call);
      continue;
    }
    HostCall::run(call.get());
    flags_->answer(number);
  }
  return true;
}
