// Products with blocks of 32 with a scale, and a minimum.
#include "products_quantised.h"

PI_KERNELS(products_q) {
  to->linear[PI_Q8_0] = linear<WQ8_0>;
  to->linear[PI_Q4_0] = linear<WQ4_0>;
  to->linear[PI_Q4_1] = linear<WQ4_1>;
  to->linear[PI_Q5_0] = linear<WQ5_0>;
  to->linear[PI_Q5_1] = linear<WQ5_1>;
}
