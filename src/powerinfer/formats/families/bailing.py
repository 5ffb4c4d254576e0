"""Ling and Ring, up to their version 2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from powerinfer.config import FfnConfig, FfnKind, ModelConfig
from powerinfer.formats import layout
from powerinfer.formats.family import EXPERTS_NAMES, GLM_EXPERTS, NORMALISED, SIGMOIDS, Folder, Gguf, Tensors
from powerinfer.formats.fields import Fields
from powerinfer.formats.folder_parts import read_experts, read_ffn_size, read_plain
from powerinfer.formats.source import Fused

_SECOND = "BailingMoeV2ForCausalLM"


def _is_second(fields: Fields) -> bool:
    classes = fields.get("architectures", None)
    return classes == [_SECOND]


def _read(family: Folder, fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    for key in ("use_bias", "use_qkv_bias", "norm_head", "use_sliding_window"):
        fields.only(key, False)
    if not _is_second(fields):
        return read_plain(family, fields, config, n_layers)
    for key, only in (("use_qk_norm", True), ("score_function", "sigmoid"), ("scoring_func", "sigmoid")):
        fields.only(key, only)
    return read_plain(replace(family, partial=0.5, qk_norm="head"), fields, config, n_layers)


def _read_experts(family: Folder, fields: Fields, n_layers: int) -> Sequence[FfnKind]:
    """Experts beside a shared one, behind the first layers. The first version's router is Mixtral's, the second's that
    of DeepSeek-V3, with weights that add up to their factor. The weight of a single expert is its score."""
    if _is_second(fields):
        fields.only("norm_topk_prob", True)
        groups = fields.integer("n_group", 1, layout.MAX_EXPERTS, 8)
        experts = read_experts(
            family,
            fields,
            "num_experts",
            "moe_intermediate_size",
            scoring="sigmoid",
            normalise=fields.integer("num_experts_per_tok", 1, layout.MAX_EXPERTS) > 1,
            scale=fields.number("routed_scaling_factor", 1e-6, layout.MAX_SCALE, 1.0),
            correction=fields.flag("moe_router_enable_expert_bias", True),
            groups=groups,
            top_groups=fields.integer("topk_group", 1, groups, min(4, groups)),
            group_best=2 if groups > 1 else 1,
        )
    else:
        normalise = fields.flag("norm_topk_prob", True)
        experts = read_experts(family, fields, "num_experts", "moe_intermediate_size", normalise=normalise)
    shared = fields.integer("num_shared_experts", 0, layout.MAX_EXPERTS)
    size = fields.integer("moe_shared_expert_intermediate_size", 1, layout.MAX_WIDTH, experts.size)
    experts = replace(experts, shared_size=shared * size)
    first = fields.integer("first_k_dense_replace", 0, layout.MAX_LAYERS)
    dense = FfnConfig(read_ffn_size(fields), experts.activation)
    return [dense if layer < first else experts for layer in range(n_layers)]


def _rename(stored: Tensors) -> list[str]:
    """The name of the router's correction as that of a bias."""
    for name in [name for name in stored if name.endswith(".expert_bias")]:
        stored[name.removesuffix("_bias") + ".bias"] = stored.pop(name)
    return []


FOLDERS = (
    Folder(
        "bailing_moe", (_SECOND, "BailingMoeForCausalLM"), _read, replaces_code=True,
        defaults={
            "vocab_size": 157184, "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 20,
            "num_attention_heads": 16, "num_key_value_heads": 4, "hidden_act": "silu", "rms_norm_eps": 1e-6,
            "max_position_embeddings": 32768, "rope_theta": 6e5, "num_experts": 256, "num_shared_experts": 1,
            "num_experts_per_tok": 8, "moe_intermediate_size": 512, "first_k_dense_replace": 1,
        },
        biases=(None, None), ffns=_read_experts,
        names=replace(
            EXPERTS_NAMES.extended(
                GLM_EXPERTS
                | dict.fromkeys("qkv", "attention.query_key_value")
                | {"o": "attention.dense", "router_correction": "mlp.gate.expert"}
                | {f"{part}_norm": f"attention.{name}_layernorm" for part, name in (("q", "query"), ("k", "key"))}
            ),
            outer=EXPERTS_NAMES.outer | {"embed": "model.word_embeddings"},
        ),
        fused=(Fused(("q", "k", "v")),), rename=_rename, draft_names={"draft_norm": "final_layernorm"},
    ),
)  # fmt: skip
GGUFS = (
    Gguf("bailingmoe", "silu", interleaved=True, experts=NORMALISED),
    Gguf(
        "bailingmoe2", "silu", qk_norm="head", partial=True, experts=SIGMOIDS,
        draft_names={"draft_norm": "layer_output_norm"},
    ),
)
