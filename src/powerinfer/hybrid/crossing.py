"""The number of tokens of a step from which on the GPU computes what is in RAM too: measured, and saved.

The CPU reads the cold bundles once per 32 tokens; streaming them to the GPU (devices/stage.py) costs nearly the same
for any number of tokens. So does streaming the matrices of whole layers (devices/streamed.py). The crossing is measured
at load on one layer of the model, of cold neurons with inputs from a text, and saved like other trials.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import numpy as np

from powerinfer.devices.batch import Batch
from powerinfer.devices.choices import Choice
from powerinfer.devices.sharing import Sharing, cpu_rates
from powerinfer.devices.step import Step
from powerinfer.devices.torch_device import current
from powerinfer.formats.json_file import Between
from powerinfer.hybrid.trials import finished, settled, split_trial
from powerinfer.kernels import gpu_host
from powerinfer.kernels.gpu import FEW
from powerinfer.progress import Progress, silent
from powerinfer.sparsity.trials import TrialSubject

if TYPE_CHECKING:
    from torch import Tensor

    from powerinfer.devices.split import SplitExecutor
    from powerinfer.devices.stage import Stage
    from powerinfer.hybrid.resolved import Resolved
    from powerinfer.hybrid.terms import HybridTerms

SIZES = (64, 128, 256, 512, 1024, 2048, 4096)
"""Numbers of tokens to try, until streaming is faster."""

GAIN = 0.95
"""Streaming must take less than this share of the CPU's time."""

_CALLS = 3  # one after another, like the layers of a model


Seconds = Callable[[int, bool], float]
"""Time of a layer for a step of a number of tokens; streamed or not."""


@dataclass(frozen=True)
class Crossing:
    """least: the number of tokens from which on streaming is faster, None: never.

    tried: (tokens, seconds of a layer with the CPU, streamed). sharing: of experts, where that is faster than either;
    shared: (tokens, seconds so).
    """

    least: Annotated[int, Between(FEW + 1, 1 << 40)] | None
    tried: tuple[tuple[int, float, float], ...]
    sharing: Sharing | None = None
    shared: tuple[tuple[int, float], ...] = ()

    @property
    def streams_from(self) -> int | None:
        """The number of tokens from which on experts, or neurons, stream, all of them or some."""
        numbers = [self.least, None if self.sharing is None else self.sharing.first]
        return min((number for number in numbers if number is not None), default=None)

    def choice(self, cold: str) -> Choice[str]:
        """The choice of a device for long prompts, with its reason. cold: what is in RAM, for people."""
        times = ", ".join(f"{tokens}: {1e3 * cpu:.3g} and {1e3 * gpu:.3g} ms" for tokens, cpu, gpu in self.tried)
        least, sharing = self.streams_from, self.sharing
        value = f"the CPU computes {cold}" if least is None else f"{cold} stream from {least} tokens"
        if sharing is not None:
            value += f", up to {sharing.last} but for the rarest, which the CPU computes meanwhile"
        if self.shared:
            times += "; divided, " + ", ".join(f"{tokens}: {1e3 * taken:.3g} ms" for tokens, taken in self.shared)
        return Choice(value, f"a layer with the CPU and streamed, by tokens: {times}")


CROSSINGS = TrialSubject("prompts", Crossing)


def find(sizes: Sequence[int], seconds: Seconds) -> Crossing:
    """Try sizes, ascending, until streaming is faster; interpolate linearly between the last two."""
    tried: list[tuple[int, float, float]] = []
    for tokens in sizes:
        tried.append((tokens, seconds(tokens, False), seconds(tokens, True)))
        won = [GAIN * cpu - gpu for _, cpu, gpu in tried[-2:]]
        if won[-1] > 0:
            before = tried[-2][0] if len(tried) > 1 else FEW
            share = won[0] / (won[0] - won[1]) if len(tried) > 1 else 0.0
            return Crossing(max(FEW + 1, before + math.ceil(share * (tokens - before))), tuple(tried))
    return Crossing(None, tuple(tried))


