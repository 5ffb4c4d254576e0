"""Placing a model, or what a GPU does not have of it, within a budget of RAM: the rest stays on disk."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from powerinfer.config import EngineConfig
from powerinfer.errors import PowerInferError, RamError, RequestError, demand
from powerinfer.hybrid.resolved import Resolved, context_of, division_of, fits, kv_bytes, model_of, ram_bytes, workload
from powerinfer.kernels import cpu
from powerinfer.sparsity.selection import DENSE, select

if TYPE_CHECKING:
    from powerinfer.hardware.description import Hardware
    from powerinfer.neurons import Profile
    from powerinfer.placement.plan import PlanRequest
    from powerinfer.placement.shapes import Model

SHORT = 256
"""Tokens: a shorter context is not suggested."""

_MOST_GROWTH = 8  # of weights as they are loaded: types without kernels become others


def place_in_ram(resolved: Resolved) -> Resolved:
    """The same on the CPU alone, within --ram, or within the free memory if that does not hold the model; `auto` does
    not use bundles if the model fits without them. RequestError where --ram does not hold the least."""
    from powerinfer.system import available_memory

    checkpoint, engine = resolved.checkpoint, resolved.engine
    ram, free = engine.ram, available_memory()
    if ram is None and not 0 < free < _MOST_GROWTH * checkpoint.file_bytes:
        return resolved
    model = model_of(resolved)
    if ram is None:
        needed = ram_bytes(model, shortened(engine, model))  # bundles may stay in their file
        return demand(placed_within(resolved, model, free, needed, lambda short, ram: placed_in(short, model, ram)))
    placed = demand(placed_in(resolved, model, ram))
    total = ram_bytes(model, engine, placed.selection)
    return placed.placed(kv_room=kv_bytes(model, engine) + max(0, ram - total))


def shortened(engine: EngineConfig, model: Model) -> EngineConfig:
    """The options with a short context where none was asked for: its KV cache takes memory as it fills."""
    return replace(engine, context=engine.context or min(SHORT, model.config.context_length))


def placed_within(
    resolved: Resolved,
    model: Model,
    free: int,
    needed: int,
    place: Callable[[Resolved, int], Resolved | RequestError],
) -> Resolved | RequestError:
    """The same within the free memory or, where the model needs more of that, the outcome of `place`, with a short
    context. Where that is too little a container gets what takes least memory; elsewhere, and where it holds all of the
    model, nothing is on disk: the system may still find the memory.

    The error where a container does not hold the least: it would kill the process.
    """
    from powerinfer.placement.budget import gib
    from powerinfer.placement.disk import within
    from powerinfer.system import container_memory

    engine, least, limit = resolved.engine, needed, container_memory()
    if needed <= free:
        return resolved.placed(disk=None)
    short = replace(resolved, engine=shortened(engine, model))
    stays = engine.disk == "none" or resolved.placement.head
    placed = None if stays else place(short, within(free))  # another error: parts of this model cannot stay on disk
    if isinstance(placed, RamError):
        least = min(needed, placed.least)
    if not isinstance(placed, Resolved) and least < needed and limit is not None and least <= limit < needed:
        placed = place(short, least)
    if isinstance(placed, Resolved):
        return replace(placed, engine=engine)
    if limit is None or needed <= limit:
        return resolved.placed(disk=None)
    if least < needed and least <= limit and placed is not None:
        return placed
    disk = "" if least == needed else " even if its weights stay on disk"
    return RamError(
        f"{model.name} needs {gib(least)} of RAM{disk}",
        f"this container leaves it {gib(limit)}: give the container more memory",
        least,
        ", or a lower --context or --prefill-chunk, or take a smaller model",
    )


def placed_in(resolved: Resolved, model: Model, ram: int) -> Resolved | RequestError:
    """The same on the CPU alone with what does not fit into `ram` on disk; the error if the rest does not fit. `auto`
    may do without bundles (`PlanRequest.settled`)."""
    engine, rests = resolved.engine, resolved.engine.disk != "none"
    request = ram_request(resolved, model, ram)
    settled, reason = request.settled(rests, "RAM" if engine.ram is None else "--ram")
    if settled is not request:
        resolved = replace(resolved, selection=select(resolved.checkpoint, engine, reason))
    if not rests:
        return resolved if fits(model, engine, ram, resolved.selection) else _too_little_ram(resolved, model)
    claims = settled.claims_if_any()
    return claims if isinstance(claims, RequestError) else resolved.placed(disk=claims.disk)


def ram_request(resolved: Resolved, model: Model, ram: int) -> PlanRequest:
    """The request for the place of a model on the CPU alone."""
    from powerinfer.hardware.description import Hardware, unmeasured

    selection = resolved.selection
    request = dense_request(resolved, model, Hardware("this machine", "", unmeasured()), ram)
    if selection.bundles is None:
        return request
    profile, chosen = profile_of(resolved), resolved.engine.selector == "auto"
    request = replace(request, selector=selection.selector, chosen=chosen, profiled=profile is not None)
    return request if profile is None else replace(request, profile=profile)


def dense_request(resolved: Resolved, model: Model, hardware: Hardware, ram: int) -> PlanRequest:
    """The request for the place of a model on a machine within so much RAM, if every neuron is computed."""
    from powerinfer.placement.request import Subject, even_profile

    threads, _ = cpu.choose_threads(resolved.engine.threads)
    device = replace(hardware.cpu, threads=threads, memory_bytes=max(hardware.cpu.memory_bytes, ram))
    engine = replace(resolved.engine, ram=ram, gpu=resolved.device.gpu or "none")
    return Subject(model, even_profile(model), "all").request(replace(hardware, cpu=device), engine)


def profile_of(resolved: Resolved) -> Profile | None:
    """The profile of the model's neurons; None: there is none."""
    from powerinfer.formats.prepared import PROFILE, PreparedFile
    from powerinfer.formats.profile_file import open_profile

    checkpoint, prepared = resolved.checkpoint, resolved.engine.prepared
    if not PreparedFile(PROFILE, checkpoint, prepared).exists():
        return None
    return open_profile(checkpoint, prepared)


