"""Choosing the torch device that layers run on, and turning its failures into one line."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from threading import Lock
from typing import TYPE_CHECKING, Any

from powerinfer.devices.streams import KINDS, streams_of
from powerinfer.errors import GpuMemoryError, PowerInferError, RequestError, install_extra

if TYPE_CHECKING:
    from torch import device
else:
    device = Any

_NO_MEMORY = re.compile("out of memory|ALLOC_FAILED")
_MARGIN = 32  # 1/_MARGIN of a model's tensors are not in the piece of memory that the others share
OLDEST = (8, 0)  # compute capability: kernels take more shared memory than earlier GPUs have


def choose_device(name: str) -> device:
    """The torch device of that name: "cuda", "cuda:1", or "cpu", which emulates a GPU.

    RequestError where there is no such device, or it cannot be used.
    """
    torch = import_torch()
    try:
        chosen = torch.device(name)
    except RuntimeError:
        raise RequestError(f"there is no device {name!r}: choose cuda, cuda:1 or cpu") from None
    if chosen.type not in KINDS:
        raise RequestError(f"layers cannot run on a device of type {chosen.type}: choose cuda, cuda:1 or cpu")
    if chosen.type != "cuda":
        return chosen
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        if torch.version.cuda is None:
            raise RequestError("this torch was built without CUDA: install one with it, or leave out the GPU")
        reason = f" ({_first_line(caught[0].message)})" if caught else ""
        raise RequestError(f"torch finds no CUDA GPU{reason}: check its driver with nvidia-smi, or leave out the GPU")
    index = chosen.index or 0
    if index >= count:
        raise RequestError(f"there is no {name}: this machine has {count} GPU{'s' * (count > 1)}, counted from cuda:0")
    try:
        capability = torch.cuda.get_device_capability(index)
        if capability < OLDEST:
            raise RequestError(
                f"{torch.cuda.get_device_name(index)} is too old: its compute capability is "
                f"{'.'.join(map(str, capability))}, and {'.'.join(map(str, OLDEST))} is needed; leave out the GPU"
            )
        torch.zeros(1, device=f"cuda:{index}")  # a broken driver fails here
    except RuntimeError as error:
        raise PowerInferError(
            f"the GPU cannot be used: {_first_line(error)}; check it with nvidia-smi, or leave out the GPU"
        ) from error
    return torch.device("cuda", index)


def current(device: device) -> AbstractContextManager[Any]:
    """A context in which kernels are launched on this device: Triton asks the thread for it, not the tensors."""
    return streams_of(device).active()


class MemoryShare:
    """The share of a CUDA device's memory that a model takes: all that torch may take, until it has a limit."""

    def __init__(self, device: device) -> None:
        self._device = device
        self._nbytes: int | None = None
        self._settle(_Shares.add)

    def limit(self, nbytes: int) -> None:
        """The model has its weights, and has run its largest steps in so many bytes. Where torch would take more, since
        steps of other sizes left it memory in other pieces, it returns those to the device first."""
        self._nbytes = nbytes
        self._settle()

    def lift(self) -> bool:
        """No limit any more; whether there was one."""
        limited, self._nbytes = self._nbytes is not None, None
        if limited:
            self._settle()
        return limited

    def end(self) -> None:
        """The model takes nothing any more."""
        self._settle(_Shares.remove)

    def _settle(self, change: Callable[[_Shares, MemoryShare], None] = lambda *_: None) -> None:
        if self._device.type == "cuda":
            with _SHARING:
                shares = _SHARES.setdefault(self._device.index or 0, _Shares(self._device))
                change(shares, self)
                shares.settle()


