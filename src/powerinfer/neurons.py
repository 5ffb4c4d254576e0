"""The data types of sparse computation: tier, bundle layout, predictor, profile, placement.

A neuron is row i of gate and up with column i of down, of one layer. Nothing here reads files or computes an FFN; the
asserts state invariants. Data from files is checked by their readers before.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int32]
Counts = NDArray[np.int64]

ROW_ALIGNMENT = 64
"""Bytes of a bundle's rows are multiples of this: a cache line."""

BUNDLE_GROUP = 32
"""Bundles of a group: as many as a quantised block that runs across neurons has."""


NeuronVectors = Sequence[NDArray[np.float32] | None]
"""float32 [neurons of a layer]: the biases of gate and up, and the neurons' own thresholds of the activation and of the
product; None, or left out at the end, where there is none."""


class FfnVectors(NamedTuple):
    """Vectors of an FFN beside its matrices, float32; None where there is none.

    gate_bias, up_bias: [neurons]; down_bias: [d_model]; limits: [neurons], thresholds in place of one for all of them;
    product_limits: [neurons], of the product h; inner_norm: [neurons], weights of the norm of h.
    """

    gate_bias: NDArray[np.float32] | None = None
    up_bias: NDArray[np.float32] | None = None
    down_bias: NDArray[np.float32] | None = None
    limits: NDArray[np.float32] | None = None
    product_limits: NDArray[np.float32] | None = None
    inner_norm: NDArray[np.float32] | None = None

    @property
    def neuron_vectors(self) -> NeuronVectors:
        return self.gate_bias, self.up_bias, self.limits, self.product_limits


NO_VECTORS = FfnVectors()


class Tier(IntEnum):
    """Memory in which a neuron is stored; the values are those of a placement's arrays."""

    GPU = 0
    CPU = 1
    DISK = 2


@dataclass(frozen=True, slots=True)
class BundleLayout:
    """The layout of a bundle, the stored bytes of one neuron: [gate row][up row][down row]; plain: no gate row.

    gate_type is the type of gate and up. gate_bytes and down_bytes are the bytes of a row of either type for d_model
    elements, shared_bytes those of the scales that the down rows of `BUNDLE_GROUP` bundles share, stored after them.
    gate_bytes 0: of a plain FFN, up is elsewhere.
    """

    d_model: int
    gated: bool
    gate_type: str
    down_type: str
    gate_bytes: int
    down_bytes: int
    shared_bytes: int = 0

    def __post_init__(self) -> None:
        assert self.d_model > 0
        assert self.gate_bytes > 0 or not self.gated
        for nbytes in (self.gate_bytes, self.down_bytes):
            assert nbytes >= 0 and nbytes % ROW_ALIGNMENT == 0, nbytes
        assert self.down_bytes > 0
        assert self.shared_bytes >= 0 and self.shared_bytes % ROW_ALIGNMENT == 0, self.shared_bytes

    @property
    def gate_at(self) -> int:
        """Offset of the gate row; only gated FFNs have one."""
        assert self.gated
        return 0

    @property
    def up_at(self) -> int:
        """Offset of the up row."""
        return self.gate_bytes if self.gated else 0

    @property
    def down_at(self) -> int:
        """Offset of the down row."""
        return self.up_at + self.gate_bytes

    @property
    def pitch(self) -> int:
        """Bytes from one bundle of a group to the next."""
        return self.down_at + self.down_bytes

    @property
    def stride(self) -> int:
        """Bytes of a neuron, its share of its group's scales included."""
        return self.pitch + self.shared_bytes // BUNDLE_GROUP

    @property
    def group_bytes(self) -> int:
        """Bytes from one group of bundles to the next."""
        return BUNDLE_GROUP * self.stride


@dataclass(frozen=True, slots=True)
class Predictor:
    """A layer's predictor without its weights: z = out . relu(in . r), r the input of the FFN's norm.

    rank: rows of in. A neuron is selected if its z is at least `threshold`; if fewer than `floor` are, the `floor`
    neurons of largest z are selected.
    """

    rank: int
    threshold: float
    floor: int

    def __post_init__(self) -> None:
        if self.rank < 1 or self.floor < 0 or not math.isfinite(self.threshold):  # it may come from a damaged file
            raise ValueError("is not of a predictor")


