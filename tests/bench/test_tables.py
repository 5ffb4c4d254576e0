"""benchmarks/lib/tables.py: cells, tables, and the documents that they are written into."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.lib import cells, tables


def test_a_missing_value_is_an_empty_cell() -> None:
    made = [cells.number(None), cells.fixed(None), cells.percent(None), cells.signed(None)]
    assert tables.table(["a", *"bcde"], [["x", *made]]).splitlines()[-1] == "| x | | | | |"
    assert [cells.number(99.94), cells.number(100.4), cells.fixed(0.5, 1)] == ["99.9", "100", "0.5"]
    assert [cells.percent(0.125), cells.signed(-0.125), cells.signed(0.1)] == ["12.5 %", "-12 %", "+10 %"]


def test_a_table_and_what_stands_around_it() -> None:
    table = tables.table(["", "n"], [["a", "1"], ["", "2"]], numbers=True)
    assert table == "| | n |\n|---|---:|\n| a | 1 |\n| | 2 |\n"
    text = tables.paragraphs("About.", table, "", tables.items(["x", "y"]))
    assert text == f"About.\n\n{table}\n- x\n- y\n"


def test_a_document_that_is_not_up_to_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    before = "# A\n<!-- one: begin -->\nold\n<!-- one: end -->\n<!-- two: begin -->\nold\n<!-- two: end -->\n"
    page.write_text(before)
    pages = {page: lambda: {"one": "new\n", "two": None}}
    drawn = []
    monkeypatch.setattr(sys, "argv", ["table", "--check"])
    with pytest.raises(SystemExit, match=r"page\.md"):
        tables.write_tables("", pages, lambda: drawn.append(1))
    assert page.read_text() == before and not drawn
    monkeypatch.setattr(sys, "argv", ["table"])
    tables.write_tables("", pages, lambda: drawn.append(1))
    assert page.read_text() == before.replace("old", "new", 1) and drawn == [1]
    assert not tables.outdated(pages)
    with pytest.raises(SystemExit, match="no markers <!-- three: begin -->"):
        tables.update({page: lambda: {"three": "x"}}, check=False)
