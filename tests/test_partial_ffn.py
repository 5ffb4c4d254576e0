"""An FFN with only some of its neurons on the CPU: the parts add up to the whole, for every way and split."""

from __future__ import annotations

import numpy as np
import pytest

from powerinfer.config import AttentionConfig, EngineConfig, FfnConfig, LayerConfig, ModelConfig, RopeConfig, uniform
from powerinfer.devices.batch import Batch
from powerinfer.devices.cpu import CpuExecutor
from powerinfer.formats.bundle_file import n_groups
from powerinfer.formats.tensors import RawTensor
from powerinfer.kernels import cpu
from powerinfer.neurons import BundleLayout, FfnVectors, Predictor

D_MODEL, D_FF, RANK, TOKENS = 64, 224, 32, 3
EPS = float(np.finfo(np.float32).eps)
WAYS = ("dense", "exact", "predicted")
CUTS = {
    "even": [range(0, D_FF, 2), range(1, D_FF, 2)],
    "ends": [range(1), range(1, D_FF - 33), range(D_FF - 33, D_FF)],
    "whole": [range(D_FF)],
}


def half(values: np.ndarray) -> RawTensor:
    return RawTensor("F16", values.shape, np.ascontiguousarray(values.astype(np.float16)).view(np.uint8).reshape(-1))


def step(executor: CpuExecutor) -> np.ndarray:
    """The residual stream after a step of TOKENS sequences, [TOKENS, D_MODEL]."""
    each = np.arange(TOKENS, dtype=np.int32)
    pages = np.arange(TOKENS, dtype=np.int32)[:, None]
    return executor.forward(Batch(each, np.zeros(TOKENS, np.int32), each, pages, each)).copy()


class Case:
    """Weights of a gated FFN with biases; values that F16 holds."""

    def __init__(self) -> None:
        rng = np.random.default_rng(3)
        sizes = {"gate": (D_FF, D_MODEL), "up": (D_FF, D_MODEL), "down": (D_MODEL, D_FF)}
        sizes |= {"inner": (RANK, D_MODEL), "outer": (D_FF, RANK), "x": (TOKENS, D_MODEL)}
        self.w = {
            name: (rng.standard_normal(size) / 4).astype(np.float16).astype(np.float32) for name, size in sizes.items()
        }
        self.bias = {name: rng.standard_normal(D_FF).astype(np.float32) for name in ("gate", "up")}

    def executor(self, neurons: np.ndarray, threads: int) -> CpuExecutor:
        """One FFN of these neurons between an embedding and a head that returns the residual stream."""
        layer = LayerConfig(AttentionConfig(1, 1, 16, RopeConfig(dim=16)), FfnConfig(D_FF, "relu", bias=True))
        config = ModelConfig("sample", D_MODEL, D_MODEL, 64, 1e-5, uniform(2, layer))
        rotations = dict.fromkeys(config.ropes, (np.ones(8, np.float32), 1.0))
        executor = CpuExecutor(config, EngineConfig(threads=threads, context=64), rotations)
        table = np.zeros((D_MODEL, D_MODEL), np.float32)
        table[:TOKENS] = self.w["x"]
        executor.embed(half(table))
        gate, up, down = self.w["gate"][neurons], self.w["up"][neurons], self.w["down"][:, neurons]
        vectors = FfnVectors(self.bias["gate"][neurons], self.bias["up"][neurons])
        executor.ffn(0, None, *(executor.matrix(half(part)) for part in (gate, up, down)), vectors)  # type: ignore[misc]
        layout, bundles = self.bundles(neurons)
        predictor = Predictor(RANK, 0.0, 0), half(self.w["inner"]), half(self.w["outer"][neurons])
        executor.ffns[0].add_bundles(layout, bundles, predictor=predictor)
        executor.head(None, executor.matrix(half(np.eye(D_MODEL, dtype=np.float32))))
        return executor

    def bundles(self, neurons: np.ndarray) -> tuple[BundleLayout, np.ndarray]:
        gate, up, down = self.w["gate"][neurons], self.w["up"][neurons], self.w["down"][:, neurons]
        nbytes, _ = cpu.bundle_row_bytes("F16", D_MODEL)
        layout = BundleLayout(D_MODEL, True, "F16", "F16", nbytes, nbytes)
        bundles = np.zeros((n_groups(len(neurons)), layout.group_bytes), np.uint8)
        for name, part in (("gate", gate), ("up", up), ("down", down.T)):
            cpu.pack_bundle_rows(layout, name, len(neurons), half(part).data, bundles, 1)
        return layout, bundles

    def added(self, neurons: np.ndarray, way: str, threads: int) -> np.ndarray:
        """The FFN's output, float32 [TOKENS, D_MODEL]."""
        executor = self.executor(neurons, threads)
        executor.ffns[0].set_ways({executor.neuron_tokens: way})
        out = step(executor)
        counts = executor.ffns[0].counts()
        assert (counts["steps"] == 0) == (way == "dense") and counts["active"] <= TOKENS * len(neurons)
        executor.close()
        return np.asarray(out - self.w["x"])

    def expected(self, way: str) -> tuple[np.ndarray, np.ndarray]:
        """(output, bound of its error), float64."""
        w = {name: values.astype(np.float64) for name, values in self.w.items()}
        off = np.zeros((TOKENS, D_FF))
        hidden = []
        for name in ("gate", "up"):
            hidden.append(w["x"] @ w[name].T + self.bias[name])
            size = np.abs(w["x"]) @ np.abs(w[name].T) + np.abs(self.bias[name])
            off += (D_MODEL + 2) * EPS * size * 8  # times the maximum of the other
        assert max(np.abs(values).max() for values in hidden) < 8
        h = np.maximum(hidden[0], 0) * hidden[1]
        if way == "predicted":
            guess = np.maximum(w["x"] @ w["inner"].T, 0) @ w["outer"].T
            assert np.abs(guess).min() > 1e-4, "the case depends on a rounding"
            h = np.where(guess >= 0, h, 0)
        down = np.abs(w["down"].T)
        return h @ w["down"].T, off @ down + (D_FF + 8) * EPS * (np.abs(h) @ down + np.abs(w["x"]))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("way", WAYS)
