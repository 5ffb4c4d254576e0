"""Gated short convolutions over torch tensors: what a layer gives, and the states of sequences, in slots. As in `gpu`,
plain torch defines what the Triton kernels compute, and sums have a fixed order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from powerinfer.kernels import gpu
from powerinfer.kernels.gpu_states import replayed_inputs, scan
from powerinfer.kernels.gpu_types import Replay
from powerinfer.kernels.gpu_types import ShortConv as ShortConv
from powerinfer.kernels.gpu_types import States as States

if TYPE_CHECKING:
    from torch import Tensor


def short_conv(net: ShortConv, products: Tensor, states: States, runs: Tensor, rows: Tensor) -> Tensor:
    """Output of a layer for T tokens of several sequences, float32 [T, channels]; their states change.

    products: float32 [T, 3 * channels], of the layer's input with the matrices of x, b and c, in this order; runs,
    rows: as of `gpu_delta.delta_net`.
    """
    if gpu.which(products) == "triton":
        from powerinfer.kernels import triton_short_conv

        return triton_short_conv.short_conv(net, products, states, runs, rows)
    x, b, c = products.split(net.about.size, dim=1)
    output: Tensor = _advance(net, x * b, states, runs, rows).flatten(1) * c
    return output


def replay(net: ShortConv, states: States, tokens: Replay) -> None:
    """Change the states of several sequences by tokens whose inputs they have."""
    inputs = replayed_inputs(states, tokens)
    if gpu.which(inputs) == "triton":
        from powerinfer.kernels import triton_short_conv

        return triton_short_conv.replay(net, inputs, states, tokens)
    x, b = inputs.split(net.about.size, dim=1)
    _advance(net, x * b, states, tokens.runs, tokens.rows)


def _advance(net: ShortConv, inputs: Tensor, states: States, runs: Tensor, rows: Tensor) -> Tensor:
    """Run the convolution of inputs float32 [T, channels]."""

    def rule(t: int, mixed: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return state, mixed.view(-1, net.about.value_dim)

    return scan(net, inputs, states, runs, rows, rule)
