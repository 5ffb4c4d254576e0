"""Gated DeltaNet beside gated attention: Qwen3-Next, Qwen3.5 and Qwen3.6, with experts or without."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from powerinfer.config import (
    AttentionKind,
    DeltaNetConfig,
    ExpertsConfig,
    FfnKind,
    GatedAttentionConfig,
    ModelConfig,
)
from powerinfer.formats import layout
from powerinfer.formats.family import (
    EXPERTS_NAMES,
    LLAMA_DEFAULTS,
    NORMALISED,
    SECOND_NORM,
    Folder,
    Gguf,
    Tensors,
)
from powerinfer.formats.fields import Fields
from powerinfer.formats.folder_parts import (
    add_layers,
    read_ffn,
    read_heads,
    read_layer_types,
    read_mixed_activation,
    read_qwen_experts,
)
from powerinfer.formats.folder_rope import GLOBAL, read_rope
from powerinfer.formats.source import ONLY_TEXT, Fused, Names, SingleTensor

_LINEAR = "linear_attention"


def _read(family: Folder, fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    fields.only("attention_bias", False)
    heads = read_heads(family, fields, config)
    rope = read_rope(family, fields, config, heads)
    attention = replace(heads, rope=rope, qk_norm="head").gated()
    delta = DeltaNetConfig(
        fields.integer("linear_num_key_heads", 1, layout.MAX_HEADS),
        fields.integer("linear_key_head_dim", 1, layout.MAX_HEAD_DIM),
        fields.integer("linear_num_value_heads", 1, layout.MAX_HEADS),
        fields.integer("linear_value_head_dim", 1, layout.MAX_HEAD_DIM),
        fields.integer("linear_conv_kernel_dim", 1, layout.MAX_HEAD_DIM),
        activation=read_mixed_activation(fields),
    )
    interval = fields.integer("full_attention_interval", 1, layout.MAX_LAYERS, 4)
    kinds: dict[str, AttentionKind] = {_LINEAR: delta, GLOBAL: attention}
    ffns = family.ffns(family, fields, n_layers) if family.ffns is not None else [read_ffn(family, fields)] * n_layers
    types = read_layer_types(fields, n_layers, interval, _LINEAR)
    return add_layers(family, config, [kinds[kind] for kind in types], ffns)


def _read_normalised_experts(family: Folder, fields: Fields, n_layers: int) -> Sequence[FfnKind]:
    fields.only("norm_topk_prob", True)  # the class has no such switch
    return read_qwen_experts(family, fields, n_layers)


_RENAMED = {".linear_attn.A_log": ".linear_attn.decay.weight", ".linear_attn.dt_bias": ".linear_attn.dt.bias"}


def _rename(stored: Tensors) -> list[str]:
    """Names as of other layers, without pictures, which a note is about."""
    all_tensors, pictures = dict(stored), False
    stored.clear()
    for name, tensor in all_tensors.items():
        if name.startswith(("model.visual.", "visual.")):
            pictures = True
            continue
        name = name.replace("model.language_model.", "model.", 1)
        for old, new in _RENAMED.items():
            name = name.replace(old, new)
        together = name.endswith((".mlp.experts.gate_up_proj", ".mlp.experts.down_proj"))
        stored[f"{name}.weight" if together else name] = tensor
    return [ONLY_TEXT] * pictures


_MTP_NAMES = {
    "fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head.norm",
}  # fmt: skip
"""Modules below `mtp`, beside its layers -> those of a layer of GLM-4.5 and DeepSeek-V3."""


def _head_name(name: str, _: Mapping[str, Any]) -> tuple[int, str] | None:
    match = re.fullmatch(r"(?:model\.)?mtp\.(?:layers\.(\d{1,9})\.)?(.*)", name)
    if match is None:
        return None
    first, dot, rest = match[2].partition(".")
    return int(match[1] or 0), match[2] if match[1] else f"{_MTP_NAMES.get(first, first)}{dot}{rest}"


_NAMES = EXPERTS_NAMES.extended(
    {"q_gate": "self_attn.q_proj", "delta_conv": "linear_attn.conv1d", "delta_o": "linear_attn.out_proj"}
    | {f"delta_{name}": f"linear_attn.{name}" for name in ("decay", "dt", "norm")}
    | {f"delta_{name}": f"linear_attn.in_proj_{name}" for name in "zba"}
    | {f"delta_{name}": "linear_attn.in_proj_qkv" for name in "qkv"}
)
_EXPERTS_TOGETHER = _NAMES.extended(
    {"experts_down": "mlp.experts.down_proj"}
    | dict.fromkeys(("experts_gate", "experts_up"), "mlp.experts.gate_up_proj")
)
_NEXT_NAMES = _NAMES.extended(
    {f"delta_{name}": "linear_attn.in_proj_qkvz" for name in "qkvz"}
    | {f"delta_{name}": "linear_attn.in_proj_ba" for name in "ba"}
)


def _find_names(config: ModelConfig, stored: Mapping[str, SingleTensor]) -> Names:
    return _EXPERTS_TOGETHER if "model.layers.0.mlp.experts.down_proj.weight" in stored else _NAMES


_QKV = ("delta_q", "delta_k", "delta_v")


def _fused(config: ModelConfig, names: Names) -> list[Fused]:
    gated = [layer for layer in config.attentions if isinstance(layer, GatedAttentionConfig)]
    fused = [Fused(("q", "q_gate"), attention.n_heads) for attention in gated]
    ffn = config.layers[0].ffn
    if isinstance(ffn, ExpertsConfig) and "{}" not in names("layers.0.experts_gate"):
        fused.append(Fused(("experts_gate", "experts_up"), ffn.n_experts))
    return [*fused, Fused(_QKV)]


def _next_fused(config: ModelConfig, names: Names) -> list[Fused]:
    groups = [state.n_key_heads for state in config.states.values()][:1]
    inner = [Fused(parts, n) for parts in ((*_QKV, "delta_z"), ("delta_b", "delta_a")) for n in groups]
    return [*_fused(config, names)[:-1], *inner]


_DEFAULTS = LLAMA_DEFAULTS | {
    "head_dim": 256, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "norm_topk_prob": True,
}  # fmt: skip
_NEXT = Folder(
    "qwen3_next", ("Qwen3NextForCausalLM",), _read,
    defaults=_DEFAULTS | {"num_key_value_heads": 2, "num_experts": 512, "num_experts_per_tok": 10}, partial=0.25,
    mixed_act=True, ffns=read_qwen_experts, names=_NEXT_NAMES, fused=_next_fused, rename=_rename, norms_less_one=True,
    head_name=_head_name,
)
_QWEN35 = replace(
    _NEXT, model_type="qwen3_5_text", classes=("Qwen3_5ForCausalLM",), vision_class="Qwen3_5ForConditionalGeneration",
    defaults=_DEFAULTS | {"num_key_value_heads": 4}, ffns=None, names=_NAMES, fused=_fused,
)
_QWEN35_EXPERTS = replace(
    _QWEN35, model_type="qwen3_5_moe_text", classes=("Qwen3_5MoeForCausalLM",),
    vision_class="Qwen3_5MoeForConditionalGeneration",
    defaults=_DEFAULTS | {"num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8},
    ffns=_read_normalised_experts, find_names=_find_names,
)

FOLDERS = (_NEXT, _QWEN35, _QWEN35_EXPERTS)
_GGUF = Gguf("qwen3next", "silu", qk_norm="head", partial=True, experts=NORMALISED, delta=True, names=SECOND_NORM)
GGUFS = (
    _GGUF,
    replace(_GGUF, architecture="qwen35", experts=None, tiled=True),
    replace(_GGUF, architecture="qwen35moe", tiled=True),
)
