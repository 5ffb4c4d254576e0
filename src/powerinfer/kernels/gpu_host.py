"""Memory of the host that a GPU writes and reads in place: a few KB, for which its copy engine takes longer than a
kernel.

Nothing here waits. What a kernel has stored is there for the whole system once the kernel has ended; what tells the
host (a number that the stream writes with a fence of the system, a call, an event) comes behind it in the stream, behind
kernels that were launched early, too, since each waits for the one before it. The other way the host writes before it
releases a number, or returns from a call; the stream launches the kernel that reads behind that, never early, and it
takes no line that a cache still has of what was there before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from powerinfer.kernels import gpu

if TYPE_CHECKING:
    from torch import Tensor


def put(rows: Tensor, into: Tensor) -> None:
    """Write rows, float32 of the device, into as many numbers of the host's."""
    if gpu.which(rows) == "triton":
        from powerinfer.kernels import triton_host

        triton_host.put(rows, into)
    else:
        into.copy_(rows)


def take(sums: Tensor) -> Tensor:
    """Copy numbers of the host's, float32, to the device."""
    if gpu.which(sums) == "triton":
        from powerinfer.kernels import triton_host

        return triton_host.take(sums, None)
    return sums.clone()


def add(sums: Tensor, total: Tensor) -> None:
    """total += numbers of the host's, both float32."""
    if gpu.which(sums) == "triton":
        from powerinfer.kernels import triton_host

        triton_host.take(sums, total)
    else:
        total.add_(sums)
