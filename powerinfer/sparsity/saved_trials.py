"""Trial results, saved in trial.json: the model then decodes the same ways, with the same bits, on every start.

    {"format": 1, "kind": "trials", "trials": [{"key": {...}, "layers": [{"ways": {...}, "seconds": {...}}, ...]}, ...]}

The newest trial comes first. A key holds everything that a result depends on, as text. The file is only a cache: one
that is damaged, foreign or too large counts as empty, and is replaced by the next measurement.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from powerinfer import __version__
from powerinfer.config import EngineConfig
from powerinfer.errors import ModelError, PowerInferError
from powerinfer.formats.checkpoint import Checkpoint
from powerinfer.formats.json_file import Between, Length, checked, of_kind, parse_json, read_limited
from powerinfer.formats.prepared import prepared_folder, write_small
from powerinfer.kernels import cpu
from powerinfer.sparsity.selectors import Selector, Threshold
from powerinfer.sparsity.trial import Verdict
from powerinfer.system import cpu_name

FORMAT = 1
MAX_TRIALS = 16  # trials kept
LIMIT = 1 << 20  # bytes of the file
KIND = "trials"

Key = dict[str, str]
Way = Literal["dense", "exact", "predicted"]
T = TypeVar("T")


@dataclass(frozen=True)
class _Layer:
    ways: dict[str, Way]
    seconds: dict[Way, Annotated[float, Between(0, 1e6)]]

    @property
    def verdict(self) -> Verdict:
        return Verdict({**self.ways}, {str(way): value for way, value in self.seconds.items()})


@dataclass(frozen=True)
class _Trial:
    key: Key
    layers: Annotated[list[_Layer], Length(1 << 16)]


def trial_key(
    checkpoint: Checkpoint, engine: EngineConfig, selector: Selector, files: Sequence[Path], sizes: Sequence[int]
) -> Key:
    """Everything that a result depends on. files: the prepared files in use; sizes: batch sizes."""
    facts = {
        "version": __version__,
        "build": cpu.build(),
        "cpu": cpu_name(),
        "isa": cpu.choose_isa(engine.isa)[0],
        "threads": cpu.choose_threads(engine.threads)[0],
        "model": checkpoint.fingerprint,
        "quantize": checkpoint.quantize,
        "files": ", ".join(map(_identity, files)),
        "selector": selector.name,
        "threshold": engine.threshold,
        "thresholds": selector.layers if isinstance(selector, Threshold) else None,
        "recall_every": engine.recall_every,
        "sizes": " ".join(map(str, sizes)),
    }
    return {name: str(value) for name, value in facts.items()}


def _identity(path: Path) -> str:
    status = os.stat(path)
    return f"{path.name} {status.st_size} {status.st_mtime_ns}"


class SavedTrials:
    """The saved trials of a model, and the one with this key."""

    def __init__(self, checkpoint: Checkpoint, prepared: str | None, key: Key) -> None:
        self.path = prepared_folder(checkpoint.path, prepared) / "trial.json"
        self._key = key

    def find(self, layers: int, ways: Sequence[str]) -> list[Verdict] | None:
        """The saved results for this key, if they fit these ways and this number of layers; otherwise None."""
        for key, verdicts in _read(self.path):
            if key == self._key:
                suits = len(verdicts) == layers and all(self._suits(verdict, ways) for verdict in verdicts)
                return [replace(verdict, earlier=True) for verdict in verdicts] if suits else None
        return None

    def _suits(self, verdict: Verdict, ways: Sequence[str]) -> bool:
        every = {"dense", *ways}
        sizes = self._key["sizes"].split()
        return list(verdict.ways) == sizes and every.issuperset(verdict.ways.values()) and every == {*verdict.seconds}

    def keep(self, verdicts: Sequence[Verdict]) -> str | None:
        """Save results, replacing those with the same key. Returns why that failed, or None."""
        others = [(key, kept) for key, kept in _read(self.path) if key != self._key]
        return write_entries(self.path, KIND, [_as_json(key, kept) for key, kept in [(self._key, verdicts), *others]])


def write_entries(path: Path, kind: str, entries: Sequence[dict[str, Any]]) -> str | None:
    """Write the first `MAX_TRIALS` trials, or as many as `LIMIT` allows. Returns why that failed, or None."""
    kept = list(entries[:MAX_TRIALS])
    while len(text := _text(kind, kept)) > LIMIT and kept:
        kept.pop()
    try:
        write_small(path, text)
    except OSError as error:
        return error.strerror or str(error)
    except PowerInferError as error:
        return str(error)
    return None


def _text(kind: str, entries: list[dict[str, Any]]) -> bytes:
    return json.dumps({"format": FORMAT, "kind": kind, kind: entries}).encode()


def _as_json(key: Key, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    layers = [
        {"ways": one.ways, "seconds": {way: round(value, 9) for way, value in one.seconds.items()}} for one in verdicts
    ]
    return {"key": key, "layers": layers}


def _read(path: Path) -> list[tuple[Key, list[Verdict]]]:
    return [(one.key, [layer.verdict for layer in one.layers]) for one in read_entries(path, KIND, _Trial)[:MAX_TRIALS]]


def read_entries(path: Path, kind: str, entry: type[T]) -> list[T]:
    """The entries of a file of that kind; none where it is not as it should be, and without entries that are not."""
    if not path.is_file():  # a pipe would wait for a writer
        return []
    try:
        entries = of_kind(parse_json(read_limited(path, LIMIT), str(path)), kind, FORMAT, str(path)).get(kind)
    except PowerInferError:
        return []
    found = []
    for one in entries if type(entries) is list else []:
        with suppress(ModelError):
            found.append(checked(entry, one, str(path)))
    return found
