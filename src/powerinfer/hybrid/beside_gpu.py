"""Placing a model beside a GPU: single neurons by a plan, experts by a plan, or layers as a whole.

With bundles, and a profile that says which neurons are hot, the plan of `placement` decides under the budgets; so it
does with experts. Without them whole layers are placed on the GPU, as many as fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from powerinfer.config import DEFAULT_CHUNK, EngineConfig
from powerinfer.devices.wanted import gpu_names, wanted_gpu
from powerinfer.errors import PowerInferError, RequestError, demand
from powerinfer.formats.checkpoint import Checkpoint
from powerinfer.hardware.description import SIZES_ALONE, RatedTypes
from powerinfer.hybrid.in_ram import dense_request, placed_within, profile_of, shortened
from powerinfer.hybrid.resolved import (
    Resolved,
    UsedGpu,
    experts_said,
    model_of,
    needs,
    pages_of,
    workload,
)
from powerinfer.kernels import cpu
from powerinfer.progress import Progress
from powerinfer.sparsity.selection import Selection, select

if TYPE_CHECKING:
    from powerinfer.hardware.description import Hardware
    from powerinfer.placement.plan import Plan, PlanRequest
    from powerinfer.placement.shapes import Model


def place_beside_gpu(
    checkpoint: Checkpoint, engine: EngineConfig, selection: Selection, gpu: str, progress: Progress
) -> Resolved | str:
    """The placement; the reason if the GPU is not used. RequestError if no layer fits on the GPU, or RAM does not hold
    the rest, and it may not stay on disk."""
    from powerinfer.hardware.measure import measured
    from powerinfer.hardware.usable_gpus import check_gpus

    names = gpu_names(gpu)
    check_gpus(names)
    selection = _split_selection(checkpoint, engine, selection)
    spared, engine = cpu.spared_cores(engine.threads, gpu), cpu.beside_gpu(engine, gpu)
    resolved = Resolved(checkpoint, engine, selection, UsedGpu(gpu, spared=spared))
    model = model_of(resolved)
    resolved = resolved.placed(pages=pages_of(model, engine))
    if len(names) > 1:
        from powerinfer.hybrid.several import place_on_cards

        on_cards = place_on_cards(resolved, model, progress)
        return on_cards if isinstance(on_cards, str) else demand(on_cards)
    if not any(model.n_experts) and selection.bundles is None:
        place = partial(_whole_layers, resolved, model)
        hardware = measured(
            engine, progress, gpu=gpu, check=lambda memories: demand(place(memories)), types=SIZES_ALONE
        )
        placed: Resolved | str = demand(place(hardware))
    else:
        request = _planned(resolved, model)
        types = model.rated_types
        hardware = measured(
            engine, progress, gpu=gpu, check=lambda memories: demand(request(memories)).claims(), types=types
        )
        split = _experts_as_saved if any(model.n_experts) else _split_neurons
        planned = demand(request(hardware))
        outcome = split(resolved.with_chunk(planned.chunk), planned)
        placed = outcome if isinstance(outcome, str) else demand(outcome)
    assert hardware.gpu is not None
    if isinstance(placed, str) or engine.vram_bytes is None:
        return placed
    return replace(placed, vram=engine.vram_bytes - hardware.gpu.reserved_bytes)


def planned_beside(
    checkpoint: Checkpoint, engine: EngineConfig, progress: Progress, types: RatedTypes
) -> PlanRequest | None:
    """The request for a plan of a model beside its GPU, by rates of this machine, also of these types. None: it has no
    GPU, or several, or cannot be placed, which its load says."""
    from powerinfer.devices.torch_device import choose_device
    from powerinfer.hardware.measure import measured
    from powerinfer.placement.budget import budgets

    try:
        name, _ = wanted_gpu(engine)
        if name is None or len(gpu_names(name)) > 1:
            return None
        choose_device(name)
        selection = _split_selection(checkpoint, engine, select(checkpoint, engine))
        resolved = Resolved(checkpoint, cpu.beside_gpu(engine, name), selection, UsedGpu(name))
        model = model_of(resolved)
        rated = RatedTypes(types.dense | model.rated_types.dense, types.rows | model.rated_types.rows)
        hardware = measured(resolved.engine, progress, gpu=name, types=rated)
        if any(model.n_experts) or selection.bundles is not None:
            return demand(_planned(resolved, model)(hardware))
        return dense_request(resolved, model, hardware, budgets(hardware, engine.vram_bytes, engine.ram)[1])
    except PowerInferError:
        return None


def _split_selection(checkpoint: Checkpoint, engine: EngineConfig, selection: Selection) -> Selection:
    """The selector beside a GPU, where neurons are split only if it is known which are hot."""
    from powerinfer.formats.prepared import PROFILE, PreparedFile

    if selection.bundles is None:
        return selection
    reason = checkpoint.config.unsplit_reason
    if reason is not None:
        if engine.selector != "auto":
            raise RequestError(f"--selector {engine.selector}: {reason}: leave out --selector, or use --gpu none")
        return select(checkpoint, engine, reason)
    profile = PreparedFile(PROFILE, checkpoint, engine.prepared)
    if profile.exists():
        return selection
    if engine.selector != "auto":
        raise RequestError(f"which neurons are hot is not known: `{profile.command}` finds out, or leave --selector")
    return select(checkpoint, engine, f"no profile says which neurons are hot; {profile.command} makes it")


# ---------------------------------------------------------------- whole layers


def _whole_layers(resolved: Resolved, model: Model, hardware: Hardware) -> Resolved | RequestError:
    """The first layers on the GPU, as many as fit into --vram; the error if none does, or RAM lacks room for the
    rest."""
    from powerinfer.placement.budget import budgets, no_layer_fits, whole_layers

    engine = resolved.engine
    vram, ram = budgets(hardware, engine.vram_bytes, engine.ram)
    resolved = resolved.with_chunk(dense_request(resolved, model, hardware, ram).chunk)
    work = workload(model, resolved.engine)
    layers, head, staging, draft = whole_layers(model, hardware, work, vram)
    if not layers:
        return no_layer_fits(model, hardware, work, vram)
    device = replace(resolved.device, reason=f"whole layers ({resolved.selection.reason})")
    placed = replace(resolved, device=device).placed(layers=layers, head=head, staging=staging, draft=draft)
    return fit_in_ram(placed, model, hardware)


def fit_in_ram(resolved: Resolved, model: Model, hardware: Hardware) -> Resolved | RequestError:
    """The same within --ram or the free memory, without the buffers for long prompts or with what that does not hold on
    disk, where layers are on the GPU as a whole; the error if --ram does not hold the rest."""
    if resolved.engine.ram is None:
        return _layers_in_free_memory(resolved, model, hardware)
    return _layers_in(resolved, model, hardware, resolved.engine.ram)


def _layers_in(resolved: Resolved, model: Model, hardware: Hardware, ram: int) -> Resolved | RequestError:
    """The same within so much RAM."""
    from powerinfer.placement.budget import WholeLayers

    engine, placement = resolved.engine, resolved.placement
    request = dense_request(resolved, model, hardware, ram)
    placed = WholeLayers(placement.layers, placement.head, placement.staging, placement.draft)
    claims = request.claims_of_layers(placed, engine.disk != "none")
    if isinstance(claims, RequestError):
        return claims
    return resolved.placed(staging=claims.staging, disk=claims.disk)


def _layers_in_ram(resolved: Resolved, model: Model, engine: EngineConfig, host_bytes: int) -> tuple[int, int]:
    """Bytes of RAM of the layers that a GPU does not have, and of the buffers through which they stream there."""
    from powerinfer.placement.budget import Division, in_ram, streamed_in_ram

    placement, work = resolved.placement, workload(model, engine)
    division = Division(placement.layers, placement.head, host_bytes=host_bytes, draft=placement.draft)
    buffers = streamed_in_ram(model, work, placement.layers, placement.staging)
    return sum(in_ram(model, work, division).values()), buffers


def _layers_in_free_memory(resolved: Resolved, model: Model, hardware: Hardware) -> Resolved | RequestError:
    """The same with what the free memory does not hold on disk; the error if a container holds not even that."""
    from powerinfer.system import available_memory

    free, short = available_memory(), shortened(resolved.engine, model)
    needed, buffers = _layers_in_ram(resolved, model, short, hardware.host_bytes)
    if not 0 < free < needed + buffers:
        return resolved.placed(disk=None)
    resolved = resolved.placed(staging=0)
    return placed_within(resolved, model, free, needed, lambda short, ram: _layers_in(short, model, hardware, ram))


# ---------------------------------------------------------------- by a plan


def _planned(resolved: Resolved, model: Model) -> Callable[..., PlanRequest | RequestError]:
    """Gives the request for a plan on a machine, and by a working memory on its GPU (None: an estimate); the error
    where no layer fits on the GPU, or RAM does not hold experts that may not stay on disk."""
    from powerinfer.placement.disk import within
    from powerinfer.placement.request import Subject, expert_subject, on_named_gpu
    from powerinfer.system import available_memory

    if any(model.n_experts):
        subject = expert_subject(model, resolved.checkpoint, resolved.engine.prepared)
    else:
        profile = profile_of(resolved)
        assert profile is not None
        subject = Subject(model, profile, resolved.selection.selector)
    engine = replace(resolved.engine, gpu=resolved.gpu)

    def request(hardware: Hardware, scratch: int | None = None) -> PlanRequest | RequestError:
        described = hardware.cpu.memory_bytes
        ram = min(available_memory() or described, described) if engine.ram is None else engine.ram
        planned = replace(subject.request(hardware, replace(engine, ram=ram)), scratch=scratch)
        rests = any(model.n_experts)
        if rests and engine.disk == "none":  # before anything says what would do if they stayed on disk
            claims = planned.claims_without_disk()
            return claims if isinstance(claims, RequestError) else on_named_gpu(planned)
        fitting = on_named_gpu(planned)
        if isinstance(fitting, RequestError) or not rests or engine.ram is not None:
            return fitting
        return planned if planned.claims().disk is None else replace(planned, ram=within(ram))

    return request


def _split_neurons(resolved: Resolved, request: PlanRequest) -> Resolved | RequestError | str:
    """A plan that places single neurons; the reason if that is slower than the CPU alone; the error where they do not
    fit."""
    from powerinfer.placement.budget import gib
    from powerinfer.placement.disk import better_densely, within
    from powerinfer.placement.plan import make_plan

    plan = make_plan(request)
    name, ram, engine = plan.request.model.name, plan.request.ram, resolved.engine
    if engine.ram is None and ram is not None and plan.on_disk is not None:
        plan = make_plan(replace(plan.request, ram=within(ram)))
    if not plan.claims.gpu_layers:
        return plan.reasons[0]
    disk = plan.on_disk if engine.disk != "none" else None
    if not plan.fits and engine.disk != "none" and engine.selector == "auto":
        selection = select(resolved.checkpoint, engine, "--vram and --ram do not hold all neurons")
        without = replace(resolved, selection=selection)
        dense = _whole_layers(without, model_of(without), request.hardware)
        if isinstance(dense, Resolved) and (disk is None or better_densely(dense.placement.disk, disk)):
            return dense
    if not plan.fits and disk is None:
        reads = "--ram does not hold what reading them from disk takes"
        if engine.disk == "none":
            reads = "--disk none forbids to read them"
        enough = [offer.bytes for offer in plan.helps if offer.flag == "--ram"]
        needed = max(enough) if engine.disk == "none" else min(enough)
        return RequestError(
            f"the neurons of {name} do not fit in --vram and --ram, and {reads}: give --ram {gib(needed)}, or more "
            "--vram"
        )
    return with_plan(resolved, plan).placed(disk=disk)


def with_plan(resolved: Resolved, plan: Plan) -> Resolved:
    """The same with the neurons, or experts, placed by a plan."""
    claims = plan.claims
    place = {"layers": claims.gpu_layers, "head": claims.gpu_head, "draft": claims.gpu_draft}
    placed = resolved.placed(**place, plan=plan, staging=plan.staging)
    if claims.slots is None:
        reason = f"{100 * plan.choice.mass_on_gpu:.0f} % of the activations on the GPU"
    else:
        reason = experts_said(placed.placement.experts or (), sum(plan.request.model.n_experts), len(claims.inside))
        placed = placed.placed(disk=claims.disk)
    return replace(placed, device=replace(resolved.device, reason=reason))


def _split_experts(
    resolved: Resolved, request: PlanRequest, staging: int | None = None
) -> Resolved | RequestError | str:
    """A plan that places experts; the reason if that is slower than the CPU alone; the error where they do not fit.
    staging: bytes of a buffer for long prompts, None: as planned."""
    from powerinfer.placement.plan import place

    plan = place(request)
    if isinstance(plan, RequestError) or plan.claims.slots is None:
        return plan if isinstance(plan, RequestError) else plan.reasons[0]
    placed = with_plan(resolved, plan).placed(scratch=request.scratch)
    return placed if staging is None else placed.placed(staging=min(staging, plan.staging))


def _experts_as_saved(resolved: Resolved, request: PlanRequest) -> Resolved | RequestError | str:
    """The plan of `_split_experts` by what held at an earlier start."""
    from powerinfer.hybrid.memory_trial import experts_memory

    saved = experts_memory(resolved, request).find()
    if saved is None:
        return _split_experts(resolved, request)
    memory = saved.result
    if 0 < memory.chunk < resolved.device.chunk:
        resolved, request = resolved.with_fewer_tokens(memory.chunk), replace(request, chunk=memory.chunk)
    return _split_experts(resolved, replace(request, scratch=memory.working), memory.staging)


def with_selector(resolved: Resolved, selection: Selection) -> Resolved | None:
    """The same with experts placed anew for a selector inside them; None where memory does not hold them so."""
    from powerinfer.hardware.measure import measured

    chosen = replace(resolved, selection=selection)
    model = model_of(chosen)
    request = _planned(chosen, model)(measured(resolved.engine, gpu=resolved.gpu, types=model.rated_types))
    placed = request if isinstance(request, RequestError) else _experts_as_saved(chosen, request)
    return placed if isinstance(placed, Resolved) and placed.placement.disk is None else None


def with_other_experts(resolved: Resolved, scratch: int) -> Resolved | RequestError:
    """The same with experts placed by that much working memory on the GPU, and the policy that suits them; the error
    where no layer is left there, or RAM does not hold the others, and they may not stay on disk."""
    from powerinfer.hardware.measure import measured
    from powerinfer.hybrid.expert_policy import with_policy

    model = model_of(resolved)
    hardware = measured(resolved.engine, gpu=resolved.gpu, types=model.rated_types)
    request = _planned(resolved, model)(hardware, scratch)
    if isinstance(request, RequestError):
        return request
    before = resolved.placement
    less = before.plan is not None and before.staging < before.plan.staging
    placed = _split_experts(resolved, request, before.staging if less else None)
    if not isinstance(placed, Resolved):
        return RequestError(placed)
    return with_policy(placed.placed(draft=placed.placement.draft and before.draft))


def with_fewer_layers(resolved: Resolved) -> Resolved | RequestError | None:
    """The same without the draft head on the GPU or, if that is not there, without the head, or with one layer less, of
    layers that are there as a whole. None if one layer is left; the error if --ram does not hold the rest."""
    from powerinfer.hardware.measure import measured

    drafted, head = resolved.placement.draft, resolved.placement.head
    layers = resolved.placement.layers - (not head)
    if not layers:
        return None
    hardware = measured(resolved.engine, gpu=resolved.gpu, types=SIZES_ALONE)
    less = resolved.placed(draft=False) if drafted else resolved.placed(layers=layers, head=False)
    return fit_in_ram(less, model_of(resolved), hardware)


def estimated_scratch(resolved: Resolved) -> int:
    """Bytes of working memory on the GPU that experts are placed by where nothing was measured."""
    return needs(resolved.placed(scratch=None)).vram - needs(resolved.placed(scratch=0)).vram


# ---------------------------------------------------------------- where the GPU has less memory than was estimated


def with_shorter_chunk(resolved: Resolved, lacking: int) -> Resolved | RequestError | None:
    """The same with shorter chunks of prompts, where these were chosen for the GPU, and take more than they are worth
    (placement/chunks.py) now that so many bytes are lacking; None: they do not. The error where RAM does not hold what
    leaves the GPU."""
    from powerinfer.hardware.measure import measured
    from powerinfer.placement.budget import budgets
    from powerinfer.placement.chunks import with_long_chunks

    if not resolved.device.chunk:
        return None
    plan, model = resolved.placement.plan, model_of(resolved)
    if plan is None:
        hardware = measured(resolved.engine, gpu=resolved.gpu, types=SIZES_ALONE)
        _, ram = budgets(hardware, resolved.engine.vram_bytes, resolved.engine.ram)
        request = dense_request(resolved, model, hardware, ram)
    else:
        request = replace(plan.request, scratch=None)
    tokens = with_long_chunks(replace(request, chunk=DEFAULT_CHUNK), lacking).chunk
    if tokens >= request.chunk:
        return None
    shorter = resolved.with_fewer_tokens(tokens)
    if plan is None:
        return shorter
    if resolved.placement.experts is not None:
        return with_other_experts(shorter, estimated_scratch(shorter) + lacking)
    return neurons_with_chunk(shorter, request)


def neurons_with_chunk(resolved: Resolved, request: PlanRequest) -> Resolved | RequestError | None:
    """The same with a plan of its neurons, as of a request, with the chunks that it has; None: they are not split so.
    The error where they do not fit."""
    placed = _split_neurons(resolved, replace(request, chunk=resolved.engine.chunk))
    if isinstance(placed, str) or (isinstance(placed, Resolved) and placed.placement.neurons is None):
        return None
    return placed


def half_buffer(resolved: Resolved) -> int:
    """Bytes of buffers for long prompts that are half as large; 0: they would be too small."""
    from powerinfer.placement.budget import fewer_experts_staged, streamed_buffer

    placement, model = resolved.placement, model_of(resolved)
    if placement.experts is not None:
        return fewer_experts_staged(model, placement.layers, placement.staging)
    return streamed_buffer(model, workload(model, resolved.engine), placement.staging // 2)
