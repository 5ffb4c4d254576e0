"""Placing a model beside a GPU: single neurons by a plan, experts by a plan, or layers as a whole.

With bundles, and a profile that says which neurons are hot, the plan of `placement` decides under the budgets; so it
does with experts. Without them whole layers are placed on the GPU, as many as fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from powerinfer.config import EngineConfig
from powerinfer.errors import RequestError, demand
from powerinfer.formats.checkpoint import Checkpoint
from powerinfer.hardware.description import SIZES_ALONE
from powerinfer.hybrid.in_ram import place_on_disk, placed_within, profile_of, shortened
from powerinfer.hybrid.resolved import (
    Device,
    Policy,
    Resolved,
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
    from powerinfer.devices.torch_device import choose_device
    from powerinfer.hardware.measure import measured

    if selection.in_experts and selection.predictors is not None:
        raise RequestError("predictors select inside experts on the CPU alone so far: leave out --gpu or --selector")
    choose_device(gpu)
    selection = _split_selection(checkpoint, engine, selection)
    spared, engine = cpu.spared_cores(engine.threads, gpu), cpu.beside_gpu(engine, gpu)
    resolved = Resolved(checkpoint, engine, selection, Device(gpu, spared=spared))
    model = model_of(resolved)
    resolved = resolved.placed(pages=pages_of(model, engine))
    if not any(model.n_experts) and selection.bundles is None:
        whole = partial(_whole_layers, resolved, model)
        hardware = measured(
            engine, progress, gpu=gpu, check=lambda memories: demand(whole(memories)), types=SIZES_ALONE
        )
        placed: Resolved | str = demand(whole(hardware))
    else:
        request = _planned(resolved, model)
        types = model.rated_types
        hardware = measured(engine, progress, gpu=gpu, check=lambda memories: request(memories).claims(), types=types)
        place = _split_experts if any(model.n_experts) else _split_neurons
        placed = place(resolved, request, hardware)
    assert hardware.gpu is not None
    if isinstance(placed, str) or engine.vram is None:
        return placed
    return replace(placed, vram=engine.vram - hardware.gpu.reserved_bytes)


def _split_selection(checkpoint: Checkpoint, engine: EngineConfig, selection: Selection) -> Selection:
    """The selector beside a GPU, where neurons are split only if it is known which are hot."""
    from powerinfer.formats.prepared import PROFILE, PreparedFile

    if selection.bundles is None:
        return selection
    whole = checkpoint.config.why_not_split
    if whole is not None:
        if engine.selector != "auto":
            raise RequestError(f"--selector {engine.selector}: {whole}: leave out --selector, or use --gpu none")
        return select(checkpoint, engine, whole)
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
    work, (vram, _) = workload(model, engine), budgets(hardware, engine.vram, engine.ram)
    layers, head, staging = whole_layers(model, hardware, work, vram)
    if not layers:
        return no_layer_fits(model, hardware, work, vram, dense=True)
    device = replace(resolved.device, why=f"whole layers ({resolved.selection.why})")
    placed = replace(resolved, device=device).placed(layers=layers, head=head, staging=staging)
    return within_ram(placed, model, hardware)


def within_ram(resolved: Resolved, model: Model, hardware: Hardware) -> Resolved | RequestError:
    """The same within --ram or the free memory, without the buffers for long prompts or with what that does not hold on
    disk, where layers are on the GPU as a whole; the error if --ram does not hold the rest."""
    from powerinfer.placement.budget import Division, gib, in_ram, streamed_in_ram

    engine, placement, ram = resolved.engine, resolved.placement, resolved.engine.ram
    layers, host_bytes = placement.layers, hardware.host_bytes
    if ram is None:
        return _layers_in_free_memory(resolved, model, hardware)
    work = workload(model, engine)
    needed = sum(in_ram(model, work, Division(layers, placement.head, host_bytes=host_bytes)).values())
    if needed + streamed_in_ram(model, work, layers, placement.staging) <= ram:
        return resolved.placed(disk=None)
    resolved = resolved.placed(staging=0)
    if needed <= ram:
        return resolved.placed(disk=None)
    if engine.disk != "none" and not placement.head:
        return place_on_disk(resolved, model, ram, host_bytes)
    held = "layer" if layers == 1 else f"{layers} layers"
    return RequestError(
        f"{model.name} needs {gib(needed)} of RAM beside the {held} that --vram holds: give --ram "
        f"{gib(needed)}, or more --vram"
    )


def _layers_in_free_memory(resolved: Resolved, model: Model, hardware: Hardware) -> Resolved | RequestError:
    """The same with what the free memory does not hold on disk; the error if a container holds not even that."""
    from powerinfer.placement.budget import Division, in_ram
    from powerinfer.placement.disk import within
    from powerinfer.system import available_memory

    engine, placement, free = resolved.engine, resolved.placement, available_memory()
    short = shortened(engine, model)
    division = Division(placement.layers, placement.head, host_bytes=hardware.host_bytes)
    needed = sum(in_ram(model, workload(model, short), division).values())
    if not 0 < free < needed:
        return resolved.placed(disk=None)

    def place(ram: int) -> Resolved | RequestError:
        placed = place_on_disk(replace(resolved, engine=short).placed(staging=0), model, ram, hardware.host_bytes)
        return placed if isinstance(placed, RequestError) else replace(placed, engine=engine)

    stays = engine.disk == "none" or placement.head
    return placed_within(place, model, None if stays else within(free), needed) or resolved.placed(disk=None)


# ---------------------------------------------------------------- by a plan


def _planned(resolved: Resolved, model: Model) -> Callable[..., PlanRequest]:
    """Gives the request for a plan on a machine, and by a working memory on its GPU (None: an estimate). RequestError,
    from it, if no layer fits on the GPU, or RAM does not hold experts that may not stay on disk."""
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

    def request(hardware: Hardware, scratch: int | None = None) -> PlanRequest:
        described = hardware.cpu.memory_bytes
        ram = min(available_memory() or described, described) if engine.ram is None else engine.ram
        made = replace(subject.request(hardware, replace(engine, ram=ram)), scratch=scratch)
        rests = any(model.n_experts)
        if rests and engine.disk == "none":
            made.in_memory()  # before anything says what would do if they stayed on disk
            rests = False
        made = on_named_gpu(made)
        if rests and engine.ram is None and made.claims().disk is not None:
            return replace(made, ram=within(ram))
        return made

    return request


def _split_neurons(
    resolved: Resolved, request: Callable[..., PlanRequest], hardware: Hardware
) -> Resolved | str:
    """A plan that places single neurons; the reason if that is slower than the CPU alone."""
    from powerinfer.placement.budget import gib
    from powerinfer.placement.disk import better_densely, within
    from powerinfer.placement.plan import make_plan

    plan = make_plan(request(hardware))
    name, ram, engine = plan.request.model.name, plan.request.ram, resolved.engine
    if engine.ram is None and ram is not None and plan.on_disk is not None:
        plan = make_plan(replace(plan.request, ram=within(ram)))
    if not plan.claims.gpu_layers:
        return plan.reasons[0]
    disk = plan.on_disk if engine.disk != "none" else None
    if not plan.fits and engine.disk != "none" and engine.selector == "auto":
        selection = select(resolved.checkpoint, engine, "--vram and --ram do not hold all neurons")
        without = replace(resolved, selection=selection)
        dense = _whole_layers(without, model_of(without), hardware)
        if isinstance(dense, Resolved) and (disk is None or better_densely(dense.placement.disk, disk)):
            return dense
    if not plan.fits and disk is None:
        reads = "--ram does not hold what reading them from disk takes"
        if engine.disk == "none":
            reads = "--disk none forbids to read them"
        enough = [offer.bytes for offer in plan.helps if offer.flag == "--ram"]
        needed = max(enough) if engine.disk == "none" else min(enough)
        raise RequestError(
            f"the neurons of {name} do not fit in --vram and --ram, and {reads}: give --ram {gib(needed)}, or more "
            "--vram"
        )
    return with_plan(resolved, plan).placed(disk=disk)


def with_plan(resolved: Resolved, plan: Plan) -> Resolved:
    """The same with the neurons, or experts, placed by a plan."""
    claims = plan.claims
    placed = resolved.placed(layers=claims.gpu_layers, head=claims.gpu_head, plan=plan, staging=plan.staging)
    if claims.slots is None:
        why = f"{100 * plan.choice.mass_on_gpu:.0f} % of the activations on the GPU"
    else:
        why = experts_said(placed.placement.experts or (), sum(plan.request.model.n_experts))
        placed = placed.placed(disk=claims.disk)
    return replace(placed, device=replace(resolved.device, why=why))


def _split_experts(
    resolved: Resolved, request: Callable[..., PlanRequest], hardware: Hardware
) -> Resolved | str:
    """A plan that places experts; the reason if that is slower than the CPU alone."""
    from powerinfer.hybrid.memory_trial import experts_memory
    from powerinfer.placement.plan import make_plan

    if resolved.placement.scratch is None:
        saved = experts_memory(resolved).find()
        resolved = resolved.placed(scratch=None if saved is None else saved.result.working)
    plan = make_plan(request(hardware, resolved.placement.scratch))
    return plan.reasons[0] if plan.claims.slots is None else with_plan(resolved, plan)


def with_other_experts(resolved: Resolved, scratch: int) -> Resolved:
    """The same with experts placed by that much working memory on the GPU. RequestError where no layer is left there,
    or RAM does not hold the others, and they may not stay on disk."""
    from powerinfer.hardware.measure import measured

    model = model_of(resolved)
    request = _planned(resolved, model)
    hardware = measured(resolved.engine, gpu=resolved.gpu, types=model.rated_types)
    placed = _split_experts(resolved.placed(scratch=scratch), request, hardware)
    if isinstance(placed, str):
        raise RequestError(placed)
    engine, placed = resolved.engine, replace(placed, policy=resolved.policy, vram=resolved.vram)
    if not resolved.placement.staging:  # left out before, or not needed
        placed = placed.placed(staging=0)
    short = placed.placement.disk is not None or (engine.ram is not None and needs(placed).ram > engine.ram)
    if short and engine.expert_policy == "auto" and placed.policy.name != "static":
        return replace(placed, policy=Policy("static", "others need more RAM than there is"))
    return placed


def with_fewer_layers(resolved: Resolved) -> Resolved | None:
    """The same without the head on the GPU or, if that is not there, with one layer less, of layers that are there as a
    whole. None if one layer is left. RequestError if --ram does not hold the rest."""
    from powerinfer.hardware.measure import measured

    layers = resolved.placement.layers - (not resolved.placement.head)
    if not layers:
        return None
    hardware = measured(resolved.engine, gpu=resolved.gpu, types=SIZES_ALONE)
    return demand(within_ram(resolved.placed(layers=layers, head=False), model_of(resolved), hardware))


def estimated_scratch(resolved: Resolved) -> int:
    """Bytes of working memory on the GPU that experts are placed by where nothing was measured."""
    return needs(resolved.placed(scratch=None)).vram - needs(resolved.placed(scratch=0)).vram
