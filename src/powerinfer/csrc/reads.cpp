#include "reads.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <system_error>
#include <thread>

#include "panels.h"

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#if defined(IORING_FEAT_EXT_ARG) && defined(__NR_io_uring_setup)
#define PI_URING
#endif
#endif

namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t ALIGN = Reads::ALIGN;
constexpr int64_t PIECE = 512 << 10;         // larger reads are split: a disk serves several side by side
constexpr int64_t DEPTH = 256;               // pieces under way
constexpr int64_t DEPTH_BYTES = 64 * PIECE;  // and their bytes, so that what is begun next is not late
constexpr int64_t COPIED_AT_ONCE = 64 << 10;
constexpr int64_t SMALL = Reads::COPIES / DEPTH;  // bytes of pieces that are copied
constexpr int MOST_THREADS = 16;
constexpr int CHANGED = -1;  // in place of an errno: the file ended before the read did
constexpr int AGAIN = -2;    // the rest is still to be read

// Not so long that adding them overflows.
Clock::duration of_seconds(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::min(seconds, 1e6)));
}

double seconds_of(Clock::duration t) { return std::chrono::duration<double>(t).count(); }

// Bytes of a piece, from `at` on, that are copied.
struct Part {
  uint8_t* to;
  int64_t at, bytes;
};

// What was begun together.
struct Ticket {
  int64_t left = 0;                  // pieces that are not over
  std::vector<Part> parts;           // of those that are copied
  std::vector<int> files;            // each once
  int error = 0, file = -1;          // of the piece that failed first
  std::atomic<bool> dropped{false};  // what has not begun never will
};

// A part of a read: whole blocks where it goes past the cache, of which the first `needed` bytes were asked for.
struct Piece {
  Ticket* ticket;
  int file, fd;
  int64_t offset, bytes, needed;
  uint8_t* to;
  int64_t number;  // of its read
  Clock::time_point begun;
  int64_t part = 0, parts = 0;  // which of the ticket's it has; none: it is read in place
  uint8_t* memory = nullptr;    // from which these are copied

  void read_to(uint8_t* place) { memory = to = place; }
  void copy() const {
    for (const Part* p = ticket->parts.data() + part; p < ticket->parts.data() + part + parts; p++)
      memcpy(p->to, memory + p->at, (size_t)p->bytes);
  }
  // Takes in the result of a read, bytes or -errno. Returns 0 when all is there, AGAIN, CHANGED, or an errno.
  int advance(int64_t result, bool direct) {
    // The kernel cancels what a thread has begun when it ends; the thread that asks for it then begins it again.
    if (result == -EINTR || result == -EAGAIN || result == -ECANCELED) return AGAIN;
    if (result < 0) return (int)-result;
    if (result >= needed) return 0;
    // Past the cache a read goes on at a block; only the end of the file is within one.
    const int64_t got = direct ? result / ALIGN * ALIGN : result;
    if (got == 0) return CHANGED;
    offset += got;
    to += got;
    bytes -= got;
    needed -= got;
    return AGAIN;
  }
};

int64_t modified_ns(const struct stat& s) {
#if defined(__APPLE__)
  return (int64_t)s.st_mtimespec.tv_sec * 1000000000 + s.st_mtimespec.tv_nsec;
#else
  return (int64_t)s.st_mtim.tv_sec * 1000000000 + s.st_mtim.tv_nsec;
#endif
}

[[noreturn]] void fail_changed(const std::string& path) {
  throw ReadError(path + " changed while it was in use; load the model again");
}

[[noreturn]] void fail_reading(const std::string& path, int error) {
  throw ReadError("cannot read " + path + ": " + strerror(error));
}

// A file, its size taken once.
class OpenFile {
 public:
  explicit OpenFile(const Reads::File& about) : about_(about) {}
  OpenFile(OpenFile&& other) noexcept
      : about_(std::move(other.about_)), modified_ns_(other.modified_ns_), fd_(other.fd_) {
    other.fd_ = -1;
  }
  ~OpenFile() {
    if (fd_ >= 0) close(fd_);
  }

