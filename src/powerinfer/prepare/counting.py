"""Profiling: a text is computed window by window, and the neurons that fire are counted.

An `Executor` is observed while it computes whole windows like prompts, densely; nothing is generated and no logits are
computed. The counts are saved regularly, so that a killed process loses little.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray

from powerinfer import __version__
from powerinfer.devices.batch import Batch
from powerinfer.errors import ModelError
from powerinfer.formats.json_file import Between, Count, Share
from powerinfer.formats.prepared import PROFILE_STATE, SAMPLES, PreparedFile
from powerinfer.formats.profile_file import BINS, ProfileFile, open_profile_file, write_profile
from powerinfer.formats.samples_file import SamplesWriter, check_samples, open_samples, write_samples
from powerinfer.neurons import Counts, Profile
from powerinfer.progress import Progress, silent

if TYPE_CHECKING:
    from powerinfer.config import ModelConfig
    from powerinfer.devices.cpu import CpuExecutor, Fired
    from powerinfer.formats.checkpoint import Checkpoint
    from powerinfer.prepare.corpus import Windows

SAVE_EVERY = 20.0  # seconds
CALL = 512  # tokens computed at once, of short windows


@dataclass(frozen=True)
class Task:
    """The inputs of a profile. rows: of the samples, 0 for none; cost: for calibrated thresholds, None for none."""

    windows: Windows
    rows: int
    cost: float | None

    @property
    def key(self) -> str:
        """A digest of everything but the model that the result depends on."""
        facts = [__version__, self.windows.digest, self.windows.corpora, self.rows, self.cost]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]

    def first_row(self, window: int) -> int:
        """The first row of the samples in or after that window; row r is token r * tokens // rows."""
        at, tokens = window * self.windows.size, self.windows.tokens
        return -(-at * self.rows // tokens)

    def tokens_of(self, window: int) -> NDArray[np.int64]:
        """Positions of a window whose tokens are sampled, ascending."""
        rows = np.arange(self.first_row(window), self.first_row(window + 1))
        return rows * self.windows.tokens // max(1, self.rows) - window * self.windows.size

    def sampled(self, first: int, last: int, begin: int, end: int) -> tuple[int, NDArray[np.int64]]:
        """Row of the first sampled token of [begin, end) in the windows from `first` to `last`, and all sampled tokens
        there, counted from `begin`."""
        positions = [self.tokens_of(window) + (window - first) * self.windows.size for window in range(first, last)]
        sampled = np.concatenate(positions)
        at, to = np.searchsorted(sampled, [begin, end])
        return self.first_row(first) + int(at), sampled[at:to] - begin

    def starts(self) -> NDArray[np.int64]:
        """The first row of each window with sampled tokens."""
        return np.unique([self.first_row(window) for window in range(len(self.windows.ids)) if self._sampled(window)])

    def _sampled(self, window: int) -> bool:
        return self.first_row(window) < self.first_row(window + 1)


def current(checkpoint: Checkpoint, prepared: str | None, task: Task) -> ProfileFile | None:
    """The existing profile, with its samples, if this task would make the same."""
    try:
        file = open_profile_file(checkpoint, prepared)
    except ModelError:
        return None
    if not task.rows:  # one that was made with samples counts the same
        rows = file.details.get("samples")
        task = replace(task, rows=rows) if type(rows) is int else task
        return file if file.details.get("key") == task.key else None
    return file if file.details.get("key") == task.key and has_samples(checkpoint, prepared, task) else None


def has_samples(checkpoint: Checkpoint, prepared: str | None, task: Task) -> bool:
    """Whether there are samples that this task would make."""
    with suppress(ModelError):
        return open_samples(checkpoint, prepared).details.get("key") == task.key
    return False


class State:
    """The progress of a profile, as saved for the next process.

    windows: number completed; counts [layers, corpora, neurons of the largest], active [layers, 101] and pairs [layers,
    2] (neurons that fired for a token and the one before it, and all that fired for tokens that have one before them),
    of these. magnitudes [layers, bins] and measured (quantile -> perplexity) belong to the calibration.
    """

    def __init__(self, config: ModelConfig, corpora: int) -> None:
        layers = config.n_layers
        self.windows = 0
        self.counts = np.zeros((layers, corpora, config.widest_ffn), np.int64)
        self.active = np.zeros((layers, BINS), np.int64)
        self.pairs = np.zeros((layers, 2), np.int64)
        self.magnitudes = np.zeros((layers, 0), np.int64)
        self.measured: dict[float, float] = {}

    _ARRAYS = ("counts", "active", "pairs", "magnitudes")


@dataclass(frozen=True)
class _StateHeader:
    """Header of the file of a state. measured: (quantile, perplexity)."""

    key: str
    windows: Count
    measured: list[tuple[Share, Annotated[float, Between(1e-300, 1e300)]]]


class Saved:
    """The file of a task's `State` beside the model."""

    def __init__(self, checkpoint: Checkpoint, prepared: str | None, task: Task) -> None:
        self.checkpoint, self.prepared, self.task = checkpoint, prepared, task
        self._place = PreparedFile(PROFILE_STATE, checkpoint, prepared)
        self._next = time.monotonic() + SAVE_EVERY

    def exists(self) -> bool:
        """Whether any state is saved."""
        return self._place.exists()

    def load(self) -> State | None:
        """The saved state of this task; None if there is none, or it cannot be used."""
        state = State(self.checkpoint.config, len(self.task.windows.corpora))
        try:
            description, tensors, _ = self._place.read()
            saved = self._place.described(_StateHeader, description)
        except ModelError:
            return None
        if saved.key != self.task.key or saved.windows > len(self.task.windows.ids):
            return None
        state.windows, state.measured = saved.windows, dict(saved.measured)
        for name in State._ARRAYS:
            tensor, array = tensors.get(name), getattr(state, name)
            if tensor is None and name == "magnitudes":
                continue
            if tensor is None or tensor.type != "I64" or len(tensor.shape) != array.ndim:
                return None
            if tensor.shape[0] != len(array) or (name != "magnitudes" and tensor.shape != array.shape):
                return None
            setattr(state, name, np.frombuffer(tensor.data.tobytes(), "<i8").astype(np.int64).reshape(tensor.shape))
        return state if self._can_be(state) else None

    def _can_be(self, state: State) -> bool:
        """Whether the numbers are consistent."""
        windows = self.task.windows
        ends = np.cumsum(windows.number)
        done = np.clip(state.windows - (ends - windows.number), 0, windows.number) * windows.size  # of each corpus
        return bool(
            (state.counts >= 0).all()
            and (state.counts <= done[:, None]).all()
            and (state.active >= 0).all()
            and (state.active <= done.sum()).all()
            and (state.active.sum(axis=1) == np.where(self.checkpoint.config.ffn_sizes, done.sum(), 0)).all()
            and (state.pairs >= 0).all()
            and (state.pairs[:, 0] <= state.pairs[:, 1]).all()
            and (state.magnitudes >= 0).all()
            and (state.magnitudes < 1 << 50).all()
        )

    def due(self) -> bool:
        """Whether it is time to save again."""
        return time.monotonic() >= self._next

    @staticmethod
    def _arrays(state: State) -> list[tuple[str, Any]]:
        return [(name, getattr(state, name)) for name in State._ARRAYS if getattr(state, name).size]

    def check_writable(self, state: State) -> None:
        """PowerInferError, before the work, if the state, about as large as the profile, or the samples cannot be
        written."""
        task = self.task
        self._place.check_writable([(name, "I64", values.shape) for name, values in self._arrays(state)])
        if task.rows and not has_samples(self.checkpoint, self.prepared, task):
            check_samples(self.checkpoint, self.prepared, task.rows, task.starts())

    def save(self, state: State) -> None:
        """Save it, replacing the previous state."""
        measured = [[float(quantile), float(value)] for quantile, value in state.measured.items()]
        description = {"key": self.task.key, "windows": state.windows, "measured": measured}
        arrays = self._arrays(state)
        with self._place.write(description, [(name, "I64", values.shape) for name, values in arrays]) as write:
            for name, values in arrays:
                write(name, np.ascontiguousarray(values, "<i8").reshape(-1).view(np.uint8))
        self._next = time.monotonic() + SAVE_EVERY

    def remove(self) -> None:
        """Remove the saved state: the profile is complete."""
        self._place.remove()


class Tally:
    """The observer that fills a `State`, and writes samples if there is a writer."""

    def __init__(self, config: ModelConfig, task: Task, state: State, samples: SamplesWriter | None) -> None:
        self._sizes = config.ffn_sizes
        self._task = task
        self._state = state
        self._samples = samples
        self._before = [np.zeros(-(-size // 8), np.uint8) for size in config.ffn_sizes]  # of the last token of a call
        self._x: NDArray[np.float32] | None = None

    def look_at(self, executor: CpuExecutor, first: int, last: int) -> None:
        """Compute the windows from `first` to `last`, all of one corpus, on the observed executor."""
        task, windows = self._task, self._task.windows
        self._corpus = windows.corpus_of(first)

        def expect(positions: NDArray[np.int32], at: int) -> None:
            self._positions = positions
            self._row, self._sampled = task.sampled(first, last, at, at + len(positions))

        run_windows(executor, windows.ids[first:last], expect)
        self._state.windows = last

    def reads(self, layer: int, x: NDArray[np.float32]) -> None:
        if self._samples is not None and len(self._sampled):
            self._x = x[self._sampled]

    def fires(self, layer: int, fired: Fired) -> None:
        active = np.ascontiguousarray(fired.active)
        state, follows = self._state, self._positions > 0
        state.counts[layer, self._corpus, : self._sizes[layer]] += fired.counts
        number = np.bitwise_count(active).sum(axis=1, dtype=np.int64)
        state.active[layer] += np.bincount(number * 100 // self._sizes[layer], minlength=BINS)
        before = np.concatenate([self._before[layer][None], active[:-1]])
        state.pairs[layer, 0] += int(np.bitwise_count(active & before)[follows].sum(dtype=np.int64))
        state.pairs[layer, 1] += int(number[follows].sum())
        self._before[layer][:] = active[-1]
        if self._samples is not None and self._x is not None:
            self._samples.put(layer, self._row, self._x, active[self._sampled])
        self._x = None


def count(
    saved: Saved,
    executor: CpuExecutor,
    state: State,
    thresholds: tuple[float, ...] | None = None,
    calibration: dict[str, Any] | None = None,
    progress: Progress = silent,
) -> ProfileFile:
    """Count what fires, from where `state` is, and write the profile and its samples beside the saved state.

    executor: of the model, with room in its cache for `contexts(task.windows.size)` windows; thresholds: of the layers,
    for activations that are never exactly zero; calibration: how they were found. An interrupted run resumes with the
    same task. ModelError for a model that computes NaN or infinity, PowerInferError if a file cannot be written.
    progress: ("profiling", tokens done, tokens).
    """
    checkpoint, prepared, task = saved.checkpoint, saved.prepared, saved.task
    windows, samples = task.windows, PreparedFile(SAMPLES, checkpoint, prepared)
    try:
        if not task.rows or (state.windows == len(windows.ids) and has_samples(checkpoint, prepared, task)):
            _count(saved, executor, state, thresholds, None, progress)
        else:
            metadata = {"key": task.key, "tokens": windows.tokens}
            with write_samples(checkpoint, prepared, task.rows, task.starts(), metadata, state.windows > 0) as writer:
                _count(saved, executor, state, thresholds, writer, progress)
    except ModelError:  # it would fail again: do not resume
        samples.remove_part()
        saved.remove()
        raise
    profile = _profile(checkpoint.config, task, state, thresholds)
    details = {"key": task.key, "window": windows.size, "samples": task.rows, "calibration": calibration}
    path = write_profile(checkpoint, prepared, profile, details)
    if not task.rows:
        samples.remove()  # those of an earlier profile
    saved.remove()
    return ProfileFile(profile, details, path)


def contexts(size: int) -> int:
    """Number of windows of that size computed together."""
    return max(1, CALL // size)


def run_windows(
    executor: CpuExecutor,
    ids: NDArray[np.int32],
    expect: Callable[[NDArray[np.int32], int], None] | None = None,
    after: Callable[[], None] | None = None,
) -> None:
    """Compute windows [n, size], n up to `contexts(size)`, as prompts; without logits.

    expect: called before each call with the positions of its tokens and the position of the first among all of them;
    after: called after it.
    """
    number, size = ids.shape
    pages = -(-size // executor.page_size)
    table = np.arange(number * pages, dtype=np.int32).reshape(number, pages)
    tokens = np.ascontiguousarray(ids.reshape(-1), np.int32)
    positions = np.tile(np.arange(size, dtype=np.int32), number)
    rows = np.repeat(np.arange(number, dtype=np.int32), size)
    step = executor.max_tokens if number == 1 else number * size
    for at in range(0, number * size, step):
        part = slice(at, at + step)
        if expect is not None:
            expect(positions[part], at)
        executor.forward(Batch(tokens[part], positions[part], rows[part], table, np.empty(0, np.int32)))
        if after is not None:
            after()


def groups(windows: Windows, begin: int) -> Iterator[tuple[int, int]]:
    """(first, end) of the windows computed together, from `begin` on: all of one corpus."""
    ends = np.cumsum(windows.number)
    while begin < len(windows.ids):
        end = min(begin + contexts(windows.size), int(ends[windows.corpus_of(begin)]))
        yield begin, end
        begin = end


def _count(
    saved: Saved,
    executor: CpuExecutor,
    state: State,
    thresholds: tuple[float, ...] | None,
    samples: SamplesWriter | None,
    progress: Progress,
) -> None:
    """Fill the state, and write the samples."""
    windows = saved.task.windows
    if samples is not None and state.windows and not samples.resumed:  # their earlier part is lost
        state.windows = 0
        for array in (state.counts, state.active, state.pairs):
            array.fill(0)
    tally = Tally(saved.checkpoint.config, saved.task, state, samples)
    with executor.observed(tally, thresholds):
        for first, last in groups(windows, state.windows):
            tally.look_at(executor, first, last)
            if saved.due():
                if samples is not None:
                    samples.sync()
                saved.save(state)
            progress("profiling", last * windows.size, windows.tokens)
    if samples is not None:
        samples.sync()
        saved.save(state)


def _profile(config: ModelConfig, task: Task, state: State, thresholds: Sequence[float] | None) -> Profile:
    windows, layers = task.windows, range(config.n_layers)
    layer_counts: tuple[Counts, ...] = tuple(state.counts[layer, :, : config.ffn_sizes[layer]] for layer in layers)
    return Profile(
        windows.tokens,
        tuple(counts.sum(axis=0) for counts in layer_counts),
        windows.corpora,
        tuple(number * windows.size for number in windows.number),
        layer_counts,
        tuple(state.active),
        tuple(float(both / max(1, fired)) for both, fired in state.pairs),
        None if thresholds is None else tuple(thresholds),
    )
