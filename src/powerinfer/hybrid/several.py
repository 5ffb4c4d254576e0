"""A model on several GPUs: placing it by a plan whose parts are theirs, and loading it so.

Each GPU has some layers that follow each other, split between it and the CPU as beside one GPU: buffers for prompts,
trials and budgets are its own. What moves between requests or steps, or stays on disk, is for one GPU, but for
`--adjust`, which moves neurons or experts within a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from powerinfer.devices.choices import Choice
from powerinfer.devices.wanted import gpu_names
from powerinfer.errors import RequestError, demand
from powerinfer.hybrid.in_ram import profile_of
from powerinfer.hybrid.resolved import Resolved, experts_said
from powerinfer.neurons import NeuronPlacement
from powerinfer.placement.plan import Plan, PlanRequest, place
from powerinfer.placement.request import Subject, even_profile, expert_subject
from powerinfer.placement.solver import GROUP
from powerinfer.progress import Progress
from powerinfer.sparsity import Sparsity
from powerinfer.system import available_memory

if TYPE_CHECKING:
    from powerinfer.devices.cpu import CpuExecutor
    from powerinfer.devices.gpu import GpuLayers
    from powerinfer.devices.split import SplitExecutor
    from powerinfer.devices.stage import Stage
    from powerinfer.hardware.description import Hardware
    from powerinfer.hybrid.experts import ExpertSplit
    from powerinfer.hybrid.ffn import NeuronSplit
    from powerinfer.hybrid.load import Loaded, Loading
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
    return _placed(resolved, request(hardware))


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
    placed = resolved.placed(layers=claims.gpu_layers, head=claims.gpu_head, plan=split, firsts=firsts, several=plan)
    if claims.whole:
        reason = f"whole layers ({resolved.selection.reason})"
    elif claims.slots is None:
        reason = f"{100 * plan.choice.mass_on_gpu:.0f} % of the activations on the GPUs"
    else:
        reason = experts_said(placed.placement.experts or (), sum(request.model.n_experts), len(claims.inside))
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
    return placed if isinstance(placed, Resolved) else None


# ---------------------------------------------------------------- loading


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


def load_on_cards(resolved: Resolved, loading: Loading) -> Loaded:
    """The model as it is placed, and how its layers decode. Raises as `load_resolved` does; GpuMemoryError where a
    budget cannot be kept."""
    from powerinfer.hybrid.load import load_split

    plan = resolved.placement.several
    assert plan is not None
    with ExitStack() as opened:
        stages = _stages(resolved, plan, opened)
        splits = [] if plan.claims.whole else _splits(resolved, plan, stages)
        for made in splits:
            opened.callback(made.close)
        streams = plan.claims.whole or plan.claims.passes
        parts = CardSplits(splits, [part.last for part in plan.parts]) if splits else None
        executor = load_split(resolved, parts, loading.progress, stages[-1] if streams else None, loading.say)
        opened.pop_all()  # the executor closes them
    try:
        _settle(executor, resolved, splits, loading)
        sparsity = _sparsity(executor, resolved, splits)
    except BaseException:
        executor.close()
        raise
    return executor, sparsity


def _stages(resolved: Resolved, plan: Plan, opened: ExitStack) -> list[Stage | None]:
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


def _splits(resolved: Resolved, plan: Plan, stages: Sequence[Stage | None]) -> list[NeuronSplit | ExpertSplit]:
    """The split of each GPU's layers."""
    from powerinfer.hybrid.experts import ExpertSplit
    from powerinfer.hybrid.ffn import NeuronSplit

    selection, placement = resolved.selection, resolved.placement
    if placement.experts is not None:
        experts, inside = placement.experts, placement.hot_neurons
        adjust, whole = resolved.engine.adjust, not selection.on_gpu
        return [ExpertSplit(experts, adjust, stage, hot_whole=whole, inside=inside) for stage in stages]
    bundles, profile = selection.bundles, plan.request.profile
    assert bundles is not None
    placed = [part.plan.placement(part.plan.request.profile) for part in plan.parts]
    joined = NeuronPlacement(
        profile.sizes,
        GROUP,
        tuple(tiers for one in placed for tiers in one.tiers),
        tuple(order for one in placed for order in one.order or ()),
    )
    about = selection.threshold, selection.predictors
    return [NeuronSplit(bundles, joined, *about, stage, profile.fraction) for stage in stages]


