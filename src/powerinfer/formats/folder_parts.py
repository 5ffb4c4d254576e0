"""The parts of a `ModelConfig` that families of Hugging Face folders have in common, read from config.json."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from powerinfer.config import (
    MIXED_ACTIVATIONS,
    AttentionConfig,
    AttentionKind,
    ExpertsConfig,
    FfnConfig,
    FfnKind,
    LayerConfig,
    ModelConfig,
    RopeConfig,
    RouterConfig,
)
from powerinfer.formats import layout
from powerinfer.formats.family import GATED, MIXED_ACT, Folder
from powerinfer.formats.fields import Fields
from powerinfer.formats.folder_rope import GLOBAL, LOCAL, read_rope
from powerinfer.formats.mapped import shown
from powerinfer.formats.tensors import MadeTensor


def read_plain(family: Folder, fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    """The configuration of a family whose layers differ in their windows and FFNs alone."""
    heads = read_heads(family, fields, config)
    attention = replace(add_biases(family, fields, heads), rope=read_rope(family, fields, config, heads))
    windows = family.windows(fields, n_layers) if family.windows is not None else [None] * n_layers
    ffns = family.ffns(family, fields, n_layers) if family.ffns is not None else [read_ffn(family, fields)] * n_layers
    return add_layers(family, config, [replace(attention, window=window) for window in windows], ffns)


def add_layers(
    family: Folder, config: ModelConfig, attentions: Iterable[AttentionKind], ffns: Iterable[FfnKind]
) -> ModelConfig:
    """The configuration with these layers, one of each for a layer."""
    pairs = zip(attentions, ffns, strict=True)
    layers = tuple(LayerConfig(attention, ffn, norms=family.norms) for attention, ffn in pairs)
    return replace(config, layers=layers, norm=family.norm)


def change_attention(config: ModelConfig, **changes: Any) -> ModelConfig:
    """The configuration with other settings of the attention of every layer."""
    layers = []
    for layer in config.layers:
        assert isinstance(layer.attention, AttentionConfig)
        layers.append(replace(layer, attention=replace(layer.attention, **changes)))
    return replace(config, layers=tuple(layers))


def plain_norms(config: ModelConfig) -> dict[str, MadeTensor]:
    """Weights of norms that a family's files do not have: ones, by canonical name."""
    unit = np.ones(config.d_model, "<f4").view(np.uint8)
    names = ["final_norm", *(f"layers.{at}.{part}_norm" for at in range(config.n_layers) for part in ("attn", "ffn"))]
    return {name: MadeTensor("F32", (config.d_model,), (), lambda: unit) for name in names}


# --- attention -------------------------------------------------------------------------------------------------------


def read_heads(family: Folder, fields: Fields, config: ModelConfig) -> AttentionConfig:
    """Attention with the heads of a family whose layers have as many."""
    n_heads = fields.integer("num_attention_heads", 1, layout.MAX_HEADS)
    kv_default = {} if family.kv_heads_stated else {"default": n_heads}
    kv_heads = fields.integer("num_key_value_heads", 1, layout.MAX_HEADS, **kv_default)
    return AttentionConfig(n_heads, kv_heads, _head_dim(family, fields, config.d_model, n_heads))


