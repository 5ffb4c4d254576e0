"""Experts that a policy exchanges between a GPU and the CPU, which has all of them: decided between steps, and copied
beside them.

    step    1 ............ | 2 ............ | 3 ............
    policy                 decides          decides
    copies                   into slots       ...
    tables                 - those leaving  + those copied

After a step of few tokens the policy looks at what all layers have counted (`placement.experts`). Experts that leave
have no slot from the next step on. During that step those that come are copied, and they have the slots from the step
behind it on: a replay reads tables that change only between steps, and which experts a step finds on the GPU does not
depend on how long a copy takes. For that the step behind waits until the copies have ended. What has no slot the CPU
computes.

One thread gives them to a stream of their own, beside that of the steps. They are sent from the CPU's panels, which the
GPU reads by itself where the driver registers them (devices/registered.py), through a buffer of one expert on the GPU.
Where experts are not in panels, or the GPU has other bits of them (types that it lacks, neurons told apart, experts on
disk), that thread reads them from the model's file, splits codes from scales, and copies from memory that is not
pinned: slower than the link, and under Python's lock for much of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from powerinfer.devices.registered import RegisteredMemory
from powerinfer.devices.streams import Event, Stream, Streams, streams_of
from powerinfer.devices.torch_device import gpu_failures
from powerinfer.errors import ChangedError, GpuMemoryError, ModelError, PowerInferError
from powerinfer.kernels.cpu import NEURON_TOKENS
from powerinfer.placement.experts import LayerSwap, Policy

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from powerinfer.devices.stage import Stage

COPIED_BYTES = 32 << 20
"""Bytes that are copied for a step, at most, but at least an expert: the CPU reads its own beside them."""

BESIDE = 0.5
"""Share of a step within which its copies end, by the rates: the step behind waits for what is left of them."""

FILE_RATE = 2e9
"""Bytes a second of experts from the file, by estimate."""

_LINE = 32
"""Numbers of a table begin at a multiple of these: each at a line of memory."""


Send = Callable[[Sequence[NDArray[Any]]], Sequence[Any]]
"""Sends arrays to the device: their bytes there, uint8 tensors, until it is called again."""


class Pace(NamedTuple):
    """The time for copies. seconds: of a step, as it is planned; rate: bytes a second of the link."""

    seconds: float
    rate: float


UNKNOWN = Pace(np.inf, np.inf)


class Exchanging(Protocol):
    """The FFN of a layer whose experts are exchanged. tally: as of `Policy.watch`; in_slot: the expert in each slot,
    -1: none."""

    layer: int
    tally: NDArray[np.int64]
    in_slot: list[int]

    @property
    def expert_bytes(self) -> int:
        """Bytes of an expert on the GPU."""
        ...

    def vacate(self, slot: int) -> None:
        """The slot has no expert any more; not while a step runs."""
        ...

    @property
    def sent_bytes(self) -> int:
        """Bytes of an expert that is sent from panels; 0: it is read from the file."""
        ...

    def write(self, slot: int, expert: int, send: Send) -> None:
        """Copy an expert into a slot that no step reads, with this thread's stream."""
        ...

    def occupy(self, slot: int, expert: int) -> None:
        """The slot has the expert; not while a step runs."""
        ...


class _Copies(NamedTuple):
    """Copies beside a step. written: those that are whole, once the thread has ended; done: the GPU is past them."""

    written: list[LayerSwap]
    done: Event
    thread: Future[None]


class _Sender:
    """Sends experts, one at a time, through a buffer on the device and one of pinned memory, with a stream."""

    def __init__(self, streams: Streams, registered: RegisteredMemory, device: torch.device, nbytes: int) -> None:
        """nbytes: of the largest."""
        import torch

        self._streams, self._registered = streams, registered
        self._pinned = streams.pinned(nbytes, torch.uint8)
        self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._read = streams.event(sleeps=True)  # the pinned buffer was

    def send(self, parts: Sequence[NDArray[Any]]) -> list[Tensor]:
        """Send arrays as `Send` says, behind all that the current stream has."""
        places, runs, copied = self._registered.arranged(parts, self._pinned)
        if copied:
            self._read.synchronize()
        for to, part in copied:
            np.copyto(to, part)
        for begin, source in runs:
            self._buffer[begin : begin + len(source)].copy_(source, non_blocking=True)
        if copied:
            self._read.record(self._streams.current())
        return [self._buffer[place] for place in places]


