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

One thread reads experts from the model's file, splits their codes from their scales, and copies them from memory that
is not pinned: slower than the link, and under Python's lock for much of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from powerinfer.devices.streams import Event, Stream, Streams, streams_of
from powerinfer.devices.torch_device import gpu_failures
from powerinfer.errors import ChangedError, GpuMemoryError, ModelError, PowerInferError
from powerinfer.kernels.cpu import NEURON_TOKENS
from powerinfer.placement.experts import LayerSwap, Policy

if TYPE_CHECKING:
    import torch
    from torch import Tensor

COPIED_BYTES = 32 << 20
"""Bytes that are copied for a step, at most, but at least an expert. A thread that copies 2 to 4 GB/s, by estimate, has
them in 8 to 16 ms: the step behind waits for what is left of that."""

_LINE = 32
"""Numbers of a table begin at a multiple of these: each at a line of memory."""


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

    def write(self, slot: int, expert: int) -> None:
        """Copy an expert into a slot that has none, with this thread's stream."""
        ...

    def occupy(self, slot: int, expert: int) -> None:
        """The slot has the expert; not while a step runs."""
        ...


class _Copies(NamedTuple):
    """Copies beside a step. written: those that are whole, once the thread has ended; done: the GPU is past them."""

    written: list[LayerSwap]
    done: Event
    thread: Future[None]


class Copier:
    """Exchanges experts as a policy says; `GpuLayers` tells it when steps end.

    on: whether the policy is told what steps select. tell: gets the failure of a copy that leaves the device usable,
    after which nothing is exchanged any more: a step does without copies, for the CPU has all experts. None: the
    failure is raised, as others are.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.on = True
        self.tell: Callable[[PowerInferError], None] | None = None
        self._ffns: dict[int, Exchanging] = {}
        self._limit = 0
        self._pool = ThreadPoolExecutor(1)
        self._copying: _Copies | None = None
        self._tables: tuple[Tensor, Tensor] | None = None  # on the device, and as the host writes them
        self._places: dict[int, slice] = {}  # of layers in the tables
        self._streams: Streams | None = None
        self._side: Stream | None = None

    def table(self, layer: int, device: torch.device) -> tuple[Tensor, NDArray[np.int32]]:
        """The slot of each expert of a layer, int32 [experts]: as the device reads it, and as the host writes it."""
        import torch

        if self._tables is None:
            self._streams, at = streams_of(device), 0
            self._side = self._streams.stream()
            for number, experts in self.policy.sizes.items():
                self._places[number] = slice(at, at + experts)
                at += -(-experts // _LINE) * _LINE
            host = self._streams.pinned(at, torch.int32)
            self._tables = torch.zeros(at, dtype=torch.int32, device=device), host
        on_device, host = self._tables
        place = self._places[layer]
        return on_device[place], host[place].numpy()

    def add(self, ffn: Exchanging) -> None:
        """Exchange experts of a layer, too; its slots have those of the policy."""
        self._ffns[ffn.layer] = ffn
        self._limit = max(1, COPIED_BYTES // max(one.expert_bytes for one in self._ffns.values()))
        self.policy.watch(ffn.layer, ffn.tally)

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
                        ffns[layer].write(slot, expert)
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
        self._copying = self._tables = None
        self._ffns.clear()
