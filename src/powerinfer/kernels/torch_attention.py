"""Attention over heads in torch: what Triton's kernels are compared with, and what trained models compute.

A setting of `AttentionConfig` has its meaning here once, for caches in pages and for whole windows of text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from powerinfer.config import AttentionConfig, LatentAttentionConfig
from powerinfer.kernels.gpu_types import PAGE, Cached, Contexts

if TYPE_CHECKING:
    from torch import Tensor


def attend_pages(
    q: Tensor, cache: tuple[Cached, Cached], contexts: Contexts, settings: AttentionConfig, sinks: Tensor | None
) -> Tensor:
    """`gpu.attention`."""
    import torch

    out = torch.zeros_like(q)
    heads, kv_heads = q.shape[1], cache[0].data.shape[2]
    for row in torch.unique(contexts.rows).tolist():
        tokens = ((contexts.rows == row) & (contexts.positions >= 0)).nonzero()[:, 0]
        if not len(tokens):
            continue
        positions = contexts.positions[tokens].long()
        last = int(positions.max()) + 1
        pages = contexts.pages[row, : -(-last // PAGE)].long()
        keys, values = (part.values(pages).flatten(0, 1)[:last] for part in cache)  # [last, kv_heads, dim]
        queries = grown(q[tokens], positions[:, None, None], settings)
        grouped = queries.view(len(tokens), kv_heads, heads // kv_heads, -1)
        scores = _capped(torch.einsum("tghd,sgd->tghs", grouped, keys) * settings.score_scale, settings)
        mask = visible(positions, torch.arange(last, device=q.device), settings)
        scores.masked_fill_(~mask[:, None, None, :], -torch.inf)
        weights = _weights(scores, None if sinks is None else sinks.view(kv_heads, -1, 1))
        out[tokens] = torch.einsum("tghs,sgd->tghd", weights, values).flatten(1, 2)
    return out.flatten(1)


def attend_windows(q: Tensor, k: Tensor, v: Tensor, settings: AttentionConfig, sinks: Tensor | None) -> Tensor:
    """Each head's sum of values, of windows of text from their begin, with gradients; of the shape of q.

    q: [batch, heads, tokens, head_dim]; k, v: [batch, kv_heads, tokens, head_dim]; sinks: [heads].
    """
    import torch
    from torch.nn import functional

    tokens, grouped = q.shape[2], settings.n_heads != settings.n_kv_heads
    q = grown(q, torch.arange(tokens, device=q.device)[:, None], settings)
    windowed = settings.window is not None and settings.window < tokens
    plain = sinks is None and settings.score_cap is None
    if plain and not windowed:
        mixed: Tensor = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=settings.scale, enable_gqa=grouped
        )
        return mixed
    places = torch.arange(tokens, device=q.device)
    mask = visible(places, places, settings)
    if plain:
        mixed = functional.scaled_dot_product_attention(q, k, v, mask, scale=settings.scale, enable_gqa=grouped)
        return mixed
    k, v = (part.repeat_interleave(settings.n_heads // settings.n_kv_heads, 1) for part in (k, v))
    scores = _capped((q @ k.transpose(-1, -2)).float() * settings.score_scale, settings)
    scores = scores.masked_fill(~mask, float("-inf"))
    return _weights(scores, None if sinks is None else sinks[:, None, None]).to(v.dtype) @ v


def grown(q: Tensor, positions: Tensor, settings: AttentionConfig | LatentAttentionConfig) -> Tensor:
    """Queries times what they grow by with their positions (`AttentionConfig.query_growth`).

    positions: not negative, broadcast to the queries.
    """
    if not settings.query_growth:
        return q
    intervals = (positions + settings.query_offset) // settings.query_interval
    return q * (1 + settings.query_growth * intervals.to(q.dtype).log1p())


def visible(positions: Tensor, places: Tensor, settings: AttentionConfig) -> Tensor:
    """Keys that tokens see, from the positions of both: bool [tokens, keys]."""
    mask = places <= positions[:, None]
    if settings.window and settings.chunked:
        mask &= places >= (positions - positions % settings.window)[:, None]
    elif settings.window:
        mask &= places > positions[:, None] - settings.window
    return mask


def _capped(scores: Tensor, settings: AttentionConfig) -> Tensor:
    cap = settings.score_cap
    return scores if cap is None else (scores / cap).tanh() * cap


def _weights(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """The softmax of scores [..., keys]; sinks: [..., 1], of each head a score more, that belongs to no value."""
    import torch

    if sinks is None:
        return scores.softmax(dim=-1)
    scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
    return scores.softmax(dim=-1)[..., :-1]
