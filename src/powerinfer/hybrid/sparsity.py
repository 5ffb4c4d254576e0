"""Statistics of layers whose neurons are split between two devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from powerinfer.hybrid.ffn import HybridFfn
from powerinfer.hybrid.units import SplitSparsity

if TYPE_CHECKING:
    from powerinfer.devices.split import SplitExecutor


class HybridSparsity(SplitSparsity[HybridFfn]):
    """Statistics of a model whose neurons are split between a GPU and the CPU."""

    def __init__(self, selector: str, executor: SplitExecutor, ffns: Sequence[HybridFfn]) -> None:
        """ffns: of the executor's split layers."""
        super().__init__(executor, ffns)
        self.selector = selector

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
        for layer, dense in cpu.ffns.items():
            counts = dense.counts()
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
        super().clear()
        for dense in self._executor.cpu.ffns.values():
            dense.clear()

    def _suspend(self, on: bool) -> None:
        super()._suspend(on)
        for dense in self._executor.cpu.ffns.values():
            dense.predict(not on)


def _shares(sums: Counter[str]) -> dict[str, Any]:
    active, tokens = sums["hot"] + sums["cold"], sums["tokens"]
    return {
        "tokens": tokens,
        "active_fraction": active / sums["neurons"] if tokens else None,
        "gpu_share": sums["hot"] / active if active else None,
        "jobs": sums["jobs"] / sums["steps"] if sums["steps"] else None,
    }
