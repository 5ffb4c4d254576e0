"""config.json of a Hugging Face folder -> `ModelConfig`.

Defaults are those of the configuration's `transformers` class, so that a missing key means the same there and here;
unsupported settings are refused by name. No code of the folder is run.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from powerinfer.config import AttentionConfig, FfnConfig, LayerConfig, ModelConfig, RopeConfig, uniform
from powerinfer.formats import layout
from powerinfer.formats.fields import Fields
from powerinfer.formats.mapped import shown
from powerinfer.formats.source import printable

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "SparseLlamaForCausalLM": "sparsellama",  # ProSparse
    "BambooForCausalLM": "bamboo",  # Bamboo and TurboSparse-Mistral
    "OPTForCausalLM": "opt",
    "FalconForCausalLM": "falcon",
    "NemotronForCausalLM": "nemotron",
    "Gemma3ForCausalLM": "gemma3_text",
    "Phi3ForCausalLM": "phi3",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
}
"""Class of a folder's `architectures` -> family, which is its `model_type`."""

# Folders of these classes refer to custom code whose function this engine has natively. It is not run.
_WITH_OWN_CODE = ("SparseLlamaForCausalLM", "BambooForCausalLM", "FalconForCausalLM")


def read_config(metadata: dict[str, Any], folder: Path) -> ModelConfig:
    """The configuration in `metadata`, the contents of the folder's config.json. ModelError if it will not do."""
    fields = Fields(metadata, str(folder / "config.json"))
    architecture = _architecture(fields)
    return _READERS[architecture](fields, architecture, printable(folder.resolve().name))


def _architecture(fields: Fields) -> str:
    """The family that `architectures` names (`model_type` when it is absent)."""
    if fields.has("quantization_config"):
        raise fields.bad("quantization_config", "is set: quantised Hugging Face folders are not supported, GGUF is")
    classes = fields.get("architectures", None)
    kind = fields.get("model_type", None)
    name = classes[0] if type(classes) is list and len(classes) == 1 and type(classes[0]) is str else None
    auto_map: Any = fields.get("auto_map", {})
    if type(auto_map) is not dict or not _replaced(auto_map.get("AutoModelForCausalLM"), name):
        raise fields.bad("auto_map", "names code of the folder's own, which is never run")
    if classes is None and type(kind) is str and kind in ARCHITECTURES.values():
        return kind
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise fields.bad("architectures", f"is {shown(classes)}, which is not supported (only {known})")
    family = ARCHITECTURES[name]
    if kind not in (None, family):
        raise fields.bad("model_type", f"is {shown(kind)}, which does not go with {name}")
    return family


def _replaced(code: Any, name: str | None) -> bool:
    """Whether no code of the folder is asked for, or code in whose place this engine's own stands."""
    return code is None or (name in _WITH_OWN_CODE and type(code) is str and code.rpartition(".")[2] == name)


# --- families --------------------------------------------------------------------------------------------------------

_GATED = {"silu": "silu", "swish": "silu", "relu": "relu", "relu2": "relu2"}
_PLAIN = {"relu": "relu", "relu2": "relu2"}


def _llama_like(fields: Fields, architecture: str, name: str) -> ModelConfig:
    layers = fields.integer("num_hidden_layers", 1, layout.MAX_LAYERS)
    d_model = fields.integer("hidden_size", 1, layout.MAX_WIDTH)
    n_heads = fields.integer("num_attention_heads", 1, layout.MAX_HEADS)
    llama = architecture in ("llama", "sparsellama")
    # Only in Llama's own class the number of key-value heads defaults to that of the heads; in Bamboo's it is 8.
    kv_default = {"default": n_heads} if llama else {}
    if architecture == "bamboo":
        kv_default = {"default": n_heads if fields.stated("num_key_value_heads") else 8}
    head_dim = _head_dim(fields, architecture, d_model, n_heads)
    context = fields.integer("max_position_embeddings", 1, layout.MAX_CONTEXT)
    attention_bias = architecture not in ("mistral", "bamboo") and fields.flag("attention_bias", False)
    if architecture == "qwen2":
        fields.only("attention_bias", True)  # the class has biases on q, k and v, and no switch
    size = fields.integer("intermediate_size", 1, layout.MAX_WIDTH)
    ffn = FfnConfig(size, *_gated_activation(fields, architecture), bias=llama and fields.flag("mlp_bias", False))
    attention = AttentionConfig(
        rope=_rope(fields, head_dim, context),
        qkv_bias=architecture == "qwen2" or attention_bias,
        o_bias=architecture != "qwen2" and attention_bias,
        qk_norm="head" if architecture == "qwen3" else None,
    )
    windows = _windows(fields, architecture, layers)
    return ModelConfig(
        architecture=architecture,
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=fields.integer("num_key_value_heads", 1, layout.MAX_HEADS, **kv_default),
        head_dim=head_dim,
        vocab_size=fields.integer("vocab_size", 1, layout.MAX_VOCAB),
        context_length=context,
        norm_eps=fields.number("rms_norm_eps", 1e-12, 0.1, 1e-6),
        layers=tuple(LayerConfig(replace(attention, window=window), ffn) for window in windows),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        name=name,
    )


