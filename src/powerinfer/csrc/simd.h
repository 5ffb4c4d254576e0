// Sixteen lanes on every machine: one zmm, two ymm, four NEON registers or a plain array. Included by ISA files
// only; everything is static, because an inline function shared with common code may be emitted with instructions
// that an older CPU lacks.
#pragma once
#include <stdint.h>
#include <string.h>

#define PI_INLINE static inline __attribute__((always_inline))
#define PI_INLINE_MEMBER inline __attribute__((always_inline))

// Powers of 3.
static constexpr int16_t PI_POWERS[5] = {1, 3, 9, 27, 81};

#if defined(__AVX512F__)
#include <immintrin.h>
// Register tiles: tokens and panels of the quantised kernels, of those on widened codes, where halves have factors fewer,
// faster from WIDE_FROM tokens on, and of the float ones; query rows of attention. STREAMS: panels, or rows of neurons,
// read at once for one token.
enum {
  TILE_Q = 8,
  TILE_Q_PANELS = 2,
  TILE_WIDE = 6,
  TILE_HALVES = 5,
  TILE_WIDE_PANELS = 2,
  WIDE_FROM = 24,
  TILE_F = 12,
  TILE_F_PANELS = 2,
  TILE_A = 12,
  STREAMS = 4
};
typedef __m512 f32x16;
typedef __m512i i32x16;
typedef __m512i u8x64;
PI_INLINE f32x16 f_zero() { return _mm512_setzero_ps(); }
PI_INLINE f32x16 f_set(float x) { return _mm512_set1_ps(x); }
PI_INLINE f32x16 f_load(const float* p) { return _mm512_loadu_ps(p); }
PI_INLINE void f_store(float* p, f32x16 v) { _mm512_storeu_ps(p, v); }
PI_INLINE f32x16 f_add(f32x16 a, f32x16 b) { return _mm512_add_ps(a, b); }
PI_INLINE f32x16 f_sub(f32x16 a, f32x16 b) { return _mm512_sub_ps(a, b); }
PI_INLINE f32x16 f_mul(f32x16 a, f32x16 b) { return _mm512_mul_ps(a, b); }
PI_INLINE f32x16 f_div(f32x16 a, f32x16 b) { return _mm512_div_ps(a, b); }
PI_INLINE f32x16 f_fma(f32x16 a, f32x16 b, f32x16 c) { return _mm512_fmadd_ps(a, b, c); }
PI_INLINE f32x16 f_max(f32x16 a, f32x16 b) { return _mm512_max_ps(a, b); }
PI_INLINE f32x16 f_min(f32x16 a, f32x16 b) { return _mm512_min_ps(a, b); }
PI_INLINE f32x16 f_abs(f32x16 a) { return _mm512_abs_ps(a); }
// Zero in the lanes that are at most t, x in the others: NaN stays.
PI_INLINE f32x16 f_above(f32x16 x, f32x16 t) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, t, _CMP_NLE_UQ), x); }
// a in the lanes where x is above zero, b in the others, and where x is NaN.
PI_INLINE f32x16 f_choose(f32x16 x, f32x16 a, f32x16 b) {
  return _mm512_mask_mov_ps(b, _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_GT_OQ), a);
}
PI_INLINE float f_sum(f32x16 a) { return _mm512_reduce_add_ps(a); }
PI_INLINE float f_hmax(f32x16 a) { return _mm512_reduce_max_ps(a); }
PI_INLINE f32x16 f_load_f16(const void* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
PI_INLINE void f_store_f16(void* p, f32x16 v) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
// Lanes below n keep `v`, the others become `other`.
PI_INLINE f32x16 f_keep_below(f32x16 v, int n, f32x16 other) {
  return _mm512_mask_mov_ps(other, n >= 16 ? 0xffff : n <= 0 ? 0 : (1u << n) - 1, v);
}
PI_INLINE f32x16 f_pow2(i32x16 n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23));
}
PI_INLINE f32x16 f_bits(i32x16 a) { return _mm512_castsi512_ps(a); }
PI_INLINE i32x16 i_set(int32_t x) { return _mm512_set1_epi32(x); }
PI_INLINE i32x16 i_add(i32x16 a, i32x16 b) { return _mm512_add_epi32(a, b); }
PI_INLINE int32_t i_sum(i32x16 a) { return _mm512_reduce_add_epi32(a); }
PI_INLINE f32x16 i_float(i32x16 a) { return _mm512_cvtepi32_ps(a); }
PI_INLINE i32x16 i_round(f32x16 a) { return _mm512_cvtps_epi32(a); }
PI_INLINE i32x16 i_load_s8(const void* p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)); }
PI_INLINE i32x16 i_load_u8(const void* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
PI_INLINE void i_store_s8(void* p, i32x16 v) { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(v)); }
PI_INLINE f32x16 f_load_bf16(const void* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
// 32 bfloat16 as the even and the odd elements of 16 pairs.
PI_INLINE void f_load_pairs(const void* p, f32x16* even, f32x16* odd) {
  __m512i v = _mm512_loadu_si512(p);
  *even = _mm512_castsi512_ps(_mm512_slli_epi32(v, 16));
  *odd = _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32((int)0xffff0000)));
}
PI_INLINE u8x64 b_load(const void* p) { return _mm512_loadu_si512(p); }
PI_INLINE void b_store(void* p, u8x64 v) { _mm512_storeu_si512(p, v); }
PI_INLINE u8x64 b_set(int x) { return _mm512_set1_epi8((char)x); }
PI_INLINE u8x64 b_and(u8x64 a, u8x64 b) { return _mm512_and_si512(a, b); }
PI_INLINE u8x64 b_or(u8x64 a, u8x64 b) { return _mm512_or_si512(a, b); }
PI_INLINE u8x64 b_sub(u8x64 a, u8x64 b) { return _mm512_sub_epi8(a, b); }
// Entries of a table of 16, aligned to as many bytes, by numbers below 16.
PI_INLINE u8x64 b_lookup(const int8_t* table, u8x64 i) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)table)), i);
}
// Entries of a table by numbers in the low halves of bytes; the others are below 8.
PI_INLINE u8x64 b_lookup_low(const int8_t* table, u8x64 i) { return b_lookup(table, i); }
PI_INLINE u8x64 b_bits(i32x16 a) { return a; }
// Words of a table by their places in it.
PI_INLINE u8x64 b_gather(const uint32_t* table, i32x16 i) { return _mm512_i32gather_epi32(i, table, 4); }
// `about` plus the bytes of `a`, less these where `bits` have this bit.
PI_INLINE u8x64 b_mirrored(u8x64 a, u8x64 bits, int bit, int about) {
  const __m512i middle = b_set(about);
  return _mm512_mask_sub_epi8(_mm512_add_epi8(middle, a), _mm512_test_epi8_mask(bits, b_set(bit)), middle, a);
}
// Bits of each lane from bit n on.
PI_INLINE i32x16 i_field(i32x16 a, int n, int mask) {
  return _mm512_and_si512(_mm512_srl_epi32(a, _mm_cvtsi32_si128(n)), _mm512_set1_epi32(mask));
}
// Shifts work on 16 bits: callers mask away what crosses from the neighbouring byte.
PI_INLINE u8x64 b_shr(u8x64 a, int n) { return _mm512_srl_epi16(a, _mm_cvtsi32_si128(n)); }
template <int n>
PI_INLINE u8x64 b_shl(u8x64 a) {
  return _mm512_slli_epi16(a, n);
}
template <int n>
PI_INLINE u8x64 b_shr(u8x64 a) {
  return _mm512_srli_epi16(a, n);
}
// Digit n of five in base 3, the first one highest, of bytes that have them as a fraction of 256.
PI_INLINE u8x64 b_digit(u8x64 x, int n) {
  const __m512i by = _mm512_set1_epi16(PI_POWERS[n]), three = _mm512_set1_epi16(3);
  const __m512i even = _mm512_mulhi_epu16(_mm512_mullo_epi16(x, _mm512_slli_epi16(by, 8)), three);
  const __m512i high = _mm512_and_si512(x, _mm512_set1_epi16((short)0xff00));
  const __m512i odd = _mm512_mulhi_epu16(_mm512_mullo_epi16(high, by), three);
  return _mm512_or_si512(even, _mm512_slli_epi16(odd, 8));
}
PI_INLINE i32x16 dot_u(i32x16 acc, u8x64 w, int32_t a) { return _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(a)); }
// The unit multiplies unsigned by signed: a signed weight is moved up by 128, and dot_s_start takes that out again.
PI_INLINE i32x16 dot_s(i32x16 acc, u8x64 w, int32_t a) {
  return _mm512_dpbusd_epi32(acc, _mm512_xor_si512(w, _mm512_set1_epi8((char)0x80)), _mm512_set1_epi32(a));
}
PI_INLINE i32x16 dot_s_start(int32_t sum) { return _mm512_set1_epi32(-128 * sum); }
// How much is added to signed codes to make them such that dot_u takes.
static constexpr int SIGNED_ABOVE = 128;
// Low bytes of products of bytes.
PI_INLINE u8x64 b_times(u8x64 a, u8x64 b) {
  const __m512i even = _mm512_set1_epi16(0xff);
  const __m512i odd = _mm512_mullo_epi16(_mm512_srli_epi16(a, 8), _mm512_andnot_si512(even, b));
  return _mm512_or_si512(_mm512_and_si512(_mm512_mullo_epi16(a, b), even), odd);
}
// Sums of four products of neighbouring bytes, both sides vectors: codes of 0..15, and signed codes.
PI_INLINE i32x16 dot_vu(i32x16 acc, u8x64 w, u8x64 q) { return _mm512_dpbusd_epi32(acc, w, q); }
PI_INLINE i32x16 dot_vs(i32x16 acc, u8x64 w, u8x64 q) {
  return _mm512_dpbusd_epi32(acc, _mm512_xor_si512(w, _mm512_set1_epi8((char)0x80)), q);
}
PI_INLINE i32x16 dot_vs_start(i32x16 sum) {
  return _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_slli_epi32(sum, 7));
}
PI_INLINE i32x16 i_load(const void* p) { return _mm512_loadu_si512(p); }
PI_INLINE void i_store(void* p, i32x16 v) { _mm512_storeu_si512(p, v); }
PI_INLINE i32x16 i_sub(i32x16 a, i32x16 b) { return _mm512_sub_epi32(a, b); }
// Byte j of word l of z[i] is byte 16 (l / 4) + 4 i + l % 4 of row j.
PI_INLINE void b_quads(u8x64 a, u8x64 b, u8x64 c, u8x64 d, u8x64 (&z)[4]) {
  const __m512i ab = _mm512_unpacklo_epi8(a, b), AB = _mm512_unpackhi_epi8(a, b), cd = _mm512_unpacklo_epi8(c, d),
                CD = _mm512_unpackhi_epi8(c, d);
  z[0] = _mm512_unpacklo_epi16(ab, cd);
  z[1] = _mm512_unpackhi_epi16(ab, cd);
  z[2] = _mm512_unpacklo_epi16(AB, CD);
  z[3] = _mm512_unpackhi_epi16(AB, CD);
}
PI_INLINE i32x16 i_and(i32x16 a, i32x16 b) { return _mm512_and_si512(a, b); }
template <int n>
PI_INLINE i32x16 i_shr(i32x16 a) {
  return _mm512_srli_epi32(a, n);
}
template <int n>
PI_INLINE i32x16 i_shl(i32x16 a) {
  return _mm512_slli_epi32(a, n);
}
// Bit i: not x[i] <= y[i], so NaN counts.
PI_INLINE uint32_t f_not_le(f32x16 x, f32x16 y) { return _mm512_cmp_ps_mask(x, y, _CMP_NLE_UQ); }
// Nibble s of each lane's 32 bits, less 8.
template <int s>
PI_INLINE f32x16 f_code(u8x64 v) {
  const __m512 values = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
  return _mm512_permutexvar_ps(_mm512_srli_epi32(v, 4 * s), values);  // the index is the low four bits
}
#if defined(__AVX512BF16__)
#define PI_BF16_UNIT 1
PI_INLINE f32x16 dot_bf16(f32x16 acc, const void* w, uint32_t a) {
  return _mm512_dpbf16_ps(acc, (__m512bh)_mm512_loadu_si512(w), (__m512bh)_mm512_set1_epi32((int)a));
}
PI_INLINE f32x16 dot_vbf16(f32x16 acc, const void* w, const void* x) {
  return _mm512_dpbf16_ps(acc, (__m512bh)_mm512_loadu_si512(w), (__m512bh)_mm512_loadu_si512(x));
}
#endif

