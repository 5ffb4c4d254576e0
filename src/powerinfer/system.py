"""Machine according to the operating system: cores, memory and the CPU's name."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath

MOST_THREADS = 1024
"""Maximum of `--threads`."""


def usable_cores() -> tuple[int, str]:
    """(number of cores this process may use, reason), from its affinity and its cgroup's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_cores()
    if quota is not None and quota < cores:
        return quota, f"the container's quota, of {cores} cores"
    return cores, "every core this process may use"


def limited_threads(requested: int) -> tuple[int, str | None]:
    """(threads, None), or (cores that this process may use, a line for the user) if more were requested.

    More than `MOST_THREADS` are not limited: the engine refuses them.
    """
    cores, _ = usable_cores()
    if not cores < requested <= MOST_THREADS:
        return requested, None
    return cores, f"--threads {requested} becomes {cores}, the cores that this process may use"


_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def _containers(controller: str, root: Path, membership: Path) -> list[tuple[bool, Path]]:
    """(whether it is of version 2, folder) of every container that this process is in: a limit holds for all that is
    below."""
    groups = {"": PurePosixPath("/"), controller: PurePosixPath("/")}  # as a container sees its own
    with suppress(OSError, ValueError):
        for line in membership.read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            for member in groups.keys() & controllers.split(","):
                groups[member] = PurePosixPath(name)
    return [
        (not member, root / member / group.relative_to("/"))
        for member, path in groups.items()
        for group in (path, *path.parents)
    ]


def _cgroup_cores(root: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> int | None:
    """Cores that the quotas of this process' containers are worth, of version 2 or 1; None: there is no quota."""
    cores = []
    for newer, folder in _containers("cpu", root, membership):
        with suppress(OSError, ValueError):  # no such group here, or no quota
            if newer:
                limit, period = map(int, (folder / "cpu.max").read_text().split())
            else:
                limit, period = (int((folder / f"cpu.cfs_{one}_us").read_text()) for one in ("quota", "period"))
            if limit > 0 and period > 0:
                cores.append(max(1, limit // period))
    return min(cores, default=None)


def cpu_name() -> str:
    """The CPU's model name."""
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                label, _, name = line.partition(":")
                if label.strip() in ("model name", "CPU part"):
                    return name.strip()
    except OSError:
        pass
    import platform

    return platform.processor() or platform.machine()


def total_memory() -> int:
    """Bytes of memory that this process may use: of the machine, or of its container."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([total, *(limit for limit, _ in _cgroup_memory())])


def gpu_memory() -> int:
    """Bytes of memory of the GPU that would be used, according to NVIDIA's driver; 0 if there is none, or torch is
    missing, through which it is used. Only the driver's own library is loaded: torch would take seconds.
    """
    import ctypes
    import importlib.util

    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    if not visible.isdecimal() or importlib.util.find_spec("torch") is None:
        return 0
    try:  # https://docs.nvidia.com/deploy/nvml-api
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        device, memory = ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()  # total, free, used
        if nvml.nvmlInit_v2():
            return 0
        failed = nvml.nvmlDeviceGetHandleByIndex_v2(int(visible), ctypes.byref(device))
        failed = failed or nvml.nvmlDeviceGetMemoryInfo(device, memory)
        nvml.nvmlShutdown()
        return 0 if failed else int(memory[0])
    except (OSError, AttributeError, OverflowError, ctypes.ArgumentError):
        return 0


def available_memory() -> int:
    """Bytes that can be allocated without swapping, in the machine and in this process' container; 0 if unknown."""
    free = _free_memory()
    return min([free, *(max(1, limit - used) for limit, used in _cgroup_memory())]) if free else 0


def _free_memory() -> int:
    """Bytes that are free on the machine; 0 if unknown."""
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":") for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 0


def container_memory() -> int | None:
    """Bytes that this process may occupy in its container, those that it does now included: beyond them it is killed.
    None where no container limits it, or the machine has less."""
    anonymous = _anonymous_memory()
    files = ("inactive_file", "active_file")  # pages of files that are in use are taken, too, before anything is killed
    rooms = [limit - max(0, used - anonymous) for limit, used in _cgroup_memory(kinds=files)]
    free = _free_memory()
    return max(1, min(rooms)) if rooms and (not free or min(rooms) < free + anonymous) else None


def _cgroup_memory(
    root: Path = _CGROUPS, membership: Path = _MEMBERSHIP, *, kinds: Sequence[str] = ("inactive_file",)
) -> list[tuple[int, int]]:
    """(limit, bytes used that cannot be reclaimed) of every container that limits this process, of version 2 or 1: a
    limit holds for all that is below. kinds: of memory, what can be reclaimed.
    """
    limits = []
    for newer, folder in _containers("memory", root, membership):
        names = ("memory.max", "memory.current") if newer else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        with suppress(OSError, ValueError):  # no such group here, or no limit
            limit, used = (int((folder / one).read_text()) for one in names)
            stat = {key: value for key, value in map(str.split, (folder / "memory.stat").read_text().splitlines())}
            cached = sum(int(stat.get(f"total_{kind}") or stat.get(kind) or 0) for kind in kinds)
            if limit < 1 << 60:
                limits.append((limit, max(0, used - cached)))
    return limits


def resident_memory() -> int:
    """Bytes of RAM that this process occupies; 0 if unknown."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def _anonymous_memory() -> int:
    """Bytes of RAM of this process that no file backs; 0 if unknown."""
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(fields["RssAnon"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 0


def peak_memory(status: Path = Path("/proc/self/status")) -> int:
    """Most bytes of RAM that this process has occupied."""
    try:
        # not ru_maxrss, which on Linux starts at the size of the parent process
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(fields["VmHWM"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        import resource
        import sys

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak * (1 if sys.platform == "darwin" else 1024)


DISTURBED_CORES = 0.15
"""CPU time taken by others, in cores, above which a measurement counts as disturbed."""


class Disturbance:
    """A context that finds the CPU time others take meanwhile, from /proc/stat; none where there is no such file.

    Afterwards `other_cores` is the mean number of cores that other processes used, `steal` those that the hypervisor
    took. This process and its children that have been waited for are not others.
    """

    other_cores = 0.0
    steal = 0.0

    @staticmethod
    def _read() -> tuple[float, float, float, float]:
        """Seconds: busy, of all cores; stolen; of this process and its children; of the clock."""
        try:
            ticks = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
            user, nice, system, _, _, irq, softirq, steal = ticks
        except (OSError, ValueError):
            return 0.0, 0.0, 0.0, time.monotonic()
        times = os.times()
        used = times.user + times.system + times.children_user + times.children_system
        hertz = os.sysconf("SC_CLK_TCK")
        return (user + nice + system + irq + softirq) / hertz, steal / hertz, used, time.monotonic()

    def __enter__(self) -> Disturbance:
        self._before = self._read()
        return self

    def __exit__(self, *_: object) -> None:
        busy, steal, used, wall = (after - before for after, before in zip(self._read(), self._before, strict=True))
        self.other_cores = max(0.0, (busy - used) / max(wall, 1e-3))
        self.steal = steal / max(wall, 1e-3)

    @property
    def cores(self) -> float:
        """Cores that others and the hypervisor took."""
        return self.other_cores + self.steal

    @property
    def disturbed(self) -> bool:
        """Whether that is too much for a measurement."""
        return self.cores > DISTURBED_CORES


def quiet(seconds: float = 0.1) -> bool:
    """Whether others leave the machine alone, observed for that time."""
    with Disturbance() as disturbance:
        time.sleep(seconds)
    return not disturbance.disturbed
