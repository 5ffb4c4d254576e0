"""The line of a load beside a GPU about a context that nobody has asked for, and that costs much."""

from __future__ import annotations

from dataclasses import replace

from powerinfer.hybrid.resolved import Resolved, context_of, model_of, workload

MUCH = 1.2
"""Times the speed that a shorter context must give for the line."""

SHARE = 10
"""The same of layers as a whole, whose speed is not predicted at a load: a layer more in so many."""


def context_note(resolved: Resolved) -> list[str]:
    """The line; none where the options give the context, or a shorter one gains little. Nor of several GPUs, or where
    neurons are placed, of which a second plan would take its time."""
    engine, placement = resolved.engine, resolved.placement
    if engine.context or not placement.layers or placement.several is not None or placement.neurons is not None:
        return []
    if placement.plan is None:
        costs = _cost_in_layers(resolved)
    else:
        from powerinfer.placement.context_cost import context_cost

        costs = context_cost(placement.plan, engine, MUCH)
    longest = resolved.checkpoint.config.context_length
    return [f"the context is the model's longest, {longest} tokens, as -c does not say: {cost}" for cost in costs]


def _cost_in_layers(resolved: Resolved) -> list[str]:
    """`context_cost` where layers are on the GPU as a whole."""
    from powerinfer.hardware.description import SIZES_ALONE
    from powerinfer.hardware.measure import measured
    from powerinfer.placement.budget import budgets, whole_layers
    from powerinfer.placement.context_cost import CONTEXT

    engine, model = resolved.engine, model_of(resolved)
    if context_of(model, engine) <= CONTEXT:
        return []
    hardware = measured(engine, gpu=resolved.gpu, types=SIZES_ALONE)
    vram, _ = budgets(hardware, engine.vram_bytes, engine.ram)
    layers = whole_layers(model, hardware, replace(workload(model, engine), context=CONTEXT), vram).layers
    now, n = resolved.placement.layers, model.config.n_layers
    if (layers - now) * SHARE < n:
        return []
    return [f"with -c {CONTEXT} the GPU would hold {layers} of the {n} layers, not {now}"]
