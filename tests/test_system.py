"""What the operating system says of this machine and of the container that the process runs in."""

from __future__ import annotations

from pathlib import Path

import pytest

from powerinfer import system

VERSION_2 = ("", "memory.max", "memory.current")
VERSION_1 = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes")


@pytest.mark.parametrize("files", [VERSION_2, VERSION_1])
def test_a_containers_memory_is_its_limit_less_what_it_uses(files: tuple[str, str, str], tmp_path: Path) -> None:
    controller, limit, used = files
    own = tmp_path / "own"
    own.write_text("12:cpu,cpuacct:/elsewhere\n" + ("7:memory:/a/b\n" if controller else "0::/a/b\n"))

    def group(name: str, most: str, now: int) -> None:
        folder = tmp_path / controller / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.stat").write_text("anon 5\nactive_file 50\ninactive_file 300\ntotal_inactive_file 400\n")
        (folder / limit).write_text(f"{most}\n")
        (folder / used).write_text(f"{now}\n")

    def found() -> list[tuple[int, int]]:
        return system._cgroup_memory(tmp_path, own)

    assert found() == []
    group("a/b", "5000", 1000)
    assert found() == [(5000, 600)]
    assert system._cgroup_memory(tmp_path, own, kinds=("inactive_file", "active_file")) == [(5000, 550)]
    group("a", "4000", 1000)  # what holds for it holds for b
    assert found() == [(5000, 600), (4000, 600)]
    group("", "max" if not controller else str((1 << 63) - 4096), 1 << 40)
    assert found() == [(5000, 600), (4000, 600)]
    own.write_text("no such file")
    assert found() == []
    group("", "3000", 100)  # as a container sees its own
    assert found() == [(3000, 0)]


@pytest.mark.parametrize("controllers", ["", "cpu", "cpu,cpuacct", "cpuacct,cpu"])
def test_cores_that_quotas_are_worth(controllers: str, tmp_path: Path) -> None:
    """Of cgroups of version 2, and of version 1."""
    own = tmp_path / "own"
    own.write_text(f"12:memory:/other\n3:{controllers}:/a/b\n")

    def group(name: str, quota: str, period: int) -> None:
        folder = tmp_path / ("cpu" if controllers else "") / name
        folder.mkdir(parents=True, exist_ok=True)
        if controllers:
            (folder / "cpu.cfs_quota_us").write_text("-1\n" if quota == "max" else f"{quota}\n")
            (folder / "cpu.cfs_period_us").write_text(f"{period}\n")
        else:
            (folder / "cpu.max").write_text(f"{quota} {period}\n")

    def cores() -> int | None:
        return system._cgroup_cores(tmp_path, own)

    assert cores() is None
    group("a/b", "max", 100000)
    assert cores() is None
    group("a", "350000", 100000)  # what holds for it holds for b
    assert cores() == 3
    group("a/b", "5000", 10000)
    assert cores() == 1
    own.write_text("no such file")
    assert cores() is None
    group("", "200000", 100000)  # as a container sees its own
    assert cores() == 2


def test_what_is_available_is_within_the_containers_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    free = system.available_memory()
    monkeypatch.setattr(system, "_cgroup_memory", lambda: [(5000, 1000), (9000, 6000)])
    assert (system.total_memory(), system.available_memory()) == (5000, min(free, 3000))
    monkeypatch.setattr(system, "_cgroup_memory", lambda: [(5000, 6000)])
    assert system.available_memory() == 1  # 0 would mean that it is not known


def test_what_a_container_leaves_counts_what_this_process_has(monkeypatch: pytest.MonkeyPatch) -> None:
    own = system._anonymous_memory()
    assert 0 < own <= system.resident_memory() * 1.5
    monkeypatch.setattr(system, "_anonymous_memory", lambda: 700)
    monkeypatch.setattr(system, "_cgroup_memory", lambda **_: [(5000, 1000), (9000, 6000)])
    assert system.container_memory() == 3700
    monkeypatch.setattr(system, "_cgroup_memory", lambda **_: [(5000, 500)])
    assert system.container_memory() == 5000
    monkeypatch.setattr(system, "_cgroup_memory", lambda **_: [(1 << 59, 0)])  # the machine has less
    assert system.container_memory() is None
    monkeypatch.setattr(system, "_cgroup_memory", lambda **_: [])
    assert system.container_memory() is None
