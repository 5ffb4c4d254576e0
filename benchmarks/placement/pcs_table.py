"""Decode and prompts of published models on PCs, simulated; what that assumes; and what was measured on an H200, beside
the same simulation: the tables of docs/hybrid.md, and one of docs/benchmarks.md.

    python -m benchmarks.placement.pcs_table [--check]     --check: only say whether the tables are up to date

Nothing is measured here, and the same code gives the same tables.
"""

from __future__ import annotations

from functools import cache

from benchmarks.lib.machine import ROOT
from benchmarks.lib.tables import Pages, paragraphs, table, write_tables
from benchmarks.placement.assumptions import BUSES, CARDS, EXPERT_SHARE, GIB, KINDS, RAM, assumptions_table, machine
from benchmarks.placement.h200 import WAKING, WHY, figures, measured_table, whole_table
from benchmarks.placement.prompts import largest_padded, prompt, replayed, with_chunk
from powerinfer.errors import RequestError
from powerinfer.hardware.cards import find_card
from powerinfer.placement.chunks import with_long_chunks
from powerinfer.placement.context_cost import CONTEXT
from powerinfer.placement.estimates import estimate_request, speed
from powerinfer.placement.plan import Plan, place

MODELS = (
    ("Qwen3-30B-A3B", "qwen3-30b-a3b", "q4_0"), ("Qwen3.6-35B-A3B", "qwen3.6-35b-a3b", "q4_0"),
    ("gpt-oss-20b", "gpt-oss-20b", "mxfp4"), ("gpt-oss-120b", "gpt-oss-120b", "mxfp4"),
    ("Nemotron 3 Nano 30B-A3B", "nemotron-3-nano-30b-a3b", "q4_0"), ("GLM-4.5-Air", "glm-4.5-air", "q4_0"),
    ("Qwen3.6-27B", "qwen3.6-27b", "q4_k_m"), ("Qwen3-32B", "qwen3-32b", "q4_k_m"),
    ("Llama 3.3 70B", "llama-3.3-70b", "q4_0"),
)  # fmt: skip
SMALL = (
    ("Qwen3-0.6B", "qwen3-0.6b", "q4_0"), ("Llama 3.2 1B", "llama-3.2-1b", "q4_0"),
    ("SmallThinker-4BA0.6B", "smallthinker-4b", "q4_0"), ("Qwen3-8B", "qwen3-8b", "q4_0"),
    ("Qwen3-30B-A3B", "qwen3-30b-a3b", "q4_0"),
)  # fmt: skip
SHORT_PROMPTS = (64, 128, 512)
PROMPTS = (512, 2048)
SHORT = 512
"""Tokens of a chunk of a long prompt where weights do not stream."""
ON_BUSES = (("Qwen3-30B-A3B", "RTX 4060"), ("gpt-oss-120b", "RTX 4070 Ti SUPER"), ("Qwen3-32B", "RTX 3060"),
            ("Llama 3.3 70B", "RTX 4090"))  # fmt: skip


@cache
def plan_of(shape: str, dtype: str, card: str, kind: str, bus: tuple[int, int] | None = None) -> Plan | None:
    """The plan for a PC; None: it does not hold the model."""
    plan = place(with_long_chunks(estimate_request(shape, dtype, machine(card, kind, bus=bus))))
    return None if isinstance(plan, RequestError) else plan


def cell(shape: str, dtype: str, card: str) -> str:
    """Decode with either RAM; a prompt's tokens a second, short and long."""
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
    return f"{decoded}; {' / '.join(read)}"


def simulated_table() -> str:
    body = [[title, dtype.upper(), *(cell(shape, dtype, card) for card in CARDS)] for title, shape, dtype in MODELS]
    heads = [f"{card}, {find_card(card)[1].gib} GB" for card in CARDS]
    about = (
        "`python -m benchmarks.placement.pcs_table`; simulated, not measured. Tokens a second of one request, half way "
        f"through {CONTEXT:,} tokens, every expert selected equally often, {RAM // GIB} GiB of RAM: decode with two "
        f"channels of DDR4-3200 / DDR5-5600; with the latter a prompt of {PROMPTS[0]} / {PROMPTS[1]:,} tokens in "
        "the chunks that the engine chooses, over the card's own bus. (disk): some is read from there while decoding. "
        f"{caution()}"
    )
    return paragraphs(about, table(["model", "weights", *heads], body))


