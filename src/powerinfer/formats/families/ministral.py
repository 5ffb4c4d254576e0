"""Ministral 3 and Devstral 2, whose queries grow with their positions."""

from __future__ import annotations

from typing import Any

from powerinfer.config import ModelConfig
from powerinfer.formats import layout
from powerinfer.formats.family import NORMALISED, Folder, Gguf
from powerinfer.formats.fields import Fields
from powerinfer.formats.folder_parts import change_attention, read_plain, read_window
from powerinfer.formats.folder_rope import read_growth
from powerinfer.formats.source import keep_text


def default_rope(theta: float, factor: float, original: int) -> dict[str, Any]:
    """The `rope_parameters` of a folder that states none."""
    yarn = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    return yarn | {"rope_theta": theta, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}


def _read(family: Folder, fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    return change_attention(read_plain(family, fields, config, n_layers), **read_growth(fields))


def read_gguf_growth(fields: Fields) -> dict[str, Any]:
    """Settings of attention by which queries grow, with every `original_context_length` positions."""
    growth = fields.number("rope.scaling_beta", 0, layout.MAX_SCALE, 0.0)  # as Ollama calls it
    growth = fields.number("attention.temperature_scale", 0, layout.MAX_SCALE, growth)
    if not growth:
        return {}
    interval = fields.integer("rope.scaling.original_context_length", 1, layout.MAX_CONTEXT)
    return {"query_growth": growth, "query_interval": interval}


FOLDERS = (
    Folder(
        "ministral3", ("Ministral3ForCausalLM",), _read, vision_class="Mistral3ForConditionalGeneration",
        defaults={
            "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 34,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
            "max_position_embeddings": 262144, "rope_parameters": default_rope(1e6, 16.0, 16384),
        },
        kv_heads_stated=True, biases=(None, None), windows=read_window, grown=True, rename=keep_text,
    ),
)  # fmt: skip
GGUFS = (Gguf("mistral3", "silu", interleaved=True, experts=NORMALISED, multiplied=True, growth=read_gguf_growth),)
