"""Sparse decode on the CPU: bundles and predictors beside a model's dense weights, and each layer's way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from powerinfer.config import EngineConfig
from powerinfer.devices.choices import Choice
from powerinfer.errors import RequestError
from powerinfer.progress import Progress, silent
from powerinfer.sparsity import Sparsity
from powerinfer.sparsity.selection import ASKED

if TYPE_CHECKING:
    from powerinfer.devices.cpu import CpuExecutor
    from powerinfer.devices.disk import DiskTier
    from powerinfer.formats.bundle_file import BundleFile
    from powerinfer.formats.bundle_memory import ApartBundles
    from powerinfer.formats.checkpoint import Checkpoint
    from powerinfer.formats.quant import Bytes
    from powerinfer.sparsity.selection import Selection
    from powerinfer.sparsity.selector_trial import Verdict, Way


class CpuSparsity(Sparsity):
    """Statistics of a model on the CPU whose FFNs have bundles beside dense weights. verdicts: by layer."""

    def __init__(self, selector: str, executor: CpuExecutor, verdicts: Mapping[int, Verdict]) -> None:
        self.selector = selector
        self.drafts_alone = True
        self.executor = executor
        self.verdicts = verdicts

    def report(self) -> dict[str, Any]:
        """Per layer and in total: the way of each batch size with its reason, and statistics of the sparse tokens.

        Fractions are of the neurons; bytes_per_token: of FFN weights, of a layer without sparse tokens all. recall: the
        share of the firing neurons that the predictor selected, on sampled tokens; None without samples. In total also
        computed_fraction: the neurons of all layers that were computed in full, and dense_bytes_per_token.
        """
        sizes = self.executor.config.ffn_sizes
        layers: list[dict[str, Any]] = []
        totals = dict.fromkeys((*_COUNTED, "neurons"), 0)
        computed, dense_bytes = 0.0, 0
        for layer, verdict in self.verdicts.items():
            counts, nbytes = self._counts(layer), self.executor.ffns[layer].nbytes
            counts["neurons"] = counts["tokens"] * sizes[layer]
            for name in totals:
                totals[name] += counts[name]
            rates = _rates(counts)
            computed += sizes[layer] * (rates["active_fraction"] if counts["tokens"] else 1)
            dense_bytes += nbytes
            rates |= {} if counts["tokens"] else {"bytes_per_token": nbytes}
            layers.append({"layer": layer, "ways": verdict.ways, "reason": verdict.reason, **rates})
        total = _rates(totals)
        for name in ("tokens", "sampled"):  # every layer computed the same ones
            total[name] = max(layer[name] for layer in layers)
        if total["tokens"]:
            total["bytes_per_token"] = sum(layer["bytes_per_token"] for layer in layers)
        total |= {"computed_fraction": computed / sum(sizes), "dense_bytes_per_token": dense_bytes}
        return {"selector": self.selector, "layers": layers, **total}

    def _counts(self, layer: int) -> dict[str, int]:
        ffn = self.executor.ffns[layer]
        return ffn.counts() if ffn.bundled else dict.fromkeys(_COUNTED, 0)

    def way(self, layer: int) -> str:
        return self.verdicts[layer].ways["1"]

    def clear(self) -> None:
        """Reset the statistics of `report`."""
        for ffn in self.executor.ffns.values():
            ffn.clear()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """All layers are dense inside the context."""
        from powerinfer.sparsity.selector_trial import apply

        for ffn in self.executor.ffns.values():
            ffn.set_ways({})
        try:
            yield
        finally:
            apply(self.executor, self.verdicts)

    def bytes_per_token(self, dense: int | None) -> int | None:
        """Bytes of weights read per token: the dense model's, less what sparse layers skipped."""
        if dense is None:
            return None
        total = float(dense)
        for layer, ffn in self.executor.ffns.items():
            counts = self._counts(layer)
            if counts["tokens"]:
                total += counts["bytes"] / counts["tokens"] - ffn.nbytes
        return round(total)


