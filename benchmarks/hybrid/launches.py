"""Count what a decode step launches on a GPU from Python, and time what that costs the host.

    python -m benchmarks.hybrid.launches MODEL [--gpu cuda] [--split 0.5] [--requests 1] [--steps 32] [--out FILE]
                                               [--expert-policy NAME]

MODEL has bundles (`powerinfer pack`), and a predictor if one is to be asked (--selector predicted); or experts, which a
policy may exchange. All of its layers go to the GPU, and of their neurons, or experts, a share chosen at random
(--split). A step is run replayed, as the engine does it:
the GPU calls the CPU, if it can, by flags where it has them; with calls by functions then, too; replayed, with the host
waiting for the GPU; and launched one by one. Before that, the
logits of some steps are compared with those of the CPU alone: a wrong model is not timed. Of each way:

- `operators` of a step: replays, calls of the CPU, and by kind those that are launched in every step; counted on any
  machine
- `calls` of a step: calls of the driver, by name, as torch's profiler has it; on a GPU only
- `step_us`, and of it `host_us`: what remains without waiting for the GPU and without the CPU's neurons; per layer too.
  On a GPU alone: elsewhere the host computes what it launches
- `python_us` of a step: the same while replays do nothing, which is the engine's own part of it

Prints one JSON document.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.hybrid import worker
from benchmarks.lib import machine
from powerinfer.config import EngineConfig
from powerinfer.devices.batch import Batch
from powerinfer.devices.cpu import ExpertSum
from powerinfer.devices.link import Way
from powerinfer.devices.recording import Recorder, Run, State
from powerinfer.devices.split import SplitExecutor
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.hybrid.copier import Copier
from powerinfer.hybrid.experts import ExpertSplit
from powerinfer.hybrid.ffn import NeuronSplit
from powerinfer.hybrid.load import load_split
from powerinfer.hybrid.parts import CpuNeurons
from powerinfer.hybrid.resolved import Placement, Resolved, UsedGpu
from powerinfer.kernels import cpu
from powerinfer.models import load
from powerinfer.neurons import NeuronPlacement, Tier
from powerinfer.placement.experts import EXPERT_POLICIES, make_policy
from powerinfer.sparsity.attach import attach
from powerinfer.sparsity.selection import Selection, select

CONTEXT = 256  # tokens of a request at most
FIRST = 3  # steps until all is recorded
FURTHEST = 0.05
"""How far logits may be from the CPU's, as a share of their size: rounding, of activations too, makes a per cent."""

Replay = Callable[[State], State]


class Ways:
    """Makes recordings with another recorder, counts replays, and may leave them out."""

    def __init__(self, recorder: Recorder | None) -> None:
        self._recorder = recorder or (lambda run, state: run)
        self.replays = 0
        self.idle = False

    def record(self, run: Run, state: State) -> Replay:
        recorded = self._recorder(run, state)

        def replay(before: State) -> State:
            self.replays += 1
            return before if self.idle else recorded(before)

        return replay

    def unless_idle(self, answer: Callable[[Any], None]) -> Callable[[Any], None]:
        """Answers nothing either where replays do nothing."""
        return lambda calls: None if self.idle else answer(calls)


class Clock:
    """Adds up the seconds that are spent in some functions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def within(self, thing: Any, name: str) -> None:
        function = getattr(thing, name)

        def timed(*arguments: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            result = function(*arguments, **named)
            self.seconds += time.perf_counter() - begin
            return result

        setattr(thing, name, timed)


def engine_of(arguments: argparse.Namespace) -> EngineConfig:
    return EngineConfig(
        context=CONTEXT, max_batch=arguments.requests, prefill_chunk=64, threads=arguments.threads, kv_type="f16",
        selector=arguments.selector, trial=False,
    )  # fmt: skip


@contextmanager
def loaded(arguments: argparse.Namespace) -> Iterator[SplitExecutor]:
    """All layers and the head on the GPU, neurons on both sides."""
    checkpoint = open_checkpoint(arguments.model)
    config, engine = checkpoint.config, engine_of(arguments)
    selection, pages = select(checkpoint, engine), arguments.requests * CONTEXT // cpu.PAGE
    whole = Placement(config.n_layers, True, pages=pages)
    resolved = Resolved(checkpoint, engine, selection, UsedGpu(arguments.gpu), whole)
    executor = load_split(resolved, expert_split(arguments) if config.experts else neuron_split(arguments, selection))
    try:
        yield executor
    finally:
        executor.close()


def expert_split(arguments: argparse.Namespace) -> ExpertSplit:
    """A share of each layer's experts on the GPU; a policy starts with them."""
    config, rng = open_checkpoint(arguments.model).config, np.random.default_rng(0)
    sizes = {layer: one.n_experts for layer, one in config.experts.items()}
    slots = {layer: round(arguments.split * n) for layer, n in sizes.items()}
    frequencies = {layer: rng.dirichlet(np.ones(n)) for layer, n in sizes.items()}
    hot = [np.zeros(0, np.int32) for _ in config.layers]
    for layer, each in frequencies.items():
        hot[layer] = np.argsort(-each, kind="stable")[: slots[layer]].astype(np.int32)
    name = arguments.expert_policy
    return ExpertSplit(hot, copier=None if name == "static" else Copier(make_policy(name, slots, sizes, frequencies)))


def neuron_split(arguments: argparse.Namespace, selection: Selection) -> NeuronSplit:
    config, rng = open_checkpoint(arguments.model).config, np.random.default_rng(0)
    assert selection.bundles is not None
    tiers = [
        np.where(rng.random(config.widest_ffn) < arguments.split, Tier.GPU, Tier.CPU).astype(np.int8)
        for _ in range(config.n_layers)
    ]
    placement = NeuronPlacement(config.ffn_sizes, 1, tuple(tiers))
    return NeuronSplit(selection.bundles, placement, predictors=selection.predictors)


