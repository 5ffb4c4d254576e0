// The contract between the instruction-set files and everything else: weight layouts, activation forms and the table of
// kernels that each level exports. Included by ISA files, so: no std headers but <stdint.h>, everything static.
//
// Weights are stored in *panels* of 16 rows. Inside a panel the operands of one multiply-add instruction are adjacent:
// four consecutive k of 16 rows are 64 bytes ("group"), so a kernel keeps one row per vector lane, never sums across
// lanes and reads memory sequentially. A panel is [codes of all blocks][scales of all blocks], 64-byte aligned.
//
//   type        codes                                                   scales
//   F32, F16    [k][16]                                                 -
//   BF16        [k/2][16][2], k padded to 32                            -
//   Q8_0        per 32 k: 8 groups of s8                                f16 d[16]
//   Q4_0, Q4_1  per 32 k: 4 x 64 B; low nibble group g, high g+4        f16 d[16] (Q4_1: followed by f16 m[16])
//   Q5_0, Q5_1  the same, then 64 B: bit g of a byte = bit 4 of group g  likewise
//   Q2_0        per 32 k: 2 x 64 B; bits 2g of line i: group 4i + g       per 64 k: f16 d[16]
//   Q1_0        per 32 k: 64 B; bit g of a byte: group g, 0 is -1         per 128 k: f16 d[16]
//   Q4_K        per 64 k: 8 x 64 B; low nibble first 32 k, high second  per 256 k: f16 d[16], f16 dmin[16],
//   Q5_K        the same for 256 k, then 8 x 64 B: bit b = block b        then per 32 k: u8 sc[16], u8 m[16]
//   Q6_K        per 128 k: 16 x 64 B nibbles (block i: part i & 1,      per 256 k: f16 d[16],
//               nibble i >> 1), then 8 x 64 B: bits 2i of block i         then per 32 k: s8 sc[2][16]
//   Q3_K        per 32 k: 3 x 64 B; bits 0-2 and 3-5 of line i: groups     as Q6_K
//               2i and 2i+1; bits 6-7 of lines 0 and 1: the low two bits
//               of groups 6 and 7, and of line 2 the high bit of each
//   Q2_K        as Q2_0                                                   per 256 k: f16 d[16], f16 dmin[16],
//                                                                         then per 16 k: u8 [16], sc low, m high nibble
//   TQ2_0       as Q2_0                                                   per 256 k: f16 d[16]
//   TQ1_0       per 256 k: 13 x 64 B, five digits of base 3 in a byte:    per 256 k: f16 d[16]
//               digit b of lines 0-7 block b < 5, digits of lines 8-11
//               the next five halves, of line 12 the last four groups
//
// Codes that are numbers of entries in a table of sixteen values, laid out as those of Q4_0:
//
//   IQ4_NL                                                              f16 d[16]
//   IQ4_XS                                                              per 256 k: f16 d[16], then per 32 k: s8 sc[16]
//   MXFP4                                                               u8 e[16], the exponents of powers of two
//   NVFP4       per 32 k: 4 x 64 B; low nibble of line 2i + j group     f32 [16] of all k, then per 16 k: u8 [16], numbers
//               4i + j, high group 4i + j + 2 (i, j < 2)                of 4 bits of exponent and 3 of mantissa
//
// Entries of grids, per 256 k: their lowest bits as u8 [32 or, IQ3, 64][16]; their other bits as u8 [..][16], the first
// entry's lowest in a byte; and, but for IQ1, signs as u32 [8][16], of 32 k each: of k = 4 g + j bit
// g / 2 + 4 (g % 2) of byte j. Scales: f16 d[16], then u8 [..][16] of two numbers s each, the first in the low half, which
// stand for 2 s + 1.
//
//   IQ3_S       [64], 1 bit of 64, signs                                [4], of 32 k each
//   IQ3_XXS     [64], signs                                             [4]
//   IQ2_XXS     [32], signs                                             [4]
//   IQ2_XS      [32], 1 bit of 32, signs                                [8], of 16 k each
//   IQ2_S       [32], 2 bits of 32, signs                               [8]
//   IQ1_S       [32], 2 bits of 32, then 1 bit of 32                    [4], s of 3 bits and whether the grid moves down
//   IQ1_M       [32], 4 bits of 32, the last of which moves it down     [8]
#pragma once
#include <stdint.h>

