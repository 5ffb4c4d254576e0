"""GGUF files of Gemma 4 and Gemma 3n, with the names and keys of llama.cpp's converter."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import mamba_files
import numpy as np
import torch

_OUTER = {
    "embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output",
    "embed_tokens_per_layer": "per_layer_token_embd", "per_layer_model_projection": "per_layer_model_proj",
    "per_layer_projection_norm": "per_layer_proj_norm",
}  # fmt: skip
_INNER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2", "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2", "router.proj": "ffn_gate_inp",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"}, "self_attn.o_proj": "attn_output",
    "per_layer_input_gate": "inp_gate", "per_layer_projection": "proj", "post_per_layer_input_norm": "post_norm",
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}  # fmt: skip
_PARAMETERS = {
    "layer_scalar": "layer_output_scale.weight", "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale", "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}  # fmt: skip


def tensors_of(config: Any, model: Any) -> Iterator[tuple[str, np.ndarray]]:
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = parameter.numpy()
        if not (found := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)):
            yield f"{_OUTER[name.split('.')[-2]]}.weight", values
        elif (inner := found[2]) in _PARAMETERS:
            yield f"blk.{found[1]}.{_PARAMETERS[inner]}", values
        else:
            yield f"blk.{found[1]}.{_INNER[inner.removesuffix('.weight')]}.weight", values


def save_gemma4(config: Any, model: Any, path: Path) -> Path:
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    layers = [config.per_layer_config[layer] for layer in range(config.num_hidden_layers)]
    whole, local = layers[slides.index(False)], layers[slides.index(True)]
    writer = gguf.GGUFWriter(path, "gemma4")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    first = config.num_hidden_layers - config.num_kv_shared_layers
    sizes = [config.intermediate_size * (1 + config.use_double_wide_mlp * (at >= first)) for at in range(len(slides))]
    writer.add_feed_forward_length(sizes if len(set(sizes)) > 1 else sizes[0])
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv([one.num_key_value_heads for one in layers])
    writer.add_key_length(whole.head_dim)
    writer.add_value_length(whole.head_dim)
    writer.add_key_length_swa(local.head_dim)
    writer.add_value_length_swa(local.head_dim)
    writer.add_rope_dimension_count(whole.head_dim)
    writer.add_rope_dimension_count_swa(local.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(slides)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    if config.final_logit_softcapping is not None:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    turned = int(whole.head_dim * rope["partial_rotary_factor"] / 2)
    divisors = [1.0] * turned + [1e30] * (whole.head_dim // 2 - turned)
    writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))
    return mamba_files.write(writer, tensors_of(config, model), path)


_STREAMS = {
    "altup.modality_router": "altup_router", "altup.router_norm": "altup_router_norm",
    "altup.prediction_coefs": "altup_predict_coef", "altup.correction_coefs": "altup_correct_coef",
    "laurel.linear_left": "laurel_l", "laurel.linear_right": "laurel_r", "laurel.post_laurel_norm": "laurel_post_norm",
}  # fmt: skip
_STACKED = {"altup_projections": "altup_proj", "altup_unembed_projections": "altup_unembd_proj"}


def _tensors_of_3n(config: Any, model: Any) -> Iterator[tuple[str, np.ndarray]]:
    stacked: dict[str, list[np.ndarray]] = {name: [] for name in _STACKED.values()}
    for name, parameter in model.state_dict().items():
        values = parameter.numpy()
        outer = name.split(".")[1]
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if outer in _STACKED:
            stacked[_STACKED[outer]].append(values)
        elif not (found := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)):
            yield f"{_OUTER[name.split('.')[-2]]}.weight", values
        elif found[2] == "altup.correct_output_scale":
            yield f"blk.{found[1]}.altup_correct_scale.weight", values
        else:
            yield f"blk.{found[1]}.{(_INNER | _STREAMS)[found[2].removesuffix('.weight')]}.weight", values
    for name, matrices in stacked.items():
        yield f"{name}.weight", np.stack(matrices)


def save_gemma3n(config: Any, model: Any, path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "gemma3n")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    sizes = config.intermediate_size
    writer.add_feed_forward_length(sizes if len(set(sizes)) > 1 else sizes[0])
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_altup_active_idx(config.altup_active_idx)
    writer.add_altup_num_inputs(config.altup_num_inputs)
    shares = torch.tensor(config.activation_sparsity_pattern)
    writer.add_activation_sparsity_scale(torch.distributions.Normal(0, 1).icdf(shares).tolist())
    if config.final_logit_softcapping is not None:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    return mamba_files.write(writer, _tensors_of_3n(config, model), path)


SAVE = {"gemma4_text": save_gemma4, "gemma3n_text": save_gemma3n}
