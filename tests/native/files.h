// Temporary files of the stand-alone tests.
#pragma once
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "checks.h"
#include "reads.h"

namespace {

[[maybe_unused]] std::vector<uint8_t> random_bytes(Random& r, int64_t n) {
  std::vector<uint8_t> data((size_t)n);
  for (uint8_t& b : data) b = (uint8_t)r.next();
  return data;
}

// A file that has these bytes, as long as this object.
struct File {
  std::vector<uint8_t> data;
  std::string path;
  explicit File(std::vector<uint8_t> bytes) : data(std::move(bytes)) {
    const char* const folder = getenv("TMPDIR");
    path = std::string(folder ? folder : "/tmp") + "/powerinfer-XXXXXX";
    const int fd = mkstemp(path.data());
    for (size_t at = 0; fd >= 0 && at < data.size();) {
      const ssize_t n = write(fd, data.data() + at, data.size() - at);
      if (n <= 0) break;
      at += (size_t)n;
    }
    if (fd < 0 || close(fd) != 0) perror(path.c_str()), exit(2);
  }
  File(const File&) = delete;
  ~File() { unlink(path.c_str()); }
  Reads::File about() const { return {path, (int64_t)data.size()}; }
  bool has(const uint8_t* p, int64_t offset, int64_t bytes) const {
    return memcmp(p, data.data() + offset, (size_t)bytes) == 0;
  }
};

}  // namespace