def _gated_activation(fields: Fields, architecture: str) -> tuple[str, float]:
    """(activation, its threshold) of a gated FFN."""
    if architecture == "bamboo":
        return _activation(fields, "hidden_act", {"relu": "drelu"}, "silu"), 0.0
    if architecture != "sparsellama":
        return _activation(fields, "hidden_act", _GATED, "silu"), 0.0
    fields.text("hidden_act")  # a ProSparse model always has it
    activation = _activation(fields, "hidden_act", {"fatrelu": "fatrelu", "relu": "relu"}, "")
    return activation, fields.number("hidden_act_param", 0, layout.MAX_SCALE) if activation == "fatrelu" else 0.0


def _opt(fields: Fields, architecture: str, name: str) -> ModelConfig:
    d_model = fields.integer("hidden_size", 1, layout.MAX_WIDTH)
    n_heads = fields.integer("num_attention_heads", 1, layout.MAX_HEADS)
    fields.only("layer_norm_elementwise_affine", True)
    first = fields.flag("do_layer_norm_before", True)
    bias = fields.flag("enable_bias", True)
    width = fields.integer("word_embed_proj_dim", 1, layout.MAX_WIDTH, d_model)
    activation = _activation(fields, "activation_function", {"relu": "relu"}, "relu")
    layer = LayerConfig(
        AttentionConfig(qkv_bias=bias, o_bias=bias),
        FfnConfig(fields.integer("ffn_dim", 1, layout.MAX_WIDTH), activation, gated=False, bias=bias),
        norms="pre" if first else "post",
    )
    return ModelConfig(
        architecture=architecture,
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_dim=_head_dim(fields, architecture, d_model, n_heads),
        vocab_size=fields.integer("vocab_size", 1, layout.MAX_VOCAB),
        context_length=fields.integer("max_position_embeddings", 1, layout.MAX_CONTEXT),
        norm_eps=1e-5,  # torch's own default; the configuration has no key for it
        layers=uniform(fields.integer("num_hidden_layers", 1, layout.MAX_LAYERS), layer),
        norm="layer",
        positions="learned",
        position_offset=2,
        embed_dim=0 if width == d_model else width,
        final_norm=first and not fields.flag("_remove_final_layer_norm", False),
        tied_embeddings=fields.flag("tie_word_embeddings", True),
        name=name,
    )


def _falcon(fields: Fields, architecture: str, name: str) -> ModelConfig:
    d_model = fields.integer("hidden_size", 1, layout.MAX_WIDTH)
    fields.only("n_embed", d_model)
    n_heads = fields.integer("num_attention_heads", 1, layout.MAX_HEADS)
    head_dim = _head_dim(fields, architecture, d_model, n_heads)
    context = fields.integer("max_position_embeddings", 1, layout.MAX_CONTEXT, 2048)
    if _nullable(fields, "alibi", False):
        raise fields.bad("alibi", "is true: ALiBi positions are not supported")
    new = _nullable(fields, "new_decoder_architecture", False)
    parallel = _nullable(fields, "parallel_attn", True)
    if new and not parallel:
        raise fields.bad("parallel_attn", "is false, which does not go with new_decoder_architecture")
    norms = fields.integer("num_ln_in_parallel_attn", 1, 2, 2 if new else 1)
    if parallel and not new and norms == 2:
        raise fields.bad("num_ln_in_parallel_attn", "is 2, which goes with new_decoder_architecture only")
    kv_heads = fields.integer("num_kv_heads", 1, layout.MAX_HEADS, n_heads)
    if not new:
        one = _nullable(fields, "multi_query", True)
        if not one and kv_heads != n_heads:
            raise fields.bad("num_kv_heads", f"is {kv_heads}, but without multi_query there are {n_heads}")
        kv_heads = 1 if one else n_heads
    bias = _nullable(fields, "bias", False)
    size = fields.integer("ffn_hidden_size", 1, layout.MAX_WIDTH, 4 * d_model)
    layer = LayerConfig(
        AttentionConfig(_rope(fields, head_dim, context), qkv_bias=bias, o_bias=bias),
        FfnConfig(size, _activation(fields, "activation", _PLAIN, "gelu"), gated=False, bias=bias),
        parallel=parallel,
        shared_norm=parallel and norms == 1,
    )
    return ModelConfig(
        architecture=architecture,
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=fields.integer("vocab_size", 1, layout.MAX_VOCAB),
        context_length=context,
        norm_eps=fields.number("layer_norm_epsilon", 1e-12, 0.1, 1e-5),
        layers=uniform(fields.integer("num_hidden_layers", 1, layout.MAX_LAYERS), layer),
        norm="layer",
        tied_embeddings=fields.flag("tie_word_embeddings", True),
        name=name,
    )


