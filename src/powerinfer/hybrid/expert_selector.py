"""The selector inside experts that `auto` takes: what a trial found on the CPU, where RAM holds it or, of experts on
disk, rows of them are prepared. Beside a GPU it is that of the CPU's experts; the GPU computes its own whole, for
nothing was measured there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from powerinfer.errors import ModelError, RequestError
from powerinfer.hybrid.in_ram import place_in_ram, shortened
from powerinfer.hybrid.resolved import Resolved, model_of, ram_bytes
from powerinfer.sparsity.selection import select, tried_inside
from powerinfer.system import available_memory

if TYPE_CHECKING:
    from powerinfer.hybrid.load import Loading
    from powerinfer.sparsity.selector_trial import TimedLayers
    from powerinfer.sparsity.trials import Outcome, Trial

_SPARE = 2  # of the bytes that the trial takes, where others may take memory, too

_TOO_LITTLE = "RAM does not hold experts whose neurons are separable"


def place_as_chosen(resolved: Resolved) -> Resolved:
    """The same on the CPU alone (`place_in_ram`), with the selector that an earlier trial chose, if there was one."""
    if not _undecided(resolved):
        return place_in_ram(resolved)
    from powerinfer.sparsity.expert_trial import expert_trial

    problem = _problem(resolved)
    if problem is not None:
        return place_in_ram(_with_reason(resolved, problem))
    if (ways := _on_disk(resolved)) is not None:
        dense, exact = ways
        return dense if exact is None else _read_as_chosen(dense, exact) or dense
    outcome = _earlier(expert_trial(resolved.checkpoint, resolved.engine), resolved)
    if outcome is not None:
        return place_in_ram(_chosen(resolved, outcome))
    placed = place_in_ram(resolved)
    problem = _problem(placed)
    return placed if problem is None else _with_reason(placed, problem)


def split_as_chosen(resolved: Resolved) -> Resolved:
    """The same beside a GPU, with the selector that an earlier trial chose, if there was one."""
    if not _undecided(resolved):
        return resolved
    from powerinfer.sparsity.expert_trial import expert_trial

    problem = _problem(resolved)
    if problem is not None:
        return _with_reason(resolved, problem)
    outcome = _earlier(expert_trial(resolved.checkpoint, resolved.engine), resolved)
    return resolved if outcome is None else _chosen(resolved, outcome)


def with_choice(resolved: Resolved, loading: Loading) -> Resolved:
    """The same with the selector that a trial chooses, now or earlier, placed by the memory that this takes; not of a
    model of which a part is on disk, unless rows of experts are prepared, nor of one whose experts a GPU has."""
    if not _undecided(resolved):
        return resolved
    if (ways := _on_disk(resolved)) is not None:
        dense, exact = ways
        return dense if exact is None else _read_as_chosen(dense, exact) or _tried_on_disk(dense, exact, loading)
    if _problem(resolved) is not None:
        return resolved
    from powerinfer.hybrid.expert_policy import with_policy
    from powerinfer.sparsity.expert_trial import expert_trial, measured

    checkpoint, engine = resolved.checkpoint, resolved.engine
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
    if not chosen.selection.in_experts:
        return chosen
    return place_in_ram(chosen) if resolved.device.gpu is None else with_policy(chosen)


def _on_disk(resolved: Resolved) -> tuple[Resolved, Resolved | None] | None:
    """The same on the CPU alone with whole experts, and with rows of them, None: the file with these is not the
    model's; None where that is not to be tried, no rows are prepared, or no experts rest on disk."""
    from powerinfer.formats.prepared import EXPERT_ROWS, PreparedFile
    from powerinfer.sparsity.expert_trial import obstacle

    checkpoint, engine = resolved.checkpoint, resolved.engine
    prepared = PreparedFile(EXPERT_ROWS, checkpoint, engine.prepared).exists()
    if resolved.device.gpu is not None or not prepared or obstacle(checkpoint, engine) is not None:
        return None
    dense = place_in_ram(resolved)
    if dense.placement.disk is None or not dense.placement.disk.about.experts:
        return None
    try:
        selection = select(checkpoint, replace(engine, selector="exact"))
    except ModelError as error:
        return _with_reason(dense, f"experts are read whole: {error}"), None
    try:
        exact = place_in_ram(replace(resolved, selection=selection))
    except RequestError:  # it takes a little more memory
        return None
    in_rows = exact.placement.disk is not None and exact.placement.disk.about.experts
    return (dense, exact) if in_rows else None


