"""The data types of experts' use: what tokens selected, one after another, and a profile, which counts it.

Nothing here reads files or computes an FFN; the asserts state invariants. Data from files is checked by their readers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]

Selected = dict[int, NDArray[np.unsignedinteger]]
"""Selected experts by layer of experts: ascending for each token, uint8 or uint16 [tokens, experts of a token]; the
tokens in the order in which decode computes them."""


@dataclass(frozen=True, eq=False)
class NeuronUse:
    """Use of the neurons inside the experts of one layer.

    order: int32 [experts, neurons], those of each expert, the busiest first; fires: float64 [neurons], by their places
    in that order, the share of the tokens that select an expert for which its neuron fires, mean of the experts by how
    often they are selected.
    """

    order: NDArray[np.int32]
    fires: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class LayerUse:
    """Use of the experts of one layer.

    layer: its number in the model; top_k: experts of a token. counts: int64 [parts, experts], tokens of each part of
    the texts (`ExpertProfile.parts`) that selected an expert. pairs: int64 [experts, experts], tokens that selected
    both, symmetric, zeros for an expert with itself. follows: int64 [experts, experts of the next layer of experts],
    tokens that selected one here and then the other there; None in the last. distances: int64 [parts, experts + 1],
    selections by how many other experts of the layer were selected since a token before last selected the same one;
    those of the first time at the end. Experts of one token count in their order, and none of them before all are
    looked up; parts follow one another. sampled: int64 [experts], sampled tokens that selected each, and fired: int64
    [experts, neurons], for how many of these each neuron fired; None where none was sampled.
    """

    layer: int
    top_k: int
    counts: Counts
    pairs: Counts
    follows: Counts | None
    distances: Counts
    sampled: Counts | None = None
    fired: Counts | None = None

    def __post_init__(self) -> None:
        n = self.n_experts
        assert (self.sampled is None) == (self.fired is None)
        assert self.pairs.shape == (n, n) and self.distances.shape == (len(self.counts), n + 1)
        assert self.follows is None or len(self.follows) == n
        assert (self.distances.sum(axis=1) == self.counts.sum(axis=1)).all() and self.total.sum() > 0

    @property
    def n_experts(self) -> int:
        """Experts of the layer."""
        return len(self.counts[0])

    @cached_property
    def total(self) -> Counts:
        """Tokens that selected each expert, of all parts: int64 [experts]."""
        return np.asarray(self.counts.sum(axis=0))

    @property
    def frequency(self) -> NDArray[np.float64]:
        """Share of the tokens that select each expert: float64 [experts]; they add up to top_k."""
        return np.asarray(self.total * (self.top_k / float(self.total.sum())), np.float64)

    @property
    def neuron_use(self) -> NeuronUse | None:
        """Use of the neurons inside the experts; None: that was not sampled. What few samples say is drawn towards
        the mean of an expert's neurons by as much of its spread as chance explains."""
        if self.sampled is None or self.fired is None or not self.sampled.any():
            return None
        tokens = np.maximum(self.sampled, 1)[:, None]
        share = self.fired / tokens
        mean = share.mean(axis=1, keepdims=True)
        chance = (share * (1 - share)).mean(axis=1, keepdims=True) / tokens
        spread = np.maximum(share.var(axis=1, keepdims=True), 1e-12)
        share = mean + np.maximum(0.0, 1 - chance / spread) * (share - mean)
        order = np.argsort(-share, axis=1, kind="stable").astype(np.int32)
        fires = np.average(np.take_along_axis(share, order, axis=1), axis=0, weights=self.sampled)
        return NeuronUse(order, np.asarray(fires, np.float64))

    @property
    def static_hits(self) -> NDArray[np.float64]:
        """Share of the selections that the most frequent n experts answer, n = 0 ... experts."""
        return _shares(np.sort(self.total)[::-1])

    @property
    def lru_hits(self) -> NDArray[np.float64]:
        """Share of the selections that the n experts selected last answer, n = 0 ... experts."""
        return self._nearer(self.distances.sum(axis=0))

    @cached_property
    def lru_hits_by_part(self) -> NDArray[np.float64]:
        """The same of each part, [parts, experts + 1]."""
        return self._nearer(self.distances)

    @cached_property
    def static_hits_by_part(self) -> NDArray[np.float64]:
        """Share of each part's selections that the n experts answer which all other parts select most often, [parts,
        experts + 1]."""
        order = np.argsort(self.counts - self.total, axis=1, kind="stable")
        return _shares(np.take_along_axis(self.counts, order, axis=1))

    @staticmethod
    def _nearer(distances: Counts) -> NDArray[np.float64]:
        return _shares(distances)[..., :-1]

    @property
    def reuse(self) -> float:
        """Share of a token's experts that the token before it selected too."""
        return float(self.lru_hits[self.top_k])

    @property
    def gini(self) -> float:
        """Gini coefficient of the counts: 0, all experts are used alike, up to 1 - 1 / experts, one is used alone."""
        n = self.n_experts
        return float(1 + 1 / n - 2 * _shares(np.sort(self.total)).sum() / n)

    def share_of_top(self, share: float) -> float:
        """Share of the selections of the most frequent `share` of the experts, at least one."""
        return float(self.static_hits[max(1, round(share * self.n_experts))])

    @property
    def foretold(self) -> float | None:
        """Share of the next layer's selections that this layer's would foretell.

        Foretold are, for one expert selected here, as many experts there as a token has, those most often selected
        after it; mean over the selections here. None in the last layer.
        """
        if self.follows is None:
            return None
        k = self.top_k_next
        return float(np.sort(self.follows, axis=1)[:, -k:].sum() / self.follows.sum())

    @property
    def top_k_next(self) -> int:
        """Experts of a token in the next layer of experts."""
        assert self.follows is not None
        return int(self.follows.sum() // self.total.sum())


def _shares(counts: Counts) -> NDArray[np.float64]:
    """Share of the first n along the last axis, n = 0 ... all."""
    none = np.zeros((*counts.shape[:-1], 1))
    return np.concatenate([none, np.cumsum(counts, axis=-1) / counts.sum(axis=-1, keepdims=True)], axis=-1)


@dataclass(frozen=True, eq=False)
class ExpertProfile:
    """Profile of experts: how often those of a model are selected over texts.

    corpora: their names; parts: of each corpus the tokens of its parts, one after another, which say how much texts
    differ; layers: those that have experts.
    """

    corpora: tuple[str, ...]
    parts: tuple[tuple[int, ...], ...]
    layers: tuple[LayerUse, ...]

    def __post_init__(self) -> None:
        assert len(self.corpora) == len(self.parts) > 0 and all(min(own, default=0) > 0 for own in self.parts)
        tokens = np.concatenate(self.parts)
        for one in self.layers:
            assert (one.counts.sum(axis=1) == tokens * one.top_k).all()

    @property
    def tokens(self) -> int:
        """Number of tokens of all corpora together."""
        return sum(self.corpus_tokens)

    @property
    def corpus_tokens(self) -> tuple[int, ...]:
        """Number of tokens of each corpus."""
        return tuple(map(sum, self.parts))

    @property
    def n_parts(self) -> int:
        """Number of parts of all corpora together."""
        return sum(map(len, self.parts))

    @property
    def frequencies(self) -> dict[int, NDArray[np.float64]]:
        """Share of the tokens that select each expert, by layer of experts: float64 [experts]."""
        return {one.layer: one.frequency for one in self.layers}

    @property
    def neuron_use(self) -> dict[int, NeuronUse]:
        """Use of the neurons inside experts, by layer of experts, where that was sampled."""
        return {one.layer: use for one in self.layers if (use := one.neuron_use) is not None}

    def mean(self, name: str) -> float:
        """The mean of a figure of the layers, by their selections."""
        weights = [one.top_k for one in self.layers]
        return float(np.average([getattr(one, name) for one in self.layers], weights=weights))

    def share_of_top(self, share: float) -> float:
        """The same of `LayerUse.share_of_top`."""
        return float(
            np.average([one.share_of_top(share) for one in self.layers], weights=[one.top_k for one in self.layers])
        )

    def overlap(self, first: int, second: int, share: float = 0.2) -> float:
        """Share of the most frequent `share` of the experts that two corpora have in common; mean of the layers.

        Ties go to the lower number.
        """
        shares, ends = [], np.cumsum([0, *map(len, self.parts)])
        for layer in self.layers:
            top = max(1, round(share * layer.n_experts))
            part_counts = (layer.counts[ends[at] : ends[at + 1]].sum(axis=0) for at in (first, second))
            tops = (set(np.argsort(-counts, kind="stable")[:top]) for counts in part_counts)
            shares.append(len(set.intersection(*tops)) / top)
        return sum(shares) / len(shares)
