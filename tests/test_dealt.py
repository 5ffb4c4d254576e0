"""Work that threads take parts of as they are free: the same bits whoever does it.

The sizes of products are chosen for `Workspace::deals`: tokens times rows times columns is at least 2^29.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_bundled_ffn import K, layout_of
from test_expert_neurons import logits, model, opened, plain_model
from test_experts import LEVELS, TOP, Layer
from test_neuron_kernels import limits_of, make_layer, products_of
from test_partial_ffn import half
from test_predicted_experts import give_plain_predictors
from test_predicted_experts import opened as opened_predicted

from powerinfer import _native
from powerinfer.config import (
    GAUSSIAN,
    AttentionConfig,
    EngineConfig,
    FfnConfig,
    LayerConfig,
    ModelConfig,
    RopeConfig,
    uniform,
)
from powerinfer.devices.batch import Batch
from powerinfer.devices.cpu import CpuExecutor
from powerinfer.formats.tensors import RawTensor
from powerinfer.neurons import FfnVectors, Predictor

WIDTH, TOKENS, HEADS = 1024, 512, 16


def test_experts_and_an_ffn_of_matrices() -> None:
    assert TOKENS * TOP * 352 * WIDTH >= 2**29
    layer = Layer("Q8_0", WIDTH, 352, gated=True, shared=WIDTH)
    x = np.random.default_rng(9).standard_normal((TOKENS, WIDTH)).astype(np.float32)
    whole = layer.run(LEVELS[0], x, threads=1)
    assert np.isfinite(whole).all() and np.ptp(whole) > 0
    for threads in (2, 5):
        assert np.array_equal(layer.run(LEVELS[0], x, threads), whole)


@pytest.mark.parametrize("gated", [False, True])
def test_ffns_that_are_no_whole_parts(gated: bool) -> None:
    """Of 1,056 neurons, with biases."""
    rng, neurons = np.random.default_rng(4), 1056
    layer = LayerConfig(
        AttentionConfig(1, 1, 16), FfnConfig(neurons, "gelu_tanh" if gated else "relu", gated=gated, bias=True)
    )
    config = ModelConfig("sample", WIDTH, TOKENS, 1024, 1e-5, uniform(1, layer))
    weights = [half(rng.standard_normal((neurons, WIDTH)) / 32) for _ in range(2)]
    down, table = half(rng.standard_normal((WIDTH, neurons)) / 32), half(rng.standard_normal((TOKENS, WIDTH)))
    biases = [rng.standard_normal(size).astype(np.float32) for size in (neurons, neurons, WIDTH)]
    vectors = FfnVectors(biases[0] if gated else None, *biases[1:])
    found = []
    for threads in (1, 2, 5):
        executor = CpuExecutor(config, EngineConfig(threads=threads, context=1024, prefill_chunk=TOKENS), {})
        executor.embed(table)
        gate = executor.matrix(weights[1]) if gated else None
        executor.ffn(0, None, gate, executor.matrix(weights[0]), executor.matrix(down), vectors)
        executor.head(None, executor.matrix(half(np.eye(TOKENS, WIDTH))))
        each = np.arange(TOKENS, dtype=np.int32)
        pages = np.arange(16, dtype=np.int32)[None]
        found.append(executor.forward(Batch(each, each, np.zeros_like(each), pages, each)).copy())
        executor.close()
    assert np.isfinite(found[0]).all() and np.ptp(found[0]) > 0
    assert all(np.array_equal(one, found[0]) for one in found[1:])


@pytest.mark.parametrize("biases", [False, True])
def test_attention(biases: bool) -> None:
    rng = np.random.default_rng(2)
    layer = LayerConfig(
        AttentionConfig(HEADS, HEADS, WIDTH // HEADS, RopeConfig(dim=WIDTH // HEADS), qkv_bias=biases),
        FfnConfig(64, "relu"),
    )
    config = ModelConfig("sample", WIDTH, TOKENS, 1024, 1e-5, uniform(1, layer))

    def matrix(rows: int) -> RawTensor:
        return half(rng.standard_normal((rows, WIDTH)) / WIDTH**0.5)

    weights = [matrix(WIDTH) for _ in range(4)]
    table, head = half(rng.standard_normal((TOKENS, WIDTH))), matrix(TOKENS)
    vectors = [rng.standard_normal(WIDTH).astype(np.float32) if biases else None for _ in range(3)]
    turned = np.ones(WIDTH // HEADS // 2, np.float32) / np.arange(1, WIDTH // HEADS // 2 + 1, dtype=np.float32)
    found = []
    for threads in (1, 2, 5):
        engine = EngineConfig(threads=threads, context=1024, prefill_chunk=TOKENS, max_batch=2)
        executor = CpuExecutor(config, engine, dict.fromkeys(config.ropes, (turned, 1.0)))
        executor.embed(table)
        executor.attention(0, None, [executor.matrix(one) for one in weights[:3]], biases=vectors)
        executor.project(0, executor.matrix(weights[3]))
        executor.head(None, executor.matrix(head))
        each = np.arange(TOKENS, dtype=np.int32)
        first = TOKENS // 3  # two prompts
        position, sequence = (
            np.where(each < first, each, each - first).astype(np.int32),
            (each >= first).astype(np.int32),
        )
        pages = np.arange(2 * 16, dtype=np.int32).reshape(2, 16)
        found.append(executor.forward(Batch(each, position, sequence, pages, each[::37])).copy())
        executor.close()
    assert np.isfinite(found[0]).all() and np.ptp(found[0]) > 0
    assert all(np.array_equal(one, found[0]) for one in found[1:])


# ---- Neurons in bundles ---------------------------------------------------------------------------------------------

NEURONS, LAYERS = 2304, 2  # so many fire that there are more parts than threads
CUTOFF = -0.3  # which more than half of the gates exceed
WAYS = [
    ("exact", 1.0, "relu"),
    ("exact", 0.3, "relu"),
    ("exact", 0.3, "cats"),
    ("predicted", 1.0, "relu"),
    *((way, dense_above, GAUSSIAN) for way, dense_above in (("exact", 1.0), ("exact", 0.3), ("dense", 1.0))),
]


@contextmanager
def busy_cores(programs: int) -> Iterator[None]:
    """So many other threads compute, each on a pool of its own."""
    over = threading.Event()

    def compute() -> None:
        pool, rows, k = _native.Pool(1), 512, 512
        data = np.ones((rows, k), np.float32).view(np.uint8).ravel()
        matrix = _native.pack_matrix(pool, _native.Arena(), "F32", rows, k, data)
        x, out = np.ones((64, k), np.float32), np.zeros((64, rows), np.float32)
        while not over.is_set():
            _native.matmul(pool, matrix, "", x, out)

    others = [threading.Thread(target=compute) for _ in range(programs)]
    for other in others:
        other.start()
    try:
        yield
    finally:
        over.set()
        for other in others:
            other.join()


def sparse_executor(
    threads: int,
    way: str,
    dense_above: float,
    activation: str,
    types: tuple[str, str],
    recall_every: int = 2,
    floor: int = 200,
) -> CpuExecutor:
    products = activation == "cats"
    limits = (limits_of(NEURONS), products_of(NEURONS)) if products else (None, None)
    layer = make_layer(K, NEURONS, types, activation, limits=limits[0], product_limits=limits[1])
    threshold = CUTOFF if activation == GAUSSIAN else 0.0
    ffn = FfnConfig(NEURONS, activation, threshold, thresholds=products, product_thresholds=products)
    config = ModelConfig("sample", K, K, 64, 1e-5, uniform(LAYERS, LayerConfig(AttentionConfig(1, 1, 16), ffn)))
    executor = CpuExecutor(config, EngineConfig(threads=threads, context=64, prefill_chunk=32, max_batch=8), {})
    rng = np.random.default_rng(7)
    executor.embed(half(rng.standard_normal((K, K))))
    guesses = (
        Predictor(32, 0.0, floor),
        half(rng.standard_normal((32, K)) / K**0.5),
        half(rng.standard_normal((NEURONS, 32)) / 32**0.5),
    )
    assert layer.gate is not None
    for number in range(LAYERS):
        gate, up, down = (executor.matrix(half(matrix)) for matrix in (layer.gate, layer.up, layer.down.T / 64))
        executor.ffn(number, None, gate, up, down, FfnVectors(None, None, None, *limits))
        predicted: dict[str, Any] = {"predictor": guesses, "recall_every": recall_every} if way == "predicted" else {}
        executor.ffns[number].add_bundles(layout_of(layer), layer.data, dense_above=dense_above, **predicted)
        executor.ffns[number].set_ways({executor.neuron_tokens: way})
    executor.head(None, executor.matrix(half(np.eye(K))))
    return executor


def steps_of(executor: CpuExecutor, tokens: int) -> np.ndarray:
    each = np.arange(tokens, dtype=np.int32)
    return executor.forward(Batch(each, np.zeros_like(each), each, each[:, None], each)).copy()


@pytest.mark.sampled
@pytest.mark.parametrize(("way", "dense_above", "activation"), WAYS)
@pytest.mark.parametrize("types", [("F16", "F16"), ("Q4_0", "Q4_0X32")], ids="-".join)
def test_neurons_in_bundles(way: str, dense_above: float, activation: str, types: tuple[str, str]) -> None:
    """Also while other programs need the cores, when what a thread has begun may be computed again by another."""
    executor = sparse_executor(3, way, dense_above, activation, types)
    right = {tokens: steps_of(executor, tokens) for tokens in (1, 5)}
    assert all(np.isfinite(one).all() and np.ptp(one) > 0 for one in right.values())
    executor.ffns[0].clear()
    with busy_cores(2):
        for _ in range(10):
            for tokens, found in right.items():
                assert np.array_equal(steps_of(executor, tokens), found)
    counts = executor.ffns[0].counts()
    assert counts["steps"] == 20 * (way != "dense") and counts["tokens"] == 10 * 6 * (way != "dense")
    executor.close()


@pytest.mark.sampled
@pytest.mark.parametrize("floor", [0, 200, NEURONS])
@pytest.mark.parametrize(("way", "dense_above", "activation"), WAYS)
def test_threads_meet_at_no_barrier(way: str, dense_above: float, activation: str, floor: int) -> None:
    """But where the recall of a predictor is measured, every other step here."""
    types = ("F16", "F16")
    executor = sparse_executor(2, way, dense_above, activation, types, recall_every=0, floor=floor)
    before = executor._pool.barriers
    for tokens in (1, 5, 1):
        steps_of(executor, tokens)
    assert executor._pool.barriers == before
    executor.close()
    if way == "predicted":
        executor = sparse_executor(2, way, dense_above, activation, types, floor=floor)
        counted = []
        for tokens in (1, 5, 1, 5):
            before = executor._pool.barriers
            steps_of(executor, tokens)
            counted.append(executor._pool.barriers - before)
        assert counted == [LAYERS, 0, LAYERS, 0]
        executor.close()


@pytest.mark.parametrize("share", [0.1, 1.0])
def test_sums_of_some_neurons(share: float) -> None:
    """Beside a GPU, while other programs need the cores: the same bits without a barrier, and threads that are late do
    not read what a caller has given."""
    layer = make_layer(K, NEURONS, ("F16", "F16"))
    executor = sparse_executor(3, "exact", 1.0, "relu", ("F16", "F16"))
    part = executor.parts.bundled(0, layout_of(layer), layer.data, (*layer.biases, None, None))
    rng = np.random.default_rng(8)
    given = [
        (
            rng.standard_normal((n, K)).astype(np.float32),
            (rng.random((n, NEURONS)) < share).astype(np.uint8),
            rng.standard_normal(n).astype(np.float32),
        )
        for n in (1, 4)
    ]

    def sum_of(x: np.ndarray, selected: np.ndarray, weight: np.ndarray) -> np.ndarray:
        copies, out = [one.copy() for one in (x, selected, weight)], np.full(x.shape, np.nan, np.float32)
        assert part.sum(copies[0], out, *copies[1:])
        for one in copies:
            one.fill(77)
        return out

    before = executor._pool.barriers
    right = [sum_of(*one) for one in given]
    assert all(np.isfinite(one).all() and np.ptp(one) > 0 for one in right)
    with busy_cores(2):
        for _ in range(20):
            for one, wanted in zip(given, right, strict=True):
                assert np.array_equal(sum_of(*one), wanted)
    assert executor._pool.barriers == before
    executor.close()


def experts_of(kind: str, folder: Path, threads: int, recall_every: int) -> CpuExecutor:
    path = model(folder) if kind == "gated" else plain_model(folder, "F16", latents=32 if "latents" in kind else 0)
    if kind.startswith("predicted"):
        predicted = give_plain_predictors(path, threshold=3.0)
        return opened_predicted(predicted, threads=threads, recall_every=recall_every)
    return opened(path, exact=True, threads=threads)


EXPERTS = ["gated", "plain", "latents", "predicted", "predicted latents"]


@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_meet_at_no_barrier(kind: str, tmp_path: Path) -> None:
    executor = experts_of(kind, tmp_path, 2, 0)
    before = executor._pool.barriers
    logits(executor, 1)
    logits(executor, 25)
    assert executor._pool.barriers == before
    executor.close()


@pytest.mark.parametrize("kind", EXPERTS)
def test_neurons_of_experts(kind: str, tmp_path: Path) -> None:
    executor = experts_of(kind, tmp_path, 3, 2)
    right = {step: logits(executor, step) for step in (1, 25)}
    with busy_cores(2):
        for step, found in right.items():
            assert np.array_equal(logits(executor, step), found)
    executor.close()
