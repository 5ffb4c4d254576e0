"""Completions and stream events, and the state of a request: of an answer, or of an embedding."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from powerinfer.errors import PowerInferError
from powerinfer.runtime.params import SamplingParams

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from powerinfer.runtime.sampling import Sampler, TokenLogprob
    from powerinfer.runtime.text import TextStream


@dataclass(frozen=True)
class Timings:
    """Times in seconds and rates of one request; None if not measured.

    load_s: seconds that loading the model took, once for the engine.
    ttft_s: seconds from submission to the first token.
    prefill_tok_s: prompt tokens computed per second, without cached ones.
    decode_tok_s: tokens after the first per second.
    """

    load_s: float
    ttft_s: float | None
    prefill_tok_s: float | None
    decode_tok_s: float | None


@dataclass(frozen=True)
class Completion:
    """The answer to one request.

    text: the answer, without the prompt.
    token_ids: as generated, including a token that ended the answer.
    finish_reason: "stop", the model or a stop string ended it; "length", `max_tokens` or the context did; "abort", the
        model was closed.
    prompt_tokens, completion_tokens: numbers of tokens of the prompt and of the answer.
    cached_tokens: prompt tokens that were taken from the prefix cache.
    timings: seconds and rates, a `Timings`.
    logprobs: for each token id a `TokenLogprob`, if `SamplingParams(logprobs=N)` asked for them.
    drafted, accepted: drafts that were computed for it, and those of them that were right.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    timings: Timings
    logprobs: list[TokenLogprob] | None = None
    drafted: int = 0
    accepted: int = 0


class StreamEvent(NamedTuple):
    """One generated token. The last event of a stream has a finish_reason and the whole completion.

    text: new text, which stays; empty for half a character and for what may begin a stop string.
    token_id: the token; None in an event that only ends an aborted stream.
    logprobs: of this token, if they were asked for.
    finish_reason: as of `Completion`, in the last event; None in the others.
    completion: the whole answer, in the last event; None in the others.
    cached_tokens: prompt tokens that were taken from the prefix cache.
    """

    text: str
    token_id: int | None
    logprobs: TokenLogprob | None = None
    finish_reason: str | None = None
    completion: Completion | None = None
    cached_tokens: int = 0


class RunningRequest(NamedTuple):
    """Progress of a running request. row: its place in the batch; params: of an answer, else None."""

    row: int
    prompt_tokens: int
    cached_tokens: int
    computed: int  # prompt and answer tokens whose keys and values are there
    generated: int  # answer tokens
    max_new: int
    has_new_line: bool
    params: SamplingParams | None


class Terms(NamedTuple):
    """Terms of a request. salt: requests with different salts share no cached prefix; timeout: seconds from the
    submission to its end, queue_timeout: to its start, None: any number."""

    salt: bytes = b""
    timeout: float | None = None
    queue_timeout: float | None = None


class Request:
    """The state of a request. The scheduler owns the second group of fields, the driver the third.

    deliver: called on the driver's thread, between steps, with the event that ends an answer, or with None at the end
    of everything else. It must be fast; if it raises, the request is aborted.
    """

    def __init__(self, prompt: Sequence[int], terms: Terms) -> None:
        self.tokens = list(prompt)  # the prompt, then what was generated
        self.n_prompt = len(self.tokens)
        self.salt, self.timeout, self.queue_timeout = terms
        self.deliver: Callable[[StreamEvent | None], object] | None = None

        self.computed = 0  # tokens whose keys and values are in `pages`
        self.cached = 0  # prompt tokens found in the prefix cache at the first admission
        self.pages: list[int] = []
        self.keys: list[bytes] = []  # keys of the pages that `tokens` fills
        self.published = 0  # leading pages that are in the prefix cache
        self.row = -1  # row of the page table while it runs
        self.drafts: Sequence[int] = ()  # guesses of the tokens that follow, computed with the last of its own
        self.read_state = self.state = -1  # slots of its state before the next step and after it
        self.spare_state = -1  # a slot for the state behind drafts, which may not last
        self.replayed = 0  # tokens that the state to read lacks: the step that wrote `state` kept what it needs of them
        self.keeps: set[int] = set()  # numbers of tokens behind which its state is to be kept
        self.last_kept = b""  # key of the state that it kept last without being asked

        self.unwanted = False  # whoever asked is gone: it is ended between two steps
        self.error: PowerInferError | None = None
        self.submit_time = time.perf_counter()
        self.start_time: float | None = None

    @property
    def ended(self) -> bool:
        return self.error is not None

    def progress(self) -> RunningRequest:
        """Progress of the request, in any thread."""
        n = self.n_prompt
        return RunningRequest(self.row, n, self.cached, self.computed, max(0, len(self.tokens) - n), 0, False, None)


