"""Exchange between two GPUs, for layers of the one, the owner, whose experts are spread over both.

    owner    ... x, selection | asked = 6 | its own experts | wait for answered >= 6 | + the other's sums ...
    helper         wait for asked >= 6 | its experts | answered = 6 |

Cards for PCs cannot read each other's memory, so what the one sends the other goes through memory of the host: in steps
of few tokens kernels write and read it in place, in longer ones it is copied. Numbers that streams write and wait for,
in the same memory, are in recordings, too; the helper has one of its own for each of the owner's. Without them events
make the streams wait, and nothing is recorded. The host waits for neither; a thread ends a step whose helper does not
answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from threading import Event as Alarm
from threading import Thread
from typing import TYPE_CHECKING, Any

import numpy as np

from powerinfer.config import ModelConfig
from powerinfer.devices import flags
from powerinfer.devices.flags import FLAG_BYTES
from powerinfer.devices.link import EXPERT_BYTES
from powerinfer.devices.streams import streams_of
from powerinfer.errors import PowerInferError
from powerinfer.kernels import gpu_host
from powerinfer.kernels.cpu import NEURON_TOKENS

if TYPE_CHECKING:
    from torch import Tensor, device

    from powerinfer.devices.recording import Recorder, Run, State
    from powerinfer.devices.streams import Recorded
    from powerinfer.devices.torch_device import MemoryShare

_SPACING = FLAG_BYTES // 8
"""Numbers of 32 bits from one flag to the other."""

_RELEASED = (1 << 31) - 1
"""A number as high as any that is waited for, and as near as the comparison needs."""

LOOK = 1.0
"""Seconds between two looks at a step that is under way."""


def card_link_bytes(tokens: int, config: ModelConfig) -> tuple[int, int]:
    """Bytes in RAM, and on the GPU that computes a part, of what sends it steps of up to that many tokens: inputs of
    experts and their sums, float32, and each token's selection."""
    width, top_k = _sizes(config)
    nbytes = tokens * (2 * 4 * width + EXPERT_BYTES * top_k)
    return nbytes + FLAG_BYTES, nbytes


def _sizes(config: ModelConfig) -> tuple[int, int]:
    """The widest input of experts, and the most experts of a token."""
    width = max((one.latents or config.d_model for one in config.experts.values()), default=0)
    return width, max((one.router.top_k for one in config.experts.values()), default=0)


