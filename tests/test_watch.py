"""An observer's view of the FFNs, against numpy on the same inputs, for every kind of FFN."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import model_files
import numpy as np
import pytest
import reference
from model_files import family_gguf, family_name, give_limits
from sparse_models import tiny_llama

from benchmarks.models.gguf_writer import F32, STRING, Builder
from powerinfer.config import EngineConfig
from powerinfer.devices import Batch
from powerinfer.devices.cpu import CpuExecutor, Fired, magnitude
from powerinfer.errors import ModelError
from powerinfer.formats.bundle_file import open_bundles
from powerinfer.formats.checkpoint import Checkpoint, open_checkpoint
from powerinfer.kernels import cpu
from powerinfer.models import load

TOKENS = 75
IDS = (np.arange(TOKENS, dtype=np.int32) * 7 + 3) % 40
EPS = float(np.finfo(np.float32).eps)


def llama(activation: str) -> Builder:
    return family_gguf("llama").add("llama.hidden_act", STRING, activation)


MODELS = {
    "silu": lambda: family_gguf("llama"),
    "relu": lambda: llama("relu"),
    "fatrelu": lambda: llama("fatrelu").add("llama.hidden_act_param", F32, 2.5),
    "cats": lambda: llama("cats").add("llama.hidden_act_param", F32, 0.5),
    "cats of neurons": lambda: give_limits(llama("cats"), products=True),
    "fatrelu of neurons": lambda: give_limits(llama("fatrelu")),
    "drelu": lambda: family_gguf("bamboo"),
    "relu2, plain": lambda: family_gguf("nemotron"),
    "relu, plain, biases": lambda: family_gguf("opt"),
    "relu, plain, parallel": lambda: family_gguf("falcon"),
    "relu, plain, parallel, two norms": lambda: family_gguf("falcon", two_norms=True),
}
every_model = pytest.mark.parametrize("name", MODELS)


@contextmanager
def opened(path: Path, **options: Any) -> Iterator[tuple[CpuExecutor, Checkpoint]]:
    checkpoint = open_checkpoint(path)
    engine = EngineConfig(**({"threads": 2, "context": 128, "max_batch": 3, "selector": "all"} | options))
    executor = load(checkpoint, engine)
    try:
        yield executor, checkpoint
    finally:
        executor.close()


def batch(first: int, last: int, row: int = 0, logits: bool = False) -> Batch:
    span = np.arange(first, last, dtype=np.int32)
    wanted = np.arange(last - first if logits else 0, dtype=np.int32)
    return Batch(IDS[first:last], span, np.zeros_like(span), np.array([[9, 2, 5]], np.int32), wanted)


class Seen:
    """Everything that was shown, copied."""

    def __init__(self) -> None:
        self.x: dict[int, list[np.ndarray]] = {}
        self.fired: dict[int, list[Fired]] = {}

    def reads(self, layer: int, x: np.ndarray) -> None:
        self.x.setdefault(layer, []).append(x.copy())

    def fires(self, layer: int, fired: Fired) -> None:
        copied = Fired(fired.counts.copy(), fired.active.copy(), fired.magnitudes.copy())
        self.fired.setdefault(layer, []).append(copied)

    def inputs(self, layer: int) -> np.ndarray:
        return np.concatenate(self.x[layer])

    def active(self, layer: int) -> np.ndarray:
        return np.concatenate([one.active for one in self.fired[layer]])

    def counts(self, layer: int) -> np.ndarray:
        return np.sum([one.counts for one in self.fired[layer]], axis=0)


def look(executor: CpuExecutor, chunks: list[int] | None = None, **options: Any) -> Seen:
    seen, at = Seen(), 0
    with executor.observed(seen, **options):
        for size in chunks or [TOKENS]:
            executor.forward(batch(at, at + size))
            at += size
    return seen


def products(checkpoint: Checkpoint, layer: int, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(h, act(gate), bound) of an FFN in float64, [tokens, d_ff]; bound: of the rounding before the activations."""
    config = checkpoint.config

    def take(name: str) -> np.ndarray:
        return checkpoint.take(f"layers.{layer}.{name}").float32().astype(np.float64)

    norm = "attn_norm" if config.layers[layer].shared_norm else "ffn_norm"
    bias = take(f"{norm}_bias") if config.norm == "layer" else None
    n = (
        reference.rms_norm(x, take(norm), config.norm_eps)
        if bias is None
        else reference.layer_norm(x, take(norm), bias, config.norm_eps)
    )
    ffn = config.layers[layer].ffn
    first = take("gate" if ffn.gated else "up")
    inner = n @ first.T + (take("up_bias") if ffn.bias else 0.0)
    bound = 4 * config.d_model * EPS * (np.abs(n) @ np.abs(first).T + 1)
    act, limit = ffn.activation, take("threshold") if ffn.thresholds else ffn.threshold
    a = reference.activate("relu" if act == "drelu" else act, inner, None, limit)
    up = n @ take("up").T if ffn.gated else None
    h = reference.activate(act, inner, up, limit)
    close = np.abs((np.abs(a) if act == "cats" else inner) - limit) <= 1.2 * bound
    if ffn.product_thresholds:
        assert up is not None
        least, off = take("product_threshold"), 4 * config.d_model * EPS * (np.abs(n) @ np.abs(take("up")).T + 1)
        close |= np.abs(np.abs(h) - least) <= 1.2 * bound * np.abs(up) + (np.abs(a) + 1.2 * bound) * off
        h = np.where(np.abs(h) <= least, 0, h)
    if act == "drelu":
        close |= np.abs(n @ take("up").T) <= bound
    return h, a, close


