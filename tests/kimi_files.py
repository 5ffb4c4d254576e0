"""GGUF files of Kimi Linear, with the names, keys and shapes of llama.cpp's converter."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from mamba_files import write

_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_INNER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output",
    "self_attn.o_norm": "ssm_norm", "self_attn.b_proj": "ssm_beta", "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm", "mlp.gate": "ffn_gate_inp", "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"self_attn.g_{part}_proj": f"ssm_g_{part}" for part in "ab"},
    **{f"self_attn.forget_gate.f_{part}_proj": f"ssm_f_{part}" for part in "ab"},
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}  # fmt: skip


def tensors_of(config: Any, model: Any) -> Iterator[tuple[str, np.ndarray]]:
    for name, parameter in model.state_dict().items():
        values = parameter.numpy()
        module, _, kind = name.rpartition(".")
        if module in _OUTER:
            yield f"{_OUTER[module]}.weight", values
            continue
        found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module)
        assert found is not None
        layer, inner = f"blk.{found[1]}.", found[2]
        if kind == "A_log":
            yield f"{layer}ssm_a", -np.exp(values)
        elif kind == "dt_bias":
            yield f"{layer}ssm_dt.bias", values
        elif kind == "e_score_correction_bias":
            yield f"{layer}exp_probs_b.bias", values
        elif inner == "self_attn.conv1d":
            for part, own in zip("qkv", np.split(values, 3), strict=True):
                yield f"{layer}ssm_conv1d_{part}.weight", own[None].swapaxes(1, 2).reshape(1, len(own), 1, -1)
        elif inner == "self_attn.kv_b_proj":
            heads = values.reshape(config.num_attention_heads, -1, values.shape[1])
            k, v = np.split(heads, [config.qk_nope_head_dim], axis=1)
            yield f"{layer}attn_k_b.weight", np.ascontiguousarray(k.swapaxes(1, 2))
            yield f"{layer}attn_v_b.weight", np.ascontiguousarray(v)
        elif inner == "mlp.experts":
            split = kind == "gate_up_proj"
            for part, half in zip(("gate", "up") if split else ("down",), np.split(values, 1 + split, 1), strict=True):
                yield f"{layer}ffn_{part}_exps.weight", np.ascontiguousarray(half)
        else:
            yield f"{layer}{_INNER[inner]}.{kind}", values


def save(config: Any, model: Any, path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "kimi-linear")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_vocab_size(config.vocab_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv([int(one == "full_attention") for one in config.layer_types])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_kda_head_dim(config.linear_head_dim)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(config.hidden_size // config.num_attention_heads)  # as the base class writes `head_dim`
    writer.add_rope_freq_base(10000.0)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_leading_dense_block_count(config.mlp_layer_types.index("sparse"))
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    return write(writer, tensors_of(config, model), path)


SAVE = {"kimi_linear": save}
"""By kind."""
