"""Sparse decode for a loaded model: bundles and predictors beside its dense weights, and which way each layer goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powerinfer.config import EngineConfig
from powerinfer.errors import RequestError
from powerinfer.formats.prepared import BUNDLES, PREDICTOR, PROFILE, PreparedFile
from powerinfer.formats.profile_file import open_profile
from powerinfer.kernels import cpu
from powerinfer.neurons import Predictor
from powerinfer.sparsity.selectors import Selector, Threshold, selector_named

if TYPE_CHECKING:
    from powerinfer.devices.cpu import CpuExecutor, Weights
    from powerinfer.formats.bundle_file import BundleFile
    from powerinfer.formats.checkpoint import Checkpoint, Progress
    from powerinfer.formats.quant import Bytes
    from powerinfer.sparsity.trial import Verdict


@dataclass
class Sparsity:
    """How the layers of a model run decode, and what came of it."""

    selector: str
    executor: CpuExecutor
    verdicts: list[Verdict]

    def report(self) -> dict[str, Any]:
        """Per layer and in all: the way of each batch size with its reason, and what the tokens so far needed.

        Of tokens that were computed sparsely. Fractions are of the neurons; bytes_per_token those of the FFN weights.
        recall: of the neurons that fired, how many the predictor had named, on sampled tokens; None without samples.
        """
        d_ff = self.executor.config.widest_ffn
        layers: list[dict[str, Any]] = []
        totals = dict.fromkeys(_COUNTED, 0)
        for layer, verdict in enumerate(self.verdicts):
            counts = self.executor.neuron_counts(layer)
            for name in _COUNTED:
                totals[name] += counts[name]
            layers.append({"layer": layer, "ways": verdict.ways, "reason": verdict.reason, **_rates(counts, d_ff)})
        whole = _rates(totals, d_ff)
        for name in ("tokens", "sampled"):  # each layer met the same ones
            whole[name] = max(layer[name] for layer in layers)
        if whole["tokens"]:
            whole["bytes_per_token"] = sum(layer["bytes_per_token"] or 0 for layer in layers)
        return {"selector": self.selector, "layers": layers, **whole}

    def clear(self) -> None:
        """Begin to count anew."""
        for layer in range(len(self.verdicts)):
            self.executor.clear_neuron_counts(layer)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """All layers dense meanwhile."""
        from powerinfer.sparsity.trial import apply

        for layer in range(len(self.verdicts)):
            self.executor.set_ways(layer, {})
        try:
            yield
        finally:
            apply(self.executor, self.verdicts)

    def bytes_per_token(self, dense: int) -> int:
        """Bytes of weights read for a token, from the dense model's and from what sparse layers were seen to read."""
        total = float(dense)
        for layer in range(len(self.verdicts)):
            counts = self.executor.neuron_counts(layer)
            if counts["tokens"]:
                total += counts["bytes"] / counts["tokens"] - self.executor.ffn_bytes(layer)
        return round(total)


_COUNTED = ("tokens", "active", "candidates", "bytes", "sampled_tokens", "sampled_active", "sampled_found")


def _rates(counts: dict[str, int], d_ff: int) -> dict[str, Any]:
    tokens, fired = counts["tokens"], counts["sampled_active"]
    return {
        "tokens": tokens,
        "active_fraction": counts["active"] / (tokens * d_ff) if tokens else None,
        "candidate_fraction": counts["candidates"] / (tokens * d_ff) if tokens else None,
        "bytes_per_token": counts["bytes"] / tokens if tokens else None,
        "sampled": counts["sampled_tokens"],
        "recall": counts["sampled_found"] / fired if fired else None,
    }


