"""Latent attention (DeepSeek-V2, arXiv 2405.04434) over whole windows, with gradients.

Keys and values of heads are made, equations (9) to (19) of the paper: for the tokens of a window that takes a few
hundred multiplications for a pair of tokens, where the engine's absorbed form over latents takes a thousand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from powerinfer.config import LatentAttentionConfig

if TYPE_CHECKING:
    from powerinfer_train.torch_model import TorchModel


def attend_latents(model: TorchModel, x: Tensor, name: str, about: LatentAttentionConfig) -> Tensor:
    """What a layer adds, for its normalised input x, both [batch, tokens, d_model]. name: `layers.N.`."""
    eps, heads = about.norm_eps, about.n_heads
    if about.q_latents is None:
        q = model.linear(x, name + "q")
    else:
        q = model.linear(model.own_norm(model.linear(x, name + "q_a"), name + "q_a_norm", eps), name + "q_b")
    q = q.unflatten(-1, (heads, about.query_dim))
    latents, shared = model.linear(x, name + "kv_a").split([about.latents, about.rope_dim], -1)
    latents = model.own_norm(latents, name + "kv_a_norm", eps)
    k = functional.linear(latents, model.weight(name + "k_b").mT.flatten(0, 1)).unflatten(-1, (heads, about.plain_dim))
    v = functional.linear(latents, model.weight(name + "v_b").flatten(0, 1)).unflatten(-1, (heads, about.value_dim))
    plain, turned = q.split([about.plain_dim, about.rope_dim], -1)
    q = torch.cat((plain, model.rotate(turned, about.rope)), -1)
    shared = model.rotate(shared.unsqueeze(-2), about.rope).expand(-1, -1, heads, -1)
    k = torch.cat((k, shared), -1)
    # with values as wide as keys, torch needs neither scores nor weights of all pairs at once
    v = functional.pad(v, (0, max(0, about.query_dim - about.value_dim)))
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=about.scale)[..., : about.value_dim]
    return model.linear(mixed.transpose(1, 2).flatten(-2), name + "o")
