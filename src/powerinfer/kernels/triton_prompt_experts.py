"""Triton kernels for experts of the many tokens of a prompt; see `triton_kernels` for the rules and the letters.

Pairs of a token and one of its experts are ordered by expert once for a layer, whose experts may then be summed piece
by piece, as they stream: each piece takes the pairs of its own. Operands are of the narrow types in which a device
multiplies many tokens, as its matrices are (`gpu.taken_by_many`): weights become so in registers. Every neuron is
computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from powerinfer.kernels import gpu
from powerinfer.kernels.gpu_types import EXPERT_TOKENS as TOKENS
from powerinfer.kernels.gpu_types import KEPT_BLOCKS
from powerinfer.kernels.triton_experts import (
    ACROSS,
    COLUMNS,
    columns,
    grouped_across_kernel,
    merge_kernel,
    order,
    put_rows,
    rows_of,
    weighted,
    weights_of,
)
from powerinfer.kernels.triton_kernels import (
    HALVED,
    WIDE,
    Tile,
    add_bias,
    either,
    narrow_row,
    precision,
    row_dots,
    scales_of,
)
from powerinfer.kernels.triton_launch import launched

if TYPE_CHECKING:
    from torch import Tensor

    from powerinfer.kernels.activations import Activations
    from powerinfer.kernels.gpu_experts import Part
    from powerinfer.kernels.gpu_types import Experts, Weight

ROWS = 4
"""Rows that a program makes float16 one after another, on average."""

TILES = {**WIDE, "MXFP4": Tile(32, 32, 4)}  # of more rows it would spill registers before Hopper


@triton.jit
def _scaled(y, scales, rows, real, SCALED: tl.constexpr):
    """Products y [R, T] with rows [T] of a narrow type; SCALED: times what these are multiplied by."""
    if SCALED:
        y *= tl.load(scales + rows, mask=real, other=0)[None, :]
    return y


@launched
@triton.jit
def _prompt_hidden_kernel(
    x, x_scales, gate, gate_scales, gate_bias, x_up, x_up_scales, up, up_scales, up_bias, begin, members, token_of,
    weight_of, h, size, k, limit,
    GATED: tl.constexpr, SCALES: tl.constexpr, BIAS: tl.constexpr, MEMBERS: tl.constexpr, SCALED: tl.constexpr,
    UP_SCALED: tl.constexpr, ACTIVATION: tl.constexpr, TYPE: tl.constexpr, UP_TYPE: tl.constexpr, T: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """h of R neurons of the expert in a slot for its tokens, times their weights; SCALES: x is. x, x_up: tokens as gate
    and up take them."""
    slot = tl.program_id(1)
    neuron = tl.program_id(0) * R + tl.arange(0, R)
    live = neuron < size
    row = slot.to(tl.int64) * size + neuron
    t = tl.arange(0, T)
    first, last = rows_of(begin, members, slot, MEMBERS)
    for at in range(first + tl.program_id(2) * T, last, tl.num_programs(2) * T):
        count = last - at
        token = tl.load(token_of + at + t, mask=t < count, other=0)
        u = row_dots(x_up, up, up_scales, row, live, count, k, UP_TYPE, T, R, C, PRECISION, rows=token)
        u = add_bias(_scaled(u, x_up_scales, token, t < count, UP_SCALED), up_bias, row, live, BIAS, T)
        a = u
        if GATED:
            a = row_dots(x, gate, gate_scales, row, live, count, k, TYPE, T, R, C, PRECISION, rows=token)
            a = add_bias(_scaled(a, x_scales, token, t < count, SCALED), gate_bias, row, live, BIAS, T)
        a = weighted(a, u, weights_of(weight_of, at, count, T), limit, ACTIVATION, GATED, SCALES)
        put_rows(h, a, at, count, size, neuron, T)


@launched
@triton.jit
def _prompt_down_kernel(
    h, h_scales, data, scales, bias, begin, members, weight_of, out, rows, k,
    BIAS: tl.constexpr, MEMBERS: tl.constexpr, SCALED: tl.constexpr, TYPE: tl.constexpr, T: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """R elements of what the expert in a slot gives for its rows of h."""
    slot = tl.program_id(1)
    element = tl.program_id(0) * R + tl.arange(0, R)
    live = element < rows
    row = slot.to(tl.int64) * rows + element
    t = tl.arange(0, T)
    first, last = rows_of(begin, members, slot, MEMBERS)
    for at in range(first + tl.program_id(2) * T, last, tl.num_programs(2) * T):
        count = last - at
        y = row_dots(h + at * k, data, scales, row, live, count, k, TYPE, T, R, C, PRECISION)
        y = _scaled(y, h_scales, at + t, t < count, SCALED)
        if BIAS:
            y += weights_of(weight_of, at, count, T) * tl.load(bias + row, mask=live, other=0)[:, None]
        put_rows(out, y, at, count, rows, element, T)


@launched
@triton.jit
def _narrow_pairs_kernel(h, out, scales, begin, members, size, MEMBERS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of h [pairs, size] of the expert in a slot as float16, see `Activations.narrowed`."""
    first, last = rows_of(begin, members, tl.program_id(0), MEMBERS)
    for row in range(first + tl.program_id(1), last, tl.num_programs(1)):
        narrow_row(h, out, scales, row, size, BLOCK)