class CardLink:
    """Buffers in memory of the host between an owner and a helper, one set for all of the owner's layers, at fixed
    addresses, and who waits for whom. An exchange begins once the one before it has ended, as the owner waits for its
    sums. Exchanges of a step have numbers that grow."""

    def __init__(
        self, owner: device, helper: device, max_tokens: int, config: ModelConfig, number: int, share: MemoryShare
    ) -> None:
        """number: of the helper among the GPUs; share: the model's, of the helper's memory."""
        import torch

        width, top_k = _sizes(config)
        self.number = number
        self.share = share
        self.device = helper
        self.expert_bytes = 0  # bytes of experts on the helper
        self.temporaries = 0  # bytes of temporaries on the helper, once steps were rehearsed
        self.recorded_bytes = 0  # bytes of recordings on the helper, likewise
        self.meet_us: float | None = None  # microseconds of an exchange, once it was tried
        self._owner = owner
        self._of_owner, self._of_helper = streams_of(owner), streams_of(helper)
        self._stream = self._of_helper.stream()
        inputs = max_tokens * (width + EXPERT_BYTES // 4 * top_k)
        self._sent = self._of_owner.pinned(inputs, torch.float32)
        self._back = self._of_owner.pinned(max_tokens * width, torch.float32)
        self._numbers = self._of_owner.pinned(2 * _SPACING, torch.int32)
        self._host = self._numbers.numpy().view(np.uint32)
        self._mapped: dict[str, Any] = {}  # both buffers as the owner, and the helper, have them
        self._flags: dict[str, tuple[int, int]] = {}  # the addresses of asked and answered, likewise
        self._computed = self._of_helper.event()
        self._answers: list[Callable[[], None]] | None = None  # of what is recorded now
        self._watch: _Watch | None = None
        self.problem = self._try()

    @property
    def nbytes(self) -> int:
        """Bytes in RAM."""
        return int(self._sent.nbytes + self._back.nbytes) + FLAG_BYTES

    @property
    def records(self) -> bool:
        """Whether exchanges can be part of recordings."""
        return bool(self._flags)

    # ---------------------------------------------------------------- the owner's part

    def send(self, rows: Tensor, few: bool, at: int = 0) -> None:
        """Write numbers of the owner, of 32 bits, to where the helper finds them, from the number `at` on. few: in a
        step of few tokens."""
        n = rows.numel()
        if few and self._mapped:
            gpu_host.put(rows, self._mapped["owner"][0][at : at + n].view(rows.dtype).view(rows.shape))
        else:
            self._sent[at : at + n].view(rows.dtype).copy_(rows.reshape(-1), non_blocking=True)

    def ask(self, number: int, compute: Callable[[], None]) -> None:
        """Let the helper compute once all that the owner was given is done; the owner goes on meanwhile, until `join`.
        compute: gives the helper's stream its work, static, with `received` and `give`.

        The owner asks first: to load a kernel may take a wait for the helper, which must not wait for a number then
        that is not yet written."""
        owner = self._of_owner
        if not self._flags:
            asked = owner.event()
            asked.record(owner.current())
            with self._use_helper():
                self._of_helper.current().wait_event(asked)
                compute()
                self._computed.record(self._of_helper.current())
            return
        owner.write_value(owner.current(), self._flags["owner"][0], number)
        answer = partial(self._answer, number, compute)
        if self._answers is not None:
            self._answers.append(answer)
            return
        with self._use_helper(), (self._watch.suspended() if self._watch is not None else nullcontext()):
            answer()

    def join(self, number: int) -> None:
        """Let what the owner is given from now on begin once the helper's sums are there."""
        owner = self._of_owner
        if not self._flags:
            owner.current().wait_event(self._computed)
        else:
            owner.wait_value(owner.current(), self._flags["owner"][1], number)

    def sums(self, tokens: int, width: int) -> Tensor:
        """The helper's sums, float32 [tokens, width], in memory of the owner."""
        if tokens <= NEURON_TOKENS and self._mapped:
            return gpu_host.take(self._mapped["owner"][1][: tokens * width].view(tokens, width))
        return self._back[: tokens * width].view(tokens, width).to(self._owner, non_blocking=True)

    def recording(self, recorder: Recorder) -> Recorder:
        """The same recorder, of operators that ask: each recording has one beside it, of what the helper computes."""
        beside = self._of_helper.recorder()
        assert beside is not None

        def record(run: Run, state: State) -> Run:
            answers: list[Callable[[], None]] = []
            self._answers = answers
            try:
                again = recorder(run, state)
            finally:
                self._answers = None
            if not answers:
                return again

            def answer() -> None:
                for each in answers:
                    each()

            with self._use_helper():
                return partial(self._replay, again, beside(answer))

        return record

    def _replay(self, again: Run, answer: Recorded, before: State) -> State:
        with self._use_helper():
            answer()
        return again(before)

    # ---------------------------------------------------------------- the helper's part

    @contextmanager
    def _use_helper(self) -> Iterator[None]:
        """A context in which the helper's stream is given work."""
        with self._of_helper.active(), self._of_helper.on(self._stream):
            yield

    def _answer(self, number: int, compute: Callable[[], None]) -> None:
        helper = self._of_helper
        helper.wait_value(helper.current(), self._flags["helper"][0], number)
        compute()
        helper.write_value(helper.current(), self._flags["helper"][1], number)

    def received(self, n: int, few: bool) -> Tensor:
        """The first n numbers that were sent, float32, in memory of the helper."""
        if few and self._mapped:
            return gpu_host.take(self._mapped["helper"][0][:n])
        return self._sent[:n].to(self.device, non_blocking=True)

    def give(self, sums: Tensor) -> None:
        """Send the owner the helper's sums, float32 [tokens, width]."""
        tokens, width = sums.shape
        if tokens <= NEURON_TOKENS and self._mapped:
            gpu_host.put(sums, self._mapped["helper"][1][: tokens * width].view(tokens, width))
        else:
            self._back[: tokens * width].view(tokens, width).copy_(sums, non_blocking=True)

    # ---------------------------------------------------------------- steps

    def begin_step(self) -> None:
        """A step begins; nothing of the last one is under way."""
        self._host[:] = 0
        if self._flags:
            self._watch = self._watch or _Watch(self._host)
            self._watch.begin()

    def check(self) -> None:
        """A step has ended. PowerInferError if it did not go on by itself."""
        if self._watch is not None and self._watch.end():
            late = f"{self._owner} has waited for {self.device} for {flags.PATIENCE:.0f} s"
            raise PowerInferError(f"{late}: look at both with nvidia-smi if that happens again")

    def release(self) -> bool:
        """A step is broken off: let neither wait for the other. Whether both have done what they were given; until then
        the owner may still write a lower number."""
        self._host[:] = _RELEASED
        return self._is_done()

    def finish(self) -> None:
        """Wait for the helper, which waits for the owner no more."""
        if self._watch is not None:
            self._watch.end()
        with suppress(RuntimeError):
            self._of_helper.finish()

    def close(self) -> None:
        """End the thread; no step follows. May be called twice."""
        if self._watch is not None:
            self._watch.close()

    @contextmanager
    def measured(self) -> Iterator[None]:
        """A context in which the largest step runs: what it takes of the helper for temporaries is noted."""
        import torch

        if self.device.type != "cuda":
            yield
            return
        cuda = torch.cuda
        cuda.reset_peak_memory_stats(self.device)
        before = cuda.memory_allocated(self.device)
        yield
        self.temporaries = int(cuda.max_memory_allocated(self.device)) - int(before)

    def _is_done(self) -> bool:
        """Whether both have done what they were given."""
        with self._of_owner.active():
            return self._of_owner.current().query() and self._stream.query()

    # ---------------------------------------------------------------- a trial

    def _try(self) -> str:
        """Find out how both can exchange; the reason why exchanges are not recorded, empty: they are."""
        streams = {"owner": self._of_owner, "helper": self._of_helper}
        with suppress(RuntimeError):
            self._mapped = {name: (one.mapped(self._sent), one.mapped(self._back)) for name, one in streams.items()}
            if self._tried(record=False):
                self._mapped = {}
        try:
            asked = {name: one.address(self._numbers) for name, one in streams.items()}
            self._flags = {name: (address, address + 4 * _SPACING) for name, address in asked.items()}
            reason = self._tried(record=self._of_owner.recorder() is not None)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
        if reason:
            self._flags = {}
        return reason and f"{self._owner} and {self.device}: {reason}"

    def _tried(self, record: bool) -> str:
        """The reason why numbers do not arrive, launched or, with `record`, replayed; empty: they do."""
        import torch

        n = min(64, self._back.numel())
        with self._of_owner.active():
            x = torch.zeros(n, dtype=torch.float32, device=self._owner)

        def compute() -> None:
            self.give(self.received(n, few=True).add_(1).view(1, n))

        def run(state: State) -> State:
            for number in range(1, flags.EXCHANGES + 1):
                self.send(x, few=True)
                self.ask(number, compute)
                self.join(number)
                x.copy_(self.sums(1, n).view(-1))
            return state

        nothing: State = (None, None, None)
        again: Run = run
        try:
            with torch.inference_mode(), self._of_owner.active():
                for turn in range(4 if record else 2):
                    if turn == 2:
                        recorder = self._of_owner.recorder()
                        assert recorder is not None
                        again = self.recording(_stateless(recorder))(run, nothing)
                    self._host[:] = 0
                    x.fill_(turn)
                    self._of_owner.finish()
                    begin = time.perf_counter()
                    again(nothing)
                    if not self._ends():
                        return "one GPU waits for the other for ever"
                    self.meet_us = 1e6 * (time.perf_counter() - begin) / flags.EXCHANGES
                    if not (x.cpu() == turn + flags.EXCHANGES).all():
                        return "numbers of one GPU do not arrive at the other"
        except RuntimeError as error:
            return str(error).partition("\n")[0]
        finally:
            self._host[:] = _RELEASED
            self._of_helper.finish()
            self._of_owner.finish()
            self._host[:] = 0
        return ""

    def _ends(self) -> bool:
        """Wait for both, in a trial; whether they end by themselves."""
        until = time.monotonic() + flags.TRIAL_PATIENCE
        while not self._is_done():
            if time.monotonic() > until:
                return False
        return True


def _stateless(recorder: Callable[[Callable[[], None]], Recorded]) -> Recorder:
    """A recorder of runs that pass nothing on."""

    def record(run: Run, state: State) -> Run:
        again = recorder(lambda: run(state) and None)

        def replay(before: State) -> State:
            again()
            return before

        return replay

    return record


class _Watch:
    """A thread that ends a step in which an exchange has lasted for `flags.PATIENCE` seconds: a GPU that has failed
    answers nothing, and the other would wait for ever."""

    def __init__(self, numbers: np.ndarray) -> None:
        """numbers: those of both flags, in memory of the host."""
        self._numbers = numbers
        self._steps = 0
        self._under_way = self._released = self._suspended = False
        self._closed = Alarm()
        Thread(target=self._look, name="powerinfer-cards", daemon=True).start()

    def begin(self) -> None:
        self._steps += 1
        self._under_way, self._released = True, False

    def end(self) -> bool:
        """A step has ended, or was broken off; whether this thread has ended it."""
        self._under_way = False
        return self._released

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """A context in which the host is at work, not a GPU: it may compile kernels."""
        self._suspended = True
        try:
            yield
        finally:
            self._suspended = False

    def close(self) -> None:
        self._closed.set()

    def _look(self) -> None:
        before, since = None, time.monotonic()
        while not self._closed.wait(LOOK):
            now = self._steps, int(self._numbers[0]), int(self._numbers[_SPACING])
            if not self._under_way or self._suspended or now != before:
                before, since = now, time.monotonic()
            elif time.monotonic() - since > flags.PATIENCE and now[1] > now[2]:
                self._released = True
                self._numbers[:] = _RELEASED
