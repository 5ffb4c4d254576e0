"""Configurations of models whose layers are alike, written flat."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from powerinfer.config import AttentionConfig, FfnConfig, LayerConfig, ModelConfig, RopeConfig, uniform

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


def _changed(layer: LayerConfig, changes: dict[str, Any]) -> LayerConfig:
    left = dict(changes)
    for part, kind in PARTS.items():
        own = {name: left.pop(name) for name in [*left] if name in _names(kind)}
        layer = replace(layer, **{part: replace(getattr(layer, part), **own)})
    return replace(layer, **left)


def _names(kind: type) -> set[str]:
    return {field.name for field in fields(kind)}
