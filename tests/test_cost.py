"""The predicted time of a step: against the equations of cost.py written out neuron by neuron."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from configs import changed
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_models import profile_of

from powerinfer.config import (
    AttentionConfig,
    EngineConfig,
    FfnConfig,
    LayerConfig,
    ModelConfig,
    PlanConfig,
    RopeConfig,
    uniform,
)
from powerinfer.hardware.description import ALL_TYPES, SIZES_ALONE, load
from powerinfer.neurons import Profile
from powerinfer.placement import cost
from powerinfer.placement.plan import make_plan
from powerinfer.placement.request import shape_subject
from powerinfer.placement.shapes import Model, described_model

MACHINE = load("pc-low")
CPU, GPU = MACHINE.cpu, MACHINE.gpu
assert GPU is not None and MACHINE.disk is not None
SYNC = 1e-6 * MACHINE.sync_us
SELECTED = (1.5, 2.5)


def small(activation: str = "relu", gated: bool = True, d_ff: int = 200, dtype: str = "f16") -> Model:
    layer = LayerConfig(AttentionConfig(4, 2, 64, RopeConfig(dim=64)), FfnConfig(d_ff, activation, gated=gated))
    config = ModelConfig("llama", 256, 1000, 512, 1e-5, uniform(2, layer))
    return replace(described_model(config, dtype, "small"), selected=SELECTED)


def row_seconds(device: object, model: Model, part: str) -> float:
    nbytes = model.bundle.down_bytes if part == "down" else model.bundle.gate_bytes
    kind = model.bundle.gate_type
    return nbytes / (1e9 * device.bundle_gb_s[kind]) + 1e-9 * device.row_ns[kind]  # type: ignore[attr-defined]


def ffn_seconds(
    device: object, model: Model, profile: Profile, layer: int, neurons: list[int], way: str, batch: int
) -> float:
    """T_d of the docstring, without its fixed part."""
    sparse = 0.0
    for neuron in neurons:
        p = profile.counts[layer][neuron] / profile.tokens
        some = lambda chance: 1 - (1 - chance) ** batch  # noqa: E731
        fires = some(min(1.0, p / 0.8) if model.config.activations == "drelu" else p)
        if way == "all":
            kind = model.bundle.gate_type
            sparse += model.bundle.stride / (1e9 * device.dense_gb_s[kind])  # type: ignore[attr-defined]
            continue
        first = row_seconds(device, model, "first")
        sparse += first * (some(min(1.0, SELECTED[layer] * p)) if way == "predicted" else 1.0)
        sparse += row_seconds(device, model, "up") * fires if model.bundle.gated else 0.0
        sparse += row_seconds(device, model, "down") * some(p)
    return sparse


@pytest.mark.parametrize("way", ["all", "exact", "predicted"])
@pytest.mark.parametrize(("activation", "gated"), [("relu", True), ("drelu", True), ("relu", False)])
@pytest.mark.parametrize("batch", [1, 4])
def test_a_split_layer_neuron_by_neuron(way: str, activation: str, gated: bool, batch: int) -> None:
    """max(T_gpu, T_cpu + T_sync) for every number of groups on the GPU, the last group smaller than the others."""
    model = small(activation, gated)
    profile = profile_of(2, 200)
    orders = [profile.order(layer) for layer in range(2)]
    expected = cost.expected(profile, orders, model.config, SELECTED, batch, 64)
    found = cost.split_time(CPU, GPU, expected, model, way, SYNC)
    assert found.total.shape == (2, 5)
    for layer in range(2):
        for k in range(5):
            on_gpu, on_cpu = np.split(orders[layer], [min(64 * k, 200)])
            gpu, cpu = (
                ffn_seconds(device, model, profile, layer, list(neurons), way, batch)
                for device, neurons in ((GPU, on_gpu), (CPU, on_cpu))
            )
            extra = 0.0 if way == "all" else 1.0
            gpu += 1e-6 * (GPU.op_us + extra * GPU.sparse_us) if k else 0.0
            busy = 1.0 if len(on_cpu) else 0.0
            if way == "predicted":
                p = profile.counts[layer][on_cpu] / profile.tokens
                silent = 1 - (1 - (1 - np.minimum(1.0, SELECTED[layer] * p)) ** batch)
                busy = 1 - float(np.prod(silent)) if len(on_cpu) else 0.0
            wait = busy * (SYNC + 1e-6 * (CPU.op_us + extra * CPU.sparse_us))
            assert found.total[layer, k] == pytest.approx(max(gpu, cpu + wait), rel=1e-9)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dtype", ["f16", "q4_0"])
def test_neurons_of_whole_layers_that_are_not_looked_up(gated: bool, dtype: str) -> None:
    """From so many tokens on that together they need nine in ten of the bytes; of one token where all are matrices."""
    model, rates = small(gated=gated, dtype=dtype), (0.2, 0.95)
    counts, none = tuple(np.full(200, round(1000 * rate)) for rate in rates), (np.zeros((0, 200), np.int64),) * 2
    profile = replace(
        profile_of(2, 200), tokens=1000, counts=counts, corpora=(), corpus_tokens=(), corpus_counts=none
    )
    orders = [profile.order(layer) for layer in range(2)]
    for way, skipped in (("exact", 2 / 3 if gated else 1 / 2), ("predicted", 1.0)):
        for batch in (1, 2, 8, 9, 10, 11, 40):
            dense = [skipped * (1 - rate) ** batch < 0.1 and (batch > 1 or dtype == "f16") for rate in rates]
            assert cost.dense_layers(profile, model, way, batch) == dense
            expected = cost.expected(profile, orders, model.config, SELECTED, batch, 64)
            plain, found = (cost.split_time(CPU, GPU, expected, model, way, SYNC, layers) for layers in ((), dense))
            seconds = 200 * model.bundle.stride / (1e9 * GPU.dense_gb_s[model.bundle.gate_type]) + 1e-6 * GPU.op_us
            for layer in range(2):
                wanted = seconds if dense[layer] else plain.gpu[layer, -1]
                assert found.gpu[layer, -1] == pytest.approx(wanted, rel=1e-9)
            assert (found.gpu[:, :-1] == plain.gpu[:, :-1]).all() and (found.cpu == plain.cpu).all()


@pytest.mark.parametrize("way", ["all", "exact", "predicted"])
def test_the_cpu_alone_with_and_without_dense_matrices(way: str) -> None:
    model = small(dtype="q4_0")
    profile = profile_of(2, 200)
    orders = [profile.order(layer) for layer in range(2)]
    expected = cost.expected(profile, orders, model.config, SELECTED, 1, 64)
    for panels in (False, True):
        found = cost.cpu_time(CPU, expected, model, way, panels)
        assert np.isinf(found.total[:, 1:]).all()
        for layer in range(2):
            wanted = ffn_seconds(CPU, model, profile, layer, list(range(200)), way, 1)
            dense = {one: 1e-9 * one.panels / CPU.dense_gb_s["Q4_0"] for one in model.ffn[layer]}
            if panels and way == "all":
                wanted = sum(dense[one] for one in model.ffn[layer])
            if panels and way == "exact":
                wanted += dense[model.ffn[layer][0]] - 200 * row_seconds(CPU, model, "first")
            wanted += 1e-6 * (CPU.op_us + (0.0 if way == "all" else CPU.sparse_us))
            assert found.total[layer, 0] == pytest.approx(wanted, rel=1e-9)


def test_reading_from_disk() -> None:
    model = small()
    profile = profile_of(2, 200)
    orders = [profile.order(layer) for layer in range(2)]
    expected = cost.expected(profile, orders, model.config, SELECTED, 1, 64)
    disk, stride, first = MACHINE.disk, model.bundle.stride, model.bundle.gate_bytes
    for layer in range(2):
        p = profile.counts[layer][orders[layer]][128:] / profile.tokens  # two groups stay in memory
        streamed = 72 * stride / disk.rate(1 << 20)
        wanted = {
            "all": streamed,
            "predicted": min(streamed, np.minimum(1, SELECTED[layer] * p).sum() * disk.seconds(stride)),
            "exact": min(streamed, p.sum() * disk.seconds(stride - first)),
        }
        for selector, seconds in wanted.items():
            found = cost.disk_seconds(disk, expected, model.bundles, selector)
            assert found[layer, 2] == pytest.approx(seconds, rel=1e-9)
            assert found[layer, 4] == 0 and (np.diff(found[layer]) <= 1e-15).all()
        firsts = cost.disk_seconds(disk, expected, model.bundles, "exact", True)
        assert firsts[layer, 2] == pytest.approx(min(streamed, wanted["exact"] + 72 * disk.seconds(first)), rel=1e-9)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 300), st.integers(1, 80), st.integers(0, 5))
def test_expected_is_cumulative_and_batches_need_more(d_ff: int, group: int, seed: int) -> None:
    model, profile = small(d_ff=d_ff), profile_of(2, d_ff, seed)
    orders = [profile.order(layer) for layer in range(2)]
    one, many = (cost.expected(profile, orders, model.config, SELECTED, batch, group) for batch in (1, 8))
    for layer in range(2):
        assert one.all[layer, cost.EACH] == d_ff
        p = profile.fraction(layer)
        assert one.all[layer, cost.ACTIVE] == pytest.approx(p.sum())
        shared = sum(1 - np.prod(1 - p[at : at + 32]) for at in range(0, d_ff, 32))
        assert one.all[layer, cost.SHARED] == pytest.approx(shared, abs=1e-9)
    for found in (one, many):
        assert (np.diff(found.sums, axis=1) >= 0).all() and (found.sums[:, 0] == 0).all()
        assert (found.sums[..., cost.SELECTED] >= found.sums[..., cost.ACTIVE] - 1e-9).all()
        assert (found.idle >= 0).all() and (found.idle[:, -1] == 1).all() and (np.diff(found.idle, axis=1) >= 0).all()
    assert (many.sums[..., : cost.SHARED] >= one.sums[..., : cost.SHARED] - 1e-9).all()
    assert (many.all >= one.all - 1e-9).all() and (many.idle <= one.idle + 1e-12).all()


def test_attention_and_ends() -> None:
    """Four matrices, keys and values in whole pages, three operators; a window bounds what attention sees."""
    model = small()
    nbytes = sum(one.panels for one in model.attention[0])
    kv = model.kv_bytes("f16", 100, 2, slice(1))
    wanted = nbytes / (1e9 * CPU.dense_gb_s["F16"]) + kv / (1e9 * CPU.kv_gb_s) + 3e-6 * CPU.op_us
    assert cost.attention_seconds(CPU, model, 0, "f16", 100, 2, panels=True) == pytest.approx(wanted, rel=1e-12)
    slides = replace(model, config=changed(model.config, window=32))
    saved = (kv - model.kv_bytes("f16", 32, 2, slice(1))) / (1e9 * CPU.kv_gb_s)
    found = cost.attention_seconds(CPU, slides, 0, "f16", 100, 2, panels=True)
    assert found == pytest.approx(wanted - saved, rel=1e-9)
    post = replace(model, config=changed(model.config, norms="post"))
    found = cost.attention_seconds(CPU, post, 0, "f16", 100, 2, panels=True)
    assert found == pytest.approx(wanted + 2e-6 * CPU.op_us, rel=1e-9), "norms that stand alone"
    slow = replace(GPU, head_gb_s={"other": 5.0, model.head.type: 7.0})
    head = model.head.stored / 7e9 + 1e-6 * GPU.op_us
    assert cost.end_seconds(slow, model, panels=False) == pytest.approx(head, rel=1e-12)


def test_bytes_that_are_read() -> None:
    model = small()
    first, down = model.bundle.gate_bytes, model.bundle.down_bytes
    assert cost.neuron_bytes(model.bundle, "all").tolist() == [2 * first + down, 0, 0, 0, 0]
    assert cost.neuron_bytes(model.bundle, "exact").tolist() == [first, 0, first, down, 0]
    assert cost.neuron_bytes(model.bundle, "predicted").tolist() == [0, first, first, down, 0]
    assert cost.neuron_bytes(small(gated=False).bundle, "exact").tolist() == [first, 0, 0, down, 0]
    across = small(d_ff=256, dtype="q4_0").bundle  # scales of 256 columns, in F16
    first, down = across.gate_bytes, across.down_bytes
    assert cost.neuron_bytes(across, "exact").tolist() == [first, 0, first, down, 512]
    assert cost.neuron_bytes(across, "all").tolist() == [2 * first + down + 16, 0, 0, 0, 0]
    seconds = cost.neuron_seconds(CPU, across, "exact")[cost.SHARED]
    assert seconds == pytest.approx(512 / (1e9 * CPU.bundle_gb_s["Q4_0"]))


class Rates(dict[str, float]):
    """A table that is asked for nothing that it lacks."""

    def __contains__(self, kind: object) -> bool:
        assert super().__contains__(kind) or kind not in ALL_TYPES.dense, kind
        return super().__contains__(kind)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("shape", "dtype", "selector"),
    [
        ("qwen3-14b", "q4_k_m", "all"),
        ("opt-30b", "q4_0", "exact"),
        ("llama-7b", "q4_1", "exact"),
        ("bamboo-7b", "f16", "predicted"),
        ("qwen3-30b-a3b", "q4_k_m", "all"),
        ("gpt-oss-20b", None, "auto"),
    ],
)
@pytest.mark.parametrize("vram", [4, 24])
def test_a_plan_reads_the_rates_of_its_types_alone(shape: str, dtype: str | None, selector: str, vram: int) -> None:
    """So a machine on which only these were measured gives the same plan as one with all."""
    subject, machine = shape_subject(shape, dtype, selector), load("pc-high")
    types, gpu = subject.model.rated_types, machine.gpu
    assert gpu is not None and types.dense
    whole = {kind: 100.0 + 10 * at for at, kind in enumerate(sorted(ALL_TYPES.dense))}
    fast, rows = replace(gpu, dense_gb_s=whole, head_gb_s=whole), {kind: gpu.row_ns[kind] for kind in types.rows}
    dense = Rates({kind: whole[kind] for kind in types.dense})
    bundles = Rates({kind: gpu.bundle_gb_s[kind] for kind in types.rows})
    few = replace(fast, dense_gb_s=dense, head_gb_s=dense, bundle_gb_s=bundles, row_ns=rows)
    assert few.lacks(types) == SIZES_ALONE and (dtype == "q4_1" or few.lacks(ALL_TYPES) != SIZES_ALONE)
    engine = EngineConfig(vram=vram << 30, ram=64 << 30, context=2048)
    machines = [replace(machine, gpu=device, key={"cpu": "this"}) for device in (few, fast)]
    requests = [subject.request(one, engine, PlanConfig()) for one in machines]
    one, other = (make_plan(request).document() for request in requests)
    assert replace(one, solve_s=0.0, predicted=None) == replace(other, solve_s=0.0, predicted=None)
    assert replace(one.predicted, policies={}) == replace(other.predicted, policies={})
