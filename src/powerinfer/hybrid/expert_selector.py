"""The selector inside experts that `auto` takes on the CPU: what a trial found, where RAM holds it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from powerinfer.hybrid.in_ram import place_in_ram, shortened
from powerinfer.hybrid.resolved import Resolved, model_of, ram_bytes
from powerinfer.sparsity.selection import tried_inside
from powerinfer.system import available_memory

if TYPE_CHECKING:
    from powerinfer.hybrid.load import Loading
    from powerinfer.sparsity.selector_trial import TimedLayers
    from powerinfer.sparsity.trials import Outcome, Trial

_SPARE = 2  # of the bytes that the trial takes, where others may take memory, too


def place_as_chosen(resolved: Resolved) -> Resolved:
    """The same on the CPU alone (`place_in_ram`), with the selector that an earlier trial chose, if there was one."""
    if not _undecided(resolved):
        return place_in_ram(resolved)
    from powerinfer.sparsity.expert_trial import expert_trial, obstacle

    checkpoint, engine = resolved.checkpoint, resolved.engine
    problem = obstacle(checkpoint, engine)
    if problem is not None:
        return place_in_ram(_with_reason(resolved, problem))
    outcome = _earlier(expert_trial(checkpoint, engine), resolved)
    if outcome is not None:
        return place_in_ram(_chosen(resolved, outcome))
    placed = place_in_ram(resolved)
    if placed.placement.disk is None:
        return placed
    return _with_reason(placed, "a part of the model is on disk, where experts are computed whole")


def with_choice(resolved: Resolved, loading: Loading) -> Resolved:
    """The same with the selector that a trial chooses, now or earlier, placed by the memory that this takes; not of a
    model of which a part is on disk."""
    if not _undecided(resolved) or resolved.placement.disk is not None:
        return resolved
    from powerinfer.sparsity.expert_trial import expert_trial, measured, obstacle

    checkpoint, engine = resolved.checkpoint, resolved.engine
    if obstacle(checkpoint, engine) is not None:
        return resolved
    trial = expert_trial(checkpoint, engine)
    outcome = _earlier(trial, resolved)
    if outcome is None and not _has_room(resolved):
        return _with_reason(resolved, "no room for the trial inside experts")
    if outcome is None:
        loading.progress("trial of neurons in experts", 0, 1)
        text = loading.sample()
        outcome = trial.run(lambda: measured(checkpoint, engine, text))
        loading.progress("trial of neurons in experts", 1, 1)
    chosen = _chosen(resolved, outcome)
    return place_in_ram(chosen) if chosen.selection.in_experts else chosen


def _with_reason(resolved: Resolved, reason: str) -> Resolved:
    """The same, whose experts are whole for this reason."""
    return replace(resolved, selection=replace(resolved.selection, reason=reason))


def _earlier(trial: Trial[TimedLayers], resolved: Resolved) -> Outcome[TimedLayers] | None:
    """The result of an earlier trial, unless it is to be repeated."""
    from powerinfer.sparsity.expert_trial import fits

    def suits(result: TimedLayers) -> bool:
        return fits(result, resolved.engine)

    outcome = trial.find(suits)
    # Only a trial depends on the memory that is free at the moment: else bits would change from run to run.
    return outcome if outcome is not None or _has_room(resolved) else trial.find(suits, anew=False)


def _has_room(resolved: Resolved) -> bool:
    """Whether --ram, and the free memory with room for others, hold what the trial loads."""
    from powerinfer.placement.shapes import partial_model
    from powerinfer.sparsity.expert_trial import FewExperts, first_layer, small_engine

    checkpoint, engine, layer = resolved.checkpoint, resolved.engine, first_layer(resolved.checkpoint)
    model = partial_model(FewExperts(checkpoint).config, checkpoint)
    again = (*model.attention[layer], *model.by_neuron().ffn[layer])  # the layer is there twice
    converted = (one.file for one in model.experts[layer] if not checkpoint.as_stored(one.name))
    needed = ram_bytes(model, small_engine(engine)) + sum(one.panels for one in again) + max(converted, default=0)
    return needed <= (engine.ram or needed) and not 0 < available_memory() < _SPARE * needed


def _undecided(resolved: Resolved) -> bool:
    return tried_inside(resolved.engine, resolved.checkpoint.config, resolved.selection)


def _chosen(resolved: Resolved, outcome: Outcome[TimedLayers]) -> Resolved:
    """The choice of a trial; whole experts where memory does not hold the other layout."""
    from powerinfer.sparsity.expert_trial import selection_of

    engine, selection = resolved.engine, selection_of(outcome)
    chosen = replace(resolved, selection=selection)
    if not selection.in_experts:
        return chosen
    model = model_of(chosen)
    limit = engine.ram or available_memory()
    needed = ram_bytes(model, engine if engine.ram else shortened(engine, model), selection)
    if 0 < limit < needed:
        return _with_reason(resolved, "RAM does not hold experts whose neurons are separable")
    return chosen