#include "types.h"

// Activations of the FFN. RELU2 is relu squared; FATRELU keeps what exceeds a threshold; DRELU is relu on the gate and
// on up; GELU_TANH is GELU in its approximation by tanh; CATS is silu where its magnitude exceeds a threshold; TOPK is
// silu for so many neurons of each bank of PI_BANK, see `keep_largest`; XIELU has numbers of its own, see PiXielu. Experts
// may also have SWIGLU_OAI, gpt-oss's: with both clamped at 7, gate * sigmoid(1.702 gate) * (up + 1). SIGMOID is that of
// gates, and none of an FFN.
enum PiAct {
  PI_SILU,
  PI_RELU,
  PI_RELU2,
  PI_FATRELU,
  PI_DRELU,
  PI_GELU_TANH,
  PI_CATS,
  PI_TOPK,
  PI_XIELU,
  PI_N_ACTS,
  PI_SWIGLU_OAI = PI_N_ACTS,
  PI_SIGMOID
};

// xIELU (arXiv 2411.13010): of x above zero `above` * x^2 + beta * x, of others below * (e^min(x, least) - 1 - x) + beta * x.
struct PiXielu {
  float above, below, beta, least;
};

enum PiKvType { PI_KV_F32, PI_KV_F16, PI_KV_Q8_0, PI_N_KV_TYPES };

enum { PI_LANES = 16, PI_PAGE = 32, PI_BANK = 64 };

static inline int64_t pi_round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Has a line of weights or of the KV cache brought into the L2 cache: on Zen 4 decode is up to 1.6 times as fast so as
// with lines in the L1 cache (docs/decisions/cpu-kernels.md).
static inline void fetch_line(const uint8_t* p) { __builtin_prefetch(p, 0, 2); }

// Bytes of the codes of one panel of k columns; those of activations in bfloat16 are padded, and so is BF16.
static inline int64_t pi_codes_bytes(int type, int64_t k) {
  const PiTypeFacts& t = pi_facts(type);
  return (t.form == PI_FORM_BF16 ? pi_round_up(k, 32) : k) / t.block * (t.codes * PI_LANES);
}

// Bytes of the factors that whole rows of a panel have, before the scales of their blocks.
static inline int64_t pi_factors_bytes(int type) { return type == PI_NVFP4 ? 4 * PI_LANES : 0; }

static inline int64_t pi_scales_bytes(int type, int64_t k) {
  return pi_factors_bytes(type) + k / pi_facts(type).block * (pi_facts(type).scales * PI_LANES);
}

static inline int64_t pi_panel_bytes(int type, int64_t k) {
  return pi_round_up(pi_codes_bytes(type, k) + pi_scales_bytes(type, k), 64);
}

// Activation rows in the requested forms; the others may be null. Strides are in elements.
struct PiActs {
  const float* f = nullptr;   // [t][ldf]
  uint16_t* b = nullptr;      // bfloat16 [t][ldb], zero from k to the next multiple of 32
  int8_t* q = nullptr;        // [t][k], each 32 scaled by its own d: x ~ d * q, |q| <= 127
  float* d = nullptr;         // [t][k / 32]
  float* sd = nullptr;        // [t][k / 32]  d * sum of the block's q
  int16_t* s = nullptr;       // [t][k / 16]  sums of q
  const float* sh = nullptr;  // [t][k / 16]  d * sum of the half's q, where a product made it
  int64_t k = 0, ldf = 0, ldb = 0;
  const uint8_t* lanes = nullptr;   // q and d in the order of single neurons' rows, or null (pi_lanes_bytes)
  const int32_t* starts = nullptr;  // [t][k / 32 or 16]  what integer sums begin with, where a product made it
};

