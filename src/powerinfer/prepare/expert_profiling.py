"""Profiling a model of experts: a text is computed window by window, what its tokens select is recorded, then counted.

The record is a trace (formats/expert_files.py). It is written while the text is computed, so that a killed process
loses little, and removed once it is counted, unless it was asked for. Where neurons inside experts can be predicted,
samples for training predictors are written beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powerinfer.errors import ModelError
from powerinfer.formats.expert_files import (
    ExpertProfileFile,
    TraceFile,
    open_expert_profile_file,
    open_trace,
    trace_place,
    write_expert_profile,
    write_trace,
)
from powerinfer.formats.prepared import SAMPLES, PreparedFile, check_replaceable
from powerinfer.formats.samples_file import SamplesWriter, open_samples, write_samples
from powerinfer.prepare.counting import SAVE_EVERY, groups, has_samples, run_windows
from powerinfer.prepare.expert_counting import count_experts, with_neurons
from powerinfer.prepare.profiling import load_executor
from powerinfer.progress import Progress, Say, silent

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from powerinfer.config import EngineConfig
    from powerinfer.devices.cpu import CpuExecutor, Routed
    from powerinfer.experts import ExpertProfile
    from powerinfer.formats.checkpoint import Checkpoint
    from powerinfer.formats.expert_files import TraceWriter
    from powerinfer.prepare.counting import Task

TOP = (0.10, 0.25, 0.50)
"""Shares of the experts whose share of the selections is stated."""


@dataclass(frozen=True)
class ProfiledExperts:
    """A profile, its trace if one was asked for, and the file of its samples and their number, None: there are none.
    tokens: computed now, 0: all was up to date; seconds: for it."""

    file: ExpertProfileFile
    samples: tuple[Path, int] | None
    trace: Path | None
    tokens: int
    seconds: float


def profile_experts(
    checkpoint: Checkpoint,
    engine: EngineConfig,
    task: Task,
    trace: Path | None = None,
    say: Say = lambda line: None,
    progress: Progress = silent,
    force: bool = False,
) -> ProfiledExperts:
    """The profile of a model of experts: the existing one if it is up to date, otherwise a new one.

    trace: where to leave the trace, None: nowhere; say: receives notes for the user. An interrupted run resumes with
    the same arguments. ModelError if the model computes numbers that are not finite, PowerInferError if a file cannot
    be written.
    """
    if trace is not None:
        check_replaceable(trace, b"experts-trace", "trace of experts")
    place = trace_place(checkpoint, engine.prepared, trace)
    sampled = not task.rows or (not force and has_samples(checkpoint, engine.prepared, task))
    recorded = None if force or not sampled else _current_trace(checkpoint, place, task)
    current_file = None if force or not sampled else _current(checkpoint, engine.prepared, task)
    samples = PreparedFile(SAMPLES, checkpoint, engine.prepared)
    samples_kept = (samples.path, task.rows) if task.rows else None
    if current_file is not None and (trace is None or recorded is not None):
        if task.rows and not current_file.profile.neuron_use:  # of an earlier version
            profile_ = _with_neurons(checkpoint, engine.prepared, current_file.profile)
            write_expert_profile(checkpoint, engine.prepared, profile_, current_file.details)
            current_file = replace(current_file, profile=profile_)
        return ProfiledExperts(current_file, samples_kept, trace, 0, 0.0)
    begin, computed = time.perf_counter(), 0
    if recorded is None:
        computed = _record(checkpoint, engine, task, place, say, progress, force, not sampled)
        recorded = open_trace(checkpoint, place)
    experts = {layer: ffn.n_experts for layer, ffn in checkpoint.config.experts.items()}
    profile_ = count_experts(recorded.selected, experts, recorded.corpora, recorded.corpus_tokens, progress)
    if task.rows:
        profile_ = _with_neurons(checkpoint, engine.prepared, profile_)
    metadata = {"key": task.key, "window": task.windows.size}
    path = write_expert_profile(checkpoint, engine.prepared, profile_, metadata)
    if trace is None:
        place.remove()
    if not task.rows:
        samples.remove()  # those of an earlier profile
    file = ExpertProfileFile(profile_, metadata, path)
    return ProfiledExperts(file, samples_kept, trace, computed, time.perf_counter() - begin)


def _with_neurons(checkpoint: Checkpoint, prepared: str | None, profile: ExpertProfile) -> ExpertProfile:
    """The profile with what the samples beside it say of neurons inside experts."""
    return with_neurons(profile, open_samples(checkpoint, prepared), checkpoint.config.experts)


def _current(checkpoint: Checkpoint, prepared: str | None, task: Task) -> ExpertProfileFile | None:
    with suppress(ModelError):
        file = open_expert_profile_file(checkpoint, prepared)
        return file if file.details.get("key") == task.key else None
    return None


def _current_trace(checkpoint: Checkpoint, place: PreparedFile, task: Task) -> TraceFile | None:
    with suppress(ModelError):
        file = open_trace(checkpoint, place)
        return file if file.details.get("key") == task.key else None
    return None


def _record(
    checkpoint: Checkpoint,
    engine: EngineConfig,
    task: Task,
    place: PreparedFile,
    say: Say,
    progress: Progress,
    force: bool,
    sample: bool,
) -> int:
    """Write the trace, and samples if they are wanted; the number of tokens computed."""
    windows = task.windows
    corpora = [(name, number * windows.size) for name, number in zip(windows.corpora, windows.number, strict=True)]
    metadata = {"key": task.key, "window": windows.size}
    executor = load_executor(checkpoint, engine, windows, progress)
    try:
        with (
            write_trace(checkpoint, place, corpora, metadata, not force) as writer,
            _samples(checkpoint, engine.prepared, task, writer.done > 0) if sample else nullcontext() as samples,
        ):
            if samples is not None and not samples.resumed:  # their earlier part is lost
                writer.done = 0
            first = min(writer.done // windows.size, len(windows.ids))
            writer.done = first * windows.size
            if first:
                say(f"resuming: {writer.done} of {windows.tokens} tokens are done")
            due = time.monotonic() + SAVE_EVERY
            recorder = _Recorder(task, writer, samples)
            with recorder.watching(executor):
                for begin, end in groups(windows, first):
                    recorder.look_at(executor, begin, end)
                    if time.monotonic() >= due:
                        recorder.sync()
                        due = time.monotonic() + SAVE_EVERY
                    progress("profiling", end * windows.size, windows.tokens)
            recorder.sync()
            return windows.tokens - first * windows.size
    except ModelError:  # it would fail again: do not resume
        place.remove_part()
        PreparedFile(SAMPLES, checkpoint, engine.prepared).remove_part()
        raise
    finally:
        executor.close()


@contextmanager
def _samples(checkpoint: Checkpoint, prepared: str | None, task: Task, resume: bool) -> Iterator[SamplesWriter]:
    metadata = {"key": task.key, "tokens": task.windows.tokens}
    with write_samples(checkpoint, prepared, task.rows, task.starts(), metadata, resume) as writer:
        yield writer


class _Recorder:
    """Writes what tokens select, and samples, if there is a writer: what experts read and which neurons fired."""

    def __init__(self, task: Task, trace: TraceWriter, samples: SamplesWriter | None) -> None:
        self._task, self._trace, self._samples = task, trace, samples
        self._selected: Routed = {}
        self._take: Callable[[], Routed] = lambda: self._selected

    @contextmanager
    def watching(self, executor: CpuExecutor) -> Iterator[None]:
        """A context in which `look_at` sees what the executor selects."""
        if self._samples is not None:
            with executor.observed_experts(self):
                yield
        else:
            with executor.routed() as take_selected:
                self._take = take_selected
                yield

    def look_at(self, executor: CpuExecutor, first: int, last: int) -> None:
        """Compute the windows from `first` to `last`, all of one corpus."""

        def expect(positions: NDArray[np.int32], at: int) -> None:
            self._row, self._sampled = self._task.sampled(first, last, at, at + len(positions))

        windows = self._task.windows.ids[first:last]
        run_windows(executor, windows, expect, lambda: self._trace.put(self._take()))

    def sync(self) -> None:
        """Sync to disk: the trace says how far both are."""
        if self._samples is not None:
            self._samples.sync()
        self._trace.sync()

    def reads(self, layer: int, x: NDArray[np.float32]) -> None:
        self._x = x[self._sampled]

    def fires(self, layer: int, selected: NDArray[np.int32], active: NDArray[np.uint8]) -> None:
        self._selected[layer] = selected
        if self._samples is not None and len(self._sampled):
            sampled = self._sampled
            self._samples.put(layer, self._row, self._x, active[sampled], selected[sampled])


def describe(result: ProfiledExperts) -> dict[str, Any]:
    """The profile as a document."""
    use, details = result.file.profile, result.file.details
    layers = [
        {
            "layer": layer.layer,
            "experts": layer.n_experts,
            "top_k": layer.top_k,
            **{f"top_{100 * share:.0f}": layer.share_of_top(share) for share in TOP},
            "gini": layer.gini,
            "reuse": layer.reuse,
            "never": int((layer.total == 0).sum()),
            "foretold": layer.foretold,
        }
        for layer in use.layers
    ]
    return {
        "path": str(result.file.path),
        "tokens": use.tokens,
        "window": details.get("window"),
        "corpora": [
            {"name": name, "tokens": tokens} for name, tokens in zip(use.corpora, use.corpus_tokens, strict=True)
        ],
        **{f"top_{100 * share:.0f}": use.share_of_top(share) for share in TOP},
        "gini": use.mean("gini"),
        "reuse": use.mean("reuse"),
        "overlap": [
            {"first": use.corpora[first], "second": use.corpora[second], "share": use.overlap(first, second)}
            for first, second in combinations(range(len(use.corpora)), 2)
        ],
        "layers": layers,
        "samples": None
        if result.samples is None
        else {"path": str(result.samples[0]), "bytes": result.samples[0].stat().st_size, "rows": result.samples[1]},
        "trace": None if result.trace is None else {"path": str(result.trace), "bytes": result.trace.stat().st_size},
        "seconds": result.seconds,
        "tok_s": result.tokens / result.seconds if result.tokens else None,
    }
