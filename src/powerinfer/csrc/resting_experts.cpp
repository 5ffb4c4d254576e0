#include "resting_experts.h"

#include <iterator>

std::vector<Matrix> on_disk(int64_t experts, const Matrix& all, int64_t rows) {
  const int64_t panels = pi_round_up(rows, PI_LANES) / PI_LANES;
  std::vector<Matrix> matrices((size_t)experts, {all.type, rows, all.k, panels, nullptr, nullptr});
  const std::vector<float> factors = all.disk ? all.disk->factors : std::vector<float>();
  check(factors.size() < 2 || factors.size() == matrices.size(), "there are not as many factors as experts");
  for (size_t i = 0; i < matrices.size(); i++) {
    OnDisk disk{0, 0, rows * stored_row_bytes(all.type, all.k), rows, {}};
    if (!factors.empty()) disk.factors = {factors.size() == 1 ? factors[0] : factors[i]};
    matrices[i].disk = std::make_shared<OnDisk>(std::move(disk));
  }
  return matrices;
}

// ---- Reading them ---------------------------------------------------------------------------------------------------

RestingExperts::RestingExperts(std::shared_ptr<Slots> slots, ExpertStore::Parts& parts)
    : uses((size_t)slots->items()),
      elsewhere(uses.size()),
      slots_(std::move(slots)),
      matrices_(uses.size()),
      guesses_(slots_, ENOUGH) {
  for (size_t e = 0; e < matrices_.size(); e++)
    for (std::vector<Matrix>& part : parts)
      if (!part.empty() && part[e].disk) matrices_[e].push_back(&part[e]);
}

void RestingExperts::expect(const int32_t* expected, int64_t n) {
  std::vector<int32_t> expected_here;
  std::copy_if(expected, expected + n, std::back_inserter(expected_here),
               [&](int32_t e) { return !elsewhere[(size_t)e]; });
  guesses_.expect(expected_here.data(), (int64_t)expected_here.size());
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
  while (pinned_ < wanted_.size() && slots_->want(&wanted_[pinned_], 1)) {
    coming_.push_back(wanted_[pinned_++]);
    if (pinned) pinned(coming_.back());
  }
}

void RestingExperts::next(ExpertRows& rows, bool stay) {
  for (const int32_t e : now_) {
    slots_->changed(e);
    if (!stay) slots_->let_go(e);
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
    for (size_t i = 0; i < matrices_[(size_t)e].size(); i++) {
      Matrix& matrix = *matrices_[(size_t)e][i];
      uint8_t* const rows = slots_->writable(e, i);
      matrix.disk->rows = rows;
      matrix.disk->panels = rows - slots_->before(i);
      matrix.data = as_read ? nullptr : matrix.disk->panels;
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

// ---- Experts as matrices --------------------------------------------------------------------------------------------

namespace {

ExpertStore::Parts parts_of(const ExpertMatrices& all) {
  const int64_t n = all.experts;
  ExpertStore::Parts parts{std::vector<Matrix>(), on_disk(n, *all.up, all.neurons), on_disk(n, *all.down, all.up->k)};
  if (all.gate) parts[ExpertStore::GATE] = on_disk(n, *all.gate, all.neurons);
  return parts;
}

}  // namespace

ExpertsOnDisk::ExpertsOnDisk(ExpertMatrices all, std::shared_ptr<Workspace> workspace)
    : ExpertStore(all, parts_of(all), std::move(workspace)), resting_(all.slots, parts_) {}

void ExpertsOnDisk::sum_rows(Thread& t, ExpertRows& rows, const PiActs& acts, bool single, uint16_t* fired,
                             const Attempt& attempt) {
  const auto next = [&] {
    if (!attempt([&] { resting_.next(rows); })) rows.compute({});
  };
  sum_arriving(t, rows, acts, single, fired, next, resting_);
}

void ExpertStore::sum_arriving(Thread& t, ExpertRows& rows, const PiActs& acts, bool single, uint16_t* fired,
                               const std::function<void()>& next, const RestingExperts& resting) const {
  Workspace& w = *workspace_;
  for (;;) {
    if (t.id == 0) next();
    w.pool->barrier();
    if (rows.active.empty()) return w.pool->barrier();  // all have seen that
    const bool settles = resting.settles();
    multiply(t.id, rows, acts, single, fired);
    w.pool->barrier();
    if (settles) w.settle(t.id);
    add_down(t.id, rows);
    w.pool->barrier();
    if (!settles) continue;
    w.settle(t.id);
    w.pool->barrier();
  }
}
