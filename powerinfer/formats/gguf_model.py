"""GGUF metadata and tensor names -> `ModelConfig` and canonical names, for the architectures this engine runs.

What is not understood and could change the result is refused: an unknown architecture, any unknown key of the
architecture, any tensor without a place in the model.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from powerinfer.config import ModelConfig, RopeConfig
from powerinfer.errors import ModelError
from powerinfer.formats import layout
from powerinfer.formats.fields import Fields
from powerinfer.formats.gguf import GGUFFile, read_gguf
from powerinfer.formats.mapped import shown
from powerinfer.formats.source import Source, collect, printable
from powerinfer.formats.tensors import RawTensor

ARCHITECTURES = ("llama", "qwen2", "qwen3")

_OUTER = {
    "embed": "token_embd.weight",
    "head": "output.weight",
    "final_norm": "output_norm.weight",
    "rope_factors": "rope_freqs.weight",
}
_INNER = {
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
}
_BOOKKEEPING = ("tensor_data_layout",)  # says how the converter got the weights; nothing depends on it


def _spelled(canonical: str) -> str:
    """The name in the file of a canonical name."""
    if canonical in _OUTER:
        return _OUTER[canonical]
    _, layer, inner = canonical.split(".")
    bias = inner.endswith("_bias")
    return f"blk.{layer}.{_INNER[inner.removesuffix('_bias')]}.{'bias' if bias else 'weight'}"


def open_gguf(path: Path) -> Source:
    """The model in a GGUF file (or in all parts of a split one); ModelError if it is not one this engine runs."""
    file = read_gguf(path)
    config = _config(file)
    layout.check(config, str(file.path))
    stored = {name: RawTensor(t.type.name, t.shape, t.data) for name, t in file.tensors.items()}
    has_factors = _OUTER["rope_factors"] in stored
    extra = [("rope_factors", (config.rope.dim // 2,))] if has_factors else []
    tensors = collect(config, stored, _spelled, str(file.path), extra)
    if has_factors:
        _check_factors(file, config, tensors["rope_factors"])
    return Source("gguf", file.path, config, file.metadata, tensors, file.files)


def _check_factors(file: GGUFFile, config: ModelConfig, tensor: RawTensor) -> None:
    if config.rope.scaling is not None:
        raise ModelError(f"{file.path}: has both rope_freqs.weight and RoPE scaling {config.rope.scaling!r}")
    file.check()
    factors = tensor.float32()
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise ModelError(f"{file.path}: rope_freqs.weight holds values that are not positive numbers")


def _config(file: GGUFFile) -> ModelConfig:
    where = str(file.path)
    general = Fields(file.metadata, where)
    architecture = _architecture(general)
    fields = Fields(file.metadata, where, prefix=f"{architecture}.")
    d_model = fields.integer("embedding_length", 1, layout.MAX_WIDTH)
    n_heads = fields.integer("attention.head_count", 1, layout.MAX_HEADS)
    if not fields.has("attention.key_length") and d_model % n_heads:
        raise fields.bad("attention.key_length", f"is missing, and {n_heads} heads do not divide {d_model} evenly")
    head_dim = fields.integer("attention.key_length", 2, layout.MAX_HEAD_DIM, max(2, d_model // n_heads))
    fields.only("attention.value_length", head_dim)
    fields.only("rope.dimension_count", head_dim)
    names = file.tensors
    if "token_embd.weight" not in names:
        raise ModelError(f"{where}: tensor token_embd.weight is missing")
    window, sliding_layers = _window(fields)
    config = ModelConfig(
        architecture=architecture,
        n_layers=fields.integer("block_count", 1, layout.MAX_LAYERS),
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=fields.integer("attention.head_count_kv", 1, layout.MAX_HEADS, n_heads),
        head_dim=head_dim,
        d_ff=fields.integer("feed_forward_length", 1, layout.MAX_WIDTH),
        vocab_size=_vocabulary(file, fields),
        context_length=fields.integer("context_length", 1, layout.MAX_CONTEXT),
        norm_eps=fields.number("attention.layer_norm_rms_epsilon", 1e-12, 0.1),
        rope=_rope(fields, head_dim, interleaved=architecture == "llama"),
        tied_embeddings="output.weight" not in names,
        # the file says by having them; one that is then missing elsewhere is an error
        qkv_bias=architecture == "qwen2" or "blk.0.attn_q.bias" in names,
        o_bias="blk.0.attn_output.bias" in names,
        ffn_bias="blk.0.ffn_up.bias" in names,
        qk_norm=architecture == "qwen3",
        name=printable(general.get("general.name", "")),
        sliding_window=window,
        sliding_layers=sliding_layers,
    )
    _refuse_others(fields)
    return config


def _architecture(general: Fields) -> str:
    general.only("general.type", "model")
    general.only("general.quantization_version", 2)
    for foreign in ("powerinfer.", "adapter."):
        if any(key.startswith(foreign) for key in general.unread()):
            raise ModelError(f"{general.where}: GGUF files with {foreign}* metadata are not supported")
    name = str(general.text("general.architecture"))
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"{general.where}: architecture {shown(name)} is not supported (only {known})")
    return name


def _vocabulary(file: GGUFFile, fields: Fields) -> int:
    """Rows of the embedding; every one must have a token when the file has tokens at all."""
    shape = file.tensors["token_embd.weight"].shape
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    claimed = fields.integer("vocab_size", 1, layout.MAX_VOCAB, shape[0])
    count = len(tokens) if isinstance(tokens, list) else claimed
    if count != shape[0] or shape[0] > layout.MAX_VOCAB:
        raise ModelError(f"{fields.where}: {count} tokens, but {shape[0]} rows of token_embd.weight")
    return shape[0]


def _rope(fields: Fields, head_dim: int, interleaved: bool) -> RopeConfig:
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
    plain = RopeConfig(theta=theta, dim=head_dim, interleaved=interleaved)
    if kind == "yarn":
        return RopeConfig(
            theta=theta,
            dim=head_dim,
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
    return RopeConfig(theta=theta, dim=head_dim, interleaved=interleaved, scaling="linear", factor=factor)


def _window(fields: Fields) -> tuple[int | None, tuple[bool, ...] | None]:
    """The sliding window, and which layers use it when not all do."""
    window = fields.integer("attention.sliding_window", 0, layout.MAX_CONTEXT, 0)
    pattern = fields.get("attention.sliding_window_pattern", None)
    if not window:
        return None, None
    if pattern is None:
        return window, None
    layers = fields.integer("block_count", 1, layout.MAX_LAYERS)
    if type(pattern) is not list or len(pattern) != layers or not all(type(slides) is bool for slides in pattern):
        raise fields.bad("attention.sliding_window_pattern", f"is {shown(pattern)}, not a truth value for every layer")
    return window, tuple(pattern)


def _refuse_others(fields: Fields) -> None:
    """Keys with a neutral value pass; any other key of the architecture asks for something this engine lacks."""
    for key in ("expert_count", "expert_used_count", "nextn_predict_layers", "pooling_type", "expert_shared_count"):
        fields.only(key, 0)
    fields.only("attention.causal", True)
    fields.only("use_parallel_residual", False)
    fields.only("hidden_act", "silu")
    for key in _BOOKKEEPING:
        fields.get(key, None)
    unread = fields.unread()
    if unread:
        raise fields.bad(shown(unread[0])[1:-1], "is set, and this engine does not know what it means")
