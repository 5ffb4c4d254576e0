// Items of equal size that rest on disk, such as a layer's neurons or experts, and memory for some of them.
#pragma once
#include <exception>
#include <memory>
#include <vector>

#include "panels.h"
#include "reads.h"

// Where a part of each item rests: item i at offset + i / each * outer + i % each * stride, or in a place of its own.
// before: bytes of memory that the part has before those that are read. later: whoever needs bytes of it reads them, of an
// item that is there or being read (`Slots::read_later`).
struct Resting {
  struct Place {
    int file;
    int64_t offset;
  };
  int file;
  int64_t offset, bytes, stride;
  int64_t each = 1LL << 40, outer = 0;
  int64_t before = 0;
  std::vector<Place> places = {};  // of each item, or none
  bool later = false;
  int64_t at(int64_t i) const {
    return places.empty() ? offset + i / each * outer + i % each * stride : places[(size_t)i].offset;
  }
  int file_of(int64_t i) const { return places.empty() ? file : places[(size_t)i].file; }
};

class Slots;

// Memory for slots of equal size, which several layers may share: each has its own number of them, and of the rest, the
// common ones, whichever needs more for a while. By one thread at a time.
class SlotMemory {
 public:
  SlotMemory(int64_t slots, int64_t slot_bytes, int64_t common = 0);
  SlotMemory(const SlotMemory&) = delete;
  SlotMemory& operator=(const SlotMemory&) = delete;

  // From now on only the first n slots, at least one, have items; the memory of the others is given back, and all that is
  // pinned is let go. Waits for what is being read: ReadError if the disk does not answer.
  void use(int64_t n);
  int64_t slots() const { return slots_; }

 private:
  friend class Slots;
  const int64_t slots_, slot_bytes_, all_common_;
  int64_t common_, unclaimed_;  // common ones that nobody has; slots that are nobody's own, nor common
  int64_t used_;
  Mapping memory_;
  std::vector<int32_t> free_;  // taken from the end
  std::vector<Slots*> users_;
};

// By one thread at a time, but `part`, `lines` and `held`, which threads may ask of pinned items between `wait` and the
// next `want`.
class Slots {
 public:
  struct Stats {
    int64_t wanted, hits, bytes;  // items that were pinned; that needed no read; bytes read for the others
    int64_t early;                // of the hits those that `fetch` has read since `settle`
    int64_t later;                // bytes that were read of parts that are read later
  };
  // parts: of each item, in any order; memory for `slots` items, at least one. memory: which has as many left, and as
  // large ones; null: of its own.
  Slots(std::shared_ptr<Reads> reads, std::vector<Resting> parts, int64_t items, int64_t slots,
        std::shared_ptr<SlotMemory> memory = nullptr);
  ~Slots();  // waits for what is under way
  Slots(const Slots&) = delete;
  Slots& operator=(const Slots&) = delete;

  // Pins these items, each once, from the first on as many as there is room for beside those pinned, and begins to read
  // those that are not there, in place of those of the least `priority` (of equals, the lowest item). Returns how many.
  // Where there is only room that is being read into, it waits for that: ReadError if the disk does not answer.
  int64_t want(const int32_t* items, int64_t n);
  // The same for items that may be wanted later: in place of others of less priority, and not pinned nor counted. Those
  // that are being read stay until they are there.
  int64_t fetch(const int32_t* items, int64_t n);
  // Waits for what is pinned. ReadError: an item that could not be read is not there, and all are let go. Of a disk that
  // does not answer, the slots stay taken until it does. What `fetch` has begun to read, and could not, is read again.
  void wait();
  void let_go();  // of all that is pinned
  // The same, and common slots are free again, but for items that are being read: of those that are there, the ones of
  // the least priority leave, whether they were there before or not.
  void settle();
  // The same of one item that is pinned; others may be wanted meanwhile.
  void wait(int32_t item);
  bool arrived(int32_t item);  // whether `wait` would return, or fail, at once; ReadError as of it
  void let_go(int32_t item);
  bool held(int64_t item) const { return slot_of_[(size_t)item] >= 0; }
  bool coming(int64_t item) const { return slot_of_[(size_t)item] < -1; }