// The same rows from row t and column c on, a multiple of 32; without `lanes`.
static inline PiActs pi_acts_from(const PiActs* all, int64_t t, int64_t c) {
  PiActs from = *all;
  if (all->f) from.f += t * all->ldf + c;
  if (all->b) from.b += t * all->ldb + c;
  if (all->q) {
    from.q += t * all->k + c;
    from.d += t * (all->k / 32) + c / 32;
    from.sd += t * (all->k / 32) + c / 32;
    from.s += t * (all->k / 16) + c / 16;
  }
  from.lanes = nullptr;
  return from;
}

// Lines of weights that are read soon, for which a product asks while it computes a panel: for each of its blocks b
// line[i] + b * stride.
struct PiAhead {
  enum { LINES = 8 };
  const uint8_t* line[LINES];
  int64_t stride;
};

// One matrix product over panels [p0, p1): out[t][16 p + lane] = bias + w . x  (+ what was there, when `add`).
struct PiLinear {
  const uint8_t* w;   // panel 0
  const float* bias;  // padded to whole panels, or null
  float* out;
  int64_t ldo;
  int type, add;
  const PiAhead* ahead = nullptr;  // of each panel, or null: the panels are in a cache, others are not; Q8_0 alone asks
};

// The settings of a layer's attention, X(type, name, neutral value): each is the attribute of that name of the layer's
// configuration (config.py), from which bindings.h reads it. It has the neutral value where that is None, or where the
// layer's kind of attention has no such attribute.
#define PI_ATTENTION_SETTINGS(X)                                                                      \
  X(float, scale, 0)      /* of the scores; 0: head_dim^-1/2 */                                       \
  X(int, window, 0)       /* tokens that a query looks back over, its own included; 0: all of them */ \
  X(bool, chunked, false) /* it looks back to the begin of its chunk of so many tokens instead */     \
  /* a query at position p is multiplied by                                                           \
     1 + query_growth * log(1 + floor((p + query_offset) / query_interval)) */                        \
  X(float, query_growth, 0)                                                                           \
  X(int, query_interval, 1)                                                                           \
  X(int, query_offset, 0)                                                                             \
  X(float, score_cap, 0) /* scores become score_cap * tanh(score / score_cap); 0: they stay */        \
  X(float, qkv_clip, 0)  /* what queries, keys and values are clamped to, in magnitude; 0: they are not */

struct PiAttentionSettings {
#define PI_SETTING(type, name, neutral) type name = neutral;
  PI_ATTENTION_SETTINGS(PI_SETTING)
#undef PI_SETTING
};

// One run of consecutive tokens of one sequence against its paged cache.
struct PiAttention {
  const float* q;        // [t][q_stride], head h at h * head_pad, times the scale of the scores
  float* out;            // [t][out_stride], head h at h * head_dim
  const uint8_t* kv;     // this layer: page p, kv head g at p * page_bytes + g * head_bytes
  const int32_t* pages;  // the sequence's page table
  int64_t q_stride, out_stride, page_bytes, head_bytes, position;  // position of token 0
  int head_dim, head_pad, group;                                   // head_dim: of a value
  PiAttentionSettings settings = {};
  const float* sinks = nullptr;  // of each head, a score in its softmax that belongs to no value; null: none
};

