// Products with K-quants: blocks of 32 or 16 in one of 256.
#include "products_quantised.h"

PI_KERNELS(products_k) { PI_K_TYPES(PI_USE) }