class TokenBlock(NamedTuple):
    """Some tokens of a prompt, from number `first` on. experts: int32 [T, top_k]; token_of, weight_of, row_of, begin:
    as of `order`; columns: of a tile of an expert's pairs; tiles: that hold these, on average."""

    first: int
    activations: Activations
    experts: Tensor
    token_of: Tensor
    weight_of: Tensor
    row_of: Tensor
    begin: Tensor
    columns: int
    tiles: int


def blocks(x: Tensor, experts: Tensor, weights: Tensor, n: int) -> list[TokenBlock]:
    """Tokens x, float32 [T, d_model], with their pairs in order. experts: int32 [T, top_k] of n, -1: none."""
    result = []
    for first in range(0, len(x), TOKENS):
        tokens = slice(first, first + TOKENS)
        rows, selected = x[tokens].contiguous(), experts[tokens].contiguous()
        pairs = int(triton.cdiv(selected.numel(), n))  # of an expert
        width = columns(pairs, len(rows))
        ordered = order(selected, weights[tokens].contiguous(), n)
        tiles = int(triton.cdiv(pairs, width))
        result.append(TokenBlock(first, gpu.activations_of(rows), selected, *ordered, width, tiles))
    return result


def add_experts(parts: Iterable[Part], blocks: list[TokenBlock], into: Tensor) -> None:
    """`gpu_experts.add_some`, of tokens in blocks. Rows of all pairs are kept until the last part where there are few
    blocks; else each part's are added by themselves."""
    if len(blocks) > KEPT_BLOCKS:
        for experts, table, members in parts:
            for block in blocks:
                rows = torch.empty((len(block.token_of), into.shape[1]), dtype=torch.float32, device=into.device)
                _put_rows(experts, block, members, rows)
                _merge(block, table, rows, into)
            del experts  # the next one reuses its memory
        return
    all_rows = [
        torch.empty((len(block.token_of), into.shape[1]), dtype=torch.float32, device=into.device) for block in blocks
    ]
    came: Tensor | None = None  # the slot of each expert of some part
    for experts, table, members in parts:
        for block, rows in zip(blocks, all_rows, strict=True):
            _put_rows(experts, block, members, rows)
        if table is not None:  # which may pass, as its part does
            came = table.clone() if came is None else torch.maximum(came, table)
        del experts
    for block, rows in zip(blocks, all_rows, strict=True):
        _merge(block, came, rows, into)


