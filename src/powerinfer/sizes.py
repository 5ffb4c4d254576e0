"""Sizes of memory as people write them."""

from __future__ import annotations

import re
from fractions import Fraction

A_SIZE = "size (such as 8GiB, 500MB)"
"""Form that a text of a size should have."""

_UNITS = {"b": 1} | {
    f"{prefix}{end}": base**power
    for power, prefix in enumerate("kmgt", 1)
    for end, base in (("", 1024), ("ib", 1024), ("b", 1000))
}


class NoUnitError(ValueError):
    """A number other than 0 without a unit; the message has the unit that it may lack."""


def read_size(text: str) -> int:
    """Bytes: "8GiB" or "8G" (1024), "500MB" (1000), "1.5 GB", "4096B", or 0.

    NoUnitError for another number without a unit, ValueError for anything else.
    """
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{0,9})?)\s*([A-Za-z]*)\s*", text)
    if match is None or (match[2] and match[2].lower() not in _UNITS):
        raise ValueError(text)
    number, unit = Fraction(match[1]), match[2].lower()
    if not unit and number:
        likely = "GiB" if number < 256 else "MiB" if number < 1 << 20 else "B"
        raise NoUnitError(f"{match[1]} has no unit: did you mean {match[1]}{likely}?")
    return int(number * _UNITS[unit or "b"])


def read_sizes(text: str) -> int | tuple[int, ...]:
    """Bytes as of `read_size`, or of several sizes with commas between them. Raises as that does."""
    sizes = tuple(map(read_size, text.split(",")))
    return sizes if len(sizes) > 1 else sizes[0]


def exact_size(nbytes: int) -> str:
    """Bytes as `read_size` reads them, in the largest unit of which they are a multiple."""
    units = ("GiB", "GB", "MiB", "MB", "KiB", "KB")
    unit = next((one for one in units if nbytes and nbytes % _UNITS[one.lower()] == 0), "B")
    return f"{nbytes // _UNITS[unit.lower()]}{unit}" if nbytes else "0"
