"""Configurations of models: of layers that are alike, written flat, and small ones of large models' families."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from powerinfer.config import (
    AttentionConfig,
    AttentionKind,
    DeltaNetConfig,
    ExpertsConfig,
    FfnConfig,
    LatentAttentionConfig,
    LayerConfig,
    ModelConfig,
    RopeConfig,
    uniform,
)

PARTS = {"attention": AttentionConfig, "ffn": FfnConfig}


def changed(config: ModelConfig, **changes: Any) -> ModelConfig:
    """`config` with other values: fields of `ModelConfig`, and those of a layer or of its parts, in every layer."""
    config = replace(config, **{name: changes.pop(name) for name in [*changes] if name in _names(ModelConfig)})
    return replace(config, layers=tuple(_changed(layer, changes) for layer in config.layers))


def model_config(n_layers: int, size: int, rope: RopeConfig | None, **settings: Any) -> ModelConfig:
    """A model of `n_layers` layers of `size` neurons; settings as in `changed`."""
    model = {name: settings.pop(name) for name in [*settings] if name in _names(ModelConfig)}
    heads = (settings.pop(name) for name in ("n_heads", "n_kv_heads", "head_dim"))
    layers = uniform(n_layers, LayerConfig(AttentionConfig(*heads, rope), FfnConfig(size)))
    return changed(ModelConfig(layers=layers, **model), **settings)


def small(config: ModelConfig) -> ModelConfig:
    """Three layers of a model of experts, of each kind that it has, with few heads, experts and dimensions."""

    def layer(own: LayerConfig) -> LayerConfig:
        attention: AttentionKind
        rope = own.attention.rope and replace(own.attention.rope, dim=own.attention.rope.dim // 4)
        if isinstance(own.attention, DeltaNetConfig):
            attention = DeltaNetConfig(1, 16, 2, 16, own.attention.taps)
        elif isinstance(own.attention, LatentAttentionConfig):
            sizes = {"n_heads": 2, "latents": 64, "plain_dim": 32, "rope_dim": 16, "value_dim": 32}
            q_latents = own.attention.q_latents and 32
            scale = 2 * own.attention.scale  # a quarter of the dimensions
            attention = replace(own.attention, rope=rope, q_latents=q_latents, scale=scale, **sizes)  # type: ignore[arg-type]
        else:
            assert isinstance(own.attention, AttentionConfig)
            if rope is not None:
                rope = replace(rope, dim=4 * rope.dim * 32 // own.attention.head_dim)
            attention = replace(own.attention, n_heads=2, n_kv_heads=1, head_dim=32, rope=rope)
        if isinstance(own.ffn, ExpertsConfig):
            router = replace(own.ffn.router, top_k=min(8, own.ffn.router.top_k), groups=1, top_groups=1, group_best=1)
            ffn = replace(own.ffn, n_experts=8, size=32, shared_size=32 if own.ffn.shared_size else 0, router=router)
            return replace(own, attention=attention, ffn=ffn)
        return replace(own, attention=attention, ffn=FfnConfig(32))

    # of three layers with states one has attention; of DeepSeek-V3 the first ones have no experts
    some = config.layers[2:5] if config.states else (*config.layers[:1], *config.layers[-2:])
    layers = tuple(map(layer, some))
    return replace(config, d_model=64, vocab_size=1200, layers=layers)


def _changed(layer: LayerConfig, changes: dict[str, Any]) -> LayerConfig:
    left = dict(changes)
    for part, kind in PARTS.items():
        own = {name: left.pop(name) for name in [*left] if name in _names(kind)}
        layer = replace(layer, **{part: replace(getattr(layer, part), **own)})
    return replace(layer, **left)


def _names(kind: type) -> set[str]:
    return {field.name for field in fields(kind)}
