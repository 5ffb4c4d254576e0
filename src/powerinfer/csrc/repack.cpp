#include "repack.h"

#include <string.h>

#include <algorithm>

#include "panels.h"

int repacked_type(int row_type) {
  if (pi_across(row_type) >= 0) return pi_panels_across(row_type);
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

}  // namespace

void panels_of_neurons(const PiRows& rows, int64_t first, int panels, uint8_t* out) {
  const int64_t k = rows.k, size = pi_panel_bytes(rows.type, k);
  const bool floats = pi_block(rows.type) == 1;
  if (floats) memset(out, 0, (size_t)(panels * size));  // what pads k
  for (int64_t p = 0; p < panels; p++, out += size) {
    const uint8_t* src[PI_LANES];
    for (int r = 0; r < PI_LANES; r++) src[r] = pi_row(&rows, (int32_t)(first + p * PI_LANES + r));
    if (pi_as_stored(rows.type)) {
      pack_panel_of(rows.type, src, k, out);
      continue;
    }
    if (!floats) {
      spread(rows.type, src, k, out);
      continue;
    }
    for (int r = 0; r < PI_LANES; r++)
      for (int64_t i = 0; i < k; i++) memcpy(out + place(rows.type, i, r), src[r] + 2 * i, 2);
  }
}

void panels_of_outputs(const PiKernels* kernels, const PiRows& rows, int64_t first, int64_t neurons, int64_t row,
                       int panels, uint8_t* out) {
  if (pi_across(rows.type) >= 0)
    return kernels->neurons.panels_across(&rows, (int32_t)first, neurons, row, panels, out);
  const int64_t size = pi_panel_bytes(rows.type, neurons);
  const auto src = [&](int64_t i) { return pi_row(&rows, (int32_t)(first + i)) + 2 * row; };
  if (rows.type == PI_F16) {
    for (int64_t i = 0; i < neurons; i++)
      for (int p = 0; p < panels; p++)
        memcpy(out + p * size + i * 2 * PI_LANES, src(i) + p * 2 * PI_LANES, 2 * PI_LANES);
    return;
  }
  for (int64_t i = 0; i < neurons; i += 2)
    for (int p = 0; p < panels; p++) {
      uint16_t even[PI_LANES], odd[PI_LANES], pairs[2 * PI_LANES];
      memcpy(even, src(i) + p * 2 * PI_LANES, sizeof even);
      memcpy(odd, src(i + 1) + p * 2 * PI_LANES, sizeof odd);
      for (int r = 0; r < PI_LANES; r++) pairs[2 * r] = even[r], pairs[2 * r + 1] = odd[r];
      memcpy(out + p * size + i * 2 * PI_LANES, pairs, sizeof pairs);
    }
}

void outputs_ahead(const PiRows& rows, int64_t first, int64_t row, PiAhead (&ahead)[8]) {
  const bool eight = pi_bits(rows.type) == 8, five = pi_bits(rows.type) == 5;
  const int64_t column = row / 128 * 128, strip = column / 512 + 1;
  const auto bundle = [&](int i) { return pi_row(&rows, (int32_t)first + i); };
  const uint8_t* const scales = pi_shared(&rows, (int32_t)first) + pi_facts(rows.type).scales * column;
  for (int p = 0; p < 8; p++) {  // four rows of a group each, and one for the fifth bits of the next 512 columns
    const auto line = ahead[p].line;
    std::fill(line, line + PiAhead::LINES, scales + 64 * (p % 4));
    for (int i = 0; i < 4; i++) line[i] = bundle(4 * p + i) + (eight ? column : column / 2);
    for (int i = 0; eight && i < 4; i++) line[4 + i] = line[i] + 64;
    if (five && strip * 512 < rows.k)
      line[4] = bundle((int)(column % 512 / 128 * 8) + p) + pi_round_up(rows.k, 128) / 2 + strip * 64;
    ahead[p].stride = bundle(PI_GROUP) - bundle(0);
  }
}
