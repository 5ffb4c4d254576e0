"""Trials of a model that is split between a GPU and the CPU: their keys, and the steps that they time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from powerinfer.devices.batch import Batch
from powerinfer.devices.streams import streams_of
from powerinfer.devices.torch_device import gpu_failures
from powerinfer.hardware.gpu_rates import software
from powerinfer.progress import Progress, silent
from powerinfer.sparsity.trials import Outcome, Trial, TrialSubject, conditions

if TYPE_CHECKING:
    import torch

    from powerinfer.devices.split import SplitExecutor
    from powerinfer.hybrid.resolved import Resolved
    from powerinfer.hybrid.terms import HybridTerms

R = TypeVar("R")


def split_trial(subject: TrialSubject[R], resolved: Resolved, facts: Mapping[str, object]) -> Trial[R]:
    """A trial beside a GPU. facts: what its result depends on, beside the model, the options and both devices."""
    checkpoint, engine = resolved.checkpoint, resolved.engine
    key = conditions(checkpoint, engine, resolved.selection) | software(resolved.gpu)
    return Trial(subject, checkpoint, engine, key | {name: str(value) for name, value in facts.items()})


def settled(
    trial: Trial[R], resolved: Resolved, measure: Callable[[], R], name: str, progress: Progress = silent
) -> Outcome[R] | None:
    """The outcome of an earlier trial, or of one now; None: there is none, with `--no-trial`. name: what it
    tries, for people. PowerInferError if the GPU fails, or runs out of memory."""
    outcome = trial.find()
    if outcome is None and resolved.engine.trial:
        progress(f"trial of {name}", 0, 1)
        with gpu_failures(f"trying {name}", "give less --vram"):
            outcome = trial.run(measure)
    return outcome


def hot_counts(ffns: Sequence[HybridTerms]) -> str:
    """The number of neurons, or experts, of each layer on the GPU, as a fact of a key."""
    return " ".join(str(len(ffn.hot)) for ffn in ffns)


def finished(device: torch.device) -> float:
    """The time when all that the device was given is done."""
    streams_of(device).finish()
    return time.perf_counter()


def decode_one(executor: SplitExecutor, token: np.int32, at: int) -> None:
    """Run a step of one token at a position; those before it have been computed."""
    pages = np.arange(at // executor.page_size + 1, dtype=np.int32)[None]
    nothing = np.zeros(1, np.int32)
    executor.forward(Batch(np.array([token], np.int32), np.array([at], np.int32), nothing, pages, nothing))
