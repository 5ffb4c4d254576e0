"""Mamba2 (arXiv 2405.21060) over torch tensors: what a layer gives, and the states of sequences, in slots. As in `gpu`,
plain torch defines what the Triton kernels compute, and sums have a fixed order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from powerinfer.kernels import gpu
from powerinfer.kernels.gpu_states import replayed_inputs, scan
from powerinfer.kernels.gpu_types import Mamba as Mamba
from powerinfer.kernels.gpu_types import Replay
from powerinfer.kernels.gpu_types import States as States

if TYPE_CHECKING:
    from torch import Tensor


def mamba(net: Mamba, products: Tensor, states: States, runs: Tensor, rows: Tensor) -> Tensor:
    """What a layer gives for T tokens of several sequences, float32 [T, heads * head_dim]; their states change.

    products: float32 [T, heads * head_dim + channels + heads], of the layer's input with the matrices of the gate, of
    x, B and C, and of the time steps, in this order; runs, rows: as of `gpu_delta.delta_net`.
    """
    if gpu.which(products) == "triton":
        from powerinfer.kernels import triton_mamba

        return triton_mamba.mamba(net, products, states, runs, rows)
    import torch

    about = net.about
    gate, inputs, steps = products.split([about.width, about.channels, about.n_heads], dim=1)
    out = _advance(net, inputs, steps, states, runs, rows)
    return _gated(net, out.flatten(1), torch.nn.functional.silu(gate * about.scales[0]))


def replay(net: Mamba, states: States, tokens: Replay) -> None:
    """Change the states of several sequences by tokens whose inputs they have."""
    inputs = replayed_inputs(states, tokens)
    if gpu.which(inputs) == "triton":
        from powerinfer.kernels import triton_mamba

        return triton_mamba.replay(net, inputs, states, tokens)
    mixed, steps = inputs.split([net.about.channels, net.about.n_heads], dim=1)
    _advance(net, mixed, steps, states, tokens.runs, tokens.rows)


def _advance(net: Mamba, inputs: Tensor, steps: Tensor, states: States, runs: Tensor, rows: Tensor) -> Tensor:
    """Convolution and rule. inputs: float32 [T, channels]; steps: float32 [T, heads]."""
    import torch

    kind = net.about
    groups, shared = kind.n_groups, kind.n_heads // kind.n_groups
    steps = torch.nn.functional.softplus(steps * kind.scales[-1] + net.step_bias).clamp(*kind.step_limits)
    decay = torch.exp(net.a * steps)

    def rule(t: int, mixed: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        x, b, c = mixed.split([kind.width, groups * kind.state_dim, groups * kind.state_dim])
        b, c = (part.view(groups, -1).repeat_interleave(shared, dim=0) for part in (b, c))
        x = x.view(kind.n_heads, -1)
        state = state * decay[t, :, None, None] + (steps[t, :, None] * x)[:, :, None] * b[:, None, :]
        return state, (state * c[:, None, :]).sum(dim=-1) + net.d[:, None] * x

    return scan(net, inputs, states, runs, rows, rule)


def _gated(net: Mamba, out: Tensor, gate: Tensor) -> Tensor:
    """out times its gate, with the norm of its groups, if there is one, behind or before that."""
    if net.norm is None:
        return out * gate
    if net.about.norm == "before":
        return _normalised(net, out) * gate
    return _normalised(net, out * gate)


def _normalised(net: Mamba, out: Tensor) -> Tensor:
    assert net.norm is not None
    parts = out.unflatten(1, (net.about.norm_groups, -1))
    scale = (parts * parts).mean(dim=-1, keepdim=True).add(net.eps).rsqrt()
    normed: Tensor = (parts * scale).flatten(1) * net.norm
    return normed
