"""Cache of the states of sequences: for models whose layers keep one for each sequence.

A running request has a slot. Unlike pages, a state is of one position, and the next step changes it; a prefix can be
reused only where its state was kept. States are kept at page boundaries:

- where a prompt ends, for whoever asks the same again, or goes on;
- where two prompts part, if they share enough. The second one keeps it, or the first if it is still on its way there,
  and the second waits;
- every `_INTERVAL` tokens of a long text, the newest only, for what goes on with an answer or was interrupted.

A state is kept by leaving its slot as it is and going on in another one, so nothing is copied. Slots that no request
uses are reused, those with the state of a prefix last, least recently used first.

A step with drafts goes on in a spare slot. If all of them were right the two change roles; else the state before the
step is still there, and the next step first replays in it those tokens that were.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from powerinfer.devices.states import UNDO_TOKENS
from powerinfer.runtime.kv_cache import PageCache

if TYPE_CHECKING:
    from powerinfer.runtime.request import Request

_INTERVAL = 512  # tokens
_WORTH = 128  # tokens that two prompts must share before their common state is kept


class StateCache:
    """The slots of running requests, and the kept states by the key of the last page of their prefix."""

    def __init__(self, slots: int, page_size: int, reuse: bool, undo: bool = False) -> None:
        """undo: requests may have drafts, each a spare slot for these."""
        self._undo = undo
        self._slots = PageCache(slots, reuse)
        self._page_size = page_size
        self._promised: dict[bytes, Request] = {}  # states that running requests are going to keep

    def longest(self, keys: Sequence[bytes]) -> int:
        """Number of these pages of a prompt in the longest prefix whose state was kept."""
        return next((n for n in range(len(keys), 0, -1) if self._slots.find(keys[n - 1]) is not None), 0)

    def awaits(self, keys: Sequence[bytes], cached: int, computing: Mapping[bytes, Request]) -> bool:
        """Whether a running request is going to keep the state of a prefix of a prompt, longer than any that was kept.

        keys: of the prompt's pages; known: how many of them are in the cache; computing: pages that will be.
        """
        have, shared = self.longest(keys[:cached]), cached
        while shared < len(keys) and keys[shared] in computing:
            shared += 1
        if any(key in self._promised for key in keys[have:shared]):
            return True
        if shared == cached or (shared - have) * self._page_size < _WORTH:
            return False
        self._promise(computing[keys[shared - 1]], shared)
        return True

    def start(self, request: Request, usable: int, cached: int) -> bool:
        """A slot for a request that starts behind its first `usable` pages, of `cached` in the cache; False: none is
        free."""
        kept_slots = [slot for key in request.keys[:usable][-1:] if (slot := self._slots.find(key)) is not None]
        for slot in kept_slots:
            self._slots.take(slot)
        free = self._slots.allocate()
        if free is None:
            self._slots.release(kept_slots)
            return False
        request.state, request.read_state = free, next(iter(kept_slots), free)
        spare = self._slots.allocate() if self._undo else None
        request.spare_state = -1 if spare is None else spare
        if (cached - usable) * self._page_size >= _WORTH:
            self._promise(request, cached)
        self._promise(request, (len(request.tokens) - 1) // self._page_size)
        return True

    def _promise(self, request: Request, pages: int) -> None:
        """Let a request keep its state behind so many pages, unless it is beyond, or its pages are not reused."""
        if request.computed < pages * self._page_size and pages <= len(request.keys):
            request.keeps.add(pages * self._page_size)
            self._promised.setdefault(request.keys[pages - 1], request)

    def limit(self, request: Request, end: int | None = None) -> int:
        """Tokens of a request that are computed next, at most: up to where its state is to be kept. end: of these
        tokens, None: of those that it has."""
        at, end = request.computed, len(request.tokens) if end is None else end
        regular = (at // _INTERVAL + 1) * _INTERVAL if request.keys else end
        return min(regular, *(stop for stop in request.keeps if stop > at), end) - at

    def draft_room(self, request: Request) -> int:
        """Drafts of a request in the next step, at most: none where its state is in a slot that is kept, or no other is
        free; none beyond where its state is to be kept."""
        if not request.replayed and (request.spare_state < 0 or request.read_state != request.state):
            return 0
        return self.limit(request, request.computed + UNDO_TOKENS) - 1

    def slots(self, request: Request) -> tuple[int, int]:
        """The slots that the next step reads and writes."""
        if request.drafts and not request.replayed:
            return request.state, request.spare_state
        return request.read_state, request.state

    def commit(self, request: Request, begin: int, drafts: bool, wrong: bool) -> None:
        """A step of the request was computed. begin: tokens computed before it; drafts: it had some; wrong: the last
        ones of these are."""
        if drafts and not request.replayed:
            request.read_state, request.state, request.spare_state = request.state, request.spare_state, -1
        undoable = drafts or request.replayed
        request.replayed = request.computed - begin if wrong else 0
        if wrong:
            return
        if undoable:
            request.spare_state, request.read_state = request.read_state, request.state
        elif request.read_state != request.state:
            self._slots.release([request.read_state])
            request.read_state = request.state
        at, pages = request.computed, request.computed // self._page_size
        wanted = at in request.keeps
        if not (wanted or at % _INTERVAL == 0) or not 0 < pages <= len(request.keys):
            return
        key = request.keys[pages - 1]
        if self._slots.find(key) is None and (other := self._slots.allocate()) is not None:
            self._slots.publish(request.state, key)
            request.state = other
            if not wanted:
                self._replace(request, key)
        self._unpromise(request, key)

    def _replace(self, request: Request, key: bytes) -> None:
        """The newest of the states that a request keeps regularly; the one before goes."""
        before = self._slots.find(request.last_kept) if request.last_kept else None
        if before is not None:
            self._slots.forget(before)
        request.last_kept = key

    def stop(self, request: Request) -> None:
        """The request does not run any more."""
        self._slots.release(list({request.read_state, request.state, request.spare_state} - {-1}))
        for stop in request.keeps:
            self._unpromise(request, request.keys[stop // self._page_size - 1])
        request.keeps.clear()
        request.state = request.read_state = request.spare_state = -1
        request.replayed = 0

    def _unpromise(self, request: Request, key: bytes) -> None:
        if self._promised.get(key) is request:
            del self._promised[key]

    def hold(self) -> int | None:
        """A slot for somebody else; None if each is in use."""
        return self._slots.allocate()

    def give_back(self, slot: int) -> None:
        self._slots.release([slot])

    @property
    def free(self) -> int:
        """Number of slots that nobody uses."""
        return self._slots.available
