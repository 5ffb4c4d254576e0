"""The documents: links lead somewhere, what is generated is up to date, and the pages of decisions stay short."""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks.lib import tables
from docs.site import pages, reference
from powerinfer.cli.common import Parser

ROOT = Path(__file__).parent.parent
PAGES = [path for path in pages.paths() if path.suffix == ".md"]
DECISIONS = sorted((ROOT / "docs/decisions").glob("*.md"))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return set(map(pages.anchor, headings))


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


def test_the_site_has_every_document_in_its_menu() -> None:
    """`make docs` builds it, which needs what the tests do not."""
    menu = re.findall(r"[\w/.-]+\.md", (ROOT / "properdocs.yml").read_text())
    assert len(menu) == len(set(menu))
    assert set(menu) == {str(page.relative_to(ROOT)) for page in PAGES}


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


def test_what_is_generated_is_up_to_date() -> None:
    assert not tables.outdated(reference.PAGES), "python -m docs.site.reference writes it"


def test_commands_of_others_have_one_here_that_is_valid() -> None:
    """The commands in the tables of docs/coming-from.md; test_readme.py looks at those in blocks."""
    page = (ROOT / "docs/coming-from.md").read_text()
    rows = re.findall(r"^\|.*?\| `powerinfer ([^`]*)`(?: \(.*\))? \|$", page, re.MULTILINE)
    found = [shlex.split(words) for words in rows]
    assert len(found) > 10
    for verb, *rest in found:
        parser = Parser(prog=verb)
        import_module(f"powerinfer.cli.{verb}").configure(parser)
        parser.parse_args(rest)


def test_the_same_flags_are_the_same() -> None:
    page = (ROOT / "docs/coming-from.md").read_text()
    same = re.findall(r"`(--?[\w-]+)`", page.partition("The same: ")[2].partition("\n\n")[0])
    here = reference.flags("run") | reference.flags("serve")
    assert len(same) > 8 and set(same) <= here


def test_a_version_in_the_changelog_has_a_date_and_at_most_60_lines() -> None:
    _, *versions = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert versions
    for version in versions:
        assert re.match(r"\d+\.\d+\.\d+ - \d{4}-\d\d-\d\d\n", version), version.split("\n")[0]
        assert version.strip().count("\n") < 60, version.split("\n")[0]


def test_the_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 120
    assert any(line.startswith("pip install") for line in lines[:15])