#elif defined(__AVX2__)
#include <immintrin.h>
// Weights are widened in pieces that stay in the L1 cache while many tokens are multiplied with them, WIDE_FROM or more,
// of F16 FLOATS_FROM: PIECE_BLOCKS of a panel, by tiles of TILE_PIECE tokens.
#define PI_PIECES 1
enum {
  TILE_Q = 2,
  TILE_Q_PANELS = 1,
  WIDE_FROM = 3,
  TILE_PIECE = 6,
  PIECE_BLOCKS = 32,
  FLOATS_FROM = 20,
  TILE_F = 6,
  TILE_F_PANELS = 1,
  TILE_A = 3,
  STREAMS = 4
};
struct f32x16 {
  __m256 a, b;
};
struct i32x16 {
  __m256i a, b;
};
struct u8x64 {
  __m256i a, b;
};
#define F2(op) \
  f32x16 { op(x.a, y.a), op(x.b, y.b) }
PI_INLINE f32x16 f_zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
PI_INLINE f32x16 f_set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
PI_INLINE f32x16 f_load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
PI_INLINE void f_store(float* p, f32x16 v) {
  _mm256_storeu_ps(p, v.a);
  _mm256_storeu_ps(p + 8, v.b);
}
PI_INLINE f32x16 f_add(f32x16 x, f32x16 y) { return F2(_mm256_add_ps); }
PI_INLINE f32x16 f_sub(f32x16 x, f32x16 y) { return F2(_mm256_sub_ps); }
PI_INLINE f32x16 f_mul(f32x16 x, f32x16 y) { return F2(_mm256_mul_ps); }
PI_INLINE f32x16 f_div(f32x16 x, f32x16 y) { return F2(_mm256_div_ps); }
PI_INLINE f32x16 f_max(f32x16 x, f32x16 y) { return F2(_mm256_max_ps); }
PI_INLINE f32x16 f_min(f32x16 x, f32x16 y) { return F2(_mm256_min_ps); }
PI_INLINE f32x16 f_fma(f32x16 x, f32x16 y, f32x16 z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
PI_INLINE f32x16 f_above(f32x16 x, f32x16 t) {
  return {_mm256_and_ps(x.a, _mm256_cmp_ps(x.a, t.a, _CMP_NLE_UQ)),
          _mm256_and_ps(x.b, _mm256_cmp_ps(x.b, t.b, _CMP_NLE_UQ))};
}
PI_INLINE f32x16 f_choose(f32x16 x, f32x16 a, f32x16 b) {
  const __m256 zero = _mm256_setzero_ps();
  return {_mm256_blendv_ps(b.a, a.a, _mm256_cmp_ps(x.a, zero, _CMP_GT_OQ)),
          _mm256_blendv_ps(b.b, a.b, _mm256_cmp_ps(x.b, zero, _CMP_GT_OQ))};
}
PI_INLINE f32x16 f_abs(f32x16 x) {
  __m256 s = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(s, x.a), _mm256_andnot_ps(s, x.b)};
}
PI_INLINE float f_sum(f32x16 x) {
  __m256 s = _mm256_add_ps(x.a, x.b);
  __m128 r = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  r = _mm_add_ps(r, _mm_movehl_ps(r, r));
  return _mm_cvtss_f32(_mm_add_ss(r, _mm_movehdup_ps(r)));
}
PI_INLINE float f_hmax(f32x16 x) {
  __m256 s = _mm256_max_ps(x.a, x.b);
  __m128 r = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  r = _mm_max_ps(r, _mm_movehl_ps(r, r));
  return _mm_cvtss_f32(_mm_max_ss(r, _mm_movehdup_ps(r)));
}
PI_INLINE f32x16 f_load_f16(const void* p) {
  const __m128i* v = (const __m128i*)p;
  return {_mm256_cvtph_ps(_mm_loadu_si128(v)), _mm256_cvtph_ps(_mm_loadu_si128(v + 1))};
}
PI_INLINE void f_store_f16(void* p, f32x16 v) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(v.a, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128((__m128i*)p + 1, _mm256_cvtps_ph(v.b, _MM_FROUND_TO_NEAREST_INT));
}
PI_INLINE f32x16 f_keep_below(f32x16 v, int n, f32x16 other) {
  __m256i i = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), m = _mm256_set1_epi32(n);
  __m256 lo = _mm256_castsi256_ps(_mm256_cmpgt_epi32(m, i));
  __m256 hi = _mm256_castsi256_ps(_mm256_cmpgt_epi32(m, _mm256_add_epi32(i, _mm256_set1_epi32(8))));
  return {_mm256_blendv_ps(other.a, v.a, lo), _mm256_blendv_ps(other.b, v.b, hi)};
}
PI_INLINE f32x16 f_pow2(i32x16 n) {
  __m256i k = _mm256_set1_epi32(127);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.a, k), 23)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.b, k), 23))};
}
PI_INLINE f32x16 f_bits(i32x16 x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
PI_INLINE i32x16 i_set(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
PI_INLINE i32x16 i_add(i32x16 x, i32x16 y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
PI_INLINE int32_t i_sum(i32x16 x) {
  __m256i s = _mm256_add_epi32(x.a, x.b);
  __m128i r = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
  r = _mm_add_epi32(r, _mm_shuffle_epi32(r, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(r, _mm_shuffle_epi32(r, 0xb1)));
}
PI_INLINE f32x16 i_float(i32x16 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
PI_INLINE i32x16 i_round(f32x16 x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
PI_INLINE i32x16 i_load_s8(const void* p) {
  __m128i v = _mm_loadu_si128((const __m128i*)p);
  return {_mm256_cvtepi8_epi32(v), _mm256_cvtepi8_epi32(_mm_unpackhi_epi64(v, v))};
}
PI_INLINE i32x16 i_load_u8(const void* p) {
  __m128i v = _mm_loadu_si128((const __m128i*)p);
  return {_mm256_cvtepu8_epi32(v), _mm256_cvtepu8_epi32(_mm_unpackhi_epi64(v, v))};
}
PI_INLINE void i_store_s8(void* p, i32x16 x) {
  __m256i s = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1)));
}
PI_INLINE f32x16 f_load_bf16(const void* p) {
  const __m128i* v = (const __m128i*)p;
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(v)), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(v + 1)), 16))};
}
PI_INLINE void f_load_pairs(const void* p, f32x16* even, f32x16* odd) {
  const __m256i* v = (const __m256i*)p;
  __m256i x = _mm256_loadu_si256(v), y = _mm256_loadu_si256(v + 1), m = _mm256_set1_epi32((int)0xffff0000);
  *even = {_mm256_castsi256_ps(_mm256_slli_epi32(x, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(y, 16))};
  *odd = {_mm256_castsi256_ps(_mm256_and_si256(x, m)), _mm256_castsi256_ps(_mm256_and_si256(y, m))};
}
PI_INLINE u8x64 b_load(const void* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
PI_INLINE void b_store(void* p, u8x64 x) {
  _mm256_storeu_si256((__m256i*)p, x.a);
  _mm256_storeu_si256((__m256i*)p + 1, x.b);
}
PI_INLINE u8x64 b_sub(u8x64 x, u8x64 y) { return {_mm256_sub_epi8(x.a, y.a), _mm256_sub_epi8(x.b, y.b)}; }
PI_INLINE u8x64 b_set(int x) { return {_mm256_set1_epi8((char)x), _mm256_set1_epi8((char)x)}; }
PI_INLINE u8x64 b_lookup(const int8_t* table, u8x64 i) {
  const __m256i t = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)table));
  return {_mm256_shuffle_epi8(t, i.a), _mm256_shuffle_epi8(t, i.b)};
}
PI_INLINE u8x64 b_and(u8x64 x, u8x64 y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
PI_INLINE u8x64 b_or(u8x64 x, u8x64 y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
PI_INLINE u8x64 b_lookup_low(const int8_t* table, u8x64 i) { return b_lookup(table, i); }
PI_INLINE u8x64 b_bits(i32x16 x) { return {x.a, x.b}; }
PI_INLINE u8x64 b_gather(const uint32_t* table, i32x16 i) {
  return {_mm256_i32gather_epi32((const int*)table, i.a, 4), _mm256_i32gather_epi32((const int*)table, i.b, 4)};
}
PI_INLINE __m256i mirrored(__m256i a, __m256i bits, __m256i bit, __m256i about) {
  const __m256i m = _mm256_cmpeq_epi8(_mm256_and_si256(bits, bit), bit);
  return _mm256_add_epi8(_mm256_sub_epi8(_mm256_xor_si256(a, m), m), about);
}
PI_INLINE u8x64 b_mirrored(u8x64 x, u8x64 bits, int bit, int about) {
  const __m256i set = _mm256_set1_epi8((char)bit), middle = _mm256_set1_epi8((char)about);
  return {mirrored(x.a, bits.a, set, middle), mirrored(x.b, bits.b, set, middle)};
}
// Activations take the signs of codes, bytes of 1 and -1: cheaper for few tokens than codes that are mirrored.
#define PI_SIGNS 1
PI_INLINE u8x64 b_signed(int32_t a, u8x64 signs) {
  const __m256i x = _mm256_set1_epi32(a);
  return {_mm256_sign_epi8(x, signs.a), _mm256_sign_epi8(x, signs.b)};
}
PI_INLINE i32x16 i_field(i32x16 x, int n, int mask) {
  const __m128i by = _mm_cvtsi32_si128(n);
  const __m256i m = _mm256_set1_epi32(mask);
  return {_mm256_and_si256(_mm256_srl_epi32(x.a, by), m), _mm256_and_si256(_mm256_srl_epi32(x.b, by), m)};
}
PI_INLINE u8x64 b_shr(u8x64 x, int n) {
  __m128i c = _mm_cvtsi32_si128(n);
  return {_mm256_srl_epi16(x.a, c), _mm256_srl_epi16(x.b, c)};
}
template <int n>
PI_INLINE u8x64 b_shl(u8x64 x) {
  return {_mm256_slli_epi16(x.a, n), _mm256_slli_epi16(x.b, n)};
}
template <int n>
PI_INLINE u8x64 b_shr(u8x64 x) {
  return {_mm256_srli_epi16(x.a, n), _mm256_srli_epi16(x.b, n)};
}
// Digit n of five in base 3, the first one highest, of bytes that have them as a fraction of 256.
PI_INLINE __m256i b_digit(__m256i x, int n) {
  const __m256i by = _mm256_set1_epi16(PI_POWERS[n]), three = _mm256_set1_epi16(3);
  const __m256i even = _mm256_mulhi_epu16(_mm256_mullo_epi16(x, _mm256_slli_epi16(by, 8)), three);
  const __m256i high = _mm256_and_si256(x, _mm256_set1_epi16((short)0xff00));
  const __m256i odd = _mm256_mulhi_epu16(_mm256_mullo_epi16(high, by), three);
  return _mm256_or_si256(even, _mm256_slli_epi16(odd, 8));
}
PI_INLINE u8x64 b_digit(u8x64 x, int n) { return {b_digit(x.a, n), b_digit(x.b, n)}; }
PI_INLINE __m256i b_times(__m256i x, __m256i y) {
  const __m256i even = _mm256_set1_epi16(0xff);
  const __m256i odd = _mm256_mullo_epi16(_mm256_srli_epi16(x, 8), _mm256_andnot_si256(even, y));
  return _mm256_or_si256(_mm256_and_si256(_mm256_mullo_epi16(x, y), even), odd);
}
PI_INLINE u8x64 b_times(u8x64 x, u8x64 y) { return {b_times(x.a, y.a), b_times(x.b, y.b)}; }
static constexpr int SIGNED_ABOVE = 128;
#if defined(__AVXVNNI__)
PI_INLINE i32x16 dot_u(i32x16 c, u8x64 w, int32_t a) {
  __m256i x = _mm256_set1_epi32(a);
  return {_mm256_dpbusd_avx_epi32(c.a, w.a, x), _mm256_dpbusd_avx_epi32(c.b, w.b, x)};
}
PI_INLINE i32x16 dot_s(i32x16 c, u8x64 w, int32_t a) {
  __m256i m = _mm256_set1_epi8((char)0x80);
  return dot_u(c, {_mm256_xor_si256(w.a, m), _mm256_xor_si256(w.b, m)}, a);
}
PI_INLINE i32x16 dot_s_start(int32_t sum) { return i_set(-128 * sum); }
PI_INLINE i32x16 dot_vu(i32x16 c, u8x64 w, u8x64 q) {
  return {_mm256_dpbusd_avx_epi32(c.a, w.a, q.a), _mm256_dpbusd_avx_epi32(c.b, w.b, q.b)};
}
#else
// maddubs saturates at 2^15: codes of up to 6 bits (2 * 63 * 127) and |w| <= 128 against |a| <= 127 stay below.
PI_INLINE __m256i dot4(__m256i c, __m256i u, __m256i s) {
  return _mm256_add_epi32(c, _mm256_madd_epi16(_mm256_maddubs_epi16(u, s), _mm256_set1_epi16(1)));
}
PI_INLINE i32x16 dot_u(i32x16 c, u8x64 w, int32_t a) {
  __m256i x = _mm256_set1_epi32(a);
  return {dot4(c.a, w.a, x), dot4(c.b, w.b, x)};
}
PI_INLINE i32x16 dot_s(i32x16 c, u8x64 w, int32_t a) {
  __m256i x = _mm256_set1_epi32(a);
  return {dot4(c.a, _mm256_abs_epi8(w.a), _mm256_sign_epi8(x, w.a)),
          dot4(c.b, _mm256_abs_epi8(w.b), _mm256_sign_epi8(x, w.b))};
}
PI_INLINE i32x16 dot_s_start(int32_t) { return i_set(0); }
PI_INLINE i32x16 dot_vu(i32x16 c, u8x64 w, u8x64 q) { return {dot4(c.a, w.a, q.a), dot4(c.b, w.b, q.b)}; }
// Sums in 16 bits of the products of neighbouring bytes, which several groups add up before they are widened: so many
// that 2 * depth * 127 * the largest code stays below 2^15.
#define PI_PAIRS 1
constexpr int pairs_depth(int most) { return most <= 16 ? 8 : most <= 32 ? 4 : most <= 64 ? 2 : 1; }
PI_INLINE u8x64 pairs_dot(u8x64 w, u8x64 a) { return {_mm256_maddubs_epi16(w.a, a.a), _mm256_maddubs_epi16(w.b, a.b)}; }
PI_INLINE u8x64 pairs_dot(u8x64 w, int32_t a) {
  __m256i x = _mm256_set1_epi32(a);
  return pairs_dot(w, {x, x});
}
PI_INLINE u8x64 pairs_add(u8x64 x, u8x64 y) {
  u8x64 r = {_mm256_add_epi16(x.a, y.a), _mm256_add_epi16(x.b, y.b)};
  __asm__("" : "+x"(r.a), "+x"(r.b));  // gcc would compute all products first, and then add what no registers hold
  return r;
}
// Signed bytes as words of 16 bits, the even or the odd ones, and the sums of the products of two words.
PI_INLINE __m256i even_words(__m256i x) { return _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8); }
PI_INLINE __m256i odd_words(__m256i x) { return _mm256_srai_epi16(x, 8); }
PI_INLINE u8x64 even_words(u8x64 x) { return {even_words(x.a), even_words(x.b)}; }
PI_INLINE u8x64 odd_words(u8x64 x) { return {odd_words(x.a), odd_words(x.b)}; }
// 32 activations: words of the even ones, then of the odd ones.
PI_INLINE u8x64 words_of(const int8_t* a) {
  const __m256i x = _mm256_loadu_si256((const __m256i*)a);
  return {even_words(x), odd_words(x)};
}
PI_INLINE i32x16 dot_words(i32x16 c, u8x64 w, int32_t a) {
  __m256i x = _mm256_set1_epi32(a);
  i32x16 r = {_mm256_add_epi32(c.a, _mm256_madd_epi16(w.a, x)), _mm256_add_epi32(c.b, _mm256_madd_epi16(w.b, x))};
  __asm__("" : "+x"(r.a), "+x"(r.b));
  return r;
}
PI_INLINE u8x64 pairs_set(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
// What `groups` of activations add where codes are stored `offset` above their value, to be taken out of both halves of
// a word.
template <int groups>
PI_INLINE int32_t pairs_start(const int8_t* a, int offset) {
  const __m128i by = _mm_set1_epi8((char)offset);
  __m128i sum = _mm_maddubs_epi16(by, _mm_loadu_si128((const __m128i*)a));
  if (groups == 8) sum = _mm_add_epi16(sum, _mm_maddubs_epi16(by, _mm_loadu_si128((const __m128i*)a + 1)));
  sum = _mm_add_epi16(sum, _mm_shuffle_epi32(sum, 0x4e));
  sum = _mm_add_epi16(sum, _mm_shuffle_epi32(sum, 0xb1));
  return _mm_cvtsi128_si32(_mm_sub_epi16(_mm_setzero_si128(), sum));
}
template <int by>
PI_INLINE i32x16 pairs_sum(u8x64 x) {
  __m256i n = _mm256_set1_epi16(by);
  return {_mm256_madd_epi16(x.a, n), _mm256_madd_epi16(x.b, n)};
}
#endif
PI_INLINE i32x16 dot_vs(i32x16 c, u8x64 w, u8x64 q) {  // |w| by q with the sign of w: |w| = 128 is right too
  return dot_vu(c, {_mm256_abs_epi8(w.a), _mm256_abs_epi8(w.b)},
                {_mm256_sign_epi8(q.a, w.a), _mm256_sign_epi8(q.b, w.b)});
}
PI_INLINE i32x16 dot_vs_start(i32x16) { return i_set(0); }
PI_INLINE i32x16 i_load(const void* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
PI_INLINE void i_store(void* p, i32x16 x) {
  _mm256_storeu_si256((__m256i*)p, x.a);
  _mm256_storeu_si256((__m256i*)p + 1, x.b);
}
PI_INLINE void b_quads(u8x64 a, u8x64 b, u8x64 c, u8x64 d, u8x64 (&z)[4]) {
  const u8x64 ab = {_mm256_unpacklo_epi8(a.a, b.a), _mm256_unpacklo_epi8(a.b, b.b)},
              AB = {_mm256_unpackhi_epi8(a.a, b.a), _mm256_unpackhi_epi8(a.b, b.b)};
  const u8x64 cd = {_mm256_unpacklo_epi8(c.a, d.a), _mm256_unpacklo_epi8(c.b, d.b)},
              CD = {_mm256_unpackhi_epi8(c.a, d.a), _mm256_unpackhi_epi8(c.b, d.b)};
  z[0] = {_mm256_unpacklo_epi16(ab.a, cd.a), _mm256_unpacklo_epi16(ab.b, cd.b)};
  z[1] = {_mm256_unpackhi_epi16(ab.a, cd.a), _mm256_unpackhi_epi16(ab.b, cd.b)};
  z[2] = {_mm256_unpacklo_epi16(AB.a, CD.a), _mm256_unpacklo_epi16(AB.b, CD.b)};
  z[3] = {_mm256_unpackhi_epi16(AB.a, CD.a), _mm256_unpackhi_epi16(AB.b, CD.b)};
}
PI_INLINE i32x16 i_sub(i32x16 x, i32x16 y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
PI_INLINE i32x16 i_and(i32x16 x, i32x16 y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
template <int n>
PI_INLINE i32x16 i_shr(i32x16 x) {
  return {_mm256_srli_epi32(x.a, n), _mm256_srli_epi32(x.b, n)};
}
template <int n>
PI_INLINE i32x16 i_shl(i32x16 x) {
  return {_mm256_slli_epi32(x.a, n), _mm256_slli_epi32(x.b, n)};
}
PI_INLINE uint32_t f_not_le(f32x16 x, f32x16 y) {
  return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(x.a, y.a, _CMP_NLE_UQ)) |
         (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(x.b, y.b, _CMP_NLE_UQ)) << 8;
}
template <int s>
PI_INLINE f32x16 f_code(u8x64 v) {
  __m256i low = _mm256_set1_epi32(15), eight = _mm256_set1_epi32(8);
  return {_mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_and_si256(_mm256_srli_epi32(v.a, 4 * s), low), eight)),
          _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_and_si256(_mm256_srli_epi32(v.b, 4 * s), low), eight))};
}