def _nemotron(fields: Fields, architecture: str, name: str) -> ModelConfig:
    d_model = fields.integer("hidden_size", 1, layout.MAX_WIDTH)
    n_heads = fields.integer("num_attention_heads", 1, layout.MAX_HEADS)
    head_dim = _head_dim(fields, architecture, d_model, n_heads)
    context = fields.integer("max_position_embeddings", 1, layout.MAX_CONTEXT)
    bias = fields.flag("attention_bias", False)
    size = fields.integer("intermediate_size", 1, layout.MAX_WIDTH)
    activation = _activation(fields, "hidden_act", _PLAIN, "relu2")
    layer = LayerConfig(
        AttentionConfig(_rope(fields, head_dim, context, partial=0.5), qkv_bias=bias, o_bias=bias),
        FfnConfig(size, activation, gated=False, bias=fields.flag("mlp_bias", False)),
    )
    return ModelConfig(
        architecture=architecture,
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=fields.integer("num_key_value_heads", 1, layout.MAX_HEADS),
        head_dim=head_dim,
        vocab_size=fields.integer("vocab_size", 1, layout.MAX_VOCAB),
        context_length=context,
        norm_eps=fields.number("norm_eps", 1e-12, 0.1, 1e-5),
        layers=uniform(fields.integer("num_hidden_layers", 1, layout.MAX_LAYERS), layer),
        norm="layer",
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        name=name,
    )


def _gemma3(fields: Fields, architecture: str, name: str) -> ModelConfig:
    n_layers = fields.integer("num_hidden_layers", 1, layout.MAX_LAYERS, 26)
    d_model = fields.integer("hidden_size", 1, layout.MAX_WIDTH, 2304)
    head_dim = fields.integer("head_dim", 2, layout.MAX_HEAD_DIM, 256)
    for key in ("final_logit_softcapping", "attn_logit_softcapping"):
        fields.only(key)
    fields.only("use_bidirectional_attention", False)
    bias = fields.flag("attention_bias", False)
    context = fields.integer("max_position_embeddings", 1, layout.MAX_CONTEXT, 131072)
    activation = _activation(fields, "hidden_activation", {"gelu_pytorch_tanh": "gelu_tanh"} | _GATED, "gelu_tanh")
    attention = AttentionConfig(
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        scale=fields.number("query_pre_attn_scalar", 1e-6, layout.MAX_SCALE, 256.0) ** -0.5,
    )
    ffn = FfnConfig(fields.integer("intermediate_size", 1, layout.MAX_WIDTH, 9216), activation)
    every = fields.integer("sliding_window_pattern", 1, layout.MAX_CONTEXT, 6)
    kinds = _kinds(fields, attention, _ropes(fields, head_dim, context, 1e6, 1e4))
    return ModelConfig(
        architecture=architecture,
        d_model=d_model,
        n_heads=fields.integer("num_attention_heads", 1, layout.MAX_HEADS, 8),
        n_kv_heads=fields.integer("num_key_value_heads", 1, layout.MAX_HEADS, 4),
        head_dim=head_dim,
        vocab_size=fields.integer("vocab_size", 1, layout.MAX_VOCAB, 262208),
        context_length=context,
        norm_eps=fields.number("rms_norm_eps", 1e-12, 0.1, 1e-6),
        layers=tuple(LayerConfig(kinds[one], ffn, norms="both") for one in _layer_types(fields, n_layers, every)),
        embedding_scale=float(np.sqrt(np.float32(d_model))),
        tied_embeddings=fields.flag("tie_word_embeddings", True),
        name=name,
    )


