#include "guesses.h"

#include <math.h>

void Guesses::expect(const int32_t* items, int64_t n) {
  const auto absent = [&](int32_t i) { return !slots_->held(i) && !slots_->coming(i); };
  std::vector<int32_t> list;
  for (const bool there : {true, false})  // what is there stays, before others come
    for (int64_t i = 0; i < n && (int64_t)list.size() < slots_->most(); i++) {
      float& priority = slots_->priority[(size_t)items[i]];
      if (priority == INFINITY || absent(items[i]) == there) continue;
      raised_.emplace_back(items[i], priority);
      priority = INFINITY;
      list.push_back(items[i]);
      if (!there) early_.push_back(items[i]);
    }
  slots_->fetch(list.data(), (int64_t)list.size());
}

void Guesses::end() {
  for (const auto& [item, priority] : raised_) slots_->priority[(size_t)item] = priority;
  raised_.clear();
  early_.clear();
}
