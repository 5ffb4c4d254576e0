"""Every figure that was measured on an H200, beside what a plan says of the same model, budget and placement.

Plans are made with the rates that were measured on that machine, and with so much working memory that they place as
much on the GPU as the load did. Rates of several tokens are those of `assumptions.for_tokens`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.lib.cells import number, signed
from benchmarks.lib.programs import OURS
from benchmarks.lib.results import of_kind
from benchmarks.lib.tables import items, paragraphs, table
from benchmarks.placement.assumptions import for_tokens, hardware_of, measured
from benchmarks.placement.compare import request as sparse_request
from powerinfer.placement.cost import any_of
from powerinfer.placement.estimates import estimate_request
from powerinfer.placement.plan import Plan, PlanRequest, make_plan
from powerinfer.placement.power_law import Law, assumed_profile
from powerinfer.placement.request import EVEN
from powerinfer.placement.shapes import described_model, find_shape

SHAPES = {"falcon-40b": "falcon-40b", "reglu-70b": "llama-70b", "drelu-7b": "bamboo-7b"}
"""Published shapes of the random models that were measured."""
TITLES = {"falcon-40b": "Falcon-40B, F16, 6 of 60 layers", "reglu-70b": "ReGLU-70B, Q4_0, 8 of 80 layers",
          "drelu-7b": "7B dReLU, F16, 16 of 32 layers, all on the GPU"}  # fmt: skip
EXPERTS = "qwen3-30b-a3b"
CONTEXT = 128
"""Tokens of a request half of which are in the cache, as in these runs."""
NEAR = 0.15
"""How far off a figure may be without a reason."""

WAKING, PRODUCTS, OTHER_RAM = "a", "b", "c"
NOTES = {
    WAKING: "these milliseconds of a step depend little on how much the CPU has to do: threads that woke, and the host "
    "between steps, both mended since and not measured again",
    PRODUCTS: "the plan counts what a step reads; with several tokens kernels of neurons and of experts are bound by "
    "their products (what is simulated of PCs has one request)",
    OTHER_RAM: "the rates are of another machine of its kind, whose RAM gave 86 GB/s in F16; this one's step needs 105",
}
_MANY = {8: PRODUCTS, 32: PRODUCTS}
WHY: dict[str, dict[int, str]] = {
    TITLES["falcon-40b"]: _MANY,
    f"{TITLES['falcon-40b']}, whole layers, 2 on the GPU": {1: OTHER_RAM},
    TITLES["drelu-7b"]: {32: PRODUCTS},
    TITLES["reglu-70b"]: {1: WAKING, **_MANY},
    "Qwen3-30B-A3B, Q4_0, 8 of 48 layers, 544 of 1024 experts": {1: WAKING, **_MANY},
    "Qwen3-30B-A3B, Q4_0, 8 of 48 layers, 814 of 1024 experts": {1: WAKING, **_MANY},
}
"""Why figures are further off than `NEAR`, by case and requests: of `NOTES`."""


@dataclass(frozen=True)
class Figure:
    """Tokens a second of so many requests together (0: of a prompt), measured and simulated."""

    name: str
    requests: int
    measured: float
    simulated: float

    @property
    def off(self) -> float:
        return self.simulated / self.measured - 1

    @property
    def gap(self) -> float:
        """Milliseconds of a step that the simulation lacks."""
        return 1e3 * max(1, self.requests) * (1 / self.measured - 1 / self.simulated)


def placed(request: PlanRequest, share: float, of: Callable[[Plan], float]) -> Plan:
    """The plan with the working memory with which the GPU has about that share, which falls with it."""
    low, high = 0, request.vram or 0
    best = make_plan(request)
    for _ in range(10):
        middle = (low + high) // 2
        plan = make_plan(replace(request, scratch=middle))
        if abs(of(plan) - share) < abs(of(best) - share):
            best = plan
        low, high = (middle, high) if of(plan) > share else (low, middle)
    return best


def _rate(plan: Plan, requests: int) -> float:
    """Tokens a second of a plan's placement with so many requests."""
    request = plan.request
    hardware = for_tokens(request.hardware, requests, tokens_of_a_weight(request, requests))
    many = replace(request, batch=requests, hardware=hardware)
    vram = (request.vram or 0) + (requests - 1) * request.model.gpu_kv_bytes(request.kv_type, request.context, 1)
    return requests / make_plan(replace(many, vram=vram)).choice.seconds


