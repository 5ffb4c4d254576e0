"""The Triton kernel that converts rows of bundles from the CPU's byte order into that of a GPU's weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from powerinfer.kernels.triton_kernels import either
from powerinfer.kernels.triton_launch import launched

if TYPE_CHECKING:
    from torch import Tensor

UNITS = 1024  # of a row that a program converts


@launched
@triton.jit(do_not_specialize=["offset"])
def _take_kernel(
    raw, at, order, out, width, offset,
    ORDER: tl.constexpr, FLIP: tl.constexpr, LINE: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """out[i, j] = unit order[j], or j, of the row of bundle i. LINE: units of a line; FLIP: the bits to invert."""
    i = tl.program_id(0)
    j = tl.program_id(1) * B + tl.arange(0, B)
    here = j < width
    place = tl.load(order + j, mask=here, other=0) if ORDER else j
    unit = tl.load(raw + tl.load(at + i).to(tl.int64) * LINE + offset + place, mask=here, other=0)
    tl.store(out + i.to(tl.int64) * width + j, unit ^ FLIP if FLIP else unit, mask=here)


def take(raw: Tensor, at: Tensor, offset: int, out: Tensor, order: Tensor | None, flip: int) -> None:
    """`gpu._take`, with `raw` and `out` in units and `offset` counted in them."""
    n, width = out.shape
    block = min(UNITS, triton.next_power_of_2(width))
    _take_kernel[(n, triton.cdiv(width, block))](
        raw, at, either(order, at), out, width, offset,
        ORDER=order is not None, FLIP=flip, LINE=64 // raw.element_size(), B=block, num_warps=4,
    )  # fmt: skip
