"""Drafts by a smaller model of the same vocabulary, which decodes greedily ahead of the one that answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from powerinfer.devices import Batch, Executor
from powerinfer.devices.batch import LogitsNeed
from powerinfer.runtime.draft_ahead import BesideThread
from powerinfer.runtime.draft_vocabulary import DraftVocabulary
from powerinfer.runtime.kv_cache import PageCache, first_parent, page_key
from powerinfer.runtime.request import AnswerRequest, Request
from powerinfer.runtime.speculation import FEW, Outlook, consecutive_drafts, likeliest

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LIKELY = 0.7  # share of drafts that is right, until it was measured
_WITH_A_DRAFT = 8  # tokens that it computes with a draft, at most; more are a text's, which it computes before


class _Sequence:
    """Tokens of a request that the smaller model has computed, and their pages, of which those with `keys` are full.

    guesses: by a number of these tokens, the likeliest one behind them, and its probability. tokens and guesses may be
    ahead of the request: those of drafts that may come true.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.guesses: dict[int, tuple[int, float]] = {}
        self.pages: list[int] = []
        self.keys: list[bytes] = []
        self.checked = 0  # tokens of the request that the smaller model has in its vocabulary
        self.noted = 0  # tokens of the request that are in the draft vocabulary

    def knows(self, tokens: Sequence[int], vocab: int) -> bool:
        """Whether all of a request's tokens, of which more were added, are below `vocab`."""
        while self.checked < len(tokens) and tokens[self.checked] < vocab:
            self.checked += 1
        return self.checked == len(tokens)

    def agree(self, tokens: Sequence[int]) -> int:
        """Number of its tokens that begin these. Unless it is ahead of all of them, the others are forgotten."""
        n = min(len(self.tokens), len(tokens))
        if self.tokens[:n] != tokens[:n]:
            n = next(at for at in range(n) if self.tokens[at] != tokens[at])
        if n < len(tokens):
            self.cut(n)
        return n

    def cut(self, n: int) -> None:
        """Forget all but the first n tokens. What is computed behind them takes the others' places in the cache."""
        del self.tokens[n:]
        self.guesses = {end: guess for end, guess in self.guesses.items() if end <= n}

    def forget_guesses(self, end: int) -> None:
        """Forget the guesses behind fewer than `end` tokens."""
        self.guesses = {at: guess for at, guess in self.guesses.items() if at >= end}

    def find(self, tokens: Sequence[int], salt: bytes, cache: PageCache, page_size: int) -> None:
        """Begin with the pages of the request's tokens that others have left."""
        for end in range(page_size, len(tokens), page_size):
            key = page_key(self.keys[-1] if self.keys else first_parent(salt), tokens[end - page_size : end])
            page = cache.find(key)
            if page is None:
                break
            cache.take(page)
            self.pages.append(page)
            self.keys.append(key)
        self.tokens = list(tokens[: len(self.keys) * page_size])

    def publish(self, certain: int, salt: bytes, cache: PageCache, page_size: int) -> None:
        """Let others find its pages of the first `certain` tokens, which are the request's own."""
        for end in range((len(self.keys) + 1) * page_size, min(certain, len(self.tokens)) + 1, page_size):
            key = page_key(self.keys[-1] if self.keys else first_parent(salt), self.tokens[end - page_size : end])
            cache.publish(self.pages[end // page_size - 1], key)
            self.keys.append(key)


class DraftModel:
    """Source of drafts: an executor of its own, with a context for each request. It computes a request's prompt when it
    is first asked for drafts, a part between two steps, so that requests without drafts cost nothing.

    thread: in which it drafts ahead; None: it does not. ready: of the drafts that were asked for last, those that were
    there at once.
    """

    name = "model"

    def __init__(
        self,
        executor: Executor,
        vocab_size: int,
        chunk: int | None = None,
        *,
        reuse: bool = True,
        ahead: bool = False,
        stream: Callable[[], AbstractContextManager[Any]] = nullcontext,
        list_panels: Callable[[NDArray[np.int32]], None] | None = None,
    ) -> None:
        """vocab_size: of the model that answers; tokens beyond it are not drafted. chunk: tokens of a text that it
        computes between two steps, at most; None: as many as fit a call; reuse: of texts that begin alike the begin is
        computed once. ahead: it may draft ahead, for nothing else needs its device meanwhile; stream: makes the context
        in which it computes. list_panels: lets the executor make logits of a draft vocabulary alone; None: it does
        not."""
        self.thread = BesideThread() if ahead else None
        self.ready = 0
        self._stream = stream
        self._executor = executor
        self._list_panels = list_panels
        self._vocabulary = DraftVocabulary(executor.vocab_size if list_panels else 0)
        self._vocab = min(vocab_size, executor.vocab_size)
        self._chunk = min(chunk or executor.max_tokens, executor.max_tokens)
        self._few = min(_WITH_A_DRAFT, executor.max_tokens)
        self._pages = PageCache(executor.n_pages, reuse)
        self._sequences: dict[AnswerRequest, _Sequence] = {}

    def outlook(self, request: AnswerRequest) -> Outlook:
        sequence = self._sequence(request)
        lacks = len(request.tokens) - sequence.agree(request.tokens)
        fits = self._lacking_pages(sequence, len(request.tokens) + FEW) <= self._pages.available
        drafts = FEW if fits and sequence.knows(request.tokens, self._executor.vocab_size) else 0
        return Outlook(drafts, "model", _LIKELY, lacks - 1 if lacks > self._few else 0, steady=True)

    def _sequence(self, request: AnswerRequest) -> _Sequence:
        sequence = self._sequences.get(request)
        if sequence is None:
            sequence = self._sequences[request] = _Sequence()
            sequence.find(request.tokens, request.salt, self._pages, self._executor.page_size)
        return sequence

    def prepare(self, requests: Sequence[AnswerRequest]) -> int:
        room = self._chunk
        for request in requests:
            sequence = self._sequences[request]
            lacking = request.tokens[sequence.agree(request.tokens) : -1][:room]
            if len(lacking) >= self._few and self._has_room(sequence, len(sequence.tokens) + len(lacking)):
                self._compute([(sequence, lacking)], logits=False)
                sequence.publish(len(request.tokens), request.salt, self._pages, self._executor.page_size)
                room -= len(lacking)
            if not room:
                break
        return self._chunk - room

    def draft(self, wanted: Sequence[tuple[AnswerRequest, int]]) -> list[list[int]]:
        self.ready = 0
        for request, _ in wanted:
            self._sequences[request].forget_guesses(len(request.tokens))
        return consecutive_drafts(
            wanted, lambda one, place: self._can_go_on(one, len(one.tokens) + place), self._next_tokens
        )

    def go_on(self, wanted: Sequence[tuple[AnswerRequest, int]], stopped: Callable[[], bool]) -> None:
        """Draft ahead, until it is told to stop: behind each request's drafts the token that is to follow them, and so
        many drafts behind that. In the thread; nothing else may be asked meanwhile."""

        def can_go_on(request: AnswerRequest, place: int) -> bool:
            return not stopped() and self._can_go_on(request, len(request.tokens) + len(request.drafts) + place)

        def next_tokens(
            requests: Sequence[AnswerRequest], drafts: Mapping[AnswerRequest, list[int]]
        ) -> list[tuple[int, float]]:
            return self._next_tokens(requests, {one: [*one.drafts, *drafts[one]] for one in requests})

        consecutive_drafts([(request, 1 + count) for request, count in wanted], can_go_on, next_tokens)

    def _next_tokens(
        self, requests: Sequence[AnswerRequest], drafts: Mapping[AnswerRequest, list[int]]
    ) -> list[tuple[int, float]]:
        """The most likely token behind each request's tokens and drafts, with its probability."""
        for request in requests:
            sequence = self._sequences[request]
            self._vocabulary.note(request.tokens[sequence.noted :])
            sequence.noted = len(request.tokens)
        if self._list_panels and (panels := self._vocabulary.changed()) is not None:
            self._list_panels(panels)
        room, batch = self._executor.max_tokens, list[tuple[_Sequence, list[int]]]()
        ends = dict[AnswerRequest, int]()
        for request in requests:
            tokens = [*request.tokens, *drafts[request]]
            sequence, end = self._sequences[request], len(tokens)
            ends[request], agreed = end, sequence.agree(tokens)
            if agreed == end and end in sequence.guesses:
                self.ready += 1
                continue
            sequence.cut(min(agreed, end - 1))
            missing = tokens[len(sequence.tokens) :]
            if len(missing) > room:  # of a call that has some already
                self._guess(batch)
                batch, room = [], self._executor.max_tokens
            batch.append((sequence, missing))
            room -= len(missing)
        if batch:
            self._guess(batch)
        return [self._sequences[request].guesses[end] for request, end in ends.items()]

    def _guess(self, batch: Sequence[tuple[_Sequence, list[int]]]) -> None:
        """Compute tokens of sequences, and guess what follows."""
        for (sequence, _), logits in zip(batch, self._compute(batch, logits=True), strict=True):
            number, probability = likeliest(self._vocabulary.narrow(logits))
            token = self._vocabulary.token(number)
            sequence.guesses[len(sequence.tokens)] = token, probability if token < self._vocab else 0.0

    def _compute(self, parts: Sequence[tuple[_Sequence, list[int]]], logits: bool) -> NDArray[Any]:
        """Compute tokens of sequences; the logits, or candidates, of each one's last."""
        counts = [len(tokens) for _, tokens in parts]
        starts = [len(sequence.tokens) for sequence, _ in parts]
        table = np.full((len(parts), max(len(sequence.pages) for sequence, _ in parts)), -1, np.int32)
        for row, (sequence, _) in enumerate(parts):
            table[row, : len(sequence.pages)] = sequence.pages
        ends = np.cumsum(counts)
        batch = Batch(
            np.concatenate([np.asarray(tokens, np.int32) for _, tokens in parts]),
            np.concatenate([np.arange(at, at + n, dtype=np.int32) for at, n in zip(starts, counts, strict=True)]),
            np.repeat(np.arange(len(parts), dtype=np.int32), counts),
            table,
            (ends - 1).astype(np.int32) if logits else np.empty(0, np.int32),
            needs=LogitsNeed.CANDIDATES,
        )
        with self._stream():
            result = self._executor.forward(batch)
        for sequence, tokens in parts:
            sequence.tokens += tokens
        return result

    def _can_go_on(self, request: AnswerRequest, tokens: int) -> bool:
        """Whether the request's sequence lacks only a few of its tokens, and has pages for so many."""
        sequence = self._sequences[request]
        lacks = len(request.tokens) - sequence.agree(request.tokens) if tokens == len(request.tokens) else 0
        return lacks <= self._few and self._has_room(sequence, tokens)

    def _lacking_pages(self, sequence: _Sequence, tokens: int) -> int:
        return max(0, -(-tokens // self._executor.page_size) - len(sequence.pages))

    def _has_room(self, sequence: _Sequence, tokens: int) -> bool:
        """Whether a sequence has pages for so many tokens."""
        more = self._pages.reserve(self._lacking_pages(sequence, tokens))
        if more is None:
            return False
        sequence.pages += more
        return True

    def observe(self, requests: Sequence[tuple[Request, int, int]]) -> None:
        pass

    def forget(self, request: AnswerRequest) -> None:
        sequence = self._sequences.pop(request, None)
        if sequence is not None:
            certain = sequence.agree(request.tokens)
            sequence.publish(certain, request.salt, self._pages, self._executor.page_size)
            self._pages.release(sequence.pages)

    def close(self) -> None:
        if self.thread is not None:
            self.thread.close()
        self._sequences.clear()
        self._executor.close()