def whole_context(placed: Resolved, model: Model, ram: int) -> int | None:
    """The longest context, in whole pages, with which nothing stays on disk; None where nothing does, or where that is
    too short to be suggested. placed: within so much RAM."""
    from powerinfer.placement.budget import in_ram

    engine, selection, placement = placed.engine, placed.selection, placed.placement
    if placement.disk is None:
        return None
    division = division_of(placed) if placement.layers else None

    def too_long(pages: int) -> bool:
        shorter = replace(engine, context=pages * cpu.PAGE)
        if division is not None:
            return sum(in_ram(model, workload(model, shorter), division).values()) > ram
        if engine.selector != "auto" and selection.bundles is not None:
            return not fits(model, shorter, ram, selection)
        dense = placed_in(replace(placed, engine=shorter, selection=DENSE), model, ram)
        return isinstance(dense, RequestError) or dense.placement.disk is not None

    context = context_of(model, engine)
    tokens = bisect_left(range(1, context // cpu.PAGE), True, key=too_long) * cpu.PAGE
    return tokens if tokens >= min(context // 2, SHORT) else None


def _too_little_ram(resolved: Resolved, model: Model) -> RequestError:
    """The error for a --ram too small for one context, with what would help."""
    from powerinfer.formats.checkpoint import open_checkpoint
    from powerinfer.placement.budget import gib
    from powerinfer.placement.shapes import checkpoint_model

    checkpoint, engine, selection = resolved.checkpoint, resolved.engine, resolved.selection
    total, kv = ram_bytes(model, engine, selection), kv_bytes(model, engine)
    ram, context = engine.ram or 0, context_of(model, engine)
    helps = [f"give --ram {gib(total)}"]
    page = model.kv_bytes(engine.kv_type, 1, 1)
    tokens = (ram - total + kv) // page * cpu.PAGE if page else 0  # Mamba2 alone has no cache
    if tokens >= min(context // 2, SHORT):
        helps.append(f"--context {tokens}")
    if fits(model, replace(engine, kv_type="q8_0"), ram, selection):
        helps.append("--kv-type q8_0")
    if fits(checkpoint_model(checkpoint, engine.prepared, fresh=True), engine, ram):
        helps.append("--selector all")
    for kind in ("q8_0", "q4_0") if engine.quantize is None else ():
        with suppress(PowerInferError):  # nothing to quantise
            smaller = checkpoint_model(open_checkpoint(checkpoint.path, quantize=kind), engine.prepared, fresh=True)
            if fits(smaller, engine, ram):
                helps.append(f"--quantize {kind}")
                break
    if len(helps) == 1:
        helps.append("a smaller model, or one in fewer bits")
    return RequestError(
        f"{model.name} needs {gib(total)} of RAM, {gib(kv)} of it for a context of {context} tokens, and --ram is "
        f"{gib(ram)}: {', or '.join(helps)}"
    )
