"""Triton kernels that write and read memory of the host in place; see `gpu_host`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from powerinfer.kernels.triton_kernels import early, either, follow
from powerinfer.kernels.triton_launch import launched

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 512  # numbers of a program: four of a thread, so that all of a row are under way at once
WARPS = 4


@launched
@triton.jit
def _put_kernel(rows, into, n, BLOCK: tl.constexpr):
    follow()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(into + i, tl.load(rows + i, mask=i < n, other=0), mask=i < n, cache_modifier=".wt")


@launched
@triton.jit
def _take_kernel(sums, total, out, n, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """out = sums, with ADD total + sums. Never launched early: what it reads is there when all before it has ended."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(sums + i, mask=i < n, other=0, cache_modifier=".cv")  # not what a cache has of the layer before
    if ADD:
        y += tl.load(total + i, mask=i < n, other=0)
    tl.store(out + i, y, mask=i < n)


def put(rows: Tensor, into: Tensor) -> None:
    """`gpu_host.put`."""
    n = rows.numel()
    _put_kernel[(triton.cdiv(n, BLOCK),)](
        rows.contiguous(), into, n, BLOCK=BLOCK, num_warps=WARPS, launch_pdl=early(rows)
    )


def take(sums: Tensor, total: Tensor | None) -> Tensor:
    """`gpu_host.take`, or `gpu_host.add` to a total, which is returned."""
    n, out = sums.numel(), torch.empty_like(sums) if total is None else total
    assert out.is_contiguous()
    _take_kernel[(triton.cdiv(n, BLOCK),)](
        sums, either(total, sums), out, n, ADD=total is not None, BLOCK=BLOCK, num_warps=WARPS
    )
    return out