  const std::string& path() const { return about_.path; }
  int64_t bytes() const { return about_.bytes; }
  int fd() const { return fd_; }

  // False if it cannot be read in this way: with O_DIRECT, of whole blocks. ReadError if it cannot be read at all.
  bool open(int flags) {
    // O_NONBLOCK: opening a named pipe must not wait for a writer.
    fd_ = ::open(path().c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | flags);
    if (fd_ < 0 && flags && errno == EINVAL) return false;
    if (fd_ < 0) throw ReadError("cannot open " + path() + ": " + strerror(errno));
    struct stat now;
    if (fstat(fd_, &now) != 0) fail_reading(path(), errno);
    if (!S_ISREG(now.st_mode)) throw ReadError(path() + " is not a regular file");
    modified_ns_ = modified_ns(now);
    if (now.st_size != bytes()) fail_changed(path());
    return !flags || reads_a_block();
  }

  // ReadError if it is not what was opened any more: what was read may belong to something else.
  void check_same() const {
    struct stat now;
    if (fstat(fd_, &now) != 0) fail_reading(path(), errno);
    if (now.st_size != bytes() || modified_ns(now) != modified_ns_) fail_changed(path());
  }

 private:
  bool reads_a_block() const {
    alignas(ALIGN) uint8_t block[ALIGN];
    ssize_t got;
    while ((got = pread(fd_, block, ALIGN, 0)) < 0 && errno == EINTR) {}
    if (got < 0 && errno != EINVAL) fail_reading(path(), errno);
    return got >= 0;
  }

  Reads::File about_;
  int64_t modified_ns_ = 0;
  int fd_ = -1;
};

// Calls with(piece) for those of dropped tickets, which leave the queue.
template <class With>
void take_dropped(std::deque<Piece>& queue, const With& with) {
  const auto from = std::stable_partition(queue.begin(), queue.end(),
                                          [](const Piece& piece) { return !piece.ticket->dropped.load(); });
  std::for_each(from, queue.end(), with);
  queue.erase(from, queue.end());
}

}  // namespace

// The books, which the caller's thread keeps; how pieces are read is up to the derived classes.
struct Reads::Engine {
  Engine(const char* n) : name(n) {}
  virtual ~Engine() = default;
  virtual void push(const std::vector<Piece>& pieces) = 0;
  virtual void reap() = 0;  // takes in what has arrived, and begins more
  // Returns after so many more have arrived, or that time; earlier where that helps.
  virtual void sleep(int64_t pieces, Clock::duration longest) = 0;
  virtual void drop() = 0;  // ends what of dropped tickets has not begun

  // False if they cannot be read in this way.
  bool open(const std::vector<File>& all, int flags) {
    files.clear();
    for (const File& file : all) {
      files.emplace_back(file);
      if (!files.back().open(flags)) return false;
    }
    return true;
  }

  // The ticket of that number; null: it was waited for.
  Ticket* find(int64_t number) {
    if (number < 0 || number >= next) throw std::invalid_argument("no such reads were begun");
    const auto at = tickets.find(number);
    return at == tickets.end() ? nullptr : &at->second;
  }

  // In pieces, which end where the read does or at a multiple of PIECE.
  void split(const Read& read, Ticket* ticket, std::vector<Piece>& pieces) {
    const int64_t end = read.offset + read.bytes, behind = direct ? read.offset % ALIGN : 0;
    const int fd = files[(size_t)read.file].fd();
    const Clock::time_point now = Clock::now();
    for (int64_t at = read.offset - behind; at < end && read.bytes;) {
      const int64_t stop = whole_reads ? end : std::min(end, (at / PIECE + 1) * PIECE), needed = stop - at;
      const int64_t bytes = direct ? (needed + ALIGN - 1) / ALIGN * ALIGN : needed;
      pieces.push_back(
          {ticket, read.file, fd, at, bytes, needed, read.to - behind + (at - (read.offset - behind)), number, now});
      at = stop;
    }
    number++;
  }

