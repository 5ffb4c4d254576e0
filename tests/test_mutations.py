"""The planted faults of `make mutations` fit the sources, and every guarantee of docs/design.md has one."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from mutations import Mutation, every_mutation

ROOT = Path(__file__).parents[1]
BEGINNING = 37
"""Characters by which a row is known."""
ELSEWHERE = ("make fuzz-asan", "make test-neon")
"""What checks rows whose faults are not planted: an emulator and sanitisers would take many minutes for each."""


def guarantees() -> list[tuple[str, str]]:
    """(guarantee, what checks it) of each row of the table."""
    table = (ROOT / "docs" / "design.md").read_text().split("| guarantee | checked by |\n|---|---|\n")[1]
    return re.findall(r"^\| (.*) \| (.*) \|$", table, re.M)


@pytest.mark.parametrize("mutation", every_mutation(), ids=lambda mutation: mutation.guarantee[:60])
def test_a_fault_can_be_planted(mutation: Mutation) -> None:
    assert (ROOT / mutation.file).read_text().count(mutation.old) == 1
    assert mutation.old != mutation.new
    tests = [word.partition("::")[0] for word in shlex.split(mutation.tests) if word.startswith("tests/")]
    assert all((ROOT / path).exists() for path in tests)
    assert tests or mutation.tests.startswith("make ")


def test_every_guarantee_has_a_fault_that_its_tests_find() -> None:
    """A fault names its row by the row's beginning, and runs one of the row's tests."""
    rows = guarantees()
    assert len(rows) > 50
    without = []
    for guarantee, checks in rows:
        paths = re.findall(r"tests/\w+\.py|make [\w-]+", checks)
        faults = [fault for fault in every_mutation() if fault.guarantee[:BEGINNING] == guarantee[:BEGINNING]]
        if checks not in ELSEWHERE and not any(path in fault.tests for path in paths for fault in faults):
            without.append(guarantee)
    assert without == []
