"""Draw the picture of the README, docs/img/speed-by-activity.svg, from the newest results of compare.py.

    python -m benchmarks.sparse.picture [--check]     --check: only say whether it is up to date

Decode speed against the share of neurons that fire, a panel for each type of weights. Colours follow the reader's light
or dark screen.
"""

from __future__ import annotations

import argparse
import math
import sys
from html import escape
from typing import Any

from benchmarks.lib.machine import ROOT
from benchmarks.sparse.table import rate, results

PICTURE = ROOT / "docs/img/speed-by-activity.svg"
WIDTH, HEIGHT = 400, 270  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 44, 104, 50, 46  # around its axes
LINES = {"predicted": "predicted", "exact": "exact", "all": "dense"}  # engine -> its name in the picture
PEER = "llama.cpp"
STYLE = """
text{font:12px system-ui,sans-serif;fill:#59636e}.title{font-weight:600;fill:#1f2328}.grid{stroke:#d1d9e0}
polyline{fill:none;stroke-width:2.5}.predicted{stroke:#d55e00}.exact{stroke:#0072b2}.dense,.peer{stroke:#8a8a8a}
.peer{stroke-dasharray:4 4}text.predicted,text.exact,text.dense,text.peer{stroke:none}
text.predicted{fill:#b34e00}text.exact{fill:#0072b2}
@media(prefers-color-scheme:dark){text{fill:#9198a1}.title{fill:#e6edf3}.grid{stroke:#3d444d}
text.predicted{fill:#ff8a3d}text.exact{fill:#58b0e8}.predicted{stroke:#ff8a3d}.exact{stroke:#58b0e8}}
"""


def curves(entries: list[dict[str, Any]], peer: str | None) -> dict[str, list[tuple[float, float]]]:
    """Name -> (share of neurons active, tokens per second), in order of the share."""
    engines = LINES | ({} if peer is None else {peer: PEER})
    found = {
        name: [(entry["active"], speed) for entry in entries if (speed := rate(entry, engine)) is not None]
        for engine, name in engines.items()
    }
    return {name: points for name, points in found.items() if points}


def panel(title: str, found: dict[str, list[tuple[float, float]]], x0: float) -> str:
    """One pair of axes with its curves, and their names beside it. Shares are on a logarithmic axis."""
    shares = sorted({share for points in found.values() for share, _ in points})
    most = max(speed for points in found.values() for _, speed in points)
    step = next(one for one in (5, 10, 20, 25, 50, 100, 200, 500, 1000) if most / one <= 5)
    top = step * math.ceil(most / step)
    low, high = math.log(shares[0]), math.log(shares[-1])

    def x(share: float) -> float:
        return x0 + LEFT + (math.log(share) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(speed: float) -> float:
        return TOP + (1 - speed / top) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<text class="title" x="{x0 + LEFT:.1f}" y="20">{escape(title)}</text>']
    parts.append(f'<text x="{x0 + LEFT:.1f}" y="38">tokens a second</text>')
    for value in range(0, top + 1, step):
        at = f"{y(value):.1f}"
        parts.append(f'<line class="grid" x1="{x0 + LEFT:.1f}" x2="{x0 + WIDTH - RIGHT:.1f}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text x="{x0 + LEFT - 6:.1f}" y="{y(value) + 4:.1f}" text-anchor="end">{value}</text>')
    for share in shares:
        parts.append(f'<text x="{x(share):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{100 * share:g}</text>')
    middle = x0 + LEFT + (WIDTH - LEFT - RIGHT) / 2
    parts.append(f'<text x="{middle:.1f}" y="{HEIGHT - 8}" text-anchor="middle">neurons that fire, %</text>')
    for number, (name, points) in enumerate(found.items()):
        kind = "peer" if name == PEER else name
        line = " ".join(f"{x(share):.1f},{y(speed):.1f}" for share, speed in points)
        begin, height = x0 + WIDTH - RIGHT + 8, TOP + 18 * number
        sample = f"{begin:.1f},{height} {begin + 20:.1f},{height}"
        parts += [f'<polyline class="{kind}" points="{drawn}"/>' for drawn in (line, sample)]
        parts.append(f'<text class="{kind}" x="{begin + 26:.1f}" y="{height + 4}">{name}</text>')
    return "\n".join(parts)


def picture(document: dict[str, Any]) -> str:
    """The SVG."""
    peer = next(iter(document["peers"]), None)
    kinds = list(dict.fromkeys(entry["type"] for entry in document["sparse"]))
    panels = []
    for column, kind in enumerate(kinds):
        entries = [entry for entry in document["sparse"] if entry["type"] == kind]
        panels.append(panel(f"{kind} weights", curves(entries, peer), column * WIDTH))
    about = "Decode speed of a model of 1.1 billion parameters by the share of its neurons that fire"
    size = f'viewBox="0 0 {WIDTH * len(kinds)} {HEIGHT}" width="{WIDTH * len(kinds)}" height="{HEIGHT}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{about}">\n<title>{about}</title>\n'
        f"<style>{STYLE}</style>\n" + "\n".join(panels) + "\n</svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1: not up to date")
    arguments = parser.parse_args()
    document = results()
    if document is None:
        sys.exit("no result of benchmarks/sparse/compare.py")
    made = picture(document)
    if not arguments.check:
        PICTURE.parent.mkdir(parents=True, exist_ok=True)
        PICTURE.write_text(made)
    elif not PICTURE.is_file() or PICTURE.read_text() != made:
        sys.exit(f"{PICTURE.name} is not made from the newest results")


if __name__ == "__main__":
    main()
