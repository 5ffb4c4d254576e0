// Reads of files that go on while the caller computes: of weights that rest on disk.
#pragma once
#include <stdint.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

// Bytes [offset, offset + bytes) of a file, to `to`. Past the system's cache whole blocks are read: then `to` lies as far
// behind a multiple of `ALIGN` as `offset` does, and the blocks around [to, to + bytes) are the caller's, too; unless the
// read is one of many small ones, which are copied from where they were read.
struct Read {
  int file;
  int64_t offset, bytes;
  uint8_t* to;
};

// A file could not be read; the message says which and why.
struct ReadError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What a job could not read: the first failure, after which the rest is void and not tried. By one thread at a time;
// nothing is thrown in a job, where threads wait for each other.
struct Failure {
  std::string what;
  template <class F>
  bool attempt(const F& work) {
    try {
      if (what.empty()) work();
    } catch (const std::exception& error) { what = error.what(); }
    return what.empty();
  }
};

// What stands in for a disk in tests: one read after another, in the order in which they were begun, each after `latency`
// seconds and at `rate` bytes a second (0: at once). The read number `fail_at` (from 0, -1: none) and those after it fail,
// `failures` in all (-1: every one), with `error`, 0: as if the file ended.
struct EmulatedDisk {
  double latency = 0, rate = 0;
  int64_t fail_at = -1, failures = -1;
  int error = 0;
};

// By one thread at a time.
class Reads {
 public:
  enum { ALIGN = 4096 };
  struct File {
    std::string path;
    int64_t bytes;
  };
  struct Stats {
    int64_t reads, bytes;   // as the caller asked for them
    int64_t small, joined;  // of these reads the small ones past the cache; in how many the disk reads them
    double waited, active;  // seconds in `wait`; seconds in which any read was under way, as far as these calls saw
  };
  // direct: past the system's cache, where the file systems of all files allow it. engine: "uring", "threads", or "auto":
  // the first that works here. emulated: null: the disk itself. ReadError for a file that cannot be opened, or has another
  // size.
  Reads(std::vector<File> files, bool direct, const std::string& engine = "auto",
        const EmulatedDisk* emulated = nullptr);
  ~Reads();  // waits for what is under way
  Reads(const Reads&) = delete;
  Reads& operator=(const Reads&) = delete;

  // Begins reads, in large pieces side by side, and returns at once. Returns what to wait for. Only so many pieces are under
  // way at a time (DEPTH of reads.cpp): with io_uring the next ones follow when this, `wait` or `done` is called.
  int64_t begin(const Read* reads, size_t n);
  // The same of small ones, whose neighbours and what lies between them, up to `gap` bytes, the disk reads at once.
  int64_t begin_small(const Read* reads, size_t n);
  // Waits until all of them are there; a ticket that was waited for is there. ReadError if one failed, or the file changed;
  // they are all over then. But if the disk has not answered for `patience` seconds they may still write to their memory:
  // then the ticket remains, to be waited for again, or cancelled.
  void wait(int64_t ticket);
  bool done(int64_t ticket);    // whether `wait` would return, or fail, at once
  void cancel(int64_t ticket);  // returns when none of them is under way, without error; some may not have been begun
  // std::invalid_argument unless the file has these bytes; so does `begin`, and for a misaligned `to`.
  void check(int file, int64_t offset, int64_t bytes) const;
  Stats stats() const;
  const std::string& engine() const;  // "uring", "threads" or "emulated"
  bool direct() const;
  double patience = 60;
  int64_t gap = 24 << 10;
  static constexpr int64_t COPIES = 16 << 20;  // bytes of memory, at most, from which small reads are copied

 private:
  int64_t begin(const Read* reads, size_t n, bool small);
  struct Engine;
  struct Uring;
  struct Threads;
  std::unique_ptr<Engine> engine_;
};
