#include "window.h"

#include <algorithm>

namespace {

// Bytes that a matrix takes in the ring: its own, and those of the blocks around it.
int64_t held(const OnDisk& matrix) {
  return pi_round_up(matrix.offset % Reads::ALIGN + matrix.bytes, (int64_t)Reads::ALIGN);
}

int64_t held(const std::vector<std::shared_ptr<OnDisk>>& matrices, size_t n) {
  int64_t bytes = 0;
  for (size_t i = 0; i < n; i++) bytes += held(*matrices[i]);
  return bytes;
}

}  // namespace

Window::Window(std::shared_ptr<Reads> reads, int64_t bytes)
    : reads_(std::move(reads)), size_(bytes / Reads::ALIGN * Reads::ALIGN), ring_(std::max<int64_t>(size_, 1)) {}

Window::~Window() {
  for (const Loaded& one : loaded_) {
    try {
      reads_->cancel(one.ticket);  // however long it takes: the ring is written to
    } catch (const std::exception&) {
      // it cannot be waited for
    }
  }
}

void Window::add(size_t op, const std::vector<std::shared_ptr<OnDisk>>& matrices) {
  check(held(matrices, matrices.size()) <= size_, "the window is smaller than the matrices of one operator");
  check(unit_of_.size() <= op, "operators are added in their order");
  uint8_t* at = ring_.data();
  for (const auto& one : matrices) {
    one->rows = at;  // there is memory behind it whatever happens to its reads
    at += held(*one);
  }
  unit_of_.resize(op + 1, -1);
  unit_of_[op] = (int)units_.size();
  units_.push_back({op, matrices, matrices.size()});
}

void Window::begin(const std::function<size_t(size_t)>& wanted) {
  if (!failure_.empty() && over()) failure_.clear();
  for (Unit& unit : units_) unit.wanted = wanted(unit.op);
  if (loaded_.empty()) next_ = 0;
  read_ahead();
}

void Window::take(size_t op) {
  const size_t unit = (size_t)unit_of_[op];
  attempt([&] {
    const auto has_all = [&](const Loaded& one) { return one.unit == unit && one.matrices >= units_[unit].wanted; };
    for (; !loaded_.empty() && !has_all(loaded_.front()); loaded_.pop_front()) reads_->cancel(loaded_.front().ticket);
    if (loaded_.empty()) {
      next_ = unit;
      load(unit);
    }
    reads_->wait(loaded_.front().ticket);
  });
}

void Window::release(size_t op) {
  if (failed()) return;
  if (!loaded_.empty() && loaded_.front().unit == (size_t)unit_of_[op]) loaded_.pop_front();
  read_ahead();
}

void Window::read_ahead() {
  attempt([&] { load_next(); });
}

void Window::load_next() {
  for (size_t tried = 0; tried < units_.size(); tried++) {
    if (!loaded_.empty() && next_ == loaded_.front().unit) break;  // all of them are there
    if (!units_[next_].wanted) next_ = after(next_);
    else if (!load(next_)) break;
  }
  if (!loaded_.empty()) (void)reads_->done(loaded_.front().ticket);  // what waits for a place in the queue goes on
}

// Begins to read a unit into the ring; false where there is no room.
bool Window::load(size_t index) {
  const Unit& unit = units_[index];
  const int64_t bytes = held(unit.matrices, unit.wanted), at = room_for(bytes);
  if (at < 0) return false;
  std::vector<Read> reads;
  uint8_t* to = ring_.data() + at;
  for (size_t i = 0; i < unit.wanted; i++) {
    const auto& one = unit.matrices[i];
    uint8_t* const rows = to + one->offset % Reads::ALIGN;
    one->rows = rows;
    reads.push_back({one->file, one->offset, one->bytes, rows});
    to += held(*one);
  }
  loaded_.push_back({index, unit.wanted, at, at + bytes, reads_->begin(reads.data(), reads.size())});
  next_ = after(index);
  return true;
}

// Where that many bytes are free behind what was loaded last, -1: nowhere.
int64_t Window::room_for(int64_t bytes) const {
  if (loaded_.empty()) return 0;
  const int64_t first = loaded_.front().begin, last = loaded_.back().end;
  if (loaded_.back().begin < first) return last + bytes <= first ? last : -1;
  if (last + bytes <= size_) return last;
  return bytes <= first ? 0 : -1;
}

// After a failure: whether nothing is written to the ring any more, which is empty then. A disk is waited for once; while
// it does not answer, steps fail at once.
bool Window::over() {
  for (; !loaded_.empty(); loaded_.pop_front()) {
    const int64_t ticket = loaded_.front().ticket;
    try {
      if (!silent_ && !reads_->done(ticket)) reads_->wait(ticket);
    } catch (const std::exception&) {
      // nobody needs it
    }
    silent_ = !reads_->done(ticket);
    if (silent_) return false;
  }
  return true;
}

void Window::forget() {
  if (!over()) throw ReadError(failed() ? failure_ : "the disk does not answer");
  give_back(ring_.data(), size_);
}

void Window::end() {
  if (failed()) throw ReadError(failure_);
}
