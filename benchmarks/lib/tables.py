"""Markdown tables of results, what stands around them, and the documents that they are written into."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def distinct(values: Iterable[str]) -> str:
    """Each value once, in order."""
    return ", ".join(dict.fromkeys(values))


def origin(document: Mapping[str, Any], commits: str | None = None) -> str:
    return f"{document['date'][:10]}, commit {commits or document['commit']}"


def processor(document: Mapping[str, Any], units: bool = False) -> str:
    cpu = document["cpu"]
    return f"{cpu['cores']} cores of {cpu['name']}" + (f" ({', '.join(cpu['units'])})" if units else "")


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: bool = False) -> str:
    """numbers: every column but the first is aligned to the right."""
    rule = "|---" + ("|---:" if numbers else "|---") * (len(heads) - 1) + "|"
    return "\n".join([_row(heads), rule, *map(_row, rows)]) + "\n"


def _row(cells: Sequence[str]) -> str:
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)


def paragraphs(*parts: str) -> str:
    """Parts with an empty line between them; empty ones are left out."""
    return "\n\n".join(part.rstrip("\n") for part in parts if part) + "\n"


def items(lines: Iterable[str]) -> str:
    """A list."""
    return "\n".join(f"- {line}" for line in lines)


# --- documents

Pages = Mapping[Path, Callable[[], Mapping[str, str | None]]]
"""What makes the tables of each page, by the names of their markers; None: no result, what stands there stays."""


def filled(text: str, name: str, body: str) -> str:
    """A page's text with `body` between the markers of that name; ValueError where it has none."""
    markers = re.compile(rf"(<!-- {name}: begin -->\n).*?(<!-- {name}: end -->)", re.DOTALL)
    if not markers.search(text):
        raise ValueError(f"no markers <!-- {name}: begin --> and <!-- {name}: end -->")
    return markers.sub(lambda found: found[1] + body + found[2], text)


def outdated(pages: Pages) -> dict[Path, str]:
    """The pages whose tables are not made from the newest results, with the text that they should have."""
    texts = {}
    for page, tables in pages.items():
        changed = text = page.read_text()
        for name, body in tables().items():
            changed = filled(changed, name, body) if body else changed
        if changed != text:
            texts[page] = changed
    return texts


def update(pages: Pages, check: bool) -> None:
    """Write the tables into their pages; check: end the program with a message instead where one is not up to date."""
    try:
        texts = outdated(pages)
    except ValueError as error:
        sys.exit(str(error))
    if check and texts:
        sys.exit(f"not made from the newest results: the tables in {', '.join(page.name for page in texts)}")
    for page, text in texts.items():
        page.write_text(text)


def write_tables(about: str | None, pages: Pages, draw: Callable[[], None] = lambda: None) -> None:
    """The whole of a script that writes tables into pages, or with --check only says whether they are up to date.

    about: the script's docstring. draw: what makes the plots beside them.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1: not up to date")
    check = parser.parse_args().check
    update(pages, check)
    if not check:
        draw()
