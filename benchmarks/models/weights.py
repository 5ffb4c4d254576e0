"""Random weights of a model whose neurons fire with given probabilities, one tensor in memory at a time.

The residual stream of every token has one constant component: CARRIED in the direction u of a vector of balanced
signs, written by the embedding and by nothing else. The rest of the stream is Gaussian with a known variance. A gate
row is g = w - a u with w of length 1 and at right angles to u and to the all-ones vector, so the gate sees
w.x - a CARRIED sqrt(d), and the sign of that does not depend on the norm before it: RMSNorm scales by a positive
number, LayerNorm takes off a mean that g does not see. a is the threshold that gives the neuron its probability.

w = A B + rest: B has few rows and is the layer's own, so that relu(B x) and relu(-B x) with a constant unit predict
most of every gate; the rest, of full rank, is what a predictor must miss.

What is written back must not move the picture: rows of o and down have no component along u; the mean of down's
input, where the activation is never negative, is projected out of down's rows, so that no constant builds up; all
writes together add a known small variance, most of it from the FFN so that a wrong FFN shows in the logits.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.models.firing import Firing
from powerinfer.placement.power_law import layer_means, power_law

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

CARRIED = 0.5  # the constant component, relative to the rest of the embedding
POSITIONS = 0.1  # share of the embedding's variance that learned positions give
FFN_WRITES = 0.3  # variance that all layers' FFNs together add, relative to the embedding's
ATTENTION_WRITES = 0.1  # the same of attention to a single token; over many tokens it averages out
ATTENTION_LEFT = 0.05  # share of that which is counted on: a token sees some twenty others
HEAD_GAIN = 3.0  # standard deviation of the logits, about
SMALLEST_VOCAB = 1000  # room for what vocabulary.py always has
ROWS = 512  # of a block that is computed at once

ACTIVATIONS = {"llama": ("relu", "relu2", "fatrelu", "drelu"), "opt": ("relu",), "falcon": ("relu", "relu2")}


@dataclass(frozen=True)
class Plan:
    """What to make. Sizes as in a configuration; the rest as the flags of make_model.py describe it."""

    family: str = "llama"
    d_model: int = 2048
    d_ff: int = 8192
    n_layers: int = 16
    n_heads: int = 32
    n_kv_heads: int = 8
    vocab: int = 32000
    context: int = 4096
    activation: str = "relu"
    offset: float = 0.0  # FATReLU's threshold
    active: float = 0.10
    skew: float = 1.0
    layer_ratio: float = 1.0
    noise_rank: int = 255
    rest: float = 0.05
    recall: float = 0.95
    seed: int = 20241216
    distinct: int = 0  # layers that differ, the others have the bytes of one of them; 0: all do

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS[self.family]:
            known = ", ".join(ACTIVATIONS[self.family])
            raise ValueError(f"{self.family} models have no activation {self.activation} (only {known})")
        if self.d_model % self.n_heads or self.n_heads % self.n_kv_heads or self.head_dim % 2:
            raise ValueError(f"{self.n_heads} heads, {self.n_kv_heads} for keys, do not suit width {self.d_model}")
        if self.vocab < SMALLEST_VOCAB:
            raise ValueError(f"a vocabulary of {self.vocab} does not hold the {SMALLEST_VOCAB} tokens there must be")
        if self.family == "opt" and self.n_kv_heads != self.n_heads:
            raise ValueError("OPT has as many key-value heads as heads")
        if not 0 < self.noise_rank <= self.d_model - 2:
            raise ValueError(f"noise of rank {self.noise_rank} does not fit into width {self.d_model}")
        if not 0.001 <= self.rest < 1 or not 0 < self.recall < 1:
            raise ValueError("the rest must be from 0.001 to 1, the recall between 0 and 1")
        if self.distinct < 0:
            raise ValueError("the number of layers that differ is at least 0")
        if not 0 < self.active <= 1 or self.skew < 0 or self.layer_ratio <= 0:
            raise ValueError("the fraction active must be above 0 and at most 1, skew and ratio not negative")
        layer_means(self.active, self.layer_ratio, self.n_layers)

    def source(self, layer: int) -> int:
        """The layer whose weights a layer has: of as many groups as differ, the middle one of its own."""
        groups = min(self.distinct or self.n_layers, self.n_layers)
        group = layer * groups // self.n_layers
        begin, end = (-(-number * self.n_layers // groups) for number in (group, group + 1))
        return (begin + end - 1) // 2

    def source_name(self, name: str) -> str:
        """The tensor whose values a tensor has, by its canonical name."""
        *outer, inner = name.split(".")
        return f"{outer[0]}.{self.source(int(outer[1]))}.{inner}" if outer else name

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads

    @property
    def gated(self) -> bool:
        return self.family == "llama"

    @property
    def layer_norm(self) -> bool:
        return self.family != "llama"

    @property
    def parallel(self) -> bool:
        return self.family == "falcon"

    @property
    def shared_norm(self) -> bool:
        """Falcon-7B's form, one key-value head and one norm, rather than Falcon-40B's."""
        return self.parallel and self.n_kv_heads == 1

    @property
    def firing(self) -> Firing:
        return Firing(self.activation, self.gated, self.rest, self.recall, self.offset)


def layer_shapes(plan: Plan) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(inner name, shape) of a layer's tensors, in file order."""
    d, biases = plan.d_model, plan.family == "opt"
    rows = {"q": d, "k": plan.n_kv_heads * plan.head_dim, "v": plan.n_kv_heads * plan.head_dim, "o": d}
    ffn = {"gate": (plan.d_ff, d), "up": (plan.d_ff, d), "down": (d, plan.d_ff)}
    yield from _norm(plan, "attn_norm")
    for name, count in rows.items():
        yield name, (count, d)
        if biases:
            yield f"{name}_bias", (count,)
    if not plan.shared_norm:
        yield from _norm(plan, "ffn_norm")
    for name, shape in ffn.items():
        if name != "gate" or plan.gated:
            yield name, shape
            if biases:
                yield f"{name}_bias", shape[:1]


