"""Experts of a long step that the CPU computes while others stream to a GPU: those with fewest tokens.

Each expert takes the link as long as any other, and the CPU longer the more tokens selected it. So the CPU takes the
rarest, as many as it has done, by the rates that were measured, when the last of the others has come. Which ones
depends on the step's selections alone: the same step gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from powerinfer.formats.json_file import Between
from powerinfer.kernels.gpu import FEW

Tokens = Annotated[int, Between(FEW + 1, 1 << 40)]
Seconds = Annotated[float, Between(0, 1e6)]


@dataclass(frozen=True)
class Sharing:
    """The division of a layer's experts in steps of `first` to `last` tokens, by seconds: of an expert that streams
    (link), of one on the CPU (expert), and there of each of its tokens (pair)."""

    first: Tokens
    last: Tokens
    link: Seconds
    expert: Seconds
    pair: Seconds

    def takes(self, tokens: int) -> bool:
        """Whether the CPU has a part in a step of that number of tokens."""
        return self.first <= tokens <= self.last

    def choose(self, counts: NDArray[np.integer], streamed: int) -> NDArray[np.intp]:
        """The numbers of the experts that the CPU takes, ascending. counts: tokens of each expert, 0 for one that
        nobody needs, which the CPU takes for nothing; streamed: how many others stream before them."""
        rarest = np.argsort(counts, kind="stable")
        seconds = np.cumsum(np.where(counts[rarest] > 0, self.expert + self.pair * counts[rarest], 0.0))
        meanwhile = self.link * (streamed + len(counts) - np.arange(1, len(counts) + 1))
        return np.sort(rarest[: int(np.argmin([*(seconds <= meanwhile), False]))])


def cpu_rates(first: tuple[float, int, int], second: tuple[float, int, int]) -> tuple[float, float]:
    """Seconds of an expert on the CPU, and of each of its tokens. first, second: seconds of two steps, their experts,
    and pairs of a token and an expert; the second with more tokens."""
    (seconds, experts, pairs), (more_seconds, more_experts, more_pairs) = first, second
    determinant = experts * more_pairs - more_experts * pairs
    if determinant > 0:
        expert = (seconds * more_pairs - more_seconds * pairs) / determinant
        pair = (experts * more_seconds - more_experts * seconds) / determinant
        if expert >= 0 and pair >= 0:
            return expert, pair
    return 0.0, more_seconds / max(1, more_pairs)