@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """Profile of neurons: how often each fires over texts.

    A neuron fires for a token when its product h is not zero; of a model whose activations are never exactly zero,
    when |act(gate . n)| (plain FFN: |act(up . n)|) exceeds the layer's threshold (CATS, arXiv 2404.08763).

    tokens: of all corpora together. counts: for each layer int64 [neurons], the tokens that the neuron fired for; empty
    where neurons are not told apart.
    corpora, corpus_tokens, corpus_counts: the same for each corpus alone, counts int64 [corpora, neurons] for each
    layer; a synthetic profile has none. active: for each layer int64 [101], the tokens by the share of the
    layer's neurons that fired for them, in whole per cent, rounded down. reuse: for each layer, of the neurons that
    fire for a token, the share that also fired for the previous token. thresholds: for each layer, or None.
    """

    tokens: int
    counts: tuple[Counts, ...]
    corpora: tuple[str, ...]
    corpus_tokens: tuple[int, ...]
    corpus_counts: tuple[Counts, ...]
    active: tuple[Counts, ...]
    reuse: tuple[float, ...]
    thresholds: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        assert self.tokens > 0 and self.counts
        layers = len(self.counts)
        assert len(self.corpus_counts) == len(self.active) == len(self.reuse) == layers
        assert self.thresholds is None or len(self.thresholds) == layers
        assert len(self.corpora) == len(self.corpus_tokens)
        assert not self.corpora or sum(self.corpus_tokens) == self.tokens
        for counts, by_corpus, active in zip(self.counts, self.corpus_counts, self.active, strict=True):
            assert counts.dtype == by_corpus.dtype == active.dtype == np.int64
            assert counts.ndim == 1 and ((counts >= 0) & (counts <= self.tokens)).all()
            assert by_corpus.shape == (len(self.corpora), len(counts)) and active.shape == (101,)
            assert not self.corpora or (by_corpus.sum(axis=0) == counts).all()

    @property
    def n_layers(self) -> int:
        """Layers of the model."""
        return len(self.counts)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Neurons of each layer."""
        return tuple(map(len, self.counts))

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that have neurons."""
        return tuple(layer for layer, counts in enumerate(self.counts) if len(counts))

    @property
    def digest(self) -> str:
        """Hex SHA-256 of the tokens and the counts: everything that a placement depends on."""
        digest = hashlib.sha256(f"{self.tokens} {self.sizes}".encode())
        for counts in self.counts:
            digest.update(counts.astype("<i8").tobytes())
        return digest.hexdigest()

    def fraction(self, layer: int) -> NDArray[np.float64]:
        """The share of the tokens for which each neuron fires: float64 [neurons]."""
        return self.counts[layer] / self.tokens

    def active_fraction(self, layer: int | None = None) -> float:
        """Share of a layer's neurons that fire for a token, mean over the tokens, 0 if it has none; None: of all
        layers."""
        layers = self.counts if layer is None else (self.counts[layer],)
        return sum(int(counts.sum()) for counts in layers) / (max(1, sum(map(len, layers))) * self.tokens)

    def order(self, layer: int) -> Indices:
        """The neurons of a layer, those that fire most often first, ties by index: int32 [neurons]."""
        return _order(self.counts[layer])

    def hot_share(self, layer: int | None = None, mass: float = 0.8) -> float:
        """Smallest share of a layer's neurons that carries `mass` of its activations; 0: none fires.

        None: of the neurons of all layers together.
        """
        assert 0 < mass <= 1
        counts = np.concatenate(self.counts) if layer is None else self.counts[layer]
        carried = np.cumsum(-np.sort(-counts))
        if not carried.any():
            return 0.0
        return float(np.searchsorted(carried, mass * carried[-1]) + 1) / len(counts)

    def overlap(self, first: int, second: int, share: float = 0.2) -> float | None:
        """The share of the most frequent neurons that two corpora have in common; mean over the layers.

        first, second: the corpora; share: of a layer's neurons, that count as most frequent. Neurons that never fire do
        not count; the common ones are divided by the larger of the two sets. None: no neuron fires.
        """
        shares = []
        for by_corpus in self.corpus_counts:
            top = max(1, round(share * by_corpus.shape[1]))
            pair = by_corpus[[first, second]]
            tops, other_tops = (set(_order(counts)[:top][np.sort(-counts)[:top] < 0]) for counts in pair)
            if tops or other_tops:
                shares.append(len(tops & other_tops) / max(len(tops), len(other_tops)))
        return sum(shares) / len(shares) if shares else None


def _order(counts: Counts) -> Indices:
    return np.argsort(-counts, kind="stable").astype(np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class NeuronPlacement:
    """The tier of every neuron: group g of a layer is `group_size` neurons of its order, from g * group_size on.

    sizes: neurons of each layer; tiers: for each layer int8 [ceil(neurons / group_size)], values of `Tier`. A layer's
    last group may be smaller. order: for each layer int32 [neurons], every neuron once, so that the neurons of a group
    are of similar impact; None: by index.
    """

    sizes: tuple[int, ...]
    group_size: int
    tiers: tuple[NDArray[np.int8], ...]
    order: tuple[Indices, ...] | None = None

    def __post_init__(self) -> None:
        assert self.group_size > 0 and len(self.sizes) == len(self.tiers)
        for size, tiers in zip(self.sizes, self.tiers, strict=True):
            assert size >= 0 and tiers.dtype == np.int8, (size, tiers.dtype)
            assert tiers.shape == (-(-size // self.group_size),), (size, tiers.shape)
            assert np.isin(tiers, list(Tier)).all(), "not a tier"
        assert self.order is None or len(self.order) == len(self.tiers)
        for size, order in zip(self.sizes, self.order or (), strict=self.order is not None):
            assert order.dtype == np.int32 and order.shape == (size,), (order.dtype, order.shape)
            assert (np.bincount(order, minlength=size) == 1).all(), "a neuron is missing"

    def split_by_tier(self, layer: int) -> dict[Tier, Indices]:
        """The neurons of a layer by tier: ascending, disjoint, together all of them. Every tier has an entry."""
        tiers = np.repeat(self.tiers[layer], self.group_size)[: self.sizes[layer]]
        if self.order is not None:
            by_index = np.empty_like(tiers)
            by_index[self.order[layer]] = tiers
            tiers = by_index
        parts = {tier: np.flatnonzero(tiers == tier).astype(np.int32) for tier in Tier}
        assert sum(map(len, parts.values())) == self.sizes[layer]
        return parts
