"""Neurons as they fire: what each layer of a loaded model did since it was last looked at, and where it is placed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from powerinfer.config import ModelConfig
    from powerinfer.devices import Executor
    from powerinfer.devices.cpu_ffn import CpuFfn
    from powerinfer.runtime.runner import Runner
    from powerinfer.sparsity import Sparsity

Shares = NDArray[np.float64]


@dataclass(frozen=True)
class LiveLayer:
    """A layer since the last look.

    way: of one token; gpu: number of its neurons on the GPU. tokens: counted, of steps of up to `NEURON_TOKENS`.
    fired: float64 [bins], of the neurons of a bin times the tokens, the share that fired; None: no token was counted,
    or why_not says why none is. placed: float64 [bins], the share of a bin's neurons on the GPU. ffn_bytes: of
    weights, read per token; None where that is unknown. seconds: that the CPU waited for the GPU, and summed cold
    neurons beside it; zeros where neurons are on one device.
    """

    layer: int
    neurons: int
    way: str
    gpu: int
    tokens: int
    fired: Shares | None
    placed: Shares
    ffn_bytes: float | None
    why_not: str | None
    seconds: tuple[float, float] = (0.0, 0.0)

    @property
    def device(self) -> str:
        """ "cpu", "gpu" or "both"."""
        return {0: "cpu", self.neurons: "gpu"}.get(self.gpu, "both")

    @property
    def active(self) -> float | None:
        """Of the neurons, the share that fired."""
        if self.fired is None:
            return None
        return float((self.fired * np.diff(bin_edges(self.neurons, len(self.fired)))).sum() / self.neurons)


def bin_edges(neurons: int, bins: int) -> NDArray[np.int64]:
    """int64 [bins + 1]: bin b has the neurons from edge b up to edge b + 1."""
    return np.arange(bins + 1, dtype=np.int64) * neurons // bins


class Live:
    """Counts the neurons that fire until it is closed; `look` returns them. One at a time for a model.

    Counters of `LLM.sparsity` are left alone. Layers whose activation is never exactly zero and that are dense, and
    layers that are on a GPU as a whole, are not counted.
    """

    def __init__(self, executor: Executor, sparsity: Sparsity, config: ModelConfig, runner: Runner) -> None:
        self._sparsity, self._config, self._runner = sparsity, config, runner
        cpu = getattr(executor, "cpu", executor)  # of one that is split
        self._own: Mapping[int, CpuFfn] = getattr(cpu, "ffns", {})
        self._first = getattr(cpu, "first_layer", 0)
        self._layers = [layer for layer, size in enumerate(config.ffn_sizes) if size]
        self._counted = [layer for layer in self._layers if layer in self._own and self._why_not(layer) is None]
        self._before: dict[int, tuple[int, int]] = {}  # by layer: tokens and bytes of the FFN's own counters
        runner.ask(self._begin)

    def look(self, bins: int = 128) -> list[LiveLayer]:
        """All layers whose neurons are told apart, since the last look or the beginning, in at most `bins` bins; taken
        between two steps."""
        return self._runner.call(lambda: [self._layer(layer, bins) for layer in self._layers])

    def close(self) -> None:
        """Count no more."""

        def end() -> None:
            for layer in self._counted:
                self._own[layer].count_fired(False)

        self._runner.call(end)

    def _begin(self) -> None:
        for layer in self._counted:
            self._own[layer].count_fired(True)
        for ffn in self._sparsity.split().values():
            ffn.take_fired()
            ffn.take_seconds()

    def _why_not(self, layer: int) -> str | None:
        """Why firings of a layer are not counted; None if they are."""
        if layer in self._sparsity.split():
            return None
        if layer not in self._own:
            return "a whole layer on the GPU: firing is not counted there" if layer < self._first else "not known"
        ffn = self._config.layers[layer].neurons
        if ffn.rectified or self._sparsity.way(layer) != "dense":
            return None
        return f"every neuron is computed: {ffn.activation} is never exactly zero"

    def _layer(self, layer: int, bins: int) -> LiveLayer:
        neurons = self._config.ffn_sizes[layer]
        edges = bin_edges(neurons, min(bins, neurons))
        split, own, why_not = self._sparsity.split().get(layer), self._own.get(layer), self._why_not(layer)
        tokens, fired, on_gpu, seconds = 0, None, np.zeros(neurons), (0.0, 0.0)
        if split is not None:
            on_gpu[split.hot] = 1
            tokens, counts = split.take_fired()
            seconds = split.take_seconds()
        elif why_not is None and own is not None:
            tokens, counts = own.take_fired()
        elif own is None and layer < self._first:
            on_gpu[:] = 1
        if tokens:
            fired = np.add.reduceat(counts, edges[:-1]) / (np.diff(edges) * tokens)
        placed = np.add.reduceat(on_gpu, edges[:-1]) / np.diff(edges)
        way, gpu = self._sparsity.way(layer), int(on_gpu.sum())
        nbytes = None if own is None else self._bytes(layer, own, way)
        return LiveLayer(layer, neurons, way, gpu, tokens, fired, placed, nbytes, why_not, seconds)

    def _bytes(self, layer: int, ffn: CpuFfn, way: str) -> float | None:
        """Bytes of weights that the FFN read per token since the last look."""
        if way == "dense":
            return float(ffn.nbytes)
        counts = ffn.counts()
        before, now = self._before.get(layer, (0, 0)), (counts["tokens"], counts["bytes"])
        self._before[layer] = now
        tokens, nbytes = now if now[0] < before[0] else (now[0] - before[0], now[1] - before[1])  # < : cleared since
        return nbytes / tokens if tokens else None
