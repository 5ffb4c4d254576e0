"""Plots by matplotlib, of the `bench` extra, whose files are the same wherever they are drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def pyplot(backend: str = "svg", font: float = 9) -> Any:
    import matplotlib

    matplotlib.use(backend)
    matplotlib.rcParams |= {"svg.hashsalt": "powerinfer", "svg.fonttype": "none", "font.size": font}
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, path: Path, **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    stamp = {".svg": "Date", ".png": "Software"}[path.suffix]
    figure.savefig(path, metadata={stamp: None}, **options)
