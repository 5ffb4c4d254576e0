"""Trials at load: ways to compute something are tried in the model itself; the fastest one stays, and is remembered.

    trial = Trial(SUBJECT, checkpoint, engine, conditions(checkpoint, engine, selection) | {"layers": "8"})
    outcome = trial.find() or trial.run(measure)

Ways round differently. So that a model computes the same way, with the same bits, on every start, results are saved in
trials.json beside the model:

    {"format": 1, "kind": "trials", "trials":
     [{"subject": "selectors", "key": {...}, "result": {...}, "disturbed": 0.0, "failures": 0, "problem": ""}, ...]}

The newest one comes first. A key holds everything that a result depends on, as text. A result that was disturbed, by
others that took cores, is used until the machine is quiet at a later start, which repeats the trial. The file is only a
cache: one that is damaged, foreign or too large counts as empty, and is replaced by the next trial.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar

from powerinfer import __version__
from powerinfer.config import EngineConfig
from powerinfer.errors import ModelError, PowerInferError
from powerinfer.formats.checkpoint import Checkpoint
from powerinfer.formats.json_file import Between, Length, checked, of_kind, parse_json, read_limited
from powerinfer.formats.prepared import prepared_folder, write_small
from powerinfer.kernels import cpu
from powerinfer.system import Disturbance, cpu_name, quiet

if TYPE_CHECKING:
    from powerinfer.sparsity.selection import Selection

FORMAT = 1
KIND = "trials"
MAX_TRIALS = 16  # of a subject
LIMIT = 1 << 20  # bytes of the file
FAILURES = 2
"""Trials that fail, one after another: then the fallback stays."""

INTERRUPTED = "its trial was interrupted; --retrial repeats it"

_PROBLEM = 1 << 10  # characters

Key = dict[str, str]
W = TypeVar("W")
M = TypeVar("M")
R = TypeVar("R")


@dataclass(frozen=True)
class TrialSubject(Generic[R]):
    """The question that a trial answers. result: the dataclass of an answer, checked when it is read.

    fallback: saved while the trial runs, so that a process that does not outlive it is not caught again; None: nothing
    is. forgives: a failure, of memory too, leaves the fallback, and the next start tries once more; else it is raised.
    tries: the most trials at a start while others disturb them; the quietest counts.
    """

    name: str
    result: type[R]
    fallback: R | None = None
    forgives: bool = False
    tries: int = 1


@dataclass(frozen=True)
class Outcome(Generic[R]):
    """A result and its origin. seconds: that the trial took, None: it is an earlier one.

    problem: why nothing was measured; disturbed: cores that others took; unsaved: why the result cannot be kept.
    """

    result: R
    path: Path
    seconds: float | None = None
    problem: str = ""
    disturbed: float = 0.0
    unsaved: str | None = None

    @property
    def origin(self) -> str:
        """Text on when it was measured, and where it is."""
        if self.seconds is None:
            return f"measured earlier ({self.path})"
        return f"measured in {self.seconds:.2f} s{self._saved_text}"

    def reason(self, measured: str) -> str:
        """Text on why it was chosen, by what was measured, and where it is."""
        origin = f", chosen earlier ({self.path})" if self.seconds is None else self._saved_text
        return f"{self.problem or measured}{origin}"

    @property
    def _saved_text(self) -> str:
        disturbance = f" while others took {self.disturbed:.1f} cores (repeated at a start when they do not)"
        place = f"kept in {self.path}" if self.unsaved is None else f"cannot be kept: {self.unsaved}"
        return f"{disturbance if self.disturbed else ''}, {place}"


class Trial(Generic[R]):
    """A subject under the conditions of a key, for a model that is being loaded."""

    def __init__(self, subject: TrialSubject[R], checkpoint: Checkpoint, engine: EngineConfig, key: Key) -> None:
        self.path = trials_file(checkpoint, engine.prepared)
        self._subject = subject
        self._key = key
        self._renew = engine.retrial
        self._failures = 0  # before this trial

    def find(self, fits: Callable[[R], bool] = lambda _: True, *, anew: bool = True) -> Outcome[R] | None:
        """The result of an earlier trial that `fits`. None: there is none, or it is to be repeated, if there can be a
        trial (`anew`)."""
        for entry, result in () if self._renew else read_trials(self.path, self._subject):
            if entry.key == self._key and fits(result):
                self._failures = entry.failures
                again = 0 < entry.failures < FAILURES or (entry.disturbed and quiet())
                return None if anew and again else Outcome(result, self.path, problem=entry.problem)
        return None

    def run(self, measure: Callable[[], R]) -> Outcome[R]:
        """Measure, and save the result. Raises what `measure` raises, unless the subject forgives it."""
        subject, begin = self._subject, time.perf_counter()
        if subject.fallback is not None:
            self.keep(subject.fallback, problem=INTERRUPTED)
        runs: list[tuple[float, R]] = []
        try:
            while len(runs) < subject.tries and (not runs or runs[-1][0]):
                with Disturbance() as disturbance:
                    result = measure()
                runs.append((round(disturbance.cores, 3) if disturbance.disturbed else 0.0, result))
        except BaseException as error:
            if subject.fallback is not None and not subject.forgives:
                self._write(None)
            forgivable = isinstance(error, PowerInferError | MemoryError)
            if subject.fallback is None or not subject.forgives or not forgivable:
                raise
            text = str(error) or "out of memory"
            problem, failures = f"the trial failed: {text}"[:_PROBLEM], min(FAILURES, self._failures + 1)
            return self.keep(subject.fallback, time.perf_counter() - begin, problem=problem, failures=failures)
        disturbed, result = min(runs, key=lambda run: run[0])
        return self.keep(result, time.perf_counter() - begin, disturbed=disturbed)

    def keep(
        self, result: R, seconds: float = 0.0, *, disturbed: float = 0.0, problem: str = "", failures: int = 0
    ) -> Outcome[R]:
        """Save a result, replacing the one with the same key. seconds: that the trial took."""
        facts = {"disturbed": disturbed, "failures": failures, "problem": problem}
        unsaved = self._write({"result": asdict(result), **facts})  # type: ignore[call-overload]
        return Outcome(result, self.path, seconds, problem, disturbed, unsaved)

    def _write(self, entry: Mapping[str, Any] | None) -> str | None:
        """Write an entry first; others stay, up to `MAX_TRIALS` and as `LIMIT` allows. None: the key has none any more.
        Returns the reason why that failed, or None."""
        name, key = self._subject.name, self._key
        entries = [] if entry is None else [{"subject": name, "key": key, **entry}]
        entries += [raw for raw, other in _entries(self.path) if (other.subject, other.key) != (name, key)]
        counts, room, fitting = Counter[str](), LIMIT - 128, []  # what is around the entries takes less
        for raw in entries:
            counts[raw["subject"]] += 1
            room -= len(json.dumps(raw)) + 2
            if counts[raw["subject"]] <= MAX_TRIALS and room >= 0:
                fitting.append(raw)
        try:
            write_small(self.path, json.dumps({"format": FORMAT, "kind": KIND, KIND: fitting}).encode())
        except (OSError, PowerInferError) as error:
            return getattr(error, "strerror", None) or str(error)
        return None


# ---------------------------------------------------------------- trying


def take_turns(ways: Sequence[W], rounds: int, measure: Callable[[W, int], M], warm_up: int = 0) -> dict[W, list[M]]:
    """Results of `measure(way, round)` by way, of all rounds but the first `warm_up`. Each round begins with another
    way, so that none always has the machine as the same other one left it."""
    results: dict[W, list[M]] = {way: [] for way in ways}
    for turn in range(rounds):
        first = turn % len(ways)
        for way in (*ways[first:], *ways[:first]):
            measured = measure(way, turn)
            if turn >= warm_up:
                results[way].append(measured)
    return results


def fastest(seconds: Mapping[W, Sequence[float]], base: W, gain: float) -> W:
    """The fastest way that is clearly faster than `base`; otherwise that.

    seconds: of each way, in every round. A way must take less than `gain` of the time of `base`, in the median of the
    rounds, and be faster in all of them but one: else the difference may be chance.
    """
    clear: list[tuple[float, int, W]] = []
    for at, (way, times) in enumerate(seconds.items()):
        shares = [time / max(before, 1e-9) for time, before in zip(times, seconds[base], strict=True)]
        if way != base and median(shares) < gain and sum(share >= 1 for share in shares) <= 1 < len(shares):
            clear.append((median(shares), at, way))
    return min(clear)[2] if clear else base


# ---------------------------------------------------------------- keys and the file


def conditions(checkpoint: Checkpoint, engine: EngineConfig, selection: Selection) -> Key:
    """The part of a key that every result depends on."""
    facts = {
        "version": __version__,
        "build": cpu.build(),
        "cpu": cpu_name(),
        "isa": cpu.choose_isa(engine.isa)[0],
        "threads": cpu.choose_threads(engine.threads)[0],
        "model": checkpoint.fingerprint,
        "quantize": checkpoint.quantize,
        "files": ", ".join(map(_identity, selection.files)),
        "selector": selection.selector,
        "thresholds": selection.thresholds,
        "recall_every": engine.recall_every,
    }
    return {name: str(value) for name, value in facts.items()}


def _identity(path: Path) -> str:
    status = os.stat(path)
    return f"{path.name} {status.st_size} {status.st_mtime_ns}"


def trials_file(checkpoint: Checkpoint, prepared: str | None) -> Path:
    """The file of a model's trials. prepared: as `prepared_folder`."""
    return prepared_folder(checkpoint.path, prepared) / "trials.json"


@dataclass(frozen=True)
class Entry:
    """A trial in the file. result: of its subject, unchecked."""

    subject: Annotated[str, Length(64)]
    key: Key
    result: Any
    disturbed: Annotated[float, Between(0, 1e6)] = 0.0
    failures: Annotated[int, Between(0, FAILURES)] = 0
    problem: Annotated[str, Length(_PROBLEM)] = ""


def read_trials(path: Path, subject: TrialSubject[R]) -> Iterator[tuple[Entry, R]]:
    """The valid trials of a subject in a file, with their results, the newest first."""
    for _, entry in _entries(path):
        if entry.subject == subject.name:
            with suppress(ModelError):
                yield entry, checked(subject.result, entry.result, str(path))


def _entries(path: Path) -> list[tuple[dict[str, Any], Entry]]:
    """Pairs (as it was written, checked) of each entry of a file; none if it is not a file of that kind."""
    try:
        entries = of_kind(parse_json(read_limited(path, LIMIT), str(path)), KIND, FORMAT, str(path)).get(KIND)
    except PowerInferError:
        return []
    valid = []
    for raw in entries if type(entries) is list else []:
        with suppress(ModelError):
            valid.append((raw, checked(Entry, raw, str(path))))
    return valid
