"""Cohere's Command R7B and Command A: attention beside the FFN, positions rotated in the layers with a window alone."""

from __future__ import annotations

from dataclasses import replace

from powerinfer.config import ModelConfig
from powerinfer.formats import layout
from powerinfer.formats.family import Folder, Gguf
from powerinfer.formats.fields import Fields
from powerinfer.formats.folder_parts import add_layers, local_ropes, read_ffn, read_layer_types


def _read(family: Folder, fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    interval = fields.integer("sliding_window_pattern", 1, layout.MAX_LAYERS, 4)
    fields.integer("sliding_window", 1, layout.MAX_CONTEXT)
    attentions = local_ropes(family, fields, config, read_layer_types(fields, n_layers, interval))
    return make_parallel(fields, add_layers(family, config, attentions, [read_ffn(family, fields)] * n_layers))


def make_parallel(fields: Fields, config: ModelConfig) -> ModelConfig:
    """The configuration with attention beside the FFN, norms without biases, and the factor of the logits."""
    layers = tuple(replace(layer, parallel=True, shared_norm=True) for layer in config.layers)
    scale = fields.number("logit_scale", 1e-6, layout.MAX_SCALE)
    return replace(config, layers=layers, norm_bias=False, logit_scale=float(scale))


DEFAULTS = {
    "vocab_size": 256000, "hidden_size": 8192, "intermediate_size": 22528, "num_hidden_layers": 40,
    "num_attention_heads": 64, "hidden_act": "silu", "max_position_embeddings": 8192, "sliding_window": 4096,
    "logit_scale": 0.0625, "tie_word_embeddings": True,
}  # fmt: skip
"""Defaults of the class, and of that with experts."""

FOLDERS = (
    Folder(
        "cohere2", ("Cohere2ForCausalLM",), _read,
        defaults=DEFAULTS,
        keys={"rms_norm_eps": "layer_norm_eps"}, other_head_dim=False, interleaved=True, norm="layer",
    ),
)  # fmt: skip
GGUFS = (
    Gguf(
        "cohere2", "silu", norm="layer", interleaved=True, parallel=True, window=None, full_every=4, single_rope=True,
        full_unrotated=True, scaled_logits=True,
    ),
)  # fmt: skip
