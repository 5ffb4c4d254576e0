"""Kinds of cores, by trees as Linux has them for several machines, and the numbers of threads that are tried."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import pytest

from powerinfer.topology import Topology, read_nodes, read_topology


class Sys:
    """A tree of files in place of /sys."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: object) -> None:
        file = self.root / "devices" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def figures(self, name: str, figures: Iterable[int]) -> None:
        for processor, figure in enumerate(figures):
            self.write(f"system/cpu/cpu{processor}/{name}", figure)

    def siblings(self, cores: Iterable[Collection[int]]) -> None:
        for core in cores:
            for processor in core:
                self.write(f"system/cpu/cpu{processor}/topology/thread_siblings_list", ",".join(map(str, core)))


@pytest.fixture
def tree(tmp_path: Path) -> Sys:
    return Sys(tmp_path)


def intel(tree: Sys) -> range:
    """8 performance cores with two processors each, and 16 efficient ones."""
    tree.write("cpu_core/cpus", "0-15")
    tree.write("cpu_atom/cpus", "16-31")
    tree.siblings([(core, core + 1) for core in range(0, 16, 2)] + [(core,) for core in range(16, 32)])
    tree.figures("cpufreq/cpuinfo_max_freq", [5_500_000] * 16 + [4_300_000] * 16)
    return range(32)


def ryzen(tree: Sys) -> range:
    """16 equal cores, of which some are preferred."""
    tree.siblings((core, core + 16) for core in range(16))
    tree.figures("cpufreq/cpuinfo_max_freq", [5_880_000] * 8 + [5_600_000] * 8 + [5_880_000] * 8 + [5_600_000] * 8)
    tree.figures("acpi_cppc/highest_perf", [231, 166] * 16)
    return range(32)


def compact(tree: Sys) -> range:
    """Ryzen with 4 cores of Zen 5 and 8 of Zen 5c."""
    tree.siblings((core, core + 12) for core in range(12))
    tree.figures("cpufreq/cpuinfo_max_freq", ([5_100_000] * 4 + [3_300_000] * 8) * 2)
    return range(24)


def little(tree: Sys) -> range:
    tree.siblings((core,) for core in range(8))
    tree.figures("cpu_capacity", [250] * 4 + [780] * 3 + [1024])
    return range(8)


def silent(tree: Sys) -> range:
    """A virtual machine that says nothing."""
    return range(8)


def separate(tree: Sys) -> range:
    """A virtual machine that says only that no core has two processors."""
    tree.siblings((core,) for core in range(8))
    return range(8)


Machine = Callable[[Sys], range]


@pytest.mark.parametrize(
    ("machine", "differ", "counts"),
    [
        (intel, True, [32, 8, 24, 31]),
        (ryzen, False, [32]),
        (compact, True, [24, 4, 12, 23]),
        (little, True, [8, 4, 7]),
        (silent, None, [8, 4, 7]),
        (separate, None, [8, 4, 7]),
    ],
)
def test_what_is_tried(machine: Machine, differ: bool | None, counts: list[int], tree: Sys) -> None:
    topology = read_topology(machine(tree), tree.root)
    assert topology.differ is differ and list(topology.thread_counts(topology.processors)) == counts


def test_the_fastest_of_three_kinds_are_the_performance_cores(tree: Sys) -> None:
    assert read_topology(little(tree), tree.root).performance == {4, 5, 6, 7}


@pytest.mark.parametrize(
    ("machine", "quota", "counts"),
    [(intel, 10, [10, 8, 9]), (intel, 8, [8, 7]), (ryzen, 6, [6]), (silent, 6, [6, 3, 5]), (separate, 6, [6, 3, 5])],
)
def test_a_container_with_a_quota(machine: Machine, quota: int, counts: list[int], tree: Sys) -> None:
    assert list(read_topology(machine(tree), tree.root).thread_counts(quota)) == counts


def test_only_the_processors_that_may_be_used_count(tree: Sys) -> None:
    intel(tree)
    for processors in (range(16), range(16, 32)):
        topology = read_topology(processors, tree.root)
        assert topology.differ is False and list(topology.thread_counts(16)) == [16]
    mixed = read_topology([0, 1, 2, 16, 17, 18], tree.root)
    assert mixed.cores == ((0, 1), (2,), (16,), (17,), (18,)) and list(mixed.thread_counts(6)) == [6, 2, 5]


def test_one_kind_of_efficient_cores_alone_is_no_difference(tree: Sys) -> None:
    tree.write("cpu_atom/cpus", "0-7")
    tree.figures("cpufreq/cpuinfo_max_freq", [3_800_000] * 8)
    assert read_topology(range(8), tree.root).differ is False


def test_figures_of_some_processors_alone_describe_nothing(tree: Sys) -> None:
    tree.figures("cpu_capacity", [1024, 250])
    tree.figures("acpi_cppc/highest_perf", [0] * 8)
    assert read_topology(range(8), tree.root).differ is None


def test_nodes_have_memory_and_processors_that_may_be_used(tree: Sys) -> None:
    tree.write("system/node/has_memory", "0-1,3")
    for node, processors in enumerate(("0-3", "4-7", "8-11", "")):
        tree.write(f"system/node/node{node}/cpulist", processors)
    assert read_nodes(range(12), tree.root) == [0, 1]
    assert read_nodes(range(4, 12), tree.root) == [], "one has all that is used"
    tree.write("system/node/has_memory", "0")
    assert read_nodes(range(12), tree.root) == []


@pytest.mark.parametrize("text", ["", "x", "3-", "-", "\x00", "0-99999999999", "5-2", "1,,2", "9" * 5000])
def test_no_text_does_harm(text: str, tree: Sys) -> None:
    for name in ("cpu_core/cpus", "cpu_atom/cpus", "system/node/has_memory", "system/node/node0/cpulist"):
        tree.write(name, text)
    tree.siblings([(0, 1)])
    tree.write("system/cpu/cpu0/topology/thread_siblings_list", text)
    for name in ("cpu_capacity", "cpufreq/cpuinfo_max_freq", "acpi_cppc/highest_perf"):
        tree.write(f"system/cpu/cpu0/{name}", text)
    assert next(iter(read_topology(range(2), tree.root).thread_counts(2))) == 2
    assert read_nodes(range(2), tree.root) == []


def test_this_machine() -> None:
    topology = read_topology()
    assert isinstance(topology, Topology) and topology.processors >= len(topology.cores) >= 1
