"""The step that a GPU is given before the host has looked at its tokens.

    GPU   step 4 ....... | asked = 4 | waits for answered >= 4 | step 5 ........................ | asked = 5 | waits
    CPU   launches step 5 | looks at asked | rows, answered = 4 | tokens of step 4, launches step 6 | looks at asked

Where each request gets the token of its largest logit, or one that is drawn out of candidates, the GPU has what that
takes first, and all that the step behind it needs beside the embeddings of these tokens is known before: the random
numbers of their draws, too. So that step is launched behind a number for which the GPU waits. The thread that waits
for the tokens, or draws them, looks their rows up, in the native module, puts them where the GPU gets them, and writes
the number. What the tokens mean the host sees while the GPU computes with them. Where the CPU has a part in that step,
and is called by flags, a native thread answers meanwhile, until the host comes for the result.

Where they end a request, or another one starts, nobody asks for what was computed. It wrote behind the tokens of its
requests, to places that nobody reads before they are written again: whatever does so is behind it in the same stream.
Nor does anyone where a token could not be drawn: the step goes on with any, and its result is void. The residual
stream of the step before, of which all logits may be asked for then, was kept.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from numpy.typing import NDArray

from powerinfer.devices import flags
from powerinfer.devices.flags import FlaggedRun, LateAnswerError
from powerinfer.errors import PowerInferError
from powerinfer.formats.quant import Float32

if TYPE_CHECKING:
    from torch import device

    from powerinfer import _native
    from powerinfer.devices.batch import Batch
    from powerinfer.devices.link import Link
    from powerinfer.devices.recording import Run, State
    from powerinfer.devices.step import Step
    from powerinfer.devices.step_buffers import StepBuffers
    from powerinfer.devices.streams import Recorded, Stream, Streams

_TURNS = 4
"""Times that a recording is launched behind itself in a trial."""

_NO_STATE: State = None, None, None  # with which a step begins

Brought = tuple[NDArray[Any], ...]
"""Tokens of the largest logits, int64 [T], and these, float32 [T]; or candidates, int32 [T, WORDS]: memory that the GPU
writes."""


class Embedding(Protocol):
    """The embedding of a model, in RAM (`CpuExecutor`)."""

    def answer_tokens(
        self, flags: _native.HostFlags, number: int, seconds: float, brought: Brought, batch: Batch, rows: Float32
    ) -> bool:
        """Answer as `CpuExecutor` does."""
        ...


class NextStep:
    """The step that is launched ahead of its tokens, one at most, of steps of one shape that follow each other.

    batch: its batch, None: there is none. step: those of the shape, which are at the same addresses; context: in which
    they are launched. restorable: whether the residual stream of the step whose result came last was kept, since this
    one overwrites it.
    """

    step: Step

    def __init__(self, streams: Streams, embedding: Embedding, buffers: StepBuffers, link: Link | None) -> None:
        """link: None: the CPU has no part in steps. RuntimeError where the device cannot use memory of the host."""
        self.batch: Batch | None = None
        self.restorable = False
        self.context: AbstractContextManager[Any] = streams.active()
        self._streams = streams
        self._embedding = embedding
        self._buffers = buffers
        self._link = link
        self._flags = flags.Flags(streams)
        self._host, self._asked, self._answered = self._flags.numbers
        self._number = self._left = 0
        self._stream: Stream
        self._run: Run | None = None
        self._calls: FlaggedRun | None = None  # the run, where the CPU is called by flags
        self._brought: Brought
        self._rows: Float32

    def trial(self, to: device) -> str | None:
        """The reason why the device cannot wait for rows, between recordings; None: it can, in a trial."""
        reason = self._flags.trial(to, recorded=False)
        record = self._streams.recorder()
        if reason is not None or record is None:
            return reason
        self._host.set_patience(flags.TRIAL_PATIENCE)
        try:
            self._try_recording(record, to)
        except RuntimeError as error:
            return str(error).partition("\n")[0]
        finally:
            self._flags.release()
            self._streams.finish()
            self._host.set_patience(flags.PATIENCE)
            self.begin()
        return None

    def _try_recording(self, record: Callable[[Callable[[], None]], Recorded], to: device) -> None:
        """RuntimeError where a recording that is launched behind itself, as a step is, does not wait for its rows and
        its turn."""
        import torch

        x = torch.zeros(1, device=to)
        rows, result = (self._streams.pinned(1, torch.float32) for _ in range(2))

        def run() -> None:
            for _ in range(flags.OPERATIONS):
                x.add_(1)
            result.copy_(x, non_blocking=True)

        again = record(run)
        self.begin()
        self._stream = self._streams.current()
        for number in range(1, _TURNS + 1):
            self._wait_behind(None)
            x.copy_(rows, non_blocking=True)
            again()
            self._flags.look_for(number)
            if number > 1 and float(result[0]) != float(rows[0]) + flags.OPERATIONS:
                raise RuntimeError("a recording that is launched behind itself does not wait for its turn")
            rows[0] = 1000.0 * number
            self._host.answer(number)
        self._streams.finish()

    def begin(self) -> None:
        """Begin to count; nothing of an earlier step is under way."""
        self._number, self.restorable = 0, False
        self._flags.begin()

    def start(self, batch: Batch, step: Step, run: Run) -> bool:
        """Launch the step behind that of a batch, which is under way, if there is one of its shape; whether there is.
        run: the recording of that shape."""
        self.step = step
        self._run, self._calls = run, None
        if isinstance(run, FlaggedRun):
            self._run, self._calls = run.launch, run
        self._stream = self._streams.current()
        self._left = self._buffers.left(batch)
        self._brought = self._buffers.brought(len(batch.tokens), step.needs)
        return self.go_on(batch)

    def go_on(self, batch: Batch) -> bool:
        """The same of a step that was launched ahead itself."""
        make, self.batch, batch.successor = batch.successor, None, None
        self.restorable = False
        following = make() if make is not None and self._left else None
        if following is None:
            return False
        self._left -= 1
        self.restorable = following.draws is not None
        self._wait_behind(self.step if self.restorable else None)
        self._rows = self._buffers.upload_ahead(following)
        assert self._run is not None
        self._run(_NO_STATE)
        self.batch = following
        return True

    def _wait_behind(self, step: Step | None) -> None:
        """Let the GPU say when the step before is done, and wait for the rows of the next one. step: that before, whose
        residual stream is kept."""
        self._number += 1
        self._streams.write_value(self._stream, self._asked, self._number)
        if step is not None:
            self._buffers.keep(step)
        self._streams.wait_value(self._stream, self._answered, self._number)

    def forget(self) -> None:
        """No step follows, and nothing is under way: the recording is let go."""
        self.batch = self._run = self._calls = None

    def answer_calls(self) -> None:
        """Compute what is left of the CPU's part of the step, which was launched ahead, where the GPU asks for it by
        flags."""
        if self._calls is not None:
            self._calls.answer()

    def tokens(self) -> NDArray[Any]:
        """Wait for its tokens, the result of the step before it, and let it begin; they are those of the batch then, or
        numbers of `NOT_FINITE`. Where one could not be drawn: the candidates. PowerInferError where the GPU does not
        bring them, LateAnswerError where it waited too long for its rows, or for the CPU's part of the step before."""
        assert self.batch is not None
        arguments = self._brought, self.batch, self._rows
        if self._link is not None:
            self._begin_calls(self._link)
        while not self._embedding.answer_tokens(self._host, self._number, flags.LOOK, *arguments):
            # All that the GPU was given may have been done just now.
            done = self._streams.current().query()
            if done and not self._embedding.answer_tokens(self._host, self._number, 0.0, *arguments):
                raise PowerInferError("the GPU did not bring the tokens of a step: load the model again")
        if self._host.released:  # what it brought may be of the step behind, which is no step
            self.batch.tokens[:] = -1
            waited = f"the embeddings of a step's tokens were not there for {flags.PATIENCE:.0f} s"
            raise LateAnswerError(f"{waited}; stop what keeps this program from its cores")
        tokens: NDArray[Any] = self.batch.tokens
        if self.batch.draws is not None and tokens.min() < 0:
            tokens = self._buffers.copied_candidates(len(tokens))  # before the GPU writes those of the next step
            self._host.answer(self._number)
        if self._calls is not None:
            self._calls.answer_beside()
        return tokens

    def _begin_calls(self, link: Link) -> None:
        """Wait until the step before has ended, and begin to count calls anew. PowerInferError if one failed."""
        while not self._host.wait(self._number, flags.LOOK) and not self._streams.current().query():
            pass
        link.check()
        link.begin_step()

    def release(self) -> None:
        """A step is broken off: the GPU waits for no rows any more, and nobody asks for the next step."""
        self.batch = None
        self._flags.release()
