"""The work of a device beside the host: its streams, events, pinned memory, recordings and calls of the host, in one
interface.

All that the project says about them goes through `streams_of(device)`. CUDA's own objects have these methods; on
torch's CPU device, which emulates a GPU, an operation is done when its call returns, so there is nothing to wait for.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor, device, dtype

_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: for all contexts
_FENCED = 0  # CU_STREAM_WRITE_VALUE_DEFAULT: what was written before it is visible first
_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ


class Event(Protocol):
    """A point in a stream, as `torch.cuda.Event` has it; one that was never recorded has been reached."""

    def record(self, stream: Any = None) -> None:
        """All that a stream was given so far, by default the current one of this thread."""
        ...

    def synchronize(self) -> None:
        """The host waits until the stream is past what was recorded."""
        ...

    def query(self) -> bool:
        """Whether it is."""
        ...

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds until a later event; of timed events that have been reached."""
        ...


class Stream(Protocol):
    """Operations of a device, one after another; those of two streams run in any order, or at the same time."""

    def wait_event(self, event: Any) -> None:
        """Let what the stream is given from now on begin once the event is reached."""
        ...

    def query(self) -> bool:
        """Whether all that the stream was given is done. RuntimeError after an error of the device."""
        ...


Recorded = Callable[[], None]
"""Gives the current stream all operations of a recording again, on the same memory."""


class Streams(Protocol):
    """The streams of one device."""

    def pinned(self, shape: int | Sequence[int], kind: dtype) -> Tensor:
        """Zeros in host memory with which copies go on beside the host (`non_blocking`)."""
        ...

    def mapped(self, memory: Tensor) -> Tensor:
        """`pinned` memory as a tensor of the device, whose kernels write and read it in place. RuntimeError where they
        cannot."""
        ...

    def register(self, address: int, nbytes: int) -> Callable[[], None] | None:
        """Let the device read whole pages of host memory by itself, as `pinned` memory, until what is returned is
        called: by a thread that has used the device, behind the last copy. Calling it raises RuntimeError where the
        memory stays registered. None: the device may not read it."""
        ...

    def event(self, *, timed: bool = False, sleeps: bool = False) -> Event:
        """sleeps: the host gives up its core while it waits for it, rather than looking again and again."""
        ...

    def stream(self) -> Stream:
        """A new one."""
        ...

    def current(self) -> Stream:
        """The one that this thread gives its operations to."""
        ...

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """A context in which that is another one."""
        ...

    def active(self) -> AbstractContextManager[Any]:
        """A context in which kernels are launched on this device: Triton asks the thread for it, not the tensors."""
        ...

    def finish(self) -> None:
        """Wait for all streams."""
        ...

    def call(self, stream: Any, function: int, data: int) -> None:
        """A stream calls a function of C, void (*)(void*), with its argument, in its order and on any thread; what
        follows in the stream waits for its return. In a recording it is called in each replay. It must neither throw,
        nor use the device, nor wait for a thread that waits for the device. RuntimeError where the device cannot."""
        ...

    def address(self, memory: Tensor) -> int:
        """The address of `pinned` memory for `write_value` and `wait_value`. RuntimeError where the device has none."""
        ...

    def write_value(self, stream: Any, address: int, value: int) -> None:
        """A stream writes a number of 32 bits, in its order: whoever sees it sees what came before it in the stream. In
        a recording it does in each replay. RuntimeError where the device cannot."""
        ...

    def wait_value(self, stream: Any, address: int, value: int) -> None:
        """Let what a stream is given from now on begin once the number there is at least as high, and differs by less
        than 2^31; likewise. The device waits for ever for one that nobody writes."""
        ...

    def recorder(self) -> Callable[[Callable[[], None]], Recorded] | None:
        """Records the operations that a function gives its stream, without running them; recordings share their memory
        (`devices/recording.py`). None: the device records nothing."""
        ...


_RECORDING = Lock()