def find_sharing(crossing: Crossing, sizes: Sequence[int], trial: Sharing, shared: Seconds) -> Crossing:
    """The crossing with the division of experts between CPU and link, if that is faster than either where they take
    about as long: from the first size on, of those tried, up to the last of `sizes`, ascending, for which it is.

    trial: the rates; shared: seconds of a step of so many tokens, divided, or else streamed.
    """
    first, last, times = None, 0, list[tuple[int, float]]()
    for tokens, cpu, streamed in reversed(crossing.tried):
        times.insert(0, (tokens, shared(tokens, True)))
        if times[0][1] >= GAIN * min(cpu, streamed):
            break
        first, last = tokens, last or tokens
    for tokens in sizes if first is not None else ():
        if tokens > last:
            times.append((tokens, shared(tokens, True)))
            if times[-1][1] >= GAIN * shared(tokens, False):
                break
            last = tokens
    sharing = None if first is None else replace(trial, first=max(FEW + 1, first), last=last)
    return replace(crossing, sharing=sharing, shared=tuple(times))


def settle(
    stage: Stage,
    executor: SplitExecutor,
    ffns: Sequence[HybridTerms],
    resolved: Resolved,
    sample: Callable[[], Sequence[int]],
    progress: Progress = silent,
) -> None:
    """Set `least` of the stage, from a saved measurement under the same conditions, or a new one.

    sample: the token ids of a text; the KV cache must be empty. Notes the result in the executor's choices.
    PowerInferError if the GPU fails or runs out of memory.
    """
    cold = "cold neurons" if executor.streamed is None else "cold neurons and the layers in RAM"
    facts = {"cold": max(ffn.cold_bytes for ffn in ffns)}
    _settle(stage, executor, cold, facts, resolved, lambda: measured(stage, executor, ffns, sample()), progress)


def settle_layers(executor: SplitExecutor, resolved: Resolved, progress: Progress = silent) -> None:
    """The same of whole layers that stream."""
    streamed = executor.streamed
    assert streamed is not None and streamed.spans
    facts = {"layer": max(own.nbytes for own in streamed.spans), "kv_type": resolved.engine.kv_type}
    _settle(streamed.stage, executor, "the layers in RAM", facts, resolved, lambda: measured_layers(executor), progress)


def _settle(
    stage: Stage,
    executor: SplitExecutor,
    cold: str,
    facts: Mapping[str, object],
    resolved: Resolved,
    measure: Callable[[], Crossing],
    progress: Progress,
) -> None:
    """facts: of the key."""
    sizes = {"buffer": stage.nbytes, "tokens": executor.max_tokens}
    outcome = settled(split_trial(CROSSINGS, resolved, {**facts, **sizes}), resolved, measure, "prompts", progress)
    if outcome is None:
        executor.choices.prefill = Choice(f"the CPU computes {cold}", "--no-trial: nothing was measured")
        return
    stage.least, stage.sharing = outcome.result.streams_from, outcome.result.sharing
    executor.choices.prefill = outcome.result.choice(cold).add(f", {outcome.origin}")


