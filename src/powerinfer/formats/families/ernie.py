"""ERNIE 4.5, dense and with experts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from powerinfer.config import ExpertsConfig, FfnKind, ModelConfig, RouterConfig
from powerinfer.formats import layout
from powerinfer.formats.family import EXPERTS_NAMES, GLM_EXPERTS, Folder, Gguf
from powerinfer.formats.fields import Fields
from powerinfer.formats.folder_parts import read_ffn, read_plain


def _read(family: Folder, fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    fields.only("use_bias", False)
    return read_plain(family, fields, config, n_layers)


def _read_experts(family: Folder, fields: Fields, n_layers: int) -> Sequence[FfnKind]:
    """Experts in every `moe_layer_interval`-th layer from one on up to another."""
    dense = read_ffn(family, fields)
    n_experts = fields.integer("moe_num_experts", 1, layout.MAX_EXPERTS)
    size = fields.integer("moe_intermediate_size", 1, layout.MAX_WIDTH)
    router = RouterConfig(fields.integer("moe_k", 1, n_experts), correction=True)
    shared = size * fields.integer("moe_num_shared_experts", 0, layout.MAX_EXPERTS)
    experts = ExpertsConfig(n_experts, size, router, dense.activation, shared_size=shared)
    interval = fields.integer("moe_layer_interval", 1, layout.MAX_LAYERS, 1)
    first = fields.integer("moe_layer_start_index", 0, layout.MAX_LAYERS)
    last = fields.integer("moe_layer_end_index", -1, layout.MAX_LAYERS, -1)
    last = n_layers - 1 if last < 0 else last
    sparse = [first <= layer <= last and (layer + 1) % interval == 0 for layer in range(n_layers)]
    return [experts if routed else dense for routed in sparse]


_AROUND_HEAD = {"emb_norm": "enorm", "hidden_norm": "hnorm", "linear_proj": "eh_proj"}


def _head_name(name: str, _: Mapping[str, Any]) -> tuple[int, str] | None:
    """A draft head is a dense layer, `mtp_block`; the norm behind it is the model's, as in Baidu's FastDeploy."""
    match = re.fullmatch(r"model\.mtp_(\w+)\.(\d{1,9})\.(.+)", name)
    if match is None:
        return None
    around = _AROUND_HEAD.get(match[1], match[1])
    return int(match[2]), match[3] if match[1] == "block" else f"{around}.{match[3]}"


_DENSE = Folder(
    "ernie4_5", ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"), _read, replaces_code=True,
    defaults={
        "vocab_size": 103424, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 18,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072,
        "rope_theta": 5e5, "hidden_act": "silu", "tie_word_embeddings": True,
    },
    interleaved=True, biases=(None, None),
)  # fmt: skip

FOLDERS = (
    _DENSE,
    replace(
        _DENSE, model_type="ernie4_5_moe", classes=("Ernie4_5_MoeForCausalLM",),
        defaults={
            "vocab_size": 103424, "hidden_size": 2560, "intermediate_size": 12288, "num_hidden_layers": 28,
            "num_attention_heads": 20, "num_key_value_heads": 4, "max_position_embeddings": 131072,
            "hidden_act": "silu", "tie_word_embeddings": True, "moe_num_experts": 64, "moe_k": 6,
            "moe_intermediate_size": 1536, "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "rope_theta": 5e5,
        },
        ffns=_read_experts, head_name=_head_name,
        names=EXPERTS_NAMES.extended(
            GLM_EXPERTS | {"router_correction": "mlp.moe_statics.e_score_correction"}
        ),
    ),
)  # fmt: skip
GGUFS = (
    Gguf("ernie4_5", "silu", interleaved=True),
    Gguf("ernie4_5-moe", "silu", interleaved=True, experts=RouterConfig(1, correction=True)),
)