class AnswerRequest(Request):
    """A prompt to be answered. every: deliver each event, not only the last."""

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        terms: Terms,
        *,
        max_new: int,
        sampler: Sampler,
        text: TextStream,
        stop_ids: frozenset[int],
    ) -> None:
        super().__init__(prompt, terms)
        self.params = params
        self.max_new = max_new
        self.sampler = sampler
        self.text = text
        self.stop_ids = stop_ids
        self.all_tokens = False
        self.drafted = self.accepted = 0  # drafts that were computed, and those of them that were right

        self.pieces: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.completion: Completion | None = None  # set when it has ended, unless it failed
        self.first_token_time: float | None = None
        self.last_token_time: float | None = None

    @property
    def ended(self) -> bool:
        return self.completion is not None or super().ended

    def progress(self) -> RunningRequest:
        has_new_line = any("\n" in piece for piece in self.pieces)
        return super().progress()._replace(max_new=self.max_new, has_new_line=has_new_line, params=self.params)

    def complete(self, reason: str, load_s: float) -> Completion:
        """End it: set and return the completion."""
        generated = self.tokens[self.n_prompt :]
        self.completion = Completion(
            text="".join(self.pieces),
            token_ids=generated,
            finish_reason=reason,
            prompt_tokens=self.n_prompt,
            completion_tokens=len(generated),
            cached_tokens=self.cached,
            timings=self._timings(len(generated), load_s),
            logprobs=None if self.params.logprobs is None else self.logprobs,
            drafted=self.drafted,
            accepted=self.accepted,
        )
        return self.completion

    def _timings(self, generated: int, load_s: float) -> Timings:
        first, last, start = self.first_token_time, self.last_token_time, self.start_time
        if first is None or last is None or start is None:
            return Timings(load_s, None, None, None)
        return Timings(
            load_s=load_s,
            ttft_s=first - self.submit_time,
            prefill_tok_s=_rate(self.n_prompt - self.cached, first - start),
            decode_tok_s=_rate(generated - 1, last - first),
        )


class EmbeddingRequest(Request):
    """A text to be embedded. Every one of its tokens is computed: it neither reads nor fills the prefix cache."""

    embedding: NDArray[np.float32] | None = None  # [d_model], set when it has ended, unless it failed
    _sum: NDArray[np.float64]

    @property
    def ended(self) -> bool:
        return self.embedding is not None or super().ended

    def add(self, states: NDArray[np.float32]) -> None:
        """The hidden states [n, d_model] of the n tokens that were computed last; after all of them, the embedding.

        PowerInferError if they are not finite.
        """
        if self.computed == len(states):  # the first ones, perhaps again
            self._sum = np.zeros(states.shape[1])
        for state in states:  # in order, so that the sum has the same bits whatever the chunks
            self._sum += state
        if self.computed == self.n_prompt:
            self.embedding = unit(self._sum)


def unit(vector: NDArray[np.float64]) -> NDArray[np.float32]:
    """The vector scaled to length 1; one of zeros stays. PowerInferError if it is not finite."""
    length = float(np.sqrt(vector @ vector))
    if not math.isfinite(length):
        raise PowerInferError("the model computed hidden states that are not finite: its weights may be damaged")
    return (vector / (length or 1.0)).astype(np.float32)


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if count > 0 and seconds > 0 else None
