"""Triton kernels of gated short convolutions; see `triton_kernels` for the rules.

Every channel is computed by itself. In steps of few tokens a program has some channels of all tokens of a sequence, and
what is kept for the next ones; in others, of one token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from powerinfer.kernels.gpu_types import FEW
from powerinfer.kernels.triton_kernels import early, follow
from powerinfer.kernels.triton_launch import launched
from powerinfer.kernels.triton_states import convolved, keep_inputs, keep_window

if TYPE_CHECKING:
    from torch import Tensor

    from powerinfer.kernels.gpu_types import Replay, ShortConv, States

CHANNELS = 256  # of a token
MANY = FEW + 1  # tokens of a step from which on each has programs of its own


@triton.jit
def _give(
    products, stride, taps, bias, window, out, t, first, read, c, channels, BIASED: tl.constexpr, TAPS: tl.constexpr
):  # fmt: skip
    """Output of a layer for channels c of token t."""
    here = c < channels
    x = convolved(products, stride, taps, bias, window, t, first, read, c, here, channels, BIASED, TAPS, "", True)
    gate = tl.load(products + t.to(tl.int64) * stride + 2 * channels + c, mask=here, other=0)
    tl.store(out + t.to(tl.int64) * channels + c, x * gate, mask=here)


@launched
@triton.jit(do_not_specialize_on_alignment=["runs", "rows"])
def _token_kernel(
    products, stride, taps, bias, window, runs, rows, out, channels,
    BIASED: tl.constexpr, TAPS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Some channels of a token."""
    follow()
    t, c = tl.program_id(0), tl.program_id(1) * C + tl.arange(0, C)
    of_run = runs + tl.load(rows + t) * 4
    first, read = tl.load(of_run), tl.load(of_run + 2)
    _give(products, stride, taps, bias, window, out, t, first, read, c, channels, BIASED, TAPS)


@launched
@triton.jit(do_not_specialize_on_alignment=["runs"])
def _sequence_kernel(
    products, stride, taps, bias, window, runs, out, channels,
    BIASED: tl.constexpr, TAPS: tl.constexpr, PAD: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Some channels of a sequence's few tokens, and the inputs that are kept for the next ones."""
    follow()
    of_run, c = runs + tl.program_id(0) * 4, tl.program_id(1) * C + tl.arange(0, C)
    first, count, read, write = tl.load(of_run), tl.load(of_run + 1), tl.load(of_run + 2), tl.load(of_run + 3)
    for i in range(count):
        _give(products, stride, taps, bias, window, out, first + i, first, read, c, channels, BIASED, TAPS)
    keep_inputs(products, stride, window, first, count, read, write, c, channels, TAPS, PAD, True)


def short_conv(net: ShortConv, products: Tensor, states: States, runs: Tensor, rows: Tensor) -> Tensor:
    """`gpu_short_conv.short_conv`."""
    about, tokens = net.about, len(products)
    products = products.contiguous()
    stride, blocks = products.shape[1], triton.cdiv(about.size, CHANNELS)
    out = torch.empty((tokens, about.size), dtype=torch.float32, device=products.device)
    bias = net.taps if net.conv_bias is None else net.conv_bias
    inputs = products, stride, net.taps, bias, states.window, runs
    kinds = {"BIASED": net.conv_bias is not None, "TAPS": about.taps, "C": CHANNELS}
    kinds |= {"num_warps": 4, "launch_pdl": early(products)}
    if tokens < MANY:
        pad = triton.next_power_of_2(about.taps - 1)
        _sequence_kernel[(len(runs), blocks)](*inputs, out, about.size, PAD=pad, **kinds)
    else:
        _token_kernel[(tokens, blocks)](*inputs, rows, out, about.size, **kinds)
        keep_window(products, stride, states.window, runs, about.taps, paired=True)
    return out


def replay(net: ShortConv, inputs: Tensor, states: States, tokens: Replay) -> None:
    """`gpu_short_conv.replay`; inputs: `replayed_inputs`."""
    keep_window(inputs, inputs.shape[1], states.window, tokens.runs, net.about.taps, paired=True)
