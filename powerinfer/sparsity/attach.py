"""Sparse decode for a loaded model: bundles and predictors beside its dense weights, and which way each layer goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from powerinfer.config import EngineConfig
from powerinfer.errors import RequestError
from powerinfer.formats.prepared import BUNDLES, PREDICTOR, PreparedFile
from powerinfer.kernels import cpu
from powerinfer.neurons import Predictor
from powerinfer.sparsity.selectors import RECTIFIED, Selector, selector_named

if TYPE_CHECKING:
    from powerinfer.devices.cpu import CpuExecutor
    from powerinfer.formats.checkpoint import Checkpoint, Progress, RawTensor
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
        d_ff = self.executor.d_ff
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
    if engine.selector == "auto":
        reason = _why_dense(checkpoint, engine)
        if reason is not None:
            executor.choices["selector"] = f"all ({reason})"
            return None
    selector = selector_named("exact" if engine.selector == "auto" else engine.selector, engine.threshold)
    if selector.name == "all":
        executor.choices["selector"] = "all (asked for)"
        return None
    reason = selector.unsuited(checkpoint.config)
    if reason is not None:
        raise RequestError(f"selector {selector.name}: {reason}")
    _load(executor, checkpoint, engine, selector, progress)
    from powerinfer.sparsity.trial import forced, trial

    ways = ["exact", "predicted"] if selector.needs_predictor else ["exact"]
    layers = checkpoint.config.n_layers
    if engine.trial:
        verdicts = trial(executor, layers, ways, engine.max_batch, sample(), progress)
    else:
        verdicts = forced(executor, layers, selector.way, engine.max_batch)
    asked = "bundles are prepared" if engine.selector == "auto" else "asked for"
    sparse = sum(any(way != "dense" for way in verdict.ways.values()) for verdict in verdicts)
    executor.choices["selector"] = f"{selector.name} in {sparse} of {layers} layers ({asked}; {_tally(verdicts)})"
    sparsity = Sparsity(selector.name, executor, verdicts)
    sparsity.clear()  # of the trial's
    return sparsity


def _why_dense(checkpoint: Checkpoint, engine: EngineConfig) -> str | None:
    """Why `auto` takes all neurons; None when exact can be had."""
    if checkpoint.config.activation not in RECTIFIED:
        return f"{checkpoint.config.activation} is never exactly zero"
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


def _load(
    executor: CpuExecutor,
    checkpoint: Checkpoint,
    engine: EngineConfig,
    selector: Selector,
    progress: Progress | None,
) -> None:
    from powerinfer.devices.cpu import available_memory
    from powerinfer.formats.pack import open_bundles

    bundles = open_bundles(checkpoint, engine.prepared, cpu.part_bytes)
    if bundles.nbytes < available_memory():
        bundles.file.populate()
    predictors = _predictors(checkpoint, engine) if selector.needs_predictor else None
    most = 0.0 if engine.threshold is None else engine.threshold
    for layer, rows in enumerate(bundles.layers):
        predictor = None if predictors is None else predictors[layer]
        executor.sparsify(layer, rows, bundles.layout, most=most, predictor=predictor, recall_every=engine.recall_every)
        if progress is not None:
            progress("loading neurons", layer + 1, len(bundles.layers))


def _predictors(checkpoint: Checkpoint, engine: EngineConfig) -> list[tuple[Predictor, RawTensor, RawTensor]]:
    """Those that were trained for the model, else those that its file brings along."""
    from powerinfer.formats.predictor_file import open_predictor

    threshold = checkpoint.predictor_threshold
    if threshold is not None and not PreparedFile(PREDICTOR, checkpoint, engine.prepared).exists():
        found = []
        for layer in range(checkpoint.config.n_layers):
            inner, outer = (checkpoint.take(f"layers.{layer}.predictor_{end}") for end in ("in", "out"))
            found.append((Predictor(inner.shape[0], threshold, 0), inner, outer))
        return found
    file = open_predictor(checkpoint, engine.prepared)
    file.file.check()
    return [(one.predictor, one.inner, one.outer) for one in file.layers]
