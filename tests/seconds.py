"""CPU seconds of the tests by file: a table at the end of a run, and a limit that CI keeps.

A second of a fast processor is more work than one of a slow one. So each process times a fixed piece of work, too, at
its begin and its end, and seconds are counted in those of the processor on which `UNIT` was measured, where those are
fewer: a fixed piece of work suffers more from a busy neighbour than tests do. `seconds.txt` has the last recorded
table: `make test ARGS=--record-seconds` writes it. With CI set in the environment a whole run that takes more than
`LIMIT` fails, unless other programs had the cores meanwhile; who needs more changes the limit here.
"""

from __future__ import annotations

import os
import resource
import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer.system import Disturbance

RECORD = Path(__file__).with_name("seconds.txt")
LIMIT = 1180.0
"""CPU seconds of a whole run: a tenth more than the table in seconds.txt adds up to, and a tenth for processors with
AMX, which have a level more to test."""
UNIT = 0.25
"""CPU seconds of `_fixed_work` where LIMIT was measured."""
DISTURBED = 0.1
"""Share of the cores that others may have had in a run that counts."""
SHOWN = 20


def _cpu_seconds() -> float:
    """CPU seconds of this process and of its children that it has waited for."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _fixed_work() -> float:
    """CPU seconds of objects of Python, of products and of copies, as tests have them."""
    matrix = np.random.default_rng(0).standard_normal((96, 96))
    begin = time.process_time()
    counts: Counter[str] = Counter()
    for i in range(300_000):
        counts[str(i % 997)] += len(f"{i:x}")
    for _ in range(2000):
        matrix = np.tanh(matrix @ matrix.T / 96.0)
        matrix = matrix[::-1].copy()
    return time.process_time() - begin


class Seconds:
    """The plugin: measures in every process that runs tests, adds up and judges in the one that began them."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.files: Counter[str] = Counter()
        self.units: list[float] = []
        self.machine = self.machine_seconds()
        self.processes = 0.0  # CPU seconds of those that ran tests
        self.others = 0.0  # share of the machine's cores that other programs and the hypervisor had
        self.problem = ""

    @property
    def worker(self) -> bool:
        return hasattr(self.config, "workerinput")

    @property
    def begins_workers(self) -> bool:
        return not self.worker and bool(getattr(self.config.option, "numprocesses", None))

    def pytest_sessionstart(self) -> None:
        if not self.begins_workers:
            self.units.append(_fixed_work())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        begin = _cpu_seconds()
        try:
            return (yield)
        finally:
            self.files[item.location[0]] += _cpu_seconds() - begin

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.files.update(getattr(node, "workeroutput", {}).get("seconds", {}))
        self.units += getattr(node, "workeroutput", {}).get("units", [])
        self.processes += getattr(node, "workeroutput", {}).get("cpu", 0.0)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not self.begins_workers:
            self.units.append(_fixed_work())
        if self.worker:
            report = dict(seconds=dict(self.files), units=self.units, cpu=_cpu_seconds())
            self.config.workeroutput.update(report)  # type: ignore[attr-defined]
            return
        busy, wall = (after - before for after, before in zip(self.machine_seconds(), self.machine, strict=True))
        mine = self.processes + (time.process_time() if self.begins_workers else _cpu_seconds())
        self.others = max(0.0, busy - mine) / max(wall, 1e-3) / (os.cpu_count() or 1)
        if not self.units or not self.files:
            return
        speed = min(1.0, UNIT / float(np.median(self.units)))
        self.files = Counter({name: seconds * speed for name, seconds in self.files.items()})
        if self.whole and self.config.getoption("--record-seconds"):
            RECORD.write_text(self.table())
        if self.whole and self.files.total() > LIMIT and os.environ.get("CI"):
            self.problem = f"the tests took {self.files.total():.0f} s, more than LIMIT in tests/seconds.py"
            if self.others > DISTURBED:
                self.problem += ", but other programs had the cores meanwhile"
            else:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @property
    def whole(self) -> bool:
        """All tests were asked for."""
        names = ("keyword", "markexpr", "lf", "failedfirst", "deselect", "maxfail")
        chosen = [getattr(self.config.option, name, None) for name in names]  # some are of a plugin that may be off
        every_test = not any(chosen) and self.config.getoption("--cases") == "sample"
        return every_test and self.config.args == self.config.getini("testpaths")

    @staticmethod
    def machine_seconds() -> tuple[float, float]:
        """Seconds: of all cores that somebody had, and of the clock."""
        busy, steal, _, wall = Disturbance._read()
        return busy + steal, wall

    def table(self, most: int | None = None) -> str:
        rows = [f"{seconds:8.1f}  {name}" for name, seconds in self.files.most_common(most)]
        return "\n".join(["CPU seconds by file", f"{self.files.total():8.1f}  in all", *rows]) + "\n"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if len(self.files) > 1:
            terminalreporter.section("CPU seconds by file")
            terminalreporter.write(self.table(SHOWN).split("\n", 1)[1])
            unit = float(np.median(self.units))
            terminalreporter.write_line(f"(unit of work {unit:.3f} s; others had {self.others:.0%} of the cores)")
        if self.problem:
            terminalreporter.write_line(self.problem, red=True)
