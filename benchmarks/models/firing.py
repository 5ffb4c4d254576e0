"""The thresholds that make neurons fire as often as wanted under Gaussian noise.

A neuron's gate sees its noise, a Gaussian of variance 1 of which a share is `rest` (full-rank, nobody predicts it) and
the remainder comes from a few directions that a predictor knows. The neuron fires where that noise exceeds the
threshold t. Everything here is quadrature over the known part y ~ N(0, 1): given y the noise is N(known * y, rest).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]

_KNOWN = np.linspace(-8, 8, 1601)
_DENSITY = np.exp(-_KNOWN * _KNOWN / 2) / math.sqrt(2 * math.pi) * (_KNOWN[1] - _KNOWN[0])  # sums to 1
_THRESHOLDS = np.linspace(-6, 6, 241)
_TABLE_X = np.linspace(-9, 9, 36001)
_TABLE_CDF = np.array([0.5 * math.erfc(-x / math.sqrt(2)) for x in _TABLE_X])


def normal_cdf(x: Float64) -> Float64:
    """The standard normal's distribution function, by table, to 1e-9."""
    return np.interp(x, _TABLE_X, _TABLE_CDF)


@dataclass(frozen=True)
class Firing:
    """A family of neurons: activation ("relu", "relu2", "fatrelu", "drelu"), whether gated, the noise they see.

    rest: share of the noise's variance that no predictor knows; recall: share of firings that a predictor is to
    name; offset: what a FATReLU gate must exceed. Probabilities are of h != 0; for drelu both gate and up must fire,
    which see the same known noise and have rests of their own.
    """

    activation: str
    gated: bool
    rest: float
    recall: float = 0.95
    offset: float = 0.0

    @property
    def known_part(self) -> float:
        """Standard deviation of the known noise."""
        return math.sqrt(1 - self.rest)

    @cached_property
    def _given_known(self) -> Float64:
        """P(fires | y), [thresholds, y]."""
        distance = self.known_part * _KNOWN - _THRESHOLDS[:, None]
        one = normal_cdf(distance / math.sqrt(self.rest))
        return one * one if self.activation == "drelu" else one

    @cached_property
    def _probabilities(self) -> Float64:
        """P(fires) of each of _THRESHOLDS, falling."""
        return self._given_known @ _DENSITY

    def threshold(self, p: Float64) -> Float64:
        """What the noise must exceed for the neuron to fire with probability p."""
        # log p is nearly a parabola in t, so a straight line between table points is close; p near 1 is linear in 1-p
        logs = np.log(self._probabilities) - np.log1p(-np.minimum(self._probabilities, 1 - 1e-12))
        wanted = np.log(p) - np.log1p(-np.asarray(p))
        return np.interp(wanted, logs[::-1], _THRESHOLDS[::-1])

    def cut(self, p: Float64) -> Float64:
        """What the known noise y must exceed to be a candidate, so that `recall` of the firings are candidates."""
        from_top = np.cumsum((self._given_known * _DENSITY)[:, ::-1], axis=1)
        wanted = self.recall * self._probabilities
        cuts = [np.interp(w, row, _KNOWN[::-1]) for w, row in zip(wanted, from_top, strict=True)]
        return np.interp(self.threshold(p), _THRESHOLDS, cuts)

    def candidates(self, p: Float64) -> Float64:
        """Probability that a neuron is a candidate."""
        return 1 - normal_cdf(self.cut(p))

    def moments(self, p: Float64, scale: float) -> tuple[Float64, Float64]:
        """(E h, E h^2) of neurons that fire with probability p; scale: standard deviation of a row times the norm."""
        if self.activation == "drelu":
            first, second = _relu_moments(self.known_part * _KNOWN - _THRESHOLDS[:, None], math.sqrt(self.rest))
            mean, square = scale**2 * first**2 @ _DENSITY, scale**4 * second**2 @ _DENSITY
        else:
            excess = _KNOWN - _THRESHOLDS[:, None]
            value = np.where(excess > 0, scale * excess + self.offset, 0.0)
            value = value * value if self.activation == "relu2" else value
            mean, square = value @ _DENSITY, value * value @ _DENSITY
            if self.gated:  # times up, of mean 0 and the same scale
                mean, square = np.zeros_like(mean), square * scale**2
        at = self.threshold(p)
        return np.interp(at, _THRESHOLDS, mean), np.interp(at, _THRESHOLDS, square)


def _relu_moments(mean: Float64, deviation: float) -> tuple[Float64, Float64]:
    """E relu(g) and E relu(g)^2 of a Gaussian g."""
    a = mean / deviation
    density = np.exp(-a * a / 2) / math.sqrt(2 * math.pi)
    above = normal_cdf(a)
    return deviation * (density + a * above), deviation**2 * ((1 + a * a) * above + a * density)