def tokens_of_a_weight(request: PlanRequest, requests: int) -> float:
    """How many of the tokens of a step a weight of an FFN is multiplied with, on average over those that it needs."""
    config = request.model.config
    if config.experts:
        some = next(iter(config.experts.values()))
        share = np.array([some.router.top_k / some.n_experts])
    elif request.selector == "all":
        return requests
    else:
        share = np.concatenate([request.profile.fraction(layer) for layer in range(config.n_layers)])
    return float(requests * share.sum() / any_of(share, requests).sum())


def neuron_figures(document: dict[str, Any], name: str) -> Iterator[Figure]:
    """Of a document of benchmarks.hybrid.compare."""
    about, jobs = document["models"][name], document["jobs"]
    shape = find_shape(SHAPES[name])
    plan = about["plan"]
    assert (shape.config.d_model, shape.config.widest_ffn) == (plan["d_model"], plan["d_ff"])
    config = replace(shape.config, layers=shape.config.layers[: plan["n_layers"]])
    job = jobs[f"decode/{name}/0/{OURS}"]
    sparsity = job["sparsity"]["1"]
    law = Law(sparsity["active_fraction"], about["hot_share_of_layer"], plan["layer_ratio"])
    model = described_model(config, about["stored"], name, shape.predictor)
    hardware = hardware_of(jobs["hardware"])
    request = PlanRequest(
        model, assumed_profile(law, config.ffn_sizes), hardware, vram=job["vram"], context=CONTEXT,
        selector="predicted", requests=32, insist=True,
    )  # fmt: skip
    ours = placed(request, sparsity["gpu_share"], lambda plan: plan.choice.mass_on_gpu)
    for batch, rate in job["decode_tok_s"].items():
        yield Figure(TITLES[name], int(batch), rate, _rate(ours, int(batch)))
    if (random := jobs.get(f"ablation/{name}/0/random")) is not None:
        share = random["sparsity"]["1"]["gpu_share"]
        shuffled = placed(replace(request, policy="random"), share, lambda plan: plan.choice.mass_on_gpu)
        yield Figure(f"{TITLES[name]}, random neurons", 1, random["decode_tok_s"]["1"], _rate(shuffled, 1))
    if (dense := jobs.get(f"ablation/{name}/0/dense")) is not None:
        whole = placed(replace(request, selector="all"), 2, lambda plan: plan.claims.gpu_layers)
        yield Figure(f"{TITLES[name]}, whole layers, 2 on the GPU", 1, dense["decode_tok_s"]["1"], _rate(whole, 1))


def expert_figures(document: dict[str, Any]) -> Iterator[Figure]:
    """Of a document of benchmarks.hybrid.experts."""
    config = find_shape(EXPERTS).config
    config = replace(config, layers=config.layers[: document["jobs"]["make"]["layers"]])
    model = described_model(config, "q4_0", EXPERTS, 0.0)
    for card in ("8", "12"):
        job = document["jobs"][f"experts/{card}/{OURS}"]
        request = PlanRequest(
            model, assumed_profile(EVEN, config.ffn_sizes), measured(), vram=job["vram"], context=CONTEXT,
            selector="all", requests=32,
        )  # fmt: skip
        slots = int(job["choices"]["gpu"].split(" of ")[0].split()[-1])
        plan = placed(request, slots, lambda plan: sum(plan.claims.slots or ()))
        name = f"Qwen3-30B-A3B, Q4_0, {len(config.layers)} of 48 layers, {slots} of {sum(model.n_experts)} experts"
        for batch, rate in job["decode_tok_s"].items():
            yield Figure(name, int(batch), rate, _rate(plan, int(batch)))


def prompt_figures(document: dict[str, Any]) -> Iterator[Figure]:
    """Of a long prompt: a layer's chunk takes what it took when it was timed at the load."""
    for name, about in document["models"].items():
        job = document["jobs"].get(f"prefill/{name}/0/{OURS}")
        if job is None or "crossing" not in job["choice"]:
            continue
        tokens, chunk = document["settings"]["prompt"], 512
        ms = float(job["choice"].split(f"{chunk}: ")[1].split(" and ")[1].split(" ms")[0])
        seconds = 1e-3 * ms * about["plan"]["n_layers"] * tokens / chunk
        rate = job["prefill_tok_s"]["streamed"]
        title = f"{TITLES[name]}, a prompt of {tokens} in half the memory; simulated by a layer's time at the load"
        yield Figure(title, 0, rate, tokens / seconds)


