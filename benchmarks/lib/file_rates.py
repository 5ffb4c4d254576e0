"""How fast a disk gives a file's bytes, past the page cache, by the engine's own reads (`_native.Reads`)."""

from __future__ import annotations

import random
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from powerinfer._native import Reads

SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
"""Bytes of the random reads."""
_AHEAD = 32 << 20  # bytes under way together
_TICKETS = 4  # that they are waited for in


def file_rates(path: Path, seconds: float) -> dict[str, Any]:
    """GB/s of reading a file in its order, and of random reads by their size, for `seconds` each: {"engine", "direct",
    "sequential_gb_s", "random_gb_s": {"4096": ...}}.

    ValueError for a file of less than 32 MiB; ReadError if it cannot be read.
    """
    nbytes = path.stat().st_size
    if nbytes < _AHEAD:
        raise ValueError(f"{path.name} has only {nbytes} bytes")
    reads = Reads([(str(path), nbytes)], True)
    result: dict[str, Any] = {"engine": reads.engine, "direct": reads.direct}
    result["sequential_gb_s"] = _rate(reads, nbytes, SIZES[-1], seconds, in_order=True)
    result["random_gb_s"] = {str(each): _rate(reads, nbytes, each, seconds) for each in SIZES}
    return result


def _rate(reads: Reads, nbytes: int, each: int, seconds: float, in_order: bool = False) -> float:
    """GB/s of reads of `each` bytes, no place twice."""
    places = list(range(0, nbytes - each + 1, each))
    if not in_order:
        random.Random(each).shuffle(places)
    together = max(2, min(64, _AHEAD // each // _TICKETS))  # of one ticket
    memory = np.empty(_TICKETS * together * each + Reads.ALIGN, np.uint8)
    start = -memory.ctypes.data % Reads.ALIGN
    under_way: deque[tuple[int, int]] = deque()  # (ticket, bytes)
    done = number = 0
    begin = time.perf_counter()
    while True:
        batch = places[number * together : (number + 1) * together]
        if batch and time.perf_counter() - begin < seconds:
            first = start + number % _TICKETS * together * each
            wanted = [(0, place, each, first + i * each) for i, place in enumerate(batch)]
            under_way.append((reads.begin(wanted, memory), len(batch) * each))
            number += 1
        elif not under_way:
            break
        if len(under_way) == _TICKETS or not batch or time.perf_counter() - begin >= seconds:
            ticket, count = under_way.popleft()
            reads.wait(ticket)
            done += count
    return done / (time.perf_counter() - begin) / 1e9
