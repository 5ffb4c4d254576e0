"""EXAONE 4, which rotates positions in the layers with a window alone, if it has some."""

from __future__ import annotations

from powerinfer.config import ModelConfig
from powerinfer.formats import layout
from powerinfer.formats.family import FOUR_NORMS, Folder, Gguf
from powerinfer.formats.fields import Fields
from powerinfer.formats.folder_parts import add_layers, local_ropes, read_ffn, read_layer_types
from powerinfer.formats.folder_rope import GLOBAL


def _read(family: Folder, fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    """Every layer is global where there is no window, and rotated then."""
    windowed = fields.has("sliding_window")
    interval = fields.integer("sliding_window_pattern", 1, layout.MAX_LAYERS, 4) if not fields.has("layer_types") else 4
    types = read_layer_types(fields, n_layers, interval) if windowed else [GLOBAL] * n_layers
    fields.get("layer_types", None)
    attentions = local_ropes(family, fields, config, types, unrotated=windowed)
    return add_layers(family, config, attentions, [read_ffn(family, fields)] * n_layers)


FOLDERS = (
    Folder(
        "exaone4", ("Exaone4ForCausalLM",), _read,
        defaults={
            "vocab_size": 102400, "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_act": "silu",
            "max_position_embeddings": 2048, "sliding_window": 4096,
        },
        biases=(None, None), qk_norm="head", norms="output", names=FOUR_NORMS,
    ),
)  # fmt: skip
GGUFS = (Gguf("exaone4", "silu", norms="output", qk_norm="head", full_every=4, single_rope=True, full_unrotated=True),)
