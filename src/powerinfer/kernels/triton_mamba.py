"""Triton kernels of Mamba2; see `triton_kernels` for the rules.

The rows of a head's state do not depend on each other. A program has some rows of one head of one sequence: it reads
them once, keeps them in registers over all tokens of the step, and writes them once. In steps of many tokens it takes
some of them at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from powerinfer.kernels.gpu_types import FEW, SCAN_CHUNK
from powerinfer.kernels.triton_kernels import early, follow, precision
from powerinfer.kernels.triton_launch import launched
from powerinfer.kernels.triton_states import convolved, gate_and_norm, keep_inputs, keep_window, softplus

if TYPE_CHECKING:
    from torch import Tensor

    from powerinfer.config import Mamba2Config
    from powerinfer.kernels.gpu_types import Mamba, Replay, States

CHANNELS = 256  # of the convolution, of a token
ROWS = 16  # of a head's state, in registers
CHUNKED = FEW + 1  # tokens of a step from which on they are computed some at a time:
CHUNK = SCAN_CHUNK  # tokens,
CHUNKED_ROWS = 32  # rows of a head's state,
COLUMNS = 32  # and columns of them

# `runs` has for each sequence: first token, number of tokens, slot read (negative: none), slot written.


@launched
@triton.jit(do_not_specialize_on_alignment=["runs", "rows"])
def _convolve_kernel(
    inputs, stride, taps, bias, window, runs, rows, mixed, channels,
    TAPS: tl.constexpr, C: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    """Some channels of a token."""
    follow()
    t, c = tl.program_id(0), tl.program_id(1) * C + tl.arange(0, C)
    of_run = runs + tl.load(rows + t) * 4
    first, read = tl.load(of_run), tl.load(of_run + 2)
    x = convolved(inputs, stride, taps, bias, window, t, first, read, c, c < channels, channels, True, TAPS, ACT)
    tl.store(mixed + t.to(tl.int64) * channels + c, x, mask=c < channels)


@launched
@triton.jit(do_not_specialize_on_alignment=["runs"])
def _convolve_few_kernel(
    inputs, stride, taps, bias, window, runs, mixed, channels,
    TAPS: tl.constexpr, PAD: tl.constexpr, C: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    """Some channels of a sequence's few tokens, and the inputs that are kept for the next ones."""
    follow()
    of_run, c = runs + tl.program_id(0) * 4, tl.program_id(1) * C + tl.arange(0, C)
    first, count, read, write = tl.load(of_run), tl.load(of_run + 1), tl.load(of_run + 2), tl.load(of_run + 3)
    for i in range(count):
        t = first + i
        x = convolved(inputs, stride, taps, bias, window, t, first, read, c, c < channels, channels, True, TAPS, ACT)
        tl.store(mixed + t.to(tl.int64) * channels + c, x, mask=c < channels)
    keep_inputs(inputs, stride, window, first, count, read, write, c, channels, TAPS, PAD)


@triton.jit
def _time_step(x, scale, bias, least, most):
    step = softplus(scale * x + bias)
    step = tl.where(step < least, least, step)  # NaN stays
    return tl.where(step > most, most, step)


