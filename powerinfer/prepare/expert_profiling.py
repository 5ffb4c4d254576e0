"""Profiling a model of experts: a text is computed window by window, what its tokens select is recorded, then counted.

The record is a trace (formats/expert_files.py). It is written while the text is computed, so that a killed process
loses little, and removed once it is counted, unless it was asked for.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
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
from powerinfer.formats.prepared import check_replaceable
from powerinfer.prepare.counting import SAVE_EVERY, groups, run_windows
from powerinfer.prepare.expert_counting import count_experts
from powerinfer.prepare.profiling import load_executor
from powerinfer.progress import Progress, Say, silent

if TYPE_CHECKING:
    from powerinfer.config import EngineConfig
    from powerinfer.formats.checkpoint import Checkpoint
    from powerinfer.formats.prepared import PreparedFile
    from powerinfer.prepare.counting import Task

TOP = (0.10, 0.25, 0.50)
"""Shares of the experts whose share of the selections is stated."""


@dataclass(frozen=True)
class ProfiledExperts:
    """A profile, and its trace if one was asked for. tokens: computed now, 0: all was up to date; seconds: for it."""

    file: ExpertProfileFile
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
    recorded = None if force else _current_trace(checkpoint, place, task)
    found = None if force else _current(checkpoint, engine.prepared, task)
    if found is not None and (trace is None or recorded is not None):
        return ProfiledExperts(found, trace, 0, 0.0)
    begin, computed = time.perf_counter(), 0
    if recorded is None:
        computed = _record(checkpoint, engine, task, place, say, progress, force)
        recorded = open_trace(checkpoint, place)
    experts = {layer: ffn.n_experts for layer, ffn in checkpoint.config.experts.items()}
    made = count_experts(recorded.selected, experts, recorded.corpora, recorded.corpus_tokens, progress)
    about = {"key": task.key, "window": task.windows.size}
    path = write_expert_profile(checkpoint, engine.prepared, made, about)
    if trace is None:
        place.remove()
    return ProfiledExperts(ExpertProfileFile(made, about, path), trace, computed, time.perf_counter() - begin)


def _current(checkpoint: Checkpoint, prepared: str | None, task: Task) -> ExpertProfileFile | None:
    with suppress(ModelError):
        file = open_expert_profile_file(checkpoint, prepared)
        return file if file.about.get("key") == task.key else None
    return None


def _current_trace(checkpoint: Checkpoint, place: PreparedFile, task: Task) -> TraceFile | None:
    with suppress(ModelError):
        file = open_trace(checkpoint, place)
        return file if file.about.get("key") == task.key else None
    return None


def _record(
    checkpoint: Checkpoint,
    engine: EngineConfig,
    task: Task,
    place: PreparedFile,
    say: Say,
    progress: Progress,
    force: bool,
) -> int:
    """Write the trace; the number of tokens computed."""
    windows = task.windows
    corpora = [(name, number * windows.size) for name, number in zip(windows.corpora, windows.number, strict=True)]
    about = {"key": task.key, "window": windows.size}
    executor = load_executor(checkpoint, engine, windows, progress)
    try:
        with write_trace(checkpoint, place, corpora, about, not force) as writer:
            first = min(writer.done // windows.size, len(windows.ids))
            writer.done = first * windows.size
            if first:
                say(f"resuming: {writer.done} of {windows.tokens} tokens are done")
            due = time.monotonic() + SAVE_EVERY
            with executor.routed() as routed:
                for begin, end in groups(windows, first):
                    run_windows(executor, windows.ids[begin:end], after=lambda: writer.put(routed()))
                    if time.monotonic() >= due:
                        writer.sync()
                        due = time.monotonic() + SAVE_EVERY
                    progress("profiling", end * windows.size, windows.tokens)
            return windows.tokens - first * windows.size
    except ModelError:  # it would fail again: do not resume
        place.remove_part()
        raise
    finally:
        executor.close()


def describe(made: ProfiledExperts) -> dict[str, Any]:
    """The profile as a document."""
    one, about = made.file.profile, made.file.about
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
        for layer in one.layers
    ]
    return {
        "path": str(made.file.path),
        "tokens": one.tokens,
        "window": about.get("window"),
        "corpora": [
            {"name": name, "tokens": tokens} for name, tokens in zip(one.corpora, one.corpus_tokens, strict=True)
        ],
        **{f"top_{100 * share:.0f}": one.share_of_top(share) for share in TOP},
        "gini": one.mean("gini"),
        "reuse": one.mean("reuse"),
        "overlap": [
            {"first": one.corpora[first], "second": one.corpora[second], "share": one.overlap(first, second)}
            for first, second in combinations(range(len(one.corpora)), 2)
        ],
        "layers": layers,
        "trace": None if made.trace is None else {"path": str(made.trace), "bytes": made.trace.stat().st_size},
        "seconds": made.seconds,
        "tok_s": made.tokens / made.seconds if made.tokens else None,
    }