#elif defined(__ARM_NEON) && defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
enum {
  TILE_Q = 2,
  TILE_Q_PANELS = 1,
  TILE_WIDE = 2,
  TILE_HALVES = 2,
  TILE_WIDE_PANELS = 1,
  WIDE_FROM = 4,
  TILE_F = 4,
  TILE_F_PANELS = 1,
  TILE_A = 3,
  STREAMS = 4
};
struct f32x16 {
  float32x4_t v[4];
};
struct i32x16 {
  int32x4_t v[4];
};
struct u8x64 {
  uint8x16_t v[4];
};
#define EACH for (int i = 0; i < 4; i++)
PI_INLINE f32x16 f_set(float x) {
  f32x16 r;
  EACH r.v[i] = vdupq_n_f32(x);
  return r;
}
PI_INLINE f32x16 f_zero() { return f_set(0.0f); }
PI_INLINE f32x16 f_load(const float* p) {
  f32x16 r;
  EACH r.v[i] = vld1q_f32(p + 4 * i);
  return r;
}
PI_INLINE void f_store(float* p, f32x16 x) { EACH vst1q_f32(p + 4 * i, x.v[i]); }
PI_INLINE f32x16 f_add(f32x16 x, f32x16 y) {
  EACH x.v[i] = vaddq_f32(x.v[i], y.v[i]);
  return x;
}
PI_INLINE f32x16 f_sub(f32x16 x, f32x16 y) {
  EACH x.v[i] = vsubq_f32(x.v[i], y.v[i]);
  return x;
}
PI_INLINE f32x16 f_mul(f32x16 x, f32x16 y) {
  EACH x.v[i] = vmulq_f32(x.v[i], y.v[i]);
  return x;
}
PI_INLINE f32x16 f_div(f32x16 x, f32x16 y) {
  EACH x.v[i] = vdivq_f32(x.v[i], y.v[i]);
  return x;
}
PI_INLINE f32x16 f_fma(f32x16 x, f32x16 y, f32x16 z) {
  EACH z.v[i] = vfmaq_f32(z.v[i], x.v[i], y.v[i]);
  return z;
}
PI_INLINE f32x16 f_max(f32x16 x, f32x16 y) {
  EACH x.v[i] = vmaxq_f32(x.v[i], y.v[i]);
  return x;
}
PI_INLINE f32x16 f_min(f32x16 x, f32x16 y) {
  EACH x.v[i] = vminq_f32(x.v[i], y.v[i]);
  return x;
}
PI_INLINE f32x16 f_above(f32x16 x, f32x16 t) {
  EACH x.v[i] = vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(x.v[i]), vcleq_f32(x.v[i], t.v[i])));
  return x;
}
PI_INLINE f32x16 f_choose(f32x16 x, f32x16 a, f32x16 b) {
  EACH x.v[i] = vbslq_f32(vcgtzq_f32(x.v[i]), a.v[i], b.v[i]);
  return x;
}
PI_INLINE f32x16 f_abs(f32x16 x) {
  EACH x.v[i] = vabsq_f32(x.v[i]);
  return x;
}
PI_INLINE float f_sum(f32x16 x) { return vaddvq_f32(vaddq_f32(vaddq_f32(x.v[0], x.v[1]), vaddq_f32(x.v[2], x.v[3]))); }
PI_INLINE float f_hmax(f32x16 x) { return vmaxvq_f32(vmaxq_f32(vmaxq_f32(x.v[0], x.v[1]), vmaxq_f32(x.v[2], x.v[3]))); }
PI_INLINE f32x16 f_load_f16(const void* p) {
  f32x16 r;
  EACH r.v[i] = vcvt_f32_f16(vld1_f16((const float16_t*)p + 4 * i));
  return r;
}
PI_INLINE void f_store_f16(void* p, f32x16 x) { EACH vst1_f16((float16_t*)p + 4 * i, vcvt_f16_f32(x.v[i])); }
PI_INLINE f32x16 f_keep_below(f32x16 x, int n, f32x16 other) {
  static const int32_t lane[4] = {0, 1, 2, 3};
  EACH x.v[i] = vbslq_f32(vcgtq_s32(vdupq_n_s32(n - 4 * i), vld1q_s32(lane)), x.v[i], other.v[i]);
  return x;
}
PI_INLINE f32x16 f_pow2(i32x16 n) {
  f32x16 r;
  EACH r.v[i] = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n.v[i], vdupq_n_s32(127)), 23));
  return r;
}
PI_INLINE f32x16 f_bits(i32x16 x) {
  f32x16 r;
  EACH r.v[i] = vreinterpretq_f32_s32(x.v[i]);
  return r;
}
PI_INLINE i32x16 i_set(int32_t x) {
  i32x16 r;
  EACH r.v[i] = vdupq_n_s32(x);
  return r;
}
PI_INLINE i32x16 i_add(i32x16 x, i32x16 y) {
  EACH x.v[i] = vaddq_s32(x.v[i], y.v[i]);
  return x;
}
PI_INLINE int32_t i_sum(i32x16 x) {
  return vaddvq_s32(vaddq_s32(vaddq_s32(x.v[0], x.v[1]), vaddq_s32(x.v[2], x.v[3])));
}
PI_INLINE f32x16 i_float(i32x16 x) {
  f32x16 r;
  EACH r.v[i] = vcvtq_f32_s32(x.v[i]);
  return r;
}
PI_INLINE i32x16 i_round(f32x16 x) {
  i32x16 r;
  EACH r.v[i] = vcvtnq_s32_f32(x.v[i]);
  return r;
}
PI_INLINE i32x16 i_load_s8(const void* p) {
  int8x16_t b = vld1q_s8((const int8_t*)p);
  int16x8_t lo = vmovl_s8(vget_low_s8(b)), hi = vmovl_s8(vget_high_s8(b));
  return {{vmovl_s16(vget_low_s16(lo)), vmovl_s16(vget_high_s16(lo)), vmovl_s16(vget_low_s16(hi)),
           vmovl_s16(vget_high_s16(hi))}};
}
PI_INLINE i32x16 i_load_u8(const void* p) {
  uint8x16_t b = vld1q_u8((const uint8_t*)p);
  uint16x8_t lo = vmovl_u8(vget_low_u8(b)), hi = vmovl_u8(vget_high_u8(b));
  i32x16 r;
  r.v[0] = vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(lo)));
  r.v[1] = vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(lo)));
  r.v[2] = vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(hi)));
  r.v[3] = vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(hi)));
  return r;
}
PI_INLINE void i_store_s8(void* p, i32x16 x) {
  int16x8_t lo = vcombine_s16(vqmovn_s32(x.v[0]), vqmovn_s32(x.v[1])),
            hi = vcombine_s16(vqmovn_s32(x.v[2]), vqmovn_s32(x.v[3]));
  vst1q_s8((int8_t*)p, vcombine_s8(vqmovn_s16(lo), vqmovn_s16(hi)));
}
PI_INLINE f32x16 f_load_bf16(const void* p) {
  f32x16 r;
  EACH r.v[i] = vreinterpretq_f32_u32(vshll_n_u16(vld1_u16((const uint16_t*)p + 4 * i), 16));
  return r;
}
PI_INLINE void f_load_pairs(const void* p, f32x16* even, f32x16* odd) {
  EACH {
    uint32x4_t w = vreinterpretq_u32_u8(vld1q_u8((const uint8_t*)p + 16 * i));
    even->v[i] = vreinterpretq_f32_u32(vshlq_n_u32(w, 16));
    odd->v[i] = vreinterpretq_f32_u32(vandq_u32(w, vdupq_n_u32(0xffff0000u)));
  }
}
PI_INLINE u8x64 b_load(const void* p) {
  u8x64 r;
  EACH r.v[i] = vld1q_u8((const uint8_t*)p + 16 * i);
  return r;
}
PI_INLINE void b_store(void* p, u8x64 x) { EACH vst1q_u8((uint8_t*)p + 16 * i, x.v[i]); }
PI_INLINE u8x64 b_sub(u8x64 x, u8x64 y) {
  EACH x.v[i] = vsubq_u8(x.v[i], y.v[i]);
  return x;
}
PI_INLINE u8x64 b_lookup(const int8_t* table, u8x64 x) {
  const uint8x16_t t = vld1q_u8((const uint8_t*)table);
  EACH x.v[i] = vqtbl1q_u8(t, x.v[i]);
  return x;
}
PI_INLINE u8x64 b_set(int x) {
  u8x64 r;
  EACH r.v[i] = vdupq_n_u8((uint8_t)x);
  return r;
}
PI_INLINE u8x64 b_and(u8x64 x, u8x64 y) {
  EACH x.v[i] = vandq_u8(x.v[i], y.v[i]);
  return x;
}
PI_INLINE u8x64 b_or(u8x64 x, u8x64 y) {
  EACH x.v[i] = vorrq_u8(x.v[i], y.v[i]);
  return x;
}
PI_INLINE u8x64 b_shr(u8x64 x, int n) {
  EACH x.v[i] = vshlq_u8(x.v[i], vdupq_n_s8((int8_t)-n));
  return x;
}
template <int n>
PI_INLINE u8x64 b_shl(u8x64 x) {
  EACH x.v[i] = vshlq_n_u8(x.v[i], n);
  return x;
}
template <int n>
PI_INLINE u8x64 b_shr(u8x64 x) {
  EACH x.v[i] = vshrq_n_u8(x.v[i], n);
  return x;
}
// Digit n of five in base 3, the first one highest, of bytes that have them as a fraction of 256.
PI_INLINE u8x64 b_digit(u8x64 x, int n) {
  EACH {
    const uint8x16_t y = vmulq_u8(x.v[i], vdupq_n_u8((uint8_t)PI_POWERS[n]));
    x.v[i] = vshrq_n_u8(vhaddq_u8(y, vshrq_n_u8(y, 1)), 6);  // 3 y / 256: the half that is dropped never counts
  }
  return x;
}
PI_INLINE u8x64 b_lookup_low(const int8_t* table, u8x64 x) { return b_lookup(table, b_and(x, b_set(15))); }
PI_INLINE u8x64 b_bits(i32x16 x) {
  u8x64 r;
  EACH r.v[i] = vreinterpretq_u8_s32(x.v[i]);
  return r;
}
PI_INLINE u8x64 b_gather(const uint32_t* table, i32x16 x) {
  u8x64 r;
  EACH {
    uint32x4_t v = vdupq_n_u32(table[vgetq_lane_s32(x.v[i], 0)]);
    v = vsetq_lane_u32(table[vgetq_lane_s32(x.v[i], 1)], v, 1);
    v = vsetq_lane_u32(table[vgetq_lane_s32(x.v[i], 2)], v, 2);
    r.v[i] = vreinterpretq_u8_u32(vsetq_lane_u32(table[vgetq_lane_s32(x.v[i], 3)], v, 3));
  }
  return r;
}
PI_INLINE u8x64 b_mirrored(u8x64 x, u8x64 bits, int bit, int about) {
  const uint8x16_t set = vdupq_n_u8((uint8_t)bit), middle = vdupq_n_u8((uint8_t)about);
  EACH x.v[i] = vbslq_u8(vtstq_u8(bits.v[i], set), vsubq_u8(middle, x.v[i]), vaddq_u8(middle, x.v[i]));
  return x;
}
PI_INLINE i32x16 i_field(i32x16 x, int n, int mask) {
  EACH x.v[i] = vandq_s32(vshlq_s32(x.v[i], vdupq_n_s32(-n)), vdupq_n_s32(mask));
  return x;
}
PI_INLINE i32x16 dot_s(i32x16 c, u8x64 w, int32_t a) {
  int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(a));
  EACH c.v[i] = vdotq_s32(c.v[i], vreinterpretq_s8_u8(w.v[i]), x);
  return c;
}
PI_INLINE i32x16 dot_u(i32x16 c, u8x64 w, int32_t a) { return dot_s(c, w, a); }  // codes are below 128
PI_INLINE i32x16 dot_s_start(int32_t) { return i_set(0); }
static constexpr int SIGNED_ABOVE = 0;
PI_INLINE u8x64 b_times(u8x64 x, u8x64 y) {
  EACH x.v[i] = vmulq_u8(x.v[i], y.v[i]);
  return x;
}
PI_INLINE i32x16 dot_vs(i32x16 c, u8x64 w, u8x64 q) {
  EACH c.v[i] = vdotq_s32(c.v[i], vreinterpretq_s8_u8(w.v[i]), vreinterpretq_s8_u8(q.v[i]));
  return c;
}
PI_INLINE i32x16 dot_vu(i32x16 c, u8x64 w, u8x64 q) { return dot_vs(c, w, q); }
PI_INLINE i32x16 dot_vs_start(i32x16) { return i_set(0); }
PI_INLINE i32x16 i_load(const void* p) {
  i32x16 r;
  EACH r.v[i] = vld1q_s32((const int32_t*)p + 4 * i);
  return r;
}
PI_INLINE void i_store(void* p, i32x16 x) { EACH vst1q_s32((int32_t*)p + 4 * i, x.v[i]); }
PI_INLINE void b_quads(u8x64 a, u8x64 b, u8x64 c, u8x64 d, u8x64 (&z)[4]) {
  EACH {
    const uint16x8_t ab = vreinterpretq_u16_u8(vzip1q_u8(a.v[i], b.v[i])),
                     AB = vreinterpretq_u16_u8(vzip2q_u8(a.v[i], b.v[i]));
    const uint16x8_t cd = vreinterpretq_u16_u8(vzip1q_u8(c.v[i], d.v[i])),
                     CD = vreinterpretq_u16_u8(vzip2q_u8(c.v[i], d.v[i]));
    z[0].v[i] = vreinterpretq_u8_u16(vzip1q_u16(ab, cd));
    z[1].v[i] = vreinterpretq_u8_u16(vzip2q_u16(ab, cd));
    z[2].v[i] = vreinterpretq_u8_u16(vzip1q_u16(AB, CD));
    z[3].v[i] = vreinterpretq_u8_u16(vzip2q_u16(AB, CD));
  }
}
PI_INLINE i32x16 i_sub(i32x16 x, i32x16 y) {
  EACH x.v[i] = vsubq_s32(x.v[i], y.v[i]);
  return x;
}
PI_INLINE i32x16 i_and(i32x16 x, i32x16 y) {
  EACH x.v[i] = vandq_s32(x.v[i], y.v[i]);
  return x;
}
template <int n>
PI_INLINE i32x16 i_shr(i32x16 x) {
  EACH x.v[i] = vshrq_n_s32(x.v[i], n);
  return x;
}
template <int n>
PI_INLINE i32x16 i_shl(i32x16 x) {
  EACH x.v[i] = vshlq_n_s32(x.v[i], n);
  return x;
}
PI_INLINE uint32_t f_not_le(f32x16 x, f32x16 y) {
  static const uint32_t bit[4] = {1, 2, 4, 8};
  uint32_t r = 0;
  EACH r |= vaddvq_u32(vbicq_u32(vld1q_u32(bit), vcleq_f32(x.v[i], y.v[i]))) << 4 * i;
  return r;
}
template <int s>
PI_INLINE f32x16 f_code(u8x64 v) {
  f32x16 r;
  EACH {
    uint32x4_t n = vandq_u32(vshlq_u32(vreinterpretq_u32_u8(v.v[i]), vdupq_n_s32(-4 * s)), vdupq_n_u32(15));
    r.v[i] = vcvtq_f32_s32(vsubq_s32(vreinterpretq_s32_u32(n), vdupq_n_s32(8)));
  }
  return r;
}

