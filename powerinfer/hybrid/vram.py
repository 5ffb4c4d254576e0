"""Keeping a VRAM budget by measuring: once a model is loaded its largest steps run, and their real memory use counts.

A plan is made from an estimate of a GPU's working memory. The measurement replaces it, once: neurons move to the GPU
where it leaves room, and to the CPU where it does not, or where the device runs out of memory. What was measured is
saved in memory.json beside the model, so that every start places the same neurons. torch's CPU device has no allocator
statistics, so there the estimate is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from powerinfer.errors import GpuMemoryError, PowerInferError
from powerinfer.formats.json_file import Between
from powerinfer.formats.prepared import prepared_folder
from powerinfer.hardware.gpu_rates import software
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
"""Where more neurons move to the GPU, this part of the measured working memory (an eighth) stays free."""

_LACKING = 256 << 20
"""Bytes of neurons to move if the device ran out of memory, since what is lacking is unknown; doubled each time."""


@dataclass(frozen=True)
class _Kept:
    """Bytes of working memory that neurons were placed by."""

    key: Key
    working: Annotated[int, Between(0, 1 << 50)]


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

    def plan(self, plan: Plan) -> Plan | None:
        """The plan by what was measured earlier; None if nothing was, or neurons do not fit into RAM then."""
        kept = None if self._renew else find_entry(self.path, KIND, _Kept, self._key)
        found = None if kept is None else with_working_memory(plan, kept.working)
        return found if found is not None and found.fits else None

    def keep(self, plan: Plan) -> None:
        """Save what a plan holds for working memory. A folder that cannot be written is no failure: later starts
        measure again."""
        keep_entry(self.path, KIND, _Kept, self._key, {"working": plan.claims.gpu["scratch"]})


def less_after_failure(plan: Plan, failures: int) -> Plan | None:
    """The plan to try after that number of times out of memory in a row; None: no neurons are left to move.

    RequestError as `with_less_vram`.
    """
    held = sum(plan.choice.gpu) * GROUP * plan.request.model.gpu_neuron
    return with_less_vram(plan, min(_LACKING << (failures - 1), held)) if held else None


def hold_budget(
    executor: SplitExecutor,
    requests: int,
    vram: int | None,
    plan: Plan | None = None,
    split: NeuronSplit | None = None,
    *,
    replan: bool = False,
) -> tuple[Plan | None, bool]:
    """Run the largest steps, `requests` of them decoding together, and move neurons to the CPU until they fit.

    The cache must be empty. vram: limit in bytes for tensors, steps and recordings, None: the device's memory. plan,
    split: the placed neurons, None: there are none to move. replan: once, move neurons to the GPU if what was
    measured leaves room for more. Returns the plan that fits, and whether memory was measured.
    GpuMemoryError, with what would help, if the budget cannot be kept.
    """
    failures = 0
    while True:
        try:
            if plan is not None and split is not None:
                _move(split, plan)
            used = rehearsed(executor, requests)
        except GpuMemoryError as error:
            problem, replan, failures = error, False, failures + 1
            less = None if plan is None else less_after_failure(plan, failures)
        else:
            if used is None:
                return plan, False
            lacking = 0
            if vram is not None:
                lacking = used + (0 if split is None else _neuron_bytes(split)) - vram
            better = _with_more(plan, used) if replan and plan is not None and lacking <= 0 else None
            replan = False
            if better is None and lacking <= 0:
                return plan, True
            problem = GpuMemoryError(
                f"the model takes {gib(lacking + (vram or 0))} of the GPU's memory, and --vram leaves it "
                f"{gib(vram or 0)}: give {gib(lacking)} more, or lower --context, --prefill-chunk or --max-batch"
            )
            less = better or (None if plan is None else with_less_vram(plan, lacking))
        if less is None or split is None:
            raise problem
        if not less.fits:
            raise PowerInferError(f"{problem}; --ram does not hold the neurons that would make room there")
        plan = less


def _with_more(plan: Plan, used: int) -> Plan | None:
    """The plan by the bytes that dense parts and steps take (`rehearsed`); None if no more neurons fit on the GPU."""
    claims = plan.claims
    working = used - sum(claims.gpu[part] for part in claims.gpu if part not in ("runtime", "scratch", "predictor"))
    if plan.staging:  # the converted piece is not part of the claims' working memory
        working -= staged_on_gpu(plan.staging) - staged_in_ram(plan.staging)
    working = max(0, working)
    found = with_working_memory(plan, working + working // MARGIN)
    if found is None or not found.fits:
        return None
    return found if sum(found.choice.gpu) > sum(plan.choice.gpu) else None


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
    hot = {ffn.layer: placement.parts(ffn.layer)[Tier.GPU] for ffn in split.ffns}
    for ffn in sorted(split.ffns, key=lambda ffn: len(hot[ffn.layer]) - len(ffn.hot)):
        failed = ffn.neurons is None and len(ffn.hot) > 0  # by running out of memory
        if failed or len(hot[ffn.layer]) != len(ffn.hot):
            ffn.place(hot[ffn.layer])
