"""Candidates for the next token, taken out of logits on the device that has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from powerinfer.kernels import gpu
from powerinfer.kernels.candidates import LARGE, LIKELIEST, MOST

if TYPE_CHECKING:
    from torch import Tensor


def select(logits: Tensor, inverse_temperatures: Tensor, out: Tensor) -> None:
    """Write the candidates of each row of logits, float32 [R, vocab], into out, int32 [R, WORDS], as `CANDIDATES`.

    inverse_temperatures: float32 [R], 1 / temperature of each row.
    """
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
