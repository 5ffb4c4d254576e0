"""Progress of long work while it runs, for whoever is interested; by default for nobody."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with (label, done, total) while something takes long."""

Say = Callable[[str], None]
"""Called with a line for the user."""


def silent(*_: object) -> None:
    """A `Progress` and a `Say` that report nothing."""