  // Pieces of at most SMALL bytes, each of the reads that lie closely together. With an emulated disk each of one.
  void split_small(const Read* reads, size_t n, int64_t gap, Ticket* ticket, std::vector<Piece>& pieces) {
    if (!copies) copies = std::make_unique<Mapping>(COPIES);
    sorted.assign(reads, reads + n);
    std::sort(sorted.begin(), sorted.end(),
              [](const Read& a, const Read& b) { return a.file != b.file ? a.file < b.file : a.offset < b.offset; });
    const Clock::time_point now = Clock::now();
    for (const Read& read : sorted) {
      const int64_t end = read.offset + read.bytes;
      bool joins = !whole_reads && !pieces.empty() && pieces.back().file == read.file;
      if (joins) {
        const Piece& last = pieces.back();
        joins = read.offset - (last.offset + last.bytes) <= gap && end - last.offset <= SMALL;
      }
      for (int64_t at = read.offset; at < end;) {
        if (!joins)
          pieces.push_back({ticket, read.file, files[(size_t)read.file].fd(), at / ALIGN * ALIGN, 0, 0, nullptr, number,
                            now, (int64_t)ticket->parts.size()});
        Piece& piece = pieces.back();
        const int64_t stop = std::min(end, piece.offset + SMALL);
        ticket->parts.push_back({read.to + (at - read.offset), at - piece.offset, stop - at});
        piece.parts++;
        piece.needed = std::max(piece.needed, stop - piece.offset);
        piece.bytes = (piece.needed + ALIGN - 1) / ALIGN * ALIGN;
        at = stop;
        joins = false;
      }
      number++;
    }
  }

  void begun(int64_t pieces) {
    if (outstanding == 0) since = Clock::now();
    outstanding += pieces;
  }

  void over(const Piece& piece, int error, Clock::time_point when) {
    Ticket& ticket = *piece.ticket;
    if (error && !ticket.error) {
      ticket.error = error;
      ticket.file = piece.file;
      ticket.dropped = true;
    }
    ticket.left--;
    if (--outstanding == 0) stats.active += seconds_of(when - since);
  }

  // Until all of the ticket is over. ReadError after `patience` seconds in which nothing is.
  void wait(const Ticket& ticket, double patience) {
    Clock::time_point answered = Clock::now();
    for (int64_t before = outstanding;;) {
      reap();
      if (!ticket.left) return;
      const Clock::time_point now = Clock::now(), until = answered + of_seconds(patience);
      if (outstanding != before) answered = now;
      else if (now >= until) fail_silent(files[(size_t)ticket.files[0]].path(), patience);
      before = outstanding;
      sleep(ticket.left, std::max(answered + of_seconds(patience) - now, Clock::duration(0)));
    }
  }

  [[noreturn]] static void fail_silent(const std::string& path, double patience) {
    char seconds[32];
    snprintf(seconds, sizeof seconds, "%g", patience);
    throw ReadError(path + ": the disk has not answered for " + seconds + " seconds");
  }

  std::string name;
  std::vector<OpenFile> files;
  bool direct = false, whole_reads = false;
  std::map<int64_t, Ticket> tickets;
  int64_t next = 0, number = 0, outstanding = 0;  // number of the next ticket, of the next read; pieces not over
  Clock::time_point since;                        // when the first of those was begun
  Stats stats = {};
  std::vector<Piece> pieces;  // of what is being begun
  std::vector<Read> sorted;
  std::unique_ptr<Mapping> copies;  // memory of small reads, SMALL bytes for each that is under way
};

// A few threads that each read one piece after another. With an emulated disk one thread, which takes its time.
struct Reads::Threads : Reads::Engine {
  explicit Threads(const EmulatedDisk* emulated)
      : Engine(emulated ? "emulated" : "threads"),
        disk_(emulated ? *emulated : EmulatedDisk()),
        emulated_(emulated),
        most_(emulated ? 1 : MOST_THREADS) {
    whole_reads = emulated_;
    begin_thread();
  }

