"""What the operating system says of this machine and of the container that the process runs in."""

from __future__ import annotations

from pathlib import Path

import pytest

from powerinfer import system


def test_a_containers_memory_is_its_limit_less_what_it_uses(tmp_path: Path) -> None:
    assert system._cgroup_memory(tmp_path) is None
    stat = "anon 5\ninactive_file 300\ntotal_inactive_file 400\n"
    for folder, limit, used, cached in (
        (tmp_path / "2", "memory.max", "memory.current", 400),
        (tmp_path / "1" / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", 400),
    ):
        folder.mkdir(parents=True)
        root = tmp_path / folder.relative_to(tmp_path).parts[0]
        (folder / "memory.stat").write_text(stat)
        (folder / used).write_text("1000\n")
        (folder / limit).write_text("5000\n")
        assert system._cgroup_memory(root) == (5000, 1000 - cached)
        for unlimited in ("max", str((1 << 63) - 4096)):
            (folder / limit).write_text(unlimited)
            assert system._cgroup_memory(root) is None
        (folder / limit).write_text("5000\n")
        (folder / used).write_text("no number")
        assert system._cgroup_memory(root) is None


def test_what_is_available_is_within_the_containers_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    free = system.available_memory()
    monkeypatch.setattr(system, "_cgroup_memory", lambda: (5000, 1000))
    assert (system.total_memory(), system.available_memory()) == (5000, min(free, 4000))
    monkeypatch.setattr(system, "_cgroup_memory", lambda: (5000, 6000))
    assert system.available_memory() == 1  # 0 would mean that it is not known
