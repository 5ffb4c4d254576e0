"""The states of sequences in torch tensors, in slots, for layers that keep one for each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from powerinfer.config import StateKind
from powerinfer.kernels.gpu_types import States


def state_bytes(about: StateKind) -> int:
    """Bytes of a sequence's state in a layer."""
    return 4 * sum(map(prod, _shapes(about)))


def _shapes(about: StateKind) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of the window, and of the heads."""
    return (about.taps - 1, about.channels), (about.n_value_heads, about.value_dim, about.key_dim)


def new_states(kinds: Sequence[StateKind], slots: int, device: Any) -> list[States]:
    """Slots for the states of some layers, in one piece of memory."""
    import torch

    if not kinds:
        return []
    shapes = [(slots, *shape) for about in kinds for shape in _shapes(about)]
    sizes = list(map(prod, shapes))
    parts = torch.zeros(sum(sizes), dtype=torch.float32, device=device).split(sizes)
    views = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
    return [States(*pair) for pair in zip(views[::2], views[1::2], strict=True)]
