"""Which of the items that rest on disk, such as experts, stay in memory: policies as priorities.

What a step needs and memory lacks is read in any case; a policy says in place of what. It gives every item a priority,
and what has the least leaves first. After each step it learns how often the step used each item. All layers are rows of
one array, so that an update costs a few microseconds. `placement.expert_slots` plays recorded selections to the same
classes.

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

DISK_POLICIES = ("static", "lru", "lfu", "window")

HALF_LIFE = 16.0
"""Tokens after which a use counts half, in `lfu`."""

WINDOW = 32
"""Tokens that `window` counts."""

_STEPS = 1 << 16  # that float32 counts, with parts of a step

Float32 = NDArray[np.float32]


class DiskPolicy(ABC):
    """start: how often items are used, float32 [layers, items], shares of the tokens; None: nothing is known."""

    name: str
    priority: Float32
    """[layers, items]"""

    def __init__(self, layers: int, items: int, start: Float32 | None = None) -> None:
        self.priority = np.zeros((layers, items), np.float32) if start is None else start.astype(np.float32)

    @abstractmethod
    def observe(self, uses: NDArray[np.integer], tokens: int) -> None:
        """After a step. uses: [layers, items], the step's tokens that used each."""


class Static(DiskPolicy):
    name = "static"

    def observe(self, uses: NDArray[np.integer], tokens: int) -> None:
        pass


class Lru(DiskPolicy):
    """Of those used by the same step, such as a prompt, those that more of its tokens used stay longer; of those never
    used the most frequent ones."""

    name = "lru"

    def __init__(self, layers: int, items: int, start: Float32 | None = None) -> None:
        super().__init__(layers, items, start)
        self._step = 1

    def observe(self, uses: NDArray[np.integer], tokens: int) -> None:
        if self._step == _STEPS:
            self.priority -= np.float32(_STEPS)
            self._step = 0
        self._step += 1
        used = uses > 0
        self.priority[used] = self._step + uses[used] / (tokens + 1)


class Lfu(DiskPolicy):
    name = "lfu"

    def __init__(self, layers: int, items: int, start: Float32 | None = None, half_life: float = HALF_LIFE) -> None:
        super().__init__(layers, items, start)
        self._decay = 0.5 ** (1 / half_life)
        self.priority /= np.float32(1 - self._decay)

    def observe(self, uses: NDArray[np.integer], tokens: int) -> None:
        self.priority *= np.float32(self._decay**tokens)
        self.priority += uses


class Window(DiskPolicy):
    """Of those that were used as often the most frequent ones of `start` stay. A step is counted as a whole."""

    name = "window"

    def __init__(self, layers: int, items: int, start: Float32 | None = None, window: int = WINDOW) -> None:
        super().__init__(layers, items, start)
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


_CLASSES: dict[str, type[DiskPolicy]] = {one.name: one for one in (Static, Lru, Lfu, Window)}


def make_disk_policy(name: str, layers: int, items: int, start: Float32 | None = None) -> DiskPolicy:
    """The policy of a name of `DISK_POLICIES`; arguments as of `DiskPolicy`. ValueError: `static` needs frequencies."""
    if start is None and name == "static":
        raise ValueError("the policy static needs the frequencies of a profile")
    return _CLASSES[name](layers, items, start)


class Residents:
    """The items of several layers that memory has, by a policy over all of them.

    policy: of `DISK_POLICIES`.
    """

    def __init__(self, policy: str) -> None:
        self._name = policy
        self._layers: list[tuple[NDArray[np.int32], Float32]] = []
        self._start: list[NDArray[np.floating]] = []
        self._policy: DiskPolicy | None = None  # None: there was no step
        self._uses: NDArray[np.int32] = np.zeros((0, 0), np.int32)

    def add(self, uses: NDArray[np.int32], priority: Float32, start: NDArray[np.floating] | None = None) -> None:
        """A layer of n items. uses [n]: the tokens of a step that used each, read and set to zero after it; priority
        [n], to be written; start [n]: how often each is used, shares of the tokens; of all layers or of none.

        ValueError: `static` needs them.
        """
        make_disk_policy(self._name, 1, len(uses), None if start is None else start[None].astype(np.float32))
        self._layers.append((uses, priority))
        if start is not None:
            self._start.append(start)
            priority[:] = start

    def forget(self) -> None:
        """What was used since the last step is of one that has no result."""
        for uses, _ in self._layers:
            uses[:] = 0

    def observe(self, tokens: int) -> None:
        """After a step of that many tokens: what leaves memory first in the next one."""
        if self._policy is None:
            self._policy = self._make()
        for row, (uses, _) in zip(self._uses, self._layers, strict=True):
            row[: len(uses)] = uses
            uses[:] = 0
        self._policy.observe(self._uses, tokens)
        for row, (_, priority) in zip(self._policy.priority, self._layers, strict=True):
            priority[:] = row[: len(priority)]

    def _make(self) -> DiskPolicy:
        shape = len(self._layers), max(len(uses) for uses, _ in self._layers)
        self._uses = np.zeros(shape, np.int32)
        start = np.zeros(shape, np.float32) if self._start else None
        if start is not None:
            for row, own in zip(start, self._start, strict=True):
                row[: len(own)] = own
        return make_disk_policy(self._name, *shape, start)
