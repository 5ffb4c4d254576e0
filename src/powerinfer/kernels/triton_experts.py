"""Triton kernels for experts; see `triton_kernels` for the rules and the letters.

One token: its experts' products of gate and up, then those of down, added up in the order of the experts. Several
tokens: pairs of a token and one of its experts are ordered by slot, so that an expert's weights are read once for all
of its tokens, and each token's rows are added up at the end.

Experts by neuron compute all gates of a token's experts (of those without gates, up), and the rest of the neurons that
fire. One token: these of all its experts are listed, as those of a layer are (`triton_neurons`). Several: rows of up
and columns of down that no token of an expert needs are masked. Steps of many tokens compute every neuron. With a
predictor the same programs multiply its rows first, and then read of gates, or up, those that some token selects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from powerinfer.kernels.gpu_types import INTEGERS, NOT_A_NUMBER
from powerinfer.kernels.triton_kernels import (
    IN_TURN,
    ONE,
    WIDE,
    Tile,
    add_bias,
    ask_for,
    asked_lines,
    coded,
    codes,
    dot,
    early,
    either,
    fitting,
    follow,
    for_rows,
    nibbles,
    of_integers,
    precision,
    processors,
    put,
    put_codes,
    row_dots,
    scales_of,
    settle,
    settle_together,
    small_signed,
    taken,
    taken_width,
)
from powerinfer.kernels.triton_launch import launched
from powerinfer.kernels.triton_neurons import activated, active, sum_firing

if TYPE_CHECKING:
    from torch import Tensor

    from powerinfer.config import RouterConfig
    from powerinfer.kernels.gpu_types import Elsewhere, Experts, Router, Weight

PAIRS = 64  # that a program orders
COMPARED = 256  # pairs at a time that they are compared with
MOST_COLUMNS = 64  # pairs of an expert in a tile
MOST_WARPS = 8  # of a program that has whole blocks of neurons: a multiprocessor holds two, with any type
COLUMNS = 256  # of d_model that a program adds up
# Neurons, and columns of down, of experts by neuron.
ACROSS = {**dict.fromkeys(("F16", "BF16", "Q8_0X32"), Tile(32, 128, 4)), "Q4_0X32": Tile(32, 64, 4)}

_LEAST = tl.constexpr(NOT_A_NUMBER)


@triton.jit
def _best(x, place):
    """The place of the largest, the first of equals."""
    top = tl.max(x, 0)
    return tl.min(tl.where(x == top, place, 1 << 30), 0)


@triton.jit
def _put_selected(chosen, i, shares, experts, weights, sent_experts, sent_weights, at, SENT: tl.constexpr):
    """Store the numbers i that are chosen, from place `at` on, and their shares; SENT: for the host, too."""
    at += tl.cumsum(chosen, 0) - 1
    tl.store(experts + at, i, mask=chosen != 0)
    tl.store(weights + at, shares, mask=chosen != 0)
    if SENT:
        tl.store(sent_experts + at, i, mask=chosen != 0, cache_modifier=".wt")
        tl.store(sent_weights + at, shares, mask=chosen != 0, cache_modifier=".wt")


@triton.jit
def _select_best(
    logits, correction, experts, weights, sent_experts, sent_weights, t, n, top_k, groups, top_groups, group_best,
    scale,
    SIGMOID: tl.constexpr, CORRECTION: tl.constexpr, NORMALISE: tl.constexpr, SENT: tl.constexpr, BLOCK: tl.constexpr,
    CACHE: tl.constexpr,
):  # fmt: skip
    """The experts of token t, not zero in what is returned. CACHE: how logits are loaded."""
    i = tl.arange(0, BLOCK)
    here = i < n
    x = tl.load(logits + t * n + i, mask=here, other=0, cache_modifier=CACHE)
    if SIGMOID:
        scores = 1 / (1 + tl.exp(-x))
    else:
        e = tl.where(here, tl.exp(x - tl.max(tl.where(here, x, -float("inf")), 0)), 0.0)
        scores = e / tl.sum(e, 0)
    wanted = scores
    if CORRECTION:
        wanted += tl.load(correction + i, mask=here, other=0)
    wanted = tl.where(wanted >= _LEAST, wanted, _LEAST)  # NaN, too
    wanted = tl.where(here, wanted, -float("inf"))
    each = n // groups
    if groups > 1:
        best = tl.full((BLOCK,), -float("inf"), tl.float32)  # of group i
        for g in range(groups):
            left = tl.where(here & (i // each == g), wanted, -float("inf"))
            total = 0.0
            for _ in range(group_best):
                place = _best(left, i)
                total += tl.max(left, 0)
                left = tl.where(i == place, -float("inf"), left)
            best = tl.where(i == g, total, best)
        kept = tl.zeros((BLOCK,), tl.int32)
        for _ in range(top_groups):
            g = _best(best, i)
            best = tl.where(i == g, -float("inf"), best)
            kept = tl.where(i // each == g, 1, kept)
        wanted = tl.where(kept != 0, wanted, -float("inf"))
    chosen = tl.zeros((BLOCK,), tl.int32)
    for _ in range(top_k):
        place = _best(wanted, i)
        chosen = tl.where(i == place, 1, chosen)
        wanted = tl.where(i == place, -float("inf"), wanted)
    if NORMALISE:
        scores *= scale / (tl.sum(tl.where(chosen != 0, scores, 0.0), 0) + 1e-20)
    else:
        scores *= scale
    _put_selected(chosen, i, scores, experts, weights, sent_experts, sent_weights, t * top_k, SENT)
    return chosen


@triton.jit
def _select_mixed(
    logits, experts, weights, sent_experts, sent_weights, t, n, top_k, near,
    SENT: tl.constexpr, BLOCK: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """The same by sparsemixer. near: what logits near each other differ by at most, in parts."""
    i = tl.arange(0, BLOCK)
    here = i < n
    x = tl.load(logits + t * n + i, mask=here, other=0, cache_modifier=CACHE)
    selectable = tl.where(here, tl.where(x >= _LEAST, x, _LEAST), -float("inf"))  # NaN, too
    chosen = tl.zeros((BLOCK,), tl.int32)
    shares = tl.zeros((BLOCK,), tl.float32)
    for _ in range(top_k):
        place = _best(selectable, i)
        most = tl.sum(tl.where(i == place, x, 0.0), 0)
        far = most - x > near * tl.maximum(tl.abs(x), most)
        share = 1 / tl.sum(tl.where(here & (chosen == 0) & (far == 0), tl.exp(x - most), 0.0), 0)
        shares = tl.where(i == place, share, shares)
        chosen = tl.where(i == place, 1, chosen)
        selectable = tl.where(i == place, -float("inf"), selectable)
    _put_selected(chosen, i, shares, experts, weights, sent_experts, sent_weights, t * top_k, SENT)
    return chosen


@triton.jit
def _elsewhere(chosen, table, BLOCK: tl.constexpr):
    """The number of the experts chosen that have no slot in the table."""
    slot = tl.load(table + tl.arange(0, BLOCK), mask=chosen != 0, other=0)
    return tl.sum((slot < 0).to(tl.int32), 0)


@launched
@triton.jit(
    do_not_specialize=["number"],
    do_not_specialize_on_alignment=["experts", "weights", "sent_experts", "sent_weights"],
)
def _route_kernel(
    logits, correction, experts, weights, sent_experts, sent_weights, table, counters, answered, number, n, top_k,
    groups, top_groups, group_best, scale,
    MIXES: tl.constexpr, SIGMOID: tl.constexpr, CORRECTION: tl.constexpr, NORMALISE: tl.constexpr, SENT: tl.constexpr,
    ANSWERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A token's experts; MIXES: by sparsemixer, whose `near` is in the place of scale. ANSWERS: `settle_together`."""
    follow()
    t = tl.program_id(0)
    if MIXES:
        chosen = _select_mixed(
            logits, experts, weights, sent_experts, sent_weights, t, n, top_k, scale, SENT, BLOCK, ""
        )
    else:
        chosen = _select_best(
            logits, correction, experts, weights, sent_experts, sent_weights, t, n, top_k, groups, top_groups,
            group_best, scale, SIGMOID, CORRECTION, NORMALISE, SENT, BLOCK, "",
        )  # fmt: skip
    if ANSWERS:
        settle_together(_elsewhere(chosen, table, BLOCK), counters, answered, number, tl.num_programs(0))


