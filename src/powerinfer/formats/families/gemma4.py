"""Gemma 4, dense and with experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from powerinfer.config import AttentionConfig, ExpertsConfig, FfnKind, ModelConfig, RouterConfig
from powerinfer.formats import layout
from powerinfer.formats.family import FOUR_NORMS, GATED, Folder, Gguf, Tensors
from powerinfer.formats.fields import Fields
from powerinfer.formats.folder_parts import (
    add_biases,
    add_layers,
    read_ffn,
    read_heads,
    read_layer_types,
    sharing_keys,
)
from powerinfer.formats.folder_rope import GLOBAL, LOCAL, read_rope
from powerinfer.formats.mapped import shown
from powerinfer.formats.source import Fused, Names, keep_text
from powerinfer.formats.tensors import MadeTensor

_ROPES = {
    LOCAL: {"rope_type": "default", "rope_theta": 1e4},
    GLOBAL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


def _read(family: Folder, fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    if fields.get("use_bidirectional_attention", None) not in (None, False, "vision"):
        raise fields.bad("use_bidirectional_attention", "is set for texts, which this engine does not support")
    inputs = fields.integer("hidden_size_per_layer_input", 0, layout.MAX_WIDTH, 0)
    rows = fields.integer("vocab_size_per_layer_input", 1, layout.MAX_VOCAB, 262144)
    first = n_layers - fields.integer("num_kv_shared_layers", 0, n_layers - 1, 0)
    types = [*read_layer_types(fields, n_layers, 6)[:-1], GLOBAL]  # as in transformers, whatever the last one is
    windows = {GLOBAL: None, LOCAL: fields.integer("sliding_window", 1, layout.MAX_CONTEXT)}
    ropes: Any = fields.get("rope_parameters", _ROPES)
    if type(ropes) is not dict or not set(ropes) >= set(types):
        raise fields.bad("rope_parameters", f"is {shown(ropes)}, not an object for every kind of attention")
    attentions = []
    for kind, heads in zip(types, _heads(family, fields, config, types), strict=True):
        part = Fields({"rope_parameters": ropes[kind]}, f"{fields.source}: {kind}")
        rope = read_rope(family, part, config, heads)
        attentions.append(replace(heads, rope=rope, window=windows[kind]))
    attentions = sharing_keys(fields, attentions, first)
    config = add_layers(family, config, attentions, _ffns(family, fields, n_layers, first))
    return replace(
        config,
        layers=tuple(replace(layer, out_scale=True) for layer in config.layers),
        layer_inputs=inputs,
        layer_input_rows=rows if inputs else 0,
        embedding_scale=float(np.sqrt(np.float32(config.d_model))),
        logit_cap=fields.number("final_logit_softcapping", 1e-6, layout.MAX_SCALE, None),
    )


def _heads(family: Folder, fields: Fields, config: ModelConfig, types: Sequence[str]) -> list[AttentionConfig]:
    """The heads of each layer: those without a window differ in keys of their own, or in an object for each layer."""
    local = replace(add_biases(family, fields, read_heads(family, fields, config)), scale=1.0, v_norm=True)
    shared = fields.flag("attention_k_eq_v", False)
    dim = fields.integer("global_head_dim", 2, layout.MAX_HEAD_DIM, 512)
    kv = fields.integer("num_global_key_value_heads", 1, layout.MAX_HEADS, None)
    kv = kv if shared and kv is not None else local.n_kv_heads
    usual = {GLOBAL: replace(local, head_dim=dim, n_kv_heads=kv, keys_as_values=shared), LOCAL: local}
    configs: Any = fields.get("per_layer_config", None)
    if configs is None:
        return [usual[kind] for kind in types]
    if type(configs) is not dict:
        raise fields.bad("per_layer_config", f"is {shown(configs)}, not an object")
    heads = []
    for layer, kind in enumerate(types):
        stated = configs.get(str(layer), {})
        if type(stated) is not dict:
            raise fields.bad("per_layer_config", f"has {shown(stated)} for layer {layer}, not an object")
        values = Fields(stated, f"{fields.source}: per_layer_config, layer {layer}")
        heads.append(
            replace(
                local,
                head_dim=values.integer("head_dim", 2, layout.MAX_HEAD_DIM, local.head_dim),
                n_kv_heads=values.integer("num_key_value_heads", 1, layout.MAX_HEADS, local.n_kv_heads),
                keys_as_values=usual[kind].keys_as_values,
            )
        )
        if values.unread():
            raise values.bad(shown(values.unread()[0])[1:-1], "is set, and this engine does not know what it means")
    return heads


def _ffns(family: Folder, fields: Fields, n_layers: int, first: int) -> Sequence[FfnKind]:
    """Dense FFNs, which are the shared expert of each layer where there are others beside it; from `first` on they may
    be twice as wide."""
    dense = read_ffn(family, fields)
    wide = replace(dense, size=2 * dense.size) if fields.flag("use_double_wide_mlp", False) else dense
    keys = ("num_experts", "top_k_experts", "moe_intermediate_size")
    if not fields.flag("enable_moe_block", False):
        for key in keys:
            fields.get(key, None)
        return [dense] * first + [wide] * (n_layers - first)
    if wide is not dense and first < n_layers:
        raise fields.bad("use_double_wide_mlp", "is set beside experts, which is not supported")
    n_experts = fields.integer("num_experts", 1, layout.MAX_EXPERTS)
    router = RouterConfig(fields.integer("top_k_experts", 1, n_experts), factors=True)
    size = fields.integer("moe_intermediate_size", 1, layout.MAX_WIDTH)
    experts = ExpertsConfig(n_experts, size, router, dense.activation, shared_size=dense.size, separate=True)
    return [experts] * n_layers


def drop_unused(config: ModelConfig, stored: Tensors, source: str) -> dict[str, MadeTensor]:
    """Nothing is made; keys and values of layers that read those of others are dropped, as in transformers."""
    parts = ("k_proj", "v_proj", "k_norm", "v_norm")
    unused = tuple(
        f".layers.{number}.self_attn.{part}.weight"
        for number, layer in enumerate(config.layers)
        if layer.heads.kv_from is not None
        for part in parts
    )
    for name in [name for name in stored if name.endswith(unused)]:
        del stored[name]
    return {}


def rename_parameters(ends: tuple[str, ...], stored: Tensors) -> list[str]:
    """Names as of other layers, of those with these ends, without what reads pictures and sound, which a note is
    about."""
    notes = keep_text(stored)
    for name in [name for name in stored if name.endswith(ends)]:
        stored[f"{name}.weight"] = stored.pop(name)
    return notes


_PARAMETERS = (
    ".layer_scalar", ".router.scale", ".router.per_expert_scale", ".experts.gate_up_proj", ".experts.down_proj",
)  # fmt: skip
"""The ends of the names of tensors that are parameters of their own, not weights of a module."""

INPUT_NAMES = replace(
    FOUR_NORMS,
    outer=FOUR_NORMS.outer
    | {
        "input_table": "model.embed_tokens_per_layer",
        "inputs_projection": "model.per_layer_model_projection",
        "inputs_norm": "model.per_layer_projection_norm",
    },
).extended(
    {
        "input_gate": "per_layer_input_gate",
        "input_out": "per_layer_projection",
        "input_norm": "post_per_layer_input_norm",
    }
)
"""Names with inputs of layers."""

_NAMES = INPUT_NAMES.extended(
    {
        "out_scale": "layer_scalar",
        **{f"shared_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
        "router": "router.proj",
        "router_scale": "router.scale",
        "router_factors": "router.per_expert_scale",
        "experts_norm": "pre_feedforward_layernorm_2",
        "shared_out_norm": "post_feedforward_layernorm_1",
        "experts_out_norm": "post_feedforward_layernorm_2",
        "experts_down": "experts.down_proj",
        **dict.fromkeys(("experts_gate", "experts_up"), "experts.gate_up_proj"),
    }
)


def _fused(config: ModelConfig, names: Names) -> list[Fused]:
    return [Fused(("experts_gate", "experts_up"), experts.n_experts) for experts in list(config.experts.values())[:1]]


def unscaled(fields: Fields, heads: Sequence[AttentionConfig]) -> float:
    """Queries and keys are normalised: scores are not scaled."""
    return 1.0


_TEXT = Folder(
    "gemma4_text", ("Gemma4ForCausalLM",), _read, vision_class="Gemma4ForConditionalGeneration",
    defaults={
        "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "sliding_window": 512,
        "hidden_size_per_layer_input": 256,
    },
    keys={"hidden_act": "hidden_activation"}, qk_norm="head",
    activations={"gelu_pytorch_tanh": "gelu_tanh"} | GATED, norms="both", names=_NAMES, fused=_fused,
    rename=partial(rename_parameters, _PARAMETERS), make=drop_unused,
)  # fmt: skip
FOLDERS = (
    _TEXT,
    replace(
        _TEXT, model_type="gemma4_unified_text", classes=("Gemma4UnifiedForCausalLM",),
        vision_class="Gemma4UnifiedForConditionalGeneration",
        defaults={**_TEXT.defaults, "max_position_embeddings": 262144, "sliding_window": 1024}
        | {"hidden_size_per_layer_input": 0},
    ),
)  # fmt: skip
GGUFS = (
    Gguf(
        "gemma4", "gelu_tanh", norms="both", qk_norm="head", v_norm=True, full_every=6, local_theta=10000.0,
        window_heads=True, scaled=True, score_scale=unscaled, logit_cap=30.0, experts=RouterConfig(1),
        separate_experts=True,
        layer_inputs=0, names={f"shared_{part}": f"ffn_{part}" for part in ("gate", "up", "down")},
    ),
)  # fmt: skip