def attach(
    executor: CpuExecutor,
    checkpoint: Checkpoint,
    engine: EngineConfig,
    sample: Callable[[], Sequence[int]],
    progress: Progress | None = None,
) -> Sparsity | None:
    """Give the executor's FFNs their sparse way, as the engine's options ask for it; None where all stays dense.

    sample: gives the token ids of a text, for the trial. Notes its choice in `executor.choices`. RequestError when a
    selector that was asked for by name cannot be had; ModelError when the prepared files do not suit the model.
    """
    prepared, reason = prepared_for(checkpoint, engine)
    if prepared is None:
        executor.choices["selector"] = f"all ({reason})"
        return None
    selector = prepared.selector
    _load(executor, engine, prepared, progress)
    from powerinfer.sparsity.trial import apply, forced, sizes_tried

    layers, sizes = checkpoint.config.n_layers, sizes_tried(executor, engine.max_batch)
    if engine.trial:
        verdicts = _tried(executor, checkpoint, engine, prepared, sizes, sample, progress)
    else:
        verdicts = forced(layers, selector.way, sizes)
    apply(executor, verdicts)
    sparse = sum(any(way != "dense" for way in verdict.ways.values()) for verdict in verdicts)
    executor.choices["selector"] = f"{selector.name} in {sparse} of {layers} layers ({reason}; {_tally(verdicts)})"
    sparsity = Sparsity(selector.name, executor, verdicts)
    sparsity.clear()  # of the trial's
    return sparsity


def check(checkpoint: Checkpoint, engine: EngineConfig) -> None:
    """Raise what `attach` would refuse the options or the prepared files with, before the weights are read."""
    prepared_for(checkpoint, engine)


def prepared_for(checkpoint: Checkpoint, engine: EngineConfig) -> tuple[Prepared | None, str]:
    """(the selector with what it needs, None for the dense path; the reason). Raises as `attach` does."""
    selector, reason = _choose(checkpoint, engine)
    return (None if selector is None else _open(checkpoint, engine, selector)), reason


def _choose(checkpoint: Checkpoint, engine: EngineConfig) -> tuple[Selector | None, str]:
    """(selector, reason); None stands for the dense path."""
    if engine.selector == "auto":
        reason = _why_dense(checkpoint, engine)
        if reason is not None:
            return None, reason
    name = "exact" if engine.selector == "auto" else engine.selector
    selector = selector_named(name, engine.threshold, lambda: _calibrated(checkpoint, engine))
    if selector.name == "all":
        return None, "asked for"
    unsuited = selector.unsuited(checkpoint.config)
    if unsuited is not None:
        raise RequestError(f"selector {selector.name}: {unsuited}")
    return selector, "bundles are prepared" if engine.selector == "auto" else "asked for"


def _calibrated(checkpoint: Checkpoint, engine: EngineConfig) -> tuple[float, ...]:
    """The thresholds that `profile` found for the layers."""
    place = PreparedFile(PROFILE, checkpoint, engine.prepared)
    if not place.exists():
        raise RequestError(
            f"--selector threshold needs --threshold X, or a profile with calibrated thresholds: `{place.command}`"
        )
    thresholds = open_profile(checkpoint, engine.prepared).thresholds
    if thresholds is None:
        raise RequestError(
            f"{place.path} has no thresholds, because the model's activations are zero by themselves: use --selector "
            "exact, or give --threshold X"
        )
    return thresholds


def _tried(
    executor: CpuExecutor,
    checkpoint: Checkpoint,
    engine: EngineConfig,
    prepared: Prepared,
    sizes: Sequence[int],
    sample: Callable[[], Sequence[int]],
    progress: Progress | None,
) -> list[Verdict]:
    """The verdicts of an earlier trial under the same circumstances, or of one that is made now."""
    from powerinfer.sparsity.saved_trials import SavedTrials, trial_key
    from powerinfer.sparsity.trial import trial

    selector = prepared.selector
    ways = ["exact", "predicted"] if selector.needs_predictor else ["exact"]
    layers = checkpoint.config.n_layers
    saved = SavedTrials(checkpoint, engine.prepared, trial_key(checkpoint, engine, selector, prepared.paths, sizes))
    verdicts = None if engine.retrial else saved.find(layers, ways)
    if verdicts is not None:
        executor.choices["trial"] = f"measured earlier ({saved.path})"
        return verdicts
    begin = time.perf_counter()
    verdicts = trial(executor, layers, ways, sizes, sample(), progress)
    problem = saved.keep(verdicts)
    kept = f"kept in {saved.path}" if problem is None else f"cannot be kept: {problem}"
    executor.choices["trial"] = f"measured in {time.perf_counter() - begin:.2f} s, {kept}"
    return verdicts


