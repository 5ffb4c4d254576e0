"""The steps of a training: `log.csv`, and where matplotlib is there a picture of it, `loss.png`."""

from __future__ import annotations

import fcntl
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from powerinfer.errors import PowerInferError, RequestError
from powerinfer.formats.prepared import write_small
from powerinfer.report.plots import draw_training, need_matplotlib, png
from powerinfer_train.recipes import RecipeStage

LOG_FILE, PICTURE = "log.csv", "loss.png"

LOG = ("step", "stage", "tokens", "loss", "zeros")
"""The first line of `log.csv`."""

LONGEST = 128
"""Characters of a line that are looked at."""


class LoggedStep(NamedTuple):
    tokens: int
    loss: float
    zeros: float


class StepLog:
    """log.csv of a folder, which no other process may write meanwhile. PowerInferError if one does, or if the disk is
    full."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOG_FILE
        with self._errors():
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a+b", buffering=0)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._file.close()
                raise PowerInferError(f"another process is training in {folder}") from None

    def __enter__(self) -> StepLog:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def begin(self, step: int) -> None:
        """Go on with that step: what an earlier run wrote from there on is cut off."""
        end = at = 0
        with self._errors():
            self._file.seek(0)
            for line in self._file.read().splitlines(keepends=True):
                at += len(line)
                rows = list(log_rows([line.decode("ascii", "replace")]))
                if rows and int(rows[0][0]) >= step:
                    break
                if rows and line.endswith(b"\n"):
                    end = at
            self._file.truncate(end)
        if not end:
            self._write(",".join(LOG))

    def add(self, step: int, stage: str, tokens: int, loss: float, zeros: float) -> None:
        """A line."""
        self._write(f"{step},{stage},{tokens},{loss:.5f},{zeros:.4f}")

    def _write(self, line: str) -> None:
        left = memoryview(f"{line}\r\n".encode())
        with self._errors():
            while left:
                left = left[os.write(self._file.fileno(), left) :]

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise PowerInferError(f"cannot write {self._path} ({error.strerror or error})") from None


def draw_log(folder: Path, stages: Sequence[tuple[RecipeStage, int]]) -> Path | None:
    """The picture of the whole training in a folder's `log.csv`; None without matplotlib, and if it has no steps.

    stages: with their steps.
    """
    steps = read_log(folder / LOG_FILE)
    with suppress(RequestError):
        need_matplotlib()
        if len(steps) > 1:
            begins = accumulate((count for _, count in stages), initial=0)
            places = [(stage.name, min(at, len(steps))) for (stage, _), at in zip(stages, begins, strict=False)]
            tokens, loss, zeros = zip(*steps, strict=True)
            image = png(lambda figure: draw_training(figure, tokens, loss, zeros, places))
            write_small(folder / PICTURE, image)
            return folder / PICTURE
    return None


def read_log(path: Path) -> list[LoggedStep]:
    """Steps of a log; lines that are none are left out."""
    steps = []
    with path.open(newline="", encoding="ascii", errors="replace") as file:
        for _, _, tokens, loss, zeros in log_rows(file):
            with suppress(ValueError):
                step = LoggedStep(int(tokens), float(loss), float(zeros))
                if math.isfinite(step.loss + step.zeros):
                    steps.append(step)
    return steps


def log_rows(file: Iterable[str]) -> Iterator[list[str]]:
    """Lines with as many values as LOG, of which the first is a number; a log that was damaged may have others."""
    for line in file:
        row = line[:LONGEST].rstrip("\r\n").split(",")
        if len(row) == len(LOG) and row[0].isdecimal():
            yield row
