// From the blocks of a model file to panels (table.h), and single rows to floats.
#pragma once
#include <stdint.h>

#include <memory>
#include <vector>

#include "table.h"

// Four bits, a byte each.
constexpr uint32_t bits_as_bytes(uint32_t n) { return (n & 1) | (n & 2) << 7 | (n & 4) << 14 | (n & 8) << 21; }

// Zeroed, page-aligned memory in huge pages if possible. Untouched memory is not allocated by the system.
class Mapping {
 public:
  explicit Mapping(int64_t bytes);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  uint8_t* data() const { return data_; }

 private:
  uint8_t* data_;
  int64_t bytes_;
};

// Gives whole pages of a mapping back to the system, on Linux: they are zero when they are next used. `at` is where memory
// begins whose content nobody needs.
void give_back(void* at, int64_t bytes);

// Hands out 64-byte aligned pieces of few large mappings, so that small matrices share huge pages.
class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  uint8_t* allocate(int64_t bytes);

 private:
  std::vector<std::unique_ptr<Mapping>> mappings_;
  uint8_t* next_ = nullptr;
  int64_t left_ = 0;
};

// Bytes of one row of k elements as a model file stores it.
int64_t stored_row_bytes(int type, int64_t k);

// Bytes by which the panels of a matrix are larger than its stored rows.
int64_t packed_excess(int type, int64_t rows, int64_t k);

// Packs panels [p0, p1) to dst, which begins with panel `at`. Packed row r is row map[r] of src, zeros where map[r] < 0;
// without a map, row r itself, zeros from `rows` on. factors: of each row of src, of types that have them in panels; null:
// they are 1.
void pack_panels(int type, const uint8_t* src, int64_t rows, int64_t k, const int32_t* map, int64_t map_rows,
                 uint8_t* dst, int64_t p0, int64_t p1, int64_t at = 0, const float* factors = nullptr);

// Whether no float16 scale or minimum of blocks is infinite or NaN in n panels.
bool panels_are_finite(int type, int64_t k, const uint8_t* panels, int64_t n);

// One panel of rows of blocks, from wherever they lie.
void pack_panel_of(int type, const uint8_t* const (&rows)[PI_LANES], int64_t k, uint8_t* dst);

// A float16 number.
float half(const uint8_t* p);

// 32 bits by groups of four elements: bit 4 g + j of them is bit g of byte j.
uint32_t bits_by_group(uint32_t bits);

// Half of the power of two that MXFP4 gives by its exponent, the least two subnormal.
float half_power(uint8_t e);

// One stored row to floats.
void unpack_row(int type, const uint8_t* row, int64_t k, float* out);
