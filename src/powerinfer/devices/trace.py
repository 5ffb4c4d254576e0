"""Traces of steps on two devices: spans by device, layer and kind, and how far the devices overlap."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from powerinfer.devices.streams import Event, streams_of

if TYPE_CHECKING:
    from torch import device

LANES = ("GPU", "CPU", "wait")
"""Lanes of a trace: computing on a device, or the CPU waiting for the GPU."""


@dataclass(frozen=True)
class Span:
    """lane: of `LANES`; layer: -1 for none; begin, end: seconds since the trace began."""

    lane: str
    kind: str
    layer: int
    begin: float
    end: float


class Trace:
    """Spans of the steps that run within `step()`.

    A span of the GPU lies between two events of its stream, so it shows when the GPU computed, not when kernels were
    launched.
    """

    def __init__(self, device: device) -> None:
        self._streams = streams_of(device)
        self._begin = time.perf_counter()
        self._events: list[tuple[str, int, Event, Event]] = []
        self.spans: list[Span] = []
        self.steps: list[tuple[float, float]] = []
        self._left_out = False

    def leave_out(self) -> None:
        """The current step is no part of the trace."""
        self._left_out = True

    @contextmanager
    def step(self) -> Iterator[None]:
        """Trace one forward call, until the GPU has finished it."""
        self._left_out, before = False, len(self.spans)
        origin = self._synchronised()
        try:
            yield
        finally:
            end = self._synchronised()
            if self._left_out:
                del self.spans[before:]
            else:
                self._take(origin)
                self.steps.append((origin[0], end[0]))
            self._events.clear()

    def _take(self, origin: tuple[float, Event]) -> None:
        """The step's events as spans."""
        for kind, layer, first, last in self._events:
            begin = origin[0] + 1e-3 * origin[1].elapsed_time(first)
            self.spans.append(Span("GPU", kind, layer, begin, begin + 1e-3 * first.elapsed_time(last)))

    def _synchronised(self) -> tuple[float, Event]:
        """(current time, an event recorded now)."""
        self._streams.finish()
        event = self._streams.event(timed=True)
        event.record(self._streams.current())
        return self._now(), event

    def _now(self) -> float:
        return time.perf_counter() - self._begin

    @contextmanager
    def gpu(self, kind: str, layer: int) -> Iterator[None]:
        """A span of the work launched on the GPU within this context."""
        stream = self._streams.current()
        first, last = (self._streams.event(timed=True) for _ in range(2))
        first.record(stream)
        yield
        last.record(stream)
        self._events.append((kind, layer, first, last))

    @contextmanager
    def cpu(self, kind: str, layer: int, lane: str = "CPU") -> Iterator[None]:
        """A span of the caller's work within this context."""
        begin = self._now()
        yield
        self.spans.append(Span(lane, kind, layer, begin, self._now()))

    def summary(self) -> dict[str, Any]:
        """Mean seconds per step: in total, with both devices, one or none working; and by lane and kind.

        overlap: 1 - the share of a step in which neither worked.
        """
        count = max(1, len(self.steps))
        seconds = sum(end - begin for begin, end in self.steps)
        busy = {lane: _union([(s.begin, s.end) for s in self.spans if s.lane == lane]) for lane in ("GPU", "CPU")}
        either = _length(_union(busy["GPU"] + busy["CPU"]))
        gpu, cpu = _length(busy["GPU"]), _length(busy["CPU"])
        kinds: dict[str, float] = {}
        for span in self.spans:
            name = f"{span.lane} {span.kind}"
            kinds[name] = kinds.get(name, 0.0) + (span.end - span.begin) / count
        return {
            "steps": len(self.steps),
            "step_s": seconds / count,
            "gpu_s": gpu / count,
            "cpu_s": cpu / count,
            "both_s": (gpu + cpu - either) / count,
            "neither_s": (seconds - either) / count,
            "overlap": either / seconds if seconds else None,
            "kinds": kinds,
        }

    def document(self) -> dict[str, Any]:
        """The spans as a Chrome trace (chrome://tracing, Perfetto): complete events in microseconds."""
        names = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": lane, "args": {"name": name}}
            for lane, name in enumerate(LANES)
        ]
        events = [
            {
                "name": span.kind if span.layer < 0 else f"{span.kind} {span.layer}",
                "cat": span.kind,
                "ph": "X",
                "pid": 0,
                "tid": LANES.index(span.lane),
                "ts": 1e6 * span.begin,
                "dur": 1e6 * (span.end - span.begin),
            }
            for span in sorted(self.spans, key=lambda span: span.begin)
        ]
        return {"traceEvents": names + events, "displayTimeUnit": "ms"}


def _union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of the spans, as disjoint intervals."""
    result: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((begin, end))
    return result


def _length(spans: list[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in spans)


def span(trace: Trace | None, device: str, kind: str, layer: int, *lane: str) -> AbstractContextManager[None]:
    """`trace.gpu` or `trace.cpu`; a no-op without a trace."""
    if trace is None:
        return nullcontext()
    noted: AbstractContextManager[None] = getattr(trace, device)(kind, layer, *lane)
    return noted
