"""Results as JSON files in benchmarks/results/, and the Markdown tables of the documents that are made of them."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.lib.machine import ROOT

RESULTS = ROOT / "benchmarks/results"


def write_json(path: Path, document: dict[str, Any]) -> None:
    write_whole(path, (json.dumps(document, indent=1) + "\n").encode())


def write_whole(path: Path, data: bytes) -> None:
    """Write a file beside its place and rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    beside.write_bytes(data)
    os.replace(beside, path)
    print(path, file=sys.stderr)


def path_of(document: dict[str, Any], name: str | None = None) -> Path:
    """Where a result is written by default: its name, or else its kind, and its date."""
    return RESULTS / f"{name or document['kind']}-{document['date'][:16].replace(':', '')}.json"


def of_kind(kind: str) -> list[dict[str, Any]]:
    """All results of a kind, oldest first by the date inside them."""
    documents = (json.loads(path.read_text()) for path in RESULTS.glob("*.json"))
    return sorted((one for one in documents if one.get("kind") == kind), key=lambda document: document["date"])


def newest(kind: str, part: str | None = None) -> dict[str, Any] | None:
    """The latest result of a kind, of those that have a part where one is given."""
    return next((one for one in reversed(of_kind(kind)) if part is None or part in one), None)


def of_one_machine(kind: str) -> list[dict[str, Any]]:
    """The results of a kind that were measured on the newest one's processor, oldest first."""
    documents = of_kind(kind)
    return [one for one in documents if one["cpu"] == documents[-1]["cpu"]]


def number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def percent(share: float | None, digits: int = 1) -> str:
    return "" if share is None else f"{100 * share:.{digits}f} %"


def row(*cells: str) -> str:
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)


def header(*cells: str, numbers: bool = False) -> list[str]:
    """The first two lines of a table. numbers: every column but the first is aligned to the right."""
    return [row(*cells), "|---" + ("|---:" if numbers else "|---") * (len(cells) - 1) + "|"]


def table(head: list[str], body: list[list[str]], numbers: bool = False) -> str:
    return "\n".join([*header(*head, numbers=numbers), *(row(*cells) for cells in body)]) + "\n"


def filled(text: str, name: str, body: str) -> str:
    """A page's text with `body` between the markers of that name; ValueError where it has none."""
    markers = re.compile(rf"(<!-- {name}: begin -->\n).*?(<!-- {name}: end -->)", re.DOTALL)
    if not markers.search(text):
        raise ValueError(f"no markers <!-- {name}: begin --> and <!-- {name}: end -->")
    return markers.sub(lambda found: found[1] + body + found[2], text)


Make = Callable[[], Mapping[str, str | None]]
"""Makes the tables of a page, by the names of their markers; None: no result, what stands there stays."""


def write_tables(about: str | None, pages: Path | Mapping[Path, Make], make: Make = dict) -> None:
    """The whole of a script that writes tables into pages, or with --check only says whether they are up to date.

    about: the script's docstring. pages: what makes the tables of each; or a page, whose tables `make` makes.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1: not up to date")
    arguments = parser.parse_args()
    written = {}
    for page, tables in ({pages: make} if isinstance(pages, Path) else pages).items():
        changed = text = page.read_text()
        try:
            for name, body in tables().items():
                changed = filled(changed, name, body) if body else changed
        except ValueError as error:
            sys.exit(f"{page.name}: {error}")
        if arguments.check and changed != text:
            sys.exit(f"the tables in {page.name} are not made from the newest results")
        written[page] = changed
    if arguments.check:
        sys.exit(0)
    for page, changed in written.items():
        page.write_text(changed)
