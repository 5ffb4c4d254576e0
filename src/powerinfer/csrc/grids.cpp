#include "grids.h"

#include <string.h>

#include "panels.h"

namespace {

// What a block has, whichever way its type packs that.
struct Block {
  uint16_t d;
  uint16_t entries[64];  // of the grid, those of IQ1_M with 2048 more where it moves down
  uint8_t signs[32];     // of eight elements each; none of IQ1
  uint8_t scales[16];    // of 32 elements each, or of 16; IQ1_S: with 8 more where the grid moves down
};

// The entries of a type's block, and the bits of each that panels have apart from its lowest eight, in one or two parts.
struct Layout {
  int entries, part[2];
  bool signs, halves;
  const char* grid;
};

Layout layout(int type) {
  switch (type) {
    case PI_IQ3_S: return {64, {1, 0}, true, false, "IQ3_S"};
    case PI_IQ3_XXS: return {64, {0, 0}, true, false, "IQ3_XXS"};
    case PI_IQ2_XXS: return {32, {0, 0}, true, false, "IQ2_XXS"};
    case PI_IQ2_XS: return {32, {1, 0}, true, true, "IQ2_XS"};
    case PI_IQ2_S: return {32, {2, 0}, true, true, "IQ2_S"};
    case PI_IQ1_S: return {32, {2, 1}, false, false, "IQ1"};
    default: return {32, {4, 0}, false, true, "IQ1"};  // IQ1_M
  }
}

// Seven signs, and an eighth that makes the number of negative ones even.
uint8_t even(uint32_t signs) {
  signs &= 127;
  return (uint8_t)(signs | (uint32_t)__builtin_parity(signs) << 7);
}

uint32_t word(const uint8_t* p) {
  uint32_t w;
  memcpy(&w, p, 4);
  return w;
}

int nibble(const uint8_t* p, int i) { return p[i / 2] >> i % 2 * 4 & 15; }

Block read_block(int type, const uint8_t* p) {
  Block b;
  memcpy(&b.d, p, 2);
  const Layout l = layout(type);
  const uint8_t* low = p + (type == PI_IQ1_M ? 0 : 2);
  if (type != PI_IQ2_XXS && type != PI_IQ2_XS)
    for (int i = 0; i < l.entries; i++) b.entries[i] = low[i];
  switch (type) {
    case PI_IQ3_S:
      for (int i = 0; i < 64; i++) b.entries[i] = (uint16_t)(b.entries[i] | (p[66 + i / 8] >> i % 8 & 1) << 8);
      memcpy(b.signs, p + 74, 32);
      for (int i = 0; i < 8; i++) b.scales[i] = (uint8_t)nibble(p + 106, i);
      break;
    case PI_IQ3_XXS:
    case PI_IQ2_XXS:
      for (int i = 0; i < 8; i++) {
        const uint32_t signs = word(type == PI_IQ3_XXS ? p + 66 + 4 * i : p + 6 + 8 * i);
        for (int n = 0; n < 4; n++) {
          b.signs[4 * i + n] = even(signs >> 7 * n);
          if (type == PI_IQ2_XXS) b.entries[4 * i + n] = p[2 + 8 * i + n];
        }
        b.scales[i] = (uint8_t)(signs >> 28);
      }
      break;
    case PI_IQ2_XS:
      for (int i = 0; i < 32; i++) {
        const int pair = p[2 + 2 * i] | p[3 + 2 * i] << 8;
        b.entries[i] = (uint16_t)(pair & 511);
        b.signs[i] = even((uint32_t)pair >> 9);
      }
      for (int i = 0; i < 16; i++) b.scales[i] = (uint8_t)nibble(p + 66, i);
      break;
    case PI_IQ2_S:
      for (int i = 0; i < 32; i++) b.entries[i] = (uint16_t)(b.entries[i] | (p[66 + i / 4] >> i % 4 * 2 & 3) << 8);
      memcpy(b.signs, p + 34, 32);
      for (int i = 0; i < 16; i++) b.scales[i] = (uint8_t)nibble(p + 74, i);
      break;
    case PI_IQ1_S:
      for (int i = 0; i < 8; i++) {
        const int high = p[34 + 2 * i] | p[35 + 2 * i] << 8;
        for (int n = 0; n < 4; n++) b.entries[4 * i + n] = (uint16_t)(b.entries[4 * i + n] | (high >> 3 * n & 7) << 8);
        b.scales[i] = (uint8_t)(high >> 12);
      }
      break;
    case PI_IQ1_M: {
      for (int i = 0; i < 32; i++) b.entries[i] = (uint16_t)(b.entries[i] | nibble(p + 32, i) << 8);
      b.d = 0;
      for (int i = 0; i < 4; i++) {
        const int four = p[48 + 2 * i] | p[49 + 2 * i] << 8;
        for (int n = 0; n < 4; n++) b.scales[4 * i + n] = (uint8_t)(four >> 3 * n & 7);
        b.d = (uint16_t)(b.d | four >> 12 << 4 * i);
      }
    }
  }
  return b;
}

}  // namespace

