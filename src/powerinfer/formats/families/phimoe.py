"""Phi-3.5-MoE: two experts by SparseMixer, LayerNorms, LongRoPE with factors of its own, a bias of the head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from powerinfer.config import FfnKind, ModelConfig, RouterConfig
from powerinfer.formats.families.llama import MIXTRAL_NAMES
from powerinfer.formats.family import LLAMA_NAMES, Folder, Gguf
from powerinfer.formats.fields import Fields
from powerinfer.formats.folder_parts import read_experts, read_plain, read_window

_NEARNESS = 0.01
"""Default of `router_jitter_noise`; GGUF files do not state it."""


def _read(family: Folder, fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    return replace(read_plain(family, fields, config, n_layers), head_bias=fields.flag("lm_head_bias", False))


def _read_experts(family: Folder, fields: Fields, n_layers: int) -> Sequence[FfnKind]:
    fields.only("num_experts_per_tok", 2)  # as many as the class has, whatever that says
    nearness = fields.number("router_jitter_noise", 0, 1, _NEARNESS)
    mixer = {"scoring": "sparsemixer", "normalise": False, "nearness": nearness}
    return [read_experts(family, fields, "num_local_experts", "intermediate_size", **mixer)] * n_layers


FOLDERS = (
    Folder(
        "phimoe", ("PhimoeForCausalLM", "PhiMoEForCausalLM"), _read, replaces_code=True,
        defaults={
            "vocab_size": 32064, "hidden_size": 4096, "intermediate_size": 6400, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
            "num_local_experts": 16, "num_experts_per_tok": 2, "hidden_act": "silu",
        },
        mscales=True, theta=1000000.0, windows=read_window, ffns=_read_experts, norm="layer",
        names=LLAMA_NAMES.extended(MIXTRAL_NAMES),
    ),
)  # fmt: skip
GGUFS = (
    Gguf(
        "phimoe", "silu", norm="layer", partial=True,
        experts=RouterConfig(2, scoring="sparsemixer", normalise=False, nearness=_NEARNESS),
    ),
)  # fmt: skip
