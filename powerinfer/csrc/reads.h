// Reads of files that go on while the caller computes: of weights that rest on disk.
#pragma once
#include <stdint.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

// Bytes [offset, offset + bytes) of a file, to `to`. Past the system's cache whole blocks are read: then `to` lies as far
// behind a multiple of `ALIGN` as `offset` does, and the blocks around [to, to + bytes) are the caller's, too.
struct Read {
  int file;
  int64_t offset, bytes;
  uint8_t* to;
};

// A file could not be read; the message says which and why.
struct ReadError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What stands in for a disk in tests: one read after another, each after `latency` seconds and at `rate` bytes a second
// (0: at once); the read number `fail_at` (from 0) and those after it fail with `error`, -1: none does.
struct EmulatedDisk {
  double latency = 0, rate = 0;
  int64_t fail_at = -1;
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
    double waited, active;  // seconds in `wait`; seconds in which any read was under way
  };
  // direct: past the system's cache, where the file system allows it. engine: "uring", "threads", or "auto": the first
  // that works here. emulated: null: the disk itself. ReadError for a file that cannot be opened, or has another size.
  Reads(std::vector<File> files, bool direct, const std::string& engine = "auto",
        const EmulatedDisk* emulated = nullptr);
  ~Reads();  // waits for what is under way
  Reads(const Reads&) = delete;
  Reads& operator=(const Reads&) = delete;

  // Begins reads, in large pieces side by side, and returns at once. Returns what to wait for.
  int64_t begin(const Read* reads, size_t n);
  // Waits until all of them are there. ReadError if one failed; they are all over then, but for a disk that does not
  // answer for `patience` seconds.
  void wait(int64_t ticket);
  bool done(int64_t ticket);  // whether `wait` would return, or fail, at once
  Stats stats() const;
  const std::string& engine() const;
  bool direct() const;
  double patience = 60;

 private:
  struct Engine;
  struct Uring;
  struct Threads;
  std::unique_ptr<Engine> engine_;
};
