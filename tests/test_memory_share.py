"""Torch takes no more of a GPU than its models' budgets, once each has what it needs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from powerinfer.devices import torch_device  # noqa: E402
from powerinfer.devices.torch_device import MemoryShare  # noqa: E402

GIB = 1 << 30


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Of the memory of devices of 10 GiB, as torch was told."""
    told: dict[int, float] = {}

    def tell(part: float, index: int) -> None:
        told[index] = part

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=10 * GIB))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", tell)
    monkeypatch.setattr(torch_device, "_SHARES", type(torch_device._SHARES)())
    return told


def share(index: int = 0) -> Any:
    return MemoryShare(torch.device("cuda", index))


def test_a_model_is_held_to_its_budget_once_it_is_loaded(parts: dict[int, float]) -> None:
    own = share()
    assert parts == {0: 1.0}
    own.limit(4 * GIB)
    assert parts == {0: 0.4}
    own.end()
    assert parts == {0: 1.0}


def test_models_share_a_device(parts: dict[int, float]) -> None:
    first, other = share(), share(1)
    first.limit(4 * GIB)
    second = share()
    assert parts == {0: 1.0, 1: 1.0}  # it is still being loaded
    second.limit(3 * GIB)
    assert parts[0] == pytest.approx(0.7)
    first.end()
    assert parts[0] == pytest.approx(0.3)
    second.end()
    second.end()
    other.limit(20 * GIB)
    assert parts == {0: 1.0, 1: 1.0}


def test_one_that_failed_to_load_counts_no_more(parts: dict[int, float]) -> None:
    first, lost = share(), share()
    first.limit(4 * GIB)
    assert parts == {0: 1.0}
    del lost
    first.limit(4 * GIB)
    assert parts == {0: 0.4}


def test_torchs_cpu_device_has_no_limit(parts: dict[int, float]) -> None:
    own = MemoryShare(torch.device("cpu"))
    own.limit(GIB)
    own.end()
    assert not parts
