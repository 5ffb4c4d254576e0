"""What a step beside a GPU takes, on the device of deferred.py with clocks: the engine's own launches, copies and
calls, in its own order, take as long as a plan says where each part takes what the plan gives it.

So a part that waited for what it need not, or one after another what can run at once, would show, as seconds that the
plan does not have.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import families  # noqa: E402
import test_hybrid as neurons  # noqa: E402
from deferred import Machine, deferred  # noqa: E402
from families import case_named  # noqa: E402
from test_sparse import packed  # noqa: E402
from truth import Truth  # noqa: E402

from benchmarks.placement.compare import request  # noqa: E402
from powerinfer.devices.gpu import GpuLayers  # noqa: E402
from powerinfer.devices.link import WAYS, Way  # noqa: E402
from powerinfer.devices.recording import recorder_of  # noqa: E402
from powerinfer.devices.replayed_spans import UNRECORDED  # noqa: E402
from powerinfer.devices.step import Operator, Step  # noqa: E402
from powerinfer.formats.checkpoint import open_checkpoint  # noqa: E402
from powerinfer.hardware.description import load  # noqa: E402
from powerinfer.placement.plan import Plan, make_plan  # noqa: E402

LAYERS = 4
ON_GPU = ("attention", "project", "norm", "predictor", "copy out", "hot neurons", "add", "head")
Costs = dict[tuple[str, int], float]
"""Seconds by kind of operator and layer; of the CPU's neurons, "cold neurons"."""


def timed(operator: Operator, machine: Machine, costs: Costs) -> Operator:
    """The same, on a device with clocks."""
    seconds = costs.get((operator.kind, operator.layer), 0.0)

    def run(step: Step) -> None:
        operator.run(step)
        if operator.static:
            machine.spend(seconds)
        elif operator.kind == "cold neurons":  # the host computes them
            machine.host += seconds

    def called(step: Step) -> None:
        assert operator.called is not None
        machine.called = costs.get(("cold neurons", operator.layer), 0.0)
        operator.called(step)
        machine.called = 0.0

    return replace(operator, run=run, called=None if operator.called is None else called)


def step_seconds(
    name: str, folder: Path, costs: Costs, monkeypatch: pytest.MonkeyPatch, way: Way = "flags", seed: int = 1
) -> float:
    """Of a step of one token that is replayed, of a small model with LAYERS layers whose neurons are half on either
    side."""
    case = case_named(name)
    case = replace(case, settings=case.settings | {"num_hidden_layers": LAYERS})
    path = packed(Truth(case, half=True), folder)
    predictors = neurons.predictor_of(open_checkpoint(path).config)
    plain: Any = GpuLayers.operators
    with deferred(seed) as machine, monkeypatch.context() as patch:
        own = functools.cache(lambda operator: timed(operator, machine, costs))
        patch.setattr(GpuLayers, "operators", property(lambda layers: [own(one) for one in plain.fget(layers)]))
        with neurons.split(path, 0.5, predictors=predictors) as (executor, _):
            executor.gpu.record(recorder_of(executor.gpu.device), way)
            assert executor.gpu.way == way
            tokens = families.prompt(case)[: UNRECORDED + 2]
            times = []
            pages = families.scattered_pages(executor, 1)[0]
            for at in range(len(tokens)):
                begin = machine.host
                families.run_chunks(executor, tokens[at : at + 1], [1], pages)
                times.append(machine.host - begin)
            assert machine.replays >= 2
    return times[-1]


def expected(costs: Costs, beside: bool) -> float:
    """The longest chain. beside: attention runs beside the CPU's part, whose input is that of the layer."""
    total = costs["head", -1]
    for layer in range(LAYERS):
        of = {kind: costs[kind, layer] for kind in (*ON_GPU[:-1], "cold neurons")}
        attention = of["attention"] + of["project"]
        before = of["norm"] + of["predictor"] + of["copy out"] + (0 if beside else attention)
        hot = of["hot neurons"] + (attention if beside else 0)
        total += before + max(hot, of["cold neurons"]) + of["add"]
    return total


@pytest.mark.sampled
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llama-relu", "falcon-40b"])
def test_both_parts_of_a_layer_run_at_once(
    name: str, way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever takes longer; attention with them where it does not need their result. In every order of streams."""
    for seed in (1, 2, 3):
        rng = np.random.default_rng(seed)
        costs = {(kind, layer): rng.uniform(1, 9) for kind in (*ON_GPU, "cold neurons") for layer in range(LAYERS)}
        costs["head", -1] = 2.0
        folder = tmp_path / str(seed)
        folder.mkdir()
        taken = step_seconds(name, folder, costs, monkeypatch, way, seed)
        assert taken == pytest.approx(expected(costs, name == "falcon-40b"), rel=1e-12)


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    """Of the paper's machine with its real memory."""
    profiles: dict[str, Any] = {}
    kinds = {"falcon-40b": "f16", "llama-70b": "q4_0"}
    asked = {name: request(name, kind, load("pc-high"), 640, profiles) for name, kind in kinds.items()}
    return {name: make_plan(replace(one, policy="greedy")) for name, one in asked.items()}


@pytest.mark.parametrize(("model", "small"), [("falcon-40b", "falcon-40b"), ("llama-70b", "llama-relu")])
def test_a_step_takes_what_the_plan_says(
    model: str, small: str, plans: dict[str, Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the plan's seconds for the parts of some of its layers; T_sync lies in the CPU's way."""
    plan = plans[model]
    chosen = np.linspace(0, plan.claims.gpu_layers - 1, LAYERS).astype(int)
    costs: Costs = {}
    for layer, of in enumerate(chosen.tolist()):
        own = plan.choice.layer_seconds[of]
        attention = (
            0.5 * own["gpu"] if plan.request.model.config.layers[of].parallel else 0.0
        )  # which is part of it then
        costs["predictor", layer] = own["other"]
        costs["attention", layer], costs["hot neurons", layer] = attention, own["gpu"] - attention
        costs["cold neurons", layer] = own["cpu"] + own["sync"]
    parts = [plan.choice.layer_seconds[of] for of in chosen.tolist()]
    assert all(own["gpu"] > 0 for own in parts) and any(own["cpu"] > own["gpu"] for own in parts)
    said = sum(own["other"] + max(own["gpu"], own["cpu"] + own["sync"]) for own in parts)
    assert step_seconds(small, tmp_path, costs, monkeypatch) == pytest.approx(said, rel=1e-12)