// ---- Single neurons ----------------------------------------------------------------------------------------------
// A bundle holds the weights of one neuron side by side: its row of gate and of up, multiplied with the activations
// ("dot"), and its column of down, stored as a row, which is added to the output ("add"). A row is a multiple of 64
// bytes, zero after its k elements. PI_GROUP bundles form a group, followed by the scales that their rows share:
//
//   F16, BF16  unchanged
//   Q8_0       k codes of s8, padded to 64; then f16 d of each 32, padded to 16 of them
//              dot: per 16 blocks of 32 (or the m that are left) 8 vectors of m words; word l of vector v is elements
//              4 v .. 4 v + 3 of block l. add: in order
//   Q4_0       codes and d likewise; dot: 4 vectors, in the high nibbles those of vector 4 + v; add: per 128 k 64
//              bytes, nibble s of 32-bit word l is element 16 s + l
//   Q4_1       dot only: as Q4_0, and behind d, padded likewise, f16 m of each 32
//   Q5_0, Q5_1, IQ4_NL  dot only: as Q4_0 and Q4_1; behind the codes of 4 bits of all k, per 512 k 64 bytes with the fifth
//              bits: bit v of byte j of word l is of element 4 v + j of block l. Of 1, 2, 4 or 8 blocks at the end, bit w of
//              word l is that of the low code in word 16 w + l, bit 4 + w that of the high one
//   those with blocks of more than 32  dot only: as model files have them
//   ..X32      add only: blocks across the group's neurons, as model files have them. Codes of 4 bits per 128 k as 64
//              bytes: byte 16 (l / 4) + 4 z + l % 4 is element 32 z + l and, in the high nibble, element 32 z + 16 + l
//              (l < 16). Q5_0X32, Q5_1X32: behind these, per 512 k, bit b of that byte is bit 4 of element
//              128 z + 16 b + l. Q8_0X32: per 64 k that byte is element 16 z + l; padded to 128 k.
//              Shared: the scales, padded to 128 elements: f16 d of each, then likewise f16 m, of MXFP4X32 u8 e
enum { PI_DOT, PI_ADD };

// Neurons of a group: the length of a block across them.
enum { PI_GROUP = 32 };

// Maximum tokens of a step whose neurons are read once: a bit for each in a word of 32.
enum { PI_NEURON_TOKENS = 32 };

// A neuron, and a token that it is multiplied with.
struct PiPair {
  int32_t neuron, token;
};

// Whether bundles hold rows of a type for a kind of use.
static inline int pi_row_type(int type, int kind) {
  const int use = pi_across(type) >= 0 ? (kind == PI_ADD ? PI_ROWS_X32 : 0)
                  : kind == PI_DOT     ? PI_ROWS_DOT
                                       : PI_ROWS_ADD;
  return (pi_facts(type).rows & use) != 0;
}

// Float16 numbers of a block: scale and minimum.
static inline int pi_halves(int type) { return (pi_facts(type).d >= 0) + (pi_facts(type).m >= 0); }

// Bits of the codes of a type: 4, 5 (the fifth apart from the others) or 8.
static constexpr int pi_bits(int type) {
  return PI_TYPES[type % PI_N_TYPES].codes * 8 / PI_TYPES[type % PI_N_TYPES].block;
}

// The type of the panels that rows across neurons become: with a byte for a code, which products read fastest, where no
// scale is lost so.
static constexpr int pi_panels_across(int type) {
  const PiTypeFacts& t = PI_TYPES[type % PI_N_TYPES];
  return t.d >= 0 && t.m < 0 ? PI_Q8_0 : type % PI_N_TYPES;
}

// Whether rows of single neurons lie as model files have them: those of long blocks.
static constexpr int pi_as_stored(int type) { return PI_TYPES[type % PI_N_TYPES].block > PI_GROUP; }

static inline int64_t pi_row_codes(int type, int64_t k) {
  if (pi_as_stored(type)) return pi_round_up(k / pi_facts(type).block * pi_facts(type).bytes, 64);
  if (pi_facts(type).values == PI_VALUES_FLOATS) return pi_round_up(pi_facts(type).bytes * k, 64);
  if (pi_bits(type) == 8) return pi_round_up(k, pi_across(type) >= 0 ? 128 : 64);
  return pi_round_up(k, 128) / 2 + (pi_bits(type) == 5 ? pi_round_up(k, 512) / 8 : 0);
}