def _settle(
    executor: SplitExecutor, resolved: Resolved, splits: Sequence[NeuronSplit | ExpertSplit], loading: Loading
) -> None:
    """Hold each GPU's budget, and settle how it computes prompts and steps."""
    from powerinfer.devices.several import OneCard
    from powerinfer.hybrid.load import settle_cold, settle_layers_in_ram
    from powerinfer.hybrid.step_trial import settle as settle_steps

    plan, prefill = resolved.placement.several, []
    assert plan is not None
    each = zip(executor.cards, gpu_names(resolved.gpu), plan.parts, strict=True)
    for number, (card, name, part) in enumerate(each):
        one = replace(resolved, device=replace(resolved.device, gpu=name))
        alone, split = OneCard(executor, card), splits[number] if splits else None
        settle: Callable[[], None] = lambda: None  # noqa: E731
        if split is not None:
            settle = partial(settle_cold, alone, one, split, loading.sample, loading.progress)
        elif card is executor.cards[-1]:
            settle = partial(settle_layers_in_ram, alone, one, loading.progress)
        _hold(alone, one, part.plan, split)
        settle()
        if split is not None:
            settle_steps(alone, split, one)
        prefill.append(executor.choices.prefill)
    known = dict.fromkeys(str(choice) for choice in prefill if choice is not None)
    if len(known) > 1:
        executor.choices.prefill = Choice("; ".join(known))


def _hold(executor: SplitExecutor, resolved: Resolved, plan: Plan, split: NeuronSplit | ExpertSplit | None) -> None:
    """Run a GPU's largest steps within its budget. GpuMemoryError if it cannot be kept."""
    from powerinfer.hybrid.vram import budget_error, neuron_bytes, rehearsal

    streamed = executor.streamed
    used = rehearsal(executor, resolved, split or streamed)
    gpu = plan.request.hardware.gpu
    if used is None or gpu is None or not resolved.engine.vrams:
        return
    limit = (plan.request.vram or 0) - gpu.reserved_bytes
    stream = split or streamed
    lacking = used + (0 if stream is None else neuron_bytes(stream)) - limit
    if lacking > 0:
        raise budget_error(lacking, limit)
    executor.gpu.share.limit(limit - executor.gpu.recorded_bytes)


def _sparsity(executor: SplitExecutor, resolved: Resolved, splits: Sequence[NeuronSplit | ExpertSplit]) -> Sparsity:
    """How the layers decode, noted in the executor's choices."""
    from powerinfer.hybrid.experts import ExpertSparsity
    from powerinfer.hybrid.load import expert_selector
    from powerinfer.hybrid.sparsity import HybridSparsity

    choices, ffns = executor.choices, [ffn for split in splits for ffn in split.ffns]
    if not splits:
        sparsity = Sparsity()
        sparsity.stage = None if executor.streamed is None else executor.streamed.stage
        choices.selector = Choice(sparsity.selector, "layers as a whole")
        return sparsity
    if resolved.placement.experts is not None:
        of_experts = ExpertSparsity(executor, ffns)  # type: ignore[arg-type]
        choices.experts = Choice("static", resolved.policy.reason)
        choices.selector = Choice(of_experts.selector, "experts on the GPUs and the CPU", expert_selector(resolved))
        of_experts.clear()
        return of_experts
    of_neurons = HybridSparsity(resolved.selection.selector, executor, ffns)  # type: ignore[arg-type]
    choices.selector = Choice(of_neurons.selector, "neurons on the GPUs and the CPU")
    of_neurons.clear()
    return of_neurons
