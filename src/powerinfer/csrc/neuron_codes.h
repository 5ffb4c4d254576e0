// The codes of rows whose blocks lie across the neurons of a group (table.h). Included by ISA files only.
#pragma once
#include "neuron_rows.h"
#include "quants.h"

namespace {

// How the codes of a type lie in rows and what they stand for (types.h).
template <int TYPE>
struct Codes {
  static constexpr PiTypeFacts FACTS = PI_TYPES[TYPE];
  static constexpr bool FIVE = pi_bits(TYPE) == 5, EIGHT = pi_bits(TYPE) == 8;
  static constexpr bool IQ4 = FACTS.values == PI_VALUES_IQ4, E2M1 = FACTS.values == PI_VALUES_E2M1;
  static constexpr bool SIGNED = IQ4 || EIGHT;
  static constexpr int OFFSET = E2M1 ? WMXFP4::OFFSET : FACTS.offset;
  // Lines of a row, and of the scales of a group, for 128 columns.
  static constexpr int LINES = EIGHT ? 2 : 1, SCALES = 2 * FACTS.scales;

  // The codes of columns 16 i and on of 128, of four rows: in z, and their fifth bits in `bits`.
  template <int i>
  static PI_INLINE_MEMBER u8x64 stored(u8x64 z, u8x64 bits) {
    if constexpr (EIGHT) return z;
    u8x64 code = i % 2 ? b_high4(z) : b_low4(z);
    if constexpr (FIVE) {
      if constexpr (i < 4) bits = b_shl<4 - i>(bits);
      else if constexpr (i > 4) bits = b_shr<i - 4>(bits);
      code = b_or(code, b_and(bits, b_set(16)));
    }
    return code;
  }
  // What they stand for, OFFSET above it unless SIGNED.
  template <int i>
  static PI_INLINE_MEMBER u8x64 columns(u8x64 z, u8x64 bits) {
    u8x64 code = stored<i>(z, bits);
    if constexpr (IQ4) code = b_lookup(PI_IQ4_ENTRIES, code);
    if constexpr (E2M1) code = b_lookup(E2M1_ABOVE, code);
    return code;
  }
  static PI_INLINE_MEMBER i32x16 start(int32_t sum) { return SIGNED ? dot_s_start(sum) : i_set(-OFFSET * sum); }
  static PI_INLINE_MEMBER i32x16 dot(i32x16 acc, u8x64 code, int32_t by) {
    return SIGNED ? dot_s(acc, code, by) : dot_u(acc, code, by);
  }
  static PI_INLINE_MEMBER f32x16 scale(const uint8_t* scales, int64_t column) {
    if constexpr (E2M1) return half_powers(scales + column);
    else return f_load_f16(scales + 2 * column);
  }
};

// A line of each of four rows, by columns.
PI_INLINE void load_quads(const uint8_t* const* row, int64_t at, u8x64 (&z)[4]) {
  b_quads(b_load(row[0] + at), b_load(row[1] + at), b_load(row[2] + at), b_load(row[3] + at), z);
}

}  // namespace
