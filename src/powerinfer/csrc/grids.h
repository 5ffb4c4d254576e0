// The types whose blocks refer to entries of a grid (IQ1, IQ2, IQ3): from blocks of files to panels, and to floats.
#pragma once
#include "grid_entries.h"
#include "table.h"

// Entries of `of` values, each a word of their numbers in `values`, of 16 / of bits.
struct Grid {
  const char* name;
  int n, of;
  const uint16_t* words;
  const int8_t* values;
  int value(int entry, int e) const { return values[words[entry] >> 16 / of * e & ((1 << 16 / of) - 1)]; }
};

// Null if no grid has that name; IQ1_S and IQ1_M share "IQ1".
const Grid* find_grid(const char* name);

// Block at byte `at` of each row, null where there is none, as codes and scales of a panel (table.h).
void pack_grid_block(int type, const uint8_t* const* rows, int64_t at, uint8_t* codes, uint8_t* scales);

// 256 values.
void unpack_grid_block(int type, const uint8_t* block, float* out);
