"""Llama 4: chunks of attention, layers that do not rotate positions, and a router that scales what experts read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from powerinfer.config import AttentionConfig, ExpertsConfig, FfnConfig, FfnKind, ModelConfig, RouterConfig
from powerinfer.errors import ModelError
from powerinfer.formats import layout
from powerinfer.formats.family import EXPERTS_NAMES, Folder, Gguf, Tensors
from powerinfer.formats.fields import Fields
from powerinfer.formats.folder_parts import (
    add_biases,
    add_layers,
    read_activation,
    read_ffn_size,
    read_heads,
    read_layer_types,
    read_switches,
)
from powerinfer.formats.folder_rope import GLOBAL, read_rope
from powerinfer.formats.mapped import shown
from powerinfer.formats.quant import Bytes, block_type
from powerinfer.formats.source import keep_text
from powerinfer.formats.tensors import MadeTensor, RawTensor
from powerinfer.formats.weight_types import FLOAT_TYPES

_CHUNKED = "chunked_attention"
_ROUTER = RouterConfig(1, scoring="sigmoid", normalise=False, scales_input=True)


def _read(family: Folder, fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    heads = add_biases(family, fields, read_heads(family, fields, config))
    rope = read_rope(family, fields, config, heads)
    qk_norm = "plain" if fields.flag("use_qk_norm", True) else None  # as good as behind the rotation
    chunk = fields.integer("attention_chunk_size", 1, layout.MAX_CONTEXT, None)
    turns = _read_turns(fields, n_layers)
    pattern = [_CHUNKED if turn and chunk is not None else GLOBAL for turn in turns]
    kinds = read_layer_types(fields, n_layers, other=_CHUNKED, default=pattern)
    if _CHUNKED in kinds and chunk is None:
        raise fields.bad("attention_chunk_size", "is missing, and layer_types has chunks")
    rotated, unrotated = replace(heads, rope=rope, qk_norm=qk_norm), _grown(fields, heads)
    attentions = [
        replace(rotated if turn else unrotated, window=chunk if kind == _CHUNKED else None, chunked=kind == _CHUNKED)
        for turn, kind in zip(turns, kinds, strict=True)
    ]
    return add_layers(family, config, attentions, _read_ffns(family, fields, n_layers))


def _read_turns(fields: Fields, n_layers: int) -> list[int]:
    """Whether positions are rotated in each layer: `no_rope_layers` says where they are."""
    if fields.get("no_rope_layers", None):
        return read_switches(fields, "no_rope_layers", n_layers, 1)
    interval = fields.integer("no_rope_layer_interval", 1, layout.MAX_LAYERS, 4)
    return [int(layer % interval != 0) for layer in range(1, n_layers + 1)]


def _grown(fields: Fields, heads: AttentionConfig) -> AttentionConfig:
    """Heads whose positions are not rotated; their queries may grow with these."""
    growth = fields.number("attn_scale", 0, layout.MAX_SCALE, 0.1)
    interval = fields.integer("floor_scale", 1, layout.MAX_CONTEXT, 8192)
    tuning: Any = fields.get("attn_temperature_tuning", True)  # the first files have a number
    if type(tuning) not in (bool, int):
        raise fields.bad("attn_temperature_tuning", f"is {shown(tuning)}, not true or false")
    return replace(heads, query_growth=growth, query_interval=interval, query_offset=1) if tuning else heads


def _read_ffns(family: Folder, fields: Fields, n_layers: int) -> Sequence[FfnKind]:
    """Experts beside a shared one of their size in `moe_layers`, or every so many layers."""
    activation, size = read_activation(family, fields), read_ffn_size(fields)
    dense = FfnConfig(fields.integer("intermediate_size_mlp", 1, layout.MAX_WIDTH), activation)
    n_experts = fields.integer("num_local_experts", 1, layout.MAX_EXPERTS)
    router = replace(_ROUTER, top_k=fields.integer("num_experts_per_tok", 1, n_experts))
    experts = ExpertsConfig(n_experts, size, router, activation, shared_size=size)
    interval = fields.integer("interleave_moe_layer_step", 1, layout.MAX_LAYERS, 1)
    routed: Any = fields.get("moe_layers", None)
    if routed is None:
        routed = range(interval - 1, n_layers, interval)
    elif type(routed) is not list or not all(type(layer) is int for layer in routed):
        raise fields.bad("moe_layers", f"is {shown(routed)}, not a list of layers")
    return [experts if layer in routed else dense for layer in range(n_layers)]


_EXPERTS = re.compile(r"layers\.(\d{1,9})\.feed_forward\.experts\.(gate_up_proj|down_proj)$")


def _make(config: ModelConfig, stored: Tensors, source: str) -> dict[str, MadeTensor]:
    """The experts' matrices: of each part one tensor, transposed, gate beside up."""
    places = {(int(match[1]), match[2]): name for name in stored if (match := _EXPERTS.search(name))}
    matrices: dict[str, MadeTensor] = {}
    for layer, experts in config.experts.items():
        shapes = dict(experts.tensors(config.d_model))
        for name, parts in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
            place = places.get((layer, name), f"model.layers.{layer}.feed_forward.experts.{name}")
            tensor = stored.pop(place, None)
            n, rows, cols = shapes[f"experts_{parts[0]}"]
            if not isinstance(tensor, RawTensor) or tensor.type not in FLOAT_TYPES:
                raise ModelError(f"{source}: tensor {place} is missing, or of a type that is not supported")
            if tensor.shape != (n, cols, rows * len(parts)):
                raise ModelError(f"{source}: tensor {place} has shape {list(tensor.shape)}")
            size = block_type(tensor.type).nbytes
            for at, part in enumerate(parts):
                turn = partial(_transposed, (n, cols), size, slice(at * rows, (at + 1) * rows))
                shape = shapes[f"experts_{part}"]
                matrices[f"layers.{layer}.experts_{part}"] = MadeTensor(tensor.type, shape, (tensor,), turn)
    return matrices


