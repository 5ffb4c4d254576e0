"""Gemma 2."""

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
from powerinfer.formats.folder_rope import GLOBAL, LOCAL, read_rope


def _read(family: Folder, fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    heads = read_heads(family, fields, config)
    attention = replace(
        add_biases(family, fields, heads),
        scale=fields.number("query_pre_attn_scalar", 1e-6, layout.MAX_SCALE, 256.0) ** -0.5,
        score_cap=fields.number("attn_logit_softcapping", 1e-6, layout.MAX_SCALE, None),
    )
    kinds = attention_kinds(fields, attention, dict.fromkeys((GLOBAL, LOCAL), read_rope(family, fields, config, heads)))
    attentions = [kinds[kind] for kind in read_layer_types(fields, n_layers, 2)]
    return replace(
        add_layers(family, config, attentions, [read_ffn(family, fields)] * n_layers),
        embedding_scale=float(np.sqrt(np.float32(config.d_model))),
        logit_cap=fields.number("final_logit_softcapping", 1e-6, layout.MAX_SCALE, None),
    )


def _score_scale(fields: Fields, heads: Sequence[AttentionConfig]) -> float | None:
    """The scale of Gemma 2 27B, which llama.cpp knows by its number of layers."""
    if len(heads) != 46:
        return None
    width = fields.integer("embedding_length", 1, layout.MAX_WIDTH)
    return float((width // heads[0].n_heads) ** -0.5)


FOLDERS = (
    Folder(
        "gemma2", ("Gemma2ForCausalLM",), _read,
        defaults={
            "num_hidden_layers": 26, "hidden_size": 2304, "num_attention_heads": 8, "num_key_value_heads": 4,
            "head_dim": 256, "intermediate_size": 9216, "hidden_activation": "gelu_pytorch_tanh", "vocab_size": 256000,
            "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "sliding_window": 4096,
            "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0, "tie_word_embeddings": True,
        },
        keys={"hidden_act": "hidden_activation"},
        activations={"gelu_pytorch_tanh": "gelu_tanh"} | GATED, norms="both", names=FOUR_NORMS, norms_less_one=True,
    ),
)  # fmt: skip
GGUFS = (
    Gguf(
        "gemma2", "gelu_tanh", norms="both", full_every=2, single_rope=True, window=4096, scaled=True,
        score_scale=_score_scale, score_cap=50.0, logit_cap=30.0,
    ),
)  # fmt: skip
