"""This machine as a `Hardware`: its CPU measured through the engine's own operators, its disk by reading from it.

What was measured is kept in the user's cache folder, one file for each CPU, instruction set and number of threads, and
taken again as long as nothing has changed that it hangs on.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from powerinfer import __version__
from powerinfer.config import EngineConfig
from powerinfer.devices.cpu import available_memory
from powerinfer.errors import PowerInferError
from powerinfer.formats.checkpoint import Progress
from powerinfer.formats.hub import cache_folder
from powerinfer.kernels import cpu
from powerinfer.placement.cpu_rates import FULL, Effort, cpu_rates
from powerinfer.placement.disk_rates import disk_rates
from powerinfer.placement.hardware import Device, Hardware, read, save

Say = Callable[[str], None]

METHOD = 2
"""Goes up when the measuring changes so that earlier figures should not be taken any more."""

SOURCE = "measured through the engine's operators, on random weights larger than the caches"


def measured(engine: EngineConfig | None = None, progress: Progress | None = None, say: Say | None = None) -> Hardware:
    """This machine: what was kept of it, else it is measured, and kept. engine: its `threads` and `isa` count."""
    engine = engine or EngineConfig()
    return known(engine) or measure_and_keep(engine, progress, say)


def known(engine: EngineConfig) -> Hardware | None:
    """What was kept of this machine; None where there is nothing, or nothing that still holds."""
    key = machine_key(engine)
    path = kept_at(key)
    try:
        found = read(path) if path.is_file() else None
    except (PowerInferError, OSError):
        return None
    return found if found is not None and found.key == key else None


def measure_and_keep(
    engine: EngineConfig, progress: Progress | None = None, say: Say | None = None, effort: Effort = FULL
) -> Hardware:
    """Measure anew. Where the figures cannot be kept, `say` gets why."""
    hardware = measure(engine, progress, effort)
    try:
        save(hardware, kept_at(hardware.key))
    except PowerInferError as error:
        if say is not None:
            say(f"what was measured cannot be kept: {error}")
    return hardware


def machine_key(engine: EngineConfig) -> dict[str, str]:
    """All that the figures hang on."""
    facts = {
        "method": METHOD,
        "version": __version__,
        "build": cpu.build(),
        "cpu": cpu.model_name(),
        "isa": cpu.choose_isa(engine.isa)[0],
        "threads": cpu.choose_threads(engine.threads)[0],
        "memory_gib": round(total_memory() / 2**30),
    }
    return {name: str(value) for name, value in facts.items()}


def kept_at(key: Mapping[str, str]) -> Path:
    """The file of a machine with this key; those that differ in the engine alone share one."""
    name = "\n".join(key[part] for part in ("cpu", "isa", "threads"))
    return cache_folder() / f"hardware-{hashlib.sha256(name.encode()).hexdigest()[:12]}.json"


def measure(engine: EngineConfig, progress: Progress | None = None, effort: Effort = FULL) -> Hardware:
    """Measure this machine; about fifteen seconds. PowerInferError where there is not enough free memory.

    gpu is None: the engine runs nothing on one yet.
    """
    key = machine_key(engine)
    memory, free = total_memory(), available_memory()
    rates = cpu_rates(engine, effort, progress)
    device = Device(
        name=cpu.model_name() or "CPU",
        memory_bytes=memory,
        reserved_bytes=max(0, memory - free) if free else 0,
        threads=int(key["threads"]),
        **rates,
    )
    disk = disk_rates(cache_folder(), effort.disk_bytes, effort.disk_seconds, progress)
    return Hardware("this machine", SOURCE, device, disk=disk, key=key)


def total_memory() -> int:
    """Bytes of memory that this process may use: of the machine, or of its container."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        return min(total, int(limit)) if limit != "max" else total
    except (OSError, ValueError):
        return total
