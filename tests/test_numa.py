"""Memory that is spread over NUMA nodes: the policy of threads and pages, on a machine with one node or more."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from model_files import tiny_gguf

from powerinfer import LLM, numa
from powerinfer.hybrid import load

try:
    DEFAULT = numa.policy() == 0
except numa.RefusedError:
    DEFAULT = False
spreads = pytest.mark.skipif(not DEFAULT, reason="this system does not let a process set the policy of its memory")


def policies() -> list[str]:
    """The policies of the pages of this process."""
    return [line.split()[1] for line in Path("/proc/self/numa_maps").read_text().splitlines()]


@spreads
def test_threads_and_pages_within_are_interleaved_and_none_afterwards() -> None:
    inside: list[int] = []
    with numa.interleaved([0]) as refused:
        assert refused is None and numa.policy() == 3
        thread = threading.Thread(target=lambda: inside.append(numa.policy()))
        thread.start()
        thread.join()
    assert inside == [3] and numa.policy() == 0
    if Path("/proc/self/numa_maps").exists():
        assert "interleave:0" not in policies()


@spreads
def test_a_policy_that_the_process_was_started_with_holds() -> None:
    with numa.interleaved([0]), numa.interleaved([0]) as refused:
        assert refused is not None and "numactl" in refused and numa.policy() == 3
    assert numa.policy() == 0


@spreads
def test_nodes_that_do_not_exist_are_refused() -> None:
    with numa.interleaved([900]) as refused:
        assert refused == "Invalid argument" and numa.policy() == 0


def test_a_machine_whose_calls_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa.platform, "machine", lambda: "m68k")
    with numa.interleaved([0, 1]) as refused:
        assert refused == "m68k is not known"


@spreads
def test_a_load_spreads_its_memory_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, seen = tiny_gguf().write(tmp_path / "m.gguf"), []
    monkeypatch.setattr(load, "read_nodes", lambda: [0, 0])
    with LLM(path, gpu="none", progress=lambda *_: seen.append(numa.policy())) as llm:
        assert llm.choices["memory"].startswith("spread over NUMA nodes 0, 0 (each thread reads 1/2 of the weights")
        assert not [note for note in llm.notes if "NUMA" in note]
    assert 3 in seen and numa.policy() == 0


def test_a_load_says_what_is_lost_where_the_system_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa.platform, "machine", lambda: "m68k")
    monkeypatch.setattr(load, "read_nodes", lambda: [0, 1])
    with LLM(tiny_gguf().write(tmp_path / "m.gguf"), gpu="none") as llm:
        (note,) = (note for note in llm.notes if "NUMA" in note)
        assert note.startswith("2 NUMA nodes: weights rest on") and "numactl --interleave=all" in note
        assert llm.choices["memory"] == "NUMA nodes 0, 1 (not spread: m68k is not known)"
