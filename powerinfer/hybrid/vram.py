"""A VRAM budget held by measuring: once a model is loaded its largest steps run, and what they really took counts.

A plan is made from an estimate of a GPU's working memory. Where that was too low, or the device runs out of memory,
the neurons that matter least go back to the CPU. torch's CPU device has no allocator to ask, so there the estimate
stands.
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
"""Bytes of neurons that make room at a time where the device ran out of memory, which does not say what is lacking."""


def hold_budget(
    executor: SplitExecutor,
    requests: int,
    vram: int | None,
    plan: Plan | None = None,
    split: NeuronSplit | None = None,
) -> Plan | None:
    """Run the largest steps, `requests` of them decoding together, and move neurons to the CPU until they fit.

    The cache must be empty yet. vram: bytes that tensors, steps and recordings may take, None: all that the device has.
    plan, split: where neurons are, None: there are none to move. Returns the plan that holds.
    PowerInferError, with what would do, where the budget cannot be held.
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
    """Bytes of the device that a model's dense parts and its largest steps take; None where nobody counts them."""
    if executor.gpu.device.type != "cuda":
        return None
    executor.gpu.rehearse(requests)
    return sum(executor.gpu.memory().values())


def _neuron_bytes(split: NeuronSplit) -> int:
    """Of hot neurons and predictors, and of the buffers for cold ones, on the GPU."""
    return sum(sum(ffn.memory().values()) for ffn in split.ffns) + (0 if split.stage is None else split.stage.nbytes)


def _move(split: NeuronSplit, plan: Plan) -> None:
    """Place neurons as another plan does: layers that give up some first, to make room."""
    placement = plan.placement(plan.request.profile)
    hot = {ffn.layer: placement.parts(ffn.layer)[Tier.GPU] for ffn in split.ffns}
    for ffn in sorted(split.ffns, key=lambda ffn: len(hot[ffn.layer]) - len(ffn.hot)):
        if len(hot[ffn.layer]) != len(ffn.hot):
            ffn.place(hot[ffn.layer])
