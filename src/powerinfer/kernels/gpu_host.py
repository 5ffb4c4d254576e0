"""Memory of the host that a GPU writes and reads in place: a few KB, for which its copy engine takes longer than a
kernel.

Nothing here waits. What a kernel has stored is there for the whole system once the kernel has ended; what tells the
host (a number that the stream writes with a fence of the system, a call, an event) comes behind it in the stream; and
behind kernels that were launched early, since each waits for the one before it. The other way the host writes before it
releases a number, or returns from a call; the stream launches the kernel that reads behind that, never early, and it
takes no line that a cache still has of what was there before.

An answer that a kernel gives in the host's place (`CallAnswer`) is a number in the same memory: the host looks at it
once it is asked, which comes behind it in the stream, and the stream waits for it behind that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from powerinfer.kernels import gpu

if TYPE_CHECKING:
    from torch import Tensor

    from powerinfer.kernels.gpu_types import CallAnswer


def put(rows: Tensor, into: Tensor) -> None:
    """Write rows of the device into as many numbers of the host's."""
    if gpu.which(rows) == "triton":
        from powerinfer.kernels import triton_host

        triton_host.put(rows, into)
    else:
        into.copy_(rows)


def take(sums: Tensor, answer: CallAnswer | None = None) -> Tensor:
    """Copy numbers of the host's, float32, to the device; zeros, where the call that makes them was answered by the
    device."""
    if gpu.which(sums) == "triton":
        from powerinfer.kernels import triton_host

        return triton_host.take(sums, None, answer)
    return _counted(sums, answer).clone()


def add(sums: Tensor, total: Tensor, answer: CallAnswer | None = None) -> None:
    """total += numbers of the host's, both float32, likewise."""
    if gpu.which(sums) == "triton":
        from powerinfer.kernels import triton_host

        triton_host.take(sums, total, answer)
    else:
        total.add_(_counted(sums, answer))


def _counted(sums: Tensor, answer: CallAnswer | None) -> Tensor:
    return sums if answer is None else sums.masked_fill(answer.counters[0] == 0, 0)
