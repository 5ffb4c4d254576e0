"""Decode and prompts of published models on PCs, simulated; what that assumes; and what was measured on an H200, beside
the same simulation: the tables of docs/hybrid.md, and one of docs/benchmarks.md.

    python -m benchmarks.placement.pcs_table [--check]     --check: only say whether the tables are up to date

Nothing is measured here, and the same code gives the same tables.
"""

from __future__ import annotations

from functools import cache

from benchmarks.lib.machine import ROOT
from benchmarks.lib.tables import Pages, paragraphs, table, write_tables
from benchmarks.placement.assumptions import BUSES, CARDS, GIB, KINDS, RAM, assumptions_table, machine
from benchmarks.placement.h200 import WAKING, WHY, figures, measured_table, whole_table
from benchmarks.placement.prompts import prompt, with_chunk
from powerinfer.errors import RequestError
from powerinfer.hardware.cards import find_card
from powerinfer.placement.estimates import CONTEXT, estimate_request, speed
from powerinfer.placement.plan import Plan, place

MODELS = (
    ("Qwen3-30B-A3B", "qwen3-30b-a3b", "q4_0"), ("Qwen3.6-35B-A3B", "qwen3.6-35b-a3b", "q4_0"),
    ("gpt-oss-20b", "gpt-oss-20b", "mxfp4"), ("gpt-oss-120b", "gpt-oss-120b", "mxfp4"),
    ("Nemotron 3 Nano 30B-A3B", "nemotron-3-nano-30b-a3b", "q4_0"), ("GLM-4.5-Air", "glm-4.5-air", "q4_0"),
    ("Qwen3.6-27B", "qwen3.6-27b", "q4_k_m"), ("Qwen3-32B", "qwen3-32b", "q4_k_m"),
    ("Llama 3.3 70B", "llama-3.3-70b", "q4_0"),
)  # fmt: skip
PROMPTS = (512, 2048)
LONG = 2048
"""Tokens of a chunk of a long prompt, beside the engine's own."""
ON_BUSES = (("Qwen3-30B-A3B", "RTX 4060"), ("gpt-oss-120b", "RTX 4070 Ti SUPER"), ("Qwen3-32B", "RTX 3060"),
            ("Llama 3.3 70B", "RTX 4090"))  # fmt: skip


@cache
def plan_of(shape: str, dtype: str, card: str, kind: str, bus: tuple[int, int] | None = None) -> Plan | None:
    """The plan for a PC; None: it does not hold the model."""
    plan = place(estimate_request(shape, dtype, machine(card, kind, bus=bus)))
    return None if isinstance(plan, RequestError) else plan


def cell(shape: str, dtype: str, card: str) -> str:
    """Decode with either RAM; a prompt's tokens a second, short and long, and the long one in chunks of `LONG`."""
    plans = [plan_of(shape, dtype, card, kind) for kind in KINDS]
    if any(plan is None for plan in plans):
        return "-"
    decoded = " / ".join(speed(1 / plan.choice.seconds) for plan in plans if plan is not None)
    newest = plans[-1]
    assert newest is not None
    disk = " (disk)" if newest.claims.disk is not None else ""
    if not newest.claims.gpu_layers or disk:
        return f"{decoded}{disk}"
    read = [speed(tokens / prompt(newest, tokens).seconds) for tokens in PROMPTS]
    long = with_chunk(newest, LONG)
    return f"{decoded}; {' / '.join(read)} / {speed(LONG / prompt(long, LONG).seconds)}"


def simulated_table() -> str:
    body = [[title, dtype.upper(), *(cell(shape, dtype, card) for card in CARDS)] for title, shape, dtype in MODELS]
    heads = [f"{card}, {find_card(card)[1].gib} GB" for card in CARDS]
    about = (
        "`python -m benchmarks.placement.pcs_table`; simulated, not measured. Tokens a second of one request, half way "
        f"through {CONTEXT:,} tokens, every expert selected equally often, {RAM // GIB} GiB of RAM: decode with two "
        f"channels of DDR4-3200 / DDR5-5600; with the latter a prompt of {PROMPTS[0]} / {PROMPTS[1]:,} tokens / the "
        f"same with `--prefill-chunk {LONG}`, over the card's own bus. (disk): some is read from there while decoding. "
        f"{caution()}"
    )
    return paragraphs(about, table(["model", "weights", *heads], body))


def caution() -> str:
    """Speeds of a slow and of a fast card if a step takes as much longer as it did on the H200 (h200.py)."""
    lost = max(one.gap for one in figures() if WHY.get(one.name, {}).get(one.requests) == WAKING)
    rates = []
    for card in (CARDS[0], CARDS[-1]):
        plan = plan_of(*MODELS[0][1:], card, KINDS[-1])
        assert plan is not None
        rates.append(f"{speed(1 / plan.choice.seconds)} would be {speed(1 / (plan.choice.seconds + 1e-3 * lost))}")
    return f"If steps still took the {lost:.1f} ms of (a) above, {', '.join(rates)}."


def buses_table() -> str:
    known = {title: (shape, dtype) for title, shape, dtype in MODELS}
    body = []
    for bus in BUSES:
        cells = []
        for title, card in ON_BUSES:
            plan = plan_of(*known[title], card, KINDS[-1], bus)
            assert plan is not None
            long = with_chunk(plan, LONG)
            cells.append(" / ".join(speed(LONG / prompt(one, LONG).seconds) for one in (plan, long)))
        body.append([f"PCIe {bus[0]}.0 x{bus[1]}", *cells])
    about = f"A prompt of {LONG:,} tokens over other buses, in chunks of {_chunk()} / {LONG:,}:"
    return paragraphs(about, table(["", *(f"{title}, {card}" for title, card in ON_BUSES)], body))


def _chunk() -> int:
    return estimate_request(*MODELS[0][1:], machine(CARDS[0])).chunk


PAGES: Pages = {
    ROOT / "docs/hybrid.md": lambda: {
        "measured": measured_table(),
        "simulated": paragraphs(simulated_table(), buses_table()),
        "assumed": assumptions_table(),
    },
    ROOT / "docs/benchmarks.md": lambda: {"whole models simulated": whole_table()},
}

if __name__ == "__main__":
    write_tables(__doc__, PAGES)
