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

    from powerinfer.kernels.gpu_types import CallAnswer

BLOCK = 512  # numbers of a program: four of a thread, so that all of a row are under way at once
WARPS = 4


@launched
@triton.jit
def _send_kernel(rows, into, n, BLOCK: tl.constexpr):
    follow()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(into + i, tl.load(rows + i, mask=i < n, other=0), mask=i < n, cache_modifier=".wt")


@launched
@triton.jit
def _receive_kernel(sums, total, out, cold, n, ADD: tl.constexpr, ANSWERS: tl.constexpr, BLOCK: tl.constexpr):
    """out = sums, with ADD total + sums; ANSWERS: zeros in their place, which are not read, where `cold` is zero. Never
    launched early: what it reads is there when all before it has ended."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < n
    if ANSWERS:
        live &= tl.load(cold) != 0
    y = tl.load(sums + i, mask=live, other=0, cache_modifier=".cv")  # not what a cache has of the layer before
    if ADD:
        y += tl.load(total + i, mask=i < n, other=0)
    tl.store(out + i, y, mask=i < n)


def put(rows: Tensor, into: Tensor) -> None:
    """`gpu_host.put`."""
    n = rows.numel()
    _send_kernel[(triton.cdiv(n, BLOCK),)](
        rows.contiguous(), into, n, BLOCK=BLOCK, num_warps=WARPS, launch_pdl=early(rows)
    )


def take(sums: Tensor, total: Tensor | None, answer: CallAnswer | None) -> Tensor:
    """`gpu_host.take`, or `gpu_host.add` to a total, which is returned."""
    n, out = sums.numel(), torch.empty_like(sums) if total is None else total
    assert out.is_contiguous()
    _receive_kernel[(triton.cdiv(n, BLOCK),)](
        sums, either(total, sums), out, out if answer is None else answer.counters, n, ADD=total is not None,
        ANSWERS=answer is not None, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return out
