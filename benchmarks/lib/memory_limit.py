"""Programs in a memory cgroup of their own, where exceeding the limit means being killed.

The kernel counts everything that the group takes: memory of processes, page tables, and the page cache of files that
they read or map first. So the pages of a mapped model are under the limit like everything else; it drops them where it
needs room, which does not count as exceeding. There is no swap for the group. Pages that were in the page cache before
are not counted: a model's file must be dropped from it first (page_cache.py).

A group is made under the nearest one of this process that allows it: a folder of the memory controller that may be
written, by root or as delegated. Where there is none, programs run without a limit, and the result says so.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path, PurePosixPath
from typing import Any

from benchmarks.lib import programs

_numbers = count()


class ExceededError(RuntimeError):
    """A program was killed because it needed more than its limit."""


@dataclass(frozen=True)
class Usage:
    """What the programs of a group took. limit, peak: bytes, the page cache included, None: none, not known; by: which
    cgroups limited them, None: nothing did; killed: one was, for exceeding it; read: bytes that they read from disk.
    """

    limit: int | None
    by: str | None = None
    peak: int | None = None
    killed: bool = False
    read: int | None = None

    def document(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _Files:
    """The names of a controller's files. kills: the file, and the word before the figure in it."""

    limits: tuple[tuple[str, int | None], ...]  # (file, value, None: the limit), in the order in which they are written
    peak: str
    kills: tuple[str, str]


_FILES = {
    "cgroup v1": _Files(
        (("memory.limit_in_bytes", None), ("memory.memsw.limit_in_bytes", None), ("memory.swappiness", 0)),
        "memory.max_usage_in_bytes",
        ("memory.oom_control", "oom_kill"),
    ),
    "cgroup v2": _Files(
        (("memory.max", None), ("memory.swap.max", 0)),
        "memory.peak",
        ("memory.events", "oom_kill"),
    ),
}


def parents(mounts: str, own: str) -> Iterator[tuple[str, Path]]:
    """(version, folder) of the groups that this process is in, the innermost first.

    mounts, own: what /proc/self/mountinfo and /proc/self/cgroup say.
    """
    found = {}
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(",")):
            found[kind] = before.split(" ")[3:5]
    for kind, version in (("cgroup", "cgroup v1"), ("cgroup2", "cgroup v2")):
        if kind not in found:
            continue
        root, mount = found[kind]
        groups = [line.split(":", 2) for line in own.splitlines()]
        controller = "memory" if kind == "cgroup" else ""
        path = PurePosixPath(next((path for _, names, path in groups if controller in names.split(",")), "/"))
        # of a container only its own part may be mounted
        below = path.relative_to(root) if path.is_relative_to(root) else PurePosixPath()
        innermost = Path(mount) / below
        yield from ((version, innermost if not up else innermost.parents[up - 1]) for up in range(len(below.parts) + 1))


def _make() -> tuple[str, Path] | None:
    """A new group; None where none can be made."""
    try:
        mounts, own = Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text()
    except OSError:
        return None
    for version, parent in parents(mounts, own):
        folder = parent / f"powerinfer-{os.getpid()}-{next(_numbers)}"
        with suppress(OSError):
            # groups of version 2 have the controller only where their parent hands it on
            if version == "cgroup v1" or "memory" in (parent / "cgroup.subtree_control").read_text().split():
                folder.mkdir()
                return version, folder
    return None


class Group:
    """A group with a limit in bytes, for as long as the context lasts; what still runs in it then is killed."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def __enter__(self) -> Group:
        made = _make()
        self.by, self._folder = made if made else (None, None)
        try:
            self._set()
        except OSError:
            self.__exit__()
            self.by = self._folder = None
        return self

    def _set(self) -> None:
        if self._folder is None or self.by is None:
            return
        for name, value in _FILES[self.by].limits:
            path = self._folder / name
            if path.exists():  # swap is not accounted for everywhere
                path.write_text(str(self.limit if value is None else value))

    def prefix(self) -> list[str]:
        """What stands before a command so that it runs in the group."""
        if self._folder is None:
            return []
        return ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self._folder / "cgroup.procs")]

    def usage(self) -> Usage:
        if self._folder is None or self.by is None:
            return Usage(self.limit)
        files = _FILES[self.by]
        return Usage(self.limit, self.by, self._figure(files.peak), bool(self._figure(*files.kills)))

    def _figure(self, name: str, word: str = "") -> int | None:
        """The number behind the word, or of the whole file."""
        assert self._folder is not None
        with suppress(OSError, ValueError):
            for line in (self._folder / name).read_text().splitlines():
                before, _, value = line.rpartition(" ")
                if before == word:
                    return int(value)
        return None

    def __exit__(self, *_: object) -> None:
        if self._folder is None:
            return
        for _ in range(100):  # the end of a process takes a moment
            with suppress(OSError, ValueError):
                for pid in (self._folder / "cgroup.procs").read_text().split():
                    with suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
            with suppress(OSError):
                self._folder.rmdir()
                return
            time.sleep(0.05)


def output(command: list[str], limit: int | None, timeout: float | None = None) -> tuple[str, Usage]:
    """What a program prints, and what it took. limit: bytes, None: none; timeout: seconds.

    ExceededError if it was killed for needing more; RuntimeError as of `programs.output`.
    """
    before = _read()
    if limit is None:
        text = programs.output(command, timeout)
        return text, Usage(None, read=_read() - before)
    with Group(limit) as group:
        try:
            text = programs.output(command, timeout, group.prefix())
        except RuntimeError:
            if group.usage().killed:
                gib = limit / (1 << 30)
                raise ExceededError(f"{Path(command[0]).name} was killed: it needs more than {gib:.2f} GiB") from None
            raise
        return text, replace(group.usage(), read=_read() - before)


def _read() -> int:
    """Bytes that the processes which have ended read from disk."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_inblock * 512
