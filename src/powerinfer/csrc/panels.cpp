#include "panels.h"

#include <math.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <new>

#include "grids.h"

namespace {

constexpr int64_t HUGE = 2 << 20;
constexpr int64_t ARENA = 64 << 20;

// The 6-bit scale and minimum of sub-block j of a Q4_K or Q5_K block.
void k_scale(const uint8_t* s, int j, uint8_t* scale, uint8_t* minimum) {
  if (j < 4) {
    *scale = s[j] & 63;
    *minimum = s[j + 4] & 63;
  } else {
    *scale = (uint8_t)((s[j + 4] & 15) | (s[j - 4] >> 6) << 4);
    *minimum = (uint8_t)(s[j + 4] >> 4 | (s[j] >> 6) << 4);
  }
}

constexpr int POWERS[5] = {1, 3, 9, 27, 81};

constexpr uint32_t SPREAD[16] = {bits_as_bytes(0),  bits_as_bytes(1),  bits_as_bytes(2),  bits_as_bytes(3),
                                 bits_as_bytes(4),  bits_as_bytes(5),  bits_as_bytes(6),  bits_as_bytes(7),
                                 bits_as_bytes(8),  bits_as_bytes(9),  bits_as_bytes(10), bits_as_bytes(11),
                                 bits_as_bytes(12), bits_as_bytes(13), bits_as_bytes(14), bits_as_bytes(15)};

// The 6-bit scale of sub-block j of an IQ4_XS block.
int xs_scale(const uint8_t* block, int j) {
  const int low = block[4 + j / 2] >> j % 2 * 4 & 15, high = (block[2] | block[3] << 8) >> 2 * j & 3;
  return (low | high << 4) - 32;
}

// Word g of each row becomes 64 bytes: row r of group g at 4 r.
void spread_words(const uint8_t* const* rows, int64_t at, int words, uint8_t* dst) {
  for (int r = 0; r < 16; r++) {
    if (!rows[r]) continue;
    const uint8_t* src = rows[r] + at;
    for (int g = 0; g < words; g++) memcpy(dst + g * 64 + r * 4, src + g * 4, 4);
  }
}

void spread_halves(const uint8_t* const* rows, int64_t at, uint8_t* dst) {
  for (int r = 0; r < 16; r++)
    if (rows[r]) memcpy(dst + 2 * r, rows[r] + at, 2);
}

// Element i of row r goes to i * 16 + r, in pieces that stay in the L1 cache.
template <class T>
void interleave(const uint8_t* const* rows, int64_t k, uint8_t* dst) {
  for (int64_t begin = 0; begin < k; begin += 64) {
    const int64_t end = std::min(begin + 64, k);
    for (int r = 0; r < 16; r++) {
      if (!rows[r]) continue;
      const uint8_t* src = rows[r];
      for (int64_t i = begin; i < end; i++) memcpy(dst + (i * 16 + r) * sizeof(T), src + i * sizeof(T), sizeof(T));
    }
  }
}

// A bit of each of 32 elements, by groups.
void pack_bits(const uint8_t* const* rows, int64_t at, uint8_t* dst) {
  for (int r = 0; r < 16; r++) {
    if (!rows[r]) continue;
    uint32_t bits;
    memcpy(&bits, rows[r] + at, 4);
    bits = bits_by_group(bits);
    memcpy(dst + 4 * r, &bits, 4);
  }
}

// Q2_0's codes of two bits, four to a byte in their order: a word of 16 elements becomes one of a line.
void pack_fours(const uint8_t* const* rows, int64_t at, uint8_t* dst) {
  for (int r = 0; r < 16; r++) {
    if (!rows[r]) continue;
    for (int line = 0; line < 4; line++) {
      uint32_t out = 0;
      for (int g = 0; g < 4; g++) {
        const uint32_t four = rows[r][at + 4 * line + g];
        out |= ((four & 3) | (four & 12) << 6 | (four & 48) << 12 | (four & 192) << 18) << 2 * g;
      }
      memcpy(dst + line * 64 + 4 * r, &out, 4);
    }
  }
}

// The 6-bit scale of sub-block j of a Q3_K block.
int q3_scale(const uint8_t* scales, int j) {
  return ((scales[j % 8] >> j / 8 * 4 & 15) | (scales[8 + j % 4] >> j / 4 * 2 & 3) << 4) - 32;
}

// A K-quant's codes of two bits, at the same bits of 32 bytes for 32 elements: words of two lines for these.
void pack_two_bits(const uint8_t* const* rows, int64_t at, uint8_t* dst) {
  for (int r = 0; r < 16; r++) {
    if (!rows[r]) continue;
    uint32_t low[16];
    memcpy(low, rows[r] + at, 64);
    for (int line = 0; line < 16; line++) {
      uint32_t out = 0;
      for (int g = 0; g < 4; g++)
        out |= (low[line / 8 * 8 + line % 2 * 4 + g] >> line % 8 / 2 * 2 & 0x03030303u) << 2 * g;
      memcpy(dst + line * 64 + 4 * r, &out, 4);
    }
  }
}

// Words of Q3_K's lines: of 32 elements the low bits are at the same bits of 32 bytes, the third ones at another bit of the
// first 32.
void pack_three_bits(const uint8_t* const* rows, int64_t at, uint8_t* dst) {
  constexpr uint32_t LOW_BITS = 0x01010101, LOW_PAIRS = 0x03030303;
  for (int r = 0; r < 16; r++) {
    if (!rows[r]) continue;
    uint32_t high[8], low[16], c[8];
    memcpy(high, rows[r] + at, 32);
    memcpy(low, rows[r] + at + 32, 64);
    for (int b = 0; b < 8; b++) {
      for (int g = 0; g < 8; g++)
        c[g] = (low[b / 4 * 8 + g] >> 2 * (b % 4) & LOW_PAIRS) | (high[g] >> b & LOW_BITS) << 2;
      const uint32_t lines[3] = {c[0] | c[1] << 3 | (c[6] & LOW_PAIRS) << 6, c[2] | c[3] << 3 | (c[7] & LOW_PAIRS) << 6,
                                 c[4] | c[5] << 3 | (c[6] >> 2 & LOW_BITS) << 6 | (c[7] >> 2 & LOW_BITS) << 7};
      for (int i = 0; i < 3; i++) memcpy(dst + (3 * b + i) * 64 + 4 * r, lines + i, 4);
    }
  }
}

// 32 codes of four bits, the high ones last, as entries of a table.
void unpack_nibbles(const uint8_t* q, const int8_t* values, float scale, float* out) {
  for (int i = 0; i < 32; i++) out[i] = scale * (float)values[i < 16 ? q[i] & 15 : q[i - 16] >> 4];
}

// Half of NVFP4's number of 8 bits: the sign counts for nothing, and what would be infinite is zero.
float half_e4m3(uint8_t code) {
  if (code == 0x7f) return 0;
  const int e = code >> 3 & 15, m = code & 7;
  return e == 0 ? (float)m / 1024 : ldexpf((float)(8 + m), e - 11);
}

// One panel; where dst is not written, it stays as it is: zeroed for missing rows and for what pads BF16.
void pack_panel(int type, const uint8_t* const* rows, int64_t k, uint8_t* dst, const float* factors) {
  const PiTypeFacts& t = pi_facts(type);
  uint8_t* meta = dst + pi_codes_bytes(type, k);
  const int64_t nb = k / t.block;
  switch (type) {
    case PI_F32: interleave<uint32_t>(rows, k, dst); return;
    case PI_F16: interleave<uint16_t>(rows, k, dst); return;
    case PI_BF16:
      for (int64_t i = 0; i + 32 <= k; i += 32) spread_words(rows, i * 2, 16, dst + i * 32);
      for (int r = 0; r < 16; r++) {
        if (rows[r])
          for (int64_t i = k / 32 * 32; i < k; i++) memcpy(dst + i / 2 * 64 + r * 4 + i % 2 * 2, rows[r] + i * 2, 2);
      }
      return;
  }
  if (type == PI_NVFP4) {
    memcpy(meta, factors, (size_t)pi_factors_bytes(type));
    meta += pi_factors_bytes(type);
  }
  for (int64_t b = 0; b < nb; b++, dst += PI_LANES * t.codes, meta += PI_LANES * t.scales) {
    const int64_t at = b * t.bytes;
    if (t.values == PI_VALUES_GRID) {
      pack_grid_block(type, rows, at, dst, meta);
      continue;
    }
    int64_t codes = at + t.at;
    if (t.d >= 0) spread_halves(rows, at + t.d, meta);
    if (t.m >= 0) spread_halves(rows, at + t.m, meta + 32);
    switch (type) {
      case PI_MXFP4:
        for (int r = 0; r < 16; r++)
          if (rows[r]) meta[r] = rows[r][at];
        break;
      case PI_NVFP4:
        for (int r = 0; r < 16; r++)
          for (int j = 0; rows[r] && j < 4; j++)
            meta[j * 16 + r] = rows[r][at + j] == 0x7f ? 0 : rows[r][at + j] & 0x7f;
        break;
      case PI_IQ4_XS:
        for (int j = 0; j < 8; j++)
          for (int r = 0; r < 16; r++)
            if (rows[r]) meta[32 + j * 16 + r] = (uint8_t)xs_scale(rows[r] + at, j);
        break;
      case PI_Q5_0:
      case PI_Q5_1:
        pack_bits(rows, codes, dst + 256);
        codes += 4;
        break;
      case PI_Q4_K:
      case PI_Q5_K:
        for (int r = 0; r < 16; r++)
          if (rows[r])
            for (int j = 0; j < 8; j++)
              k_scale(rows[r] + at + 4, j, meta + 64 + j * 32 + r, meta + 64 + j * 32 + 16 + r);
        if (type == PI_Q4_K) break;
        spread_words(rows, codes, 8, dst + 2048);
        codes += 32;
        break;
      case PI_Q6_K:
        for (int r = 0; r < 16; r++)
          if (rows[r])
            for (int j = 0; j < 16; j++) meta[32 + j * 16 + r] = rows[r][at + 192 + j];
        for (int h = 0; h < 2; h++) {
          spread_words(rows, at + h * 64, 16, dst + h * 1536);
          spread_words(rows, at + 128 + h * 32, 8, dst + h * 1536 + 1024);
        }
        continue;
      case PI_Q2_K:
        for (int r = 0; r < 16; r++)
          if (rows[r])
            for (int j = 0; j < 16; j++) meta[64 + j * 16 + r] = rows[r][at + j];
        pack_two_bits(rows, codes, dst);
        continue;
      case PI_TQ2_0: pack_two_bits(rows, codes, dst); continue;
      case PI_Q2_0: pack_fours(rows, codes, dst); continue;
      case PI_Q1_0:
        for (int j = 0; j < 4; j++) pack_bits(rows, codes + 4 * j, dst + 64 * j);
        continue;
      case PI_Q3_K:
        for (int r = 0; r < 16; r++)
          if (rows[r])
            for (int j = 0; j < 16; j++) meta[32 + j * 16 + r] = (uint8_t)q3_scale(rows[r] + at + 96, j);
        pack_three_bits(rows, at, dst);
        continue;
    }
    spread_words(rows, codes, (int)(at + t.at + t.codes - codes) / 4, dst);
  }
}

}  // namespace

