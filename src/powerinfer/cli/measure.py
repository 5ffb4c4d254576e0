"""Measure how fast this machine decodes: dense products, scattered neurons, fixed costs, the disk, and its GPU.

These are the figures from which `plan` predicts the time of a token, measured with the engine's own operators on random
weights; no model is needed. It takes about five seconds and two GB of memory, with a GPU some more; other programs
should be idle meanwhile: a disturbed result is marked, and replaced when the machine is quiet. The result is saved in
the user's cache folder and reused until the engine, the CPU, the GPU or the number of threads changes, or --force is
given. The file can be used with `plan --hardware` on another machine.

JSON: path, paths (of several GPUs each has a file), measured (false: an earlier result was used), seconds, hardware
(the description, as in the file; gpu is null if there is none, cards are the GPUs behind it).
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from typing import TYPE_CHECKING

from powerinfer.cli.common import Output, config_flags, config_from
from powerinfer.config import EngineConfig

if TYPE_CHECKING:
    from powerinfer.hardware.description import Device, Hardware


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--force", action="store_true", help="measure again, even if a result is saved")
    config_flags(parser, EngineConfig, "engine", only=("threads", "isa", "gpu"))


def execute(args: argparse.Namespace, out: Output) -> int:
    from powerinfer.cli.progress import Bar
    from powerinfer.devices.wanted import gpu_names
    from powerinfer.hardware.measure import gpu_beside, kept_at, machine_key, measure_and_keep, saved_hardware

    engine = config_from(args, EngineConfig)
    begin = time.perf_counter()
    gpu = gpu_beside(engine, out.note)
    cached = None if args.force else saved_hardware(engine, gpu)
    hardware = cached
    if hardware is None:
        with Bar() as bar:
            hardware = measure_and_keep(engine, bar, out.note, gpu=gpu, again=args.force)
    paths = [str(kept_at(machine_key(engine, name))) for name in ([None] if gpu is None else gpu_names(gpu))]
    _show(hardware, out)
    if cached is not None:
        out.line(f"measured earlier ({', '.join(paths)}); --force measures again")
    out.document(
        {
            "path": paths[0],
            "paths": paths,
            "measured": cached is None,
            "seconds": time.perf_counter() - begin,
            "hardware": dataclasses.asdict(hardware),
        }
    )
    return 0


def _show(hardware: Hardware, out: Output) -> None:
    cpu = hardware.cpu
    out.line(f"{cpu.name}, {cpu.threads} threads, {hardware.key['isa']}, {cpu.memory_bytes / 1e9:.1f} GB of memory")
    _show_device(cpu, out)
    if cpu.cache_bytes:
        out.line(f"steps of up to {cpu.cache_bytes / 1e6:.0f} MB are {cpu.cache_gain:.1f} times as fast")
    for card in hardware.all_cards:
        gpu = card.device
        reserved = f", of which {gpu.reserved_bytes / 1e9:.2f} GB are the driver's" if gpu.reserved_bytes else ""
        out.line(f"{gpu.name}, {gpu.memory_bytes / 1e9:.1f} GB of usable memory{reserved}")
        _show_device(gpu, out)
        out.line(
            f"between the two: {card.copy_gb_s:.1f} GB/s; synchronisation of a layer {card.sync_us:.1f} us; "
            f"{hardware.host_bytes / 1e9:.2f} GB of RAM for libraries and driver"
        )
    disk = hardware.disk
    reads = [f"{_size(size)} {rate:.2f}" for size, rate in disk.read_gb_s.items()] if disk is not None else []
    out.line("disk, random reads: " + (", ".join(reads) + " GB/s" if reads else "could not be measured"))


def _show_device(device: Device, out: Output) -> None:
    for title, rates in (
        ("dense weights", device.dense_gb_s),
        ("output head", device.head_gb_s),
        ("rows of bundles", device.bundle_gb_s),
    ):
        out.line(f"{title}: " + ", ".join(f"{name} {rate:.1f}" for name, rate in sorted(rates.items())) + " GB/s")
    rows = ", ".join(f"{name} {ns:.0f}" for name, ns in device.row_ns.items())
    out.line(f"fixed time of a row: {rows} ns")
    out.line(
        f"an operator {device.op_us:.1f} us, {device.sparse_us:.1f} us more for a sparse FFN, a step "
        f"{device.step_us:.0f} us; keys and values {device.kv_gb_s:.1f} GB/s"
    )
    if device.pack_gb_s:
        out.line(f"weights from disk, packed as they are multiplied: {device.pack_gb_s:.1f} GB/s")


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >> 20 else f"{nbytes >> 10} KiB"
