"""Topology of this machine's processors, as Linux describes it: kinds of cores, processors of a core, NUMA nodes.

A processor is what Linux numbers: a core, or one of the two of a core with simultaneous multithreading (SMT). A system
that describes nothing, such as most virtual machines, is no error: its cores may differ or not.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

SYS = Path("/sys")

_MOST = 1 << 13  # processors of a list: Linux has fewer
_FILES = (
    ("cpu_capacity", 0.75),
    ("cpufreq/cpuinfo_max_freq", 0.75),
    ("acpi_cppc/highest_perf", 0.7),
)
"""Files of a processor that say how fast it is, and the share of the fastest one's figure from which on it counts as a
performance core. Cores of one kind differ by less: some reach a higher frequency than others."""


@dataclass(frozen=True)
class Topology:
    """The processors that this process may use.

    cores: the processors of each core. performance: the processors of performance cores, which are faster than the
    others; None: the system does not describe it.
    """

    cores: tuple[tuple[int, ...], ...]
    performance: frozenset[int] | None

    @property
    def processors(self) -> int:
        return sum(map(len, self.cores))

    @property
    def differ(self) -> bool | None:
        """Whether the cores are of two kinds; None: not described."""
        return None if self.performance is None else 0 < len(self.performance) < self.processors

    def thread_counts(self, most: int, reason: str = "every core") -> dict[int, str]:
        """Numbers of threads, up to `most`, that may be the fastest, each with what it stands for. First comes `most`,
        which `reason` explains, alone where all cores are equal."""
        counts = {most: reason}
        if self.differ is False:
            return counts
        if self.performance is not None:
            fast = sum(not self.performance.isdisjoint(core) for core in self.cores)
            counts.setdefault(min(fast, most), "performance cores")
        if len(self.cores) < self.processors:
            counts.setdefault(min(len(self.cores), most), "one thread a core")
        elif self.performance is None:
            counts.setdefault(most // 2, "half of the processors, which may differ or share cores")
        counts.setdefault(most - 1, "every core but one")
        return counts


def read_topology(processors: Collection[int] | None = None, root: Path = SYS) -> Topology:
    """The topology of processors; None: of those that this process may use. root: of sysfs."""
    used = _usable() if processors is None else frozenset(processors)
    siblings = {one: _processors(_folder(root, one) / "topology/thread_siblings_list") for one in used}
    cores = {tuple(sorted(used & (siblings[one] or {one}))) for one in used}
    return Topology(tuple(sorted(cores)), _performance(used, root))


def _folder(root: Path, processor: int) -> Path:
    return root / f"devices/system/cpu/cpu{processor}"


def _performance(processors: frozenset[int], root: Path) -> frozenset[int] | None:
    """Processors of performance cores; None: the system does not describe it."""
    fast, slow = (_processors(root / f"devices/{name}/cpus") for name in ("cpu_core", "cpu_atom"))
    if fast is not None and slow is not None:  # Intel's processors with cores of two kinds, and no others
        return processors & fast or processors
    for name, share in _FILES:
        figures = {one: _number(_folder(root, one) / name) for one in processors}
        positive = [figure for figure in figures.values() if figure]
        if len(positive) == len(processors):
            least = share * max(positive)
            return frozenset(one for one, figure in figures.items() if figure and figure >= least)
    return None


def read_nodes(processors: Collection[int] | None = None, root: Path = SYS) -> list[int]:
    """The NUMA nodes that have memory and some of the processors; [] where there is only one. Arguments as of
    `read_topology`."""
    folder = root / "devices/system/node"
    stored = sorted(_processors(folder / "has_memory") or ())
    if len(stored) < 2:
        return []
    used = _usable() if processors is None else frozenset(processors)
    nodes = [node for node in stored if used & (_processors(folder / f"node{node}/cpulist") or frozenset())]
    return nodes if len(nodes) > 1 else []


def _usable() -> frozenset[int]:
    affinity = getattr(os, "sched_getaffinity", None)
    return frozenset(affinity(0) if affinity is not None else range(os.cpu_count() or 1))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _processors(path: Path) -> frozenset[int] | None:
    """The numbers of a list such as `0-3,8`; None: there is no such list, or it is empty."""
    numbers: set[int] = set()
    try:
        for part in path.read_text().split(","):
            first, _, last = part.strip().partition("-")
            if first:
                numbers.update(range(int(first), min(int(last or first), _MOST) + 1))
    except (OSError, ValueError):
        return None
    return frozenset(numbers) or None
