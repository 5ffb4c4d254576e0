"""Measuring this machine as a `Hardware`: its CPU and GPU with the engine's own operators, its disk by reading from it.

Results are saved in the user's cache folder, one file for each CPU, instruction set and number of threads, and reused
as long as nothing they depend on changes. A GPU is measured on request, by a name for `choose_device`, and saved in a
separate file, together with its CPU.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeGuard

from powerinfer import __version__
from powerinfer.config import EngineConfig
from powerinfer.devices.wanted import gpu_names
from powerinfer.errors import PowerInferError
from powerinfer.hardware.cpu_rates import FULL, Effort, cpu_rates
from powerinfer.hardware.description import (
    ALL_TYPES,
    OTHER,
    RATED_ROWS,
    SIZES_ALONE,
    Device,
    Hardware,
    RatedTypes,
    read,
    save,
    unmeasured,
)
from powerinfer.hardware.disk_rates import disk_rates
from powerinfer.hub import cache_folder
from powerinfer.kernels import cpu
from powerinfer.progress import Progress, Say, silent
from powerinfer.system import Disturbance, available_memory, cpu_name, quiet, total_memory

METHOD = 4
"""Incremented when the measuring changes so much that saved figures must not be reused."""

GPU_METHOD = 3
"""The same for GPUs."""

MEMORY = "memory_gib"
"""The one part of a key that no rate depends on."""

DISTURBED = (
    "other programs took {:.1f} cores while this machine was measured: the figures may be too low, and are measured "
    "again when it is quiet"
)
SOURCE = "measured with the engine's operators, on random weights larger than the caches"


def measured(
    engine: EngineConfig | None = None,
    progress: Progress = silent,
    say: Say = silent,
    gpu: str | None = None,
    check: Callable[[Hardware], object] = silent,
    types: RatedTypes = ALL_TYPES,
) -> Hardware:
    """Describe this machine: by the saved result, otherwise it is measured and saved. Depends on `threads` and `isa` of
    engine.

    gpu: its name, or those of several GPUs (`wanted_gpu`), None: without; beside one automatic threads are fewer
    (`cpu.beside_gpu`). check: called with `memories` before anything is measured, and may raise. types: whose rates on
    the GPU are read.
    PowerInferError if the GPU cannot be used.
    """
    engine = engine or EngineConfig()
    hardware = saved_hardware(engine, gpu, types)
    if hardware is None:
        check(memories(engine, gpu))
        hardware = measure_and_keep(engine, progress, say, gpu=gpu, types=types)
    return hardware


def memories(engine: EngineConfig, gpu: str | None = None) -> Hardware:
    """Describe this machine's memories, for what depends on bytes alone; all of its rates are 1.

    What the GPU's driver and libraries take of either memory is not known before it is measured, and counts as nothing.
    """
    if _are_several(gpu):
        return _with_cards(memories(engine, name) for name in gpu_names(gpu))
    rates, rows = {OTHER: 1.0}, dict.fromkeys(RATED_ROWS, 1.0)
    blank = replace(unmeasured("", *_memory_now()), dense_gb_s=rates, head_gb_s=rates, bundle_gb_s=rows, row_ns=rows)
    device = None
    if gpu is not None:
        from powerinfer.hardware.gpu_rates import free_memory, gpu_name

        free = free_memory(gpu) or blank.memory_bytes
        device = replace(blank, name=gpu_name(gpu), memory_bytes=free, reserved_bytes=0)
    return Hardware("this machine", SOURCE, blank, device, copy_gb_s=1.0, key=machine_key(engine, gpu))


def gpu_beside(engine: EngineConfig, say: Say) -> str | None:
    """The name of the GPU that an engine with these options would use, for `measured`; None for none.

    If a GPU cannot be used: PowerInferError if it was requested, otherwise a message and None.
    """
    from powerinfer.devices.wanted import UNUSED_VRAM, wanted_gpu
    from powerinfer.hardware.usable_gpus import check_gpus

    name, reason = wanted_gpu(engine)
    if name is None and engine.vram:
        say(UNUSED_VRAM.format(reason))
    if name is not None:
        try:
            check_gpus(gpu_names(name))
        except PowerInferError as error:
            if engine.gpu != "auto":
                raise
            say(f"the GPU is not used: {error}")
            return None
    return name


def saved_hardware(engine: EngineConfig, gpu: str | None = None, types: RatedTypes = ALL_TYPES) -> Hardware | None:
    """The saved result for this machine; None if there is none, or it is outdated or lacks one of these types.

    None, too, if other programs disturbed the measuring and the machine is quiet now.

    The free memory of a GPU is queried again: other programs may use some. So is the machine's where it has another
    size now, as that of a virtual machine may grow with use: no rate depends on it.
    """
    if _are_several(gpu):
        saved = [saved_hardware(engine, name, types) for name in gpu_names(gpu)]
        return None if None in saved else _with_cards(one for one in saved if one is not None)
    hardware = _saved(engine, gpu)
    if hardware is None or gpu is None:
        return hardware
    assert hardware.gpu is not None
    if hardware.gpu.lacks(types) != SIZES_ALONE or (types != SIZES_ALONE and not hardware.cpu.dense_gb_s):
        return None
    return hardware


def _saved(engine: EngineConfig, gpu: str | None) -> Hardware | None:
    """`saved_hardware`, with the types that it has."""
    key = machine_key(engine, gpu)
    hardware = _read(kept_at(key))
    if hardware is None or _sizeless(hardware.key) != _sizeless(key) or (hardware.disturbed and quiet()):
        return None
    if hardware.key != key:
        memory, used = _memory_now()
        hardware = replace(hardware, cpu=replace(hardware.cpu, memory_bytes=memory, reserved_bytes=used), key=key)
    if gpu is None:
        return hardware
    if hardware.gpu is None:
        return None
    from powerinfer.hardware.gpu_rates import with_free_memory

    return replace(hardware, gpu=with_free_memory(hardware.gpu, gpu))


def _read(path: Path) -> Hardware | None:
    try:
        return read(path) if path.is_file() else None
    except (PowerInferError, OSError):
        return None


def measure_and_keep(
    engine: EngineConfig,
    progress: Progress = silent,
    say: Say = silent,
    effort: Effort = FULL,
    gpu: str | None = None,
    again: bool = False,
    types: RatedTypes = ALL_TYPES,
) -> Hardware:
    """Measure and save; with a GPU the rates that are saved are taken over, unless `again`.

    If the result cannot be saved, `say` is called with the reason.
    """
    if _are_several(gpu):
        names = gpu_names(gpu)
        return _with_cards(measure_and_keep(engine, progress, say, effort, name, again, types) for name in names)
    engine = cpu.beside_gpu(engine, gpu)
    hardware = None if gpu is None or again else saved_hardware(engine)
    if hardware is None and (gpu is None or types != SIZES_ALONE):
        hardware = measure(engine, progress, effort)
        _keep(hardware, say)
    if gpu is not None:
        hardware = _with_gpu(hardware, None if again else _saved(engine, gpu), engine, gpu, types, progress)
        _keep(hardware, say)
    assert hardware is not None
    if hardware.disturbed:
        say(DISTURBED.format(hardware.disturbed))
    return hardware


def _are_several(gpu: str | None) -> TypeGuard[str]:
    return gpu is not None and len(gpu_names(gpu)) > 1


def _with_cards(machines: Iterable[Hardware]) -> Hardware:
    """One machine, described with each of its GPUs, with all of them."""
    first, *further = machines
    return first.with_cards(further)


def _keep(hardware: Hardware, say: Say) -> None:
    """Save what was measured, with the rates that another process has saved meanwhile."""
    path = kept_at(hardware.key)
    try:
        with _locked(path.parent):
            save(joined(hardware, _read(path)), path)
    except (PowerInferError, OSError) as error:
        say(f"the result cannot be saved: {error}")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder for this process; others wait. The lock ends with the process."""
    folder.mkdir(parents=True, exist_ok=True)
    fd = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def joined(hardware: Hardware, saved: Hardware | None) -> Hardware:
    """A machine, and the rates on its GPU that only `saved` has, if it was measured as undisturbed."""
    if hardware.gpu is None or saved is None or saved.gpu is None:
        return hardware
    if _sizeless(saved.key) != _sizeless(hardware.key):
        return hardware
    if saved.disturbed > hardware.disturbed:
        return hardware
    return replace(hardware, gpu=hardware.gpu.joined(saved.gpu)) if hardware.gpu.dense_gb_s else saved