#else
// No instruction set: the compiler's vector types, which it splits to the machine's width, and plain loops, out of
// line, where those are not enough.
#include <math.h>
#define PI_PLAIN static __attribute__((noinline, unused))
enum {
  TILE_Q = 1,
  TILE_Q_PANELS = 1,
  TILE_WIDE = 1,
  TILE_HALVES = 1,
  TILE_WIDE_PANELS = 1,
  WIDE_FROM = 2,
  TILE_F = 1,
  TILE_F_PANELS = 1,
  TILE_A = 1,
  STREAMS = 1
};
typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint8_t u8x64 __attribute__((vector_size(64)));
#define EACH for (int i = 0; i < 16; i++)
PI_PLAIN float half_to_float(uint16_t h) {
  uint32_t s = (uint32_t)(h & 0x8000) << 16, e = (h >> 10) & 31, m = h & 1023, u;
  float f;
  if (e == 0) {
    f = (float)m * 5.9604644775390625e-8f;
    return s ? -f : f;
  }
  u = s | (e == 31 ? 0x7f800000u : (e + 112) << 23) | m << 13;
  memcpy(&f, &u, 4);
  return f;
}
PI_PLAIN uint16_t float_to_half(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  uint16_t s = (uint16_t)(u >> 16 & 0x8000);
  u &= 0x7fffffff;
  if (u > 0x7f800000) return s | 0x7e00;
  if (u >= 0x477ff000) return s | 0x7c00;
  if (u < 0x38800000) {
    memcpy(&f, &u, 4);
    return s | (uint16_t)nearbyintf(f * 16777216.0f);
  }
  return s | (uint16_t)((u - 0x38000000 + 0xfff + (u >> 13 & 1)) >> 13);
}
PI_INLINE f32x16 f_set(float x) { return x - (f32x16){}; }
PI_INLINE f32x16 f_zero() { return (f32x16){}; }
PI_INLINE f32x16 f_load(const float* p) {
  f32x16 r;
  memcpy(&r, p, 64);
  return r;
}
PI_INLINE void f_store(float* p, f32x16 x) { memcpy(p, &x, 64); }
PI_INLINE f32x16 f_add(f32x16 x, f32x16 y) { return x + y; }
PI_INLINE f32x16 f_sub(f32x16 x, f32x16 y) { return x - y; }
PI_INLINE f32x16 f_mul(f32x16 x, f32x16 y) { return x * y; }
PI_INLINE f32x16 f_div(f32x16 x, f32x16 y) { return x / y; }
PI_INLINE f32x16 f_fma(f32x16 x, f32x16 y, f32x16 z) { return x * y + z; }
PI_INLINE f32x16 f_max(f32x16 x, f32x16 y) { return x > y ? x : y; }
PI_INLINE f32x16 f_min(f32x16 x, f32x16 y) { return x < y ? x : y; }
PI_INLINE f32x16 f_above(f32x16 x, f32x16 t) { return x <= t ? (f32x16){} : x; }
PI_INLINE f32x16 f_choose(f32x16 x, f32x16 a, f32x16 b) { return x > (f32x16){} ? a : b; }
PI_INLINE f32x16 f_abs(f32x16 x) { return (f32x16)((u32x16)x & 0x7fffffffu); }
PI_PLAIN float f_sum(f32x16 x) {
  for (int n = 8; n; n /= 2)
    for (int i = 0; i < n; i++) x[i] += x[i + n];
  return x[0];
}
PI_PLAIN float f_hmax(f32x16 x) {
  float m = x[0];
  EACH m = x[i] > m ? x[i] : m;
  return m;
}
PI_PLAIN f32x16 f_load_f16(const void* p) {
  f32x16 r;
  uint16_t h[16];
  memcpy(h, p, 32);
  EACH r[i] = half_to_float(h[i]);
  return r;
}
PI_PLAIN void f_store_f16(void* p, f32x16 x) {
  uint16_t h[16];
  EACH h[i] = float_to_half(x[i]);
  memcpy(p, h, 32);
}
PI_PLAIN f32x16 f_keep_below(f32x16 x, int n, f32x16 other) {
  EACH x[i] = i < n ? x[i] : other[i];
  return x;
}
PI_INLINE f32x16 f_pow2(i32x16 n) { return (f32x16)((n + 127) << 23); }
PI_INLINE f32x16 f_bits(i32x16 x) { return (f32x16)x; }
PI_INLINE i32x16 i_set(int32_t x) { return x - (i32x16){}; }
PI_INLINE i32x16 i_add(i32x16 x, i32x16 y) { return x + y; }
PI_PLAIN int32_t i_sum(i32x16 x) {
  int32_t s = 0;
  EACH s += x[i];
  return s;
}
PI_INLINE f32x16 i_float(i32x16 x) { return __builtin_convertvector(x, f32x16); }
PI_PLAIN i32x16 i_round(f32x16 x) {  // out of range and NaN as on x86
  i32x16 r;
  EACH r[i] = x[i] > -2147483648.0f && x[i] < 2147483648.0f ? (int32_t)nearbyintf(x[i]) : INT32_MIN;
  return r;
}
PI_PLAIN i32x16 i_load_s8(const void* p) {
  i32x16 r;
  EACH r[i] = ((const int8_t*)p)[i];
  return r;
}
PI_PLAIN i32x16 i_load_u8(const void* p) {
  i32x16 r;
  EACH r[i] = ((const uint8_t*)p)[i];
  return r;
}
PI_PLAIN void i_store_s8(void* p, i32x16 x) {
  EACH((int8_t*)p)[i] = (int8_t)(x[i] > 127 ? 127 : x[i] < -128 ? -128 : x[i]);
}
PI_PLAIN f32x16 f_load_bf16(const void* p) {
  uint16_t h[16];
  u32x16 u;
  memcpy(h, p, 32);
  EACH u[i] = (uint32_t)h[i] << 16;
  return (f32x16)u;
}
PI_INLINE void f_load_pairs(const void* p, f32x16* even, f32x16* odd) {
  u32x16 w;
  memcpy(&w, p, 64);
  *even = (f32x16)(w << 16);
  *odd = (f32x16)(w & 0xffff0000u);
}
PI_INLINE u8x64 b_load(const void* p) {
  u8x64 r;
  memcpy(&r, p, 64);
  return r;
}
PI_INLINE void b_store(void* p, u8x64 x) { memcpy(p, &x, 64); }
PI_INLINE u8x64 b_sub(u8x64 x, u8x64 y) { return x - y; }
PI_INLINE u8x64 b_set(int x) { return (uint8_t)x - (u8x64){}; }
PI_PLAIN u8x64 b_lookup(const int8_t* table, u8x64 x) {
  for (int i = 0; i < 64; i++) x[i] = (uint8_t)table[x[i] & 15];
  return x;
}
PI_INLINE u8x64 b_and(u8x64 x, u8x64 y) { return x & y; }
PI_INLINE u8x64 b_or(u8x64 x, u8x64 y) { return x | y; }
PI_PLAIN u8x64 b_shr(u8x64 x, int n) {
  for (int i = 0; i < 64; i++) x[i] = (uint8_t)(x[i] >> n);
  return x;
}
PI_PLAIN u8x64 b_shl(u8x64 x, int n) {
  for (int i = 0; i < 64; i++) x[i] = (uint8_t)(x[i] << n);
  return x;
}
template <int n>
PI_INLINE u8x64 b_shl(u8x64 x) {
  return b_shl(x, n);
}
template <int n>
PI_INLINE u8x64 b_shr(u8x64 x) {
  return b_shr(x, n);
}
// Digit n of five in base 3, the first one highest, of bytes that have them as a fraction of 256.
PI_PLAIN u8x64 b_digit(u8x64 x, int n) {
  for (int i = 0; i < 64; i++) x[i] = (uint8_t)((x[i] * PI_POWERS[n] & 255) * 3 >> 8);
  return x;
}
PI_INLINE u8x64 b_lookup_low(const int8_t* table, u8x64 x) { return b_lookup(table, x); }
PI_INLINE u8x64 b_bits(i32x16 x) { return (u8x64)x; }
PI_PLAIN u8x64 b_gather(const uint32_t* table, i32x16 x) {
  EACH x[i] = (int32_t)table[x[i]];
  return (u8x64)x;
}
PI_PLAIN u8x64 b_mirrored(u8x64 x, u8x64 bits, int bit, int about) {
  for (int i = 0; i < 64; i++) x[i] = (uint8_t)(bits[i] & bit ? about - x[i] : about + x[i]);
  return x;
}
PI_INLINE i32x16 i_field(i32x16 x, int n, int mask) { return x >> n & mask; }
PI_PLAIN i32x16 dot_s(i32x16 c, u8x64 w, int32_t a) {
  int8_t x[4], v[64];
  memcpy(x, &a, 4);
  memcpy(v, &w, 64);
  int32_t s[16];
  EACH s[i] = v[4 * i] * x[0] + v[4 * i + 1] * x[1] + v[4 * i + 2] * x[2] + v[4 * i + 3] * x[3];
  i32x16 t;
  memcpy(&t, s, 64);
  return c + t;
}
PI_INLINE i32x16 dot_u(i32x16 c, u8x64 w, int32_t a) { return dot_s(c, w, a); }
PI_INLINE i32x16 dot_s_start(int32_t) { return i_set(0); }
static constexpr int SIGNED_ABOVE = 0;
PI_INLINE u8x64 b_times(u8x64 x, u8x64 y) { return x * y; }
PI_PLAIN i32x16 dot_vs(i32x16 c, u8x64 w, u8x64 q) {
  int8_t a[64], b[64];
  memcpy(a, &w, 64);
  memcpy(b, &q, 64);
  i32x16 r;
  EACH r[i] =
      a[4 * i] * b[4 * i] + a[4 * i + 1] * b[4 * i + 1] + a[4 * i + 2] * b[4 * i + 2] + a[4 * i + 3] * b[4 * i + 3];
  return c + r;
}
PI_INLINE i32x16 dot_vu(i32x16 c, u8x64 w, u8x64 q) { return dot_vs(c, w, q); }  // codes are below 128
PI_INLINE i32x16 dot_vs_start(i32x16) { return i_set(0); }
PI_INLINE i32x16 i_load(const void* p) {
  i32x16 r;
  memcpy(&r, p, 64);
  return r;
}
PI_INLINE void i_store(void* p, i32x16 x) { memcpy(p, &x, 64); }
PI_PLAIN void b_quads(u8x64 a, u8x64 b, u8x64 c, u8x64 d, u8x64 (&z)[4]) {
  const u8x64 rows[4] = {a, b, c, d};
  for (int i = 0; i < 4; i++)
    for (int l = 0; l < 16; l++)
      for (int j = 0; j < 4; j++) z[i][4 * l + j] = rows[j][16 * (l / 4) + 4 * i + l % 4];
}
PI_INLINE i32x16 i_sub(i32x16 x, i32x16 y) { return x - y; }
PI_INLINE i32x16 i_and(i32x16 x, i32x16 y) { return x & y; }
template <int n>
PI_INLINE i32x16 i_shr(i32x16 x) {
  return x >> n;
}
template <int n>
PI_INLINE i32x16 i_shl(i32x16 x) {
  return x << n;
}
PI_PLAIN uint32_t f_not_le(f32x16 x, f32x16 y) {
  uint32_t r = 0;
  EACH r |= (uint32_t)!(x[i] <= y[i]) << i;
  return r;
}
template <int s>
PI_INLINE f32x16 f_code(u8x64 v) {
  return i_float((i32x16)((u32x16)v >> 4 * s & 15) - 8);
}
#endif

