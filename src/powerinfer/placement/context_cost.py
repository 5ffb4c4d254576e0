"""The cost of a long context, whose cache takes the place of weights in a GPU's memory or in RAM, and the contexts that
leave these there."""

from __future__ import annotations

from dataclasses import replace

from powerinfer.config import EngineConfig
from powerinfer.errors import RequestError
from powerinfer.placement.budget import Claims, gib
from powerinfer.placement.plan import Plan, PlanRequest, place

CONTEXT = 4096
"""Tokens of context that estimates are for, and of the shorter one."""

WEIGHTS = ("attention", "ffn", "panels", "experts", "head", "predictors")
"""Parts of a plan's bytes that are weights."""

STEP = 1024
"""Tokens in steps of which a context is looked for that leaves room for all weights, from two steps on."""


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


def contexts_that_fit(plan: Plan, engine: EngineConfig) -> list[str]:
    """A line on the longest contexts, with the plan's type of cache and with Q8_0, that do what the machine has too
    little memory for: nothing on disk or, where nothing is, all of the model on the GPU. None where neither does, for
    several GPUs, and where neurons are placed."""
    request, lacking = plan.request, {one.flag for one in plan.helps if not one.within_machine}
    if request.on_cards or plan.claims.bundles or not lacking:
        return []
    on_gpu = "--ram" not in lacking
    request = replace(request, chunk=engine.chunk)  # longer ones are for what streams
    flags: list[tuple[int, str]] = []
    for kv_type in dict.fromkeys((request.kv_type, "q8_0")):
        context = _longest(replace(request, kv_type=kv_type), on_gpu)
        if context and all(context > known for known, _ in flags):
            flags.append((context, f" --kv-type {kv_type}" if kv_type != request.kv_type else ""))
    if not flags:
        return []
    goal = "all of the model is on the GPU" if on_gpu else "nothing stays on disk"
    ways = (kind.strip() if context == request.context else f"-c {context}{kind}" for context, kind in flags)
    return [f"{goal} with {', or with '.join(ways)}"]


def _longest(request: PlanRequest, on_gpu: bool) -> int:
    """Tokens of the longest context up to the request's for which a model has room, in steps; 0: none of two."""

    def fits(steps: int) -> bool:
        context = min(steps * STEP, request.context)
        claims = replace(request, context=context).claims_if_any()
        return not isinstance(claims, RequestError) and (_on_gpu(request, claims) if on_gpu else claims.disk is None)

    least, most = 2, -(-request.context // STEP)
    if most < least or not fits(least):
        return 0
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if fits(middle) else (least, middle - 1)
    return min(least * STEP, request.context)


def _on_gpu(request: PlanRequest, claims: Claims) -> bool:
    """Whether all of the model is there."""
    config, experts = request.model.config, request.model.n_experts
    layers = claims.gpu_layers == config.n_layers and claims.gpu_head
    return layers and claims.disk is None and (claims.slots is None or sum(claims.slots) == sum(experts))
