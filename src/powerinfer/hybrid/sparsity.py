"""Statistics of layers whose neurons are split between two devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from powerinfer.hybrid.ffn import HybridFfn
from powerinfer.hybrid.terms import SplitSparsity, shares

if TYPE_CHECKING:
    from powerinfer.devices.split import SplitExecutor


class HybridSparsity(SplitSparsity[HybridFfn]):
    """Statistics of a model whose neurons are split between a GPU and the CPU."""

    def __init__(self, selector: str, executor: SplitExecutor, ffns: Sequence[HybridFfn]) -> None:
        """ffns: of the executor's split layers."""
        super().__init__(executor, ffns)
        self.selector = selector

    def report(self) -> dict[str, Any]:
        """Report as `SplitSparsity` does, of tokens computed in steps of up to `NEURON_TOKENS`; layers that are wholly
        on the CPU count, too. streams_from: the number of tokens of a step from which on the GPU computes the cold
        neurons, too, None: never."""
        layers, totals = self._collect()
        cpu = self._executor.cpu
        for layer, dense in cpu.ffns.items():
            counts, size = dense.counts(), cpu.config.ffn_sizes[layer]
            sums = Counter({name: counts[name] for name in ("tokens", "steps", "active")})
            sums.update(jobs=counts["steps"], cold=counts["active"], neurons=counts["tokens"] * size)
            totals.update(sums)
            layers.append({"layer": layer, "hot": 0, "cold": size, **shares(sums)})
        return self._report(layers, totals) | {"streams_from": self.streams_from}

    def way(self, layer: int) -> str:
        return "predicted" if self.selector == "predicted" else "exact"

    def split(self) -> Mapping[int, HybridFfn]:
        return {ffn.layer: ffn for ffn in self.ffns}

    def clear(self) -> None:
        super().clear()
        for dense in self._executor.cpu.ffns.values():
            dense.clear()

    def _suspend(self, on: bool) -> None:
        super()._suspend(on)
        for dense in self._executor.cpu.ffns.values():
            dense.predict(not on)
