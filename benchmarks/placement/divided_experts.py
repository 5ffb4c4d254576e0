"""What plans gain by hot neurons of experts on a card, by how hot they are: the table of docs/experts.md.

    python -m benchmarks.placement.divided_experts [--check]

Nothing is measured: as of `expert_cards`, of machines that `plan --card` describes. Predictors of rank 128 select 1.5
times the neurons that fire, and those of an expert fire by a power law.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks.lib.cells import number
from benchmarks.lib.machine import ROOT
from benchmarks.lib.tables import paragraphs, table, write_tables
from powerinfer.errors import PowerInferError
from powerinfer.experts import NeuronUse
from powerinfer.hardware.cards import described_machine
from powerinfer.models.inventory import matrix
from powerinfer.placement.plan import PlanRequest, make_plan
from powerinfer.placement.power_law import Law, fit_skew, power_law
from powerinfer.placement.request import even_profile
from powerinfer.placement.shapes import SELECTED_PER_FIRING, Model, described_model, find_shape

NAME = "nemotron-3-nano-30b-a3b"
CARDS = (("RTX 4060", 32), ("RTX 3060 12 GB", 32), ("RTX 4060 Ti 16 GB", 64))
"""Each with GB of RAM."""
HOT = (0.25, 0.38, 0.6)
"""Shares of an expert's neurons that carry 80 % of what fires."""
RANK, CONTEXT = 128, 8192


def predicted_model(dtype: str) -> Model:
    """With predictors inside its experts."""
    config = find_shape(NAME).config
    model = described_model(config, dtype, NAME, 0.0).by_neuron(predicted=True)
    inner, layers = matrix("Q8_0", RANK, config.d_model), range(config.n_layers)
    rows = [model.neurons_inside(layer, True) for layer in layers]
    predictors = tuple((inner, matrix("Q8_0", n, RANK)) if n else () for n in rows)
    return replace(model, predictors=predictors, selected=(SELECTED_PER_FIRING,) * config.n_layers)


def inside(model: Model, hot: float) -> dict[int, NeuronUse]:
    """That share of the neurons of each expert is hot."""
    skew, uses = fit_skew(Law(model.firing, hot), 1), {}
    for layer, about in model.config.experts.items():
        order = np.tile(np.arange(about.size, dtype=np.int32), (about.n_experts, 1))
        uses[layer] = NeuronUse(order, power_law(model.firing, skew, about.size))
    return uses


def speed(model: Model, card: str, ram: int) -> str:
    """Tokens a second; in brackets neurons of each expert on the GPU, and of how many layers, where experts are
    divided; nothing where the model does not fit."""
    hardware = described_machine(card, ram << 30)
    request = PlanRequest(model, even_profile(model), hardware, context=CONTEXT, selector="all")
    try:
        plan = make_plan(request)
    except PowerInferError:
        return "-"
    some = plan.claims.inside
    divided = f" ({min(some.values())} of {len(some)} layers)" if some else ""
    return f"{number(1 / plan.choice.seconds)}{divided}"


def divided_table() -> str:
    heads = [f"{100 * hot:g} % hot" for hot in HOT]
    body = []
    for dtype in ("q4_0", "q5_0", "q8_0"):
        model = predicted_model(dtype)
        uses = [inside(model, hot) for hot in HOT]
        for card, ram in CARDS:
            speeds = [speed(replace(model, inside=one), card, ram) for one in uses]
            body.append([dtype.upper(), f"{card}, {ram} GB of RAM", speed(model, card, ram), *speeds])
    about = (
        "`python -m benchmarks.placement.divided_experts`; predicted, not measured: Nemotron 3 Nano 30B-A3B with "
        f"`predicted`, {CONTEXT} tokens of context, every expert selected equally often. Tokens per second of one "
        "request with whole experts, and with divided ones if that share of an expert's neurons carries 80 % of what "
        "fires; in brackets the fewest hot neurons of an expert's 1,856, and of how many of 23 layers. How it is in "
        "that model is not published."
    )
    return paragraphs(about, table(["weights", "card", "whole", *heads], body))


PAGES = {ROOT / "docs/experts.md": lambda: {"divided": divided_table()}}

if __name__ == "__main__":
    write_tables(__doc__, PAGES)
