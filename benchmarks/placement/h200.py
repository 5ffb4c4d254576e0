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

from benchmarks.lib.cells import number, percent, signed
from benchmarks.lib.programs import OURS
from benchmarks.lib.results import of_kind
from benchmarks.lib.tables import items, paragraphs, table
from benchmarks.placement.assumptions import CARDS, EXPERT_SHARE, for_tokens, hardware_of, machine, measured
from benchmarks.placement.compare import request as sparse_request
from benchmarks.placement.prompts import prompt
from powerinfer.hardware.description import Hardware
from powerinfer.placement.chunks import with_long_chunks
from powerinfer.placement.cost import any_of
from powerinfer.placement.estimates import estimate_request
from powerinfer.placement.plan import Plan, PlanRequest, make_plan
from powerinfer.placement.power_law import Law, assumed_profile
from powerinfer.placement.request import EVEN
from powerinfer.placement.shapes import described_model, file_bytes, find_shape

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


DENSE = "llama-3.3-70b"
PROMPTS = (512, 2048)


@cache
def extrapolated() -> dict[str, float]:
    """Tokens a second of llama.cpp with whole models by card's GB, and "drelu": by `-ncmoe` and `-ngl`, its rate with
    some of the layers by how many times as many there are. So what a step takes once counts for each of these times.
    """
    found: dict[str, float] = {}
    for document in of_kind("hybrid-experts"):
        part = document["jobs"]["make"]["layers"] / find_shape(EXPERTS).config.n_layers
        for card in HITS:
            found[str(card)] = part * document["jobs"][f"experts/{card}/llama.cpp-ncmoe"]["decode_tok_s"]["1"]
    for document in of_kind("hybrid"):
        if run := document["jobs"].get("decode/drelu-7b/0/llama.cpp-ngl"):
            found["drelu"] = document["models"]["drelu-7b"]["part"] * run["decode_tok_s"]["1"]
    return found


@dataclass(frozen=True)
class Whole:
    """A plan of a whole model. reads: whether its prompts are simulated; peer: of `extrapolated`, "" for none."""

    title: str
    plan: Plan
    reads: bool = False
    peer: str = ""

    @property
    def prompts(self) -> list[str]:
        """Tokens a second of each of `PROMPTS`."""
        return [number(tokens / prompt(self.plan, tokens).seconds) if self.reads else "" for tokens in PROMPTS]

    def ratio(self) -> str:
        """Decode by what is extrapolated, which is in tokens a second."""
        if not self.peer:
            return ""
        other = extrapolated()[self.peer]
        return f"{other:.0f}: {1 / self.plan.choice.seconds / other:.1f}x"


def local(alike: Plan, hits: float) -> Plan:
    """The same request where policies have that share of the selected experts on the GPU."""
    request = alike.request
    config = request.model.config
    n, top_k = config.experts[0].n_experts, config.experts[0].router.top_k
    known = skewed(n, top_k, sum(alike.claims.slots or ()) / sum(request.model.n_experts), hits)
    return make_plan(replace(request, frequencies=dict.fromkeys(config.experts, known)))


def sparse(shape: str, dtype: str, hardware: Hardware, vram: int) -> Plan:
    """The plan of a model whose neurons are predicted, in so many bytes of a GPU's memory."""
    return make_plan(replace(sparse_request(shape, dtype, hardware, 2048, {}), vram=vram))


