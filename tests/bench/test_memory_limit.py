"""benchmarks/lib: programs under a limit, as far as this machine allows one, and files out of the page cache."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from benchmarks.lib import memory_limit, page_cache

V1 = """\
36 35 0:30 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
37 35 0:31 / /sys/fs/cgroup/cpu rw,relatime shared:9 - cgroup cgroup rw,cpu
38 35 0:32 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
OWN_V1 = "4:memory:/jobs/one\n3:cpu:/elsewhere\n0::/whole\n"
V2 = "25 20 0:22 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
OWN_V2 = "0::/user.slice/user-1000.slice\n"


def test_where_groups_may_be_made() -> None:
    first = Path("/sys/fs/cgroup/memory")
    other = Path("/sys/fs/cgroup/unified")
    assert list(memory_limit.parents(V1, OWN_V1)) == [
        *(("cgroup v1", folder) for folder in (first / "jobs/one", first / "jobs", first)),
        *(("cgroup v2", folder) for folder in (other / "whole", other)),
    ]
    root = Path("/sys/fs/cgroup")
    assert [folder for _, folder in memory_limit.parents(V2, OWN_V2)] == [
        root / "user.slice/user-1000.slice",
        root / "user.slice",
        root,
    ]
    # a container: of the hierarchy only its own part is mounted
    inside = V2.replace(" / /sys", " /user.slice /sys")
    assert [folder for _, folder in memory_limit.parents(inside, OWN_V2)] == [root / "user-1000.slice", root]
    assert list(memory_limit.parents("1 1 0:1 / /proc rw - proc proc rw\n", OWN_V2)) == []


def group(folder: Path, by: str, **files: str) -> memory_limit.Group:
    """A group whose files are ordinary ones."""
    made = memory_limit.Group(1 << 20)
    made.by, made._folder = by, folder
    for name, text in files.items():
        (folder / f"memory.{name}").write_text(text)
    return made


def test_files_of_both_versions(tmp_path: Path) -> None:
    first, second = tmp_path / "1", tmp_path / "2"
    first.mkdir()
    second.mkdir()
    files = {"limit_in_bytes": "9", "swappiness": "60", "max_usage_in_bytes": "4096\n"}
    one = group(first, "cgroup v1", **files, oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    one._set()
    assert (first / "memory.limit_in_bytes").read_text() == "1048576"
    assert (first / "memory.swappiness").read_text() == "0"
    assert not (first / "memory.memsw.limit_in_bytes").exists(), "not every kernel has it"
    assert one.usage() == memory_limit.Usage(1 << 20, "cgroup v1", 4096, True)
    files = {"max": "max", "swap.max": "max", "events": "low 0\nmax 7\noom 2\noom_kill 0\n"}
    two = group(second, "cgroup v2", **files)
    two._set()
    assert [(second / f"memory.{name}").read_text() for name in ("max", "swap.max")] == ["1048576", "0"]
    assert two.usage() == memory_limit.Usage(1 << 20, "cgroup v2", None, False), "older kernels keep no peak"
    (second / "cgroup.procs").write_text("")
    text = memory_limit.programs.output(["/bin/sh", "-c", "echo $$"], None, two.prefix())
    assert (second / "cgroup.procs").read_text() == text, "the program is the process that joined"


def test_without_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limit, "_make", lambda: None)
    text, usage = memory_limit.output([sys.executable, "-c", "print('all of it')"], 1 << 20)
    assert text == "all of it\n" and usage.by is None and usage.limit == 1 << 20
    with pytest.raises(RuntimeError, match=r"^false ended with status 1"):
        memory_limit.output(["false"], 1 << 20)


def test_exceeding_is_being_killed() -> None:
    with memory_limit.Group(96 << 20) as made:
        by, folder = made.by, made._folder
    if by is None:
        pytest.skip("no memory cgroup can be made here")
    assert folder is not None and not folder.exists()
    takes = "print(len(bytearray({} << 20)))"
    text, usage = memory_limit.output([sys.executable, "-c", takes.format(8)], 96 << 20)
    assert text == f"{8 << 20}\n" and usage.by == by and not usage.killed
    assert usage.peak is None or 8 << 20 <= usage.peak <= 96 << 20
    with pytest.raises(memory_limit.ExceededError, match=r"needs more than 0\.09 GiB"):
        memory_limit.output([sys.executable, "-c", takes.format(256)], 96 << 20)


def test_what_is_left_running_is_killed() -> None:
    with memory_limit.Group(96 << 20) as made:
        if made._folder is None:
            pytest.skip("no memory cgroup can be made here")
        script = "import subprocess as s; print(s.Popen(['sleep', '600'], stdout=s.DEVNULL, stderr=s.DEVNULL).pid)"
        pid = int(memory_limit.programs.output([sys.executable, "-c", script], None, made.prefix()))
        os.kill(pid, 0)
    assert not made._folder.exists()
    stat = Path(f"/proc/{pid}/stat")  # it is a zombie until whoever inherited it has noticed
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_files_leave_the_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    (tmp_path / "empty").write_bytes(b"")
    assert page_cache.cached(path) == 1 << 20 and page_cache.cached(tmp_path / "empty") == 0
    assert page_cache.drop([path]) in (page_cache.DROPPED, page_cache.ADVISED)
    if page_cache.cached(path) == 1 << 20:
        pytest.skip("this file system is memory")
    assert page_cache.cached(path) == 0
    path.read_bytes()
    assert page_cache.cached(path) == 1 << 20
