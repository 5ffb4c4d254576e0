// Matrices whose weights rest as bundles: panels of some of these neurons are made as they are multiplied.
#pragma once
#include <memory>

#include "bundles.h"
#include "weights.h"

enum class BundlePart { GATE, UP, DOWN };

// Gate, up or down of `neurons` neurons from `first` on, both multiples of PI_GROUP, of bundles in memory.
// std::invalid_argument where these have no such rows.
Matrix bundle_matrix(std::shared_ptr<const Bundles> bundles, BundlePart part, int64_t first, int64_t neurons);
