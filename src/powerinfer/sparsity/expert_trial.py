"""The trial of neurons inside experts: whether leaving out those that do not fire is faster than whole experts.

It comes before a model's weights are loaded, for experts have one layout or the other: the first layers, up to the
first that has such experts, are loaded with some of these in both, and decode a text. What it shows decides for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from powerinfer.config import EngineConfig, ExpertsConfig, LayerConfig
from powerinfer.devices.batch import Batch
from powerinfer.devices.cpu import CpuExecutor
from powerinfer.errors import RequestError
from powerinfer.formats.tensors import RawTensor, RestingTensor
from powerinfer.kernels import cpu
from powerinfer.models import rotations
from powerinfer.models.blocks import wire_embedding, wire_layer
from powerinfer.neurons import Indices
from powerinfer.sparsity.selection import Selection, check_experts
from powerinfer.sparsity.selector_trial import GAIN, TimedLayer, TimedLayers, Way
from powerinfer.sparsity.trials import Outcome, Trial, TrialSubject, conditions

if TYPE_CHECKING:
    from powerinfer.formats.checkpoint import Checkpoint

SUBJECT = TrialSubject("neurons in experts", TimedLayers, forgives=True)
WAYS: tuple[Way, ...] = ("dense", "exact")
PROMPT = 8
"""Tokens before those that are timed, of each sequence."""
ROUNDS = 8
EXPERTS = 32
"""Experts of a layer that are loaded, at least."""

_EXACT = Selection("exact", "", in_experts=True)


def sizes_tried(engine: EngineConfig) -> list[int]:
    """The batch sizes that are measured: one token, and the most that neurons are left out for."""
    return sorted({1, max(1, min(engine.max_batch, cpu.NEURON_TOKENS))})


def first_layer(checkpoint: Checkpoint) -> int:
    """The first layer of experts whose neurons are separable."""
    layers = checkpoint.config.experts.items()
    return next(layer for layer, experts in layers if experts.whole_reason is None)


def small_engine(engine: EngineConfig) -> EngineConfig:
    """The options of the trial: contexts that its steps fill, in the largest batch."""
    sizes = sizes_tried(engine)
    pages = -(-(PROMPT + ROUNDS + 1) * len(sizes) // cpu.PAGE)
    return replace(engine, context=cpu.PAGE * pages, max_batch=max(sizes), prefill_chunk=max(sizes))


def obstacle(checkpoint: Checkpoint, engine: EngineConfig) -> str | None:
    """Reason for which `--selector auto` tries nothing inside experts; None: it does."""
    if not checkpoint.config.experts or checkpoint.config.whole_experts_reason is not None:
        return checkpoint.config.whole_experts_reason or "there are no experts"
    try:
        check_experts("exact", checkpoint)
    except RequestError as error:
        return str(error)
    return None if engine.trial else "--no-trial: --selector exact skips neurons inside experts, if asked for"


class FewExperts:
    """A checkpoint's first layers, of which each has the first few experts (`Tensors`). layers: how many, None: up to
    the first of experts whose neurons are separable."""

    def __init__(self, checkpoint: Checkpoint, layers: int | None = None) -> None:
        self._checkpoint = checkpoint
        layers = first_layer(checkpoint) + 1 if layers is None else layers
        cut = map(self._cut, checkpoint.config.layers[:layers])
        self.config = replace(checkpoint.config, layers=tuple(cut), draft=None)

    def _cut(self, layer: LayerConfig) -> LayerConfig:
        if not isinstance(layer.ffn, ExpertsConfig):
            return layer
        router = replace(layer.ffn.router, groups=1, top_groups=1)
        n = min(layer.ffn.n_experts, max(EXPERTS, 4 * router.top_k))
        return replace(layer, ffn=replace(layer.ffn, n_experts=n, router=router))

    def has(self, name: str) -> bool:
        return self._checkpoint.has(name)

    def take(self, name: str) -> RawTensor:
        layer, _, part = name.removeprefix("layers.").partition(".")
        if not part.startswith(("router", "experts_")):
            return self._checkpoint.take(name)
        n = self.config.experts[int(layer)].n_experts
        if part.startswith("experts_") and not part.endswith("_bias"):
            return self._checkpoint.take_some(name, np.arange(n, dtype=np.int32))
        full = self._checkpoint.take(name)
        return full.subset(np.arange(n, dtype=np.int32))

    def take_some(self, name: str, index: Indices) -> RawTensor:
        return self._checkpoint.take_some(name, index)

    def order(self, name: str) -> Indices | None:
        return self._checkpoint.order(name)

    def rest(self, name: str) -> RestingTensor:
        return self._checkpoint.rest(name)

    def skip(self, name: str) -> None:
        self._checkpoint.skip(name)

    def check_unchanged(self) -> None:
        self._checkpoint.check_unchanged()


def expert_trial(checkpoint: Checkpoint, engine: EngineConfig) -> Trial[TimedLayers]:
    """The trial of a model without an `obstacle`."""
    sizes = " ".join(map(str, sizes_tried(engine)))
    subject = replace(SUBJECT, fallback=unmeasured(engine))
    return Trial(subject, checkpoint, engine, conditions(checkpoint, engine, _EXACT) | {"sizes": sizes})


def unmeasured(engine: EngineConfig) -> TimedLayers:
    """Whole experts, unmeasured."""
    return TimedLayers([TimedLayer({str(size): "dense" for size in sizes_tried(engine)})])


def fits(result: TimedLayers, engine: EngineConfig) -> bool:
    """Whether a saved result answers this trial."""
    return result == unmeasured(engine) or result.fits(1, WAYS[1:], sizes_tried(engine))


def selection_of(outcome: Outcome[TimedLayers]) -> Selection:
    """The selector that a trial chose: what is faster for one token, and in the largest batch not slower."""
    if outcome.problem:
        return Selection("all", outcome.reason(""))
    (verdict,) = outcome.result.verdicts(earlier=outcome.seconds is None)
    exact = all(way == "exact" for way in verdict.ways.values())
    origin = "" if outcome.seconds is None else f"; {outcome.origin}"
    reason = f"a layer of experts, {verdict.reason}{origin}"
    return replace(_EXACT, reason=reason) if exact else Selection("all", reason)


def measured(checkpoint: Checkpoint, engine: EngineConfig, sample: Sequence[int]) -> TimedLayers:
    """Times of the experts of the first such layer in both layouts, in the same steps."""
    layer, sizes = first_layer(checkpoint), sizes_tried(engine)
    few, small = FewExperts(checkpoint), small_engine(engine)
    pages = small.max_batch * -(-(small.context or 0) // cpu.PAGE)
    executor = CpuExecutor(few.config, small, rotations(checkpoint, small), pages=pages)
    try:
        wire_embedding(executor, checkpoint)
        for at in range(layer + 1):
            wire_layer(executor, few, at, None)
        ops = [executor.expert_operator(layer)]
        executor.in_experts = True
        wire_layer(executor, few, layer, None)
        ops.append(executor.expert_operator(layer))
        checkpoint.release()
        times = {size: _seconds(executor, [op.number for op in ops], size, sample) for size in sizes}
    finally:
        executor.close()
    ways: dict[str, Way] = {}
    for size, (dense, exact) in times.items():
        ways[str(size)] = "exact" if exact < (GAIN if size == 1 else 1.0) * dense else "dense"
    seconds: dict[Way, float] = dict(zip(WAYS, (round(value, 9) for value in times[1]), strict=True))
    return TimedLayers([TimedLayer(ways, seconds)])


def _seconds(executor: CpuExecutor, ops: Sequence[int], size: int, sample: Sequence[int]) -> list[float]:
    """Median seconds of rows operator in a step of `size` sequences."""
    length = PROMPT + ROUNDS + 1
    tokens = np.resize(np.asarray(sample or [0], np.int32), size * length).reshape(size, length)
    rows = np.arange(size, dtype=np.int32)
    pages = np.arange(executor.n_pages // size * size, dtype=np.int32).reshape(size, -1)
    nothing, places = np.empty(0, np.int32), count(0)
    times_of_steps: list[list[float]] = []
    with executor.timed():
        for turn in range(length):
            at = next(places)
            step = np.ascontiguousarray(tokens[:, at])
            executor.forward(Batch(step, np.full(size, at, np.int32), rows, pages, nothing))
            times = executor.operator_seconds()
            if turn > PROMPT:
                times_of_steps.append([times[op][1] for op in ops])
    return [median(times) for times in zip(*times_of_steps, strict=True)]

