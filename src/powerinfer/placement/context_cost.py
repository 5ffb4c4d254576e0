"""The cost of a long context that nobody has asked for: its cache takes the place of weights on a GPU."""

from __future__ import annotations

from dataclasses import replace

from powerinfer.config import EngineConfig
from powerinfer.errors import RequestError
from powerinfer.placement.budget import gib
from powerinfer.placement.plan import Plan, place

CONTEXT = 4096
"""Tokens of context that estimates are for, and of the shorter one."""

WEIGHTS = ("attention", "ffn", "panels", "experts", "head", "predictors")
"""Parts of a plan's bytes that are weights."""


def context_cost(plan: Plan, engine: EngineConfig, gain: float = 1.0) -> list[str]:
    """A line on the speed with a context of `CONTEXT` tokens; none where the options give the context, or it leaves the
    weights where they are, or the shorter one is less than `gain` times as fast."""
    if engine.context or plan.request.context <= CONTEXT or not plan.bytes["gpu"]:
        return []
    shorter = place(replace(plan.request, context=CONTEXT))
    if isinstance(shorter, RequestError):
        return []
    now, more = (
        sum(nbytes for part, nbytes in made.bytes["gpu"].items() if part in WEIGHTS) for made in (plan, shorter)
    )
    rate, before = (plan.request.batch / made.choice.seconds for made in (shorter, plan))
    if more <= now or rate < gain * before:
        return []
    return [
        f"with -c {CONTEXT} the GPU would hold {gib(more)} of weights, not {gib(now)}: {rate:.2f} tokens/s, not "
        f"{before:.2f}, each in the middle of its context"
    ]