@launched
@triton.jit(do_not_specialize_on_alignment=["runs"])
def _scan_kernel(
    mixed, gates, stride, a, d, biases, states, runs, out, channels, groups, heads, dim, size, scale,
    least, most, R: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """R rows of the state of a head of a sequence, and what they give, token by token. gates: time steps of the heads
    of a token."""
    follow()
    row, h = tl.program_id(0), tl.program_id(1)
    r, n = tl.program_id(2) * R + tl.arange(0, R), tl.arange(0, N)
    first, count = tl.load(runs + row * 4), tl.load(runs + row * 4 + 1)
    read, write = tl.load(runs + row * 4 + 2).to(tl.int64), tl.load(runs + row * 4 + 3).to(tl.int64)
    inner, group = heads * dim, h // (heads // groups)
    of_row, of_state = r < dim, n < size
    there = of_row[:, None] & of_state[None, :] & (count > 0)
    within = r[:, None] * size + n[None, :]
    state = tl.load(states + (read * heads + h) * dim * size + within, mask=there & (read >= 0), other=0)
    own_a, own_d, bias = tl.load(a + h), tl.load(d + h), tl.load(biases + h)
    begin = first.to(tl.int64)
    token, gate, to = mixed + begin * channels, gates + begin * stride + h, out + begin * inner + h * dim
    for _ in range(count):
        value = tl.load(token + h * dim + r, mask=of_row, other=0)
        key = tl.load(token + inner + group * size + n, mask=of_state, other=0)
        query = tl.load(token + inner + (groups + group) * size + n, mask=of_state, other=0)
        step = _time_step(tl.load(gate), scale, bias, least, most)
        state = state * tl.exp(own_a * step) + (step * value)[:, None] * key[None, :]
        tl.store(to + r, tl.sum(state * query[None, :], 1) + own_d * value, mask=of_row)
        token += channels
        gate += stride
        to += inner
    tl.store(states + (write * heads + h) * dim * size + within, state, mask=there)


# ---------------------------------------------------------------------------------------------------------------------
# Prompts: the same for some tokens at a time (arXiv 2405.21060, section 6)
#
# With B, C, x and the step of a token, G the sum of a * step up to it, and S the state before the chunk,
#
#     out_t = exp(G_t) S C_t + sum over s <= t of exp(G_t - G_s) (B_s . C_t) step_s x_s  + d x_t,
#     S becomes exp(G of the last token) S + sum over s of exp(G of the last token - G_s) step_s x_s B_s^T
#
# B_s . C_t is the same for all heads of a group: it is made for all chunks at once.


@launched
@triton.jit(do_not_specialize_on_alignment=["runs"])
def _pairs_kernel(
    mixed, runs, pairs, channels, groups, inner, size,
    T: tl.constexpr, N: tl.constexpr, S: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """B_s . C_t of T tokens of a sequence and a group."""
    follow()
    row, group = tl.program_id(0), tl.program_id(2)
    first, count = tl.load(runs + row * 4), tl.load(runs + row * 4 + 1)
    begin = tl.program_id(1) * T
    if begin < count:
        i = tl.arange(0, T)
        live = begin + i < count
        t = (first + begin + i).to(tl.int64)
        token = mixed + t[:, None] * channels + inner
        of_pair = tl.zeros((T, T), tl.float32)
        for at in range(0, N, S):
            n = at + tl.arange(0, S)
            of_state = live[:, None] & (n < size)[None, :]
            key = tl.load(token + group * size + n[None, :], mask=of_state, other=0)
            query = tl.load(token + (groups + group) * size + n[None, :], mask=of_state, other=0)
            of_pair = tl.dot(query, tl.trans(key), of_pair, input_precision=PRECISION)
        tl.store(pairs + (t * groups + group)[:, None] * T + i[None, :], of_pair, mask=live[:, None])


@launched
@triton.jit(do_not_specialize_on_alignment=["runs"])
def _chunked_scan_kernel(
    mixed, gates, stride, a, d, biases, pairs, states, runs, out, channels, groups, heads, dim, size, scale,
    least, most, T: tl.constexpr, R: tl.constexpr, N: tl.constexpr, S: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`_scan_kernel`, T tokens at a time. The state is where it will be left, S of its columns in registers."""
    follow()
    row, h = tl.program_id(0), tl.program_id(1)
    i, r = tl.arange(0, T), tl.program_id(2) * R + tl.arange(0, R)
    first, count = tl.load(runs + row * 4), tl.load(runs + row * 4 + 1)
    read, write = tl.load(runs + row * 4 + 2).to(tl.int64), tl.load(runs + row * 4 + 3).to(tl.int64)
    inner, group = heads * dim, h // (heads // groups)
    own_a, own_d, bias = tl.load(a + h), tl.load(d + h), tl.load(biases + h)
    for begin in range(0, count, T):
        live = begin + i < count
        t = (first + begin + i).to(tl.int64)
        step = _time_step(tl.load(gates + t * stride + h, mask=live, other=0), scale, bias, least, most)
        step = tl.where(live, step, 0.0)
        total = tl.cumsum(own_a * step, 0)
        last = tl.sum(own_a * step, 0)
        of_row = live[:, None] & (r < dim)[None, :]
        token = mixed + t[:, None] * channels
        value = tl.load(token + h * dim + r[None, :], mask=of_row, other=0)
        left = tl.trans(value * (step * tl.exp(last - total))[:, None])
        before = tl.where(begin > 0, write, read)
        given = tl.zeros((T, R), tl.float32)
        for at in range(0, N, S):
            n = at + tl.arange(0, S)
            of_state = live[:, None] & (n < size)[None, :]
            there, within = (r < dim)[:, None] & (n < size)[None, :], h * dim * size + r[:, None] * size + n[None, :]
            own = states + before * heads * dim * size + within
            state = tl.load(own, mask=there & (before >= 0), other=0)
            query = tl.load(token + inner + (groups + group) * size + n[None, :], mask=of_state, other=0)
            given = tl.dot(query, tl.trans(state), given, input_precision=PRECISION)
            key = tl.load(token + inner + group * size + n[None, :], mask=of_state, other=0)
            state = tl.dot(left, key, state * tl.exp(last), input_precision=PRECISION)
            tl.store(states + write * heads * dim * size + within, state, mask=there)
        of_pair = tl.load(pairs + (t * groups + group)[:, None] * T + i[None, :], mask=live[:, None], other=0)
        until = i[:, None] >= i[None, :]
        of_pair *= tl.exp(tl.where(until, total[:, None] - total[None, :], 0.0))
        given *= tl.exp(total)[:, None]
        given = tl.dot(tl.where(until, of_pair, 0.0), value * step[:, None], given, input_precision=PRECISION)
        tl.store(out + t[:, None] * inner + h * dim + r[None, :], given + own_d * value, mask=of_row)
        tl.debug_barrier()  # what one thread has written another one may read


def mamba(net: Mamba, products: Tensor, states: States, runs: Tensor, rows: Tensor) -> Tensor:
    """`gpu_mamba.mamba`."""
    about, tokens, sequences = net.about, len(products), len(runs)
    products = products.contiguous()
    inputs = products[:, about.width :]
    out = torch.empty((tokens, about.width), dtype=torch.float32, device=products.device)
    mixed = _mix(net, inputs, states, runs, None if tokens < CHUNKED else rows)
    gates = inputs[:, about.channels :]
    scan = _chunked_scan if tokens >= max(CHUNKED, 2 * sequences) else _scan  # not where many decode
    scan(net, mixed, gates, states.heads, runs, out)
    first, scale = about.norm == "before", about.scales[0]
    gate_and_norm(out, products, net.norm, about.norm_groups, net.eps, first=first, scale=scale)
    return out


def replay(net: Mamba, inputs: Tensor, states: States, tokens: Replay) -> None:
    """`gpu_mamba.replay`; inputs: `replayed_inputs`."""
    out = torch.empty((len(inputs), net.about.width), dtype=torch.float32, device=inputs.device)
    mixed = _mix(net, inputs, states, tokens.runs, None)
    _scan(net, mixed, inputs[:, net.about.channels :], states.heads, tokens.runs, out)


def _mix(net: Mamba, inputs: Tensor, states: States, runs: Tensor, rows: Tensor | None) -> Tensor:
    """x, B and C of T tokens, float32 [T, channels]; the states' windows change. rows: None where sequences have few
    tokens."""
    kind, channels, stride = net.about, net.about.channels, inputs.stride(0)
    mixed = torch.empty((len(inputs), channels), dtype=torch.float32, device=inputs.device)
    blocks = triton.cdiv(channels, CHANNELS)
    given = inputs, stride, net.taps, net.conv_bias, states.window, runs
    kinds = {"TAPS": kind.taps, "C": CHANNELS, "ACT": kind.activation}
    kinds |= {"num_warps": 4, "launch_pdl": early(inputs)}
    if rows is None:
        pad = triton.next_power_of_2(kind.taps - 1)
        _convolve_few_kernel[(len(runs), blocks)](*given, mixed, channels, PAD=pad, **kinds)
    else:
        _convolve_kernel[(len(inputs), blocks)](*given, rows, mixed, channels, **kinds)
        keep_window(inputs, stride, states.window, runs, kind.taps)
    return mixed


def _scan(net: Mamba, mixed: Tensor, gates: Tensor, states: Tensor, runs: Tensor, out: Tensor) -> None:
    about = net.about
    _scan_kernel[(len(runs), about.n_heads, triton.cdiv(about.head_dim, ROWS))](
        mixed, gates, gates.stride(0), net.a, net.d, net.step_bias, states, runs, out, about.channels,
        *_numbers(about), R=ROWS, N=triton.next_power_of_2(about.state_dim), num_warps=4, launch_pdl=early(mixed),
    )  # fmt: skip


def _numbers(about: Mamba2Config) -> tuple[float, ...]:
    """Arguments of both kernels."""
    return about.n_groups, about.n_heads, about.head_dim, about.state_dim, about.scales[-1], *about.step_limits


def _chunked_scan(net: Mamba, mixed: Tensor, gates: Tensor, states: Tensor, runs: Tensor, out: Tensor) -> None:
    """`_scan` with products of matrices, within float32 rounding."""
    about, tokens, sequences = net.about, len(mixed), len(runs)
    pairs = torch.empty((tokens, about.n_groups, CHUNK), dtype=torch.float32, device=out.device)
    columns = COLUMNS * triton.cdiv(about.state_dim, COLUMNS)
    common = {"T": CHUNK, "N": columns, "S": COLUMNS, "PRECISION": precision(mixed)}
    common |= {"num_warps": 4, "num_stages": 1, "launch_pdl": early(mixed)}
    _pairs_kernel[(sequences, triton.cdiv(tokens, CHUNK), about.n_groups)](
        mixed, runs, pairs, about.channels, about.n_groups, about.width, about.state_dim, **common
    )
    _chunked_scan_kernel[(sequences, about.n_heads, triton.cdiv(about.head_dim, CHUNKED_ROWS))](
        mixed, gates, gates.stride(0), net.a, net.d, net.step_bias, pairs, states, runs, out, about.channels,
        *_numbers(about), R=CHUNKED_ROWS, **common,
    )  # fmt: skip