def _olmo(fields: Fields, architecture: str, name: str) -> ModelConfig:
    n_layers = fields.integer("num_hidden_layers", 1, layout.MAX_LAYERS)
    d_model = fields.integer("hidden_size", 1, layout.MAX_WIDTH)
    n_heads = fields.integer("num_attention_heads", 1, layout.MAX_HEADS)
    head_dim = _head_dim(fields, architecture, d_model, n_heads)
    context = fields.integer("max_position_embeddings", 1, layout.MAX_CONTEXT, 2048)
    bias = fields.flag("attention_bias", False)
    attention = AttentionConfig(qkv_bias=bias, o_bias=bias, qk_norm="width")
    size = fields.integer("intermediate_size", 1, layout.MAX_WIDTH)
    ffn = FfnConfig(size, _activation(fields, "hidden_act", _GATED, "silu"))
    if architecture == "olmo2":
        every = [replace(attention, rope=_rope(fields, head_dim, context))] * n_layers
    else:
        kinds = _kinds(fields, attention, _ropes(fields, head_dim, context, 5e5, None))
        every = [kinds[one] for one in _layer_types(fields, n_layers, 4)]
    return ModelConfig(
        architecture=architecture,
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=fields.integer("num_key_value_heads", 1, layout.MAX_HEADS, n_heads),
        head_dim=head_dim,
        vocab_size=fields.integer("vocab_size", 1, layout.MAX_VOCAB, 50304),
        context_length=context,
        norm_eps=fields.number("rms_norm_eps", 1e-12, 0.1, 1e-5),
        layers=tuple(LayerConfig(one, ffn, norms="output") for one in every),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        name=name,
    )


def _phi3(fields: Fields, architecture: str, name: str) -> ModelConfig:
    d_model = fields.integer("hidden_size", 1, layout.MAX_WIDTH)
    n_heads = fields.integer("num_attention_heads", 1, layout.MAX_HEADS)
    head_dim = _head_dim(fields, architecture, d_model, n_heads)
    context = fields.integer("max_position_embeddings", 1, layout.MAX_CONTEXT, 4096)
    attention = AttentionConfig(
        rope=_rope(fields, head_dim, context, partial=1.0, original=4096),
        window=fields.integer("sliding_window", 1, layout.MAX_CONTEXT, None),
    )
    size = fields.integer("intermediate_size", 1, layout.MAX_WIDTH)
    layer = LayerConfig(attention, FfnConfig(size, _activation(fields, "hidden_act", _GATED, "silu")))
    return ModelConfig(
        architecture=architecture,
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=fields.integer("num_key_value_heads", 1, layout.MAX_HEADS, n_heads),
        head_dim=head_dim,
        vocab_size=fields.integer("vocab_size", 1, layout.MAX_VOCAB, 32064),
        context_length=context,
        norm_eps=fields.number("rms_norm_eps", 1e-12, 0.1, 1e-5),
        layers=uniform(fields.integer("num_hidden_layers", 1, layout.MAX_LAYERS), layer),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        name=name,
    )


_READERS = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "sparsellama", "bamboo"), _llama_like),
    "opt": _opt,
    "falcon": _falcon,
    "nemotron": _nemotron,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
    "olmo2": _olmo,
    "olmo3": _olmo,
}


# --- parts -----------------------------------------------------------------------------------------------------------


def _activation(fields: Fields, key: str, known: dict[str, str], default: str) -> str:
    """The activation: `known` maps what the family's files call it to what this engine does."""
    name = fields.text(key, default)
    if name not in known:
        raise fields.bad(key, f"is {shown(name)}; of this family only {', '.join(known)} is supported")
    return known[name]


def _nullable(fields: Fields, key: str, default: bool) -> bool:
    """A truth value that may be null, which counts as false; `default` only where the key is missing."""
    return bool(fields.flag(key, False if fields.stated(key) else default))


