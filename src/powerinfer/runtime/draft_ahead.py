"""Drafting ahead: a smaller model on a GPU drafts on while the model that answers verifies its last drafts.

    model           | verifies d1 d2                     | verifies e1 e2
    smaller model   | drafts what follows d2: g, e1, e2  | ...

If d1 and d2 are right and g is sampled behind them, the next step has its drafts at once; else what was drafted ahead
is forgotten. That is the order of Mirror-SD (arXiv 2510.13161) and PEARL (arXiv 2408.11850), for the branch in which
all is right. It is done in a thread, and a stream, of its own, and only where steps take less time with it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

Work = Callable[[Callable[[], bool]], None]
"""Work that is called with a function that says whether it should end soon."""


class BesideThread:
    """A thread for one piece of work at a time, beside that of its caller."""

    def __init__(self) -> None:
        self._tasks = SimpleQueue[Work | None]()
        self._outcomes = SimpleQueue[BaseException | None]()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._busy = False

    def begin(self, work: Work) -> None:
        """Begin a piece of work. RuntimeError if there can be no thread."""
        if self._thread is None:
            arguments = self._tasks, self._outcomes, self._stopped.is_set
            thread = threading.Thread(target=_run, args=arguments, name="powerinfer drafts", daemon=True)
            thread.start()
            self._thread = thread
        self._stopped.clear()
        self._busy = True
        self._tasks.put(work)

    def end(self) -> None:
        """Let it end soon, and wait for that; raises what it has raised."""
        if not self._busy:
            return
        self._stopped.set()
        outcome = self._outcomes.get()
        self._busy = False
        if outcome is not None:
            raise outcome

    def close(self) -> None:
        """End the thread. Nothing is raised."""
        with suppress(Exception):
            self.end()
        self._tell_to_end()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _tell_to_end(self) -> None:
        self._tasks.put(None)

    __del__ = _tell_to_end


def _run(
    tasks: SimpleQueue[Work | None], outcomes: SimpleQueue[BaseException | None], stopped: Callable[[], bool]
) -> None:
    while (work := tasks.get()) is not None:
        try:
            work(stopped)
        except BaseException as error:  # the caller's, who may end drafts with it
            outcomes.put(error)
        else:
            outcomes.put(None)
        del work  # while it waits it keeps nothing alive


_ROUND = 16  # steps with drafts by which a way is measured
_LEAST = 3  # steps of a size that can be compared
_PATIENCE = 128  # steps in the better way after which the other one is tried again; doubled each time that it loses
_LONGEST_PATIENCE = 8 * _PATIENCE
_MARGIN = 1.01  # expected gain below which nothing is drafted ahead


class AheadTrial:
    """A trial, repeated, of whether steps with drafts take less time where the source drafts ahead, drafting included.

    way: whether it does so in the next step.
    """

    def __init__(self) -> None:
        self.way = False
        self._chosen: bool | None = None  # None: no trial has ended yet
        self._tries = True
        self._left = _ROUND
        self._patience = _PATIENCE
        self._changed = True  # the next step has what the other way left
        self._seconds: dict[bool, dict[tuple[int, int], deque[float]]] = {False: {}, True: {}}

    def add(self, requests: int, tokens: int, seconds: float) -> None:
        """A step of so many requests and tokens, some of which were drafts, took so long, drafting included."""
        if self._changed:
            self._changed = False
            return
        self._seconds[self.way].setdefault((requests, tokens), deque(maxlen=2 * _ROUND)).append(seconds)
        self._left -= 1
        if self._left <= 0:
            self._turn()

    def _turn(self) -> None:
        """A round, or the patience with a way, has ended."""
        if self._tries:
            better = self._better()
            if better is None:  # steps had other sizes
                self._go(not self.way, _ROUND)
                return
            self._patience = min(2 * self._patience, _LONGEST_PATIENCE) if better == self._chosen else _PATIENCE
            self._chosen, self._tries = better, False
            self._go(better, self._patience)
        else:
            self._tries = True
            self._seconds[not self.way].clear()
            self._go(not self.way, _ROUND)

    def _go(self, way: bool, steps: int) -> None:
        self._changed = way != self.way
        self.way, self._left = way, steps

    def _better(self) -> bool | None:
        """Whether drafting ahead takes less time, by steps of equal sizes; None: there are too few of these."""
        without = beside = 0.0
        for size, plain in self._seconds[False].items():
            ahead = self._seconds[True].get(size, ())
            if min(len(plain), len(ahead)) >= _LEAST:
                weight = min(len(plain), len(ahead))
                without += weight * _usual(plain)
                beside += weight * _usual(ahead)
        return None if not without else beside * _MARGIN < without


def _usual(seconds: deque[float] | tuple[float, ...]) -> float:
    """The mean but for the longest, which something else may have disturbed: some have their drafts at once, others
    do not, so that a median says little."""
    return sum(sorted(seconds)[:-1]) / (len(seconds) - 1)
