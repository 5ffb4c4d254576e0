"""Tokens of a prompt in a step beside a GPU: more where weights stream for each step, as far as there is memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from powerinfer.config import DEFAULT_CHUNK, EngineConfig, PlanConfig
from powerinfer.hardware.cards import described_machine
from powerinfer.placement.chunks import CHUNKS, SHARE, WEIGHTS
from powerinfer.placement.estimates import estimate_request
from powerinfer.placement.plan import PlanRequest, make_plan
from powerinfer.placement.request import shape_subject

GIB = 1 << 30


def planned(name: str, vram: int, selector: str = "all", **options: int) -> PlanRequest:
    machine = described_machine("RTX 4090", 64 * GIB)
    engine = EngineConfig(**{"context": 16384, "vram": vram, **options}, selector=selector)
    return shape_subject(name, "q4_0", selector).request(machine, engine, PlanConfig(hardware="x"))


@pytest.mark.parametrize(("name", "sizes"), [("qwen3-30b-a3b", (8, 12, 16)), ("llama-3.3-70b", (8, 16, 24))])
def test_chunks_are_as_long_as_little_memory_makes_them(name: str, sizes: tuple[int, ...]) -> None:
    """Of experts, and of whole layers, that stream."""
    lengths = []
    for vram in sizes:
        request = planned(name, vram * GIB)
        short = replace(request, chunk=DEFAULT_CHUNK)
        before, after = short.claims(), request.claims()
        assert before.staging and after.staging and not after.disk
        assert SHARE * (after.gpu["scratch"] - before.gpu["scratch"]) <= vram * GIB
        assert request.chunk in (*CHUNKS, DEFAULT_CHUNK)
        longer = min((tokens for tokens in CHUNKS if tokens > request.chunk), default=None)
        if longer is not None:
            more = replace(request, chunk=longer).claims()
            lost = sum(before.gpu.values()) - sum(more.gpu.values())
            scratch = more.gpu["scratch"] - before.gpu["scratch"]
            beyond = max(scratch, lost + scratch), more.cpu["scratch"] - before.cpu["scratch"]
            cold = sum(nbytes for use, nbytes in before.cpu.items() if use in WEIGHTS)
            ram = request.hardware.cpu.memory_bytes // 2
            assert SHARE * beyond[0] > min(vram * GIB, cold) or SHARE * beyond[1] > ram
        lengths.append(request.chunk)
        made = make_plan(request)
        told = any(f"prompts are computed {request.chunk} tokens at a time" in reason for reason in made.reasons)
        assert told == (request.chunk > DEFAULT_CHUNK)
        assert made.request.workload.tokens == request.chunk
    assert len(set(lengths)) > 1


def test_what_was_given_wins() -> None:
    assert planned("qwen3-30b-a3b", 12 * GIB, prefill_chunk=777).chunk == 777
    assert planned("qwen3-30b-a3b", 12 * GIB, prefill_chunk=512).chunk == 512


def test_chunks_stay_short_where_nothing_streams() -> None:
    """All fits, or no GPU is used; and no chunk is longer than a context."""
    assert planned("qwen3-30b-a3b", 12 * GIB, context=2048).chunk == 2048
    assert planned("qwen3-30b-a3b", 12 * GIB, context=1000).chunk == 1000
    assert planned("qwen3-30b-a3b", 12 * GIB, context=300).chunk == DEFAULT_CHUNK
    assert planned("qwen3-30b-a3b", 0).chunk == DEFAULT_CHUNK
    assert planned("qwen3-8b", 24 * GIB, context=4096).chunk == DEFAULT_CHUNK


def test_the_table_of_all_models_counts_with_the_chunks_of_a_load() -> None:
    machine = described_machine("RTX 4060", 32 * GIB)
    engine = EngineConfig(context=4096, max_batch=8)
    wanted = shape_subject("qwen3-30b-a3b", "q4_0", "all").request(machine, engine, PlanConfig(hardware="x"))
    assert estimate_request("qwen3-30b-a3b", "Q4_0", machine).chunk == wanted.chunk > DEFAULT_CHUNK
