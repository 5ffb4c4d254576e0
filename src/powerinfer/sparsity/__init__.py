"""The decoding of a loaded model's layers: every neuron, or those that a selector finds."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from powerinfer.devices.stage import Stage
    from powerinfer.neurons import Counts, Indices

__all__ = ["Sparsity", "SplitFfn"]


class SplitFfn(Protocol):
    """An FFN whose neurons are on a GPU (hot: int32, ascending) and on the CPU."""

    hot: Indices

    def take_fired(self) -> tuple[int, Counts]:
        """(tokens, int64 [neurons] those that each fired for) since the last call; not while a step runs."""
        ...

    def take_seconds(self) -> tuple[float, float]:
        """Seconds that the CPU waited for the GPU, and summed cold neurons beside it, since the last call."""
        ...


class Sparsity:
    """The ways in which the layers of a model decode, and statistics of them. This base class: all layers are dense.

    selector: its name; stage: what the CPU's part of a model passes through to a GPU in long prompts, None: none does.
    drafts_alone: drafts are for a request that decodes alone, which then has the bits of decoding without them: beside
    others its bits depend on the number of tokens.
    """

    selector = "all"
    stage: Stage | None = None
    drafts_alone = False

    @property
    def streams_from(self) -> int | None:
        """The number of tokens of a step from which on a GPU computes the CPU's part, too; None: never."""
        return None if self.stage is None else self.stage.least

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

    def way(self, layer: int) -> str:
        """The way in which a layer computes one token: "dense", "exact" or "predicted"."""
        return "dense"

    def split(self) -> Mapping[int, SplitFfn]:
        """The FFNs whose neurons are on two devices, by layer."""
        return {}

    def adjust(self) -> bool:
        """Swap neurons between devices; not while a step runs. False if it was not worth it."""
        return False
