"""config.json of a Hugging Face folder -> `ModelConfig`.

Defaults are those of the configuration's `transformers` class, so that a missing key means the same there and here;
unsupported settings are refused by name. No code of the folder is run.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from powerinfer.config import (
    ACTIVATIONS,
    MIXED_ACTIVATIONS,
    THRESHOLDED,
    AttentionConfig,
    AttentionKind,
    DeltaNetConfig,
    ExpertsConfig,
    FfnConfig,
    FfnKind,
    GatedAttentionConfig,
    LatentAttentionConfig,
    LayerConfig,
    ModelConfig,
    RopeConfig,
    RouterConfig,
    uniform,
)
from powerinfer.formats import layout
from powerinfer.formats.fields import Fields
from powerinfer.formats.folder_keys import check_others, not_read
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
    "OpenELMForCausalLM": "openelm",
    "MixtralForCausalLM": "mixtral",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "OlmoeForCausalLM": "olmoe",
    "Glm4MoeForCausalLM": "glm4_moe",
    "GptOssForCausalLM": "gpt_oss",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "GraniteForCausalLM": "granite",
    "GraniteMoeForCausalLM": "granitemoe",
    "GraniteMoeSharedForCausalLM": "granitemoeshared",
    "SmallThinkerForCausalLM": "smallthinker",
    "ArceeForCausalLM": "arcee",
    "SmolLM3ForCausalLM": "smollm3",
    "SeedOssForCausalLM": "seed_oss",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "Glm4ForCausalLM": "glm4",
    **dict.fromkeys(("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"), "ernie4_5"),
    "Ernie4_5_MoeForCausalLM": "ernie4_5_moe",
}
"""Class of a folder's `architectures` -> family, which is its `model_type`."""

WITH_VISION = {
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
}
"""Classes of models that also read pictures, whose part for text is one of ARCHITECTURES."""
_VISION = re.compile("Llava|VL|Vision|Vlm|VLM|ImageText|Pixtral|Idefics|PaliGemma|Florence")
"""A part of the names of classes that read pictures."""
_OTHER_TYPES = {"kimi_k2": "deepseek_v3"}
"""`model_type` of folders that have the class of another family, whose layers they share."""

# Folders of these classes refer to custom code whose function this engine has natively. It is not run.
_WITH_OWN_CODE = (
    "SparseLlamaForCausalLM", "BambooForCausalLM", "FalconForCausalLM", "OpenELMForCausalLM", "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM", "SmallThinkerForCausalLM", "ArceeForCausalLM", "MiniMaxM2ForCausalLM",
    "Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM", "Ernie4_5_MoeForCausalLM",
)  # fmt: skip


def read_config(
    metadata: dict[str, Any], folder: Path, notes: list[str] | None = None, unread: list[str] | None = None
) -> ModelConfig:
    """The configuration in `metadata`, the contents of the folder's config.json. ModelError if it is not supported.

    notes: gets lines for the user; unread: gets the keys that nothing read.
    """
    where = str(folder / "config.json")
    metadata = _text_part(metadata)
    architecture = _architecture(Fields(metadata, where))
    stated = {key: value for key, value in metadata.items() if value is not None or key in _NULLABLE}
    fields = Fields(_DEFAULTS.get(architecture, {}) | stated, where, notes=notes)
    own = _OWN_KEYS.get(architecture, {})

    def key(name: str) -> str:
        return own.get(name, name)

    config = ModelConfig(
        architecture=architecture,
        d_model=fields.integer(key("hidden_size"), 1, layout.MAX_WIDTH),
        vocab_size=fields.integer("vocab_size", 1, layout.MAX_VOCAB),
        context_length=fields.integer(key("max_position_embeddings"), 1, layout.MAX_CONTEXT),
        norm_eps=fields.number(key("rms_norm_eps"), 1e-12, 0.1, 1e-5),
        layers=(),
        tied_embeddings=fields.flag(key("tie_word_embeddings"), False),
        name=printable(folder.resolve().name),
    )
    n_layers = fields.integer(key("num_hidden_layers"), 1, layout.MAX_LAYERS)
    config = _with_thresholds(fields, _READERS[architecture](fields, config, n_layers))
    check_others(fields)
    if unread is not None:
        unread += [key for key in not_read(fields) if key in metadata]
    return config


def _with_thresholds(fields: Fields, config: ModelConfig) -> ModelConfig:
    """With those of the activations that have one: a number for all layers, or a list with one for each; where none is
    stated, each neuron has its own, unless they are of experts. Of topk both are there: a layer's is how many count."""
    topk = any(layer.ffn.activation == "topk" for layer in config.layers)
    if not topk and not any(layer.ffn.activation in THRESHOLDED for layer in config.layers):
        return config
    if not fields.has("hidden_act_param") and not config.experts and not topk:
        every = (replace(layer, ffn=replace(layer.neurons, thresholds=True)) for layer in config.layers)
        return replace(config, layers=tuple(every))
    limits = fields.numbers("hidden_act_param", config.n_layers, 0, layout.MAX_SCALE)
    layers = []
    for layer, limit in zip(config.layers, limits, strict=True):
        assert isinstance(layer.ffn, FfnConfig | ExpertsConfig)
        ffn = replace(layer.ffn, threshold=limit)
        layers.append(replace(layer, ffn=replace(ffn, thresholds=True) if topk and isinstance(ffn, FfnConfig) else ffn))
    return replace(config, layers=tuple(layers))


def _text_part(metadata: dict[str, Any]) -> dict[str, Any]:
    """The configuration of what reads text, in a model that also reads pictures."""
    classes, text = metadata.get("architectures"), metadata.get("text_config")
    name = classes[0] if type(classes) is list and len(classes) == 1 and type(classes[0]) is str else ""
    if name not in WITH_VISION or type(text) is not dict:
        return metadata
    outer = {key: metadata[key] for key in ("tie_word_embeddings", "quantization_config") if key in metadata}
    return text | outer | {"architectures": [WITH_VISION[name]]}


def _architecture(fields: Fields) -> str:
    """The family that `architectures` names (`model_type` when it is absent)."""
    if fields.has("quantization_config") and not _is_mxfp4(fields):
        raise fields.bad("quantization_config", "is set: quantised Hugging Face folders are not supported, GGUF is")
    classes = fields.get("architectures", None)
    kind: Any = fields.get("model_type", None)
    kind = _OTHER_TYPES.get(kind, kind) if type(kind) is str else kind
    name = classes[0] if type(classes) is list and len(classes) == 1 and type(classes[0]) is str else None
    auto_map: Any = fields.get("auto_map", {})
    if type(auto_map) is not dict or not _replaced(auto_map.get("AutoModelForCausalLM"), name):
        raise fields.bad("auto_map", "names code of the folder's own, which is never run")
    if classes is None and type(kind) is str and kind in ARCHITECTURES.values():
        return kind
    if name not in ARCHITECTURES:
        if name is not None and (fields.has("vision_config") or _VISION.search(name)):
            raise fields.bad("architectures", f"is {shown(name)}: vision models are not supported")
        known = ", ".join(sorted({*ARCHITECTURES.values()}))
        raise fields.bad("architectures", f"is {shown(name or classes)}, which is not supported (only {known})")
    family = ARCHITECTURES[name]
    if kind not in (None, family):
        raise fields.bad("model_type", f"is {shown(kind)}, which does not go with {name}")
    return family


