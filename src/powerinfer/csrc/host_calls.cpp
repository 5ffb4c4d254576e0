#include "host_calls.h"

#include <stdio.h>

#include <algorithm>
#include <exception>

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

void NeuronCall::write_zeros() noexcept { std::fill(out_, out_ + tokens_ * sum_->bundles->up.k, 0.0f); }

bool ExpertCall::compute() {
  if (part_ == SUM_ORDERED) return op_->sum_ordered(program_, a_.x, a_.tokens, a_.out, a_.hidden);
  select();
  if (part_ == ALL) return op_->sum(program_, a_.x, a_.tokens, own_.data(), a_.weights, a_.out, a_.hidden);
  op_->order(program_, a_.tokens, own_.data(), a_.weights);
  while (op_->fetch(program_)) {}
  return false;
}

void ExpertCall::note() {
  if (part_ != SUM_ORDERED) select();
}

void ExpertCall::select() {
  for (size_t i = 0; i < own_.size(); i++) {
    const int32_t expert = a_.selected[i];
    check(expert >= 0 && expert < a_.experts, "no such expert");
    own_[i] = a_.places[expert];
    a_.tally[expert]++;
    if (own_[i] < 0) a_.tally[a_.experts]++;
  }
}

void ExpertCall::write_zeros() noexcept {
  if (part_ != ORDER) std::fill(a_.out, a_.out + a_.tokens * op_->store().d_model, 0.0f);
}

void FlaggedCalls::add(uint32_t number, std::shared_ptr<HostCall> call) {
  const uint32_t last = calls_.empty() ? 0 : calls_.back().first;
  check(number > last && number < HostFlags::RELEASED, "calls have numbers that grow");
  calls_.emplace_back(number, std::move(call));
}

bool FlaggedCalls::answer(double seconds) {
  for (; next_ < calls_.size() && !flags_->is_released(); next_++) {
    const auto& [number, call] = calls_[next_];
    if (!flags_->wait(number, seconds)) return flags_->is_released();
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
