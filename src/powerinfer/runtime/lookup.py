"""Drafts by prompt lookup: what followed the last tokens where they occurred before, in the prompt or in the answer.

Of all earlier places that end with the same tokens the longest match counts, of equal ones the latest. It needs no
weights, and pays where answers repeat what they were given: code that is edited, quotations, tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from powerinfer.runtime.request import AnswerRequest, Request
from powerinfer.runtime.speculation import MOST, Outlook

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SHORTEST, _LONGEST = 2, 32  # tokens of a match
_NEWEST = 256  # matches of which the longest is found: a text that repeats itself has one at each place
_KINDS = ((16, "16 or more", 0.85), (8, "8 to 15", 0.75), (4, "4 to 7", 0.6), (0, "2 or 3", 0.35))
"""Kinds of matches: the shortest, the name, the share of drafts that is right until it was measured."""


class _Tokens:
    """The tokens of a request, in an array that grows with them."""

    def __init__(self) -> None:
        self._tokens = np.empty(0, np.int32)
        self._n = 0
        self.follows = 0  # index behind the match that was found last

    def update(self, tokens: Sequence[int]) -> NDArray[np.int32]:
        """The array, with what was added since."""
        if len(tokens) > len(self._tokens):
            self._tokens = np.concatenate([self._tokens[: self._n], np.empty(len(tokens) + 256, np.int32)])
        self._tokens[self._n : len(tokens)] = tokens[self._n :]
        self._n = len(tokens)
        return self._tokens[: self._n]


class LookupDrafts:
    """Source of drafts that looks them up in a request's own tokens."""

    name = "lookup"

    def __init__(self) -> None:
        self._texts: dict[AnswerRequest, _Tokens] = {}

    def outlook(self, request: AnswerRequest) -> Outlook:
        text = self._texts.setdefault(request, _Tokens())
        tokens = text.update(request.tokens)
        length, text.follows = longest_match(tokens)
        if not length:
            return Outlook(0, "none", 0.0)
        _, kind, likely = next(one for one in _KINDS if length >= one[0])
        return Outlook(MOST, kind, likely)

    def prepare(self, requests: Sequence[AnswerRequest]) -> int:
        return 0

    def draft(self, wanted: Sequence[tuple[AnswerRequest, int]]) -> list[list[int]]:
        drafts = []
        for request, count in wanted:
            follows = self._texts[request].follows
            # what a match near the end is followed by goes on with itself
            period = request.tokens[follows:]
            drafts.append([period[place % len(period)] for place in range(count)])
        return drafts

    def observe(self, requests: Sequence[tuple[Request, int, int]]) -> None:
        pass

    def forget(self, request: AnswerRequest) -> None:
        self._texts.pop(request, None)

    def close(self) -> None:
        self._texts.clear()


def longest_match(tokens: NDArray[np.int32]) -> tuple[int, int]:
    """(length, end) of the longest part of the tokens, up to 32 of them, that is equal to their end and lies before it;
    of equal ones the last. Of the parts of two tokens the newest 256 are tried. (0, 0): there are none."""
    n = len(tokens)
    if n <= _SHORTEST:
        return 0, 0
    ends = np.flatnonzero(tokens[: n - 1] == tokens[n - 1])  # of matches, the last token of each
    length = 1
    while length < min(_LONGEST, n) and len(ends):
        ends_ = ends[ends >= length]
        longer = ends_[tokens[ends_ - length] == tokens[n - 1 - length]]
        if not len(longer):
            break
        ends, length = longer[-_NEWEST:], length + 1
    return (length, int(ends[-1]) + 1) if length >= _SHORTEST and len(ends) else (0, 0)
