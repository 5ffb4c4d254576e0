"""Neurons as they fire: what each layer of a loaded model did since it was last looked at, and where it is placed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from powerinfer.kernels.cpu import NEURON_TOKENS

if TYPE_CHECKING:
    from powerinfer.config import ModelConfig
    from powerinfer.devices import Executor
    from powerinfer.devices.cpu_ffn import CpuFfn
    from powerinfer.neurons import Profile
    from powerinfer.runtime.runner import Runner
    from powerinfer.sparsity import Sparsity

Shares = NDArray[np.float64]


@dataclass(frozen=True)
class LiveLayer:
    """A layer since the last look.

    way: of one token; gpu: number of its neurons on the GPU. tokens: counted, of steps of up to `NEURON_TOKENS`.
    fired: float64 [bins], of the neurons of a bin times the tokens, the share that fired; None: no token was counted,
    or reason says why none is. Bins have neurons in the order of a ranking, if there is one, else of their index.
    placed: float64 [bins], the share of a bin's neurons on the GPU. ffn_bytes: of
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
    reason: str | None
    seconds: tuple[float, float] = (0.0, 0.0)

    @property
    def device(self) -> str:
        """ "cpu", "gpu" or "both"."""
        return {0: "cpu", self.neurons: "gpu"}.get(self.gpu, "both")

    @property
    def active(self) -> float | None:
        """Share of the neurons that fired."""
        if self.fired is None:
            return None
        return float((self.fired * np.diff(bin_edges(self.neurons, len(self.fired)))).sum() / self.neurons)


_Fired = tuple[int, NDArray[np.int64]]
"""Tokens, and for each neuron those that it fired for."""


class _LayerSample(NamedTuple):
    """A layer as it is taken on the engine's thread. on_gpu: float64 [neurons], 1 or 0; the rest as of `LiveLayer`."""

    layer: int
    way: str
    fired: _Fired | None
    on_gpu: Shares
    ffn_bytes: float | None
    reason: str | None
    seconds: tuple[float, float]


def bin_edges(neurons: int, bins: int) -> NDArray[np.int64]:
    """int64 [bins + 1]: bin b has the neurons from edge b up to edge b + 1."""
    return np.arange(bins + 1, dtype=np.int64) * neurons // bins


class DisplayRanking:
    """The neurons of each layer, those that fired for the most tokens first: in a profile, and since. Thread-safe if
    `add` is called by one thread at a time.

    An order is made anew only when a layer's tokens have doubled, so that columns stay where they are.
    """

    def __init__(self, profile: Profile | None = None) -> None:
        self.profile_tokens = 0 if profile is None else profile.tokens
        self._counts: dict[int, NDArray[np.int64]] = {}
        self._tokens: dict[int, int] = {}
        self._orders: dict[int, NDArray[np.int64]] = {}
        self._due: dict[int, int] = {}  # tokens from which on a layer's order is made anew
        if profile is not None:
            for layer, counts in enumerate(profile.counts):
                if len(counts):
                    self.add(layer, profile.tokens, counts)

    def add(self, layer: int, tokens: int, counts: NDArray[np.int64]) -> None:
        """Take in the tokens that each of the layer's neurons fired for."""
        self._counts[layer] = self._counts[layer] + counts if layer in self._counts else counts.astype(np.int64)
        now = self._tokens[layer] = self._tokens.get(layer, 0) + tokens
        if now >= self._due.get(layer, 0):
            self._orders[layer] = np.argsort(-self._counts[layer], kind="stable")
            self._due[layer] = 2 * now

    def order(self, layer: int) -> NDArray[np.int64] | None:
        """int64 [neurons], their indexes; None before the layer's first token."""
        return self._orders.get(layer)

    @property
    def tokens(self) -> int:
        """Tokens that the layers have counted, those of the profile included."""
        return max(self._tokens.values(), default=0)

    def carried(self, share: float) -> float | None:
        """The share of all activations that is carried by this share of each layer's neurons, the hottest; None if
        none was counted."""
        total = sum(int(counts.sum()) for counts in self._counts.values())
        hot = 0
        for counts in self._counts.values():
            hottest = max(1, round(share * len(counts)))
            hot += int(np.partition(counts, -hottest)[-hottest:].sum())
        return hot / total if total else None


_BY_INDEX = DisplayRanking()
"""A ranking that knows no order."""


