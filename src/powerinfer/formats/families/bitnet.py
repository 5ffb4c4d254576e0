"""BitNet b1.58: norms of what heads give and of the products of neurons, each before the next matrix. Matrices are of
-1, 0 and 1 times a scale: formats/ternary_weights.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from powerinfer.config import AttentionConfig, FfnConfig, FfnKind, ModelConfig
from powerinfer.formats.family import GATED, LLAMA_DEFAULTS, LLAMA_NAMES, Folder, Gguf
from powerinfer.formats.fields import Fields
from powerinfer.formats.folder_parts import change_attention, read_ffn, read_plain


def _read(family: Folder, fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    return change_attention(read_plain(family, fields, config, n_layers), attended_norm=True)


def _normalised_ffns(family: Folder, fields: Fields, n_layers: int) -> Sequence[FfnKind]:
    return [replace(read_ffn(family, fields), inner_norm=True)] * n_layers


def _change_heads(fields: Fields, heads: Sequence[AttentionConfig]) -> list[AttentionConfig]:
    return [replace(attention, attended_norm=True) for attention in heads]


def _change_ffns(fields: Fields, ffns: Sequence[FfnKind]) -> list[FfnKind]:
    return [replace(ffn, inner_norm=True) if isinstance(ffn, FfnConfig) else ffn for ffn in ffns]


FOLDERS = (
    Folder(
        "bitnet", ("BitNetForCausalLM",), _read, replaces_code=True,
        defaults=LLAMA_DEFAULTS | {
            "vocab_size": 128256, "hidden_size": 2560, "intermediate_size": 6912, "num_hidden_layers": 30,
            "num_attention_heads": 20, "num_key_value_heads": 5, "max_position_embeddings": 2048, "hidden_act": "relu2",
            "rms_norm_eps": 1e-5,
        },
        theta=500000.0, ffns=_normalised_ffns,
        activations={name: GATED[name] for name in ("relu2", "silu", "swish", "relu")},
        names=LLAMA_NAMES.extended({"attended_norm": "self_attn.attn_sub_norm", "inner_norm": "mlp.ffn_sub_norm"}),
    ),
)  # fmt: skip
GGUFS = (Gguf("bitnet", "silu", change=_change_heads, change_ffns=_change_ffns),)
