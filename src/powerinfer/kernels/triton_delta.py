"""Triton kernels of Gated DeltaNet; see `triton_kernels` for the rules.

The delta rule works on each column of a head's state by itself. A program has some columns of one head of one sequence:
it reads them once, keeps them in registers over all tokens of the step, and writes them once. In steps of many tokens
it takes some of them at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from powerinfer.kernels.gpu_types import DELTA_CHUNK, FEW, UNIT_EPS
from powerinfer.kernels.triton_kernels import precision
from powerinfer.kernels.triton_launch import launched
from powerinfer.kernels.triton_states import convolved, gate_and_norm, keep_window, softplus

if TYPE_CHECKING:
    from torch import Tensor

    from powerinfer.kernels.gpu_types import DeltaNet, Replay, States

COLUMNS = 16  # of a head's state, in registers
CHUNKED = FEW + 1  # tokens of a step from which on they are computed some at a time:
CHUNK = DELTA_CHUNK  # tokens,
CHUNKED_COLUMNS = 32  # columns of a head's state

_UNIT_EPS = tl.constexpr(UNIT_EPS)

# `runs` has for each sequence: first token, number of tokens, slot read (negative: none), slot written.


@launched
@triton.jit(do_not_specialize_on_alignment=["runs", "rows"])
def _mix_kernel(
    products, stride, taps, window, runs, rows, mixed, channels, key_heads, key_dim, value_dim, scale,
    TAPS: tl.constexpr, BLOCK: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    """Convolution and activation of a token's head, and the L2 norm of a query or key: first all queries, then all
    keys, then all values."""
    t, h, dim = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    row = tl.load(rows + t)
    first, read = tl.load(runs + row * 4), tl.load(runs + row * 4 + 2)
    of_keys = h < 2 * key_heads
    dims = tl.where(of_keys, key_dim, value_dim)
    at = tl.where(of_keys, h * key_dim, 2 * key_heads * (key_dim - value_dim) + h * value_dim) + dim
    live = dim < dims
    x = convolved(products, stride, taps, taps, window, t, first, read, at, live, channels, False, TAPS, ACT)
    if of_keys:
        x *= tl.where(h < key_heads, scale, 1.0) / tl.sqrt_rn(tl.sum(x * x, 0) + _UNIT_EPS)
    tl.store(mixed + t.to(tl.int64) * channels + at, x, mask=live)


@launched
@triton.jit(do_not_specialize_on_alignment=["runs"])
def _rule_kernel(
    mixed, gates, stride, decays, biases, states, runs, out, channels, key_heads, heads, key_dim, value_dim,
    TILED: tl.constexpr, K: tl.constexpr, C: tl.constexpr, CHANNELS: tl.constexpr = False,
):  # fmt: skip
    """The gated delta rule for C columns of a head of a sequence. gates: beta, then alpha, of the heads of a token, or,
    CHANNELS, alpha of each channel of a key."""
    row, h = tl.program_id(0), tl.program_id(1)
    c, k = tl.program_id(2) * C + tl.arange(0, C), tl.arange(0, K)
    first, count = tl.load(runs + row * 4), tl.load(runs + row * 4 + 1)
    read, write = tl.load(runs + row * 4 + 2).to(tl.int64), tl.load(runs + row * 4 + 3).to(tl.int64)
    key_head = h % key_heads if TILED else h // (heads // key_heads)
    of_key, of_value = k < key_dim, c < value_dim
    there = of_value[:, None] & of_key[None, :] & (count > 0)
    within = c[:, None] * key_dim + k[None, :]
    size = value_dim * key_dim
    state = tl.load(states + (read * heads + h) * size + within, mask=there & (read >= 0), other=0)
    of_decay = tl.load(decays + h)
    at_alpha = h * key_dim + k if CHANNELS else h
    bias = tl.load(biases + at_alpha, mask=of_key, other=0) if CHANNELS else tl.load(biases + at_alpha)
    begin = first.to(tl.int64)
    token, gate, to = mixed + begin * channels, gates + begin * stride + h, out + (begin * heads + h) * value_dim
    for _ in range(count):
        query = tl.load(token + key_head * key_dim + k, mask=of_key, other=0)
        key = tl.load(token + (key_heads + key_head) * key_dim + k, mask=of_key, other=0)
        value = tl.load(token + 2 * key_heads * key_dim + h * value_dim + c, mask=of_value, other=0)
        beta = 1 / (1 + tl.exp(-tl.load(gate)))
        if CHANNELS:
            alpha = tl.load(gate - h + heads + at_alpha, mask=of_key, other=0)
            state *= tl.exp(of_decay * softplus(alpha + bias))[None, :]
        else:
            state *= tl.exp(of_decay * softplus(tl.load(gate + heads) + bias))
        delta = beta * (value - tl.sum(state * key[None, :], 1))
        state += delta[:, None] * key[None, :]
        tl.store(to + c, tl.sum(state * query[None, :], 1), mask=of_value)
        token += channels
        gate += stride
        to += heads * value_dim
    tl.store(states + (write * heads + h) * size + within, state, mask=there)


# ---------------------------------------------------------------------------------------------------------------------
# Prompts: the same rule for some tokens at a time (arXiv 2412.06464, section 3.3)
#
# Let G be the sum of the logarithms of a chunk's decays up to a token, S the state before the chunk. What the tokens
# add to the state, d k^T each, follows from one triangular system,
#
#     d_t + sum over s < t of b_t exp(G_t - G_s) (k_s . k_t) d_s  =  b_t (v_t - exp(G_t) S k_t)
#
# whose inverse does not depend on S: it is made for all chunks at once. Then chunk after chunk
#
#     d = u - w S^T,   out_t = exp(G_t) S q_t + sum over s <= t of exp(G_t - G_s) (k_s . q_t) d_s,
#     S becomes exp(G of the last token) S + sum over s of exp(G of the last token - G_s) d_s k_s^T


@launched
@triton.jit(do_not_specialize_on_alignment=["runs"])
def _chunk_kernel(
    mixed, gates, stride, decays, biases, runs, w, u, pairs, sums, channels, key_heads, heads, key_dim, value_dim,
    TILED: tl.constexpr, T: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of T tokens of a sequence and a head: G (sums), exp(G_t - G_s) (k_s . q_t) (pairs), w and u."""
    row, h = tl.program_id(0), tl.program_id(2)
    first, count = tl.load(runs + row * 4), tl.load(runs + row * 4 + 1)
    begin = tl.program_id(1) * T
    if begin < count:
        i, k, c = tl.arange(0, T), tl.arange(0, K), tl.arange(0, V)
        live = begin + i < count
        t = (first + begin + i).to(tl.int64)
        key_head = h % key_heads if TILED else h // (heads // key_heads)
        alpha = tl.load(gates + t * stride + heads + h, mask=live, other=0)
        step = tl.load(decays + h) * softplus(alpha + tl.load(biases + h))
        total = tl.cumsum(tl.where(live, step, 0.0), 0)
        beta = 1 / (1 + tl.exp(-tl.load(gates + t * stride + h, mask=live, other=0)))
        beta = tl.where(live, beta, 0.0)
        of_key, of_value = live[:, None] & (k < key_dim)[None, :], live[:, None] & (c < value_dim)[None, :]
        token = mixed + t[:, None] * channels
        query = tl.load(token + key_head * key_dim + k[None, :], mask=of_key, other=0)
        key = tl.load(token + (key_heads + key_head) * key_dim + k[None, :], mask=of_key, other=0)
        value = tl.load(token + 2 * key_heads * key_dim + h * value_dim + c[None, :], mask=of_value, other=0)
        before, same = i[:, None] > i[None, :], i[:, None] == i[None, :]
        fade = tl.exp(tl.where(before, total[:, None] - total[None, :], 0.0))
        turned = tl.trans(key)
        of_pair = tl.dot(query, turned, input_precision=PRECISION) * fade
        of_pair = tl.where(before | same, of_pair, 0.0)
        system = tl.where(before, tl.dot(key, turned, input_precision=PRECISION) * fade * beta[:, None], 0.0)
        inverse = tl.where(same, 1.0, 0.0)
        for at in range(1, T):  # a row at a time, from those above it
            own = tl.sum(tl.where((i == at)[:, None], system, 0.0), 0)
            inverse -= tl.where((i == at)[:, None], tl.sum(own[:, None] * inverse, 0)[None, :], 0.0)
        of_state = tl.dot(inverse, key * (beta * tl.exp(total))[:, None], input_precision=PRECISION)
        of_values = tl.dot(inverse, value * beta[:, None], input_precision=PRECISION)
        at_head = t * heads + h
        tl.store(w + at_head[:, None] * key_dim + k[None, :], of_state, mask=of_key)
        tl.store(u + at_head[:, None] * value_dim + c[None, :], of_values, mask=of_value)
        tl.store(pairs + at_head[:, None] * T + i[None, :], of_pair, mask=live[:, None])
        tl.store(sums + at_head, total, mask=live)


