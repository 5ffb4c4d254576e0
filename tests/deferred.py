"""A stand-in for a GPU that works later: what it is given queues up, and runs when its stream gets round to it.

A device of torch's, "deferred", with tensors of its own: numpy cannot see them, and they do not mix with the host's.
As on CUDA

- operations of a stream run in their order; those of two streams in any, except where one waits for an event;
- the host goes on at once. It waits where torch does: for events, for results whose shape or value it asks for, for
  copies that are not `non_blocking` or whose memory on the host is not pinned. What it reads earlier is not there yet,
  and what it overwrites too early is copied as it is then;
- memory that is freed is given out again, to the same stream, though others may still be using it; new memory holds
  NaN and -1;
- a recording runs nothing; it is replayed on the same memory, and recordings share theirs. Streams that wait for an
  event of a recording are part of it, and its own stream must wait for them before it ends;
- streams call functions of the host in their order;
- streams write numbers, and wait for them, in their order. Nothing else makes them wait for the host.

Which stream works when is drawn from a seed: streams stall, run on, and take turns. Operations are computed by torch on
the CPU, so the answer is that of torch's CPU device, bit for bit.

It has clocks, too, of each stream and of the host, which do not depend on that order: `spend` gives the operations
before it some seconds. Then a step's time is that of the longest chain of operations that wait for each other.
"""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import functools
import linecache
import random
import re
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import gpu_device
import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from triton.runtime.interpreter import GridExecutor

from powerinfer.devices import flags, streams, wanted
from powerinfer.kernels import gpu, gpu_candidates, gpu_delta, gpu_experts, gpu_latent, gpu_mamba

aten = torch.ops.aten

_setup_privateuseone_for_python_backend("deferred")
DEFERRED = torch.device("deferred")

MOODS = (0.0, 0.0, 0.2, 0.9, 1.0)
"""How likely a stream runs its next operation whenever something is launched."""

LENGTHS = (10, 100, 1000)
"""For how many launches at most."""

NEVER = 100
"""How often the host looks at streams of which none can go on, until it is sure that all wait for each other."""

_used: list[Machine] = []
"""The one whose device it is now, last."""


class Tensor(torch.Tensor):
    """A tensor on the device. inner: its memory, which only operations that run may look at."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    inner: torch.Tensor
    block: Block

    @staticmethod
    def __new__(cls, inner: torch.Tensor, block: Block) -> Tensor:
        about = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        with torch.inference_mode(False):  # those of inference mode have no views outside of it
            made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, device=DEFERRED, **about)
        made.inner, made.block = inner, block
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _used[-1].dispatch(func, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Tensor({self.dtype}, {tuple(self.shape)}, on the device)"


class Block:
    """Memory of the device, for as long as a tensor there has it; then its stream may give it to another one."""

    def __init__(self, free: list[np.ndarray], memory: np.ndarray) -> None:
        self._free, self._memory = free, memory

    def __del__(self) -> None:
        self._free.append(self._memory)


class Event:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.recorded = self.reached = 0
        self.times: dict[int, float] = {}  # by number of the record: it may be recorded again before others look
        self._at = 0.0

    def record(self, stream: Stream | None = None) -> None:
        machine = self._machine
        if machine.leaves_out():
            return
        stream, recording = stream or machine.current(), machine.recording
        if recording is not None and stream in recording:
            recording.mark(stream, self)
            return
        machine.outside_of_recordings()
        with machine.lock:
            self.recorded += 1
            number = self.recorded

            def reach() -> None:
                self.reached, self._at = number, time.perf_counter()
                self.times[number] = stream.time

            stream.queue.append(reach)
            machine.tick()

    def synchronize(self) -> None:
        if self._machine.leaves_out():
            return
        number, machine = self.recorded, self._machine
        machine.wait(lambda: self.reached >= number)
        machine.host = max(machine.host, self.times.get(number, 0.0))

    def query(self) -> bool:
        with self._machine.lock:
            self._machine.tick()
            return self.reached >= self.recorded

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end._at - self._at)


@dataclasses.dataclass(eq=False)
class Awaited:
    """A number that the host writes, or another device's stream, from which on a stream goes on. time: when it was
    written."""

    machine: Machine
    address: int
    value: int

    @property
    def reached(self) -> bool:
        there = ctypes.c_uint32.from_address(self.address).value
        return ctypes.c_int32(there - self.value).value >= 0

    @property
    def time(self) -> float:
        of_streams = self.machine.written.get((self.address, self.value))
        return self.machine.answers.get(self.value, 0.0) if of_streams is None else of_streams


class Stream:
    """queue: operations, and what to wait for: (event, number), or a number of the host's. time: its clock."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.queue: deque[Callable[[], Any] | tuple[Event, int] | Awaited] = deque()
        self.mood = self.time = 0.0

    def pass_time(self, since: float, seconds: float) -> None:
        """Some seconds pass, from that moment of the host's clock on at the earliest."""
        self.time = max(self.time, since) + seconds

    def wait_event(self, event: Event) -> None:
        if self._machine.leaves_out():
            return
        recording = self._machine.recording
        if recording is not None and (event in recording.marks or self in recording):
            recording.wait(self, event)
        else:
            self._machine.outside_of_recordings()
            self.queue.append((event, event.recorded))

    def query(self) -> bool:
        machine = self._machine
        machine.outside_of_recordings()
        with machine.lock:
            machine.idle = 0 if any(stream.ready() for stream in machine.streams) else machine.idle + 1
            if self.queue and machine.idle > NEVER:
                raise RuntimeError("the host waits for what never happens")
            machine.tick()
            return not self.queue

    def ready(self) -> bool:
        """Whether there is something to run."""
        while self.queue and isinstance(self.queue[0], tuple | Awaited):
            first = self.queue[0]
            if isinstance(first, Awaited):
                if not first.reached:
                    return False
                self.time = max(self.time, first.time)
            else:
                event, number = first
                if event.reached < number:
                    return False
                self.time = max(self.time, event.times.get(number, 0.0))
            self.queue.popleft()
        return bool(self.queue)

    def step(self) -> None:
        operation = self.queue.popleft()
        assert callable(operation)
        with torch.inference_mode():
            operation()


