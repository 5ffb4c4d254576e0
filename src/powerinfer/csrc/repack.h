// From bundles to panels: weights that rest as bundles, for products with many tokens.
#pragma once
#include "table.h"

// The type of panels that rows of bundles become without loss; -1: there is none.
int repacked_type(int row_type);

// Writes panels, 16 matrix rows each, with the values of the same weights, and so products of the same bits.
// Of gate or up, one or two: the rows of neurons from `first` on, a multiple of 32.
void panels_of_neurons(const PiRows& rows, int64_t first, int panels, uint8_t* out);
// Of down, of a line of 128: its rows (columns of the bundles' rows) from `row` on, a multiple of 16, over `neurons`
// neurons from `first` on, both multiples of 32.
void panels_of_outputs(const PiKernels* kernels, const PiRows& rows, int64_t first, int64_t neurons, int64_t row,
                       int panels, uint8_t* out);
// What `panels_of_outputs` reads for the next line of rows, by panels of this one; nothing depends on it. Groups lie evenly
// apart.
void outputs_ahead(const PiRows& rows, int64_t first, int64_t row, PiAhead (&ahead)[8]);
