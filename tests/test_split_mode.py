"""Plans with each layer's experts divided between several GPUs (`--split-mode expert`)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from powerinfer.config import EngineConfig, PlanConfig
from powerinfer.devices.card_link import card_link_bytes
from powerinfer.errors import RequestError
from powerinfer.hardware.cards import described_machine
from powerinfer.placement.budget import budgets
from powerinfer.placement.divided import bytes_for_others, split_problem
from powerinfer.placement.plan import Plan, PlanRequest, make_plan
from powerinfer.placement.request import shape_subject
from powerinfer.placement.shapes import find_shape
from powerinfer.placement.working_memory import experts_for_others

GIB = 1 << 30
EXPERT = EngineConfig(context=4096, split_mode="expert")


def request(name: str, cards: str, engine: EngineConfig = EXPERT) -> PlanRequest:
    return shape_subject(name, None, "auto").request(described_machine(cards, 64 * GIB), engine, PlanConfig())


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
    assert on_gpu == (gpus - 1) * link[1] + experts_for_others(model.config, tokens)
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


def test_what_cannot_be_divided_is_refused() -> None:
    """By name, with how to mend it, by plans and by what loads ask."""
    experts, dense = find_shape("qwen3-30b-a3b").config, find_shape("llama-13b").config
    assert split_problem(experts, EXPERT, 2) is None and split_problem(dense, EngineConfig(), 1) is None
    refused = {
        "for several GPUs: name them with --gpu 0,1, or --vram 8GiB,12GiB, or leave it out": (experts, {}, 1),
        "is for models of experts: leave it out": (dense, {}, 2),
        "--expert-policy lru moves experts": (experts, {"expert_policy": "lru"}, 2),
        "--adjust moves experts": (experts, {"adjust": True}, 2),
        "--selector predicted is for": (experts, {"selector": "predicted"}, 2),
    }
    for message, (config, options, gpus) in refused.items():
        assert message in (split_problem(config, replace(EXPERT, **options), gpus) or "")
    for cards, engine in (("RTX 3090", EXPERT), ("RTX 3090, RTX 3090", replace(EXPERT, vram=0))):
        with pytest.raises(RequestError, match="--split-mode expert is for several GPUs"):
            request("qwen3-30b-a3b", cards, engine)
