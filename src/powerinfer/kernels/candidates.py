"""Records of candidates: the largest logits of a row, for samplers that draw among the most likely tokens.

A device that has the logits makes them (`gpu_candidates`); the native module draws tokens out of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from powerinfer import _native

LIKELIEST = _native.LIKELIEST
"""Tokens of a row that are always among its candidates, unless these are more than MOST."""

MOST = _native.MOST_CANDIDATES
"""Candidates of a row at most."""

CANDIDATES = np.dtype([("count", "<i4"), ("total", "<f4"), ("values", "<f4", MOST), ("ids", "<i4", MOST)])
"""Candidates of a row of logits: every token whose logit is at least some bound, in any order.

count: of these, at least LIKELIEST, or all tokens where there are fewer; more than MOST: the row's values and ids are
incomplete. total: the sum of exp((logit - largest logit) / temperature) over all tokens of the row, within ERROR of it
where the largest logit is between -LARGE and LARGE, and elsewhere less than 1, infinite or NaN. values, ids: of the
first `count` places, logits and tokens; NaN is the largest.
"""

ERROR = _native.TOTAL_ERROR
"""Largest relative error of `total`, where a temperature is at least 1e-5 and at most HOTTEST.

An exponential of x <= 0 in float32 is off by a part of 2**-22, and by 2**-22 |x| more as x is rounded twice and
multiplied by log2(e). Weighted by what they add to the sum, |x| is at most the entropy's limit on average, ln(tokens):
14 for a million tokens. A sum in float32 of rows of partial sums adds less than 40 roundings.
"""

HOTTEST = 1e5
"""Highest temperature for which `total` is made."""

LARGE = 1e30

WORDS = CANDIDATES.itemsize // 4



def any_tokens(records: NDArray[np.int32], tokens: NDArray[np.int32]) -> NDArray[np.int32]:
    """The tokens, int32 [R], some candidate of each row's in place of those that are -1. records: int32 [R, WORDS]."""
    return np.where(tokens < 0, records[:, 2 + MOST], tokens)


DRAW_NUMBERS = _native.DRAW_NUMBERS

Draw = tuple[float, float, float, float, float]
"""Numbers by which a token is drawn: the temperature, 0: it is the most likely one; top_k, 0: no limit; top_p; min_p;
one that is uniform in [0, 1)."""


def drawn_token(record: Any, draw: Draw) -> int:
    """The token that a sampler draws out of a record of `CANDIDATES`; -1: these do not suffice, or it depends on how
    exponentials are rounded, which differs between libraries."""
    return _native.drawn_token(int(record["count"]), float(record["total"]), record["values"], record["ids"], draw)