// Whether f_fma rounds once.
#if defined(PI_PLAIN)
static constexpr bool FUSED = false;
#else
static constexpr bool FUSED = true;
#endif

PI_INLINE i32x16 i_low4(i32x16 x) { return i_and(x, i_set(15)); }
PI_INLINE u8x64 b_low4(u8x64 x) { return b_and(x, b_set(15)); }
PI_INLINE u8x64 b_high4(u8x64 x) { return b_and(b_shr<4>(x), b_set(15)); }
// The lowest byte of each lane four times.
PI_INLINE u8x64 b_repeat(i32x16 x) {
  const i32x16 low = i_and(x, i_set(255));
  return b_or(b_or(b_bits(low), b_bits(i_shl<8>(low))), b_or(b_bits(i_shl<16>(low)), b_bits(i_shl<24>(low))));
}

// First n lanes only.
PI_INLINE f32x16 f_load_n(const float* p, int n) {
  float buf[16] = {0};
  memcpy(buf, p, (size_t)n * 4);
  return f_load(buf);
}
PI_INLINE void f_store_n(float* p, f32x16 v, int n) {
  float buf[16];
  f_store(buf, v);
  memcpy(p, buf, (size_t)n * 4);
}

// Parts of e^x for x in [-88, 88], by range reduction and a degree-6 polynomial as in Cephes expf: x is n log 2 + r, and
// e^r is 1 + r + r^2 more.
struct ExpParts {
  i32x16 n;
  f32x16 r, more;
};
PI_INLINE ExpParts f_exp_parts(f32x16 x) {
  const i32x16 n = i_round(f_mul(x, f_set(1.44269504088896341f)));
  f32x16 k = i_float(n), r = f_fma(k, f_set(-0.693359375f), x);
  r = f_fma(k, f_set(2.12194440e-4f), r);
  f32x16 p = f_set(1.9875691500e-4f);
  p = f_fma(p, r, f_set(1.3981999507e-3f));
  p = f_fma(p, r, f_set(8.3334519073e-3f));
  p = f_fma(p, r, f_set(4.1665795894e-2f));
  p = f_fma(p, r, f_set(1.6666665459e-1f));
  p = f_fma(p, r, f_set(5.0000001201e-1f));
  return {n, r, p};
}