  ~Threads() override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void push(const std::vector<Piece>& more) override {
    int64_t threads;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      queue_.insert(queue_.end(), more.begin(), more.end());
      threads = (int64_t)queue_.size() - idle_;
    }
    try {
      for (; threads > 0 && (int)threads_.size() < most_; threads--) begin_thread();
    } catch (const std::system_error&) {  // those that there are will do
    }
    if (more.size() > 1) wake_.notify_all();
    else wake_.notify_one();
  }

  void reap() override {
    if (arrived_.load(std::memory_order_acquire) == reaped_) return;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      results_.swap(mine_);
    }
    for (const Result& one : mine_) over(one.piece, one.error, one.when);
    reaped_ += (int64_t)mine_.size();
    mine_.clear();
  }

  void sleep(int64_t some, Clock::duration longest) override {
    std::unique_lock<std::mutex> lock(mutex_);
    waited_for_ = some;
    done_.wait_for(lock, longest, [&] { return (int64_t)results_.size() >= some; });
    waited_for_ = INT64_MAX;
  }

  void drop() override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const int64_t before = (int64_t)results_.size();
      take_dropped(queue_, [&](const Piece& piece) { results_.push_back({piece, 0, Clock::now()}); });
      arrived_.fetch_add((int64_t)results_.size() - before, std::memory_order_release);
    }
    moved_.notify_all();
  }

 private:
  struct Result {
    Piece piece;
    int error;
    Clock::time_point when;
  };

  void begin_thread() {
    threads_.emplace_back([this, n = (int64_t)threads_.size()] { work(n); });
  }

  void work(int64_t thread) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      idle_++;
      wake_.wait(lock, [this] { return stop_ || !queue_.empty(); });
      idle_--;
      if (stop_) return;
      Piece piece = queue_.front();
      queue_.pop_front();
      lock.unlock();
      if (piece.parts) piece.read_to(copies->data() + thread * SMALL);
      const int error = piece.ticket->dropped ? 0 : emulated_ ? emulate(piece) : read(piece);
      if (error) piece.ticket->dropped = true;
      lock.lock();
      results_.push_back({piece, error, Clock::now()});
      arrived_.fetch_add(1, std::memory_order_release);
      if ((int64_t)results_.size() >= waited_for_) done_.notify_one();
    }
  }

  int read(Piece& piece) const {
    for (;;) {
      const ssize_t got = pread(piece.fd, piece.to, (size_t)piece.bytes, piece.offset);
      const int error = piece.advance(got < 0 ? -errno : got, direct);
      if (!error) piece.copy();
      if (error != AGAIN) return error;
    }
  }

  int emulate(Piece& piece) {
    const double takes = disk_.latency + (disk_.rate > 0 ? (double)piece.needed / disk_.rate : 0);
    free_ = std::max(free_, piece.begun) + of_seconds(takes);
    {
      std::unique_lock<std::mutex> lock(mutex_);
      if (moved_.wait_until(lock, free_, [&] { return piece.ticket->dropped.load(); })) {
        free_ = Clock::now();
        return 0;
      }
    }
    const int64_t after = piece.number - disk_.fail_at;
    if (disk_.fail_at >= 0 && after >= 0 && (disk_.failures < 0 || after < disk_.failures))
      return disk_.error ? disk_.error : CHANGED;
    return read(piece);
  }

  const EmulatedDisk disk_;
  const bool emulated_;
  const int most_;
  Clock::time_point free_;  // when the emulated disk can begin the next read
  std::mutex mutex_;
  std::condition_variable wake_, done_, moved_;  // pieces to read; results to take; dropped tickets
  std::deque<Piece> queue_;
  std::vector<Result> results_, mine_;  // mine: the caller's
  std::atomic<int64_t> arrived_{0};
  int64_t reaped_ = 0, waited_for_ = INT64_MAX;  // results that the caller took; that it sleeps for
  int64_t idle_ = 0;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

