"""Counting a trace: what tokens selected, one after another, becomes a profile of experts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from powerinfer.experts import ExpertProfile, LayerUse, Selected
from powerinfer.neurons import Counts
from powerinfer.progress import Progress, silent

if TYPE_CHECKING:
    from powerinfer.config import ExpertsConfig
    from powerinfer.formats.samples_file import SamplesFile

PIECE = 2048
"""Tokens counted at once."""

PARTS = 8
"""Maximum number of parts of a corpus that are counted separately."""
PART = 1024
"""Tokens of a part, at least, unless its corpus has fewer."""


def count_experts(
    selected: Selected,
    experts: Mapping[int, int],
    corpora: Sequence[str],
    corpus_tokens: Sequence[int],
    progress: Progress = silent,
) -> ExpertProfile:
    """The profile of a trace.

    experts: of each layer; corpus_tokens: of each corpus, whose tokens follow one another in `selected`. Memory: what
    the profile takes, and a piece of the trace. progress: ("counting", tokens done, tokens).
    """
    tokens, divided = sum(corpus_tokens), tuple(map(_parts, corpus_tokens))
    parts = [n for own in divided for n in own]
    counts = {layer: np.zeros((len(parts), n), np.int64) for layer, n in experts.items()}
    pairs = {layer: np.zeros((n, n), np.int64) for layer, n in experts.items()}
    after = dict(zip(experts, list(experts)[1:], strict=False))  # the next layer of experts
    follows = {layer: np.zeros((experts[layer], experts[next_one]), np.int64) for layer, next_one in after.items()}
    distances = Distances(experts, {layer: rows.shape[1] for layer, rows in selected.items()}, parts)
    done = 0
    for part, rows_of_part in _pieces(parts):
        piece = {layer: np.asarray(rows[rows_of_part], np.int64) for layer, rows in selected.items()}
        for layer, rows in piece.items():
            counts[layer][part] += np.bincount(rows.reshape(-1), minlength=experts[layer])
            _add_pairs(pairs[layer], rows, rows)
            if layer in after:
                _add_pairs(follows[layer], rows, piece[after[layer]])
        distances.count(piece, part)
        done += rows_of_part.stop - rows_of_part.start
        progress("counting", done, tokens)
    for both in pairs.values():
        np.fill_diagonal(both, 0)
    layers = tuple(
        LayerUse(layer, rows.shape[1], counts[layer], pairs[layer], follows.get(layer), distances.counts[layer])
        for layer, rows in selected.items()
    )
    return ExpertProfile(tuple(corpora), divided, layers)


def with_neurons(profile: ExpertProfile, samples: SamplesFile, experts: Mapping[int, ExpertsConfig]) -> ExpertProfile:
    """The profile with how often neurons inside experts fired in samples of its texts. experts: by layer."""

    def counted(use: LayerUse) -> LayerUse:
        if use.layer not in samples.selected:
            return use
        sampled, fired = _fired(samples, use.layer, experts[use.layer])
        return replace(use, sampled=sampled, fired=fired)

    samples.file.check()
    return replace(profile, layers=tuple(map(counted, profile.layers)))


def _fired(samples: SamplesFile, layer: int, experts: ExpertsConfig) -> tuple[Counts, Counts]:
    """int64 [experts], the samples that selected each, and [experts, neurons], for how many of these each fired."""
    selected, n, size = samples.selected[layer], experts.n_experts, experts.size
    bits = samples.layers[layer][1][:, : selected.shape[1] * size // 8]
    sampled, fired = np.zeros(n, np.int64), np.zeros((n, size), np.int64)
    for first in range(0, len(selected), PIECE):
        chosen = selected[first : first + PIECE].reshape(-1)
        rows = bits[first : first + PIECE].reshape(len(chosen), size // 8)
        sampled += np.bincount(chosen, minlength=n)
        for expert in np.unique(chosen):
            active = np.unpackbits(rows[chosen == expert], axis=1, bitorder="little")
            fired[expert] += active.sum(axis=0, dtype=np.int64)
    return sampled, fired


def _parts(tokens: int) -> tuple[int, ...]:
    """Tokens of the parts of a corpus, about equal ones."""
    ends = np.linspace(0, tokens, 1 + max(1, min(PARTS, tokens // PART))).round().astype(np.int64)
    return tuple(np.diff(ends).tolist())


def _pieces(parts: Iterable[int]) -> Iterator[tuple[int, slice]]:
    """(part, tokens): pieces of one part."""
    begin = 0
    for part, tokens in enumerate(parts):
        for at in range(begin, begin + tokens, PIECE):
            yield part, slice(at, min(begin + tokens, at + PIECE))
        begin += tokens


def _add_pairs(to: Counts, first: NDArray[np.int64], second: NDArray[np.int64]) -> None:
    """Add 1 for each token to the pairs of an expert of `first` and one of `second`: [tokens, experts of a token]."""
    pairs = first[:, :, None] * to.shape[1] + second[:, None, :]
    to += np.bincount(pairs.reshape(-1), minlength=to.size).reshape(to.shape)


class Distances:
    """Counts selections by their distance of reuse (`LayerUse.distances`), of layers that are alike together.

    found: of each layer int64 [parts, experts + 1]. parts: their tokens.
    """

    def __init__(self, experts: Mapping[int, int], top_k: Mapping[int, int], parts: Sequence[int]) -> None:
        self.counts: dict[int, Counts] = {
            layer: np.zeros((len(parts), n + 1), np.int64) for layer, n in experts.items()
        }
        kinds: dict[tuple[int, int], list[int]] = {}
        for layer, n in experts.items():
            kinds.setdefault((n, top_k[layer]), []).append(layer)
        # When each expert was selected last, -1: never; no two at the same time.
        dtype = np.int32 if sum(parts) * max(top_k.values()) < 1 << 31 else np.int64
        self._last = [(layers, np.full((len(layers), n), -1, dtype)) for (n, _), layers in kinds.items()]
        self._tokens = 0

    def count(self, piece: Mapping[int, NDArray[np.int64]], part: int) -> None:
        """The next tokens of every layer: [tokens, experts of a token]; they belong to that part."""
        tokens = len(next(iter(piece.values())))
        for layers, last in self._last:
            rows = np.stack([piece[layer] for layer in layers], axis=1)  # [tokens, layers, top_k]
            n, k = last.shape[1], rows.shape[2]
            distances = np.empty(rows.shape, np.int64)
            order = np.arange(k)
            flat, begin = last.reshape(-1), n * np.arange(len(layers))[:, None]
            for token, places in enumerate(rows + begin):
                before = flat[places]
                later = np.packbits(last[:, None, :] > before[:, :, None], axis=2)
                distances[token] = np.where(before < 0, n, np.bitwise_count(later).sum(axis=2, dtype=np.int64))
                flat[places] = (self._tokens + token) * k + order
            for at, layer in enumerate(layers):
                self.counts[layer][part] += np.bincount(distances[:, at].reshape(-1), minlength=n + 1)
        self._tokens += tokens
