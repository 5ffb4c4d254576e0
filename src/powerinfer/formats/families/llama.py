"""Llama, and what shares its layers: Mistral, Mixtral, and the ReLU models SparseLM, ProSparse and Bamboo."""

from __future__ import annotations

from dataclasses import replace

from powerinfer.config import FfnConfig, ModelConfig
from powerinfer.formats import layout
from powerinfer.formats.family import LLAMA_DEFAULTS, LLAMA_NAMES, NORMALISED, Folder, Gguf
from powerinfer.formats.fields import Fields
from powerinfer.formats.folder_parts import (
    read_ffn_size,
    read_local_experts,
    read_plain,
    read_window,
    read_window_by_type,
)
from powerinfer.formats.source import keep_text

MIXTRAL_NAMES = {"router": "block_sparse_moe.gate"} | {
    f"experts_{part}": f"block_sparse_moe.experts.{{}}.{name}"
    for part, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
}


def _read_sparselm(family: Folder, fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    """SparseLM's class has ReLU whatever `hidden_act` says, and may have FFNs of another size, or without a gate."""
    fields.only("sparsity_use_hybrid_kernel", False)  # down is transposed then
    size = fields.integer("sparsity_new_intermediate_size", 1, layout.MAX_WIDTH, read_ffn_size(fields))
    bias = fields.flag("mlp_bias", False)
    ffn = FfnConfig(size, "relu", gated=fields.flag("sparsity_gated_mlp", True), bias=bias)
    return read_plain(replace(family, ffns=lambda *_: [ffn] * n_layers), fields, config, n_layers)


FOLDERS = (
    Folder("llama", ("LlamaForCausalLM",), defaults=LLAMA_DEFAULTS, mlp_bias=True),
    Folder(
        "mistral", ("MistralForCausalLM",), vision_class="Mistral3ForConditionalGeneration", rename=keep_text,
        defaults=LLAMA_DEFAULTS | {"sliding_window": 4096}, kv_heads_stated=True,
        biases=(None, None), windows=read_window_by_type,
    ),
    Folder(
        "mixtral", ("MixtralForCausalLM",),
        defaults={
            "hidden_act": "silu", "rope_theta": 1e6, "num_key_value_heads": 8, "num_local_experts": 8,
            "num_experts_per_tok": 2, "max_position_embeddings": 131072, "intermediate_size": 14336,
        },
        biases=(None, None), windows=read_window, ffns=read_local_experts, names=LLAMA_NAMES.extended(MIXTRAL_NAMES),
    ),
    Folder(
        "llama_sparse_relu",  # SparseLM
        ("SparseLlamaForCausalLM",), _read_sparselm, replaces_code=True, defaults=LLAMA_DEFAULTS,
    ),
    Folder(
        "sparsellama",  # ProSparse, whose class has the same name
        ("SparseLlamaForCausalLM",), replaces_code=True,
        defaults={"rms_norm_eps": 1e-6},  # a ProSparse model always states hidden_act
        other_head_dim=False, activations={"fatrelu": "fatrelu", "relu": "relu"}, mlp_bias=True,
    ),
    Folder(
        "bamboo",  # Bamboo and TurboSparse-Mistral
        ("BambooForCausalLM",), replaces_code=True,
        defaults=LLAMA_DEFAULTS | {"sliding_window": 4096, "num_key_value_heads": 8}, other_head_dim=False,
        biases=(None, None), windows=read_window_by_type, activations={"relu": "drelu"}, predictors=True,
    ),
)  # fmt: skip
GGUFS = (
    Gguf("llama", "silu", interleaved=True, experts=NORMALISED, published="relu"),  # with experts: Mixtral
    Gguf("bamboo", "drelu", interleaved=True, published="drelu"),
)
