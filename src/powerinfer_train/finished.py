"""The record of a finished training, `finished.json` beside the model: what was asked for and what came out of it, so
that the same command has nothing left to do."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from powerinfer.config import SparsifyConfig
from powerinfer.errors import ModelError
from powerinfer.formats.checkpoint import Checkpoint
from powerinfer.formats.json_file import checked, read_json
from powerinfer.formats.prepared import write_small
from powerinfer.prepare.corpus import Corpus

RECORD = "finished.json"
STATE = "training.safetensors"

_FREE = ("save", "device")
"""Options that say nothing of what is made."""

_NUMBERS = ("perplexity_before", "perplexity", "ratio", "zeros", "tokens", "seconds")
"""Figures that the command says."""


@dataclass(frozen=True)
class Finished:
    """asked: what was asked for; files: everything written, by name, in bytes; path: of the model, in the folder;
    figures: JSON."""

    asked: dict[str, Any]
    files: dict[str, int]
    path: str
    figures: dict[str, Any]


def asked_for(
    checkpoint: Checkpoint, corpora: Sequence[Corpus], config: SparsifyConfig, start: Checkpoint | None
) -> dict[str, Any]:
    """Result that a training is asked for, as JSON. Texts are known by path, size and time of change, not read."""
    return {
        "options": {name: value for name, value in asdict(config).items() if name not in _FREE},
        "model": checkpoint.fingerprint,
        "start": None if start is None else start.fingerprint,
        "texts": [_stamp(path) for corpus in corpora for path in corpus.paths],
    }


def read_finished(out: Path, asked: Mapping[str, Any]) -> Finished | None:
    """The record in a folder, if it is of what is asked for and every file is there as long as it was."""
    with suppress(ModelError, OSError):
        record = checked(Finished, read_json(out / RECORD)[0], str(out / RECORD))
        for name in _NUMBERS:
            checked(float, record.figures.get(name), name)
        if record.asked == asked and record.files.items() <= _sizes(out).items():
            return record
    return None


def write_finished(out: Path, asked: dict[str, Any], path: Path, figures: dict[str, Any]) -> None:
    """Write the record when all files are written. OSError or PowerInferError as of `write_small`."""
    record = Finished(asked, _sizes(out), str(path.relative_to(out)), figures)
    write_small(out / RECORD, json.dumps(asdict(record), indent=2).encode() + b"\n")


def _sizes(out: Path) -> dict[str, int]:
    files = (one for one in out.iterdir() if one.is_file() and one.name not in (RECORD, STATE))
    return {one.name: one.stat().st_size for one in files}


def _stamp(path: Path) -> list[str | int]:
    with suppress(OSError):
        stat = path.stat()
        return [str(path.resolve()), stat.st_size, stat.st_mtime_ns]
    return [str(path)]  # whoever reads it will say why it cannot be
