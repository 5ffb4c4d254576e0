"""OLMo 2 and 3, and OLMoE."""

from __future__ import annotations

from collections.abc import Sequence

from powerinfer.config import FfnKind, ModelConfig
from powerinfer.formats.family import EXPERTS_NAMES, FOUR_NORMS, UNNORMALISED, Folder, Gguf
from powerinfer.formats.fields import Fields
from powerinfer.formats.folder_parts import (
    add_biases,
    add_layers,
    attention_kinds,
    read_experts,
    read_ffn,
    read_heads,
    read_layer_types,
)
from powerinfer.formats.folder_rope import read_ropes


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
GGUFS = (
    Gguf("olmo2", "silu", norms="output", qk_norm="width", full_every=4),  # the window is OLMo 3's
    Gguf("olmoe", "silu", qk_norm="width", experts=UNNORMALISED),
)
