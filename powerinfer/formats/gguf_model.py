"""GGUF metadata and tensor names -> `ModelConfig` and canonical names, for the architectures this engine runs.

What is not understood and could change the result is refused: an unknown architecture, any unknown key of the
architecture, any tensor without a place in the model.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from powerinfer.config import ACTIVATIONS, AttentionConfig, FfnConfig, LayerConfig, ModelConfig, RopeConfig
from powerinfer.errors import ModelError
from powerinfer.formats import layout
from powerinfer.formats.fields import Fields
from powerinfer.formats.gguf import GGUFFile
from powerinfer.formats.mapped import shown
from powerinfer.formats.source import Fused, Names, Source, collect, printable
from powerinfer.formats.tensors import RawTensor


@dataclass(frozen=True)
class _Family:
    """What the name of an architecture says; the rest is in the metadata and in which tensors there are.

    activation: what a file means that does not say; interleaved: as in `RopeConfig`.
    """

    activation: str
    gated: bool = True
    norm: str = "rms"
    interleaved: bool = False

    @property
    def activations(self) -> tuple[str, ...]:
        """Those that a file may name."""
        return ACTIVATIONS if self.gated else ("relu", "relu2")


ARCHITECTURES = {
    "llama": _Family("silu", interleaved=True),
    "qwen2": _Family("silu"),
    "qwen3": _Family("silu"),
    "bamboo": _Family("drelu", interleaved=True),
    "falcon": _Family("gelu", gated=False, norm="layer"),
    "opt": _Family("relu", gated=False, norm="layer"),
    "nemotron": _Family("relu2", gated=False, norm="layer"),
}

_NAMES = Names(
    outer={
        "embed": "token_embd",
        "positions": "position_embd",
        "head": "output",
        "final_norm": "output_norm",
        "rope_factors": "rope_freqs",
    },
    layers="blk",
    inner={
        "attn_norm": "attn_norm",
        "ffn_norm": "ffn_norm",
        "q": "attn_q",
        "k": "attn_k",
        "v": "attn_v",
        "o": "attn_output",
        "q_norm": "attn_q_norm",
        "k_norm": "attn_k_norm",
        "gate": "ffn_gate",
        "up": "ffn_up",
        "down": "ffn_down",
    },
)
_FUSED = dict.fromkeys("qkv", "attn_qkv")
_OPT_OFFSET = 2  # of the rows in OPT's table of positions
_BOOKKEEPING = ("tensor_data_layout",)  # says how the converter got the weights; nothing depends on it


def open_gguf(file: GGUFFile) -> Source:
    """The model in a GGUF file, or in all parts of a split one; ModelError if it is not one this engine runs."""
    config = read_config(file)
    names, extra = names_of(file, config), _factors(file, config)
    tensors = collect(config, stored_tensors(file), names, str(file.path), extra, fused(file, config))
    if "rope_factors" in tensors:
        _check_factors(file, config, tensors["rope_factors"])
    return Source("gguf", file.path, config, file.metadata, tensors, file.files)


def stored_tensors(file: GGUFFile) -> dict[str, RawTensor]:
    """The tensors under the names of the file."""
    return {name: RawTensor(t.type.name, t.shape, t.data) for name, t in file.tensors.items()}


def names_of(file: GGUFFile, config: ModelConfig) -> Names:
    """How this file spells canonical names."""
    inner = _NAMES.inner | (_FUSED if _is_fused(file) else {})
    if config.architecture == "falcon" and not config.layers[0].shared_norm:
        inner |= {"attn_norm": "attn_norm_2", "ffn_norm": "attn_norm"}
    return replace(_NAMES, inner=inner)


def fused(file: GGUFFile, config: ModelConfig) -> Fused | None:
    """How Q, K and V are cut, if they are one tensor."""
    return Fused(config, grouped=False) if _is_fused(file) else None


def _is_fused(file: GGUFFile) -> bool:
    return "blk.0.attn_qkv.weight" in file.tensors


def _factors(file: GGUFFile, config: ModelConfig) -> list[tuple[str, tuple[int, ...]]]:
    if not config.ropes or "rope_freqs.weight" not in file.tensors:
        return []
    return [("rope_factors", (config.ropes[0].dim // 2,))]


def _check_factors(file: GGUFFile, config: ModelConfig, tensor: RawTensor) -> None:
    scaling = config.ropes[0].scaling
    if scaling is not None:
        raise ModelError(f"{file.path}: has both rope_freqs.weight and RoPE scaling {scaling!r}")
    file.check()
    factors = tensor.float32()
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise ModelError(f"{file.path}: rope_freqs.weight holds values that are not positive numbers")


def read_config(file: GGUFFile, published: dict[str, str] | None = None) -> ModelConfig:
    """The configuration, checked; ModelError if it is not one this engine runs.

    published: of PowerInfer's own files, the architectures there are and the activation of each.
    """
    where = str(file.path)
    general = Fields(file.metadata, where)
    architecture = _architecture(general, published)
    family = ARCHITECTURES[architecture]
    fields = Fields(file.metadata, where, prefix=f"{architecture}.")
    if published is not None:
        family = replace(family, activation=published[architecture])
        fields.only("hidden_act", family.activation)
    d_model = fields.integer("embedding_length", 1, layout.MAX_WIDTH)
    n_heads = fields.integer("attention.head_count", 1, layout.MAX_HEADS)
    if not fields.has("attention.key_length") and d_model % n_heads:
        raise fields.bad("attention.key_length", f"is missing, and {n_heads} heads do not divide {d_model} evenly")
    head_dim = fields.integer("attention.key_length", 2, layout.MAX_HEAD_DIM, max(2, d_model // n_heads))
    fields.only("attention.value_length", head_dim)
    names = file.tensors
    if "token_embd.weight" not in names:
        raise ModelError(f"{where}: tensor token_embd.weight is missing")
    learned = architecture == "opt"
    falcon = architecture == "falcon"
    config = ModelConfig(
        architecture=architecture,
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=fields.integer("attention.head_count_kv", 1, layout.MAX_HEADS, n_heads),
        head_dim=head_dim,
        vocab_size=_vocabulary(file, fields),
        context_length=_table(file, fields) if learned else fields.integer("context_length", 1, layout.MAX_CONTEXT),
        norm_eps=_epsilon(fields, family, architecture),
        layers=_layers(file, fields, architecture, family, head_dim),
        norm=family.norm,
        positions="learned" if learned else "rope",
        position_offset=_OPT_OFFSET if learned else 0,
        tied_embeddings="output.weight" not in names,
        name=printable(general.get("general.name", "")),
    )
    _refuse_others(fields, falcon)
    layout.check(config, where)
    return config


def _layers(
    file: GGUFFile, fields: Fields, architecture: str, family: _Family, head_dim: int
) -> tuple[LayerConfig, ...]:
    """The layers. Biases: the file says by having them; one that is then missing elsewhere is an error."""
    names, falcon = file.tensors, architecture == "falcon"
    n_layers = fields.integer("block_count", 1, layout.MAX_LAYERS)
    attention = AttentionConfig(
        rope=None if architecture == "opt" else _rope(fields, _rotated(fields, architecture, head_dim), family),
        qkv_bias=architecture == "qwen2" or "blk.0.attn_q.bias" in names or "blk.0.attn_qkv.bias" in names,
        o_bias="blk.0.attn_output.bias" in names,
        qk_norm="head" if architecture == "qwen3" else None,
    )
    activation, threshold = _activation(fields, family)
    bias = "blk.0.ffn_up.bias" in names
    shared_norm = falcon and "blk.0.attn_norm_2.weight" not in names
    return tuple(
        LayerConfig(
            replace(attention, window=window),
            FfnConfig(size, activation, threshold, family.gated, bias),
            parallel=falcon,
            shared_norm=shared_norm,
        )
        for size, window in zip(_ffn_sizes(fields, n_layers), _windows(fields, n_layers), strict=True)
    )


def _architecture(general: Fields, published: Collection[str] | None) -> str:
    general.only("general.type", "model")
    general.only("general.quantization_version", 2)
    known = ARCHITECTURES if published is None else published
    for foreign in ("adapter.",) if published is not None else ("powerinfer.", "adapter."):
        if any(key.startswith(foreign) for key in general.unread()):
            raise ModelError(f"{general.where}: GGUF files with {foreign}* metadata are not supported")
    name = str(general.text("general.architecture"))
    if name not in known:
        raise ModelError(f"{general.where}: architecture {shown(name)} is not supported (only {', '.join(known)})")
    return name


def _activation(fields: Fields, family: _Family) -> tuple[str, float]:
    """(activation, its threshold); `hidden_act` is a key of this engine's own: others go by the architecture alone."""
    name = fields.text("hidden_act", family.activation)
    if name not in family.activations:
        how = f"is {shown(name)}" if fields.has("hidden_act") else f"is missing, which means {name}"
        raise fields.bad("hidden_act", f"{how}; only {', '.join(family.activations)} is supported here")
    return name, fields.number("hidden_act_param", 0, layout.MAX_SCALE) if name == "fatrelu" else 0.0


