"""The loop that turns requests into tokens: plan, forward, sample, text, until each request ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import numpy as np

from powerinfer.config import EngineConfig
from powerinfer.devices import Batch, Executor
from powerinfer.errors import PowerInferError, RequestError
from powerinfer.runtime.params import SamplingParams
from powerinfer.runtime.request import Request, StreamEvent
from powerinfer.runtime.sampling import Sampler, token_logprobs
from powerinfer.runtime.scheduler import Scheduler
from powerinfer.runtime.text import TextStream

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from powerinfer.formats.tokenizer import Tokenizer

    UseLogits = Callable[[int, NDArray[np.float32]], None]
    """use(position of the first row, float32 [n, vocab]); the rows are valid during the call."""

SCORE_ROWS = 64  # logits rows of one call when text is scored: 12 MB for a vocabulary of 49152


class Runner:
    """Runs requests on an executor. Any thread may call any method.

    It has no thread of its own: a thread that waits for a request computes steps for all of them (`advance`).
    An interrupt (Ctrl-C) in the forward call, where nearly all time is spent, leaves the state as it was before the
    step. An interrupt in the bookkeeping ends all requests and resets it.
    """

    def __init__(
        self, executor: Executor, tokenizer: Tokenizer, context: int, engine: EngineConfig, load_s: float
    ) -> None:
        self.context = min(context, executor.n_pages * executor.page_size)
        self._executor = executor
        self._tokenizer = tokenizer
        self._engine = engine
        self._load_s = load_s
        self._lock = threading.RLock()
        self._live: dict[Request, None] = {}
        self._scratch = np.empty((2, executor.vocab_size), np.float32)
        self._scheduler = self._new_scheduler()
        self._closed = False
        self._idle: Callable[[], bool] | None = None
        self._idling = False  # a thread is at it
        self._torn = False  # true while the bookkeeping changes, so that what interrupts it is seen

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(
            n_pages=self._executor.n_pages,
            page_size=self._executor.page_size,
            context=self.context,
            max_tokens=self._executor.max_tokens,
            max_batch=self._engine.max_batch,
            prefill_chunk=self._engine.prefill_chunk,
            prefix_cache=self._engine.prefix_cache,
        )

    @property
    def free_pages(self) -> int:
        """Pages that no request uses."""
        return self._scheduler.cache.available

    def request(self, prompt: Sequence[int], params: SamplingParams) -> Request:
        """A checked request, to be submitted. RequestError if it is invalid."""
        self._check_prompt(prompt)
        room = self.context - len(prompt)
        max_new = room if params.max_tokens is None else params.max_tokens
        if not 1 <= max_new <= room:
            wanted = "at least 1" if params.max_tokens is None else f"max_tokens {max_new}"
            raise RequestError(
                f"the prompt of {len(prompt)} tokens and {wanted} to generate do not fit the context of "
                f"{self.context} tokens: shorten the prompt, lower max_tokens or raise the context"
            )
        eos = frozenset() if params.ignore_eos else self._tokenizer.eos_ids
        return Request(
            prompt,
            params,
            max_new=max_new,
            sampler=Sampler(params, self._executor.vocab_size, prompt, self._scratch),
            text=TextStream(self._tokenizer.stream(), params.stop),
            stop_ids=eos.union(params.stop_token_ids),
        )

    def submit(self, request: Request) -> None:
        """Queue a request."""
        with self._lock:
            self._mend()
            self._torn = True
            request.submit_time = time.perf_counter()
            self._live[request] = None
            self._scheduler.submit(request)
            self._torn = False

    def advance(self, request: Request) -> None:
        """Compute a step of all requests, unless another thread already advanced this one."""
        with self._lock:
            if not request.events and not request.ended:
                self._step()

    def between_steps(self) -> AbstractContextManager[object]:
        """A context in which neither a step nor idle work runs."""
        return self._lock

    def when_idle(self, work: Callable[[], bool]) -> None:
        """Call `work` repeatedly, until it returns False, in another thread whenever no request is left.

        A PowerInferError stops it for good. A new request waits for at most one call.
        """
        self._idle = work

    def _idle_work(self, work: Callable[[], bool]) -> None:
        more = True
        while more:
            with self._lock:
                try:
                    more = not self._closed and not self._live and work()
                except PowerInferError:  # not tried again
                    self._idle, more = None, False
                self._idling = more

    def abort(self, request: Request) -> None:
        """End a request, if it still runs, and free its pages."""
        with self._lock:
            self._mend()
            if request in self._live:
                self._torn = True
                text = request.text.flush()
                request.pieces.append(text)
                self._end(request, "abort", StreamEvent(text, None))
                self._torn = False

    def score(self, tokens: Sequence[int], first: int, use: UseLogits, step: int = SCORE_ROWS) -> None:
        """Compute a text and hand the logits at its positions from `first` on to `use`.

        The text is computed from its beginning, without the prefix cache; other requests wait meanwhile. What comes
        before `first` is computed as a prompt is, the rest in calls of up to `step` tokens: one token a call is what
        decode does.
        """
        assert step > 0
        self._check_prompt(tokens)
        if len(tokens) > self.context:
            raise RequestError(f"{len(tokens)} tokens do not fit the context of {self.context} tokens")
        with self._lock:
            self._mend()
            cache = self._scheduler.cache
            self._torn = True
            pages = cache.reserve(-(-len(tokens) // self._executor.page_size))
            self._torn = False
            if pages is None:
                raise RequestError("no room in the KV cache: wait for the running requests to end")
            try:
                self._score(tokens, first, use, min(step, SCORE_ROWS), pages)
            finally:
                self._torn = True
                cache.release(pages)
                self._torn = False

    def _score(self, tokens: Sequence[int], first: int, use: UseLogits, step: int, pages: list[int]) -> None:
        page_table = np.asarray([pages], np.int32)
        limit = self._executor.max_tokens
        start = 0
        while start < len(tokens):
            wanted = start >= first
            end = min(start + min(limit, step), len(tokens)) if wanted else min(start + limit, first, len(tokens))
            batch = Batch(
                np.asarray(tokens[start:end], np.int32),
                np.arange(start, end, dtype=np.int32),
                np.zeros(end - start, np.int32),
                page_table,
                np.arange(end - start if wanted else 0, dtype=np.int32),
            )
            logits = self._executor.forward(batch)
            if wanted:
                use(start, logits)
            start = end

    def close(self) -> None:
        """End running requests and close the executor. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._torn = True
            self._mend()
            self._closed = True
            self._executor.close()

    def _check_prompt(self, prompt: Sequence[int]) -> None:
        if self._closed:
            raise RequestError("the model was closed")
        if not prompt:
            raise RequestError("the prompt is empty: it needs at least one token")
        if min(prompt) < 0 or max(prompt) >= self._executor.vocab_size:
            wrong = next(token for token in prompt if not 0 <= token < self._executor.vocab_size)
            raise RequestError(f"the prompt holds token {wrong}, but the model has {self._executor.vocab_size} tokens")

    def _step(self) -> None:
        self._mend()
        self._torn = True
        batch = self._scheduler.plan()
        self._torn = False
        if batch is None:
            assert not self._scheduler.waiting, "a checked request can always be started"
            return
        logits = self._executor.forward(batch)
        self._torn = True
        for row, request in enumerate(self._scheduler.commit()):
            try:
                self._accept(request, logits[row])
            except PowerInferError as error:  # this request failed: the others continue
                request.error = error
                self._leave(request)
        self._torn = False

    def _accept(self, request: Request, logits: NDArray[np.float32]) -> None:
        """Sample the next token of a request, and end the request if it was the last."""
        token = request.sampler.sample(logits)
        count = request.params.logprobs
        logprobs = None
        if count is not None:
            logprobs = token_logprobs(logits, token, count, self._scratch[1])
            request.logprobs.append(logprobs)
        request.last_token_time = time.perf_counter()
        if request.first_token_time is None:
            request.first_token_time = request.last_token_time
        request.tokens.append(token)
        text, reason = "", None
        if token in request.stop_ids:
            text, reason = request.text.flush(), "stop"
        else:
            text = request.text.push(token)
            if request.text.stopped:
                reason = "stop"
            elif len(request.tokens) - request.n_prompt >= request.max_new:
                text += request.text.flush()
                reason = "stop" if request.text.stopped else "length"
        request.pieces.append(text)
        event = StreamEvent(text, token, logprobs)
        if reason is not None:
            self._end(request, reason, event)
        elif request.events is not None:
            request.events.append(event)

    def _end(self, request: Request, reason: str, event: StreamEvent) -> None:
        completion = request.complete(reason, self._load_s)
        if request.events is not None:
            request.events.append(event._replace(finish_reason=reason, completion=completion))
        self._leave(request)

    def _leave(self, request: Request) -> None:
        self._scheduler.finish(request)
        del self._live[request]
        if not self._live and self._idle is not None and not self._idling:
            self._idling = True
            threading.Thread(target=self._idle_work, args=(self._idle,), daemon=True).start()

    def _mend(self) -> None:
        """Reset the bookkeeping if something interrupted it: all pages free, all requests ended."""
        if not self._torn:
            return
        self._scheduler = self._new_scheduler()
        while self._live:
            request, _ = self._live.popitem()
            if not request.ended:
                completion = request.complete("abort", self._load_s)
                if request.events is not None:
                    request.events.append(StreamEvent("", None, None, "abort", completion))
        self._torn = False
