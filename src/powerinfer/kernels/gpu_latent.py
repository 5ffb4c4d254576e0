"""Multi-head latent attention over torch tensors (DeepSeek-V2, arXiv 2405.04434), in the absorbed form: keys and values
of heads are never made. As in `gpu`, plain torch defines what the Triton kernels compute, and sums have a fixed order.

The cache has one key for all heads of a token, `latents` numbers and then the rotated part; the latents are the value.
What belongs to heads is head by head, [heads, T, ...], so that each head's rows meet its own matrix.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from powerinfer.config import LatentAttentionConfig
from powerinfer.kernels import gpu, torch_attention
from powerinfer.kernels.gpu_types import FEW, PAGE, Cached, Contexts, Weight

if TYPE_CHECKING:
    from torch import Tensor

    from powerinfer.formats.tensors import RawTensor


def upload(tensor: RawTensor, device: Any) -> Weight:
    """The matrices of all heads, [heads, out, in], one below the other on a torch device; raises as `gpu.upload`."""
    heads, rows, k = tensor.shape
    return gpu.upload(replace(tensor.gathered(), shape=(heads * rows, k)), device)


def per_head(w: Weight, x: Tensor, by_token: bool = False) -> Tensor:
    """Each head's rows times its matrix: float32 [heads, T, out], or [T, heads, out] if `by_token`.

    w: of `upload`; x: float32 [heads, T, in], its last dimension contiguous.
    """
    import torch

    heads, tokens, k = x.shape
    rows = w.rows // heads
    shape = (tokens, heads, rows) if by_token else (heads, tokens, rows)
    out = torch.empty(shape, dtype=torch.float32, device=x.device)
    each = out.transpose(0, 1) if by_token else out
    if tokens <= FEW and gpu.which(x) == "triton":
        from powerinfer.kernels import triton_latent

        triton_latent.per_head(w, x, each)
        return out
    for begin, end in gpu.pieces(heads, rows * max(k, tokens), tokens=tokens):
        own = gpu.operand(w, begin * rows, end * rows).view(end - begin, rows, k)
        each[begin:end] = gpu.product(x[begin:end], own.transpose(1, 2))
    return out


def place(
    turned: Tensor,
    kv: Tensor,
    norm: tuple[Tensor, float],
    positions: Tensor,
    rotation: tuple[Tensor, float],
    cache: Cached,
    slots: Tensor,
) -> None:
    """`gpu.rotate` of the rotated parts of queries, in place, float32 [T, heads, n]; and a layer's keys into the cache.

    kv: float32 [T, latents + n], each token's latents, which get an RMS norm with a weight, float32 [latents], and eps;
    and what the keys of all heads share, which is rotated. kv is undefined afterwards. rotation: frequencies and
    factor. The others as in `gpu.rotate` and `gpu.store_kv`.
    """
    if gpu.which(kv) == "triton":
        from powerinfer.kernels import triton_latent

        triton_latent.place(turned, kv, norm, positions, rotation, cache, slots)
        return
    import torch

    weight, eps = norm
    latents = len(weight)
    gpu.rotate(turned, positions, *rotation)
    rest = gpu.rotate(kv[:, None, latents:], positions, *rotation)
    key = torch.cat([gpu.norm(kv[:, None, :latents], weight, None, eps, False), rest], dim=-1)
    gpu.store(cache, key, slots)


def attention(
    q: Tensor, turned: Tensor, cache: Cached, contexts: Contexts, settings: LatentAttentionConfig
) -> Tensor:
    """What each head gets of the latents in the cache, float32 [heads, T, latents].

    q: float32 [heads, T, latents], queries for latents; turned: float32 [T, heads, n], their rotated parts; cache: with
    this step's keys, [pages, PAGE, 1, latents + n]. The others as in `gpu.attention`.
    """
    if gpu.which(q) == "triton":
        from powerinfer.kernels import triton_latent

        return triton_latent.attention(q, turned, cache, contexts, settings)
    import torch

    out = torch.zeros_like(q)
    latents = q.shape[2]
    table, rows, positions = contexts
    for row in torch.unique(rows).tolist():
        tokens = ((rows == row) & (positions >= 0)).nonzero()[:, 0]
        if not len(tokens):
            continue
        last = int(positions[tokens].max()) + 1
        keys = cache.values(table[row, : -(-last // PAGE)].long()).flatten(0, 2)[:last]  # [last, latents + n]
        places = positions[tokens].long()[:, None]
        scores = torch.matmul(q[:, tokens], keys[:, :latents].T)
        scores += torch.einsum("thn,sn->hts", turned[tokens], keys[:, latents:])
        scores = torch_attention.grown(scores, places, settings)  # which are sums of a query's numbers
        hidden = torch.arange(last, device=q.device) > places
        scores.mul_(settings.scale).masked_fill_(hidden, -torch.inf)
        out[:, tokens] = torch.matmul(scores.softmax(dim=-1), keys[:, :latents])
    return out
