"""Assumed firing frequencies for models without a profile: a power law over the ranks of a layer's neurons.

    p(q) = min(TOP, a * q ** -skew),  q = (i + 0.5) / n for the neuron of rank i of n

with `a` such that the mean is the fraction of neurons that fire for a token. The means of the layers grow
geometrically from the first to the last. `FAMILIES` has the figures that papers report for whole models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from powerinfer.errors import RequestError
from powerinfer.neurons import Profile

Float64 = NDArray[np.float64]

TOP = 0.9999
"""The largest probability."""
HOT = 0.8
"""Hot neurons: the fewest that carry this share of the activations, as in the paper (arXiv 2312.12456, 3.1)."""

_TOKENS = 1_000_000  # of a synthetic profile: as many as the paper's, fine enough for any neuron that matters
_MOST_SKEW = 20.0
_FIT = 2048  # ranks used to fit a skew


@dataclass(frozen=True)
class Law:
    """active: fraction of the neurons that fire for a token, mean over the layers; hot: share of a layer's neurons that
    carry HOT of its activations, mean over the layers; ratio: mean fraction of the last layer relative to the first."""

    active: float
    hot: float
    ratio: float = 1.0


FAMILIES: dict[str, Law] = {
    # arXiv 2312.12456: OPT-30B, 3 %; 26 % of a layer carry 80 %, and 17 % of the model, for which the ratio is solved
    "opt": Law(0.03, 0.26, 74),
    # the same: LLaMA2-70B (ReGLU), 18 %, 43 % of a layer and 26 % of the model
    "reglu-70b": Law(0.18, 0.43, 64),
    # the same: sparsity of 78 and 70 %; shares of smaller models are not reported, that of a layer is taken over
    "reglu-13b": Law(0.22, 0.43),
    "reglu-7b": Law(0.30, 0.43),
    # the same: Falcon-40B, sparsity of 95 %; share of a layer taken over from OPT, which is a plain ReLU FFN too
    "falcon": Law(0.05, 0.26),
    # Bamboo: sparsity of 90 %; share unknown, that of Zipf's law (skew 1), to which the shares above come close
    "drelu": Law(0.10, 0.38),
    # Nemotron 3 Nano: of 72,174 calls of experts 90.69 % zeros (kennydd001/ervf), 81 to 96 % by layer, in an order that
    # is not stated; share unknown, as of Bamboo. The dense models of the family are taken to be like it
    "nemotron-h": Law(0.0931, 0.38),
    # arXiv 2507.20984: of the neurons of the experts that a token selects over 60 % are idle; share as of ReGLU
    "smallthinker": Law(0.40, 0.43),
    # arXiv 2312.12456: SwiGLU models leave out 40 to 53 % below a threshold; 69 % of a layer of LLaMA2-70B carry 80 %
    "swiglu": Law(0.50, 0.69),
}


def power_law(mean: float, skew: float, n: int) -> Float64:
    """n probabilities with that mean, largest first: p(q) = min(TOP, a * q ** -skew) at ranks q = (i + 0.5) / n.

    mean: from 0, exclusive, to 1; TOP and above gives TOP for all. skew: from 0, all alike, to 20.
    """
    assert 0 < mean <= 1 and 0 <= skew <= _MOST_SKEW
    if mean >= TOP or not n:
        return np.full(n, TOP)
    ranks = np.arange(n)
    shape = (2.0 * ranks + 1) ** -skew  # largest first, from 1
    # If the first t are clipped to TOP, `a` follows from the mean; t is the smallest for which no other exceeds TOP.
    rest = np.cumsum(shape[::-1])[::-1]
    a = (mean * n - TOP * ranks) / rest
    cut = int(np.argmax(a * shape <= TOP))
    return np.asarray(np.minimum(TOP, a[cut] * shape))


def layer_means(mean: float, ratio: float, n_layers: int) -> list[float]:
    """Mean fraction of every layer: growing geometrically, the last `ratio` times the first, `mean` on average.

    ValueError if a layer's fraction would exceed 1.
    """
    growth = ratio ** (np.arange(n_layers) / max(1, n_layers - 1))
    means = mean * growth / growth.mean()
    if means.max() > 1:
        raise ValueError(
            f"a mean of {mean} with a ratio of {ratio} between layers means {means.max():.2f} in one layer"
        )
    return [float(one) for one in means]


def hot_share(activations: NDArray[np.floating] | NDArray[np.integer]) -> float:
    """Share of neurons, the busiest first, that carry HOT of all activations (counts or probabilities)."""
    descending = np.sort(np.asarray(activations, np.float64).ravel())[::-1]
    carried = np.cumsum(descending)
    return float((np.searchsorted(carried, HOT * carried[-1]) + 1) / len(descending))


def fit_skew(law: Law, n_layers: int) -> float:
    """The skew for which the layers' mean `hot_share` is `law.hot`. RequestError if there is none."""
    try:
        means = layer_means(law.active, law.ratio, n_layers)
    except ValueError as error:
        raise RequestError(f"{error}; choose a smaller --active") from None

    if min(means) >= TOP:
        return 0.0  # all fire, whatever the skew

    def share(skew: float) -> float:
        return float(np.mean([hot_share(power_law(mean, skew, _FIT)) for mean in means]))

    low, high = 0.0, _MOST_SKEW
    if not share(high) <= law.hot <= share(low):
        raise RequestError(
            f"where {100 * law.active:g} % of the neurons fire, {100 * HOT:g} % of the activations are carried by "
            f"{100 * share(high):.2g} to {100 * share(low):g} % of a layer's neurons, not by {100 * law.hot:g} % "
            "(--hot-share)"
        )
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (middle, high) if share(middle) > law.hot else (low, middle)
    return (low + high) / 2


def assumed_profile(law: Law, sizes: Sequence[int]) -> Profile:
    """A synthetic profile with that skew: neuron i is the i-th most frequent of its layer.

    sizes: neurons of each layer.
    """
    skew = fit_skew(law, len(sizes))
    means = layer_means(law.active, law.ratio, len(sizes))
    shares = (power_law(mean, skew, size) for mean, size in zip(means, sizes, strict=True))
    counts = tuple(np.rint(_TOKENS * share).astype(np.int64) for share in shares)
    parts = tuple(np.zeros((0, size), np.int64) for size in sizes)
    active = tuple(np.bincount([int(100 * mean)], weights=[_TOKENS], minlength=101).astype(np.int64) for mean in means)
    return Profile(_TOKENS, counts, (), (), parts, active, (0.0,) * len(sizes))