def _norm(plan: Plan, name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield name, (plan.d_model,)
    if plan.layer_norm:
        yield f"{name}_bias", (plan.d_model,)


def shapes(plan: Plan) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(canonical name, shape) of every tensor, in file order. All models have a head of their own.

    A tied head would see every token's own embedding and say that token again.
    """
    yield "embed", (plan.vocab, plan.d_model)
    if plan.family == "opt":
        yield "positions", (plan.context + 2, plan.d_model)  # OPT begins to count at 2
    for layer in range(plan.n_layers):
        for name, shape in layer_shapes(plan):
            yield f"layers.{layer}.{name}", shape
    yield from _norm(plan, "final_norm")
    yield "head", (plan.vocab, plan.d_model)


@dataclass(frozen=True)
class Layer:
    """What a layer's tensors are made from. Arrays are float64 [d_ff] but the basis."""

    number: int
    probabilities: Float64
    thresholds: Float64  # what a neuron's noise must exceed, in its standard deviations
    cuts: Float64  # what the known noise must exceed for a candidate
    mean: Float64  # of h
    square: Float64  # mean of h^2
    spread: float  # standard deviation, per dimension, of the varying part of the stream that the FFN reads
    after_norm: float  # the same after the norm
    basis: Float32  # directions of the known noise, B [noise_rank, d_model], orthonormal


def ahead(work: Callable[[int], Any], count: int, threads: int) -> Iterator[Any]:
    """work(0), work(1), ... in their order, computed ahead by `threads` threads: as many, and one more, are kept."""
    if threads == 1:
        yield from map(work, range(count))
        return
    with ThreadPoolExecutor(threads) as pool:
        begun: deque[Future[Any]] = deque()
        for number in range(count):
            begun.append(pool.submit(work, number))
            if len(begun) > threads:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()


def repeated(work: Callable[[int], Any], sources: Sequence[int], threads: int) -> Iterator[Any]:
    """work(source) of each source, as `ahead`; that of one that comes again is computed once, and kept until then."""
    firsts = list(dict.fromkeys(sources))
    computed = ahead(lambda number: work(firsts[number]), len(firsts), threads)
    last = {source: place for place, source in enumerate(sources)}
    kept: dict[int, Any] = {}
    for place, source in enumerate(sources):
        if source not in kept:
            kept[source] = next(computed)
        yield kept[source] if place < last[source] else kept.pop(source)


class Weights:
    """The values of a plan's tensors; every block of rows has a random stream of its own, so order does not matter.

    threads: that compute blocks ahead of who asks for them.
    """

    def __init__(self, plan: Plan, threads: int = 1) -> None:
        self.plan = plan
        self.threads = threads
        signs = np.ones(plan.d_model, np.float32)
        signs[: plan.d_model // 2] = -1
        self.direction = self._stream("direction").permutation(signs) / np.float32(math.sqrt(plan.d_model))
        self._means = layer_means(plan.active, plan.layer_ratio, plan.n_layers)
        self._firing = plan.firing
        self._kept: Layer | None = None

    def _stream(self, *key: object) -> np.random.Generator:
        """Random numbers that depend on the seed and on nothing but the key."""
        digits = [list(str(part).encode()) for part in key]
        return np.random.default_rng([self.plan.seed, *(digit for part in digits for digit in [*part, 256])])

    def layer(self, number: int) -> Layer:
        """What the layer's tensors share; that of one layer is kept."""
        number = self.plan.source(number)
        if self._kept is None or self._kept.number != number:
            self._kept = self._layer(number)
        return self._kept

    def _layer(self, number: int) -> Layer:
        plan, firing = self.plan, self._firing
        law = power_law(self._means[number], plan.skew, plan.d_ff)
        p = self._stream("probabilities", number).permutation(law)
        # what was written before the FFN reads, relative to the embedding
        attended = number if plan.parallel else number + 1
        writes = (FFN_WRITES * number + ATTENTION_WRITES * ATTENTION_LEFT * attended) / plan.n_layers
        spread = math.sqrt(1 + writes)
        after_norm = spread / math.hypot(spread, CARRIED)
        basis = self._stream("basis", number).standard_normal((plan.noise_rank, plan.d_model), np.float32)
        basis = np.ascontiguousarray(np.linalg.qr(self._off_direction(basis).T)[0].T)
        return Layer(
            number, p, firing.threshold(p), firing.cut(p), *firing.moments(p, after_norm), spread, after_norm, basis
        )

    # --- tensors -----------------------------------------------------------------------------------------------------

    def blocks(
        self, name: str, shape: tuple[int, ...], finish: Callable[[Float32], Any] = lambda block: block
    ) -> Iterator[Any]:
        """The tensor in blocks of whole rows; vectors in one block. Q, K and V: a head a block. finish: what is to be
        made of each block, by the thread that computed it.
        """
        *outer, inner = name.split(".")
        if len(shape) == 1:
            yield finish(np.full(shape, 0 if inner.endswith("_bias") else 1, np.float32))
            return
        make: Callable[..., Float32] = self._reads
        if inner in ("embed", "positions"):
            make = self._embeds
        elif inner in ("o", "down"):
            make = self._writes
        elif inner == "gate" or (inner == "up" and (not self.plan.gated or self.plan.activation == "drelu")):
            make = self._leaning
        layer, name = self.layer(int(outer[1])) if outer else None, self.plan.source_name(name)
        step = self.plan.head_dim if inner in ("q", "k", "v") else ROWS

        def block(number: int) -> Any:
            rows = slice(number * step, min((number + 1) * step, shape[0]))
            normal = self._stream(name, number).standard_normal((rows.stop - rows.start, shape[1]), np.float32)
            return finish(make(normal, inner, rows, layer))

        yield from ahead(block, -(-shape[0] // step), self.threads)

    def _off_direction(self, rows: Float32) -> Float32:
        """Rows [n, d_model], in place, without what they have along the direction and along the all-ones vector."""
        rows -= (rows @ self.direction)[:, None] * self.direction
        rows -= rows.mean(axis=1, keepdims=True)
        return rows

    def _embeds(self, normal: Float32, inner: str, rows: slice, layer: Layer | None) -> Float32:
        table = self._off_direction(normal)
        if self.plan.family == "opt":
            table *= np.float32(math.sqrt(POSITIONS if inner == "positions" else 1 - POSITIONS))
        if inner == "embed":
            table += self.direction * np.float32(CARRIED * math.sqrt(self.plan.d_model))
        return table

    def _reads(self, normal: Float32, inner: str, rows: slice, layer: Layer | None) -> Float32:
        gain = HEAD_GAIN if inner == "head" else 1.0
        return self._off_direction(normal) * np.float32(gain / math.sqrt(self.plan.d_model))

    def _writes(self, normal: Float32, inner: str, rows: slice, layer: Layer) -> Float32:
        """Rows of o or down. The block is put at right angles to its own part of the direction: so is the whole."""
        plan = self.plan
        if inner == "o":
            one_token = plan.d_model * layer.after_norm**2
            normal *= np.float32(math.sqrt(ATTENTION_WRITES / plan.n_layers / one_token))
        else:
            normal *= np.float32(math.sqrt(FFN_WRITES / plan.n_layers / (layer.square - layer.mean**2).sum()))
            if layer.mean.any():
                steady = (layer.mean / np.linalg.norm(layer.mean)).astype(np.float32)
                normal -= (normal @ steady)[:, None] * steady
        along = self.direction[rows] / np.linalg.norm(self.direction[rows])
        normal -= along[:, None] * (along @ normal)
        return normal

    def _leaning(self, normal: Float32, inner: str, rows: slice, layer: Layer) -> Float32:
        """Rows that exceed their offset with the chosen probabilities."""
        plan = self.plan
        noise = self._off_direction(normal)
        noise *= np.float32(math.sqrt(plan.rest)) / np.linalg.norm(noise, axis=1, keepdims=True)
        noise += self.known_noise(layer.number, rows) @ layer.basis * np.float32(self._firing.known_part)
        noise /= np.linalg.norm(noise, axis=1, keepdims=True)
        lean = layer.spread * layer.thresholds[rows]
        lean -= plan.offset * math.hypot(layer.spread, CARRIED)  # FATReLU's offset comes after the norm
        lean /= CARRIED * math.sqrt(plan.d_model)
        return noise - lean.astype(np.float32)[:, None] * self.direction

    def known_noise(self, layer: int, rows: slice) -> Float32:
        """A [rows, noise_rank], of length 1 each. For drelu gate and up share it."""
        normal = self._stream("known", layer, rows.start).standard_normal(
            (rows.stop - rows.start, self.plan.noise_rank), np.float32
        )
        return normal / np.linalg.norm(normal, axis=1, keepdims=True)

    # --- predictor ---------------------------------------------------------------------------------------------------

    def predictor(self, layer: int, rank: int) -> tuple[Float32, Float32]:
        """(W_in [rank, d_model], W_out [d_ff, rank]): candidates are z >= 0 of z = W_out relu(W_in x).

        x is the residual stream before the FFN's norm (parallel: the layer's input), at any scale. Of the hidden
        units, 2 noise_rank give the known noise and one the constant; the rest of `rank` is zeros.
        """
        plan, shared = self.plan, self.layer(layer)
        used = 2 * plan.noise_rank + 1
        if rank < used:
            raise ValueError(f"noise of rank {plan.noise_rank} needs a predictor of rank {used} at least, not {rank}")
        inner = np.zeros((rank, plan.d_model), np.float32)
        inner[: used - 1] = np.concatenate([shared.basis, -shared.basis])
        inner[used - 1] = self.direction
        outer = np.zeros((plan.d_ff, rank), np.float32)
        for first in range(0, plan.d_ff, ROWS):
            rows = slice(first, min(first + ROWS, plan.d_ff))
            known = self.known_noise(shared.number, rows)
            outer[rows, : used - 1] = np.concatenate([known, -known], axis=1)
        outer[:, used - 1] = -shared.cuts * shared.spread / (CARRIED * math.sqrt(plan.d_model))
        return inner, outer
