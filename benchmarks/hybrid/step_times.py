"""Tell where the time of a decode step goes: kernels, the GPU idle between steps, the engine's thread between steps.

Of a model that is loaded, with one request:

- `step_ms` of a step, by the rate at which tokens come; of it the engine's thread is `forward_ms` in the executor,
  which waits for the GPU there, and `between_ms` outside
- `busy_ms` of a step in which some kernel runs, and `idle_ms` from the last kernel of a step to the first of the next,
  in which the GPU waits for the host alone: a request's fixed host cost. As torch's profiler has it, which makes steps
  slower (`profiled_ms`); on a GPU only
- `kernels`: microseconds of a step and launches, by name, the longest first
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple
from unittest import mock

from powerinfer import LLM, SamplingParams

PROFILED = 8  # steps, of more that are decoded
LONGEST = 25  # kernels
GRAPHS = {"TEARDOWN_CUPTI": "0", "DISABLE_CUPTI_LAZY_REINIT": "1"}
"""Of the environment: else the profiler may crash where CUDA graphs are replayed once it has ended."""


class Kernel(NamedTuple):
    """A kernel that ran, in microseconds."""

    name: str
    begin: float
    end: float


def decoded(llm: LLM, tokens: int, drawn: bool) -> float:
    """Seconds of a step of one request. drawn: not of the most likely tokens, but of random ones."""
    params = SamplingParams(max_tokens=1 + tokens, temperature=float(drawn), seed=1, ignore_eos=True)
    rate = llm.generate([[1]], params)[0].timings.decode_tok_s
    assert rate is not None
    return 1 / rate


def engine_times(llm: LLM, tokens: int, drawn: bool) -> dict[str, float]:
    """Of the engine's thread, medians."""
    executor, calls = llm._executor, list[tuple[float, float]]()
    forward = executor.forward

    def timed(batch: Any) -> Any:
        begin = time.perf_counter()
        result = forward(batch)
        calls.append((begin, time.perf_counter()))
        return result

    with mock.patch.object(executor, "forward", timed):
        step = decoded(llm, tokens, drawn)
    inside = median(end - begin for begin, end in calls[1:])
    between = median(after[0] - before[1] for before, after in pairwise(calls[1:]))
    return {"step_ms": 1e3 * step, "forward_ms": 1e3 * inside, "between_ms": 1e3 * between}


def profiled(llm: LLM, steps: int, drawn: bool) -> list[Kernel]:
    """The kernels of so many steps, in order, those of the prompt among them."""
    import torch

    os.environ |= GRAPHS
    told = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[told.CUDA]) as profile:
        decoded(llm, steps, drawn)
    cuda = torch.autograd.DeviceType.CUDA
    kernels = (event for event in profile.events() if event.device_type == cuda)
    spans = (Kernel(one.name, one.time_range.start, one.time_range.end) for one in kernels)
    return sorted(spans, key=lambda span: span[1])


def gpu_times(kernels: Sequence[Kernel]) -> dict[str, Any]:
    """Of a step; nothing where its end cannot be told. kernels: in order, of several alike: of those that have run once
    in each the one with the longest time to the next is a step's last."""
    if not kernels:
        return {}
    behind, ends = defaultdict(list), kernels[0].end
    places: dict[str, list[int]] = defaultdict(list)
    for place, (one, after) in enumerate(pairwise(kernels)):
        ends = max(ends, one.end)
        behind[one.name].append(max(0.0, after.begin - ends))
        places[one.name].append(place)
    usual = [name for name, each in behind.items() if len(each) in (PROFILED - 1, PROFILED, PROFILED + 1)]
    if not usual:
        return {}
    last = max(usual, key=lambda name: median(behind[name]))
    first, final = places[last][0], places[last][-1]
    steps, some = len(places[last]) - 1, kernels[first + 1 : final + 1]
    busy, until = 0.0, some[0].begin
    for one in some:
        busy += max(0.0, one.end - max(until, one.begin))
        until = max(until, one.end)
    sums: dict[str, list[float]] = defaultdict(list)
    for one in some:
        sums[one.name].append(one.end - one.begin)
    longest = sorted(sums.items(), key=lambda item: -sum(item[1]))[:LONGEST]
    return {
        "profiled_ms": 1e-3 * (kernels[final].end - kernels[first].end) / steps,
        "busy_ms": 1e-3 * busy / steps,
        "idle_ms": 1e-3 * median(behind[last]),
        "launched": len(some) / steps,
        "kernels": {name: {"us": sum(each) / steps, "launches": len(each) / steps} for name, each in longest},
    }


def times(llm: LLM, gpu: str, tokens: int, drawn: bool = False) -> dict[str, Any]:
    """Where the time of a step goes, in milliseconds, of so many tokens, three at least. drawn: as of `decoded`."""
    decoded(llm, tokens, drawn)  # steps are recorded
    found: dict[str, Any] = engine_times(llm, tokens, drawn)
    if gpu.startswith("cuda"):
        try:
            found |= gpu_times(profiled(llm, PROFILED, drawn))
        except Exception as error:  # there is no profiler, or it is not for this GPU; what was timed stays
            found["lacks"] = f"{type(error).__name__}: {error}".partition("\n")[0]
    return found
