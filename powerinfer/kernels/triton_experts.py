"""Triton kernels for experts; see `triton_kernels` for the rules and the letters.

One token: its experts' products of gate and up, then those of down, added up in the order of the experts. Several
tokens: pairs of a token and one of its experts are ordered by slot, so that an expert's weights are read once for all
of its tokens, and each token's rows are added up at the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from powerinfer.kernels.gpu_types import NOT_A_NUMBER, OAI_LIMIT, OAI_SCALE
from powerinfer.kernels.triton_kernels import ONE, SEVERAL, add_bias, either, precision, row_dots
from powerinfer.kernels.triton_neurons import active

if TYPE_CHECKING:
    from torch import Tensor

    from powerinfer.config import RouterConfig
    from powerinfer.kernels.gpu_types import Experts

PAIRS = 64  # that a program orders
COMPARED = 256  # pairs at a time that they are compared with
MOST_COLUMNS = 64  # pairs of an expert in a tile
TOKENS = 1024  # at a time: the rows of all pairs take memory, and are indexed with 32 bits
COLUMNS = 256  # of d_model that a program adds up

_LEAST = tl.constexpr(NOT_A_NUMBER)
_LIMIT, _SCALE = tl.constexpr(OAI_LIMIT), tl.constexpr(OAI_SCALE)


@triton.jit
def _best(x, place):
    """The place of the largest, the first of equals."""
    top = tl.max(x, 0)
    return tl.min(tl.where(x == top, place, 1 << 30), 0)


@triton.jit
def _route_kernel(
    logits, correction, experts, weights, n, top_k, groups, top_groups, group_best, scale,
    SIGMOID: tl.constexpr, CORRECTION: tl.constexpr, NORMALISE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A token's experts."""
    t = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    here = i < n
    x = tl.load(logits + t * n + i, mask=here, other=0)
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
    at = t * top_k + tl.cumsum(chosen, 0) - 1
    if NORMALISE:
        scores *= scale / (tl.sum(tl.where(chosen != 0, scores, 0.0), 0) + 1e-20)
    else:
        scores *= scale
    tl.store(experts + at, i, mask=chosen != 0)
    tl.store(weights + at, scores, mask=chosen != 0)


def route(logits: Tensor, about: RouterConfig, correction: Tensor | None, experts: Tensor, weights: Tensor) -> None:
    """`gpu_experts.route`."""
    tokens, n = logits.shape
    if tokens:
        _route_kernel[(tokens,)](
            logits.contiguous(), either(correction, logits), experts, weights, n, about.top_k, about.groups,
            about.top_groups, about.group_best, about.scale, SIGMOID=about.scoring == "sigmoid",
            CORRECTION=correction is not None, NORMALISE=about.normalise, BLOCK=triton.next_power_of_2(n), num_warps=4,
        )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# One token


@triton.jit
def _activated(a, u, limit, ACTIVATION: tl.constexpr, GATED: tl.constexpr):
    """h of gate (unless GATED: any) and up."""
    if ACTIVATION == "swiglu_oai":
        a = tl.where(a > _LIMIT, _LIMIT, a)  # NaN stays
        u = tl.where(u > _LIMIT, _LIMIT, tl.where(u < -_LIMIT, -_LIMIT, u))
        h = a / (1 + tl.exp(-_SCALE * a)) * (u + 1)
    elif GATED:
        if ACTIVATION == "drelu":
            u = tl.where(u <= 0, 0.0, u)
        h = active(a, limit, ACTIVATION) * u
    else:
        h = active(u, limit, ACTIVATION)
    return h