def whole_plans() -> Iterator[Whole]:
    """Of whole models on that machine, in the memory of smaller cards."""
    for card, hits in HITS.items():
        plan = make_plan(with_long_chunks(replace(estimate_request(EXPERTS, "q4_0", measured()), vram=card * GIB)))
        yield Whole(f"Qwen3-30B-A3B, Q4_0, {card} GB", plan, True, str(card))
        yield Whole(f"the same, {100 * hits:.0f} % of the selected experts on the GPU", local(plan, hits))
    yield Whole("7B dReLU, F16, 24 GB", sparse("bamboo-7b", "f16", measured(), 24 * GIB), peer="drelu")
    for title, shape, dtype in (("Falcon-40B, F16", "falcon-40b", "f16"), ("ReGLU-70B, Q4_0", "llama-70b", "q4_0")):
        yield Whole(f"{title}, 24 GB", sparse(shape, dtype, measured(), 24 * GIB))
    request = estimate_request(DENSE, "q4_0", measured())
    half = make_plan(with_long_chunks(replace(request, vram=file_bytes(request.model.config, "q4_0") // 2)))
    yield Whole("Llama 3.3 70B, Q4_0, half of its weights", half, True)


def lost() -> list[float]:
    """Milliseconds by which steps of one request were longer than the plan's, for a reason that was mended since."""
    return [one.gap for one in figures() if WHY.get(one.name, {}).get(one.requests) == WAKING]


def pcs_rows() -> list[list[str]]:
    """The same aims on PCs, a column for each of `CARDS`: decode, with locality, prompts; 7B dReLU."""
    rows = [
        [f"Qwen3-30B-A3B, Q4_0{part}"] for part in ("", ", with locality", *(f": prompt of {n:,}" for n in PROMPTS))
    ]
    rows.append(["7B dReLU, F16"])
    for card in CARDS:
        own = machine(card)
        assert own.gpu is not None
        one = Whole("", make_plan(with_long_chunks(estimate_request(EXPERTS, "q4_0", own))), True)
        slots, n = one.plan.claims.slots, sum(one.plan.request.model.n_experts)
        some = slots is not None and sum(slots) < n
        hits = HITS[min(HITS, key=lambda gib: abs(gib * GIB - own.gpu.memory_bytes))]  # type: ignore[union-attr]
        beside = sparse("bamboo-7b", "f16", own, own.gpu.memory_bytes)
        cells = [
            number(1 / plan.choice.seconds) for plan in (one.plan, local(one.plan, hits) if some else one.plan, beside)
        ]
        for row, cell in zip(rows, (*cells[:2], *one.prompts, cells[2]), strict=True):
            row.append(cell)
    return rows


def whole_table() -> str:
    """Tokens a second by the plan, and if a step took as much longer as the measured ones did; of prompts, too."""
    gaps, fixed, body = lost(), measured(), []
    assert fixed.gpu is not None
    for one in whole_plans():
        seconds = one.plan.choice.seconds
        slower = (1 / (seconds + 1e-3 * gap) for gap in (max(gaps), min(gaps)))
        body.append([one.title, number(1 / seconds), " to ".join(map(number, slower)), one.ratio(), *one.prompts])
    host = fixed.cpu.step_us + fixed.gpu.step_us
    about = (
        "Simulated for the H200 beside 14 threads (`python -m benchmarks.placement.pcs_table`), not measured: whole "
        "models, one request, by the plan at the rates measured there, and if steps still took the "
        f"{min(gaps):.1f} to {max(gaps):.1f} ms more that they took on 27 November ([hybrid.md](hybrid.md#measured)). "
        f"Of each step {1e-3 * host:.2f} ms are a request's fixed cost as it was then, before steps were launched "
        "ahead of their tokens; the aims are 0.2 and 0.1 ms. llama.cpp's figures are its rates with a "
        "sixth of the layers, or half of them, divided by six or two, so what a step takes once counts as many times; "
        "without a cache of experts. Prompts are in the chunks that "
        f"the engine chooses, experts' products at {percent(EXPERT_SHARE, 0)} of the published peak, which nobody "
        "measured."
    )
    heads = ["tokens/s", "decode", "with these", "llama.cpp, estimated", *(f"prompt of {one:,}" for one in PROMPTS)]
    pcs = (
        "The same on PCs with two channels of DDR5-5600, simulated by what [hybrid.md](hybrid.md#assumed) assumes, "
        f"with locality {percent(HITS[8], 0)} of the selected experts on cards of 8 GB and {percent(HITS[12], 0)} on "
        "larger ones; llama.cpp was not measured on such. Prompts of a dense 70B and of others: "
        "[hybrid.md](hybrid.md#simulated)."
    )
    return paragraphs(about, table(heads, body), pcs, table(["tokens/s", *CARDS], pcs_rows()))
