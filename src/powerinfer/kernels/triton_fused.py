"""The neurons of a layer for one token as one Triton kernel, and a sum; see `triton_kernels` for the rules and letters.

`triton_neurons` takes a launch for each stage: list, products, sums. Each is a few microseconds, at whose end the
memory idles. Here a program has an even share of the selected neurons, or of all of them, from the list to its sum of
down, a row of its own; the rows are added by a second kernel. As many programs as a GPU holds run at once, each with
several rows on their way; so it reads and writes a row of sums for each, beside the weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from powerinfer.kernels.triton_kernels import (
    Tile,
    add_up,
    ask_for,
    asked_lines,
    early,
    either,
    follow,
    for_rows,
    precision,
    processors,
    row_width,
    share,
    tile_columns,
)
from powerinfer.kernels.triton_launch import launched
from powerinfer.kernels.triton_neurons import add_rows, product, product_operands

if TYPE_CHECKING:
    from torch import Tensor

    from powerinfer.kernels.gpu_types import Neurons

WARPS_HELD, REGISTERS = 16, 128
"""Warps that a multiprocessor holds, and the registers that it then has for each thread."""
WARPS = 8
"""Of a program with the tiles below. Of narrow rows it has fewer (`for_rows`), and does as much less at a time."""
PRODUCTS = {
    **dict.fromkeys(("F32", "F16", "BF16"), Tile(4, 2048, WARPS)),
    "Q8_0": Tile(4, 4096, WARPS),
    "Q4_0": Tile(4, 4096, WARPS),
}
"""Tiles of gate and up, see `for_rows`: of all programs of an H100 together 4 MB on their way."""
DOWN = {
    **dict.fromkeys(("F32", "F16", "BF16", "Q8_0"), Tile(2, 4096, WARPS)),
    "Q4_0": Tile(2, 2048, WARPS),
    "Q4_0X32": Tile(4, 4096, WARPS),
}
"""Tiles of down, narrower where a program has fewer warps."""
LEAST_NEURONS = 4
"""Of a layer, selected or not, for each program at least."""
ADDED_UP = (512, 32)
"""Programs, and columns, whose sums a program adds up at a time."""
LISTED_WORDS = 1024
"""Words of a selection, four neurons each, that a program lists at a time: more would take too many registers. It
counts four times as many."""
_BYTES, _SIGNS, _ONES = tl.constexpr(0x7F7F7F7F), tl.constexpr(0x80808080), tl.constexpr(0x01010101)


@triton.jit
def _selected_words(selected, n, first, W: tl.constexpr):
    """Of W words of a selection [n], each of four neurons, those with a 1 in the byte of each that is selected, and how
    many these are."""
    w = first + tl.arange(0, W)
    words = tl.load(selected.to(tl.pointer_type(tl.uint32)) + w, mask=4 * w < n, other=0)
    ones = ((((words & _BYTES) + _BYTES) | words) & _SIGNS) >> 7
    beyond = tl.minimum(tl.maximum(4 * w + 4 - n, 0), 3)  # bytes of the last word that are no neurons
    ones &= _ONES >> (8 * beyond).to(tl.uint32)
    return ones, ((ones * _ONES) >> 24).to(tl.int32)


@triton.jit
def _own_share(selected, listed, n, WORDS: tl.constexpr):
    """List the neurons of this program's share of the selected ones [n], at their places in listed: begin and end of
    these."""
    words, total = (n + 3) // 4, 0
    for first in range(0, words, 4 * WORDS):
        _ones, counts = _selected_words(selected, n, first, 4 * WORDS)
        total += tl.sum(counts, 0)
    begin, end = share(total)
    before = 0
    for first in range(0, words, WORDS):
        ones, counts = _selected_words(selected, n, first, WORDS)
        behind = before + tl.sum(counts, 0)
        if (behind > begin) & (before < end):
            place = before + tl.cumsum(counts, 0) - counts
            neuron = 4 * (first + tl.arange(0, WORDS))
            for i in tl.static_range(4):
                one = ((ones >> (8 * i)) & 1).to(tl.int32)
                tl.store(listed + place, neuron + i, mask=(one != 0) & (place >= begin) & (place < end))
                place += one
        before = behind
    return begin, end


@launched
@triton.jit
def _fused_kernel(
    x, gate, gate_scales, gate_bias, up, up_scales, up_bias, limits, product_limits, down, down_scales, shared, group,
    selected, listed, h, parts, fired, n, k, d_model, limit, threshold,
    GATED: tl.constexpr, ACTIVATION: tl.constexpr, TYPE: tl.constexpr, DOWN: tl.constexpr, LISTED: tl.constexpr,
    GATE_BIAS: tl.constexpr, UP_BIAS: tl.constexpr, LIMITS: tl.constexpr, PRODUCT_LIMITS: tl.constexpr,
    THRESHOLD: tl.constexpr, R: tl.constexpr, C: tl.constexpr, ADDED: tl.constexpr, ACROSS: tl.constexpr,
    SHARE: tl.constexpr, WORDS: tl.constexpr, LINES: tl.constexpr, DOWN_LINES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A row of parts [programs, d_model]: the sum of this program's neurons, of which ADDED rows of down are added at a
    time, in ACROSS columns. Without GATED the gate arguments are up's; without LISTED all n neurons count, and a
    program has at most SHARE of them. listed [n] int32 and h [n] float32 are for the programs, each at its places.
    """
    if LISTED:
        follow()
        begin, end = _own_share(selected, listed, n, WORDS)
        tl.debug_barrier()  # what other threads of the program listed
    else:
        begin, end = share(n)
        ask_for(gate, begin + tl.arange(0, R), n, k, TYPE, LINES)
        follow()
    for i in range(begin, end, R):
        place = i + tl.arange(0, R)
        live = place < end
        row = place
        if LISTED:
            row = tl.load(listed + tl.minimum(place, end - 1))
            if GATED:  # most of what is selected fires
                ask_for(up, row, n, k, TYPE, LINES)
            ask_for(down, row, n, d_model, DOWN, DOWN_LINES)
        row = tl.where(live, row, 0).to(tl.int64)
        a = product(
            x, gate, gate_scales, gate_bias, up, up_scales, up_bias, limits, product_limits, row, live, live, 1, k,
            limit, threshold, GATED, ACTIVATION, TYPE, GATE_BIAS, UP_BIAS, LIMITS, PRODUCT_LIMITS, THRESHOLD, 0, R, C,
            PRECISION, False,
        )  # fmt: skip
        tl.store(h + place, a, mask=live)
        before = tl.load(fired + row, mask=live, other=0)
        tl.store(fired + row, before + (a != 0).to(fired.dtype.element_ty), mask=live)
    tl.debug_barrier()  # h of other threads
    if not LISTED:
        place = begin + tl.arange(0, SHARE)
        value = tl.load(h + place, mask=place < end, other=0)
        fires = (value != 0).to(tl.int32)
        at = begin + tl.cumsum(fires, 0) - fires
        tl.debug_barrier()  # all have read
        tl.store(h + at, value, mask=fires != 0)
        tl.store(listed + at, place, mask=fires != 0)
        end = begin + tl.sum(fires, 0)
        tl.debug_barrier()
    parts += tl.program_id(0).to(tl.int64) * d_model
    for across in range(0, tl.cdiv(d_model, tile_columns(DOWN, ACROSS))):
        add_rows(
            down, down_scales, shared, group, listed, h, parts, begin, end, 1, n, d_model, across, DOWN, 0, ADDED,
            ACROSS, PRECISION, False,
        )  # fmt: skip