def _is_mxfp4(fields: Fields) -> bool:
    """Whether it is gpt-oss with experts in MXFP4, the one kind of quantised folder that is read."""
    how: Any = fields.get("quantization_config", None)
    return fields.get("model_type", None) == "gpt_oss" and type(how) is dict and how.get("quant_method") == "mxfp4"


def _replaced(code: Any, name: str | None) -> bool:
    """Whether the folder asks for no code of its own, or only for code that this engine replaces."""
    return code is None or (name in _WITH_OWN_CODE and type(code) is str and code.rpartition(".")[2] == name)


# --- families --------------------------------------------------------------------------------------------------------
# A reader gets the configuration without its layers, and adds them and the settings of the family.

_WITH_PICTURES = ("qwen3_5_text", "qwen3_5_moe_text")
_GATED = {"silu": "silu", "swish": "silu", **{name: name for name in ACTIVATIONS if name not in ("silu", "gelu_tanh")}}
_PLAIN = {"relu": "relu", "relu2": "relu2"}

# Defaults of missing keys in the family's class, where families differ.
_LLAMA = {"rms_norm_eps": 1e-6, "hidden_act": "silu"}
_OLMO = {"vocab_size": 50304, "max_position_embeddings": 2048, "hidden_act": "silu", "sliding_window": 4096}
_DELTA = {
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "head_dim": 256, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "norm_topk_prob": True,
}  # fmt: skip
_GRANITE = _LLAMA | {"max_position_embeddings": 2048, "num_local_experts": 8, "num_experts_per_tok": 2}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA | {"sliding_window": 4096},
    "qwen2": _LLAMA | {"sliding_window": 4096},
    "qwen3": _LLAMA | {"sliding_window": 4096},
    "sparsellama": {"rms_norm_eps": 1e-6},  # a ProSparse model always states hidden_act
    "bamboo": _LLAMA | {"sliding_window": 4096, "num_key_value_heads": 8},
    "opt": {"activation_function": "relu", "tie_word_embeddings": True},
    "falcon": {
        "max_position_embeddings": 2048, "activation": "gelu", "tie_word_embeddings": True, "parallel_attn": True,
        "multi_query": True,
    },
    "nemotron": {"hidden_act": "relu2"},
    "gemma3_text": {
        "num_hidden_layers": 26, "hidden_size": 2304, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 256, "intermediate_size": 9216, "hidden_activation": "gelu_pytorch_tanh", "vocab_size": 262208,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "sliding_window": 4096, "tie_word_embeddings": True,
    },
    "phi3": {"vocab_size": 32064, "max_position_embeddings": 4096, "hidden_act": "silu"},
    "olmo2": _OLMO,
    "olmo3": _OLMO,
    "openelm": {
        "vocab_size": 32000, "max_context_length": 2048, "model_dim": 2048, "num_transformer_layers": 12,
        "head_dim": 128, "ffn_dim_divisor": 256, "activation_fn_name": "swish", "rms_norm_eps": 1e-6,
    },
    "mixtral": {
        "hidden_act": "silu", "rope_theta": 1e6, "num_key_value_heads": 8, "num_local_experts": 8,
        "num_experts_per_tok": 2, "max_position_embeddings": 131072, "intermediate_size": 14336,
    },
    "qwen2_moe": _LLAMA | {
        "qkv_bias": True, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632, "intermediate_size": 5632, "num_key_value_heads": 16,
    },
    "qwen3_moe": _LLAMA | {
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144,
        "num_key_value_heads": 4,
    },
    "olmoe": {
        "hidden_act": "silu", "num_experts": 64, "num_experts_per_tok": 8, "intermediate_size": 2048,
        "vocab_size": 50304, "max_position_embeddings": 4096,
    },
    "glm4_moe": {
        "hidden_act": "silu", "num_experts_per_tok": 8, "moe_intermediate_size": 1408,
        "intermediate_size": 10944, "num_key_value_heads": 8, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "norm_topk_prob": True,
    },
    "gpt_oss": {
        "hidden_act": "silu", "num_local_experts": 128, "num_experts_per_tok": 4, "hidden_size": 2880,
        "intermediate_size": 2880, "head_dim": 64, "num_attention_heads": 64, "num_key_value_heads": 8,
        "num_hidden_layers": 36, "vocab_size": 201088, "max_position_embeddings": 131072, "sliding_window": 128,
        "attention_bias": True,
    },
    "qwen3_next": _DELTA | {"num_key_value_heads": 2, "num_experts": 512, "num_experts_per_tok": 10},
    "qwen3_5_text": _DELTA | {"num_key_value_heads": 4},
    "qwen3_5_moe_text": _DELTA | {"num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8},
    "glm4_moe_lite": {
        "vocab_size": 154880, "hidden_size": 2048, "intermediate_size": 10240, "num_hidden_layers": 47,
        "num_attention_heads": 20, "max_position_embeddings": 202752, "hidden_act": "silu", "first_k_dense_replace": 1,
        "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "n_routed_experts": 64, "n_shared_experts": 1,
        "moe_intermediate_size": 1536, "norm_topk_prob": True, "routed_scaling_factor": 1.8, "num_experts_per_tok": 4,
        "rope_interleave": True,
    },
    "deepseek_v2": _LLAMA | {
        "vocab_size": 102400, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "max_position_embeddings": 2048, "first_k_dense_replace": 0, "q_lora_rank": 1536,
        "n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407, "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    },
    "deepseek_v3": _LLAMA | {
        "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
        "num_attention_heads": 128, "max_position_embeddings": 4096, "first_k_dense_replace": 3, "q_lora_rank": 1536,
        "n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8,
        "rope_interleave": True,
    },
    "granite": _LLAMA,
    "granitemoe": _GRANITE,
    "granitemoeshared": _GRANITE,
    "smallthinker": {
        "num_hidden_layers": 32, "hidden_size": 1536, "vocab_size": 151936, "rms_norm_eps": 1e-6,
        "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072,
        "sliding_window_size": 4096, "moe_num_primary_experts": 32, "moe_ffn_hidden_size": 768,
        "moe_num_active_primary_experts": 4, "tie_word_embeddings": True, "hidden_act": "relu",
    },
    "arcee": {
        "hidden_size": 2560, "intermediate_size": 18432, "num_hidden_layers": 32, "num_attention_heads": 32,
        "vocab_size": 32000, "max_position_embeddings": 4096, "hidden_act": "relu2",
    },
    "smollm3": _LLAMA | {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
        "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 2e6,
        "tie_word_embeddings": True,
    },
    "seed_oss": _LLAMA | {
        "vocab_size": 155136, "hidden_size": 4096, "intermediate_size": 27648, "num_hidden_layers": 64,
        "num_attention_heads": 80, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288,
        "attention_bias": True,
    },
    "minimax_m2": _LLAMA | {
        "vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 62,
        "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 196608,
        "rope_theta": 5e6, "num_local_experts": 256, "num_experts_per_tok": 8,
    },
    "glm4": {
        "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 40,
        "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072,
        "rms_norm_eps": 1.5625e-7, "hidden_act": "silu", "attention_bias": True,
    },
    "ernie4_5": {
        "vocab_size": 103424, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 18,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072,
        "rope_theta": 5e5, "hidden_act": "silu", "tie_word_embeddings": True,
    },
    "ernie4_5_moe": {
        "vocab_size": 103424, "hidden_size": 2560, "intermediate_size": 12288, "num_hidden_layers": 28,
        "num_attention_heads": 20, "num_key_value_heads": 4, "max_position_embeddings": 131072, "hidden_act": "silu",
        "tie_word_embeddings": True, "moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536,
        "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "rope_theta": 5e5,
    },
}  # fmt: skip
# Here null does not mean the default but no window, as many as heads, false.
_NULLABLE = (
    "sliding_window", "num_key_value_heads", "alibi", "new_decoder_architecture", "parallel_attn", "multi_query",
    "bias", "q_lora_rank", "norm_topk_prob", "rope_interleave",
)  # fmt: skip
_KV_HEADS_STATED = ("mistral", "qwen2", "qwen3", "nemotron")  # whose number of key-value heads has no usable default
# Keys that a family calls otherwise.
_OWN_KEYS = {
    "falcon": {"rms_norm_eps": "layer_norm_epsilon"},
    "nemotron": {"rms_norm_eps": "norm_eps"},
    "openelm": {
        "hidden_size": "model_dim", "num_hidden_layers": "num_transformer_layers",
        "max_position_embeddings": "max_context_length", "tie_word_embeddings": "share_input_output_layers",
    },
}  # fmt: skip