  // Of an item that is pinned and was waited for.
  const uint8_t* part(int64_t item, size_t part) const;
  // The same to be written to, also of one that is being read: whoever does so says that the item is no longer as it was
  // read.
  uint8_t* writable(int64_t item, size_t part) {
    const int32_t slot = slot_of_[(size_t)item];
    return memory_->memory_.data() + place(slot < -1 ? -2 - slot : slot, item, part);
  }
  // Parts that are read later, of items that are pinned: bytes [first, first + bytes) of one are to be read; begins to
  // read all that was noted so, and returns the ticket. Whoever does so waits for it (`reads`) before they are let go.
  void read_later(int32_t item, size_t part, int64_t first, int64_t bytes);
  int64_t begin_later();
  // How often an item was read: then nothing is there of its parts that are read later.
  uint32_t times_read(int64_t item) const { return times_read_[(size_t)item]; }
  Reads& reads() const { return *reads_; }
  bool as_read(int64_t item) const { return as_read_[(size_t)item]; }
  void changed(int64_t item) { as_read_[(size_t)item] = 0; }
  // Where part 0 of each item lies, in units of 64 bytes from `memory`; of those that are not there, anywhere. Null if
  // parts 0 do not all begin such a unit: past the cache large parts lie in memory as they do in their file.
  const uint32_t* lines() const { return lines_.empty() ? nullptr : lines_.data(); }
  const std::shared_ptr<SlotMemory>& shared() const { return memory_; }
  const uint8_t* memory() const { return memory_->memory_.data(); }

  Stats stats() const { return stats_; }
  // Items that can be pinned at a time, as the common slots are.
  int64_t most() const { return taken_ + available(); }

  void clear();  // the counts
  int64_t items() const { return (int64_t)slot_of_.size(); }
  int64_t slots() const { return slots_; }  // its own
  int64_t slot_bytes() const { return slot_bytes_; }
  size_t parts() const { return parts_.size(); }
  int64_t before(size_t part) const { return parts_[part].before; }
  int64_t part_bytes(size_t part) const { return parts_[part].bytes; }
  bool aligned(size_t part) const;  // whether it begins such a unit, of every item
  std::vector<float> priority;      // of the items: a policy sets it between steps

 private:
  friend class SlotMemory;
  // Items that are being read, all begun together, and their slots; guessed: `fetch` has begun them.
  struct Coming {
    int64_t ticket;
    bool guessed;
    std::vector<int32_t> slots;
  };
  int64_t lay_out(int64_t items);
  int64_t available() const;
  int32_t take();
  void drop(int32_t slot);
  void leave(int64_t from);
  int64_t place_in_part(const Resting& part, int64_t item) const;
  int64_t place(int64_t slot, int64_t item, size_t part) const;
  void check_items(const int32_t* items, int64_t n) const;
  void pin(int32_t slot);
  size_t pins(const Coming& coming) const;
  int64_t room() const;
  bool make_room();
  int64_t pin_all(const int32_t* items, int64_t n);
  uint64_t rank(int64_t item) const;
  void choose_victims(int64_t n);
  void read_misses(bool pinned);
  void note_reads(int32_t slot);
  void begin(Coming coming);
  void finish(size_t i);
  void tell();
  void take_in();

  const std::shared_ptr<Reads> reads_;
  const std::vector<Resting> parts_;
  std::vector<int64_t> part_at_;  // of each part, its place in a slot
  bool small_ = false;  // parts lie close together: read past the cache in place, they would leave much memory unused
  const int64_t slot_bytes_;
  int64_t item_bytes_ = 0;
  const int64_t slots_;
  const std::shared_ptr<SlotMemory> memory_;
  int64_t taken_ = 0;                       // slots with items
  std::vector<int32_t> where_;              // of each slot with an item, its place in the memory
  std::vector<uint8_t> as_read_;            // items
  std::vector<uint32_t> times_read_;        // of items
  std::vector<uint8_t> early_;              // items that `fetch` has read, and that were not pinned since, nor settled
  std::vector<int32_t> slot_of_, item_of_;  // -1: none; of an item that is being read -2 - its slot
  std::vector<uint8_t> kept_;               // slots that are pinned, or not to be given to others now
  std::vector<int32_t> pins_, free_;        // slots that are pinned; that have no item, nor memory
  std::vector<Coming> coming_;              // in the order in which they were begun
  std::exception_ptr error_;                // of reads that failed and whose items were pinned
  std::vector<uint32_t> lines_;
  Stats stats_ = {};
  std::vector<int32_t> misses_;    // of one call: items to read
  std::vector<int32_t> kept_now_;  // slots of others that it names
  std::vector<uint64_t> victims_;  // ranks of those that they replace
  std::vector<Read> begun_, later_;
};
