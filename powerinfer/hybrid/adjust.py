"""Which neurons trade places while a model serves: what has become hot for what has cooled (pure functions)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from powerinfer.neurons import Indices

NOISE = 3.0
"""Standard deviations by which a cold neuron must have fired more often than the hot one that it takes the place of."""

MOST = 512
"""Neurons of a layer that trade places at a time, on either side."""


def trades(fired: NDArray[np.float64], hot: Indices, cold: Indices, most: int = MOST) -> tuple[Indices, Indices]:
    """(those of `hot` that leave, those of `cold` that come), as many, the clearest first.

    fired: float64 [d_ff], tokens that each neuron fired for lately. The coldest of the hot is set against the hottest
    of the cold, and so on. Counts scatter by their roots, so a difference below `NOISE` roots of their sum is none:
    what is equally hot does not change places again and again.
    """
    leave = hot[np.argsort(fired[hot], kind="stable")][:most]
    come = cold[np.argsort(-fired[cold], kind="stable")][:most]
    n = min(len(leave), len(come))
    less, more = fired[leave[:n]], fired[come[:n]]
    clear = more - less > NOISE * np.sqrt(more + less)
    n = int(np.argmin(clear)) if not clear.all() else n
    return leave[:n], come[:n]
