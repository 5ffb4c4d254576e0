"""Gated DeltaNet (arXiv 2412.06464) over whole windows, with gradients. It is computed in float32 between its products.

The rule, of a head's state S [key_dim, value_dim], zero before the first token, with decay g and rate b:

    S_t = g_t S_(t-1) + k_t d_t^T,  d_t = b_t (v_t - g_t S_(t-1)^T k_t),  out_t = S_t^T q_t

It is computed for CHUNK tokens at a time, as in section 3.3 of the paper. With G_t the product of g from the chunk's
first token to t, D_tj = G_t / G_j for j <= t, else 0, and S the state before the chunk:

    d = (1 + L)^-1 (b v - b G k S),  L_tj = b_t D_tj k_t.k_j below the diagonal
    out = G q S + P d,               P_tj = D_tj q_t.k_j
    S' = G_last S + sum over j of (G_last / G_j) k_j d_j^T

so that only products with states go from chunk to chunk, and all else is for all chunks at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from powerinfer.config import DeltaNetConfig
from powerinfer.kernels.gpu_types import UNIT_EPS
from powerinfer_train.estimate import CHUNK

if TYPE_CHECKING:
    from powerinfer_train.torch_model import TorchModel


_ACTIVATE: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
}


def remember(model: TorchModel, x: Tensor, name: str, config: DeltaNetConfig) -> Tensor:
    """Output of a layer for its normalised input x, both [batch, tokens, d_model]. name: `layers.N.`."""
    name += "delta_"
    heads, keys = config.n_value_heads, config.n_key_heads * config.key_dim
    taps = model.weights[name + "conv"].split([keys, keys, config.width])
    activate = _ACTIVATE[config.activation]
    q, k, v = (
        activate(_Convolved.apply(model.linear(x, name + part).float(), part_taps)).unflatten(-1, (-1, dim))
        for part, part_taps, dim in zip("qkv", taps, (config.key_dim, config.key_dim, config.value_dim), strict=True)
    )
    q, k = (_repeat_heads(part, config) for part in (_unit(q) * config.key_dim**-0.5, _unit(k)))
    rate = model.linear(x, name + "b").float().sigmoid()
    spread = functional.softplus(model.linear(x, name + "a").float() + model.weights[name + "dt_bias"])
    out = delta_rule(q, k, v, spread * model.weights[name + "decay"], rate)
    gate = model.linear(x, name + "z").float().unflatten(-1, (heads, config.value_dim))
    out = model.inner_norm(out, name + "norm") * functional.silu(gate)
    return model.linear(out.flatten(-2), name + "o")


def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor) -> Tensor:
    """Values that heads read from their states, [batch, tokens, heads, value_dim].

    q, k: [batch, tokens, heads, key_dim]; v: [batch, tokens, heads, value_dim]; decay: [batch, tokens, heads], the
    logarithm of g, at most 0; rate: b, of the same shape.
    """
    batch, tokens, heads = decay.shape
    chunk = min(CHUNK, tokens)

    def cut(x: Tensor) -> Tensor:
        """[batch, tokens, heads, ...] -> [chunks, batch * heads, chunk, ...]; what is missing in the last one is zero,
        and so changes no state."""
        chunks_of = functional.pad(x, (0, 0) * (x.ndim - 2) + (0, -tokens % chunk)).unflatten(1, (-1, chunk))
        return chunks_of.movedim(1, 0).movedim(3, 2).flatten(1, 2)

    q, k, v, decay, rate = (cut(part) for part in (q, k, v, decay, rate))
    passed = decay.cumsum(-1)  # the logarithm of G
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    decays = (passed[..., :, None] - passed[..., None, :]).masked_fill(later, -torch.inf).exp()
    lower = k @ k.mT * decays * rate[..., None]
    identity = torch.eye(chunk, dtype=q.dtype, device=q.device).expand_as(lower)
    # reads what lies below the diagonal alone
    solved = torch.linalg.solve_triangular(lower, identity, upper=False, unitriangular=True) * rate[..., None, :]
    values = solved @ v
    of_state = solved * passed.exp()[..., None, :] @ k
    scores = q @ k.mT * decays
    q = q * passed.exp()[..., None]
    k = k * (passed[..., -1:] - passed).exp()[..., None]
    passed_on = passed[..., -1:, None].exp()
    state, out = q.new_zeros(*q.shape[1:2], q.shape[-1], v.shape[-1]), []
    for at in range(len(q)):
        learnt = torch.baddbmm(values[at], of_state[at], state, alpha=-1)
        out.append(torch.baddbmm(q[at] @ state, scores[at], learnt))
        state = torch.baddbmm(state * passed_on[at], k[at].mT, learnt)
    chunks_ = torch.stack(out).unflatten(1, (batch, heads)).permute(1, 0, 3, 2, 4)
    return chunks_.flatten(1, 2)[:, :tokens]


def _unit(x: Tensor) -> Tensor:
    """Divided by their length."""
    return x * (x.square().sum(-1, keepdim=True) + UNIT_EPS).rsqrt()


def _repeat_heads(x: Tensor, config: DeltaNetConfig) -> Tensor:
    """The query or key of each value head, from those of the key heads [..., heads, key_dim]."""
    shared = config.n_value_heads // config.n_key_heads
    if shared == 1:
        return x
    return x.repeat(1, 1, shared, 1) if config.tiled else x.repeat_interleave(shared, dim=2)


class _Convolved(torch.autograd.Function):  # type: ignore[misc]
    """x [batch, tokens, channels], each channel the sum of its last values times its taps [channels, n], the last of
    which is the token's own. Taps have no gradient: they are never trained. As one function, for torch's own take a CPU
    two to four times as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, taps: Tensor) -> Tensor:
        ctx.save_for_backward(taps)
        out = x * taps[:, -1]
        for back in range(1, taps.shape[1]):
            out[:, back:].addcmul_(x[:, :-back], taps[:, -1 - back])
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (taps,) = ctx.saved_tensors
        gradient = gradients[0] * taps[:, -1]
        for back in range(1, taps.shape[1]):
            gradient[:, :-back].addcmul_(gradients[0][:, back:], taps[:, -1 - back])
        return gradient, None
