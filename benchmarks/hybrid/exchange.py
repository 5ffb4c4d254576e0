"""Time what a layer's exchange between a GPU and the CPU costs, and the boundary between two kernels.

    python -m benchmarks.hybrid.exchange [--device cuda] [--layers 48] [--out FILE]

A step of so many layers is recorded as the engine records it, of kernels that do nearly nothing, with an exchange in
each layer or without; the CPU's part is empty. What the exchange adds to a layer:

- by flags, in place    kernels write the host's memory and read it, numbers in memory tell when: the engine's first
                        choice
- by flags, copied      the same with copies of a row either way
- by functions, in place, and copied    the driver calls a function of the host
- copies alone, and kernels in place alone: without asking for anything

A replay in which a call failed, or that made more or fewer calls than it has layers, is an error.

Kernels are timed launched early, as the engine does where the GPU can, and not. A way that the device lacks is left
out, with the reason. Prints one JSON document.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch

from benchmarks.hybrid.compare import gpu_name
from benchmarks.lib import machine, results
from benchmarks.models.expert_models import CONFIGS
from powerinfer._native import HostCall
from powerinfer.devices.link import Link
from powerinfer.devices.recording import State, recorder_of
from powerinfer.devices.streams import streams_of
from powerinfer.devices.torch_device import choose_device
from powerinfer.kernels import gpu, gpu_host

LAYERS = 48
KERNELS = 12  # of a layer
REPEATS = 21
SHAPE = "qwen3-30b-a3b"  # whose rows are exchanged
NOTHING: State = None, None, None

Run = Callable[[], None]


class Steps:
    """Steps of so many layers on a device."""

    def __init__(self, device: Any, layers: int) -> None:
        self.device, self.layers = device, layers
        self.streams = streams_of(device)
        self.config = CONFIGS[SHAPE]
        self.rows = torch.zeros((2, self.config.d_model), device=device)
        self.reasons: dict[str, str] = {}

    def link(self, in_place: bool) -> Link:
        """A link that has tried its ways; by copies unless in place. What it lacks is noted."""
        link = Link(self.device, 1, self.config)
        told = link.try_ways()[1] if in_place else link.try_flags()
        if told:
            self.reasons["in place" if in_place else "copied"] = told
        return link

    def kernels(self) -> None:
        for _ in range(KERNELS):
            gpu_host.put(self.rows[0, :32], self.rows[1, :32])

    def seconds(self, run: Run, link: Link | None = None, calls: Sequence[HostCall] = (), flags: bool = False) -> float:
        """Of a replay, the median. calls: that each replay makes. RuntimeError where it does not, PowerInferError where
        one failed."""
        recorder = recorder_of(self.device)
        run()  # loads the kernels, and calls by functions
        self.streams.finish()
        again = run
        if recorder is not None:
            if flags:
                assert link is not None and link.flags is not None
                recorder = link.flags.answering(recorder)

            def through(state: State) -> State:
                run()
                return state

            recorded = recorder(through, NOTHING)
            again = lambda: (recorded(NOTHING), None)[1]  # noqa: E731
        for call in calls:
            call.take()  # of those before
        times = []
        for _ in range(REPEATS):
            if link is not None:
                link.begin_step()
            begin = time.perf_counter()
            again()
            self.streams.finish()
            times.append(time.perf_counter() - begin)
            if link is not None:
                link.check()
        made = [call.take()[0] for call in calls]
        if made != [REPEATS] * len(calls):
            raise RuntimeError(f"a layer's call was made {min(made)} to {max(made)} times in {REPEATS} replays")
        return median(times[1:])

    def exchanging(self, link: Link, asks: bool) -> tuple[Run, list[HostCall]]:
        """A step with an exchange in each layer, and its calls."""
        x, calls = self.rows[:1], [link.empty_call() for _ in range(self.layers)]

        def run() -> None:
            for number, call in enumerate(calls, 1):
                self.kernels()
                link.send_input(x)
                if asks:
                    link.begin(call, number)
                    link.join(number)
                link.add_back(x)

        return run, calls if asks else []

    def alone(self) -> None:
        for _ in range(self.layers):
            self.kernels()


def launched(early: bool) -> AbstractContextManager[Any]:
    """A context in which kernels are launched early, if the device can, or not."""
    if early:
        return nullcontext()
    from powerinfer.kernels import triton_host

    return mock.patch.object(triton_host, "early", lambda _: False)


def cases(steps: Steps) -> Iterator[tuple[str, float]]:
    """(name, seconds of a step)."""
    can = steps.device.type == "cuda" and torch.cuda.get_device_capability(steps.device) >= (9, 0)
    for early in (True, False) if can else (True,):
        with launched(early):
            yield "kernels" if early else "kernels, none early", steps.seconds(steps.alone)
    for in_place in (True, False):
        link, where = steps.link(in_place), "in place" if in_place else "copied"
        yield f"asking for nothing, {where}", steps.seconds(steps.exchanging(link, False)[0], link)
        run, calls = steps.exchanging(link, True)
        yield f"by functions, {where}", steps.seconds(run, link, calls)
        if link.flags is not None:
            yield f"by flags, {where}", steps.seconds(run, link, calls, flags=True)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, or cpu, which stands in (default %(default)s)")
    parser.add_argument("--layers", type=int, default=LAYERS, metavar="N", help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="write the document there too")
    arguments = parser.parse_args(argv)
    steps = Steps(choose_device(arguments.device), arguments.layers)
    document: dict[str, Any] = {"kind": "gpu-exchange", **machine.description(), "device": gpu_name(arguments.device)}
    document |= {"layers": arguments.layers, "kernels": KERNELS, "by": gpu.which(steps.rows), "step_us": {}}
    document["lacks"] = steps.reasons
    with steps.streams.active():
        for name, seconds in cases(steps):
            document["step_us"][name] = round(1e6 * seconds, 2)
            told = {one: us - document["step_us"]["kernels"] for one, us in document["step_us"].items()}
            document["layer_us"] = {one: round(us / arguments.layers, 3) for one, us in told.items() if us}
            if arguments.out is not None:
                results.write_json(arguments.out, document)
    if (late := document["step_us"].get("kernels, none early")) is not None:
        del document["layer_us"]["kernels, none early"]
        document["kernel_us"] = {
            "early": document["step_us"]["kernels"] / arguments.layers / KERNELS,
            "none early": late / arguments.layers / KERNELS,
        }
        if arguments.out is not None:
            results.write_json(arguments.out, document)
    print(json.dumps(document))
    return document


if __name__ == "__main__":
    main()