def fused_sum(
    neurons: Neurons, x: Tensor, selected: Tensor | None, threshold: float, into: Tensor | None, fired: Tensor
) -> Tensor:
    """`triton_neurons.neuron_sum` of one token."""
    n, up, down = neurons.n, neurons.up, neurons.down
    tile, sums = for_rows(PRODUCTS[up.type], up.type, up.k), DOWN[down.type]
    across = min(sums.columns * tile.warps // sums.warps, int(triton.next_power_of_2(row_width(down.type, down.k))))
    programs = min(max(1, WARPS_HELD // tile.warps) * processors(x), triton.cdiv(n, LEAST_NEURONS))
    listed = torch.empty(n, dtype=torch.int32, device=x.device)
    h = torch.empty(n, dtype=torch.float32, device=x.device)
    parts = torch.empty((programs, 1, down.k), dtype=torch.float32, device=x.device)
    if selected is not None:
        selected = selected.contiguous()
        if selected.data_ptr() % 4:  # it is read in words
            selected = selected.clone()
    operands, flags = product_operands(neurons, x.contiguous(), h, selected is not None, threshold)
    _fused_kernel[(programs,)](
        *operands, down.data, either(down.scales, h), either(neurons.shared, h), neurons.group, either(selected, h),
        listed, h, parts, fired, n, up.k, down.k, neurons.threshold, threshold, **flags, DOWN=down.type, R=tile.rows,
        C=tile.columns, ADDED=sums.rows, ACROSS=across,
        SHARE=int(triton.next_power_of_2(triton.cdiv(n, programs))) if selected is None else 1,
        WORDS=LISTED_WORDS * tile.warps // WARPS, LINES=asked_lines(up, tile.rows),
        DOWN_LINES=asked_lines(down, tile.rows), PRECISION=precision(x),
        num_warps=tile.warps, maxnreg=REGISTERS, launch_pdl=early(x),
    )  # fmt: skip
    out = torch.empty((1, down.k), dtype=torch.float32, device=x.device) if into is None else into
    add_up(parts, out, into is not None, ADDED_UP)
    return out
