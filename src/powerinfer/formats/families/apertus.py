"""Apertus: the activation xIELU, whose numbers each layer has learned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from powerinfer.config import FfnConfig, FfnKind, ModelConfig, RopeConfig
from powerinfer.errors import ModelError
from powerinfer.formats import layout
from powerinfer.formats.family import LLAMA_DEFAULTS, LLAMA_NAMES, PLAIN, Folder, Gguf, Tensors
from powerinfer.formats.fields import Fields
from powerinfer.formats.folder_parts import add_biases, add_layers, read_ffn, read_heads
from powerinfer.formats.folder_rope import read_rope
from powerinfer.formats.tensors import RawTensor
from powerinfer.formats.weight_types import FLOAT_TYPES

_THETA = 12000000.0
_ROPE = RopeConfig(_THETA, scaling="llama3", factor=8.0, original_context_length=8192)
_START = {"alpha_n": 0.3, "alpha_p": 0.8, "beta": 0.5, "eps": -1e-6}
"""The curve of the class before training: its alphas, which are softplus of what files have, are of less than beta."""


def _read(family: Folder, fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    fields.only("qk_norm", True)
    fields.only("post_norm", False)
    heads = add_biases(family, fields, read_heads(family, fields, config))
    if fields.has("rope_parameters") or fields.has("rope_scaling"):
        rope = read_rope(family, fields, config, heads)
    else:
        rope = replace(_ROPE, dim=heads.head_dim)
        if fields.number("rope_theta", 1.0001, layout.MAX_THETA, _THETA) != _THETA:
            fields.notes.append("rope_theta is not applied without rope_scaling, as in transformers")
    ffn = read_ffn(family, fields)
    if ffn.activation == "xielu":
        ffn = replace(ffn, curve=_curve(**_START))
    return add_layers(family, config, [replace(heads, rope=rope)] * n_layers, [ffn] * n_layers)


def _curve(alpha_n: float, alpha_p: float, beta: float, eps: float) -> tuple[float, ...]:
    """`FfnConfig.curve`; the alphas without beta, positive."""
    return alpha_p, beta + alpha_n, beta, eps


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def _take_curves(config: ModelConfig, stored: Tensors, source: str) -> ModelConfig:
    """The configuration with the curves that tensors have; `beta` and `eps` may be missing, as in the class."""
    layers = []
    for at, layer in enumerate(config.layers):
        names = {part: f"model.layers.{at}.mlp.act_fn.{part}" for part in _START}
        tensors = {part: stored.pop(name) for part, name in names.items() if name in stored}
        if layer.neurons.activation != "xielu":
            continue
        numbers = dict(_START)
        for part, tensor in tensors.items():
            if not isinstance(tensor, RawTensor) or tensor.type not in FLOAT_TYPES or tensor.size != 1:
                raise ModelError(f"{source}: tensor {names[part]} is not one number")
            numbers[part] = float(tensor.float32().reshape(-1)[0])
            if not abs(numbers[part]) <= layout.MAX_SCALE:
                raise ModelError(f"{source}: tensor {names[part]} is {numbers[part]:g}, which no curve has")
        if missing := [names[part] for part in ("alpha_n", "alpha_p") if part not in tensors]:
            raise ModelError(f"{source}: tensor {missing[0]} is missing")
        numbers |= {part: _softplus(numbers[part]) for part in ("alpha_n", "alpha_p")}
        layers.append(replace(layer, ffn=replace(layer.neurons, curve=_curve(**numbers))))
    return replace(config, layers=tuple(layers)) if layers else config


def _read_curves(fields: Fields, ffns: Sequence[FfnKind]) -> list[FfnKind]:
    """The FFNs of a GGUF file, whose keys do not begin with the architecture, and whose alphas are as folders have
    them."""
    high, curves = layout.MAX_SCALE, fields.prefixed("xielu.")
    columns = {part: curves.numbers(part, len(ffns), -high, high) for part in _START}
    for part in ("alpha_n", "alpha_p"):
        columns[part] = [_softplus(number) for number in columns[part]]
    changed: list[FfnKind] = []
    for at, ffn in enumerate(ffns):
        assert isinstance(ffn, FfnConfig)
        changed.append(replace(ffn, curve=_curve(**{part: column[at] for part, column in columns.items()})))
    return changed


FOLDERS = (
    Folder(
        "apertus", ("ApertusForCausalLM",), _read,
        defaults=LLAMA_DEFAULTS | {
            "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "max_position_embeddings": 65536, "rms_norm_eps": 1e-5, "hidden_act": "xielu",
        },
        theta=_THETA, qk_norm="head", gated=False, activations=PLAIN | {"xielu": "xielu"}, adapt=_take_curves,
        names=LLAMA_NAMES.extended({"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"}),
    ),
)  # fmt: skip
GGUFS = (Gguf("apertus", "xielu", gated=False, qk_norm="head", change_ffns=_read_curves),)
