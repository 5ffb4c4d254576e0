"""config.json as models are published: every key is read, or is known to change nothing. Tiny ones of transformers have
other keys (families.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from powerinfer.config import ChannelDeltaConfig, ExpertsConfig, LatentAttentionConfig, ModelConfig
from powerinfer.errors import ModelError
from powerinfer.formats.folder_config import read_config

USUAL = {"initializer_range": 0.02, "transformers_version": "4.56.1", "use_cache": True, "torch_dtype": "bfloat16"}
FULL = [4, 8, 12, 16, 20, 24, 27]
KIMI: dict[str, Any] = USUAL | {
    "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear",
    "auto_map": {
        "AutoConfig": "configuration_kimi.KimiLinearConfig", "AutoModel": "modeling_kimi.KimiLinearModel",
        "AutoModelForCausalLM": "modeling_kimi.KimiLinearForCausalLM",
    },
    "bos_token_id": 163584, "eos_token_id": 163586, "pad_token_id": 163839, "first_k_dense_replace": 1, "head_dim": 72,
    "hidden_act": "silu", "hidden_size": 2304, "intermediate_size": 9216, "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": FULL, "head_dim": 128, "kda_layers": [at for at in range(1, 28) if at not in FULL],
        "num_heads": 32, "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True, "model_max_length": 1048576, "moe_intermediate_size": 1024, "moe_layer_freq": 1,
    "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "num_attention_heads": 32, "num_expert_group": 1,
    "num_experts": 256, "num_experts_per_token": 8, "num_hidden_layers": 27, "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0, "num_shared_experts": 1, "q_lora_rank": None, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446, "tie_word_embeddings": False, "topk_group": 1, "use_grouped_topk": True,
    "v_head_dim": 128, "vocab_size": 163840,
}  # fmt: skip
FACTORS = [1.0 + at / 8 for at in range(64)]
PUBLISHED: dict[str, dict[str, Any]] = {
    "kimi_linear": KIMI,
    "gemma3n": USUAL | {
        "architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n",
        "audio_config": {"model_type": "gemma3n_audio"}, "vision_config": {"model_type": "gemma3n_vision"},
        "text_config": USUAL | {
            "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20, "altup_active_idx": 0, "altup_coef_clip": 120.0,
            "altup_correct_scale": True, "altup_lr_multiplier": 1.0, "altup_num_inputs": 4, "attention_bias": False,
            "attention_dropout": 0.0, "final_logit_softcapping": 30.0, "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2048, "hidden_size_per_layer_input": 256,
            "intermediate_size": [8192] * 30, "laurel_rank": 64, "max_position_embeddings": 32768,
            "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 6, "model_type": "gemma3n_text",
            "num_attention_heads": 8, "num_hidden_layers": 30, "num_key_value_heads": 2, "num_kv_shared_layers": 10,
            "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000.0, "rope_scaling": None,
            "rope_theta": 1000000.0, "sliding_window": 512, "vocab_size": 262400, "vocab_size_per_layer_input": 262144,
        },
    },
    "phimoe": USUAL | {
        "architectures": ["PhiMoEForCausalLM"], "model_type": "phimoe",
        "auto_map": {"AutoModelForCausalLM": "modeling_phimoe.PhiMoEForCausalLM"}, "attention_bias": True,
        "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 32000, "hidden_act": "silu", "hidden_dropout": 0.0,
        "hidden_size": 4096, "input_jitter_noise": 0.01, "intermediate_size": 6400, "lm_head_bias": True,
        "max_position_embeddings": 131072, "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "num_local_experts": 16, "original_max_position_embeddings": 4096,
        "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "router_aux_loss_coef": 0.0,
        "rope_scaling": {
            "long_factor": FACTORS, "long_mscale": 1.243163121016122, "original_max_position_embeddings": 4096,
            "short_factor": FACTORS, "short_mscale": 1.243163121016122, "type": "longrope",
        },
        "router_jitter_noise": 0.01, "sliding_window": 131072, "tie_word_embeddings": False, "vocab_size": 32064,
    },
    "bitnet": USUAL | {
        "architectures": ["BitNetForCausalLM"], "model_type": "bitnet", "bos_token_id": 128000, "eos_token_id": 128001,
        "auto_map": {"AutoModelForCausalLM": "modeling_bitnet.BitNetForCausalLM"}, "hidden_act": "relu2",
        "hidden_size": 2560, "intermediate_size": 6912, "max_position_embeddings": 4096, "num_attention_heads": 20,
        "num_hidden_layers": 30, "num_key_value_heads": 5, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
        "tie_word_embeddings": True, "vocab_size": 128256,
        "quantization_config": {
            "quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline",
        },
    },
    "stablelm": USUAL | {
        "architectures": ["StableLmForCausalLM"], "model_type": "stablelm", "attention_dropout": 0.0,
        "bos_token_id": 100257, "eos_token_id": 100257, "hidden_act": "silu", "hidden_dropout": 0.0,
        "hidden_size": 5120, "intermediate_size": 13824, "layer_norm_eps": 1e-05, "max_position_embeddings": 4096,
        "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "partial_rotary_factor": 0.25,
        "qk_layernorm": True, "rope_theta": 10000, "tie_word_embeddings": False, "use_parallel_residual": True,
        "use_qkv_bias": False, "vocab_size": 100352,
    },
    "olmo": USUAL | {
        "architectures": ["OlmoForCausalLM"], "model_type": "olmo", "attention_bias": False, "attention_dropout": 0.0,
        "clip_qkv": None, "eos_token_id": 50279, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008,
        "max_position_embeddings": 2048, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
        "pad_token_id": 1, "pretraining_tp": 1, "rope_scaling": None, "rope_theta": 10000.0,
        "tie_word_embeddings": False, "vocab_size": 50304,
    },
}  # fmt: skip
LEFT = {
    "kimi_linear": ["head_dim", "num_key_value_heads", "num_nextn_predict_layers", "use_grouped_topk"],
    "phimoe": ["input_jitter_noise"],
}
"""Keys that nothing reads and that change nothing: of Kimi's layers none is rotated, and latents have no such heads."""