@triton.jit
def _hidden_kernel(
    x, gate, gate_scales, gate_bias, up, up_scales, up_bias, slots, weights, h, size, k, limit,
    GATED: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, TYPE: tl.constexpr, UP_TYPE: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """h of R neurons of one of the token's experts, times its weight."""
    j = tl.program_id(1)
    slot = tl.load(slots + j)
    if slot >= 0:
        neuron = tl.program_id(0) * R + tl.arange(0, R)
        live = neuron < size
        row = slot.to(tl.int64) * size + neuron
        u = row_dots(x, up, up_scales, row, live, 1, k, UP_TYPE, 0, R, C, "ieee")
        u = add_bias(u, up_bias, row, live, BIAS, 0)
        a = u
        if GATED:
            a = row_dots(x, gate, gate_scales, row, live, 1, k, TYPE, 0, R, C, "ieee")
            a = add_bias(a, gate_bias, row, live, BIAS, 0)
        a = _activated(a, u, limit, ACTIVATION, GATED)
        tl.store(h + j * size + neuron, a * tl.load(weights + j), mask=live)


@triton.jit
def _down_kernel(
    h, down, scales, bias, slots, weights, out, rows, size, top_k, TYPE: tl.constexpr, BIAS: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """R elements of the sum over the token's experts."""
    element = tl.program_id(0) * R + tl.arange(0, R)
    live = element < rows
    total = tl.zeros((R,), tl.float32)
    for j in range(top_k):
        slot = tl.load(slots + j)
        if slot >= 0:
            row = slot.to(tl.int64) * rows + element
            total += row_dots(h + j * size, down, scales, row, live, 1, size, TYPE, 0, R, C, "ieee")
            if BIAS:
                total += tl.load(weights + j) * tl.load(bias + row, mask=live, other=0)
    tl.store(out + element, total, mask=live)


def _of_one(experts: Experts, x: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
    k, top_k = x.shape[1], slots.shape[1]
    first = experts.up if experts.gate is None else experts.gate
    h = torch.empty((top_k, experts.size), dtype=torch.float32, device=x.device)
    out = torch.empty((1, k), dtype=torch.float32, device=x.device)
    tile, bias = ONE[experts.up.type], experts.up_bias is not None
    _hidden_kernel[(triton.cdiv(experts.size, tile.rows), top_k)](
        x.contiguous(), first.data, either(first.scales, first.data), either(experts.gate_bias, h), experts.up.data,
        either(experts.up.scales, experts.up.data), either(experts.up_bias, h), slots, weights, h, experts.size, k,
        experts.threshold, GATED=experts.gate is not None, BIAS=bias, ACTIVATION=experts.activation, TYPE=first.type,
        UP_TYPE=experts.up.type, R=tile.rows, C=tile.columns, num_warps=tile.warps,
    )  # fmt: skip
    down, tile = experts.down, ONE[experts.down.type]
    _down_kernel[(triton.cdiv(k, tile.rows),)](
        h, down.data, either(down.scales, down.data), either(experts.down_bias, h), slots, weights, out, k,
        experts.size, top_k, TYPE=down.type, BIAS=bias, R=tile.rows, C=tile.columns, num_warps=tile.warps,
    )  # fmt: skip
    return out


# ---------------------------------------------------------------------------------------------------------------------
# Several tokens


@triton.jit(do_not_specialize=["pairs"])
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


@triton.jit
def _gather_kernel(x, token_of, out, d, C: tl.constexpr):
    """C elements of a row: its token's."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * C + tl.arange(0, C)
    own = x + tl.load(token_of + row).to(tl.int64) * d + c
    tl.store(out + row * d + c, tl.load(own, mask=c < d, other=0), mask=c < d)


@triton.jit
def _grouped_hidden_kernel(
    x, gate, gate_scales, gate_bias, up, up_scales, up_bias, begin, weight_of, h, size, k, limit,
    GATED: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, TYPE: tl.constexpr, UP_TYPE: tl.constexpr,
    T: tl.constexpr, R: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """h of R neurons of the expert in a slot for the slot's rows of x, times their weights."""
    slot = tl.program_id(1)
    neuron = tl.program_id(0) * R + tl.arange(0, R)
    live = neuron < size
    t = tl.arange(0, T)
    row = slot.to(tl.int64) * size + neuron
    last = tl.load(begin + slot + 1)
    for at in range(tl.load(begin + slot), last, T):
        here = last - at
        own = x + at * k
        u = row_dots(own, up, up_scales, row, live, here, k, UP_TYPE, T, R, C, PRECISION)
        u = add_bias(u, up_bias, row, live, BIAS, T)
        a = u
        if GATED:
            a = row_dots(own, gate, gate_scales, row, live, here, k, TYPE, T, R, C, PRECISION)
            a = add_bias(a, gate_bias, row, live, BIAS, T)
        a = _activated(a, u, limit, ACTIVATION, GATED)
        a *= tl.load(weight_of + at + t, mask=t < here, other=0)[None, :]
        to = h + (at + t)[None, :] * size + neuron[:, None]
        tl.store(to, a, mask=live[:, None] & (t < here)[None, :])


@triton.jit
def _grouped_down_kernel(
    h, data, scales, bias, begin, weight_of, out, rows, k,
    TYPE: tl.constexpr, BIAS: tl.constexpr, T: tl.constexpr, R: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """R elements of what the expert in a slot gives for the slot's rows of h."""
    slot = tl.program_id(1)
    element = tl.program_id(0) * R + tl.arange(0, R)
    live = element < rows
    t = tl.arange(0, T)
    row = slot.to(tl.int64) * rows + element
    last = tl.load(begin + slot + 1)
    for at in range(tl.load(begin + slot), last, T):
        here = last - at
        y = row_dots(h + at * k, data, scales, row, live, here, k, TYPE, T, R, C, PRECISION)
        if BIAS:
            own = tl.load(weight_of + at + t, mask=t < here, other=0)
            y += own[None, :] * tl.load(bias + row, mask=live, other=0)[:, None]
        to = out + (at + t)[None, :] * rows + element[:, None]
        tl.store(to, y, mask=live[:, None] & (t < here)[None, :])


@triton.jit
def _merge_kernel(rows, row_of, slots, out, top_k, d, C: tl.constexpr):
    """C elements of a token's sum, its experts in their order."""
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * C + tl.arange(0, C)
    total = tl.zeros((C,), tl.float32)
    for j in range(top_k):
        if tl.load(slots + t * top_k + j) >= 0:
            row = tl.load(row_of + t * top_k + j).to(tl.int64)
            total += tl.load(rows + row * d + c, mask=c < d, other=0)
    tl.store(out + t * d + c, total, mask=c < d)


def expert_sum(experts: Experts, x: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
    """`gpu_experts.expert_sum`."""
    tokens, top_k = slots.shape
    if tokens == 1:
        return _of_one(experts, x, slots, weights)
    if tokens > TOKENS:
        pieces = ((part[first : first + TOKENS] for part in (x, slots, weights)) for first in range(0, tokens, TOKENS))
        return torch.cat([expert_sum(experts, *piece) for piece in pieces])
    pairs, d, device = tokens * top_k, x.shape[1], x.device
    out = torch.empty((tokens, d), dtype=torch.float32, device=device)
    if not tokens:
        return out
    token_of, row_of = (torch.empty(pairs, dtype=torch.int32, device=device) for _ in range(2))
    weight_of = torch.empty(pairs, dtype=torch.float32, device=device)
    begin = torch.empty(experts.slots + 1, dtype=torch.int32, device=device)
    _order_kernel[(triton.cdiv(max(pairs, experts.slots + 1), PAIRS),)](
        slots, weights, token_of, weight_of, row_of, begin, pairs, top_k, experts.slots, BLOCK=PAIRS, OTHER=COMPARED,
        num_warps=4,
    )  # fmt: skip
    gathered, rows = (torch.empty((pairs, d), dtype=torch.float32, device=device) for _ in range(2))
    wide = triton.cdiv(d, COLUMNS)
    _gather_kernel[(pairs, wide)](x.contiguous(), token_of, gathered, d, C=COLUMNS, num_warps=4)
    columns = min(MOST_COLUMNS, max(16, triton.next_power_of_2(triton.cdiv(pairs, experts.slots))))
    up, down, size, exact, bias = experts.up, experts.down, experts.size, precision(x), experts.up_bias is not None
    first = up if experts.gate is None else experts.gate
    h = torch.empty((pairs, size), dtype=torch.float32, device=device)
    tile = SEVERAL[up.type]
    _grouped_hidden_kernel[(triton.cdiv(size, tile.rows), experts.slots)](
        gathered, first.data, either(first.scales, first.data), either(experts.gate_bias, h), up.data,
        either(up.scales, up.data), either(experts.up_bias, h), begin, weight_of, h, size, d, experts.threshold,
        GATED=experts.gate is not None, BIAS=bias, ACTIVATION=experts.activation, TYPE=first.type,
        UP_TYPE=up.type, T=columns, R=tile.rows, C=tile.columns, PRECISION=exact, num_warps=tile.warps,
    )  # fmt: skip
    tile = SEVERAL[down.type]
    _grouped_down_kernel[(triton.cdiv(d, tile.rows), experts.slots)](
        h, down.data, either(down.scales, down.data), either(experts.down_bias, h), begin, weight_of, rows, d, size,
        TYPE=down.type, BIAS=bias, T=columns, R=tile.rows,
        C=tile.columns, PRECISION=exact, num_warps=tile.warps,
    )  # fmt: skip
    _merge_kernel[(tokens, wide)](rows, row_of, slots, out, top_k, d, C=COLUMNS, num_warps=4)
    return out
