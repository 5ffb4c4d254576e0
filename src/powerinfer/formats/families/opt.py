"""OPT."""

from __future__ import annotations

from dataclasses import replace

from powerinfer.config import FfnConfig, LayerConfig, ModelConfig, uniform
from powerinfer.formats import layout
from powerinfer.formats.family import Folder, Gguf, Tensors
from powerinfer.formats.fields import Fields
from powerinfer.formats.folder_parts import read_activation, read_heads
from powerinfer.formats.source import Names


def _read(family: Folder, fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    fields.only("layer_norm_elementwise_affine", True)
    first = fields.flag("do_layer_norm_before", True)
    bias = fields.flag("enable_bias", True)
    width = fields.integer("word_embed_proj_dim", 1, layout.MAX_WIDTH, config.d_model)
    activation = read_activation(family, fields)
    heads = read_heads(family, fields, config)
    layer = LayerConfig(
        replace(heads, n_kv_heads=heads.n_heads, qkv_bias=bias, o_bias=bias),
        FfnConfig(fields.integer("ffn_dim", 1, layout.MAX_WIDTH), activation, gated=False, bias=bias),
        norms="pre" if first else "post",
    )
    return replace(
        config,
        norm_eps=1e-5,  # torch's own default; the configuration has no key for it
        layers=uniform(n_layers, layer),
        norm="layer",
        positions="learned",
        position_offset=2,
        embed_dim=0 if width == config.d_model else width,
        final_norm=first and not fields.flag("_remove_final_layer_norm", False),
    )


def _rename(stored: Tensors) -> list[str]:
    """The prefix that some folders leave out."""
    if not any(name.startswith("model.decoder.") for name in stored):
        for name in [name for name in stored if name.startswith("decoder.")]:
            stored[f"model.{name}"] = stored.pop(name)
    return []


FOLDERS = (
    Folder(
        "opt", ("OPTForCausalLM",), _read, defaults={"activation_function": "relu", "tie_word_embeddings": True},
        keys={"hidden_act": "activation_function"}, other_head_dim=False, activations={"relu": "relu"},
        names=Names(
            outer={
                "embed": "model.decoder.embed_tokens", "positions": "model.decoder.embed_positions",
                "project_in": "model.decoder.project_in", "project_out": "model.decoder.project_out",
                "final_norm": "model.decoder.final_layer_norm", "head": "lm_head",
            },
            layers="model.decoder.layers",
            inner={
                "attn_norm": "self_attn_layer_norm", "ffn_norm": "final_layer_norm",
                **{name: f"self_attn.{name}_proj" for name in "qkv"}, "o": "self_attn.out_proj", "up": "fc1",
                "down": "fc2",
            },
        ),
        rename=_rename,
    ),
)
GGUFS = (
    Gguf(
        "opt", "relu", gated=False, norm="layer", positions="learned", epsilon=1e-5,  # no writer states it
        published="relu", pre_tokenizer="gpt-2",
    ),
)  # fmt: skip