// Bytes of the d of a row, and of its m where it has them.
static inline int64_t pi_row_scales(int64_t k) { return pi_round_up(k / 32, 16) * 2; }

// Bytes of the row of one neuron.
static inline int64_t pi_row_bytes(int type, int64_t k) {
  const int scales = pi_across(type) >= 0 || pi_as_stored(type) ? 0 : pi_halves(type);
  return pi_round_up(pi_row_codes(type, k) + scales * pi_row_scales(k), 64);
}

// Bytes of the scales that the rows of a group share.
static inline int64_t pi_shared_bytes(int type, int64_t k) {
  return pi_across(type) >= 0 ? pi_facts(type).scales * pi_round_up(k, 128) : 0;
}

// The gate rows, up rows or down rows of the bundles of a layer. Groups are `stride` apart, the bundles of a group `pitch`,
// and in each of these the row is at byte `at`. Or they lie anywhere: bundle i 64 * lines[i] bytes behind `groups`, and
// the scales of group g 64 * shared_lines[g] behind `shared`.
struct PiRows {
  const uint8_t* groups;
  int64_t stride, pitch, at, k;
  int type;
  const uint32_t* lines = nullptr;
  const uint8_t* shared = nullptr;
  const uint32_t* shared_lines = nullptr;
};

static inline const uint8_t* pi_row(const PiRows* rows, int32_t i) {
  const int64_t bundle =
      rows->lines ? 64 * (int64_t)rows->lines[i] : i / PI_GROUP * rows->stride + i % PI_GROUP * rows->pitch;
  return rows->groups + bundle + rows->at;
}

// The scales that neuron i shares with its group.
static inline const uint8_t* pi_shared(const PiRows* rows, int32_t i) {
  const int64_t group = i / PI_GROUP;
  return rows->lines ? rows->shared + 64 * (int64_t)rows->shared_lines[group]
                     : rows->groups + group * rows->stride + PI_GROUP * rows->pitch;
}

// Activations for quantised rows, per token and 16 blocks of 32: s8 q[8][16][4], i32 sums of the blocks' q, f32 d;
// zeros after the last block. Where 1, 2, 4 or 8 blocks are left at the end of a row, its vectors are read side by side,
// as they lie: word m v + l is of block l, lane i has the d of block i % m, and at PI_LANES_HALVES, for m of 1 and 2, the
// words of vectors 0 to 3, those of 4 to 7 64 bytes behind.
enum { PI_LANES_HALVES = 256, PI_LANES_SUM = 512, PI_LANES_D = 576, PI_LANES_STEP = 640 };
static inline int64_t pi_lanes_bytes(int64_t k) { return pi_round_up(k, 512) / 512 * PI_LANES_STEP; }
static inline int pi_lanes_close(int64_t left) { return left == 1 || left == 2 || left == 4 || left == 8; }