def measured(stage: Stage, executor: SplitExecutor, ffns: Sequence[HybridTerms], sample: Sequence[int]) -> Crossing:
    """Time the layer that has most on the CPU, both ways. The stage is off afterwards."""
    import torch

    ffn = max(ffns, key=lambda one: one.cold_bytes)
    device = executor.gpu.device

    with current(device), torch.inference_mode():
        inputs = _inputs(executor, ffn, sample)
        operators = [*ffn.ahead(), *ffn.begin(), *ffn.finish()]

        loads = dict[int, tuple[int, int] | None]()

        def seconds(tokens: int, streamed: bool, sharing: Sharing | None = None) -> float:
            stage.least, stage.sharing = 0 if streamed else None, sharing
            assert executor.gpu.link is not None
            rows = torch.arange(tokens, device=device) % len(inputs[0])
            x, read = inputs[0][rows], executor.gpu.link.read(tokens)
            read.copy_(inputs[1][rows])
            step = Step(x, read, read, read, read, read, read)  # only x and read are used
            if (sent := ffn.sent(step)) is not None:
                gpu_host.put(read, sent)

            def run() -> None:
                for operator in operators:
                    operator.run(step)

            run()
            begin = finished(device)
            for _ in range(_CALLS):
                run()
            step_seconds = (finished(device) - begin) / _CALLS
            if not streamed:
                loads[tokens] = ffn.cold_load(tokens)
            return step_seconds

        sizes = [*(size for size in SIZES if size < executor.max_tokens), executor.max_tokens]
        stage.registered.active = True
        try:
            crossing = find(sizes, seconds)
            rates = _rates(crossing, loads, len(ffn.cold))
            if rates is None:
                return crossing
            return find_sharing(crossing, sizes, rates, lambda tokens, on: seconds(tokens, True, rates if on else None))
        finally:
            stage.least = stage.sharing = None
            stage.registered.active = False


def _rates(crossing: Crossing, loads: Mapping[int, tuple[int, int] | None], cold: int) -> Sharing | None:
    """Rates of the link and the CPU by the last two sizes that were tried, for any number of tokens; None: the CPU has
    no part in what streams, or there is one size. loads: of each size, as of `HybridTerms.cold_load`; cold: experts."""
    if len(crossing.tried) < 2 or cold < 2:
        return None
    steps = []
    for tokens, cpu, _ in crossing.tried[-2:]:
        load = loads[tokens]
        if load is None:
            return None
        steps.append((cpu, *load))
    return Sharing(FEW + 1, 1 << 40, crossing.tried[-1][2] / cold, *cpu_rates(*steps))


def measured_layers(executor: SplitExecutor) -> Crossing:
    """Time what streams of the layer of which most does, both ways; the cache must be empty. How long dense products
    take does not depend on the numbers."""
    streamed, cpu = executor.streamed, executor.cpu
    assert streamed is not None
    largest = max(streamed.spans, key=lambda one: one.nbytes)
    random = np.random.default_rng(0)

    def seconds(tokens: int, streams: bool) -> float:
        places, none = np.arange(tokens, dtype=np.int32), np.zeros(tokens, np.int32)
        pages = np.arange(-(-tokens // executor.page_size), dtype=np.int32)[None]
        batch = Batch(none, places, none, pages, np.empty(0, np.int32))
        x = cpu.embedded(batch)
        x[:] = random.standard_normal(x.shape, np.float32)

        def run() -> float:
            begin = time.perf_counter()
            if streams:
                streamed.run(batch, x, [*largest.operators] * _CALLS)
            else:
                for _ in range(_CALLS):
                    cpu.run_part(batch, largest.first, largest.last)
            return (time.perf_counter() - begin) / _CALLS

        run()
        return run()

    most, registered = min(executor.max_tokens, executor.n_pages * executor.page_size), streamed.stage.registered
    registered.active = True
    try:
        return find([*(size for size in SIZES if size < most), most], seconds)
    finally:
        registered.active = False


def _inputs(executor: SplitExecutor, ffn: HybridTerms, sample: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The residual stream and the input of the layer's neurons in a step of a text, float32 [tokens, d_model]."""
    inputs: list[tuple[Tensor, Tensor]] = []
    count = min(FEW, executor.max_tokens, executor.n_pages * executor.page_size)
    places = np.arange(count, dtype=np.int32)
    pages = np.arange(-(-count // executor.page_size), dtype=np.int32)[None]
    tokens = np.resize(np.asarray(sample or [0], np.int32), count)
    ffn.on_input = lambda x, read: inputs.append((x.clone(), read.clone()))
    try:
        with executor.gpu.launched():
            executor.forward(Batch(tokens, places, np.zeros(count, np.int32), pages, np.empty(0, np.int32)))
    finally:
        ffn.on_input = None
    return inputs[0]
