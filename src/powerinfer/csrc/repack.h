// From bundles to panels: weights that rest as bundles, for products with many tokens.
#pragma once
#include "table.h"

// The type of panels that rows of bundles become without loss; -1: there is none.
int repacked_type(int row_type);

// Writes one or two panels, 16 matrix rows each, as pack_panels does of the same weights.
// Of gate or up: the rows of neurons from `first` on, a multiple of 32.
void panels_of_neurons(const PiRows& rows, int64_t first, int panels, uint8_t* out);
// Of down: its rows (columns of the bundles' rows) from `row` on, a multiple of 32, over `neurons` neurons from `first`
// on, both multiples of 32.
void panels_of_outputs(const PiRows& rows, int64_t first, int64_t neurons, int64_t row, int panels, uint8_t* out);
