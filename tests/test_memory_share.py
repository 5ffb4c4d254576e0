"""Torch takes no more of a GPU than its models' budgets, once each has what it needs."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from powerinfer.devices import torch_device  # noqa: E402
from powerinfer.devices.torch_device import MemoryShare  # noqa: E402

GIB = 1 << 30


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Of the memory of devices of 10 GiB, as torch was told; of the first 1 GiB was taken before."""
    told: dict[int, float] = {}

    def tell(part: float, device: Any) -> None:
        told[device.index] = part

    cuda = torch.cuda
    monkeypatch.setattr(cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=10 * GIB))
    monkeypatch.setattr(cuda, "set_per_process_memory_fraction", tell)
    monkeypatch.setattr(cuda, "get_per_process_memory_fraction", lambda device: told.get(device.index, 0.95))
    monkeypatch.setattr(cuda, "memory_reserved", lambda device: GIB * (device.index == 0))
    monkeypatch.setattr(torch_device, "current", lambda _: nullcontext())
    monkeypatch.setattr(torch_device, "_SHARES", {})
    return told


def share(index: int = 0) -> MemoryShare:
    return MemoryShare(torch.device("cuda", index))


def test_a_model_is_held_to_its_budget_once_it_is_loaded(parts: dict[int, float]) -> None:
    """Beside what the program has there itself; afterwards all is as it was before."""
    own = share()
    assert parts == {0: 0.95}
    own.limit(4 * GIB)
    assert parts == {0: pytest.approx(0.5)}
    own.end()
    assert parts == {0: 0.95}


def test_models_share_a_device(parts: dict[int, float]) -> None:
    first, other = share(), share(1)
    first.limit(4 * GIB)
    second = share()
    assert parts == {0: 0.95, 1: 0.95}  # it is still being loaded
    second.limit(3 * GIB)
    assert parts[0] == pytest.approx(0.8)
    first.end()
    assert parts[0] == pytest.approx(0.4)
    second.end()
    second.end()
    other.limit(20 * GIB)
    assert parts == {0: 0.95, 1: 0.95}


def test_a_limit_is_lifted(parts: dict[int, float]) -> None:
    own = share()
    assert not own.lift()
    own.limit(4 * GIB)
    assert own.lift() and parts == {0: 0.95}
    assert not own.lift()


def test_torchs_cpu_device_has_no_limit(parts: dict[int, float]) -> None:
    own = MemoryShare(torch.device("cpu"))
    own.limit(GIB)
    own.end()
    assert not parts