struct PiNeuronKernels {
  // By the type of the rows: out[t * ldo + j] = neuron index[j] . token t. Quantised rows need `lanes`.
  void (*dots[PI_N_TYPES])(const PiRows*, const int32_t* index, int64_t n, const PiActs*, int64_t tokens, float* out,
                           int64_t ldo);
  // The same of pairs: out[j] = neuron of pair j . its token.
  void (*dot_pairs[PI_N_TYPES])(const PiRows*, const PiPair*, int64_t n, const PiActs*, float* out);
  // out[t * ldo + c] += sum over j, in their order, of h[t * ldh + j] * neuron index[j][c].
  void (*add)(const PiRows*, const int32_t* index, int64_t n, const float* h, int64_t ldh, int64_t tokens, float* out,
              int64_t ldo);
  // The same of pairs: h[j] * neuron of pair j to the row of its token.
  void (*add_pairs)(const PiRows*, const PiPair*, int64_t n, const float* h, float* out, int64_t ldo);
  // `add` of rows across neurons, with h as whole numbers: neuron j's is q[t * ldq + j] times d[t * ldd + g], where g
  // counts the groups that the list comes to. For each of these the sum is exact, so that sums are the same in any order
  // of neurons within a group; a list that comes back to a group rounds once more. Steps have ascending lists.
  void (*add_groups)(const PiRows*, const int32_t* index, int64_t n, const int8_t* q, int64_t ldq, const float* d,
                     int64_t ldd, int64_t tokens, float* out, int64_t ldo);
  // Panels of down from rows across neurons, `neurons` of them from `first` on: so many panels, of the type
  // pi_panels_across, whose rows are the columns from `column` on, all of one line of 128. first and neurons are multiples
  // of PI_GROUP, column of PI_LANES.
  void (*panels_across)(const PiRows*, int32_t first, int64_t neurons, int64_t column, int panels, uint8_t* out);
  // The j in [0, n) at which x[t * ldx + j] (or its magnitude) exceeds `limit` or is NaN for any token t, ascending,
  // as first + j; the number for each token is added to counts. Returns their number; up to 16 more are written.
  int64_t (*keep)(const float* x, int64_t ldx, int64_t tokens, int64_t n, int absolute, float limit, int32_t first,
                  int32_t* out, int64_t* counts);
  // Whether |x[j]| exceeds `limit` or is NaN, for any j in [0, n), n a multiple of 16; for each j in bit j % 16 of
  // bits[j / 16], which may be null.
  int (*fires)(const float* x, int64_t n, float limit, uint16_t* bits);
};

// ---- Gated DeltaNet ------------------------------------------------------------------------------------------------
// A state holds for each value head blocks of 16 columns, [block][key_dim][16] floats.

// The gated delta rule over consecutive tokens of a sequence, for one value head. For each token
//   state = decay * state;  state += key x (beta * (value - key . state));  out = query . state
// Keys, queries and values are rows `ld` apart; out replaces the values; gates: [t][ldg], first decay, then, `to_beta`
// further, beta. decays: rows of the keys' dimensions, `ld` apart, by which each row of the state decays, or null: then
// the gates' decay counts. Reads the state `from`, null for zeros, and leaves the new one in `to`, which may be the
// same.
struct PiDelta {
  const float *query, *key, *gates, *decays;
  float* value;
  int64_t ld, ldg, to_beta;
  const float* from;
  float* to;
  int64_t key_dim, tokens;
};

struct PiDeltaKernels {
  // Columns [c0, c1) of the values, multiples of 16.
  void (*rule)(const PiDelta*, int64_t c0, int64_t c1);
};

// ---- Mamba2 --------------------------------------------------------------------------------------------------------
// Tokens of a sequence are computed in chunks, which begin at positions that are multiples of PI_CHUNK: what a token
// gets from its chunk are products of matrices, what it gets from those before is one product with the state at the
// chunk's begin. The memory of a head is that state, in blocks of 16 columns [block][state_dim][16] floats, then, of a
// chunk that has begun, x of its tokens [PI_CHUNK][head_dim], their weights [PI_CHUNK] for the newest token (the step of
// each, times the decays since) and the decay of the state since the chunk's begin [16, the first counts].
enum { PI_CHUNK = 16 };
static inline int64_t pi_mamba_head(int64_t head_dim, int64_t state_dim) {
  return head_dim * (state_dim + PI_CHUNK) + PI_CHUNK + 16;
}

// Consecutive tokens of a chunk, for one head:  state = decay * state + step * x b^T;  y = state c + d * x.
// before, tokens: those of the chunk that are in `from`, and those that follow here. x, c, gates, scores: rows of the
// latter, `ld` apart; y replaces x; gates: first the step, then, `to_decay` further, the decay; scores: c . b of every
// token of the chunk up to the row's own [PI_CHUNK], zeros behind it. b: of every token of the chunk. Reads the memory
// `from`, null where a sequence begins, and leaves the new one in `to`, which may be the same.
struct PiMamba {
  float* x;
  const float *c, *gates, *scores;
  const float* b[PI_CHUNK];
  int64_t ld, to_decay;
  const float* from;
  float* to;
  int64_t head_dim, state_dim, before, tokens;
  float d;
};

