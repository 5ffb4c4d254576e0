"""Progress on stderr: a bar on a terminal, occasional plain lines elsewhere, nothing for quick work."""

from __future__ import annotations

import sys
import time

FIRST_AFTER = 0.7  # seconds before anything is shown
REDRAW = 0.1  # seconds between redraws of a bar
PLAIN_LINE = 5.0  # seconds between two plain lines
LEFT_AFTER = 3.0  # seconds before the remaining time is estimated
WIDTH = 30


class Bar:
    """Call it with (label, done, total), as the loaders do. As a context manager it removes itself at the end."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._next = time.monotonic() + FIRST_AFTER
        self._label: str | None = None
        self._since = (0.0, 0)  # start time of the current label, and what was done then
        self._shown = False
        self._full = False  # the label's end is shown

    def __call__(self, label: str, done: int, total: int) -> None:
        now = time.monotonic()
        if label != self._label and self._label is not None:
            self.close()
        if label != self._label:
            self._since, self._full = (now, done), False
        self._label = label
        if self._full or (now < self._next and not (self._shown and done >= total)):
            return
        self._full = done >= total
        self._next = now + (REDRAW if self._terminal else PLAIN_LINE)
        percent = 100 * done // total if total > 0 else 0
        left = self._left(now, done, total)
        if self._terminal:
            full = WIDTH * percent // 100
            sys.stderr.write(f"\r{label} [{'#' * full}{' ' * (WIDTH - full)}] {percent:3d}%{left}\033[K")
        else:
            sys.stderr.write(f"{label}: {percent}%{left}\n")
        sys.stderr.flush()
        self._shown = True

    def _left(self, now: float, done: int, total: int) -> str:
        """The estimated remaining time, if it is long enough to show."""
        begin, first = self._since
        if done <= first or done >= total or now - begin < LEFT_AFTER:
            return ""
        seconds = round((total - done) * (now - begin) / (done - first))
        hours, minutes = divmod(seconds // 60, 60)
        return f", {hours}:{minutes:02d}:{seconds % 60:02d} left" if hours else f", {minutes}:{seconds % 60:02d} left"

    def close(self) -> None:
        """Remove the bar; plain lines stay."""
        if self._shown and self._terminal:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()
        self._shown = False

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
