"""Requests and other work for a loaded model, from any thread; the engine's own thread does it (`driver.py`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import islice, pairwise
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from powerinfer.config import EngineConfig
from powerinfer.devices import Batch, Executor
from powerinfer.devices.batch import StoppedError
from powerinfer.devices.choices import Choice, launched_afterwards
from powerinfer.errors import CLOSED, RequestError
from powerinfer.runtime.driver import Driver, EngineStats
from powerinfer.runtime.grammar import Grammars
from powerinfer.runtime.params import SamplingParams, TextLimit
from powerinfer.runtime.request import AnswerRequest, EmbeddingRequest, Request, RunningRequest, Terms
from powerinfer.runtime.sampling import Sampler, TokenMask
from powerinfer.runtime.scheduler import Scheduler, StepLimits
from powerinfer.runtime.speculation import DraftSource, Speculation
from powerinfer.runtime.text import TextStream

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from powerinfer.text.tokenizer import Tokenizer

    UseLogits = Callable[[int, int, NDArray[np.float32]], None]
    """use(text, position of the first row, float32 [n, vocab]), on the engine's thread; the rows are valid in the call.
    """

T = TypeVar("T")

SCORE_ROWS = 64  # logits rows of one call when text is scored: 12 MB for a vocabulary of 49152
LONGEST = 1e9  # seconds, of a timeout


class Runner:
    """Runs requests on an executor. Any thread may call any method. The engine's thread ends with this object."""

    def __init__(
        self,
        executor: Executor,
        tokenizer: Tokenizer,
        context: int,
        engine: EngineConfig,
        load_s: float,
        longest: int,
        source: DraftSource | None = None,
        *,
        drafts_alone: bool = False,
    ) -> None:
        """longest: the maximum context of the model, in tokens; source: of drafts, None: there are none; drafts_alone:
        these are for a request that decodes alone."""
        self._longest = longest
        self.context = min(context, executor.n_pages * executor.page_size)
        self._executor = executor
        self._tokenizer = tokenizer
        self._max_batch = engine.max_batch
        self._speculation = None
        if source is not None:
            choices, name, launches = executor.choices, source.name, executor.choices.launches
            if launches is not None:
                choices.launches = launched_afterwards("drafts follow them")

            def say_failed(reason: str) -> None:
                choices.drafts, choices.launches = Choice("none", f"{name} failed: {reason}"), launches

            self._speculation = Speculation(source, alone=drafts_alone, say_failed=say_failed)
        self._scratch = np.empty((2, executor.vocab_size), np.float32)
        self._grammars = Grammars(tokenizer, executor.vocab_size)
        chunk = engine.prefill_chunk or executor.max_tokens
        self._scheduler = Scheduler(
            n_pages=executor.n_pages,
            page_size=executor.page_size,
            context=self.context,
            limits=StepLimits(executor.max_tokens, engine.max_batch, chunk, engine.mixed_chunk),
            prefix_cache=engine.prefix_cache,
            n_states=executor.n_states,
            drafts=source is not None,
        )
        self._driver = Driver(
            executor, self._scheduler, tokenizer.token_bytes, load_s=load_s, max_queue=engine.max_queue,
            speculation=self._speculation,
        )  # fmt: skip

    def __del__(self) -> None:
        if hasattr(self, "_driver"):
            self._driver.stop()

    @property
    def drafts(self) -> str | None:
        """The name of the source of drafts; None: there is none, or it failed."""
        return None if self._speculation is None or self._speculation.failed else self._speculation.source.name

    def request(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        salt: bytes = b"",
        timeout: float | None = None,
        queue_timeout: float | None = None,
        mask: TokenMask | None = None,
    ) -> AnswerRequest:
        """A checked request, to be submitted. RequestError if it is invalid, or if the model was closed.

        A grammar of `params` is compiled meanwhile; it and `mask` exclude each other.
        """
        self._check_prompt(prompt)
        room = self.context - len(prompt)
        max_new = room if params.max_tokens is None else params.max_tokens
        if isinstance(params.max_tokens, TextLimit):
            max_new = min(max_new, max(1, room))
        if not 1 <= max_new <= room:
            raise RequestError(self._no_room_reason(len(prompt), params.max_tokens))
        if params.rules is not None:
            if mask is not None:
                raise RequestError("a mask and a grammar were given: give one")
            mask = self._grammars.mask(params.rules)
        eos = frozenset() if params.ignore_eos else self._tokenizer.eos_ids
        request = AnswerRequest(
            prompt,
            params,
            _terms(salt, timeout, queue_timeout),
            max_new=max_new,
            sampler=Sampler(params, self._executor.vocab_size, prompt, self._scratch, mask),
            text=TextStream(self._tokenizer.stream(params.skip_special_tokens), params.stop),
            stop_ids=eos.union(params.stop_token_ids),
        )
        self._scheduler.extend_keys(request)
        return request

    def _no_room_reason(self, n: int, max_tokens: int | None) -> str:
        """Reason for which a prompt of n tokens cannot be answered, and what helps."""
        wanted = "at least 1" if max_tokens is None else f"max_tokens {max_tokens}"
        limit_note = ", the model's maximum" if self.context >= self._longest else ""
        advice = ["shorten the prompt"]
        if max_tokens is not None and n < self.context:
            advice.append("lower max_tokens (--max-tokens)")
        if not limit_note:
            advice.append("raise the context (--context)")
        *first, last = advice
        helps = f"{', '.join(first)} or {last}" if first else last
        context = f"the context of {self.context} tokens{limit_note}"
        return f"the prompt of {n} tokens and {wanted} to generate do not fit {context}: {helps}"

    def embedding(
        self,
        prompt: Sequence[int],
        *,
        salt: bytes = b"",
        timeout: float | None = None,
        queue_timeout: float | None = None,
    ) -> EmbeddingRequest:
        """A checked request for a text's embedding, to be submitted. Errors as of `request`."""
        self._check_prompt(prompt)
        self._check_fits(prompt)
        return EmbeddingRequest(prompt, _terms(salt, timeout, queue_timeout))

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests, all before the next step. What happens to them is told to their `deliver`."""
        if self._driver.is_current_thread:
            raise RuntimeError("the engine's own thread cannot wait for an answer")
        now = time.perf_counter()
        for request in requests:
            request.submit_time = now
        self._driver.post(partial(self._driver.submit, requests))

    def abort(self, requests: Iterable[Request]) -> None:
        """End those of the requests that still run, and free their pages, before the next step; does not wait."""
        self._driver.abort(requests)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._driver.closing

    def prepare(self) -> None:
        """Hand the vocabulary to the compiler of grammars."""
        self._grammars.prepare()

    def stats(self) -> EngineStats:
        return self._driver.stats()

    def running(self) -> list[RunningRequest]:
        """Progress of the running requests, in the order of their places. Does not wait for a step."""
        requests = [request.progress() for request in self._scheduler.running[:]]
        return sorted(requests, key=lambda request: request.row)

    def call(self, work: Callable[[], T]) -> T:
        """Result or error of `work()`, called between two steps and outside idle work."""
        if self._driver.is_current_thread or self._driver.ended:
            return work()
        outcome: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()

        def command() -> None:
            try:
                outcome.put((work(), None))
            except BaseException as error:  # the caller's, not the engine's
                outcome.put((None, error))

        self._driver.post(command)
        value, error = outcome.get()
        if error is not None:
            raise error
        return value  # type: ignore[return-value]

    def ask(self, work: Callable[[], T]) -> T:
        """`call` of what needs the model's memory. RequestError if the model was closed."""

        def checked() -> T:
            if self._driver.closing:
                raise RequestError(CLOSED)
            return work()

        return self.call(checked)

    def enter(self, make: Callable[[], AbstractContextManager[T]]) -> AbstractContextManager[T]:
        """`make()`, entered and left between two steps. RequestError if the model was closed."""
        self._driver.check()
        return self._enter(make())

    @contextmanager
    def _enter(self, context: AbstractContextManager[T]) -> Iterator[T]:
        def enter() -> T:
            self._driver.check()
            return context.__enter__()

        def leave() -> None:
            try:
                context.__exit__(None, None, None)
            except Exception:
                if not self._driver.ended:  # a model that was closed meanwhile has nothing to put back
                    raise

        value = self.call(enter)
        try:
            yield value
        finally:
            self.call(leave)

    def when_idle(self, work: Callable[[], bool]) -> None:
        """Call `work` repeatedly, until it returns False, whenever the last request has ended.

        A PowerInferError stops it for good. A new request waits for at most one call.
        """
        self._driver.idle_work = work

    def score(self, texts: Sequence[Sequence[int]], firsts: Sequence[int], use: UseLogits, step: int) -> None:
        """Compute texts and hand the logits at the positions of each from `firsts` on to `use`.

        A first behind a text's end asks for none. They are computed without the prefix cache, in turns with the steps
        of requests, up to `max_batch` texts together; whole pages of tokens with which all of these begin are computed
        once. What comes before `firsts` is computed as a prompt is, the rest in calls of up to `step` tokens: one token
        a call is what decode does.
        """
        assert step > 0
        for tokens in texts:
            self._check_prompt(tokens)
            self._check_fits(tokens)
        firsts = [min(max(first, 0), len(tokens)) for first, tokens in zip(firsts, texts, strict=True)]
        begin = 0
        while begin < len(texts):
            end, pages = begin, 0
            while end < len(texts) and end - begin < self._together:
                pages += self._pages(len(texts[end]))
                if pages > self._executor.n_pages and end > begin:
                    break
                end += 1
            self._score_some(texts[begin:end], firsts[begin:end], partial(_numbered, use, begin), step)
            begin = end

    @property
    def _together(self) -> int:
        """Number of texts that are scored together: one, where sequences have states, which cannot be shared."""
        return self._max_batch if self._scheduler.states is None else 1

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._executor.page_size)

    def _score_some(self, texts: Sequence[Sequence[int]], firsts: Sequence[int], use: UseLogits, step: int) -> None:
        driver, cache, states = self._driver, self._scheduler.cache, self._scheduler.states
        pages, slots = list[int](), list[int]()
        shared = _same(texts, min(firsts)) // self._executor.page_size if len(texts) > 1 else 0  # pages
        text_pages = [self._pages(len(tokens)) - shared for tokens in texts]

        def begin() -> None:
            reserved = cache.reserve(shared + sum(text_pages))
            state = None if states is None or reserved is None else states.hold()
            if reserved is None or (states is not None and state is None):
                cache.release(reserved or [])
                raise RequestError("no room in the KV cache: wait for the running requests to end")
            pages.extend(reserved)
            slots.extend([] if state is None else [state])
            driver.open_commands += 1

        def end() -> None:
            if pages:
                cache.release(pages)
                driver.open_commands -= 1
            for slot in slots:
                assert states is not None
                states.give_back(slot)

        try:
            self.call(begin)
            rest = iter(pages[shared:])
            table = np.full((len(texts), shared + max(text_pages)), -1, np.int32)
            table[:, :shared] = pages[:shared]
            for row, count in enumerate(text_pages):
                table[row, shared : shared + count] = list(islice(rest, count))
            state_slots = np.asarray(slots or [0], np.int32)
            for rows, positions, wanted in self._parts(texts, firsts, shared * self._executor.page_size, step):
                wanted_rows, row_of = np.unique(rows, return_inverse=True)
                batch = Batch(
                    np.asarray([texts[row][at] for row, at in zip(rows, positions, strict=True)], np.int32),
                    positions,
                    row_of.astype(np.int32),
                    table[wanted_rows],
                    np.arange(len(rows) if wanted else 0, dtype=np.int32),
                    *(() if states is None else (state_slots, state_slots)),
                )
                self.call(partial(self._score, batch, rows, use))
        finally:
            driver.tell(end)  # after what an interrupt left under way

    def _parts(
        self, texts: Sequence[Sequence[int]], firsts: Sequence[int], shared: int, step: int
    ) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int32], bool]]:
        """(text, position) of the tokens of each call, int32 [T], and whether their logits are wanted.

        shared: tokens of the first text that are computed for all.
        """
        limit = self._executor.max_tokens
        before = [(row, shared, first) for row, first in enumerate(firsts)]
        after = [(row, first, len(texts[row])) for row, first in enumerate(firsts)]
        calls = ([(0, 0, shared)], limit, False), (before, limit, False), (after, min(step, SCORE_ROWS, limit), True)
        for ranges, size, wanted in calls:
            rows = np.concatenate([np.full(end - start, row, np.int32) for row, start, end in ranges])
            positions = np.concatenate([np.arange(start, end, dtype=np.int32) for _, start, end in ranges])
            for at in range(0, len(rows), size):
                yield rows[at : at + size], positions[at : at + size], wanted

    def _score(self, batch: Batch, texts: NDArray[np.int32], use: UseLogits) -> None:
        """texts: of each token, int32 [T]."""
        self._driver.check()
        try:
            logits = self._driver.compute(batch)
        except StoppedError:
            raise RequestError(CLOSED) from None
        if len(logits):
            cuts = [0, *(np.flatnonzero(np.diff(texts)) + 1).tolist(), len(texts)]
            for start, end in pairwise(cuts):
                use(int(texts[start]), int(batch.positions[start]), logits[start:end])

    def close(self) -> None:
        """End running requests and close the executor. May be called twice."""
        self._driver.close()
        self._grammars.close()

    def _check_fits(self, tokens: Sequence[int]) -> None:
        if len(tokens) > self.context:
            raise RequestError(f"{len(tokens)} tokens do not fit the context of {self.context} tokens")

    def _check_prompt(self, prompt: Sequence[int]) -> None:
        self._driver.check()
        if not prompt:
            raise RequestError("the prompt is empty: it needs at least one token")
        if min(prompt) < 0 or max(prompt) >= self._executor.vocab_size:
            wrong = next(token for token in prompt if not 0 <= token < self._executor.vocab_size)
            raise RequestError(f"the prompt holds token {wrong}, but the model has {self._executor.vocab_size} tokens")


def _same(texts: Sequence[Sequence[int]], most: int) -> int:
    """Number of tokens that all texts begin with, at most `most`."""
    return next((at for at in range(most) if len({tokens[at] for tokens in texts}) > 1), most)


def _numbered(use: UseLogits, first: int, text: int, at: int, logits: NDArray[np.float32]) -> None:
    use(first + text, at, logits)


def _terms(salt: bytes, timeout: float | None, queue_timeout: float | None) -> Terms:
    """The terms of a request, checked: RequestError for an invalid one."""
    if not isinstance(salt, bytes):
        raise RequestError(f"salt must be bytes, not {salt!r}")
    return Terms(salt, _seconds("timeout", timeout), _seconds("queue_timeout", queue_timeout))


def _seconds(name: str, value: float | None) -> float | None:
    """A timeout; RequestError if it is none."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise RequestError(f"{name} must be a number of seconds above 0 or None, not {value!r}")
    return float(min(value, LONGEST))
