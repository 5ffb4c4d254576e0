"""Opening the disk as a tier: how its files are read on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from powerinfer.devices.disk import DiskTier, OnDisk, Reads, read_files
from powerinfer.hybrid.disk_hints import disk_helps, disk_speed
from powerinfer.progress import Say
from powerinfer.system import available_memory

if TYPE_CHECKING:
    from powerinfer.formats.expert_rows import ExpertRows
    from powerinfer.formats.mapped import MappedFile
    from powerinfer.hybrid.resolved import Resolved
    from powerinfer.placement.disk import DiskPlan
    from powerinfer.placement.experts import Frequencies


def open_tier(resolved: Resolved, say: Say) -> DiskTier | None:
    """The part of a model that stays on disk, its files open; None: there is none. say: told what is read. ModelError
    if the files cannot be read."""
    plan = resolved.placement.disk
    if plan is None:
        return None
    files = _files(resolved)
    places = [resolved.checkpoint.rests_at(name) for name in sorted(plan.about.matrices)]
    direct, reason = _direct(resolved, plan, files)
    on_disk, reads = _opened(resolved, plan.about, files, direct)
    if direct and not reads.direct:
        reason = "through the system's cache: this file system cannot do without"
    speed, helps = disk_speed(resolved) if reads.direct else "", disk_helps(resolved)
    say(f"not all of the model fits into RAM: it reads {plan.why}{speed}{helps}")
    on_disk = replace(on_disk, why=f"{plan.why}{speed}; {reads.engine}, {reason}{helps}")
    return DiskTier(on_disk, files, [place for place in places if place is not None], reads, _rows(resolved))


def first_layers_tier(resolved: Resolved, slots: Mapping[int, int]) -> DiskTier:
    """Description of layers of which nothing but experts is on disk. slots: by layer the number of those in RAM."""
    plan, files = resolved.placement.disk, _files(resolved)
    assert plan is not None
    on_disk, reads = _opened(resolved, OnDisk(experts=slots), files, _direct(resolved, plan, files)[0])
    return DiskTier(on_disk, files, (), reads, _rows(resolved))


def _files(resolved: Resolved) -> list[MappedFile]:
    prepared = resolved.selection.bundles, resolved.selection.expert_rows
    return [*resolved.checkpoint.files, *(one.file for one in prepared if one is not None)]


def _rows(resolved: Resolved) -> Mapping[int, ExpertRows] | None:
    rows = resolved.selection.expert_rows
    return None if rows is None else rows.layers


def _opened(
    resolved: Resolved, rests: OnDisk, files: Sequence[MappedFile], direct: bool
) -> tuple[OnDisk, Reads]:
    """The disk tier: what is on disk, with the policy of its memory, and the reads of its files."""
    policy, in_rows = resolved.engine.disk_policy, resolved.selection.expert_rows is not None
    frequencies = _frequencies(resolved) if rests.experts else None
    on_disk = replace(rests, direct=direct, policy=policy, neuron_policy=policy, frequencies=frequencies)
    reads = read_files(files, direct)
    if reads.direct and (rests.neurons or in_rows) and (gap := _gap(resolved)) is not None:
        reads.gap = gap
    return on_disk, reads


def _gap(resolved: Resolved) -> int | None:
    """Bytes between two neurons up to which this machine's disk reads them at once; None: it was not measured."""
    from powerinfer.hardware.measure import saved_hardware

    hardware, selection = saved_hardware(resolved.engine), resolved.selection
    if hardware is None or hardware.disk is None:
        return None
    predicted = selection.selector == "predicted"
    if selection.expert_rows is not None:
        layouts = [one.layout for one in selection.expert_rows.layers.values()]
    else:
        layouts = [] if selection.bundles is None else [*selection.bundles.layouts]
    if not layouts:
        return None
    nbytes = max(layout.pitch - (0 if predicted else layout.gate_bytes) for layout in layouts)
    return hardware.disk.gap(nbytes + Reads.ALIGN)


def _frequencies(resolved: Resolved) -> Frequencies | None:
    """Shares of the tokens that select each expert; None: no profile says them."""
    from powerinfer.formats.expert_files import open_expert_profile
    from powerinfer.formats.prepared import EXPERTS, PreparedFile

    checkpoint, prepared = resolved.checkpoint, resolved.engine.prepared
    if not PreparedFile(EXPERTS, checkpoint, prepared).exists():
        return None
    return open_expert_profile(checkpoint, prepared).frequencies


def _direct(resolved: Resolved, plan: DiskPlan, files: Sequence[MappedFile]) -> tuple[bool, str]:
    """Whether reads go past the system's cache, and why."""
    asked = resolved.engine.disk
    if asked != "auto":
        return asked == "direct", f"{asked}: asked for with --disk"
    size, planned = sum(file.size for file in files), sum(plan.held.values())
    if planned + size < available_memory():
        return False, "through the system's cache, which has room for the files beside --ram"
    return True, "past the system's cache, which has no room for the files beside --ram and would fetch them in vain"
