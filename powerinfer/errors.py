"""Errors that reach a user: one line that says what is wrong and how to mend it.

Every error the package raises on purpose derives from `PowerInferError`; the command line prints its text on one
line and exits with `exit_status`. Anything else that escapes is a defect.
"""

from __future__ import annotations


class PowerInferError(Exception):
    """The work failed."""

    exit_status = 1

    def __str__(self) -> str:
        """The message on one line; what a hostile file put into it cannot steer a terminal."""
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in super().__str__())


class RequestError(PowerInferError, ValueError):
    """The request was wrong: a flag, a parameter, a prompt longer than the context."""

    exit_status = 2


class ModelError(PowerInferError, ValueError):
    """A model file is malformed, hostile, or of a kind this engine does not run."""

    exit_status = 2


class GpuMemoryError(PowerInferError):
    """A GPU ran out of memory."""
