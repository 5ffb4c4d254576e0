#include "resting_experts.h"

#include <algorithm>
#include <iterator>

#include "experts.h"

RestingExperts::RestingExperts(std::shared_ptr<Slots> slots, const std::vector<std::vector<Matrix>*>& parts)
    : uses((size_t)slots->items()),
      elsewhere(uses.size()),
      slots_(std::move(slots)),
      parts_(uses.size()),
      guesses_(slots_, ENOUGH) {
  for (std::vector<Matrix>* const of_all : parts) {
    for (size_t e = 0; e < parts_.size(); e++) {
      Matrix& one = (*of_all)[e];
      one.disk = std::make_shared<OnDisk>(*one.disk);
      parts_[e].push_back(&one);
    }
  }
}

void RestingExperts::expect(const int32_t* experts, int64_t n) {
  std::vector<int32_t> here;
  std::copy_if(experts, experts + n, std::back_inserter(here), [&](int32_t e) { return !elsewhere[(size_t)e]; });
  guesses_.expect(here.data(), (int64_t)here.size());
}

void RestingExperts::begin(const ExpertRows& rows) {
  all_ += (int64_t)rows.active.size();
  for (const int32_t e : rows.active) hits_ += slots_->held(e);
  hits_ -= guesses_.judge([&](int32_t e) { return rows.begin[(size_t)e + 1] > rows.begin[(size_t)e]; });
  end();
  for (const int32_t e : rows.active) uses[(size_t)e] += rows.begin[(size_t)e + 1] - rows.begin[(size_t)e];
  wanted_ = rows.active;
  const auto rank = [&](int32_t e) { return slots_->held(e) ? 0 : slots_->coming(e) ? 1 : 2; };
  std::stable_sort(wanted_.begin(), wanted_.end(), [&](int32_t a, int32_t b) { return rank(a) < rank(b); });
  read_more();
}

// Pins experts, from the first on, one at a time: then each can be waited for.
void RestingExperts::read_more() {
  while (pinned_ < wanted_.size() && slots_->want(&wanted_[pinned_], 1)) coming_.push_back(wanted_[pinned_++]);
}

void RestingExperts::next(ExpertRows& rows) {
  for (const int32_t e : now_) {
    slots_->changed(e);
    slots_->let_go(e);
  }
  now_.clear();
  read_more();
  // Where others are to follow into their memory, few at a time, so that reads go on.
  const size_t most = pinned_ == wanted_.size() ? wanted_.size() : std::max((size_t)slots_->slots() / 4, (size_t)1);
  take_arrived(most);
  if (now_.empty() && !coming_.empty()) {
    slots_->wait(coming_.front());
    take_arrived(most);
  }
  place();
  rows.compute(now_);
}

// The matrices of the experts that are computed now: as they were read, or as an earlier step has left them.
void RestingExperts::place() {
  settles_ = false;
  for (const int32_t e : now_) {
    const bool as_read = slots_->as_read(e);
    for (size_t i = 0; i < parts_[(size_t)e].size(); i++) {
      Matrix& one = *parts_[(size_t)e][i];
      uint8_t* const rows = slots_->own(e, i);
      one.disk->rows = rows;
      one.disk->panels = rows - slots_->before(i);
      one.data = as_read ? nullptr : one.disk->panels;
      settles_ = settles_ || (as_read && slots_->before(i) > 0);
    }
  }
}

void RestingExperts::take_arrived(size_t most) {
  std::vector<int32_t> left;
  for (const int32_t e : coming_) (now_.size() < most && slots_->arrived(e) ? now_ : left).push_back(e);
  coming_ = std::move(left);
}

void RestingExperts::end() {
  slots_->let_go();
  guesses_.end();
  wanted_.clear();
  coming_.clear();
  now_.clear();
  pinned_ = 0;
}
