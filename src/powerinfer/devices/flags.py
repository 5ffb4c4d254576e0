"""Flags in memory of the host by which a GPU calls the CPU from a recording, without the driver's threads.

    GPU   ... what the call reads | asked = 6 | other work | wait for answered >= 6 | what the call wrote ...
    CPU                  looks at asked ....... | the call | answered = 6 | looks at asked ...

The thread that replays a recording answers its calls, so it must not wait for the GPU in between. To launch operators
one by one can take such a wait, where memory is allocated or a kernel is loaded: their calls are functions
(`Streams.call`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from powerinfer import _native
from powerinfer.errors import PowerInferError

if TYPE_CHECKING:
    from torch import device

    from powerinfer.devices.recording import Recorder, Run, State
    from powerinfer.devices.streams import Recorded, Streams

LOOK = 0.05
"""Seconds after which whoever waits to be asked looks whether the GPU works at all."""

PATIENCE = 30.0
"""Seconds after which a call that is not answered fails its step."""

TRIAL_PATIENCE = 2.0

EXCHANGES = 64
OPERATIONS = 16
"""Calls in the recording of a trial, and operations before each: as long as that of a large model."""

_SPACING = 32
"""Numbers of 32 bits from one flag to the other: the two are in lines of a cache that are never fetched together."""


class FlaggedRun:
    """A recording that asks for calls. Called, it is replayed, and they are answered; or one after the other."""

    def __init__(self, flags: Flags, launch: Run, calls: _native.FlaggedCalls) -> None:
        self.launch = launch
        self._flags = flags
        self._calls = calls

    def __call__(self, before: State) -> State:
        after = self.launch(before)
        self.answer()
        return after

    def answer(self) -> None:
        """Make and answer its calls. PowerInferError where the GPU does not ask."""
        self._flags.answer(self._calls)


class Flags:
    """The flags of a GPU's calls, one at a time. Calls of a step have numbers, from 1, that grow."""

    def __init__(self, streams: Streams) -> None:
        """RuntimeError where the device cannot use memory of the host."""
        import torch

        self._streams = streams
        memory = streams.pinned(2 * _SPACING, torch.int32)
        self._asked = streams.address(memory)
        self._answered = self._asked + 4 * _SPACING
        numbers = memory.numpy().view(np.uint32)
        self._host = _native.HostFlags(numbers[:1], numbers[_SPACING : _SPACING + 1], PATIENCE)
        self._recorded: _native.FlaggedCalls | None = None

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

    def answer(self, calls: _native.FlaggedCalls) -> None:
        """Make and answer the calls of a recording that is replayed. PowerInferError where the GPU does not ask."""
        calls.begin()
        while not calls.answer(LOOK):
            # All that the GPU was given may have been done just now.
            if self._streams.current().query() and not calls.answer(0.0):
                raise PowerInferError("the GPU did not ask for the CPU's part of a step: load the model again")

    # ---------------------------------------------------------------- a trial

    def trial(self, device: device, recorded: bool = True) -> str | None:
        """The reason why the GPU cannot use them, in a recording if `recorded`; None: it can, in a trial. It must wait
        where it should, and neither longer nor while it is given more."""
        streams = self._streams
        record = streams.recorder() if recorded else None
        if recorded and record is None:
            return "the device records nothing"
        self._host.set_patience(TRIAL_PATIENCE)
        try:
            self._try(lambda run: run, device, 1)  # a device that cannot says so here, without harm to a recording
            if record is not None:
                self._try(record, device, EXCHANGES)
        except RuntimeError as error:
            return str(error).partition("\n")[0]
        finally:
            self.release()
            streams.finish()
            self._host.set_patience(PATIENCE)
            self.begin()
        return None

    def _try(self, record: Callable[[Callable[[], None]], Recorded], to: device, exchanges: int) -> None:
        """RuntimeError where it is not as it should be."""
        import torch

        streams = self._streams
        x = torch.zeros(1, device=to)
        sent, back = (streams.pinned(1, torch.float32) for _ in range(2))

        def run() -> None:
            for number in range(1, exchanges + 1):
                for _ in range(OPERATIONS):
                    x.add_(1)
                sent.copy_(x, non_blocking=True)
                self._write(number)
                self.wait(number)
                x.copy_(back, non_blocking=True)

        again = record(run)
        for turn in range(2):
            self.begin()
            x.fill_(turn)
            again()
            value = float(turn)
            for number in range(1, exchanges + 1):
                self._wait_until_asked(number)
                if number == 1:
                    time.sleep(0.001)
                    if streams.current().query():
                        raise RuntimeError("the GPU does not wait for a number")
                if float(sent[0]) != value + OPERATIONS:
                    raise RuntimeError("the GPU writes a number before its turn")
                value = back[0] = float(1000 * turn + number)
                self._host.answer(number)
            streams.finish()
            if float(x.cpu()[0]) != value:
                raise RuntimeError("the GPU does not wait for a number")

    def _wait_until_asked(self, number: int) -> None:
        until = time.monotonic() + 2 * TRIAL_PATIENCE
        while not self._host.wait(number, LOOK):
            done = self._streams.current().query() or time.monotonic() > until
            if done and not self._host.wait(number, 0.0):
                raise RuntimeError("the GPU does not write a number")
        if self.released:
            raise RuntimeError("the host waits for the GPU when it replays a recording")
