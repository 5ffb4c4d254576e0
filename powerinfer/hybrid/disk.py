"""Opening the disk as a tier: how its files are read on this machine."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from powerinfer.devices.disk import DiskTier, read_files
from powerinfer.formats.bundle_memory import own_pages
from powerinfer.system import available_memory

if TYPE_CHECKING:
    from powerinfer.formats.mapped import MappedFile
    from powerinfer.hybrid.resolve import Resolved
    from powerinfer.placement.disk import DiskPlan

_TRIED = 64 << 20
"""Bytes that a trial reads each way."""

_PIECE = 4 << 20


def open_tier(resolved: Resolved, plan: DiskPlan) -> tuple[DiskTier, str]:
    """The files of a model that does not fit into RAM, and how they are read, with the reason. ModelError if they
    cannot be read."""
    checkpoint, bundles = resolved.checkpoint, resolved.selection.bundles
    files = [*checkpoint.files, *([] if bundles is None else [bundles.file])]
    places = [checkpoint.rests_at(name) for name in sorted(plan.about.matrices)]
    direct, why = _direct(resolved, plan, files)
    about = replace(plan.about, direct=direct)
    tier = DiskTier(about, files, [place for place in places if place is not None])
    if direct and not tier.reads.direct:
        why = "through the system's cache: this file system cannot do without"
    return tier, f"{tier.reads.engine}, {why}"


def _direct(resolved: Resolved, plan: DiskPlan, files: Sequence[MappedFile]) -> tuple[bool, str]:
    """Whether reads go past the system's cache, and why."""
    asked = resolved.engine.disk
    if asked != "auto":
        return asked == "direct", f"{asked}: asked for with --disk"
    size, held = sum(file.size for file in files), sum(plan.held.values())
    if held + size < available_memory():
        return False, "through the system's cache, which has room for the files beside --ram"
    rates = {direct: _rate(files, direct) for direct in (True, False)}
    better = rates[True] >= rates[False]
    shown = f"{rates[better] / 1e9:.2f} GB/s, {rates[not better] / 1e9:.2f} the other way"
    return better, f"{'past' if better else 'through'} the system's cache ({shown})"


def _rate(files: Iterable[MappedFile], direct: bool) -> float:
    """Bytes a second of reading parts of the largest file that the system's cache does not have, two at a time."""
    largest = max(files, key=lambda file: file.size)
    reads = read_files([largest], direct)
    memory = own_pages(2 * _PIECE)
    pieces = range(0, min(largest.size, _TRIED) // _PIECE * _PIECE, _PIECE)
    if not direct:
        largest.forget()
    start = time.perf_counter()
    waiting: list[int] = []
    for number, offset in enumerate(pieces):
        if len(waiting) == 2:
            reads.wait(waiting.pop(0))
        waiting.append(reads.begin([(0, offset, _PIECE, number % 2 * _PIECE)], memory))
    for ticket in waiting:
        reads.wait(ticket)
    return len(pieces) * _PIECE / max(time.perf_counter() - start, 1e-6)
