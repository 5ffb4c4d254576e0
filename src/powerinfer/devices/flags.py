"""Flags in memory of the host by which a GPU calls the CPU from a recording, without the driver's threads.

    GPU   ... what the call reads | asked = 6 | other work | wait for answered >= 6 | what the call wrote ...
    CPU                  looks at asked ....... | the call | answered = 6 | looks at asked ...

The thread that replays a recording answers its calls, so it must not wait for the GPU in between. To launch operators
one by one can take such a wait, where memory is allocated or a kernel is loaded: their calls are functions
(`Streams.call`). The calls of a step that was launched ahead a native thread answers until the other one is back.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from powerinfer import _native
from powerinfer.errors import PowerInferError
from powerinfer.kernels import gpu_host

if TYPE_CHECKING:
    from torch import Tensor, device

    from powerinfer.devices.recording import Recorder, Run, State
    from powerinfer.devices.streams import Recorded, Streams

LOOK = 0.05
"""Seconds after which whoever waits to be asked looks whether the GPU works at all."""

PATIENCE = 30.0
"""Seconds after which a GPU that is not answered goes on, and its step is void."""

ASLEEP_AFTER = 1.0
"""Seconds after which the native thread is asked no more, and leaves what follows to the other one."""

TRIAL_PATIENCE = 2.0

EXCHANGES = 64
OPERATIONS = 16
"""Calls in the recording of a trial, and operations before each: as long as that of a large model."""

_SPACING = 32
"""Numbers of 32 bits from one flag to the other: the two are in lines of a cache that are never fetched together."""

FLAG_BYTES = 4 * 2 * _SPACING
"""Bytes of RAM of both."""


class LateAnswerError(PowerInferError):
    """A GPU was not answered in time, and went on: what it has computed since is void."""


class FlaggedRun:
    """A recording that asks for calls. Called, it is replayed, and they are answered; or one after the other."""

    def __init__(self, flags: Flags, replay: Run, calls: _native.FlaggedCalls) -> None:
        self._flags = flags
        self._replay = replay
        self._calls = calls

    def __call__(self, before: State) -> State:
        after = self.launch(before)
        self.answer()
        return after

    def launch(self, before: State) -> State:
        """Replay it; its calls are to be answered."""
        self._calls.begin()
        return self._replay(before)

    def answer(self) -> None:
        """Make and answer its calls, but those that were. PowerInferError where the GPU does not ask."""
        self._flags.answer(self._calls)

    def answer_beside(self) -> None:
        """Let the native thread make and answer its calls, until `answer`. Until then nobody else uses the CPU's part
        of the model, nor its pool."""
        self._flags.answer_beside(self._calls)


class Flags:
    """The flags of a GPU's calls, one at a time. Calls of a step have numbers, from 1, that grow."""

    def __init__(self, streams: Streams) -> None:
        """RuntimeError where the device cannot use memory of the host."""
        import torch

        self._streams = streams
        self._memory = memory = streams.pinned(2 * _SPACING, torch.int32)
        self._asked = streams.address(memory)
        self._answered = self._asked + 4 * _SPACING
        numbers = memory.numpy().view(np.uint32)
        self._host = _native.HostFlags(numbers[:1], numbers[_SPACING : _SPACING + 1], PATIENCE)
        self._recorded: _native.FlaggedCalls | None = None
        self._thread: _native.AnsweringThread | None = None

    @property
    def recording(self) -> bool:
        """Whether the operations that the stream is given now are recorded, and their calls answered in replays."""
        return self._recorded is not None

    @property
    def numbers(self) -> tuple[_native.HostFlags, int, int]:
        """Both numbers as the CPU has them, and the GPU's addresses of those that it asks for and that are answered."""
        return self._host, self._asked, self._answered

    @property
    def released(self) -> bool:
        """Whether this step's GPU has gone on without answers."""
        return self._host.released

    @cached_property
    def answered(self) -> Tensor:
        """The number up to which calls are answered, int32 [1], for kernels that answer one themselves. RuntimeError
        where they cannot."""
        return self._streams.mapped(self._memory)[_SPACING : _SPACING + 1]

    # ---------------------------------------------------------------- the GPU's part, in recordings

    def ask(self, number: int, call: _native.HostCall) -> None:
        """The GPU asks for a call once all that it was given is done, and goes on."""
        assert self._recorded is not None
        self._recorded.add(number, call)
        self._write(number)

    def wait(self, number: int) -> None:
        """Let what the GPU is given from now on begin once the calls up to that number are answered."""
        self._streams.wait_value(self._streams.current(), self._answered, number)

    def _write(self, number: int) -> None:
        self._streams.write_value(self._streams.current(), self._asked, number)

    # ---------------------------------------------------------------- the CPU's part

    def begin(self) -> None:
        """A step begins; nothing of the last one is under way."""
        self._host.begin()

    def release(self) -> None:
        """Let the GPU go on without answers, to the end of a step that has failed."""
        self._host.release()
        self.take_back()

    def answering(self, recorder: Recorder) -> Recorder:
        """The same recorder, of operators whose calls are answered by whoever replays them."""

        def record(run: Run, state: State) -> Run:
            calls = self._recorded = _native.FlaggedCalls(self._host)
            try:
                again = recorder(run, state)
            finally:
                self._recorded = None
            return FlaggedRun(self, again, calls)

        return record

    def answer_beside(self, calls: _native.FlaggedCalls) -> None:
        """Let the native thread make and answer the calls of a recording that is replayed, until `take_back`."""
        if self._thread is None:
            self._thread = _native.AnsweringThread()
        self._thread.start(calls, ASLEEP_AFTER)

    def take_back(self) -> None:
        """Wait for the call that the native thread makes: the others are the caller's, and so is the CPU's part of the
        model."""
        if self._thread is not None:
            self._thread.take_back()

    @property
    def answers_beside(self) -> bool:
        """Whether the native thread makes, or waits for, calls."""
        return self._thread is not None and self._thread.answers

    def answer(self, calls: _native.FlaggedCalls) -> None:
        """Make and answer the calls of a recording that is replayed, but those that were. PowerInferError where the GPU
        does not ask."""
        self.take_back()
        while not calls.answer(LOOK):
            # All that the GPU was given may have been done just now.
            if self._streams.current().query() and not calls.answer(0.0):
                raise PowerInferError("the GPU did not ask for the CPU's part of a step: load the model again")

    # ---------------------------------------------------------------- a trial

    def trial(self, device: device, *, recorded: bool = True, in_place: bool = False) -> str | None:
        """The reason why the GPU cannot use them, in a recording if `recorded`; None: it can, in a trial. It must wait
        where it should, and neither longer nor while it is given more. in_place: what it sends and gets is not
        copied."""
        streams = self._streams
        record = streams.recorder() if recorded else None
        if recorded and record is None:
            return "the device records nothing"
        self._host.set_patience(TRIAL_PATIENCE)
        try:
            # A device that cannot says so here, without harm to a recording.
            self._try(lambda run: run, device, 1, in_place)
            if record is not None:
                self._try(record, device, EXCHANGES, in_place)
        except RuntimeError as error:
            return str(error).partition("\n")[0]
        finally:
            self.release()
            streams.finish()
            self._host.set_patience(PATIENCE)
            self.begin()
        return None

    def _try(
        self, record: Callable[[Callable[[], None]], Recorded], to: device, exchanges: int, in_place: bool
    ) -> None:
        """RuntimeError where it is not as it should be."""
        import torch

        streams = self._streams
        x = torch.zeros(1, device=to)
        sent, back = (streams.pinned(1, torch.float32) for _ in range(2))
        mapped = [streams.mapped(one) for one in (sent, back)] if in_place else []
        last = torch.full((1,), exchanges + 1, dtype=torch.int32, device=to)
        if in_place:  # kernels are loaded before anything waits
            gpu_host.put(x, mapped[0])
            gpu_host.add(mapped[1], x)
            gpu_host.put(last, self.answered)
            streams.finish()

        def run() -> None:
            for number in range(1, exchanges + 1):
                for _ in range(OPERATIONS):
                    x.add_(1)
                gpu_host.put(x, mapped[0]) if in_place else sent.copy_(x, non_blocking=True)
                self._write(number)
                self.wait(number)
                gpu_host.add(mapped[1], x.zero_()) if in_place else x.copy_(back, non_blocking=True)
            if in_place:
                gpu_host.put(last, self.answered)
                self._write(exchanges + 1)
                self.wait(exchanges + 1)

        again = record(run)
        for turn in range(2):
            self.begin()
            x.fill_(turn)
            again()
            value = float(turn)
            for number in range(1, exchanges + 1):
                self.look_for(number)
                if number == 1:
                    time.sleep(0.001)
                    if streams.current().query():
                        raise RuntimeError("the GPU does not wait for a number")
                if float(sent[0]) != value + OPERATIONS:
                    raise RuntimeError("the GPU writes a number before its turn")
                value = back[0] = float(1000 * turn + number)
                self._host.answer(number)
            if in_place:
                self.look_for(exchanges + 1)
                if not self._host.answered(exchanges + 1):
                    raise RuntimeError("the GPU writes a number before its turn")
            streams.finish()
            if float(x.cpu()[0]) != value:
                raise RuntimeError("the GPU does not wait for a number")

    def look_for(self, number: int) -> None:
        """Look for a number, in a trial, until the GPU has written it. RuntimeError if it does not."""
        until = time.monotonic() + 2 * TRIAL_PATIENCE
        while not self._host.wait(number, LOOK):
            done = self._streams.current().query() or time.monotonic() > until
            if done and not self._host.wait(number, 0.0):
                raise RuntimeError("the GPU does not write a number")
        if self.released:
            raise RuntimeError("the host waits for the GPU when it replays a recording")
