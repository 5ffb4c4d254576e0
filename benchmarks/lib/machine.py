"""What a result must say about where it comes from, and how quiet the machine was while it was taken."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from powerinfer.system import Disturbance

ROOT = Path(__file__).resolve().parents[2]


def first_line(*command: str) -> str:
    """The first line that a command prints, or "" where the command is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().split("\n")[0] if done.returncode == 0 else ""


def commit() -> str:
    """The commit of the working tree, with "+changes" when tracked files of the package differ from it."""
    noted = ROOT / "COMMIT"  # of a copy of the source (hybrid/carry.py)
    if noted.exists():
        return noted.read_text().strip()
    name = first_line("git", "rev-parse", "--short=12", "HEAD")
    changed = first_line("git", "status", "--porcelain", "--untracked-files=no", "--", "src", "CMakeLists.txt")
    return name + ("+changes" if changed else "")


def cpu_fields() -> dict[str, str]:
    """The first processor's lines of /proc/cpuinfo; empty where there is no such file."""
    path = Path("/proc/cpuinfo")
    text = path.read_text(errors="replace").split("\n\n")[0] if path.exists() else ""
    pairs = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def cpu() -> dict[str, Any]:
    """Name of the processor, usable cores, and the vector units that matter here."""
    fields = cpu_fields()
    units = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_int8", "amx_bf16")
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    return {
        "name": fields.get("model name", platform.processor() or platform.machine()),
        "family": fields.get("cpu family", ""),
        "model": fields.get("model", ""),
        "cores": len(os.sched_getaffinity(0)),
        "units": [unit for unit in units if unit in flags],
    }


def without_folders(part: str) -> str:
    """A part of a command line with its paths cut to their last two names: their location is private."""
    label, found, path = part.rpartition("=")
    return shlex.quote(label + found + "/".join(Path(path).parts[-2:])) if os.sep in path else shlex.quote(part)


def program() -> list[str]:
    """How the running script is called: as a module of benchmarks/, or as a file."""
    path = Path(sys.argv[0])
    if path.is_absolute() and path.is_relative_to(ROOT / "benchmarks"):
        return ["-m", ".".join(path.relative_to(ROOT).with_suffix("").parts)]
    return [without_folders(sys.argv[0])]


def description() -> dict[str, Any]:
    """Everything a result names: when, which commit, on what, built with what, by which command."""
    memory = Path("/proc/meminfo").read_text().splitlines()[0].split()[1]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "cpu": cpu(),
        "memory_gib": round(int(memory) / 2**20, 1),
        "kernel": platform.release(),
        "compiler": first_line(os.environ.get("CXX", "c++"), "--version"),
        "python": platform.python_version(),
        "command": " ".join(["python", *program(), *map(without_folders, sys.argv[1:])]),
    }


_BUSY = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    sum(range(1 << 16))
"""


@contextmanager
def busy(processes: int, on: int | None = None) -> Iterator[None]:
    """That many processes which each use all of a core that they get: of any, or of one (on: its number). They end with
    the context, and with the caller.

    A `Disturbance` around it counts them as the caller's own.
    """
    command = [sys.executable, "-c", _BUSY, str(os.getpid())]
    started = []
    try:
        for _ in range(processes):
            started.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))
            if on is not None:
                os.sched_setaffinity(started[-1].pid, [on])
        yield
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()


def wait_until_quiet(seconds: float) -> None:
    """Wait, at most `seconds`, for a half second in which others use less than a tenth of a core."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with Disturbance() as found:
            time.sleep(0.5)
        if found.cores < 0.1:
            return
