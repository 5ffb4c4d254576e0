"""benchmarks/placement: PCs that are simulated, prompts and drafts on them, and the picture of a step."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from random import Random
from xml.etree import ElementTree

import pytest

from benchmarks.lib import cells
from benchmarks.placement import drafts, h200, step_picture
from benchmarks.placement.assumptions import GIB, H200_FLOPS, for_tokens, machine, measured, tensor_flops
from benchmarks.placement.prompts import LEAST_GAIN, SIZES, elements, largest_padded, prompt, replayed, with_chunk
from powerinfer.placement.estimates import estimate_request
from powerinfer.placement.plan import Plan, make_plan


@pytest.fixture(scope="module")
def split() -> Plan:
    """Experts on both devices."""
    return make_plan(step_picture.request())


def test_a_timeline_takes_what_the_plan_says(split: Plan) -> None:
    spans = list(step_picture.spans(split))
    assert max(one.end for one in spans) == pytest.approx(split.choice.seconds, rel=1e-12)
    lanes = defaultdict(list)
    for one in spans:
        lanes[one.lane].append((one.begin, one.end))
    assert lanes.keys() == {"GPU", "link", "CPU"}
    for parts in lanes.values():
        parts.sort()
        assert all(end <= begin + 1e-12 for (_, end), (begin, _) in pairwise(parts))
    own = split.choice.layer_seconds
    cold = sum(one.end - one.begin for one in spans if one.kind == "cold")
    assert cold == pytest.approx(sum(layer["cpu"] for layer in own), rel=1e-12)


def test_the_picture_of_a_step_is_up_to_date_and_inside_its_frame() -> None:
    text = step_picture.PICTURE.read_text()
    assert text == step_picture.picture(), "python -m benchmarks.placement.step_picture draws it"
    drawn = ElementTree.fromstring(text)
    width, height = (float(one) for one in drawn.attrib["viewBox"].split()[2:])
    boxes = list(drawn.iter("{http://www.w3.org/2000/svg}rect"))
    assert {box.attrib["class"] for box in boxes} == step_picture.KINDS.keys()
    for box in boxes:
        x, y, w, h = (float(box.attrib[name]) for name in ("x", "y", "width", "height"))
        assert x >= 0 and y >= 0 and x + w <= width and y + h <= height


def test_prompts_stream_what_the_gpu_does_not_have(split: Plan) -> None:
    model, slots = split.request.model, split.claims.slots
    assert slots is not None and split.staging
    cold = sum(
        (1 - slots[layer] / model.n_experts[layer]) * sum(one.stored for one in model.experts[layer])
        for layer in range(len(slots))
    )
    short = with_chunk(split, 512)
    held = short.claims.slots
    assert split.request.chunk > 1024 and held is not None
    once = prompt(split, 1024)
    assert 0.5 * cold < once.streamed <= cold, "chunks are long where experts stream"
    kept = sum(
        (1 - held[layer] / n) * sum(one.stored for one in model.experts[layer])
        for layer, n in enumerate(model.n_experts)
    )
    made = prompt(short, 1024)
    assert once.streamed < made.streamed < 2 * kept and kept < cold, "of short chunks the CPU takes more"
    assert sum(made.bound.values()) < made.seconds
    assert once.seconds < made.seconds
    assert prompt(short, 1024, 0.08).seconds > made.seconds
    slow = make_plan(estimate_request("qwen3-30b-a3b", "q4_0", machine("RTX 4060", bus=(3, 4))))
    divided = prompt(slow, 1024)
    assert divided.seconds > made.seconds and 0 < divided.streamed < 0.6 * made.streamed, "the CPU takes more of them"
    alone = prompt(replace(slow, claims=slow.claims.without_buffers()), 1024)
    assert alone.seconds > divided.seconds and alone.bound.keys() == {"CPU"} and not alone.streamed
    assert elements(model.experts[0]) == 3 * 128 * 768 * 2048


def test_a_prompt_takes_at_least_its_products() -> None:
    """A model that the card holds: two FLOP a weight and token at the share of the peak that is assumed."""
    plan = make_plan(estimate_request("qwen3-8b", "q4_k_m", machine("RTX 4090")))
    model = plan.request.model
    weights = sum(elements((*model.attention[layer], *model.ffn[layer])) for layer in range(model.config.n_layers))
    assert plan.request.hardware.gpu is not None
    assert tensor_flops(plan.request.hardware.gpu) == pytest.approx(165e12, rel=0.01)  # as published
    least = 2 * weights * 4096 / 165e12 / 0.6
    made = prompt(with_chunk(plan, 4096), 4096)
    assert least < made.seconds < 3 * least and not made.streamed


def test_chunks_are_replayed_where_the_host_is_slower() -> None:
    """Of models that a card holds; the more the card computes, the less that gains."""
    numbers = []
    for shape in ("qwen3-0.6b", "qwen3-1.7b", "qwen3-8b"):
        plan = make_plan(estimate_request(shape, "q4_0", machine("RTX 5090")))
        numbers.append(largest_padded(plan))
        for tokens in (64, 512):
            launched, made = prompt(plan, tokens), replayed(plan, tokens)
            assert launched.bound.keys() <= {"host", "GPU"} and made > replayed(plan, tokens // 2)
            if launched.bound.keys() == {"host"} and tokens == 64:
                assert made < launched.seconds
    assert numbers == sorted(numbers, reverse=True) and numbers[0] in SIZES and numbers[-1] == 0
    experts = make_plan(estimate_request("qwen3-30b-a3b", "q4_0", machine("RTX 5090")))
    assert experts.claims.slots == experts.request.model.n_experts
    assert largest_padded(experts) and replayed(experts, 64) < LEAST_GAIN * prompt(experts, 33).seconds
    with pytest.raises(AssertionError, match="elsewhere"):
        replayed(make_plan(step_picture.request()), 64)


def test_whole_models_beside_estimates(split: Plan) -> None:
    """Decode by what is extrapolated of the other engine; prompts only where they are simulated."""
    rate = 1 / split.choice.seconds
    one = h200.Whole("a model", split, True, "8")
    other = 442.727578 * 8 / 48  # of benchmarks/results/hybrid-experts-2026-11-27T1415.json
    assert h200.extrapolated()["8"] == pytest.approx(other) and one.ratio() == f"{other:.0f}: {rate / other:.1f}x"
    assert one.prompts == [cells.number(tokens / prompt(split, tokens).seconds) for tokens in h200.PROMPTS]
    assert h200.Whole("a model", split).ratio() == "" and h200.Whole("a model", split).prompts == ["", ""]
    local = h200.local(split, 0.9)
    slots = [sum(plan.claims.slots or ()) for plan in (local, split)]
    assert local.choice.seconds < split.choice.seconds and slots[0] == slots[1] > 0
    gpu = measured().gpu
    assert gpu is not None and tensor_flops(gpu) == H200_FLOPS


def test_rates_of_several_tokens() -> None:
    plain = machine("RTX 4060", ram_gb_s=70.0)
    assert for_tokens(plain, 1) == plain
    found = [for_tokens(plain, tokens) for tokens in (2, 4, 8)]
    for kind in ("Q4_K", "Q6_K"):
        assert plain.gpu is not None
        rates = [one.gpu.dense_gb_s[kind] for one in found if one.gpu is not None]
        assert plain.gpu.dense_gb_s["other"] >= rates[0] >= rates[1] > rates[2] > 0
    assert 70.0 >= found[0].cpu.dense_gb_s["other"] > found[2].cpu.dense_gb_s["other"] > 0


def test_drafts_gain_what_is_right() -> None:
    assert drafts.expected_tokens((1.0, 1.0, 1.0), 2) == 3
    assert drafts.expected_tokens((0.5, 0.5), 2) == 1.75
    assert drafts.foreseen((0.5, 0.5), 2) == 0.125
    # the same steps whatever their tokens, the CPU busy for half of one
    made = drafts.Speculation(1.0, (1.0,) * 5, (1.1,) * 5, 0.5, 0.1, (0.5,) * 5)
    assert made.gain_on_cpu((0.0,) * 4) == made.gain_on_gpu((0.0,) * 4) == drafts.Gain(0, 1.0)
    right = (0.8,) * 4
    assert made.gain_on_cpu(right) == drafts.Gain(2, pytest.approx(2.44 / 2.0))
    assert made.gain_on_gpu(right) == drafts.Gain(4, pytest.approx(3.3616 / 1.5))
    assert made.mirrored(right, always=True) == drafts.Gain(4, pytest.approx(3.3616 / 1.1))
    assert made.mirrored(right).gain == pytest.approx(3.3616 / (1.5 - 0.4 * 0.8**5))
    assert made.gain_as_placed(right) == made.gain_on_cpu(right)
    assert replace(made, whole=True).gain_as_placed(right) == made.gain_on_gpu(right)
    nowhere = replace(made, on_gpu=None)
    assert nowhere.gain_on_gpu(right) == nowhere.mirrored(right) == drafts.Gain(0, 1.0)


def test_mirrored_steps_take_what_two_clocks_say() -> None:
    """Steps played one after another: the GPU drafts for the next while the CPU verifies, for as long as that lasts."""
    made = drafts.Speculation(1.0, (1.0,) * 5, (1.0, 1.1, 1.2, 1.3, 1.4), 0.9, 0.2, (0.5,) * 5)
    right, rng = (0.9, 0.8, 0.7, 0.6), Random(3)
    chosen = made.mirrored(right)
    n, steps, tokens, clock, ahead = chosen.drafts, 40_000, 0, 0.0, 0.0
    for _ in range(steps):
        clock += n * made.each_on_gpu - ahead + made.on_gpu[n]
        holds = [rng.random() < share for share in (*right, right[-1])[: n + 1]]
        accepted = next((at for at, one in enumerate(holds[:n]) if not one), n)
        tokens += 1 + accepted
        ahead = min(n * made.each_on_gpu, made.busy[n]) if all(holds) else 0.0
    assert n > 1 and tokens / clock == pytest.approx(chosen.gain / made.plain, rel=0.01)


def test_a_head_on_the_gpu_takes_the_place_of_layers() -> None:
    head = drafts.draft_head()
    assert 1.0e9 < head.output.file < 1.1e9 and 0.2e9 < sum(one.file for one in head.layer) < 0.35e9
    request = estimate_request(drafts.SHAPE, drafts.DTYPE, machine("RTX 4060", ram=32 * GIB))
    assert request.hardware.gpu is not None
    fewer = replace(request, vram=request.hardware.gpu.memory_bytes - head.on_gpu)
    assert make_plan(fewer).claims.gpu_layers < make_plan(request).claims.gpu_layers


def test_figures_far_off_have_a_reason_and_others_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(h200, "figures", lambda: [h200.Figure("a model", 1, 100.0, 130.0)])
    monkeypatch.setattr(h200, "WHY", {})
    with pytest.raises(ValueError, match="no reason"):
        h200.measured_table()
    monkeypatch.setattr(h200, "WHY", {"a model": {1: h200.PRODUCTS}})
    assert "| a model | 100 | 130 | +30 % | (b) |\n\n- (b) the plan" in h200.measured_table()
    monkeypatch.setattr(h200, "figures", lambda: [h200.Figure("a model", 1, 100.0, 110.0)])
    with pytest.raises(ValueError, match="a reason"):
        h200.measured_table()
