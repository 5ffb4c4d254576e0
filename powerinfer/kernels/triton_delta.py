"""Triton kernels of Gated DeltaNet; see `triton_kernels` for the rules.

The delta rule works on each column of a head's state by itself. A program has some columns of one head of one sequence:
it reads them once, keeps them in registers over all tokens of the step, and writes them once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from powerinfer.kernels.gpu_types import UNIT_EPS

if TYPE_CHECKING:
    from torch import Tensor

    from powerinfer.kernels.gpu_types import DeltaNet, DeltaStates

COLUMNS = 16  # of a head's state, in registers
CHANNELS = 256  # of the convolution, whose inputs a program keeps

_UNIT_EPS = tl.constexpr(UNIT_EPS)

# `runs` has for each sequence: first token, number of tokens, slot read (negative: none), slot written.


@triton.jit(do_not_specialize_on_alignment=["runs", "rows"])
def _mix_kernel(
    products, stride, taps, window, runs, rows, mixed, channels, key_heads, key_dim, value_dim, scale,
    TAPS: tl.constexpr, BLOCK: tl.constexpr,
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
    x = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(TAPS):
        back = t - (TAPS - 1) + j
        now = tl.load(products + back.to(tl.int64) * stride + at, mask=live & (back >= first), other=0)
        place = read.to(tl.int64) * (TAPS - 1) + back - first + TAPS - 1
        kept = tl.load(window + place * channels + at, mask=live & (back < first) & (read >= 0), other=0)
        x += tl.load(taps + j * channels + at, mask=live, other=0) * tl.where(back >= first, now, kept)
    x = x / (1 + tl.exp(-x))
    if of_keys:
        x *= tl.where(h < key_heads, scale, 1.0) / tl.sqrt_rn(tl.sum(x * x, 0) + _UNIT_EPS)
    tl.store(mixed + t.to(tl.int64) * channels + at, x, mask=live)


@triton.jit(do_not_specialize_on_alignment=["runs"])
def _keep_kernel(products, stride, window, runs, channels, TAPS: tl.constexpr, PAD: tl.constexpr, C: tl.constexpr):
    """The convolution's inputs for the last tokens of a sequence, some channels of them."""
    row, c, j = tl.program_id(0), tl.program_id(1) * C + tl.arange(0, C), tl.arange(0, PAD)
    first, count = tl.load(runs + row * 4), tl.load(runs + row * 4 + 1)
    read, write = tl.load(runs + row * 4 + 2).to(tl.int64), tl.load(runs + row * 4 + 3).to(tl.int64)
    there = (j < TAPS - 1)[:, None] & (c < channels)[None, :] & (count > 0)
    back = (count - (TAPS - 1) + j)[:, None]
    new = tl.load(products + (first + back).to(tl.int64) * stride + c[None, :], mask=there & (back >= 0), other=0)
    place = read * (TAPS - 1) + back + TAPS - 1
    old = tl.load(window + place * channels + c[None, :], mask=there & (back < 0) & (read >= 0), other=0)
    tl.debug_barrier()  # every thread has read what another one overwrites
    to = window + (write * (TAPS - 1) + j[:, None]) * channels + c[None, :]
    tl.store(to, tl.where(back >= 0, new, old), mask=there)


@triton.jit
def _softplus(x):
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1 + e
    # log(1 + e) without the error of the sum (W. Kahan)
    return tl.where(x > 20.0, x, tl.where(u == 1, e, tl.log(u) * (e / tl.where(u == 1, 1.0, u - 1))))


@triton.jit(do_not_specialize_on_alignment=["runs"])
def _rule_kernel(
    mixed, gates, stride, decays, biases, states, runs, out, channels, key_heads, heads, key_dim, value_dim,
    TILED: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The gated delta rule for C columns of a head of a sequence. gates: beta, then alpha, of the heads of a token."""
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
    of_decay, bias = tl.load(decays + h), tl.load(biases + h)
    begin = first.to(tl.int64)
    token, gate, to = mixed + begin * channels, gates + begin * stride + h, out + (begin * heads + h) * value_dim
    for _ in range(count):
        query = tl.load(token + key_head * key_dim + k, mask=of_key, other=0)
        key = tl.load(token + (key_heads + key_head) * key_dim + k, mask=of_key, other=0)
        value = tl.load(token + 2 * key_heads * key_dim + h * value_dim + c, mask=of_value, other=0)
        beta = 1 / (1 + tl.exp(-tl.load(gate)))
        state *= tl.exp(of_decay * _softplus(tl.load(gate + heads) + bias))
        delta = beta * (value - tl.sum(state * key[None, :], 1))
        state += delta[:, None] * key[None, :]
        tl.store(to + c, tl.sum(state * query[None, :], 1), mask=of_value)
        token += channels
        gate += stride
        to += heads * value_dim
    tl.store(states + (write * heads + h) * size + within, state, mask=there)


@triton.jit
def _gated_norm_kernel(out, gate, stride, weight, width, eps, BLOCK: tl.constexpr):
    """RMS norm of a token's head in place, times silu of its gate."""
    t, h, dim = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    here = dim < width
    at = out + (t * tl.num_programs(1) + h) * width + dim
    x = tl.load(at, mask=here, other=0)
    x *= 1 / tl.sqrt_rn(tl.sum(x * x, 0) / width + eps) * tl.load(weight + dim, mask=here, other=0)
    z = tl.load(gate + t * stride + h * width + dim, mask=here, other=0)
    tl.store(at, x * (z / (1 + tl.exp(-z))), mask=here)


def delta_net(net: DeltaNet, products: Tensor, states: DeltaStates, runs: Tensor, rows: Tensor) -> Tensor:
    """`gpu_delta.delta_net`."""
    about, tokens, sequences = net.about, len(products), len(runs)
    heads, keys, channels, stride = about.n_value_heads, about.n_key_heads, about.channels, products.shape[1]
    products = products.contiguous()
    mixed = torch.empty((tokens, channels), dtype=torch.float32, device=products.device)
    out = torch.empty((tokens, about.width), dtype=torch.float32, device=products.device)
    dims = about.key_dim, about.value_dim
    _mix_kernel[(tokens, 2 * keys + heads)](
        products, stride, net.taps, states.window, runs, rows, mixed, channels, keys, *dims, about.key_dim**-0.5,
        TAPS=about.taps, BLOCK=triton.next_power_of_2(max(dims)), num_warps=1,
    )  # fmt: skip
    _keep_kernel[(sequences, triton.cdiv(channels, CHANNELS))](
        products, stride, states.window, runs, channels, TAPS=about.taps,
        PAD=triton.next_power_of_2(about.taps - 1), C=CHANNELS, num_warps=4,
    )  # fmt: skip
    gates = products[:, channels + about.width :]
    _rule_kernel[(sequences, heads, triton.cdiv(about.value_dim, COLUMNS))](
        mixed, gates, stride, net.decay, net.dt_bias, states.heads, runs, out, channels, keys, heads, *dims,
        TILED=about.tiled, K=triton.next_power_of_2(about.key_dim), C=COLUMNS, num_warps=4,
    )  # fmt: skip
    _gated_norm_kernel[(tokens, heads)](
        out, products[:, channels:], stride, net.norm, about.value_dim, net.eps,
        BLOCK=triton.next_power_of_2(about.value_dim), num_warps=1,
    )  # fmt: skip
    return out
