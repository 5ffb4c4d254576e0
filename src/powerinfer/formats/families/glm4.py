"""GLM-4, and GLM-4.5 with experts."""

from __future__ import annotations

from powerinfer.config import ModelConfig
from powerinfer.formats.family import EXPERTS_NAMES, GLM_EXPERTS, LLAMA_NAMES, SECOND_NORM, SIGMOIDS, Folder, Gguf
from powerinfer.formats.fields import Fields
from powerinfer.formats.folder_parts import change_attention, read_deepseek_experts, read_plain
from powerinfer.formats.source import Fused


def _read_glm45(family: Folder, fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    qk_norm = "head" if fields.flag("use_qk_norm", False) else None
    return change_attention(read_plain(family, fields, config, n_layers), qk_norm=qk_norm)


_GATE_UP = (Fused(("gate", "up")),)

FOLDERS = (
    Folder(
        "glm4", ("Glm4ForCausalLM",),
        defaults={
            "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 40,
            "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072,
            "rms_norm_eps": 1.5625e-7, "hidden_act": "silu", "attention_bias": True,
        },
        partial=0.5, interleaved=True, biases=("attention_bias", None), norms="both",
        names=LLAMA_NAMES.extended(
            dict.fromkeys(("gate", "up"), "mlp.gate_up_proj")
            | {"attn_out_norm": "post_self_attn_layernorm", "ffn_out_norm": "post_mlp_layernorm"}
        ),
        fused=_GATE_UP,
    ),
    Folder(
        "glm4_moe", ("Glm4MoeForCausalLM",), _read_glm45,
        defaults={
            "hidden_act": "silu", "num_experts_per_tok": 8, "moe_intermediate_size": 1408,
            "intermediate_size": 10944, "num_key_value_heads": 8, "n_shared_experts": 1, "first_k_dense_replace": 1,
            "norm_topk_prob": True,
        },
        partial=0.5, biases=("attention_bias", None), ffns=read_deepseek_experts,
        names=EXPERTS_NAMES.extended(GLM_EXPERTS),
    ),
)  # fmt: skip
GGUFS = (
    Gguf("glm4", "silu", interleaved=True, norms="both", partial=True, fused=_GATE_UP),
    Gguf("glm4moe", "silu", qk_norm="stored", partial=True, experts=SIGMOIDS, names=SECOND_NORM),
)
