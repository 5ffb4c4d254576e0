"""Trial results, saved in trial.json: the model then decodes the same ways, with the same bits, on every start.

    {"format": 1, "kind": "trials", "trials":
     [{"key": {...}, "disturbed": 0.0, "layers": [{"ways": {...}, "seconds": {...}}, ...]}, ...]}

disturbed: cores that others took during the trial, 0 if it was not disturbed. Such a result is used until the machine
is quiet at a later start, which then repeats the trial.

The newest trial comes first. A key holds everything that a result depends on, as text. The file is only a cache: one
that is damaged, foreign or too large counts as empty, and is replaced by the next measurement.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

from powerinfer import __version__
from powerinfer.config import EngineConfig
from powerinfer.errors import ModelError, PowerInferError
from powerinfer.formats.checkpoint import Checkpoint
from powerinfer.formats.json_file import Between, Length, checked, of_kind, parse_json, read_limited
from powerinfer.formats.prepared import prepared_folder, write_small
from powerinfer.kernels import cpu
from powerinfer.sparsity.selection import Selection
from powerinfer.sparsity.trial import Verdict
from powerinfer.system import cpu_name, quiet

FORMAT = 1
MAX_TRIALS = 16  # trials kept
LIMIT = 1 << 20  # bytes of the file
KIND = "trials"

Key = dict[str, str]


class _Keyed(Protocol):
    @property
    def key(self) -> Key: ...


T = TypeVar("T", bound=_Keyed)


@dataclass(frozen=True)
class _Trial:
    key: Key
    layers: Annotated[list[Verdict], Length(1 << 16)]
    disturbed: Annotated[float, Between(0, 1e6)] = 0.0


def trial_key(checkpoint: Checkpoint, engine: EngineConfig, selection: Selection, sizes: Sequence[int]) -> Key:
    """Everything that a result depends on. sizes: batch sizes."""
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
        """The saved results for this key, if they fit these ways and this number of layers; otherwise None.

        None, too, if the trial was disturbed and the machine is quiet now.
        """
        kept = find_entry(self.path, KIND, _Trial, self._key)
        if kept is None or len(kept.layers) != layers or not all(self._suits(verdict, ways) for verdict in kept.layers):
            return None
        if kept.disturbed and quiet():
            return None
        return [replace(verdict, earlier=True) for verdict in kept.layers]

    def _suits(self, verdict: Verdict, ways: Sequence[str]) -> bool:
        every = {"dense", *ways}
        sizes = self._key["sizes"].split()
        return list(verdict.ways) == sizes and every.issuperset(verdict.ways.values()) and every == {*verdict.seconds}

    def keep(self, verdicts: Sequence[Verdict], disturbed: float = 0.0) -> str | None:
        """Save results, replacing those with the same key. Returns why that failed, or None.

        disturbed: cores that others took during the trial, 0 if it was not disturbed.
        """
        layers = [{"ways": one.ways, "seconds": one.seconds} for one in verdicts]
        return keep_entry(self.path, KIND, _Trial, self._key, {"disturbed": disturbed, "layers": layers})


@dataclass(frozen=True)
class MeasuredFfns:
    """What a trial measured: seconds of each layer's FFN for one token, by way. ways: how each decodes one token;
    disturbed: cores that others took meanwhile, 0 if they were few."""

    selector: str
    cpu: str
    threads: str
    ways: list[str]
    seconds: list[dict[str, float]]
    disturbed: float = 0.0


def newest_trial(checkpoint: Checkpoint, prepared: str | None) -> MeasuredFfns | None:
    """The newest saved trial of a model, of one token; None without one."""
    path = prepared_folder(checkpoint.path, prepared) / "trial.json"
    wanted = {"model": checkpoint.fingerprint, "quantize": str(checkpoint.quantize)}
    for _, one in _read(path, KIND, _Trial):
        measured = all("dense" in layer.seconds and "1" in layer.ways for layer in one.layers)
        if wanted.items() <= one.key.items() and measured and len(one.layers) == checkpoint.config.n_layers:
            key = {name: one.key.get(name, "") for name in ("selector", "cpu", "threads")}
            seconds: list[dict[str, float]] = [dict(layer.seconds) for layer in one.layers]  # type: ignore[arg-type]
            ways: list[str] = [layer.ways["1"] for layer in one.layers]
            return MeasuredFfns(**key, ways=ways, seconds=seconds, disturbed=one.disturbed)
    return None


# ---------------------------------------------------------------- files of entries by key


def find_entry(path: Path, kind: str, schema: type[T], key: Key) -> T | None:
    """The entry with this key in a file of that kind; None without one."""
    return next((entry for _, entry in _read(path, kind, schema) if entry.key == key), None)


def keep_entry(path: Path, kind: str, schema: type[T], key: Key, result: Mapping[str, Any] | None) -> str | None:
    """Write a result first, replacing one with the same key; older ones stay, up to `MAX_TRIALS` and as `LIMIT` allows.
    None: there is none with this key any more.

    Returns why that failed, or None.
    """
    others = [raw for raw, entry in _read(path, kind, schema) if entry.key != key]
    kept = [*([] if result is None else [{"key": key, **result}]), *others][:MAX_TRIALS]
    while len(text := json.dumps({"format": FORMAT, "kind": kind, kind: kept}).encode()) > LIMIT and kept:
        kept.pop()
    try:
        write_small(path, text)
    except OSError as error:
        return error.strerror or str(error)
    except PowerInferError as error:
        return str(error)
    return None


def _read(path: Path, kind: str, schema: type[T]) -> list[tuple[dict[str, Any], T]]:
    """(as it was written, checked) of each valid entry of a file; none if it is not a file of that kind."""
    try:
        entries = of_kind(parse_json(read_limited(path, LIMIT), str(path)), kind, FORMAT, str(path)).get(kind)
    except PowerInferError:
        return []
    found = []
    for one in entries if type(entries) is list else []:
        with suppress(ModelError):
            found.append((one, checked(schema, one, str(path))))
    return found[:MAX_TRIALS]
