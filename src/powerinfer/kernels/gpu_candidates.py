"""Candidates for the next token: the largest logits of a row, taken out on the device that has them.

A sampler that draws among the most likely tokens reads these few instead of the whole row. torch is imported inside
the functions: the sizes are used without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

LIKELIEST = 64
"""Tokens of a row that are always among its candidates, unless these are more than MOST."""

MOST = 128
"""Candidates of a row at most."""

CANDIDATES = np.dtype([("count", "<i4"), ("total", "<f4"), ("values", "<f4", MOST), ("ids", "<i4", MOST)])
"""Candidates of a row of logits: every token whose logit is at least some bound, in any order.

count: of these, at least LIKELIEST, or all tokens where there are fewer; more than MOST: the row's values and ids are
incomplete. total: the sum of exp((logit - largest logit) / temperature) over all tokens of the row, within ERROR of it
where the largest logit is between -LARGE and LARGE, and elsewhere less than 1, infinite or NaN. values, ids: of the
first `count` places, logits and tokens; NaN is the largest.
"""

ERROR = 2.0**-16
"""Largest relative error of `total`, where a temperature is at least 1e-5 and at most HOTTEST.

An exponential of x <= 0 in float32 is off by a part of 2**-22, and by 2**-22 |x| more as x is rounded twice and
multiplied by log2(e). Weighted by what they add to the sum, |x| is at most the entropy's limit on average, ln(tokens):
14 for a million tokens. A sum in float32 of rows of partial sums adds less than 40 roundings.
"""

HOTTEST = 1e5
"""Highest temperature for which `total` is made."""

LARGE = 1e30

WORDS = CANDIDATES.itemsize // 4


def select(logits: Tensor, inverse_temperatures: Tensor, out: Tensor) -> None:
    """Write the candidates of each row of logits, float32 [R, vocab], into out, int32 [R, WORDS], as `CANDIDATES`.

    inverse_temperatures: float32 [R], 1 / temperature of each row.
    """
    from powerinfer.kernels import gpu

    if gpu.which(logits) == "triton":
        from powerinfer.kernels import triton_candidates

        triton_candidates.select(logits, inverse_temperatures, out)
    else:
        _select(logits, inverse_temperatures, out)


def _select(logits: Tensor, inverse_temperatures: Tensor, out: Tensor) -> None:
    import torch

    keys = _keys(logits)
    bounds = keys.topk(min(LIKELIEST, keys.shape[1]), dim=1).values[:, -1:]
    top = logits.amax(dim=1, keepdim=True).clamp(-LARGE, LARGE)
    totals = ((logits - top) * inverse_temperatures[:, None]).exp().sum(dim=1)
    for row, (values, reached, total) in enumerate(zip(logits, keys >= bounds, totals, strict=True)):
        ids = reached.nonzero()[:, 0]
        out[row, 0], out[row, 1] = len(ids), total.view(torch.int32)
        ids = ids[:MOST]
        out[row, 2 : 2 + len(ids)] = values[ids].view(torch.int32)
        out[row, 2 + MOST : 2 + MOST + len(ids)] = ids


def _keys(logits: Tensor) -> Tensor:
    """int32 in the order of the logits, of which NaN is the largest."""
    import torch

    bits = torch.where(logits == 0, 0.0, logits).view(torch.int32)
    return torch.where(logits.isnan(), 0x7FFFFFFF, bits ^ (bits >> 31 & 0x7FFFFFFF))