@launched
@triton.jit(do_not_specialize_on_alignment=["runs"])
def _chunked_rule_kernel(
    mixed, w, u, pairs, sums, states, runs, out, channels, key_heads, heads, key_dim, value_dim,
    TILED: tl.constexpr, T: tl.constexpr, K: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`_rule_kernel`, T tokens at a time."""
    row, h = tl.program_id(0), tl.program_id(1)
    i, c, k = tl.arange(0, T), tl.program_id(2) * C + tl.arange(0, C), tl.arange(0, K)
    first, count = tl.load(runs + row * 4), tl.load(runs + row * 4 + 1)
    read, write = tl.load(runs + row * 4 + 2).to(tl.int64), tl.load(runs + row * 4 + 3).to(tl.int64)
    key_head = h % key_heads if TILED else h // (heads // key_heads)
    there = (c < value_dim)[:, None] & (k < key_dim)[None, :] & (count > 0)
    within = c[:, None] * key_dim + k[None, :]
    size = value_dim * key_dim
    state = tl.load(states + (read * heads + h) * size + within, mask=there & (read >= 0), other=0)
    for begin in range(0, count, T):
        live = begin + i < count
        t = (first + begin + i).to(tl.int64)
        at_head = t * heads + h
        of_key, of_value = live[:, None] & (k < key_dim)[None, :], live[:, None] & (c < value_dim)[None, :]
        token = mixed + t[:, None] * channels
        query = tl.load(token + key_head * key_dim + k[None, :], mask=of_key, other=0)
        key = tl.load(token + (key_heads + key_head) * key_dim + k[None, :], mask=of_key, other=0)
        total = tl.load(sums + at_head, mask=live, other=0)
        last = tl.load(sums + (first + tl.minimum(begin + T, count) - 1).to(tl.int64) * heads + h)
        of_state = tl.load(w + at_head[:, None] * key_dim + k[None, :], mask=of_key, other=0)
        delta = tl.load(u + at_head[:, None] * value_dim + c[None, :], mask=of_value, other=0)
        of_pair = tl.load(pairs + at_head[:, None] * T + i[None, :], mask=live[:, None], other=0)
        turned = tl.trans(state)
        delta -= tl.dot(of_state, turned, input_precision=PRECISION)
        given = tl.dot(query, turned, input_precision=PRECISION) * tl.exp(total)[:, None]
        given = tl.dot(of_pair, delta, given, input_precision=PRECISION)
        tl.store(out + at_head[:, None] * value_dim + c[None, :], given, mask=of_value)
        left = tl.where(live, tl.exp(last - total), 0.0)
        state *= tl.exp(last)
        state = tl.dot(tl.trans(delta), key * left[:, None], state, input_precision=PRECISION)
    tl.store(states + (write * heads + h) * size + within, state, mask=there)


def delta_net(net: DeltaNet, products: Tensor, states: States, runs: Tensor, rows: Tensor) -> Tensor:
    """`gpu_delta.delta_net`."""
    about, tokens, sequences = net.about, len(products), len(runs)
    products = products.contiguous()
    out = torch.empty((tokens, about.width), dtype=torch.float32, device=products.device)
    mixed = _mix(net, products, states, runs, rows)
    gates = products[:, about.channels + about.width :]
    chunked = tokens >= max(CHUNKED, 2 * sequences) and not about.channel_decays  # not where many decode
    rule = _chunked_rule if chunked else _rule
    rule(net, mixed, gates, states.heads, runs, out)
    heads, sigmoid = about.n_value_heads, about.channel_decays
    gate_and_norm(out, products[:, about.channels :], net.norm, heads, net.eps, first=True, sigmoid=sigmoid)
    return out


def replay(net: DeltaNet, inputs: Tensor, states: States, tokens: Replay) -> None:
    """`gpu_delta.replay`; inputs: `replayed_inputs`."""
    out = torch.empty((len(inputs), net.about.width), dtype=torch.float32, device=inputs.device)
    mixed = _mix(net, inputs, states, tokens.runs, tokens.rows)
    _rule(net, mixed, inputs[:, net.about.channels :], states.heads, tokens.runs, out)


def _mix(net: DeltaNet, inputs: Tensor, states: States, runs: Tensor, rows: Tensor) -> Tensor:
    """Queries, keys and values of T tokens, float32 [T, channels]; the states' windows change."""
    kind, (tokens, stride) = net.about, inputs.shape
    keys, dims = kind.n_key_heads, (kind.key_dim, kind.value_dim)
    mixed = torch.empty((tokens, kind.channels), dtype=torch.float32, device=inputs.device)
    _mix_kernel[(tokens, 2 * keys + kind.n_value_heads)](
        inputs, stride, net.taps, states.window, runs, rows, mixed, kind.channels, keys, *dims, kind.key_dim**-0.5,
        TAPS=kind.taps, BLOCK=triton.next_power_of_2(max(dims)), ACT=kind.activation, num_warps=1,
    )  # fmt: skip
    keep_window(inputs, stride, states.window, runs, kind.taps)
    return mixed


def _rule(net: DeltaNet, mixed: Tensor, gates: Tensor, states: Tensor, runs: Tensor, out: Tensor) -> None:
    about = net.about
    heads, dims = about.n_value_heads, (about.key_dim, about.value_dim)
    _rule_kernel[(len(runs), heads, triton.cdiv(about.value_dim, COLUMNS))](
        mixed, gates, gates.stride(0), net.decay, net.dt_bias, states, runs, out, about.channels, about.n_key_heads,
        heads, *dims, TILED=about.tiled, K=triton.next_power_of_2(about.key_dim), C=COLUMNS,
        CHANNELS=about.channel_decays, num_warps=4,
    )  # fmt: skip


def _chunked_rule(net: DeltaNet, mixed: Tensor, gates: Tensor, states: Tensor, runs: Tensor, out: Tensor) -> None:
    """`_rule` with products of matrices, within float32 rounding."""
    about, tokens, sequences = net.about, len(mixed), len(runs)
    heads, dims = about.n_value_heads, (about.key_dim, about.value_dim)
    sizes = [heads * size for size in (*dims, CHUNK, 1)]
    w, u, pairs, sums = torch.empty(tokens * sum(sizes), dtype=torch.float32, device=out.device).split(
        [tokens * size for size in sizes]
    )
    padded = [triton.next_power_of_2(size) for size in dims]
    common = {"TILED": about.tiled, "T": CHUNK, "K": padded[0], "PRECISION": precision(mixed), "num_warps": 4}
    _chunk_kernel[(sequences, triton.cdiv(tokens, CHUNK), heads)](
        mixed, gates, gates.stride(0), net.decay, net.dt_bias, runs, w, u, pairs, sums, about.channels,
        about.n_key_heads, heads, *dims, V=padded[1], **common,
    )  # fmt: skip
    _chunked_rule_kernel[(sequences, heads, triton.cdiv(about.value_dim, CHUNKED_COLUMNS))](
        mixed, w, u, pairs, sums, states, runs, out, about.channels, about.n_key_heads, heads, *dims,
        C=CHUNKED_COLUMNS, **common, num_stages=1,  # several do not fit into shared memory
    )  # fmt: skip
