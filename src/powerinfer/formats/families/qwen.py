"""Qwen2 and Qwen3, dense and with experts."""

from __future__ import annotations

from functools import partial

from powerinfer.config import ModelConfig
from powerinfer.formats.family import EXPERTS_NAMES, LLAMA_DEFAULTS, NORMALISED, UNNORMALISED, Folder, Gguf
from powerinfer.formats.fields import Fields
from powerinfer.formats.folder_parts import (
    change_attention,
    read_plain,
    read_qwen_experts,
    read_switched_window,
    refuse_window,
)


def _read_qwen2(family: Folder, fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    """Biases on q, k and v, for which the class has no switch."""
    fields.flag("attention_bias", False)
    fields.only("attention_bias", True)
    return change_attention(read_plain(family, fields, config, n_layers), qkv_bias=True)


FOLDERS = (
    Folder(
        "qwen2", ("Qwen2ForCausalLM",), _read_qwen2, defaults=LLAMA_DEFAULTS | {"sliding_window": 4096},
        kv_heads_stated=True, biases=(None, None), windows=read_switched_window,
    ),
    Folder(
        "qwen3", ("Qwen3ForCausalLM",),
        defaults=LLAMA_DEFAULTS | {"sliding_window": 4096, "head_dim": 128},  # independent of other sizes
        kv_heads_stated=True, qk_norm="head", windows=read_switched_window,
    ),
    Folder(
        "qwen2_moe", ("Qwen2MoeForCausalLM",),
        defaults=LLAMA_DEFAULTS | {
            "qkv_bias": True, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632, "intermediate_size": 5632, "num_key_value_heads": 16,
        },
        biases=("qkv_bias", None), windows=refuse_window, ffns=read_qwen_experts, names=EXPERTS_NAMES,
    ),
    Folder(
        "qwen3_moe", ("Qwen3MoeForCausalLM",),
        defaults=LLAMA_DEFAULTS | {
            "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144, "num_key_value_heads": 4,
        },
        qk_norm="head", windows=refuse_window, ffns=partial(read_qwen_experts, shared=False), names=EXPERTS_NAMES,
    ),
)  # fmt: skip
GGUFS = (
    Gguf("qwen2", "silu", qkv_bias=True),
    Gguf("qwen3", "silu", qk_norm="head"),
    Gguf("qwen2moe", "silu", qkv_bias=True, experts=UNNORMALISED),
    Gguf("qwen3moe", "silu", qk_norm="head", experts=NORMALISED),
)
