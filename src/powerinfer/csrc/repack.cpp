#include "repack.h"

#include <string.h>

#include <algorithm>

int repacked_type(int row_type) {
  if (row_type == PI_Q4_0X32) return PI_Q4_0;
  return row_type == PI_F16 || row_type == PI_BF16 || row_type == PI_Q4_0 ? row_type : -1;
}

namespace {

// Where element i of row r of a panel of 2-byte floats lies.
int64_t place(int type, int64_t i, int64_t r) {
  return type == PI_F16 ? (i * PI_LANES + r) * 2 : i / 2 * 64 + r * 4 + i % 2 * 2;
}

// 16 rows of Q4_0 as single neurons have them (table.h) to a panel.
void spread_q4_0(const uint8_t* const (&src)[PI_LANES], int64_t k, uint8_t* panel) {
  const int64_t blocks = k / 32, codes = pi_row_codes(PI_Q4_0, k);
  uint8_t* const scales = panel + pi_codes_bytes(PI_Q4_0, k);
  for (int64_t b = 0; b < blocks; b++) {
    const int64_t first = b / 16 * 16, n = std::min(blocks - first, (int64_t)16);
    for (int64_t v = 0; v < 4; v++) {
      const int64_t at = first * 16 + (v * n + b - first) * 4;
      uint32_t words[PI_LANES];
      for (int r = 0; r < PI_LANES; r++) memcpy(words + r, src[r] + at, 4);
      memcpy(panel + b * 256 + v * 64, words, 64);
    }
    uint16_t of_block[PI_LANES];
    for (int r = 0; r < PI_LANES; r++) memcpy(of_block + r, src[r] + codes + b * 2, 2);
    memcpy(scales + b * 32, of_block, 32);
  }
}

typedef uint8_t Bytes16 __attribute__((vector_size(16)));

// Four rows of 16 bytes become 16 words of four, one byte of each row.
void zip_rows(const Bytes16 (&x)[4], uint8_t* out) {
  typedef uint16_t Halves __attribute__((vector_size(16)));
  for (int half = 0; half < 2; half++) {
    Bytes16 pairs[2];
    for (int i = 0; i < 2; i++) {
      const Bytes16 a = x[2 * i], b = x[2 * i + 1];
      pairs[i] = half ? __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
                      : __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    }
    const Halves a = (Halves)pairs[0], b = (Halves)pairs[1];
    const Halves low = __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11),
                 high = __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
    memcpy(out + 32 * half, &low, 16);
    memcpy(out + 32 * half + 16, &high, 16);
  }
}

// A group's codes of Q4_0X32 for 32 rows of down, to block `group` of two panels.
void turn_q4_0(const PiRows& rows, int64_t first, int64_t row, int64_t group, uint8_t* low, uint8_t* high) {
  Bytes16 codes[PI_GROUP];  // of each neuron; the low nibble is of rows 0 to 15
  for (int n = 0; n < PI_GROUP; n++) {
    const uint8_t* src = pi_row(&rows, (int32_t)(first + n)) + row / 128 * 64 + row % 128 / 32 * 4;
    for (int i = 0; i < 4; i++) memcpy((uint8_t*)&codes[n] + 4 * i, src + 16 * i, 4);
  }
  for (int v = 0; v < 4; v++) {
    Bytes16 of_low[4], of_high[4];
    for (int i = 0; i < 4; i++) {
      const Bytes16 one = codes[4 * v + i], other = codes[16 + 4 * v + i];
      of_low[i] = (one & 15) | other << 4;
      of_high[i] = one >> 4 | (other & 0xf0);
    }
    zip_rows(of_low, low + group * 256 + v * 64);
    zip_rows(of_high, high + group * 256 + v * 64);
  }
}

}  // namespace

void panels_of_neurons(const PiRows& rows, int64_t first, int panels, uint8_t* out) {
  const int64_t k = rows.k, size = pi_panel_bytes(rows.type, k);
  if (rows.type != PI_Q4_0) memset(out, 0, (size_t)(panels * size));  // what pads k
  for (int64_t p = 0; p < panels; p++, out += size) {
    const uint8_t* src[PI_LANES];
    for (int r = 0; r < PI_LANES; r++) src[r] = pi_row(&rows, (int32_t)(first + p * PI_LANES + r));
    if (rows.type == PI_Q4_0) {
      spread_q4_0(src, k, out);
      continue;
    }
    for (int r = 0; r < PI_LANES; r++)
      for (int64_t i = 0; i < k; i++) memcpy(out + place(rows.type, i, r), src[r] + 2 * i, 2);
  }
}

void panels_of_outputs(const PiRows& rows, int64_t first, int64_t neurons, int64_t row, int panels, uint8_t* out) {
  const int type = repacked_type(rows.type);
  const int64_t size = pi_panel_bytes(type, neurons), codes = pi_codes_bytes(type, neurons);
  if (type == PI_Q4_0) {
    for (int64_t g = 0; g < neurons / PI_GROUP; g++) {
      const uint8_t* scales = pi_shared(&rows, (int32_t)(first + g * PI_GROUP)) + 2 * row;
      turn_q4_0(rows, first + g * PI_GROUP, row, g, out, out + size);
      for (int p = 0; p < 2; p++) memcpy(out + p * size + codes + g * 32, scales + p * 32, 32);
    }
    return;
  }
  for (int64_t i = 0; i < neurons; i++) {
    const uint8_t* src = pi_row(&rows, (int32_t)(first + i)) + 2 * row;
    for (int64_t r = 0; r < panels * PI_LANES; r++)
      memcpy(out + r / PI_LANES * size + place(type, i, r % PI_LANES), src + 2 * r, 2);
  }
}
