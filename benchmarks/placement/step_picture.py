"""Draw the timeline of a step, docs/img/step-rtx-4060.svg: what both devices of a PC do in a few layers, simulated.

    python -m benchmarks.placement.step_picture [--check]     --check: only say whether it is up to date

Qwen3-30B-A3B beside an RTX 4060, from the plan's own seconds, whose order of launches, copies and calls is that which
the tests hold by the clocks of their stand-in for a GPU (tests/test_timeline.py). Above with the exchange that was
measured, by calls of functions; below with one as others measured it, by flags, as the engine has them, too, and with
three quarters of the experts that a token selects on the GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from html import escape

from benchmarks.lib.machine import ROOT
from benchmarks.placement.assumptions import machine
from benchmarks.placement.h200 import HITS, skewed
from powerinfer.placement.chunks import with_long_chunks
from powerinfer.placement.estimates import estimate_request
from powerinfer.placement.plan import Plan, PlanRequest, make_plan

PICTURE = ROOT / "docs/img/step-rtx-4060.svg"
CARD, SHAPE, DTYPE = "RTX 4060", "qwen3-30b-a3b", "q4_0"
SHOWN = 4
"""Layers in the picture."""
FLAGS_US = 8.0
"""An exchange by flags in memory that both devices see, as others measured it."""
WIDTH, LEFT, RIGHT, LANE, TOP, PANEL = 880, 52, 12, 22, 44, 136
LANES = ("GPU", "link", "CPU")
STYLE = """
text{font:12px system-ui,sans-serif;fill:#59636e}.title{font-weight:600;fill:#1f2328}.axis{stroke:#d1d9e0}
.attention{fill:#8a8a8a}.hot{fill:#d55e00}.exchange{fill:#b8a100}.cold{fill:#0072b2}
@media(prefers-color-scheme:dark){text{fill:#9198a1}.title{fill:#e6edf3}.axis{stroke:#3d444d}
.hot{fill:#ff8a3d}.cold{fill:#58b0e8}}
"""
KINDS = {"attention": "attention, router, and what only one device does", "hot": "experts on the GPU",
         "exchange": "exchange", "cold": "experts in RAM"}  # fmt: skip


@dataclass(frozen=True)
class Span:
    """Seconds from the begin of a step in which a lane is busy. kind: of `KINDS`."""

    lane: str
    kind: str
    begin: float
    end: float


def spans(plan: Plan) -> Iterator[Span]:
    """What a step does, layer by layer, and its ends behind them; together as long as the plan says."""
    now = 0.0
    for layer, own in enumerate(plan.choice.layer_seconds):
        on_gpu = layer < plan.claims.gpu_layers
        first = now + own["other"]
        yield Span("GPU" if on_gpu else "CPU", "attention", now, first)
        gpu_end = first + own["gpu"]
        if own["gpu"]:
            yield Span("GPU", "hot", first, gpu_end)
        out = first + own["sync"] / 2
        back = out + own["cpu"]
        if own["cpu"]:
            yield Span("CPU", "cold", out, back)
        now = max(gpu_end, back + own["sync"] / 2)
        if own["sync"]:
            yield Span("link", "exchange", first, out)
            yield Span("link", "exchange", back, back + own["sync"] / 2)
        now += own["disk"]
    if plan.choice.seconds > now:
        yield Span("GPU" if plan.claims.gpu_head else "CPU", "attention", now, plan.choice.seconds)


def layers_shown(plan: Plan) -> list[Span]:
    """The spans of some layers in a row that have experts on both devices, from 0 on."""
    each = [own["other"] + max(own["gpu"], own["cpu"] + own["sync"]) for own in plan.choice.layer_seconds]
    both = [layer for layer, own in enumerate(plan.choice.layer_seconds) if own["cpu"] and own["sync"]]
    first = both[0]
    begin, end = sum(each[:first]), sum(each[: first + SHOWN])
    inside = [one for one in spans(plan) if begin - 1e-12 <= one.begin < end - 1e-12]
    return [Span(one.lane, one.kind, one.begin - begin, one.end - begin) for one in inside]


def request() -> PlanRequest:
    return with_long_chunks(estimate_request(SHAPE, DTYPE, machine(CARD)))


def plans() -> dict[str, Plan]:
    """Of the engine as it is, and as it may become, by title."""
    today = request()
    config = today.model.config
    experts, top_k = config.experts[0].n_experts, config.experts[0].router.top_k
    now = make_plan(today)
    held = sum(now.claims.slots or ()) / sum(today.model.n_experts)
    known = skewed(experts, top_k, held, HITS[8])
    flags = replace(today, hardware=replace(today.hardware, sync_us=FLAGS_US))
    later = make_plan(replace(flags, frequencies=dict.fromkeys(config.experts, known)))
    hits = f"exchange in {FLAGS_US:g} us, three quarters of what is selected on the GPU"
    return {f"exchange in {today.hardware.sync_us:.3g} us": now, hits: later}


def panel(title: str, shown: list[Span], scale: float, y0: float) -> str:
    """One timeline. scale: pixels a second."""
    parts = [f'<text class="title" x="{LEFT}" y="{y0 + 16}">{escape(title)}</text>']
    for number, lane in enumerate(LANES):
        y = y0 + 26 + number * (LANE + 6)
        parts.append(f'<text x="{LEFT - 8}" y="{y + 15}" text-anchor="end">{lane}</text>')
        parts += [
            f'<rect class="{one.kind}" x="{LEFT + one.begin * scale:.1f}" y="{y}" '
            f'width="{max(0.5, (one.end - one.begin) * scale - 0.5):.1f}" height="{LANE}"/>'
            for one in shown
            if one.lane == lane
        ]
    return "\n".join(parts)


def picture() -> str:
    """The SVG."""
    every = plans()
    shown = {title: layers_shown(plan) for title, plan in every.items()}
    longest = max(one.end for some in shown.values() for one in some)
    scale = (WIDTH - LEFT - RIGHT) / longest
    parts, at = [], LEFT
    bottom = TOP + len(every) * PANEL - 20
    step = next(one for one in (20, 50, 100, 200, 500, 1000) if longest * 1e6 / one <= 12)
    for us in range(0, int(longest * 1e6) + 1, step):
        x = LEFT + us * 1e-6 * scale
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{us}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{bottom + 32}" text-anchor="end">microseconds</text>')
    for kind, name in KINDS.items():
        parts.append(f'<rect class="{kind}" x="{at}" y="8" width="12" height="12"/>')
        parts.append(f'<text x="{at + 18}" y="18">{escape(name)}</text>')
        at += 40 + 7 * len(name)
    for number, (title, plan) in enumerate(every.items()):
        about = f"{title}: {1 / plan.choice.seconds:.0f} tokens a second"
        parts.append(panel(about, shown[title], scale, TOP - 14 + number * PANEL))
    about = f"{SHOWN} layers of a step of Qwen3-30B-A3B beside an RTX 4060, simulated"
    height = bottom + 40
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{about}">\n<title>{about}</title>\n'
        f"<style>{STYLE}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1: not up to date")
    check, made = parser.parse_args().check, picture()
    if not check:
        PICTURE.write_text(made)
    elif not PICTURE.is_file() or PICTURE.read_text() != made:
        sys.exit(f"{PICTURE.name} is not up to date")


if __name__ == "__main__":
    main()
