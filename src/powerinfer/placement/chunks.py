"""The number of tokens of a prompt that a step computes: weights in RAM stream to a GPU once for each step."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from powerinfer.errors import RequestError
from powerinfer.placement.budget import budgets, bundle_bytes

if TYPE_CHECKING:
    from powerinfer.placement.budget import Claims
    from powerinfer.placement.plan import PlanRequest

CHUNKS = 8192, 4096, 2048
"""Tokens to choose from."""

WEIGHTS = frozenset(("attention", "head", "panels", "experts"))
"""Uses of RAM by weights that a step reads, beside bundles."""

SHARE = 12
"""Longer chunks get at most 1/SHARE of either memory, and of what a step reads in RAM: a step with 2,048 tokens takes
about a fourth of the time of four with 512 while weights stream, and decode loses no more than that share."""


def with_long_chunks(request: PlanRequest, lacking: int = 0) -> PlanRequest:
    """The same with the longest chunks that there is working memory for, where weights stream; else as it is. lacking:
    bytes by which steps take more of the GPU than they are counted with."""
    before = _streaming(request)
    if before is None:
        return request
    limits = budgets(request.hardware, request.vram, request.ram)
    least = min(limits[0], _cold_bytes(request, before))
    for tokens in CHUNKS:
        longer = replace(request, chunk=min(tokens, request.context))
        if longer.chunk > request.chunk and (after := _streaming(longer)) is not None:
            lost = _all_but_scratch(before) - _all_but_scratch(after)  # of layers that leave, too
            of_gpu = max(lost, after.gpu["scratch"] - before.gpu["scratch"])
            of_cpu = after.cpu["scratch"] - before.cpu["scratch"]
            if SHARE * (of_gpu + lacking) <= least and SHARE * of_cpu <= limits[1]:
                return longer
    return request


def _streaming(request: PlanRequest) -> Claims | None:
    """The claims, if weights pass through the GPU and no disk is in the way; else None."""
    claims = request.claims_if_any()
    if isinstance(claims, RequestError) or not claims.staging or claims.disk is not None:
        return None
    return claims


def _all_but_scratch(claims: Claims) -> int:
    return sum(claims.gpu.values()) - claims.gpu["scratch"]


def _cold_bytes(request: PlanRequest, claims: Claims) -> int:
    """Bytes of weights in RAM that a step may read there."""
    dense = sum(nbytes for use, nbytes in claims.cpu.items() if use in WEIGHTS)
    if not claims.bundles:
        return dense
    return dense + max(0, bundle_bytes(request.model, request.workload.predicted) - claims.gpu_left)
