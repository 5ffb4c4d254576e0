"""Plans with each layer's experts spread over several GPUs (`--split-mode expert`)."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from math import comb

import pytest

from powerinfer.cli.main import main
from powerinfer.config import EngineConfig, PlanConfig
from powerinfer.devices.card_link import card_link_bytes
from powerinfer.errors import RequestError
from powerinfer.hardware.cards import described_machine
from powerinfer.placement import spread
from powerinfer.placement.budget import budgets
from powerinfer.placement.cost import resident_seconds
from powerinfer.placement.plan import Plan, PlanRequest, make_plan
from powerinfer.placement.request import shape_subject
from powerinfer.placement.shapes import find_shape
from powerinfer.placement.spread import MEET_US, bytes_for_others, exchange_seconds, split_problem
from powerinfer.placement.working_memory import experts_for_others

GIB = 1 << 30
EXPERT = EngineConfig(context=4096, split_mode="expert")


def request(name: str, cards: str, engine: EngineConfig = EXPERT) -> PlanRequest:
    machine, planning = described_machine(cards, 64 * GIB), PlanConfig(card=cards)
    return shape_subject(name, None, "auto").request(machine, engine, planning)


def on_each(plan: Plan) -> list[int]:
    """Bytes of experts of each GPU by its shares."""
    model = plan.request.model
    return [sum(n * model.expert_bytes(layer)[0] for layer, n in enumerate(own)) for own in plan.shares]


def check(plan: Plan) -> None:
    """Shares are all that is on GPUs, and each GPU's bytes are those of its share, within its budget."""
    claims, vram_and_ram = plan.claims, budgets(plan.request.hardware, plan.request.vram, plan.request.ram)
    assert claims.slots is not None and len(plan.shares) == len(plan.parts) > 1
    assert tuple(map(sum, zip(*plan.shares, strict=True))) == claims.slots
    assert not any(claims.slots[claims.gpu_layers :])
    assert all(part.last == behind.first for part, behind in pairwise(plan.parts))
    for part, nbytes in zip(plan.parts, on_each(plan), strict=True):
        own = part.plan.bytes["gpu"]
        assert own["experts"] == nbytes and sum(own.values()) <= (part.plan.request.vram or 0)
        assert part.plan.claims.gpu_left == (part.plan.request.vram or 0) - sum(own.values())
        layers = slice(part.first, part.first + part.plan.request.model.config.n_layers)
        assert part.plan.claims.slots == claims.slots[layers]
    for tier, most in zip(("gpu", "cpu"), vram_and_ram, strict=True):
        assert sum(plan.bytes[tier].values()) <= most
    assert sum(plan.bytes["gpu"].values()) == sum(sum(part.plan.bytes["gpu"].values()) for part in plan.parts)


@pytest.mark.parametrize(
    ("name", "cards"),
    [
        ("qwen3-30b-a3b", "RTX 3090, RTX 3090"),  # all of it, and room to spare
        ("gpt-oss-120b", "RTX 5090, RTX 3060"),
        ("glm-4.5-air", "RTX 3060, RTX 4060, RTX 4060 Ti 16GB"),  # its first layer has no experts
    ],
)
def test_experts_are_divided_in_each_budget(name: str, cards: str) -> None:
    plan, alone = make_plan(request(name, cards)), make_plan(request(name, cards, EngineConfig(context=4096)))
    check(plan)
    assert not alone.shares and alone.request.key != plan.request.key
    model, gpus = plan.request.model, len(plan.parts)
    (in_ram, on_gpu), tokens = bytes_for_others(plan.request), plan.request.workload.tokens
    link = card_link_bytes(tokens, model.config)
    assert in_ram == gpus * (gpus - 1) * link[0]
    assert on_gpu == (gpus - 1) * (link[1] + experts_for_others(model.config, tokens))
    for part, one in zip(plan.parts, alone.parts, strict=True):
        layers = part.plan.claims.gpu_layers - one.plan.claims.gpu_layers
        more = part.plan.claims.gpu["scratch"] - one.plan.claims.gpu["scratch"]
        assert more == on_gpu if not layers else more != 0
    layers = [layer for layer, n in enumerate(plan.claims.slots or ()) if n]
    assert all(own[layer] for own in plan.shares for layer in layers), "every GPU has some of each"
    sizes, held = on_each(plan), [sum(part.plan.bytes["gpu"].values()) for part in plan.parts]
    shares = [part.plan.request.vram or 0 for part in plan.parts]
    if plan.claims.slots == model.n_experts:  # as fast as each is
        assert max(sizes) - min(sizes) <= model.expert_bytes(layers[0])[0]
    else:
        assert all(room - n <= model.expert_bytes(layers[0])[0] for n, room in zip(held, shares, strict=True))


