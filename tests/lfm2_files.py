"""GGUF files of LFM2, with the names and keys of llama.cpp's converter."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from mamba_files import write

_OUTER = {"embed_tokens": "token_embd", "embedding_norm": "token_embd_norm", "lm_head": "output"}
_INNER = {
    "operator_norm": "attn_norm", "ffn_norm": "ffn_norm", "self_attn.out_proj": "attn_output",
    "feed_forward.gate": "ffn_gate_inp",
    **{f"conv.{part}": f"shortconv.{part}" for part in ("conv", "in_proj", "out_proj")},
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"self_attn.{part}_layernorm": f"attn_{part}_norm" for part in "qk"},
    **{f"feed_forward.{own}": f"ffn_{part}" for part, own in (("gate", "w1"), ("up", "w3"), ("down", "w2"))},
}  # fmt: skip


def tensors_of(config: Any, model: Any) -> Iterator[tuple[str, np.ndarray]]:
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = parameter.numpy()
        if not (found := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)):
            yield f"{_OUTER[name.split('.')[-2]]}.weight", values
            continue
        layer, (module, _, kind) = found[1], found[2].rpartition(".")
        if kind == "expert_bias":
            yield f"blk.{layer}.exp_probs_b.bias", values
        elif module == "feed_forward.experts":
            split = kind == "gate_up_proj"
            for part, half in zip(("gate", "up") if split else ("down",), np.split(values, 1 + split, 1), strict=True):
                yield f"blk.{layer}.ffn_{part}_exps.weight", np.ascontiguousarray(half)
        else:
            yield f"blk.{layer}.{_INNER[module]}.{kind}", values[:, 0].copy() if module == "conv.conv" else values


def save(config: Any, model: Any, path: Path) -> Path:
    experts = config.model_type == "lfm2_moe"
    writer = gguf.GGUFWriter(path, "lfm2moe" if experts else "lfm2")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_vocab_size(config.vocab_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv([config.num_key_value_heads * (one != "conv") for one in config.layer_types])
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_shortconv_l_cache(config.conv_L_cache)
    size = config.intermediate_size
    if experts:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    else:
        size = model.model.layers[0].feed_forward.w1.out_features
    writer.add_feed_forward_length(size)
    return write(writer, tensors_of(config, model), path)


SAVE = dict.fromkeys(("lfm2", "lfm2_moe"), save)
"""By kind."""
