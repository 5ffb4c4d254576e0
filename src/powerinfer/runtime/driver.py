"""The engine's thread: it computes the steps of all requests, and everything else that must not happen during a step.

Other threads put commands into one queue, which the thread reads between steps; it sleeps when there is nothing to do.
What a step brings is delivered just before the next one is computed, or once a GPU computes it: those who wait for it
then run while the native module, or the wait for the GPU, is without the interpreter lock, and each is woken once a
step at most.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import Enum, auto
from functools import partial
from heapq import heapify, heappop, heappush
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from powerinfer.devices import Batch, Executor
from powerinfer.devices.batch import LogitsNeed, StoppedError
from powerinfer.errors import (
    CLOSED,
    ChangedError,
    EngineError,
    PowerInferError,
    QueueFullError,
    RequestError,
    RequestTimeoutError,
)
from powerinfer.runtime.request import AnswerRequest, Request, StreamEvent
from powerinfer.runtime.sampling import token_logprob
from powerinfer.runtime.scheduler import Scheduler
from powerinfer.runtime.speculation import NO_DRAFTS, Speculation, SpeculationStats

if TYPE_CHECKING:
    from numpy.typing import NDArray

FORKED = "the process was forked after this model was loaded: load it in the new process"


@dataclass(frozen=True)
class EngineStats:
    """Counts of an engine since it was loaded, and what it is doing."""

    running: int  # requests
    waiting: int  # requests, those that were put back to free pages included
    prompt_tokens: int  # of requests that were started, cached ones included
    cached_tokens: int  # prompt tokens taken from the prefix cache
    answer_tokens: int
    pages: int  # of the KV cache
    used_pages: int  # by requests
    reusable_pages: int  # by no request, with a prefix that one may find
    steps: int
    step_s: float  # seconds in these steps
    preemptions: int  # requests put back to free pages
    aborted: int
    rejected: int  # because the queue was full
    timed_out: int
    disk_bytes: int  # of weights that were read from disk, to the end of the last step
    disk_wanted: int  # neurons and experts on disk that steps used
    disk_hits: int  # of these, in RAM when the step began
    disk_stall_s: float  # seconds that steps waited for the disk
    speculation: SpeculationStats = NO_DRAFTS

    def numbers(self) -> dict[str, float]:
        """The counts by name, those of drafts too: `speculation.drafted`, `speculation.places.0`."""
        numbers = {name: value for name, value in asdict(self).items() if name != "speculation"}
        drafts = asdict(self.speculation)
        drafts |= {f"places.{place}": count for place, count in enumerate(drafts.pop("places"))}
        return numbers | {f"speculation.{name}": value for name, value in drafts.items()}


class _Step(NamedTuple):
    """The executor's present step. requests: whose step it is, none: another caller's; stop: of its batch,
    set when nobody needs its result."""

    requests: Sequence[Request]
    stop: NDArray[np.int32]

    @property
    def unwanted(self) -> bool:
        return bool(self.requests) and all(request.unwanted for request in self.requests)


class _Life(Enum):
    """Life of the executor; it only goes forward."""

    OPEN = auto()
    CLOSING = auto()  # at the end of the thread, or by the caller of `close`, whichever comes first
    CLOSED = auto()


class Driver:
    """Runs requests on an executor, in a thread of its own, which the first command starts.

    Other threads use `post`, `abort`, `stop`, `stats` and what is said to be theirs; the rest belongs to the thread.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        spell: Callable[[int], bytes],
        *,
        load_s: float,
        max_queue: int,
        speculation: Speculation | None = None,
    ) -> None:
        """spell: the bytes of a token, for logprobs; speculation: gives requests their drafts, None: they have none."""
        self.scheduler = scheduler
        self.live: dict[Request, None] = {}
        self.open_commands = 0  # commands under way that must not meet idle work
        self.idle_work: Callable[[], bool] | None = None
        self._executor = executor
        self._drop_successor: Callable[[], None] | None = getattr(executor, "drop_successor", None)
        self._overlaps = bool(getattr(executor, "overlaps", False))  # a device computes while events are delivered
        self._spell = spell
        self._load_s = load_s
        self._max_queue = max_queue
        self._speculation = speculation
        self._commands: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._outbox: list[tuple[Request, StreamEvent | None]] = []
        self._arrived: list[Request] = []  # since the last step
        self._deadlines: list[tuple[float, int, Request, bool]] = []  # a heap: time, number, request, of its start only
        self._numbered = 0
        self._idle_due = False
        self._gate = threading.Lock()  # of what follows
        self._thread: threading.Thread | None = None
        self._over: Callable[[], PowerInferError] | None = None  # set when it has ended: the error of later requests
        self._life = _Life.OPEN
        self._process = os.getpid()
        self._prompt_tokens = self._cached_tokens = self._answer_tokens = 0
        self._steps = self._aborted = self._rejected = self._timed_out = 0
        self._step_s = 0.0
        self._reads = executor.disk is not None
        self._disk = self._read()
        self._latest = _Step((), np.zeros(1, np.int32))  # step that was computed
        self._step_now: _Step | None = None
        self._stopping = False  # no step's result is needed any more
        self._logprob_scratch = np.empty(executor.vocab_size, np.float32)

    # ---------------------------------------------------------------- for other threads

    def check(self) -> None:
        """PowerInferError if no request can be answered any more."""
        if os.getpid() != self._process:
            raise RequestError(FORKED)
        if self._over is not None:
            raise self._over()

    def post(self, command: Callable[[], object]) -> None:
        """Run a command between two steps, in the order of posting. PowerInferError if the thread has ended."""
        self.check()  # before the lock, which a forked process may have inherited locked
        with self._gate:
            self.check()
            if self._thread is None:
                self._start()
            self._commands.put(command)

    def tell(self, command: Callable[[], object]) -> None:
        """The same for what need not happen if the thread has ended. May be called anywhere, as from a finaliser."""
        self._commands.put(command)

    def abort(self, requests: Iterable[Request]) -> None:
        """End those of the requests that still run, within a step. May be called anywhere."""
        running = [request for request in requests if not request.ended]
        if running:
            self.tell(lambda: self._abort(running))
            for request in running:
                request.unwanted = True
            if (step := self._step_now) is not None and step.unwanted:
                step.stop[0] = 1

    @property
    def is_current_thread(self) -> bool:
        """Whether this is the engine's thread."""
        return self._thread is threading.current_thread()

    @property
    def closing(self) -> bool:
        """Whether `close` was called."""
        return self._life is not _Life.OPEN

    @property
    def ended(self) -> bool:
        """Whether there is no thread that runs commands, nor will be."""
        return self._over is not None or os.getpid() != self._process

    def stop(self) -> None:
        """End the thread within a step, and its requests as aborted. May be called anywhere."""
        if not self.ended:  # a command that nobody takes any more would keep this object in a cycle
            self.tell(lambda: self._end(_closed))
            self._stopping = True
            if (step := self._step_now) is not None:
                step.stop[0] = 1

    def close(self) -> None:
        """End the requests as aborted and close the executor; wait for it. May be called twice."""
        if os.getpid() != self._process:
            return
        with self._gate:
            if not self.closing:
                self._life = _Life.CLOSING
            if self._thread is None:
                self._over = self._over or _closed
        self.stop()
        if not self.is_current_thread:
            self.join()
            self._close_executor()

    def join(self) -> None:
        """Wait for the end of the thread."""
        if self._thread is not None and os.getpid() == self._process:
            self._thread.join()

    def stats(self) -> EngineStats:
        scheduler, cache = self.scheduler, self.scheduler.cache
        running, disk = len(scheduler.running), self._disk
        return EngineStats(
            running=running,
            waiting=max(0, len(self.live) - running),
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            answer_tokens=self._answer_tokens,
            pages=cache.n_pages,
            used_pages=cache.n_pages - cache.available,
            reusable_pages=cache.reusable,
            steps=self._steps,
            step_s=self._step_s,
            preemptions=scheduler.preemptions,
            aborted=self._aborted,
            rejected=self._rejected,
            timed_out=self._timed_out,
            disk_bytes=int(disk.get("bytes", 0)),
            disk_wanted=int(disk.get("wanted", 0)),
            disk_hits=int(disk.get("hits", 0)),
            disk_stall_s=disk.get("waited", 0.0),
            speculation=NO_DRAFTS if self._speculation is None else self._speculation.stats(),
        )

    def _start(self) -> None:
        """Start the thread; with the gate."""
        thread = self._thread = threading.Thread(target=self._main, name="powerinfer", daemon=True)
        try:
            thread.start()
        except BaseException as error:  # an interrupt may leave it started: it sees then that it is not the one
            self._thread = None
            if isinstance(error, RuntimeError):
                raise PowerInferError(f"the engine's thread cannot be started: {error}") from error
            raise
        _running.add(self)

    # ---------------------------------------------------------------- the thread

    def _main(self) -> None:
        with self._gate:
            if not self.is_current_thread:
                return
        try:
            busy = False
            while self._over is None:
                self._obey(wait=not busy)
                busy = self._over is None and (self._step() or self._work_idly())
        except BaseException as error:  # a bug, or a device that fails in an unexpected way: nothing is certain now
            self._break(error)
        with suppress(Exception):
            self._rest()
        while not self._commands.empty():  # nothing is posted any more
            with suppress(BaseException):
                self._commands.get()()
        self._deliver()
        _running.discard(self)
        if self.closing:
            self._close_executor()

    def _obey(self, wait: bool) -> None:
        """Run the commands that are there; wait for one, or for the next deadline, if there is nothing else to do."""
        if not wait and self._commands.empty() and not self._deadlines:
            return
        if wait or not self._commands.empty():
            self._deliver()
        with suppress(Empty):
            if wait:
                self._commands.get(timeout=self._patience())()
            while True:
                self._commands.get_nowait()()
        if self._deadlines:
            self._expire()

    def _patience(self) -> float | None:
        """Seconds until the next deadline; None if there is none."""
        return max(0.0, self._deadlines[0][0] - time.perf_counter()) if self._deadlines else None

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if self._over is not None:
                self._fail(request, self._over())
                continue
            self.live[request] = None
            self.scheduler.submit(request)
            self._arrived.append(request)
            for seconds, start_only in ((request.timeout, False), (request.queue_timeout, True)):
                if seconds is not None:
                    self._numbered += 1
                    at = request.submit_time + seconds
                    heappush(self._deadlines, (at, self._numbered, request, start_only))
        if len(self._deadlines) > 4 * len(self.live) + 64:  # mostly of requests that have ended
            self._deadlines = [one for one in self._deadlines if one[2] in self.live]
            heapify(self._deadlines)

    def _expire(self) -> None:
        """Fail the requests whose time is over."""
        now = time.perf_counter()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, request, start_only = heappop(self._deadlines)
            if request not in self.live or (start_only and request.start_time is not None):
                continue
            self._timed_out += 1
            seconds = request.queue_timeout if start_only else request.timeout
            verb = "waited" if start_only else "took"
            self._fail(request, RequestTimeoutError(f"the request {verb} longer than {seconds:g} s"))
        if not self.live:
            self._deadlines.clear()

    def _refuse_excess(self) -> None:
        """Fail the newest of the requests that have to wait although the queue is full."""
        while self._arrived:
            request = self._arrived.pop()
            waits = request in self.live and request.start_time is None  # it may have been aborted meanwhile
            if waits and self._max_queue and len(self.scheduler.waiting) > self._max_queue:
                self._rejected += 1
                self._fail(request, QueueFullError(f"{self._max_queue} requests are waiting already: try again later"))

    def _step(self) -> bool:
        """Compute a step; whether there was one to compute."""
        entered = begin = time.perf_counter()
        batch = self.scheduler.follow()
        if batch is None:
            if self._speculation is not None:
                self._speculation.draft(self.scheduler.running)
                begin = time.perf_counter()
            batch = self._plan()
        if self._arrived:
            self._refuse_excess()
        if batch is None or not self._overlaps:
            self._deliver()
        if batch is None:
            assert self.open_commands or not self.live, "a checked request can always be started"
            self._rest()
            return False
        batch.meanwhile = self._deliver if self._overlaps else None
        planned = self.scheduler.planned
        result = self._rows(partial(self._verified, batch, planned), planned)
        if result is None:
            self.scheduler.forget_successor()
        else:
            row, answered = 0, self._answer_tokens
            for request in self.scheduler.commit():
                row += self._accept(request, batch, result[row:], row)
            parts = self.scheduler.settle()
            if batch.needs == LogitsNeed.LOGITS:
                self._embed()
            if self._speculation is not None:
                self._speculation.observe(parts)  # behind which the step's hidden states are gone
            if self._speculation is not None and len(batch.tokens) == len(batch.logit_rows):  # of no prompt
                brought, seconds = self._answer_tokens - answered, time.perf_counter() - begin
                self._speculation.computed(len(batch.tokens), len(planned), brought, seconds)
        if self._reads:
            self._disk = self._read()
        self._steps += 1
        self._step_s += time.perf_counter() - entered
        return True

    def _verified(self, batch: Batch, requests: Sequence[Request]) -> NDArray[Any]:
        """`compute`, while what follows the requests' drafts may be drafted."""
        if self._speculation is None:
            return self.compute(batch, requests)
        with self._speculation.drafting_ahead(requests):
            return self.compute(batch, requests)
    def _plan(self) -> Batch | None:
        """A step that does not follow from the one before."""
        batch = self.scheduler.plan()
        if self._speculation is not None:
            for request in self.scheduler.put_back:
                self._speculation.forget(request)
        for request in self.scheduler.started:
            self._prompt_tokens += request.n_prompt
            self._cached_tokens += request.cached
        if batch is not None:
            batch.needs = max(map(_needs, self.scheduler.planned), default=LogitsNeed.LOGITS)
        return batch

    def _successor(self) -> Batch | None:
        """The step behind the one that is computed, for an executor that launches it now; None: it is not known."""
        return None if self._stopping or not self._commands.empty() else self.scheduler.plan_successor()

    def _rest(self) -> None:
        """There is no step to compute: nothing is kept of the last one, and nothing waits for the CPU."""
        self._latest = _Step((), self._latest.stop)
        if self._drop_successor is not None:
            with suppress(PowerInferError):  # nobody asked for it
                self._drop_successor()

    def compute(self, batch: Batch, requests: Sequence[Request] = ()) -> NDArray[Any]:
        """The executor's result for a batch; StoppedError if before it is there the model is closed, or all of
        `requests`, if there are any, are aborted."""
        step = self._latest
        if step.requests is not requests or step.stop[0]:  # who stops a step late must mean these requests
            step = self._latest = _Step(requests, np.zeros(1, np.int32))
        batch.stop = step.stop
        drafts = self._speculation is not None and not self._speculation.failed
        steady = batch.needs != LogitsNeed.LOGITS and not drafts
        batch.successor = self._successor if steady else None
        self._step_now = step
        try:
            if self._stopping or (requests and requests[0].unwanted and step.unwanted):  # before it was seen here
                raise StoppedError
            return self._executor.forward(batch)
        finally:
            self._step_now = batch.successor = None

    def _read(self) -> dict[str, float]:
        """Counts of reads from disk, which cannot be asked during a step."""
        disk = self._executor.disk
        return {} if disk is None else disk.totals()

    def _rows(self, compute: Callable[[], NDArray[Any]], requests: Iterable[Request]) -> NDArray[Any] | None:
        """The result of the executor; None if it was stopped, or failed, and with it the requests."""
        try:
            return compute()
        except StoppedError:  # the command that ends the requests is there
            return None
        except MemoryError:
            failure = PowerInferError("out of memory; a smaller context or model needs less")
        except PowerInferError as error:
            failure = error
        for request in requests:
            self._fail(request, failure)
        if isinstance(failure, ChangedError):
            self._end(lambda: EngineError(str(failure)))
        return None

    def _embed(self) -> None:
        """Add what the step computed of embeddings, and end those that are complete."""
        parts = self.scheduler.embedded
        if not parts:
            return
        rows = np.concatenate([np.arange(first, first + count, dtype=np.int32) for _, first, count in parts])
        states = self._rows(lambda: self._executor.hidden_states(rows), [request for request, _, _ in parts])
        if states is None:
            return
        ends = np.cumsum([count for _, _, count in parts])
        for (request, _, count), end in zip(parts, ends.tolist(), strict=True):
            try:
                request.add(states[end - count : end])
            except PowerInferError as error:
                self._fail(request, error)
            else:
                if request.ended:
                    self._leave(request, None)

    def _accept(self, request: AnswerRequest, batch: Batch, rows: NDArray[Any], first: int) -> int:
        """Sample what follows a request's tokens, and its drafts while they are what was sampled; the number of rows
        that it has. rows: of the executor's result, from its first one on, which is row `first` of the batch."""
        drafts, place = request.drafts, 0
        guessing = None if self._speculation is None else self._speculation.guessing(request)  # it may end with them
        request.drafted += len(drafts)
        try:
            self._sample(request, batch, rows[0], first)
            while place < len(drafts) and not request.ended and request.tokens[-1] == drafts[place]:
                place += 1
                request.accepted += 1
                self.scheduler.accept(request)
                self._sample(request, batch, rows[place], first + place)
        except PowerInferError as error:  # this request failed: the others continue
            self._fail(request, error)
        if self._speculation is not None and guessing is not None and drafts:
            self._speculation.verified(guessing, len(drafts), place)
        return 1 + len(drafts)

    def _sample(self, request: AnswerRequest, batch: Batch, logits: NDArray[Any], row: int) -> None:
        """Sample the next token of a request, and end the request if it was the last. logits: of that row of the batch,
        or what an executor returns in their place."""
        sampler = request.sampler
        if logits.ndim:
            token = sampler.sample(logits)
        elif logits.dtype.names is None:
            token = sampler.take(int(logits))
        else:
            drawn = sampler.draw(logits)
            if drawn is None:
                assert batch.logits is not None
                drawn = sampler.sample(batch.logits()[row])
            token = drawn
        count = request.params.logprobs
        logprobs = None
        if count is not None:
            logprobs = token_logprob(logits, token, count, self._spell, self._logprob_scratch)
            request.logprobs.append(logprobs)
        request.last_token_time = time.perf_counter()
        if request.first_token_time is None:
            request.first_token_time = request.last_token_time
        request.tokens.append(token)
        self._answer_tokens += 1
        ends = sampler.ends_with(token)
        text, reason = "", None
        if token in request.stop_ids:
            text, reason = request.text.flush(), "stop"
        else:
            text = request.text.push(token)
            if request.text.stopped:
                reason = "stop"
            elif ends or len(request.tokens) - request.n_prompt >= request.max_new:
                text += request.text.flush()
                reason = "stop" if ends or request.text.stopped else "length"
        request.pieces.append(text)
        if reason is not None:
            self._complete(request, reason, StreamEvent(text, token, logprobs, cached_tokens=request.cached))
        elif request.all_tokens:
            self._outbox.append((request, StreamEvent(text, token, logprobs, cached_tokens=request.cached)))

    def _complete(self, request: AnswerRequest, reason: str, event: StreamEvent) -> None:
        completion = request.complete(reason, self._load_s)
        self._leave(request, event._replace(finish_reason=reason, completion=completion))

    def _fail(self, request: Request, error: PowerInferError) -> None:
        request.error = error
        self._leave(request, None)

    def _leave(self, request: Request, last: StreamEvent | None) -> None:
        self._outbox.append((request, last))
        if request in self.live:
            self.scheduler.finish(request)
            if self._speculation is not None:
                self._speculation.forget(request)
            del self.live[request]
            self._idle_due = not self.live

    def _abort(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if request in self.live:
                self._aborted += 1
                if isinstance(request, AnswerRequest):
                    text = request.text.flush()
                    request.pieces.append(text)
                    self._complete(request, "abort", StreamEvent(text, None, cached_tokens=request.cached))
                else:
                    self._fail(request, _closed() if self._over is None else self._over())

    def _deliver(self) -> None:
        """Tell those who wait for requests what happened."""
        outbox, self._outbox = self._outbox, []
        for request, event in outbox:
            if request.deliver is None:
                continue
            try:
                request.deliver(event)
            except Exception:  # whoever asked is gone
                request.deliver = None
                self.abort([request])  # later: a step may be planned with it

    def _work_idly(self) -> bool:
        """Do a piece of idle work, if it is due; whether it was. A PowerInferError ends it for good."""
        if not self._idle_due or self.idle_work is None or self.live or self.open_commands:
            return False
        self._deliver()
        try:
            self._idle_due = self.idle_work()
        except PowerInferError:
            self.idle_work = None
        return True

    def _close_executor(self) -> None:
        with self._gate:
            before, self._life = self._life, _Life.CLOSED
        if before is not _Life.CLOSED:
            if self._speculation is not None:
                self._speculation.close()
            self._executor.close()

    def _end(self, over: Callable[[], PowerInferError]) -> None:
        with self._gate:
            self._over = self._over or over
        self._abort(list(self.live))

    def _break(self, error: BaseException) -> None:
        """Fail everything: the state of the engine is unknown."""
        message = f"the engine stopped after an internal error, {type(error).__name__}: {error}; load the model again"

        def broken() -> PowerInferError:
            failure = EngineError(message)
            failure.__cause__ = error
            return failure

        with self._gate:
            self._over = broken
        while self.live:
            request, _ = self.live.popitem()
            if not request.ended:
                request.error = broken()
                self._outbox.append((request, None))


def _needs(request: Request) -> LogitsNeed:
    """Need of a request for its rows of logits."""
    if not isinstance(request, AnswerRequest) or request.params.logprobs is not None:
        return LogitsNeed.LOGITS
    return request.sampler.needs


def _closed() -> PowerInferError:
    return RequestError(CLOSED)


_running: set[Driver] = set()  # those whose threads run


def _stop_all() -> None:
    """Stop all at the interpreter's exit: no thread may return from the native module to one that is gone."""
    drivers = list(_running)
    for driver in drivers:
        driver.stop()
    for driver in drivers:
        driver.join()


atexit.register(_stop_all)
