"""Values as cells of tables. A value that is missing, None, is an empty cell in every format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def fixed(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def percent(share: float | None, digits: int = 1) -> str:
    return "" if share is None else f"{100 * share:.{digits}f} %"


def signed(share: float | None) -> str:
    """Per cent with its sign."""
    return "" if share is None else f"{100 * share:+.0f} %"


def middle(summary: Mapping[str, Any] | None) -> float | None:
    """The median of repeated measurements; None without any."""
    return summary["median"] if summary else None


def measured(
    engine: Mapping[str, Any] | None, rate: str, form: Callable[[float | None], str] = number, enough: int = 3
) -> str:
    """The median of an engine's rate, of `Runs.summary`; marked where fewer than `enough` runs were undisturbed."""
    if engine is None:
        return ""
    return form(middle(engine[rate])) + "*" * (engine["kept"] < enough) if rate in engine else "fails"