def _read_as_chosen(dense: Resolved, exact: Resolved) -> Resolved | None:
    """The choice of an earlier trial of reading experts; None: there was none."""
    from powerinfer.hybrid.disk_trial import disk_trial, fits

    outcome = disk_trial(dense, exact).find(fits)
    return None if outcome is None else _read_as(dense, exact, outcome)


def _tried_on_disk(dense: Resolved, exact: Resolved, loading: Loading) -> Resolved:
    from powerinfer.hybrid.disk_trial import disk_trial, measured

    loading.progress("trial of experts on disk", 0, 1)
    text = loading.sample()
    outcome = disk_trial(dense, exact).run(lambda: measured(dense, exact, text))
    loading.progress("trial of experts on disk", 1, 1)
    return _read_as(dense, exact, outcome)


def _read_as(dense: Resolved, exact: Resolved, outcome: Outcome[TimedLayers]) -> Resolved:
    from powerinfer.sparsity.expert_trial import selection_of

    selection = selection_of(outcome)
    way = exact if selection.in_experts else dense
    return _with_reason(way, selection.reason)


def _with_reason(resolved: Resolved, reason: str) -> Resolved:
    """The same, whose experts are whole for this reason."""
    return replace(resolved, selection=replace(resolved.selection, reason=reason))


def _problem(resolved: Resolved) -> str | None:
    """The reason for which nothing is tried; None: a trial decides."""
    from powerinfer.formats.expert_rows import kind_of
    from powerinfer.formats.prepared import PreparedFile
    from powerinfer.sparsity.expert_trial import obstacle

    placement, routed = resolved.placement, resolved.checkpoint.config.experts.items()
    problem = obstacle(resolved.checkpoint, resolved.engine)
    if problem is not None:
        return problem
    if placement.disk is not None:
        command = PreparedFile(kind_of(False), resolved.checkpoint, resolved.engine.prepared).command
        return f"a part of the model is on disk, where experts are whole unless `{command}` has stored their rows"
    if placement.experts is None:
        return None
    hot = placement.experts
    alone = all(layer < placement.layers and len(hot[layer]) == about.n_experts for layer, about in routed)
    return "the GPU has all experts, and computes them whole unless --selector exact is asked for" if alone else None


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
    if resolved.placement.several is not None:
        return False
    return tried_inside(resolved.engine, resolved.checkpoint.config, resolved.selection)


def _chosen(resolved: Resolved, outcome: Outcome[TimedLayers]) -> Resolved:
    """The choice of a trial, beside a GPU with experts placed anew; whole experts where memory does not hold the other
    layout."""
    from powerinfer.sparsity.expert_trial import selection_of

    engine, selection = resolved.engine, selection_of(outcome)
    if not selection.in_experts:
        return replace(resolved, selection=selection)
    if resolved.device.gpu is not None:
        from powerinfer.hybrid.beside_gpu import with_selector

        return with_selector(resolved, replace(selection, on_gpu=False)) or _with_reason(resolved, _TOO_LITTLE)
    chosen = replace(resolved, selection=selection)
    model = model_of(chosen)
    limit = engine.ram or available_memory()
    needed = ram_bytes(model, engine if engine.ram else shortened(engine, model), selection)
    return _with_reason(resolved, _TOO_LITTLE) if 0 < limit < needed else chosen
