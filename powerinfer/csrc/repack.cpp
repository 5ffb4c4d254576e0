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

// A row of Q4_0 as single neurons have it (table.h), to row r of a panel.
void spread_q4_0(const uint8_t* src, int64_t k, int64_t r, uint8_t* panel) {
  const int64_t blocks = k / 32, codes = pi_row_codes(PI_Q4_0, k);
  uint8_t* const scales = panel + pi_codes_bytes(PI_Q4_0, k);
  for (int64_t b = 0; b < blocks; b += 16) {
    const int64_t n = std::min(blocks - b, (int64_t)16);
    for (int64_t v = 0; v < 4; v++)
      for (int64_t l = 0; l < n; l++) memcpy(panel + (b + l) * 256 + v * 64 + r * 4, src + b * 16 + (v * n + l) * 4, 4);
  }
  for (int64_t b = 0; b < blocks; b++) memcpy(scales + b * 32 + r * 2, src + codes + b * 2, 2);
}

// A group's codes of Q4_0X32 for 32 rows of down, to block `group` of two panels.
void turn_q4_0(const PiRows& rows, int64_t first, int64_t row, int64_t group, uint8_t* low, uint8_t* high) {
  uint8_t codes[PI_GROUP][16];  // of each neuron; the low nibble is of rows 0 to 15
  for (int n = 0; n < PI_GROUP; n++) {
    const uint8_t* src = pi_row(&rows, (int32_t)(first + n)) + row / 128 * 64 + row % 128 / 32 * 4;
    for (int i = 0; i < 4; i++) memcpy(codes[n] + 4 * i, src + 16 * i, 4);
  }
  low += group * 256;
  high += group * 256;
  for (int n = 0; n < 16; n++) {
    const uint8_t *one = codes[n], *other = codes[n + 16];
    const int at = n / 4 * 64 + n % 4;
    for (int r = 0; r < 16; r++) {
      low[at + 4 * r] = (uint8_t)((one[r] & 15) | other[r] << 4);
      high[at + 4 * r] = (uint8_t)(one[r] >> 4 | (other[r] & 0xf0));
    }
  }
}

}  // namespace

void panels_of_neurons(const PiRows& rows, int64_t first, int panels, uint8_t* out) {
  const int64_t k = rows.k, size = pi_panel_bytes(rows.type, k);
  memset(out, 0, (size_t)(panels * size));
  for (int64_t r = 0; r < panels * PI_LANES; r++) {
    const uint8_t* src = pi_row(&rows, (int32_t)(first + r));
    uint8_t* panel = out + r / PI_LANES * size;
    if (rows.type == PI_Q4_0) spread_q4_0(src, k, r % PI_LANES, panel);
    else
      for (int64_t i = 0; i < k; i++) memcpy(panel + place(rows.type, i, r % PI_LANES), src + 2 * i, 2);
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
