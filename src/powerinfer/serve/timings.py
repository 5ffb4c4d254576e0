"""llama-server's `timings`: how many tokens an answer has, and how long they took."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from powerinfer.runtime.request import StreamEvent


class AnswerTimings:
    """The timings of one answer, event by event.

    Until its last event `prompt_ms` counts from the submission, the wait in the queue included.
    """

    def __init__(self, prompt_tokens: int) -> None:
        self._prompt = prompt_tokens
        self._begin = time.perf_counter()
        self._first: float | None = None
        self._generated = self._cached = self._drafted = self._accepted = 0
        self._prompt_ms = self._answer_ms = 0.0

    def add(self, event: StreamEvent) -> None:
        """Count an event."""
        now = time.perf_counter()
        self._cached = event.cached_tokens
        if event.token_id is not None:
            self._generated += 1
            if self._first is None:
                self._first, self._prompt_ms = now, 1e3 * (now - self._begin)
            self._answer_ms = 1e3 * (now - self._first)
        if event.completion is not None:
            self._drafted, self._accepted = event.completion.drafted, event.completion.accepted
            measured = event.completion.timings
            if measured.prefill_tok_s:
                self._prompt_ms = 1e3 * (self._prompt - self._cached) / measured.prefill_tok_s
            if measured.decode_tok_s:
                self._answer_ms = 1e3 * (self._generated - 1) / measured.decode_tok_s

    def document(self) -> dict[str, Any]:
        """The object of the API. The first token comes with the prompt: rates are of those after it."""
        prompt, answer = self._prompt - self._cached, max(0, self._generated - 1)
        drafts = {"draft_n": self._drafted, "draft_n_accepted": self._accepted} if self._drafted else {}
        return {
            "cache_n": self._cached,
            "prompt_n": prompt,
            "prompt_ms": self._prompt_ms,
            "prompt_per_token_ms": _ratio(self._prompt_ms, prompt),
            "prompt_per_second": _ratio(1e3 * prompt, self._prompt_ms),
            "predicted_n": self._generated,
            "predicted_ms": self._answer_ms,
            "predicted_per_token_ms": _ratio(self._answer_ms, answer),
            "predicted_per_second": _ratio(1e3 * answer, self._answer_ms),
            **drafts,
        }


def _ratio(a: float, b: float) -> float:
    return a / b if b > 0 else 0.0
