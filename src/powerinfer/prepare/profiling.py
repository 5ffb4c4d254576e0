"""Profiling a model from beginning to end: read the corpus, load the model, calibrate thresholds, count what fires."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

from powerinfer.config import DEFAULT_CHUNK, EngineConfig, ProfileConfig
from powerinfer.errors import RequestError
from powerinfer.prepare.counting import Task
from powerinfer.progress import Progress, Say, silent
from powerinfer.sparsity.selection import check_neurons
from powerinfer.text.model_text import chat_template_of, tokenizer_of

if TYPE_CHECKING:
    from powerinfer.devices.cpu import CpuExecutor
    from powerinfer.formats.checkpoint import Checkpoint
    from powerinfer.formats.profile_file import ProfileFile
    from powerinfer.prepare.corpus import Windows
    from powerinfer.prepare.counting import Saved, State

WINDOW = 512
"""Default number of tokens of a window; fewer if the model's context is shorter."""
LEAST_WINDOW = 8


@dataclass(frozen=True)
class Profiled:
    """A profile. tokens: number computed now, 0 if the profile was up to date; seconds: the time that it took."""

    file: ProfileFile
    tokens: int
    seconds: float


def check(options: ProfileConfig) -> None:
    """RequestError for an option out of its range."""
    for field in dataclasses.fields(ProfileConfig):
        value, least = getattr(options, field.name), field.metadata.get("least", 1)
        if field.type == "int" and (type(value) is not int or value < least):
            flag = "--" + field.name.replace("_", "-")
            raise RequestError(f"{flag} must be a whole number of at least {least}, not {value}")
    if 0 < options.window < LEAST_WINDOW:
        raise RequestError(f"--window must be a whole number of at least {LEAST_WINDOW}, not {options.window}")
    if not 0 < options.perplexity_cost <= 1:
        raise RequestError(f"--perplexity-cost must be between 0 and 1 (0.01 is 1 %), not {options.perplexity_cost}")


