"""Progress on stderr: a bar on a terminal, plain lines now and then elsewhere, nothing for what is done at once."""

from __future__ import annotations

import sys
import time
from types import TracebackType

FIRST_AFTER = 0.7  # seconds of silence; quick work shows nothing at all
REDRAW = 0.1  # seconds between two states of a bar
PLAIN_LINE = 5.0  # seconds between two plain lines
WIDTH = 30


class Bar:
    """Call it with (label, done, total), as the loaders do. As a context manager it leaves a clean line behind."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._next = time.monotonic() + FIRST_AFTER
        self._label: str | None = None
        self._shown = False

    def __call__(self, label: str, done: int, total: int) -> None:
        now = time.monotonic()
        if label != self._label and self._label is not None:
            self.close()
        self._label = label
        if now < self._next and not (self._shown and done >= total):
            return
        self._next = now + (REDRAW if self._terminal else PLAIN_LINE)
        percent = 100 * done // total if total > 0 else 0
        if self._terminal:
            full = WIDTH * percent // 100
            sys.stderr.write(f"\r{label} [{'#' * full}{' ' * (WIDTH - full)}] {percent:3d}%\033[K")
        else:
            sys.stderr.write(f"{label}: {percent}%\n")
        sys.stderr.flush()
        self._shown = True

    def close(self) -> None:
        """Remove the bar; plain lines stay."""
        if self._shown and self._terminal:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()
        self._shown = False

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
