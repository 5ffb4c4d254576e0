// Products with K-quants: blocks of 32 or 16 in one of 256.
#include "products_quantised.h"

PI_KERNELS(products_k) {
  to->linear[PI_Q4_K] = linear<WQ4_K>;
  to->linear[PI_Q5_K] = linear<WQ5_K>;
  to->linear[PI_Q6_K] = linear<WQ6_K>;
}
