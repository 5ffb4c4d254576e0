"""The README: its figures and its picture are made from results, and it names what can be installed."""

from __future__ import annotations

import re
import tomllib
from importlib import import_module
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.lib import tables
from benchmarks.placement import cards_table
from benchmarks.sparse import picture
from powerinfer.formats.catalogue import catalogue
from powerinfer.hardware.cards import find_card
from powerinfer.placement import estimates

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    "name",
    [
        "disk",
        "hybrid",
        "placement",
        "placement.aims_table",
        pytest.param("placement.cards_table", marks=pytest.mark.rest),  # it makes some 600 plans
        "placement.families_table",
        "placement.predictions_table",
        "serving",
        "sparse",
        "speed",
    ],
)
def test_figures_are_those_of_the_newest_results(name: str) -> None:
    module = f"benchmarks.{name}" + ("" if "." in name else ".table")
    assert not tables.outdated(import_module(module).PAGES), f"python -m {module} writes them"


def test_models_of_the_cards_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of the README, and the rows of every eighth model in that of docs/models.md."""
    names = {name for name, _ in cards_table.SHORT} | set(list(catalogue())[::8])
    some = {name: model for name, model in catalogue().items() if name in names}
    for module in (cards_table, estimates):
        monkeypatch.setattr(module, "catalogue", lambda: some)
    cards_table._offers.cache_clear()
    readme, page = cards_table.README, (ROOT / "docs/models.md").read_text()
    pages = {path: make for path, make in cards_table.PAGES.items() if path == readme}
    assert not tables.outdated(pages), "python -m benchmarks.placement.cards_table writes it"
    rows = [line for line in cards_table.cards_table().splitlines() if line.startswith("| `")]
    cards_table._offers.cache_clear()
    assert len(rows) > 10 and [row for row in rows if f"{row}\n" not in page] == []


def test_cards_are_named_as_a_plan_takes_them() -> None:
    pages = "".join(page.read_text() for page in (cards_table.README, ROOT / "docs/models.md"))
    for gib, name in re.findall(r"\| (\d+) GB \(([^)]+)\), \d+ GB of RAM", pages):
        assert find_card(name)[1].gib == int(gib), name


def test_the_picture_is_that_of_the_newest_results() -> None:
    document = picture.results()
    assert document is not None and picture.PICTURE.read_text() == picture.picture(document)


def test_the_picture_has_every_curve_inside_it() -> None:
    drawn = ElementTree.fromstring(picture.PICTURE.read_text())
    width, height = (float(one) for one in drawn.attrib["viewBox"].split()[2:])
    lines = [one.attrib["points"] for one in drawn.iter("{http://www.w3.org/2000/svg}polyline")]
    document = picture.results()
    assert document is not None
    kinds = {entry["type"] for entry in document["sparse"]}
    assert len(lines) == 2 * 4 * len(kinds), "a curve and a sample for each of four engines"
    for points in lines:
        for point in points.split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= width and 0 <= y <= height


def test_a_curve_is_higher_where_the_speed_is() -> None:
    svg = picture.panel("x", {"exact": [(0.1, 30.0), (1.0, 10.0)], "dense": [(0.1, 20.0), (1.0, 20.0)]}, 0)
    curves = re.findall(r'<polyline class="(\w+)" points="([^"]+)"', svg)[::2]
    ends = {name: [float(point.split(",")[1]) for point in points.split()] for name, points in curves}
    assert ends["exact"][0] < ends["dense"][0] == ends["dense"][1] < ends["exact"][1]


def test_every_extra_for_users_is_named() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (listed,) = re.findall(r"^Extras of the installation: .*?\n\n", (ROOT / "README.md").read_text(), re.M | re.S)
    named = set(re.findall(r"`(\w+)` \(", listed))
    assert named == set(extras) - {"test", "bench", "check", "docs"}
