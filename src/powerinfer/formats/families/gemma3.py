"""Gemma 3."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from powerinfer.config import AttentionConfig, ModelConfig
from powerinfer.formats import layout
from powerinfer.formats.family import FOUR_NORMS, GATED, Folder, Gguf
from powerinfer.formats.fields import Fields
from powerinfer.formats.folder_parts import (
    add_biases,
    add_layers,
    attention_kinds,
    read_ffn,
    read_heads,
    read_layer_types,
)
from powerinfer.formats.folder_rope import read_ropes
from powerinfer.formats.source import keep_text


def _read(family: Folder, fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    attention = replace(
        add_biases(family, fields, read_heads(family, fields, config)),
        scale=fields.number("query_pre_attn_scalar", 1e-6, layout.MAX_SCALE, 256.0) ** -0.5,
    )
    interval = fields.integer("sliding_window_pattern", 1, layout.MAX_CONTEXT, 6)
    kinds = attention_kinds(fields, attention, read_ropes(family, fields, config, attention, 1e4))
    attentions = [kinds[kind] for kind in read_layer_types(fields, n_layers, interval)]
    scale = float(np.sqrt(np.float32(config.d_model)))
    return replace(
        add_layers(family, config, attentions, [read_ffn(family, fields)] * n_layers), embedding_scale=scale
    )


def _score_scale(fields: Fields, heads: Sequence[AttentionConfig]) -> float | None:
    """The scale of Gemma 3 27B, which llama.cpp knows by its number of layers."""
    if len(heads) != 62:
        return None
    width = fields.integer("embedding_length", 1, layout.MAX_WIDTH)
    return float((width // heads[0].n_heads) ** -0.5)


FOLDERS = (
    Folder(
        "gemma3_text", ("Gemma3ForCausalLM",), _read,
        defaults={
            "num_hidden_layers": 26, "hidden_size": 2304, "num_attention_heads": 8, "num_key_value_heads": 4,
            "head_dim": 256, "intermediate_size": 9216, "hidden_activation": "gelu_pytorch_tanh", "vocab_size": 262208,
            "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "sliding_window": 4096,
            "tie_word_embeddings": True,
        },
        vision_class="Gemma3ForConditionalGeneration", keys={"hidden_act": "hidden_activation"}, theta=1e6,
        qk_norm="head", activations={"gelu_pytorch_tanh": "gelu_tanh"} | GATED, norms="both", names=FOUR_NORMS,
        rename=keep_text, norms_less_one=True,
    ),
)  # fmt: skip
GGUFS = (
    Gguf(
        "gemma3", "gelu_tanh", norms="both", qk_norm="head", full_every=6, local_theta=10000.0, scaled=True,
        score_scale=_score_scale,
    ),
)  # fmt: skip
