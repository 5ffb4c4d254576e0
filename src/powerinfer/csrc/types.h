// The weight types: all that the engine knows of each without a kernel, stated once. C++ generates its enum, its tables and
// its lists of kernels from these rows; Python reads them as `_native.types()` (formats/weight_types.py). Included by ISA
// files, so: no std headers, everything static.
#pragma once
#include <stdint.h>

// X(name, ggml id, block, bytes, at, codes, scales, d, m, offset, values, form, rows, gpu)
//
//   block, bytes  a stored block: elements along k, and its bytes in a model file
//   at, codes     where in it the codes begin, and their bytes; a panel (table.h) has 16 times as many
//   scales        bytes of the scales of a row in a panel, for each block
//   d, m          where in a block its float16 scale and minimum are; -1: it has none
//   offset        by how much codes are stored above their value
//   values        what a code is: a FLOATS number, a WHOLE number, the number of an entry of IQ4 or of E2M1, or it is
//                 part of an entry of a GRID (grid_entries.h)
//   form          the form of activations that its products take (PiForm)
//   rows          what rows of neurons of this type are for: DOT (gate and up), ADD (down); X32: blocks of down may lie as
//                 in model files, each across the 32 neurons of a group (type NAMEX32)
//   gpu           its type on a GPU: its own; or that of its values in panels, another that keeps them all or F16, to which
//                 they are rounded (matrices from files become Q8_0)
//
// By the files with their products: products_float and _bf16, _q, _k, _iq, _grids.
#define PI_FLOAT_TYPES(X)                                        \
  X(F32, 0, 1, 4, 0, 4, 0, -1, -1, 0, FLOATS, F32, NONE, F32)    \
  X(F16, 1, 1, 2, 0, 2, 0, -1, -1, 0, FLOATS, F32, DOT_ADD, F16) \
  X(BF16, 30, 1, 2, 0, 2, 0, -1, -1, 0, FLOATS, BF16, DOT_ADD, BF16)
#define PI_Q_TYPES(X)                                                  \
  X(Q8_0, 8, 32, 34, 2, 32, 2, 0, -1, 0, WHOLE, Q8, DOT_ADD_X32, Q8_0) \
  X(Q4_0, 2, 32, 18, 2, 16, 2, 0, -1, 8, WHOLE, Q8, DOT_ADD_X32, Q4_0) \
  X(Q4_1, 3, 32, 20, 4, 16, 4, 0, 2, 0, WHOLE, Q8, DOT_X32, F16)       \
  X(Q5_0, 6, 32, 22, 2, 20, 2, 0, -1, 16, WHOLE, Q8, DOT_X32, Q8_0)    \
  X(Q5_1, 7, 32, 24, 4, 20, 4, 0, 2, 0, WHOLE, Q8, DOT_X32, F16)       \
  X(Q2_0, 42, 64, 18, 2, 16, 2, 0, -1, 1, WHOLE, Q8, DOT, Q2_0)        \
  X(Q1_0, 41, 128, 18, 2, 16, 2, 0, -1, 1, WHOLE, Q8, DOT, Q1_0)
#define PI_K_TYPES(X)                                                  \
  X(Q4_K, 12, 256, 144, 16, 128, 20, 0, 2, 0, WHOLE, Q8, DOT, Q4_K)    \
  X(Q5_K, 13, 256, 176, 16, 160, 20, 0, 2, 0, WHOLE, Q8, DOT, Q5_K)    \
  X(Q6_K, 14, 256, 210, 0, 192, 18, 208, -1, 32, WHOLE, Q8, DOT, Q6_K) \
  X(Q3_K, 11, 256, 110, 0, 96, 18, 108, -1, 4, WHOLE, Q8, DOT, Q3_K)   \
  X(Q2_K, 10, 256, 84, 16, 64, 20, 80, 82, 0, WHOLE, Q8, DOT, Q2_K)    \
  X(TQ2_0, 35, 256, 66, 0, 64, 2, 64, -1, 1, WHOLE, Q8, DOT, TQ2_0)    \
  X(TQ1_0, 34, 256, 54, 0, 52, 2, 52, -1, 1, WHOLE, Q8, DOT, TQ1_0)
#define PI_IQ_TYPES(X)                                                \
  X(IQ4_NL, 20, 32, 18, 2, 16, 2, 0, -1, 0, IQ4, Q8, DOT_X32, Q8_0)   \
  X(IQ4_XS, 23, 256, 136, 8, 128, 10, 0, -1, 0, IQ4, Q8, DOT, IQ4_XS) \
  X(MXFP4, 39, 32, 17, 1, 16, 1, -1, -1, 0, E2M1, Q8, X32, MXFP4)     \
  X(NVFP4, 40, 64, 36, 4, 32, 4, -1, -1, 0, E2M1, Q8, NONE, NVFP4)