def _with_gpu(
    alone: Hardware | None,
    saved: Hardware | None,
    engine: EngineConfig,
    gpu: str,
    types: RatedTypes,
    progress: Progress,
) -> Hardware:
    """A machine with its GPU. alone: the CPU, None: its rates are not read; saved: what is known of both."""
    from powerinfer.hardware.gpu_rates import GpuRates, gpu_rates, host_bytes

    alone = alone or saved or Hardware("this machine", SOURCE, unmeasured(cpu_name() or "CPU", *_memory_now()))
    before = None
    if saved is not None and saved.gpu is not None:
        before, types = GpuRates(saved.gpu, saved.sync_us, saved.copy_gb_s), saved.gpu.lacks(types)
    with Disturbance() as disturbance:
        rates = gpu_rates(gpu, types, before, progress=progress)
    return replace(
        alone,
        disturbed=max(alone.disturbed, _disturbed(disturbance) if types != SIZES_ALONE else 0.0),
        gpu=rates.device,
        sync_us=rates.sync_us,
        copy_gb_s=rates.copy_gb_s,
        host_bytes=host_bytes(gpu) if saved is None else saved.host_bytes,
        key=machine_key(engine, gpu),
    )


def _disturbed(disturbance: Disturbance) -> float:
    return round(disturbance.cores, 3) if disturbance.disturbed else 0.0


