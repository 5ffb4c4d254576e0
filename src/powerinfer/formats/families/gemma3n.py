"""Gemma 3n."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import NormalDist
from typing import Any

import numpy as np

from powerinfer.config import GAUSSIAN, AltUpConfig, FfnConfig, ModelConfig
from powerinfer.formats import layout
from powerinfer.formats.families.gemma4 import INPUT_NAMES, drop_unused, rename_parameters, unscaled
from powerinfer.formats.family import Folder, Gguf
from powerinfer.formats.fields import Fields
from powerinfer.formats.folder_parts import (
    add_biases,
    add_layers,
    attention_kinds,
    read_activation,
    read_heads,
    read_layer_types,
    sharing_keys,
)
from powerinfer.formats.folder_rope import read_ropes
from powerinfer.formats.mapped import shown

_CUT_LAYERS, _CUT_SHARE = 10, 0.95  # where nothing is stated: of the first layers, the share of neurons that are zero
_SOURCE_LAYERS = 20  # in llama.cpp: from here on they read the keys and values of others, whatever the file says


def _read(family: Folder, fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    heads = replace(add_biases(family, fields, read_heads(family, fields, config)), scale=1.0, v_norm=True)
    kinds = attention_kinds(fields, heads, read_ropes(family, fields, config, heads, 1e4))
    attentions = [kinds[kind] for kind in read_layer_types(fields, n_layers, 5)]
    first = n_layers - fields.integer("num_kv_shared_layers", 0, n_layers - 1)
    activation = read_activation(family, fields)
    sizes = fields.integers("intermediate_size", n_layers, 1, layout.MAX_WIDTH)
    ffns = _cut([FfnConfig(size, activation) for size in sizes], _cutoffs(fields, n_layers))
    config = add_layers(family, config, sharing_keys(fields, attentions, first), ffns)
    streams = fields.integer("altup_num_inputs", 1, layout.MAX_WIDTH)
    for key in ("altup_coef_clip", "altup_lr_multiplier", "query_pre_attn_scalar"):
        fields.get(key, None)  # of a training; the last has no effect in the class
    return replace(
        config,
        layer_inputs=fields.integer("hidden_size_per_layer_input", 1, layout.MAX_WIDTH),
        layer_input_rows=fields.integer("vocab_size_per_layer_input", 1, layout.MAX_VOCAB),
        altup=AltUpConfig(
            streams,
            fields.integer("altup_active_idx", 0, streams - 1),
            fields.integer("laurel_rank", 1, layout.MAX_WIDTH),
            fields.flag("altup_correct_scale"),
        ),
        embedding_scale=float(np.sqrt(np.float32(config.d_model))),
        logit_cap=fields.number("final_logit_softcapping", 1e-6, layout.MAX_SCALE, None),
    )


def _cut(ffns: Sequence[FfnConfig], cutoffs: Sequence[float | None]) -> list[FfnConfig]:
    """The FFNs of layers whose neurons a cutoff makes zero, in standard deviations of a token's gates; None: none
    does."""
    pairs = zip(ffns, cutoffs, strict=True)
    return [ffn if cutoff is None else replace(ffn, activation=GAUSSIAN, threshold=cutoff) for ffn, cutoff in pairs]


def _cutoffs(fields: Fields, n_layers: int) -> list[float | None]:
    """The cutoff of each layer, from the share of the neurons that it makes zero if gates are normally distributed."""
    key = "activation_sparsity_pattern"
    shares = _usual(n_layers)
    if fields.has(key):
        shares = fields.numbers(key, n_layers, 0, 1)
        if type(fields.get(key, None)) is not list or 1 in shares:
            raise fields.bad(key, f"is {shown(fields.get(key, None))}, not a share below 1 for every layer")
    return [float(np.float32(NormalDist().inv_cdf(share))) if share else None for share in shares]


def _usual(n_layers: int) -> list[float]:
    cut = _CUT_LAYERS if n_layers > _CUT_LAYERS else 0
    return [_CUT_SHARE] * cut + [0.0] * (n_layers - cut)


def _complete(fields: Fields, shapes: Mapping[str, tuple[int, ...]], config: ModelConfig) -> ModelConfig:
    """The configuration of a GGUF file with what its flags do not say. llama.cpp takes the usual numbers, whatever a
    file says; where it says none, they are the same here."""
    n_layers = config.n_layers
    attentions = [layer.heads for layer in config.layers]
    if not fields.has("attention.shared_kv_layers") and n_layers > _SOURCE_LAYERS:
        attentions = sharing_keys(fields, attentions, _SOURCE_LAYERS)
    ffns = [layer.ffn for layer in config.layers if isinstance(layer.ffn, FfnConfig)]
    pairs = zip(attentions, _cut(ffns, _stated_cutoffs(fields, n_layers)), config.layers, strict=True)
    layers = tuple(replace(layer, attention=attention, ffn=ffn) for attention, ffn, layer in pairs)
    streams = fields.integer("altup.num_inputs", 1, layout.MAX_WIDTH, 4)
    rank = shapes.get("blk.0.laurel_l.weight", (1,))[0]  # named later if it is missing
    active = fields.integer("altup.active_idx", 0, streams - 1, 0)
    altup = AltUpConfig(streams, active, max(rank, 1), fields.flag("altup.correct_scale", True))
    fields.get("altup.lr_multiplier", None)  # of a training, in Ollama's files, as is this one, which says it again:
    fields.only("head_dim", attentions[0].head_dim)
    return replace(config, layers=layers, altup=altup)


def _stated_cutoffs(fields: Fields, n_layers: int) -> list[float | None]:
    """The cutoff of each layer, minus infinity where there is none."""
    key = "activation_sparsity_scale"
    values: Any = fields.get(key, None)
    if values is None:
        return [NormalDist().inv_cdf(share) if share else None for share in _usual(n_layers)]
    numbers = type(values) is list and len(values) == n_layers and all(type(one) in (int, float) for one in values)
    if not numbers or any(math.isnan(one) or one > layout.MAX_SCALE for one in values):
        raise fields.bad(key, f"is {shown(values)}, not a number of standard deviations for every layer")
    return [float(one) if one > -layout.MAX_SCALE else None for one in values]


_NAMES = replace(
    INPUT_NAMES,
    outer=INPUT_NAMES.outer
    | {"altup_in": "model.altup_projections.{}", "altup_out": "model.altup_unembed_projections.{}"},
).extended(
    {
        "altup_router": "altup.modality_router",
        "altup_norm": "altup.router_norm",
        "altup_predict": "altup.prediction_coefs",
        "altup_correct": "altup.correction_coefs",
        "altup_scale": "altup.correct_output_scale",
        "laurel_in": "laurel.linear_left",
        "laurel_out": "laurel.linear_right",
        "laurel_norm": "laurel.post_laurel_norm",
    }
)

FOLDERS = (
    Folder(
        "gemma3n_text", ("Gemma3nForCausalLM",), _read, vision_class="Gemma3nForConditionalGeneration",
        defaults={
            "vocab_size": 262400, "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 35,
            "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True, "sliding_window": 512, "final_logit_softcapping": 30.0,
            "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256, "altup_active_idx": 0,
            "altup_correct_scale": True, "altup_num_inputs": 4, "num_kv_shared_layers": 15, "laurel_rank": 64,
        },
        keys={"hidden_act": "hidden_activation"}, theta=1e6, qk_norm="head",
        activations={"gelu_pytorch_tanh": "gelu_tanh"}, norms="both", names=_NAMES,
        rename=partial(rename_parameters, (".correct_output_scale",)), make=drop_unused,
    ),
)  # fmt: skip
GGUFS = (
    Gguf(
        "gemma3n", "gelu_tanh", norms="both", qk_norm="head", v_norm=True, full_every=5, local_theta=10000.0,
        scaled=True, score_scale=unscaled, logit_cap=30.0, layer_inputs=256, complete=_complete,
        names={
            "altup_router": "altup_router", "altup_norm": "altup_router_norm", "altup_predict": "altup_predict_coef",
            "altup_correct": "altup_correct_coef", "altup_scale": "altup_correct_scale", "laurel_in": "laurel_l",
            "laurel_out": "laurel_r", "laurel_norm": "laurel_post_norm",
        },
    ),
)  # fmt: skip