class Live:
    """Counts the neurons that fire until it is closed; `look` returns them. One at a time for a model.

    Counters of `LLM.sparsity` are left alone. Layers whose activation is never exactly zero and that are dense, and
    layers that are on a GPU as a whole, are not counted.
    """

    def __init__(self, executor: Executor, sparsity: Sparsity, config: ModelConfig, runner: Runner) -> None:
        self._sparsity, self._config, self._runner = sparsity, config, runner
        cpu = getattr(executor, "cpu", executor)  # of one that is split
        self._ffns: Mapping[int, CpuFfn] = getattr(cpu, "ffns", {})
        self._first = getattr(cpu, "first_layer", 0)
        self._layers = [layer for layer, size in enumerate(config.ffn_sizes) if size]
        layers = [layer for layer in self._layers if layer in self._ffns]
        self._counted = [layer for layer in layers if self._uncounted_reason(layer) is None]
        self._before: dict[int, tuple[int, int]] = {}  # by layer: tokens and bytes of the FFN's own counters
        self._early: dict[int, _Fired] = {}  # counts that wait for those of the other layers
        runner.ask(self._begin)

    def look(self, bins: int = 128, ranking: DisplayRanking | None = None) -> list[LiveLayer]:
        """All layers whose neurons are told apart, since the last look or the beginning, in at most `bins` bins; taken
        between two steps. ranking: what was counted is added to it, and the neurons of the bins are in its order."""
        layers, fired = self._runner.call(self._take)
        if ranking is None:
            ranking = _BY_INDEX
        else:
            for layer, (tokens, counts) in fired.items():
                if tokens:
                    ranking.add(layer, tokens, counts)
        return [_binned(one, bins, fired.get(one.layer), ranking.order(one.layer)) for one in layers]

    def close(self) -> None:
        """Count no more."""

        def end() -> None:
            for layer in self._counted:
                self._ffns[layer].count_fired(False)

        self._runner.call(end)

    def _begin(self) -> None:
        for layer in self._counted:
            self._ffns[layer].count_fired(True)
        for ffn in self._sparsity.split().values():
            ffn.take_fired()
            ffn.take_seconds()

    def _uncounted_reason(self, layer: int) -> str | None:
        """Reason for which firings of a layer are not counted; None if they are."""
        if layer in self._sparsity.split():
            return None
        if layer not in self._ffns:
            return "a whole layer on the GPU: firing is not counted there" if layer < self._first else "not known"
        ffn = self._config.layers[layer].neurons
        if ffn.rectified or self._sparsity.way(layer) != "dense":
            return None
        return f"every neuron is computed: {ffn.activation} is never exactly zero"

    def _take(self) -> tuple[list[_LayerSample], dict[int, _Fired]]:
        """All layers, and by layer what fired, on the engine's thread.

        A step that was stopped has been counted by its first layers only: such counts wait for the next look.
        """
        layers = [self._layer(layer) for layer in self._layers]
        fired = {one.layer: one.fired for one in layers if one.fired is not None}
        for layer, (tokens, counts) in self._early.items():
            if layer in fired:
                fired[layer] = (tokens + fired[layer][0], counts + fired[layer][1])
        step_tokens = [tokens for tokens, _ in fired.values()] or [0]
        cut = min(step_tokens) == 0 < max(step_tokens) <= NEURON_TOKENS
        self._early = fired if cut else {}
        return layers, {} if cut else fired

    def _layer(self, layer: int) -> _LayerSample:
        neurons = self._config.ffn_sizes[layer]
        split, ffn, reason = self._sparsity.split().get(layer), self._ffns.get(layer), self._uncounted_reason(layer)
        fired, on_gpu, seconds = None, np.zeros(neurons), (0.0, 0.0)
        if split is not None:
            on_gpu[split.hot] = 1
            fired = split.take_fired()
            seconds = split.take_seconds()
        elif reason is None and ffn is not None:
            fired = ffn.take_fired()
        elif ffn is None and layer < self._first:
            on_gpu[:] = 1
        way = self._sparsity.way(layer)
        nbytes = None if ffn is None else self._bytes(layer, ffn, way)
        return _LayerSample(layer, way, fired, on_gpu, nbytes, reason, seconds)

    def _bytes(self, layer: int, ffn: CpuFfn, way: str) -> float | None:
        """Bytes of weights that the FFN read per token since the last look."""
        if way == "dense":
            return float(ffn.nbytes)
        counts = ffn.counts()
        before, now = self._before.get(layer, (0, 0)), (counts["tokens"], counts["bytes"])
        self._before[layer] = now
        tokens, nbytes = now if now[0] < before[0] else (now[0] - before[0], now[1] - before[1])  # < : cleared since
        return nbytes / tokens if tokens else None


def _binned(sample: _LayerSample, bins: int, counted: _Fired | None, order: NDArray[np.int64] | None) -> LiveLayer:
    """A layer in bins. counted: what fired of it; order: of its neurons, None: by index."""
    neurons = len(sample.on_gpu)
    edges = bin_edges(neurons, min(bins, neurons))
    tokens, counts = counted or (0, None)
    on_gpu = sample.on_gpu if order is None else sample.on_gpu[order]
    fired = None
    if tokens and counts is not None:
        fired = np.add.reduceat(counts if order is None else counts[order], edges[:-1]) / (np.diff(edges) * tokens)
    placed = np.add.reduceat(on_gpu, edges[:-1]) / np.diff(edges)
    return LiveLayer(
        sample.layer, neurons, sample.way, int(sample.on_gpu.sum()), tokens, fired, placed, sample.ffn_bytes,
        sample.reason, sample.seconds,
    )  # fmt: skip
