"""Keeping a VRAM budget by measuring: once a model is loaded its largest steps run, and their real memory use counts.

A plan is made from an estimate of a GPU's working memory. The measurement replaces it, once: neurons move to the GPU
where it leaves room, and to the CPU where it does not, or where the device runs out of memory, be it while weights are
uploaded, in the largest steps or in the trial of prompts. Either way a margin stays free, so that the next start does
not run out again. What was measured is saved in memory.json beside the model, so that every start places the same
neurons; an entry that the measurement contradicts is replaced. torch's CPU device has no allocator statistics, so there
the estimate is used.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from powerinfer.errors import GpuMemoryError, PowerInferError, RequestError
from powerinfer.formats.json_file import Between
from powerinfer.formats.prepared import prepared_folder
from powerinfer.hardware.gpu_rates import software
from powerinfer.kernels.gpu import FEW
from powerinfer.neurons import Tier
from powerinfer.placement.budget import gib, staged_in_ram, staged_on_gpu
from powerinfer.placement.plan import with_less_vram, with_working_memory
from powerinfer.placement.solver import GROUP
from powerinfer.sparsity.saved_trials import Key, find_entry, keep_entry, trial_key

if TYPE_CHECKING:
    from pathlib import Path

    from powerinfer.devices.split import SplitExecutor
    from powerinfer.hybrid.ffn import NeuronSplit
    from powerinfer.hybrid.resolve import Resolved
    from powerinfer.placement.plan import Plan

KIND = "memory"

MARGIN = 8
"""Where neurons move, this part of the measured working memory (an eighth) stays free."""

_LACKING = 256 << 20
"""Bytes of neurons to move if the device ran out of memory, since what is lacking is unknown; doubled each time."""


@dataclass(frozen=True)
class _Kept:
    """Bytes of working memory that neurons were placed by; measured: as in `Held`."""

    key: Key
    working: Annotated[int, Between(0, 1 << 50)]
    measured: Annotated[int, Between(0, 1 << 50)]


@dataclass(frozen=True)
class Held:
    """plan: places the neurons, None: there are none to place. measured: bytes that dense parts and steps take with it,
    None: that is not known."""

    plan: Plan | None = None
    measured: int | None = None


class SavedMemory:
    """What was measured when a model was loaded the same way; `--retrial` measures again."""

    def __init__(self, resolved: Resolved) -> None:
        plan, engine = resolved.plan, resolved.engine
        assert plan is not None and resolved.gpu is not None
        self.path: Path = prepared_folder(resolved.checkpoint.path, engine.prepared) / "memory.json"
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
            "margin": MARGIN,
        }
        self._key = trial_key(resolved.checkpoint, engine, resolved.selection, ()) | software(resolved.gpu)
        self._key |= {name: str(value) for name, value in facts.items()}
        self._renew = engine.retrial

    def find(self, plan: Plan) -> Held | None:
        """The plan by what was measured earlier; None if nothing was, or neurons do not fit into RAM then."""
        kept = None if self._renew else find_entry(self.path, KIND, _Kept, self._key)
        if kept is not None:
            with suppress(RequestError):
                found = with_working_memory(plan, kept.working)
                if found is not None and found.fits:
                    return Held(found, kept.measured)
        return None

    def keep(self, held: Held) -> None:
        """Save what a plan holds for working memory. A folder that cannot be written is no failure: later starts
        measure again."""
        assert held.plan is not None
        result = {"working": held.plan.claims.gpu["scratch"], "measured": held.measured}
        keep_entry(self.path, KIND, _Kept, self._key, result)


def less_after_failure(plan: Plan, failures: int) -> Plan | None:
    """The plan to try after that number of times out of memory in a row; None: no neurons are left to move.

    RequestError as `with_less_vram`.
    """
    held = _held(plan)
    return with_less_vram(plan, min(_LACKING << (failures - 1), held)) if held else None


def hold_budget(
    executor: SplitExecutor,
    requests: int,
    vram: int | None,
    start: Held = Held(),
    split: NeuronSplit | None = None,
    *,
    failures: int = 0,
    settle: Callable[[], None] = lambda: None,
) -> Held:
    """Run the largest steps, `requests` of them decoding together, and `settle`, and move neurons until they fit.

    The cache must be empty. vram: limit in bytes for tensors, steps and recordings, None: the device's memory. start:
    the plan so far; if nothing was measured for it, or something else than now, neurons also move to the GPU, once, if
    there is room for more. split: the placed neurons, None: there are none to move. failures: times that the device has
    run out of memory so far. settle: what else must run, at the end. Returns what fits.
    GpuMemoryError, with what would help, if the budget cannot be kept.
    """
    plan, grow, tight = start.plan, not failures, failures > 0
    while True:
        less = None
        try:
            if plan is not None and split is not None:
                _move(split, plan)
            used = _rehearsal(executor, requests, split)
            lacking = _lacking(used, split, vram)
            if plan is not None and lacking > 0:
                less = _with_fewer(plan, lacking, _margin(plan, used))
            elif plan is not None and tight:  # what was freed suffices; a margin has to follow
                less = _if_changed(plan, _with_fewer(plan, 0, _margin(plan, used)))
            elif plan is not None and used is not None and grow:
                less = _with_more(plan, used, start.measured)
            if less is None and lacking <= 0:
                settle()
                return Held(plan, used)
            problem = _over_budget(lacking, vram)
            grow = tight = False
        except GpuMemoryError as error:
            problem, failures = error, failures + 1
            less = None if plan is None else less_after_failure(plan, failures)
            grow, tight = False, True
        if less is None or split is None:
            raise problem
        if not less.fits:
            raise PowerInferError(f"{problem}; --ram does not hold the neurons that would make room there")
        plan = less


def _lacking(used: int | None, split: NeuronSplit | None, vram: int | None) -> int:
    """Bytes beyond the limit; 0 or less where it is kept, or not known."""
    if used is None or vram is None:
        return 0
    return used + (0 if split is None else _neuron_bytes(split)) - vram


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
        if less is not None and less.fits:
            return less
    return with_less_vram(plan, lacking)


def _if_changed(plan: Plan, less: Plan | None) -> Plan | None:
    return less if less is not None and less.fits and less.choice.gpu != plan.choice.gpu else None


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
        if found is not None and found.fits and sum(found.choice.gpu) > sum(plan.choice.gpu):
            return found
    return None


def _working(plan: Plan, used: int) -> int:
    """Bytes of working memory, in the sense of `Claims`, of those that dense parts and steps take (`rehearsed`)."""
    claims = plan.claims
    working = used - sum(claims.gpu[part] for part in claims.gpu if part not in ("runtime", "scratch", "predictor"))
    if plan.staging:  # the converted piece is not part of the claims' working memory
        working -= staged_on_gpu(plan.staging) - staged_in_ram(plan.staging)
    return max(0, working)


def _rehearsal(executor: SplitExecutor, requests: int, split: NeuronSplit | None) -> int | None:
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


def _neuron_bytes(split: NeuronSplit) -> int:
    """Bytes of hot neurons, predictors and staging buffers on the GPU."""
    return sum(sum(ffn.memory().values()) for ffn in split.ffns) + (0 if split.stage is None else split.stage.nbytes)


def _move(split: NeuronSplit, plan: Plan) -> None:
    """Move neurons to match another plan: first the layers that lose some, to make room."""
    placement = plan.placement(plan.request.profile)
    hot = {ffn.layer: placement.by_tier(ffn.layer)[Tier.GPU] for ffn in split.ffns}
    for ffn in sorted(split.ffns, key=lambda ffn: len(hot[ffn.layer]) - len(ffn.hot)):
        failed = ffn.neurons is None and len(ffn.hot) > 0  # by running out of memory
        if failed or len(hot[ffn.layer]) != len(ffn.hot):
            ffn.place(hot[ffn.layer])