def _transposed(shape: tuple[int, int], size: int, columns: slice, data: Bytes) -> Bytes:
    """Some columns of matrices [in, out], as [out, in]."""
    matrices = data.view(f"<u{size}").reshape(*shape, -1)
    return np.ascontiguousarray(matrices[:, :, columns].swapaxes(1, 2)).view(np.uint8).reshape(-1)


def _change(fields: Fields, heads: Sequence[AttentionConfig]) -> list[AttentionConfig]:
    """Attention as llama.cpp implies it: in chunks, but for every fourth layer, which does not rotate positions; norms
    of q and k, but not in Maverick, which it knows by its experts. Ollama's files state chunks and norms."""
    fields.only("attention.sliding_window", 8192)
    chunk = fields.integer("attention.chunk_size", 1, layout.MAX_CONTEXT, 8192)
    plain = "plain" if fields.flag("use_qk_norm", fields.peek("expert_count") != 128) else None
    return [
        replace(attention, rope=None, window=None, query_growth=0.1, query_interval=8192, query_offset=1)
        if layer % 4 == 0
        else replace(attention, qk_norm=plain, window=chunk, chunked=True)
        for layer, attention in enumerate(heads, 1)
    ]


FOLDERS = (
    Folder(
        "llama4_text", ("Llama4ForCausalLM",), _read, vision_class="Llama4ForConditionalGeneration",
        defaults={
            "vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
            "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
            "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "num_experts_per_tok": 1,
            "num_local_experts": 16, "attention_chunk_size": 8192,
        },
        theta=5e5, interleaved=True,
        names=EXPERTS_NAMES.extended(
            {"router": "feed_forward.router"}
            | {part: f"feed_forward.{part}_proj" for part in ("gate", "up", "down")}
            | {f"shared_{part}": f"feed_forward.shared_expert.{part}_proj" for part in ("gate", "up", "down")}
        ),
        rename=keep_text, make=_make,
    ),
)  # fmt: skip
GGUFS = (Gguf("llama4", "silu", interleaved=True, experts=_ROUTER, change=_change),)