// e^x, about 1 ulp; exactly 0 from -88 down, exactly 1 at 0.
PI_INLINE f32x16 f_exp(f32x16 x) {
  x = f_min(f_max(x, f_set(-88.0f)), f_set(88.0f));
  const ExpParts e = f_exp_parts(x);
  return f_mul(f_add(f_fma(f_mul(e.r, e.r), e.more, e.r), f_set(1.0f)), f_pow2(e.n));
}

// e^x - 1 - x of x up to 88; NaN stays. Where |x| is below log(2) / 2, n is 0 and r is x, which the middle leaves out
// exactly.
PI_INLINE f32x16 f_expm1_less(f32x16 x) {
  const ExpParts e = f_exp_parts(f_min(f_max(x, f_set(-88.0f)), f_set(88.0f)));
  const f32x16 by = f_pow2(e.n), middle = f_add(f_sub(f_mul(by, e.r), x), f_sub(by, f_set(1.0f)));
  return f_fma(f_mul(by, f_mul(e.r, e.r)), e.more, middle);
}

// tanh x, about 2 ulp; NaN stays. Up to 0.625 a polynomial as in Cephes tanhf, above it 1 - 2 / (e^(2 |x|) + 1); each of the
// two is exactly 0 where it does not count.
PI_INLINE f32x16 f_tanh(f32x16 x) {
  x = f_max(f_set(-20.0f), f_min(f_set(20.0f), x));  // in this order NaN stays
  const f32x16 size = f_abs(x), large = f_above(size, f_set(0.625f)), small = f_sub(size, large);
  const f32x16 z = f_mul(small, small);
  f32x16 p = f_set(-5.70498872745e-3f);
  p = f_fma(p, z, f_set(2.06390887954e-2f));
  p = f_fma(p, z, f_set(-5.37397155531e-2f));
  p = f_fma(p, z, f_set(1.33314422036e-1f));
  p = f_fma(p, z, f_set(-3.33332819422e-1f));
  const f32x16 near = f_fma(f_mul(p, z), small, small);
  const f32x16 far = f_sub(f_set(1.0f), f_div(f_set(2.0f), f_add(f_exp(f_add(large, large)), f_set(1.0f))));
  return f_mul(f_add(near, far), f_div(x, f_max(f_set(1e-30f), size)));  // the sign
}