def _llama_like(fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    architecture = config.architecture
    attention_bias = architecture not in ("mistral", "bamboo") and fields.flag("attention_bias", False)
    if architecture == "qwen2":
        fields.only("attention_bias", True)  # the class has biases on q, k and v, and no switch
    mlp_bias = architecture in _WITH_MLP_BIAS and fields.flag("mlp_bias", False)
    o_bias = architecture != "qwen2" and attention_bias
    if architecture == "seed_oss":
        o_bias = fields.flag("attention_out_bias", False)
    heads = _heads(fields, config)
    attention = replace(
        heads,
        rope=_rope(fields, config, heads),
        qkv_bias=architecture == "qwen2" or attention_bias,
        o_bias=o_bias,
        qk_norm="head" if architecture == "qwen3" else None,
    )
    gated = architecture != "arcee"
    activation = _gated_activation(fields, architecture) if gated else _activation(fields, "hidden_act", _PLAIN)
    ffn = FfnConfig(_ffn_size(fields), activation, gated=gated, bias=mlp_bias)
    windows = _windows(fields, architecture, n_layers)
    every = [replace(attention, window=one) for one in windows]
    if architecture == "smollm3":
        turned = _turned(fields, n_layers)
        every = [one if turns else replace(one, rope=None) for one, turns in zip(every, turned, strict=True)]
    return replace(config, layers=tuple(LayerConfig(one, ffn) for one in every))


def _turned(fields: Fields, n_layers: int) -> list[int]:
    """Whether positions are rotated in each layer of SmolLM3: `no_rope_layers` says where they are."""
    every = fields.integer("no_rope_layer_interval", 1, layout.MAX_LAYERS, 4)
    if fields.has("no_rope_layers"):
        return _switches(fields, "no_rope_layers", n_layers, 1)
    return [int(layer % every != 0) for layer in range(1, n_layers + 1)]


_WITH_MLP_BIAS = ("llama", "sparsellama", "arcee", "smollm3", "seed_oss")


def _gated_activation(fields: Fields, architecture: str) -> str:
    """The activation of a gated FFN."""
    known = {"bamboo": {"relu": "drelu"}, "sparsellama": {"fatrelu": "fatrelu", "relu": "relu"}}
    return _activation(fields, "hidden_act", known.get(architecture, _GATED))


def _opt(fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    fields.only("layer_norm_elementwise_affine", True)
    first = fields.flag("do_layer_norm_before", True)
    bias = fields.flag("enable_bias", True)
    width = fields.integer("word_embed_proj_dim", 1, layout.MAX_WIDTH, config.d_model)
    activation = _activation(fields, "activation_function", {"relu": "relu"})
    heads = _heads(fields, config)
    layer = LayerConfig(
        replace(heads, n_kv_heads=heads.n_heads, qkv_bias=bias, o_bias=bias),
        FfnConfig(fields.integer("ffn_dim", 1, layout.MAX_WIDTH), activation, gated=False, bias=bias),
        norms="pre" if first else "post",
    )
    return replace(
        config,
        norm_eps=1e-5,  # torch's own default; the configuration has no key for it
        layers=uniform(n_layers, layer),
        norm="layer",
        positions="learned",
        position_offset=2,
        embed_dim=0 if width == config.d_model else width,
        final_norm=first and not fields.flag("_remove_final_layer_norm", False),
    )


def _falcon(fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
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
    heads = _heads(fields, config)
    kv_heads = fields.integer("num_kv_heads", 1, layout.MAX_HEADS, heads.n_heads)
    if not new:
        one = fields.flag("multi_query", False)
        if not one and kv_heads != heads.n_heads:
            raise fields.bad("num_kv_heads", f"is {kv_heads}, but without multi_query there are {heads.n_heads}")
        kv_heads = 1 if one else heads.n_heads
    bias = fields.flag("bias", False)
    size = fields.integer("ffn_hidden_size", 1, layout.MAX_WIDTH, 4 * config.d_model)
    layer = LayerConfig(
        replace(heads, n_kv_heads=kv_heads, rope=_rope(fields, config, heads), qkv_bias=bias, o_bias=bias),
        FfnConfig(size, _activation(fields, "activation", _PLAIN), gated=False, bias=bias),
        parallel=parallel,
        shared_norm=parallel and norms == 1,
    )
    return replace(config, layers=uniform(n_layers, layer), norm="layer")


def _nemotron(fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    bias = fields.flag("attention_bias", False)
    activation = _activation(fields, "hidden_act", _PLAIN)
    heads = _heads(fields, config)
    layer = LayerConfig(
        replace(heads, rope=_rope(fields, config, heads, partial=0.5), qkv_bias=bias, o_bias=bias),
        FfnConfig(_ffn_size(fields), activation, gated=False, bias=fields.flag("mlp_bias", False)),
    )
    return replace(config, layers=uniform(n_layers, layer), norm="layer")


def _gemma3(fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    for key in ("final_logit_softcapping", "attn_logit_softcapping"):
        fields.only(key)
    fields.only("use_bidirectional_attention", False)
    bias = fields.flag("attention_bias", False)
    activation = _activation(fields, "hidden_activation", {"gelu_pytorch_tanh": "gelu_tanh"} | _GATED)
    attention = replace(
        _heads(fields, config),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        scale=fields.number("query_pre_attn_scalar", 1e-6, layout.MAX_SCALE, 256.0) ** -0.5,
    )
    ffn = FfnConfig(_ffn_size(fields), activation)
    every = fields.integer("sliding_window_pattern", 1, layout.MAX_CONTEXT, 6)
    kinds = _kinds(fields, attention, _ropes(fields, config, attention, 1e6, 1e4))
    return replace(
        config,
        layers=tuple(LayerConfig(kinds[one], ffn, norms="both") for one in _layer_types(fields, n_layers, every)),
        embedding_scale=float(np.sqrt(np.float32(config.d_model))),
    )


def _olmo(fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    bias = fields.flag("attention_bias", False)
    attention = replace(_heads(fields, config), qkv_bias=bias, o_bias=bias, qk_norm="width")
    ffn = FfnConfig(_ffn_size(fields), _activation(fields, "hidden_act", _GATED))
    if config.architecture == "olmo2":
        every = [replace(attention, rope=_rope(fields, config, attention))] * n_layers
    else:
        kinds = _kinds(fields, attention, _ropes(fields, config, attention, 5e5, None))
        every = [kinds[one] for one in _layer_types(fields, n_layers, 4)]
    return replace(config, layers=tuple(LayerConfig(one, ffn, norms="output") for one in every))


def _phi3(fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    heads = _heads(fields, config)
    attention = replace(
        heads,
        rope=_rope(fields, config, heads, partial=1.0, original=4096),
        window=fields.integer("sliding_window", 1, layout.MAX_CONTEXT, None),
    )
    layer = LayerConfig(attention, FfnConfig(_ffn_size(fields), _activation(fields, "hidden_act", _GATED)))
    return replace(config, layers=uniform(n_layers, layer))


def _openelm(fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    """Layers of several sizes (arXiv 2404.14619), which the published files state one by one."""
    fields.only("ffn_with_glu", True)
    fields.only("normalization_layer_name", "rms_norm")
    dim = fields.integer("head_dim", 2, layout.MAX_HEAD_DIM)
    rope = RopeConfig(fields.number("rope_freq_constant", 1.0001, layout.MAX_THETA, 10000.0), dim)
    qk_norm = "head" if fields.flag("normalize_qk_projections", False) else None
    activation = _activation(fields, "activation_fn_name", _GATED)
    divisor = fields.integer("ffn_dim_divisor", 1, layout.MAX_WIDTH)
    heads, kv_heads = (
        fields.integers(key, n_layers, 1, layout.MAX_HEADS) for key in ("num_query_heads", "num_kv_heads")
    )
    shares = fields.get("ffn_multipliers", None)
    if type(shares) is not list or len(shares) != n_layers or not all(type(one) in (int, float) for one in shares):
        raise fields.bad("ffn_multipliers", f"is {shown(shares)}, not a number for every layer")
    sizes = [_divisible(share * config.d_model, divisor) for share in shares if 0 < share < layout.MAX_WIDTH]
    if len(sizes) != n_layers or max(sizes) > layout.MAX_WIDTH:
        raise fields.bad("ffn_multipliers", f"is {shown(shares)}, which are no sizes of FFNs")
    return replace(
        config,
        layers=tuple(
            LayerConfig(AttentionConfig(n, kv, dim, rope, qk_norm=qk_norm), FfnConfig(size, activation))
            for n, kv, size in zip(heads, kv_heads, sizes, strict=True)
        ),
    )


def _divisible(size: float, divisor: int) -> int:
    """The multiple of `divisor` nearest to `size`, at least one; the next one if it is more than a tenth below."""
    nearest = max(divisor, int(size + divisor / 2) // divisor * divisor)
    return nearest + divisor * (nearest < 0.9 * size)


def _experts_of(fields: Fields, count: str, size: str, **router: Any) -> ExpertsConfig:
    """Experts whose number and size are in these keys; transformers 5 may call the number `num_local_experts`.

    router: fields of `RouterConfig`.
    """
    n_experts = fields.integer("num_local_experts", 1, layout.MAX_EXPERTS, None)
    if n_experts is None or fields.has(count):
        n_experts = fields.integer(count, 1, layout.MAX_EXPERTS)
    top_k = fields.integer("num_experts_per_tok", 1, n_experts)
    activation = _activation(fields, "hidden_act", _GATED)  # drelu: TurboSparse-Mixtral
    neurons = fields.integer(size, 1, layout.MAX_WIDTH)
    return ExpertsConfig(n_experts, neurons, RouterConfig(top_k, **router), activation)


def _mixtral(fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    heads = _heads(fields, config)
    window = fields.integer("sliding_window", 1, layout.MAX_CONTEXT, None)
    attention = replace(heads, rope=_rope(fields, config, heads), window=window)
    experts = _experts_of(fields, "num_local_experts", "intermediate_size")
    return replace(config, layers=uniform(n_layers, LayerConfig(attention, experts)))


def _qwen_moe(fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    third = config.architecture == "qwen3_moe"
    fields.only("use_sliding_window", False)
    heads = _heads(fields, config)
    bias = fields.flag("attention_bias" if third else "qkv_bias", False)
    attention = replace(
        heads,
        rope=_rope(fields, config, heads),
        qkv_bias=bias,
        o_bias=third and bias,
        qk_norm="head" if third else None,
    )
    normalise = fields.flag("norm_topk_prob", False)
    experts = _experts_of(fields, "num_experts", "moe_intermediate_size", normalise=normalise)
    if not third:
        shared = fields.integer("shared_expert_intermediate_size", 1, layout.MAX_WIDTH)
        experts = replace(experts, shared_size=shared, shared_weight=True)
    kinds = _some_experts(fields, experts, n_layers)
    return replace(config, layers=tuple(LayerConfig(attention, kind) for kind in kinds))


def _some_experts(fields: Fields, experts: ExpertsConfig, n_layers: int) -> list[FfnKind]:
    """Experts in every `decoder_sparse_step`-th layer that is not one of `mlp_only_layers`."""
    every = fields.integer("decoder_sparse_step", 1, layout.MAX_LAYERS, 1)
    without = fields.get("mlp_only_layers", None) or []
    if type(without) is not list or not all(type(layer) is int for layer in without):
        raise fields.bad("mlp_only_layers", f"is {shown(without)}, not a list of layers")
    dense = [bool((layer + 1) % every) or layer in without for layer in range(n_layers)]
    return [FfnConfig(_ffn_size(fields), experts.activation) if one else experts for one in dense]


MIXED_ACT = "linear_hidden_act"
"""A key of this engine's own: the activation behind the convolution of Gated DeltaNet, where FFNs have another."""


def _qwen_delta(fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    """Gated DeltaNet beside gated attention: Qwen3-Next, Qwen3.5 and Qwen3.6, with experts or without."""
    fields.only("attention_bias", False)
    stated = fields.text(MIXED_ACT, fields.text("hidden_act"))
    mixed = _GATED.get(stated, "")
    if mixed not in MIXED_ACTIVATIONS:
        raise fields.bad(
            MIXED_ACT if fields.has(MIXED_ACT) else "hidden_act",
            f"is {shown(stated)}, also behind the convolution of Gated DeltaNet, as in transformers; only "
            f"{', '.join(MIXED_ACTIVATIONS)} are supported there: give {MIXED_ACT} if the model has one of them",
        )
    heads = _heads(fields, config)
    attention = GatedAttentionConfig(
        **vars(replace(heads, rope=_rope(fields, config, heads, partial=0.25), qk_norm="head"))
    )
    delta = DeltaNetConfig(
        fields.integer("linear_num_key_heads", 1, layout.MAX_HEADS),
        fields.integer("linear_key_head_dim", 1, layout.MAX_HEAD_DIM),
        fields.integer("linear_num_value_heads", 1, layout.MAX_HEADS),
        fields.integer("linear_value_head_dim", 1, layout.MAX_HEAD_DIM),
        fields.integer("linear_conv_kernel_dim", 1, layout.MAX_HEAD_DIM),
        activation=mixed,
    )
    every = fields.integer("full_attention_interval", 1, layout.MAX_LAYERS, 4)
    kinds: dict[str, AttentionKind] = {_LINEAR: delta, _GLOBAL: attention}
    ffns: list[FfnKind]
    if config.architecture == "qwen3_5_text":
        ffns = [FfnConfig(_ffn_size(fields), _activation(fields, "hidden_act", _GATED))] * n_layers
    else:
        if config.architecture == "qwen3_5_moe_text":
            fields.only("norm_topk_prob", True)  # the class has no such switch
        experts = _experts_of(
            fields, "num_experts", "moe_intermediate_size", normalise=fields.flag("norm_topk_prob", False)
        )
        shared = fields.integer("shared_expert_intermediate_size", 1, layout.MAX_WIDTH)
        ffns = _some_experts(fields, replace(experts, shared_size=shared, shared_weight=True), n_layers)
    types = _layer_types(fields, n_layers, every, _LINEAR)
    return replace(config, layers=tuple(LayerConfig(kinds[one], ffn) for one, ffn in zip(types, ffns, strict=True)))


def _olmoe(fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    fields.only("clip_qkv")
    heads = _heads(fields, config)
    bias = fields.flag("attention_bias", False)
    attention = replace(heads, rope=_rope(fields, config, heads), qkv_bias=bias, o_bias=bias, qk_norm="width")
    normalise = fields.flag("norm_topk_prob", False)
    experts = _experts_of(fields, "num_experts", "intermediate_size", normalise=normalise)
    return replace(config, layers=uniform(n_layers, LayerConfig(attention, experts)))


def _glm4_moe(fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    heads = _heads(fields, config)
    attention = replace(
        heads,
        rope=_rope(fields, config, heads, partial=0.5),
        qkv_bias=fields.flag("attention_bias", False),
        qk_norm="head" if fields.flag("use_qk_norm", False) else None,
    )
    kinds = _deepseek_ffns(fields, n_layers, sigmoid=True)
    return replace(config, layers=tuple(LayerConfig(attention, kind) for kind in kinds))


def _minimax_m2(fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    for key, only in (("scoring_func", "sigmoid"), ("use_routing_bias", True), ("use_qk_norm", True)):
        fields.only(key, only)
    fields.only("qk_norm_type", "per_layer")
    fields.only("shared_intermediate_size", 0)
    heads = _heads(fields, config)
    turned = fields.integer("rotary_dim", 2, heads.head_dim, heads.head_dim)  # as the published files say it
    rope = _rope(fields, config, heads, partial=turned / heads.head_dim)
    attention = replace(heads, rope=rope, qk_norm="width")
    experts = _experts_of(fields, "num_local_experts", "intermediate_size", scoring="sigmoid", correction=True)
    return replace(config, layers=uniform(n_layers, LayerConfig(attention, experts)))


def _glm4(fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    heads = _heads(fields, config)
    rope = replace(_rope(fields, config, heads, partial=0.5), interleaved=True)
    attention = replace(heads, rope=rope, qkv_bias=fields.flag("attention_bias", False))
    layer = LayerConfig(
        attention, FfnConfig(_ffn_size(fields), _activation(fields, "hidden_act", _GATED)), norms="both"
    )
    return replace(config, layers=uniform(n_layers, layer))


def _ernie(fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    """ERNIE 4.5; with experts in every `moe_layer_interval`-th layer from one on up to another."""
    fields.only("use_bias", False)
    heads = _heads(fields, config)
    attention = replace(heads, rope=replace(_rope(fields, config, heads), interleaved=True))
    dense = FfnConfig(_ffn_size(fields), _activation(fields, "hidden_act", _GATED))
    if config.architecture == "ernie4_5":
        return replace(config, layers=uniform(n_layers, LayerConfig(attention, dense)))
    n_experts = fields.integer("moe_num_experts", 1, layout.MAX_EXPERTS)
    size = fields.integer("moe_intermediate_size", 1, layout.MAX_WIDTH)
    router = RouterConfig(fields.integer("moe_k", 1, n_experts), correction=True)
    shared = size * fields.integer("moe_num_shared_experts", 0, layout.MAX_EXPERTS)
    experts = ExpertsConfig(n_experts, size, router, dense.activation, shared_size=shared)
    every = fields.integer("moe_layer_interval", 1, layout.MAX_LAYERS, 1)
    first = fields.integer("moe_layer_start_index", 0, layout.MAX_LAYERS)
    last = fields.integer("moe_layer_end_index", -1, layout.MAX_LAYERS, -1)
    last = n_layers - 1 if last < 0 else last
    sparse = [first <= layer <= last and (layer + 1) % every == 0 for layer in range(n_layers)]
    return replace(config, layers=tuple(LayerConfig(attention, experts if one else dense) for one in sparse))


def _deepseek_ffns(fields: Fields, n_layers: int, *, sigmoid: bool) -> list[FfnKind]:
    """Experts as of DeepSeek, behind the first layers; sigmoid: V3's router, whose scores are corrected, else V2's."""
    groups = fields.integer("n_group", 1, layout.MAX_EXPERTS, 1)
    top_groups = fields.integer("topk_group", 1, groups, 1)
    if not sigmoid:
        method = fields.text("topk_method", "greedy")
        if method not in ("greedy", "group_limited_greedy"):
            raise fields.bad("topk_method", f"is {shown(method)}, which this engine does not support")
        groups, top_groups = (groups, top_groups) if method != "greedy" else (1, 1)
        fields.only("norm_topk_prob", False)  # which the class does not look at
    experts = _experts_of(
        fields,
        "n_routed_experts",
        "moe_intermediate_size",
        scoring="sigmoid" if sigmoid else "softmax",
        normalise=fields.flag("norm_topk_prob", False),
        scale=fields.number("routed_scaling_factor", 1e-6, layout.MAX_SCALE, 1.0),
        correction=sigmoid,
        groups=groups,
        top_groups=top_groups,
        group_best=2 if sigmoid and groups > 1 else 1,
    )
    shared = fields.integer("n_shared_experts", 0, layout.MAX_EXPERTS)
    experts = replace(experts, shared_size=shared * experts.size)
    first = fields.integer("first_k_dense_replace", 0, layout.MAX_LAYERS)
    dense = FfnConfig(_ffn_size(fields), experts.activation)
    types = fields.get("mlp_layer_types", None)
    if types is None:
        types = ["dense" if layer < first else "sparse" for layer in range(n_layers)]
    if type(types) is not list or len(types) != n_layers or any(one not in ("dense", "sparse") for one in types):
        raise fields.bad("mlp_layer_types", f"is {shown(types)}, not dense or sparse for every layer")
    return [dense if one == "dense" else experts for one in types]


def _deepseek(fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    """Latent attention. The norms of latents have the default of their class, whatever `rms_norm_eps` is."""
    third = config.architecture != "deepseek_v2"
    fields.only("attention_bias", False)
    fields.only("mlp_bias", False)
    fields.only("moe_layer_freq", 1)

    def dims(key: str, default: int) -> int:
        return int(fields.integer(key, 1, layout.MAX_HEAD_DIM, default))

    heads, latents, rotated = (
        fields.integer("num_attention_heads", 1, layout.MAX_HEADS),
        dims("kv_lora_rank", 512),
        dims("qk_rope_head_dim", 64),
    )
    plain = dims("qk_nope_head_dim", 128)
    rope, gain = _latent_rope(fields, config, rotated)
    attention = LatentAttentionConfig(
        heads,
        latents,
        plain,
        rotated,
        dims("v_head_dim", 128),
        replace(rope, interleaved=fields.flag("rope_interleave", False) if third else True),
        gain * (plain + rotated) ** -0.5,
        fields.integer("q_lora_rank", 1, layout.MAX_WIDTH, None),
    )
    kinds = _deepseek_ffns(fields, n_layers, sigmoid=third)
    return replace(config, layers=tuple(LayerConfig(attention, kind) for kind in kinds))


def _gpt_oss(fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    fields.only("hidden_act", "silu")
    fields.only("swiglu_alpha", 1.702)
    fields.only("swiglu_limit", 7.0, 7)
    heads = _heads(fields, config)
    bias = fields.flag("attention_bias")
    if not fields.has("rope_parameters") and not fields.has("rope_scaling"):
        raise fields.bad("rope_parameters", "is missing")
    rope = _rope(fields, config, heads, theta=150000.0)
    attention = replace(heads, rope=rope, qkv_bias=bias, o_bias=bias, sinks=True)
    n_experts = fields.integer("num_local_experts", 1, layout.MAX_EXPERTS)
    router = RouterConfig(fields.integer("num_experts_per_tok", 1, n_experts), bias=True)
    experts = ExpertsConfig(n_experts, _ffn_size(fields), router, "swiglu_oai", bias=True)
    window = fields.integer("sliding_window", 1, layout.MAX_CONTEXT, None)
    windows = [window if kind == _LOCAL else None for kind in _layer_types(fields, n_layers, 2)]
    return replace(config, layers=tuple(LayerConfig(replace(attention, window=one), experts) for one in windows))


def _latent_rope(fields: Fields, config: ModelConfig, dim: int) -> tuple[RopeConfig, float]:
    """(rotary embedding, factor of attention's scores), which YaRN's `mscale` and `mscale_all_dim` are about."""
    rope = _rope(fields, config, AttentionConfig(1, 1, dim))
    if rope.scaling != "yarn":
        return rope, 1.0
    scale = _rope_values(fields).number("mscale_all_dim", 0, layout.MAX_SCALE, 0.0)
    return rope, _yarn_gain(rope.factor, scale) ** 2


def _yarn_gain(factor: float, scale: float = 1.0) -> float:
    """What YaRN multiplies with where positions are divided by `factor`."""
    return 1 + 0.1 * scale * math.log(max(factor, 1))


def _granite(fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    heads = _heads(fields, config)
    bias = fields.flag("attention_bias", False)
    scale = fields.number("attention_multiplier", 1e-6, layout.MAX_SCALE, 1.0)
    attention = replace(heads, rope=_rope(fields, config, heads), qkv_bias=bias, o_bias=bias, scale=scale)
    ffn: FfnKind
    if config.architecture == "granite":
        bias = fields.flag("mlp_bias", False)
        ffn = FfnConfig(_ffn_size(fields), _activation(fields, "hidden_act", _GATED), bias=bias)
    else:
        ffn = _experts_of(fields, "num_local_experts", "intermediate_size")
    if config.architecture == "granitemoeshared":
        ffn = replace(ffn, shared_size=fields.integer("shared_intermediate_size", 0, layout.MAX_WIDTH, 0))
    return replace(
        config,
        layers=uniform(n_layers, LayerConfig(attention, ffn)),
        embedding_scale=fields.number("embedding_multiplier", 1e-6, layout.MAX_SCALE, 1.0),
        residual_scale=fields.number("residual_multiplier", 1e-6, layout.MAX_SCALE, 1.0),
        logit_scale=1 / fields.number("logits_scaling", 1e-6, layout.MAX_SCALE, 1.0),
    )


def _smallthinker(fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    """Layers may lack a window, and rotated positions; a router reads what its layer does."""
    fields.only("moe_enable_early_router", True)
    fields.only("moe_enable_secondary_experts", False)
    if 0 in _switches(fields, "moe_layer_layout", n_layers, 1):
        raise fields.bad("moe_layer_layout", "holds layers without experts, which are not supported")
    heads = _heads(fields, config)
    rope = _rope(fields, config, heads, theta=1e6)
    size = fields.integer("sliding_window_size", 1, layout.MAX_CONTEXT)
    n_experts = fields.integer("moe_num_primary_experts", 1, layout.MAX_EXPERTS)
    scoring = "softmax" if fields.flag("moe_primary_router_apply_softmax", False) else "sigmoid"
    experts = ExpertsConfig(
        n_experts,
        fields.integer("moe_ffn_hidden_size", 1, layout.MAX_WIDTH),
        RouterConfig(fields.integer("moe_num_active_primary_experts", 1, n_experts), scoring),
        _activation(fields, "hidden_act", {"relu": "relu"}),
        early_router=True,
    )
    rotated = _switches(fields, "rope_layout", n_layers, 1)
    windows = _switches(fields, "sliding_window_layout", n_layers, 0)
    return replace(
        config,
        layers=tuple(
            LayerConfig(replace(heads, rope=rope if turns else None, window=size if slides else None), experts)
            for turns, slides in zip(rotated, windows, strict=True)
        ),
    )


_READERS = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "sparsellama", "bamboo"), _llama_like),
    **dict.fromkeys(("arcee", "smollm3", "seed_oss"), _llama_like),
    "minimax_m2": _minimax_m2,
    "glm4": _glm4,
    **dict.fromkeys(("ernie4_5", "ernie4_5_moe"), _ernie),
    "opt": _opt,
    "falcon": _falcon,
    "nemotron": _nemotron,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
    "olmo2": _olmo,
    "olmo3": _olmo,
    "openelm": _openelm,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen_moe,
    "qwen3_moe": _qwen_moe,
    "olmoe": _olmoe,
    "glm4_moe": _glm4_moe,
    "smallthinker": _smallthinker,
    "gpt_oss": _gpt_oss,
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _qwen_delta),
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "glm4_moe_lite": _deepseek,
    **dict.fromkeys(("granite", "granitemoe", "granitemoeshared"), _granite),
}


# --- parts -----------------------------------------------------------------------------------------------------------


def _ffn_size(fields: Fields) -> int:
    return int(fields.integer("intermediate_size", 1, layout.MAX_WIDTH))


def _activation(fields: Fields, key: str, known: dict[str, str]) -> str:
    """The activation: `known` maps the family's names to those of this engine."""
    name = fields.text(key)
    if name not in known:
        raise fields.bad(key, f"is {shown(name)}; of this family only {', '.join(known)} is supported")
    return known[name]


def _heads(fields: Fields, config: ModelConfig) -> AttentionConfig:
    """Attention with the heads of a family whose layers have as many."""
    n_heads = fields.integer("num_attention_heads", 1, layout.MAX_HEADS)
    kv_default = {} if config.architecture in _KV_HEADS_STATED else {"default": n_heads}
    kv_heads = fields.integer("num_key_value_heads", 1, layout.MAX_HEADS, **kv_default)
    return AttentionConfig(n_heads, kv_heads, _head_dim(fields, config.architecture, config.d_model, n_heads))


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
    if architecture in ("llama", "sparsellama", "arcee", "seed_oss"):
        return [None] * layers  # the class ignores the setting
    if architecture == "smollm3":
        fields.only("use_sliding_window", False)
        return [None] * layers
    window = fields.integer("sliding_window", 1, layout.MAX_CONTEXT, None)
    if architecture in ("mistral", "bamboo") and not fields.has("layer_types"):
        return [window] * layers
    if architecture in ("mistral", "bamboo"):  # of which `transformers` then makes the class Ministral
        return [window if kind == _LOCAL else None for kind in _layer_types(fields, layers)]
    if not fields.flag("use_sliding_window", False):
        window = None
    first = fields.integer("max_window_layers", 0, layout.MAX_CONTEXT, 28)
    if not fields.has("layer_types"):
        return [window if layer >= first else None for layer in range(layers)]
    return [window if kind == _LOCAL else None for kind in _layer_types(fields, layers)]


_GLOBAL, _LOCAL, _LINEAR = "full_attention", "sliding_attention", "linear_attention"


def _layer_types(fields: Fields, layers: int, every: int = 1, other: str = _LOCAL) -> list[str]:
    """The kind of each layer's attention: `other`, or global.

    every: without `layer_types`, every `every`-th layer is global.
    """
    kinds = fields.get("layer_types", None)
    if kinds is None:
        return [other if (layer + 1) % every else _GLOBAL for layer in range(layers)]
    if type(kinds) is not list or len(kinds) != layers:
        raise fields.bad("layer_types", f"is {shown(kinds)}, not a kind for every layer")
    strange = [kind for kind in kinds if kind not in (_GLOBAL, other)]
    if strange:
        raise fields.bad("layer_types", f"holds {shown(strange[0])}, which is not supported")
    return kinds


def _switches(fields: Fields, key: str, layers: int, default: int) -> list[int]:
    """A list of 0 or 1 for every layer."""
    values = fields.get(key, None)
    if values is None:
        return [default] * layers
    if type(values) is not list or len(values) != layers or any(type(one) is not int or one >> 1 for one in values):
        raise fields.bad(key, f"is {shown(values)}, not 0 or 1 for every layer")
    return values


def _kinds(fields: Fields, attention: AttentionConfig, ropes: dict[str, RopeConfig]) -> dict[str, AttentionConfig]:
    """Attention with a window and without, each with its rotary embedding."""
    window = fields.integer("sliding_window", 1, layout.MAX_CONTEXT, None)
    windows = {_GLOBAL: None, _LOCAL: window}
    return {kind: replace(attention, rope=rope, window=windows[kind]) for kind, rope in ropes.items()}


def _ropes(
    fields: Fields, config: ModelConfig, heads: AttentionConfig, theta: float, local_theta: float | None
) -> dict[str, RopeConfig]:
    """The rotary embedding of each kind of attention. `rope_scaling` is that of global attention only.

    local_theta: default of the local one's base, in `rope_local_base_freq`; None: the base is that of the global one.
    """
    new = fields.get("rope_parameters", None)
    if type(new) is dict and set(new) & {_GLOBAL, _LOCAL}:
        defaults = {_GLOBAL: theta, _LOCAL: local_theta or theta}
        parts = {kind: Fields({"rope_parameters": new.get(kind)}, f"{fields.where}: {kind}") for kind in defaults}
        return {kind: _rope(parts[kind], config, heads, theta=default) for kind, default in defaults.items()}
    whole = _rope(fields, config, heads, theta=theta)
    local = whole.theta
    if local_theta is not None:
        local = fields.number("rope_local_base_freq", 1.0001, layout.MAX_THETA, local_theta)
    return {_GLOBAL: whole, _LOCAL: RopeConfig(theta=local, dim=heads.head_dim)}


def _rope(
    fields: Fields,
    config: ModelConfig,
    heads: AttentionConfig,
    partial: float | None = None,
    theta: float = 10000.0,
    original: int | None = None,
) -> RopeConfig:
    """`rope_parameters` as transformers 5 writes it, or `rope_theta` and `rope_scaling` as earlier versions did.

    partial: the family's default share of a head that is rotated; None: the whole head is, always. theta, original:
    its defaults of the base, and of the context that the model was trained with first.
    """
    rope = _rope_values(fields)
    if config.architecture in _WITH_PICTURES:  # places in a picture; a text has one position in all three dimensions
        for key in ("mrope_section", "mrope_interleaved"):
            rope.get(key, None)
    dim = _rotated(fields, rope, heads.head_dim, partial)
    theta = fields.number("rope_theta", 1.0001, layout.MAX_THETA, theta)
    plain = RopeConfig(rope.number("rope_theta", 1.0001, layout.MAX_THETA, theta), dim)
    outer = fields.integer("original_max_position_embeddings", 1, layout.MAX_CONTEXT, original)
    kind = rope.text("rope_type", "default")
    if kind not in _SCALINGS:
        raise rope.bad("rope_type", f"is {shown(kind)}, which is not supported (only {', '.join(_SCALINGS)})")
    result = _scaled(rope, plain, _SCALINGS[kind], outer, config.context_length)
    unread = rope.unread()
    if unread:
        raise rope.bad(shown(unread[0])[1:-1], f"is set, which this engine does not support for type {kind}")
    return result


def _rope_values(fields: Fields) -> Fields:
    """What `rope_parameters` and `rope_scaling` say; both may be there, if they agree in what both say."""
    new, old = fields.get("rope_parameters", None), fields.get("rope_scaling", None)
    where = f"{fields.where}: {'rope_parameters' if new is not None else 'rope_scaling'}"
    new, old = ({} if value is None else value for value in (new, old))
    for key, values in (("rope_parameters", new), ("rope_scaling", old)):
        if type(values) is not dict:
            raise fields.bad(key, f"is {shown(values)}, not an object")
    both = [{key: value for key, value in values.items() if value is not None} for values in (new, old)]
    for values in both:  # the older name of the key
        if "type" in values:
            values.setdefault("rope_type", values.pop("type"))
    if any(both[1][key] != both[0][key] for key in both[1].keys() & both[0].keys()):
        raise fields.bad("rope_scaling", "and rope_parameters are both set, and differ")
    if new and old and both[0].get("rope_type", "default") != both[1].get("rope_type", "default"):
        raise fields.bad("rope_scaling", "and rope_parameters are both set, and differ")
    return Fields(both[1] | both[0], where, notes=fields.notes)


def _rotated(fields: Fields, rope: Fields, head_dim: int, partial: float | None) -> int:
    """Rotated dimensions of a head."""
    if partial is None:
        fields.only("partial_rotary_factor", 1, 1.0)
        rope.only("partial_rotary_factor", 1, 1.0)
        return head_dim
    outer = fields.number("partial_rotary_factor", 0, 1, partial)
    return int(head_dim * rope.number("partial_rotary_factor", 0, 1, outer))


_SCALINGS = {
    "default": None,
    "linear": "linear",
    "llama3": "llama3",
    "yarn": "yarn",
    "longrope": "longrope",
    "su": "longrope",  # as the first files of Phi-3 call it
}
"""`rope_type` -> `RopeConfig.scaling`."""


def _scaled(rope: Fields, plain: RopeConfig, scaling: str | None, outer: int | None, context: int) -> RopeConfig:
    """`plain` with the scaling that `rope` describes.

    outer: the context that the model was trained on first, as it stands outside `rope`; context: the model's own.
    """

    def number(key: str, *default: float | None) -> Any:
        return rope.number(key, 1e-6, layout.MAX_SCALE, *default)

    if scaling is None:
        return plain
    if scaling == "linear":
        return replace(plain, scaling=scaling, factor=number("factor"))
    inner = rope.integer("original_max_position_embeddings", 1, layout.MAX_CONTEXT, None)
    if inner is not None and outer is not None and inner != outer:
        raise rope.bad("original_max_position_embeddings", f"is {inner}, but {outer} outside")
    first = inner or outer or context
    own: dict[str, Any]
    if scaling == "llama3":
        own = {"factor": number("factor")} | {key: number(key) for key in ("low_freq_factor", "high_freq_factor")}
    elif scaling == "yarn":
        rope.flag("finetuned", False)
        own = {"factor": number("factor")}
        own |= {"attention_factor": _attention_factor(rope, own["factor"])}
        own |= {"truncate": rope.flag("truncate", True)}
        own |= {"beta_fast": number("beta_fast", 32.0), "beta_slow": number("beta_slow", 1.0)}
    else:
        own = {"factor": number("factor", context / first), "attention_factor": number("attention_factor", None)}
        names = {"divisors": "short_factor", "long_divisors": "long_factor"}
        own |= {name: _divisors(rope, key, plain.dim // 2) for name, key in names.items()}
    return replace(plain, scaling=scaling, original_context_length=first, **own)


def _attention_factor(rope: Fields, factor: float) -> float | None:
    """YaRN's factor of what is rotated, None: the one that follows from `factor`. As in `transformers` `mscale` and
    `mscale_all_dim` count together only, and what other readers know besides is not applied."""
    stated = rope.number("attention_factor", 1e-6, layout.MAX_SCALE, None)
    scales = [rope.number(key, 0, layout.MAX_SCALE, 0.0) for key in ("mscale", "mscale_all_dim")]
    for key in ("attn_factor", "extrapolation_factor"):
        if rope.number(key, -1, layout.MAX_SCALE, 1.0) not in (1, -1):
            rope.notes.append(f"{key} of YaRN is not applied, as in transformers")
    if stated is not None or not all(scales):
        if stated is None and scales[0]:
            rope.notes.append("mscale of YaRN is not applied without mscale_all_dim, as in transformers")
        return None if stated is None else float(stated)
    of_rotated, of_all = (_yarn_gain(factor, scale) for scale in scales)
    return of_rotated / of_all


def _divisors(rope: Fields, key: str, count: int) -> tuple[float, ...]:
    values: Any = rope.get(key, None)
    right = type(values) is list and len(values) == count
    if not right or not all(type(one) in (int, float) and 1e-6 < one < layout.MAX_SCALE for one in values):
        raise rope.bad(key, f"is not a list of {count} positive numbers")
    return tuple(map(float, values))