float half(const uint8_t* p) {
  uint16_t h;
  memcpy(&h, p, 2);
  const uint32_t sign = (uint32_t)(h & 0x8000) << 16, e = h >> 10 & 31, m = h & 1023;
  float f;
  if (e == 0) {
    f = (float)m * 5.9604644775390625e-8f;
    return sign ? -f : f;
  }
  const uint32_t u = sign | (e == 31 ? 0x7f800000u : (e + 112) << 23) | m << 13;
  memcpy(&f, &u, 4);
  return f;
}

uint32_t bits_by_group(uint32_t bits) {
  uint32_t out = 0;
  for (int g = 0; g < 8; g++) out |= SPREAD[bits >> 4 * g & 15] << g;
  return out;
}

Mapping::Mapping(int64_t bytes) : bytes_(pi_round_up(bytes < 1 ? 1 : bytes, 4096) + HUGE) {
  void* p = mmap(nullptr, (size_t)bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  // Huge pages must be whole and aligned: release the head and start on a boundary.
  const int64_t skip = (HUGE - (int64_t)((uintptr_t)p % HUGE)) % HUGE;
  if (skip) munmap(p, (size_t)skip);
  data_ = (uint8_t*)p + skip;
  bytes_ -= skip;
#if defined(MADV_HUGEPAGE)
  if (bytes >= HUGE) madvise(data_, (size_t)(bytes / HUGE * HUGE), MADV_HUGEPAGE);  // no page beyond what is asked for
#endif
}

Mapping::~Mapping() { munmap(data_, (size_t)bytes_); }

void give_back(void* at, int64_t bytes) {
#if defined(__linux__)
  const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), end = ((uintptr_t)at + (uintptr_t)bytes) / page * page;
  const uintptr_t begin = ((uintptr_t)at + page - 1) / page * page;
  if (begin < end) madvise((void*)begin, end - begin, MADV_DONTNEED);
#else
  (void)at, (void)bytes;
#endif
}

