#include "repack.h"

#include <string.h>

#include <algorithm>

int repacked_type(int row_type) {
  if (pi_across(row_type) >= 0) return pi_across(row_type);
  return pi_row_type(row_type, PI_DOT) ? row_type : -1;
}

namespace {

// Where element i of row r of a panel of 2-byte floats lies.
int64_t place(int type, int64_t i, int64_t r) {
  return type == PI_F16 ? (i * PI_LANES + r) * 2 : i / 2 * 64 + r * 4 + i % 2 * 2;
}

// The fifth bits of a block of a row (table.h), of 4 g + j at bit g of byte j. lanes: blocks of its line, l: which it is.
uint32_t fifths_of(const uint8_t* line, int64_t lanes, int64_t l) {
  uint32_t word, all = 0;
  if (!pi_lanes_close(lanes)) {
    memcpy(&word, line + 4 * l, 4);
    return word;
  }
  for (int64_t g = 0; g < 8; g++) {
    const int64_t at = g % 4 * lanes + l;
    memcpy(&word, line + at % 16 * 4, 4);
    all |= (word >> (at / 16 + (g >= 4 ? 4 : 0)) & 0x01010101u) << g;
  }
  return all;
}

// 16 quantised rows as single neurons have them (table.h) to a panel.
void spread(int type, const uint8_t* const (&src)[PI_LANES], int64_t k, uint8_t* panel) {
  const PiTypeFacts& t = pi_facts(type);
  const int64_t blocks = k / 32, codes = pi_row_codes(type, k), each = pi_bits(type) == 8 ? 32 : 16;
  uint8_t* const scales = panel + pi_codes_bytes(type, k);
  for (int64_t b = 0; b < blocks; b++, panel += PI_LANES * t.codes) {
    const int64_t first = b / 16 * 16, n = std::min(blocks - first, (int64_t)16);
    uint32_t words[PI_LANES];
    for (int64_t v = 0; v < each / 4; v++) {
      const int64_t at = first * each + (v * n + b - first) * 4;
      for (int r = 0; r < PI_LANES; r++) memcpy(words + r, src[r] + at, 4);
      memcpy(panel + v * 64, words, 64);
    }
    if (pi_bits(type) == 5) {
      const int64_t line = pi_round_up(k, 128) / 2 + 4 * first;
      for (int r = 0; r < PI_LANES; r++) words[r] = fifths_of(src[r] + line, n, b - first);
      memcpy(panel + 256, words, 64);
    }
    uint16_t of_block[PI_LANES];
    for (int64_t i = 0; i < pi_halves(type); i++) {
      for (int r = 0; r < PI_LANES; r++) memcpy(of_block + r, src[r] + codes + i * pi_row_scales(k) + b * 2, 2);
      memcpy(scales + b * PI_LANES * t.scales + 32 * i, of_block, 32);
    }
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

// 16 bytes of a neuron's row, of 16 elements in turn: part z of the line at `line` (table.h).
Bytes16 part(const uint8_t* line, int64_t z) {
  Bytes16 bytes;
  for (int i = 0; i < 4; i++) memcpy((uint8_t*)&bytes + 4 * i, line + 16 * i + 4 * z, 4);
  return bytes;
}

// A group's codes for 32 rows of down, which are its blocks, to blocks of two panels.
void turn(const PiRows& rows, int64_t first, int64_t row, uint8_t* low, uint8_t* high) {
  const auto src = [&](int n) { return pi_row(&rows, (int32_t)(first + n)); };
  if (pi_bits(rows.type) == 8) {
    for (int v = 0; v < 8; v++) {
      Bytes16 of_low[4], of_high[4];
      for (int i = 0; i < 4; i++) {
        const uint8_t* const line = src(4 * v + i) + row / 64 * 64;
        of_low[i] = part(line, row % 64 / 16);
        of_high[i] = part(line, row % 64 / 16 + 1);
      }
      zip_rows(of_low, low + v * 64);
      zip_rows(of_high, high + v * 64);
    }
    return;
  }
  Bytes16 codes[PI_GROUP];  // of each neuron; the low nibble is of rows 0 to 15
  for (int n = 0; n < PI_GROUP; n++) codes[n] = part(src(n) + row / 128 * 64, row % 128 / 32);
  for (int v = 0; v < 4; v++) {
    Bytes16 of_low[4], of_high[4];
    for (int i = 0; i < 4; i++) {
      const Bytes16 one = codes[4 * v + i], other = codes[16 + 4 * v + i];
      of_low[i] = (one & 15) | other << 4;
      of_high[i] = one >> 4 | (other & 0xf0);
    }
    zip_rows(of_low, low + v * 64);
    zip_rows(of_high, high + v * 64);
  }
  if (pi_bits(rows.type) != 5) return;
  Bytes16 of_low[4] = {}, of_high[4] = {};
  for (int n = 0; n < PI_GROUP; n++) {
    const Bytes16 bits = part(src(n) + pi_round_up(rows.k, 128) / 2 + row / 512 * 64, row % 512 / 128);
    of_low[n % 4] |= (bits >> row % 128 / 16 & 1) << n / 4;
    of_high[n % 4] |= (bits >> (row % 128 / 16 + 1) & 1) << n / 4;
  }
  zip_rows(of_low, low + 256);
  zip_rows(of_high, high + 256);
}

}  // namespace

void panels_of_neurons(const PiRows& rows, int64_t first, int panels, uint8_t* out) {
  const int64_t k = rows.k, size = pi_panel_bytes(rows.type, k);
  const bool floats = pi_block(rows.type) == 1;
  if (floats) memset(out, 0, (size_t)(panels * size));  // what pads k
  for (int64_t p = 0; p < panels; p++, out += size) {
    const uint8_t* src[PI_LANES];
    for (int r = 0; r < PI_LANES; r++) src[r] = pi_row(&rows, (int32_t)(first + p * PI_LANES + r));
    if (!floats) {
      spread(rows.type, src, k, out);
      continue;
    }
    for (int r = 0; r < PI_LANES; r++)
      for (int64_t i = 0; i < k; i++) memcpy(out + place(rows.type, i, r), src[r] + 2 * i, 2);
  }
}

void panels_of_outputs(const PiRows& rows, int64_t first, int64_t neurons, int64_t row, int panels, uint8_t* out) {
  const int type = repacked_type(rows.type);
  const int64_t size = pi_panel_bytes(type, neurons), codes = pi_codes_bytes(type, neurons);
  if (pi_across(rows.type) >= 0) {
    const PiTypeFacts& t = pi_facts(type);
    const int64_t of_codes = PI_LANES * t.codes, of_scales = PI_LANES * t.scales;
    for (int64_t g = 0; g < neurons / PI_GROUP; g++) {
      const uint8_t* const scales = pi_shared(&rows, (int32_t)(first + g * PI_GROUP));
      uint8_t* const to = out + g * of_codes;
      turn(rows, first + g * PI_GROUP, row, to, to + size);
      for (int p = 0; p < 2; p++) {
        uint8_t* const meta = out + p * size + codes + g * of_scales;
        const int64_t r = row + p * PI_LANES;
        if (t.d < 0) memcpy(meta, scales + r, PI_LANES);
        else memcpy(meta, scales + 2 * r, 2 * PI_LANES);
        if (t.m >= 0) memcpy(meta + 2 * PI_LANES, scales + 2 * (pi_round_up(rows.k, 128) + r), 2 * PI_LANES);
      }
    }
    return;
  }
  for (int64_t i = 0; i < neurons; i++) {
    const uint8_t* src = pi_row(&rows, (int32_t)(first + i)) + 2 * row;
    for (int64_t r = 0; r < panels * PI_LANES; r++)
      memcpy(out + r / PI_LANES * size + place(type, i, r % PI_LANES), src + 2 * r, 2);
  }
}
