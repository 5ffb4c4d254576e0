"""Cohere's models of experts (Command A+, North Mini Code), whose shared expert and the others are averaged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from powerinfer.config import AttentionConfig, FfnConfig, FfnKind, ModelConfig
from powerinfer.formats import layout
from powerinfer.formats.families import cohere2
from powerinfer.formats.family import EXPERTS_NAMES, GLM_EXPERTS, SIGMOIDS, Folder, Gguf
from powerinfer.formats.fields import Fields
from powerinfer.formats.folder_parts import add_layers, local_ropes, read_experts, read_layer_types, read_mlp_types
from powerinfer.formats.folder_rope import GLOBAL, LOCAL
from powerinfer.formats.mapped import shown


def _read(family: Folder, fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    """The norm is RMS where its epsilon is stated; positions are rotated in the layers with a window, and in dense ones
    unless these have windows of a pattern of their own."""
    fields.integer("sliding_window", 1, layout.MAX_CONTEXT)
    dense = [kind == "dense" for kind in read_mlp_types(fields, n_layers, fields.integer(_FIRST, 0, n_layers, 0))]
    types, turning = _read_types(fields, n_layers)
    attentions = local_ropes(family, fields, config, types, unrotated=False)
    attentions = [
        heads if heads.window is not None or (turning and is_dense) else replace(heads, rope=None)
        for heads, is_dense in zip(attentions, dense, strict=True)
    ]
    config = add_layers(family, config, attentions, _read_ffns(family, fields, dense))
    average = fields.text("shared_expert_combination_strategy")
    if average not in ("average", "sum"):
        raise fields.bad("shared_expert_combination_strategy", f"is {shown(average)}; only average or sum is supported")
    config = cohere2.make_parallel(fields, config)
    config = config if average == "sum" else average_experts(config)
    epsilon = fields.number("rms_norm_eps", 1e-12, 0.1, None)
    return config if epsilon is None else replace(config, norm="rms", norm_eps=float(epsilon))


_FIRST = "first_k_dense_replace"


def _read_types(fields: Fields, n_layers: int) -> tuple[Sequence[str], bool]:
    """The kind of each layer's attention, and whether positions are rotated in all dense layers."""
    first = fields.integer(_FIRST, 0, n_layers, 0)
    of_dense, interval = (
        fields.integer(key, 1, layout.MAX_LAYERS)
        for key in ("prefix_dense_sliding_window_pattern", "sliding_window_pattern")
    )
    places = [(layer + 1, of_dense) if layer < first else (layer + 1 - first, interval) for layer in range(n_layers)]
    pattern = [LOCAL if place % every else GLOBAL for place, every in places]
    return read_layer_types(fields, n_layers, default=pattern), of_dense == 1


def _read_ffns(family: Folder, fields: Fields, dense: Sequence[bool]) -> list[FfnKind]:
    scoring = fields.text("expert_selection_fn")
    if scoring not in ("softmax", "sigmoid"):
        raise fields.bad("expert_selection_fn", f"is {shown(scoring)}; only softmax or sigmoid is supported")
    normalise = fields.flag("norm_topk_prob") or scoring == "softmax"
    experts = read_experts(family, fields, "num_experts", "intermediate_size", scoring=scoring, normalise=normalise)
    shared = fields.integer("num_shared_experts", 0, layout.MAX_EXPERTS) * experts.size
    if shared > layout.MAX_WIDTH:
        raise fields.bad("num_shared_experts", f"times intermediate_size is {shared}, which is absurd")
    experts = replace(experts, shared_size=shared)
    size = fields.integer("prefix_dense_intermediate_size", 1, layout.MAX_WIDTH, experts.size)
    return [FfnConfig(size, experts.activation) if is_dense else experts for is_dense in dense]


def average_experts(config: ModelConfig) -> ModelConfig:
    """The configuration with half of what experts and their shared one add."""
    layers = [
        replace(layer, ffn_factors=(1.0, 0.5)) if getattr(layer.ffn, "shared_size", 0) else layer
        for layer in config.layers
    ]
    return replace(config, layers=tuple(layers))


def _change(fields: Fields, heads: Sequence[AttentionConfig]) -> list[AttentionConfig]:
    """Heads without rotation in layers that have no window, unless these are dense: every fourth, from the first, where
    the file does not say which."""
    first = fields.integer("leading_dense_block_count", 0, len(heads))
    key = "attention.sliding_window_pattern"
    if type(fields.peek(key)) is not list:
        interval = fields.integer(key, 1, layout.MAX_LAYERS, 4)
        window = fields.integer("attention.sliding_window", 1, layout.MAX_CONTEXT)
        heads = [replace(one, window=window if at % interval else None) for at, one in enumerate(heads)]
    return [one if one.window is not None or at < first else replace(one, rope=None) for at, one in enumerate(heads)]


FOLDERS = (
    Folder(
        "cohere2_moe", ("Cohere2MoeForCausalLM",), _read,
        defaults=cohere2.DEFAULTS | {
            "head_dim": 128, "num_experts_per_tok": 2, "num_experts": 8, "num_shared_experts": 0,
            "shared_expert_combination_strategy": "average", "expert_selection_fn": "softmax", "norm_topk_prob": True,
            "prefix_dense_sliding_window_pattern": 1, "sliding_window_pattern": 4,
        },
        keys={"rms_norm_eps": "layer_norm_eps"}, interleaved=True, norm="layer",
        names=EXPERTS_NAMES.extended(GLM_EXPERTS),
    ),
)  # fmt: skip
GGUFS = (
    Gguf(
        "cohere2moe", "silu", norm="stated", interleaved=True, parallel=True, scaled_logits=True,
        experts=replace(SIGMOIDS, normalise=False), averaged=True, change=_change,
    ),
)  # fmt: skip
