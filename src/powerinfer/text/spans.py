"""Plain-text spans of one text, carried over to another that has nearly the same special tokens.

A chat template may write a little less, or more, where the contents of messages have marks in them: it strips the white
space beside a token, or looks for one at the beginning of a content. The prompt is what it writes without marks; which
of the special tokens in it are plain text is known of the rendering with marks.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence

from powerinfer.formats.windows import find

MAX_CELLS = 1 << 18  # pairs of tokens that are compared, where the two texts differ

Span = tuple[int, int]


def carried_over(
    marked: str, spans: Sequence[Span], text: str, special: Sequence[str], in_contents: Callable[[str], bool]
) -> list[Span]:
    """The spans of `text` that are plain, given those of `marked`.

    special: the special tokens. A token of `text` that cannot be told to be one of `marked` is plain if it occurs in
    the contents at all.
    """
    present = [token for token in special if token and (token in marked or token in text)]
    if not present:
        return []
    present.sort(key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, present)))
    ends = [end for _, end in spans]
    pieces = [(match, _cut_to_match(match, spans, ends)) for match in _all(pattern, marked, len(present[0]))]
    matches = list(_all(pattern, text, len(present[0])))
    pairs = _pairs([(match[0], bool(plain)) for match, plain in pieces], [match[0] for match in matches])
    carried: list[Span] = []
    for at, match in enumerate(matches):
        if at in pairs:
            moved = match.start() - pieces[pairs[at]][0].start()
            carried += [(begin + moved, end + moved) for begin, end in pieces[pairs[at]][1]]
        elif in_contents(match[0]):
            carried.append(match.span())
    return carried


def _all(pattern: re.Pattern[str], text: str, longest: int) -> Iterator[re.Match[str]]:
    start = 0
    while match := find(pattern, text, start, longest):
        yield match
        start = match.end()


def _cut_to_match(match: re.Match[str], spans: Sequence[Span], ends: Sequence[int]) -> list[Span]:
    """The parts of spans inside a token. ends: those of the spans."""
    inside = []
    for begin, end in spans[bisect_right(ends, match.start()) :]:
        if begin >= match.end():
            break
        inside.append((max(begin, match.start()), min(end, match.end())))
    return inside


def _pairs(pieces: list[tuple[str, bool]], names_after: list[str]) -> dict[int, int]:
    """Map from `names_after` to `pieces`: as many as possible in the same order, plain ones rather than others."""
    names = [name for name, _ in pieces]
    if names == names_after:
        return {at: at for at in range(len(names_after))}
    head = tail = 0
    if len(names) * len(names_after) > MAX_CELLS:
        shorter = min(len(names), len(names_after))
        head = next((at for at in range(shorter) if names[at] != names_after[at]), shorter)
        tail = next((at for at in range(shorter - head) if names[-1 - at] != names_after[-1 - at]), shorter - head)
    pairs = {at: at for at in range(head)}
    pairs |= {len(names_after) - 1 - at: len(names) - 1 - at for at in range(tail)}
    rows, columns = range(head, len(names) - tail), range(head, len(names_after) - tail)
    if len(rows) * len(columns) > MAX_CELLS:
        return pairs
    weight = 2 * min(len(rows), len(columns)) + 1  # one more pair is worth more than all plain ones
    best = [[0] * (len(columns) + 1) for _ in range(len(rows) + 1)]
    for row in reversed(rows):
        for column in reversed(columns):
            down, right = best[row - head + 1][column - head], best[row - head][column - head + 1]
            joined = 0
            if names[row] == names_after[column]:
                joined = best[row - head + 1][column - head + 1] + weight + pieces[row][1]
            best[row - head][column - head] = max(down, right, joined)
    row, column = head, head
    while row < rows.stop and column < columns.stop:
        place = best[row - head][column - head]
        if place == best[row - head + 1][column - head]:
            row += 1
        elif place == best[row - head][column - head + 1]:
            column += 1
        else:
            pairs[column] = row
            row, column = row + 1, column + 1
    return pairs
