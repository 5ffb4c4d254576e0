"""Patterns in long texts: Python's `re` lets no other thread run while it looks for a match."""

from __future__ import annotations

import re

WINDOW = 1 << 14  # characters, or entries of a list, that are looked at in one go


def find(pattern: re.Pattern[str], text: str, start: int, longest: int) -> re.Match[str] | None:
    """`pattern.search(text, start)`, in windows, between which other threads may run.

    longest: characters of the longest match. The pattern must not look beyond a match, and not ask for the text's end.
    """
    for at in range(start, len(text), WINDOW):
        match = pattern.search(text, at, at + WINDOW + longest)
        if match is not None and match.start() < at + WINDOW:
            return match
    return None
