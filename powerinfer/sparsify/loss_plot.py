"""The steps of a training as a picture, `loss.png` beside `log.csv`, where matplotlib is there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from powerinfer.errors import RequestError
from powerinfer.formats.prepared import write_small
from powerinfer.report.plots import draw_training, need_matplotlib, png
from powerinfer.sparsify.recipes import Stage

LOG = ("step", "stage", "tokens", "loss", "zeros")
"""The first line of `log.csv`."""

LONGEST = 128
"""Characters of a line that are looked at."""


class Step(NamedTuple):
    tokens: int
    loss: float
    zeros: float


def draw_log(folder: Path, stages: Sequence[tuple[Stage, int]]) -> Path | None:
    """The picture of the whole training in a folder's `log.csv`; None without matplotlib, and if it has no steps.

    stages: with their steps.
    """
    steps = read_log(folder / "log.csv")
    with suppress(RequestError):
        need_matplotlib()
        if len(steps) > 1:
            begins = accumulate((count for _, count in stages), initial=0)
            places = [(stage.name, min(at, len(steps))) for (stage, _), at in zip(stages, begins, strict=False)]
            tokens, loss, zeros = zip(*steps, strict=True)
            image = png(lambda figure: draw_training(figure, tokens, loss, zeros, places))
            write_small(folder / "loss.png", image)
            return folder / "loss.png"
    return None


def read_log(path: Path) -> list[Step]:
    """Its steps; lines that are none are left out."""
    steps = []
    with path.open(newline="", encoding="ascii", errors="replace") as file:
        for _, _, tokens, loss, zeros in log_rows(file):
            with suppress(ValueError):
                step = Step(int(tokens), float(loss), float(zeros))
                if math.isfinite(step.loss + step.zeros):
                    steps.append(step)
    return steps


def log_rows(file: Iterable[str]) -> Iterator[list[str]]:
    """Lines with as many values as LOG, of which the first is a number; a log that was damaged may have others."""
    for line in file:
        row = line[:LONGEST].rstrip("\r\n").split(",")
        if len(row) == len(LOG) and row[0].isdecimal():
            yield row