struct PiMambaKernels {
  void (*advance)(const PiMamba*);
  // out[j] = c . b[j] for j in [0, n), zeros up to PI_CHUNK; rows of state_dim.
  void (*scores)(const float* c, const float* const* b, int64_t n, int64_t state_dim, float* out);
};

enum { PI_MOST_TAPS = 8 };  // of a convolution

// Panels [p0, p1) of a matrix by the tokens; scratch: pi_linear_scratch.
typedef void (*PiProduct)(const PiLinear*, const PiActs*, int64_t p0, int64_t p1, int64_t tokens, void* scratch);

struct PiKernels {
  const char* name;
  PiProduct linear[PI_N_TYPES];  // by the type of the matrix
  // Converts n elements of a row to the forms in `forms`, at the start of row 0 of `to`.
  void (*forms)(const float* x, int64_t n, int forms, const PiActs* to);
  // Norms of one row; out may be x. The bias of layer_norm may be null.
  void (*rms_norm)(const float* x, const float* w, int64_t n, float eps, float* out);
  void (*layer_norm)(const float* x, const float* w, const float* b, int64_t n, float eps, float* out);
  // gate = act(gate) * up, or act(gate) where up is null; n is a multiple of 16. The threshold is FATRELU's and CATS's; not
  // for XIELU.
  void (*activate)(int act, float threshold, float* gate, const float* up, int64_t n);
  // x = xielu(x); n is a multiple of 16. NaN stays.
  void (*xielu)(const PiXielu*, float* x, int64_t n);
  // Of each bank of PI_BANK elements of x keeps the `kept` whose magnitude is largest as a multiple of `unit`, the first
  // among equals, NaN before all others; the rest become 0. n is a multiple of PI_BANK.
  void (*keep_largest)(float* x, const float* unit, int64_t kept, int64_t n);
  void (*rope)(float* head, const float* cos, const float* sin, int64_t half);
  void (*scale)(float* x, float by, int64_t n);
  // x = limit * tanh(x / limit); n is a multiple of 16.
  void (*cap)(float* x, float limit, int64_t n);
  // Writes the key and the value of one slot of a page; either may be null.
  void (*store_kv)(int kv_type, uint8_t* head, int slot, const float* k, const float* v, int head_pad);
  // Writes the key of one slot of a page whose values are parts of its keys.
  void (*store_latent)(int kv_type, uint8_t* head, int slot, const float* k, int head_pad);
  // Rows r of kv head g: token r / group, head g * group + r % group. At most pi_attention_scratch floats of scratch.
  void (*attention[PI_N_KV_TYPES])(const PiAttention*, int g, int64_t r0, int64_t r1, float* scratch);
  // The same where a value is the first head_dim numbers of its key.
  void (*latent_attention[PI_N_KV_TYPES])(const PiAttention*, int g, int64_t r0, int64_t r1, float* scratch);
  // x[t] = bias + sum over j of w[j] * x[t - taps + 1 + j] for n channels, a multiple of 16, in place: rows `ld` apart,
  // w [taps][ldw], bias null for zeros. What precedes the first token is in `from` [taps - 1][lds], null for zeros; the
  // inputs of the last tokens go to `to`, which may be the same. 2 to PI_MOST_TAPS taps.
  void (*convolve)(float* x, int64_t ld, int64_t tokens, const float* w, const float* bias, int64_t ldw, int64_t taps,
                   const float* from, float* to, int64_t lds, int64_t n);
  PiNeuronKernels neurons;
  PiDeltaKernels delta;
  PiMambaKernels mamba;
};

