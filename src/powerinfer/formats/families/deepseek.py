"""Latent attention: DeepSeek V2 and V3, Kimi K2, GLM-4.7-Flash."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from powerinfer.config import LatentAttentionConfig, ModelConfig
from powerinfer.formats import layout
from powerinfer.formats.family import EXPERTS_NAMES, GLM_EXPERTS, LLAMA_DEFAULTS, UNNORMALISED, Folder, Gguf
from powerinfer.formats.fields import Fields
from powerinfer.formats.folder_parts import add_layers, read_deepseek_experts
from powerinfer.formats.folder_rope import read_growth, read_latent_rope
from powerinfer.formats.source import Fused, Names


def _read(family: Folder, fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    """The norms of latents have the default of their class, whatever `rms_norm_eps` is."""
    fields.only("attention_bias", False)
    fields.only("mlp_bias", False)
    fields.only("moe_layer_freq", 1)

    def dims(key: str, default: int) -> int:
        return int(fields.integer(key, 1, layout.MAX_HEAD_DIM, default))

    heads, latents, rotated = (
        fields.integer("num_attention_heads", 1, layout.MAX_HEADS),
        dims("kv_lora_rank", 512),
        dims("qk_rope_head_dim", 64),
    )
    plain = dims("qk_nope_head_dim", 128)
    rope, gain = read_latent_rope(family, fields, config, plain, rotated)
    attention = LatentAttentionConfig(
        heads,
        latents,
        plain,
        rotated,
        dims("v_head_dim", 128),
        rope,
        gain * (plain + rotated) ** -0.5,
        fields.integer("q_lora_rank", 1, layout.MAX_WIDTH, None),
        **(read_growth(fields) if family.grown else {}),
    )
    assert family.ffns is not None
    return add_layers(family, config, [attention] * n_layers, family.ffns(family, fields, n_layers))


def read_v3(family: Folder, fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    """V3's files say in which order elements are rotated."""
    family = replace(family, interleaved=fields.flag("rope_interleave", False))
    return _read(family, fields, config, n_layers)


def _read_gguf_growth(fields: Fields) -> dict[str, Any]:
    """Settings of attention by which queries grow, as of Mistral Large 3."""
    growth = fields.number("attention.temperature_scale", 0, layout.MAX_SCALE, 0.0)
    if not growth:
        return {}
    interval = fields.integer("attention.temperature_length", 1, layout.MAX_CONTEXT)
    return {"query_growth": growth, "query_interval": interval}


def fuse_latents(config: ModelConfig, names: Names) -> list[Fused]:
    """Matrices that make keys and values of heads from latents are one."""
    heads = [kind.n_heads for kind in config.attentions if isinstance(kind, LatentAttentionConfig)]
    return [Fused(("k_b_rows", "v_b"), n, flat=True) for n in heads[:1]]


LATENT_NAMES = EXPERTS_NAMES.extended(
    GLM_EXPERTS
    | {
        "q_a": "self_attn.q_a_proj", "q_a_norm": "self_attn.q_a_layernorm", "q_b": "self_attn.q_b_proj",
        "kv_a": "self_attn.kv_a_proj_with_mqa", "kv_a_norm": "self_attn.kv_a_layernorm",
        **dict.fromkeys(("k_b_rows", "v_b"), "self_attn.kv_b_proj"),
    }
)  # fmt: skip
"""Names with latent attention, and experts as DeepSeek has them."""

_V3 = Folder(
    "deepseek_v3", ("DeepseekV3ForCausalLM",), read_v3, other_types=("kimi_k2",), replaces_code=True,
    defaults=LLAMA_DEFAULTS | {
        "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
        "num_attention_heads": 128, "max_position_embeddings": 4096, "first_k_dense_replace": 3, "q_lora_rank": 1536,
        "n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "rope_interleave": True,
    },
    ffns=read_deepseek_experts,
    names=LATENT_NAMES,
    fused=fuse_latents,
)  # fmt: skip

FOLDERS = (
    _V3,
    replace(
        _V3, model_type="deepseek_v2", classes=("DeepseekV2ForCausalLM",), read=_read, other_types=(),
        defaults=LLAMA_DEFAULTS | {
            "vocab_size": 102400, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
            "num_attention_heads": 32, "max_position_embeddings": 2048, "first_k_dense_replace": 0,
            "q_lora_rank": 1536, "n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407,
            "norm_topk_prob": False, "routed_scaling_factor": 1.0,
        },
        interleaved=True, ffns=partial(read_deepseek_experts, sigmoid=False),
    ),
    replace(
        _V3, model_type="glm4_moe_lite", classes=("Glm4MoeLiteForCausalLM",), other_types=(), replaces_code=False,
        defaults={
            "vocab_size": 154880, "hidden_size": 2048, "intermediate_size": 10240, "num_hidden_layers": 47,
            "num_attention_heads": 20, "max_position_embeddings": 202752, "hidden_act": "silu",
            "first_k_dense_replace": 1, "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256,
            "n_routed_experts": 64, "n_shared_experts": 1, "moe_intermediate_size": 1536, "norm_topk_prob": True,
            "routed_scaling_factor": 1.8, "num_experts_per_tok": 4, "rope_interleave": True,
        },
    ),
)  # fmt: skip
LATENT_GGUF = Gguf(
    "deepseek2", "silu", interleaved=True, experts=UNNORMALISED, latent=True, growth=_read_gguf_growth
)  # fmt: skip
GGUFS = (LATENT_GGUF, replace(LATENT_GGUF, architecture="glm4moelite"))  # the second: Ollama's of GLM-4.7-Flash