#if defined(PI_URING)

// The kernel reads: pieces go into one ring of memory that is shared with it, results come back in another.
struct Reads::Uring : Reads::Engine {
  Uring() : Engine("uring") {
    io_uring_params about = {};
    ring_ = (int)syscall(__NR_io_uring_setup, DEPTH, &about);
    if (ring_ < 0) throw std::system_error(errno, std::generic_category());
    const unsigned needed = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP | IORING_FEAT_EXT_ARG;
    const bool has_all = (about.features & needed) == needed;
    const size_t submissions = about.sq_off.array + about.sq_entries * sizeof(unsigned);
    const size_t completions = about.cq_off.cqes + about.cq_entries * sizeof(io_uring_cqe);
    ring_bytes_ = std::max(submissions, completions);
    entry_bytes_ = about.sq_entries * sizeof(io_uring_sqe);
    rings_ = has_all ? map(ring_bytes_, IORING_OFF_SQ_RING) : MAP_FAILED;
    entries_ = has_all ? (io_uring_sqe*)map(entry_bytes_, IORING_OFF_SQES) : (io_uring_sqe*)MAP_FAILED;
    if (rings_ == MAP_FAILED || entries_ == MAP_FAILED) {
      const int error = has_all ? errno : ENOSYS;
      unmap();
      throw std::system_error(error, std::generic_category());
    }
    const auto word = [this](unsigned offset) { return (unsigned*)((uint8_t*)rings_ + offset); };
    sq_tail_ = word(about.sq_off.tail);
    sq_mask_ = *word(about.sq_off.ring_mask);
    cq_head_ = word(about.cq_off.head);
    cq_tail_ = word(about.cq_off.tail);
    cq_mask_ = *word(about.cq_off.ring_mask);
    cqes_ = (io_uring_cqe*)word(about.cq_off.cqes);
    for (unsigned i = 0; i <= sq_mask_; i++) word(about.sq_off.array)[i] = i;
    for (int64_t i = 0; i < DEPTH; i++) free_[i] = (int)i;
  }

  ~Uring() override { unmap(); }

  void push(const std::vector<Piece>& more) override {
    queue_.insert(queue_.end(), more.begin(), more.end());
    reap();
  }

  void reap() override {
    take();
    while (!queue_.empty() && flying_ < DEPTH &&
           (flying_ == 0 || flying_bytes_ + queue_.front().bytes <= DEPTH_BYTES)) {
      if (queue_.front().ticket->dropped) over(queue_.front(), 0, Clock::now());
      else add(queue_.front());
      queue_.pop_front();
    }
    if (unsubmitted_) enter(0, Clock::duration(0));
  }

  void drop() override {
    take_dropped(queue_, [&](const Piece& piece) { over(piece, 0, Clock::now()); });
  }

  void sleep(int64_t some, Clock::duration longest) override {
    // Where more are queued, some must be taken in for these to begin.
    enter(std::max<int64_t>(1, std::min(some, queue_.empty() ? flying_ : flying_ / 2)), longest);
  }