class CudaStreams:
    """A CUDA device's."""

    def __init__(self, device: device) -> None:
        import torch

        self._device = device
        self._cuda: Any = torch.cuda

    def pinned(self, shape: int | Sequence[int], kind: dtype) -> Tensor:
        import torch

        with self.active():  # else it is the first device's, to `mapped`
            return torch.zeros(shape, dtype=kind, pin_memory=True)

    def mapped(self, memory: Tensor) -> Tensor:
        import torch

        address = self.address(memory)
        with self.active():
            tensor: Tensor = torch.as_tensor(_ArrayInterface(memory, address), device=self._device)
        if tensor.data_ptr() != address:  # torch has copied it
            raise RuntimeError("torch has no tensors of the device in memory of the host")
        return tensor

    def register(self, address: int, nbytes: int) -> Callable[[], None] | None:
        with self.active():
            registered = _registering()
            if registered is None or registered[0](address, nbytes, _PORTABLE):
                return None
        return partial(_unregister, self, registered[1], address)

    def event(self, *, timed: bool = False, sleeps: bool = False) -> Event:
        event: Event = self._cuda.Event(enable_timing=timed, blocking=sleeps)
        return event

    def stream(self) -> Stream:
        stream: Stream = self._cuda.Stream(self._device)
        return stream

    def current(self) -> Stream:
        stream: Stream = self._cuda.current_stream(self._device)
        return stream

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._cuda.stream(stream)
        return context

    def active(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._cuda.device(self._device)
        return context

    def finish(self) -> None:
        self._cuda.synchronize(self._device)

    def call(self, stream: Any, function: int, data: int) -> None:
        status = _cuda_launch()(stream.cuda_stream, function, data)
        if status:
            raise RuntimeError(f"CUDA error {status}: a stream was to call a function of the host")

    def address(self, memory: Tensor) -> int:
        pointer = ctypes.c_uint64()
        with self.active():
            status = _memory_operations().address(ctypes.byref(pointer), memory.data_ptr(), 0)
        if status:
            raise RuntimeError(f"CUDA error {status}: the device has no address for memory of the host")
        return pointer.value

    def write_value(self, stream: Any, address: int, value: int) -> None:
        status = _memory_operations().write(stream.cuda_stream, address, value, _FENCED)
        if status:
            raise RuntimeError(f"CUDA error {status}: a stream was to write a number")

    def wait_value(self, stream: Any, address: int, value: int) -> None:
        status = _memory_operations().wait(stream.cuda_stream, address, value, _AT_LEAST)
        if status:
            raise RuntimeError(f"CUDA error {status}: a stream was to wait for a number")

    def recorder(self) -> Callable[[Callable[[], None]], Recorded]:
        cuda = self._cuda
        pool, stream = cuda.graph_pool_handle(), cuda.Stream(self._device)
        first: list[Any] = []  # kept: a pool ends with the last of its graphs

        def record(run: Callable[[], None]) -> Recorded:
            graph = cuda.CUDAGraph()
            options = {"pool": pool, "stream": stream, "capture_error_mode": "thread_local"}
            # Outside: a recording that fails may leave its own stream as the current one. One at a time: another one
            # begins by waiting for the whole device, which ends a recording that is under way in another thread.
            # What torch gives cuBLAS to work in, for each stream, would outlive the recording in whose memory it lies,
            # and be used by others.
            with _RECORDING:
                free_workspaces()
                try:
                    with cuda.stream(cuda.current_stream(self._device)), cuda.graph(graph, **options):
                        run()
                finally:
                    free_workspaces()
            first.append(graph) if not first else None
            replay: Recorded = graph.replay
            return replay

        return record


def free_workspaces() -> None:
    """Free what torch gave cuBLAS to work in. The next product with many tokens takes it again: so it counts as one of
    the temporaries of the steps that follow."""
    import torch

    free = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if free is not None:
        free()


class _ArrayInterface:
    """Memory of the host at an address of the device's, as torch takes memory that others have made; it keeps this."""

    def __init__(self, memory: Tensor, address: int) -> None:
        self._memory, array = memory, memory.numpy()
        layout = {"shape": array.shape, "typestr": array.dtype.str, "data": (address, False), "version": 2}
        self.__cuda_array_interface__ = layout


@cache
def _cuda_launch() -> Callable[[int, int, int], int]:
    """cuLaunchHostFunc of the driver, which torch has loaded: its streams are those of the runtime. RuntimeError where
    there is none."""
    try:
        launch = ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc
    except (OSError, AttributeError) as error:
        raise RuntimeError(f"the CUDA driver has no cuLaunchHostFunc: {error}") from None
    launch.argtypes, launch.restype = [ctypes.c_void_p] * 3, ctypes.c_int
    return launch


class _MemoryOperations(NamedTuple):
    """cuMemHostGetDevicePointer, cuStreamWriteValue32 and cuStreamWaitValue32 of the driver."""

    address: Callable[[Any, int, int], int]
    write: Callable[[int, int, int, int], int]
    wait: Callable[[int, int, int, int], int]


@cache
def _memory_operations() -> _MemoryOperations:
    """Their second versions, which need no option of the kernel's module. RuntimeError where there are none."""
    names = "cuMemHostGetDevicePointer_v2", "cuStreamWriteValue32_v2", "cuStreamWaitValue32_v2"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        address, write, wait = (getattr(driver, name) for name in names)
    except (OSError, AttributeError) as error:
        raise RuntimeError(f"the CUDA driver has no stream memory operations: {error}") from None
    address.argtypes, address.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint], ctypes.c_int
    for operation in (write, wait):  # stream, address, number, flags
        operation.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
        operation.restype = ctypes.c_int
    return _MemoryOperations(address, write, wait)


