"""The tokens of one forward call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # importing numpy.typing takes milliseconds
    import numpy as np
    from numpy.typing import NDArray

    Int32 = NDArray[np.int32]
    Float32 = NDArray[np.float32]


class LogitsNeed(IntEnum):
    """Need for logits: of each row the largest one alone, those of the most likely tokens, or all."""

    LARGEST = 0
    CANDIDATES = 1
    LOGITS = 2


NOT_FINITE = {-1: float("nan"), -2: float("inf"), -3: float("-inf")}
"""The number in place of a token whose logit, the largest, is none: -1 for NaN."""


class StoppedError(Exception):
    """A call ended early, as its batch's `stop` says: what it wrote is as of one that failed."""


@dataclass(slots=True)
class Batch:
    """T tokens of S sequences whose keys and values are stored in pages.

    The tokens of one sequence are consecutive and in order of position; the key and value of position p of the
    sequence in row r are in page `page_table[r, p // page_size]`, slot `p % page_size`. A token attends to the
    positions 0 .. its own of its sequence. All arrays are C-contiguous.
    """

    tokens: Int32  # [T]
    positions: Int32  # [T]
    rows: Int32  # [T] row of page_table of each token
    page_table: Int32  # [S, P] page ids, -1 where unused
    logit_rows: Int32  # [R] indices into tokens, ascending: whose logits are returned
    # Of models whose layers keep a state for each sequence: its slot before the step, not read at position 0, and after
    # it; [S], only those of rows with tokens count. None: every row has a slot of its own, which nobody else uses.
    read_states: Int32 | None = None
    states: Int32 | None = None
    # Of those, too: [S] tokens right before a row's first whose inputs are replayed, which the state in its slot lacks;
    # the step that wrote `states` last computed them first, from that same state, and kept them. 0: none. And the slot
    # that gets the state behind them, from which the row's tokens go on; it may be the one that is read.
    replayed: Int32 | None = None
    undo_states: Int32 | None = None
    # [1]: once it is not 0, set by any thread, nobody needs the result, and the call may end with StoppedError. None:
    # somebody does.
    stop: Int32 | None = None
    # Where layers leave neurons out on the CPU, each token has the bits of a step of it alone, of up to NEURON_TOKENS:
    # those of a request, and drafts that follow it.
    alone: bool = field(default=False, kw_only=True)
    # Of each row of logits: an executor may return, in place of logits, tokens of the largest or `CANDIDATES`.
    needs: LogitsNeed = field(default=LogitsNeed.LOGITS, kw_only=True)
    # [R] 1 / temperature at which candidates of each row are weighed; None: 1.
    inverse_temperatures: Float32 | None = field(default=None, kw_only=True)
    # Called once by an executor that `overlaps`, while a device computes where that is possible, else before the step.
    meanwhile: Callable[[], None] | None = field(default=None, kw_only=True)
    # Of a batch that needs no more than candidates: called by an executor that launches the batch behind it now, which
    # has its shape, and fills in the tokens of that: those that this call returns. Where it cannot draw all of them out
    # of candidates, it returns these, and fills in none. None: there is none. The next call is of that batch, or what
    # was launched is void; nobody asks for hidden states of this one.
    successor: Callable[[], Batch | None] | None = field(default=None, kw_only=True)
    # [T, DRAW_NUMBERS], of a successor of a batch that needs candidates: how its tokens are drawn out of these.
    draws: NDArray[np.float64] | None = field(default=None, kw_only=True)
    # Set by an executor that returns candidates: makes the logits [R, vocab_size] of that call, until the next one.
    logits: Callable[[], Float32] | None = field(default=None, kw_only=True)

    def overlap(self) -> None:
        """Call `meanwhile`, if that has not happened."""
        if self.meanwhile is not None:
            call, self.meanwhile = self.meanwhile, None
            call()
