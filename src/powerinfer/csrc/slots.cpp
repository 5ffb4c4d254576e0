#include "slots.h"

#include <string.h>

#include <algorithm>
#include <exception>

#include "weights.h"

namespace {

constexpr int64_t LINE = 64;
constexpr int64_t MOST_BYTES = 1LL << 46;
constexpr int32_t MISSED = INT32_MIN;  // in place of a slot: it is about to be read

int64_t up_to(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

int64_t bytes_of(int64_t slots, int64_t slot_bytes) {
  check(slots > 0 && slots < INT32_MAX && slot_bytes > 0, "at least one slot is needed");
  check(slot_bytes <= MOST_BYTES / slots, "so much memory for slots cannot be had");
  return slots * slot_bytes;
}

}  // namespace

// ---- Memory ---------------------------------------------------------------------------------------------------------

SlotMemory::SlotMemory(int64_t slots, int64_t slot_bytes, int64_t common)
    : slots_(slots),
      slot_bytes_(slot_bytes),
      all_common_(common),
      common_(common),
      unclaimed_(slots - common),
      used_(slots),
      memory_(bytes_of(slots, slot_bytes)) {
  check(common >= 0 && common < slots, "not all slots can be common ones");
  for (int64_t i = slots - 1; i >= 0; i--) free_.push_back((int32_t)i);
}

void SlotMemory::use(int64_t n) {
  check(n > 0 && n <= slots_, "there are not so many slots");
  for (Slots* const user : users_) user->leave(n);
  if (n < used_) give_back(memory_.data() + n * slot_bytes_, (used_ - n) * slot_bytes_);
  used_ = n;
  std::vector<uint8_t> taken((size_t)n);
  for (const Slots* const user : users_)
    for (size_t slot = 0; slot < user->item_of_.size(); slot++)
      if (user->item_of_[slot] >= 0) taken[(size_t)user->where_[slot]] = 1;
  free_.clear();
  for (int64_t i = n - 1; i >= 0; i--)
    if (!taken[(size_t)i]) free_.push_back((int32_t)i);
}

// ---- Slots ----------------------------------------------------------------------------------------------------------

Slots::Slots(std::shared_ptr<Reads> reads, std::vector<Resting> parts, int64_t items, int64_t slots,
             std::shared_ptr<SlotMemory> memory)
    : reads_(std::move(reads)),
      parts_(std::move(parts)),
      slot_bytes_(lay_out(items)),
      slots_(slots),
      memory_(memory ? std::move(memory) : std::make_shared<SlotMemory>(slots, slot_bytes_)),
      as_read_((size_t)items),
      times_read_((size_t)items),
      early_((size_t)items),
      slot_of_((size_t)items, -1) {
  const int64_t unit = reads_->direct() && !small_ ? (int64_t)Reads::ALIGN : LINE;
  check(slots > 0 && slots <= memory_->unclaimed_, "there are not so many slots left");
  check(slot_bytes_ <= memory_->slot_bytes_ && memory_->slot_bytes_ % unit == 0, "the slots of that memory do not fit");
  bool in_lines = memory_->slots_ * memory_->slot_bytes_ / LINE <= UINT32_MAX;
  for (int64_t i = 0; i < items && reads_->direct() && !small_; i++) in_lines = in_lines && parts_[0].at(i) % LINE == 0;
  if (in_lines && !parts_[0].before) lines_.resize((size_t)items);
  for (const Resting& part : parts_) item_bytes_ += part.later ? 0 : part.bytes;
  const int64_t most = slots + memory_->all_common_;
  priority.resize((size_t)items);
  item_of_.assign((size_t)most, -1);
  where_.resize((size_t)most);
  kept_.resize((size_t)most);
  for (int64_t i = most - 1; i >= 0; i--) free_.push_back((int32_t)i);  // taken from the end
  memory_->unclaimed_ -= slots;
  memory_->users_.push_back(this);
}

Slots::~Slots() {
  for (const Coming& coming : coming_) {
    try {
      reads_->cancel(coming.ticket);
    } catch (const ReadError&) {}
  }
  coming_.clear();
  for (size_t slot = 0; slot < item_of_.size(); slot++)
    if (item_of_[slot] >= 0) drop((int32_t)slot);
  memory_->unclaimed_ += slots_;
  memory_->users_.erase(std::remove(memory_->users_.begin(), memory_->users_.end(), this), memory_->users_.end());
}

// Slots that can be had beside those with items.
int64_t Slots::available() const {
  const int64_t more = std::max(slots_ - taken_, (int64_t)0) + memory_->common_;
  return std::min(more, (int64_t)memory_->free_.size());
}

int32_t Slots::take() {
  const int32_t slot = free_.back();
  free_.pop_back();
  where_[(size_t)slot] = memory_->free_.back();
  memory_->free_.pop_back();
  memory_->common_ -= ++taken_ > slots_;
  return slot;
}

// The item of a slot leaves memory.
void Slots::drop(int32_t slot) {
  int32_t& item = item_of_[(size_t)slot];
  slot_of_[(size_t)item] = -1;
  item = -1;
  kept_[(size_t)slot] = 0;
  free_.push_back(slot);
  memory_->free_.push_back(where_[(size_t)slot]);
  memory_->common_ += taken_-- > slots_;
}

// Lets all go, and of what lies at `from` or behind that nothing is left.
void Slots::leave(int64_t from) {
  let_go();
  while (!coming_.empty()) finish(0);
  for (size_t slot = 0; slot < item_of_.size(); slot++)
    if (item_of_[slot] >= 0 && where_[slot] >= from) drop((int32_t)slot);
}

// Bytes of a slot. Past the cache whole blocks are read, at other places in their blocks from item to item; small parts
// are copied from these.
int64_t Slots::lay_out(int64_t items) {
  check(items > 0 && items < INT32_MAX && !parts_.empty(), "slots are for items that have parts");
  std::vector<int64_t> largest;
  int64_t whole = 0, close = 0;
  for (const Resting& part : parts_) {
    const int64_t most = (INT64_MAX / 2) / items;
    check(part.places.empty() || (int64_t)part.places.size() == items, "not a place for each item");
    check(part.bytes > 0 && part.before >= 0 && part.before <= MOST_BYTES && part.each > 0 && part.stride >= 0 &&
              part.outer >= 0 && part.stride < most && part.outer < most,
          "parts have bytes, and follow each other");
    largest.push_back(0);
    for (int64_t i = 0; i < items; i++) {
      reads_->check(part.file_of(i), part.at(i), part.bytes);
      largest.back() = std::max(largest.back(), place_in_part(part, i) + part.bytes);
    }
    whole += up_to(largest.back(), reads_->direct() ? (int64_t)Reads::ALIGN : LINE);
    close += up_to(part.before + part.bytes, LINE);
  }
  small_ = reads_->direct() && whole > close + close / 8;
  int64_t at = 0;
  for (size_t i = 0; i < parts_.size(); i++) {
    part_at_.push_back(at);
    if (small_) at += up_to(parts_[i].before + parts_[i].bytes, LINE);
    else at += up_to(largest[i], reads_->direct() ? (int64_t)Reads::ALIGN : LINE);
  }
  return at;
}

int64_t Slots::place(int64_t slot, int64_t item, size_t part) const {
  return where_[(size_t)slot] * memory_->slot_bytes_ + part_at_[part] + place_in_part(parts_[part], item);
}

// Past the cache, what is read lies in a block of memory as in its file.
int64_t Slots::place_in_part(const Resting& part, int64_t item) const {
  if (!reads_->direct() || small_) return part.before;
  const int64_t align = Reads::ALIGN;
  return part.before + ((part.at(item) - part.before) % align + align) % align;
}

const uint8_t* Slots::part(int64_t item, size_t part) const {
  return memory_->memory_.data() + place(slot_of_[(size_t)item], item, part);
}

bool Slots::aligned(size_t part) const {
  for (int64_t i = 0; i < items(); i++)
    if (parts_[part].at(i) % LINE) return false;
  return !parts_[part].before;
}

void Slots::read_later(int32_t item, size_t part, int64_t first, int64_t bytes) {
  const Resting& from = parts_[part];
  check(first >= 0 && bytes <= from.bytes - first, "a part has fewer bytes");
  later_.push_back({from.file_of(item), from.at(item) + first, bytes, writable(item, part) + first});
}

int64_t Slots::begin_later() {
  begun_.swap(later_);
  later_.clear();
  for (const Read& read : begun_) stats_.later += read.bytes;
  return small_ ? reads_->begin_small(begun_.data(), begun_.size()) : reads_->begin(begun_.data(), begun_.size());
}

void Slots::check_items(const int32_t* list, int64_t n) const {
  for (int64_t i = 0; i < n; i++)
    if (list[i] < 0 || list[i] >= items()) throw std::invalid_argument("no such item");
}

void Slots::pin(int32_t slot) {
  kept_[(size_t)slot] = 1;
  pins_.push_back(slot);
}

void Slots::let_go() {
  for (const int32_t slot : pins_) kept_[(size_t)slot] = 0;
  pins_.clear();
  error_ = nullptr;
}

void Slots::settle() {
  let_go();
  choose_victims(taken_ - slots_);
  for (const uint64_t rank : victims_) drop(slot_of_[(size_t)(uint32_t)rank]);
  std::fill(early_.begin(), early_.end(), (uint8_t)0);
}

// Slots that are pinned.
size_t Slots::pins(const Coming& coming) const {
  size_t n = 0;
  for (const int32_t slot : coming.slots) n += kept_[(size_t)slot];
  return n;
}

// Slots that can be given to others, or be pinned as they are.
int64_t Slots::room() const {
  int64_t n = most() - (int64_t)pins_.size();
  for (const Coming& coming : coming_) n -= (int64_t)(coming.slots.size() - pins(coming));
  return n;
}

// Waits for reads, which are over then. If they failed, their slots are free, and those who wanted the items are told by
// `wait`; of items that nobody wants the error is forgotten. ReadError if they are not over. Of guesses that failed, which
// may be others than those that somebody wants by now, these are read again, by themselves.
void Slots::finish(size_t i) {
  const Coming& coming = coming_[i];
  std::exception_ptr error;
  try {
    reads_->wait(coming.ticket);
  } catch (const ReadError&) {
    if (!reads_->done(coming.ticket)) throw;
    error = std::current_exception();
  }
  if (error && !error_ && !coming.guessed && pins(coming)) error_ = error;
  Coming again = {};
  begun_.clear();
  for (const int32_t slot : coming.slots) {
    if (error && coming.guessed && kept_[(size_t)slot]) {
      again.slots.push_back(slot);
      note_reads(slot);
      continue;
    }
    slot_of_[(size_t)item_of_[(size_t)slot]] = slot;
    if (error) drop(slot);
  }
  if (error)
    pins_.erase(std::remove_if(pins_.begin(), pins_.end(), [&](int32_t slot) { return !kept_[(size_t)slot]; }),
                pins_.end());
  coming_.erase(coming_.begin() + (int64_t)i);
  if (!again.slots.empty()) begin(std::move(again));
}

// What has arrived.
void Slots::take_in() {
  for (size_t i = 0; i < coming_.size();) {
    if (reads_->done(coming_[i].ticket)) finish(i);
    else i++;
  }
}

// Waits for the oldest reads with slots that are not pinned; false if there are none.
bool Slots::make_room() {
  for (size_t i = 0; i < coming_.size(); i++) {
    if (pins(coming_[i]) == coming_[i].slots.size()) continue;
    finish(i);
    return true;
  }
  return false;
}

// By priority, then by number, as unsigned integers; any NaN has its place, too.
uint64_t Slots::rank(int64_t item) const {
  const float value = priority[(size_t)item] + 0.0f;  // no negative zero
  uint32_t bits;
  memcpy(&bits, &value, 4);
  bits = bits >> 31 ? ~bits : bits | 0x80000000u;
  return (uint64_t)bits << 32 | (uint64_t)item;
}

// The n lowest of the items that can be replaced, in order; all if there are fewer.
void Slots::choose_victims(int64_t n) {
  victims_.clear();
  if (n <= 0) return;
  for (size_t slot = 0; slot < item_of_.size(); slot++) {
    const int32_t item = item_of_[slot];
    if (item >= 0 && !kept_[slot] && held(item)) victims_.push_back(rank(item));
  }
  if (n < (int64_t)victims_.size()) {
    std::nth_element(victims_.begin(), victims_.begin() + n, victims_.end());
    victims_.resize((size_t)n);
  }
  std::sort(victims_.begin(), victims_.end());
}

// Begins to read the misses, into slots that can be had and in place of the victims.
void Slots::read_misses(bool pinned) {
  if (misses_.empty()) return;
  Coming coming = {0, !pinned, {}};
  begun_.clear();
  size_t victim = 0;
  for (const int32_t item : misses_) {
    int32_t slot;
    if (available() > 0) {
      slot = take();
    } else {
      const size_t old = (size_t)(uint32_t)victims_[victim++];
      slot = slot_of_[old];
      slot_of_[old] = -1;
    }
    item_of_[(size_t)slot] = item;
    slot_of_[(size_t)item] = -2 - slot;
    as_read_[(size_t)item] = 1;
    times_read_[(size_t)item]++;
    early_[(size_t)item] = !pinned;
    if (pinned) pin(slot);
    coming.slots.push_back(slot);
    if (!lines_.empty()) lines_[(size_t)item] = (uint32_t)(place(slot, item, 0) / LINE);
    note_reads(slot);
  }
  begin(std::move(coming));
}

// The parts of a slot's item, to be read by `begin`.
void Slots::note_reads(int32_t slot) {
  const int32_t item = item_of_[(size_t)slot];
  for (size_t i = 0; i < parts_.size(); i++)
    if (!parts_[i].later)
      begun_.push_back({parts_[i].file_of(item), parts_[i].at(item), parts_[i].bytes,
                        memory_->memory_.data() + place(slot, item, i)});
}

void Slots::begin(Coming coming) {
  const size_t n = begun_.size();
  coming.ticket = small_ ? reads_->begin_small(begun_.data(), n) : reads_->begin(begun_.data(), n);
  coming_.push_back(std::move(coming));
}

// Pins what is there or being read, and notes what is not. Returns for how many there was room.
int64_t Slots::pin_all(const int32_t* items, int64_t n) {
  misses_.clear();
  int64_t left = room(), i = 0;
  for (; i < n; i++) {
    int32_t& slot = slot_of_[(size_t)items[i]];
    const bool coming = slot < -1 && slot != MISSED;
    if (slot == MISSED || (slot != -1 && kept_[(size_t)(coming ? -2 - slot : slot)])) continue;
    while (!coming && left == 0 && make_room()) left = room() - (int64_t)misses_.size();
    if (!coming && left == 0) break;
    left -= !coming;
    stats_.wanted++;
    stats_.hits += slot != -1;
    stats_.early += slot != -1 && early_[(size_t)items[i]];
    early_[(size_t)items[i]] = 0;
    if (slot != -1) {
      pin(coming ? -2 - slot : slot);
    } else {
      slot = MISSED;
      misses_.push_back(items[i]);
    }
  }
  return i;
}

int64_t Slots::want(const int32_t* items, int64_t n) {
  check_items(items, n);
  take_in();
  int64_t some;
  try {
    some = pin_all(items, n);
  } catch (...) {
    for (const int32_t item : misses_) slot_of_[(size_t)item] = -1;
    let_go();
    throw;
  }
  choose_victims((int64_t)misses_.size() - available());
  read_misses(true);
  stats_.bytes += (int64_t)misses_.size() * item_bytes_;
  return some;
}

int64_t Slots::fetch(const int32_t* items, int64_t n) {
  check_items(items, n);
  take_in();
  misses_.clear();
  kept_now_.clear();
  for (int64_t i = 0; i < n; i++) {
    const int32_t slot = slot_of_[(size_t)items[i]];
    if (slot < 0 || kept_[(size_t)slot]) continue;
    kept_[(size_t)slot] = 1;
    kept_now_.push_back(slot);
  }
  choose_victims(n - (int64_t)kept_now_.size() - available());
  size_t victim = 0;
  int64_t left = available(), some = 0;
  for (; some < n; some++) {
    const int32_t item = items[some];
    if (slot_of_[(size_t)item] != -1) continue;
    if (left > 0) left--;
    else if (victim < victims_.size() && victims_[victim] >> 32 < rank(item) >> 32) victim++;
    else break;
    slot_of_[(size_t)item] = MISSED;
    misses_.push_back(item);
  }
  for (const int32_t slot : kept_now_) kept_[(size_t)slot] = 0;
  read_misses(false);
  return some;
}

void Slots::wait() {
  try {
    for (size_t i = 0; i < coming_.size();) {
      if (pins(coming_[i])) finish(i);
      else i++;
    }
  } catch (const ReadError&) {  // the disk does not answer, nor will it for the others
    if (!error_) error_ = std::current_exception();
  }
  tell();
}

// Whoever waits of what failed.
void Slots::tell() {
  if (!error_) return;
  const std::exception_ptr error = error_;
  let_go();
  std::rethrow_exception(error);
}

void Slots::wait(int32_t item) {
  const auto reads_it = [&](const Coming& one) {
    return std::count(one.slots.begin(), one.slots.end(), -2 - slot_of_[(size_t)item]) > 0;
  };
  try {
    while (coming(item)) finish((size_t)(std::find_if(coming_.begin(), coming_.end(), reads_it) - coming_.begin()));
  } catch (const ReadError&) {
    if (!error_) error_ = std::current_exception();
  }
  tell();
}

bool Slots::arrived(int32_t item) {
  if (!held(item)) take_in();
  tell();
  return held(item);
}

void Slots::let_go(int32_t item) {
  const int32_t slot = coming(item) ? -2 - slot_of_[(size_t)item] : slot_of_[(size_t)item];
  if (slot < 0) return;
  kept_[(size_t)slot] = 0;
  pins_.erase(std::remove(pins_.begin(), pins_.end(), slot), pins_.end());
}

void Slots::clear() { stats_ = {}; }
