"""Marks: the fixed texts of a dialect of calls, in an answer that comes piece by piece.

White space around and inside a mark may vary; `HOLE` in it stands for a word that a model chooses, such as an id.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T", str, bytes)

HOLE = "\x00"
MISMATCH, MORE = -1, -2
_WORD = re.compile(r'[^\s<>\[\]{}"|｜]{0,128}')
_SPACE = re.compile(r"\s*")
_PARTS = re.compile(rf"\s+|{HOLE}|[^\s{HOLE}]+")


@lru_cache(maxsize=512)
def _parts(mark: str) -> tuple[str, ...]:
    return tuple(_PARTS.findall(mark.strip()))


def follow(mark: str, text: str, words: list[str] | None = None) -> int:
    """The position behind `mark` in a text that begins with it; MISMATCH, or MORE: more of the text may decide it.

    words: gets those in the holes of the mark.
    """
    at = _space_end(text, 0)
    for part in _parts(mark):
        if part == HOLE:
            begin, at = at, _WORD.match(text, at).end()  # type: ignore[union-attr]
            if at == len(text):
                return MORE
            if words is not None:
                words.append(text[begin:at])
        elif part.isspace():
            at = _space_end(text, at)
        elif text.startswith(part, at):
            at += len(part)
        else:
            return MORE if part.startswith(text[at:]) else MISMATCH
    return at


def follow_any(marks: tuple[str, ...], text: str) -> int:
    """`follow` for the first mark that the text begins with."""
    ends = [follow(mark, text) for mark in marks]
    return next((at for at in ends if at >= 0), MORE if MORE in ends else MISMATCH)


def _space_end(text: str, at: int) -> int:
    return _SPACE.match(text, at).end()  # type: ignore[union-attr]


def overlap(text: T, mark: T) -> int:
    """Length of the longest end of `text` that `mark` begins with, and is longer than."""
    longest = min(len(text), len(mark) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(mark[:length])), 0)
