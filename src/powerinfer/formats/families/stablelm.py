"""StableLM 2 1.6B and StableLM 3B."""

from __future__ import annotations

from powerinfer.config import ModelConfig
from powerinfer.formats.family import LLAMA_DEFAULTS, Folder, Gguf
from powerinfer.formats.fields import Fields
from powerinfer.formats.folder_parts import change_attention, read_plain


def _read(family: Folder, fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    """Read all but what the 12B has: norms of each head, with weights of its own, and attention beside the FFN."""
    fields.only("qk_layernorm", False)
    fields.only("use_parallel_residual", False)
    bias = fields.flag("use_qkv_bias", False)
    return change_attention(read_plain(family, fields, config, n_layers), qkv_bias=bias)


FOLDERS = (
    Folder(
        "stablelm", ("StableLmForCausalLM",), _read,
        defaults=LLAMA_DEFAULTS | {
            "vocab_size": 50304, "intermediate_size": 6912, "hidden_size": 2560, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 4096,
        },
        keys={"rms_norm_eps": "layer_norm_eps"}, other_head_dim=False, partial=0.25, biases=(None, None), norm="layer",
    ),
)  # fmt: skip
GGUFS = (Gguf("stablelm", "silu", norm="layer", partial=True),)
