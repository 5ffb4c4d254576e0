"""Multi-head latent attention of a layer on a GPU: its two operators, on the kernels of `kernels/gpu_latent.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from powerinfer.config import LatentAttentionConfig
from powerinfer.devices.gpu_weights import GpuNorm, HeadMatrices, Matrices
from powerinfer.devices.step import Step
from powerinfer.kernels import gpu_latent
from powerinfer.kernels.gpu_types import Cached

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any


@dataclass(frozen=True)
class LatentInput:
    """attended = what each head gets of the latents in the cache for norm(x), float32 [heads, T, latents].

    first: makes queries, or their latents where there is a second, and kv: latents and the rotated part of keys;
    second: makes queries of latents; k_b: of each head what would make its keys; rotation: frequencies and factor.
    """

    config: LatentAttentionConfig
    norm: GpuNorm | None
    first: Matrices
    second: Matrices | None
    q_norm: GpuNorm | None
    kv_norm: GpuNorm
    k_b: HeadMatrices
    rotation: tuple[Tensor, float]
    cache: Cached

    def __call__(self, step: Step) -> None:
        config = self.config
        products = self.first(step.normalised(self.norm, self.first.for_codes))
        q, kv = products[:, : -config.head_dim], products[:, -config.head_dim :]
        if self.second is not None:
            q = self.second(q if self.q_norm is None else self.q_norm(q, for_codes=self.second.for_codes))
        heads = q.unflatten(1, (config.n_heads, config.query_dim))
        plain, rotated = heads[..., : config.plain_dim], heads[..., config.plain_dim :]
        kv_norm = self.kv_norm.weight, self.kv_norm.eps
        gpu_latent.place(rotated, kv, kv_norm, step.positions, self.rotation, self.cache, step.slots)
        queries = self.k_b(plain.transpose(0, 1))
        step.attended = gpu_latent.attention(queries, rotated, self.cache, step.contexts, config)


@dataclass(frozen=True)
class LatentOutput:
    """x += norm(out . each head's v_b . attended)."""

    v_b: HeadMatrices
    out: Matrices
    norm: GpuNorm | None

    def __call__(self, step: Step) -> None:
        assert step.attended is not None
        values = self.v_b(step.attended, by_token=True).flatten(1)
        step.attended = None
        step.add_product(self.out, values, self.norm)
