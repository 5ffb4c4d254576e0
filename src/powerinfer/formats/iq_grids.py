"""The grids of the IQ types: vectors of 4 or 8 small numbers, to which blocks refer (csrc/grid_tables.cpp)."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from powerinfer.formats.weight_types import grid_values


@cache
def grid(name: str) -> NDArray[np.float32]:
    """The grid of that name, float32 [vectors, elements]; IQ1_S and IQ1_M share "IQ1"."""
    return np.array(grid_values(name), np.float32).reshape(-1, 4 if name.startswith("IQ3") else 8)
