"""A model on several GPUs: placing it by a plan whose parts are theirs, and the splits of its FFNs.

Each GPU has some layers that follow each other, split between it and the CPU as beside one GPU: buffers for prompts,
trials and budgets are its own, and so is what exchanges its experts. RAM, and what stays on disk beside it, are shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from powerinfer.devices.wanted import gpu_names
from powerinfer.errors import RequestError, demand
from powerinfer.hybrid.in_ram import profile_of
from powerinfer.hybrid.resolved import Resolved, experts_said, model_of
from powerinfer.hybrid.spread import deal
from powerinfer.neurons import Indices, NeuronPlacement
from powerinfer.placement.budget import budgets, gib
from powerinfer.placement.disk import better_densely, within
from powerinfer.placement.plan import Plan, PlanRequest, place
from powerinfer.placement.request import Subject, even_profile, expert_subject
from powerinfer.placement.several import too_little_ram
from powerinfer.placement.solver import GROUP
from powerinfer.progress import Progress
from powerinfer.sparsity.selection import select
from powerinfer.system import available_memory

if TYPE_CHECKING:
    from powerinfer.devices.cpu import CpuExecutor
    from powerinfer.devices.gpu import GpuLayers
    from powerinfer.devices.stage import Stage
    from powerinfer.hardware.description import Hardware
    from powerinfer.hybrid.copier import Copier
    from powerinfer.hybrid.experts import ExpertSplit
    from powerinfer.hybrid.ffn import NeuronSplit
    from powerinfer.placement.shapes import Model


# ---------------------------------------------------------------- placing


def place_on_cards(resolved: Resolved, model: Model, progress: Progress) -> Resolved | RequestError | str:
    """The placement by a plan over all GPUs; the reason if they are not used. The error if one of them holds no layer,
    or RAM does not hold the rest."""
    from powerinfer.hardware.measure import measured

    request = partial(_request, resolved, model)
    hardware = measured(
        resolved.engine,
        progress,
        gpu=resolved.gpu,
        check=lambda memories: demand(request(memories).claims_if_any()),
        types=model.rated_types,
    )
    planned = request(hardware)
    return _place_in_memory(resolved.with_chunk(planned.chunk), planned)


def _place_in_memory(resolved: Resolved, request: PlanRequest) -> Resolved | RequestError | str:
    """The placement within --ram or the free memory; with whole layers, where `auto` chose neurons that memory does not
    hold and disks read dense matrices in less time. The error where RAM lacks what may not stay on disk."""
    placed = _placed(resolved, request)
    if not isinstance(placed, Resolved):
        return placed
    engine, plan = resolved.engine, placed.placement.several
    assert plan is not None
    if plan.fits:
        return placed
    if engine.disk == "none":
        _, budget = budgets(request.hardware, request.vram, request.ram)
        needed = max((one.bytes for one in plan.helps if one.flag == "--ram"), default=budget)
        return too_little_ram(request, plan.claims, needed - budget)
    if engine.ram is None and request.ram is not None and plan.loads:
        placed = _placed(resolved, replace(request, ram=within(request.ram)))
        if not isinstance(placed, Resolved):
            return placed
        plan = placed.placement.several
        assert plan is not None
    disk = placed.placement.disk
    if plan.claims.bundles and engine.selector == "auto":
        selection = select(resolved.checkpoint, engine, "--vram and --ram do not hold all neurons")
        without = replace(resolved, selection=selection)
        dense = _placed(without, _request(without, model_of(without), request.hardware))
        if isinstance(dense, Resolved) and (disk is None or better_densely(dense.placement.disk, disk)):
            return dense
    if disk is None:
        needed = min((one.bytes for one in plan.helps if one.flag == "--ram"), default=0)
        return RequestError(
            f"the neurons of {request.model.name} do not fit in --vram and --ram, and --ram does not hold what reading "
            f"them from disk takes: give --ram {gib(needed)}, or more --vram"
        )
    return placed


def _request(resolved: Resolved, model: Model, hardware: Hardware) -> PlanRequest:
    checkpoint, engine, selection = resolved.checkpoint, resolved.engine, resolved.selection
    if any(model.n_experts):
        subject = expert_subject(model, checkpoint, engine.prepared)
    elif selection.bundles is None:
        subject = Subject(model, even_profile(model), "all")
    else:
        profile = profile_of(resolved)
        assert profile is not None
        subject = Subject(model, profile, selection.selector)
    described = hardware.cpu.memory_bytes
    ram = min(available_memory() or described, described) if engine.ram is None else engine.ram
    return subject.request(hardware, replace(engine, ram=ram, gpu=resolved.gpu))


def _placed(resolved: Resolved, request: PlanRequest) -> Resolved | RequestError | str:
    plan = place(request)
    if isinstance(plan, RequestError):
        return plan
    claims = plan.claims
    if not claims.gpu_layers:
        return plan.reasons[0]
    resolved = resolved.with_chunk(request.chunk)
    firsts, split = tuple(part.first for part in plan.parts), None if claims.whole else plan
    parts: dict[str, Any] = {"layers": claims.gpu_layers, "head": claims.gpu_head, "spread": any(map(sum, plan.shares))}
    parts["disk"] = claims.disk or plan.on_disk
    placed = resolved.placed(**parts, plan=split, firsts=firsts, several=plan)
    if claims.whole:
        reason = f"whole layers ({resolved.selection.reason})"
    elif claims.slots is None:
        reason = f"{100 * plan.choice.mass_on_gpu:.0f} % of the activations on the GPUs"
    else:
        reason = experts_said(placed.placement.experts or (), sum(request.model.n_experts), len(claims.inside))
        cards = "both" if len(plan.parts) == 2 else "all GPUs"
        reason += f"; each layer's experts are spread over {cards}" if parts["spread"] else ""
    return replace(placed, device=replace(placed.device, reason=reason))


def with_less(resolved: Resolved, lacking: int) -> Resolved | RequestError | None:
    """The same with so many bytes less on each GPU, once one of them ran out of memory; None: that leaves one of them
    no layer. The error where RAM does not hold what leaves."""
    several = resolved.placement.several
    assert several is not None
    vrams = tuple((part.plan.request.vram or 0) - lacking for part in several.parts)
    if min(vrams) <= 0:
        return None
    placed = _placed(resolved, replace(several.request, vram=sum(vrams), vrams=vrams))
    if not isinstance(placed, Resolved):
        return None
    plan = placed.placement.several
    assert plan is not None
    return placed if plan.fits or (plan.loads and resolved.engine.disk != "none") else None


# ---------------------------------------------------------------- what is loaded


class CardSplits:
    """The split of each GPU's FFNs (`SplitFfns`)."""

    def __init__(self, splits: Sequence[NeuronSplit | ExpertSplit], ends: Sequence[int]) -> None:
        """ends: of the layers of each."""
        self.kind = splits[0].kind
        self._splits = splits
        self._ends = ends

    def __call__(self, cpu: CpuExecutor, layers: GpuLayers, layer: int, weights: Any) -> Any:
        """The FFN of a layer, as its GPU's split makes it."""
        split = next(split for split, end in zip(self._splits, self._ends, strict=True) if layer < end)
        return split(cpu, layers, layer, weights)


