"""The part of a decode step that is spent outside the native module.

    python -m benchmarks.speed.python_share MODEL [--threads N] [--tokens 128] [--gpu NAME]     prints a JSON document

Every call into the native program is timed from Python, so the crossing counts as native; all the rest, from the
request to the text (scheduling, sampling, detokenising), is Python's share. Greedy, one request.

With --gpu, of a model that a GPU has as a whole: `host_us`, CPU time of the engine's thread for a token outside of the
native program, greedy and sampled. What was recorded is not replayed, so torch's CPU device (`cpu`) tells it too, but
for the driver's own time: it has flags then, so that greedy steps are launched ahead of their tokens. The answers mean
nothing. `calls`: of Python's functions, and of others by these, a token.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from powerinfer import LLM, SamplingParams
from powerinfer.devices.flags import Flags
from powerinfer.devices.streams import ImmediateStreams


class Timed:
    """A native program whose `run` calls are timed."""

    def __init__(self, program: Any, clock: Callable[[], float] = time.perf_counter) -> None:
        self._program = program
        self._clock = clock
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)

    def run(self, *arguments: Any) -> Any:
        start = self._clock()
        whole = self._program.run(*arguments)
        self.seconds += self._clock() - start
        return whole


def measure(model: Path, threads: int, tokens: int, repeat: int) -> dict[str, Any]:
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    shares, steps = [], []
    with LLM(model, threads=threads, context=1024, prefix_cache=False) as llm:
        timed = Timed(llm._executor._program)
        llm._executor._program = timed
        for _ in range(repeat + 1):
            before, start = timed.seconds, time.perf_counter()
            llm.generate([[1]], params)
            wall = time.perf_counter() - start
            shares.append(1 - (timed.seconds - before) / wall)
            steps.append(1000 * wall / tokens)
    return {"python_share": median(shares[1:]), "step_ms": median(steps[1:]), "threads": threads}


@contextmanager
def flags_at_once() -> Iterator[None]:
    """A context in which torch's CPU device has flags, which are seen as they are written, and never waits for one."""

    def write(_: Any, stream: Any, address: int, value: int) -> None:
        ctypes.c_uint32.from_address(address).value = value

    with (
        patch.object(ImmediateStreams, "address", lambda _, memory: memory.data_ptr()),
        patch.object(ImmediateStreams, "write_value", write),
        patch.object(ImmediateStreams, "wait_value", lambda *_: None),
        patch.object(Flags, "trial", lambda *_, **_options: None),
    ):
        yield


def measure_host(model: Path, gpu: str, threads: int, tokens: int, repeat: int) -> dict[str, Any]:
    """What the host does for a token of a model that a GPU has, by how the token is chosen."""
    with flags_at_once() if gpu == "cpu" else nullcontext():
        return _measure_host(model, gpu, threads, tokens, repeat)


def _measure_host(model: Path, gpu: str, threads: int, tokens: int, repeat: int) -> dict[str, Any]:
    ways = {"greedy": SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)}
    ways["sampled"] = SamplingParams(seed=1, max_tokens=tokens, ignore_eos=True)
    document: dict[str, Any] = {}
    with LLM(model, gpu=gpu, threads=threads, context=tokens + 1, prefix_cache=False, trial=False) as llm:
        executor = llm._executor
        if not executor.gpu.has_head:
            sys.exit("the GPU has not all layers: give more --vram, or a smaller model")
        timed = executor.cpu._program = Timed(executor.cpu._program, time.thread_time)
        llm._runner.call(lambda: executor.gpu.record(lambda run, state: lambda before: before))
        for name, params in ways.items():
            times = []
            for _ in range(repeat + 1):
                before, start = timed.seconds, llm._runner.call(time.thread_time)
                llm.generate([[1]], params)
                times.append((llm._runner.call(time.thread_time) - start - timed.seconds + before) / tokens)
            called = {"call": 0, "c_call": 0}

            def count(_: Any, event: str, __: Any, called: dict[str, int] = called) -> None:
                called[event] = called.get(event, 0) + 1

            llm._runner.call(lambda count=count: sys.setprofile(count))
            llm.generate([[1]], params)
            llm._runner.call(lambda: sys.setprofile(None))
            calls = {"python": called["call"], "others": called["c_call"]}
            document[name] = {"host_us": round(1e6 * min(times), 1)}  # others disturb it
            document[name]["calls"] = {kind: round(value / tokens, 1) for kind, value in calls.items()}
    return {"gpu": gpu, "threads": threads, **document}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--gpu", help="what the host does for a token of layers there: cuda, or cpu")
    arguments = parser.parse_args()
    model, threads, counts = arguments.model, arguments.threads, (arguments.tokens, arguments.repeat)
    if arguments.gpu is None:
        print(json.dumps(measure(model, threads, *counts)))
    else:
        print(json.dumps(measure_host(model, arguments.gpu, threads, *counts)))


if __name__ == "__main__":
    main()
