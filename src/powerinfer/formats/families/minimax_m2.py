"""MiniMax-M2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from powerinfer.config import FfnKind, ModelConfig
from powerinfer.formats.families.llama import MIXTRAL_NAMES
from powerinfer.formats.family import LLAMA_DEFAULTS, LLAMA_NAMES, SIGMOIDS, Folder, Gguf
from powerinfer.formats.fields import Fields
from powerinfer.formats.folder_parts import read_experts, read_heads, read_plain


def _read(family: Folder, fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    for key, only in (("scoring_func", "sigmoid"), ("use_routing_bias", True), ("use_qk_norm", True)):
        fields.only(key, only)
    fields.only("qk_norm_type", "per_layer")
    fields.only("shared_intermediate_size", 0)
    dim = read_heads(family, fields, config).head_dim
    rotated = fields.integer("rotary_dim", 2, dim, dim)  # as the published files say it
    return read_plain(replace(family, partial=rotated / dim), fields, config, n_layers)


def _read_experts(family: Folder, fields: Fields, n_layers: int) -> Sequence[FfnKind]:
    size = "intermediate_size"
    return [read_experts(family, fields, "num_local_experts", size, scoring="sigmoid", correction=True)] * n_layers


FOLDERS = (
    Folder(
        "minimax_m2", ("MiniMaxM2ForCausalLM",), _read, replaces_code=True,
        defaults=LLAMA_DEFAULTS | {
            "vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 62,
            "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 196608,
            "rope_theta": 5e6, "num_local_experts": 256, "num_experts_per_tok": 8,
        },
        biases=(None, None), qk_norm="width", ffns=_read_experts,
        names=LLAMA_NAMES.extended(
            MIXTRAL_NAMES | {"router_correction": "block_sparse_moe.e_score_correction"}
        ),
    ),
)  # fmt: skip
GGUFS = (Gguf("minimax-m2", "silu", qk_norm="width", partial=True, experts=SIGMOIDS),)
