"""The trial: decode a few tokens in every way, and choose the fastest for each layer and batch size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np

from powerinfer.devices.batch import Batch
from powerinfer.formats.json_file import Between
from powerinfer.progress import Progress

if TYPE_CHECKING:
    from powerinfer.devices.cpu import CpuExecutor

BATCHES = (1, 2, 4, 8, 16, 32)
ROUNDS = 4  # the first is a warm-up
PROMPT = 16  # tokens before those that are timed
GAIN = 0.98  # a sparse way must take less than this share of the dense time


Way = Literal["dense", "exact", "predicted"]


@dataclass(frozen=True)
class Verdict:
    """How one layer decodes, and why.

    ways: by number of tokens; seconds: way -> time of one token, if measured.
    """

    ways: dict[str, Way]
    seconds: dict[Way, Annotated[float, Between(0, 1e6)]] = field(default_factory=dict)
    earlier: bool = False  # a saved result was used
    why_untried: str = "asked for: --no-trial"

    @property
    def reason(self) -> str:
        if not self.seconds:
            return self.why_untried
        times = ", ".join(f"{way} {1e6 * value:.0f} us" for way, value in self.seconds.items())
        return f"one token: {times}" + ", measured earlier (trial.json)" * self.earlier


def sizes_tried(executor: CpuExecutor, max_batch: int) -> list[int]:
    """The batch sizes that are measured."""
    return [size for size in BATCHES if size <= max(1, min(executor.neuron_tokens, max_batch, executor.n_pages))]


def apply(executor: CpuExecutor, verdicts: Sequence[Verdict]) -> None:
    """Set the ways of all layers."""
    for layer, verdict in enumerate(verdicts):
        executor.ffns[layer].set_ways({int(size): way for size, way in verdict.ways.items()})


def forced(
    skips: Sequence[bool], way: Way, sizes: Sequence[int], why: str = Verdict.why_untried, why_dense: str | None = None
) -> list[Verdict]:
    """One way for small batches, in all layers but those that skip no neuron. skips: of each layer, whether it does;
    why: the reason for either, or for those that do."""
    sparse, dense = (
        Verdict({str(size): one for size in sizes}, why_untried=reason)
        for one, reason in ((way, why), ("dense", why_dense or why))
    )
    return [sparse if some else dense for some in skips]


def trial(
    executor: CpuExecutor,
    ways: Sequence[Way],
    sizes: Sequence[int],
    sample: Sequence[int],
    progress: Progress,
) -> list[Verdict]:
    """Measure the FFN of every layer, dense and in `ways`, in turn, and find the fastest for each batch size.

    Leaves the executor's ways undefined. The KV cache must be empty.
    """
    every: list[Way] = ["dense", *ways]
    layers = executor.config.n_layers
    taken: list[dict[str, Way]] = [{} for _ in range(layers)]
    seconds: list[dict[Way, float]] = []
    for done, size in enumerate(sizes):
        progress("trial of selectors", done, len(sizes))
        times = _measure(executor, every, size, sample)
        for layer in range(layers):
            own = {way: times[way][layer] for way in every}
            best = min(ways, key=lambda way: own[way])
            taken[layer][str(size)] = best if own[best] < GAIN * own["dense"] else "dense"
            if size == sizes[0]:
                seconds.append({way: round(value, 9) for way, value in own.items()})
    progress("trial of selectors", len(sizes), len(sizes))
    return [Verdict(*one) for one in zip(taken, seconds, strict=True)]


def _measure(executor: CpuExecutor, ways: Sequence[Way], size: int, sample: Sequence[int]) -> dict[Way, list[float]]:
    """Way -> median seconds of each layer's FFN in a step of `size` sequences."""
    tokens = np.resize(np.asarray(sample or [0], np.int32), size * (PROMPT + len(ways) * ROUNDS)).reshape(size, -1)
    pages = np.arange(size, dtype=np.int32)[:, None]
    rows = np.repeat(np.arange(size, dtype=np.int32), PROMPT)
    positions = np.tile(np.arange(PROMPT, dtype=np.int32), size)
    nothing = np.empty(0, np.int32)
    prompt = np.ascontiguousarray(tokens[:, :PROMPT].reshape(-1))
    for start in range(0, len(prompt), executor.max_tokens):
        end = start + executor.max_tokens
        executor.forward(Batch(prompt[start:end], positions[start:end], rows[start:end], pages, nothing))
    taken: dict[Way, list[list[float]]] = {way: [] for way in ways}
    with executor.timed():
        for step in range(len(ways) * ROUNDS):
            way = ways[step % len(ways)]
            for layer in range(executor.config.n_layers):
                executor.ffns[layer].set_ways({size: way})
            at = PROMPT + step
            executor.forward(
                Batch(
                    np.ascontiguousarray(tokens[:, at]),
                    np.full(size, at, np.int32),
                    np.arange(size, dtype=np.int32),
                    pages,
                    nothing,
                )
            )
            taken[way].append(executor.ffn_seconds())
    return {way: [median(times) for times in zip(*steps[1:], strict=True)] for way, steps in taken.items()}
