"""What plans make of published models of experts on cards of 8 to 24 GB: the table of docs/experts.md.

    python -m benchmarks.placement.expert_cards [--check]

Nothing is measured, and the same code gives the same table: speeds are those of described machines, the card's memory
and the RAM are varied. Every expert is taken to be selected equally often, which no real model does; a profile puts
more of what tokens select on the GPU.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.lib.cells import number
from benchmarks.lib.machine import ROOT
from benchmarks.lib.tables import paragraphs, table, write_tables
from powerinfer.errors import PowerInferError
from powerinfer.hardware.description import Hardware, load
from powerinfer.placement.plan import PlanRequest, make_plan
from powerinfer.placement.power_law import assumed_profile
from powerinfer.placement.request import EVEN
from powerinfer.placement.shapes import described_model, find_shape

GIB = 1 << 30
CARDS = ((8, 32, "pc-8gb"), (12, 32, "pc-16gb"), (16, 64, "pc-16gb"), (24, 64, "pc-high"), (24, 128, "pc-high"))
"""GB of the card and of RAM, and the machine whose rates they have."""

CONTEXT = 8192
SYSTEM = 4
"""GB of RAM that the system and other programs have."""


def machine(card: int, ram: int, name: str) -> Hardware:
    described = load(name)
    assert described.gpu is not None
    gpu = replace(described.gpu, memory_bytes=card * GIB)
    return replace(described, gpu=gpu, cpu=replace(described.cpu, memory_bytes=ram * GIB, reserved_bytes=SYSTEM * GIB))


def cell(name: str, hardware: Hardware) -> str:
    """Tokens a second, the share of the experts that is on the GPU and, where others are on disk, that in RAM; nothing
    where the model does not fit."""
    shape = find_shape(name)
    model = described_model(shape.config, dtype_of(name), name, 0.0)
    context = min(CONTEXT, shape.config.context_length)
    try:
        request = PlanRequest(
            model, assumed_profile(EVEN, shape.config.ffn_sizes), hardware, context=context, selector="all"
        )
        plan = make_plan(request)
    except PowerInferError:
        return "-"
    speed = number(1 / plan.choice.seconds)
    disk, every = plan.claims.disk, sum(model.n_experts)
    in_ram = "" if disk is None else f" + {100 * sum(disk.about.experts.values()) / every:.0f} %"
    if plan.claims.slots is None:
        return f"{speed}, CPU{in_ram}"
    return f"{speed}, {100 * sum(plan.claims.slots) / every:.0f} %{in_ram}"


def dtype_of(name: str) -> str:
    return "mxfp4" if name.startswith("gpt-oss") else "q4_0"


MODELS = (
    "mixtral-8x7b", "olmoe-1b-7b", "qwen3-30b-a3b", "smallthinker-4b", "smallthinker-21b", "glm-4.5-air", "gpt-oss-20b",
    "gpt-oss-120b", "qwen3-next-80b-a3b", "qwen3.6-35b-a3b", "deepseek-v2-lite", "deepseek-v2", "deepseek-v3",
    "kimi-k2",
)  # fmt: skip


def cards_table() -> str:
    heads = [f"{card} GB, {ram} GB of RAM" for card, ram, _ in CARDS]
    machines = [machine(*one) for one in CARDS]
    body = []
    for name in MODELS:
        model = described_model(find_shape(name).config, dtype_of(name), name, 0.0)
        size = sum(one.panels for layer in (*model.attention, *model.ffn) for one in layer) + model.tables
        body.append([name, f"{size / 1e9:.0f} GB", *(cell(name, one) for one in machines)])
    about = (
        "`python -m benchmarks.placement.expert_cards`; predicted, not measured. Weights of 4 bits (Q4_0, gpt-oss "
        f"MXFP4), {CONTEXT} tokens of context, every expert selected equally often. Tokens per second of one request, "
        "and the share of the experts that is on the GPU, with + that in RAM where the others are read from disk (at "
        "up to 6.7 GB/s); CPU: the GPU is not used."
    )
    return paragraphs(about, table(["model", "weights", *heads], body))


PAGES = {ROOT / "docs/experts.md": lambda: {"cards": cards_table()}}

if __name__ == "__main__":
    write_tables(__doc__, PAGES)