def unpacked(active: np.ndarray, d_ff: int) -> np.ndarray:
    return np.unpackbits(active, axis=1, count=d_ff, bitorder="little").astype(bool)


@pytest.mark.sampled
@every_model
@pytest.mark.parametrize("d_ff", [96, 99, 17, 1])
def test_the_neurons_that_fire(name: str, d_ff: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "FF", d_ff)
    with opened(MODELS[name]().write(tmp_path / "m.gguf")) as (executor, checkpoint):
        seen = look(executor)
        assert checkpoint.config.widest_ffn == d_ff
        for layer in range(checkpoint.config.n_layers):
            h, _, close = products(checkpoint, layer, seen.inputs(layer))
            fires = unpacked(seen.active(layer), d_ff)
            assert close.mean() < 0.02 and (fires == (h != 0))[~close].all()
            assert np.array_equal(seen.counts(layer), fires.sum(axis=0))
            assert seen.active(layer).shape == (TOKENS, -(-d_ff // 8))
            if d_ff > 1:
                assert fires.mean() == 1 if name == "silu" else 0.1 < fires.mean() < 0.9
            assert not seen.fired[layer][0].magnitudes.any()


@every_model
def test_chunks_and_threads_see_the_same(name: str, tmp_path: Path) -> None:
    path = MODELS[name]().write(tmp_path / "m.gguf")
    with opened(path) as (executor, checkpoint):
        whole, layers = look(executor), range(checkpoint.config.n_layers)
    for threads, chunks in ((1, [75]), (3, [75]), (2, [1] * 75), (2, [40, 1, 34])):
        with opened(path, threads=threads) as (executor, _):
            parts = look(executor, chunks)
        for layer in layers:
            assert np.array_equal(parts.inputs(layer), whole.inputs(layer)), (threads, chunks)
            assert np.array_equal(parts.active(layer), whole.active(layer)), (threads, chunks)
            assert np.array_equal(parts.counts(layer), whole.counts(layer)), (threads, chunks)


@every_model
def test_observing_changes_nothing(name: str, tmp_path: Path) -> None:
    with opened(MODELS[name]().write(tmp_path / "m.gguf")) as (executor, checkpoint):
        plain = executor.forward(batch(0, TOKENS, logits=True)).copy()
        zeros = [0.0] * checkpoint.config.n_layers
        for options in ({}, {"thresholds": zeros}, {"thresholds": zeros, "silence": True, "measure": True}):
            with executor.observed(Seen(), **options):
                assert np.array_equal(executor.forward(batch(0, TOKENS, logits=True)), plain)
        assert np.array_equal(executor.forward(batch(0, TOKENS, logits=True)), plain)


@every_model
def test_thresholds_apply_before_multiplication_by_up(name: str, tmp_path: Path) -> None:
    with opened(MODELS[name]().write(tmp_path / "m.gguf")) as (executor, checkpoint):
        most = [0.25 * (layer + 1) for layer in range(checkpoint.config.n_layers)]
        seen, d_ff = look(executor, thresholds=most, measure=True), checkpoint.config.widest_ffn
        for layer, limit in enumerate(most):
            _, a, _ = products(checkpoint, layer, seen.inputs(layer))
            fires = unpacked(seen.active(layer), d_ff)
            close = np.abs(np.abs(a) - limit) < 1e-4
            assert (fires == (np.abs(a) > limit))[~close].all() and 0.05 < fires.mean() < 0.95
            bins = seen.fired[layer][0].magnitudes
            assert bins.sum() == a.size
            edges = magnitude(np.arange(1, len(bins)))
            wanted, _ = np.histogram(np.abs(a), np.concatenate([[0], edges, [np.inf]]))
            assert np.abs(np.cumsum(bins) - np.cumsum(wanted)).max() <= 0.002 * a.size


def test_bins_of_magnitudes() -> None:
    edges = magnitude(np.arange(48 * 16))
    assert edges[0] == 2.0**-30 and edges[30 * 16] == 1.0 and edges[31 * 16 + 8] == 3.0
    assert (np.diff(edges) > 0).all() and (edges[1:] / edges[:-1]).max() <= 1 + 1 / 16


def test_silencing_is_what_selector_threshold_does(tmp_path: Path) -> None:
    """Dense with zeros, and sparse from bundles: the same answer, for thresholds of layers."""
    from powerinfer.formats.bundle_types import choose_types
    from powerinfer.prepare.packing import pack

    path = tiny_llama(tmp_path / "m.gguf", "silu")
    checkpoint = open_checkpoint(path)
    pack(checkpoint, None, choose_types(checkpoint, "F16", "F16"))
    most = [0.5, 0.125]
    with opened(path) as (executor, _):
        dense = executor.forward(batch(0, TOKENS, logits=True)).copy()
        with executor.observed(None, most, silence=True):
            silenced = executor.forward(batch(0, TOKENS, logits=True)).copy()
        bundles = open_bundles(checkpoint, None, cpu.bundle_row_bytes)
        for layer, rows in enumerate(bundles.layers):
            executor.ffns[layer].add_bundles(bundles.layouts[layer], rows, threshold=most[layer])
            executor.ffns[layer].set_ways({1: "exact"})
        sparse = np.concatenate([executor.forward(batch(at, at + 1, logits=True)).copy() for at in range(TOKENS)])
    scale = np.abs(dense).max()
    assert np.abs(silenced - dense).max() > 0.01 * scale
    assert np.abs(sparse - silenced).max() < 1e-4 * scale


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("part", ["gate", "up", "q"])
def test_numbers_that_are_not_finite_are_named_with_their_layer(part: str, value: float, tmp_path: Path) -> None:
    builder = llama("relu")
    name = family_name(f"layers.1.{part}", "llama", False, False)
    for tensor in builder.tensors:
        if tensor.name == name:
            values = np.frombuffer(tensor.data, np.float32).copy()
            values[5] = value
            tensor.data = values.tobytes()
    with opened(builder.write(tmp_path / "m.gguf")) as (executor, _):
        seen = Seen()
        with (
            pytest.raises(ModelError, match=r"layer 1 .*not finite.*may be damaged"),
            executor.observed(seen),
        ):
            executor.forward(batch(0, TOKENS))
        assert list(seen.fired) == [0]
        executor.forward(batch(0, TOKENS))  # not observed any more: nothing is raised


def test_a_silenced_infinity_is_found_too(tmp_path: Path) -> None:
    """A gate of minus infinity never fires, and hides nothing."""
    builder = llama("relu")
    name = family_name("layers.0.ffn_norm", "llama", False, False)
    for tensor in builder.tensors:
        if tensor.name == name:
            tensor.data = np.full(64, np.finfo(np.float32).min, np.float32).tobytes()
    with (
        opened(builder.write(tmp_path / "m.gguf")) as (executor, _),
        pytest.raises(ModelError, match="layer 0"),
        executor.observed(Seen()),
    ):
        executor.forward(batch(0, 3))
