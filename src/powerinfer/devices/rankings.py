"""Rankings of items by their use: a fast memory keeps the first ones, such as experts on a GPU, or experts and neurons
in RAM.

A ranking gives every item a priority; the item of the least priority leaves first. After each step it learns how often
the step used each item. All items are one array, so that an update costs a few microseconds. What rests on disk is read
in any case, in place of the least (`Residents`); experts on a GPU are exchanged by `placement.experts.Policy`.

    static   how often a profile has seen an item
    lru      when it was used last
    lfu      how often it was used, where older uses count less and less
    window   how often it was used by the last tokens
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque

import numpy as np
from numpy.typing import NDArray

from powerinfer import _native

ExpertDecisions = _native.ExpertPolicy
"""The same rankings, of experts that a GPU has copies of, and what follows from them: once a step, for all layers."""

DISK_POLICIES = ("static", "lru", "lfu", "window")

HALF_LIFE = 16.0
"""Tokens after which a use counts half, in `lfu`."""

WINDOW = 32
"""Tokens that `window` counts."""

_STEPS = 1 << 16  # that float32 counts, with parts of a step


class UseRanking(ABC):
    """start: how often items are used, [layers, items] or [items], shares of the tokens; zeros where nothing is known.
    priority: of each item, in its type."""

    def __init__(self, start: NDArray[np.floating]) -> None:
        self.priority = start.copy()

    @abstractmethod
    def observe(self, uses: NDArray[np.integer], tokens: int) -> None:
        """Learn from a step. uses: of each item, the step's tokens that used it."""


class Static(UseRanking):
    def observe(self, uses: NDArray[np.integer], tokens: int) -> None:
        pass


class Lru(UseRanking):
    """Least recently used. Of items used by the same step, such as a prompt, those stay longer that more of its tokens
    used, then those of higher numbers; of those never used the most frequent ones."""

    def __init__(self, start: NDArray[np.floating]) -> None:
        super().__init__(start)
        self._step = 1
        self._parts = np.arange(start.shape[-1]) / start.shape[-1]

    def observe(self, uses: NDArray[np.integer], tokens: int) -> None:
        if self._step == _STEPS:
            self.priority -= _STEPS
            self._step = 0
        self._step += 1
        used = uses.nonzero()
        self.priority[used] = self._step + (uses[used] + self._parts[used[-1]]) / (tokens + 1)


class Lfu(UseRanking):
    """Least frequently used."""

    def __init__(self, start: NDArray[np.floating], half_life: float = HALF_LIFE) -> None:
        super().__init__(start)
        self._decay = 0.5 ** (1 / half_life)
        self.priority /= start.dtype.type(1 - self._decay)

    def observe(self, uses: NDArray[np.integer], tokens: int) -> None:
        self.priority *= self.priority.dtype.type(self._decay**tokens)
        self.priority += uses


class Window(UseRanking):
    """Least used by the last tokens; of items that were used as often the most frequent ones of `start` stay. A step is
    counted as a whole."""

    def __init__(self, start: NDArray[np.floating], window: int = WINDOW) -> None:
        super().__init__(start)
        self._window = window
        self._steps: deque[tuple[NDArray[np.integer], int]] = deque()
        self._tokens = 0

    def observe(self, uses: NDArray[np.integer], tokens: int) -> None:
        self._steps.append((uses.copy(), tokens))
        self._tokens += tokens
        self.priority += uses
        while self._tokens > self._window and len(self._steps) > 1:
            old, n = self._steps.popleft()
            self._tokens -= n
            self.priority -= old


RANKINGS: dict[str, type[UseRanking]] = {"static": Static, "lru": Lru, "lfu": Lfu, "window": Window}
"""Rankings by the name of a policy."""

NEEDS_PROFILE = "the policy static needs the frequencies of a profile"


class Residents:
    """The items of several layers that memory has, by a ranking of all of them.

    policy: of `DISK_POLICIES`.
    """

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._layers: list[tuple[NDArray[np.int32], NDArray[np.float32]]] = []
        self._start: list[NDArray[np.floating]] = []
        self._ranking: UseRanking | None = None  # None: there was no step
        self._uses: NDArray[np.int32] = np.zeros((0, 0), np.int32)

    def add(
        self, uses: NDArray[np.int32], priority: NDArray[np.float32], start: NDArray[np.floating] | None = None
    ) -> None:
        """Add a layer of n items. uses [n]: the tokens of a step that used each, read and set to zero after it;
        priority [n], to be written; start [n]: how often each is used, shares of the tokens; of all layers or of none.

        ValueError: `static` needs them.
        """
        if start is None and self._policy == "static":
            raise ValueError(NEEDS_PROFILE)
        self._layers.append((uses, priority))
        if start is not None:
            self._start.append(start)
            priority[:] = start

    def forget(self) -> None:
        """Forget what was used since the last step, by one that has no result."""
        for uses, _ in self._layers:
            uses[:] = 0

    def observe(self, tokens: int) -> None:
        """Learn from a step of that many tokens: what leaves memory first in the next one."""
        if self._ranking is None:
            self._ranking = self._make()
        for row, (uses, _) in zip(self._uses, self._layers, strict=True):
            row[: len(uses)] = uses
            uses[:] = 0
        self._ranking.observe(self._uses, tokens)
        for row, (_, priority) in zip(self._ranking.priority, self._layers, strict=True):
            priority[:] = row[: len(priority)]

    def _make(self) -> UseRanking:
        shape = len(self._layers), max(len(uses) for uses, _ in self._layers)
        self._uses = np.zeros(shape, np.int32)
        start = np.zeros(shape, np.float32)
        for row, known in zip(start, self._start, strict=False):
            row[: len(known)] = known
        return RANKINGS[self._policy](start)