def _why_dense(checkpoint: Checkpoint, engine: EngineConfig) -> str | None:
    """Why `auto` takes all neurons; None when exact can be had."""
    if not checkpoint.config.rectified:
        return f"{checkpoint.config.activations} is never exactly zero"
    bundles = PreparedFile(BUNDLES, checkpoint, engine.prepared)
    if not bundles.exists():
        return f"no bundles are prepared; {bundles.command} makes them"
    return None


def _tally(verdicts: Sequence[Verdict]) -> str:
    """How many layers decode one token which way."""
    counts: dict[str, int] = {}
    for verdict in verdicts:
        way = verdict.ways["1"]
        counts[way] = counts.get(way, 0) + 1
    return "one token: " + ", ".join(f"{way} {count}" for way, count in sorted(counts.items()))


DENSE_ABOVE = {"F16": 0.7, "BF16": 0.7, "Q8_0": 0.52, "Q4_0": 0.52}
"""By type of gate: the share of a layer's neurons from which on reading up and down from end to end is faster than
reading the rows of those that fire (docs/selectors.md)."""


@dataclass(frozen=True)
class Prepared:
    """A selector and what it needs: bundles, and predictors where it has them. paths: the files."""

    selector: Selector
    bundles: BundleFile
    predictors: Callable[[int], Weights] | None
    paths: list[Path]

    def most(self, layer: int) -> float:
        """Up to which magnitude activations of a layer count as zero."""
        return self.selector.of(layer) if isinstance(self.selector, Threshold) else 0.0


def _open(checkpoint: Checkpoint, engine: EngineConfig, selector: Selector) -> Prepared:
    """The prepared files. Predictors are those that were trained for the model, else those that its file brings."""
    from powerinfer.formats.bundle_file import open_bundles
    from powerinfer.formats.predictor_file import open_predictor

    bundles = open_bundles(checkpoint, engine.prepared, cpu.part_bytes)
    if not selector.needs_predictor:
        return Prepared(selector, bundles, None, [bundles.path])
    threshold = checkpoint.predictor_threshold
    if threshold is not None and not PreparedFile(PREDICTOR, checkpoint, engine.prepared).exists():

        def own(layer: int) -> Weights:
            inner, outer = (checkpoint.take(f"layers.{layer}.predictor_{end}") for end in ("in", "out"))
            return Predictor(inner.shape[0], threshold, 0), inner, outer

        return Prepared(selector, bundles, own, [bundles.path])
    file = open_predictor(checkpoint, engine.prepared)

    def trained(layer: int) -> Weights:
        file.file.check()
        one = file.layers[layer]
        return one.predictor, one.inner, one.outer

    return Prepared(selector, bundles, trained, [bundles.path, file.path])


def _load(executor: CpuExecutor, engine: EngineConfig, prepared: Prepared, progress: Progress | None) -> None:
    from powerinfer.system import available_memory

    bundles = prepared.bundles
    with ThreadPoolExecutor(2) as pool:  # one thread alone does not fill the memory's bandwidth
        layers: Iterable[Bytes] = bundles.layers  # without room read where they lie in the file
        if bundles.nbytes < available_memory() * 3 // 4:  # a copy cannot be given back: the rest stays for others
            layers = pool.map(bundles.copied, range(len(bundles.layers)))
        for layer, rows in enumerate(layers):
            executor.sparsify(
                layer,
                rows,
                bundles.layout,
                most=prepared.most(layer),
                predictor=None if prepared.predictors is None else prepared.predictors(layer),
                recall_every=engine.recall_every,
                dense_above=DENSE_ABOVE[bundles.layout.gate_type] if engine.trial else 1.0,  # forced is forced
            )
            if progress is not None:
                progress("loading neurons", layer + 1, len(bundles.layers))
