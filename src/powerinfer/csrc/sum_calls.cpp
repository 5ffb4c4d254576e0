#include "sum_calls.h"

#include <algorithm>

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
