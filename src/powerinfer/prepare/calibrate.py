"""Thresholds for activations that are never exactly zero: how much can be skipped at a stated increase in perplexity.

As in CATS (arXiv 2404.08763, section 3.2): the threshold of a layer is a quantile of the magnitudes of act(gate . n),
and all layers use the same quantile. CATS chooses it by hand; here it is the largest one, found by bisection, whose
perplexity on held-out windows of the text stays within the cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from powerinfer.devices.batch import Batch
from powerinfer.devices.cpu import CpuExecutor, Fired, magnitude
from powerinfer.prepare.counting import run_windows
from powerinfer.progress import Progress, silent

if TYPE_CHECKING:
    from powerinfer.neurons import Counts
    from powerinfer.prepare.corpus import Windows

MAX_SHARE = 0.98
"""The largest quantile tried."""

HALVINGS = 7
"""Number of bisections: the final interval of the quantile is below 0.008."""

SCORED, MEASURED = 32, 64  # maximum windows for perplexity, and for magnitudes


class Silenced:
    """An executor that skips activations below thresholds for tokens with logits, as decode would.

    The tokens before them are computed densely, like a prompt.
    """

    def __init__(self, executor: CpuExecutor, thresholds: Sequence[float] | None) -> None:
        self.page_size, self.n_pages, self.n_states = executor.page_size, executor.n_pages, executor.n_states
        self.drafter = None
        self.max_tokens, self.vocab_size, self.disk = executor.max_tokens, executor.vocab_size, executor.disk
        self.choices, self.bytes_per_token, self.traced = executor.choices, executor.bytes_per_token, executor.traced
        self._executor, self._thresholds = executor, thresholds

    def forward(self, batch: Batch) -> NDArray[np.float32]:
        decoded = self._thresholds is not None and len(batch.logit_rows)
        with self._executor.observed(None, self._thresholds, silence=True) if decoded else nullcontext():
            return self._executor.forward(batch)

    def hidden_states(self, rows: NDArray[np.int32]) -> NDArray[np.float32]:
        return self._executor.hidden_states(rows)

    def close(self) -> None:
        pass  # it belongs to the caller


def held_out(number: int) -> tuple[list[int], list[int]]:
    """(windows for perplexity, windows for magnitudes), of `number` windows.

    Evenly spaced, and disjoint if there is more than one.
    """
    scored = _spread(range(number), min(SCORED, max(1, number // 5)))
    rest = [window for window in range(number) if window not in set(scored)]
    return scored, _spread(rest, MEASURED) if rest else scored


def _spread(items: Sequence[int], limit: int) -> list[int]:
    number = min(limit, len(items))
    return [items[(2 * at + 1) * len(items) // (2 * number)] for at in range(number)]


def measure_magnitudes(
    executor: CpuExecutor, windows: Windows, numbers: Sequence[int], layers: int, progress: Progress = silent
) -> Counts:
    """Histograms of the magnitudes of the layers' activations over some windows: int64 [layers, bins]."""
    magnitudes: dict[int, Counts] = {}

    class Adder:
        def reads(self, layer: int, x: NDArray[np.float32]) -> None:
            pass

        def fires(self, layer: int, fired: Fired) -> None:
            magnitudes[layer] = magnitudes.get(layer, 0) + fired.magnitudes

    with executor.observed(Adder(), [0.0] * layers, measure=True):
        for done, window in enumerate(numbers):
            run_windows(executor, windows.ids[window : window + 1])
            progress("measuring activations", done + 1, len(numbers))
    return np.stack([magnitudes[layer] for layer in range(layers)])


def thresholds_at(magnitudes: Counts, quantile: float) -> tuple[float, ...]:
    """The `quantile` of the magnitudes of each layer's activations.

    magnitudes: int64 [layers, bins]; within a bin they are assumed uniform.
    """
    edges = magnitude(np.arange(magnitudes.shape[1] + 1))
    thresholds = []
    for bins in magnitudes:
        below = np.concatenate([[0], np.cumsum(bins)])
        rank = quantile * below[-1]
        at = int(np.searchsorted(below, rank, side="right")) - 1
        at = min(at, len(bins) - 1)
        part = (rank - below[at]) / bins[at] if bins[at] else 0.0
        thresholds.append(float(edges[at] + part * (edges[at + 1] - edges[at])))
    return tuple(thresholds)


def calibrate(measure: Callable[[float], float], cost: float) -> float:
    """The largest quantile, as far as bisection finds it, whose perplexity is at most 1 + cost times the dense one.

    measure: the perplexity at a quantile; at 0 the dense one. Returns 0 if none is good enough.
    """
    limit = (1 + cost) * measure(0.0)
    if measure(MAX_SHARE) <= limit:
        return MAX_SHARE
    low, high = 0.0, MAX_SHARE
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if measure(middle) <= limit:
            low = middle
        else:
            high = middle
    return low
