// Products with codes that are entries of grids.
#include "products_quantised.h"

#include "quants_grids.h"

PI_KERNELS(products_grids) { PI_GRID_TYPES(PI_USE) }