@launched
@triton.jit(
    do_not_specialize=["number"],
    do_not_specialize_on_alignment=["experts", "weights", "sent_experts", "sent_weights"],
)
def _router_kernel(
    x, data, scales, bias, logits, arrived, correction, experts, weights, sent_experts, sent_weights, table, counters,
    answered, number, n, k, top_k, groups, top_groups, group_best, scale,
    TYPE: tl.constexpr, BIAS: tl.constexpr, R: tl.constexpr, C: tl.constexpr, LINES: tl.constexpr,
    MIXES: tl.constexpr, SIGMOID: tl.constexpr, CORRECTION: tl.constexpr, NORMALISE: tl.constexpr, SENT: tl.constexpr,
    ANSWERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """R logits of one token; the program that finishes last, by the counter `arrived`, which is zero before and behind,
    selects the experts: from all logits, whichever it is. ANSWERS: `settle`."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    live = row < n
    ask_for(data, row, n, k, TYPE, LINES)
    follow()
    y = row_dots(x, data, scales, row.to(tl.int64), live, 1, k, TYPE, 0, R, C, "ieee")
    tl.store(logits + row, add_bias(y, bias, row, live, BIAS, 0), mask=live)
    tl.debug_barrier()  # all threads of the program have stored theirs
    if tl.atomic_add(arrived, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(arrived, 0)
        if MIXES:
            chosen = _select_mixed(
                logits, experts, weights, sent_experts, sent_weights, 0, n, top_k, scale, SENT, BLOCK, ".cg"
            )
        else:
            chosen = _select_best(
                logits, correction, experts, weights, sent_experts, sent_weights, 0, n, top_k, groups, top_groups,
                group_best, scale, SIGMOID, CORRECTION, NORMALISE, SENT, BLOCK, ".cg",
            )  # fmt: skip
        if ANSWERS:
            settle(_elsewhere(chosen, table, BLOCK), counters, answered, number)


def _routing(settings: RouterConfig, n: int) -> tuple[tuple[int, int, int, int, float], dict[str, Any]]:
    """Arguments of a kernel that selects, from top_k to scale, and what it is compiled for, but CORRECTION."""
    mixes = settings.scoring == "sparsemixer"
    scale = 2 * settings.nearness if mixes else settings.scale
    return (settings.top_k, settings.groups, settings.top_groups, settings.group_best, scale), {
        "MIXES": mixes,
        "SIGMOID": settings.scoring == "sigmoid",
        "NORMALISE": settings.normalise,
        "BLOCK": triton.next_power_of_2(n),
    }


def route(
    logits: Tensor, about: RouterConfig, correction: Tensor | None, experts: Tensor, weights: Tensor,
    sent: tuple[Tensor, Tensor] | None, elsewhere: Elsewhere | None,
) -> None:  # fmt: skip
    """`gpu_experts.route`."""
    tokens, n = logits.shape
    if tokens:
        numbers, flags = _routing(about, n)
        _route_kernel[(tokens,)](
            logits.contiguous(), either(correction, logits), experts, weights, *(sent or (experts, weights)),
            *_settled(elsewhere, experts), n, *numbers, **flags, CORRECTION=correction is not None,
            SENT=sent is not None, ANSWERS=elsewhere is not None, num_warps=4, launch_pdl=early(logits),
        )  # fmt: skip


def _settled(elsewhere: Elsewhere | None, other: Tensor) -> tuple[Any, ...]:
    """Arguments of a kernel that settles it."""
    return (other, other, other, 0) if elsewhere is None else (elsewhere.table, *elsewhere.answer)


def select(
    router: Router, x: Tensor, experts: Tensor, weights: Tensor, sent: tuple[Tensor, Tensor] | None,
    elsewhere: Elsewhere | None,
) -> None:  # fmt: skip
    """`gpu_experts.select` of one token."""
    w, correction = router.weight, router.correction
    tile, (numbers, flags) = fitting(w, 1, processors(x)), _routing(router.settings, w.rows)
    logits = torch.empty((1, w.rows), dtype=torch.float32, device=x.device)
    _router_kernel[(triton.cdiv(w.rows, tile.rows),)](
        taken(x, w.type), w.data, scales_of(w), either(router.bias, logits), logits, router.arrived,
        either(correction, logits), experts, weights, *(sent or (experts, weights)), *_settled(elsewhere, experts),
        w.rows, w.k, *numbers, TYPE=w.type, BIAS=router.bias is not None, R=tile.rows, C=tile.columns,
        LINES=asked_lines(w, tile.rows), CORRECTION=correction is not None, SENT=sent is not None,
        ANSWERS=elsewhere is not None, **flags, num_warps=tile.warps, launch_pdl=early(x),
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# One token


@triton.jit
def _slot(slots, table, j, TABLE: tl.constexpr):
    """Of the token's expert j; TABLE: slots are experts, whose slots the table has."""
    slot = tl.load(slots + j)
    return tl.load(table + slot) if TABLE else slot


@triton.jit
def weighted(a, u, weight, limit, ACTIVATION: tl.constexpr, GATED: tl.constexpr, SCALES: tl.constexpr):
    """h of products a and u, times a weight; SCALES: of the products times it."""
    if SCALES:
        a = activated(a * weight, u * weight, limit, ACTIVATION, GATED)
    else:
        a = activated(a, u, limit, ACTIVATION, GATED) * weight
    return a


@launched
@triton.jit
def _hidden_kernel(
    x, x_up, gate, gate_scales, gate_bias, up, up_scales, up_bias, slots, table, weights, h, h_codes, size, k, limit,
    GATED: tl.constexpr, SCALES: tl.constexpr, BIAS: tl.constexpr, TABLE: tl.constexpr, CODED: tl.constexpr,
    ACTIVATION: tl.constexpr, TYPE: tl.constexpr, UP_TYPE: tl.constexpr, TILES: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """h of TILES * R neurons of one of the token's experts, times its weight; SCALES: x is. x, x_up: x as gate and up
    take it. CODED: h_codes are `codes` of each expert's h; these neurons are whole blocks."""
    follow()
    j = tl.program_id(1)
    slot = _slot(slots, table, j, TABLE)
    for tile in range(TILES):
        neuron = (tl.program_id(0) * TILES + tile) * R + tl.arange(0, R)
        a = tl.zeros((R,), tl.float32)  # without a slot: down reads, and leaves out, what would be written by nobody
        if slot >= 0:
            live = neuron < size
            row = slot.to(tl.int64) * size + neuron
            u = row_dots(x_up, up, up_scales, row, live, 1, k, UP_TYPE, 0, R, C, "ieee")
            u = add_bias(u, up_bias, row, live, BIAS, 0)
            a = u
            if GATED:
                a = row_dots(x, gate, gate_scales, row, live, 1, k, TYPE, 0, R, C, "ieee")
                a = add_bias(a, gate_bias, row, live, BIAS, 0)
            a = weighted(a, u, tl.load(weights + j), limit, ACTIVATION, GATED, SCALES)
        tl.store(h + j * size + neuron, a, mask=neuron < size)
    if CODED:
        B: tl.constexpr = TILES * R // 32
        tl.debug_barrier()  # h of the program's other threads
        b = tl.program_id(0) * B + tl.arange(0, B)
        places = h + j * size + b[:, None] * 32 + tl.arange(0, 32)[None, :]
        real = b * 32 < size
        put_codes(h_codes, j.to(tl.int64), tl.load(places, mask=real[:, None], other=0), b, real, size, B)


@triton.jit
def _down_rows(
    h, down, scales, bias, slots, table, weights, element, live, j, rows, size, apart,
    TYPE: tl.constexpr, BIAS: tl.constexpr, TABLE: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """What the token's expert j adds to R elements; nothing where it has no slot, without a branch."""
    slot = _slot(slots, table, j, TABLE)
    here = live & (slot >= 0)
    row = tl.maximum(slot, 0).to(tl.int64) * rows + element
    y = row_dots(h + j * apart, down, scales, row, here, 1, size, TYPE, 0, R, C, "ieee")
    if BIAS:
        y += tl.load(weights + j) * tl.load(bias + row, mask=here, other=0)
    return tl.where(here, y, 0.0)


@launched
@triton.jit
def _down_kernel(
    h, down, scales, bias, slots, table, weights, out, rows, size, apart,
    TOP_K: tl.constexpr, TYPE: tl.constexpr, BIAS: tl.constexpr, TABLE: tl.constexpr, ADD: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """R elements of the sum over the token's experts; with ADD out grows by it. h: as down takes it, of each expert,
    `apart` elements apart."""
    follow()
    element = tl.program_id(0) * R + tl.arange(0, R)
    live = element < rows
    total = tl.zeros((R,), tl.float32)
    if of_integers(TYPE):  # few registers: what all experts' rows load is under way together
        for j in tl.static_range(TOP_K):
            total += _down_rows(
                h, down, scales, bias, slots, table, weights, element, live, j, rows, size, apart, TYPE, BIAS, TABLE,
                R, C,
            )  # fmt: skip
    else:
        for j in range(TOP_K):
            total += _down_rows(
                h, down, scales, bias, slots, table, weights, element, live, j, rows, size, apart, TYPE, BIAS, TABLE,
                R, C,
            )  # fmt: skip
    put(out + element, total, live, ADD)


def _of_one(
    experts: Experts, x: Tensor, slots: Tensor, weights: Tensor, table: Tensor | None, into: Tensor | None
) -> Tensor:
    k, top_k, size = x.shape[1], slots.shape[1], experts.size
    first = experts.up if experts.gate is None else experts.gate
    h = torch.empty((top_k, size), dtype=torch.float32, device=x.device)
    out = torch.empty((1, k), dtype=torch.float32, device=x.device) if into is None else into
    down, bias = experts.down, experts.up_bias is not None
    h_codes = coded(h, top_k, size, top_k) if down.type in INTEGERS else None
    tile, tiles = _tile(first, experts.up), 1
    if h_codes is not None:
        tile, tiles = whole_blocks(tile)
    _hidden_kernel[(triton.cdiv(size, tiles * tile.rows), top_k)](
        *_taken(x, first, experts.up), first.data, scales_of(first), either(experts.gate_bias, h),
        experts.up.data, scales_of(experts.up), either(experts.up_bias, h), slots,
        either(table, slots), weights, h, either(h_codes, h), size, k, experts.threshold,
        GATED=experts.gate is not None, SCALES=experts.scales_input, BIAS=bias, TABLE=table is not None,
        CODED=h_codes is not None, ACTIVATION=experts.activation, TYPE=first.type, UP_TYPE=experts.up.type,
        TILES=tiles, R=tile.rows, C=tile.columns, num_warps=tile.warps, enable_fp_fusion=h_codes is None,
        launch_pdl=early(x),
    )  # fmt: skip
    tile, operand = for_rows(ONE[down.type], down.type, size), either(h_codes, h)
    _down_kernel[(triton.cdiv(k, tile.rows),)](
        operand, down.data, scales_of(down), either(experts.down_bias, h), slots, either(table, slots),
        weights, out, k, size, operand.shape[1], TOP_K=top_k, TYPE=down.type, BIAS=bias, TABLE=table is not None,
        ADD=into is not None, R=tile.rows, C=tile.columns, num_warps=tile.warps, launch_pdl=early(x),
    )  # fmt: skip
    return out


def whole_blocks(tile: Tile) -> tuple[Tile, int]:
    """A tile with more rows, and warps, so that a thread has as much of them on its way as with few rows; and how many
    of it have whole blocks of neurons."""
    more = max(1, min(32 // tile.rows, MOST_WARPS // tile.warps))
    tile = tile._replace(rows=tile.rows * more, warps=tile.warps * more)
    return tile, max(1, 32 // tile.rows)


def _tile(gate: Weight, up: Weight) -> Tile:
    """Of one token, for both."""
    return min(for_rows(ONE[one.type], one.type, one.k) for one in (gate, up))


def _taken(x: Tensor, gate: Weight, up: Weight) -> tuple[Tensor, Tensor]:
    """x [1, k] as gate and as up take it."""
    own = taken(x, gate.type)
    return own, own if up.type == gate.type else taken(x, up.type)


@triton.jit
def _selected(
    hidden, outer, scales, row, chosen, live, tokens, rank, least,
    TYPE: tl.constexpr, T: tl.constexpr, R: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Neurons, rows [R], that a predictor selects of the `chosen`, [R] or, with T > 1, [R, T]; TYPE "": all."""
    if TYPE != "":
        z = row_dots(hidden, outer, scales, row, live, tokens, rank, TYPE, T, R, C, PRECISION)
        chosen &= (z >= least) | (z != z)
    return chosen


@launched
@triton.jit
def _firing_kernel(
    x, x_up, gate, gate_scales, up, up_scales, hidden, outer, outer_scales, slots, table, weights, h, rows, counts,
    size, k, rank, limit, least,
    GATED: tl.constexpr, TABLE: tl.constexpr, ACTIVATION: tl.constexpr, TYPE: tl.constexpr, UP_TYPE: tl.constexpr,
    PREDICTOR: tl.constexpr, R: tl.constexpr, C: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """h of R neurons of one of the token's experts, times its weight: rows of up are read where the gate fires, all of
    them without gates, when up is in their place. rows: of down, of each neuron; counts: of the R neurons, those that
    fire. PREDICTOR: the type of what selects before, "": nothing does."""
    follow()
    j = tl.program_id(1)
    slot = _slot(slots, table, j, TABLE)
    neuron = tl.program_id(0) * R + tl.arange(0, R)
    live = neuron < size
    row = slot.to(tl.int64) * size + neuron
    a = tl.zeros((R,), tl.float32)
    chosen = live & (slot >= 0)
    if slot >= 0:
        chosen = _selected(hidden, outer, outer_scales, row, chosen, live, 1, rank, least, PREDICTOR, 0, R, P, "ieee")
    if tl.max(chosen.to(tl.int32), 0) > 0:
        a = row_dots(x, gate, gate_scales, row, chosen, 1, k, TYPE, 0, R, C, "ieee")
        a = tl.where(chosen, active(a, limit, ACTIVATION), 0.0)
        fires = a != 0
        if not GATED:
            a *= tl.load(weights + j)
        elif tl.max(fires.to(tl.int32), 0) > 0:
            u = row_dots(x_up, up, up_scales, row, fires, 1, k, UP_TYPE, 0, R, C, "ieee")
            if ACTIVATION == "drelu":
                u = tl.where(u <= 0, 0.0, u)
            a = tl.where(fires, a * u * tl.load(weights + j), 0.0)
    tl.store(h + j * size + neuron, a, mask=live)
    tl.store(rows + j * size + neuron, row.to(tl.int32), mask=live)
    tl.store(counts + j * tl.num_programs(0) + tl.program_id(0), tl.sum((a != 0).to(tl.int32), 0))


class _Selecting(NamedTuple):
    """Arguments of kernels for a predictor inside experts: hidden, its second matrix and the least z; then the type of
    the matrix, "" without a predictor, and columns of a tile of its rows."""

    hidden: Tensor
    outer: Tensor
    scales: Tensor | tuple[Tensor, Tensor]
    rank: int
    least: float
    type: str
    columns: int


def _selecting(experts: Experts, hidden: Tensor | None, other: Tensor, turns: bool) -> _Selecting:
    """hidden: of each row that is multiplied, None: nothing selects; other: in the place of what is not read; turns:
    rows are multiplied one by one."""
    if hidden is None:
        return _Selecting(other, other, other, 0, 0.0, "", 0)
    assert experts.predictor is not None
    outer = experts.predictor.outer
    columns = min((ONE if turns else WIDE)[outer.type].columns, max(64, triton.next_power_of_2(outer.k)))
    operand = codes(hidden) if turns and outer.type in INTEGERS else hidden
    least = experts.predictor.threshold
    return _Selecting(operand, outer.data, scales_of(outer), outer.k, least, outer.type, columns)


def _firing_of_one(
    experts: Experts,
    x: Tensor,
    slots: Tensor,
    weights: Tensor,
    table: Tensor | None,
    into: Tensor | None,
    hidden: Tensor | None,
) -> Tensor:
    up, size, top_k = experts.up, experts.size, slots.shape[1]
    gate = up if experts.gate is None else experts.gate
    tile = _tile(gate, up)
    programs = triton.cdiv(size, tile.rows)
    h = torch.empty((1, top_k * size), dtype=torch.float32, device=x.device)
    rows, counts = (torch.empty(n, dtype=torch.int32, device=x.device) for n in (top_k * size, top_k * programs))
    by = _selecting(experts, hidden, h, True)
    _firing_kernel[(programs, top_k)](
        *_taken(x, gate, up), gate.data, scales_of(gate), up.data, scales_of(up), *by[:3],
        slots, either(table, slots), weights, h, rows, counts, size, x.shape[1], by.rank, experts.threshold, by.least,
        GATED=experts.gate is not None, TABLE=table is not None, ACTIVATION=experts.activation, TYPE=gate.type,
        UP_TYPE=up.type, PREDICTOR=by.type, R=tile.rows, C=tile.columns, P=by.columns, num_warps=tile.warps,
        launch_pdl=early(x),
    )  # fmt: skip
    return sum_firing(experts.down, experts.shared, experts.group, h, rows, counts, tile.rows, into)


# ---------------------------------------------------------------------------------------------------------------------
# Several tokens


@launched
@triton.jit(do_not_specialize=["pairs"], do_not_specialize_on_alignment=["weights"])
def _order_kernel(
    slots, weights, token_of, weight_of, row_of, begin, pairs, top_k, n, BLOCK: tl.constexpr, OTHER: tl.constexpr
):  # fmt: skip
    """row_of: the row of each pair, ordered by slot, and by token within a slot; token_of, weight_of: of each row;
    begin: [n + 1], the first row of each slot. Pairs without a slot come last."""
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # a pair, and a slot
    own = tl.load(slots + p, mask=p < pairs, other=-1)
    own = tl.where(own < 0, n, own)
    row = tl.zeros((BLOCK,), tl.int32)
    first = tl.zeros((BLOCK,), tl.int32)
    for q0 in range(0, pairs, OTHER):
        q = q0 + tl.arange(0, OTHER)
        other = tl.load(slots + q, mask=q < pairs, other=-1)
        other = tl.where(other < 0, n, other)
        real = (q < pairs)[None, :]
        before = (other[None, :] < own[:, None]) | ((other[None, :] == own[:, None]) & (q[None, :] < p[:, None]))
        row += tl.sum((before & real).to(tl.int32), 1)
        first += tl.sum(((other[None, :] < p[:, None]) & real).to(tl.int32), 1)
    tl.store(row_of + p, row, mask=p < pairs)
    tl.store(token_of + row, p // top_k, mask=p < pairs)
    tl.store(weight_of + row, tl.load(weights + p, mask=p < pairs, other=0), mask=p < pairs)
    tl.store(begin + p, first, mask=p <= n)


@launched
@triton.jit
def _gather_kernel(x, token_of, out, d, C: tl.constexpr):
    """C elements of a row: its token's."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * C + tl.arange(0, C)
    own = x + tl.load(token_of + row).to(tl.int64) * d + c
    tl.store(out + row * d + c, tl.load(own, mask=c < d, other=0), mask=c < d)


@launched
@triton.jit
def _grouped_hidden_kernel(
    x, gate, gate_scales, gate_bias, up, up_scales, up_bias, begin, weight_of, h, size, k, limit,
    GATED: tl.constexpr, SCALES: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, TYPE: tl.constexpr,
    UP_TYPE: tl.constexpr, T: tl.constexpr, R: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """h of R neurons of the expert in a slot for the slot's rows of x, times their weights; SCALES: x is."""
    slot = tl.program_id(1)
    neuron = tl.program_id(0) * R + tl.arange(0, R)
    live = neuron < size
    row = slot.to(tl.int64) * size + neuron
    last = tl.load(begin + slot + 1)
    for at in range(tl.load(begin + slot), last, T):
        here = last - at
        u = row_dots(_of(x, at, k, UP_TYPE, T), up, up_scales, row, live, here, k, UP_TYPE, T, R, C, PRECISION)
        u = add_bias(u, up_bias, row, live, BIAS, T)
        a = u
        if GATED:
            a = row_dots(_of(x, at, k, TYPE, T), gate, gate_scales, row, live, here, k, TYPE, T, R, C, PRECISION)
            a = add_bias(a, gate_bias, row, live, BIAS, T)
        a = weighted(a, u, weights_of(weight_of, at, here, T), limit, ACTIVATION, GATED, SCALES)
        put_rows(h, a, at, here, size, neuron, T)


@triton.jit
def _of(x, at, k, TYPE: tl.constexpr, T: tl.constexpr):
    """Row `at` of x [rows, k], with T = 1 as `taken` makes it."""
    return x + at * (k if T > 1 else taken_width(k, TYPE))


@triton.jit
def weights_of(weight_of, at, here, T: tl.constexpr):
    """Those of `here` rows from `at` on, at most T, [1, T]; with T = 1 of one."""
    if T > 1:
        t = tl.arange(0, T)
        weight = tl.load(weight_of + at + t, mask=t < here, other=0)[None, :]
    else:
        weight = tl.load(weight_of + at)
    return weight


@triton.jit
def put_rows(to, y, at, here, width, column, T: tl.constexpr):
    """Store y [R, T], with T = 1 [R], in columns [R] of rows from `at` on of `to` [rows, width]."""
    if T > 1:
        t = tl.arange(0, T)
        real = (column < width)[:, None] & (t < here)[None, :]
        tl.store(to + (at + t)[None, :] * width + column[:, None], y, mask=real)
    else:
        tl.store(to + at * width + column, y, mask=column < width)


@launched
@triton.jit
def _grouped_down_kernel(
    h, data, scales, bias, begin, weight_of, out, rows, k,
    TYPE: tl.constexpr, BIAS: tl.constexpr, T: tl.constexpr, R: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """R elements of what the expert in a slot gives for the slot's rows of h."""
    slot = tl.program_id(1)
    element = tl.program_id(0) * R + tl.arange(0, R)
    live = element < rows
    row = slot.to(tl.int64) * rows + element
    last = tl.load(begin + slot + 1)
    for at in range(tl.load(begin + slot), last, T):
        here = last - at
        y = row_dots(_of(h, at, k, TYPE, T), data, scales, row, live, here, k, TYPE, T, R, C, PRECISION)
        if BIAS:
            own = tl.load(bias + row, mask=live, other=0)
            y += weights_of(weight_of, at, here, T) * (own[:, None] if T > 1 else own)
        put_rows(out, y, at, here, rows, element, T)


@launched
@triton.jit
def _grouped_firing_kernel(
    x, gate, gate_scales, up, up_scales, hidden, outer, outer_scales, begin, weight_of, h, size, k, rank, limit, least,
    GATED: tl.constexpr, ACTIVATION: tl.constexpr, TYPE: tl.constexpr, UP_TYPE: tl.constexpr, PREDICTOR: tl.constexpr,
    T: tl.constexpr, R: tl.constexpr, C: tl.constexpr, P: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`_grouped_hidden_kernel` that reads a row of up where the gate fires for some of the rows of x, and a row of
    gates (without them, of up) where PREDICTOR, of a type as of `_firing_kernel`, selects it for some."""
    slot = tl.program_id(1)
    neuron = tl.program_id(0) * R + tl.arange(0, R)
    live = neuron < size
    row = slot.to(tl.int64) * size + neuron
    last = tl.load(begin + slot + 1)
    for at in range(tl.load(begin + slot), last, T):
        here = last - at
        chosen = live
        if T > 1:
            chosen = live[:, None] & (tl.arange(0, T) < here)[None, :]
        of_predictor = hidden
        if PREDICTOR != "":
            of_predictor = _of(hidden, at, rank, PREDICTOR, T)
        chosen = _selected(
            of_predictor, outer, outer_scales, row, chosen, live, here, rank, least, PREDICTOR, T, R, P, PRECISION
        )
        a = chosen.to(tl.float32)  # zeros, where none is
        needed = _any_token(chosen, T)
        if tl.max(needed, 0) > 0:
            a = row_dots(_of(x, at, k, TYPE, T), gate, gate_scales, row, needed > 0, here, k, TYPE, T, R, C, PRECISION)
            a = tl.where(chosen, active(a, limit, ACTIVATION), 0.0)
            fires = _any_token(a != 0, T)
            if not GATED:
                a *= weights_of(weight_of, at, here, T)
            elif tl.max(fires, 0) > 0:
                own = _of(x, at, k, UP_TYPE, T)
                u = row_dots(own, up, up_scales, row, fires > 0, here, k, UP_TYPE, T, R, C, PRECISION)
                if ACTIVATION == "drelu":
                    u = tl.where(u <= 0, 0.0, u)
                a = tl.where(a == 0, 0.0, a * u * weights_of(weight_of, at, here, T))
        put_rows(h, a, at, here, size, neuron, T)


@triton.jit
def _any_token(chosen, T: tl.constexpr):
    """Rows [R] that are chosen for some token: 1, else 0."""
    chosen = chosen.to(tl.int32)
    return tl.max(chosen, 1) if T > 1 else chosen


@triton.jit
def _needed(h, first, here, size, T: tl.constexpr, R: tl.constexpr):
    """h [T, R] of R neurons from `first` on for up to T tokens, and which of them are not zero for some token."""
    t, n = tl.arange(0, T)[:, None], first + tl.arange(0, R)
    by = tl.load(h + t * size + n[None, :], mask=(t < here) & (n < size)[None, :], other=0)
    return by, tl.max((by != 0).to(tl.int32), 0)


@triton.jit
def rows_of(begin, members, slot, MEMBERS: tl.constexpr):
    """Begin and end of the rows of a slot. MEMBERS: `begin` is of experts, and `members` has that of each slot; -1:
    none."""
    number = slot
    if MEMBERS:
        number = tl.load(members + slot)
    present = number >= 0
    return tl.load(begin + number, mask=present, other=0), tl.load(begin + number + 1, mask=present, other=0)


@launched
@triton.jit
def grouped_across_kernel(
    h, data, shared, group, begin, members, h_scales, out, d, size,
    TYPE: tl.constexpr, GROUPS: tl.constexpr, T: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr, MEMBERS: tl.constexpr = False, SCALED: tl.constexpr = False,
):  # fmt: skip
    """C columns (of Q4_0X32 bytes, of two columns each) of what the expert in a slot gives for the slot's rows of h,
    from the columns of down of its neurons; those that no row needs are not read. GROUPS: `group` has the row of shared
    of each neuron; MEMBERS: as of `rows_of`; SCALED: h is of a narrow type, h_scales are what its rows are multiplied
    by."""
    NARROW: tl.constexpr = h.dtype.element_ty
    slot = tl.program_id(1)
    t, r = tl.arange(0, T)[:, None], tl.arange(0, R)
    first_row, last = rows_of(begin, members, slot, MEMBERS)
    for at in range(first_row, last, T):
        here, own, to = last - at, h + at * size, out + at * d
        scale = tl.full((T, 1), 1.0, tl.float32)
        if SCALED:
            scale = tl.load(h_scales + at + t, mask=t < here, other=0)
        acc = tl.zeros((T, C), tl.float32)
        if TYPE == "Q4_0X32":
            B: tl.constexpr = C // 16
            blocks = d // 32
            b = tl.program_id(0) * B + tl.arange(0, B)
            j = tl.arange(0, 16)[None, :]
            first = b[:, None] * 32 + j
            valid = (b < blocks)[:, None]
            high_acc = tl.zeros((T, C), tl.float32)
            for n in range(0, size, R):  # R is 32: they share their scales
                by, needed = _needed(own, n, here, size, T, R)
                if tl.max(needed, 0) > 0:
                    row = slot.to(tl.int64) * size + n
                    codes_at = data + (row + r)[:, None, None] * (blocks * 16) + (b[:, None] * 16 + j)[None]
                    codes = tl.load(codes_at, mask=(needed > 0)[:, None, None] & valid[None], other=0)
                    low, high = nibbles(codes)
                    if GROUPS:
                        of = tl.load(group + row + r).to(tl.int64)
                        d_at = shared + of[:, None, None] * d + first[None]
                        loads = (needed > 0)[:, None, None] & valid[None]
                        low *= 0.0625 * tl.load(d_at, mask=loads, other=0).to(tl.float32)
                        high *= 0.0625 * tl.load(d_at + 16, mask=loads, other=0).to(tl.float32)
                    else:
                        d_at = shared + row // 32 * d + first
                        low *= 0.0625 * tl.load(d_at, mask=valid, other=0).to(tl.float32)[None]
                        high *= 0.0625 * tl.load(d_at + 16, mask=valid, other=0).to(tl.float32)[None]
                    low, high = tl.reshape(low, (R, C)).to(NARROW), tl.reshape(high, (R, C)).to(NARROW)
                    acc = tl.dot(by, low, acc, input_precision=PRECISION)
                    high_acc = tl.dot(by, high, high_acc, input_precision=PRECISION)
            i = tl.arange(0, C)
            c = tl.program_id(0) * (B * 32) + i // 16 * 32 + i % 16
            tl.store(to + t * d + (c + 16)[None, :], high_acc * scale, mask=(t < here) & (c < d)[None, :])
        else:
            c = tl.program_id(0) * C + tl.arange(0, C)
            for n in range(0, size, R):
                by, needed = _needed(own, n, here, size, T, R)
                if tl.max(needed, 0) > 0:
                    row = slot.to(tl.int64) * size + n + r
                    mask = (needed > 0)[:, None] & (c < d)[None, :]
                    w = tl.load(data + row[:, None] * d + c[None, :], mask=mask, other=0)
                    if TYPE == "Q8_0X32" and GROUPS:
                        of = tl.load(group + row).to(tl.int64)
                        scales = tl.load(shared + of[:, None] * d + c[None, :], mask=mask, other=0)
                        w = small_signed(w) * scales.to(tl.float32)
                    elif TYPE == "Q8_0X32":  # R is 32 here, too
                        scales_at = shared + (slot.to(tl.int64) * size + n) // 32 * d + c
                        own_scales = tl.load(scales_at, mask=c < d, other=0).to(tl.float32)
                        w = small_signed(w) * own_scales[None, :]
                    acc = dot(by, w.to(NARROW), acc, PRECISION)
        tl.store(to + t * d + c[None, :], acc * scale, mask=(t < here) & (c < d)[None, :])


@launched
@triton.jit
def merge_kernel(
    rows, row_of, slots, table, out, top_k, d, TABLE: tl.constexpr, ADD: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """C elements of a token's sum, its experts in their order; with ADD out grows by it, if there are any. TABLE: as of
    `_slot`."""
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * C + tl.arange(0, C)
    total, count = tl.zeros((C,), tl.float32), 0
    for j in range(top_k):
        if _slot(slots + t * top_k, table, j, TABLE) >= 0:
            row = tl.load(row_of + t * top_k + j).to(tl.int64)
            total += tl.load(rows + row * d + c, mask=c < d, other=0)
            count += 1
    put(out + t * d + c, total, (c < d) & (count > 0) if ADD else c < d, ADD)


def expert_sum(
    experts: Experts,
    x: Tensor,
    slots: Tensor,
    weights: Tensor,
    table: Tensor | None,
    into: Tensor | None,
    hidden: Tensor | None,
) -> Tensor:
    """`gpu_experts.expert_sum` of at most `FEW` tokens."""
    tokens, top_k = slots.shape
    if tokens == 1 and experts.by_neuron:
        return _firing_of_one(experts, x, slots, weights, table, into, hidden)
    if tokens == 1:
        return _of_one(experts, x, slots, weights, table, into)
    if table is not None:
        slots = table[slots.long()]
    d = x.shape[1]
    out = torch.empty((tokens, d), dtype=torch.float32, device=x.device) if into is None else into
    if not tokens:
        return out
    pairs = _ordered(experts, slots, weights)
    h = _grouped_hidden(experts, x, pairs, hidden)
    rows = _grouped_down(experts, h, pairs, d)
    grid, add = (tokens, triton.cdiv(d, COLUMNS)), into is not None
    merge_kernel[grid](rows, pairs.row_of, slots, slots, out, top_k, d, TABLE=False, ADD=add, C=COLUMNS, num_warps=4)
    return out


class _Pairs(NamedTuple):
    """Tokens and their experts, in the order of the experts' slots.

    token_of, weight_of: of each; row_of: where each pair of a token lies; begin: int32 [slots + 1], of each slot's;
    per_slot: pairs of a slot, on average; columns: of a tile for them.
    """

    token_of: Tensor
    weight_of: Tensor
    row_of: Tensor
    begin: Tensor
    per_slot: int
    columns: int


def _ordered(experts: Experts, slots: Tensor, weights: Tensor) -> _Pairs:
    per_slot = int(triton.cdiv(slots.numel(), experts.slots))  # or less: some have no slot
    return _Pairs(*order(slots, weights, experts.slots), per_slot, columns(per_slot, len(slots)))


def order(slots: Tensor, weights: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The token and the weight of each pair of a token and a slot, in the order of the slots, the row of each pair, and
    the first row of each of n slots and of what has none. slots: int32 [T, top_k], -1: none; weights: of each."""
    pairs, device = slots.numel(), slots.device
    token_of, row_of = (torch.empty(pairs, dtype=torch.int32, device=device) for _ in range(2))
    weight_of = torch.empty(pairs, dtype=torch.float32, device=device)
    begin = torch.empty(n + 1, dtype=torch.int32, device=device)
    _order_kernel[(triton.cdiv(max(pairs, n + 1), PAIRS),)](
        slots, weights, token_of, weight_of, row_of, begin, pairs, slots.shape[1], n, BLOCK=PAIRS, OTHER=COMPARED,
        num_warps=4,
    )  # fmt: skip
    return token_of, weight_of, row_of, begin


def columns(per_slot: int, tokens: int) -> int:
    """Columns of a tile for so many pairs of a slot, on average: a token has an expert once."""
    return min(MOST_COLUMNS, max(16, int(triton.next_power_of_2(min(per_slot, tokens)))))


def _gathered(x: Tensor, pairs: _Pairs) -> Tensor:
    """The row of x [T, d] of each pair's token."""
    n, d = len(pairs.token_of), x.shape[1]
    out = torch.empty((n, d), dtype=torch.float32, device=x.device)
    _gather_kernel[(n, triton.cdiv(d, COLUMNS))](x.contiguous(), pairs.token_of, out, d, C=COLUMNS, num_warps=4)
    return out


def _grouped_hidden(experts: Experts, x: Tensor, pairs: _Pairs, hidden: Tensor | None) -> Tensor:
    """h of each pair, float32 [pairs, size]."""
    n, d, size = len(pairs.token_of), x.shape[1], experts.size
    gathered = _gathered(x, pairs)
    h = torch.empty((n, size), dtype=torch.float32, device=x.device)
    up = experts.up
    first = up if experts.gate is None else experts.gate
    turns = pairs.per_slot <= IN_TURN and first.type in INTEGERS and up.type in INTEGERS
    tile = _tile(first, up) if turns else WIDE[up.type]
    kinds = {"ACTIVATION": experts.activation, "TYPE": first.type, "UP_TYPE": up.type}
    shape = {"T": 1 if turns else pairs.columns, "R": tile.rows, "C": tile.columns, "PRECISION": precision(x)}
    shape["num_warps"] = tile.warps
    gate_of, up_of = ((part.data, scales_of(part)) for part in (first, up))
    grid = triton.cdiv(size, tile.rows), experts.slots
    gathered = codes(gathered) if turns else gathered
    gated = experts.gate is not None
    if hidden is not None or (experts.by_neuron and gated):
        by = _selecting(experts, None if hidden is None else _gathered(hidden, pairs), h, turns)
        _grouped_firing_kernel[grid](
            gathered, *gate_of, *up_of, *by[:3], pairs.begin, pairs.weight_of, h, size, d, by.rank, experts.threshold,
            by.least, GATED=gated, PREDICTOR=by.type, P=by.columns, **kinds, **shape,
        )  # fmt: skip
    else:
        _grouped_hidden_kernel[grid](
            gathered, *gate_of, either(experts.gate_bias, h), *up_of, either(experts.up_bias, h), pairs.begin,
            pairs.weight_of, h, size, d, experts.threshold, GATED=gated, SCALES=experts.scales_input,
            BIAS=experts.up_bias is not None, **kinds, **shape,
        )  # fmt: skip
    return h


def _grouped_down(experts: Experts, h: Tensor, pairs: _Pairs, d: int) -> Tensor:
    """The addend of each pair to its token, float32 [pairs, d]."""
    down, size, exact = experts.down, experts.size, precision(h)
    rows = torch.empty((len(h), d), dtype=torch.float32, device=h.device)
    if experts.by_neuron:
        tile = ACROSS[down.type]
        wide_tile = tile.columns * (2 if down.type == "Q4_0X32" else 1)
        grouped_across_kernel[(triton.cdiv(d, wide_tile), experts.slots)](
            h, down.data, either(experts.shared, h), either(experts.group, h), pairs.begin, h, h, rows, d, size,
            TYPE=down.type, GROUPS=experts.group is not None, T=pairs.columns, R=tile.rows, C=tile.columns,
            PRECISION=exact, num_warps=tile.warps,
        )  # fmt: skip
        return rows
    turns = pairs.per_slot <= IN_TURN and down.type in INTEGERS
    tile = for_rows(ONE[down.type], down.type, size) if turns else WIDE[down.type]
    _grouped_down_kernel[(triton.cdiv(d, tile.rows), experts.slots)](
        codes(h) if turns else h, down.data, scales_of(down), either(experts.down_bias, h), pairs.begin,
        pairs.weight_of, rows, d, size, TYPE=down.type, BIAS=experts.up_bias is not None,
        T=1 if turns else pairs.columns, R=tile.rows, C=tile.columns, PRECISION=exact, num_warps=tile.warps,
    )  # fmt: skip
    return rows
