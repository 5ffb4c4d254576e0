"""The number of tokens of a prompt that a step computes: weights in RAM stream to a GPU once for each step."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from powerinfer.errors import RequestError
from powerinfer.placement.budget import budgets

if TYPE_CHECKING:
    from powerinfer.placement.budget import Claims
    from powerinfer.placement.plan import PlanRequest

CHUNKS = 8192, 4096, 2048
"""Tokens to choose from."""

SHARE = 12
"""Longer chunks get at most 1/SHARE of either memory, which decode could use: a step with 2,048 tokens takes about a
fourth of the time of four with 512 while weights stream, and decode loses no more than that share of what is hot."""


def with_long_chunks(request: PlanRequest) -> PlanRequest:
    """The same with the longest chunks that there is working memory for, where weights stream; else as it is."""
    claims = request.claims_if_any()
    if not _streams(claims):
        return request
    limits = budgets(request.hardware, request.vram, request.ram)
    for tokens in CHUNKS:
        chunk = min(tokens, request.context)
        longer = replace(request, chunk=chunk)
        if chunk > request.chunk and _streams(longer.claims_if_any()) and _fits(request, longer, limits):
            return longer
    return request


def _streams(claims: Claims | RequestError) -> bool:
    """Whether weights pass through the GPU, and no disk is in the way."""
    return not isinstance(claims, RequestError) and claims.staging > 0 and claims.disk is None


def _fits(request: PlanRequest, longer: PlanRequest, limits: tuple[int, int]) -> bool:
    """Whether the working memory of longer chunks takes little more of VRAM and RAM."""

    def scratch(planned: PlanRequest) -> tuple[int, int]:
        claims = planned.claims()
        return claims.gpu["scratch"], claims.cpu["scratch"]

    pairs = zip(scratch(request), scratch(longer), limits, strict=True)
    return all(SHARE * (after - before) <= limit for before, after, limit in pairs)
