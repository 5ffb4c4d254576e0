"""GGUF files of families with Mamba2, with the names and keys of llama.cpp's converter."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

_OUTER = dict.fromkeys(("embeddings", "embed_tokens"), "token_embd") | {"lm_head": "output"}
_OUTER |= dict.fromkeys(("norm_f", "norm", "final_layernorm"), "output_norm")
_INNER = dict.fromkeys(("norm", "input_layernorm"), "attn_norm") | {"block_sparse_moe.router": "ffn_gate_inp"}
_INNER |= dict.fromkeys(("post_attention_layernorm", "pre_ff_layernorm"), "ffn_norm")
_INNER |= {f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
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


def tensors_of(config: Any, model: Any, groups: int) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a model of any of these families."""
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = parameter.numpy()
        if not (found := re.fullmatch(r"\w+\.layers\.(\d+)\.(.+)", name)):
            yield f"{_OUTER[name.split('.')[-2]]}.weight", values
            continue
        layer, inner = found.groups()
        prefix, _, rest = inner.partition(".")
        if (own := mixer_tensor(rest, values, groups)) is not None and prefix in ("mixer", "mamba"):
            yield f"blk.{layer}.{own[0]}", own[1]
        elif inner.endswith("e_score_correction_bias"):
            yield f"blk.{layer}.exp_probs_b.bias", values
        elif inner.startswith("mixer.experts."):
            yield f"blk.{layer}.ffn_{inner.split('.')[2].removesuffix('_proj')}_exps.weight", values
        elif inner.startswith("block_sparse_moe.experts."):
            split = inner.endswith("gate_up_proj")
            for part, half in zip(("gate", "up") if split else ("down",), np.split(values, 1 + split, 1), strict=True):
                yield f"blk.{layer}.ffn_{part}_exps.weight", np.ascontiguousarray(half)
        elif inner.startswith("shared_mlp."):
            of = "_shexp" * bool(config.num_local_experts)
            split = "input" in inner
            for part, half in zip(("gate", "up") if split else ("down",), np.split(values, 1 + split), strict=True):
                yield f"blk.{layer}.ffn_{part}{of}.weight", half
        else:
            module, _, kind = inner.rpartition(".")
            yield f"blk.{layer}.{_INNER.get(module) or _MIXER[module.partition('.')[2]]}.{kind}", values


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
    add_mamba(writer, config.conv_kernel, config.ssm_state_size, config.n_groups, config.mamba_num_heads,
              config.mamba_head_dim)  # fmt: skip
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
    return write(writer, tensors_of(config, model, config.n_groups), path)


def add_mamba(writer: Any, taps: int, state: int, groups: int, heads: int, head_dim: int) -> None:
    writer.add_ssm_conv_kernel(taps)
    writer.add_ssm_state_size(state)
    writer.add_ssm_group_count(groups)
    writer.add_ssm_inner_size(heads * head_dim)
    writer.add_ssm_time_step_rank(heads)


def save_granite(config: Any, model: Any, path: Path) -> Path:
    """Granite 4 H, as llama.cpp's converter writes it, and Granite 4 without Mamba2, whose positions are rotated."""
    kinds = [one == "full_attention" for one in config.layer_types]
    writer = gguf.GGUFWriter(path, "granite" if all(kinds) else "granitehybrid")
    writer.add_context_length(1 << 20)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv([config.num_key_value_heads * one for one in kinds])
    writer.add_rope_scaling_finetuned(all(kinds))
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)
    groups = config.mamba_n_groups
    add_mamba(writer, config.mamba_d_conv, config.mamba_d_state, groups, config.mamba_n_heads, config.mamba_d_head)
    writer.add_feed_forward_length(config.intermediate_size)
    if config.num_local_experts:
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    tensors = tensors_of(config, model, groups)
    return write(writer, (_in_pairs(config, *one) for one in tensors) if all(kinds) else tensors, path)


def _in_pairs(config: Any, name: str, values: np.ndarray) -> tuple[str, np.ndarray]:
    """A tensor, of queries and keys with the two rows of a rotated pair adjacent."""
    counts = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    heads = counts.get(name.split(".")[-2])
    if heads is None:
        return name, values
    pairs = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2)
    return name, np.ascontiguousarray(pairs.reshape(values.shape))


def save_falcon(config: Any, model: Any, path: Path) -> Path:
    """Falcon-H1, as llama.cpp's converter writes it: the factors are in the matrices."""
    writer = gguf.GGUFWriter(path, "falcon-h1")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    groups, state = config.mamba_n_groups, config.mamba_d_state
    add_mamba(writer, config.mamba_d_conv, state, groups, config.mamba_n_heads, config.mamba_d_head)
    inner = config.mamba_d_ssm
    of_input = np.repeat(config.ssm_multipliers, (inner, inner, groups * state, groups * state, config.mamba_n_heads))
    into = config.attention_in_multiplier
    factors = {
        "token_embd.weight": config.embedding_multiplier, "output.weight": config.lm_head_multiplier,
        "ffn_gate.weight": config.mlp_multipliers[0], "ffn_down.weight": config.mlp_multipliers[1],
        "attn_q.weight": into, "attn_k.weight": into * config.key_multiplier, "attn_v.weight": into,
        "attn_output.weight": config.attention_out_multiplier, "ssm_out.weight": config.ssm_out_multiplier,
        "ssm_in.weight": config.ssm_in_multiplier * of_input[:, None],
    }  # fmt: skip

    def scaled() -> Iterator[tuple[str, np.ndarray]]:
        for name, values in tensors_of(config, model, groups):
            short = name if name in factors else name.partition(".")[2].partition(".")[2]
            name = name.removesuffix(".weight") if short == "ffn_norm.weight" else name
            yield name, (values * factors.get(short, 1.0)).astype(np.float32)

    return write(writer, scaled(), path)


def save_mamba2(config: Any, model: Any, path: Path) -> Path:
    """Mamba2 alone, as llama.cpp's converter writes it."""
    writer = gguf.GGUFWriter(path, "mamba2")
    writer.add_context_length(1 << 20)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    add_mamba(writer, config.conv_kernel, config.state_size, config.n_groups, config.num_heads, config.head_dim)
    return write(writer, tensors_of(config, model, config.n_groups), path)


SAVE = {
    "nemotron_h": save_nemotron, "granitemoehybrid": save_granite, "falcon_h1": save_falcon, "mamba2": save_mamba2,
}  # fmt: skip
"""By kind."""


def write(writer: Any, tensors: Iterator[tuple[str, np.ndarray]], path: Path) -> Path:
    for name, values in tensors:
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
