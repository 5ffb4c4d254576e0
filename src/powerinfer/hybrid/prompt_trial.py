"""The trial of chunks of prompts on a GPU that has the whole model: padded to a few numbers of tokens, and replayed, or
as they are, and launched one operator after another.

A launch takes the host microseconds, and a chunk has thousands: of few tokens they may take longer than the GPU does
for what they launch. Padding makes the GPU's part longer. So each number is timed at load, until replaying gains too
little. The result is saved: whether a chunk is padded decides how its sums are rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from powerinfer.devices.choices import Choice
from powerinfer.formats.json_file import Between
from powerinfer.hybrid.trials import settled, split_trial
from powerinfer.kernels.gpu_types import FEW
from powerinfer.placement.working_memory import prompt_recordings
from powerinfer.sparsity.trials import TrialSubject

if TYPE_CHECKING:
    from powerinfer.devices.gpu import GpuLayers
    from powerinfer.devices.split import SplitExecutor
    from powerinfer.hybrid.resolved import Resolved

SIZES = (64, 96, 128, 192, 256, 384, 512)
"""Numbers of tokens to which chunks are padded: a chunk grows by less than half, from 64 tokens on."""

GAIN = 0.9
"""A chunk that is padded and replayed must take less than this share of the time of the shortest one that is padded so,
launched."""

STEPS = 3
"""Chunks of each way that are timed."""


@dataclass(frozen=True)
class PaddedPrompts:
    """last: the largest of `SIZES` to which chunks are padded, 0: none is. tried: of each size, seconds of the shortest
    chunk that is padded to it, launched, and of a replayed one; none: there was no room."""

    last: Annotated[int, Between(0, SIZES[-1])]
    tried: tuple[tuple[int, Annotated[float, Between(0, 1e6)], Annotated[float, Between(0, 1e6)]], ...] = ()

    @property
    def times(self) -> str:
        """The times, for people."""
        if not self.tried:
            return "no room to record them"
        times = (f"{size}: {1e3 * launched:.3g} and {1e3 * replayed:.3g}" for size, launched, replayed in self.tried)
        return f"ms of a chunk launched and replayed, by tokens: {', '.join(times)}"


PADDED = TrialSubject("chunks of prompts", PaddedPrompts, fallback=PaddedPrompts(0), forgives=True)

LAUNCHED = "chunks are launched"


def settle(executor: SplitExecutor, resolved: Resolved, room: int | None) -> None:
    """Pad and record chunks of prompts, by an earlier trial or now, where the GPU has the whole model; the cache must
    be empty. room: bytes that are left there, None: what is free. Notes it, or the reason why they are launched, in the
    executor's choices. PowerInferError when the device fails."""
    gpu = executor.gpu
    if not gpu.records:
        return
    if gpu.prompts_problem is not None:
        executor.choices.prompts = Choice(LAUNCHED, gpu.prompts_problem)
        return
    most = min(executor.max_tokens, executor.n_pages * executor.page_size)
    sizes = [size for size in SIZES if size <= most]
    facts = {"layers": gpu.layers, "tokens": most, "kv_type": resolved.engine.kv_type, "sizes": SIZES}
    fitting = [size for size in sizes if room is None or _needed(resolved, gpu, size) <= room]
    trial = split_trial(PADDED, resolved, facts)
    outcome = settled(trial, resolved, lambda: measured(gpu, fitting, room), "chunks of prompts")
    if outcome is None:
        executor.choices.prompts = Choice(LAUNCHED, "--no-trial: nothing was timed")
        return
    sizes = [size for size in sizes if size <= outcome.result.last]
    gpu.pad_prompts(sizes)
    value = LAUNCHED
    if sizes:
        numbers = ", ".join(map(str, sizes))
        replayed = sizes[-1] in fitting and gpu.record_prompts(room)
        value = f"chunks of {FEW + 1} to {sizes[-1]} tokens are padded to {numbers} and "
        value += "replayed" if replayed else "launched: no room to record them"
    executor.choices.prompts = Choice(value, outcome.problem or outcome.result.times).add(f", {outcome.origin}")


def _needed(resolved: Resolved, gpu: GpuLayers, tokens: int) -> int:
    return prompt_recordings(resolved.checkpoint.config, tokens, gpu.layers)


def measured(gpu: GpuLayers, sizes: Sequence[int], room: int | None) -> PaddedPrompts:
    """Time sizes, ascending, until one gains too little or has no room. Nothing is padded afterwards."""
    last, tried = 0, list[tuple[int, float, float]]()
    try:
        for fewest, size in zip((FEW + 1, *(1 + size for size in sizes)), sizes, strict=False):
            gpu.pad_prompts(())
            launched = gpu.prompt_seconds(fewest, STEPS)
            gpu.pad_prompts((size,))
            if not gpu.record_prompts(room):
                break
            tried.append((size, launched, gpu.prompt_seconds(size, STEPS)))
            if tried[-1][2] >= GAIN * launched:
                break
            last = size
    finally:
        gpu.pad_prompts(())
    return PaddedPrompts(last, tuple(tried))
