"""OLMo 2 and 3, and OLMoE."""

from __future__ import annotations

from collections.abc import Sequence

from powerinfer.config import FfnKind, ModelConfig
from powerinfer.formats.family import AS_THEY_ARE, EXPERTS_NAMES, FOUR_NORMS, Folder, Gguf
from powerinfer.formats.fields import Fields
from powerinfer.formats.folder_parts import (
    attention_kinds,
    experts_of,
    ffn_of,
    heads_of,
    layer_types,
    with_biases,
    with_layers,
)
from powerinfer.formats.folder_rope import ropes_of_kinds


def _olmo3(family: Folder, fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    attention = with_biases(family, fields, heads_of(family, fields, config))
    kinds = attention_kinds(fields, attention, ropes_of_kinds(family, fields, config, attention, None))
    attentions = [kinds[kind] for kind in layer_types(fields, n_layers, 4)]
    return with_layers(family, config, attentions, [ffn_of(family, fields)] * n_layers)


def _experts(family: Folder, fields: Fields, n_layers: int) -> Sequence[FfnKind]:
    normalise = fields.flag("norm_topk_prob", False)
    return [experts_of(family, fields, "num_experts", "intermediate_size", normalise=normalise)] * n_layers


_DEFAULTS = {"vocab_size": 50304, "max_position_embeddings": 2048, "hidden_act": "silu", "sliding_window": 4096}

FOLDERS = (
    Folder("olmo2", ("Olmo2ForCausalLM",), defaults=_DEFAULTS, qk_norm="width", norms="output", names=FOUR_NORMS),
    Folder(
        "olmo3", ("Olmo3ForCausalLM",), _olmo3, defaults=_DEFAULTS, theta=5e5, qk_norm="width", norms="output",
        names=FOUR_NORMS,
    ),
    Folder(
        "olmoe", ("OlmoeForCausalLM",),
        defaults={
            "hidden_act": "silu", "num_experts": 64, "num_experts_per_tok": 8, "intermediate_size": 2048,
            "vocab_size": 50304, "max_position_embeddings": 4096,
        },
        qk_norm="width", ffns=_experts, names=EXPERTS_NAMES,
    ),
)  # fmt: skip
GGUFS = (
    Gguf("olmo2", "silu", norms="output", qk_norm="width", full_every=4),  # the window is OLMo 3's
    Gguf("olmoe", "silu", qk_norm="width", experts=AS_THEY_ARE),
)
