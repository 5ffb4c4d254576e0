// Rows of single neurons whose blocks lie across the neurons of a group (table.h), from the blocks of a model file.
#include <string.h>

#include "bundles.h"

namespace {

typedef uint8_t Bytes16 __attribute__((vector_size(16)));
typedef uint16_t Words8 __attribute__((vector_size(16)));

// x[i][j] becomes x[j][i].
void transpose(Bytes16 (&x)[16]) {
  for (int step = 0; step < 4; step++) {
    Bytes16 y[16];
    for (int i = 0; i < 8; i++) {
      const Bytes16 a = x[i], b = x[i + 8];
      y[2 * i] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      y[2 * i + 1] = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    }
    memcpy(x, y, sizeof x);
  }
}

// The codes of a block: neurons 0 to 15, and the others.
struct BlockCodes {
  Bytes16 half[2];
};

BlockCodes codes_of(int type, const uint8_t* block) {
  const uint8_t* q = block + pi_facts(type).at;
  BlockCodes codes;
  if (pi_bits(type) == 8) {
    memcpy(&codes, q, 32);
    return codes;
  }
  const bool five = pi_bits(type) == 5;
  Bytes16 bytes;
  memcpy(&bytes, q + (five ? 4 : 0), 16);
  codes.half[0] = bytes & 15;
  codes.half[1] = (Bytes16)((Words8)bytes >> 4) & 15;
  if (!five) return codes;
  uint32_t fifths[8];
  for (int i = 0; i < 8; i++) fifths[i] = bits_as_bytes((uint32_t)(q[i / 2] >> i % 2 * 4) & 15) << 4;
  BlockCodes more;
  memcpy(&more, fifths, 32);
  for (int h = 0; h < 2; h++) codes.half[h] |= more.half[h];
  return codes;
}

// Byte y of a line of rows is, of 16 columns each: part y % 16 / 4, its column 4 (y / 16) + y % 4.
constexpr int part_of(int y) { return y % 16 / 4; }
constexpr int column_of(int y) { return y / 16 * 4 + y % 4; }

// The lines of a group's rows from codes of 16 columns by part; columns are those of a half of the neurons.
template <class F>
void put_lines(uint8_t* rows, int64_t pitch, F bytes) {
  for (int half = 0; half < 2; half++)
    for (int y0 = 0; y0 < 64; y0 += 16) {
      Bytes16 tile[16];
      for (int i = 0; i < 16; i++) tile[i] = bytes(part_of(y0 + i), column_of(y0 + i), half);
      transpose(tile);
      for (int n = 0; n < 16; n++) memcpy(rows + (16 * half + n) * pitch + y0, tile + n, 16);
    }
}

// The fifth bits of 128 columns: a part of the line of 512.
void put_fifths(const BlockCodes* codes, int64_t part, uint8_t* rows, int64_t pitch) {
  for (int half = 0; half < 2; half++) {
    Bytes16 tile[16];
    for (int l = 0; l < 16; l++) {
      tile[l] = Bytes16{};
      for (int b = 0; b < 8; b++) {  // in words, for bytes have no shifts
        const Words8 bit = (Words8)(codes[16 * b + l].half[half] & 16);
        tile[l] |= (Bytes16)(b < 4 ? bit >> (4 - b) : bit << (b - 4));
      }
    }
    transpose(tile);
    for (int n = 0; n < 16; n++)
      for (int i = 0; i < 4; i++)
        memcpy(rows + (16 * half + n) * pitch + 16 * i + 4 * part, (const uint8_t*)(tile + n) + 4 * i, 4);
  }
}

}  // namespace

void pack_group_across(int type, int64_t k, const uint8_t* blocks, int64_t stride, uint8_t* group, int64_t pitch,
                       int64_t at) {
  const int of = pi_across(type), bits = pi_bits(type);
  const PiTypeFacts& t = pi_facts(type);
  uint8_t *const rows = group + at, *const shared = group + PI_GROUP * pitch;
  uint8_t* const mins = shared + 2 * pi_round_up(k, 128);
  for (int64_t r = 0; r < PI_GROUP; r++) {  // what pads a row
    const int64_t from = bits == 8 ? k / 128 * 128 : k / 512 * 64 * 4;
    memset(rows + r * pitch + from, 0, (size_t)(pi_row_bytes(type, k) - from));
  }
  memset(shared, 0, (size_t)pi_shared_bytes(type, k));
  for (int64_t c = 0; c < k; c += 128) {
    const int64_t n = k - c < 128 ? k - c : 128;
    BlockCodes codes[128];
    if (n < 128) memset(codes, 0, sizeof codes);
    for (int64_t i = 0; i < n; i++) {
      const uint8_t* const block = blocks + (c + i) * stride;
      codes[i] = codes_of(of, block);
      if (t.d < 0) shared[c + i] = block[0];
      else memcpy(shared + 2 * (c + i), block + t.d, 2);
      if (t.m >= 0) memcpy(mins + 2 * (c + i), block + t.m, 2);
    }
    if (bits == 8) {
      for (int line = 0; line < 2; line++)
        put_lines(rows + c + 64 * line, pitch,
                  [&](int part, int l, int half) { return codes[64 * line + 16 * part + l].half[half]; });
      continue;
    }
    put_lines(rows + c / 2, pitch, [&](int part, int l, int half) {
      const Bytes16 low = codes[32 * part + l].half[half] & 15, high = codes[32 * part + 16 + l].half[half] & 15;
      return low | (Bytes16)((Words8)high << 4);
    });
    if (bits == 5) put_fifths(codes, c % 512 / 128, rows + pi_round_up(k, 128) / 2 + c / 512 * 64, pitch);
  }
}
