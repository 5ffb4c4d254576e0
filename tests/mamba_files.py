"""GGUF files of families with Mamba2, with the names and keys of llama.cpp's converter."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

_OUTER = {"embeddings": "token_embd", "norm_f": "output_norm"}
_MIXER = {
    "in_proj": "ssm_in", "out_proj": "ssm_out", "conv1d": "ssm_conv1d", "norm": "ssm_norm",
    **{f"{part}_proj": f"attn_{short}" for part, short in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "output"))},
    "up_proj": "ffn_up", "down_proj": "ffn_down", "gate": "ffn_gate_inp",
    "shared_experts.up_proj": "ffn_up_shexp", "shared_experts.down_proj": "ffn_down_shexp",
    "fc1_latent_proj": "ffn_latent_down", "fc2_latent_proj": "ffn_latent_up",
}  # fmt: skip


def mixer_tensor(name: str, values: np.ndarray, groups: int) -> tuple[str, np.ndarray] | None:
    """(name in the layer, values) of a parameter of Mamba2; None: it is none."""
    if name == "A_log":
        return "ssm_a", -np.exp(values)[:, None]
    if name == "D":
        return "ssm_d", values[:, None].copy()
    if name == "dt_bias":
        return "ssm_dt.bias", values
    if name == "conv1d.weight":
        return "ssm_conv1d.weight", np.ascontiguousarray(values[:, 0])
    if name == "norm.weight":
        return "ssm_norm.weight", values.reshape(groups, -1)
    return None


def nemotron_tensors(config: Any, model: Any) -> Iterator[tuple[str, np.ndarray]]:
    for name, parameter in model.state_dict().items():
        values = parameter.numpy()
        if name == "lm_head.weight":
            yield "output.weight", values
            continue
        if not (found := re.fullmatch(r"model\.layers\.(\d+)\.(?:mixer\.)?(.+)", name)):
            yield f"{_OUTER[name.split('.')[1]]}.weight", values
            continue
        layer, inner = found.groups()
        if ".mixer." not in name:
            yield f"blk.{layer}.attn_norm.weight", values
        elif (own := mixer_tensor(inner, values, config.n_groups)) is not None:
            yield f"blk.{layer}.{own[0]}", own[1]
        elif inner == "gate.e_score_correction_bias":
            yield f"blk.{layer}.exp_probs_b.bias", values
        elif inner.startswith("experts."):
            yield f"blk.{layer}.ffn_{inner.split('.')[1].removesuffix('_proj')}_exps.weight", values
        else:
            module, _, kind = inner.rpartition(".")
            yield f"blk.{layer}.{_MIXER[module]}.{kind}", values


def save_nemotron(config: Any, model: Any, path: Path) -> Path:
    """Nemotron-H, as llama.cpp's converter writes it."""
    types = config.layers_block_type
    experts = "moe" in types
    writer = gguf.GGUFWriter(path, "nemotron_h_moe" if experts else "nemotron_h")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(len(types))
    writer.add_vocab_size(config.vocab_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv([config.num_key_value_heads * (one == "full_attention") for one in types])
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim // 2)  # of nothing that is rotated
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    add_mamba(writer, config, config.mamba_num_heads, config.mamba_head_dim)
    sizes = {"moe": config.moe_intermediate_size, "mlp": config.intermediate_size}
    writer.add_feed_forward_length([sizes.get(one, 0) for one in types])
    if experts:
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_group_count(config.n_group)
        if config.n_group > 1:
            writer.add_expert_group_used_count(config.topk_group)
        if config.moe_latent_size is not None:
            writer.add_moe_latent_size(config.moe_latent_size)
    return write(writer, nemotron_tensors(config, model), path)


def add_mamba(writer: Any, config: Any, heads: int, head_dim: int) -> None:
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_state_size(config.ssm_state_size)
    writer.add_ssm_group_count(config.n_groups)
    writer.add_ssm_inner_size(heads * head_dim)
    writer.add_ssm_time_step_rank(heads)


def write(writer: Any, tensors: Iterator[tuple[str, np.ndarray]], path: Path) -> Path:
    for name, values in tensors:
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