 private:
  void* map(size_t bytes, int64_t what) const {
    return mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring_, what);
  }

  void unmap() {
    if (rings_ != MAP_FAILED) munmap(rings_, ring_bytes_);
    if (entries_ != MAP_FAILED) munmap(entries_, entry_bytes_);
    close(ring_);
  }

  void add(const Piece& piece) {
    const int slot = free_[DEPTH - 1 - flying_++];
    flying_bytes_ += piece.bytes;
    in_flight_[slot] = piece;
    if (piece.parts) in_flight_[slot].read_to(copies->data() + slot * SMALL);
    submit(slot);
  }

  void submit(int slot) {
    const Piece& piece = in_flight_[slot];
    const unsigned tail = *sq_tail_;
    io_uring_sqe* entry = entries_ + (tail & sq_mask_);
    memset(entry, 0, sizeof *entry);
    entry->opcode = IORING_OP_READ;
    // Large pieces that are in the system's cache are copied by a thread of the kernel: by the caller would take it long.
    if (!direct && piece.bytes > COPIED_AT_ONCE) entry->flags = IOSQE_ASYNC;
    entry->fd = piece.fd;
    entry->off = (uint64_t)piece.offset;
    entry->addr = (uint64_t)(uintptr_t)piece.to;
    entry->len = (unsigned)piece.bytes;
    entry->user_data = (uint64_t)slot;
    __atomic_store_n(sq_tail_, tail + 1, __ATOMIC_RELEASE);
    unsubmitted_++;
  }

  void take() {
    unsigned head = *cq_head_;
    const unsigned tail = __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE);
    if (head == tail) return;
    const Clock::time_point now = Clock::now();
    for (; head != tail; head++) {
      const io_uring_cqe& result = cqes_[head & cq_mask_];
      const int slot = (int)result.user_data;
      Piece& piece = in_flight_[slot];
      const int64_t bytes = piece.bytes;
      const int error = piece.advance(result.res, direct);
      if (error == AGAIN) {
        flying_bytes_ -= bytes - piece.bytes;
        submit(slot);
        continue;
      }
      if (!error) piece.copy();
      flying_bytes_ -= bytes;
      free_[DEPTH - flying_--] = slot;
      over(piece, error, now);
    }
    __atomic_store_n(cq_head_, head, __ATOMIC_RELEASE);
  }

  // Submits what was added, and waits for so many results, if any, for that time. ReadError if it cannot wait.
  void enter(int64_t some, Clock::duration longest) {
    const int64_t ns = std::chrono::duration_cast<std::chrono::nanoseconds>(longest).count();
    __kernel_timespec time = {ns / 1000000000, ns % 1000000000};
    io_uring_getevents_arg more = {};
    more.ts = (uint64_t)(uintptr_t)&time;
    const unsigned flags = some ? IORING_ENTER_GETEVENTS | IORING_ENTER_EXT_ARG : 0;
    const long taken = syscall(__NR_io_uring_enter, ring_, unsubmitted_, (unsigned)some, flags, some ? &more : nullptr,
                               some ? sizeof more : 0);
    if (taken >= 0) unsubmitted_ -= (unsigned)taken;
    else if (errno == EAGAIN || errno == EBUSY) std::this_thread::yield();  // the kernel has no memory for more now
    else if (some && errno != EINTR && errno != ETIME)
      throw ReadError(std::string("cannot read: io_uring: ") + strerror(errno));
  }

  int ring_ = -1;
  size_t ring_bytes_ = 0, entry_bytes_ = 0;
  void* rings_ = MAP_FAILED;
  io_uring_sqe* entries_ = (io_uring_sqe*)MAP_FAILED;
  io_uring_cqe* cqes_ = nullptr;
  unsigned *sq_tail_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
  unsigned sq_mask_ = 0, cq_mask_ = 0;
  unsigned unsubmitted_ = 0;               // entries that the kernel has not taken
  int64_t flying_ = 0, flying_bytes_ = 0;  // pieces that are not queued any more
  Piece in_flight_[DEPTH];
  int free_[DEPTH];  // places in in_flight_; the first DEPTH - flying_ of them
  std::deque<Piece> queue_;
};

#else

struct Reads::Uring : Reads::Engine {
  Uring() : Engine("uring") { throw std::system_error(ENOSYS, std::generic_category()); }
  void push(const std::vector<Piece>&) override {}
  void reap() override {}
  void drop() override {}
  void sleep(int64_t, Clock::duration) override {}
};

#endif

Reads::Reads(std::vector<File> files, bool direct, const std::string& engine, const EmulatedDisk* emulated) {
  if (engine != "auto" && engine != "uring" && engine != "threads")
    throw std::invalid_argument("reads are by 'auto', 'uring' or 'threads', not '" + engine + "'");
  if (!emulated && engine != "threads") {
    try {
      engine_ = std::make_unique<Uring>();
    } catch (const std::system_error& error) {
      if (engine == "uring") throw std::invalid_argument("io_uring cannot be used here: " + error.code().message());
    }
  }
  if (!engine_) engine_ = std::make_unique<Threads>(emulated);
#if defined(O_DIRECT)
  engine_->direct = direct && engine_->open(files, O_DIRECT);
#endif
  if (!engine_->direct) engine_->open(files, 0);
}

