"""StableLM 2 and StableLM 3B; the 12B has norms of each head with weights of its own, and attention beside the FFN."""

from __future__ import annotations

from dataclasses import replace

from powerinfer.config import ModelConfig
from powerinfer.formats.family import LLAMA_DEFAULTS, LLAMA_NAMES, Folder, Gguf
from powerinfer.formats.fields import Fields
from powerinfer.formats.folder_parts import change_attention, read_plain


def _read(family: Folder, fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    bias, parallel = fields.flag("use_qkv_bias", False), fields.flag("use_parallel_residual", False)
    norm = "separate" if fields.flag("qk_layernorm", False) else None
    config = change_attention(read_plain(family, fields, config, n_layers), qkv_bias=bias, qk_norm=norm)
    layers = (replace(layer, parallel=parallel, shared_norm=parallel) for layer in config.layers)
    return replace(config, layers=tuple(layers))


FOLDERS = (
    Folder(
        "stablelm", ("StableLmForCausalLM",), _read,
        defaults=LLAMA_DEFAULTS | {
            "vocab_size": 50304, "intermediate_size": 6912, "hidden_size": 2560, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 4096,
        },
        keys={"rms_norm_eps": "layer_norm_eps"}, other_head_dim=False, partial=0.25, biases=(None, None), norm="layer",
        names=LLAMA_NAMES.extended({f"{part}_norm": f"self_attn.{part}_layernorm.norms.{{}}" for part in "qk"}),
    ),
)  # fmt: skip
GGUFS = (Gguf("stablelm", "silu", norm="layer", partial=True, parallel=None, qk_norm="stored"),)