def stages_of(resolved: Resolved, plan: Plan, opened: ExitStack) -> list[Stage | None]:
    """Buffers for long prompts of each GPU; None: it has none."""
    from powerinfer.devices.stage import Stage
    from powerinfer.devices.torch_device import choose_device, gpu_failures

    stages: list[Stage | None] = []
    for name, part in zip(gpu_names(resolved.gpu), plan.parts, strict=True):
        stages.append(None)
        if part.plan.staging:
            with gpu_failures("making room for prompts", "give less --vram"):
                stages[-1] = stage = Stage(choose_device(name), part.plan.staging)
                opened.callback(stage.close)
    return stages


def splits_of(
    resolved: Resolved, plan: Plan, stages: Sequence[Stage | None], copiers: Sequence[Copier | None]
) -> list[NeuronSplit | ExpertSplit]:
    """The split of each GPU's layers. copiers: of each, what exchanges its experts, None: they stay."""
    from powerinfer.hybrid.experts import ExpertSplit
    from powerinfer.hybrid.ffn import NeuronSplit

    selection, placement = resolved.selection, resolved.placement
    if placement.experts is not None:
        adjust, hot_whole = resolved.engine.adjust, not selection.on_gpu
        spread = _spread(placement.experts, plan.shares)
        hot: Sequence[Sequence[Indices]] = spread or [placement.experts] * len(plan.parts)
        cards = zip(hot, stages, copiers, strict=True)
        more = hot_whole, placement.hot_neurons, spread
        return [ExpertSplit(experts, adjust, stage, copier, *more) for experts, stage, copier in cards]
    bundles, profile = selection.bundles, plan.request.profile
    assert bundles is not None
    placed = [part.plan.placement(part.plan.request.profile) for part in plan.parts]
    joined = NeuronPlacement(
        profile.sizes,
        GROUP,
        tuple(tiers for one in placed for tiers in one.tiers),
        tuple(order for one in placed for order in one.order or ()),
    )
    selects = selection.threshold, selection.predictors
    return [NeuronSplit(bundles, joined, *selects, stage, profile.fraction) for stage in stages]


def _spread(experts: Sequence[Indices], shares: Sequence[Sequence[int]]) -> list[list[Indices]]:
    """Experts of each layer on each GPU, where these are spread. experts, shares: as of `Placement.experts` and
    `Plan.shares`."""
    layers = [deal(hot, counts) for hot, *counts in zip(experts, *shares, strict=True)] if shares else []
    return [[layer[number] for layer in layers] for number in range(len(shares))]
