// Products with codes that are numbers of entries in a table.
#include "products_quantised.h"

PI_KERNELS(products_iq) { PI_IQ_TYPES(PI_USE) }