Reads::~Reads() {
  for (auto& [number, ticket] : engine_->tickets) ticket.dropped = true;
  engine_->drop();
  for (auto& [number, ticket] : engine_->tickets) {
    try {
      engine_->wait(ticket, 1e9);
    } catch (const ReadError&) {  // of the ring itself
    }
  }
}

void Reads::check(int file, int64_t offset, int64_t bytes) const {
  if (file < 0 || file >= (int)engine_->files.size()) throw std::invalid_argument("there is no such file to read");
  if (offset < 0 || bytes < 0 || bytes > engine_->files[(size_t)file].bytes() - offset)
    throw std::invalid_argument("a read lies outside its file");
}

int64_t Reads::begin(const Read* reads, size_t n) { return begin(reads, n, false); }

int64_t Reads::begin_small(const Read* reads, size_t n) { return begin(reads, n, engine_->direct); }

int64_t Reads::begin(const Read* reads, size_t n, bool small) {
  Engine& e = *engine_;
  for (size_t i = 0; i < n; i++) {
    check(reads[i].file, reads[i].offset, reads[i].bytes);
    if (e.direct && !small && ((int64_t)(uintptr_t)reads[i].to - reads[i].offset) % ALIGN)
      throw std::invalid_argument("a read past the cache needs memory that is aligned as the file is");
  }
  const int64_t id = e.next++;
  Ticket& ticket = e.tickets[id];
  e.pieces.clear();
  if (small) {
    e.split_small(reads, n, gap, &ticket, e.pieces);
    e.stats.small += (int64_t)n;
    e.stats.joined += (int64_t)e.pieces.size();
  }
  for (size_t i = 0; i < n; i++) {
    std::vector<int>& files = ticket.files;
    if (std::find(files.begin(), files.end(), reads[i].file) == files.end()) files.push_back(reads[i].file);
    if (!small) e.split(reads[i], &ticket, e.pieces);
    e.stats.bytes += reads[i].bytes;
  }
  e.stats.reads += (int64_t)n;
  ticket.left = (int64_t)e.pieces.size();
  e.begun(ticket.left);
  e.push(e.pieces);
  return id;
}

void Reads::wait(int64_t id) {
  Engine& e = *engine_;
  Ticket* ticket = e.find(id);
  if (!ticket) return;
  const Clock::time_point begun = Clock::now();
  struct Clocked {
    Engine& e;
    Clock::time_point begun;
    ~Clocked() { e.stats.waited += seconds_of(Clock::now() - begun); }
  } clocked{e, begun};
  e.wait(*ticket, patience);
  const int error = ticket->error, file = ticket->file;
  const std::vector<int> files = std::move(ticket->files);
  e.tickets.erase(id);
  if (error == CHANGED) fail_changed(e.files[(size_t)file].path());
  if (error) fail_reading(e.files[(size_t)file].path(), error);
  for (const int each : files) e.files[(size_t)each].check_same();
}

bool Reads::done(int64_t id) {
  engine_->reap();
  const Ticket* ticket = engine_->find(id);
  return !ticket || !ticket->left;
}

void Reads::cancel(int64_t id) {
  Ticket* ticket = engine_->find(id);
  if (!ticket) return;
  ticket->dropped = true;
  engine_->drop();
  engine_->wait(*ticket, 1e9);
  engine_->tickets.erase(id);
}

Reads::Stats Reads::stats() const {
  Stats stats = engine_->stats;
  if (engine_->outstanding) stats.active += seconds_of(Clock::now() - engine_->since);
  return stats;
}

const std::string& Reads::engine() const { return engine_->name; }

bool Reads::direct() const { return engine_->direct; }
