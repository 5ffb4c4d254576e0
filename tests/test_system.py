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