uint8_t* Arena::allocate(int64_t bytes) {
  bytes = pi_round_up(bytes, 64);
  if (bytes > left_) {
    const int64_t size = std::max(bytes, ARENA);
    mappings_.push_back(std::make_unique<Mapping>(size));
    next_ = mappings_.back()->data();
    left_ = size;
  }
  uint8_t* p = next_;
  next_ += bytes;
  left_ -= bytes;
  return p;
}

float half_power(uint8_t e) {
  const uint32_t u = e < 2 ? 0x200000u << e : (uint32_t)(e - 1) << 23;
  float f;
  memcpy(&f, &u, 4);
  return f;
}

int64_t stored_row_bytes(int type, int64_t k) { return k / pi_block(type) * pi_facts(type).bytes; }

int64_t packed_excess(int type, int64_t rows, int64_t k) {
  return pi_round_up(rows, PI_LANES) / PI_LANES * pi_panel_bytes(type, k) - rows * stored_row_bytes(type, k);
}

void pack_panels(int type, const uint8_t* src, int64_t rows, int64_t k, const int32_t* map, int64_t map_rows,
                 uint8_t* dst, int64_t p0, int64_t p1, int64_t at, const float* factors) {
  const int64_t row_bytes = stored_row_bytes(type, k), panel_bytes = pi_panel_bytes(type, k);
  for (int64_t p = p0; p < p1; p++) {
    const uint8_t* from[16];
    float of_rows[16];
    uint8_t* const panel = dst + (p - at) * panel_bytes;
    for (int r = 0; r < 16; r++) {
      const int64_t i = p * 16 + r, row = map ? (i < map_rows ? map[i] : -1) : i;
      from[r] = row >= 0 && row < rows ? src + row * row_bytes : nullptr;
      of_rows[r] = from[r] && factors ? factors[row] : 1;
    }
    const bool gaps = std::find(from, from + 16, nullptr) != from + 16 || (type == PI_BF16 && k % 32);
    if (gaps) memset(panel, 0, (size_t)panel_bytes);
    pack_panel(type, from, k, panel, of_rows);
  }
}

