// The grids of the IQ types as kernels look them up. Included by ISA files, which take nothing but data from outside.
#pragma once
#include "types.h"

// Values of IQ2, by their numbers.
#define PI_IQ2_VALUES 8, 25, 43

// A word for each entry. IQ3_S: four values, a byte each, and IQ3_XXS: halves of these, which are even. IQ2 and IQ1: the numbers of
// eight values; byte e has value e in its low half, value 4 + e in its high half.
template <int n>
struct PiEntries {
  uint32_t of[n];
};
extern const PiEntries<512> PI_ENTRIES_IQ3_S;
extern const PiEntries<256> PI_ENTRIES_IQ3_XXS;
extern const PiEntries<256> PI_ENTRIES_IQ2_XXS;
extern const PiEntries<512> PI_ENTRIES_IQ2_XS;
extern const PiEntries<1024> PI_ENTRIES_IQ2_S;
extern const PiEntries<2048> PI_ENTRIES_IQ1;
