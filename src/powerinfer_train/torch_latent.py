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
from powerinfer.kernels.torch_attention import grown

if TYPE_CHECKING:
    from powerinfer_train.torch_model import TorchModel


def attend_latents(model: TorchModel, x: Tensor, name: str, config: LatentAttentionConfig) -> Tensor:
    """Output of a layer for its normalised input x, both [batch, tokens, d_model]. name: `layers.N.`."""
    eps, heads = config.norm_eps, config.n_heads
    if config.q_latents is None:
        q = model.linear(x, name + "q")
    else:
        q = model.linear(model.inner_norm(model.linear(x, name + "q_a"), name + "q_a_norm", eps), name + "q_b")
    q = q.unflatten(-1, (heads, config.query_dim))
    latents, shared = model.linear(x, name + "kv_a").split([config.latents, config.rope_dim], -1)
    latents = model.inner_norm(latents, name + "kv_a_norm", eps)
    k = functional.linear(latents, model.weight(name + "k_b").mT.flatten(0, 1)).unflatten(-1, (heads, config.plain_dim))
    v = functional.linear(latents, model.weight(name + "v_b").flatten(0, 1)).unflatten(-1, (heads, config.value_dim))
    plain, rotated = q.split([config.plain_dim, config.rope_dim], -1)
    shared = shared.unsqueeze(-2)
    if config.rope is not None:
        rotated, shared = (model.rotate(part, config.rope) for part in (rotated, shared))
    q = torch.cat((plain, rotated), -1)
    k = torch.cat((k, shared.expand(-1, -1, heads, -1)), -1)
    # with values as wide as keys, torch needs neither scores nor weights of all pairs at once
    v = functional.pad(v, (0, max(0, config.query_dim - config.value_dim)))
    q = grown(q, torch.arange(q.shape[1], device=q.device)[:, None, None], config)
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=config.scale)
    mixed = mixed[..., : config.value_dim]
    return model.linear(mixed.transpose(1, 2).flatten(-2), name + "o")
