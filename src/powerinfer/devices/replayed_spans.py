"""Spans of a trace around what is replayed: the GPU works as without a trace, and so the overlap is the real one.

Operators that are recorded together are one span, named after all of them; to have one each, they would have to be
launched one by one, which takes longer than they do.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import groupby

from powerinfer.devices.recording import Recorder, Run, State
from powerinfer.devices.step import Operator, Step
from powerinfer.devices.trace import Trace

UNRECORDED = 2
"""Steps of a shape before its recording is replayed: one is launched, the second recorded."""


class ReplayedSpans:
    """Marks operators for a trace. Steps that were launched or recorded, for want of a recording, are no part of it."""

    def __init__(self, recorder: Recorder, trace: Trace) -> None:
        self._recorder = recorder
        self._trace = trace
        self._span: AbstractContextManager[None] | None = None
        self._replayed = False

    def marked(self, operators: Sequence[Operator]) -> list[Operator]:
        """The operators, with others around those that are recorded together that begin and end a span."""
        marked: list[Operator] = []
        for static, group in groupby(operators, lambda one: one.static):
            together = list(group)
            if static:
                of = "+".join(dict.fromkeys(one.kind for one in together)), together[0].layer
                begin = Operator(*of, partial(self._begin, *of), static=False)
                together = [begin, *together, replace(begin, run=self._end)]
            marked += together
        return marked

    def record(self, run: Run, state: State) -> Run:
        """Record as the recorder does."""
        recorded = self._recorder(run, state)
        self._trace.leave_out()

        def replay(before: State) -> State:
            self._replayed = True
            return recorded(before)

        return replay

    def _begin(self, kinds: str, layer: int, _: Step) -> None:
        self._replayed = False
        self._span = self._trace.gpu(kinds, layer)
        self._span.__enter__()

    def _end(self, _: Step) -> None:
        assert self._span is not None
        self._span.__exit__(None, None, None)
        if not self._replayed:
            self._trace.leave_out()