class NeuronsInExperts(Sparsity):
    """Statistics of a model in which experts, or some, are computed by neuron; selector: `exact` or `predicted`."""

    def __init__(self, selector: str, executor: CpuExecutor, reason: str = ASKED) -> None:
        self.selector = selector
        self.drafts_alone = True
        self._reason = reason
        self._executor = executor
        self._layers = executor.expert_ffns

    def report(self) -> dict[str, Any]:
        """Report as `CpuSparsity` does, of layers of experts; fractions are of the neurons of the selected experts."""
        counts = {layer: ffn.counts() for layer, ffn in self._layers.items()}
        ways = {"ways": {"1": self.selector, "32": self.selector}, "reason": self._reason}
        layers = [{"layer": layer, **ways, **_rates(own)} for layer, own in counts.items()]
        totals = {name: sum(own[name] for own in counts.values()) for name in (*_COUNTED, "neurons")}
        total = _rates(totals)
        for name in ("tokens", "sampled"):
            total[name] = max(layer[name] for layer in layers)
        if total["tokens"]:
            total["bytes_per_token"] = sum(layer["bytes_per_token"] or 0 for layer in layers)
        dense_bytes = sum(ffn.nbytes for ffn in self._layers.values())
        total |= {"computed_fraction": total["active_fraction"], "dense_bytes_per_token": dense_bytes}
        return {"selector": self.selector, "layers": layers, **total}

    def way(self, layer: int) -> str:
        return self.selector if layer in self._layers else "dense"

    def clear(self) -> None:
        for ffn in self._layers.values():
            ffn.op.clear()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Every neuron of the selected experts is computed inside the context."""
        for ffn in self._layers.values():
            ffn.op.set_whole(True)
        try:
            yield
        finally:
            for ffn in self._layers.values():
                ffn.op.set_whole(False)

    def bytes_per_token(self, dense: int | None) -> int | None:
        if dense is None:
            return None
        counted = [(ffn.counts(), ffn.nbytes) for ffn in self._layers.values()]
        return round(dense + sum(own["bytes"] / own["tokens"] - whole for own, whole in counted if own["tokens"]))


_COUNTED = ("tokens", "active", "candidates", "bytes", "sampled_tokens", "sampled_active", "sampled_found")


def _rates(counts: dict[str, int]) -> dict[str, Any]:
    """neurons: that the tokens would have computed densely."""
    tokens, neurons, fired = counts["tokens"], counts["neurons"], counts["sampled_active"]
    return {
        "tokens": tokens,
        "active_fraction": counts["active"] / neurons if tokens else None,
        "candidate_fraction": counts["candidates"] / neurons if tokens else None,
        "bytes_per_token": counts["bytes"] / tokens if tokens else None,
        "sampled": counts["sampled_tokens"],
        "recall": counts["sampled_found"] / fired if fired else None,
    }


def attach(
    executor: CpuExecutor,
    checkpoint: Checkpoint,
    engine: EngineConfig,
    selection: Selection,
    sample: Callable[[], Sequence[int]],
    progress: Progress = silent,
) -> Sparsity:
    """Attach bundles and predictors to the executor's FFNs, and find where the selector is faster than dense.

    sample: returns the token ids of a text, for the trial. Notes the result in `executor.choices`.
    """
    if selection.in_experts:
        executor.choices.selector = Choice(f"{selection.selector} inside experts", selection.reason)
        return NeuronsInExperts(selection.selector, executor, selection.reason)
    if selection.bundles is None:
        executor.choices.selector = Choice("all", selection.reason)
        return Sparsity()
    if executor.disk is not None and not executor.disk.about.neurons:
        if engine.selector != "auto":
            raise RequestError(
                f"--selector {selection.selector}: RAM does not hold its bundles: give more --ram, or leave it out"
            )
        executor.choices.selector = Choice("all", "RAM does not hold the neurons' bundles")
        return Sparsity()
    if executor.disk is not None:
        return _attach_resting(executor, checkpoint, engine, selection, executor.disk, progress)
    from powerinfer.sparsity.selector_trial import SELECTORS, apply, forced, measured, sizes_tried
    from powerinfer.sparsity.trials import Trial, conditions

    name, ffns = selection.selector, list(executor.ffns)
    ways: list[Way] = ["exact", "predicted"] if name == "predicted" else ["exact"]
    sizes = sizes_tried(executor, engine.max_batch)
    if engine.trial:
        key = conditions(checkpoint, engine, selection) | {"sizes": " ".join(map(str, sizes))}
        trial = Trial(SELECTORS, checkpoint, engine, key)
        outcome = trial.find(lambda result: result.fits(len(ffns), ways, sizes))
        earlier = None if outcome is None else dict(zip(ffns, outcome.result.verdicts(earlier=True), strict=True))
        _load(executor, engine, selection, selection.bundles, earlier, progress)
        if outcome is None:
            text = sample()
            outcome = trial.run(lambda: measured(executor, ways, sizes, text, progress))
        executor.choices.trial = Choice(outcome.origin)
        verdicts = earlier or dict(zip(ffns, outcome.result.verdicts(earlier=False), strict=True))
    else:
        skips = {at: name == "threshold" or ffn.rectified for at, ffn in checkpoint.config.neurons.items()}
        verdicts = forced(skips, ways[-1], sizes)
        _load(executor, engine, selection, selection.bundles, verdicts, progress)
    apply(executor, verdicts)
    sparse = sum(any(way != "dense" for way in verdict.ways.values()) for verdict in verdicts.values())
    alone = Counter(verdict.ways["1"] for verdict in verdicts.values())
    tally = "one token: " + ", ".join(f"{way} {count}" for way, count in sorted(alone.items()))
    sizes_text = "" if sparse == len(ffns) - alone["dense"] else ", of some batch sizes"
    sparse_layers = f"{name} in {sparse} of {len(ffns)} layers{sizes_text}"
    executor.choices.selector = Choice(sparse_layers, f"{selection.reason}; {tally}")
    sparsity = CpuSparsity(name, executor, verdicts)
    sparsity.clear()  # counts of the trial
    return sparsity


def _attach_resting(
    executor: CpuExecutor,
    checkpoint: Checkpoint,
    engine: EngineConfig,
    selection: Selection,
    disk: DiskTier,
    progress: Progress,
) -> Sparsity:
    """The same of a model of which a part stays on disk: neurons of the layers that it says. Nothing is tried: in small
    steps these use the selector, since dense ones read whole matrices."""
    from powerinfer.devices.disk_neurons import n_slots, neuron_slots
    from powerinfer.formats.prepared import PROFILE, PreparedFile
    from powerinfer.formats.profile_file import open_profile
    from powerinfer.sparsity.selector_trial import apply, forced

    name, bundles = selection.selector, selection.bundles
    assert bundles is not None
    profiled = PreparedFile(PROFILE, checkpoint, engine.prepared).exists()
    profile = open_profile(checkpoint, engine.prepared) if profiled else None
    bundles.file.check()
    all_neurons = {layer: executor.ffns[layer].neurons for layer in disk.about.neurons}
    slots = {layer: n_slots(disk, layer, n, executor.parts.least_slots(n)) for layer, n in all_neurons.items()}
    memory = disk.neuron_memory(sum(slots.values()))
    for done, layer in enumerate(slots):
        ffn, layout, groups = executor.ffns[layer], bundles.layouts[layer], bundles.layers[layer]
        predictor = None if selection.predictors is None else selection.predictors(layer)
        entire = predictor is not None
        stored = neuron_slots(disk, layout, groups, all_neurons[layer], slots[layer], entire=entire, memory=memory)
        bundles.file.release(groups)
        neurons = ffn.add_resting(stored, threshold=selection.threshold(layer), predictor=predictor)
        disk.add_neurons(layer, stored.slots, neurons, None if profile is None else profile.fraction(layer))
        progress("loading neurons", done + 1, len(slots))
    disk.fill()
    if name == "predicted" and disk.about.prefetch and disk.reads.direct:
        for layer, after in pairwise(disk.about.neurons):
            executor.ffns[layer].foresee(executor.ffns[after])
    way: Way = "predicted" if name == "predicted" else "exact"
    rests = {layer: layer in disk.about.neurons for layer in executor.ffns}
    sizes = (1, executor.neuron_tokens)
    verdicts = forced(rests, way, sizes, "neurons are read from disk", "RAM does not hold its bundles")
    apply(executor, verdicts)
    hot = f"{disk.about.neuron_policy} over {'the profile' if profile else 'what was used'}"
    reason = f"{selection.reason}; their neurons are on disk, RAM has some: {hot}"
    executor.choices.selector = Choice(f"{name} in {sum(rests.values())} of {len(rests)} layers", reason)
    return CpuSparsity(name, executor, verdicts)


DENSE_ABOVE = {"F16": 0.7, "BF16": 0.7, "Q8_0": 0.52, "Q4_0": 0.52, "Q4_1": 0.52}
"""Shares of firing neurons, by type of gate, from which on reading up and down sequentially is faster than reading the
rows of those that fire (docs/selectors.md)."""


def _load(
    executor: CpuExecutor,
    engine: EngineConfig,
    selection: Selection,
    bundles: BundleFile,
    verdicts: Mapping[int, Verdict] | None,
    progress: Progress,
) -> None:
    """Give the FFNs their bundles: those that decode sparsely, or without verdicts all."""
    from powerinfer.formats.bundle_memory import own_pages
    from powerinfer.system import available_memory

    wanted = list(executor.ffns)
    if verdicts is not None:
        wanted = [layer for layer in wanted if {*verdicts[layer].ways.values()} != {"dense"}]
    entire = selection.predictors is not None  # else gates are computed from the matrices
    nbytes = [rows.nbytes for rows in bundles.layers] if entire else bundles.apart_bytes
    sizes = [nbytes[layer] for layer in wanted]
    with ThreadPoolExecutor(2) as pool:  # one thread cannot use the full memory bandwidth
        layers: Iterable[Bytes | ApartBundles]
        if sum(sizes) >= available_memory() * 3 // 4:  # a copy cannot be reclaimed: leave a quarter to others
            layers = (bundles.layers[layer] for layer in wanted)  # read from the mapped file, as it has them
            executor.mapped.append(bundles.file)
        elif entire:
            layers = pool.map(bundles.copied, wanted)
        else:  # in one piece: a layer may be too small for huge pages
            memory = np.split(own_pages(max(1, sum(sizes))), np.cumsum(sizes))
            layers = pool.map(bundles.copied_apart, wanted, memory)
        for done, (layer, rows) in enumerate(zip(wanted, layers, strict=True)):
            executor.ffns[layer].add_bundles(
                bundles.layouts[layer],
                rows,
                threshold=selection.threshold(layer),
                predictor=None if selection.predictors is None else selection.predictors(layer),
                recall_every=engine.recall_every,
                dense_above=DENSE_ABOVE[bundles.types[0]] if engine.trial else 1.0,  # --no-trial: no fallback
            )
            progress("loading neurons", done + 1, len(wanted))
