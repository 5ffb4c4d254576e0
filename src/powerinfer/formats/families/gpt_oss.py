"""gpt-oss, whose folders have experts in an order of their own.

Rows of gate and up take turns in one tensor. Experts in MXFP4 are two tensors, `*_blocks` and `*_scales`, whose bytes
hold neighbouring elements; other experts are transposed, [in, out].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import prod

import numpy as np

from powerinfer.config import ExpertsConfig, FfnKind, ModelConfig, RouterConfig, Shape
from powerinfer.errors import ModelError
from powerinfer.formats import layout
from powerinfer.formats.family import LLAMA_NAMES, NORMALISED, SECOND_NORM, Folder, Gguf, Tensors
from powerinfer.formats.fields import Fields
from powerinfer.formats.folder_parts import change_attention, read_ffn_size, read_layer_types, read_plain, read_window
from powerinfer.formats.folder_rope import LOCAL
from powerinfer.formats.fp4_weights import split_halves
from powerinfer.formats.quant import Bytes, block_type
from powerinfer.formats.tensors import MadeTensor, RawTensor
from powerinfer.formats.weight_types import FLOAT_TYPES


def _read(family: Folder, fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    fields.only("hidden_act", "silu")
    fields.only("swiglu_alpha", 1.702)
    fields.only("swiglu_limit", 7.0, 7)
    if not fields.has("rope_parameters") and not fields.has("rope_scaling"):
        raise fields.bad("rope_parameters", "is missing")
    return change_attention(read_plain(family, fields, config, n_layers), sinks=True)


def _read_windows(fields: Fields, layers: int) -> list[int | None]:
    windows, kinds = read_window(fields, layers), read_layer_types(fields, layers, 2)
    return [window if kind == LOCAL else None for window, kind in zip(windows, kinds, strict=True)]


def _read_experts(family: Folder, fields: Fields, n_layers: int) -> Sequence[FfnKind]:
    n_experts = fields.integer("num_local_experts", 1, layout.MAX_EXPERTS)
    router = RouterConfig(fields.integer("num_experts_per_tok", 1, n_experts), bias=True)
    return [ExpertsConfig(n_experts, read_ffn_size(fields), router, "swiglu_oai", bias=True)] * n_layers


_BLOCK = 32  # elements of a block of MXFP4, in 16 bytes and a scale
_TURNS = {"gate": (0, 2), "up": (1, 2), "down": (0, 1)}  # first row of a matrix in its tensor, and of how many


def take_experts(config: ModelConfig, stored: Tensors, source: str) -> dict[str, MadeTensor]:
    """The matrices of the experts by canonical name; what they are made of is no longer in `stored`.

    Sinks and biases stay there, under names with `.weight` and `.bias`. ModelError for a shape or type that cannot be.
    """
    tensors: dict[str, MadeTensor] = {}
    for layer, layer_config in enumerate(config.layers):
        assert isinstance(layer_config.ffn, ExpertsConfig)
        prefix = f"model.layers.{layer}."
        sinks = stored.pop(f"{prefix}self_attn.sinks", None)
        if sinks is not None:
            stored[f"{prefix}self_attn.sinks.weight"] = sinks
        for tensor, parts in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
            of_part = _PackedExperts(stored, f"{prefix}mlp.experts.{tensor}", source)
            for part in parts:
                shapes = dict(layer_config.ffn.tensors(config.d_model))
                name = f"experts_{part}"
                tensors[f"layers.{layer}.{name}"] = of_part.matrices(part, shapes[name])
                stored[f"{prefix}mlp.experts.{part}.bias"] = of_part.bias(part, shapes[f"{name}_bias"])
    return tensors


class _PackedExperts:
    """One tensor of experts, or the two that take its place."""

    def __init__(self, stored: Tensors, name: str, source: str) -> None:
        def take(end: str) -> RawTensor:
            tensor = stored.pop(name + end, None)
            if tensor is None:
                raise ModelError(f"{source}: tensor {name}{end} is missing")
            assert isinstance(tensor, RawTensor)
            return tensor

        self._source = f"{source}: tensor {name}"
        packed = f"{name}_blocks" in stored
        self._sources: tuple[RawTensor, ...]
        self._sources = (take("_blocks"), take("_scales")) if packed else (take(""),)
        self._bias = take("_bias")
        self._packed = packed

    def _check(self, end: str, tensor: RawTensor, types: frozenset[str], shape: Shape) -> None:
        if tensor.shape != shape:
            raise ModelError(f"{self._source}{end} has shape {list(tensor.shape)}, not {list(shape)}")
        if tensor.type not in types:
            raise ModelError(f"{self._source}{end} has type {tensor.type}, not {' or '.join(sorted(types))}")

    def matrices(self, part: str, shape: Shape) -> MadeTensor:
        """[experts, out, in]."""
        experts, rows, cols = shape
        first, turns = _TURNS[part]
        if self._packed:
            if cols % _BLOCK:
                raise ModelError(f"{self._source}_blocks: {cols} columns are not whole blocks of {_BLOCK}")
            per_row = cols // _BLOCK
            self._check("_blocks", self._sources[0], frozenset(("U8",)), (experts, turns * rows, per_row, 16))
            self._check("_scales", self._sources[1], frozenset(("U8",)), (experts, turns * rows, per_row))
            return MadeTensor("MXFP4", shape, self._sources, partial(_blocks_of, experts, per_row, first, turns))
        tensor = self._sources[0]
        self._check("", tensor, FLOAT_TYPES, (experts, cols, turns * rows))
        size = block_type(tensor.type).nbytes
        return MadeTensor(tensor.type, shape, self._sources, partial(_transposed, experts, cols, size, first, turns))

    def bias(self, part: str, shape: Shape) -> RawTensor:
        """[experts, out], a view."""
        experts, rows = shape
        first, turns = _TURNS[part]
        self._check("_bias", self._bias, FLOAT_TYPES, (experts, turns * rows))
        runs = self._bias.data.reshape(prod(shape), turns, -1)[:, first]
        return RawTensor(self._bias.type, shape, runs)


def _blocks_of(experts: int, per_row: int, first: int, turns: int, blocks: Bytes, scales: Bytes) -> Bytes:
    """Every turns-th row as blocks of 17 bytes: the scale, then elements 0-15 in low and 16-31 in high halves."""
    codes, exponents = blocks.reshape(experts, -1, per_row, 16), scales.reshape(experts, -1, per_row)
    out = np.empty((experts, codes.shape[1] // turns, per_row, 17), np.uint8)
    for to, pairs, exponent in zip(out, codes[:, first::turns], exponents[:, first::turns], strict=True):
        to[..., 0] = exponent
        to[..., 1:] = split_halves(pairs)
    return out.reshape(-1)


def _transposed(experts: int, cols: int, size: int, first: int, turns: int, data: Bytes) -> Bytes:
    """Matrices [in, out] as [out, in], every turns-th row."""
    matrices = data.view(f"<u{size}").reshape(experts, cols, -1)
    return np.ascontiguousarray(matrices[:, :, first::turns].swapaxes(1, 2)).view(np.uint8).reshape(-1)


FOLDERS = (
    Folder(
        "gpt_oss", ("GptOssForCausalLM",), _read, quantisation="mxfp4",
        defaults={
            "hidden_act": "silu", "num_local_experts": 128, "num_experts_per_tok": 4, "hidden_size": 2880,
            "intermediate_size": 2880, "head_dim": 64, "num_attention_heads": 64, "num_key_value_heads": 8,
            "num_hidden_layers": 36, "vocab_size": 201088, "max_position_embeddings": 131072, "sliding_window": 128,
            "attention_bias": True,
        },
        theta=150000.0, windows=_read_windows, ffns=_read_experts,
        names=LLAMA_NAMES.extended(
            {"router": "mlp.router", "sinks": "self_attn.sinks"}
            | {f"experts_{part}": f"mlp.experts.{part}" for part in ("gate", "up", "down")}
        ),
        make=take_experts,
    ),
)  # fmt: skip
_GGUF = Gguf(
    "gpt-oss", "swiglu_oai", full_every=2, single_rope=True, sinks=True, experts=NORMALISED, names=SECOND_NORM
)
GGUFS = (
    _GGUF,
    replace(_GGUF, architecture="gptoss", names={"o": "attn_out"}, scaling="yarn", pre_tokenizer="gpt-4o"),  # Ollama's
)
