"""What dividing a layer's experts (`--split-mode expert`), or the neurons of its FFN, between two cards would gain over
layers on either card.

    python -m benchmarks.placement.spread_layers

Nothing is measured: by plans for machines that `plan --card` describes. Of experts it is what plans with and without
`--split-mode expert` predict. Neurons of dense FFNs are not divided; what that would gain is by the terms of plans:
both cards read their shares of an FFN at the same time, chosen so that both end at once, as if all bytes could be
shared so; attention and what is in RAM stay as they are, and a layer is divided only where that gains. For each layer
the residual stream goes to the other card and a sum comes back, through memory of the host, since cards for PCs cannot
read each other's: over both buses, and with a time to meet. How long that is no one has measured on two cards: 10 us is
about what four passes of PCIe take, 150 us what a GPU and a CPU take to meet on an H200 (`cards.SYNC_US`). Of prompts
the operations are halved instead.
"""

from __future__ import annotations

import math
from dataclasses import replace
from unittest.mock import patch

from benchmarks.lib.tables import paragraphs, table
from benchmarks.placement.prompts import prompt
from powerinfer.config import EngineConfig
from powerinfer.errors import RequestError
from powerinfer.hardware.cards import BUS, LANE_GB_S, described_machine
from powerinfer.placement import cost, spread
from powerinfer.placement.plan import Plan, PlanPart, place
from powerinfer.placement.request import PlanConfig, shape_subject

MACHINES = (
    ("RTX 3090, RTX 3090", 64), ("RTX 4060 Ti 16GB, RTX 3060", 64), ("RTX 5090, RTX 3090", 64),
)  # fmt: skip
"""Cards, of PCIe 4 x16, 4 x8 and 5 x16, and GB of RAM."""
MODELS = ("qwen3-30b-a3b", "gpt-oss-120b", "glm-4.5-air", "llama-3.3-70b", "qwen2.5-32b", "llama-13b")
BATCHES = (1, 8)
MEET_US = (10.0, 50.0, 150.0)
"""Of both ways together."""
CONTEXT, TOKENS = 4096, 4096
SLOW_BUS = BUS * 8 * LANE_GB_S[3]
"""GB/s that copies reach of PCIe 3 x8, for the slowest boards with two slots."""


def planned(name: str, cards: str, ram: int, batch: int, split_mode: str = "layer", slow: bool = False) -> Plan | None:
    """None: it does not fit. slow: by the bus of the slowest boards."""
    engine = EngineConfig(context=CONTEXT, max_batch=batch, split_mode=split_mode)
    machine = described_machine(cards, ram << 30)
    if slow:
        further = tuple(replace(card, copy_gb_s=SLOW_BUS) for card in machine.cards)
        machine = replace(machine, copy_gb_s=SLOW_BUS, cards=further)
    plan = place(replace(shape_subject(name, None, "auto").request(machine, engine, PlanConfig()), batch=batch))
    return None if isinstance(plan, RequestError) or not plan.parts else plan


def divisible(part: PlanPart, layer: int, batch: int) -> float:
    """Seconds of a card for what of a layer's dense FFN may be on either; layer: of the part."""
    plan, model = part.plan, part.plan.request.model
    gpu = plan.request.hardware.gpu
    assert gpu is not None
    if plan.claims.bundles:
        return max(0.0, plan.choice.layer_seconds[layer]["gpu"] - cost.fixed_seconds(gpu, plan.selector))
    return model.config.layers[layer].ffn.share_read(batch) * cost.matrix_seconds(gpu, model.ffn[layer], False)


def exchanged(plan: Plan, tokens: int, meet_us: float, slow: bool) -> float:
    """Seconds of a layer's exchange, there and back."""
    buses = [SLOW_BUS if slow else card.copy_gb_s for card in plan.request.hardware.all_cards]
    nbytes = 4 * tokens * plan.request.model.config.d_model
    return 1e-6 * meet_us + 2 * sum(nbytes / (1e9 * bus) for bus in buses)


def together(own: float, other: float, exchange: float) -> float:
    """Seconds of what takes `own` on the one card and `other` on the other, where the latter begins later."""
    return min(own, (1 + exchange / other) / (1 / own + 1 / other)) if own and other else own


def dense_gain(plan: Plan, meet_us: float, slow: bool) -> float:
    """How many times as fast a step would be with every dense FFN divided between both cards."""
    batch, saved = plan.request.batch, 0.0
    exchange = exchanged(plan, batch, meet_us, slow)
    rates = [card.device.dense_gb_s["other"] for card in plan.request.hardware.all_cards]
    for number, part in enumerate(plan.parts):
        for layer in range(part.plan.claims.gpu_layers):
            own, terms = divisible(part, layer, batch), part.plan.choice.layer_seconds[layer]
            less = own - together(own, own * rates[number] / rates[1 - number], exchange)
            beside = terms["cpu"] + terms["sync"]
            split = max(terms["gpu"], beside) - max(terms["gpu"] - less, beside)
            saved += split if part.plan.claims.bundles else less
    return plan.choice.seconds / (plan.choice.seconds - saved)


def expert_gain(name: str, cards: str, ram: int, batch: int, meet_us: float, slow: bool) -> float:
    """How many times as fast a step is with each layer's experts spread over both cards, as plans say."""
    with patch.object(spread, "MEET_US", meet_us):
        whole, apart = (planned(name, cards, ram, batch, split, slow) for split in ("layer", "expert"))
    return whole.choice.seconds / apart.choice.seconds if whole and apart else math.nan


def row(name: str, cards: str, ram: int) -> list[str] | None:
    """Cells of a model on two cards; None: it does not fit, or one of them holds it."""
    cells = []
    for batch in BATCHES:
        plan = planned(name, cards, ram, batch)
        if plan is None:
            return None
        dense = not any(plan.request.model.n_experts)
        ways = [*((meet, False) for meet in MEET_US), (MEET_US[1], True)]
        gains = [dense_gain(plan, *way) if dense else expert_gain(name, cards, ram, batch, *way) for way in ways]
        cells += [f"{batch / plan.choice.seconds:.3g}", *(f"{gain:.2f}" for gain in gains)]
    plan = planned(name, cards, ram, 1)
    assert plan is not None
    return [name, cards.replace("RTX ", ""), *cells, prompt_gain(plan)]


def prompt_gain(plan: Plan) -> str:
    """How many times as fast a prompt would be, at most: its layers' time halved, and the exchange of chunks."""
    chunk, seconds = plan.request.chunk, 0.0
    for part in plan.parts:
        seconds += prompt(part.plan, TOKENS).seconds
    chunks = -(-TOKENS // chunk)
    exchange = chunks * plan.claims.gpu_layers * exchanged(plan, chunk, MEET_US[1], slow=False)
    return f"{seconds / min(seconds, seconds / 2 + exchange):.2f}"


def layers_table() -> str:
    heads = ["model", "cards"]
    for batch in BATCHES:
        heads += [f"{batch}: tokens/s", *(f"{meet:g} us" for meet in MEET_US), f"{MEET_US[1]:g} us, PCIe 3 x8"]
    body = [found for name in MODELS for machine in MACHINES if (found := row(name, *machine)) is not None]
    about = (
        f"Predicted, {CONTEXT} tokens of context, for 1 and 8 requests: tokens per second with layers one after "
        "another, and how many times as fast steps would be with FFNs divided, by the time both cards take to meet "
        f"in a layer; the last column for prompts of {TOKENS} tokens, at most."
    )
    return paragraphs(about, table([*heads, "prompt"], body))


if __name__ == "__main__":
    print(layers_table())
