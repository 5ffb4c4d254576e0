"""The devices on which tests of GPU code run: torch's CPU device, which emulates a GPU, and CUDA where there is one.

Triton's kernels are compiled where there is a GPU, and interpreted where there is none. Triton decides that when it is
imported, so a process has one of the two; on a machine with a GPU, CUDA_VISIBLE_DEVICES= has them interpreted.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from shutil import which
from typing import Any

import numpy as np
import pytest

EPS = float(np.finfo(np.float32).eps)


def _cuda() -> bool:
    """Whether torch finds a GPU; it is imported only where there is a driver."""
    from powerinfer.devices.wanted import has_driver

    driver = has_driver() or which("nvidia-smi") is not None
    if not driver or find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())


CUDA = _cuda()
DEVICES = ("cpu", "cuda") if CUDA else ("cpu",)

if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"

_used = ["cpu"]


@contextmanager
def used(name: str) -> Iterator[None]:
    """Tests run on this device within the context; outside of one, on torch's CPU device."""
    _used.append(name)
    try:
        yield
    finally:
        _used.pop()


def device_name() -> str:
    """The name of the device that the test runs on, as `--gpu` takes it."""
    return _used[-1]


def torch_device() -> Any:
    """The same as torch has it."""
    from powerinfer.devices.torch_device import choose_device

    return choose_device(device_name())


def sum_error(n: int) -> float:
    """Bound of the error of a float32 sum of n products, as a share of the sum of their magnitudes.

    A GPU may take three products of TF32 for one of float32. Of a = high + low, low is at most 2^-11 of a and is
    rounded by 2^-11 of itself: so each of the two mixed products is off by 2^-22, and the product of the lows, which is
    left out, is as large: 6 eps together. A tensor core cuts a sum's last bits off, by up to eps each time.
    """
    return (n + (8 if device_name() == "cuda" else 2)) * EPS


def count_pinned(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Count what torch's CPU device pins from now on; what is called has the bytes of it that are still held."""
    from powerinfer.devices.streams import ImmediateStreams

    pinned, made = list[weakref.ref[Any]](), ImmediateStreams.pinned

    def noted(*given: Any) -> Any:
        memory = made(*given)
        pinned.append(weakref.ref(memory))
        return memory

    monkeypatch.setattr(ImmediateStreams, "pinned", noted)
    return lambda: sum(memory.nbytes for memory in (each() for each in pinned) if memory is not None)