void pack_panel_of(int type, const uint8_t* const (&rows)[PI_LANES], int64_t k, uint8_t* dst) {
  pack_panel(type, rows, k, dst, nullptr);
}

void unpack_row(int type, const uint8_t* row, int64_t k, float* out) {
  const PiTypeFacts& t = pi_facts(type);
  if (type == PI_F32) {
    memcpy(out, row, (size_t)k * 4);
    return;
  }
  if (type == PI_F16) {
    for (int64_t i = 0; i < k; i++) out[i] = half(row + 2 * i);
    return;
  }
  if (type == PI_BF16) {
    for (int64_t i = 0; i < k; i++) {
      const uint32_t u = (uint32_t)(row[2 * i] | row[2 * i + 1] << 8) << 16;
      memcpy(out + i, &u, 4);
    }
    return;
  }
  for (int64_t b = 0; b < k; b += t.block, row += t.bytes, out += t.block) {
    if (t.values == PI_VALUES_GRID) {
      unpack_grid_block(type, row, out);
      continue;
    }
    switch (type) {
      case PI_Q8_0:
        for (int i = 0; i < 32; i++) out[i] = half(row) * (float)(int8_t)row[2 + i];
        break;
      case PI_IQ4_NL: unpack_nibbles(row + 2, PI_IQ4_ENTRIES, half(row), out); break;
      case PI_IQ4_XS:
        for (int j = 0; j < 8; j++)
          unpack_nibbles(row + 8 + 16 * j, PI_IQ4_ENTRIES, half(row) * (float)xs_scale(row, j), out + 32 * j);
        break;
      case PI_MXFP4: unpack_nibbles(row + 1, PI_E2M1_ENTRIES, half_power(row[0]), out); break;
      case PI_NVFP4:
        for (int i = 0; i < 64; i++) {
          const uint8_t pair = row[4 + i / 16 * 8 + i % 8];
          out[i] = half_e4m3(row[i / 16]) * (float)PI_E2M1_ENTRIES[i % 16 < 8 ? pair & 15 : pair >> 4];
        }
        break;
      case PI_Q4_0:
      case PI_Q4_1:
      case PI_Q5_0:
      case PI_Q5_1: {
        const bool five = t.codes == 20;
        const float d = half(row), m = t.m >= 0 ? half(row + t.m) : 0.0f;
        const uint8_t* q = row + t.at;
        uint32_t bits = 0;
        if (five) {
          memcpy(&bits, q, 4);
          q += 4;
        }
        for (int i = 0; i < 32; i++) {
          const int code = (i < 16 ? q[i] & 15 : q[i - 16] >> 4) | (int)(bits >> i & 1) << 4;
          out[i] = t.m >= 0 ? d * (float)code + m : d * (float)(code - t.offset);
        }
        break;
      }
      case PI_Q4_K:
      case PI_Q5_K: {
        const uint8_t *q = row + (type == PI_Q4_K ? 16 : 48), *high = row + 16;
        for (int j = 0; j < 8; j++) {
          uint8_t scale, minimum;
          k_scale(row + 4, j, &scale, &minimum);
          const float d = half(row) * (float)scale, m = half(row + 2) * (float)minimum;
          for (int i = 0; i < 32; i++) {
            int code = j % 2 ? q[j / 2 * 32 + i] >> 4 : q[j / 2 * 32 + i] & 15;
            if (type == PI_Q5_K) code |= (high[i] >> j & 1) << 4;
            out[32 * j + i] = d * (float)code - m;
          }
        }
        break;
      }
      case PI_Q2_K:
        for (int j = 0; j < 16; j++) {
          const float d = half(row + 80) * (float)(row[j] & 15), m = half(row + 82) * (float)(row[j] >> 4);
          for (int i = 16 * j; i < 16 * j + 16; i++)
            out[i] = d * (float)(row[16 + i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3) - m;
        }
        break;
      case PI_TQ2_0:
        for (int i = 0; i < 256; i++)
          out[i] = half(row + 64) * (float)((row[i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3) - 1);
        break;
      case PI_Q2_0:
        for (int i = 0; i < 64; i++) out[i] = half(row) * (float)((row[2 + i / 4] >> i % 4 * 2 & 3) - 1);
        break;
      case PI_Q1_0:
        for (int i = 0; i < 128; i++) out[i] = half(row) * (float)((row[2 + i / 8] >> i % 8 & 1) * 2 - 1);
        break;
      case PI_TQ1_0:
        for (int i = 0; i < 256; i++) {
          // Five digits each of 32 and of 16 bytes, four of the last four.
          const int width = i < 160 ? 32 : i < 240 ? 16 : 4, first = i < 160 ? 0 : i < 240 ? 160 : 240;
          const int at = first / 5 + (i - first) % width, digit = (i - first) / width;
          out[i] = half(row + 52) * (float)(((row[at] * POWERS[digit] & 255) * 3 >> 8) - 1);
        }
        break;
      case PI_Q3_K:
        for (int j = 0; j < 16; j++) {
          const float d = half(row + 108) * (float)q3_scale(row + 96, j);
          for (int i = 16 * j; i < 16 * j + 16; i++) {
            const int low = row[32 + i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3, high = row[i % 32] >> i / 32 & 1;
            out[i] = d * (float)((low | high << 2) - 4);
          }
        }
        break;
      case PI_Q6_K:
        for (int i = 0; i < 256; i++) {
          const int h = i / 128, part = i % 128 / 32, l = i % 32;
          const int low = row[h * 64 + part % 2 * 32 + l] >> (part / 2 * 4) & 15,
                    two = row[128 + h * 32 + l] >> (2 * part) & 3;
          out[i] = half(row + 208) * (float)(int8_t)row[192 + i / 16] * (float)((low | two << 4) - 32);
        }
        break;
    }
  }
}