// A source file of kernels is compiled once for each level that it gains something from, with PI_LEVEL naming it, and
// exports one function, PI_KERNELS(name of the file) { to->... = ...; }, which enters its kernels in the table of that
// level. What a level does not enter is that of the level it builds upon (levels.cpp).
#define PI_JOIN_(a, b, c) a##b##_##c
#define PI_JOIN(a, b, c) PI_JOIN_(a, b, c)
#define PI_KERNELS(file) extern "C" void PI_JOIN(pi_, file, PI_LEVEL)(PiKernels * to)

// Bytes of one page of one kv head: keys [head_pad][32], values [32][head_pad], for Q8_0 followed by f16 scales
// [head_pad / 32][32] and [32][head_pad / 32] (rounded up). latent: values are parts of keys, which alone are stored, as
// values are.
static inline int64_t pi_kv_head_bytes(int kv_type, int64_t head_pad, bool latent = false) {
  const int64_t rows = latent ? 1 : 2, n = head_pad * PI_PAGE * rows;
  if (kv_type == PI_KV_F32) return n * 4;
  if (kv_type == PI_KV_F16) return n * 2;
  return pi_round_up(n + rows * (pi_round_up(head_pad, 32) / 32) * PI_PAGE * 2, 64);
}

enum { PI_ATTENTION_ROWS = 12 };
static inline int64_t pi_attention_scratch(int64_t head_pad) { return PI_ATTENTION_ROWS * (head_pad + PI_PAGE + 16); }

// Activations of that many bytes stay in a core's L2 cache while the panels of a matrix are read (tile unit).
enum { PI_AMX_ACTS = 524288 };

// Tokens whose sums a thread has in memory while it reads a panel in pieces (products_pieces.h).
enum { PI_PIECE_TOKENS = 252 };

// Rows of activations that a thread has in its scratch as floats: a multiple of 12, which all tiles divide.
static inline int64_t pi_floats_at_once(int64_t k) {
  const int64_t tokens = 98304 / k / 12 * 12;
  return tokens < 12 ? 12 : tokens;
}

// Panels of k columns, an even number, that are widened at once for more tokens than the L2 cache holds: half of it does
// these.
static inline int64_t pi_wide_panels(int64_t k) {
  const int64_t fit = 786432 / (k * (16 + 10)) / 2 * 2;
  return fit < 2 ? 2 : fit > 8 ? 8 : fit;
}

// Bytes of scratch for `linear` per thread, 64-byte aligned, whichever is most. Quantised weights: the blocks of such panels
// widened to a byte a code and five floats a row, and a float for each 16 of 393,216 bytes of activations; or a piece of a
// panel likewise, sums, the factors of tokens, of which so many bytes of activations have as many, and these activations
// as words of 16 bits, half as many. The tile unit: a tile of sums, the scales of the activations in tile order and the
// codes of one panel. BF16: activations as floats. F16: a piece of a panel as floats, and sums.
static inline int64_t pi_linear_scratch(int64_t k) {
  const int64_t some = PI_AMX_ACTS / k / 16 * 16, tokens = some < 16 ? 16 : some, blocks = pi_round_up(k, 256) / 32;
  const int64_t many = 393216 / k < 6 ? 6 : 393216 / k,
                at_once = many < PI_PIECE_TOKENS ? many : (int64_t)PI_PIECE_TOKENS,
                acts = 6 * k > 393216 ? 6 * k : 393216;
  const int64_t bytes[] = {
      pi_wide_panels(k) * blocks * (512 + 5 * 64) + acts / 4, 4096 + tokens * (k / 32 + 1) * 12 + blocks * 512,
      32 * (512 + 5 * 64) + PI_PIECE_TOKENS * 64 + at_once * (k / 32) * 16 + (12 * k > 393216 ? 12 * k : 393216),
      pi_floats_at_once(pi_round_up(k, 32)) * pi_round_up(k, 32) * 4};
  int64_t most = 0;
  for (int64_t n : bytes) most = n > most ? n : most;
  return 4096 + most;
}
