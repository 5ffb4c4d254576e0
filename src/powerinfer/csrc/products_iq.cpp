// Products with codes that are numbers of entries in a table.
#include "products_quantised.h"

PI_KERNELS(products_iq) {
  to->linear[PI_IQ4_NL] = linear<WIQ4_NL>;
  to->linear[PI_IQ4_XS] = linear<WIQ4_XS>;
  to->linear[PI_MXFP4] = linear<WMXFP4>;
}