// limit * tanh(x / limit)
PI_INLINE f32x16 f_capped(f32x16 x, float limit) { return f_mul(f_set(limit), f_tanh(f_div(x, f_set(limit)))); }

// A constant as an argument: its type says its value, and it is a number like any other where one is expected.
template <int n>
struct Index {
  static constexpr int value = n;
  PI_INLINE_MEMBER constexpr operator int() const { return n; }
};
// Shifts by an Index, and by what is made of it, become instructions with a constant.
template <int n>
PI_INLINE u8x64 b_shr(u8x64 x, Index<n>) {
  if constexpr (n == 0) return x;
  else return b_shr<n>(x);
}
// Bit n of each byte as bit `to`; others may be anything. A loop over n shares the shift by it with other bits.
template <int to, int n>
PI_INLINE u8x64 b_move(u8x64 x, Index<n>) {
  if constexpr (n < to) return b_shl<to - n>(x);
  else return b_shr(x, Index<n - to>{});
}
template <int to>
PI_INLINE u8x64 b_move(u8x64 x, int n) {
  return b_shl<to>(b_shr(x, n));
}
// The same of lanes.
template <int to, int n>
PI_INLINE i32x16 i_move(i32x16 x, Index<n>) {
  if constexpr (n < to) return i_shl<to - n>(x);
  else return i_shr<n - to>(x);
}
template <int to>
PI_INLINE i32x16 i_move(i32x16 x, int n) {
  return i_shl<to>(i_field(x, n, -1));
}
template <int m, int n>
PI_INLINE constexpr Index<m + n> plus(Index<n>) {
  return {};
}
template <int m>
PI_INLINE constexpr int plus(int n) {
  return m + n;
}
template <int m, int n>
PI_INLINE constexpr Index<m + n / 2> plus_half(Index<n>) {
  return {};
}
template <int m>
PI_INLINE constexpr int plus_half(int n) {
  return m + n / 2;
}
template <int n>
PI_INLINE constexpr Index<2 * n> twice(Index<n>) {
  return {};
}
PI_INLINE constexpr int twice(int n) { return 2 * n; }
template <int n>
PI_INLINE constexpr Index<n / 2 * 4> four_if_2(Index<n>) {
  return {};
}
PI_INLINE constexpr int four_if_2(int n) { return n / 2 * 4; }