@dataclasses.dataclass(eq=False)
class Mark:
    """An event in a recording: in a stream, behind so many operations."""

    stream: Stream
    count: int


class Recording:
    """What streams are given while one of them records: operations, marks, and (mark,) to wait for."""

    def __init__(self, origin: Stream) -> None:
        self.streams: dict[Stream, list[Any]] = {origin: []}
        self.marks: dict[Event, Mark] = {}
        self._origin = origin
        self._joined: dict[Stream, int] = {}  # how much of a stream others wait for

    def __contains__(self, stream: Stream) -> bool:
        return stream in self.streams

    def mark(self, stream: Stream, event: Event) -> None:
        mark = self.marks[event] = Mark(stream, len(self.streams[stream]) + 1)
        self.streams[stream].append(mark)

    def wait(self, stream: Stream, event: Event) -> None:
        if event in self.marks:
            mark = self.marks[event]
            self.streams.setdefault(stream, []).append((mark,))
            self._joined[mark.stream] = max(self._joined.get(mark.stream, 0), mark.count)
        elif event.recorded:
            raise RuntimeError("CUDA error: dependency created on uncaptured work in another stream")

    def end(self) -> None:
        for stream, operations in self.streams.items():
            if stream is not self._origin and self._joined.get(stream, 0) < len(operations):
                raise RuntimeError("CUDA error: capturing stream has unjoined work")

    def replay(self, machine: Machine) -> None:
        """Streams of their own have what others than the first were given."""
        events: defaultdict[Mark, Event] = defaultdict(lambda: Event(machine))
        streams = [machine.current(), *machine.branches(len(self.streams) - 1)]
        streams[0].queue.append(functools.partial(streams[0].pass_time, machine.host, 0.0))

        def reach(event: Event, stream: Stream) -> None:
            event.reached, event.times[1] = 1, stream.time

        for stream, operations in zip(streams, self.streams.values(), strict=True):
            for operation in operations:
                if isinstance(operation, Mark):
                    stream.queue.append(functools.partial(reach, events[operation], stream))
                elif isinstance(operation, tuple):
                    stream.queue.append((events[operation[0]], 1))
                elif isinstance(operation, float):
                    stream.queue.append(functools.partial(stream.pass_time, 0.0, operation))
                elif isinstance(operation, Written):
                    stream.queue.append(functools.partial(operation.run, stream))
                else:
                    stream.queue.append(operation)


