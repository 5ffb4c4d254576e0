"""Memory of machines with several NUMA nodes: pages of what is loaded are spread over the nodes.

A page lies on one node, by default on that of the thread that touches it first, and threads of the others read it at a
fraction of the speed. Threads take parts of products as they become free, and the system moves them between cores, so
no thread has weights of its own. Spread page by page, weights are read from all nodes at once, whoever reads them.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

# Numbers of system calls by machine.
_CALLS = {
    "x86_64": {"set_mempolicy": 238, "get_mempolicy": 239},
    "aarch64": {"set_mempolicy": 237, "get_mempolicy": 236},
    "riscv64": {"set_mempolicy": 237, "get_mempolicy": 236},
}
_DEFAULT, _INTERLEAVE = 0, 3  # policies
_BITS = 64  # of a word of a set of nodes


class RefusedError(Exception):
    """The system does not spread memory; the reason is for people."""


@contextmanager
def interleaved(nodes: Sequence[int]) -> Iterator[str | None]:
    """A context in which the calling thread, and threads that it starts, spread memory that they touch first over these
    nodes; such threads do so afterwards, too. Its value is the reason why they do not, None: they do."""
    try:
        if policy() != _DEFAULT:
            raise RefusedError("the policy that the process was started with, as by numactl, holds")
        _set_policy(_INTERLEAVE, nodes)
    except RefusedError as error:
        yield str(error)
        return
    try:
        yield None
    finally:
        _set_policy(_DEFAULT, ())


def policy() -> int:
    """The number of the calling thread's policy. RefusedError where the system does not say it."""
    import ctypes

    mode = ctypes.c_int()
    _call("get_mempolicy", ctypes.byref(mode), None, 0, None, 0)
    return mode.value


def _set_policy(mode: int, nodes: Sequence[int]) -> None:
    import ctypes

    words = (ctypes.c_uint64 * (max(nodes, default=0) // _BITS + 1))()
    for node in nodes:
        words[node // _BITS] |= 1 << node % _BITS
    _call("set_mempolicy", mode, words if nodes else None, len(words) * _BITS + 1 if nodes else 0)


def _call(name: str, *arguments: object) -> None:
    import ctypes

    numbers = _CALLS.get(platform.machine())
    if sys.platform != "linux" or numbers is None:
        raise RefusedError(f"{platform.machine()} is not known")
    library = ctypes.CDLL(None, use_errno=True)
    converted = [ctypes.c_ulong(one) if isinstance(one, int) else one for one in arguments]
    if library.syscall(ctypes.c_long(numbers[name]), *converted):
        raise RefusedError(os.strerror(ctypes.get_errno()))
