"""The kernels by which a GPU sums a layer's neurons for one token: one for each stage, or a fused one. Tried at load.

The fused kernel leaves the memory idle less often, and has fewer rows on their way (kernels/triton_fused.py); what is
faster depends on the GPU and on the layers. So once the neurons are where they stay, some tokens of a text are decoded
both ways, by turns. A fused kernel that this GPU cannot run is not used.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Annotated

import numpy as np

from powerinfer.devices.choices import Choice
from powerinfer.devices.replayed_spans import UNRECORDED
from powerinfer.devices.torch_device import current
from powerinfer.errors import PowerInferError
from powerinfer.formats.json_file import Between, Length
from powerinfer.hybrid.policy_trial import GAIN
from powerinfer.hybrid.trials import decode_one, hot_counts, settled, split_trial
from powerinfer.kernels import gpu
from powerinfer.progress import Progress, silent
from powerinfer.sparsity.trials import Outcome, Trial, TrialSubject, fastest, take_turns

if TYPE_CHECKING:
    from powerinfer.devices.split import SplitExecutor
    from powerinfer.hybrid.ffn import HybridFfn
    from powerinfer.hybrid.resolved import Resolved

STEPS = 8
"""Steps that are timed at a time."""
ROUNDS = 6
"""Rounds of both ways."""

_PROBLEM = 1 << 10  # characters


@dataclass(frozen=True)
class Kernel:
    """The choice of a kernel.

    staged_s, fused_s: medians of seconds of a step with a kernel for each stage, and with the fused one; problem: why
    that was not timed.
    """

    fused: bool
    staged_s: Annotated[float, Between(0, 1e6)] = 0.0
    fused_s: Annotated[float, Between(0, 1e6)] = 0.0
    problem: Annotated[str, Length(_PROBLEM)] = ""


KERNELS = TrialSubject("neuron kernels", Kernel, fallback=Kernel(fused=False))


def fuses(executor: SplitExecutor) -> bool:
    """Whether the GPU has such a kernel, compiled by Triton; of neurons on disk reads take most of the time."""
    import torch

    device = executor.gpu.device
    return device.type == "cuda" and gpu.which(torch.empty(0, device=device)) == "triton" and executor.disk is None


class Fusion:
    """The choice for a model that is being loaded. Notes it in the executor's choices."""

    def __init__(self, executor: SplitExecutor, ffns: Sequence[HybridFfn], resolved: Resolved) -> None:
        """Takes a choice of an earlier start with neurons placed alike, before anything is recorded."""
        self._executor = executor
        self._ffns = ffns
        self._resolved = resolved
        self._fused, self._settled = False, not fuses(executor)
        earlier = None if self._settled else self._trial.find()
        if earlier is not None:
            self._take(earlier)

    def settle(self, sample: Callable[[], Sequence[int]], progress: Progress = silent) -> bool:
        """Time both ways if there is no choice yet; whether steps are other ones than before.

        sample: the token ids of a text; the KV cache must be empty, and neurons where they stay. PowerInferError if the
        GPU fails, or runs out of memory without the fused kernel, too.
        """
        before = self._fused
        if not self._settled and any(len(ffn.hot) for ffn in self._ffns):
            # Neurons may have moved to where they were at an earlier start.
            outcome = settled(self._trial, self._resolved, lambda: self._timed(sample()), "kernels", progress)
            if outcome is not None:
                self._take(outcome)
            else:
                way = "a kernel for each stage for one token"
                self._executor.choices.neurons = Choice(way, "--no-trial: nothing was timed")
        return self._fused != before

    @property
    def _trial(self) -> Trial[Kernel]:
        return split_trial(KERNELS, self._resolved, {"hot": hot_counts(self._ffns)})

    def _take(self, outcome: Outcome[Kernel]) -> None:
        kernel, self._settled = outcome.result, True
        self._fuse(kernel.fused)
        value = "a fused kernel" if kernel.fused else "a kernel for each stage"
        times = f"{1e3 * kernel.fused_s:.3g} ms a step fused, {1e3 * kernel.staged_s:.3g} otherwise"
        self._executor.choices.neurons = Choice(f"{value} for one token", outcome.reason(kernel.problem or times))

    def _fuse(self, on: bool) -> None:
        self._fused = on
        for ffn in self._ffns:
            ffn.fuse(on)

    def _timed(self, text: Sequence[int]) -> Kernel:
        executor = self._executor
        tokens = np.resize(np.asarray(text or [0], np.int32), min(STEPS, executor.n_pages * executor.page_size))
        problem = ""

        def seconds(fused: bool, _: int) -> float:
            nonlocal problem
            if fused and problem:
                return math.inf
            self._fuse(fused)
            try:
                return self._seconds(tokens)
            except (PowerInferError, RuntimeError) as error:  # Triton's compiler raises both
                if not fused:
                    raise  # nor does anything else run
                problem = _problem_text(error)
                return math.inf

        with current(executor.gpu.device):
            rounds = take_turns((False, True), ROUNDS, seconds)
        if problem:
            return Kernel(False, problem=problem)
        return Kernel(fastest(rounds, False, GAIN), median(rounds[False]), median(rounds[True]))

    def _seconds(self, tokens: np.ndarray) -> float:
        """Seconds of a step, once steps are recorded."""
        for _ in range(UNRECORDED):
            decode_one(self._executor, tokens[0], 0)
        begin = time.perf_counter()
        for at, token in enumerate(tokens):
            decode_one(self._executor, token, at)
        return (time.perf_counter() - begin) / len(tokens)


def _problem_text(error: Exception) -> str:
    """The failure, without what would help if there were no other way."""
    return f"fused: {(str(error).splitlines() or [type(error).__name__])[0].partition(';')[0]}"[:_PROBLEM]
