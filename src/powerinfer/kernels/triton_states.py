"""Triton kernels that layers with states share (`triton_delta`, `triton_mamba`, `triton_short_conv`); see
`triton_kernels` for the rules.

`runs` has for each sequence: first token, number of tokens, slot read (negative: none), slot written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from powerinfer.kernels.triton_kernels import early, follow
from powerinfer.kernels.triton_launch import launched

if TYPE_CHECKING:
    from torch import Tensor

CHANNELS = 256  # of the convolution, whose inputs a program keeps


@triton.jit
def _inputs_at(at, there, channels, PAIRED: tl.constexpr):
    """Inputs of a convolution: numbers, PAIRED: each times the one that lies `channels` behind it."""
    x = tl.load(at, mask=there, other=0)
    if PAIRED:
        x *= tl.load(at + channels, mask=there, other=0)
    return x


@triton.jit
def keep_inputs(
    inputs, stride, window, first, count, read, write, c, channels, TAPS: tl.constexpr, PAD: tl.constexpr,
    PAIRED: tl.constexpr = False,
):  # fmt: skip
    """The slot that a sequence writes gets the convolution's inputs for its last tokens, of channels c."""
    j = tl.arange(0, PAD)
    there = (j < TAPS - 1)[:, None] & (c < channels)[None, :] & (count > 0)
    back = (count - (TAPS - 1) + j)[:, None]
    at = inputs + (first + back).to(tl.int64) * stride + c[None, :]
    new = _inputs_at(at, there & (back >= 0), channels, PAIRED)
    place = read.to(tl.int64) * (TAPS - 1) + back + TAPS - 1
    old = tl.load(window + place * channels + c[None, :], mask=there & (back < 0) & (read >= 0), other=0)
    tl.debug_barrier()  # every thread has read what another one overwrites
    to = window + (write.to(tl.int64) * (TAPS - 1) + j[:, None]) * channels + c[None, :]
    tl.store(to, tl.where(back >= 0, new, old), mask=there)


@launched
@triton.jit(do_not_specialize_on_alignment=["runs"])
def _keep_kernel(
    inputs, stride, window, runs, channels,
    TAPS: tl.constexpr, PAD: tl.constexpr, C: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """`keep_inputs` of some channels of a sequence."""
    follow()
    of_run, c = runs + tl.program_id(0) * 4, tl.program_id(1) * C + tl.arange(0, C)
    first, count, read, write = tl.load(of_run), tl.load(of_run + 1), tl.load(of_run + 2), tl.load(of_run + 3)
    keep_inputs(inputs, stride, window, first, count, read, write, c, channels, TAPS, PAD, PAIRED)


@triton.jit
def activated(x, ACT: tl.constexpr):
    """The activation behind a convolution."""
    if ACT == "":
        return x
    if ACT == "silu":
        return x / (1 + tl.exp(-x))
    x = tl.where(x < 0, 0.0, x)  # NaN stays
    if ACT == "relu2":
        x *= x
    return x


@triton.jit
def convolved(
    inputs, stride, taps, bias, window, t, first, read, c, live, channels,
    BIASED: tl.constexpr, TAPS: tl.constexpr, ACT: tl.constexpr, PAIRED: tl.constexpr = False,
):  # fmt: skip
    """Convolution, bias and activation for channels c of token t, where `live`."""
    x = tl.load(bias + c, mask=live, other=0) if BIASED else tl.zeros(c.shape, tl.float32)
    for j in tl.static_range(TAPS):
        back = t - (TAPS - 1) + j
        now = _inputs_at(inputs + back.to(tl.int64) * stride + c, live & (back >= first), channels, PAIRED)
        place = read.to(tl.int64) * (TAPS - 1) + back - first + TAPS - 1
        old = tl.load(window + place * channels + c, mask=live & (back < first) & (read >= 0), other=0)
        x += tl.load(taps + j * channels + c, mask=live, other=0) * tl.where(back >= first, now, old)
    return activated(x, ACT)


@triton.jit
def softplus(x):
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1 + e
    # log(1 + e) without the error of the sum (W. Kahan)
    return tl.where(x > 20.0, x, tl.where(u == 1, e, tl.log(u) * (e / tl.where(u == 1, 1.0, u - 1))))


@launched
@triton.jit
def _gated_norm_kernel(
    out, gate, stride, scale, weight, per_group, width, eps,
    NORMED: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr, SIGMOID: tl.constexpr = False,
):  # fmt: skip
    """RMS norm of a group of a token's numbers in place, times silu of its gate, which is `scale` times what is stored,
    SIGMOID: or that of it; FIRST: the norm comes first; without a norm unless NORMED. per_group: from a group's weights
    to the next one's."""
    follow()
    t, group, dim = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    here = dim < width
    at = out + (t * tl.num_programs(1) + group) * width + dim
    x = tl.load(at, mask=here, other=0)
    z = scale * tl.load(gate + t * stride + group * width + dim, mask=here, other=0)
    z = (1 if SIGMOID else z) / (1 + tl.exp(-z))
    if not FIRST:
        x *= z
    if NORMED:
        own = tl.load(weight + group * per_group + dim, mask=here, other=0)
        x *= 1 / tl.sqrt_rn(tl.sum(x * x, 0) / width + eps) * own
    if FIRST:
        x *= z
    tl.store(at, x, mask=here)


def keep_window(
    inputs: Tensor, stride: int, window: Tensor, runs: Tensor, taps: int, *, paired: bool = False
) -> None:
    """The slots that a step writes get the convolution's inputs for the last tokens of its sequences; paired: which are
    products of two columns."""
    channels = window.shape[-1]
    _keep_kernel[(len(runs), triton.cdiv(channels, CHANNELS))](
        inputs, stride, window, runs, channels, TAPS=taps, PAD=triton.next_power_of_2(taps - 1), C=CHANNELS,
        PAIRED=paired, num_warps=4, launch_pdl=early(inputs),
    )  # fmt: skip


def gate_and_norm(
    out: Tensor, gate: Tensor, norm: Tensor | None, groups: int, eps: float, *, first: bool, scale: float = 1.0,
    sigmoid: bool = False,
) -> None:
    """RMS norm of each of the `groups` equal parts of a token's row, in place, and times silu, or the sigmoid, of its
    gate, which is `scale` times the first numbers of its row of `gate`; first: the norm comes first. norm: weights of
    each part, or of all parts one set; None: no norm."""
    width = out.shape[1] // groups
    per_group = 0 if norm is None or len(norm) == width else width
    block = triton.next_power_of_2(width)
    _gated_norm_kernel[(len(out), groups)](
        out, gate, gate.stride(0), scale, out if norm is None else norm, per_group, width, eps,
        NORMED=norm is not None, FIRST=first, BLOCK=block, SIGMOID=sigmoid, num_warps=min(8, max(1, block // 512)),
        launch_pdl=early(out),
    )  # fmt: skip