def read(checkpoint: Checkpoint, options: ProfileConfig, say: Say, progress: Progress = silent) -> Task:
    """Read the corpus, and define the counting task. say: receives notes for the user.

    RequestError for a corpus that cannot be read, or options that the model cannot meet.
    """
    from powerinfer.formats.expert_files import MAX_TOKENS
    from powerinfer.formats.samples_file import row_bytes
    from powerinfer.prepare.corpus import SAMPLE_SOURCE, open_corpora, read_windows

    config = checkpoint.config
    if not config.experts:
        check_neurons(config, "profile")
    elif options.tokens > MAX_TOKENS:
        raise RequestError(f"--tokens must be at most {MAX_TOKENS} for models of experts, not {options.tokens}")
    if options.window > config.context_length:
        raise RequestError(f"--window {options.window} is more than the model's context of {config.context_length}")
    corpora = open_corpora(options.corpus)
    window = options.window or min(WINDOW, config.context_length)
    template = chat_template_of(checkpoint)
    windows = read_windows(corpora, tokenizer_of(checkpoint), window, options.tokens, progress, template, say)
    if not options.corpus:
        say(f"the text is a small built-in sample of {windows.tokens} tokens ({SAMPLE_SOURCE}): use --corpus for more")
    if config.experts and config.unpredicted_reason is not None:
        return Task(windows, 0, None)
    rows = min(windows.tokens, options.samples // row_bytes(checkpoint))
    if config.experts:
        return Task(windows, rows, None)
    return Task(windows, rows, None if config.partly_rectified else options.perplexity_cost)


def profile(
    checkpoint: Checkpoint,
    engine: EngineConfig,
    task: Task,
    say: Say,
    progress: Progress = silent,
    force: bool = False,
) -> Profiled:
    """The profile of a model: the existing one if it is up to date, otherwise a new one.

    say: receives notes for the user. ModelError if the model computes numbers that are not finite, PowerInferError if a
    file cannot be written.
    """
    from powerinfer.prepare.counting import Saved, State, count, current

    config, windows = checkpoint.config, task.windows
    saved_file = None if force else current(checkpoint, engine.prepared, task)
    if saved_file is not None:
        if not task.rows:
            _drop_samples(checkpoint, engine.prepared, say)
        return Profiled(saved_file, 0, 0.0)
    saved = Saved(checkpoint, engine.prepared, task)
    state = None if force else saved.load()
    if state is not None and (state.windows or state.measured):
        say(f"resuming: {state.windows * windows.size} of {windows.tokens} tokens are done")
    elif saved.exists() and not force:
        say("an unfinished profile was made from another text, other options or another model: starting over")
    state = state or State(config, len(windows.corpora))
    saved.check_writable(state)
    executor = load_executor(checkpoint, engine, windows, progress)
    try:
        thresholds, calibration = None, None
        if task.cost is not None:
            thresholds, calibration = _calibrated(executor, saved, state, task.cost, progress)
        begin, before = time.perf_counter(), state.windows
        counted = count(saved, executor, state, thresholds, calibration, progress)
        return Profiled(counted, (len(windows.ids) - before) * windows.size, time.perf_counter() - begin)
    finally:
        executor.close()


def _drop_samples(checkpoint: Checkpoint, prepared: str | None, say: Say) -> None:
    """Remove the samples of a profile, which are many times its size."""
    from powerinfer.formats.prepared import SAMPLES, PreparedFile

    samples = PreparedFile(SAMPLES, checkpoint, prepared)
    with suppress(OSError):
        say(f"{samples.path} ({samples.path.stat().st_size / 1e6:,.0f} MB) is removed: no predictors are trained on it")
    samples.remove()


def load_executor(checkpoint: Checkpoint, engine: EngineConfig, windows: Windows, progress: Progress) -> CpuExecutor:
    """The model, on the CPU and dense, with room for the windows that are computed together."""
    from powerinfer.models import load
    from powerinfer.prepare.counting import contexts

    together = contexts(windows.size)
    chunk = max(DEFAULT_CHUNK, together * windows.size) if together > 1 else DEFAULT_CHUNK
    options = dataclasses.replace(
        engine, context=windows.size, max_batch=together, prefill_chunk=chunk, selector="all", threshold=None
    )
    return load(checkpoint, options, progress)


def _calibrated(
    executor: CpuExecutor, saved: Saved, state: State, cost: float, progress: Progress
) -> tuple[tuple[float, ...], dict[str, Any]]:
    """(thresholds of the layers, their cost in perplexity). Measurements are stored in `state`, and saved."""
    from powerinfer.evaluate import windows_perplexity
    from powerinfer.prepare.calibrate import HALVINGS, Silenced, calibrate, held_out, measure_magnitudes, thresholds_at
    from powerinfer.runtime.engine import LLM

    checkpoint, windows = saved.checkpoint, saved.task.windows
    tokenizer = tokenizer_of(checkpoint)
    scored, rest = held_out(len(windows.ids))
    if not state.magnitudes.size:
        state.magnitudes = measure_magnitudes(executor, windows, rest, checkpoint.config.n_layers, progress)
        saved.save(state)
    inside: Sequence[list[int]] = [windows.ids[window].tolist() for window in scored]
    done = 0

    def measure(quantile: float) -> float:
        nonlocal done
        if quantile not in state.measured:
            thresholds = thresholds_at(state.magnitudes, quantile) if quantile else None
            options = EngineConfig(context=windows.size, max_batch=1)
            llm = LLM.from_parts(Silenced(executor, thresholds), tokenizer, checkpoint.config, options)
            total = (HALVINGS + 2) * len(inside)
            at = done * len(inside)

            def tell(label: str, windows: int, of: int) -> None:
                progress("calibrating thresholds", at + windows, total)

            state.measured[quantile] = windows_perplexity(llm, inside, tell).perplexity
            saved.save(state)
        done += 1
        return state.measured[quantile]

    quantile = calibrate(measure, cost)
    dense, perplexity = state.measured[0.0], state.measured[quantile]
    calibration = {
        "quantile": quantile,
        "asked": cost,
        "cost": perplexity / dense - 1,
        "perplexity": perplexity,
        "perplexity_dense": dense,
        "tokens": len(scored) * (windows.size - windows.size // 2 - 1),
    }
    return thresholds_at(state.magnitudes, quantile), calibration


def describe(checkpoint: Checkpoint, prepared: str | None, profiled: Profiled) -> dict[str, Any]:
    """The profile as a document."""
    from powerinfer.formats.prepared import SAMPLES, PreparedFile

    profile, details = profiled.file.profile, profiled.file.details
    samples = PreparedFile(SAMPLES, checkpoint, prepared)
    rows = details.get("samples") if samples.exists() else 0
    fired = [float(profile.counts[layer].sum()) for layer in range(profile.n_layers)]
    layers = [
        {
            "layer": layer,
            "active_fraction": profile.active_fraction(layer),
            "hot_share": profile.hot_share(layer),
            "reuse": profile.reuse[layer],
            "threshold": None if profile.thresholds is None else profile.thresholds[layer],
        }
        for layer in profile.layers
    ]
    return {
        "path": str(profiled.file.path),
        "tokens": profile.tokens,
        "window": details.get("window"),
        "corpora": [
            {"name": name, "tokens": tokens}
            for name, tokens in zip(profile.corpora, profile.corpus_tokens, strict=True)
        ],
        "active_fraction": profile.active_fraction(),
        "hot_share": profile.hot_share(),
        "reuse": sum(map(float.__mul__, profile.reuse, fired)) / sum(fired) if any(fired) else 0.0,
        "overlap": [
            {"first": first, "second": second, "share": profile.overlap(at, to)}
            for (at, first), (to, second) in combinations(enumerate(profile.corpora), 2)
        ],
        "layers": layers,
        "samples": {"path": str(samples.path), "bytes": samples.path.stat().st_size, "rows": rows} if rows else None,
        "calibration": details.get("calibration"),
        "seconds": profiled.seconds,
        "tok_s": profiled.tokens / profiled.seconds if profiled.tokens else None,
    }