def read(config: dict[str, Any], notes: list[str] | None = None, unread: list[str] | None = None) -> ModelConfig:
    return read_config(config, Path("published"), notes, unread)


@pytest.mark.parametrize("kind", PUBLISHED)
def test_every_key_is_read(kind: str) -> None:
    notes: list[str] = []
    unread: list[str] = []
    config = read(PUBLISHED[kind], notes, unread)
    assert config.n_layers in (27, 30, 32, 40) and unread == LEFT.get(kind, []) and notes == []


def test_keys_of_kimi_linear_by_either_name() -> None:
    """As `attribute_map` of the class has them: what a file says counts, whatever it calls it."""
    usual = {
        "num_expert_group": "n_group", "num_experts_per_token": "num_experts_per_tok",
        "num_experts": "num_local_experts", "moe_renormalize": "norm_topk_prob",
        "model_max_length": "max_position_embeddings",
        "num_shared_experts": "n_shared_experts",
    }  # fmt: skip
    changed = {
        "num_expert_group": 4, "num_experts_per_token": 6, "num_experts": 64, "moe_renormalize": False,
        "model_max_length": 4096, "num_shared_experts": 2, "topk_group": 2,
    }  # fmt: skip
    own = read(KIMI | changed)
    left = {key: value for key, value in KIMI.items() if key not in usual}
    renamed = {usual.get(key, key): value for key, value in changed.items()}
    assert read(left | renamed) == own
    ffn = own.layers[-1].ffn
    assert isinstance(ffn, ExpertsConfig) and own.context_length == 4096
    assert (ffn.n_experts, ffn.shared_size, ffn.router.top_k, ffn.router.groups) == (64, 2048, 6, 4)
    assert not ffn.router.normalise and read(left).layers == read(KIMI).layers
    with pytest.raises(ModelError, match=r"config\.json: num_experts is '0', not a number from 1"):
        read(KIMI | {"num_experts": 0})


def test_what_linear_attention_of_kimi_says() -> None:
    linear, notes = KIMI["linear_attn_config"], []

    def changed(**keys: Any) -> dict[str, Any]:
        return KIMI | {"linear_attn_config": linear | keys}

    layers = read(changed(head_dim=None, num_heads=16, new=3), notes).layers
    kinds = [type(layer.attention) for layer in layers]
    assert [at for at, kind in enumerate(kinds, 1) if kind is LatentAttentionConfig] == FULL
    delta = layers[0].attention
    assert isinstance(delta, ChannelDeltaConfig) and (delta.n_key_heads, delta.key_dim) == (16, 128)
    assert notes == ["new of linear_attn_config is not read"]
    for key, value in (("gate_lower_bound", -5.0), ("use_full_rank_gate", True)):
        with pytest.raises(ModelError, match=rf"linear_attn_config: {key} is '{value}', which this engine"):
            read(changed(**{key: value}))
    with pytest.raises(ModelError, match="mla_use_output_gate is 'True'"):
        read(KIMI | {"mla_use_output_gate": True})
    with pytest.raises(ModelError, match="hidden_act is 'topk', also behind the convolution of linear attention"):
        read(KIMI | {"hidden_act": "topk"})


def test_layers_of_granite_that_rotate_nothing() -> None:
    """Files may say it twice."""
    config = {"model_type": "granite_swa", "num_hidden_layers": 4, "layer_rope_theta": [0, 1e4, 1e4, 0]}
    agreeing = read(config | {"no_rope_layers": [0, 1, 1, 0]})
    assert [layer.heads.rope is None for layer in agreeing.layers] == [True, False, False, True]
    with pytest.raises(ModelError, match="no_rope_layers is not 0 where layer_rope_theta is"):
        read(config | {"no_rope_layers": [0, 1, 1, 1]})
    del config["layer_rope_theta"]
    with pytest.raises(ModelError, match="no_rope_layers holds 0"):
        read(config | {"no_rope_layers": [0, 1, 1, 0]})