def _head_dim(family: Folder, fields: Fields, d_model: int, n_heads: int) -> int:
    if fields.has("head_dim") and family.other_head_dim:
        return int(fields.integer("head_dim", 2, layout.MAX_HEAD_DIM))
    if d_model % n_heads or d_model // n_heads > layout.MAX_HEAD_DIM or d_model // n_heads < 2:
        raise fields.bad("num_attention_heads", f"is {n_heads}, which does not divide hidden_size {d_model} well")
    if not family.other_head_dim:
        fields.only("head_dim", d_model // n_heads)
    return d_model // n_heads


def add_biases(family: Folder, fields: Fields, heads: AttentionConfig) -> AttentionConfig:
    """Attention with the biases and the norms of q and k that the family has."""
    qkv, o = (key is not None and fields.flag(key, False) for key in family.biases)
    return replace(heads, qkv_bias=qkv, o_bias=o, qk_norm=family.qk_norm)


def read_window(fields: Fields, layers: int) -> list[int | None]:
    """The window that `sliding_window` states, in all layers."""
    return [fields.integer("sliding_window", 1, layout.MAX_CONTEXT, None)] * layers


def read_window_by_type(fields: Fields, layers: int) -> list[int | None]:
    """The window of all layers, or of those that `layer_types` names: `transformers` then has the class Ministral."""
    windows = read_window(fields, layers)
    if not fields.has("layer_types"):
        return windows
    kinds = read_layer_types(fields, layers)
    return [window if kind == LOCAL else None for window, kind in zip(windows, kinds, strict=True)]


def read_switched_window(fields: Fields, layers: int) -> list[int | None]:
    """A window that is off unless `use_sliding_window` says otherwise."""
    window = fields.integer("sliding_window", 1, layout.MAX_CONTEXT, None)
    if not fields.flag("use_sliding_window", False):
        window = None
    first = fields.integer("max_window_layers", 0, layout.MAX_CONTEXT, 28)
    if not fields.has("layer_types"):
        return [window if layer >= first else None for layer in range(layers)]
    return [window if kind == LOCAL else None for kind in read_layer_types(fields, layers)]


def refuse_window(fields: Fields, layers: int) -> list[int | None]:
    """No window; a file that asks for one is refused."""
    fields.only("use_sliding_window", False)
    return [None] * layers


def read_layer_types(
    fields: Fields, layers: int, interval: int = 1, other: str = LOCAL, default: Sequence[str] = ()
) -> Sequence[str]:
    """The kind of each layer's attention: `other`, or global.

    default: the kinds without `layer_types`; if it is empty, every `interval`-th layer is global.
    """
    kinds = fields.get("layer_types", None)
    if kinds is None:
        return default or [other if (layer + 1) % interval else GLOBAL for layer in range(layers)]
    if type(kinds) is not list or len(kinds) != layers:
        raise fields.bad("layer_types", f"is {shown(kinds)}, not a kind for every layer")
    strange = [kind for kind in kinds if kind not in (GLOBAL, other)]
    if strange:
        raise fields.bad("layer_types", f"holds {shown(strange[0])}, which is not supported")
    return kinds


def read_switches(fields: Fields, key: str, layers: int, default: int) -> list[int]:
    """A list of 0 or 1 for every layer."""
    values = fields.get(key, None)
    if values is None:
        return [default] * layers
    if type(values) is not list or len(values) != layers or any(type(one) is not int or one >> 1 for one in values):
        raise fields.bad(key, f"is {shown(values)}, not 0 or 1 for every layer")
    return values


def local_ropes(
    family: Folder, fields: Fields, config: ModelConfig, types: Sequence[str], unrotated: bool = True
) -> list[AttentionConfig]:
    """The attention of layers of these types; unrotated: positions are not rotated in global ones."""
    heads = add_biases(family, fields, read_heads(family, fields, config))
    ropes = dict.fromkeys((GLOBAL, LOCAL), read_rope(family, fields, config, heads))
    kinds = attention_kinds(fields, heads, ropes)
    if unrotated:
        kinds[GLOBAL] = replace(kinds[GLOBAL], rope=None)
    return [kinds[kind] for kind in types]


def attention_kinds(
    fields: Fields, attention: AttentionConfig, ropes: dict[str, RopeConfig]
) -> dict[str, AttentionConfig]:
    """Attention with a window and without, each with its rotary embedding."""
    window = fields.integer("sliding_window", 1, layout.MAX_CONTEXT, None)
    windows = {GLOBAL: None, LOCAL: window}
    return {kind: replace(attention, rope=rope, window=windows[kind]) for kind, rope in ropes.items()}


def sharing_keys(fields: Fields, attentions: Sequence[AttentionConfig], first: int) -> list[AttentionConfig]:
    """Attention of layers of which those from `first` on read the keys and values of the last one before that has a
    window, as they have, or none."""
    sources = {attention.window is None: layer for layer, attention in enumerate(attentions[:first])}
    if any((attention.window is None) not in sources for attention in attentions[first:]):
        raise fields.bad("layer_types", "has no layer whose keys and values later ones of its kind could read")
    sharing = [
        replace(attention, kv_from=sources[attention.window is None], keys_as_values=False)
        for attention in attentions[first:]
    ]
    return [*attentions[:first], *sharing]


# --- FFNs ------------------------------------------------------------------------------------------------------------


def read_ffn_size(fields: Fields) -> int:
    """Neurons of a dense FFN."""
    return int(fields.integer("intermediate_size", 1, layout.MAX_WIDTH))


def read_activation(family: Folder, fields: Fields) -> str:
    """The activation of FFNs."""
    key = family.key("hidden_act")
    name = fields.text(key)
    if name not in family.activations:
        raise fields.bad(key, f"is {shown(name)}; of this family only {', '.join(family.activations)} is supported")
    return family.activations[name]


def read_mixed_activation(fields: Fields) -> str:
    """The activation behind the convolutions of linear attention, that of FFNs unless the file states another."""
    stated = fields.text(MIXED_ACT, fields.text("hidden_act"))
    if (mixed := GATED.get(stated, "")) in MIXED_ACTIVATIONS:
        return mixed
    raise fields.bad(
        MIXED_ACT if fields.has(MIXED_ACT) else "hidden_act",
        f"is {shown(stated)}, also behind the convolution of linear attention, as in transformers; only "
        f"{', '.join(MIXED_ACTIVATIONS)} are supported there: give {MIXED_ACT} if the model has one of them",
    )


def read_ffn(family: Folder, fields: Fields) -> FfnConfig:
    """A dense FFN."""
    bias = family.mlp_bias and fields.flag("mlp_bias", False)
    return FfnConfig(read_ffn_size(fields), read_activation(family, fields), gated=family.gated, bias=bias)


def read_experts(family: Folder, fields: Fields, count: str, size: str, **router: Any) -> ExpertsConfig:
    """Experts whose number and size are in these keys; transformers 5 may call the number `num_local_experts`.

    router: fields of `RouterConfig`.
    """
    n_experts = fields.integer("num_local_experts", 1, layout.MAX_EXPERTS, None)
    if n_experts is None or fields.has(count):
        n_experts = fields.integer(count, 1, layout.MAX_EXPERTS)
    top_k = fields.integer("num_experts_per_tok", 1, n_experts)
    activation = read_activation(family, fields)  # drelu: TurboSparse-Mixtral
    neurons = fields.integer(size, 1, layout.MAX_WIDTH)
    return ExpertsConfig(n_experts, neurons, RouterConfig(top_k, **router), activation)


def read_local_experts(family: Folder, fields: Fields, n_layers: int) -> Sequence[FfnKind]:
    """Experts in all layers, of the size that dense FFNs have elsewhere, with weights that add up to 1."""
    return [read_experts(family, fields, "num_local_experts", "intermediate_size")] * n_layers


def read_qwen_experts(family: Folder, fields: Fields, n_layers: int, shared: bool = True) -> Sequence[FfnKind]:
    """Experts in every `decoder_sparse_step`-th layer that is not one of `mlp_only_layers`; shared: beside another one
    that a gate of its own weighs."""
    normalise = fields.flag("norm_topk_prob", False)
    experts = read_experts(family, fields, "num_experts", "moe_intermediate_size", normalise=normalise)
    if shared:
        size = fields.integer("shared_expert_intermediate_size", 1, layout.MAX_WIDTH)
        experts = replace(experts, shared_size=size, shared_weight=True)
    interval = fields.integer("decoder_sparse_step", 1, layout.MAX_LAYERS, 1)
    without = fields.get("mlp_only_layers", None) or []
    if type(without) is not list or not all(type(layer) is int for layer in without):
        raise fields.bad("mlp_only_layers", f"is {shown(without)}, not a list of layers")
    dense = [bool((layer + 1) % interval) or layer in without for layer in range(n_layers)]
    return [FfnConfig(read_ffn_size(fields), experts.activation) if one else experts for one in dense]


def read_deepseek_experts(family: Folder, fields: Fields, n_layers: int, sigmoid: bool = True) -> Sequence[FfnKind]:
    """Experts as of DeepSeek, behind the first layers; sigmoid: V3's router, whose scores are corrected, else V2's."""
    groups = fields.integer("n_group", 1, layout.MAX_EXPERTS, 1)
    top_groups = fields.integer("topk_group", 1, groups, 1)
    if not sigmoid:
        method = fields.text("topk_method", "greedy")
        if method not in ("greedy", "group_limited_greedy"):
            raise fields.bad("topk_method", f"is {shown(method)}, which this engine does not support")
        groups, top_groups = (groups, top_groups) if method != "greedy" else (1, 1)
        fields.only("norm_topk_prob", False)  # which the class does not look at
    experts = read_experts(
        family,
        fields,
        "n_routed_experts",
        "moe_intermediate_size",
        scoring="sigmoid" if sigmoid else "softmax",
        normalise=fields.flag("norm_topk_prob", False),
        scale=fields.number("routed_scaling_factor", 1e-6, layout.MAX_SCALE, 1.0),
        correction=sigmoid,
        groups=groups,
        top_groups=top_groups,
        group_best=2 if sigmoid and groups > 1 else 1,
    )
    shared = fields.integer("n_shared_experts", 0, layout.MAX_EXPERTS)
    experts = replace(experts, shared_size=shared * experts.size)
    first = fields.integer("first_k_dense_replace", 0, layout.MAX_LAYERS)
    dense = FfnConfig(read_ffn_size(fields), experts.activation)
    return [dense if kind == "dense" else experts for kind in read_mlp_types(fields, n_layers, first)]


def read_mlp_types(fields: Fields, n_layers: int, first: int) -> list[str]:
    """Whether each layer's FFN is "dense", as the first ones are where the file does not say, or "sparse": experts."""
    types: Any = fields.get("mlp_layer_types", None)
    if types is None:
        types = ["dense" if layer < first else "sparse" for layer in range(n_layers)]
    if type(types) is not list or len(types) != n_layers or any(kind not in ("dense", "sparse") for kind in types):
        raise fields.bad("mlp_layer_types", f"is {shown(types)}, not dense or sparse for every layer")
    return [str(kind) for kind in types]