#define PI_GRID_TYPES(X)                                               \
  X(IQ3_S, 21, 256, 110, 2, 104, 6, 0, -1, 15, GRID, Q8, DOT, IQ3_S)   \
  X(IQ3_XXS, 18, 256, 98, 2, 96, 6, 0, -1, 31, GRID, Q8, DOT, IQ3_XXS) \
  X(IQ2_XS, 17, 256, 74, 2, 68, 10, 0, -1, 43, GRID, Q8, DOT, IQ2_XS)  \
  X(IQ2_S, 22, 256, 82, 2, 72, 10, 0, -1, 43, GRID, Q8, DOT, IQ2_S)    \
  X(IQ2_XXS, 16, 256, 66, 2, 64, 6, 0, -1, 43, GRID, Q8, DOT, IQ2_XXS) \
  X(IQ1_S, 19, 256, 50, 2, 44, 6, 0, -1, 1, GRID, Q8, DOT, IQ1_S)      \
  X(IQ1_M, 29, 256, 56, 0, 48, 10, -1, -1, 9, GRID, Q8, DOT, IQ1_M)
#define PI_QUANTISED_TYPES(X) PI_Q_TYPES(X) PI_K_TYPES(X) PI_IQ_TYPES(X) PI_GRID_TYPES(X)
#define POWERINFER_TYPES(X) PI_FLOAT_TYPES(X) PI_QUANTISED_TYPES(X)

// The other types of GGUF files, which are converted when they are loaded: X(name, ggml id, block, bytes).
#define POWERINFER_STORED_TYPES(X) \
  X(Q8_1, 9, 32, 36)               \
  X(Q8_K, 15, 256, 292)            \
  X(I8, 24, 1, 1)                  \
  X(I16, 25, 1, 2)                 \
  X(I32, 26, 1, 4)                 \
  X(I64, 27, 1, 8)                 \
  X(F64, 28, 1, 8)

#define PI_NAME(name, ...) PI_##name,
enum PiType { POWERINFER_TYPES(PI_NAME) PI_N_TYPES };
#undef PI_NAME

// Rows of neurons whose blocks lie across the neurons of a group, of those types that have any.
#define PI_NAME(name, ...) PI_##name##X32 = PI_N_TYPES + PI_##name,
enum PiTypeAcross { POWERINFER_TYPES(PI_NAME) PI_END_X32 };
#undef PI_NAME

// Forms of an activation row; a weight type needs exactly one.
enum PiForm { PI_FORM_F32 = 1, PI_FORM_BF16 = 2, PI_FORM_Q8 = 4 };

enum PiValues { PI_VALUES_FLOATS, PI_VALUES_WHOLE, PI_VALUES_IQ4, PI_VALUES_E2M1, PI_VALUES_GRID };

enum {
  PI_ROWS_NONE = 0,
  PI_ROWS_DOT = 1,
  PI_ROWS_ADD = 2,
  PI_ROWS_DOT_ADD = 3,
  PI_ROWS_X32 = 4,
  PI_ROWS_DOT_X32 = 5,
  PI_ROWS_DOT_ADD_X32 = 7
};

struct PiTypeFacts {
  const char* name;
  int32_t id, block, bytes, at, codes, scales, d, m, offset, values, form, rows;
  const char* gpu;
};

static constexpr PiTypeFacts PI_TYPES[PI_N_TYPES] = {
#define PI_FACTS(name, id, block, bytes, at, codes, scales, d, m, offset, values, form, rows, gpu) \
  {#name, id, block, bytes, at, codes, scales, d, m, offset, PI_VALUES_##values, PI_FORM_##form, PI_ROWS_##rows, #gpu},
    POWERINFER_TYPES(PI_FACTS)
#undef PI_FACTS
};

static constexpr PiTypeFacts PI_STORED_TYPES[] = {
#define PI_SIZES(name, id, block, bytes) \
  {#name, id, block, bytes, 0, 0, 0, -1, -1, 0, PI_VALUES_FLOATS, PI_FORM_F32, PI_ROWS_NONE, ""},
    POWERINFER_STORED_TYPES(PI_SIZES)
#undef PI_SIZES
};

// The entries that codes of IQ4 and, doubled, of E2M1 stand for.
alignas(16) static constexpr int8_t PI_IQ4_ENTRIES[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                                          1,    13,   25,  38,  53,  69,  89,  113};
alignas(16) static constexpr int8_t PI_E2M1_ENTRIES[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// The type of the blocks that lie across the neurons of a group, -1: they lie along a neuron.
static inline int pi_across(int type) { return type >= PI_N_TYPES ? type - PI_N_TYPES : -1; }

// Facts of a type, or of the blocks that lie across neurons.
static inline const PiTypeFacts& pi_facts(int type) { return PI_TYPES[type % PI_N_TYPES]; }

static inline int pi_form(int type) { return pi_facts(type).form; }

// Elements of one stored block of a type, along k.
static inline int64_t pi_block(int type) { return pi_facts(type).block; }
