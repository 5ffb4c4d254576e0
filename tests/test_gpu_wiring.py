"""Every kind of layer that a description can have, wired on a GPU (gpu_device.py), against the reference.

The random models, the reference operators and the bounds are those of test_program.py, with weights in floating point:
a GPU does not quantise activations.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import gpu_device  # noqa: E402
import test_gpu_kernels as kernels  # noqa: E402
import test_program as programs  # noqa: E402
from gpu_device import torch_device  # noqa: E402
from test_gpu_layers import on_device  # noqa: E402

from powerinfer.config import AttentionConfig, FfnConfig, LayerConfig, ModelConfig, RopeConfig  # noqa: E402
from powerinfer.devices.batch import Batch  # noqa: E402
from powerinfer.devices.gpu import CacheSize, GpuLayers  # noqa: E402
from powerinfer.devices.step import Operator  # noqa: E402
from powerinfer.formats.tensors import RawTensor  # noqa: E402
from powerinfer.kernels import gpu  # noqa: E402
from powerinfer.neurons import FfnVectors, NeuronVectors  # noqa: E402

SETTINGS = {
    "four norms a layer": replace(
        programs.SETTINGS["four norms a layer, two tables of angles, scaled"], types="F16", kv_type="f32"
    ),
    **{
        name: programs.SETTINGS[name]
        for name in ("norms behind, of all heads together", "learned positions, norms behind, projections",
                     "a norm of all heads, which fill their lanes", "attention and FFN side by side, biases",
                     "silu beyond a threshold of each neuron, biases")
    },
}  # fmt: skip


def config_of(s: programs.Setting) -> ModelConfig:
    orders = {"shared": "pre", "parallel": "pre"}
    norms = None if not s.head_norms else "width" if s.wide_norms else "head"
    layers = tuple(
        LayerConfig(
            AttentionConfig(
                s.heads, s.kv_heads, s.head_dim,
                None if base is None or s.rotated == 0 else RopeConfig(theta=base), window or None, s.biases, s.biases,
                norms, s.scale,
            ),
            FfnConfig(s.d_ff, s.activation, s.threshold, s.gated, s.biases, s.limits, s.product_limits),
            orders.get(s.order, s.order),
            s.order in orders,
            s.order == "shared",
        )
        for window, base in zip(s.windows, s.rope_bases, strict=True)
    )  # fmt: skip
    return ModelConfig(
        "test", s.d_model, s.vocab, 1024, s.eps, layers, norm=s.norm,
        embed_dim=s.embed_dim or 0,
    )  # fmt: skip


READERS = {"q": "attn_norm", "k": "attn_norm", "v": "attn_norm", "gate": "ffn_norm", "up": "ffn_norm", "o": "o"}


class Wired:
    """A model of test_program.py on a device. split: the FFNs are two parts, one of them launched in every step.
    orders: of the columns of matrices of 16 bits that read the result of a norm, by its name, and of o."""

    def __init__(self, weights: programs.Weights, *, split: bool, orders: dict[str, np.ndarray] | None = None) -> None:
        self.w, s, self.orders = weights, weights.s, orders or {}
        config = config_of(s)
        rotations = {rope: (weights.frequencies[rope.theta], s.rope_factor) for rope in config.ropes}
        self.gpu = GpuLayers(
            config, torch_device(), layers=weights.layers, cache=CacheSize(s.kv_type, 8), max_tokens=75,
            rotations=rotations, split=split,
        )  # fmt: skip
        for layer, about in enumerate(config.layers):
            attn_norm, ffn_norm = (self._norm(f"{layer}.{name}") for name in ("attn_norm", "ffn_norm"))
            self._attention(layer, None if about.norms == "post" else attn_norm)
            if not about.parallel:
                self._project(layer)
            if about.norms == "post":
                self.gpu.normalise(layer, attn_norm)
            self._ffn(layer, None if about.norms == "post" else ffn_norm, split)
            if about.parallel:
                self._project(layer)
            if about.norms == "post":
                self.gpu.normalise(layer, ffn_norm)
        projection = self._matrix("project_out") if s.embed_dim else None
        self.gpu.head(self._norm("final_norm"), self._matrix("head"), projection)

    def _norm(self, name: str) -> Any:
        weight = self.w.vectors.get(name)
        order = self.orders.get(name.split(".")[-1])
        return None if weight is None else self.gpu.norm(weight, self.w.vectors.get(f"{name}_bias"), order)

    def _raw(self, name: str) -> RawTensor:
        part = name.split(".")[-1]
        kind, shape, data = self.w.s.type_of(part), self.w.s.shape(part), self.w.data[name]
        order = self.orders.get(READERS.get(part, ""))
        if order is None:
            return RawTensor(kind, shape, data)
        columns = data.view(np.uint16).reshape(shape)[:, order]
        return RawTensor(kind, shape, columns.reshape(-1).view(np.uint8), order=order)

    def _matrix(self, name: str) -> Any:
        return self.gpu.matrix(self._raw(name))

    def _attention(self, layer: int, norm: Any) -> None:
        parts = [f"{layer}.{part}" for part in "qkv"]
        biases = [self.w.vectors.get(f"{part}_bias") for part in parts]
        own = {f"{part}_norm": self.w.vectors.get(f"{layer}.{part}_norm") for part in "qk"}
        self.gpu.attention(layer, norm, [self._matrix(part) for part in parts], biases=biases, **own)

    def _project(self, layer: int) -> None:
        bias, norm = self.w.vectors.get(f"{layer}.o_bias"), self._norm(f"{layer}.attn_out_norm")
        self.gpu.project(layer, self._matrix(f"{layer}.o"), bias, norm, self.orders.get("o"))

    def _ffn(self, layer: int, norm: Any, split: bool) -> None:
        names = [f"{layer}.{part}" for part in ("gate", "up", "down")]
        vectors = FfnVectors(
            *(self.w.vectors.get(f"{name}_bias") for name in names),
            *(self.w.vectors.get(f"{layer}.{name}") for name in ("limits", "product_limits")),
        )
        out_norm = self._norm(f"{layer}.ffn_out_norm")
        if split:
            self.gpu.split_ffn(layer, norm, Halves(self, layer, vectors.neuron_vectors), vectors.down_bias, out_norm)
        else:
            gate, up, down = (self._matrix(name) if name in self.w.data else None for name in names)
            self.gpu.ffn(layer, norm, gate, up, down, vectors, out_norm)

    def logits(self, chunks: list[int]) -> np.ndarray:
        """Of the first sequence, in chunks."""
        tokens, reference = self.w.sequences[0], programs.Reference(self.w)
        x = reference._rows("embed", tokens) * self.w.s.embedding_scale
        if self.w.s.embed_dim:
            x = reference._linear(x, "project_in")
        if self.w.s.learned_positions:
            x = x + reference._rows("positions", programs.OFFSET + np.arange(len(tokens)))
        assert sum(chunks) == len(tokens)
        out, at = [], 0
        for size in chunks:
            places, none = np.arange(at, at + size, dtype=np.int32), np.zeros(size, np.int32)
            batch = Batch(none, places, none, np.array([[5, 2, 7]], np.int32), np.arange(size, dtype=np.int32))
            out.append(self.gpu.run(batch, x[at : at + size].astype(np.float32)).copy())
            at += size
        return np.concatenate(out)


class Halves:
    """The neurons of a layer as two parts, the second of which is launched in every step."""

    def __init__(self, wired: Wired, layer: int, vectors: NeuronVectors) -> None:
        s, half = wired.w.s, wired.w.s.d_ff // 2
        own_parts = [part for part in s.parts if part in ("gate", "up", "down")]
        values = {part: replace(wired._raw(f"{layer}.{part}"), order=None).float32() for part in own_parts}
        values["down"] = values["down"].T
        self.layer, self.parts = layer, []
        for own in (slice(0, half), slice(half, None)):
            weights = {part: of_rows(s.type_of(part), matrix[own]) for part, matrix in values.items()}
            *biases, limits, products = (None if one is None else on_device(one[own]) for one in vectors)
            gate, up, down = weights.get("gate"), weights["up"], weights["down"]
            about = s.activation, s.threshold, limits, products
            self.parts.append(gpu.Neurons(gate, up, down, None, None, *biases, *about))

    def sent(self, _: Any) -> None:
        return None

    def ahead(self) -> list[Operator]:
        return []

    def begin(self) -> list[Operator]:
        return []

    def finish(self) -> list[Operator]:
        return [Operator("half", self.layer, partial(self._add, part), static=False) for part in self.parts]

    def close(self) -> None:
        self.parts.clear()

    @staticmethod
    def _add(part: gpu.Neurons, step: Any) -> None:
        step.add_part(gpu.neuron_sum(part, step.read)[0])


def of_rows(kind: str, values: np.ndarray) -> gpu.Weight:
    dtype = {"F32": torch.float32, "F16": torch.float16}[kind]
    return gpu.Weight(kind, *values.shape, on_device(values).to(dtype))


def bounded(name: str) -> tuple[programs.Weights, np.ndarray, float]:
    """A random model, the logits of its first sequence, and how far they may be missed."""
    weights = programs.Weights(SETTINGS[name], seed=5)
    exact = programs.Reference(weights).logits(weights.sequences[0])
    noisy = (programs.Reference(weights, np.random.default_rng(i)).logits(weights.sequences[0]) for i in range(4))
    return weights, exact, 2 * max(float(np.abs(run - exact).max()) for run in noisy)


@pytest.mark.sampled
@pytest.mark.parametrize("split", [False, True], ids=["dense", "split"])
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.usefixtures("device")
def test_logits_are_those_of_the_reference(name: str, split: bool) -> None:
    weights, exact, bound = bounded(name)
    wired = Wired(weights, split=split)
    for chunks in ([75], [33, 1, 41]):
        assert np.abs(wired.logits(chunks) - exact).max() <= bound


@pytest.mark.parametrize("split", [False, True], ids=["dense", "split"])
@pytest.mark.usefixtures("device")
def test_columns_in_an_order_of_their_own(split: bool) -> None:
    weights, exact, bound = bounded("four norms a layer")
    widths = {"attn_norm": weights.s.d_model, "ffn_norm": weights.s.d_model, "o": weights.s.heads * weights.s.head_dim}
    rng = np.random.default_rng(1)
    orders = {name: rng.permutation(width).astype(np.int32) for name, width in widths.items()}
    assert np.abs(Wired(weights, split=split, orders=orders).logits([33, 42]) - exact).max() <= bound


@pytest.mark.skipif(not kernels.TRITON or gpu_device.CUDA, reason="Triton's interpreter is not at hand")
@pytest.mark.usefixtures("device")
def test_the_kernels_of_a_gpu() -> None:
    """Four norms, gelu_tanh and two rotary tables with Triton's kernels, in its interpreter."""
    weights, exact, bound = bounded("four norms a layer")
    weights.sequences[0] = weights.sequences[0][:5]
    gpu.force_triton(True)
    try:
        ours = Wired(weights, split=True).logits([4, 1])
    finally:
        gpu.force_triton(None)
    assert np.abs(ours - exact[:5]).max() <= bound


@pytest.mark.usefixtures("device")
def test_order_of_operators() -> None:
    """Other devices start as early as their input is known, and their sum is added last."""
    kinds = {}
    for name in ("four norms a layer", "attention and FFN side by side, biases"):
        for split in (False, True):
            wired = Wired(programs.Weights(SETTINGS[name], seed=5), split=split)
            kinds[name, split] = [one.kind for one in wired.gpu.operators if one.layer == 1]
    assert list(kinds.values()) == [
        ["attention", "project", "ffn"],
        ["attention", "project", "norm", "half", "half", "normalise"],
        ["attention", "ffn", "project"],
        ["norm", "attention", "project", "half", "half", "bias"],
    ]
