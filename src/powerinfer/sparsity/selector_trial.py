"""The trial of selectors: decode a few tokens in every way, and choose the fastest for each layer and batch size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from statistics import median
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np

from powerinfer.devices.batch import Batch
from powerinfer.formats.checkpoint import Checkpoint
from powerinfer.formats.json_file import Between, Length
from powerinfer.progress import Progress
from powerinfer.sparsity.trials import TrialSubject, read_trials, take_turns, trials_file

if TYPE_CHECKING:
    from powerinfer.devices.cpu import CpuExecutor

BATCHES = (1, 2, 4, 8, 16, 32)
ROUNDS = 4  # the first is a warm-up
PROMPT = 16  # tokens before those that are timed
GAIN = 0.98  # a sparse way must take less than this share of the dense time


Way = Literal["dense", "exact", "predicted"]


@dataclass(frozen=True)
class TimedLayer:
    """The way of a layer by number of tokens, and seconds of one token in each way."""

    ways: dict[str, Way]
    seconds: dict[Way, Annotated[float, Between(0, 1e6)]] = field(default_factory=dict)


@dataclass(frozen=True)
class TimedLayers:
    """The result of the trial, of all layers that have an FFN."""

    layers: Annotated[list[TimedLayer], Length(1 << 16)]

    def fits(self, layers: int, ways: Sequence[Way], sizes: Sequence[int]) -> bool:
        """Whether it is of that number of FFNs, and of these ways and batch sizes."""
        tried, names = {"dense", *ways}, [str(size) for size in sizes]
        return len(self.layers) == layers and all(
            list(layer.ways) == names and tried.issuperset(layer.ways.values()) and tried == {*layer.seconds}
            for layer in self.layers
        )

    def verdicts(self, earlier: bool) -> list[Verdict]:
        """The verdicts on the layers. earlier: they were measured at an earlier start."""
        return [Verdict(layer.ways, layer.seconds, earlier) for layer in self.layers]


SELECTORS = TrialSubject("selectors", TimedLayers, tries=3)


@dataclass(frozen=True)
class Verdict(TimedLayer):
    """The ways in which a layer decodes, and why. seconds: if they were measured."""

    earlier: bool = False  # a saved result was used
    untried_reason: str = "asked for: --no-trial"

    @property
    def reason(self) -> str:
        if not self.seconds:
            return self.untried_reason
        times = ", ".join(f"{way} {1e6 * value:.0f} us" for way, value in self.seconds.items())
        return f"one token: {times}" + ", measured earlier (trials.json)" * self.earlier


@dataclass(frozen=True)
class MeasuredFfns:
    """Seconds of the FFNs of `layers` for one token, by way, as a trial measured them. ways: how each decodes one
    token; disturbed: cores that others took meanwhile, 0 if they were few."""

    selector: str
    cpu: str
    threads: str
    layers: list[int]
    ways: list[str]
    seconds: list[dict[str, float]]
    disturbed: float = 0.0


def newest_trial(checkpoint: Checkpoint, prepared: str | None) -> MeasuredFfns | None:
    """The newest saved trial of a model, of one token; None without one."""
    wanted = {"model": checkpoint.fingerprint, "quantize": str(checkpoint.quantize)}
    numbers = list(checkpoint.config.neurons)
    for trial, result in read_trials(trials_file(checkpoint, prepared), SELECTORS):
        layers = result.layers
        measured = all("dense" in layer.seconds and "1" in layer.ways for layer in layers)
        if wanted.items() <= trial.key.items() and measured and len(layers) == len(numbers):
            key = {name: trial.key.get(name, "") for name in ("selector", "cpu", "threads")}
            seconds: list[dict[str, float]] = [dict(layer.seconds) for layer in layers]  # type: ignore[arg-type]
            ways: list[str] = [layer.ways["1"] for layer in layers]
            return MeasuredFfns(**key, layers=numbers, ways=ways, seconds=seconds, disturbed=trial.disturbed)
    return None


def sizes_tried(executor: CpuExecutor, max_batch: int) -> list[int]:
    """The batch sizes that are measured."""
    return [size for size in BATCHES if size <= max(1, min(executor.neuron_tokens, max_batch, executor.n_pages))]


def apply(executor: CpuExecutor, verdicts: Mapping[int, Verdict]) -> None:
    """Set the ways of all layers."""
    for layer, verdict in verdicts.items():
        executor.ffns[layer].set_ways({int(size): way for size, way in verdict.ways.items()})


def forced(
    skips: Mapping[int, bool],
    way: Way,
    sizes: Sequence[int],
    reason: str = Verdict.untried_reason,
    dense_reason: str | None = None,
) -> dict[int, Verdict]:
    """One way for small batches, in all layers but those that skip no neuron. skips: by layer, whether it does; reason:
    for either, or for those that do."""
    sparse, dense = (
        Verdict({str(size): kind for size in sizes}, untried_reason=text)
        for kind, text in ((way, reason), ("dense", dense_reason or reason))
    )
    return {layer: sparse if some else dense for layer, some in skips.items()}


def measured(
    executor: CpuExecutor,
    ways: Sequence[Way],
    sizes: Sequence[int],
    sample: Sequence[int],
    progress: Progress,
) -> TimedLayers:
    """Measure the FFN of every layer, dense and in `ways`, in turn, and find the fastest for each batch size.

    Leaves the executor's ways undefined. The KV cache must be empty.
    """
    tried: list[Way] = ["dense", *ways]
    ffns = range(len(executor.ffns))
    fastest_ways: list[dict[str, Way]] = [{} for _ in ffns]
    seconds: list[dict[Way, float]] = []
    for done, size in enumerate(sizes):
        progress("trial of selectors", done, len(sizes))
        times = _seconds(executor, tried, size, sample)
        for at in ffns:
            times_of_layer = {way: times[way][at] for way in tried}
            best = min(ways, key=lambda way: times_of_layer[way])
            fastest_ways[at][str(size)] = best if times_of_layer[best] < GAIN * times_of_layer["dense"] else "dense"
            if size == sizes[0]:
                seconds.append({way: round(value, 9) for way, value in times_of_layer.items()})
    progress("trial of selectors", len(sizes), len(sizes))
    return TimedLayers([TimedLayer(*one) for one in zip(fastest_ways, seconds, strict=True)])


def _seconds(executor: CpuExecutor, ways: Sequence[Way], size: int, sample: Sequence[int]) -> dict[Way, list[float]]:
    """Way -> median seconds of each layer's FFN in a step of `size` sequences."""
    tokens = np.resize(np.asarray(sample or [0], np.int32), size * (PROMPT + len(ways) * ROUNDS)).reshape(size, -1)
    pages = np.arange(size, dtype=np.int32)[:, None]
    sequences, places = np.arange(size, dtype=np.int32), count(PROMPT)
    rows = np.repeat(sequences, PROMPT)
    positions = np.tile(np.arange(PROMPT, dtype=np.int32), size)
    nothing = np.empty(0, np.int32)
    prompt = np.ascontiguousarray(tokens[:, :PROMPT].reshape(-1))
    for start in range(0, len(prompt), executor.max_tokens):
        end = start + executor.max_tokens
        executor.forward(Batch(prompt[start:end], positions[start:end], rows[start:end], pages, nothing))

    def step(way: Way, _: int) -> list[float]:
        for ffn in executor.ffns.values():
            ffn.set_ways({size: way})
        at = next(places)
        executor.forward(
            Batch(np.ascontiguousarray(tokens[:, at]), np.full(size, at, np.int32), sequences, pages, nothing)
        )
        return executor.ffn_seconds()

    with executor.timed():
        rounds = take_turns(ways, ROUNDS, step, warm_up=1)
    return {way: [median(times) for times in zip(*steps, strict=True)] for way, steps in rounds.items()}
