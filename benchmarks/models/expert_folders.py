"""Hugging Face folders of models of experts with random weights, for expert_models.py: F16, norms and routers F32."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from benchmarks.models.writers import write_json, write_tokenizer_files
from powerinfer.config import AttentionConfig, ExpertsConfig, ModelConfig, Shape
from powerinfer.formats.folder import file_names
from powerinfer.formats.layout import shapes

CLASSES = {
    "mixtral": "MixtralForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "smallthinker": "SmallThinkerForCausalLM",
}
"""Family -> class, of those that can be written."""

Values = Iterator[np.ndarray]


def file_tensors(config: ModelConfig) -> Iterator[tuple[str, str, Shape]]:
    """(name in the file, canonical name, shape) in file order; experts are tensors of their own, one after another."""
    names = file_names(config, {})
    for canonical, shape in shapes(config):
        name = names(canonical).replace("e_score_correction.bias", "e_score_correction_bias")
        if "{}" in name:
            yield from ((name.format(expert), canonical, shape[1:]) for expert in range(shape[0]))
        elif canonical.endswith(".shared_weight"):
            yield name, canonical, (1, *shape)
        else:
            yield name, canonical, shape


def in_full(canonical: str, shape: Shape) -> bool:
    """Whether a tensor is F32."""
    return len(shape) == 1 or canonical.endswith(".router")


def write_folder(path: Path, config: ModelConfig, values: dict[str, Values]) -> None:
    """config.json, tokenizer.json and model.safetensors. values: canonical name -> its values, row by row in pieces."""
    beside = path.with_name(path.name + ".part")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    write_json(beside / "config.json", document(config))
    write_tokenizer_files(beside, config.vocab_size)
    with (beside / "model.safetensors").open("wb") as file:
        _write_tensors(file, config, values)
    os.replace(beside, path)


def _write_tensors(file: BinaryIO, config: ModelConfig, values: dict[str, Values]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, canonical, shape in file_tensors(config):
        full = in_full(canonical, shape)
        end = at + int(np.prod(shape)) * (4 if full else 2)
        header[name] = {"dtype": "F32" if full else "F16", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for canonical, shape in shapes(config):
        for piece in values[canonical]:
            file.write(piece.astype("<f4" if in_full(canonical, shape) else "<f2").data)


def document(config: ModelConfig) -> dict[str, Any]:
    """config.json."""
    kinds = [layer.attention for layer in config.layers]
    first = next(kind for kind in kinds if kind.rope is not None)
    experts = config.layers[-1].ffn
    assert isinstance(first, AttentionConfig) and first.rope is not None and isinstance(experts, ExpertsConfig)
    router = experts.router
    shared = {
        "architectures": [CLASSES[config.architecture]],
        "model_type": config.architecture,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": first.n_heads,
        "num_key_value_heads": first.n_kv_heads,
        "head_dim": first.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": first.rope.theta,
        "tie_word_embeddings": config.tied_embeddings,
        "hidden_act": experts.activation,
        "torch_dtype": "float16",
    }
    top_k = {"num_experts_per_tok": router.top_k}
    own = {
        "mixtral": {"num_local_experts": experts.n_experts, "intermediate_size": experts.size, "sliding_window": None},
        "olmoe": {"num_experts": experts.n_experts, "intermediate_size": experts.size},
        "qwen3_moe": {"num_experts": experts.n_experts, "moe_intermediate_size": experts.size},
        "glm4_moe": _glm(config, first, experts),
        "smallthinker": _smallthinker(config, experts),
    }[config.architecture]
    if config.architecture == "smallthinker":
        return shared | own
    return shared | top_k | own | ({} if config.architecture == "mixtral" else {"norm_topk_prob": router.normalise})


def _glm(config: ModelConfig, attention: AttentionConfig, experts: ExpertsConfig) -> dict[str, Any]:
    dense = [layer.ffn.width for layer in config.layers if layer.ffn.neurons is not None]
    assert attention.rope is not None
    return {
        "n_routed_experts": experts.n_experts,
        "moe_intermediate_size": experts.size,
        "n_shared_experts": experts.shared_size // experts.size,
        "first_k_dense_replace": len(dense),
        "intermediate_size": dense[0] if dense else experts.size,
        "routed_scaling_factor": experts.router.scale,
        "n_group": experts.router.groups,
        "topk_group": experts.router.top_groups,
        "partial_rotary_factor": attention.rope.dim / attention.head_dim,
        "attention_bias": attention.qkv_bias,
    }


def _smallthinker(config: ModelConfig, experts: ExpertsConfig) -> dict[str, Any]:
    kinds = [layer.attention for layer in config.layers]
    windows = [getattr(kind, "window", None) for kind in kinds]
    return {
        "moe_num_primary_experts": experts.n_experts,
        "moe_num_active_primary_experts": experts.router.top_k,
        "moe_ffn_hidden_size": experts.size,
        "moe_primary_router_apply_softmax": experts.router.scoring == "softmax",
        "rope_layout": [int(kind.rope is not None) for kind in kinds],
        "sliding_window_layout": [int(window is not None) for window in windows],
        "sliding_window_size": next((window for window in windows if window is not None), 4096),
    }
