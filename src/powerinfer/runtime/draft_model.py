"""Drafts by a smaller model of the same vocabulary, which decodes greedily ahead of the one that answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from powerinfer.devices import Batch, Executor
from powerinfer.runtime.kv_cache import PageCache
from powerinfer.runtime.request import AnswerRequest, Request
from powerinfer.runtime.speculation import Outlook, likeliest

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST = 4
"""Drafts of a request in one step."""

_LIKELY = 0.7  # share of drafts that is right, until it was measured
_FEW = 8  # tokens that it computes with a draft; more are a text's, which it computes before
_SURE = 0.3  # probability below which a draft is the last one


class _Sequence:
    """Tokens of a request that the smaller model has computed, and their pages."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.pages: list[int] = []

    def agree(self, tokens: Sequence[int]) -> int:
        """Number of its tokens that begin these; the others are forgotten."""
        n = min(len(self.tokens), len(tokens))
        if self.tokens[:n] != tokens[:n]:
            n = next(at for at in range(n) if self.tokens[at] != tokens[at])
        del self.tokens[n:]
        return n


class DraftModel:
    """Source of drafts: an executor of its own, with a context for each request. It computes a request's prompt when it
    is first asked for drafts, so that requests without drafts cost nothing."""

    name = "model"

    def __init__(self, executor: Executor, vocab_size: int) -> None:
        """vocab_size: of the model that answers; tokens beyond it are not drafted."""
        self._executor = executor
        self._vocab = min(vocab_size, executor.vocab_size)
        self._pages = PageCache(executor.n_pages, reuse=False)
        self._sequences: dict[AnswerRequest, _Sequence] = {}

    def outlook(self, request: AnswerRequest) -> Outlook:
        longest = self._executor.n_pages * self._executor.page_size
        return Outlook(MOST if len(request.tokens) + MOST <= longest else 0, "model", _LIKELY)

    def prepare(self, requests: Iterable[AnswerRequest]) -> None:
        for request in requests:
            if self._has_room(request, len(request.tokens)):
                sequence, room = self._sequences[request], self._executor.max_tokens
                agreed = sequence.agree(request.tokens)
                while len(request.tokens) - agreed > _FEW:
                    part = request.tokens[agreed : agreed + room][: len(request.tokens) - 1 - agreed]
                    self._compute([(sequence, part)], logits=False)
                    agreed += len(part)

    def draft(self, wanted: Sequence[tuple[AnswerRequest, int]]) -> list[list[int]]:
        drafts: dict[AnswerRequest, list[int]] = {request: [] for request, _ in wanted}
        counts = dict(wanted)
        going = [request for request, _ in wanted]
        for place in range(max(counts.values())):
            going = [one for one in going if place < counts[one] and len(drafts[one]) == place]
            going = [one for one in going if self._has_room(one, len(one.tokens) + place)]
            if not going:
                break
            for request, token, probability in self._next_tokens(going, drafts):
                if token < self._vocab and (probability >= _SURE or not place):
                    drafts[request].append(token)
        return [drafts[request] for request, _ in wanted]

    def _next_tokens(
        self, requests: Sequence[AnswerRequest], drafts: dict[AnswerRequest, list[int]]
    ) -> list[tuple[AnswerRequest, int, float]]:
        """The most likely token behind each request's tokens and drafts, with its probability."""
        result, room, batch = list[tuple[AnswerRequest, int, float]](), self._executor.max_tokens, list[AnswerRequest]()
        pending: dict[AnswerRequest, list[int]] = {}
        for request in requests:
            tokens = [*request.tokens, *drafts[request]]
            sequence = self._sequences[request]
            missing = tokens[min(sequence.agree(tokens), len(tokens) - 1) :]
            del sequence.tokens[len(tokens) - len(missing) :]
            if len(missing) > room:
                result += self._answer(batch, pending)
                batch, room = [], self._executor.max_tokens
            batch.append(request)
            pending[request] = missing
            room -= len(missing)
        return result + self._answer(batch, pending)

    def _answer(
        self, batch: Sequence[AnswerRequest], pending: dict[AnswerRequest, list[int]]
    ) -> list[tuple[AnswerRequest, int, float]]:
        logits = self._compute([(self._sequences[one], pending[one]) for one in batch], logits=True)
        result = []
        for request, row in zip(batch, logits, strict=True):
            result.append((request, *likeliest(row)))
        return result

    def _compute(self, parts: Sequence[tuple[_Sequence, list[int]]], logits: bool) -> NDArray[np.float32]:
        """Compute tokens of sequences; the logits of each one's last."""
        counts = [len(tokens) for _, tokens in parts]
        starts = [len(sequence.tokens) for sequence, _ in parts]
        table = np.full((len(parts), max(len(sequence.pages) for sequence, _ in parts)), -1, np.int32)
        for row, (sequence, _) in enumerate(parts):
            table[row, : len(sequence.pages)] = sequence.pages
        ends = np.cumsum(counts)
        result = self._executor.forward(
            Batch(
                np.concatenate([np.asarray(tokens, np.int32) for _, tokens in parts]),
                np.concatenate([np.arange(at, at + n, dtype=np.int32) for at, n in zip(starts, counts, strict=True)]),
                np.repeat(np.arange(len(parts), dtype=np.int32), counts),
                table,
                (ends - 1).astype(np.int32) if logits else np.empty(0, np.int32),
            )
        )
        for sequence, tokens in parts:
            sequence.tokens += tokens
        return result

    def _has_room(self, request: AnswerRequest, tokens: int) -> bool:
        """Whether the request's sequence has pages for so many tokens."""
        sequence = self._sequences.setdefault(request, _Sequence())
        lacking = -(-tokens // self._executor.page_size) - len(sequence.pages)
        more = self._pages.reserve(max(0, lacking))
        if more is None:
            return False
        sequence.pages += more
        return True

    def observe(self, requests: Sequence[tuple[Request, int, int]]) -> None:
        pass

    def forget(self, request: AnswerRequest) -> None:
        sequence = self._sequences.pop(request, None)
        if sequence is not None:
            self._pages.release(sequence.pages)

    def close(self) -> None:
        self._sequences.clear()
        self._executor.close()