def _epsilon(fields: Fields, family: _Family, architecture: str) -> float:
    if family.norm == "rms":
        return float(fields.number("attention.layer_norm_rms_epsilon", 1e-12, 0.1))
    default = {"default": 1e-5} if architecture == "opt" else {}  # no writer of OPT files states it
    return float(fields.number("attention.layer_norm_epsilon", 1e-12, 0.1, **default))


def _rotated(fields: Fields, architecture: str, head_dim: int) -> int:
    """Rotated dimensions of a head."""
    if architecture == "nemotron":
        return int(fields.integer("rope.dimension_count", 2, head_dim, head_dim))
    fields.only("rope.dimension_count", head_dim)
    return head_dim


def _table(file: GGUFFile, fields: Fields) -> int:
    """The context that OPT's table of positions allows; writers state it with or without the rows of the offset."""
    table = file.tensors.get("position_embd.weight")
    if table is None:
        raise ModelError(f"{file.path}: tensor position_embd.weight is missing")
    claimed = fields.integer("context_length", 1, layout.MAX_CONTEXT)
    context = table.shape[0] - _OPT_OFFSET
    if context < 1 or claimed not in (context, table.shape[0]):
        raise fields.bad("context_length", f"is {claimed}, but position_embd.weight has {table.shape[0]} rows")
    return context


