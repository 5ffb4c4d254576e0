"""The selector inside experts that `auto` takes on the CPU: what a trial found, where RAM holds it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from powerinfer.hybrid.in_ram import shortened
from powerinfer.hybrid.resolved import Resolved, model_of, ram_bytes
from powerinfer.system import available_memory

if TYPE_CHECKING:
    from powerinfer.hybrid.load import Loading
    from powerinfer.sparsity.selector_trial import TimedLayers
    from powerinfer.sparsity.trials import Outcome


def with_earlier_choice(resolved: Resolved) -> Resolved:
    """The same with the selector that an earlier trial chose, if there was one."""
    if not _undecided(resolved):
        return resolved
    from powerinfer.sparsity.expert_trial import expert_trial, fits, obstacle

    checkpoint, engine = resolved.checkpoint, resolved.engine
    problem = obstacle(checkpoint, engine)
    if problem is not None:
        return replace(resolved, selection=replace(resolved.selection, reason=problem))
    outcome = expert_trial(checkpoint, engine).find(lambda result: fits(result, engine))
    return resolved if outcome is None else _chosen(resolved, outcome)


def with_choice(resolved: Resolved, loading: Loading) -> Resolved:
    """The same with the selector that a trial chooses, now or earlier; not of a model of which a part is on disk."""
    if not _undecided(resolved) or resolved.placement.disk is not None:
        return resolved
    from powerinfer.sparsity.expert_trial import expert_trial, fits, has_room, measured, obstacle

    checkpoint, engine = resolved.checkpoint, resolved.engine
    if obstacle(checkpoint, engine) is not None:
        return resolved
    trial = expert_trial(checkpoint, engine)
    outcome = trial.find(lambda result: fits(result, engine))
    if outcome is None and not has_room(checkpoint):
        return replace(resolved, selection=replace(resolved.selection, reason="no room for the trial inside experts"))
    if outcome is None:
        loading.progress("trial of neurons in experts", 0, 1)
        text = loading.sample()
        outcome = trial.run(lambda: measured(checkpoint, engine, text))
        loading.progress("trial of neurons in experts", 1, 1)
    return _chosen(resolved, outcome)


def _undecided(resolved: Resolved) -> bool:
    selection = resolved.selection
    experts = bool(resolved.checkpoint.config.experts)
    return experts and (resolved.engine.selector, selection.selector) == ("auto", "all")


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
        problem = "RAM does not hold experts whose neurons are separable"
        return replace(resolved, selection=replace(resolved.selection, reason=problem))
    return chosen
