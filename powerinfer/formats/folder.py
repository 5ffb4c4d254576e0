"""Hugging Face folders: config.json and safetensors -> `ModelConfig` and canonical names.

Defaults are those of the `transformers` class that the configuration names, so that a key left out means the same
there and here; anything that asks for more than this engine does is refused by name. No code of the folder is run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from powerinfer.config import ModelConfig, RopeConfig
from powerinfer.errors import ModelError
from powerinfer.formats import layout
from powerinfer.formats.fields import Fields
from powerinfer.formats.mapped import MappedFile, shown
from powerinfer.formats.safetensors_file import read_json, read_safetensors
from powerinfer.formats.source import Source, collect, printable
from powerinfer.formats.tensors import RawTensor

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

_OUTER = {"embed": "model.embed_tokens.weight", "head": "lm_head.weight", "final_norm": "model.norm.weight"}
_INNER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{name: f"self_attn.{name}_proj" for name in "qkvo"},
    **{name: f"self_attn.{name}" for name in ("q_norm", "k_norm")},
    **{name: f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
_MAX_SHARDS = 1 << 12


def _spelled(canonical: str) -> str:
    """The name in the files of a canonical name."""
    if canonical in _OUTER:
        return _OUTER[canonical]
    _, layer, inner = canonical.split(".")
    bias = inner.endswith("_bias")
    return f"model.layers.{layer}.{_INNER[inner.removesuffix('_bias')]}.{'bias' if bias else 'weight'}"


def open_folder(folder: Path) -> Source:
    """The model in a Hugging Face folder; ModelError if it is malformed or not one this engine runs."""
    metadata, config_file = read_json(folder / "config.json")
    config = _config(metadata, folder)
    layout.check(config, str(folder / "config.json"))
    stored, files = _read_weights(folder)
    # Frequencies that old versions saved along: they follow from the configuration.
    stored = {name: tensor for name, tensor in stored.items() if not name.endswith(".rotary_emb.inv_freq")}
    if config.tied_embeddings:
        _drop_tied_head(stored, files, folder)
    tensors = collect(config, stored, _spelled, str(folder))
    return Source("hf", folder, config, metadata, tensors, [config_file, *files])


def _drop_tied_head(stored: dict[str, RawTensor], files: list[MappedFile], folder: Path) -> None:
    """Some folders keep a copy of the tied embedding as the head; it goes if it really is one."""
    head, embed = stored.get(_OUTER["head"]), stored.get(_OUTER["embed"])
    if head is None or embed is None:
        return
    for file in files:
        file.check()
    if (head.type, head.shape) != (embed.type, embed.shape) or not np.array_equal(head.data, embed.data):
        raise ModelError(f"{folder}: config.json ties lm_head to the embedding, but the two tensors differ")
    del stored[_OUTER["head"]]


# --- weights ---------------------------------------------------------------------------------------------------------


def _read_weights(folder: Path) -> tuple[dict[str, RawTensor], list[MappedFile]]:
    """All tensors of the folder, from one file or from the shards that the index names."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        tensors, file = read_safetensors(single)
        return tensors, [file]
    if not index.exists():
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))
        why = "; pickle files can run code and are never read" if pickled else ""
        raise ModelError(f"{folder} holds neither {single.name} nor {index.name}{why}")
    places = _weight_map(index)
    tensors = {}
    files = []
    for name in sorted(set(places.values())):
        shard, file = read_safetensors(folder / name)
        files.append(file)
        strange = [tensor for tensor in shard if places.get(tensor) != name]
        if strange:
            raise ModelError(f"{folder / name}: tensor {shown(strange[0])} is not where {index.name} says")
        tensors |= shard
    missing = places.keys() - tensors.keys()
    if missing:
        raise ModelError(f"{index}: tensor {shown(min(missing))} is not in {shown(places[min(missing)])}")
    return tensors, files


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> name of a file in the same folder, and nowhere else."""
    places = read_json(index)[0].get("weight_map")
    if type(places) is not dict or not places:
        raise ModelError(f"{index}: has no weight_map")
    for name in set(map(str, places.values())):
        if name.startswith(".") or not set(name).isdisjoint("/\\:\0") or not name.endswith(".safetensors"):
            raise ModelError(f"{index}: {shown(name)} is not the name of a safetensors file in the folder")
    if not all(type(name) is str for name in places.values()):
        raise ModelError(f"{index}: weight_map holds something that is not a file name")
    if len(set(places.values())) > _MAX_SHARDS:
        raise ModelError(f"{index}: names an absurd number of files")
    return places


# --- configuration ---------------------------------------------------------------------------------------------------


def _config(metadata: dict[str, Any], folder: Path) -> ModelConfig:
    fields = Fields(metadata, str(folder / "config.json"))
    architecture = _architecture(fields)
    layers = fields.integer("num_hidden_layers", 1, layout.MAX_LAYERS)
    d_model = fields.integer("hidden_size", 1, layout.MAX_WIDTH)
    n_heads = fields.integer("num_attention_heads", 1, layout.MAX_HEADS)
    # Only Llama's own class takes a missing number of key-value heads for that of the heads.
    kv_default = {"default": n_heads} if architecture == "llama" else {}
    head_dim = _head_dim(fields, architecture, d_model, n_heads)
    context = fields.integer("max_position_embeddings", 1, layout.MAX_CONTEXT)
    attention_bias = architecture != "mistral" and fields.flag("attention_bias", False)
    window, sliding_layers = _window(fields, architecture, layers)
    activation = fields.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise fields.bad("hidden_act", f"is {shown(activation)}; only silu is supported")
    if architecture == "qwen2":
        fields.only("attention_bias", True)  # the class has biases on q, k and v, and no switch
    return ModelConfig(
        architecture=architecture,
        n_layers=layers,
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=fields.integer("num_key_value_heads", 1, layout.MAX_HEADS, **kv_default),
        head_dim=head_dim,
        d_ff=fields.integer("intermediate_size", 1, layout.MAX_WIDTH),
        vocab_size=fields.integer("vocab_size", 1, layout.MAX_VOCAB),
        context_length=context,
        norm_eps=fields.number("rms_norm_eps", 1e-12, 0.1, 1e-6),
        rope=_rope(fields, head_dim, context),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=architecture == "qwen2" or attention_bias,
        o_bias=architecture != "qwen2" and attention_bias,
        ffn_bias=architecture == "llama" and fields.flag("mlp_bias", False),
        qk_norm=architecture == "qwen3",
        sliding_window=window,
        sliding_layers=sliding_layers,
        name=printable(folder.resolve().name),
    )


def _architecture(fields: Fields) -> str:
    """The family that `architectures` names (`model_type` when it is absent)."""
    if fields.has("quantization_config"):
        raise fields.bad("quantization_config", "is set: quantised Hugging Face folders are not supported, GGUF is")
    auto_map: Any = fields.get("auto_map", {})
    if type(auto_map) is not dict or "AutoModelForCausalLM" in auto_map:
        raise fields.bad("auto_map", "names code of the folder's own, which is never run")
    classes = fields.get("architectures", None)
    kind = fields.get("model_type", None)
    if classes is None and type(kind) is str and kind in ARCHITECTURES.values():
        return kind
    if type(classes) is not list or len(classes) != 1 or classes[0] not in list(ARCHITECTURES):
        known = ", ".join(ARCHITECTURES)
        raise fields.bad("architectures", f"is {shown(classes)}, which is not supported (only {known})")
    family = ARCHITECTURES[classes[0]]
    if kind not in (None, family):
        raise fields.bad("model_type", f"is {shown(kind)}, which does not go with {classes[0]}")
    return family


def _head_dim(fields: Fields, architecture: str, d_model: int, n_heads: int) -> int:
    if fields.has("head_dim"):
        return int(fields.integer("head_dim", 2, layout.MAX_HEAD_DIM))
    if architecture == "qwen3":
        return 128  # the default of its class, whatever the other sizes
    if d_model % n_heads or d_model // n_heads > layout.MAX_HEAD_DIM or d_model // n_heads < 2:
        raise fields.bad("num_attention_heads", f"is {n_heads}, which does not divide hidden_size {d_model} well")
    return d_model // n_heads


def _window(fields: Fields, architecture: str, layers: int) -> tuple[int | None, tuple[bool, ...] | None]:
    """The sliding window, and which layers use it when not all do."""
    if architecture == "llama":
        return None, None  # the class has none, whatever the file says
    # null means no window; only a missing key means the default of the class
    default = None if fields.stated("sliding_window") else 4096
    window = fields.integer("sliding_window", 1, layout.MAX_CONTEXT, default)
    if architecture == "mistral":
        return window, None
    if not fields.flag("use_sliding_window", False):
        window = None
    first = fields.integer("max_window_layers", 0, layout.MAX_CONTEXT, 28)
    kinds = fields.get("layer_types", None)
    if kinds is None:
        slides = tuple(window is not None and layer >= first for layer in range(layers))
    else:
        if type(kinds) is not list or len(kinds) != layers:
            raise fields.bad("layer_types", f"is {shown(kinds)}, not a kind for every layer")
        strange = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
        if strange:
            raise fields.bad("layer_types", f"holds {shown(strange[0])}, which is not supported")
        slides = tuple(kind == "sliding_attention" for kind in kinds)
    if window is None or not any(slides):
        return None, None
    return window, None if all(slides) else slides


def _rope(fields: Fields, head_dim: int, context: int) -> RopeConfig:
    """`rope_parameters` as transformers 5 writes it, or `rope_theta` and `rope_scaling` as earlier versions did."""
    new, old = fields.get("rope_parameters", None), fields.get("rope_scaling", None)
    if new is not None and old is not None and new != old:
        raise fields.bad("rope_scaling", "and rope_parameters are both set, and differ")
    values = new if new is not None else old if old is not None else {}
    if type(values) is not dict:
        raise fields.bad("rope_parameters", f"is {shown(values)}, not an object")
    fields.only("partial_rotary_factor", 1, 1.0)
    outer_theta = fields.number("rope_theta", 1.0001, layout.MAX_THETA, 10000.0)
    outer_original = fields.integer("original_max_position_embeddings", 1, layout.MAX_CONTEXT, None)
    rope = Fields(values, f"{fields.where}: {'rope_parameters' if new is not None else 'rope_scaling'}")
    rope.only("partial_rotary_factor", 1, 1.0)
    theta = rope.number("rope_theta", 1.0001, layout.MAX_THETA, outer_theta)
    kind = rope.text("rope_type", rope.text("type", "default"))
    result = _SCALINGS[kind](rope, theta, head_dim, outer_original, context) if kind in _SCALINGS else None
    if result is None:
        raise rope.bad("rope_type", f"is {shown(kind)}, which is not supported (only {', '.join(_SCALINGS)})")
    unread = rope.unread()
    if unread:
        raise rope.bad(shown(unread[0])[1:-1], f"is set, which this engine does not support for type {kind}")
    return result


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


_SCALINGS = {"default": _plain, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
