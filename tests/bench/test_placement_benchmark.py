"""benchmarks/placement/compare.py and table.py: what is measured, and the tables made of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.placement import aims, aims_table, compare, table
from benchmarks.placement.simulate import simulated
from powerinfer.placement.plan import make_plan


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "LEAST", (1, 40))
    monkeypatch.setattr(compare, "SHARES", (0.1, 0.25))
    monkeypatch.setattr(compare, "MODELS", ("opt-30b",))
    monkeypatch.setattr(compare, "MACHINES", ("pc-low",))
    monkeypatch.setattr(compare, "PAPER", [("opt-13b", "f16", "pc-low", 13.0), ("opt-30b", "f16", "pc-low", None)])


def result(**parts: Any) -> dict[str, Any]:
    return {"command": "python x", "cpu": {"name": "CPU"}, "commit": "abc", "date": "2026-11-21T12:00", **parts}


def test_tables_of_what_was_measured(few: None) -> None:
    profiles: dict[str, Any] = {}
    solved = compare.solve_times(repeat=1, plain=0.0)
    assert [(one["least_groups"], one["budget"]) for one in solved] == [(1, 0.1), (1, 0.25), (40, 0.1), (40, 0.25)]
    assert all(one["optimal"] and one["mass"] >= one["greedy_mass"] for one in solved)
    text = table.solve_table(result(solve=solved))
    assert text.count("| yes |") == 4 and "The program as it stands" not in text
    solved[0]["plain"] = {"seconds": 25.0, "limit_s": 10.0, "proven": False, "mass": None}
    assert "after 25 s (limit 10 s) it found no answer" in table.solve_table(result(solve=solved))
    compared = compare.policies(profiles)
    assert [(one["dtype"], one["budget"]) for one in compared] == [("f16", 0.25), ("q4_0", 0.25)]
    text = table.policy_table(result(policies=compared))
    assert "All answers of ilp and time are proven optimal" in text and text.count("| OPT-30B ") == 2
    reported = compare.paper(profiles)
    text = table.paper_table(result(paper=reported))
    assert "| 13 |" in text and "| |" in text and text.count("| PC-Low |") == 2
    for one in reported:
        assert 0 < one["work_on_gpu"] < 1 and sum(one["bytes"]["gpu"].values()) <= 11 << 30


@pytest.mark.parametrize("measured", [False, True])
def test_aims_are_marked_as_missing_or_simulated(measured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    run = {"decode_tok_s": {"1": 40.0, "8": 80.0, "32": 90.0}, "sparsity": {"1": {"gpu_share": 0.6}}}
    ours = run | {"trace": {"overlap": 0.7}, "plan": {"ms_per_token": 30.0}}
    peer = {"decode_tok_s": {"1": 4.0, "8": 20.0, "32": 10.0}}
    jobs = {
        f"decode/{aims_table.FALCON}/0/{engine}": job for engine, job in (("powerinfer", ours), ("llama.cpp", peer))
    }
    jobs |= {f"ablation/{aims_table.FALCON}/0/dense": peer, f"card/{aims_table.FALCON}": {"vram": 6 << 30}}
    models = {aims_table.FALCON: {"plan": {"n_layers": 15}, "whole_layers": 60}}
    settings = {"gpu": "cuda:0", "scale": "0.1"}
    kernels = [{"kernel": "neurons", "type": "F16/F16", "tokens": 1, "share": 0.5}]
    layer = {"kernels": kernels, "active": 0.1, "plain": True, "d_ff": 32768, "device": "a GPU"}
    ways = {"powerinfer": {"streamed": 30.0, "cpu": 20.0}, "llama.cpp-ngl": {"llama.cpp": 20.0}}
    prompts = {f"prefill/{aims_table.FALCON}/0/{engine}": {"prefill_tok_s": rates} for engine, rates in ways.items()}
    experts = {
        f"experts/{card}/{engine}": {"decode_tok_s": {"1": rate}}
        for card, engine, rate in ((8, "powerinfer", 40.0), (8, "llama.cpp-ncmoe", 32.0), (12, "powerinfer", 50.0))
    }
    experts |= {"experts/8/llama.cpp-cache": {"error": "no room"}, "make": {"layers": 16}}
    found = {
        "hybrid": [
            {"jobs": jobs, "models": models, "settings": settings},
            {"jobs": jobs, "models": models, "settings": settings | {"gpu": "cpu"}},  # says nothing about speed
            {"jobs": {}, "models": {"drelu-7b": {}}, "settings": settings},
            {"jobs": prompts, "models": models, "settings": settings | {"times": 2.0, "prompt": 2048}},
        ],
        "hybrid-experts": [{"jobs": experts, "settings": settings}, {"jobs": {}, "settings": settings}],
        "gpu-kernels": [layer, layer | {"device": "cpu", "kernels": [kernels[0] | {"share": 0.9}]}],
    }
    monkeypatch.setattr(aims_table, "of_kind", lambda kind: found[kind] if measured else [])
    steps = {"predicted_tok_s": 16.0, "tok_s": 16.1, "busy": 0.98, "gpu_share": 0.39}
    policies = {"time": steps, "random": steps | {"tok_s": 11.0}}
    cases = [
        {"model": name, "machine": where, "policies": policies} for name, _ in aims.MODELS for where in table.MACHINES
    ]
    cases[1] = cases[1] | {"policies": {policy: {"why": "does not fit"} for policy in policies}}
    lines = aims_table.aims_table(result(aims=cases, context=640)).splitlines()
    rows = [line for line in lines if line.startswith("| ") and "at least" not in line]
    on_a_gpu = [row.split("|")[4].strip() for row in rows]
    assert len(rows) == len(aims_table.AIMS) == 9
    if measured:
        assert on_a_gpu[0] == "10x: 40 by 4 tokens/s, 15 of 60 layers, 6.0 GiB"
        assert on_a_gpu[4] == "Falcon-40B, as above: 4.0x at 8, 9.0x at 32 (4.5x the peer's best at any of these sizes)"
        assert on_a_gpu[5:8] == [
            "50 % (Falcon-40B, a GPU), missing",
            "60 %; 70 %; +20 %",
            "whole layers, dense: 4; at a time, the plan: 40 tokens/s",
        ]
        assert on_a_gpu[3] == "8 GB: 1.25x, 40 by 32 tokens/s; 16 of 48 layers"
        assert on_a_gpu[8] == "1.50x: 30 by 20 tokens/s, falcon-40b, 15 of 60 layers"
    assert on_a_gpu.count(aims_table.MISSING) == (2 if measured else 9)
    if measured:  # what failed is missing, and nothing else
        jobs.pop(f"decode/{aims_table.FALCON}/0/llama.cpp")
        jobs[f"decode/{aims_table.FALCON}/0/powerinfer"] = run
        assert aims_table.decode_of(aims_table.FALCON)() == aims_table.falcon_batches() == aims_table.MISSING
        assert aims_table.falcon_shares() == "60 %; missing; missing"
    for row in rows:
        cells = [cell.strip() for cell in row.split("|")[5:-1]]
        assert all(cell.startswith(("simulated: ", "nothing: ", "does not fit")) for cell in cells)
    assert "| simulated: 16.1 tokens/s | does not fit |" in rows[0]
    assert "simulated: random 11.0, the plan 16.1 tokens/s" in rows[7]
    fits = compare.request("opt-13b", "f16", compare.load("pc-low"), 640, {})
    assert aims.one(fits)["tok_s"] > 0
    assert aims.one(compare.request("falcon-40b", "f16", compare.load("pc-low"), 640, {}))["why"]


def test_the_plain_program_is_the_papers() -> None:
    """On a small case HiGHS proves of it what the solver finds."""
    impact = compare.np.array([[9.0, 5.0, 1.0], [8.0, 2.0, 2.0]])
    found = compare.plain_program(impact, 2, 3, 30.0)
    answer = compare.solve(compare.mass_costs(impact, [2, 2]), None, 3, None)
    assert found["proven"] and found["mass"] == pytest.approx(-answer.cost / impact.sum()) == pytest.approx(15 / 27)


def plan_of(name: str, dtype: str, where: str, always: bool) -> Any:
    """always: a neuron fires for every token or for none."""
    base = compare.request(name, dtype, compare.load(where), 640, {})
    if always:
        counts = tuple(np.where(own > np.quantile(own, 0.9), base.profile.tokens, 0) for own in base.profile.counts)
        base = replace(base, profile=replace(base.profile, counts=counts))
    return make_plan(base)


@pytest.mark.parametrize(("name", "where"), [("opt-13b", "pc-low"), ("falcon-40b", "pc-high"), ("bamboo-7b", "pc-low")])
def test_steps_without_chance_take_what_is_planned(name: str, where: str) -> None:
    plan = plan_of(name, "f16", where, always=True)
    made = simulated(plan, tokens=2)
    assert made["tok_s"] == pytest.approx(plan.document().predicted.decode_tok_s, rel=1e-6)
    assert made["slowest"] == pytest.approx(made["fastest"])
    assert made["gpu_share"] == pytest.approx(plan.activations["gpu"], abs=1e-6)
    assert 0 < made["both"] < made["busy"] <= 1


def test_steps_of_chance_are_slower_than_their_mean() -> None:
    plan = plan_of("falcon-40b", "q4_0", "pc-high", always=False)
    made, planned = simulated(plan, tokens=8), plan.document().predicted.decode_tok_s
    assert made == simulated(plan, tokens=8) != simulated(plan, tokens=8, seed=1)
    assert 0.95 * planned < made["slowest"] < made["tok_s"] < made["fastest"] and made["tok_s"] < 0.995 * planned
    assert made["gpu_share"] == pytest.approx(plan.activations["gpu"], abs=0.01)
