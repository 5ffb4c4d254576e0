"""Hints for people whose model is read from disk: how fast that is, and which options would read less."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from powerinfer.errors import ModelError, RequestError
from powerinfer.hybrid.in_ram import placed_in, profile_of, shortened, whole_context
from powerinfer.hybrid.resolved import Resolved, fits, model_of
from powerinfer.sparsity.selection import select

if TYPE_CHECKING:
    from powerinfer.placement.disk import DiskPlan
    from powerinfer.placement.plan import PlanRequest


def disk_speed(resolved: Resolved) -> str:
    """The speed of decoding, as `powerinfer plan` says it; "" if the machine, or how often neurons fire, is not
    known."""
    from powerinfer.placement.plan import place
    from powerinfer.placement.plan_document import rate

    placement = resolved.placement
    if placement.layers:  # of neurons and layers beside a GPU it is not predicted
        read = None if placement.plan is None else placement.plan.from_disk
    else:
        request = _request(resolved)
        plan = None if request is None else place(request)
        read = None if plan is None or isinstance(plan, RequestError) else plan.from_disk
    return "" if read is None else f", about {rate(1 / read.seconds)} tokens/s"


def _request(resolved: Resolved) -> PlanRequest | None:
    """The request for a plan of the model as it is placed, on the CPU alone."""
    from powerinfer.hardware.measure import saved_hardware
    from powerinfer.placement.request import Subject, even_profile, expert_subject

    engine, disk = resolved.engine, resolved.placement.disk
    hardware = saved_hardware(engine)
    if disk is None or hardware is None or hardware.disk is None or disk.ram > hardware.cpu.memory_bytes:
        return None
    model, profile = model_of(resolved), profile_of(resolved) if disk.about.neurons else None
    if any(model.n_experts):
        subject = expert_subject(model, resolved.checkpoint, engine.prepared)
    elif not disk.about.neurons:
        subject = Subject(model, even_profile(model), "all")
    elif profile is not None:
        subject = Subject(model, profile, resolved.selection.selector)
    else:
        return None
    if engine.ram is None:
        engine = shortened(engine, model)
    return subject.request(hardware, replace(engine, ram=disk.ram, gpu="none", split_mode="layer"))


def disk_helps(resolved: Resolved) -> str:
    """The options with which less would be read from disk, or nothing; "" if there are none."""
    from powerinfer.placement.budget import gib

    engine, placement = resolved.engine, resolved.placement
    if placement.disk is None or placement.plan is not None:
        return ""
    model, ram, flags = model_of(resolved), placement.disk.ram, []
    asked = engine.ram is not None
    bundled = engine.selector != "auto" and resolved.selection.bundles is not None
    if asked and bundled and not placement.layers and fits(model, engine, ram):
        flags.append("--selector all")
    if asked or (engine.context and not placement.layers):
        context = whole_context(resolved, model, ram)
        flags += [] if context is None else [f"--context {context}"]
    helps = f"; {' or '.join(flags)} would leave room for all of it" if flags else ""
    nbytes = _predicted_bytes(resolved)
    if nbytes is not None:
        less = gib(nbytes) if nbytes else "none"
        helps += f"; --selector predicted would read {less} of these, with answers that are not exact"
    return helps


def _predicted_bytes(resolved: Resolved) -> int | None:
    """Bytes of dense weights that a step reads with --selector predicted; None: there are no predictors, or that is
    more than half of what it reads now. `auto` is exact, or dense, so it is for the user to choose them."""
    checkpoint, engine = resolved.checkpoint, resolved.engine
    config, disk = checkpoint.config, resolved.placement.disk
    if disk is None or resolved.placement.layers or engine.selector != "auto":
        return None
    if not config.rectified or config.competing or config.whole_reason is not None:
        return None
    selection = select(checkpoint, engine)
    if selection.bundles is None:
        return None
    if engine.ram is None:
        engine = shortened(engine, model_of(resolved))
    bundled = _on_disk(replace(resolved, engine=replace(engine, selector="exact"), selection=selection))
    plan = None
    if bundled is not None and bundled.about.neurons:
        with suppress(ModelError):  # predictors of another model, or none
            predicted = replace(engine, selector="predicted")
            plan = _on_disk(replace(resolved, engine=predicted, selection=select(checkpoint, predicted)))
    if plan is None or 2 * plan.streamed >= disk.streamed:
        return None
    return plan.streamed if plan.reading is None or disk.reading is None or plan.reading < disk.reading else None


def _on_disk(resolved: Resolved) -> DiskPlan | None:
    """The plan with another selector, within the same RAM; None where that is too little, or nothing stays on disk."""
    disk = resolved.placement.disk
    assert disk is not None
    placed = placed_in(resolved, model_of(resolved), disk.ram)
    return None if isinstance(placed, RequestError) else placed.placement.disk
