"""Falcon, of both decoder architectures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from powerinfer.config import FfnConfig, LayerConfig, ModelConfig, uniform
from powerinfer.formats import layout
from powerinfer.formats.family import PLAIN, Folder, Gguf
from powerinfer.formats.fields import Fields
from powerinfer.formats.folder_parts import read_activation, read_heads
from powerinfer.formats.folder_rope import read_rope
from powerinfer.formats.source import Fused, Names, SingleTensor


def _read(family: Folder, fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    fields.only("n_embed", config.d_model)
    if fields.flag("alibi", False):
        raise fields.bad("alibi", "is true: ALiBi positions are not supported")
    new = fields.flag("new_decoder_architecture", False)
    parallel = fields.flag("parallel_attn", False)
    if new and not parallel:
        raise fields.bad("parallel_attn", "is false, which does not go with new_decoder_architecture")
    norms = fields.integer("num_ln_in_parallel_attn", 1, 2, 2 if new else 1)
    if parallel and not new and norms == 2:
        raise fields.bad("num_ln_in_parallel_attn", "is 2, which goes with new_decoder_architecture only")
    heads = read_heads(family, fields, config)
    kv_heads = fields.integer("num_kv_heads", 1, layout.MAX_HEADS, heads.n_heads)
    if not new:
        single = fields.flag("multi_query", False)
        if not single and kv_heads != heads.n_heads:
            raise fields.bad("num_kv_heads", f"is {kv_heads}, but without multi_query there are {heads.n_heads}")
        kv_heads = 1 if single else heads.n_heads
    bias = fields.flag("bias", False)
    size = fields.integer("ffn_hidden_size", 1, layout.MAX_WIDTH, 4 * config.d_model)
    rope = read_rope(family, fields, config, heads)
    layer = LayerConfig(
        replace(heads, n_kv_heads=kv_heads, rope=rope, qkv_bias=bias, o_bias=bias),
        FfnConfig(size, read_activation(family, fields), gated=False, bias=bias),
        parallel=parallel,
        shared_norm=parallel and norms == 1,
    )
    return replace(config, layers=uniform(n_layers, layer), norm="layer")


_NAMES = Names(
    outer={"embed": "transformer.word_embeddings", "head": "lm_head", "final_norm": "transformer.ln_f"},
    layers="transformer.h",
    inner={
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
        **dict.fromkeys("qkv", "self_attention.query_key_value"), "o": "self_attention.dense",
        "up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h",
    },
)
_TWO_NORMS = _NAMES.extended({"attn_norm": "ln_attn", "ffn_norm": "ln_mlp"})


def _find_names(config: ModelConfig, stored: Mapping[str, SingleTensor]) -> Names:
    return _TWO_NORMS if config.layers[0].parallel and not config.layers[0].shared_norm else _NAMES


def _fused(config: ModelConfig, names: Names) -> list[Fused]:
    return [Fused(("q", "k", "v"), config.layers[0].attention.n_kv_heads)]


FOLDERS = (
    Folder(
        "falcon", ("FalconForCausalLM",), _read, replaces_code=True,
        defaults={
            "max_position_embeddings": 2048, "activation": "gelu", "tie_word_embeddings": True, "parallel_attn": True,
            "multi_query": True,
        },
        keys={"rms_norm_eps": "layer_norm_epsilon", "hidden_act": "activation"}, other_head_dim=False,
        activations=PLAIN, find_names=_find_names, fused=_fused,
    ),
)  # fmt: skip
GGUFS = (
    Gguf("falcon", "gelu", gated=False, norm="layer", parallel=True, published="relu", pre_tokenizer="falcon"),
)
