"""Drafts by the model's own draft head, one layer that predicts the token after the next (MTP).

At each position it reads the model's hidden state and the token that follows. Tokens of prompts it reads as they are
computed; those of answers when it is asked for drafts, so that an answer without drafts costs nothing more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from powerinfer.devices import Batch
from powerinfer.devices.batch import LogitsNeed
from powerinfer.placement.draft_gain import RIGHT
from powerinfer.runtime.draft_vocabulary import DraftVocabulary
from powerinfer.runtime.request import AnswerRequest, Request
from powerinfer.runtime.speculation import FEW, Outlook, consecutive_drafts, likeliest

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from powerinfer.devices.drafter import DraftHead

_WAITING = 64  # tokens of an answer that wait to be read, at most; older ones never are


class _Pending:
    """Tokens of a request that the head has not read, of positions from `begin` on, in memory that seldom moves."""

    def __init__(self) -> None:
        self.begin = 0
        self.noted = 0  # tokens of the request that are in the draft vocabulary
        self._memory = np.empty((0, 0), np.float32)
        self._first = self._end = 0

    def __len__(self) -> int:
        return self._end - self._first

    def add(self, begin: int, inputs: NDArray[np.float32]) -> None:
        """An input a token, float32 [n, d_model], from position `begin` on; others than those before it are dropped."""
        if self.begin + len(self) != begin:
            self.begin, self._first, self._end = begin, 0, 0
        older, room = self._memory[self._first : self._end], max(len(self) + len(inputs), 2 * _WAITING)
        if self._end + len(inputs) > len(self._memory) or len(self._memory) > 2 * room:  # the latter behind a prompt
            if not room <= len(self._memory) <= 2 * room:
                self._memory = np.empty((room, inputs.shape[1]), np.float32)
            self._first, self._end = 0, len(older)
            if len(older):
                self._memory[: len(older)] = older
        self._memory[self._end : self._end + len(inputs)] = inputs
        self._end += len(inputs)

    def take(self, left: int) -> tuple[int, NDArray[np.float32]]:
        """The oldest ones, all but `left`, and the position of the first. They stay valid until more are added."""
        begin, first = self.begin, self._first
        self.begin, self._first = begin + len(self) - left, self._end - left
        return begin, self._memory[first : self._first]


_Part = tuple[AnswerRequest, int, "NDArray[np.float32]"]
"""A request, a position, and the inputs from there on."""


class MtpDrafts:
    """Source of drafts: the head of the model itself, on the pages of its requests."""

    name = "mtp"

    def __init__(self, head: DraftHead, page_size: int, max_tokens: int, vocab_size: int) -> None:
        """max_tokens: of a call of the head; more requests at a time there are not."""
        self._head = head
        self._page_size = page_size
        self._max_tokens = max_tokens
        self._pending: dict[AnswerRequest, _Pending] = {}
        self._vocabulary = DraftVocabulary(vocab_size if head.lists else 0)

    def outlook(self, request: AnswerRequest) -> Outlook:
        pending = self._pending.get(request)
        ready = pending is not None and pending.begin + len(pending) + 1 == len(request.tokens)
        most = FEW if ready else 0
        return Outlook(most, self.name, RIGHT, steady=True)  # the few tokens that wait are read in one call

    def observe(self, parts: Sequence[tuple[Request, int, int]]) -> None:
        answers = [(one, first, count) for one, first, count in parts if isinstance(one, AnswerRequest) and count]
        if not answers:
            return
        inputs = self._head.inputs(_rows(answers))
        read, at = [], 0
        for request, _, count in answers:
            pending = self._pending.get(request)
            if pending is None:
                pending = self._pending[request] = _Pending()
            pending.add(request.computed - count, inputs[at : at + count])
            at += count
            if request.computed <= request.n_prompt or count > FEW + 1:
                read.append((request, *pending.take(1)))  # the last one waits for what follows it, and for drafts
            elif len(pending) > _WAITING:
                pending.take(_WAITING)
        if read:
            self._read_on(read)

    def prepare(self, requests: Sequence[AnswerRequest]) -> int:
        read = [(request, *self._pending[request].take(1)) for request in requests]
        self._read_on(read)
        return sum(len(inputs) for _, _, inputs in read)

    def draft(self, wanted: Sequence[tuple[AnswerRequest, int]]) -> list[list[int]]:
        inputs = {}
        for request, _ in wanted:
            pending = self._pending[request]
            inputs[request] = pending.take(0)
            self._vocabulary.note(request.tokens[pending.noted :])
            pending.noted = len(request.tokens)
        if (panels := self._vocabulary.changed()) is not None:
            self._vocabulary.order(self._head.list_panels(panels))

        def can_go_on(request: AnswerRequest, place: int) -> bool:
            begin, _ = inputs[request]
            return not place or begin < len(request.pages) * self._page_size

        def next_tokens(
            requests: Sequence[AnswerRequest], drafts: Mapping[AnswerRequest, list[int]]
        ) -> list[tuple[int, float]]:
            logits, outputs = self._read([(request, *inputs[request]) for request in requests], drafts)
            for request, output in zip(requests, outputs, strict=True):
                inputs[request] = len(request.tokens) - 1 + len(drafts[request]), output[None]
            likely = [likeliest(self._vocabulary.narrow(row)) for row in logits]
            return [(self._token(number), probability) for number, probability in likely]

        return consecutive_drafts(wanted, can_go_on, next_tokens)

    def _read_on(self, parts: Sequence[_Part]) -> None:
        """Let the head read inputs of requests, whose drafts nobody wants."""
        for call in _calls(parts, self._max_tokens):
            self._head.forward(self._batch(call, None), np.concatenate([inputs for _, _, inputs in call]))

    def _read(
        self, parts: Sequence[_Part], drafts: Mapping[AnswerRequest, list[int]]
    ) -> tuple[NDArray[Any], NDArray[np.float32]]:
        """The same of an input of each; logits, or candidates, and outputs. drafts: of each, tokens behind its own."""
        batch = self._batch(parts, drafts)
        logits = self._head.forward(batch, np.concatenate([inputs for _, _, inputs in parts]))
        return logits, self._head.outputs(batch.logit_rows)

    def _batch(self, parts: Sequence[_Part], drafts: Mapping[AnswerRequest, list[int]] | None) -> Batch:
        counts = [len(inputs) for _, _, inputs in parts]
        table = np.full((len(parts), max(len(request.pages) for request, _, _ in parts)), -1, np.int32)
        tokens = list[int]()
        for row, (request, begin, inputs) in enumerate(parts):
            table[row, : len(request.pages)] = request.pages
            text = request.tokens if drafts is None else [*request.tokens, *drafts[request]]
            tokens += text[begin + 1 : begin + 1 + len(inputs)]
        return Batch(
            np.asarray(tokens, np.int32),
            np.concatenate([np.arange(begin, begin + len(inputs), dtype=np.int32) for _, begin, inputs in parts]),
            np.repeat(np.arange(len(parts), dtype=np.int32), counts),
            table,
            np.empty(0, np.int32) if drafts is None else np.cumsum(counts).astype(np.int32) - 1,
            needs=LogitsNeed.CANDIDATES,
        )

    def _token(self, number: int) -> int:
        """The model's token of that number among the logits."""
        return self._vocabulary.token(number)

    def forget(self, request: AnswerRequest) -> None:
        self._pending.pop(request, None)

    def close(self) -> None:
        self._pending.clear()
        del self._head  # which has the model


def _rows(answers: Sequence[tuple[AnswerRequest, int, int]]) -> NDArray[np.int32]:
    """Indices of so many tokens of each from its first one on, int32."""
    if len(answers) == 1:  # in each step of decoding
        _, first, count = answers[0]
        return np.arange(first, first + count, dtype=np.int32)
    return np.concatenate([np.arange(first, first + count, dtype=np.int32) for _, first, count in answers])


def _calls(parts: Sequence[_Part], most: int) -> Iterator[list[_Part]]:
    """The same inputs, in calls of at most so many."""
    call, room = list[_Part](), most
    for request, begin, inputs in parts:
        at = 0
        while at < len(inputs):
            piece = inputs[at : at + room]
            call.append((request, begin + at, piece))
            at, room = at + len(piece), room - len(piece)
            if not room:
                yield call
                call, room = [], most
    if call:
        yield call