def test_parts_add_up(way: str, cut: str, threads: int) -> None:
    case = Case()
    value, bound = case.expected(way)
    assert (np.abs(value) > 10 * bound).any()
    parts = [case.added(np.array(part), way, threads) for part in CUTS[cut]]
    assert (np.abs(np.sum(parts, axis=0, dtype=np.float64) - value) <= len(parts) * bound).all()


def test_new_bundles_make_it_dense_and_need_no_predictor() -> None:
    case, every = Case(), np.arange(D_FF)
    executor = case.executor(every, 2)
    dense = step(executor)
    executor.ffns[0].set_ways({executor.neuron_tokens: "predicted"})
    assert (step(executor) != dense).any()
    layout, bundles = case.bundles(every)
    executor.ffns[0].add_bundles(layout, bundles)
    counts = executor.ffns[0].counts()
    assert (step(executor) == dense).all() and counts["steps"] == counts["bytes"] == 0
    with pytest.raises(ValueError, match="no predictor"):
        executor.ffns[0].set_ways({executor.neuron_tokens: "predicted"})
    executor.close()


def test_bundled_neurons_use_the_biases_of_the_ffn() -> None:
    case, every = Case(), np.arange(D_FF)
    executor = case.executor(every, 1)
    layout, bundles = case.bundles(every)
    for biases in ((), (case.bias["gate"],), (case.bias["gate"], case.bias["gate"])):
        neurons = executor.parts.bundled(0, layout, bundles, biases, neurons=D_FF)
        with pytest.raises(ValueError, match="other biases"):
            executor.ffns[0].op.set_bundled(neurons)
    executor.close()


def test_inconsistent_shapes_are_refused() -> None:
    case = Case()
    few, more, wide = (np.zeros((rows, D_MODEL), np.float32) for rows in (32, 64, D_FF + 16))
    executor = case.executor(np.arange(D_FF), 1)
    few_up, more_up, wide_up = (executor.matrix(half(part)) for part in (few, more, wide))
    few_down, wide_down = (executor.matrix(half(part.T)) for part in (few, wide))
    for message, matrices in (
        ("than the other", (more_up, few_up, few_down)),
        ("than up has neurons", (more_up, more_up, few_down)),
        ("more neurons than d_ff", (wide_up, wide_up, wide_down)),
    ):
        with pytest.raises(ValueError, match=message):
            executor.ffn(1, None, *matrices)
    executor.ffn(1, None, few_up, few_up, few_down)
    nbytes, _ = cpu.bundle_row_bytes("F16", D_MODEL)
    layout = BundleLayout(D_MODEL, True, "F16", "F16", nbytes, nbytes)
    for neurons, rows in ((64, 32), (32, 64)):
        about = Predictor(RANK, 0.0, 0), half(case.w["inner"]), half(np.zeros((rows, RANK), np.float32))
        with pytest.raises(ValueError, match=r"another shape|number of rows"):
            bundles = np.zeros((n_groups(neurons), layout.group_bytes), np.uint8)
            executor.ffns[1].add_bundles(layout, bundles, predictor=about)
    executor.close()
