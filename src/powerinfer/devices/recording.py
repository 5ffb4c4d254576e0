"""Recording and replaying the launches of steps of few tokens.

Launching a kernel takes the host longer than a small kernel takes the device. The launches of a step depend only on its
shape, so everything between two points at which the host must act is recorded once per shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from powerinfer.devices.step import Operator, Step
from powerinfer.devices.streams import streams_of

if TYPE_CHECKING:
    from torch import Tensor, device

    from powerinfer.devices.step import Norm

MOST_SHAPES = 16
"""Shapes whose recordings are kept; the least recently used is dropped first."""

RECORDED_BYTES = 128 << 20
"""Limit of the GPU memory of recordings, which the driver allocates; it may allow fewer shapes."""

PROMPTS_BYTES = 128 << 20
"""The same of recordings of chunks of prompts, which nothing else gives way to."""

LEAST_SHAPES = 4
"""The number of shapes that stay where a GPU has less memory than was planned: a request alone seldom needs more."""

State = tuple["Tensor | None", "tuple[Norm, Tensor] | None", "Tensor | None"]
"""State that operators pass on besides x, read and total: attended, normed and hidden of a step."""

Run = Callable[[State], State]

Recorder = Callable[[Run, State], Run]
"""Given a function that runs some operators, and the state before them, returns a cheaper equivalent."""


class Recordings:
    """Runs steps. It records the static operators when a shape occurs a second time, and replays them afterwards."""

    def __init__(self, operators: Sequence[Operator], recorder: Recorder, shapes: int = MOST_SHAPES) -> None:
        self._parts = [(static, list(group)) for static, group in groupby(operators, lambda one: one.static)]
        self._recorder = recorder
        self._shapes = shapes
        self._runs: dict[tuple[int, ...], dict[int, Run | None]] = {}

    @property
    def static(self) -> bool:
        """Whether all operators are static, so that the host goes on at once."""
        return all(static for static, _ in self._parts)

    def run(self, step: Step) -> None:
        """All operators on the step."""
        key = step.key
        runs = self._runs.pop(key, {})
        if len(self._runs) == self._shapes:
            del self._runs[next(iter(self._runs))]
        self._runs[key] = runs
        for number, (static, operators) in enumerate(self._parts):
            if not static or number not in runs:
                if static:  # the first time it just runs: kernels are compiled, memory is allocated
                    runs[number] = None
                for operator in operators:
                    operator.run(step)
            else:
                recorded = runs[number]
                if recorded is None:
                    recorded = runs[number] = self._recorder(_runner(operators, replace(step)), _state(step))
                step.attended, step.normed, step.hidden = recorded(_state(step))
            step.forget_codes()

    def whole_run(self, step: Step) -> Run | None:
        """The recording of steps of this shape, at the same addresses; None: there is none of the step as a whole."""
        return self._runs.get(step.key, {}).get(0) if self.static and len(self._parts) == 1 else None

    def forget(self, layer: int) -> None:
        """Drop the recordings of a layer's operators."""
        for number, (_, operators) in enumerate(self._parts):
            if any(operator.layer == layer for operator in operators):
                for kept in self._runs.values():
                    kept.pop(number, None)


def _state(step: Step) -> State:
    return step.attended, step.normed, step.hidden


def _runner(operators: Sequence[Operator], step: Step) -> Run:
    def run(state: State) -> State:
        step.attended, step.normed, step.hidden = state
        for operator in operators:
            operator.run(step)
        return _state(step)

    return run


def recorder_of(device: device) -> Recorder | None:
    """A recorder of a device's own recordings, all of which share one pool of memory; None: it has none.

    Memory that is freed while something is recorded may be used by what is recorded later. That is safe for recordings
    that are replayed one after another in one stream, as parts of whole steps: only what operators pass on must outlive
    its recording, and `after` keeps that allocated for as long as the recording is kept. The next one of the step reads
    it before any other is replayed: if recorded later, it cannot have been given this memory; if recorded earlier, it
    wrote there before, as part of this step, or will in the next one.
    """
    recorder = streams_of(device).recorder()
    if recorder is None:
        return None

    def record(run: Run, state: State) -> Run:
        passed: list[State] = []
        again = recorder(lambda: passed.append(run(state)))
        (after,) = passed

        def replay(_: State) -> State:
            again()
            return after

        return replay

    return record
