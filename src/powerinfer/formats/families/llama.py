"""Llama, and what shares its layers: Mistral, Mixtral, and the ReLU models ProSparse and Bamboo."""

from __future__ import annotations

from powerinfer.formats.family import LLAMA_DEFAULTS, LLAMA_NAMES, NORMALISED, Folder, Gguf
from powerinfer.formats.folder_parts import read_local_experts, read_window, read_window_by_type

MIXTRAL_NAMES = {"router": "block_sparse_moe.gate"} | {
    f"experts_{part}": f"block_sparse_moe.experts.{{}}.{name}"
    for part, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
}

FOLDERS = (
    Folder("llama", ("LlamaForCausalLM",), defaults=LLAMA_DEFAULTS, mlp_bias=True),
    Folder(
        "mistral", ("MistralForCausalLM",), defaults=LLAMA_DEFAULTS | {"sliding_window": 4096}, kv_heads_stated=True,
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
        "sparsellama",  # ProSparse
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