def _head_dim(fields: Fields, architecture: str, d_model: int, n_heads: int) -> int:
    fixed = architecture in ("sparsellama", "bamboo", "opt", "falcon")  # classes without this setting
    if fields.has("head_dim") and not fixed:
        return int(fields.integer("head_dim", 2, layout.MAX_HEAD_DIM))
    if architecture == "qwen3":
        return 128  # the default of its class, independent of other sizes
    if d_model % n_heads or d_model // n_heads > layout.MAX_HEAD_DIM or d_model // n_heads < 2:
        raise fields.bad("num_attention_heads", f"is {n_heads}, which does not divide hidden_size {d_model} well")
    if fixed:
        fields.only("head_dim", d_model // n_heads)
    return d_model // n_heads


def _windows(fields: Fields, architecture: str, layers: int) -> list[int | None]:
    """The sliding window of each layer."""
    if architecture in ("llama", "sparsellama"):
        return [None] * layers  # the class ignores the setting
    # null means no window; only a missing key means the default of the class
    default = None if fields.stated("sliding_window") else 4096
    window = fields.integer("sliding_window", 1, layout.MAX_CONTEXT, default)
    if architecture in ("mistral", "bamboo"):
        return [window] * layers
    if not fields.flag("use_sliding_window", False):
        window = None
    first = fields.integer("max_window_layers", 0, layout.MAX_CONTEXT, 28)
    if not fields.has("layer_types"):
        return [window if layer >= first else None for layer in range(layers)]
    return [window if kind == _LOCAL else None for kind in _layer_types(fields, layers)]


_GLOBAL, _LOCAL = "full_attention", "sliding_attention"


def _layer_types(fields: Fields, layers: int, every: int = 1) -> list[str]:
    """The kind of each layer's attention; every: without `layer_types` the last of so many layers is global."""
    kinds = fields.get("layer_types", None)
    if kinds is None:
        return [_LOCAL if (layer + 1) % every else _GLOBAL for layer in range(layers)]
    if type(kinds) is not list or len(kinds) != layers:
        raise fields.bad("layer_types", f"is {shown(kinds)}, not a kind for every layer")
    strange = [kind for kind in kinds if kind not in (_GLOBAL, _LOCAL)]
    if strange:
        raise fields.bad("layer_types", f"holds {shown(strange[0])}, which is not supported")
    return kinds


def _kinds(fields: Fields, attention: AttentionConfig, ropes: dict[str, RopeConfig]) -> dict[str, AttentionConfig]:
    """Attention with a window and without, each with its rotary embedding."""
    window = fields.integer("sliding_window", 1, layout.MAX_CONTEXT, None if fields.stated("sliding_window") else 4096)
    windows = {_GLOBAL: None, _LOCAL: window}
    return {kind: replace(attention, rope=rope, window=windows[kind]) for kind, rope in ropes.items()}


def _ropes(
    fields: Fields, head_dim: int, context: int, theta: float, local_theta: float | None
) -> dict[str, RopeConfig]:
    """The rotary embedding of each kind of attention. `rope_scaling` is that of global attention only.

    local_theta: default of the local one's base, in `rope_local_base_freq`; None: the base is that of the global one.
    """
    new = fields.get("rope_parameters", None)
    if type(new) is dict and set(new) & {_GLOBAL, _LOCAL}:
        defaults = {_GLOBAL: theta, _LOCAL: local_theta or theta}
        parts = {kind: Fields({"rope_parameters": new.get(kind)}, f"{fields.where}: {kind}") for kind in defaults}
        return {kind: _rope(parts[kind], head_dim, context, theta=default) for kind, default in defaults.items()}
    whole = _rope(fields, head_dim, context, theta=theta)
    local = whole.theta
    if local_theta is not None:
        local = fields.number("rope_local_base_freq", 1.0001, layout.MAX_THETA, local_theta)
    return {_GLOBAL: whole, _LOCAL: RopeConfig(theta=local, dim=head_dim)}


def _rope(
    fields: Fields,
    head_dim: int,
    context: int,
    partial: float | None = None,
    theta: float = 10000.0,
    original: int | None = None,
) -> RopeConfig:
    """`rope_parameters` as transformers 5 writes it, or `rope_theta` and `rope_scaling` as earlier versions did.

    partial: the family's default share of a head that is rotated; None: the whole head is, always. theta, original:
    its defaults of the base, and of the context that the model was trained with first.
    """
    new, old = fields.get("rope_parameters", None), fields.get("rope_scaling", None)
    if new is not None and old is not None and new != old:
        raise fields.bad("rope_scaling", "and rope_parameters are both set, and differ")
    values = new if new is not None else old if old is not None else {}
    if type(values) is not dict:
        raise fields.bad("rope_parameters", f"is {shown(values)}, not an object")
    rope = Fields(values, f"{fields.where}: {'rope_parameters' if new is not None else 'rope_scaling'}")
    dim = _rotated(fields, rope, head_dim, partial)
    outer_theta = fields.number("rope_theta", 1.0001, layout.MAX_THETA, theta)
    outer_original = fields.integer("original_max_position_embeddings", 1, layout.MAX_CONTEXT, original)
    theta = rope.number("rope_theta", 1.0001, layout.MAX_THETA, outer_theta)
    kind = rope.text("rope_type", rope.text("type", "default"))
    result = _SCALINGS[kind](rope, theta, dim, outer_original, context) if kind in _SCALINGS else None
    if result is None:
        raise rope.bad("rope_type", f"is {shown(kind)}, which is not supported (only {', '.join(_SCALINGS)})")
    unread = rope.unread()
    if unread:
        raise rope.bad(shown(unread[0])[1:-1], f"is set, which this engine does not support for type {kind}")
    return result


def _rotated(fields: Fields, rope: Fields, head_dim: int, partial: float | None) -> int:
    """Rotated dimensions of a head."""
    if partial is None:
        fields.only("partial_rotary_factor", 1, 1.0)
        rope.only("partial_rotary_factor", 1, 1.0)
        return head_dim
    outer = fields.number("partial_rotary_factor", 0, 1, partial)
    return int(head_dim * rope.number("partial_rotary_factor", 0, 1, outer))


def _plain(rope: Fields, theta: float, dim: int, original: int | None, context: int) -> RopeConfig:
    return RopeConfig(theta=theta, dim=dim)


def _linear(rope: Fields, theta: float, dim: int, original: int | None, context: int) -> RopeConfig:
    return RopeConfig(theta=theta, dim=dim, scaling="linear", factor=rope.number("factor", 1e-6, layout.MAX_SCALE))


def _original(rope: Fields, outer: int | None, context: int) -> int:
    """The context the model was trained on first: said inside, outside, or the model's own."""
    inner = rope.integer("original_max_position_embeddings", 1, layout.MAX_CONTEXT, None)
    if inner is not None and outer is not None and inner != outer:
        raise rope.bad("original_max_position_embeddings", f"is {inner}, but {outer} outside")
    return int(inner or outer or context)


def _llama3(rope: Fields, theta: float, dim: int, original: int | None, context: int) -> RopeConfig:
    return RopeConfig(
        theta=theta,
        dim=dim,
        scaling="llama3",
        factor=rope.number("factor", 1e-6, layout.MAX_SCALE),
        original_context_length=_original(rope, original, context),
        low_freq_factor=rope.number("low_freq_factor", 1e-6, layout.MAX_SCALE),
        high_freq_factor=rope.number("high_freq_factor", 1e-6, layout.MAX_SCALE),
    )


def _yarn(rope: Fields, theta: float, dim: int, original: int | None, context: int) -> RopeConfig:
    rope.only("truncate", True)
    rope.flag("finetuned", False)
    return RopeConfig(
        theta=theta,
        dim=dim,
        scaling="yarn",
        factor=rope.number("factor", 1e-6, layout.MAX_SCALE),
        original_context_length=_original(rope, original, context),
        beta_fast=rope.number("beta_fast", 1e-6, layout.MAX_SCALE, 32.0),
        beta_slow=rope.number("beta_slow", 1e-6, layout.MAX_SCALE, 1.0),
        attention_factor=rope.number("attention_factor", 1e-6, layout.MAX_SCALE, None),
    )


def _longrope(rope: Fields, theta: float, dim: int, original: int | None, context: int) -> RopeConfig:
    first = _original(rope, original, context)
    short, long = (_divisors(rope, key, dim // 2) for key in ("short_factor", "long_factor"))
    return RopeConfig(
        theta=theta,
        dim=dim,
        scaling="longrope",
        factor=rope.number("factor", 1e-6, layout.MAX_SCALE, context / first),
        original_context_length=first,
        attention_factor=rope.number("attention_factor", 1e-6, layout.MAX_SCALE, None),
        divisors=short,
        long_divisors=long,
    )


def _divisors(rope: Fields, key: str, count: int) -> tuple[float, ...]:
    values: Any = rope.get(key, None)
    right = type(values) is list and len(values) == count
    if not right or not all(type(one) in (int, float) and 1e-6 < one < layout.MAX_SCALE for one in values):
        raise rope.bad(key, f"is not a list of {count} positive numbers")
    return tuple(map(float, values))


_SCALINGS = {
    "default": _plain,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,  # as the first files of Phi-3 call it
}
