// Items of equal size that rest on disk, such as a layer's neurons or experts, and memory for some of them.
#pragma once
#include <memory>
#include <vector>

#include "panels.h"
#include "reads.h"

// Where a part of each item rests: item i at offset + i / each * outer + i % each * stride.
struct Resting {
  int file;
  int64_t offset, bytes, stride;
  int64_t each = 1LL << 40, outer = 0;
  int64_t at(int64_t i) const { return offset + i / each * outer + i % each * stride; }
};

// By one thread at a time, but `part`, `lines` and `held`, which threads may read between `wait` and the next `want`.
class Slots {
 public:
  struct Stats {
    int64_t wanted, hits, bytes;  // items that were wanted; that were there; bytes read for the others
  };
  // parts: of each item, in any order; memory for `slots` items, at least one.
  Slots(std::shared_ptr<Reads> reads, std::vector<Resting> parts, int64_t items, int64_t slots);

  // Pins these items, each once, from the first on as many as there is room for beside those pinned, and begins to read
  // those that are not there, in place of those of the least `priority` (of equals, the lowest item). Returns how many.
  int64_t want(const int32_t* items, int64_t n);
  // The same for items that may be wanted later: in place of others of less priority, and not pinned nor counted.
  int64_t fetch(const int32_t* items, int64_t n);
  // Waits for what is pinned. ReadError: an item that could not be read is not there, and all are let go.
  void wait();
  void let_go();  // of all that is pinned
  bool held(int64_t item) const { return slot_of_[(size_t)item] >= 0; }

  // Of an item that is pinned and was waited for.
  const uint8_t* part(int64_t item, size_t part) const;
  // Where part 0 of each item lies, in units of 64 bytes from `memory`; of those that are not there, anywhere.
  const uint32_t* lines() const { return lines_.data(); }
  const uint8_t* memory() const { return memory_.data(); }

  Stats stats() const { return stats_; }
  void clear();  // the counts
  int64_t items() const { return (int64_t)slot_of_.size(); }
  int64_t slots() const { return (int64_t)item_of_.size(); }
  int64_t slot_bytes() const { return slot_bytes_; }
  std::vector<float> priority;  // of the items: a policy sets it between steps

 private:
  const std::shared_ptr<Reads> reads_;
  const std::vector<Resting> parts_;
  int64_t slot_bytes_;
  Mapping memory_;
  std::vector<int32_t> slot_of_, item_of_;
  std::vector<uint32_t> lines_;
  Stats stats_ = {};
};
