"""Selectors: which neurons of a layer are computed for a token.

    all        every neuron
    exact      those whose gate fires: the dense answer, if inactive gates are exactly zero
    predicted  those that a predictor selects and whose gate, computed exactly, fires
    threshold  those whose activation exceeds a threshold: lossy, for activations that are never exactly zero

The native operators do this work (csrc/ffn.cpp).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from powerinfer.config import ModelConfig
from powerinfer.errors import RequestError


class Selector(Protocol):
    """Selects the neurons to compute."""

    name: str
    way: str  # of the native operator
    needs_predictor: bool

    def unsuited(self, config: ModelConfig) -> str | None:
        """Why a model of this configuration cannot use it, and what to use instead; None if it can."""
        ...


class All:
    name, way, needs_predictor = "all", "dense", False

    def unsuited(self, config: ModelConfig) -> str | None:
        return None


class Exact:
    name, way, needs_predictor = "exact", "exact", False

    def unsuited(self, config: ModelConfig) -> str | None:
        if config.rectified:
            return None
        return f"the activation {config.activations} is never exactly zero: use --selector threshold, which is lossy"


class Predicted:
    name, way, needs_predictor = "predicted", "predicted", True

    def unsuited(self, config: ModelConfig) -> str | None:
        if config.rectified:
            return None
        return f"no predictor can select neurons of the activation {config.activations}: use --selector threshold"


@dataclass(frozen=True)
class Threshold:
    """Activations of a magnitude up to `value` count as zero (CATS, arXiv 2404.08763).

    layers: the thresholds of the layers, None: `value` for all.
    """

    value: float
    layers: tuple[float, ...] | None = None
    name, way, needs_predictor = "threshold", "exact", False

    def of(self, layer: int) -> float:
        """The threshold of a layer."""
        return self.value if self.layers is None else self.layers[layer]

    def unsuited(self, config: ModelConfig) -> str | None:
        return None


def check_suited(selector: Selector, config: ModelConfig) -> None:
    """RequestError if a model of this configuration cannot use the selector."""
    unsuited = selector.unsuited(config)
    if unsuited is not None:
        raise RequestError(f"selector {selector.name}: {unsuited}")


def selector_named(
    name: str, threshold: float | None, calibrated: Callable[[], tuple[float, ...]] | None = None
) -> Selector:
    """The selector of that name. RequestError for a missing or superfluous threshold.

    calibrated: returns the thresholds of the layers if no threshold is given.
    """
    if name == "threshold":
        if threshold is None and calibrated is not None:
            layers = calibrated()
            return Threshold(max(layers), layers)
        if threshold is None or not 0 < threshold < float("inf"):
            raise RequestError("--selector threshold needs --threshold X, a positive number")
        return Threshold(threshold)
    if threshold is not None:
        raise RequestError(f"--threshold goes with --selector threshold, not with {name}")
    known: dict[str, Selector] = {"all": All(), "exact": Exact(), "predicted": Predicted()}
    return known[name]
