"""Keeping a VRAM budget by measuring: once a model is loaded its largest steps run, and their real memory use counts.

A plan is made from an estimate of a GPU's working memory. The measurement replaces it, once: neurons move to the GPU
where it leaves room, and to the CPU where it does not, or where the device runs out of memory, be it while weights are
uploaded, in the largest steps or in the trial of prompts. Either way a margin stays free, so that the next start does
not run out again. What was measured is saved in trials.json beside the model, so that every start places the same
neurons; an entry that the measurement contradicts is replaced. torch's CPU device has no allocator statistics, so there
the estimate is used.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, cast

from powerinfer.errors import GpuMemoryError, PowerInferError, RequestError
from powerinfer.formats.json_file import Between
from powerinfer.hybrid.trials import split_trial
from powerinfer.kernels.gpu import FEW
from powerinfer.neurons import Tier
from powerinfer.placement.budget import gib, staged_in_ram, staged_on_gpu
from powerinfer.placement.plan import GPU_ACCOUNTING, with_less_vram, with_working_memory
from powerinfer.placement.solver import GROUP
from powerinfer.sparsity.trials import Subject, Trial

if TYPE_CHECKING:
    from powerinfer.devices.split import SplitExecutor
    from powerinfer.devices.streamed import StreamedLayers
    from powerinfer.hybrid.experts import ExpertSplit
    from powerinfer.hybrid.ffn import NeuronSplit
    from powerinfer.hybrid.resolve import Resolved
    from powerinfer.placement.plan import Plan

MARGIN = 8
"""Where neurons move, this part of the measured working memory (an eighth) stays free."""

_LACKING = 256 << 20
"""Bytes of neurons to move if the device ran out of memory, since what is lacking is unknown; doubled each time."""


@dataclass(frozen=True)
class Working:
    """Bytes of working memory that neurons were placed by; measured: as in `Held`."""

    working: Annotated[int, Between(0, 1 << 50)]
    measured: Annotated[int, Between(0, 1 << 50)]


MEMORY = Subject("working memory", Working)


@dataclass(frozen=True)
class Held:
    """plan: places the neurons, None: there are none to place. measured: bytes that dense parts and steps take with it,
    None: that is not known."""

    plan: Plan | None
    measured: int | None


class SavedMemory:
    """Working memory that neurons of a model were placed by, and what was measured with that; `--retrial` measures
    again. A folder that cannot be written is no failure: later starts measure again."""

    def __init__(self, resolved: Resolved) -> None:
        plan = resolved.plan
        assert plan is not None
        request, gpu = plan.request, plan.request.hardware.gpu
        assert gpu is not None
        facts = {
            "vram": gpu.memory_bytes if request.vram is None else request.vram,
            "reserved": gpu.reserved_bytes,
            "layers": f"{plan.claims.gpu_layers} {plan.claims.gpu_head}",
            "profile": request.profile.digest,
            "policy": request.policy,
            "work": request.workload,
            "staging": plan.claims.staging,
            "passes": plan.claims.passes,
            "accounting": GPU_ACCOUNTING,
        }
        self._trial = split_trial(MEMORY, resolved, {**facts, "margin": MARGIN})

    def find(self, plan: Plan) -> Held | None:
        """The plan by what was measured earlier; None if nothing was, or neurons do not fit into RAM then."""
        saved = self._trial.find()
        if saved is not None:
            with suppress(RequestError):
                found = with_working_memory(plan, saved.result.working)
                if found is not None and found.loads:
                    return Held(found, saved.result.measured)
        return None

    def keep(self, held: Held) -> None:
        """Save what a plan holds for working memory."""
        assert held.plan is not None and held.measured is not None
        self._trial.keep(Working(held.plan.claims.gpu["scratch"], held.measured))


def experts_memory(resolved: Resolved) -> Trial[Working]:
    """The trial of the working memory that experts of a model are placed by: what was measured or, where that did not
    hold, the estimate. It does not depend on --vram."""
    engine = resolved.engine
    sizes = engine.context, engine.max_batch, engine.prefill_chunk, engine.kv_type, engine.threads
    return split_trial(MEMORY, resolved, {"experts": engine.expert_policy, "work": sizes, "margin": MARGIN})


@dataclass(frozen=True)
class Attempt:
    """A plan that is tried, None: there are no neurons to place.

    failures: how often the device ran out of memory before; tight: with the plan before this one. grow: neurons may
    move to the GPU if there is room for more.
    """

    plan: Plan | None = None
    failures: int = 0
    tight: bool = False
    grow: bool = True

    def after_failure(self) -> Attempt | None:
        """What to try once the device ran out of memory with it; None: no neurons are left to move.

        RequestError as `with_less_vram`.
        """
        held = 0 if self.plan is None else _held(self.plan)
        if self.plan is None or not held:
            return None
        less = with_less_vram(self.plan, min(_LACKING << self.failures, held))
        return None if less is None else Attempt(less, self.failures + 1, tight=True, grow=False)

    def after_steps(self, used: int | None, lacking: int, earlier: int | None) -> Attempt | None:
        """What to try once the largest steps ran with it; None: it stays.

        used: what they and the dense parts take, and earlier: took at the last start, None: that is not known. lacking:
        bytes beyond the limit. RequestError as `with_less_vram`.
        """
        plan = other = self.plan
        if plan is None:
            return None
        if lacking > 0:
            other = _with_fewer(plan, lacking, _margin(plan, used))
        elif self.tight:  # what was freed suffices; a margin has to follow
            other = _if_changed(plan, _with_fewer(plan, 0, _margin(plan, used)))
        else:
            other = _with_more(plan, used, earlier) if self.grow and used is not None else None
        return None if other is None else Attempt(other, self.failures, grow=False)


def hold_budget(
    executor: SplitExecutor,
    requests: int,
    vram: int | None,
    attempt: Attempt = Attempt(),
    split: NeuronSplit | ExpertSplit | StreamedLayers | None = None,
    *,
    earlier: int | None = None,
    settle: Callable[[], bool | None] = lambda: None,
) -> Held:
    """Run the largest steps, `requests` of them decoding together, and `settle`, and move neurons until they fit.

    The cache must be empty. vram: limit in bytes for tensors, steps and recordings, None: the device's memory. attempt:
    the plan so far; earlier: what was measured with it, None: nothing. If that is something else than now, neurons also
    move to the GPU, once, if there is room for more. split: the placed neurons of a plan, or experts or layers that
    stream, which do not move; None: there are none of these. settle: what else must run, at the end; whether steps are
    other ones from then on, so that the largest must run again. Returns what fits.
    GpuMemoryError, with what would help, if the budget cannot be kept.
    """
    while True:
        try:
            if attempt.plan is not None and split is not None:
                _move(cast("NeuronSplit", split), attempt.plan)
            used = _rehearsal(executor, requests, split)
            lacking = _lacking(used, split, vram)
            other = attempt.after_steps(used, lacking, earlier)
            if other is None and lacking <= 0:
                if settle():
                    continue
                if vram is not None:
                    executor.gpu.share.limit(vram - executor.gpu.recorded_bytes)
                return Held(attempt.plan, used)
            problem = _over_budget(lacking, vram)
        except GpuMemoryError as error:
            problem = error.with_traceback(None)  # its frames hold tensors of the step
            other = attempt.after_failure()
        if other is None or split is None:
            raise problem
        assert other.plan is not None
        if not other.plan.loads:
            raise PowerInferError(f"{problem}; --ram does not hold the neurons that would make room there")
        attempt = other


def _lacking(used: int | None, split: NeuronSplit | ExpertSplit | StreamedLayers | None, vram: int | None) -> int:
    """Bytes beyond the limit; 0 or less where it is kept, or not known."""
    if used is None or vram is None:
        return 0
    return used + (0 if split is None else neuron_bytes(split)) - vram


def _over_budget(lacking: int, vram: int | None) -> GpuMemoryError:
    vram, lacking = vram or 0, max(0, lacking)
    return GpuMemoryError(
        f"the model takes {gib(lacking + vram)} of the GPU's memory, and --vram leaves it {gib(vram)}: give "
        f"{gib(lacking)} more, or lower --context, --prefill-chunk or --max-batch"
    )


def _held(plan: Plan) -> int:
    """Bytes of neurons on the GPU."""
    return sum(plan.choice.gpu) * GROUP * plan.request.model.gpu_neuron


def _margin(plan: Plan, used: int | None) -> int:
    return (plan.claims.gpu["scratch"] if used is None else _working(plan, used)) // MARGIN


def _with_fewer(plan: Plan, lacking: int, margin: int) -> Plan | None:
    """The plan with `lacking` fewer bytes of neurons on the GPU, and with `margin` fewer still if there are that many
    and RAM holds them; None, or RequestError, as `with_less_vram` has it for `lacking` alone."""
    with suppress(RequestError):
        less = with_less_vram(plan, min(lacking + margin, max(lacking, _held(plan))))
        if less is not None and less.loads:
            return less
    return with_less_vram(plan, lacking)


def _if_changed(plan: Plan, less: Plan | None) -> Plan | None:
    return less if less is not None and less.loads and less.choice.gpu != plan.choice.gpu else None


def _with_more(plan: Plan, used: int, earlier: int | None) -> Plan | None:
    """The plan by the bytes that dense parts and steps take (`rehearsed`); None if no more neurons fit on the GPU.

    earlier: what they took at an earlier start with this plan, which stands unless the two differ by more than the
    margin.
    """
    working = _working(plan, used)
    margin = working // MARGIN
    if earlier is not None and used >= earlier - margin:
        return None
    with suppress(RequestError):
        found = with_working_memory(plan, working + margin)
        if found is not None and found.loads and sum(found.choice.gpu) > sum(plan.choice.gpu):
            return found
    return None


def _working(plan: Plan, used: int) -> int:
    """Bytes of working memory, in the sense of `Claims`, of those that dense parts and steps take (`rehearsed`)."""
    claims = plan.claims
    working = used - sum(claims.gpu[part] for part in claims.gpu if part not in ("runtime", "scratch", "predictor"))
    if plan.staging:  # the converted piece is not part of the claims' working memory
        working -= staged_on_gpu(plan.staging) - staged_in_ram(plan.staging)
    return max(0, working)


def _rehearsal(
    executor: SplitExecutor, requests: int, split: NeuronSplit | ExpertSplit | StreamedLayers | None
) -> int | None:
    """`rehearsed`; what streaming neurons passes on is part of the largest steps."""
    stage = None if split is None else split.stage
    if stage is None:
        return rehearsed(executor, requests)
    stage.least = FEW + 1
    try:
        return rehearsed(executor, requests)
    finally:
        stage.least = None


def rehearsed(executor: SplitExecutor, requests: int) -> int | None:
    """Bytes of the device that a model's dense parts and its largest steps take; None where they are unknown."""
    if executor.gpu.device.type != "cuda":
        return None
    executor.gpu.rehearse(requests)
    return sum(executor.gpu.memory().values())


def neuron_bytes(split: NeuronSplit | ExpertSplit | StreamedLayers) -> int:
    """Bytes of hot neurons, predictors and staging buffers on the GPU."""
    return sum(sum(ffn.memory().values()) for ffn in split.ffns) + (0 if split.stage is None else split.stage.nbytes)


def _move(split: NeuronSplit, plan: Plan) -> None:
    """Move neurons to match another plan: first the layers that lose some, to make room. Of neurons that rest on disk
    RAM has as many as that plan keeps: where more of them have their gates there, fewer."""
    if plan.on_disk is not None:
        for ffn in split.ffns:
            ffn.limit(plan.on_disk.about.neurons[ffn.layer])
    placement = plan.placement(plan.request.profile)
    hot = {ffn.layer: placement.by_tier(ffn.layer)[Tier.GPU] for ffn in split.ffns}
    for ffn in sorted(split.ffns, key=lambda ffn: len(hot[ffn.layer]) - len(ffn.hot)):
        failed = ffn.neurons is None and len(ffn.hot) > 0  # by running out of memory
        if failed or len(hot[ffn.layer]) != len(ffn.hot):
            ffn.place(hot[ffn.layer])