def caution() -> str:
    """Speeds of a slow and of a fast card if a step takes as much longer as it did on the H200 (h200.py), and a
    prompt's if experts are multiplied half as fast; and of decode in memory that shorter chunks leave."""
    lost = max(one.gap for one in figures() if WHY.get(one.name, {}).get(one.requests) == WAKING)
    rates = []
    for card in (CARDS[0], CARDS[-1]):
        plan = plan_of(*MODELS[0][1:], card, KINDS[-1])
        assert plan is not None
        rates.append(f"{speed(1 / plan.choice.seconds)} would be {speed(1 / (plan.choice.seconds + 1e-3 * lost))}")
    longer = plan_of(*MODELS[0][1:], CARDS[1], KINDS[-1])
    plan = plan_of(*MODELS[0][1:], CARDS[0], KINDS[-1])
    assert plan is not None and longer is not None
    decoded, short = (speed(1 / one.choice.seconds) for one in (longer, with_chunk(longer, SHORT)))
    tokens = PROMPTS[-1]
    read, slower = (speed(tokens / prompt(plan, tokens, share).seconds) for share in (EXPERT_SHARE, EXPERT_SHARE / 2))
    return (
        f"With `--prefill-chunk {SHORT}` less memory is for prompts, and {decoded} would be {short}. If steps still "
        f"took the {lost:.1f} ms of (a) above, {', '.join(rates)}. If experts' products reached half of "
        f"what is assumed below, which nobody measured, the prompt's {read} would be {slower}."
    )


def buses_table() -> str:
    known = {title: (shape, dtype) for title, shape, dtype in MODELS}
    body, long = [], PROMPTS[-1]
    for bus in BUSES:
        cells = []
        for title, card in ON_BUSES:
            plan = plan_of(*known[title], card, KINDS[-1], bus)
            assert plan is not None
            cells.append(" / ".join(speed(long / prompt(one, long).seconds) for one in (with_chunk(plan, SHORT), plan)))
        body.append([f"PCIe {bus[0]}.0 x{bus[1]}", *cells])
    about = f"A prompt of {long:,} tokens over other buses, with `--prefill-chunk {SHORT}` / as the engine chooses:"
    return paragraphs(about, table(["", *(f"{title}, {card}" for title, card in ON_BUSES)], body))


def replayed_cell(shape: str, dtype: str, card: str) -> str:
    """Milliseconds of short prompts, launched and replayed; to how many tokens chunks would be padded."""
    plan = plan_of(shape, dtype, card, KINDS[-1])
    if plan is None or not plan.claims.gpu_head:
        return "-"
    every = plan.request.model.n_experts
    if plan.claims.slots not in (None, every):
        return "-"
    times = (f"{1e3 * prompt(plan, n).seconds:.0f} / {1e3 * replayed(plan, n):.0f}" for n in SHORT_PROMPTS)
    return f"{', '.join(times)}; {largest_padded(plan) or 'none'}"


def replayed_table() -> str:
    body = [[title, *(replayed_cell(shape, dtype, card) for card in CARDS)] for title, shape, dtype in SMALL]
    numbers = ", ".join(map(str, SHORT_PROMPTS[:-1]))
    about = (
        f"Milliseconds of a prompt of {numbers} and {SHORT_PROMPTS[-1]} tokens, launched / replayed, of models in "
        f"{SMALL[0][2].upper()} that the card has as a whole; and to how many tokens chunks would be padded:"
    )
    return paragraphs(about, table(["", *CARDS], body))


PAGES: Pages = {
    ROOT / "docs/hybrid.md": lambda: {
        "measured": measured_table(),
        "simulated": simulated_table(),
        "assumed": assumptions_table(),
    },
    ROOT / "docs/benchmarks.md": lambda: {
        "whole models simulated": paragraphs(whole_table(), buses_table(), replayed_table())
    },
}

if __name__ == "__main__":
    write_tables(__doc__, PAGES)
