"""The documents: links lead somewhere, and the pages of decisions stay short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = (".", "benchmarks", "runs", "models/*", "docs", "docs/decisions")
PAGES = sorted(page for folder in FOLDERS for page in ROOT.glob(f"{folder}/*.md"))
DECISIONS = sorted((ROOT / "docs/decisions").glob("*.md"))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"`[^`]*`|```.*?```", "", page.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://|mailto:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), link


def test_decisions_fit_in_200_lines() -> None:
    lines = [line for page in DECISIONS for line in page.read_text().splitlines()]
    assert len(lines) <= 200, "a row that nobody needs any more makes room; the history of git has it"
    assert max(map(len, lines)) <= 120


def test_a_decision_has_a_date_and_a_fate_and_the_newest_is_first() -> None:
    index = ROOT / "docs/decisions/README.md"
    for page in DECISIONS:
        if page == index:
            continue
        assert f"({page.name})" in index.read_text(), "a page that the index lacks"
        rows = re.findall(r"^- .*", page.read_text(), re.MULTILINE)
        dates = [re.match(r"- ((?:\d{4}-)?\d\d-\d\d) (?:kept|not kept|limit|open): ", row) for row in rows]
        assert dates and all(dates), page.name
        days = [date[1] if len(date[1]) > 5 else f"2026-{date[1]}" for date in dates if date]
        assert days == sorted(days, reverse=True), page.name
