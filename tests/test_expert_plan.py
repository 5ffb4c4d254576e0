"""Where plans place experts, and loads that follow them. The GPU is torch's CPU device."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_experts import model as tiny_model
from test_plan import GIB, MIB, machine

from powerinfer import LLM, RequestError, SamplingParams
from powerinfer.cli.main import main
from powerinfer.config import EngineConfig, ModelConfig
from powerinfer.devices.cpu_experts import expert_layout
from powerinfer.experts import NeuronUse
from powerinfer.formats.bundle_file import n_groups
from powerinfer.formats.bundle_memory import apart_bytes
from powerinfer.formats.checkpoint import open_checkpoint
from powerinfer.formats.expert_files import open_expert_profile
from powerinfer.hardware import measure
from powerinfer.hybrid.resolve import resolve
from powerinfer.hybrid.resolved import Resolved, needs
from powerinfer.kernels import cpu
from powerinfer.models.inventory import matrix
from powerinfer.neurons import Tier
from powerinfer.placement import budget
from powerinfer.placement.plan import Plan, PlanRequest, kept_document, make_plan, save_plan
from powerinfer.placement.power_law import Law, assumed_profile, fit_skew, power_law
from powerinfer.placement.request import EVEN
from powerinfer.placement.shapes import checkpoint_model, described_model, find_shape

MOE = (
    "mixtral-8x7b", "olmoe-1b-7b", "qwen3-30b-a3b", "glm-4.5-air", "smallthinker-4b", "smallthinker-21b",
    "deepseek-v2-lite", "kimi-k2",
)  # fmt: skip


def taken(request: PlanRequest, division: budget.Division) -> budget.Footprint:
    """Bytes on the GPU."""
    return budget.on_gpu(request.model, request.hardware, request.workload, division, dense=True)


def cut(name: str, layers: int = 3) -> ModelConfig:
    config = find_shape(name).config
    return replace(config, layers=config.layers[:layers])


def request_of(config: ModelConfig, vram: int, **more: Any) -> PlanRequest:
    model = described_model(config, "q4_0", "made up", 0.0)
    given = {"context": 512, "chunk": 128, "selector": "all"} | more
    return PlanRequest(model, assumed_profile(EVEN, config.ffn_sizes), machine(vram), **given)


def check(made: Plan) -> None:
    request, claims = made.request, made.claims
    vram, ram = budget.budgets(request.hardware, request.vram, request.ram)
    assert sum(made.bytes["gpu"].values()) <= vram and sum(made.bytes["cpu"].values()) <= ram
    assert claims.slots is not None
    assert all(0 <= slots <= n for slots, n in zip(claims.slots, request.model.n_experts, strict=True))
    assert not any(claims.slots[claims.gpu_layers :])
    for layer, held in enumerate(made.neurons):  # of dense layers, with their layer
        assert held[Tier.GPU] in (0, request.model.config.ffn_sizes[layer]) and held[Tier.DISK] == 0


def divisible(vram: int, hot: float | None, **more: Any) -> PlanRequest:
    """Of a model of Nemotron's kind among whose neurons predictors select; hot: the share of them that carry 80 % of
    what fires, None: all fire alike."""
    config = cut("nemotron-3-nano-30b-a3b", 9)
    request = request_of(config, vram, ram=32 * GIB, **more)
    model = request.model.by_neuron(predicted=True)
    rows = {layer: model.neurons_inside(layer, True) for layer in config.experts}
    pairs = {layer: (matrix("Q8_0", 128, config.d_model), matrix("Q8_0", n, 128)) for layer, n in rows.items()}
    law = Law(model.firing, hot or 0.8)
    size = next(iter(config.experts.values())).size
    fires = power_law(law.active, fit_skew(law, 1) if hot else 0.0, size)
    inside = {
        layer: NeuronUse(np.tile(np.arange(size, dtype=np.int32), (about.n_experts, 1)), fires)
        for layer, about in config.experts.items()
    }
    every = range(config.n_layers)
    model = replace(model, predictors=tuple(pairs.get(layer, ()) for layer in every), inside=inside)
    return replace(request, model=replace(model, selected=(1.5,) * config.n_layers))


def test_experts_are_divided_where_that_is_faster() -> None:
    """By the neurons that fire most often, within the same memory."""
    every, speeds = sum(make_plan(divisible(64 * GIB, 0.3)).bytes["gpu"].values()), []
    for hot in (None, 0.6, 0.3):
        request = divisible(every // 2, hot)
        made = make_plan(request)
        check(made)
        whole = make_plan(replace(request, model=replace(request.model, inside={})))
        assert bool(made.claims.inside) == (hot is not None)
        ratio = whole.choice.seconds / made.choice.seconds
        speeds.append(ratio)
        if hot is None:
            continue
        slots = made.claims.slots
        assert slots is not None
        for layer, neurons in made.claims.inside.items():
            assert neurons % 32 == 0 < neurons < request.model.config.experts[layer].size and not slots[layer]
        assert made.choice.mass_on_gpu > whole.choice.mass_on_gpu
        line = "faster than whole experts in the same memory: {:.4g} tokens/s, not {:.4g}"
        assert made.reasons[-1] == line.format(1 / made.choice.seconds, 1 / whole.choice.seconds)
        document = made.document()
        assert [one.inside for one in document.layers if one.inside] == list(made.claims.inside.values())
        assert made.request.key != whole.request.key
        assert sum(made.bytes["gpu"].values()) <= every // 2 and made.bytes["cpu"]["experts"] > 0
    assert speeds[0] == 1 < speeds[1] < speeds[2]


def test_experts_that_move_are_whole() -> None:
    request = divisible(2 * GIB, 0.3, moves=True)
    assert not make_plan(request).claims.inside and make_plan(replace(request, moves=False)).claims.inside
    assert not make_plan(replace(request, moves=False, batch=33, requests=33)).claims.inside, "steps are whole"


def test_ram_holds_all_of_divided_experts() -> None:
    """Else they are whole."""
    request = divisible(2 * GIB, 0.3)
    made = make_plan(request)
    assert made.claims.inside
    less = make_plan(replace(request, ram=sum(made.bytes["cpu"].values()) - 1))
    assert not less.claims.inside and less.fits


@pytest.mark.parametrize("hot", [None, 0.3])
def test_buffers_for_long_prompts_give_way_to_experts_in_ram(hot: float | None) -> None:
    """Whether or not it would be faster to divide these."""
    request = divisible(2 * GIB, hot)
    whole = make_plan(replace(request, model=replace(request.model, inside={})))
    assert whole.claims.staging > 0
    ram = sum(whole.claims.cpu.values()) + budget.staged_in_ram(whole.claims.staging) - 1
    less = make_plan(replace(request, ram=ram))
    assert less.fits and less.claims.staging == 0 <= less.claims.cpu_left and not less.claims.inside


@pytest.mark.parametrize("name", MOE)
def test_more_memory_holds_more_experts_and_is_faster(name: str) -> None:
    config = cut(name)
    request = request_of(config, 64 * GIB)
    whole = make_plan(request)
    check(whole)
    assert whole.claims.slots == request.model.n_experts and whole.claims.gpu_head
    assert "experts" not in whole.bytes["cpu"] and whole.choice.mass_on_gpu == 1
    most = sum(whole.bytes["gpu"].values())
    none = sum(taken(request, budget.Division(3, True, (0,) * 3)).values())
    before = (-1, float("inf"))
    for share in (0.0, 0.1, 0.5, 0.9, 1.0):
        made = make_plan(replace(request, vram=none + round(share * (most - none)), insist=True))
        check(made)
        held = sum(made.claims.slots or ())
        assert (held, -made.choice.seconds) > (before[0], -before[1]), "more experts, less time"
        before = held, made.choice.seconds
        in_ram = sum(n - slots for n, slots in zip(request.model.n_experts, made.claims.slots or (), strict=True))
        each = request.model.expert_bytes(2)
        assert made.bytes["gpu"].get("experts", 0) == held * each[0]
        assert made.bytes["cpu"].get("experts", 0) == in_ram * each[1]
        document = made.document()
        assert [one.experts for one in document.layers] == list(made.claims.slots or ())
        assert any("experts are on the GPU" in reason for reason in document.reasons)
    assert before[0] == sum(request.model.n_experts)
    for one in make_plan(replace(request, vram=none, insist=True)).helps:
        made = make_plan(replace(request, vram=one.bytes, insist=True))
        assert one.what not in {other.what for other in made.helps}, "what helps suffices"


def test_biases_of_experts_count() -> None:
    model = described_model(cut("gpt-oss-20b"), "mxfp4", "made up", 0.0)
    about = model.config.experts[0]
    biases = 4 * (2 * about.size + model.config.d_model)
    bare = replace(
        model.config, layers=tuple(replace(one, ffn=replace(about, bias=False)) for one in model.config.layers)
    )
    without = described_model(bare, "mxfp4", "made up", 0.0)
    for ours, its in zip(model.expert_bytes(0), without.expert_bytes(0), strict=True):
        assert ours - its == biases


def test_a_gpu_too_small_for_any_expert_holds_attention() -> None:
    request = request_of(cut("qwen3-30b-a3b"), 8 * GIB)
    layers = [taken(request, budget.Division(n, slots=(0,) * 3)) for n in (1, 2)]
    made = make_plan(replace(request, vram=sum(layers[1].values()) - 1, insist=True))
    check(made)
    assert made.claims.gpu_layers == 1 and not made.claims.gpu_head
    too_small = replace(request, vram=sum(layers[0].values()) - 1, insist=True)
    assert too_small.claims().gpu_layers == 0
    with pytest.raises(RequestError, match=r"needs .*RAM"):
        replace(too_small, ram=100 * MIB).claims()
    with pytest.raises(RequestError, match="RAM"):
        replace(request, vram=sum(layers[1].values()), ram=100 * MIB).claims()


def test_frequent_experts_come_first() -> None:
    request = request_of(cut("qwen3-30b-a3b"), 8 * GIB)
    n = 128
    skewed = {layer: 8 * np.roll(np.arange(1.0, n + 1) ** -1.2, layer) for layer in range(3)}
    skewed = {layer: np.minimum(1.0, each / each.sum() * 8) for layer, each in skewed.items()}
    skewed[1] = np.full(n, 8 / n)  # its experts are all alike
    none = sum(taken(request, budget.Division(3, True, (0,) * 3)).values())
    room = 90 * request.model.expert_bytes(0)[0]
    even = make_plan(replace(request, vram=none + room, insist=True))
    known = make_plan(replace(request, vram=none + room, insist=True, frequencies=skewed))
    check(known)
    assert even.claims.slots == (30, 30, 30) and sum(known.claims.slots or ()) == 90
    assert known.claims.slots is not None and known.claims.slots[0] == known.claims.slots[2] != known.claims.slots[1]
    assert known.choice.mass_on_gpu > 1.4 * even.choice.mass_on_gpu and known.choice.seconds < even.choice.seconds
    assert known.request.key != even.request.key


def test_a_saved_plan_is_found_again(tmp_path: Path) -> None:
    request = request_of(cut("olmoe-1b-7b"), 2 * GIB, insist=True)
    made = make_plan(request)
    document = made.document(save_plan(made, tmp_path))
    assert kept_document(tmp_path, request) == document


@pytest.mark.parametrize("card", ["pc-8gb", "pc-16gb"])
def test_published_models_on_described_machines(card: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--shape", "qwen3-30b-a3b", "--dtype", "q4_0", "--context", "4096", "--hardware", card]
    assert main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["fits"] and document["gpu_layers"] == 48 and document["bytes"]["gpu"]["experts"] > GIB
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "of 6144 experts are on the GPU" in out and "policy  " not in out and "FFNs beside experts" in out


def answer(path: Path, **options: Any) -> tuple[str, LLM]:
    llm = LLM(path, threads=1, context=64, prefill_chunk=32, trial=False, **options)
    found = llm.generate("ab", SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    return found.text, llm


@pytest.mark.usefixtures("described")
def test_a_load_follows_its_plan(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from powerinfer.hybrid.load import load_resolved
    from powerinfer.hybrid.vram import smaller

    path = tiny_model(tmp_path)
    alone, llm = answer(path, gpu="none")
    llm.close()
    whole, llm = answer(path, gpu="cpu")
    assert whole == alone and llm.choices["gpu"].endswith("8 of 8 experts")
    assert llm.sparsity is not None and llm.sparsity["selector"] == "router" and llm.sparsity["gpu_share"] is None
    llm.close()
    engine = EngineConfig(threads=1, context=64, prefill_chunk=32, gpu="cpu")
    checkpoint = open_checkpoint(path)
    every = needs(resolve(checkpoint, engine)).vram
    each = checkpoint_model(checkpoint).expert_bytes(0)[0]
    budget_of = replace(engine, vram=every - 3 * each)
    resolved = resolve(open_checkpoint(path), budget_of)
    assert resolved.placement.experts is not None
    slots = [len(own) for own in resolved.placement.experts]  # of which layers depends on the machine
    assert sum(slots) == 5
    assert needs(resolved).vram == every - 3 * each
    executor, sparsity = load_resolved(resolved, lambda: [1])
    try:
        held = executor.gpu.memory()["ffn"] + sum(ffn.memory()["ffn"] for ffn in sparsity.ffns)  # type: ignore[attr-defined]
        hardware, model = measure.measured(engine, gpu="cpu"), checkpoint_model(checkpoint)
        work = budget.Workload("f16", 64, 32, 8)
        planned = budget.on_gpu(model, hardware, work, budget.Division(2, True, tuple(slots)), True)
        places = (8 + 2) * 4  # where each of the experts is, and a counter a layer, int32
        assert held == planned["ffn"] + planned["experts"] + places
    finally:
        executor.close()
    partly, llm = answer(path, gpu="cpu", vram=every - 3 * each)
    assert partly == alone and 0 < llm.sparsity["gpu_share"] < 1 and "5 of 8 experts" in llm.choices["gpu"]
    llm.close()
    fewer = smaller(resolved, 1)
    assert isinstance(fewer, Resolved) and fewer.placement.experts is not None
    assert sum(map(len, fewer.placement.experts)) == 4
    with pytest.raises(RequestError, match=r"hold no layer .* give --vram"):
        answer(path, gpu="cpu", vram=1 << 20)
    with pytest.raises(RequestError, match="--adjust is for models"):
        answer(path, gpu="none", adjust=True)
    for policy in ("lru", "dynamic"):
        room = replace(budget_of, expert_policy=policy)
        cached = needs(resolve(open_checkpoint(path), room))
        panels = checkpoint_model(checkpoint).expert_bytes(0)[1]
        # Buffers through which experts are sent take the place of one on the GPU, and as much in RAM.
        assert cached.vram == every - 3 * each and cached.ram == needs(resolved).ram + (5 + 1) * panels
        exchanged, llm = answer(path, gpu="cpu", vram=every - 3 * each, expert_policy=policy)
        assert exchanged == alone and llm.sparsity["copied"] >= 0
        llm.close()
        with pytest.raises(RequestError, match="leave out --adjust"):
            answer(path, gpu="cpu", vram=every - 3 * each, expert_policy=policy, adjust=True)
    adjusted, llm = answer(path, gpu="cpu", vram=every - 3 * each, adjust=True)
    assert adjusted == alone
    llm.close()


@pytest.mark.usefixtures("described")
def test_a_profile_says_which_experts_are_hot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    path = tiny_model(tmp_path)
    engine = EngineConfig(threads=1, context=64, prefill_chunk=32, gpu="cpu")
    each = checkpoint_model(open_checkpoint(path)).expert_bytes(0)[0]
    room = replace(engine, vram=needs(resolve(open_checkpoint(path), engine)).vram - 3 * each)  # of two layers of four
    before = resolve(open_checkpoint(path), room).placement.experts
    assert before is not None and [own.tolist() for own in before] == [list(range(len(own))) for own in before]
    (tmp_path / "text.txt").write_text("abc bca cab " * 40)
    assert main(["profile", "-m", str(path), "--corpus", str(tmp_path / "text.txt"), "--tokens", "64"]) == 0
    capsys.readouterr()
    counts = open_expert_profile(open_checkpoint(path)).frequencies
    hot = resolve(open_checkpoint(path), room).placement.experts
    assert hot is not None and sum(map(len, hot)) == 5
    for layer, own in enumerate(hot):
        assert not 0 < len(own) < 4 or counts[layer][own].min() >= np.delete(counts[layer], own).max(), "most frequent"
    flags = ["--gpu", "cpu", "--vram", f"{room.vram}B", "--context", "64", "--prefill-chunk", "32", "--dry-run"]
    assert main(["plan", "-m", str(path), "--threads", "1", *flags]) == 0
    assert "(as profiled)" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", ["q4_0", "q8_0", "q4_k_m"])
def test_neurons_inside_experts_that_do_not_fire_are_not_read(dtype: str) -> None:
    """Nemotron 3 Nano, whose up is read whole, and of down the rows that fire; scales are those of 32 rows."""
    config = find_shape("nemotron-3-nano-30b-a3b").config
    config = replace(config, layers=config.layers[:9])
    model = described_model(config, dtype, "made up", 0.0)
    fires, one = 0.0931, model.by_neuron()
    row, scales = {"q4_0": (1344, 168), "q8_0": (2688, 168), "q4_k_m": (1680, 168)}[dtype]  # of 2,688 numbers
    row = -(-row // 64) * 64
    read = (row * fires + scales * (1 - (1 - fires) ** 32)) / (row + scales)
    types = {one.type for own in model.experts for one in own}
    assert one.firing == fires and len(types) == 1 + (dtype == "q4_k_m") and model.may_skip
    if dtype != "q4_k_m":
        assert one.step_share(1, 1) == pytest.approx((1 + read) / 2, rel=0.01) and one.step_share(0, 1) == 1
    assert 0.5 < one.step_share(1, 1) < one.step_share(1, 8) < one.step_share(1, 256) == pytest.approx(1, abs=0.01)
    assert model.step_share(1, 1) == 1
    request = PlanRequest(
        model, assumed_profile(EVEN, config.ffn_sizes), machine(4 * GIB), context=512, chunk=128, selector="all"
    )
    for vram in (0, None):
        dense = make_plan(replace(request, vram=vram))
        skipping = make_plan(replace(request, vram=vram, model=one))
        assert dense.skipping_tok_s is not None and 1.1 < dense.skipping_tok_s * dense.choice.seconds < 1.9
        assert dense.skipping_tok_s == 1 / skipping.choice.seconds and skipping.skipping_tok_s is None
        assert skipping.dense_tok_s is not None and skipping.dense_tok_s < 1 / skipping.choice.seconds
        assert dense.document().predicted.skipping_tok_s == dense.skipping_tok_s


def test_what_predictors_inside_experts_leave_out_is_not_read() -> None:
    """Of Nemotron 3 Nano: rows of up, too; a predictor of rank 128 reads its rows of every expert that is needed."""
    config = find_shape("nemotron-3-nano-30b-a3b").config
    config = replace(config, layers=config.layers[:9])
    model, n = described_model(config, "q8_0", "made up", 0.0), config.n_layers
    neurons = [model.neurons_inside(layer, True) for layer in range(n)]
    pairs = [(matrix("Q8_0", 128, config.d_model), matrix("Q8_0", each, 128)) if each else () for each in neurons]
    exact, selecting = model.by_neuron(), model.by_neuron(True)
    predicted = replace(selecting, predictors=tuple(pairs), selected=(1.5,) * n)
    read = (1.5 * exact.firing + 2 * (exact.step_share(1, 1) - 0.5)) / 2
    assert predicted.step_share(1, 1) == pytest.approx(read) and selecting.step_share(1, 1) == exact.step_share(1, 1)
    assert predicted.step_share(1, 1) < predicted.step_share(1, 8) < exact.step_share(1, 8)
    request = PlanRequest(
        model, assumed_profile(EVEN, config.ffn_sizes), machine(4 * GIB), context=512, chunk=128, selector="all"
    )
    for vram in (0, 2 * GIB, None):
        plans = [make_plan(replace(request, vram=vram, model=one)) for one in (model, exact, predicted)]
        dense, some, fewest = (plan.choice.seconds for plan in plans)
        assert fewest < some < dense
        assert plans[2].dense_tok_s is not None and plans[2].dense_tok_s < 1 / some
        slots = plans[2].claims.slots or (0,) * n
        there = [layer for layer in config.experts if layer < plans[2].claims.gpu_layers]  # and their shared experts
        of_gpu = sum(pairs[at][0].stored + pairs[at][1].stored * 3712 // neurons[at] for at in there)
        assert plans[2].bytes["gpu"].get("predictor", 0) == of_gpu and (of_gpu > 0) == (vram != 0)
        routed = [(pairs[layer], about.n_experts - slots[layer]) for layer, about in config.experts.items()]
        of_ram = sum(one.panels for pair, cold in routed for one in pair[: 2 if vram == 0 else cold > 0])
        assert plans[2].bytes["cpu"]["predictor"] == of_ram


def test_neurons_of_experts_are_counted_where_a_load_has_them() -> None:
    """Of Nemotron 3 Nano: up as matrices, down, of the shared one, too, as bundles; with a predictor, all are."""
    config = find_shape("nemotron-3-nano-30b-a3b").config
    model = described_model(config, "q8_0", "made up", 0.0)
    about, d_model = next(iter(config.experts.values())), config.d_model
    n, size = about.n_experts, about.size
    layout = expert_layout(d_model, "Q8_0", "Q8_0")
    down = apart_bytes(layout, n_groups(size))
    up = cpu.matrix_bytes("Q8_0", size, d_model)
    router, shared_up = cpu.matrix_bytes("F32", n, d_model), cpu.matrix_bytes("Q8_0", about.shared_size, d_model)
    more = n_groups(about.shared_size)
    for predicted, experts, of_shared in (
        (False, n * (up + down), shared_up + apart_bytes(layout, more)),
        (True, n * n_groups(size) * layout.group_bytes, more * layout.group_bytes),
    ):
        skipping = model.by_neuron(predicted)
        for layer in range(config.n_layers):
            held = sum(one.panels for one in skipping.ffn[layer])
            assert held == (router + experts + of_shared if layer in config.experts else 0)
            if layer in config.experts:
                assert skipping.expert_bytes(layer)[1] == experts // n, "the shared one is on the GPU, then"
                assert skipping.expert_bytes(layer)[0] == model.expert_bytes(layer)[0]


@pytest.mark.parametrize("predicted", [False, True])
def test_a_shared_expert_with_gates_is_no_bundle(predicted: bool) -> None:
    config = cut("deepseek-v2-lite")
    layers = [replace(one, ffn=replace(one.ffn, activation="relu")) for one in config.layers]
    model = described_model(replace(config, layers=tuple(layers)), "q8_0", "made up", 0.0)
    skipping, (layer, about) = model.by_neuron(predicted), next(iter(model.config.experts.items()))
    layout = expert_layout(config.d_model, "Q8_0", "Q8_0", gated=predicted)
    gates = 0 if predicted else cpu.matrix_bytes("Q8_0", about.size, config.d_model)
    experts = about.n_experts * (gates + n_groups(about.size) * layout.group_bytes)
    assert skipping.expert_bytes(layer)[1] == experts // about.n_experts and about.shared_size
    beside = sum(one.panels for one in model.beside[layer])
    assert sum(one.panels for one in skipping.ffn[layer]) == experts + beside


def test_types_without_rows_of_neurons_skip_none() -> None:
    assert not described_model(cut("smallthinker-21b"), "q4_k_m", "made up", 0.0).may_skip
    assert described_model(cut("smallthinker-21b"), "q4_0", "made up", 0.0).may_skip
    assert not described_model(cut("qwen3-30b-a3b"), "q4_0", "made up", 0.0).may_skip
    config = cut("smallthinker-4b")  # in experts of 800 neurons down has rows of single ones in any type
    odd = replace(config, layers=tuple(replace(one, ffn=replace(one.ffn, size=800)) for one in config.layers))
    model = described_model(odd, "q4_k_m", "made up", 0.0)
    assert {tuple(one.type for one in own[1:]) for own in model.experts} <= {("Q4_K", "Q5_0"), ("Q4_K", "Q8_0")}
    assert model.may_skip and described_model(odd, "q8_0", "made up", 0.0).may_skip
    model = described_model(odd, "nvfp4", "made up", 0.0)
    assert not model.may_skip
    assert make_plan(replace(request_of(odd, 4 * GIB), model=model)).skipping_tok_s is None