def batch_at(executor: SplitExecutor, requests: int, position: int) -> Batch:
    """The next token of each request, all of which are as long."""
    each = np.arange(requests, dtype=np.int32)
    pages = np.arange(requests * CONTEXT // cpu.PAGE, dtype=np.int32).reshape(requests, -1)
    return Batch(each % executor.vocab_size, np.full(requests, position, np.int32), each, pages, each)


def checked(executor: SplitExecutor, arguments: argparse.Namespace) -> float:
    """How far the logits of steps, the last ones replayed, are from the CPU's. SystemExit where that is too far."""
    checkpoint, engine = open_checkpoint(arguments.model), engine_of(arguments)
    alone = load(checkpoint, engine)
    try:
        attach(alone, checkpoint, engine, select(checkpoint, engine), list)
        each = []
        for position in range(FIRST + 2):
            batch = batch_at(executor, arguments.requests, position)
            ours, wanted = executor.forward(batch).copy(), alone.forward(batch)
            each.append(worker.apart(ours, wanted))
        off = float(np.max(each))  # not a number if any is none
    finally:
        alone.close()
    if not off <= FURTHEST:
        sys.exit(f"not timed: logits are off by {off:.3g} of the CPU's, more than {FURTHEST}")
    return off


def timed_steps(executor: SplitExecutor, requests: int, steps: int, clock: Clock) -> tuple[float, float]:
    """Median seconds of a step in `GpuLayers`, in all and outside of the clock's functions."""
    whole, own = [], []
    for position in range(steps):
        batch = batch_at(executor, requests, position)
        x = executor.cpu.embedded(batch)
        waited, begin = clock.seconds, time.perf_counter()
        executor.gpu.run(batch, x)
        whole.append(time.perf_counter() - begin)
        own.append(whole[-1] - (clock.seconds - waited))
    return median(whole[FIRST:]), median(own[FIRST:])


def driver_calls(executor: SplitExecutor, requests: int, steps: int) -> dict[str, float]:
    """Calls of the CUDA driver and its runtime in a step, by name."""
    import torch

    told = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[told.CPU, told.CUDA]) as profile:
        for position in range(steps):
            executor.forward(batch_at(executor, requests, position))
    on_host = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CPU]
    names = Counter(name for name in on_host if name.startswith("cu"))
    return {name: count / steps for name, count in names.most_common()}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    with loaded(arguments) as executor:
        layers, requests, steps = executor.gpu.layers, arguments.requests, arguments.steps
        off = checked(executor, arguments)
        link, on_gpu, clock = executor.gpu.link, arguments.gpu != "cpu", Clock()
        assert link is not None
        ways, waits = Ways(executor.gpu._recorder), [(link, "wait"), (executor.gpu.buffers, "download")]
        if link.flags is not None:
            link.flags.answer = ways.unless_idle(link.flags.answer)  # type: ignore[method-assign]
            waits.append((link.flags, "answer"))
        for thing, name in ((CpuNeurons, "sum"), (ExpertSum, "sum"), *waits):
            clock.within(thing, name)
        caller = executor.gpu.caller
        document: dict[str, Any] = {"how": None if caller is None else str(caller)}
        tried: list[tuple[str, Recorder | None, Way]] = [("replayed", ways.record, executor.gpu.ways[0])]
        if link.flags is not None:
            tried.append(("by functions", ways.record, "calls"))
        tried += [("the host waits", ways.record, "waits"), ("one by one", None, "waits")]
        for name, recorder, exchange in tried:
            executor.gpu.record(recorder, exchange)
            timed_steps(executor, requests, FIRST + 1, clock)
            whole, own = timed_steps(executor, requests, steps, clock)
            ways.replays = 0
            before = link.calls.made
            executor.forward(batch_at(executor, requests, steps - 1))
            called = link.calls.made - before
            launched = Counter(
                one.kind
                for one in executor.gpu.operators
                if recorder is None or not (one.static or (called and one.called))
            )
            way: dict[str, Any] = {"operators": {"replays": ways.replays, "calls": called, **launched}}
            if on_gpu:
                way["calls"] = driver_calls(executor, requests, steps)
                times = {"step_us": 1e6 * whole, "host_us": 1e6 * own, "host_us_per_layer": 1e6 * own / layers}
                way |= {key: round(value, 1) for key, value in times.items()}
            if recorder is not None:
                ways.idle = True
                idle = 1e6 * timed_steps(executor, requests, steps, clock)[1]
                way |= {"python_us": round(idle, 1), "python_us_per_layer": round(idle / layers, 2)}
                ways.idle = False
            document[name] = way
        names = "gpu", "selector", "split", "expert_policy", "requests", "steps"
        about = {key: getattr(arguments, key) for key in names}
        return {
            **machine.description(),
            **about,
            "model": arguments.model.name,
            "layers": layers,
            "off": off,
            **document,
        }


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--gpu", default="cuda")
    parser.add_argument("--selector", default="exact", choices=("exact", "predicted", "all"))
    parser.add_argument("--split", type=float, default=0.5, help="share of the neurons, or experts, on the GPU")
    parser.add_argument("--expert-policy", default="static", choices=EXPERT_POLICIES)
    parser.add_argument("--requests", type=int, default=1, help="of a step, a token of each")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the document there too")
    arguments = parser.parse_args(argv)
    if not FIRST < arguments.steps <= CONTEXT:
        parser.error(f"--steps is more than {FIRST} and at most {CONTEXT}")
    document = measure(arguments)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))
    return document


if __name__ == "__main__":
    main()
