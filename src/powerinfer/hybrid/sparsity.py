"""What split layers did, and the swapping of their neurons between requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from powerinfer.devices.stage import Stage
from powerinfer.errors import PowerInferError
from powerinfer.hybrid.adjust import trades
from powerinfer.hybrid.ffn import HybridFfn
from powerinfer.neurons import Indices
from powerinfer.sparsity import Sparsity

if TYPE_CHECKING:
    from powerinfer.devices.split import SplitExecutor

ENOUGH = 128
"""Tokens that a layer must have computed recently before its neurons are swapped."""


class HybridSparsity(Sparsity):
    """Of a model whose layers are split between a GPU and the CPU."""

    def __init__(
        self, selector: str, executor: SplitExecutor, ffns: Sequence[HybridFfn], stage: Stage | None = None
    ) -> None:
        """ffns: of the executor's split layers; stage: theirs."""
        self.selector = selector
        self.stage = stage
        self.ffns = ffns
        self.traded = 0  # neurons moved to the GPU since the model was loaded
        self._executor = executor
        self._turn = 0

    def report(self) -> dict[str, Any]:
        """Per layer and in all, of tokens computed in steps of up to `NEURON_TOKENS`.

        hot, cold: neurons on the GPU and on the CPU; active_fraction: of the neurons, those that fired; gpu_share: of
        those that fired, the ones on the GPU; jobs: share of the steps in which the CPU had work; traded: neurons
        swapped onto the GPU; streams_from: the number of tokens of a step from which on the GPU computes the cold ones
        too, None: never. Layers that are wholly on the CPU count, too.
        """
        cpu = self._executor.cpu
        sizes = cpu.config.ffn_sizes
        layers: list[dict[str, Any]] = []
        totals: Counter[str] = Counter()

        def add(layer: int, hot: int, sums: Mapping[str, int]) -> None:
            own = Counter({**sums, "neurons": sums["tokens"] * sizes[layer]})
            totals.update(own)
            layers.append({"layer": layer, "hot": hot, "cold": sizes[layer] - hot, **_shares(own)})

        for ffn in self.ffns:
            add(ffn.layer, len(ffn.hot), ffn.collect())
        for layer, own_ffn in cpu.ffns.items():
            counts = own_ffn.counts()
            own = {"tokens": counts["tokens"], "steps": counts["steps"], "jobs": counts["steps"]}
            add(layer, 0, own | {"hot": 0, "cold": counts["active"]})
        whole = _shares(totals) | {"tokens": max((layer["tokens"] for layer in layers), default=0)}
        more = {"traded": self.traded, "streams_from": self.streams_from}
        return {"selector": self.selector, "layers": layers, **whole, **more}

    def way(self, layer: int) -> str:
        return "predicted" if self.selector == "predicted" else "exact"

    def split(self) -> Mapping[int, HybridFfn]:
        return {ffn.layer: ffn for ffn in self.ffns}

    def clear(self) -> None:
        """Reset the counters of `report`."""
        for ffn in self.ffns:
            ffn.clear()
        for own in self._executor.cpu.ffns.values():
            own.clear()

    def adjust(self) -> bool:
        """Swap neurons of one layer, the next in turn with enough recent tokens; not while a step runs.

        Based on recent counts, which are halved at each turn of the layer. False if no layer was worth it.
        PowerInferError if a device runs out of memory; then nothing has changed or, where even that does not fit any
        more, all neurons of the layer are on the CPU.
        """
        for _ in self.ffns:
            ffn = self.ffns[self._turn]
            self._turn = (self._turn + 1) % len(self.ffns)
            ffn.collect()
            if ffn.recent_tokens < ENOUGH:
                continue
            leave, come = trades(ffn.recent, ffn.hot, ffn.cold)
            ffn.forget_half()
            if len(come):
                _replace(ffn, np.union1d(np.setdiff1d(ffn.hot, leave), come).astype(np.int32))
                self.traded += len(come)
                return True
        return False

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """A context in which no predictor runs."""
        self._let_predict(False)
        try:
            yield
        finally:
            self._let_predict(True)

    def _let_predict(self, on: bool) -> None:
        for ffn in self.ffns:
            ffn.predict(on)
        for own in self._executor.cpu.ffns.values():
            own.predict(on)

    def bytes_per_token(self, dense: int | None) -> None:
        """Unknown: what the GPU skips is not counted."""


def _replace(ffn: HybridFfn, hot: Indices) -> None:
    """Put other neurons on the GPU; after a failure, which is raised, the layer can still be computed."""
    before = ffn.hot
    try:
        ffn.place(hot)
    except BaseException as error:
        error.with_traceback(None)  # its frames may hold what must make room
        try:
            ffn.place(before)
        except PowerInferError:
            ffn.place(before[:0])
        raise


def _shares(sums: Mapping[str, int]) -> dict[str, Any]:
    active, tokens = sums["hot"] + sums["cold"], sums["tokens"]
    return {
        "tokens": tokens,
        "active_fraction": active / sums["neurons"] if tokens else None,
        "gpu_share": sums["hot"] / active if active else None,
        "jobs": sums["jobs"] / sums["steps"] if sums["steps"] else None,
    }
