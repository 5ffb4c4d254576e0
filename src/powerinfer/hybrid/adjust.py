"""Which neurons, or experts, to swap while a model serves: those that have become hot for those that have cooled.

Pure functions.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from powerinfer.neurons import Indices

NOISE = 3.0
"""Standard deviations by which a cold neuron must have fired more often than the hot one that it replaces."""

MAX_SWAPS = 512
"""Maximum number of neurons of a layer swapped at a time."""


def trades(fired: NDArray[np.float64], hot: Indices, cold: Indices, limit: int = MAX_SWAPS) -> tuple[Indices, Indices]:
    """(neurons of `hot` to move to the CPU, the same number of `cold` to move to the GPU), largest difference first.

    fired: float64 [neurons], tokens for which each fired recently; of experts, that selected each. The coldest hot
    neuron is compared with the hottest cold one, and so on. The standard deviation of a count is its square root, so a
    difference below `NOISE` roots of the sum is ignored: equally hot neurons are not swapped back and forth.
    """
    leave = hot[np.argsort(fired[hot], kind="stable")][:limit]
    come = cold[np.argsort(-fired[cold], kind="stable")][:limit]
    n = min(len(leave), len(come))
    less, more = fired[leave[:n]], fired[come[:n]]
    clear = more - less > NOISE * np.sqrt(more + less)
    n = int(np.argmin(clear)) if not clear.all() else n
    return leave[:n], come[:n]
