"""Which tokens the next forward call computes: continuous batching over a paged cache.

Every step takes one token of each decoding request and fills the rest of the call with chunks of waiting prompts, so
requests can join and leave at any step. A request is admitted if there are pages for all its tokens. If a growing
request finds no page, the youngest one is preempted: it returns to the queue and is recomputed later. Since a token's
result does not depend on batch or chunk, this affects only the time.
"""

from __future__ import annotations

import time
from collections import deque
from heapq import heapify, heappop, heappush

import numpy as np

from powerinfer.devices import Batch
from powerinfer.runtime.kv_cache import PageCache, page_key
from powerinfer.runtime.request import Request


class Scheduler:
    """Queue, running requests and their pages. One step is `plan`, the forward call, then `commit`.

    `plan` can be repeated: nothing counts as computed before `commit`.
    """

    def __init__(
        self,
        *,
        n_pages: int,
        page_size: int,
        context: int,
        max_tokens: int,
        max_batch: int,
        prefill_chunk: int,
        prefix_cache: bool = True,
    ) -> None:
        self.cache = PageCache(n_pages, reuse=prefix_cache)
        self.page_size = page_size
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        self._max_tokens = max_tokens
        self._prefill_chunk = min(prefill_chunk, max_tokens)
        # every running request gets at least one token a step
        max_batch = min(max_batch, max_tokens)
        self._rows = list(range(max_batch))
        heapify(self._rows)
        self._work: list[tuple[Request, int]] = []  # the planned step: requests and their numbers of tokens
        self._pending: dict[bytes, Request] = {}  # pages being computed, by key
        self._tokens = np.zeros(max_tokens, np.int32)
        self._positions = np.zeros(max_tokens, np.int32)
        self._row_of = np.zeros(max_tokens, np.int32)
        self._logit_rows = np.zeros(max_batch, np.int32)
        self._page_table = np.full((max_batch, -(-context // page_size)), -1, np.int32)
        self._batch = Batch(self._tokens[:0], self._positions[:0], self._row_of[:0], self._page_table[:0],
                            self._logit_rows[:0])  # fmt: skip

    def submit(self, request: Request) -> None:
        """Queue a request. All its tokens, including those to generate, must fit the context and the cache."""
        if self.cache.reuse:
            self._extend_keys(request)
        self.waiting.append(request)

    def plan(self) -> Batch | None:
        """The next step, or None if there is nothing to do. The next plan reuses the arrays."""
        if self.waiting:
            self._admit()
        for request in self.running[:]:
            if len(request.tokens) > len(request.pages) * self.page_size and request.row >= 0:
                self._grow(request)
        if not self.running:
            return None
        self._choose()
        return self._fill()

    def commit(self) -> list[Request]:
        """The planned step was computed. Returns the requests that have logits, in the order of their rows."""
        ready = []
        for request, count in self._work:
            request.computed += count
            if request.computed // self.page_size > request.published and self.cache.reuse:
                self._publish(request)
            if request.computed == len(request.tokens):
                ready.append(request)
        return ready

    def finish(self, request: Request) -> None:
        """Remove a request and free its pages. Full pages stay in the prefix cache."""
        if request.row >= 0:
            self._stop_running(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def _admit(self) -> None:
        """Start waiting requests in order while there are rows and pages."""
        while self.waiting and self._rows:
            request = self.waiting[0]
            if not self._take_pages(request):
                return
            self.waiting.popleft()
            row = request.row = heappop(self._rows)
            self._page_table[row, : len(request.pages)] = request.pages
            self.running.append(request)
            if request.start_time is None:
                request.start_time = time.perf_counter()
                request.cached = request.computed

    def _take_pages(self, request: Request) -> bool:
        """Allocate the pages of all of a request's tokens, those of a known prefix from the cache."""
        cache = self.cache
        needed = -(-len(request.tokens) // self.page_size)
        # the last token is always computed: its logits are needed
        shareable = (len(request.tokens) - 1) // self.page_size if cache.reuse else 0
        pages: list[int] = []
        for key in request.keys[:shareable]:
            page = cache.find(key)
            if page is None:
                if key in self._pending:  # a running request is computing the same page: wait for it
                    cache.release(pages)
                    return False
                break
            cache.take(page)
            pages.append(page)
        known = len(pages)
        # leave each running request a page to grow into
        new = cache.reserve(needed - known) if cache.available >= needed - known + len(self.running) else None
        if new is None:
            cache.release(pages)
            return False
        request.pages = pages + new
        request.published = known
        request.computed = known * self.page_size
        for key in request.keys[known:]:
            self._pending.setdefault(key, request)
        return True

    def _grow(self, request: Request) -> None:
        """One more page for a running request, if necessary by preempting the youngest one."""
        page = self.cache.allocate()
        while page is None:
            youngest = self.running[-1]
            self._stop_running(youngest)
            self.waiting.appendleft(youngest)
            if youngest is request:
                return
            page = self.cache.allocate()
        self._page_table[request.row, len(request.pages)] = page
        request.pages.append(page)

    def _stop_running(self, request: Request) -> None:
        self.running.remove(request)
        for key in request.keys[request.published :]:
            if self._pending.get(key) is request:
                del self._pending[key]
        self.cache.release(request.pages)
        request.pages = []
        request.computed = 0
        self._page_table[request.row] = -1
        heappush(self._rows, request.row)
        request.row = -1

    def _choose(self) -> None:
        """Choose one token of each decoding request, then prompts, oldest first, up to the size of a call."""
        work = self._work
        work.clear()
        prompts = []
        for request in self.running:
            if request.computed + 1 == len(request.tokens):
                work.append((request, 1))
            else:
                prompts.append(request)
        room = min(self._max_tokens - len(work), self._prefill_chunk)
        for request in prompts:
            if room == 0:
                break
            count = min(len(request.tokens) - request.computed, room)
            work.append((request, count))
            room -= count

    def _fill(self) -> Batch:
        tokens, positions, row_of, logit_rows = self._tokens, self._positions, self._row_of, self._logit_rows
        at = n_logits = n_rows = 0
        for request, count in self._work:
            start = request.computed
            if count == 1:
                tokens[at] = request.tokens[start]
                positions[at] = start
                row_of[at] = request.row
            else:
                tokens[at : at + count] = request.tokens[start : start + count]
                positions[at : at + count] = np.arange(start, start + count)
                row_of[at : at + count] = request.row
            at += count
            n_rows = max(n_rows, request.row + 1)
            if start + count == len(request.tokens):
                logit_rows[n_logits] = at - 1
                n_logits += 1
        batch = self._batch
        if (len(batch.tokens), len(batch.logit_rows), len(batch.page_table)) != (at, n_logits, n_rows):
            batch = self._batch = Batch(
                tokens[:at], positions[:at], row_of[:at], self._page_table[:n_rows], logit_rows[:n_logits]
            )
        return batch

    def _publish(self, request: Request) -> None:
        self._extend_keys(request)
        full = request.computed // self.page_size
        for i in range(request.published, full):
            self.cache.publish(request.pages[i], request.keys[i])
            self._pending.pop(request.keys[i], None)
        request.published = full

    def _extend_keys(self, request: Request) -> None:
        """Compute the keys of all pages that the request's tokens fill."""
        keys, size = request.keys, self.page_size
        for i in range(len(keys), len(request.tokens) // size):
            keys.append(page_key(keys[-1] if keys else b"", request.tokens[i * size : (i + 1) * size]))
