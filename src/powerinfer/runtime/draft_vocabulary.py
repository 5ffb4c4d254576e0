"""Draft vocabulary: the tokens that drafts are chosen from, so that most of the output head need not be read for them.

The output head is most of what a draft reads, and a few of its rows get almost all tokens: of vocabularies made by
merging (BPE) the first ones, and those that a text has used before (a fixed set by frequency: FR-Spec, arXiv
2502.14856). A token outside of it is never drafted, which costs that draft and no bit of an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from powerinfer.kernels.candidates import CANDIDATES
from powerinfer.kernels.cpu import LANES
from powerinfer.kernels.draft_rows import first_tokens, recent_tokens

if TYPE_CHECKING:
    from numpy.typing import NDArray


class DraftVocabulary:
    """The first eighth of a model's tokens, in panels of `LANES`, and panels of tokens that requests had lately."""

    def __init__(self, vocab_size: int) -> None:
        self._panels = vocab_size // LANES  # whole ones
        self._first = first_tokens(vocab_size) // LANES
        self._most = recent_tokens(vocab_size) // LANES
        self._noted = np.zeros(self._panels, np.int64)  # when each was noted last; 0: never
        self._time = 0
        self._listed = np.arange(self._first, dtype=np.int32)
        self._changed = True

    @property
    def first(self) -> int:
        """Number of its first tokens."""
        return self._first * LANES

    @property
    def restricts(self) -> bool:
        """Whether it leaves tokens out; small vocabularies are drafted from as a whole."""
        return self._first < self._panels

    def note(self, tokens: Sequence[int]) -> None:
        """Tokens of a request, which it may have again."""
        if not self.restricts or not tokens:
            return
        panels = np.unique(np.asarray(tokens, np.int32) // LANES)
        panels = panels[(panels >= self._first) & (panels < self._panels)]
        self._changed |= bool((self._noted[panels] == 0).any())
        self._time += 1
        self._noted[panels] = self._time

    def changed(self) -> NDArray[np.int32] | None:
        """The panels to make logits of, ascending, if they are others than at the last call; else None."""
        if not self.restricts or not self._changed:
            return None
        self._changed = False
        recent = np.flatnonzero(self._noted)
        if len(recent) > self._most:  # the half that was noted last stays
            older = recent[np.argsort(-self._noted[recent], kind="stable")][self._most // 2 :]
            self._noted[older] = 0
            recent = np.flatnonzero(self._noted)
        self._listed = np.concatenate([np.arange(self._first), recent]).astype(np.int32)
        return self._listed

    def order(self, listed: NDArray[np.int32]) -> None:
        """Take the panels in another order, in which their logits come; some may come twice."""
        self._listed = listed

    def narrow(self, logits: NDArray[Any]) -> NDArray[Any]:
        """The part of a row of logits, float32 [vocab], that was computed; candidates as they are."""
        if not self.restricts or logits.dtype == CANDIDATES:
            return logits
        return logits[: len(self._listed) * LANES]

    def token(self, number: int) -> int:
        """The token of a number of these."""
        return int(self._listed[number // LANES]) * LANES + number % LANES if self.restricts else number