@cache
def _registering() -> tuple[Callable[[int, int, int], int], Callable[[int], int]] | None:
    """cuMemHostRegister and cuMemHostUnregister of the driver, which torch has loaded: a failure of the runtime's own
    function would be raised again by whatever torch does next."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        register, unregister = driver.cuMemHostRegister_v2, driver.cuMemHostUnregister
    except (OSError, AttributeError):
        return None
    register.argtypes, register.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint], ctypes.c_int
    unregister.argtypes, unregister.restype = [ctypes.c_void_p], ctypes.c_int
    return register, unregister


def _unregister(streams: CudaStreams, unregister: Callable[[int], int], address: int) -> None:
    with streams.active():
        status = unregister(address)
    if status:
        raise RuntimeError(f"CUDA error {status}: memory of the host stays registered, and its pages in RAM")


def call_now(function: int, data: int) -> None:
    """Call a function of C, void (*)(void*), without Python's lock."""
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(data)


class _Reached:
    """An event that is reached when it is recorded."""

    _at = 0.0

    def record(self, stream: Any = None) -> None:
        self._at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _Reached) -> float:
        return 1e3 * (end._at - self._at)


class _Immediate:
    """A stream whose operations are done when they are given."""

    def wait_event(self, event: Any) -> None:
        pass

    def query(self) -> bool:
        return True


_NOT_LATER = "torch's CPU device has no streams"


class ImmediateStreams:
    """The streams of torch's CPU device."""

    def __init__(self, _: device) -> None:
        pass

    def pinned(self, shape: int | Sequence[int], kind: dtype) -> Tensor:
        import torch

        return torch.zeros(shape, dtype=kind)

    def mapped(self, memory: Tensor) -> Tensor:
        return memory

    def register(self, address: int, nbytes: int) -> Callable[[], None]:
        return lambda: None

    def event(self, *, timed: bool = False, sleeps: bool = False) -> Event:
        return _Reached()

    def stream(self) -> Stream:
        return _Immediate()

    def current(self) -> Stream:
        return _Immediate()

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def active(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def finish(self) -> None:
        pass

    def call(self, stream: Any, function: int, data: int) -> None:
        call_now(function, data)

    def address(self, memory: Tensor) -> int:
        raise RuntimeError(_NOT_LATER)

    def write_value(self, stream: Any, address: int, value: int) -> None:
        raise RuntimeError(_NOT_LATER)

    def wait_value(self, stream: Any, address: int, value: int) -> None:
        raise RuntimeError(_NOT_LATER)

    def recorder(self) -> None:
        return None


KINDS: dict[str, Callable[[Any], Streams]] = {"cuda": CudaStreams, "cpu": ImmediateStreams}
"""The streams of each type of torch device."""


@cache
def streams_of(device: device) -> Streams:
    """Streams of a torch device, of a type of `KINDS`."""
    return KINDS[device.type](device)
