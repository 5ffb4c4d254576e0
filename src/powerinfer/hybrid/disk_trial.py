"""The trial of neurons inside experts that rest on disk: whether to read rows of those that fire is faster than whole
experts.

The first layers, up to the second with experts, which are then guessed a layer ahead, are loaded in both ways, one
after the other, with memory for a few experts each, and decode a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from powerinfer.devices.batch import Batch
from powerinfer.devices.cpu import CpuExecutor
from powerinfer.hybrid.disk import first_layers_tier
from powerinfer.hybrid.resolved import Resolved
from powerinfer.kernels import cpu
from powerinfer.models import rotations
from powerinfer.models.blocks import wire_embedding, wire_layer
from powerinfer.sparsity.expert_trial import WAYS
from powerinfer.sparsity.selector_trial import GAIN, TimedLayer, TimedLayers, Way
from powerinfer.sparsity.trials import Trial, TrialSubject, conditions

UNMEASURED = TimedLayers([TimedLayer({"1": "dense"})])
"""Whole experts."""

SUBJECT = TrialSubject("neurons in experts on disk", TimedLayers, UNMEASURED, forgives=True)
PROMPT = 12
"""Tokens before those that are timed."""
TIMED = 20
SLOTS = 4
"""Experts of a layer in memory, as multiples of those of a token: more would take long to fill."""


def disk_trial(dense: Resolved, exact: Resolved) -> Trial[TimedLayers]:
    """The trial of a model that is placed in both ways, with experts on disk."""
    checkpoint, engine, rows = dense.checkpoint, dense.engine, exact.selection.expert_rows
    assert rows is not None
    key = conditions(checkpoint, engine, replace(exact.selection, files=(rows.path,)))
    slots = [_slots(resolved) for resolved in (dense, exact)]
    return Trial(SUBJECT, checkpoint, engine, key | {"slots": str(slots), "disk": engine.disk})


def fits(result: TimedLayers) -> bool:
    """Whether a saved result answers it."""
    return result == UNMEASURED or result.fits(1, WAYS[1:], [1])


def measured(dense: Resolved, exact: Resolved, sample: Sequence[int]) -> TimedLayers:
    """Seconds of a token's experts, with reading them."""
    all_read, rows = (_seconds(resolved, sample) for resolved in (dense, exact))
    way: Way = "exact" if rows < GAIN * all_read else "dense"
    seconds: dict[Way, float] = dict(zip(WAYS, (round(value, 9) for value in (all_read, rows)), strict=True))
    return TimedLayers([TimedLayer({"1": way}, seconds)])


def _slots(resolved: Resolved) -> dict[int, int]:
    """Numbers of experts in memory, by layer."""
    disk, experts = resolved.placement.disk, resolved.checkpoint.config.experts
    assert disk is not None
    of_layers = islice(disk.about.experts.items(), 2)
    return {layer: min(slots, SLOTS * experts[layer].router.top_k) for layer, slots in of_layers}


def _seconds(resolved: Resolved, sample: Sequence[int]) -> float:
    checkpoint, slots = resolved.checkpoint, _slots(resolved)
    layers, steps = max(slots) + 1, PROMPT + TIMED
    pages = -(-steps // cpu.PAGE)
    small = replace(resolved.engine, context=cpu.PAGE * pages, max_batch=1, prefill_chunk=cpu.PAGE)
    config = replace(checkpoint.config, layers=checkpoint.config.layers[:layers], draft=None)
    tier = first_layers_tier(resolved, slots)
    executor = CpuExecutor(config, small, rotations(checkpoint, small), pages=pages, disk=tier)
    executor.in_experts = resolved.selection.in_experts
    try:
        wire_embedding(executor, checkpoint)
        for layer in range(layers):
            wire_layer(executor, checkpoint, layer, None)
        checkpoint.release()
        ops = [executor.expert_operator(layer).number for layer in slots]
        tokens = np.resize(np.asarray(sample or [0], np.int32), steps)
        of_pages, nothing, first = np.arange(pages, dtype=np.int32)[None], np.empty(0, np.int32), np.zeros(1, np.int32)
        total = 0.0
        with executor.timed():
            for at in range(steps):
                place = np.full(1, at, np.int32)
                executor.forward(Batch(tokens[place], place, first, of_pages, nothing))
                times = executor.operator_seconds()
                total += sum(times[op][1] for op in ops) * (at >= PROMPT)
    finally:
        executor.close()
    return total / TIMED
