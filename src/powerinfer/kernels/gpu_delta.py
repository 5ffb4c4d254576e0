"""Gated DeltaNet (arXiv 2412.06464) over torch tensors. As in `gpu`, plain torch defines what the Triton kernels
compute, and sums have a fixed order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from powerinfer.config import DeltaNetConfig
from powerinfer.kernels import gpu
from powerinfer.kernels.gpu_states import replayed_inputs, scan
from powerinfer.kernels.gpu_types import UNIT_EPS, Replay
from powerinfer.kernels.gpu_types import DeltaNet as DeltaNet
from powerinfer.kernels.gpu_types import States as States

if TYPE_CHECKING:
    from torch import Tensor


def delta_net(net: DeltaNet, products: Tensor, states: States, runs: Tensor, rows: Tensor) -> Tensor:
    """What a layer gives for T tokens of several sequences, float32 [T, value heads * value_dim]; their states change.

    products: float32 [T, channels + value heads * value_dim + value heads + decays], of the layer's input with the
    matrices of queries, keys, values, gate, beta and alpha, in this order; runs: int32 [S, 4], of each sequence its
    first token, their number, the slot that is read, negative for a sequence that begins, and the one that is written,
    which no other sequence reads or writes; one without tokens has the number 0, and its slots do not count; rows:
    int32 [T], the sequence of each token.
    """
    if gpu.which(products) == "triton":
        from powerinfer.kernels import triton_delta

        return triton_delta.delta_net(net, products, states, runs, rows)
    about = net.about
    inputs, gate, gates = products.split([about.channels, about.width, about.n_value_heads + about.decays], dim=1)
    out = _advance(net, inputs, gates, states, runs, rows)
    out = gpu.norm(out, net.norm, None, net.eps, False).view(len(products), -1)
    return out * (gate.sigmoid() if about.channel_decays else gate * gate.sigmoid())


def replay(net: DeltaNet, states: States, tokens: Replay) -> None:
    """Change the states of several sequences by tokens whose inputs they have."""
    inputs = replayed_inputs(states, tokens)
    if gpu.which(inputs) == "triton":
        from powerinfer.kernels import triton_delta

        return triton_delta.replay(net, inputs, states, tokens)
    mixed, gates = inputs.split([net.about.channels, net.about.n_value_heads + net.about.decays], dim=1)
    _advance(net, mixed, gates, states, tokens.runs, tokens.rows)


def _advance(net: DeltaNet, inputs: Tensor, gates: Tensor, states: States, runs: Tensor, rows: Tensor) -> Tensor:
    """Convolution and rule. inputs: float32 [T, channels]; gates: float32 [T, 2 * value heads], beta, then alpha."""
    import torch

    kind = net.about
    heads, keys = kind.n_value_heads, kind.n_key_heads * kind.key_dim
    beta, alpha = gates.split([heads, kind.decays], dim=1)
    beta = beta.sigmoid()
    steps = torch.nn.functional.softplus(alpha + net.dt_bias).unflatten(1, (heads, -1))
    decay = torch.exp(net.decay[:, None] * steps)  # [T, heads, 1 or key_dim]

    def rule(t: int, mixed: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = mixed.split([keys, keys, kind.width])
        q = _of_value_heads(_unit(q.view(-1, kind.key_dim)) * kind.key_dim**-0.5, kind)
        k = _of_value_heads(_unit(k.view(-1, kind.key_dim)), kind)
        state = state * decay[t, :, None]
        delta = beta[t, :, None] * (v.view(heads, -1) - (state * k[:, None, :]).sum(dim=-1))
        state = state + delta[:, :, None] * k[:, None, :]
        return state, (state * q[:, None, :]).sum(dim=-1)

    return scan(net, inputs, states, runs, rows, rule)


def _unit(x: Tensor) -> Tensor:
    """Rows divided by their length."""
    return x * (x * x).sum(dim=-1, keepdim=True).add(UNIT_EPS).rsqrt()


def _of_value_heads(x: Tensor, about: DeltaNetConfig) -> Tensor:
    """The query or key of each value head, from those of the key heads."""
    shared = about.n_value_heads // about.n_key_heads
    return x.repeat(shared, 1) if about.tiled else x.repeat_interleave(shared, dim=0)
