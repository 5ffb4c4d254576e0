"""How the layers of a loaded model decode: every neuron, or those that a selector finds."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

__all__ = ["Sparsity"]


class Sparsity:
    """How the layers of a model decode, and what its tokens needed. This one: all layers are dense.

    selector: its name.
    """

    selector = "all"

    def report(self) -> dict[str, Any] | None:
        """What the tokens so far needed, per layer ("layers") and in all; None where all layers are dense."""
        return None

    def clear(self) -> None:
        """Reset the statistics of `report`."""

    def suspended(self) -> AbstractContextManager[None]:
        """Meanwhile the selector is `all`, or, where a device lacks the dense matrices, `exact`."""
        return nullcontext()

    def bytes_per_token(self, dense: int | None) -> int | None:
        """Bytes of weights that one decoded token reads, from those of the dense model; None: not known."""
        return dense

    def adjust(self) -> bool:
        """Let neurons trade places between devices; not while a step runs. False where it was not worth it."""
        return False
