"""MiniCPM up to 4.1, whose layers are Llama's with factors. (MiniCPM 5 is a Llama.)"""

from __future__ import annotations

from dataclasses import replace

from powerinfer.config import ModelConfig
from powerinfer.formats import layout
from powerinfer.formats.family import Folder, Gguf
from powerinfer.formats.fields import Fields
from powerinfer.formats.folder_parts import read_plain


def _read(family: Folder, fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    if fields.has("sparse_config"):
        fields.notes.append("sparse_config is not applied: attention is dense in long contexts, too")
    depth = fields.number("scale_depth", 1e-6, layout.MAX_SCALE, 1.0)
    return replace(
        read_plain(family, fields, config, n_layers),
        embedding_scale=fields.number("scale_emb", 1e-6, layout.MAX_SCALE, 1.0),
        residual_scale=depth / n_layers**0.5,
        logit_scale=fields.number("dim_model_base", 1e-6, layout.MAX_SCALE, 1.0) / config.d_model,
    )


def _scales(d_model: int, n_layers: int) -> dict[str, float]:
    """Factors of files of before 2025, which do not state them."""
    return {"embedding": 12.0, "residual": 1.4 / n_layers**0.5, "logit": d_model / 256}


FOLDERS = (
    Folder(
        "minicpm", ("MiniCPMForCausalLM",), _read, replaces_code=True,
        defaults={
            "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
            "num_attention_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "hidden_act": "silu",
            "tie_word_embeddings": True,
        },
    ),
)  # fmt: skip
GGUFS = (Gguf("minicpm", "silu", interleaved=True, scales=True, missing_scales=_scales),)
