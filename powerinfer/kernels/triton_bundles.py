"""The Triton kernel that converts parts of bundles from the CPU's byte order into that of a GPU's weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

UNITS = 1024  # of a row that a program converts


@triton.jit(do_not_specialize=["part"])
def _take_kernel(
    raw, at, out, width, part, each,
    ORDER: tl.constexpr, FLIP: tl.constexpr, LINE: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """out[i, j] = unit `place(j)` of the part of bundle i. LINE: units of a line; FLIP: the bits to invert."""
    i = tl.program_id(0)
    j = tl.program_id(1) * B + tl.arange(0, B)
    if ORDER == "blocks":
        block = j // each
        first = block // 16 * 16
        place = first * each + j % each * tl.minimum(width // each - first, 16) + block % 16
    elif ORDER == "bytes":
        place = j // 64 * 64 + j % 16 * 4 + j // 16 % 4
    elif ORDER == "words":
        place = j // 16 * 16 + j % 4 * 4 + j // 4 % 4
    else:
        place = j
    here = j < width
    unit = tl.load(raw + tl.load(at + i).to(tl.int64) * LINE + part + place, mask=here, other=0)
    tl.store(out + i.to(tl.int64) * width + j, unit ^ FLIP if FLIP else unit, mask=here)


def take(raw: Tensor, at: Tensor, part: int, out: Tensor, order: str, each: int, flip: int) -> None:
    """`gpu._take`, with `raw` and `out` in units and `part` counted in them."""
    n, width = out.shape
    block = min(UNITS, triton.next_power_of_2(width))
    _take_kernel[(n, triton.cdiv(width, block))](
        raw, at, out, width, part, each,
        ORDER=order, FLIP=flip, LINE=64 // raw.element_size(), B=block, num_warps=4,
    )  # fmt: skip
