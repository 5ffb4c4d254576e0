"""Recordings of chunks of prompts, whose tokens are padded to one of a few numbers, so that shapes repeat.

A chunk of as many tokens as `PromptRecordings` takes is padded whether it is replayed or launched: how sums are rounded
may depend on the number of tokens in a step, so a prompt has the same bits whatever was recorded before.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

from powerinfer.devices.recording import MOST_SHAPES, Recorder, Recordings
from powerinfer.kernels.gpu_types import FEW

if TYPE_CHECKING:
    from powerinfer.devices.step import Operator


class PromptRecordings:
    """sizes: numbers of tokens to which chunks are padded, ascending, (): none is. nbytes: the driver's memory of
    recordings, at most; passed: torch's for their temporaries, which other steps do not use."""

    def __init__(self) -> None:
        self.sizes: tuple[int, ...] = ()
        self.nbytes = self.passed = 0
        self._recorder: Recorder | None = None
        self._shapes = MOST_SHAPES
        self._recordings: Recordings | None = None
        self._operators: Sequence[Operator] = ()
        self._recorded_at = 0, 0

    def padded(self, tokens: int) -> int:
        """The number of tokens to which a chunk is padded; 0: it is not."""
        if not self.sizes or not FEW < tokens <= self.sizes[-1]:
            return 0
        return self.sizes[bisect_left(self.sizes, tokens)]

    @property
    def records(self) -> bool:
        """Whether chunks are recorded, rather than launched every time."""
        return self._recorder is not None

    def use(self, recorder: Recorder | None, shapes: int = MOST_SHAPES, nbytes: int = 0, passed: int = 0) -> None:
        """Record with it from now on, so many shapes, which take so many bytes; None: launch every time."""
        self._recorder, self._shapes, self.nbytes, self.passed = recorder, shapes, nbytes, passed
        self._recordings, self._operators = None, ()

    def give_way(self) -> bool:
        """Free the memory of recordings, and record no more; whether there was any."""
        recorded = self.records
        self.use(None)
        return recorded

    def recordings(self, operators: Sequence[Operator], addresses: tuple[int, int]) -> Recordings | None:
        """Recordings of these operators, all static, with steps at those addresses; None: they are launched."""
        if self._recorder is None:
            return None
        if self._recordings is None or operators is not self._operators or self._recorded_at != addresses:
            self._recordings = Recordings(operators, self._recorder, self._shapes)
            self._operators, self._recorded_at = operators, addresses
        return self._recordings