def _vocabulary(file: GGUFFile, fields: Fields) -> int:
    """Rows of the embedding; every one must have a token when the file has tokens at all."""
    shape = file.tensors["token_embd.weight"].shape
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    claimed = fields.integer("vocab_size", 1, layout.MAX_VOCAB, shape[0])
    count = len(tokens) if isinstance(tokens, list) else claimed
    if count != shape[0] or shape[0] > layout.MAX_VOCAB:
        raise ModelError(f"{fields.where}: {count} tokens, but {shape[0]} rows of token_embd.weight")
    return shape[0]


def _rope(fields: Fields, dim: int, family: _Family) -> RopeConfig:
    interleaved = family.interleaved
    theta = fields.number("rope.freq_base", 1.0001, layout.MAX_THETA, 10000.0)
    # ggml: a factor without a type means linear scaling, and a factor of 0 none; the second key is the older one
    kind = fields.text("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        raise fields.bad("rope.scaling.type", f"is {shown(kind)}, which is not supported (only none, linear, yarn)")
    old = fields.number("rope.scale_linear", 0, layout.MAX_SCALE, 0.0)
    factor = fields.number("rope.scaling.factor", 0, layout.MAX_SCALE, old) or 1.0
    original = fields.integer("rope.scaling.original_context_length", 1, layout.MAX_CONTEXT, 0)
    gain = fields.number("rope.scaling.attn_factor", 1e-6, layout.MAX_SCALE, 1.0)
    fast = fields.number("rope.scaling.yarn_beta_fast", 1e-6, layout.MAX_SCALE, 32.0)
    slow = fields.number("rope.scaling.yarn_beta_slow", 1e-6, layout.MAX_SCALE, 1.0)
    fields.flag("rope.scaling.finetuned", False)
    fields.only("rope.scaling.alpha", 0.0)
    fields.only("rope.scaling.yarn_ext_factor", 1.0, -1.0)
    fields.only("rope.scaling.yarn_attn_factor", 1.0, -1.0)
    fields.only("rope.scaling.yarn_log_multiplier", 0.0)
    plain = RopeConfig(theta=theta, dim=dim, interleaved=interleaved)
    if kind == "yarn":
        return RopeConfig(
            theta=theta,
            dim=dim,
            interleaved=interleaved,
            scaling="yarn",
            factor=factor,
            original_context_length=original or fields.integer("context_length", 1, layout.MAX_CONTEXT),
            beta_fast=fast,
            beta_slow=slow,
            attention_factor=None if gain == 1 else gain * (1 + 0.1 * math.log(max(factor, 1))),
        )
    if gain != 1:
        raise fields.bad("rope.scaling.attn_factor", f"is {gain:g}, which this engine supports for yarn scaling only")
    if kind == "none" or factor == 1:
        return plain
    return RopeConfig(theta=theta, dim=dim, interleaved=interleaved, scaling="linear", factor=factor)


def _ffn_sizes(fields: Fields, n_layers: int) -> list[int]:
    """Neurons of each layer: one number for all, or one for each."""
    sizes = fields.get("feed_forward_length", None)
    if type(sizes) is not list:
        return [fields.integer("feed_forward_length", 1, layout.MAX_WIDTH)] * n_layers
    if len(sizes) != n_layers or not all(type(size) is int and 0 < size <= layout.MAX_WIDTH for size in sizes):
        raise fields.bad("feed_forward_length", f"is {shown(sizes)}, not a size for every layer")
    return sizes


def _windows(fields: Fields, n_layers: int) -> list[int | None]:
    """The sliding window of each layer."""
    window = fields.integer("attention.sliding_window", 0, layout.MAX_CONTEXT, 0)
    pattern = fields.get("attention.sliding_window_pattern", None)
    if not window or pattern is None:
        return [window or None] * n_layers
    if type(pattern) is not list or len(pattern) != n_layers or not all(type(slides) is bool for slides in pattern):
        raise fields.bad("attention.sliding_window_pattern", f"is {shown(pattern)}, not a truth value for every layer")
    return [window if slides else None for slides in pattern]


def _refuse_others(fields: Fields, parallel: bool) -> None:
    """Keys with a neutral value pass; any other key of the architecture asks for something this engine lacks."""
    for key in ("expert_count", "expert_used_count", "nextn_predict_layers", "pooling_type", "expert_shared_count"):
        fields.only(key, 0)
    fields.only("attention.causal", True)
    fields.only("use_parallel_residual", parallel)
    for key in _BOOKKEEPING:
        fields.get(key, None)
    unread = fields.unread()
    if unread:
        raise fields.bad(shown(unread[0])[1:-1], "is set, and this engine does not know what it means")
