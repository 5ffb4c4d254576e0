"""FFNs with their neurons as bundles only: some of a layer's, selected or all, in steps of any size.

What is expected, and how far off it may be, is that of tests/test_neuron_kernels.py.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_neuron_kernels import (
    ACTIVATIONS,
    CURVE,
    THRESHOLD,
    TYPES,
    Layer,
    expected,
    limits_of,
    make_layer,
    products_of,
)

from powerinfer import _native
from powerinfer.config import AttentionConfig, EngineConfig, FfnConfig, LayerConfig, ModelConfig, RopeConfig
from powerinfer.devices.cpu import CpuExecutor
from powerinfer.formats.bundle_memory import gather, some_bytes
from powerinfer.formats.tensors import RawTensor
from powerinfer.kernels import cpu
from powerinfer.neurons import BundleLayout, FfnVectors, Predictor

K, NEURONS, TOKENS = 128, 160, 33


def layout_of(layer: Layer) -> BundleLayout:
    gate_bytes, _ = cpu.bundle_row_bytes(layer.up_type, K)
    return BundleLayout(
        K, layer.gate is not None, layer.up_type, layer.down_type, gate_bytes, *cpu.bundle_row_bytes(layer.down_type, K)
    )


def executor_of(layer: Layer, threads: int) -> CpuExecutor:
    each = layer.limits is not None
    curve = CURVE if layer.activation == "xielu" else ()
    threshold = 0.0 if each else THRESHOLD
    ffn = FfnConfig(NEURONS, layer.activation, threshold, layer.gate is not None, True, each, curve=curve)
    layers = (LayerConfig(AttentionConfig(1, 1, 16, RopeConfig(dim=16)), ffn),)
    config = ModelConfig("sample", K, K, 64, 1e-5, layers)
    engine = EngineConfig(threads=threads, context=64, prefill_chunk=64)
    return CpuExecutor(config, engine, dict.fromkeys(config.ropes, (np.ones(8, np.float32), 1.0)))


def some(share: float, seed: int = 0) -> np.ndarray:
    return np.flatnonzero(np.random.default_rng(seed).random(NEURONS) < share).astype(np.int32)


def part_of(layer: Layer, index: np.ndarray, threads: int = 2, **more: Any) -> _native.NeuronSum:
    bundles = gather(layout_of(layer), layer.data, index)
    return executor_of(layer, threads).parts.bundled(
        0, layout_of(layer), bundles, (*layer.biases, layer.limits, layer.product_limits), **more
    )


def sum_of(
    layer: Layer,
    index: np.ndarray,
    x: np.ndarray,
    selected: np.ndarray | None = None,
    threads: int = 2,
    weight: np.ndarray | None = None,
) -> np.ndarray:
    out = np.full(x.shape, np.nan, np.float32)
    part_of(layer, index, threads).sum(x, out, selected, weight)
    return out


def tokens(n: int) -> np.ndarray:
    return np.random.default_rng(n).standard_normal((n, K)).astype(np.float32)


KINDS = [(t, t) for t in TYPES] + [("Q4_0", "Q4_0X32"), ("Q4_1", "Q4_1X32"), ("F16", "Q8_0")]


@pytest.mark.parametrize("types", KINDS)
@pytest.mark.parametrize("share", [0.03, 0.5, 1.0])
def test_some_neurons_give_their_sum(types: tuple[str, str], share: float) -> None:
    layer = make_layer(K, NEURONS, types)
    index = some(share)
    for n in (1, 7, 9, 32, TOKENS):
        x = tokens(n)
        want, bound = expected(layer, x, index)
        assert (np.abs(sum_of(layer, index, x) - want) <= bound).all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gated", [True, False])
def test_every_kind_of_ffn(activation: str, gated: bool) -> None:
    layer = make_layer(K, NEURONS, ("F16", "F16"), activation, gated, biases=True)
    x, index = tokens(3), some(0.4, 1)
    want, bound = expected(layer, x, index)
    assert (np.abs(sum_of(layer, index, x) - want) <= bound).all()


@pytest.mark.parametrize("activation", ["fatrelu", "cats"])
@pytest.mark.parametrize("types", [("F16", "F16"), ("Q4_0", "Q4_0X32")])
def test_each_neuron_has_its_threshold(types: tuple[str, str], activation: str) -> None:
    """Some neurons, all tokens and those that select them, few or many; dense neurons are of the same kind."""
    own = {"limits": limits_of(NEURONS), "product_limits": products_of(NEURONS) if activation == "cats" else None}
    layer, index, x = make_layer(K, NEURONS, types, activation, **own), some(0.6, 2), tokens(TOKENS)  # type: ignore[arg-type]
    for n in (1, 9, TOKENS):
        want, bound = expected(layer, x[:n], index)
        assert (np.abs(sum_of(layer, index, x[:n]) - want) <= bound).all()
    for share in (0.05, 0.9):
        names = (np.random.default_rng(10).random((TOKENS, len(index))) < share).astype(np.uint8)
        together = sum_of(layer, index, x, names, 1)
        for i in range(TOKENS):
            want, bound = expected(layer, x[i : i + 1], index[names[i] > 0])
            assert (np.abs(together[i] - want[0]) <= bound[0]).all()
            alone = sum_of(layer, index, x[i : i + 1], names[i : i + 1], 1)
            np.testing.assert_array_equal(together[i], alone[0])


@pytest.mark.parametrize("types", [("F16", "F16"), ("Q4_0", "Q4_0X32"), ("Q4_1", "Q4_1X32")])
@pytest.mark.parametrize("n", [1, 8, 31, TOKENS])
def test_a_token_gets_the_neurons_that_it_selects(types: tuple[str, str], n: int) -> None:
    layer, index, x = make_layer(K, NEURONS, types), some(0.6, 2), tokens(n)
    names = np.random.default_rng(3).integers(0, 2, (n, len(index))).astype(np.uint8) * 255
    out = sum_of(layer, index, x, names)
    for i in range(n):
        want, bound = expected(layer, x[i : i + 1], index[names[i] > 0])
        # another token's neurons of a group do not change how this token's are rounded: their products are zero
        assert (np.abs(out[i] - want[0]) <= bound[0]).all()
    assert not sum_of(layer, index, x, np.zeros_like(names)).any()


@pytest.mark.parametrize("types", [("Q8_0", "Q8_0"), ("Q4_0", "Q4_0X32")])
@pytest.mark.parametrize("n", [1, 2, 9, 32, TOKENS])
def test_a_token_s_sum_is_multiplied_with_its_weight(types: tuple[str, str], n: int) -> None:
    """As a router weighs experts: the bits are those of the product, and a weight of 0 selects nothing."""
    layer, index, x = make_layer(K, NEURONS, types), some(0.7, 11), tokens(n)
    rng = np.random.default_rng(12)
    weight = rng.standard_normal(n).astype(np.float32) * (rng.random(n) < 0.5)
    selected = (rng.random((n, len(index))) < 0.5).astype(np.uint8)
    for names in (None, selected):
        plain = sum_of(layer, index, x, names, threads=1)
        part, out = part_of(layer, index, threads=1), np.full(x.shape, np.nan, np.float32)
        assert part.sum(x, out, names, weight) is bool(weight.any())
        np.testing.assert_array_equal(out, plain * weight[:, None])
        wanted = np.count_nonzero(weight[:, None] * (np.ones_like(selected) if names is None else names))
        assert part.counts().get("candidates", 0) == (wanted if n <= 32 else 0)
    assert not part_of(layer, index).sum(x, out, None, np.zeros(n, np.float32)) and not out.any()
    assert np.isnan(sum_of(layer, index, x, weight=np.full(n, np.nan, np.float32))).all()


def test_what_fires_is_counted() -> None:
    """Per neuron and in all, in steps of up to 32 tokens, until it is cleared."""
    layer, index = make_layer(K, NEURONS, ("F16", "F16")), some(0.6, 13)
    x, out = tokens(TOKENS), np.empty((TOKENS, K), np.float32)
    part, fired = part_of(layer, index, count_fired=True), np.empty(len(index), np.int64)
    gate, up = (x[:9].astype(np.float64) @ weights[index].T for weights in (layer.gate, layer.up))
    for times in (1, 2):
        part.sum(x[:9], out[:9])
        part.sum(x, out)  # not counted: too many tokens
        part.take_fired(fired)  # of this time alone
        assert np.array_equal(fired, ((gate > 0) & (up != 0)).sum(axis=0))
        counts = part.counts()
        assert (counts["steps"], counts["tokens"], counts["active"]) == (times, 9 * times, times * fired.sum())
        assert counts["candidates"] == times * 9 * len(index)
    part.sum(x[:9], out[:9])
    part.clear()
    part.take_fired(fired)
    assert not fired.any() and not any(part.counts().values())
    with pytest.raises(ValueError, match="another number"):
        part.take_fired(fired[1:].copy())
    with pytest.raises(ValueError, match="not counted"):
        part_of(layer, index).take_fired(fired)


@pytest.mark.sampled
@pytest.mark.parametrize("types", KINDS)
@pytest.mark.parametrize("share", [0.05, 0.9])
def test_a_token_beside_others_has_the_bits_that_it_has_alone(types: tuple[str, str], share: float) -> None:
    """With one thread, whose list is not cut; `share` of the neurons are selected, by few tokens each or by most."""
    layer, index, x = make_layer(K, NEURONS, types), some(0.8, 9), tokens(TOKENS)
    names = (np.random.default_rng(10).random((TOKENS, len(index))) < share).astype(np.uint8)
    for wanted in (names, None):
        alone = [
            sum_of(layer, index, x[i : i + 1], names[i : i + 1] if wanted is not None else None, 1)
            for i in range(TOKENS)
        ]
        for n in (2, 9, 32, TOKENS):
            together = sum_of(layer, index, x[:n], None if wanted is None else names[:n], 1)
            np.testing.assert_array_equal(together.view(np.uint32), np.concatenate(alone[:n]).view(np.uint32))


def test_the_parts_of_a_cut_add_up_whatever_the_cut() -> None:
    layer, x = make_layer(K, NEURONS, ("F16", "F16")), tokens(5)
    want, bound = expected(layer, x, np.arange(NEURONS))
    rng = np.random.default_rng(4)
    for parts in (1, 2, 3, 7):
        owner = rng.integers(0, parts, NEURONS)
        cut = [np.flatnonzero(owner == part).astype(np.int32) for part in range(parts)]
        total = sum(sum_of(layer, index, x).astype(np.float64) for index in cut if len(index))
        assert (np.abs(total - want) <= 2 * bound).all()


def test_the_same_bits_on_every_run_and_memory_of_their_own() -> None:
    layer, index, x = make_layer(K, NEURONS, ("Q4_0", "Q4_0X32")), some(0.5, 5), tokens(9)
    assert sum_of(layer, index, x).tobytes() == sum_of(layer, index, x).tobytes()
    bundles = gather(layout_of(layer), layer.data, index)
    assert bundles.rows.nbytes == some_bytes(layout_of(layer), index) and not np.shares_memory(bundles.rows, layer.data)


def test_within_a_model_it_adds_to_the_residual_stream() -> None:
    """Between an embedding and a head that show the stream: x + its norm's sum + down's bias."""
    layer = make_layer(K, NEURONS, ("F16", "F16"))
    executor, rows = executor_of(layer, 2), tokens(K)
    table = RawTensor("F32", (K, K), np.ascontiguousarray(rows).view(np.uint8).reshape(-1))
    bias = np.random.default_rng(6).standard_normal(K).astype(np.float32)
    executor.embed(table)
    executor.bundled_ffn(0, layout_of(layer), layer.data, vectors=FfnVectors(down_bias=bias))
    one = RawTensor("F32", (K, K), np.eye(K, dtype=np.float32).view(np.uint8).reshape(-1))
    executor.head(None, executor.matrix(one))
    from powerinfer.devices.batch import Batch

    ids = np.arange(12, dtype=np.int32)
    pages = np.arange(2, dtype=np.int32)[None]
    logits = executor.forward(Batch(ids, ids, np.zeros(12, np.int32), pages, ids))
    want, bound = expected(layer, rows[:12], np.arange(NEURONS))
    assert (np.abs(logits - (want + rows[:12] + bias)) <= bound + 1e-5).all()


@pytest.mark.parametrize(
    "change", [{"counts": [33, 0, 0, 0, 0]}, {"counts": [1, 1, 1, 1, 1]}, {"counts": []}, {"bytes": -64}]
)
def test_groups_that_do_not_suit_are_refused(change: dict) -> None:
    layer, index = make_layer(K, NEURONS, ("F16", "F16")), some(0.5, 7)
    bundles = gather(layout_of(layer), layer.data, index)
    counts = np.array(change.get("counts", bundles.counts), np.int32)
    rows = np.ascontiguousarray(bundles.rows[:, : change.get("bytes", bundles.rows.shape[1])])
    with pytest.raises(ValueError):
        executor_of(layer, 1).parts.bundled(0, layout_of(layer), replace(bundles, rows=rows, counts=counts))


def test_selections_and_weights_of_another_shape_are_refused() -> None:
    layer, index = make_layer(K, NEURONS, ("F16", "F16")), some(0.5, 8)
    for shape in ((2, len(index) + 1), (1, len(index))):
        with pytest.raises(ValueError, match="selected"):
            sum_of(layer, index, tokens(2), np.ones(shape, np.uint8))
    with pytest.raises(ValueError, match="weight"):
        sum_of(layer, index, tokens(2), weight=np.ones(3, np.float32))
    with pytest.raises(ValueError, match="negative"):
        part_of(layer, index, threshold=-1.0)
    part = part_of(layer, index)
    for x, out in ((tokens(2)[:, 1:].copy(), tokens(2)), (tokens(2), tokens(3)), (tokens(0), tokens(0))):
        with pytest.raises(ValueError, match="x and out"):
            part.sum(x, out)


def test_counters_are_read_between_steps() -> None:
    """Also while another thread of Python runs steps: none is seen in part."""
    layer = make_layer(K, NEURONS, ("F16", "F16"))
    part, x, steps = part_of(layer, some(0.5, 9), count_fired=True), tokens(32), 400

    def run() -> None:
        for _ in range(steps):
            part.sum(x, np.empty_like(x))

    runner = threading.Thread(target=run)
    runner.start()
    while True:
        over = not runner.is_alive()
        counts = part.counts()
        assert counts["tokens"] == 32 * counts["steps"]
        assert counts["candidates"] == part.neurons * counts["tokens"]
        if over:
            break
    assert counts["steps"] == steps


def test_bundles_of_another_kind_than_the_matrices_are_refused() -> None:
    layer = make_layer(K, NEURONS, ("F16", "F16"), biases=True)
    executor = executor_of(layer, 1)
    gate, up, down = (
        executor.matrix(RawTensor("F32", w.shape, np.ascontiguousarray(w, np.float32).view(np.uint8).reshape(-1)))
        for w in (layer.gate, layer.up, layer.down.T)
    )
    same, index = executor.parts.bundled(0, layout_of(layer), layer.data, layer.biases), np.arange(1, NEURONS)
    fewer = gather(layout_of(layer), layer.data, index.astype(np.int32))
    ffns = [
        executor._program.ffn(_native.FfnSpec(), _native.DenseNeurons(spec, gate, up, down))
        for spec in (
            _native.NeuronSpec(layer.activation, THRESHOLD, *layer.biases),
            _native.NeuronSpec("relu2", THRESHOLD, *layer.biases),
            _native.NeuronSpec(layer.activation, THRESHOLD, layer.biases[1], layer.biases[1]),
            _native.NeuronSpec(layer.activation, THRESHOLD),
        )
    ]
    ffns[0].set_bundled(same)
    for ffn, neurons in (
        (ffns[0], executor.parts.bundled(0, layout_of(layer), fewer, layer.biases)),
        *((ffn, same) for ffn in ffns[1:]),
    ):
        with pytest.raises(ValueError, match="another kind"):
            ffn.set_bundled(neurons)
    own, other = limits_of(NEURONS), limits_of(NEURONS)[::-1].copy()
    layer = make_layer(K, NEURONS, ("F16", "F16"), "cats", limits=own)
    each = executor_of(layer, 1)
    alike = each.parts.bundled(0, layout_of(layer), layer.data, (None, None, own, own))
    for limits, products in ((own, own), (other, own), (None, None), (own, None), (own, other)):
        spec = _native.NeuronSpec("cats", 0.0, limits=limits, product_limits=products)
        ffn = each._program.ffn(_native.FfnSpec(), _native.DenseNeurons(spec, gate, up, down))
        with (
            nullcontext()
            if products is limits is own
            else pytest.raises(ValueError, match="other biases or thresholds")
        ):
            ffn.set_bundled(alike)
    with pytest.raises(ValueError, match="one for every neuron"):
        _native.DenseNeurons(_native.NeuronSpec("cats", limits=own[1:].copy()), gate, up, down)
    with pytest.raises(ValueError, match="products without a gate"):
        _native.DenseNeurons(_native.NeuronSpec("cats", limits=own, product_limits=own), None, up, down)
    with pytest.raises(ValueError, match="another workspace"):
        ffns[0].set_bundled(part_of(layer, np.arange(NEURONS, dtype=np.int32)))


def test_a_way_needs_its_part() -> None:
    layer = make_layer(K, NEURONS, ("F16", "F16"))
    executor = executor_of(layer, 1)
    executor.bundled_ffn(0, layout_of(layer), layer.data)
    for way, message in (("dense", "no matrices"), ("predicted", "no predictor")):
        with pytest.raises(ValueError, match=message):
            executor.ffns[0].set_ways({executor.neuron_tokens: way})
    executor.ffns[0].set_ways({executor.neuron_tokens: "exact"})
    one = np.zeros((1, K), np.float32).view(np.uint8).reshape(-1)
    up, down = executor.matrix(RawTensor("F32", (1, K), one)), executor.matrix(RawTensor("F32", (K, 1), one))
    executor.ffn(0, None, None, up, down)
    for way in ("exact", "predicted"):
        with pytest.raises(ValueError, match="no bundles"):
            executor.ffns[0].set_ways({1: way})
    neurons = executor.parts.bundled(0, layout_of(layer), layer.data)
    ffn = executor._program.ffn(_native.FfnSpec(), None, neurons)
    with pytest.raises(ValueError, match="recall"):
        ffn.set_bundled(neurons, recall_every=1)


def test_a_predictor_that_does_not_suit_is_refused() -> None:
    layer = make_layer(K, NEURONS, ("F16", "F16"))

    def predictor(rank: int, neurons: int) -> tuple[Predictor, RawTensor, RawTensor]:
        shapes = ((rank, K), (neurons, rank))
        return Predictor(rank, 0.0, 0), *(
            RawTensor("F32", shape, np.zeros(4 * shape[0] * shape[1], np.uint8)) for shape in shapes
        )

    bundles, all_but_one = layer.data, gather(layout_of(layer), layer.data, np.arange(1, NEURONS, dtype=np.int32))
    executor_of(layer, 1).bundled_ffn(0, layout_of(layer), bundles, predictor=predictor(32, NEURONS))
    with pytest.raises(ValueError, match="predictor"):
        executor_of(layer, 1).bundled_ffn(0, layout_of(layer), bundles, predictor=predictor(32, NEURONS - 1))
    with pytest.raises(ValueError, match="all of its neurons"):
        executor_of(layer, 1).bundled_ffn(0, layout_of(layer), all_but_one, predictor=predictor(32, NEURONS))
