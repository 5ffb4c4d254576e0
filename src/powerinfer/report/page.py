"""A self-contained HTML page: no scripts, no links, inline images, for phones and wide screens.

All text is escaped here, by `text`; nothing else writes a name or a figure into the page.
"""

from __future__ import annotations

import html
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Image:
    """A plot: PNG bytes for light and for dark screens; alt: a description for screen readers."""

    light: bytes
    dark: bytes
    alt: str


@dataclass(frozen=True)
class Table:
    """Rows of cells as text; the first of a row is its name. fold: initially collapsed."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    fold: bool = False


@dataclass
class Section:
    """A heading, paragraphs, commands to type, plots with their captions, and tables."""

    title: str
    paragraphs: list[str] = field(default_factory=list)
    steps: list[tuple[str, str]] = field(default_factory=list)  # (what it makes, command)
    images: list[tuple[Image, str]] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)


def text(raw: str) -> str:
    """Raw text as HTML; non-printable characters are escaped."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in raw)
    return html.escape(shown.encode("utf-8", "replace").decode())


def page(
    title: str,
    subtitle: str,
    tiles: Sequence[tuple[str, str]],
    sections: Sequence[Section],
    mark: str,
    verdict: str | None = None,
) -> str:
    """The whole page. tiles: (figure, what it is) at the top; mark: metadata for `mark_of`; verdict: the sentence that
    stands first."""
    first = f'<p class="verdict">{text(verdict)}</p>\n' if verdict else ""
    figures = "".join(f"<div><b>{text(value)}</b><span>{text(what)}</span></div>" for value, what in tiles)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'\">\n"
        f'<meta name="{_MARK}" content="{text(mark)}">\n'
        f"<title>{text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<header><h1>{text(title)}</h1><p>{text(subtitle)}</p></header>\n"
        f'<main>\n{first}<div class="tiles">{figures}</div>\n{"".join(map(_section, sections))}'
        "</main>\n</body>\n</html>\n"
    )


def mark_of(document: str) -> str | None:
    """The mark of a page that `page` made; None of any other text."""
    _, mark, rest = document[:4096].partition(f'<meta name="{_MARK}" content="')
    return html.unescape(rest.partition('"')[0]) if mark else None


def _section(section: Section) -> str:
    parts = [f"<section>\n<h2>{text(section.title)}</h2>\n"]
    parts += [f"<p>{text(paragraph)}</p>\n" for paragraph in section.paragraphs]
    if section.steps:
        steps = "".join(f"<li>{text(what)}<pre>{text(command)}</pre></li>" for what, command in section.steps)
        parts.append(f"<ul>{steps}</ul>\n")
    parts += [_figure(image, caption) for image, caption in section.images]
    parts += [_table(table) for table in section.tables]
    return "".join([*parts, "</section>\n"])


def _figure(image: Image, caption: str) -> str:
    light, dark = (f"data:image/png;base64,{b64encode(raw).decode()}" for raw in (image.light, image.dark))
    return (
        f'<figure><picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img src="{light}" alt="{text(image.alt)}"></picture><figcaption>{text(caption)}</figcaption></figure>\n'
    )


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{text(cell)}</th>' for cell in table.head)
    rows = []
    for first, *rest in table.rows:
        cells = "".join(f"<td>{text(cell)}</td>" for cell in rest)
        rows.append(f'<tr><th scope="row">{text(first)}</th>{cells}</tr>\n')
    body = f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>{"".join(rows)}</tbody></table></div>'
    title = text(table.title)
    if table.fold:
        return f"<details><summary>{title}</summary>{body}</details>\n"
    return (f"<h3>{title}</h3>" if title else "") + body + "\n"


_MARK = "powerinfer-report"

_STYLE = """
:root{--ink:#1f2328;--soft:#59636e;--line:#d1d9e0;--paper:#fff;--card:#f6f8fa}
@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--soft:#9198a1;--line:#3d444d;--paper:#161b22;--card:#1f2630}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:62rem;padding:1rem;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
h1{margin:.5rem 0 0;font-size:1.6rem}h2{margin:2.5rem 0 .5rem;font-size:1.2rem}h3{margin:1.5rem 0 .25rem;font-size:1rem}
header p,figcaption,.tiles span,summary{color:var(--soft)}header p{margin:.25rem 0 0}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:.6rem;margin:1.2rem 0}
.tiles div{background:var(--card);border-radius:.5rem;padding:.6rem .8rem}
.tiles b{display:block;font-size:1.25rem}.tiles span{font-size:.85rem}
.verdict{margin:1.2rem 0 0;font-size:1.15rem;font-weight:600}
figure{margin:1rem 0 1.5rem}img{width:100%;height:auto;border:1px solid var(--line);border-radius:.5rem}
figcaption{font-size:.9rem}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{padding:.2rem .7rem;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap;overflow-wrap:normal}
th:first-child{text-align:left}thead th{color:var(--soft);font-weight:600}tbody th{font-weight:400}
pre{margin:.3rem 0;padding:.5rem .8rem;background:var(--card);border-radius:.5rem;white-space:pre-wrap;font-size:.85rem}
summary{cursor:pointer}
"""