class Copier:
    """Exchanges experts as a policy says; `GpuLayers` tells it when steps end.

    on: whether the policy is told what steps select. tell: gets the failure of a copy that leaves the device usable,
    after which nothing is exchanged any more: a step does without copies, for the CPU has all experts. None: the
    failure is raised, as others are.
    """

    def __init__(self, policy: Policy, pace: Pace = UNKNOWN) -> None:
        self.policy = policy
        self.on = True
        self.registered: RegisteredMemory | None = None  # the stage's, or of its own
        self._shares_memory = False
        self._pace = pace
        self._device: torch.device | None = None
        self._sender: _Sender | None = None
        self.tell: Callable[[PowerInferError], None] | None = None
        self._ffns: dict[int, Exchanging] = {}
        self._limit = 0
        self._pool = ThreadPoolExecutor(1)
        self._copying: _Copies | None = None
        self._tables: tuple[Tensor, Tensor] | None = None  # on the device, and as the host writes them
        self._places: dict[int, slice] = {}  # of layers in the tables
        self._streams: Streams | None = None
        self._side: Stream | None = None

    def use(self, device: torch.device, stage: Stage | None) -> None:
        """Exchange experts on a device. stage: what streams to it passes through that, so both read the same memory."""
        if self._streams is None:
            self._device, self._streams = device, streams_of(device)
            self._side, self._shares_memory = self._streams.stream(), stage is not None
            self.registered = RegisteredMemory(self._streams) if stage is None else stage.registered

    def start(self) -> None:
        """Begin to exchange experts: what is sent is registered now."""
        assert self.registered is not None
        self.on = True
        if any(ffn.sent_bytes for ffn in self._ffns.values()):
            self.registered.register()

    def table(self, layer: int) -> tuple[Tensor, NDArray[np.int32]]:
        """The slot of each expert of a layer, int32 [experts]: as the device reads it, and as the host writes it."""
        import torch

        if self._tables is None:
            assert self._streams is not None
            at = 0
            for number, experts in self.policy.sizes.items():
                self._places[number] = slice(at, at + experts)
                at += -(-experts // _LINE) * _LINE
            host = self._streams.pinned(at, torch.int32)
            self._tables = torch.zeros(at, dtype=torch.int32, device=self._device), host
        on_device, host = self._tables
        place = self._places[layer]
        return on_device[place], host[place].numpy()

    def add(self, ffn: Exchanging) -> None:
        """Exchange experts of a layer, too; its slots have those of the policy."""
        self._ffns[ffn.layer] = ffn
        ffns = self._ffns.values()
        rate = self._pace.rate if all(one.sent_bytes for one in ffns) else min(self._pace.rate, FILE_RATE)
        copied = min(COPIED_BYTES, BESIDE * self._pace.seconds * rate)
        self._limit = max(1, int(copied / max(1, *(one.expert_bytes for one in ffns))))
        self.policy.watch(ffn.layer, ffn.tally)

    @property
    def gpu_bytes(self) -> int:
        """Bytes on the device beside the experts."""
        return max((ffn.sent_bytes for ffn in self._ffns.values()), default=0)

    def _send(self, parts: Sequence[NDArray[Any]]) -> Sequence[Tensor]:
        if self._sender is None:
            assert self._streams is not None and self.registered is not None and self._device is not None
            self._sender = _Sender(self._streams, self.registered, self._device, self.gpu_bytes)
        return self._sender.send(parts)

    def rehearse(self) -> None:
        """Copy an expert of each layer to where it is: what copies take beside a step has its memory then, and kernels
        are compiled. No step runs."""
        swaps = [(layer, 0, ffn.in_slot[0]) for layer, ffn in self._ffns.items() if ffn.in_slot[0] >= 0]
        self._begin(swaps)
        self.settle()

    # ---------------------------------------------------------------- between steps

    def end(self, tokens: int) -> None:
        """A step of that many tokens has ended: use what was copied beside it, and begin with what the policy wants
        next. Raises what a copy raised, unless `tell` gets it; then nothing is copied any more."""
        (came, failure), swaps = self._finish(), list[LayerSwap]()
        if self.on and tokens <= NEURON_TOKENS:
            swaps = self.policy.decide(tokens, self._limit)
        else:
            self.policy.forget()
        self._begin(swaps)
        if came or swaps:
            self._publish()
        self._tell(failure)

    def forget(self) -> None:
        """A step has failed."""
        self.policy.forget()

    def settle(self) -> None:
        """Wait for what is being copied, and use it."""
        came, failure = self._finish()
        if came:
            self._publish()
        self._tell(failure)

    def follow(self, policy: Policy) -> None:
        """Let another policy decide, and have its experts in their slots."""
        self.settle()
        self.policy = policy
        swaps = []
        for layer, ffn in self._ffns.items():
            policy.watch(layer, ffn.tally)
            wanted = enumerate(policy.resident(layer).tolist())
            swaps += [(layer, slot, expert) for slot, expert in wanted if ffn.in_slot[slot] != expert >= 0]
        self._begin(swaps)
        self.settle()

    def _begin(self, swaps: Sequence[LayerSwap]) -> None:
        """The slots have nothing from now on, and are written beside what the GPU does next. No step runs, so none
        reads them."""
        if not swaps:
            return
        for layer, slot, _ in swaps:
            self._ffns[layer].vacate(slot)
        streams, side, ffns = self._streams, self._side, self._ffns
        assert streams is not None and side is not None
        written, done = list[LayerSwap](), streams.event()

        def copy() -> None:
            with streams.active(), streams.on(side):
                try:
                    for layer, slot, expert in swaps:
                        ffns[layer].write(slot, expert, self._send)
                        written.append((layer, slot, expert))
                finally:
                    done.record(side)

        self._copying = _Copies(written, done, self._pool.submit(copy))

    def _finish(self) -> tuple[bool, PowerInferError | None]:
        """Give experts that were copied whole their slots, once the GPU is past its copies: whether there were any, and
        the failure of one behind them that leaves the device usable. Slots of others stay empty."""
        if self._copying is None or self._streams is None:
            return False, None
        (written, done, thread), self._copying = self._copying, None
        failure: PowerInferError | None = None
        try:
            with gpu_failures("exchanging experts", "give less --vram"):
                thread.result()
        except (GpuMemoryError, ModelError) as error:
            self.on, failure = False, error
        except BaseException:
            self.on = False
            raise
        self._streams.current().wait_event(done)
        for layer, slot, expert in written:
            self._ffns[layer].occupy(slot, expert)
        return bool(written), failure

    def _tell(self, failure: PowerInferError | None) -> None:
        """Tell, or raise, what `_finish` returned; once the GPU knows which slots are in use."""
        if failure is None:
            return
        if self.tell is None or isinstance(failure, ChangedError):
            raise failure
        self.tell(failure)

    def _publish(self) -> None:
        """Tell the GPU which experts are in slots, before the next step."""
        assert self._tables is not None
        on_device, host = self._tables
        on_device.copy_(host, non_blocking=True)

    def close(self) -> None:
        """End the thread that copies, once the GPU is past its copies: their memory is freed then. May be called
        twice."""
        if self._copying is not None and self._streams is not None:
            self._copying.thread.exception()  # wait
            with suppress(RuntimeError):  # of a device that has failed
                self._streams.finish()
        self._pool.shutdown()
        if self.registered is not None and not self._shares_memory:
            self.registered.close()
        self._copying = self._tables = self._sender = None
        self._ffns.clear()
