"""Drafts by an EAGLE head, which has rows for some of the model's tokens alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from powerinfer.runtime.mtp import MtpDrafts
from powerinfer.runtime.speculation import likeliest

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from powerinfer.devices.drafter import EagleHead


class EagleDrafts(MtpDrafts):
    """Source of drafts: an EAGLE head, on the pages of the model's requests."""

    name = "eagle"

    def __init__(self, head: EagleHead, page_size: int, max_tokens: int) -> None:
        super().__init__(head, page_size, max_tokens)
        self._tokens = head.tokens

    def _likeliest(self, logits: NDArray[np.float32]) -> tuple[int, float]:
        row, probability = likeliest(logits)
        return int(self._tokens[row]), probability
