"""Drafts by an EAGLE head, which has rows for some of the model's tokens alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from powerinfer.runtime.mtp import MtpDrafts

if TYPE_CHECKING:
    from powerinfer.devices.drafter import EagleHead


class EagleDrafts(MtpDrafts):
    """Source of drafts: an EAGLE head, on the pages of the model's requests."""

    name = "eagle"

    def __init__(self, head: EagleHead, *sizes: int) -> None:
        """sizes: as of `MtpDrafts`."""
        super().__init__(head, *sizes)
        self._tokens = head.tokens

    def _token(self, number: int) -> int:
        return int(self._tokens[super()._token(number)])
