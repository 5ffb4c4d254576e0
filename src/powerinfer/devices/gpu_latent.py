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

    about: LatentAttentionConfig
    norm: GpuNorm | None
    first: Matrices
    second: Matrices | None
    q_norm: GpuNorm | None
    kv_norm: GpuNorm
    k_b: HeadMatrices
    rotation: tuple[Tensor, float]
    cache: Cached

    def __call__(self, step: Step) -> None:
        about = self.about
        made = self.first(step.normalised(self.norm, self.first.for_codes))
        q, kv = made[:, : -about.head_dim], made[:, -about.head_dim :]
        if self.second is not None:
            q = self.second(q if self.q_norm is None else self.q_norm(q, for_codes=self.second.for_codes))
        heads = q.unflatten(1, (about.n_heads, about.query_dim))
        plain, turned = heads[..., : about.plain_dim], heads[..., about.plain_dim :]
        kv_norm = self.kv_norm.weight, self.kv_norm.eps
        gpu_latent.place(turned, kv, kv_norm, step.positions, self.rotation, self.cache, step.slots)
        queries = self.k_b(plain.transpose(0, 1))
        step.attended = gpu_latent.attention(queries, turned, self.cache, step.contexts, about)


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
