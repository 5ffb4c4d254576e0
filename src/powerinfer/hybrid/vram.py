"""Keeping a VRAM budget by measuring: once a model is loaded its largest steps run, and their real memory use counts.

A plan is made from an estimate of a GPU's working memory. The measurement replaces it, once: the model is loaded again
with more neurons on the GPU where it leaves room, and with fewer where it does not (load.py). They do not move: weights
lie in one piece of memory, which torch keeps whole, however much of it is free. Where the device runs out of memory, be
it while weights are uploaded, in the largest steps or in the trial of prompts, the model is loaded again with less
there, too. Either way a margin stays free, so that the next start does not run out again. What was measured is saved in
trials.json beside the model, so that every start places the same neurons; an entry that the measurement contradicts is
replaced. torch's CPU device has no allocator statistics, so there the estimate is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from powerinfer.errors import GpuMemoryError, RequestError, demand
from powerinfer.hardware.description import SIZES_ALONE
from powerinfer.hybrid.beside_gpu import (
    estimated_scratch,
    half_buffer,
    with_fewer_layers,
    with_other_experts,
    with_shorter_chunk,
)
from powerinfer.hybrid.memory_trial import MARGIN
from powerinfer.hybrid.prompt_trial import settle as settle_prompts
from powerinfer.hybrid.resolved import Resolved, needs
from powerinfer.kernels.gpu import FEW
from powerinfer.placement.budget import gib, staged_in_ram, staged_on_gpu
from powerinfer.placement.plan import Plan, with_less_vram, with_working_memory
from powerinfer.placement.solver import GROUP

if TYPE_CHECKING:
    from powerinfer.devices.split import SplitExecutor
    from powerinfer.devices.streamed import StreamedLayers
    from powerinfer.hybrid.experts import ExpertSplit
    from powerinfer.hybrid.ffn import NeuronSplit

    Split = NeuronSplit | ExpertSplit | StreamedLayers

_LACKING = 256 << 20
"""Bytes to leave out if the device ran out of memory, since what is lacking is unknown; doubled each time."""


def smaller(resolved: Resolved, lacking: int, failures: int = 0) -> Resolved | RequestError | None:
    """The same with less on the GPU, once that ran out of memory. What costs least gives way first: chunks of prompts
    that take more than they are worth; then some neurons, or half of the buffers for long prompts, with some experts;
    then the buffers; then more experts, or layers. None: nothing is left to leave out; the error where RAM does not
    hold what would leave.

    lacking: bytes, 0: not known; failures: how often the device ran out of memory before.
    """
    resolved, lacking = resolved.placed(refilled=False), lacking or _LACKING << failures
    placement = resolved.placement
    if placement.several is not None:
        from powerinfer.hybrid.several import with_less

        return with_less(resolved, lacking)
    shorter = with_shorter_chunk(resolved, lacking)
    if isinstance(shorter, Resolved):
        return shorter if shorter.placement.neurons is None else _fewer_neurons(shorter, lacking) or shorter
    if placement.neurons is not None:
        return _fewer_neurons(resolved, lacking)
    if (headless := _drop_draft_head(resolved)) is not None:
        return headless
    if placement.experts is None:
        if placement.staging:
            return resolved.placed(staging=0 if failures else half_buffer(resolved))
        return with_fewer_layers(resolved)
    return _fewer_experts(resolved, lacking, failures)


def _fewer_neurons(resolved: Resolved, lacking: int) -> Resolved | RequestError | None:
    """`smaller`, by so many bytes of neurons."""
    plan = resolved.placement.neurons
    assert plan is not None
    hot_bytes = _hot_bytes(plan)
    less = with_less_vram(plan, min(lacking, hot_bytes)) if hot_bytes else None
    rests = resolved.engine.disk != "none"
    if not isinstance(less, Plan) or not (less.loads if rests else less.fits):
        return less if isinstance(less, RequestError) else None
    return resolved.placed(plan=less, disk=less.on_disk if rests else None)


def _fewer_experts(resolved: Resolved, lacking: int, failures: int) -> Resolved | RequestError | None:
    """`smaller`, by buffers and by so many bytes of experts."""
    placement = resolved.placement
    assert placement.plan is not None and placement.experts is not None
    inside, model = placement.plan.claims.inside, placement.plan.request.model
    estimate, scratch = estimated_scratch(resolved), placement.scratch
    measured = scratch is not None and scratch < estimate  # now or at an earlier start, and it does not hold
    hot = any(map(len, placement.experts)) or inside
    if placement.staging and (failures or not hot):
        return resolved.placed(staging=0)
    if not hot:
        return None
    if measured:
        return with_other_experts(resolved, estimate)
    if placement.staging:
        half = half_buffer(resolved)
        lacking -= staged_on_gpu(placement.staging) - staged_on_gpu(half)
        resolved = resolved.placed(staging=half)
        if lacking <= 0:
            return resolved
    spare = max(0, placement.plan.claims.gpu_left)
    most = sum(len(hot) * model.expert_bytes(layer)[0] for layer, hot in enumerate(placement.experts))
    most += sum(model.hot_bytes(layer, hot)[0] for layer, hot in inside.items())
    return with_other_experts(resolved, (estimate if scratch is None else scratch) + spare + min(lacking, most))


def _drop_draft_head(resolved: Resolved) -> Resolved | None:
    """The same without a draft head beside experts, which RAM must hold then; None: there is none, or it does not."""
    placement, ram = resolved.placement, resolved.engine.ram
    if not placement.draft or placement.experts is None:
        return None
    less = resolved.placed(draft=False)
    return less if ram is None or needs(less).ram <= ram else None


def fill(
    plan: Plan, used: int | None, lacking: int, earlier: int | None = None, *, tight: bool = False
) -> Plan | None:
    """The plan by what is really left on the GPU, once the largest steps ran; None: it stays. RequestError if neurons
    that have to leave do not fit into RAM, and there is no disk.

    used: bytes that they and the dense parts take, and earlier: took at the last start, None: that is not known.
    lacking: bytes beyond the limit; tight: the device ran out of memory with the plan before this one.
    """
    if lacking > 0:
        return _with_fewer(plan, lacking, _margin(plan, used))
    if tight:  # what was freed suffices; a margin has to follow
        less = _with_fewer(plan, 0, _margin(plan, used))
        return less if less is not None and less.loads and less.choice.gpu != plan.choice.gpu else None
    return None if used is None else _with_more(plan, used, earlier)


def hold_budget(
    executor: SplitExecutor,
    resolved: Resolved,
    split: Split | None = None,
    *,
    earlier: int | None = None,
    tight: bool = False,
    settle: Callable[[], bool | None] = lambda: None,
) -> tuple[Resolved, int | None]:
    """Run the largest steps, all requests decoding together, and `settle`.

    The cache must be empty. earlier, tight: as of `fill`. split: the placed neurons of a plan, or experts or layers
    that stream; None: there are none of these. settle: what else must run, at the end; whether steps are other ones
    from then on, so that the largest must run again. Returns what to load in its place, with other neurons on the GPU,
    or the same, once it is settled; and the bytes that dense parts and steps take, None: not known.
    GpuMemoryError if the budget cannot be kept so.
    """
    vram, placement = resolved.vram, resolved.placement
    used = _rehearsal(executor, resolved, split, vram)
    if placement.neurons is not None and not placement.refilled:
        filled = fill(placement.neurons, used, _lacking(used, split, vram), earlier, tight=tight)
        if filled is not None:
            if not filled.loads:
                problem = _budget_error(_lacking(used, split, vram), vram)
                short = "--ram does not hold the neurons that would make room there"
                raise GpuMemoryError(f"{problem}; {short}", problem.lacking)
            disk = filled.on_disk if resolved.engine.disk != "none" else None
            return resolved.placed(plan=filled, disk=disk, refilled=True), used
    while True:
        lacking = _lacking(used, split, vram)
        if lacking > 0:
            raise _budget_error(lacking, vram)
        if not settle():
            break
        used = _rehearsal(executor, resolved, split, vram)
    settle_prompts(executor, resolved, None if used is None or vram is None else -_lacking(used, split, vram))
    if vram is not None:
        recorded = sum(one.recorded_bytes for one in (executor.gpu, executor.draft) if one is not None)
        executor.gpu.share.limit(vram - recorded)
    return resolved, used


def hold_card(executor: SplitExecutor, resolved: Resolved, plan: Plan, split: Split | None) -> None:
    """Run the largest steps of one of several GPUs, which are placed by its part of the plan. split: as of
    `hold_budget`. GpuMemoryError if its budget cannot be kept."""
    gpu = plan.request.hardware.gpu
    limit = None if gpu is None or not resolved.engine.vrams else (plan.request.vram or 0) - gpu.reserved_bytes
    used = _rehearsal(executor, resolved, split, limit)
    if used is None or limit is None:
        return
    lacking = _lacking(used, split, limit)
    if lacking > 0:
        raise _budget_error(lacking, limit)
    executor.gpu.share.limit(limit - executor.gpu.recorded_bytes)


def measured_scratch(resolved: Resolved, split: ExpertSplit, used: int | None) -> int | None:
    """The working memory to place experts by instead of an estimate, where it leaves room for one more; None: it does
    not, or nothing was measured. used: what dense parts and the largest steps take."""
    from powerinfer.hardware.measure import measured

    if used is None or resolved.placement.scratch is not None or not any(len(ffn.cold) for ffn in split.ffns):
        return None
    gpu = measured(resolved.engine, gpu=resolved.gpu, types=SIZES_ALONE).gpu
    assert gpu is not None
    limit = gpu.memory_bytes - gpu.reserved_bytes if resolved.vram is None else resolved.vram
    estimate = estimated_scratch(resolved)
    placed = needs(resolved).vram - gpu.reserved_bytes - estimate
    working = max(0, used + neuron_bytes(split) - placed)
    scratch = working + working // MARGIN
    least = min(ffn.expert_bytes for ffn in split.ffns if len(ffn.cold))
    return scratch if limit - placed - scratch >= least and scratch < estimate else None


def _lacking(used: int | None, split: Split | None, vram: int | None) -> int:
    """Bytes beyond the limit; 0 or less where it is kept, or not known."""
    if used is None or vram is None:
        return 0
    return used + (0 if split is None else neuron_bytes(split)) - vram


def _budget_error(lacking: int, vram: int | None) -> GpuMemoryError:
    vram, lacking = vram or 0, max(0, lacking)
    return GpuMemoryError(
        f"the model takes {gib(lacking + vram)} of the GPU's memory, and --vram leaves it {gib(vram)}: give "
        f"{gib(lacking)} more, or lower --context, --prefill-chunk or --max-batch",
        lacking,
    )


def _hot_bytes(plan: Plan) -> int:
    """Bytes of neurons on the GPU."""
    return sum(plan.choice.gpu) * GROUP * plan.request.model.gpu_neuron


def _margin(plan: Plan, used: int | None) -> int:
    return (plan.claims.gpu["scratch"] if used is None else _working(plan, used)) // MARGIN


def _with_fewer(plan: Plan, lacking: int, margin: int) -> Plan | None:
    """The plan with `lacking` fewer bytes of neurons on the GPU, and with `margin` fewer still if there are that many
    and RAM holds them; None if there are not even `lacking`."""
    less = with_less_vram(plan, min(lacking + margin, max(lacking, _hot_bytes(plan))))
    return less if isinstance(less, Plan) and less.loads else demand(with_less_vram(plan, lacking))


def _with_more(plan: Plan, used: int, earlier: int | None) -> Plan | None:
    """The plan by the bytes that dense parts and steps take (`rehearsed`); None if no more neurons fit on the GPU.

    earlier: what they took at an earlier start with this plan, which stands unless the two differ by more than the
    margin.
    """
    working = _working(plan, used)
    margin = working // MARGIN
    if earlier is not None and used >= earlier - margin:
        return None
    more = with_working_memory(plan, working + margin)
    grows = isinstance(more, Plan) and more.loads and sum(more.choice.gpu) > sum(plan.choice.gpu)
    return more if isinstance(more, Plan) and grows else None


def _working(plan: Plan, used: int) -> int:
    """Bytes of working memory, in the sense of `Claims`, of those that dense parts and steps take (`rehearsed`)."""
    claims = plan.claims
    working = used - sum(claims.gpu[part] for part in claims.gpu if part not in ("runtime", "scratch", "predictor"))
    if plan.staging:  # the converted piece is not part of the claims' working memory
        working -= staged_on_gpu(plan.staging) - staged_in_ram(plan.staging)
    return max(0, working)


def _rehearsal(executor: SplitExecutor, resolved: Resolved, split: Split | None, vram: int | None) -> int | None:
    """`rehearsed`; what streaming neurons passes on is part of the largest steps. Where that is beyond the limit,
    recordings of shapes that seldom occur give way before anything else does: they are made again when these do."""
    stage, requests = None if split is None else split.stage, resolved.engine.max_batch
    if stage is not None:
        stage.least = FEW + 1
    try:
        used = rehearsed(executor, requests)
    finally:
        if stage is not None:
            stage.least = None
    lacking = _lacking(used, split, vram)
    return used if used is None or lacking <= 0 else used - executor.gpu.record_less(lacking)


def rehearsed(executor: SplitExecutor, requests: int) -> int | None:
    """Bytes of the device that a model's dense parts and its largest steps take; None where they are unknown."""
    if executor.gpu.device.type != "cuda":
        return None
    passed = executor.gpu.rehearse(requests)
    used, draft = sum(executor.gpu.memory().values()), executor.draft
    if draft is not None:
        more = draft.rehearse(requests)
        parts = {part: n for part, n in draft.memory().items() if part != "allocator"}  # of the model's, too
        used += sum(parts.values()) - min(passed, more)  # temporaries lie where those of the model were
    return used


def neuron_bytes(split: Split) -> int:
    """Bytes of hot neurons, predictors and staging buffers on the GPU."""
    return sum(sum(ffn.memory().values()) for ffn in split.ffns) + (0 if split.stage is None else split.stage.nbytes)
