"""Errors that reach a user: one line that says what is wrong and how to fix it.

Every intended error derives from `PowerInferError`; the command line prints its text on one line and exits with
`exit_status`. Any other exception is a bug.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeVar

T = TypeVar("T")


class PowerInferError(Exception):
    """The work failed."""

    exit_status = 1

    def __str__(self) -> str:
        """The message on one line, with control characters escaped: it may quote a hostile file."""
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in super().__str__())


class RequestError(PowerInferError, ValueError):
    """The request was invalid: a flag, a parameter, a prompt longer than the context."""

    exit_status = 2


class VramError(RequestError):
    """Too little VRAM is free, or may be used."""


class RamError(RequestError):
    """Too little RAM is there, or may be used. needs, more, lower: of its message the begin, what RAM there is and what
    would do, and what else helps; least: bytes that would do."""

    def __init__(self, needs: str, more: str, least: int, lower: str = "") -> None:
        super().__init__(f"{needs}, and {more}{lower}")
        self.needs, self.lower, self.least = needs, lower, least


class NoDraftsError(RequestError):
    """The model cannot have the drafts that were asked for; it would answer without."""


class QueueFullError(RequestError):
    """More than `max_queue` requests wait already."""


class RequestTimeoutError(RequestError):
    """A request had to wait, or took, longer than it was allowed to."""


class ModelError(PowerInferError, ValueError):
    """A model file is malformed, hostile, or not supported."""

    exit_status = 2


class ChangedError(ModelError):
    """A file of a loaded model is no longer what it was: the model must be loaded again."""


class GpuMemoryError(PowerInferError):
    """A GPU ran out of memory. lacking: bytes, 0: not known."""

    def __init__(self, message: str, lacking: int = 0) -> None:
        super().__init__(message)
        self.lacking = lacking


class EngineError(PowerInferError):
    """An internal error ended the engine of a loaded model, which must be loaded again."""


def demand(outcome: T | PowerInferError) -> T:
    """The value of an outcome that may be an error, which is raised then. A caller that has another way looks at the
    error instead."""
    if isinstance(outcome, PowerInferError):
        raise outcome
    return outcome


CLOSED = "the model was closed"


def install_extra(extra: str) -> str:
    """Command that installs an extra of this package."""
    return f"pip install '.[{extra}]' in a clone of powerinfer"


def single_line(message: object) -> str:
    """An error or a message on one line, of at most 200 characters."""
    return " ".join(str(message).split())[:200]


def did_you_mean(word: str, names: Collection[str]) -> str:
    """The end of a message about an unknown word: the nearest known one; "" if none is near."""
    from difflib import get_close_matches

    near = get_close_matches(word, names, n=1, cutoff=0.65)
    return f"; did you mean {near[0]}?" if near else ""


def nearest_supported(name: object, names: Collection[str]) -> str:
    """The end of a message that a family is not supported: up to three that are called like it, and where all are."""
    from difflib import get_close_matches

    near = sorted(get_close_matches(name[:100], names, n=3, cutoff=0.65)) if isinstance(name, str) else []
    are = f" ({', '.join(near)} {'are' if len(near) > 1 else 'is'})" if near else ""
    return f"is not supported{are}: docs/what-runs.md lists what is"