class _Shares:
    """The shares of a device's models. Torch has one limit for a process: the sum of its models', if each has one, and
    what the program had taken before the first of them."""

    def __init__(self, device: device) -> None:
        self._device = device
        self._shares: list[MemoryShare] = []
        self._before, self._allowed = 0, 1.0

    def add(self, share: MemoryShare) -> None:
        if not self._shares:
            cuda = import_torch().cuda
            self._before = int(cuda.memory_reserved(self._device))
            self._allowed = float(cuda.get_per_process_memory_fraction(self._device))
        self._shares.append(share)

    def remove(self, share: MemoryShare) -> None:
        self._shares = [one for one in self._shares if one is not share]

    def settle(self) -> None:
        cuda, part = import_torch().cuda, self._allowed
        limits = [one._nbytes for one in self._shares]
        limited = [one for one in limits if one is not None]
        if limits and len(limited) == len(limits):
            part = min(part, (self._before + sum(limited)) / cuda.get_device_properties(self._device).total_memory)
        with current(self._device):  # torch sets its limit on the device that it leaves as the current one
            cuda.set_per_process_memory_fraction(part, self._device)


_SHARES: dict[int, _Shares] = {}
_SHARING = Lock()


def make_room(device: device, nbytes: int) -> None:
    """Let torch take a CUDA device's memory in one piece for tensors of so many bytes that come next, but for a part of
    them, so that nothing of it is left to others, for which torch would keep all of it. It would take 20 MiB for some
    of them at a time, and for each large one up to 2 MiB too many. Where there is no such piece, it does."""
    if device.type == "cuda":
        torch = import_torch()
        torch.cuda.empty_cache()
        with suppress(torch.OutOfMemoryError):
            torch.empty(nbytes - nbytes // _MARGIN, dtype=torch.uint8, device=device)


def held_beside_tensors(device: device, *, most: bool = False) -> int:
    """Bytes of CUDA memory that torch holds and no tensor has now: free ones, and those by which it rounds tensors up.
    most: of what it has held at most since its statistics were reset."""
    cuda = import_torch().cuda
    asked_for = cuda.memory_stats(device).get("requested_bytes.all.current", cuda.memory_allocated(device))
    reserved = cuda.max_memory_reserved(device) if most else cuda.memory_reserved(device)
    return int(reserved) - int(asked_for)


def memory_taken(device: device) -> tuple[int, int]:
    """Bytes of a device that torch has taken, and all others; 0 in emulation."""
    if device.type != "cuda":
        return 0, 0
    cuda = import_torch().cuda
    free, total = cuda.mem_get_info(device)
    reserved = int(cuda.memory_reserved(device))
    return reserved, int(total) - int(free) - reserved


def import_torch() -> Any:
    """torch, or RequestError where it is not installed."""
    try:
        import torch
    except ImportError:
        raise RequestError(f"running on a GPU needs torch: {install_extra('gpu')}, or leave out the GPU") from None
    return torch


def _first_line(error: object) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _triton_errors() -> tuple[type[Exception], ...]:
    """Errors that Triton raises where it compiles or launches; none if it was not imported."""
    if "triton" not in sys.modules:
        return ()
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    return CompilationError, OutOfResources, PTXASError


@contextmanager
def gpu_failures(doing: str, remedy: str) -> Iterator[None]:
    """Turn failures of the device into one line: out of memory, with the remedy, errors of the device itself, and
    kernels that do not compile or need more shared memory than it has.

    Memory cached by torch is freed, so that the next step has all that there is.
    """
    torch = import_torch()
    try:
        yield
        return
    except RuntimeError as error:
        text = str(error)
        if isinstance(error, torch.OutOfMemoryError) or ("CUDA" in text and _NO_MEMORY.search(text)):
            problem: PowerInferError = GpuMemoryError(f"the GPU ran out of memory while {doing}: {remedy}")
        elif "CUDA" in text:  # from then on every call fails
            problem = PowerInferError(f"the GPU failed while {doing}: {_first_line(error)}; load the model again")
        else:
            raise
        cause: Exception = error
    except _triton_errors() as error:
        reason = (str(error).splitlines() or [type(error).__name__])[-1]  # before it a part of the kernel
        problem = PowerInferError(
            f"this GPU cannot run a kernel of this model while {doing} ({reason}); leave out the GPU"
        )
        cause = error
    problem.__cause__ = cause.with_traceback(None)  # whose frames would keep the step's tensors alive
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        with suppress(RuntimeError):
            torch.cuda.empty_cache()
    raise problem
