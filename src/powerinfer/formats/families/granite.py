"""Granite, dense, with windows, with experts, and with a shared one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from powerinfer.config import ExpertsConfig, FfnKind, ModelConfig
from powerinfer.formats import layout
from powerinfer.formats.family import LLAMA_DEFAULTS, LLAMA_NAMES, NORMALISED, Folder, Gguf, Tensors
from powerinfer.formats.fields import Fields
from powerinfer.formats.folder_parts import (
    change_attention,
    read_experts,
    read_layer_types,
    read_local_experts,
    read_plain,
    read_switches,
)
from powerinfer.formats.folder_rope import GLOBAL, LOCAL
from powerinfer.formats.source import Fused, Names


def read_factor(fields: Fields, key: str) -> float:
    """A factor of Granite's, or the divisor of the logits."""
    return float(fields.number(key, 1e-6, layout.MAX_SCALE, 1.0))


def scale_sums(fields: Fields, config: ModelConfig) -> ModelConfig:
    """The configuration with Granite's factors, apart from that of attention's scores."""
    return replace(
        config,
        embedding_scale=read_factor(fields, "embedding_multiplier"),
        residual_scale=read_factor(fields, "residual_multiplier"),
        logit_scale=1 / read_factor(fields, "logits_scaling"),
    )


def _read(family: Folder, fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    config = read_plain(family, fields, config, n_layers)
    return scale_sums(fields, change_attention(config, scale=read_factor(fields, "attention_multiplier")))


def _read_windows(family: Folder, fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    """Layers with a window and without; each has a base of the rotary embedding, where 0 means none of it."""
    config = _read(family, fields, config, n_layers)
    window = fields.integer("sliding_window", 1, layout.MAX_CONTEXT)
    types = read_layer_types(fields, n_layers, default=[LOCAL if at % 4 else GLOBAL for at in range(n_layers)])
    bases: list[float | None] = [None] * n_layers
    if fields.has("layer_rope_theta"):
        bases = [*fields.numbers("layer_rope_theta", n_layers, 0, layout.MAX_THETA)]
        turning = [int(theta != 0) for theta in bases]
        if fields.has("no_rope_layers") and read_switches(fields, "no_rope_layers", n_layers, 1) != turning:
            raise fields.bad("no_rope_layers", "is not 0 where layer_rope_theta is, and 1 elsewhere")
    layers = []
    for layer, kind, theta in zip(config.layers, types, bases, strict=True):
        heads = replace(layer.heads, window=window if kind == LOCAL else None, sinks=True)
        assert heads.rope is not None
        if theta is not None and 0 < theta <= 1:
            raise fields.bad("layer_rope_theta", f"holds {theta:g}, no base of frequencies")
        rope = heads.rope if theta is None else replace(heads.rope, theta=theta) if theta else None
        layers.append(replace(layer, attention=replace(heads, rope=rope)))
    return replace(config, layers=tuple(layers))


_RENAMED = {
    ".self_attn.sinks": ".self_attn.sinks.weight",
    ".block_sparse_moe.router.weight": ".block_sparse_moe.router.layer.weight",
    ".block_sparse_moe.experts.gate_up_proj": ".block_sparse_moe.input_linear.weight",
    ".block_sparse_moe.experts.down_proj": ".block_sparse_moe.output_linear.weight",
}


def _rename(stored: Tensors) -> list[str]:
    """Names as of other layers, and of Granite's first models of experts."""
    for name in list(stored):
        for old, new in _RENAMED.items():
            if name.endswith(old):
                stored[name.removesuffix(old) + new] = stored.pop(name)
    return []


def read_shared_experts(family: Folder, fields: Fields, n_layers: int) -> Sequence[FfnKind]:
    """Experts beside a shared one, in all layers."""
    experts = read_experts(family, fields, "num_local_experts", "intermediate_size")
    size = fields.integer("shared_intermediate_size", 0, layout.MAX_WIDTH, 0)
    return [replace(experts, shared_size=size)] * n_layers


def fuse_experts(config: ModelConfig, names: Names) -> list[Fused]:
    """Gate and up of the experts, and of the shared one, are one matrix each."""
    experts = config.layers[0].ffn
    assert isinstance(experts, ExpertsConfig)
    return [Fused(("experts_gate", "experts_up"), experts.n_experts), Fused(("shared_gate", "shared_up"))]


EXPERTS_NAMES = LLAMA_NAMES.extended(
    {"router": "block_sparse_moe.router.layer"}
    | {
        f"{experts}_{part}": f"{block}.{matrix}_linear"
        for experts, block in (("experts", "block_sparse_moe"), ("shared", "shared_mlp"))
        for part, matrix in (("gate", "input"), ("up", "input"), ("down", "output"))
    }
)
"""Names of Granite's experts."""

_DENSE = Folder("granite", ("GraniteForCausalLM",), _read, defaults=LLAMA_DEFAULTS, mlp_bias=True)
_EXPERTS = replace(
    _DENSE, model_type="granitemoe", classes=("GraniteMoeForCausalLM",),
    defaults=LLAMA_DEFAULTS | {"max_position_embeddings": 2048, "num_local_experts": 8, "num_experts_per_tok": 2},
    ffns=read_local_experts,
    names=EXPERTS_NAMES,
    fused=fuse_experts,
)
_SHARED = replace(
    _EXPERTS, model_type="granitemoeshared", classes=("GraniteMoeSharedForCausalLM",), ffns=read_shared_experts
)

_SINKS = {"sinks": "self_attn.sinks"}
_WINDOWS = replace(
    _DENSE, model_type="granite_swa", classes=("GraniteSWAForCausalLM",), read=_read_windows,
    defaults=LLAMA_DEFAULTS | {
        "vocab_size": 100352, "hidden_size": 2560, "intermediate_size": 8192, "num_hidden_layers": 24,
        "num_attention_heads": 20, "num_key_value_heads": 4, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True, "sliding_window": 128,
    },
    names=LLAMA_NAMES.extended(_SINKS), rename=_rename,
)  # fmt: skip
_EXPERTS_WITH_WINDOWS = replace(
    _SHARED, model_type="granitemoe_swa", classes=("GraniteMoeSWAForCausalLM",), read=_read_windows,
    defaults=LLAMA_DEFAULTS | {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "max_position_embeddings": 2048, "num_local_experts": 8, "num_experts_per_tok": 2,
        "sliding_window": 128,
    },
    names=EXPERTS_NAMES.extended(_SINKS), rename=_rename,
)  # fmt: skip

FOLDERS = (_DENSE, _WINDOWS, _EXPERTS, _SHARED, _EXPERTS_WITH_WINDOWS)
_GGUF = Gguf("granite", "silu", interleaved=True, scales=True)
_GGUF_EXPERTS = replace(_GGUF, architecture="granitemoe", experts=NORMALISED)
GGUFS = (
    _GGUF,
    _GGUF_EXPERTS,
    replace(_GGUF_EXPERTS, architecture="granite_swa", sinks=True, single_rope=True, rope_pattern=True),
)
