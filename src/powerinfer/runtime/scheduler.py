"""Choice of the tokens of the next forward call: continuous batching over a paged cache.

Every step takes one token of each decoding request and fills the rest of the call with chunks of prompts, in equal
shares, so requests can join and leave at any step. While requests decode the chunks are smaller, so that the time
between their tokens stays short. A request is admitted if there are pages for all its tokens: in order, and clients
(salts) in turn. If a growing request finds no page, the youngest one is preempted: it is recomputed later, before
those that wait. Since a token's result does not depend on batch or chunk, this affects only the time.

A decoding request may have drafts, tokens that are guessed to follow its own: the step takes these too, and gives
logits for each. Those that turn out right are `accepted`; what the others left in pages is written again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from powerinfer.devices import Batch
from powerinfer.devices.batch import LogitsNeed
from powerinfer.kernels.candidates import DRAW_NUMBERS
from powerinfer.runtime.kv_cache import PageCache, first_parent, page_key
from powerinfer.runtime.request import AnswerRequest, EmbeddingRequest, Request
from powerinfer.runtime.state_cache import StateCache

if TYPE_CHECKING:
    from numpy.typing import NDArray


class WaitingRequests:
    """Requests that were never started: in order within a salt, salts in turn."""

    def __init__(self) -> None:
        self._of: dict[bytes, deque[Request]] = {}  # by salt, in the order of their turns
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, request: Request) -> None:
        self._of.setdefault(request.salt, deque()).append(request)
        self._count += 1

    def first(self) -> list[Request]:
        """The first request of each salt, in the order of their turns."""
        return [queue[0] for queue in self._of.values()]

    def start(self, request: Request) -> None:
        """Remove the first request of a salt, whose turn it was."""
        queue = self._of.pop(request.salt)
        queue.popleft()
        self._count -= 1
        if queue:
            self._of[request.salt] = queue

    def remove(self, request: Request) -> None:
        queue = self._of[request.salt]
        queue.remove(request)
        self._count -= 1
        if not queue:
            del self._of[request.salt]


class StepLimits(NamedTuple):
    """Limits of a step: tokens and sequences; prompt tokens where requests decode (mixed_chunk), and where none do."""

    max_tokens: int
    max_batch: int
    prefill_chunk: int
    mixed_chunk: int


class Scheduler:
    """Queue, running requests and their pages. One step is `plan`, the forward call, then `commit`.

    `plan` can be repeated: nothing counts as computed before `commit`. Where a step is launched before the tokens of
    the one before are known, it is planned by `plan_successor`, and `follow` says whether it is the next one.
    """

    def __init__(
        self,
        *,
        n_pages: int,
        page_size: int,
        context: int,
        limits: StepLimits,
        prefix_cache: bool = True,
        n_states: int = 0,
        drafts: bool = False,
    ) -> None:
        """n_states: slots for states, 0: sequences have none; drafts: requests may have some."""
        self.cache = PageCache(n_pages, reuse=prefix_cache)
        self._drafts = drafts
        self.states = StateCache(n_states, page_size, prefix_cache, drafts) if n_states else None
        self.page_size = page_size
        self.waiting = WaitingRequests()
        self.preempted: deque[Request] = deque()  # to be started before those that wait
        self.running: list[Request] = []  # oldest first
        self.started: list[Request] = []  # for the first time, by the last plan
        self.put_back: list[Request] = []  # by the last plan: they wait to be computed again
        self.preemptions = 0
        self._max_tokens = max_tokens = limits.max_tokens
        self._prefill_chunk = min(limits.prefill_chunk, max_tokens)
        self._mixed_chunk = min(limits.mixed_chunk, self._prefill_chunk)
        # every running request gets at least one token a step
        max_batch = min(limits.max_batch, max_tokens)
        self._rows = list(range(max_batch))
        heapify(self._rows)
        self.planned: list[Request] = []  # the requests of the planned step; another list for other requests
        self._work: list[tuple[Request, int]] = []  # the same with their numbers of tokens
        self._begun: list[int] = []  # tokens of each of these that were computed before
        self._pending: dict[bytes, Request] = {}  # pages being computed, by key
        self._tokens = np.zeros(max_tokens, np.int32)
        self._positions = np.zeros(max_tokens, np.int32)
        self._successors = np.zeros((2, 2, max_batch), np.int32)  # tokens and positions of successors, in turn
        self._draws = np.zeros((max_batch, DRAW_NUMBERS))  # of a successor's tokens
        self._successor: Batch | None = None  # of the planned step
        self._row_of = np.zeros(max_tokens, np.int32)
        self._logit_rows = np.zeros(max_tokens, np.int32)
        self._inverse_temperatures = np.ones(max_tokens, np.float32)
        self._page_table = np.full((max_batch, -(-context // page_size)), -1, np.int32)
        self._read_states, self._states, self._replayed, self._undo_states = np.zeros((4, max_batch), np.int32)
        self._batch = Batch(self._tokens[:0], self._positions[:0], self._row_of[:0], self._page_table[:0],
                            self._logit_rows[:0], *self._slots_of(0),
                            inverse_temperatures=self._inverse_temperatures[:0])  # fmt: skip
        self._planned = self._batch  # it, or a successor

    def submit(self, request: Request) -> None:
        """Queue a request. All its tokens, including those to generate, must fit the context and the cache."""
        self.waiting.add(request)
        if self._rows:
            self._successor = None

    def plan(self) -> Batch | None:
        """The next step, or None if there is nothing to do. The next plan reuses the arrays."""
        self.started.clear()
        self.put_back.clear()
        self._successor = None
        self._admit()
        for request in self.running[:]:
            if len(request.tokens) > len(request.pages) * self.page_size and request.row >= 0:
                self._grow(request)
        if not self.running:
            return None
        for request in self.running:
            if request.drafts:
                self._limit_drafts(request)
        self._choose()
        return self._fill()

    def plan_successor(self) -> Batch | None:
        """The step behind the planned one, where that gives each of its requests a token, with which none of them must
        end, and none can start; its tokens are not there yet. None where that is not so, where requests have states, or
        a page is lacking, or where candidates often do not suffice for a token."""
        batch = self._planned
        if self.states is not None or len(batch.tokens) != len(batch.logit_rows):
            return None
        if len(self._work) != len(self.running):  # a prompt had no room
            return None
        if self._rows and (self.preempted or len(self.waiting)):
            return None
        sampled = batch.needs == LogitsNeed.CANDIDATES
        for request, count in self._work:
            length = len(request.tokens) + 1
            if count > 1 or not isinstance(request, AnswerRequest) or length >= request.n_prompt + request.max_new:
                return None
            if sampled and not request.sampler.steady:
                return None
            if length > len(request.pages) * self.page_size:
                page = self.cache.allocate()
                if page is None:
                    return None
                self._add_page(request, page)
        self._successors = self._successors[::-1]
        tokens, positions = self._successors[0, :, : len(batch.tokens)]
        tokens[:] = -1  # until they are there
        np.add(batch.positions, 1, out=positions)
        self._successor = Batch(tokens, positions, batch.rows, batch.page_table, batch.logit_rows, needs=batch.needs)
        if sampled:
            self._successor.inverse_temperatures = batch.inverse_temperatures
            draws = self._successor.draws = self._draws[: len(batch.tokens)]
            for row, (request, _) in enumerate(self._work):
                assert isinstance(request, AnswerRequest)
                draws[row] = request.sampler.next_draw()
        return self._successor

    def follow(self) -> Batch | None:
        """The successor of the planned step, which is planned now; its tokens are those that its requests got. None:
        there was none, or it was not launched, or it would not be the next step any more."""
        batch, self._successor = self._successor, None
        if batch is not None and batch.tokens.min() < 0:
            return None
        if batch is not None:
            self._planned = batch
            self.started.clear()
            self.put_back.clear()
        return batch

    def forget_successor(self) -> None:
        """The planned step was not computed, so that what follows is not known."""
        self._successor = None

    @property
    def embedded(self) -> list[tuple[EmbeddingRequest, int, int]]:
        """The embeddings of the planned step, each with its first token in the batch and their number."""
        texts, at = [], 0
        for request, count in self._work:
            if isinstance(request, EmbeddingRequest):
                texts.append((request, at, count))
            at += count
        return texts

    def commit(self) -> list[AnswerRequest]:
        """The planned step was computed. Returns the requests that have logits, in the order of their rows: of each
        that of its last token, then those of its drafts, none of which counts as computed yet."""
        ready = []
        self._begun = [request.computed for request, _ in self._work]
        for request, count in self._work:
            self._advance(request, count - len(request.drafts))
            if isinstance(request, AnswerRequest) and request.computed == len(request.tokens):
                ready.append(request)
        return ready

    def accept(self, request: AnswerRequest) -> None:
        """A draft of the planned step is the request's last token, so that this was computed."""
        self._advance(request, 1)

    def _advance(self, request: Request, count: int) -> None:
        request.computed += count
        full = request.computed // self.page_size
        if isinstance(request, AnswerRequest) and full > request.published and self.cache.reuse:
            self._publish(request)

    def settle(self) -> list[tuple[Request, int, int]]:
        """No more of the planned step will be accepted. Returns its requests that still run, each with its first token
        in the batch and the number of tokens that are right."""
        parts, at = [], 0
        for (request, count), begun in zip(self._work, self._begun, strict=True):
            if request.row >= 0:
                right = request.computed - begun
                if self.states is not None:
                    self.states.commit(request, begun, right < count or len(request.drafts) > 0, right < count)
                parts.append((request, at, right))
                request.drafts = ()
            at += count
        return parts

    def finish(self, request: Request) -> None:
        """Remove a request and free its pages. Full pages stay in the prefix cache."""
        if request.row >= 0:
            self._stop_running(request)
        elif request in self.preempted:
            self.preempted.remove(request)
        else:
            self.waiting.remove(request)
        if not self.running:  # nothing is kept of the last one, such as its compiled grammar
            self._work.clear()
            self._begun.clear()
            self.planned = []
            self.started.clear()
            self.put_back.clear()

    def _admit(self) -> None:
        """Start requests while there are rows and pages, those that were preempted first."""
        while self._rows and (request := self._next()) is not None:
            row = request.row = heappop(self._rows)
            self._page_table[row, : len(request.pages)] = request.pages
            self.running.append(request)
            if request.start_time is None:
                request.start_time = time.perf_counter()
                request.cached = request.computed
                self.started.append(request)

    def _next(self) -> Request | None:
        """The next request to start, which has its pages now; None if none can be started.

        One that lacks pages is not overtaken, as it might be for ever.
        """
        if self.preempted:
            if self._awaits_prefix(self.preempted[0]) or not self._take_pages(self.preempted[0]):
                return None
            return self.preempted.popleft()
        if not self.waiting:
            return None
        for request in self.waiting.first():
            if not self._awaits_prefix(request):
                if not self._take_pages(request):
                    return None
                self.waiting.start(request)
                return request
        return None

    def _prefix(self, request: Request) -> Sequence[bytes]:
        """The keys of the pages that a request need not compute, if they are known."""
        # the last token is always computed: its logits are needed
        return request.keys[: (len(request.tokens) - 1) // self.page_size]

    def _awaits_prefix(self, request: Request) -> bool:
        """Whether a running request is computing the next page of its prefix, for both, and keeps its state."""
        keys = self._prefix(request)
        cached = self._cached_prefix(keys)
        if self.states is not None:
            return self.states.awaits(keys, cached, self._pending)
        return cached < len(keys) and keys[cached] in self._pending

    def _cached_prefix(self, keys: Sequence[bytes]) -> int:
        """Number of these pages of a prompt that are in the cache, from the first on."""
        return next((n for n, key in enumerate(keys) if self.cache.find(key) is None), len(keys))

    def _take_pages(self, request: Request) -> bool:
        """Allocate the pages of all of a request's tokens, those of a known prefix from the cache."""
        cache = self.cache
        needed = -(-len(request.tokens) // self.page_size)
        keys = self._prefix(request)
        cached = self._cached_prefix(keys)
        reused = cached if self.states is None else self.states.longest(keys[:cached])
        pages = [page for key in keys[:reused] if (page := cache.find(key)) is not None]
        for page in pages:
            cache.take(page)
        # leave each running request a page to grow into
        new = cache.reserve(needed - reused) if cache.available >= needed - reused + len(self.running) else None
        if new is None:
            cache.release(pages)
            return False
        request.computed = reused * self.page_size
        if self.states is not None and not self.states.start(request, reused, cached):
            cache.release(pages + new)
            request.computed = 0
            return False
        request.pages = pages + new
        request.published = reused
        for key in request.keys[reused:]:
            self._pending.setdefault(key, request)
        return True

    def _grow(self, request: Request) -> None:
        """One more page for a running request, if necessary by preempting the youngest one."""
        page = self.cache.allocate()
        while page is None:
            youngest = self.running[-1]
            self._stop_running(youngest)
            self.preempted.appendleft(youngest)
            self.put_back.append(youngest)
            self.preemptions += 1
            if youngest is request:
                return
            page = self.cache.allocate()
        self._add_page(request, page)

    def _add_page(self, request: Request, page: int) -> None:
        self._page_table[request.row, len(request.pages)] = page
        request.pages.append(page)

    def _limit_drafts(self, request: Request) -> None:
        """Keep those of a request's drafts for which there are pages, without putting another request back."""
        if self.states is not None:
            request.drafts = request.drafts[: self.states.draft_room(request)]
        room = len(request.pages) * self.page_size - len(request.tokens)
        while len(request.drafts) > room and (page := self.cache.allocate()) is not None:
            self._add_page(request, page)
            room += self.page_size
        request.drafts = request.drafts[:room]

    def _stop_running(self, request: Request) -> None:
        self._successor = None
        self.running.remove(request)
        for key in request.keys[request.published :]:
            if self._pending.get(key) is request:
                del self._pending[key]
        self.cache.release(request.pages)
        if self.states is not None:
            self.states.stop(request)
        request.pages = []
        request.computed = 0
        request.drafts = ()
        self._page_table[request.row] = -1
        heappush(self._rows, request.row)
        request.row = -1

    def _choose(self) -> None:
        """Choose one token of each decoding request, then shares of the prompts, up to the size of a call."""
        work = self._work
        work.clear()
        prompts, spare = [], self._max_tokens - len(self.running)
        decodes = all(request.computed + 1 == len(request.tokens) for request in self.running)
        for request in self.running:
            if request.computed + 1 == len(request.tokens):
                request.drafts = request.drafts[: spare if decodes else 0]  # prompts may have started since these
                spare -= len(request.drafts)
                work.append((request, 1 + len(request.drafts)))
            else:
                prompts.append(request)
        room = min(spare + len(prompts), self._mixed_chunk if work else self._prefill_chunk)
        prompts = prompts[:room]  # oldest first
        wanted = [len(request.tokens) - request.computed for request in prompts]
        if self.states is not None:
            wanted = list(map(self.states.limit, prompts))
        counts = shares(room, wanted)
        work.extend(zip(prompts, counts, strict=True))
        self.planned = [request for request, _ in work]

    def _fill(self) -> Batch:
        tokens, positions, row_of, logit_rows = self._tokens, self._positions, self._row_of, self._logit_rows
        at = n_logits = n_rows = 0
        for request, count in self._work:
            start = request.computed
            drafts = len(request.drafts)
            if count == 1:
                tokens[at] = request.tokens[start]
                positions[at] = start
                row_of[at] = request.row
            else:
                tokens[at : at + count - drafts] = request.tokens[start : start + count - drafts]
                tokens[at + count - drafts : at + count] = request.drafts
                positions[at : at + count] = np.arange(start, start + count)
                row_of[at : at + count] = request.row
            if self.states is not None:
                row = request.row
                self._read_states[row], self._states[row] = self.states.slots(request)
                self._replayed[row], self._undo_states[row] = request.replayed, request.read_state
            at += count
            n_rows = max(n_rows, request.row + 1)
            if start + count == len(request.tokens) + drafts and isinstance(request, AnswerRequest):
                rows = slice(n_logits, n_logits + 1 + drafts)
                logit_rows[rows] = np.arange(at - 1 - drafts, at)
                self._inverse_temperatures[rows] = request.sampler.inverse_temperature
                n_logits += 1 + drafts
        batch = self._batch
        if (len(batch.tokens), len(batch.logit_rows), len(batch.page_table)) != (at, n_logits, n_rows):
            batch = self._batch = Batch(
                tokens[:at], positions[:at], row_of[:at], self._page_table[:n_rows], logit_rows[:n_logits],
                *self._slots_of(n_rows), inverse_temperatures=self._inverse_temperatures[:n_logits],
            )  # fmt: skip
        batch.alone = len(self._work) == 1 and len(self._work[0][0].drafts) > 0
        self._planned = batch
        return batch

    def _slots_of(self, rows: int) -> tuple[NDArray[np.int32], ...]:
        """The slots of states of these rows, and what is replayed in them, as a batch has them."""
        numbers = (self._read_states, self._states, self._replayed, self._undo_states)
        return tuple(one[:rows] for one in numbers[: 4 if self._drafts else 2])

    def _publish(self, request: Request) -> None:
        self.extend_keys(request)
        full = request.computed // self.page_size
        for i in range(request.published, full):
            self.cache.publish(request.pages[i], request.keys[i])
            self._pending.pop(request.keys[i], None)
        request.published = full

    def extend_keys(self, request: Request) -> None:
        """Compute the keys of all pages that the request's tokens fill; before it is submitted, in any thread."""
        keys, size = request.keys, self.page_size
        for i in range(len(keys), len(request.tokens) // size if self.cache.reuse else 0):
            parent = keys[-1] if keys else first_parent(request.salt)
            keys.append(page_key(parent, request.tokens[i * size : (i + 1) * size]))


def shares(room: int, wanted: Sequence[int]) -> list[int]:
    """Equal shares of `room`, none larger than what is wanted; what one leaves, the others share."""
    result = [0] * len(wanted)
    for served, i in enumerate(sorted(range(len(wanted)), key=wanted.__getitem__)):
        result[i] = min(wanted[i], room // (len(wanted) - served))
        room -= result[i]
    return result