def _merge(block: TokenBlock, table: Tensor | None, rows: Tensor, into: Tensor) -> None:
    """Add a block's rows to its tokens, of experts that have a slot."""
    (tokens, d), top_k = block.activations.x.shape, block.experts.shape[1]
    to = into[block.first : block.first + tokens]
    merge_kernel[(tokens, triton.cdiv(d, COLUMNS))](
        rows, block.row_of, block.experts, either(table, block.experts), to, top_k, d, TABLE=table is not None,
        ADD=True, C=COLUMNS, num_warps=4,
    )  # fmt: skip


def _put_rows(experts: Experts, block: TokenBlock, members: Tensor | None, rows: Tensor) -> None:
    """Write the addend of each pair of these experts to its token to rows, float32 [pairs, d]."""
    x, up, size, pairs = block.activations.x, experts.up, experts.size, len(block.token_of)
    d, exact, first = x.shape[1], precision(x), up if experts.gate is None else experts.gate
    h = torch.empty((pairs, size), dtype=torch.float32, device=x.device)
    (by_gate, by_up), tile = (gpu.taken_by_many(one, block.activations) for one in (first, up)), TILES[up.type]
    shape = {"MEMBERS": members is not None, "T": block.columns, "PRECISION": exact}
    numbers, bias = either(members, block.begin), experts.up_bias is not None
    _prompt_hidden_kernel[(triton.cdiv(size, tile.rows), experts.slots, block.tiles)](
        by_gate[0], either(by_gate[1], h), first.data, scales_of(first), either(experts.gate_bias, h),
        by_up[0], either(by_up[1], h), up.data, scales_of(up), either(experts.up_bias, h), block.begin, numbers,
        block.token_of, block.weight_of, h, size, d, experts.threshold, GATED=experts.gate is not None,
        SCALES=experts.scales_input, BIAS=bias, SCALED=by_gate[1] is not None, UP_SCALED=by_up[1] is not None,
        ACTIVATION=experts.activation, TYPE=first.type, UP_TYPE=up.type, R=tile.rows, C=tile.columns,
        num_warps=tile.warps, **shape,
    )  # fmt: skip
    down = experts.down
    narrow, scale = _narrowed(h, down, experts.slots, block, members)
    if experts.by_neuron:
        tile = ACROSS[down.type]
        width = tile.columns * (2 if down.type == "Q4_0X32" else 1)
        grouped_across_kernel[(triton.cdiv(d, width), experts.slots)](
            narrow, down.data, either(experts.shared, h), either(experts.group, h), block.begin, numbers,
            either(scale, h), rows, d, size, TYPE=down.type, GROUPS=experts.group is not None, R=tile.rows,
            C=tile.columns, SCALED=scale is not None, num_warps=tile.warps, **shape,
        )  # fmt: skip
        return
    tile = TILES[down.type]
    _prompt_down_kernel[(triton.cdiv(d, tile.rows), experts.slots, block.tiles)](
        narrow, either(scale, h), down.data, scales_of(down), either(experts.down_bias, h), block.begin, numbers,
        block.weight_of, rows, d, size, BIAS=bias, SCALED=scale is not None, TYPE=down.type, R=tile.rows,
        C=tile.columns, num_warps=tile.warps, **shape,
    )  # fmt: skip


def _narrowed(
    h: Tensor, down: Weight, slots: int, block: TokenBlock, members: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """`gpu.taken_by_many` of h, of whose rows only those of experts in slots are made; others are undefined."""
    if down.type == "BF16" or not gpu.multiplies_narrow(down):
        return gpu.taken_by_many(down, gpu.activations_of(h))
    pairs, size = h.shape
    narrow = torch.empty((pairs, size), dtype=torch.float16, device=h.device)
    scales = torch.empty((pairs, 1), dtype=torch.float32, device=h.device)
    _narrow_pairs_kernel[(slots, triton.cdiv(block.columns * block.tiles, ROWS))](
        h, narrow, scales, block.begin, either(members, block.begin), size, MEMBERS=members is not None,
        BLOCK=min(HALVED, triton.next_power_of_2(size)), num_warps=4,
    )  # fmt: skip
    return narrow, scales
