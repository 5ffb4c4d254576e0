"""A Triton kernel that makes rows of the CPU's panels (csrc/table.h), as `gpu_panels` says in plain torch.

A panel is a matrix of words, one of each of 16 rows together, and what is beside the codes of a block follows them, for
16 rows together, too. Programs turn some words each, and others what is beside some blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from powerinfer.formats.quant import block_type
from powerinfer.formats.weight_types import WEIGHT_TYPES
from powerinfer.kernels.triton_launch import launched

if TYPE_CHECKING:
    from torch import Tensor

    from powerinfer.kernels.gpu_types import Weight

LANES: tl.constexpr = tl.constexpr(16)
WORDS, BLOCKS = 128, 16
"""Words, or blocks, of each of 16 rows that a program has."""


@triton.jit
def _row_words(source, j, lane, present, KIND: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr):
    """Words j [W, 1] of rows, OUT a block, from the IN words of each block in panels."""
    block, w = j // OUT, j % OUT
    at = w
    if KIND == "Q5_0":
        at = w % 4
    elif KIND == "Q5_K":  # the fifth bits come first
        at = tl.where(w < 8, 32 + w, w - 8)
    elif KIND == "Q6_K":
        at = tl.where(w < 32, w // 16 * 24 + w % 16, (w - 32) // 8 * 24 + 16 + w % 8)
    words = tl.load(source + (block * IN + at) * LANES + lane, mask=present, other=0)
    if KIND == "Q4_0":  # codes with an offset of 8 become two's complement
        words = words ^ -0x77777778
    elif KIND == "Q5_0":
        fifth = tl.load(source + (block * IN + 4) * LANES + lane, mask=present, other=0)
        low = words >> w // 4 * 4 & 0x0F0F0F0F
        words = low | (~(fifth >> w) & 0x01010101) * 0xF0
    return words


@triton.jit
def _put_k_scales(meta, scales, row, b, lane, present, n):
    """Scales of blocks b [B, 1] of Q4_K or Q5_K: four words."""
    at = meta + b * (20 * LANES)
    halves = meta.to(tl.pointer_type(tl.uint16)) + b * (10 * LANES)
    first = tl.load(halves + lane, mask=present, other=0).to(tl.int32)
    first |= tl.load(halves + LANES + lane, mask=present, other=0).to(tl.int32) << 16
    second = tl.zeros_like(first)
    third = tl.zeros_like(first)
    fourth = tl.zeros_like(first)
    for i in tl.static_range(4):
        scale_at = at + (64 + 32 * i) + lane
        scale = tl.load(scale_at, mask=present, other=0).to(tl.int32)
        least = tl.load(scale_at + LANES, mask=present, other=0).to(tl.int32)
        other = tl.load(scale_at + 128, mask=present, other=0).to(tl.int32)
        other_least = tl.load(scale_at + 128 + LANES, mask=present, other=0).to(tl.int32)
        second |= (scale | other >> 4 << 6) << 8 * i
        third |= (least | other_least >> 4 << 6) << 8 * i
        fourth |= (other & 15 | (other_least & 15) << 4) << 8 * i
    to = scales.to(tl.pointer_type(tl.int32)) + row * (4 * n) + 4 * b
    tl.store(to, first, mask=present)
    tl.store(to + 1, second, mask=present)
    tl.store(to + 2, third, mask=present)
    tl.store(to + 3, fourth, mask=present)


@triton.jit
def _put_q6_k_scales(meta, scales, row, b, lane, present, n):
    """Scales of blocks b [B, 1] of Q6_K: nine halves of a word."""
    at = meta + b * (18 * LANES)
    to = scales.to(tl.pointer_type(tl.int16)) + row * (9 * n) + 9 * b
    for i in tl.static_range(8):
        scale_at = at + (32 + 32 * i) + lane
        pair = tl.load(scale_at, mask=present, other=0).to(tl.int16)
        pair |= tl.load(scale_at + LANES, mask=present, other=0).to(tl.int16) << 8
        tl.store(to + i, pair, mask=present)
    halves = meta.to(tl.pointer_type(tl.int16)) + b * (9 * LANES)
    tl.store(to + 8, tl.load(halves + lane, mask=present, other=0), mask=present)


@launched
@triton.jit
def _panel_rows_kernel(
    panels, data, scales, pitch, words, n,
    KIND: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr, W: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """W words of the rows of a panel of `pitch` bytes, or what is beside B blocks. words, n: words and blocks of a
    row."""
    panel = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)[None, :]
    row, source = panel * LANES + lane, panels + panel * pitch
    tile, tiles = tl.program_id(1), tl.cdiv(words, W)
    if tile < tiles:
        j = tile * W + tl.arange(0, W)[:, None]
        present = (j < words) & (lane < LANES)
        of_panel = source.to(tl.pointer_type(tl.int16)) if KIND == "F16" else source.to(tl.pointer_type(tl.int32))
        tl.store(data + row * words + j, _row_words(of_panel, j, lane, present, KIND, OUT, IN), mask=present)
    else:
        b = (tile - tiles) * B + tl.arange(0, B)[:, None]
        live, meta = (b < n) & (lane < LANES), source + n * (IN * 4 * LANES)
        if KIND == "Q4_K" or KIND == "Q5_K":
            _put_k_scales(meta, scales, row, b, lane, live, n)
        elif KIND == "Q6_K":
            _put_q6_k_scales(meta, scales, row, b, lane, live, n)
        elif KIND == "MXFP4":
            tl.store(scales + row * n + b, tl.load(meta + b * LANES + lane, mask=live, other=0), mask=live)
        else:
            halves = meta.to(tl.pointer_type(tl.int16))
            to = scales.to(tl.pointer_type(tl.int16)) + row * n + b
            tl.store(to, tl.load(halves + b * LANES + lane, mask=live, other=0), mask=live)


def put(weight: Weight, at: int, kind: str, k: int, panels: Tensor) -> None:
    """`gpu_panels.put` of a type of `gpu_panels.SAME_BITS`; of BF16 k is even."""
    n = k // block_type(kind).block
    rows = slice(at, at + 16 * len(panels))
    data = weight.data[rows].view(torch.int16 if kind == "F16" else torch.int32)
    words, scales, tiles = data.shape[1], data, 0
    if weight.scales is not None:
        scales, tiles = weight.scales[rows].view(torch.uint8), triton.cdiv(n, BLOCKS)
    of_block = (words // n, WEIGHT_TYPES[kind].codes // 4) if tiles else (1, 1)
    _panel_rows_kernel[(len(panels), triton.cdiv(words, WORDS) + tiles)](
        panels, data, scales, panels.shape[1], words, n, KIND=kind, OUT=of_block[0], IN=of_block[1], W=WORDS, B=BLOCKS,
        num_warps=4,
    )  # fmt: skip
