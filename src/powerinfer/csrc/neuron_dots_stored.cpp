// Rows of long blocks against the activations, as model files have them: a block becomes bytes, in order, and factors of
// each 16, with which all tokens are multiplied.
#include "grid_entries.h"
#include "neuron_rows.h"

namespace {

enum { BLOCK = 256, HALVES = 16 };  // of the longest

// A block's codes and, of each 16, what they are multiplied with and what is added.
struct Opened {
  alignas(64) int8_t q[BLOCK];
  alignas(64) float factor[HALVES], minimum[HALVES];
};

// Masks of the bytes whose bit is set.
struct Masks {
  uint64_t of[256] = {};
  constexpr Masks() {
    for (int bits = 0; bits < 256; bits++)
      for (int i = 0; i < 8; i++) of[bits] |= bits >> i & 1 ? (uint64_t)0xff << 8 * i : 0;
  }
};
constexpr Masks MASKS;

PI_INLINE uint32_t word(const uint8_t* p) {
  uint32_t w;
  memcpy(&w, p, 4);
  return w;
}
PI_INLINE int pair(const uint8_t* p) { return p[0] | p[1] << 8; }
PI_INLINE int nibble(const uint8_t* p, int i) { return p[i / 2] >> i % 2 * 4 & 15; }

// The number of half precision at byte `at` of a block of `bytes`, which are at least 32.
PI_INLINE float half_at(const uint8_t* p, int at, int bytes) {
  const int from = at < bytes - 32 ? at : bytes - 32;
  float all[16];
  f_store(all, f_load_f16(p + from));
  return all[(at - from) / 2];
}

// That at the beginning of two bytes, or of more.
PI_INLINE float half_of(const uint8_t* p) {
  const uint8_t alone[32] = {p[0], p[1]};
  return half_at(alone, 0, 32);
}

PI_INLINE void look_up(const int8_t* table, int8_t* q) {
  for (int i = 0; i < BLOCK; i += 64) b_store(q + i, b_lookup(table, b_load(q + i)));
}

// Of 64 entries of four magnitudes the words, with their signs.
PI_INLINE void mirror(const uint32_t (&entries)[64], const uint8_t (&signs)[32], int8_t* q) {
  for (int i = 0; i < 32; i++) {
    uint64_t magnitudes;
    memcpy(&magnitudes, entries + 2 * i, 8);
    const uint64_t mask = MASKS.of[signs[i]], carry = mask & 0x0101010101010101u;
    magnitudes = (magnitudes ^ mask) + carry;  // magnitudes are below 128 and above 0: nothing crosses a byte
    memcpy(q + 8 * i, &magnitudes, 8);
  }
}

// Of 32 entries of eight numbers the bytes, with bit 2 where the value is of the other kind.
PI_INLINE void spread(const uint32_t (&entries)[32], const uint8_t (&bits_of)[32], int8_t* q) {
  for (int i = 0; i < 32; i++) {
    const uint64_t low = entries[i] & 0x0f0f0f0fu, high = entries[i] >> 4 & 0x0f0f0f0fu;
    const uint64_t numbers = low | high << 32 | (MASKS.of[bits_of[i]] & 0x0404040404040404u);
    memcpy(q + 8 * i, &numbers, 8);
  }
}

PI_INLINE uint8_t even(uint32_t signs) {
  return (uint8_t)((signs & 127) | (uint32_t)__builtin_parity(signs & 127) << 7);
}

#define PI_IQ2_SIGNED(a, b, c) a, b, c, 0, -a, -b, -c
#define PI_IQ2_SIGNED_OF(...) PI_IQ2_SIGNED(__VA_ARGS__)
alignas(16) constexpr int8_t IQ2_SIGNED[16] = {PI_IQ2_SIGNED_OF(PI_IQ2_VALUES)};
alignas(16) constexpr int8_t IQ1_MOVED[16] = {-7, 1, 9, 0, -9, -1, 7};  // eight times the values, moved up or down

template <int>
struct Type {};

// Two bits of each of 32 bytes for 32 elements, at `low`.
PI_INLINE void open_pairs(const uint8_t* low, int above, int8_t* q) {
  for (int h = 0; h < 2; h++)
    for (int j = 0; j < 4; j++)
      for (int i = 0; i < 32; i++) q[128 * h + 32 * j + i] = (int8_t)((low[32 * h + i] >> 2 * j & 3) - above);
}

PI_INLINE void set_factors(float d, Opened& to) {
  for (int j = 0; j < HALVES; j++) to.factor[j] = d;
}

PI_INLINE void open(Type<PI_TQ2_0>, const uint8_t* p, Opened& to) {
  open_pairs(p, 1, to.q);
  set_factors(half_at(p, 64, 66), to);
}

PI_INLINE void open(Type<PI_Q2_0>, const uint8_t* p, Opened& to) {
  for (int i = 0; i < 64; i++) to.q[i] = (int8_t)((p[2 + i / 4] >> i % 4 * 2 & 3) - 1);
  set_factors(half_of(p), to);
}

PI_INLINE void open(Type<PI_Q1_0>, const uint8_t* p, Opened& to) {
  for (int i = 0; i < 16; i++) {
    const uint64_t signs = ~MASKS.of[p[2 + i]] | 0x0101010101010101u;
    memcpy(to.q + 8 * i, &signs, 8);
  }
  set_factors(half_of(p), to);
}

PI_INLINE void open(Type<PI_TQ1_0>, const uint8_t* p, Opened& to) {
  const auto digit = [](uint8_t byte, int n) __attribute__((always_inline)) {
    return (int8_t)((((uint16_t)(uint8_t)(byte * PI_POWERS[n]) * 3) >> 8) - 1);
  };
  for (int n = 0; n < 5; n++)
    for (int i = 0; i < 32; i++) to.q[32 * n + i] = digit(p[i], n);
  for (int n = 0; n < 5; n++)
    for (int i = 0; i < 16; i++) to.q[160 + 16 * n + i] = digit(p[32 + i], n);
  for (int n = 0; n < 4; n++)
    for (int i = 0; i < 4; i++) to.q[240 + 4 * n + i] = digit(p[48 + i], n);
  set_factors(half_at(p, 52, 54), to);
}

PI_INLINE void open(Type<PI_Q2_K>, const uint8_t* p, Opened& to) {
  open_pairs(p + 16, 0, to.q);
  const float d = half_at(p, 80, 84), m = half_at(p, 82, 84);
  for (int j = 0; j < HALVES; j++) {
    to.factor[j] = d * (float)(p[j] & 15);
    to.minimum[j] = -m * (float)(p[j] >> 4);
  }
}

PI_INLINE void open(Type<PI_Q3_K>, const uint8_t* p, Opened& to) {
  for (int h = 0; h < 2; h++)
    for (int j = 0; j < 4; j++)
      for (int i = 0; i < 32; i++)
        to.q[128 * h + 32 * j + i] = (int8_t)(((p[32 + 32 * h + i] >> 2 * j & 3) | (p[i] >> (4 * h + j) & 1) << 2) - 4);
  const float d = half_at(p, 108, 110);
  const uint8_t* const s = p + 96;
  for (int j = 0; j < HALVES; j++)
    to.factor[j] = d * (float)(((s[j % 8] >> j / 8 * 4 & 15) | (s[8 + j % 4] >> j / 4 * 2 & 3) << 4) - 32);
}

// The scales and minima of 32 elements each, of 6 bits.
PI_INLINE void open_scales(const uint8_t* p, Opened& to) {
  const float d = half_at(p, 0, 144), m = half_at(p, 2, 144);
  const uint8_t* const s = p + 4;
  for (int j = 0; j < 8; j++) {
    const int scale = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | s[j - 4] >> 6 << 4;
    const int minimum = j < 4 ? s[j + 4] & 63 : s[j + 4] >> 4 | s[j] >> 6 << 4;
    to.factor[2 * j] = to.factor[2 * j + 1] = d * (float)scale;
    to.minimum[2 * j] = to.minimum[2 * j + 1] = -m * (float)minimum;
  }
}

PI_INLINE void open(Type<PI_Q4_K>, const uint8_t* p, Opened& to) {
  for (int j = 0; j < 4; j++)
    for (int i = 0; i < 32; i++) {
      to.q[64 * j + i] = (int8_t)(p[16 + 32 * j + i] & 15);
      to.q[64 * j + 32 + i] = (int8_t)(p[16 + 32 * j + i] >> 4);
    }
  open_scales(p, to);
}

PI_INLINE void open(Type<PI_Q5_K>, const uint8_t* p, Opened& to) {
  for (int j = 0; j < 4; j++)
    for (int i = 0; i < 32; i++) {
      const uint8_t low = p[48 + 32 * j + i], high = p[16 + i];
      to.q[64 * j + i] = (int8_t)((low & 15) | (high >> 2 * j & 1) << 4);
      to.q[64 * j + 32 + i] = (int8_t)(low >> 4 | (high >> (2 * j + 1) & 1) << 4);
    }
  open_scales(p, to);
}

PI_INLINE void open(Type<PI_Q6_K>, const uint8_t* p, Opened& to) {
  for (int h = 0; h < 2; h++)
    for (int part = 0; part < 4; part++)
      for (int i = 0; i < 32; i++) {
        const int low = p[64 * h + part % 2 * 32 + i] >> part / 2 * 4 & 15, two = p[128 + 32 * h + i] >> 2 * part & 3;
        to.q[128 * h + 32 * part + i] = (int8_t)((low | two << 4) - 32);
      }
  const float d = half_at(p, 208, 210);
  for (int j = 0; j < HALVES; j++) to.factor[j] = d * (float)(int8_t)p[192 + j];
}

PI_INLINE void open(Type<PI_IQ4_XS>, const uint8_t* p, Opened& to) {
  for (int j = 0; j < 8; j++)
    for (int i = 0; i < 16; i++) {
      to.q[32 * j + i] = (int8_t)(p[8 + 16 * j + i] & 15);
      to.q[32 * j + 16 + i] = (int8_t)(p[8 + 16 * j + i] >> 4);
    }
  look_up(PI_IQ4_ENTRIES, to.q);
  const float d = half_at(p, 0, 136);
  const int high = pair(p + 2);
  for (int j = 0; j < 8; j++)
    to.factor[2 * j] = to.factor[2 * j + 1] = d * (float)((nibble(p + 4, j) | (high >> 2 * j & 3) << 4) - 32);
}

// Numbers s of four bits that stand for (2 s + 1) d, of 32 elements each or of 16.
PI_INLINE void open_odd(const uint8_t* s, int step, float d, Opened& to) {
  for (int j = 0; j < HALVES; j++) to.factor[j] = d * (float)(2 * nibble(s, j / step) + 1);
}

PI_INLINE void open(Type<PI_IQ3_S>, const uint8_t* p, Opened& to) {
  uint32_t entries[64];
  uint8_t signs[32];
  for (int i = 0; i < 64; i++) entries[i] = PI_ENTRIES_IQ3_S.of[p[2 + i] | (p[66 + i / 8] >> i % 8 & 1) << 8];
  memcpy(signs, p + 74, 32);
  mirror(entries, signs, to.q);
  open_odd(p + 106, 2, half_at(p, 0, 110), to);
}

PI_INLINE void open(Type<PI_IQ3_XXS>, const uint8_t* p, Opened& to) {
  uint32_t entries[64];
  uint8_t signs[32];
  const float d = half_at(p, 0, 98) * 0.5f;  // entries are halves of the grid's
  for (int i = 0; i < 64; i++) entries[i] = PI_ENTRIES_IQ3_XXS.of[p[2 + i]];
  for (int j = 0; j < 8; j++) {
    const uint32_t bits = word(p + 66 + 4 * j);
    for (int n = 0; n < 4; n++) signs[4 * j + n] = even(bits >> 7 * n);
    to.factor[2 * j] = to.factor[2 * j + 1] = d * (float)(2 * (bits >> 28) + 1);
  }
  mirror(entries, signs, to.q);
}

PI_INLINE void open(Type<PI_IQ2_XXS>, const uint8_t* p, Opened& to) {
  uint32_t entries[32];
  uint8_t signs[32];
  const float d = half_at(p, 0, 66) * 0.125f;
  for (int j = 0; j < 8; j++) {
    const uint32_t bits = word(p + 6 + 8 * j);
    for (int n = 0; n < 4; n++) {
      entries[4 * j + n] = PI_ENTRIES_IQ2_XXS.of[p[2 + 8 * j + n]];
      signs[4 * j + n] = even(bits >> 7 * n);
    }
    to.factor[2 * j] = to.factor[2 * j + 1] = d * (float)(2 * (bits >> 28) + 1);
  }
  spread(entries, signs, to.q);
  look_up(IQ2_SIGNED, to.q);
}

PI_INLINE void open(Type<PI_IQ2_XS>, const uint8_t* p, Opened& to) {
  uint32_t entries[32];
  uint8_t signs[32];
  for (int i = 0; i < 32; i++) {
    const int entry_and_signs = pair(p + 2 + 2 * i);
    entries[i] = PI_ENTRIES_IQ2_XS.of[entry_and_signs & 511];
    signs[i] = even((uint32_t)entry_and_signs >> 9);
  }
  spread(entries, signs, to.q);
  look_up(IQ2_SIGNED, to.q);
  open_odd(p + 66, 1, half_at(p, 0, 74) * 0.125f, to);
}

PI_INLINE void open(Type<PI_IQ2_S>, const uint8_t* p, Opened& to) {
  uint32_t entries[32];
  uint8_t signs[32];
  for (int i = 0; i < 32; i++) entries[i] = PI_ENTRIES_IQ2_S.of[p[2 + i] | (p[66 + i / 4] >> i % 4 * 2 & 3) << 8];
  memcpy(signs, p + 34, 32);
  spread(entries, signs, to.q);
  look_up(IQ2_SIGNED, to.q);
  open_odd(p + 74, 1, half_at(p, 0, 82) * 0.125f, to);
}

PI_INLINE void open(Type<PI_IQ1_S>, const uint8_t* p, Opened& to) {
  uint32_t entries[32];
  uint8_t down[32];
  const float d = half_at(p, 0, 50) * 0.125f;
  for (int j = 0; j < 8; j++) {
    const int high = pair(p + 34 + 2 * j);
    for (int n = 0; n < 4; n++) {
      entries[4 * j + n] = PI_ENTRIES_IQ1.of[p[2 + 4 * j + n] | (high >> 3 * n & 7) << 8];
      down[4 * j + n] = (uint8_t)-(high >> 15);
    }
    to.factor[2 * j] = to.factor[2 * j + 1] = d * (float)(2 * (high >> 12 & 7) + 1);
  }
  spread(entries, down, to.q);
  look_up(IQ1_MOVED, to.q);
}

PI_INLINE void open(Type<PI_IQ1_M>, const uint8_t* p, Opened& to) {
  uint32_t entries[32];
  uint8_t down[32];
  for (int i = 0; i < 32; i++) {
    const int high = nibble(p + 32, i);
    entries[i] = PI_ENTRIES_IQ1.of[p[i] | (high & 7) << 8];
    down[i] = (uint8_t)-(high >> 3);
  }
  spread(entries, down, to.q);
  look_up(IQ1_MOVED, to.q);
  const uint8_t d_bytes[2] = {(uint8_t)(p[49] >> 4 | (p[51] & 0xf0)), (uint8_t)(p[53] >> 4 | (p[55] & 0xf0))};
  const float d = half_of(d_bytes) * 0.125f;
  for (int j = 0; j < HALVES; j++) to.factor[j] = d * (float)(2 * (pair(p + 48 + j / 4 * 2) >> j % 4 * 3 & 7) + 1);
}

// Adds block b of token t.
template <int TYPE>
PI_INLINE f32x16 add(const Opened& w, const float* factors, const PiActs* x, int64_t t, int64_t b, f32x16 sum) {
  constexpr int SIZE = PI_TYPES[TYPE].block;
  const int8_t* const q = x->q + t * x->k + b * SIZE;
  const float* const d = x->d + (t * x->k + b * SIZE) / 32;
#pragma GCC unroll 4
  for (int v = 0; v < SIZE / 64; v++) {
    const u8x64 of_x = b_load(q + 64 * v);
    const i32x16 start = dot_vs_start(dot_vu(i_set(0), b_set(1), of_x));
    const f32x16 scale = f_keep_below(f_set(d[2 * v]), 8, f_set(d[2 * v + 1]));
    const f32x16 products = f_mul(i_float(dot_vs(start, b_load(w.q + 64 * v), of_x)), scale);
    sum = f_fma(products, f_load(factors + 16 * v), sum);
  }
  if constexpr (PI_TYPES[TYPE].m >= 0) {
    const int16_t* const s = x->s + (t * x->k + b * SIZE) / 16;
    float sums[HALVES];
    for (int j = 0; j < HALVES; j++) sums[j] = d[j / 2] * (float)s[j];
    sum = f_fma(f_load(w.minimum), f_load(sums), sum);
  }
  return sum;
}

// A row against n tokens: out[i * ldo].
template <int TYPE, class TokenOf>
PI_INLINE void multiply(const Rows<1>& w, const PiActs* x, int64_t n, const TokenOf& token_of, float* out,
                        int64_t ldo) {
  constexpr int BYTES = PI_TYPES[TYPE].bytes, SIZE = PI_TYPES[TYPE].block;
  f32x16 sums[PI_NEURON_TOKENS], sum = f_zero();
  for (int64_t i = 0; i < n && n > 1; i++) sums[i] = sum;
  int64_t asked = 0;
  for (int64_t b = 0; b < x->k / SIZE; b++) {
    for (; asked < (b + 1) * BYTES; asked += 64) w.ask(asked);
    Opened opened;
    open(Type<TYPE>{}, w.now[0] + b * BYTES, opened);
    float factors[SIZE / 4];
    for (int j = 0; j < SIZE / 16; j++)
      for (int l = 0; l < 4; l++) factors[4 * j + l] = opened.factor[j];
    if (n == 1) sum = add<TYPE>(opened, factors, x, token_of(0), b, sum);
    else
      for (int64_t i = 0; i < n; i++) sums[i] = add<TYPE>(opened, factors, x, token_of(i), b, sums[i]);
  }
  if (n == 1) out[0] = f_sum(sum);
  else
    for (int64_t i = 0; i < n; i++) out[i * ldo] = f_sum(sums[i]);
}

enum { AHEAD = 2 };  // rows that are requested before they are read

template <int TYPE>
void dots(const PiRows* all, const int32_t* index, int64_t n, const PiActs* x, int64_t tokens, float* out,
          int64_t ldo) {
  const auto token_of = [](int64_t i) __attribute__((always_inline)) { return i; };
  for (int64_t j = 0; j < n; j++)
    multiply<TYPE>(Rows<1>(all, index + j, n - j, AHEAD), x, tokens, token_of, out + j, ldo);
}

template <int TYPE>
void dot_pairs(const PiRows* all, const PiPair* pairs, int64_t n, const PiActs* x, float* out) {
  for (int64_t j = 0, end; j < n; j = end) {
    for (end = j + 1; end < n && pairs[end].neuron == pairs[j].neuron && end - j < PI_NEURON_TOKENS;) end++;
    const auto token_of = [&](int64_t i) __attribute__((always_inline)) { return (int64_t)pairs[j + i].token; };
    multiply<TYPE>(Rows<1>(all, pairs + j, n - j, end - j), x, end - j, token_of, out + j, 1);
  }
}

template <int TYPE>
void use(PiKernels* to) {
  if constexpr ((PI_TYPES[TYPE].rows & PI_ROWS_DOT) != 0 && pi_as_stored(TYPE)) {
    to->neurons.dots[TYPE] = dots<TYPE>;
    to->neurons.dot_pairs[TYPE] = dot_pairs<TYPE>;
  }
}

}  // namespace

PI_KERNELS(neuron_dots_stored) {
#define PI_USE(name, ...) use<PI_##name>(to);
  POWERINFER_TYPES(PI_USE)
#undef PI_USE
}