def machine_key(engine: EngineConfig, gpu: str | None = None) -> dict[str, str]:
    """Everything that the figures depend on, and how large the memory is."""
    facts: dict[str, object] = {
        "method": METHOD,
        "version": __version__,
        "build": cpu.build(),
        "cpu": cpu_name(),
        "isa": cpu.choose_isa(engine.isa)[0],
        "threads": cpu.choose_threads(cpu.beside_gpu(engine, gpu).threads)[0],
        MEMORY: round(total_memory() / 2**30),
    }
    if gpu is not None:
        from powerinfer.hardware.gpu_rates import software

        facts |= {"gpu": gpu, "gpu_method": GPU_METHOD} | software(gpu)
    return {name: str(value) for name, value in facts.items()}


def _sizeless(key: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in key.items() if name != MEMORY}


def _memory_now() -> tuple[int, int]:
    """Bytes of the machine's memory, and of it in use."""
    memory, free = total_memory(), available_memory()
    return memory, max(0, memory - free) if free else 0


def kept_at(key: Mapping[str, str]) -> Path:
    """The file of a machine with this key; keys that differ only in the engine share one."""
    name = "\n".join(key[part] for part in ("cpu", "isa", "threads", "gpu") if part in key)
    return cache_folder() / f"hardware-{hashlib.sha256(name.encode()).hexdigest()[:12]}.json"


def measure(engine: EngineConfig, progress: Progress = silent, effort: Effort = FULL) -> Hardware:
    """Measure this machine without a GPU; about five seconds. PowerInferError if too little memory is free."""
    key = machine_key(engine)
    memory, used = _memory_now()
    with Disturbance() as disturbance:
        rates = cpu_rates(engine, effort, progress)
    name, threads = cpu_name() or "CPU", int(key["threads"])
    device = Device(name=name, memory_bytes=memory, reserved_bytes=used, threads=threads, **rates)
    disk = disk_rates(cache_folder(), effort.disk_bytes, effort.disk_seconds, progress)
    return Hardware("this machine", SOURCE, device, disk=disk, key=key, disturbed=_disturbed(disturbance))
