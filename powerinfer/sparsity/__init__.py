"""How the layers of a loaded model decode: every neuron, or those that a selector finds."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

__all__ = ["Sparsity"]


class Sparsity:
    """How the layers of a model decode, and statistics of it. This base class: all layers are dense.

    selector: its name.
    """

    selector = "all"

    def report(self) -> dict[str, Any] | None:
        """Statistics of the tokens so far, per layer ("layers") and in total; None if all layers are dense."""
        return None

    def clear(self) -> None:
        """Reset the statistics of `report`."""

    def suspended(self) -> AbstractContextManager[None]:
        """A context in which the selector is `all`, or `exact` if a device lacks the dense matrices."""
        return nullcontext()

    def bytes_per_token(self, dense: int | None) -> int | None:
        """Bytes of weights read per decoded token, given those of the dense model; None: unknown."""
        return dense

    def adjust(self) -> bool:
        """Swap neurons between devices; not while a step runs. False if it was not worth it."""
        return False