void pack_grid_block(int type, const uint8_t* const* rows, int64_t at, uint8_t* codes, uint8_t* scales) {
  const Layout l = layout(type);
  for (int r = 0; r < PI_LANES; r++) {
    if (!rows[r]) continue;
    const Block b = read_block(type, rows[r] + at);
    uint8_t* to = codes + r;
    for (int i = 0; i < l.entries; i++, to += PI_LANES) *to = (uint8_t)b.entries[i];
    int shift = 8;
    for (int bits : l.part) {
      const int per_byte = bits ? 8 / bits : 0;  // entries of a byte
      for (int i = 0; bits && i < l.entries; i += per_byte, to += PI_LANES) {
        int byte = 0;
        for (int n = 0; n < per_byte; n++) byte |= (b.entries[i + n] >> shift & ((1 << bits) - 1)) << bits * n;
        *to = (uint8_t)byte;
      }
      shift += bits;
    }
    to += 3 * r;  // words from here on
    for (int i = 0; l.signs && i < 8; i++, to += 4 * PI_LANES) {
      const uint32_t groups = bits_by_group(word(b.signs + 4 * i));
      uint32_t signs = 0;
      for (int g = 0; g < 8; g++) signs |= (groups >> g & 0x01010101u) << (g / 2 + g % 2 * 4);
      memcpy(to, &signs, 4);
    }
    memcpy(scales + 2 * r, &b.d, 2);
    for (int i = 0; i < (l.halves ? 8 : 4); i++)
      scales[2 * PI_LANES + i * PI_LANES + r] = (uint8_t)(b.scales[2 * i] | b.scales[2 * i + 1] << 4);
  }
}

void unpack_grid_block(int type, const uint8_t* block, float* out) {
  const Layout l = layout(type);
  const Block b = read_block(type, block);
  const Grid& grid = *find_grid(l.grid);
  const float d = half((const uint8_t*)&b.d);
  for (int k = 0; k < 256; k++) {
    const int entry = b.entries[k / grid.of], scale = b.scales[k / (l.halves ? 16 : 32)];
    const float value = (float)grid.value(entry & (grid.n - 1), k % grid.of);
    if (l.signs) {
      const float by = type == PI_IQ3_S     ? d * (float)(1 + 2 * scale)
                       : type == PI_IQ3_XXS ? d * (0.5f + (float)scale) * 0.5f
                                            : d * (0.5f + (float)scale) * 0.25f;
      out[k] = by * value * (b.signs[k / 8] >> k % 8 & 1 ? -1.0f : 1.0f);
    } else {
      const bool down = type == PI_IQ1_S ? scale & 8 : entry & 2048;
      out[k] = d * (float)(2 * (scale & 7) + 1) * (value + (down ? -0.125f : 0.125f));
    }
  }
}