@dataclasses.dataclass(eq=False)
class Written:
    """A number that a stream writes for the host, which answers it after some seconds."""

    machine: Machine
    address: int
    value: int
    seconds: float

    def run(self, stream: Stream) -> None:
        machine = self.machine
        machine.written[self.address, self.value] = stream.time
        machine.answered = max(machine.answered, stream.time) + self.seconds
        machine.answers[self.value] = machine.answered
        ctypes.c_uint32.from_address(self.address).value = self.value


class Machine:
    """The device, as `devices.streams.Streams` has it. without: calls of events and streams from this line of source
    do nothing. host: the host's clock; called: seconds of the next call of the host by a stream; answers: when the host
    answers, by number, if it does so in those seconds, one call after another."""

    def __init__(self, seed: int, without: str | None = None) -> None:
        self.lock = threading.RLock()
        self.replays = 0
        self.host = self.called = self.answered = 0.0
        self.answers: dict[int, float] = {}
        self.written: dict[tuple[int, int], float] = {}  # when streams wrote numbers, by address
        self.idle = 0
        self._without = without
        self._random = random.Random(seed)
        self.streams: list[Stream] = []
        self._branches: list[Stream] = []
        self._default = self.stream()
        self._thread = threading.local()
        self._pinned: dict[int, np.ndarray] = {}  # kept, so that no other memory gets their addresses
        self.registered: dict[int, int] = {}  # bytes by address
        self._free: defaultdict[Any, list[np.ndarray]] = defaultdict(list)
        self._shapes: dict[Any, Any] = {}
        self._until = 0

    # ---------------------------------------------------------------- the interface

    def pinned(self, shape: int | Sequence[int], kind: torch.dtype) -> torch.Tensor:
        memory = np.zeros(shape, torch.empty(0, dtype=kind).numpy().dtype)
        self._pinned[memory.ctypes.data] = memory
        return torch.from_numpy(memory)

    def mapped(self, memory: torch.Tensor) -> Tensor:
        assert memory.data_ptr() in self._pinned
        return Tensor(memory, Block([], np.empty(0, np.uint8)))

    def register(self, address: int, nbytes: int) -> Callable[[], None] | None:
        if any(address < at + size and at < address + nbytes for at, size in self.registered.items()):
            return None
        self.registered[address] = nbytes
        self._pinned[address] = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))

        def release() -> None:
            if any(stream.queue for stream in self.streams):
                raise RuntimeError("the device may still read what is unregistered")
            del self.registered[address], self._pinned[address]

        return release

    def event(self, *, timed: bool = False, sleeps: bool = False) -> Event:
        return Event(self)

    def stream(self) -> Stream:
        with self.lock:
            self.streams.append(Stream(self))
            return self.streams[-1]

    def current(self) -> Stream:
        found: Stream = getattr(self._thread, "stream", self._default)
        return found

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self._thread.stream = self.current(), stream
        try:
            yield
        finally:
            self._thread.stream = before

    def active(self) -> AbstractContextManager[None]:
        return nullcontext()

    def finish(self) -> None:
        if self.leaves_out():
            return
        self.wait(lambda: not any(stream.queue for stream in self.streams))
        self.host = max(self.host, *(stream.time for stream in self.streams))

    def recorder(self) -> Callable[[Callable[[], None]], streams.Recorded]:
        pool: Any = object()

        def record(run: Callable[[], None]) -> streams.Recorded:
            self.outside_of_recordings()
            tape = Recording(self.current())
            self._thread.tape, self._thread.pool = tape, pool
            try:
                run()
            finally:
                self._thread.tape = None
            tape.end()

            def replay() -> None:
                self.outside_of_recordings()
                with self.lock:
                    self.replays += 1
                    tape.replay(self)
                    self.tick()

            return replay

        return record

    def call(self, stream: Stream, function: int, data: int) -> None:
        self.launch(functools.partial(streams.call_now, function, data), stream)
        self.spend(self.called, stream)

    def address(self, memory: torch.Tensor) -> int:
        assert memory.data_ptr() in self._pinned
        return memory.data_ptr()

    def write_value(self, stream: Stream, address: int, value: int) -> None:
        if not self.leaves_out():
            recording, written = self.recording, Written(self, address, value, self.called)
            recorded = recording is not None and stream in recording
            self.launch(written if recorded else functools.partial(written.run, stream), stream)

    def wait_value(self, stream: Stream, address: int, value: int) -> None:
        if not self.leaves_out():
            self.launch(Awaited(self, address, value), stream)

    def branches(self, count: int) -> list[Stream]:
        """Streams for replays."""
        while len(self._branches) < count:
            self._branches.append(self.stream())
        return self._branches[:count]

    @property
    def recording(self) -> Recording | None:
        """Of this thread."""
        return getattr(self._thread, "tape", None)

    # ---------------------------------------------------------------- time

    def launch(self, operation: Any, stream: Stream | None = None) -> None:
        """A stream, by default the current one, or its recording gets an operation."""
        stream, recording = stream or self.current(), self.recording
        with self.lock:
            if recording is not None and stream in recording:
                recording.streams[stream].append(operation)
            else:
                stream.queue.append(operation)
                self.tick()

    def spend(self, seconds: float, stream: Stream | None = None) -> None:
        """A stream, by default the current one, takes so long before it goes on."""
        stream, recording = stream or self.current(), self.recording
        with self.lock:
            if recording is not None and stream in recording:
                recording.streams[stream].append(float(seconds))
            else:
                stream.queue.append(functools.partial(stream.pass_time, self.host, seconds))

    def tick(self) -> None:
        """Some time passes."""
        if self._until == 0:
            self._until = self._random.randint(1, self._random.choice(LENGTHS))
            for stream in self.streams:
                stream.mood = self._random.choice(MOODS)
        self._until -= 1
        for stream in self._random.sample(self.streams, len(self.streams)):
            while self._random.random() < stream.mood and stream.ready():
                stream.step()

    def wait(self, done: Callable[[], bool]) -> None:
        """The host waits."""
        self.outside_of_recordings()
        with self.lock:
            while not done():
                ready = [stream for stream in self.streams if stream.ready()]
                if not ready:  # waits that were over are no longer in the queues
                    assert done(), "the host waits for what never happens"
                    return
                awake = [stream for stream in ready if stream.mood] or ready
                self._random.choice(awake).step()

    def wait_for_stream(self) -> None:
        """For all that the current one has."""
        self.outside_of_recordings()
        own = self.event()
        own.record()
        own.synchronize()

    def leaves_out(self) -> bool:
        """Whether the caller's call is to do nothing."""
        if self._without is None:
            return False
        frame = sys._getframe(2)
        return linecache.getline(frame.f_code.co_filename, frame.f_lineno).split("#")[0].strip() == self._without

    def outside_of_recordings(self) -> None:
        if self.recording is not None:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    # ---------------------------------------------------------------- memory

    def empty(self, shape: Sequence[int], stride: Sequence[int], kind: torch.dtype) -> Tensor:
        """Memory for a tensor, from what the current stream, or the recordings, have freed."""
        last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1 if 0 not in shape else 0
        nbytes = last * kind.itemsize
        size = max(512, -(-nbytes // 512) * 512)
        owner = self.current() if self.recording is None else self._thread.pool
        free = self._free[owner, size]
        try:
            memory = free.pop()
        except IndexError:
            memory = np.empty(size + 64, np.uint8)
            memory = memory[-memory.ctypes.data % 64 :][:size]
        every = torch.from_numpy(memory[:nbytes])
        self.launch(lambda: every.fill_(255))
        return Tensor(every.view(kind).as_strided(shape, stride), Block(free, memory))

    def copy(self, to: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        """Between the device and the host."""
        host = to if isinstance(source, Tensor) else source
        pinned = host.untyped_storage().data_ptr() in self._pinned
        if not pinned:
            self.outside_of_recordings()
        if not pinned and host is source:
            source = source.clone()
        out, own = _inner(to), _inner(source)
        self.launch(lambda: out.copy_(own))
        if not non_blocking or (host is to and not pinned):
            self.wait_for_stream()
        return to

    # ---------------------------------------------------------------- operations of torch

    def dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func._can_decompose():
            return func.decompose(*args, **kwargs)
        if func is aten.copy_.default and isinstance(args[0], Tensor) != isinstance(args[1], Tensor):
            return self.copy(args[0], args[1], bool(args[2] if len(args) > 2 else kwargs.get("non_blocking")))
        to = kwargs.get("device")
        if to is not None and to.type != DEFERRED.type:
            if func is not aten._to_copy.default:  # empty_like and others that read nothing
                return func(*_inner(args), **kwargs)
            kind = kwargs.get("dtype") or args[0].dtype
            return self.copy(torch.empty(args[0].shape, dtype=kind), args[0], False)
        inner, options = _inner(args), _inner(kwargs)
        if "device" in options:
            options["device"] = None
        schema = func._schema
        if func is not aten.copy_.default:
            for one in _tensors((args, tuple(kwargs.values()))):
                if not isinstance(one, Tensor) and one.dim():
                    raise RuntimeError(f"Expected all tensors to be on the same device: {func}")
        written = [one for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write]
        if written:
            named = dict(zip((one.name for one in schema.arguments), args, strict=False)) | kwargs
            self.launch(lambda: func(*inner, **options))
            back = [named[one.name] for one in written]
            return back[0] if len(back) == 1 else tuple(back)
        if any(one.alias_info is not None for one in schema.returns):  # a view
            block = next(one.block for one in _tensors(args) if isinstance(one, Tensor))
            return tree_map(lambda one: Tensor(one, block), func(*inner, **options))
        key = func, _key(args), _key(sorted(kwargs.items()))
        if key not in self._shapes:
            self._shapes[key] = _shapes(func, args, kwargs)
        shapes = self._shapes[key]
        if shapes is None:  # the host has to know the data
            self.wait_for_stream()
            found = func(*inner, **options)
            return tree_map(lambda one: self.kept(one) if isinstance(one, torch.Tensor) else one, found)
        made = tree_map(lambda one: self.empty(*one), shapes, is_leaf=lambda one: isinstance(one, _Shape))
        outs = [one.inner for one in _tensors(made) if isinstance(one, Tensor)]

        def run() -> None:
            for out, value in zip(outs, _tensors(func(*inner, **options)), strict=True):
                out.copy_(value)

        self.launch(run)
        return made

    def kept(self, value: torch.Tensor) -> Tensor:
        """What the host has computed, on the device."""
        made = self.empty(value.shape, value.stride(), value.dtype)
        out = made.inner
        self.launch(lambda: out.copy_(value))
        return made


class _Shape(tuple[Any, ...]):
    """shape, stride, type."""


def _inner(tree: Any) -> Any:
    """The same with the memory of tensors, in dataclasses as well."""
    if isinstance(tree, Tensor):
        return tree.inner
    if isinstance(tree, (list, tuple)):
        parts = map(_inner, tree)
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    if isinstance(tree, dict):
        return {name: _inner(value) for name, value in tree.items()}
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        made = copy.copy(tree)
        for field in dataclasses.fields(tree):
            object.__setattr__(made, field.name, _inner(getattr(tree, field.name)))
        return made
    return tree


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Those of lists and tuples."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for one in tree:
            yield from _tensors(one)


def _on_device(tree: Any) -> bool:
    """Whether any tensor of it is, in dataclasses as well."""
    if isinstance(tree, (list, tuple)):
        return any(map(_on_device, tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return any(_on_device(getattr(tree, field.name)) for field in dataclasses.fields(tree))
    return isinstance(tree, Tensor)


def _key(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.shape, tree.stride(), tree.dtype, tree.device
    if isinstance(tree, (list, tuple)):
        return tuple(map(_key, tree))
    return type(tree), tree


def _shapes(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operation returns, without its values; None where these say."""

    def on_meta(one: Any) -> Any:
        if isinstance(one, Tensor):
            return torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="meta")
        return torch.device("meta") if isinstance(one, torch.device) else one

    try:
        found = func(*tree_map(on_meta, args), **tree_map(on_meta, kwargs))
    except (RuntimeError, NotImplementedError):
        return None
    if not all(isinstance(one, torch.Tensor) for one in tree_leaves(found)):
        return None
    return tree_map(lambda one: _Shape((tuple(one.shape), one.stride(), one.dtype)), found)


def _empty(size: Any, dtype: Any = None, **_: Any) -> Tensor:
    stride = torch.empty(size, device="meta").stride()
    return _used[-1].empty(tuple(size), stride, dtype or torch.get_default_dtype())


def _empty_strided(size: Any, stride: Any, dtype: Any = None, **_: Any) -> Tensor:
    return _used[-1].empty(tuple(size), tuple(stride), dtype or torch.get_default_dtype())


def _arange(*given: Any, dtype: Any = None, **_: Any) -> Tensor:
    return _used[-1].kept(torch.arange(*given, dtype=dtype))


def _copy_from(source: torch.Tensor, to: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return _used[-1].copy(to, source, non_blocking)


_library = torch.library.Library("aten", "IMPL")
for _name in ("arange", "arange.start", "arange.start_step"):
    _library.impl(_name, _arange, "PrivateUse1")
_library.impl("empty.memory_format", _empty, "PrivateUse1")
_library.impl("empty_strided", _empty_strided, "PrivateUse1")
_library.impl("_copy_from", _copy_from, "PrivateUse1")


# ---- What a GPU computes by kernels that do not ask the host ---------------------------------------------------------


def kernel(plain: Callable[..., Any], like: Callable[..., torch.Tensor] | None = None) -> Callable[..., Any]:
    """A function as one launch. like: makes memory for what it returns, None: nothing is returned."""

    def launch(*args: Any) -> Any:
        if gpu.which(torch.empty(0)) == "triton" or not _on_device(args):  # Triton's kernels are launches themselves
            return plain(*args)
        given = _inner(args)
        result = None if like is None else like(*args)
        out = None if result is None else _inner(result)

        def run() -> None:
            found = plain(*given)
            if out is not None:
                out.copy_(found)

        _used[-1].launch(run)
        return result

    return launch


def _like_first(first: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(first)


def _like_heads(first: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(first).flatten(1)


def _like_second(_: Any, second: torch.Tensor, *__: Any) -> torch.Tensor:
    return torch.empty_like(second)


def _of_net(net: Any, products: torch.Tensor, *_: Any) -> torch.Tensor:
    return products.new_empty((len(products), net.about.width))


KERNELS: list[tuple[Any, str, Callable[..., torch.Tensor] | None]] = [
    (gpu, "attention", _like_heads),
    (gpu, "store_kv", None),
    (gpu, "rotate_and_store", None),
    (gpu_latent, "attention", _like_first),
    (gpu_latent, "place", None),
    (gpu_experts, "expert_sum", _like_second),
    (gpu_delta, "delta_net", _of_net),
    (gpu_mamba, "mamba", _of_net),
    (gpu_candidates, "select", None),
]


def _launched(plain: Callable[..., None]) -> Callable[..., None]:
    """Triton's interpreter, as one launch."""

    def launch(grid: Any, *args: Any, **kwargs: Any) -> None:
        if not _on_device((args, tuple(kwargs.values()))):
            plain(grid, *args, **kwargs)
            return
        given, named = _inner(args), _inner(kwargs)
        _used[-1].launch(lambda: plain(grid, *given, **named))

    return launch


@contextmanager
def deferred(seed: int, without: str | None = None) -> Iterator[Machine]:
    """A context in which tests run on the device "deferred". without: as of `Machine`."""
    machine = Machine(seed, without)
    _used.append(machine)
    with pytest.MonkeyPatch.context() as patch, gpu_device.used(DEFERRED.type):
        patch.setitem(streams.KINDS, DEFERRED.type, lambda _: machine)
        patch.setattr(wanted, "_NAME", re.compile(f"{wanted._NAME.pattern}|{DEFERRED.type}"))
        patch.setattr(GridExecutor, "__call__", _launched(GridExecutor.__call__))
        # The streams work when the host looks. A trial need not be long.
        for name, value in (("LOOK", 0.0), ("EXCHANGES", 3), ("OPERATIONS", 2)):
            patch.setattr(flags, name, value)
        for module, name, like in KERNELS:
            patch.setattr(module, name, kernel(getattr(module, name), like))
        streams.streams_of.cache_clear()
        try:
            yield machine
            assert not machine.registered, "memory stays registered"
        finally:
            streams.streams_of.cache_clear()
            _used.remove(machine)