@cache
def figures() -> list[Figure]:
    """All of them."""
    found: list[Figure] = []
    for document in of_kind("hybrid"):
        for name in document["models"]:
            if f"decode/{name}/0/{OURS}" in document["jobs"]:
                found += neuron_figures(document, name)
        found += prompt_figures(document)
    for document in of_kind("hybrid-experts"):
        found += expert_figures(document)
    return found


def measured_table() -> str:
    """A row for each case. ValueError for a figure that is further off than `NEAR` without a reason, or has one too
    many."""
    cases: dict[str, list[Figure]] = {}
    for one in figures():
        why = WHY.get(one.name, {}).get(one.requests, "")
        if bool(why) != (abs(one.off) > NEAR):
            raise ValueError(f"{one.name}, {one.requests}: {one.off:+.2f}, and {'a' if why else 'no'} reason")
        cases.setdefault(one.name, []).append(one)
    body = []
    for name, some in cases.items():
        rates = [" / ".join(number(getattr(one, field)) for one in some) for field in ("measured", "simulated")]
        known, notes = WHY.get(name, {}), list[str]()
        for one in some:
            note = known.get(one.requests)
            if note and f"({note})" not in notes:
                notes += [f"{one.gap:.1f} ms"] * (note == WAKING) + [f"({note})"]
        body.append([name, *rates, " / ".join(signed(one.off) for one in some), " ".join(notes)])
    heads = ["tokens/s; of 1 / 8 / 32 requests", "measured", "simulated", "off", "why"]
    used = {note for name in cases for note in WHY.get(name, {}).values()}
    return paragraphs(table(heads, body), items(f"({note}) {text}" for note, text in NOTES.items() if note in used))


GIB = 1 << 30
HITS = {8: 0.75, 12: 0.88}
"""Share of the selected experts that a policy has on the GPU where texts have locality, by GB of the card."""


def skewed(experts: int, top_k: int, held: float, hits: float) -> NDArray[np.float64]:
    """How often experts are selected where the share `held` of them, the most frequent, takes the share `hits`."""
    hot = round(experts * held)
    return np.where(np.arange(experts) < hot, top_k * hits / hot, top_k * (1 - hits) / (experts - hot))


def whole_plans() -> Iterator[tuple[str, Plan]]:
    """Of whole models on that machine, in the memory of smaller cards."""
    for card, hits in HITS.items():
        alike = replace(estimate_request(EXPERTS, "q4_0", measured()), vram=card * GIB)
        plan = make_plan(alike)
        yield f"Qwen3-30B-A3B, Q4_0, {card} GB", plan
        config = alike.model.config
        n, top_k = config.experts[0].n_experts, config.experts[0].router.top_k
        known = skewed(n, top_k, sum(plan.claims.slots or ()) / sum(alike.model.n_experts), hits)
        local = make_plan(replace(alike, frequencies=dict.fromkeys(config.experts, known)))
        yield f"the same, {100 * hits:.0f} % of the selected experts on the GPU", local
    for title, shape, dtype in (
        ("7B dReLU, F16, 24 GB", "bamboo-7b", "f16"), ("Falcon-40B, F16, 24 GB", "falcon-40b", "f16"),
        ("ReGLU-70B, Q4_0, 24 GB", "llama-70b", "q4_0"),
    ):  # fmt: skip
        yield title, make_plan(replace(sparse_request(shape, dtype, measured(), 2048, {}), vram=24 * GIB))


def whole_table() -> str:
    """Tokens a second by the plan, and if a step took as much longer as the measured ones did."""
    lost = [one.gap for one in figures() if WHY.get(one.name, {}).get(one.requests) == WAKING]
    body = []
    for title, plan in whole_plans():
        slower = (1 / (plan.choice.seconds + 1e-3 * gap) for gap in (max(lost), min(lost)))
        body.append([title, number(1 / plan.choice.seconds), " to ".join(map(number, slower))])
    about = (
        "Simulated for the H200 beside 14 threads (`python -m benchmarks.placement.pcs_table`): whole models, one "
        "request, by the plan at the rates measured there, and if steps still took the "
        f"{min(lost):.1f} to {max(lost):.1f} ms more that they took on 27 November "
        "([hybrid.md](hybrid.md#measured))."
    )
    return paragraphs(about, table(["decode, tokens/s", "by the plan", "with these"], body))
