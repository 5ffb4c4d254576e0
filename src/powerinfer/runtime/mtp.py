"""Drafts by the model's own draft head, one layer that predicts the token after the next (MTP).

At each position it reads the model's hidden state and the token that follows. Tokens of prompts it reads as they are
computed; those of answers when it is asked for drafts, so that requests without drafts cost nothing more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from powerinfer.devices import Batch
from powerinfer.runtime.request import AnswerRequest, Request
from powerinfer.runtime.speculation import Outlook, likeliest

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from powerinfer.devices.drafter import DraftHead

MOST = 4
"""Drafts of a request in one step."""

_LIKELY = 0.7  # share of drafts that is right, until it was measured
_SURE = 0.3  # probability below which a draft is the last one


class _Pending(NamedTuple):
    """Tokens of a request that the head has not read. inputs: float32 [n, d_model], of positions from `begin` on."""

    begin: int
    inputs: NDArray[np.float32]


class MtpDrafts:
    """Source of drafts: the head of the model itself, on the pages of its requests."""

    name = "mtp"

    def __init__(self, head: DraftHead, page_size: int, waiting: int) -> None:
        """waiting: tokens of an answer that wait to be read, at most; older ones never are."""
        self._head = head
        self._waiting = waiting
        self._page_size = page_size
        self._pending: dict[AnswerRequest, _Pending] = {}

    def outlook(self, request: AnswerRequest) -> Outlook:
        pending = self._pending.get(request)
        ready = pending is not None and pending.begin + len(pending.inputs) + 1 == len(request.tokens)
        return Outlook(MOST if ready else 0, "mtp", _LIKELY)

    def observe(self, parts: Sequence[tuple[Request, int, int]]) -> None:
        answers = [(one, first, count) for one, first, count in parts if isinstance(one, AnswerRequest) and count]
        if not answers:
            return
        rows = np.concatenate([np.arange(first, first + count, dtype=np.int32) for _, first, count in answers])
        inputs = self._head.inputs(rows)
        read, at = [], 0
        for request, _, count in answers:
            pending = self._add(request, request.computed - count, inputs[at : at + count])
            at += count
            if request.computed <= request.n_prompt or count > MOST + 1:
                # the last one waits for what follows it, and for drafts
                read.append((request, pending.begin, pending.inputs[:-1]))
                pending = _Pending(pending.begin + len(pending.inputs) - 1, pending.inputs[-1:])
            self._pending[request] = pending
        self._read([part for part in read if len(part[2])], last=False)

    def _add(self, request: AnswerRequest, begin: int, inputs: NDArray[np.float32]) -> _Pending:
        """Inputs that wait to be read, with more."""
        before = self._pending.get(request)
        if before is None or before.begin + len(before.inputs) != begin:
            return _Pending(begin, inputs)
        inputs = np.concatenate([before.inputs, inputs])
        end = begin + len(inputs) - len(before.inputs)
        if request.computed > request.n_prompt:
            inputs = inputs[-self._waiting :]
        return _Pending(end - len(inputs), inputs)

    def prepare(self, requests: Iterable[AnswerRequest]) -> None:
        pass

    def draft(self, wanted: Sequence[tuple[AnswerRequest, int]]) -> list[list[int]]:
        drafts: dict[AnswerRequest, list[int]] = {request: [] for request, _ in wanted}
        counts, going = dict(wanted), [request for request, _ in wanted]
        parts = [(request, *self._pending.pop(request)) for request in going]
        for place in range(max(counts.values())):
            logits, outputs = self._read(parts, last=True, drafts=drafts)
            for request, row in zip(going, logits, strict=True):
                token, probability = likeliest(row)
                if probability >= _SURE or not place:
                    drafts[request].append(token)
            parts, behind = [], list[AnswerRequest]()
            for request, output in zip(going, outputs, strict=True):
                position = len(request.tokens) - 1 + place
                more = len(drafts[request]) == place + 1 < counts[request]
                if more and position < len(request.pages) * self._page_size:
                    parts.append((request, position, output[None]))
                    behind.append(request)
            going = behind
            if not going:
                break
        return [drafts[request] for request, _ in wanted]

    def _read(
        self,
        parts: Sequence[tuple[AnswerRequest, int, NDArray[np.float32]]],
        *,
        last: bool,
        drafts: dict[AnswerRequest, list[int]] | None = None,
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Let the head read inputs of requests, from a position of each on. last: returns logits and outputs of the
        last position of each. drafts: of each, tokens behind its own."""
        nothing = np.empty((0, 0), np.float32)
        if not parts:
            return nothing, nothing
        counts = [len(inputs) for _, _, inputs in parts]
        table = np.full((len(parts), max(len(request.pages) for request, _, _ in parts)), -1, np.int32)
        tokens = list[int]()
        for row, (request, begin, inputs) in enumerate(parts):
            table[row, : len(request.pages)] = request.pages
            text = request.tokens if drafts is None else [*request.tokens, *drafts[request]]
            tokens += text[begin + 1 : begin + 1 + len(inputs)]
        ends = np.cumsum(counts).astype(np.int32) - 1
        batch = Batch(
            np.asarray(tokens, np.int32),
            np.concatenate([np.arange(begin, begin + len(inputs), dtype=np.int32) for _, begin, inputs in parts]),
            np.repeat(np.arange(len(parts), dtype=np.int32), counts),
            table,
            ends if last else np.empty(0, np.int32),
        )
        logits = self._head.forward(batch, np.concatenate([inputs for _, _, inputs in parts]))
        return (logits, self._head.outputs(ends)) if last else (nothing, nothing)

    def forget(self, request: AnswerRequest) -> None:
        self._pending.pop(request, None)

    def close(self) -> None:
        self._pending.clear()
