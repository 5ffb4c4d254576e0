"""Published models of experts in small: two layers, 32 experts, four a token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.models import expert_models
from powerinfer.config import (
    AttentionConfig,
    DeltaNetConfig,
    ExpertsConfig,
    FfnConfig,
    LatentAttentionConfig,
    ModelConfig,
)

EXPERTS, TOP = 32, 4


def shape(name: str) -> ModelConfig:
    """A small model of that family, of two layers of experts."""
    config = expert_models.CONFIGS[name]
    first, last = config.layers[0], config.layers[-1]
    ffn = last.ffn
    assert isinstance(ffn, ExpertsConfig)
    ffn = replace(ffn, n_experts=EXPERTS, size=32, router=replace(ffn.router, top_k=TOP))
    ffn = replace(ffn, shared_size=32 if ffn.shared_size else 0)
    others: tuple[Any, ...] = (replace(last, attention=attention_of(name, last.attention), ffn=ffn),) * 2
    if isinstance(first.attention, DeltaNetConfig):
        small = replace(first.attention, n_key_heads=2, key_dim=32, n_value_heads=4, value_dim=64)
        others = (replace(first, attention=small, ffn=ffn), others[0])
    elif isinstance(first.attention, LatentAttentionConfig):
        assert isinstance(first.ffn, FfnConfig)
        dense = replace(first, attention=others[0].attention, ffn=replace(first.ffn, size=64))
        others = (dense, *others)
    return replace(config, d_model=256, vocab_size=1024, layers=others)


def attention_of(name: str, given: Any) -> Any:
    if isinstance(given, LatentAttentionConfig):
        small = replace(given, n_heads=4, latents=128, plain_dim=32, value_dim=64)
        return replace(small, q_latents=None if given.q_latents is None else 64)
    assert isinstance(given, AttentionConfig) and given.rope is not None
    rope = replace(given.rope, dim=min(given.rope.dim, 64))
    return replace(given, n_heads=4, n_kv_heads=4 if name == "olmoe-1b-7b" else 2, head_dim=64, rope=rope)
