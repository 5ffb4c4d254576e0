"""OLMo 1 to 3, and OLMoE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from powerinfer.config import AttentionConfig, FfnKind, ModelConfig
from powerinfer.formats import layout
from powerinfer.formats.family import EXPERTS_NAMES, FOUR_NORMS, UNNORMALISED, Folder, Gguf, Tensors
from powerinfer.formats.fields import Fields
from powerinfer.formats.folder_parts import (
    add_biases,
    add_layers,
    attention_kinds,
    change_attention,
    plain_norms,
    read_experts,
    read_ffn,
    read_heads,
    read_layer_types,
    read_plain,
)
from powerinfer.formats.folder_rope import read_ropes
from powerinfer.formats.tensors import MadeTensor


def _read_olmo(family: Folder, fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    """LayerNorm without weights, whose epsilon no file states."""
    clip = fields.number("clip_qkv", 1e-6, layout.MAX_SCALE, None)
    config = change_attention(read_plain(family, fields, config, n_layers), qkv_clip=clip)
    return replace(config, norm_bias=False, norm_eps=1e-5)


def _make_norms(config: ModelConfig, stored: Tensors, source: str) -> dict[str, MadeTensor]:
    return plain_norms(config)


def _clip(fields: Fields, heads: Sequence[AttentionConfig]) -> list[AttentionConfig]:
    clip = fields.number("attention.clamp_kqv", 0, layout.MAX_SCALE, 0.0) or None
    return [replace(one, qkv_clip=clip) for one in heads]


def _read_olmo3(family: Folder, fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    attention = add_biases(family, fields, read_heads(family, fields, config))
    kinds = attention_kinds(fields, attention, read_ropes(family, fields, config, attention, None))
    attentions = [kinds[kind] for kind in read_layer_types(fields, n_layers, 4)]
    return add_layers(family, config, attentions, [read_ffn(family, fields)] * n_layers)


def _read_experts(family: Folder, fields: Fields, n_layers: int) -> Sequence[FfnKind]:
    normalise = fields.flag("norm_topk_prob", False)
    return [read_experts(family, fields, "num_experts", "intermediate_size", normalise=normalise)] * n_layers


_DEFAULTS = {"vocab_size": 50304, "max_position_embeddings": 2048, "hidden_act": "silu", "sliding_window": 4096}

FOLDERS = (
    Folder(
        "olmo", ("OlmoForCausalLM",), _read_olmo,
        defaults={
            "vocab_size": 50304, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
            "num_attention_heads": 32, "hidden_act": "silu", "max_position_embeddings": 2048,
        },
        norm="layer", make=_make_norms,
    ),
    Folder("olmo2", ("Olmo2ForCausalLM",), defaults=_DEFAULTS, qk_norm="width", norms="output", names=FOUR_NORMS),
    Folder(
        "olmo3", ("Olmo3ForCausalLM",), _read_olmo3, defaults=_DEFAULTS, theta=5e5, qk_norm="width", norms="output",
        names=FOUR_NORMS,
    ),
    Folder(
        "olmoe", ("OlmoeForCausalLM",),
        defaults={
            "hidden_act": "silu", "num_experts": 64, "num_experts_per_tok": 8, "intermediate_size": 2048,
            "vocab_size": 50304, "max_position_embeddings": 4096,
        },
        qk_norm="width", ffns=_read_experts, names=EXPERTS_NAMES,
    ),
)  # fmt: skip
_GGUF2 = Gguf("olmo2", "silu", norms="output", qk_norm="width", full_every=4, whole_factor=True)  # OLMo 3 has windows
GGUFS = (
    Gguf("olmo", "silu", norm="layer", interleaved=True, plain_norms=True, change=_clip),
    _GGUF2,
    replace(_GGUF2, architecture="olmo3", pre_tokenizer="dbrx"),  # as Ollama calls it
    Gguf("olmoe", "silu", qk_norm="width", experts=UNNORMALISED),
)
