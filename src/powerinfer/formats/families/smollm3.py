"""SmolLM3, which does not rotate positions in every layer."""

from __future__ import annotations

from dataclasses import replace

from powerinfer.config import AttentionConfig, ModelConfig
from powerinfer.formats import layout
from powerinfer.formats.family import LLAMA_DEFAULTS, Folder, Gguf
from powerinfer.formats.fields import Fields
from powerinfer.formats.folder_parts import read_plain, read_switches, refuse_window


def _read(family: Folder, fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    layers = []
    config = read_plain(family, fields, config, n_layers)
    for layer, turns in zip(config.layers, _read_turned(fields, n_layers), strict=True):
        assert isinstance(layer.attention, AttentionConfig)
        layers.append(layer if turns else replace(layer, attention=replace(layer.attention, rope=None)))
    return replace(config, layers=tuple(layers))


def _read_turned(fields: Fields, n_layers: int) -> list[int]:
    """Whether positions are rotated in each layer: `no_rope_layers` says where they are."""
    interval = fields.integer("no_rope_layer_interval", 1, layout.MAX_LAYERS, 4)
    if fields.has("no_rope_layers"):
        return read_switches(fields, "no_rope_layers", n_layers, 1)
    return [int(layer % interval != 0) for layer in range(1, n_layers + 1)]


FOLDERS = (
    Folder(
        "smollm3", ("SmolLM3ForCausalLM",), _read,
        defaults=LLAMA_DEFAULTS | {
            "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
            "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 2e6,
            "tie_word_embeddings": True,
        },
        windows=refuse_window, mlp_bias=True,
    ),
)  # fmt: skip
GGUFS = (Gguf("smollm3", "silu", interleaved=True, unrotated_every=4),)
