// Products with blocks of 32 or more with a scale, and a minimum.
#include "products_quantised.h"

PI_KERNELS(products_q) { PI_Q_TYPES(PI_USE) }
