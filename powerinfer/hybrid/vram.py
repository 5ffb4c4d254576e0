"""Keeping a VRAM budget by measuring: once a model is loaded its largest steps run, and their real memory use counts.

A plan is made from an estimate of a GPU's working memory. If that was too low, or the device runs out of memory, the
least important neurons move back to the CPU. torch's CPU device has no allocator statistics, so the estimate is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from powerinfer.errors import GpuMemoryError, PowerInferError
from powerinfer.neurons import Tier
from powerinfer.placement.budget import gib
from powerinfer.placement.plan import with_less_vram

if TYPE_CHECKING:
    from powerinfer.devices.split import SplitExecutor
    from powerinfer.hybrid.ffn import NeuronSplit
    from powerinfer.placement.plan import Plan

_LACKING = 256 << 20
"""Bytes of neurons moved at a time if the device ran out of memory, since it is unknown how much is lacking."""


def hold_budget(
    executor: SplitExecutor,
    requests: int,
    vram: int | None,
    plan: Plan | None = None,
    split: NeuronSplit | None = None,
) -> Plan | None:
    """Run the largest steps, `requests` of them decoding together, and move neurons to the CPU until they fit.

    The cache must be empty. vram: limit in bytes for tensors, steps and recordings, None: the device's memory. plan,
    split: the placed neurons, None: there are none to move. Returns the plan that fits.
    PowerInferError, with what would help, if the budget cannot be kept.
    """
    while True:
        try:
            used = rehearsed(executor, requests)
            if used is None or vram is None:
                return plan
            used += 0 if split is None else _neuron_bytes(split)
            lacking = used - vram
            problem = PowerInferError(
                f"the model takes {gib(used)} of the GPU's memory, and --vram leaves it {gib(vram)}: give "
                f"{gib(lacking)} more, or lower --context, --prefill-chunk or --max-batch"
            )
        except GpuMemoryError as error:
            lacking, problem = _LACKING, error
        if lacking <= 0:
            return plan
        less = None if plan is None else with_less_vram(plan, lacking)
        if less is None or split is None:
            raise problem
        if not less.fits:
            raise PowerInferError(f"{problem}; --ram does not hold the neurons that would make room there")
        _move(split, less)
        plan = less


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
        if len(hot[ffn.layer]) != len(ffn.hot):
            ffn.place(hot[ffn.layer])