@pytest.mark.parametrize("mode", ["layer", "expert"])
def test_a_gpu_whose_layers_have_no_experts(mode: str) -> None:
    """It has some of the other layers' all the same, where these are spread."""
    engine = EngineConfig(context=1024, max_batch=1, prefill_chunk=64, vram=(18 * GIB // 10, 24 * GIB), split_mode=mode)
    plan = make_plan(request("deepseek-v2-lite", "RTX 3090, RTX 3090", engine))
    assert plan.parts[0].last == plan.parts[1].first == 1 and plan.claims.slots == plan.request.model.n_experts
    if mode == "expert":
        check(plan)
        assert plan.experts_of_parts[0] > 0
    else:
        assert plan.experts_of_parts == [0, sum(plan.request.model.n_experts)]


def test_the_time_is_that_of_the_gpu_that_ends_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two alike cards that have all experts: which of them a token selects is chance, and the other one begins after
    the exchange; over a slower way it takes as much longer, and a line of the plan says what is faster."""
    asked = request("qwen3-30b-a3b", "RTX 3090, RTX 3090")
    plan, alone = make_plan(asked), make_plan(replace(asked, spread=False))
    model, card = plan.request.model, plan.request.hardware.all_cards[1]
    n, top_k = model.n_experts[0], model.config.experts[0].router.top_k
    each = resident_seconds(card.device, model, 0, 1)
    own, exchange = alone.choice.layer_seconds[0]["gpu"] - top_k * each, exchange_seconds(plan.request, 0, 0, 1)
    assert exchange == pytest.approx(1e-6 * MEET_US, rel=0.1) and exchange > 1e-6 * MEET_US
    mine = plan.shares[0][0]
    wanted = sum(
        comb(mine, k) * comb(n - mine, top_k - k) / comb(n, top_k)
        * max(own + k * each, exchange + 3e-6 * card.device.op_us + (top_k - k) * each)
        for k in range(top_k + 1)
    )  # fmt: skip
    assert plan.choice.layer_seconds[0]["gpu"] == pytest.approx(wanted, rel=0.02)
    assert {one.seconds for one in plan.others.values()} == {plan.choice.seconds}
    sums = [sum(one["other"] + one["gpu"] for one in made.choice.layer_seconds) for made in (plan, alone)]
    ends = [made.choice.seconds - seconds for made, seconds in zip((plan, alone), sums, strict=True)]
    assert ends[0] == pytest.approx(ends[1]), "what is beside layers"
    assert plan.reasons[-1] == (
        f"slower than --split-mode layer: {1 / plan.choice.seconds:.4g} tokens/s, not {1 / alone.choice.seconds:.4g}"
    )
    assert "only one of them computes" in alone.reasons[-1] and "at the same time" in plan.reasons[-2]
    monkeypatch.setattr(spread, "MEET_US", MEET_US + 1000)
    later = make_plan(asked).choice.layer_seconds[0]["gpu"]
    assert later == pytest.approx(exchange + 1e-3 + 3e-6 * card.device.op_us + top_k / 2 * each, rel=0.01)


def test_what_cannot_be_divided_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, with how to mend it, by plans and by what loads ask."""
    experts, dense = find_shape("qwen3-30b-a3b").config, find_shape("llama-13b").config
    assert split_problem(experts, EXPERT, 2) is None and split_problem(dense, EngineConfig(), 1) is None
    refused = {
        "for several GPUs: name them with --gpu 0,1, or --vram 8GiB,12GiB, or leave it out": (experts, {}, 1),
        "for several GPUs, and none is used (no NVIDIA driver): leave": (experts, {"vram": (GIB, GIB)}, 0),
        "is for models of experts: leave it out": (dense, {}, 2),
        "--expert-policy lru does not work with --split-mode expert: leave": (experts, {"expert_policy": "lru"}, 2),
        "--expert-policy auto may choose one that moves experts": (experts, {"expert_policy": "auto"}, 2),
        "--adjust does not work": (experts, {"adjust": True}, 2),
        "--selector predicted does not work": (experts, {"selector": "predicted"}, 2),
    }
    monkeypatch.setattr("powerinfer.devices.wanted.DRIVERS", ())
    for message, (config, options, gpus) in refused.items():
        assert message in (split_problem(config, replace(EXPERT, **options), gpus) or "")
    described = {
        'for several GPUs: name two cards, as --card "RTX 3090, RTX 3060", or leave': ("RTX 3090", EXPERT),
        "for several GPUs, and none is used (--vram is 0)": ("RTX 3090, RTX 3090", replace(EXPERT, vram=0)),
    }
    for message, (cards, engine) in described.items():
        with pytest.raises(RequestError, match=re.escape(message)):
            request("qwen3-30b-a3b", cards, engine)


def test_a_plan_says_what_each_gpu_has(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "--shape", "gpt-oss-120b", "--card", "RTX 5090, RTX 3060", "--ram", "64GiB", "-c", "4096"]
    documents = {}
    for mode in ("layer", "expert"):
        assert main([*command, "-sm", mode, "--json"]) == 0
        documents[mode] = json.loads(capsys.readouterr().out)
        cards, layers = documents[mode]["cards"], documents[mode]["layers"]
        assert documents[mode]["split_mode"] == mode
        on_gpus = [layer["experts"] for layer in layers]
        assert sum(card["experts"] for card in cards) == sum(on_gpus)
        first = cards[0]["layers"]
        assert (sum(on_gpus[:first]) == cards[0]["experts"]) is (mode == "layer")
        assert all(sum(card["bytes"].values()) <= card["vram"] for card in cards)
    assert documents["layer"]["key"] != documents["expert"]["key"]
    assert main([*command, "--split-mode", "expert"]) == 0
    shown = capsys.readouterr().out
    for card in documents["expert"]["cards"]:
        assert f"; {card['experts']} of all layers' 4608 experts: " in shown
    assert "150 us for a card and the CPU to meet" in shown and "50 us pass until two GPUs have met" in shown
    assert main([*command, "--split-mode", "row"]) == 2


def test_a_plan_says_which_card_is_faster_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Of those that have room for the model: not where its budget is too small."""
    alone = make_plan(request("qwen3-30b-a3b", "RTX 3090", EngineConfig(context=4096)))
    command = ["plan", "--shape", "qwen3-30b-a3b", "--card", "RTX 3060, RTX 3090", "--ram", "64GiB", "-c", "4096"]
    for options in ((), ("--split-mode", "expert"), ("--vram", "12GiB,18GiB")):
        assert main([*command, *options, "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        speeds = document["predicted"]["decode_tok_s"], 1 / alone.choice.seconds
        line = "slower than NVIDIA GeForce RTX 3090 alone: {:.4g} tokens/s, not {:.4g}".format(*speeds)
        assert speeds[0] < 0.98 * speeds[1]
        assert [one for one in document["reasons"] if " alone: " in one] == [line] * ("--vram" not in options)
