// Panels of down from rows whose blocks lie across neurons: a column of these rows is a row of the matrix, so a line of
// each row of a group becomes a block of eight panels.
#include "neuron_codes.h"

namespace {

// Calls put(i, r, codes) for the codes of rows 4 r to 4 r + 3 of a group: columns 16 i and on of the 128 from `column` on.
template <int TYPE, class F>
PI_INLINE void read_group(const PiRows* rows, int32_t first, int64_t column, F put) {
  using C = Codes<TYPE>;
  const int64_t at = C::EIGHT ? column : column / 2, fifths = pi_round_up(rows->k, 128) / 2 + column / 512 * 64;
  for (int r = 0; r < PI_GROUP / 4; r++) {
    const uint8_t* row[4];
    u8x64 z[C::LINES][4], bits[4];
    for (int i = 0; i < 4; i++) row[i] = pi_row(rows, first + 4 * r + i);
#pragma GCC unroll 2
    for (int l = 0; l < C::LINES; l++) load_quads(row, at + 64 * l, z[l]);
    if constexpr (C::FIVE) load_quads(row, fifths, bits);
    const u8x64 fifth = C::FIVE ? bits[column % 512 / 128] : z[0][0];
    unroll<0, 8>([&](auto i) __attribute__((always_inline)) {
      constexpr int I = i.value;
      put(i, r, C::EIGHT ? z[I / 4 % C::LINES][I % 4] : z[0][I / 2], fifth);
    });
  }
}

template <int TYPE>
void panels_of(const PiRows* rows, int32_t first, int64_t neurons, int64_t column, int panels, uint8_t* out) {
  using C = Codes<TYPE>;
  constexpr int TO = pi_panels_across(PI_N_TYPES + TYPE);
  constexpr PiTypeFacts T = PI_TYPES[TO];
  const int64_t size = pi_panel_bytes(TO, neurons), codes = pi_codes_bytes(TO, neurons);
  const int begin = (int)(column % 128 / 16), end = begin + panels;
  uint8_t* const to = out - begin * size;
  for (int64_t g = 0; g < neurons / PI_GROUP; g++) {
    const int32_t neuron = first + (int32_t)(g * PI_GROUP);
    uint8_t* const block = to + g * PI_LANES * T.codes;
    if constexpr (TO == PI_Q8_0) {
      read_group<TYPE>(rows, neuron, column / 128 * 128, [&](auto i, int r, u8x64 z, u8x64 fifth) {
        constexpr int I = i.value;
        if (I < begin || I >= end) return;
        const u8x64 values = C::template columns<I>(z, fifth);
        b_store(block + I * size + 64 * r, C::SIGNED ? values : b_sub(values, b_set(C::OFFSET)));
      });
    } else {
      u8x64 all[8][PI_GROUP / 4];
      read_group<TYPE>(rows, neuron, column / 128 * 128, [&](auto i, int r, u8x64 z, u8x64 fifth) {
        all[i.value][r] = C::template stored<i.value>(z, fifth);
      });
      for (int i = begin; i < end; i++) {
        const u8x64* const row = all[i];
        for (int j = 0; j < 4; j++)
          b_store(block + i * size + 64 * j, b_or(b_low4(row[j]), b_shl<4>(b_low4(row[4 + j]))));
        if constexpr (C::FIVE) {
          u8x64 fifth = b_set(0);
          unroll<0, 8>([&](auto r) __attribute__((always_inline)) {
            constexpr int R = r.value;
            const u8x64 bit = b_and(row[R], b_set(16));
            fifth = b_or(fifth, R < 4 ? b_shr < R<4 ? 4 - R : 0>(bit) : b_shl < R<4 ? 0 : R - 4>(bit));
          });
          b_store(block + i * size + 256, fifth);
        }
      }
    }
    const uint8_t *const scales = pi_shared(rows, neuron), *const mins = scales + 2 * pi_round_up(rows->k, 128);
    for (int i = 0; i < panels; i++) {
      uint8_t* const meta = out + i * size + codes + g * PI_LANES * T.scales;
      const int64_t c = column + i * PI_LANES;
      if constexpr (T.d < 0) memcpy(meta, scales + c, PI_LANES);
      else memcpy(meta, scales + 2 * c, 2 * PI_LANES);
      if constexpr (T.m >= 0) memcpy(meta + 2 * PI_LANES, mins + 2 * c, 2 * PI_LANES);
    }
  }
}

template <int TYPE>
void panels_of_type(const PiRows* rows, int32_t first, int64_t neurons, int64_t column, int panels, uint8_t* out) {
  if constexpr (PI_TYPES[TYPE].rows & PI_ROWS_X32) panels_of<TYPE>(rows, first, neurons, column, panels, out);
}

void panels_across(const PiRows* rows, int32_t first, int64_t neurons, int64_t column, int panels, uint8_t* out) {
#define PI_PANELS_OF(name, ...) \
  case PI_##name##X32: return panels_of_type<PI_##name>(rows, first, neurons, column, panels, out);
  switch (rows->type) { POWERINFER_TYPES(PI_PANELS_OF) }
#undef PI_PANELS_OF
}

}  // namespace

PI_KERNELS(neuron_panels) { to->neurons.panels_across = panels_across; }
