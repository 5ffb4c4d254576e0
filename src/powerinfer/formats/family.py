"""Descriptions of a family of models, as its files are read: one for Hugging Face folders, one for GGUF files.

The families themselves are in `families/`, one file each. They are a part of this room, not one of their own: they are
made of its keys, names and tensors, and `open_checkpoint` leads to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from powerinfer.config import ACTIVATIONS, AttentionConfig, FfnKind, ModelConfig, RouterConfig
from powerinfer.formats.fields import Fields
from powerinfer.formats.source import Fused, Names, SingleTensor
from powerinfer.formats.tensors import MadeTensor

Tensors: TypeAlias = dict[str, SingleTensor]
"""Tensors under the names of a file."""

DRAFT_NAMES = {
    "draft_join": "eh_proj",
    "draft_embed_norm": "enorm",
    "draft_hidden_norm": "hnorm",
    "draft_embed": "embed_tokens",
    "draft_head": "shared_head.head",
    "draft_norm": "shared_head.norm",
}
"""The names of what is around the layer of a draft head, as of GLM-4.5 and DeepSeek-V3."""

LLAMA_NAMES = Names(
    outer={"embed": "model.embed_tokens", "head": "lm_head", "final_norm": "model.norm"},
    layers="model.layers",
    inner={
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        **{name: f"self_attn.{name}_proj" for name in "qkvo"},
        **{name: f"self_attn.{name}" for name in ("q_norm", "k_norm")},
        **{name: f"mlp.{name}_proj" for name in ("gate", "up", "down")},
        "threshold": "mlp.threshold",
        "product_threshold": "mlp.product_threshold",
        "predictor_in": "mlp.predictor.fc1",  # of TurboSparse models
        "predictor_out": "mlp.predictor.fc2",
        **DRAFT_NAMES,
    },
)
"""The names of tensors in a folder of Llama, which most families share."""

EXPERTS_NAMES = LLAMA_NAMES.extended(
    {
        "router": "mlp.gate",
        **{f"experts_{part}": f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")},
        **{f"shared_{part}": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
        "shared_weight": "mlp.shared_expert_gate",
    }
)
"""Names with experts, each with tensors of its own, as Qwen has them."""

GLM_EXPERTS = {"router_correction": "mlp.gate.e_score_correction"} | {
    f"shared_{part}": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")
}
"""Other names of GLM-4.5, DeepSeek and ERNIE."""

FOUR_NORMS = LLAMA_NAMES.extended(
    {
        "attn_norm": "input_layernorm",
        "attn_out_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "ffn_out_norm": "post_feedforward_layernorm",
    }
)
"""Names with norms before and behind attention and FFN, as of Gemma and OLMo."""

LLAMA_DEFAULTS = {"rms_norm_eps": 1e-6, "hidden_act": "silu"}
"""Defaults of Llama's class, which many share."""

_WITHOUT_CURVE = tuple(name for name in ACTIVATIONS if name != "xielu")
GATED = {"silu": "silu", "swish": "silu", **{name: name for name in _WITHOUT_CURVE if name != "gelu_tanh"}}
"""Activations of a gated FFN in config.json -> names of this engine."""
PLAIN = {"relu": "relu", "relu2": "relu2"}
"""Activations of an FFN without a gate."""


MIXED_ACT = "linear_hidden_act"
"""A key of this engine's own: the activation behind the convolution of linear attention, where FFNs have another."""


@dataclass(frozen=True)
class Folder:
    """A family in Hugging Face folders.

    Reading config.json. model_type: the name of the family; layer_list: a key with an entry for each layer, which says
    how many there are where their number is missing; classes: of `architectures`; other_types: `model_type` of
    folders with the class of this family, whose layers they share; vision_class: class of models that also read
    pictures, whose part for text is of this family; replaces_code: folders refer to custom code whose function this
    engine has natively (it is not run); quantisation: the `quant_method` that is read, "": none.
    defaults: of missing keys in the family's class, where families differ; keys: those that the family calls otherwise,
    by the usual name; other_keys: usual names by others that files may have, too (`attribute_map` of the class).
    read: makes the configuration from one without layers, None: `read_plain`, which goes by:
    kv_heads_stated: the number of key-value heads has no usable default; other_head_dim: the class has a `head_dim`;
    partial: default share of a head that is rotated, None: the whole head is, always; mscales: LongRoPE
    states what sine and cosine are multiplied by, up to the first context and beyond it; theta: default of the rotary
    embedding's base; stretched: `alpha` of the type "dynamic" stretches it; interleaved: as in `RopeConfig`; grown:
    `rope_parameters` say how queries grow with their positions (`AttentionConfig.query_growth`); biases: keys of the
    biases of q, k and v, and of that of o, None: there are none; qk_norm: as in `AttentionConfig`; windows: the
    sliding window of each layer, None: there are none; gated, activations: of FFNs; mlp_bias: FFNs may have biases;
    mixed_act: the family has MIXED_ACT; ffns: the FFN of each layer, None: they are alike and dense; norms: as in
    `LayerConfig`; norm: as in `ModelConfig`.

    Reading tensors. names, fused: as the files have them; find_names: in place of `names` where that depends on the
    model. adapt: takes tensors out that are settings, and gives the configuration with them; rename: changes names of
    the file in place, and gives notes; make: takes tensors out and gives, by canonical name, what is made of them;
    norms_less_one: files keep the weights of norms less one, but for `whole_norms`; predictors: files may have some;
    head_name: where draft heads are not in layers behind the model's, gives, of a tensor's name and config.json, the
    number of the head and the name that it has in such a layer; None: it is the model's. draft_names: of a head's
    tensors, where those of the model's layers are called otherwise.
    """

    model_type: str
    classes: tuple[str, ...]
    read: Callable[[Folder, Fields, ModelConfig, int], ModelConfig] | None = None
    other_types: tuple[str, ...] = ()
    layer_list: str = ""
    vision_class: str = ""
    replaces_code: bool = False
    quantisation: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    other_keys: Mapping[str, str] = field(default_factory=dict)
    kv_heads_stated: bool = False
    other_head_dim: bool = True
    partial: float | None = None
    mscales: bool = False
    theta: float = 10000.0
    stretched: bool = False
    interleaved: bool = False
    grown: bool = False
    biases: tuple[str | None, str | None] = ("attention_bias", "attention_bias")
    qk_norm: str | None = None
    windows: Callable[[Fields, int], list[int | None]] | None = None
    gated: bool = True
    activations: Mapping[str, str] = field(default_factory=lambda: GATED)
    mlp_bias: bool = False
    mixed_act: bool = False
    ffns: Callable[[Folder, Fields, int], Sequence[FfnKind]] | None = None
    norms: str = "pre"
    norm: str = "rms"
    names: Names = LLAMA_NAMES
    find_names: Callable[[ModelConfig, Mapping[str, SingleTensor]], Names] | None = None
    fused: Sequence[Fused] | Callable[[ModelConfig, Names], Sequence[Fused]] = ()
    adapt: Callable[[ModelConfig, Tensors, str], ModelConfig] | None = None
    rename: Callable[[Tensors], list[str]] | None = None
    make: Callable[[ModelConfig, Tensors, str], dict[str, MadeTensor]] | None = None
    norms_less_one: bool = False
    whole_norms: tuple[str, ...] = ("delta_norm",)
    predictors: bool = False
    head_name: Callable[[str, Mapping[str, Any]], tuple[int, str] | None] | None = None
    draft_names: Mapping[str, str] = field(default_factory=dict)

    def key(self, usual: str) -> str:
        """The family's name of a key."""
        return self.keys.get(usual, usual)


@dataclass(frozen=True)
class Gguf:
    """A family in GGUF files; the rest follows from the metadata and from which tensors exist.

    architecture: as files state it; activation: the default; interleaved: as in `RopeConfig`; norm: as in
    `ModelConfig`, "stated": "rms" where the file states its epsilon, else "layer"; norms, parallel: as in
    `LayerConfig`, parallel None: where there are no norms of FFNs; qk_norm: as in `AttentionConfig`, "stored": of heads
    if the file has its weights, "separate" where norms are LayerNorm; v_norm: likewise;
    partial: the file says how many dimensions of a head are rotated. window: where the file states none, 0: there is
    none then, None: it must. window_heads: layers with a window have heads of another size.
    full_every: if the file states a window and no pattern, every
    full_every-th layer has no window, 0: all layers have it; full_first: these are the first of so many, not the last,
    and positions are not rotated in them; unrotated_every: positions are not rotated in each layer whose number, from
    1, it divides, 0: in none;
    local_theta: base of the frequencies of the layers with a window, None: as the others; always without scaling where
    full_every is set, unless single_rope. positions: as in `ModelConfig`; epsilon: of norms, where the file has none,
    None: it must. plain_norms: they have no weights. out_norm_eps, embed_norm: as in `ModelConfig`. scaled: embeddings
    are multiplied by the root of their width; fused: matrices in one tensor.
    scaling: of the rotary embedding, where the file states a factor alone; whole_factor: `attn_factor` is that of YaRN,
    which else is multiplied by it. multiplied: YaRN's factor is divided by another one, which `yarn_log_multiplier` is
    about; growth: the settings by
    which queries grow with their positions, None: they do not.
    full_unrotated: positions are not rotated in layers without a window, where others have one; rope_pattern: the file
    may say in which layers they are; scaled_logits: it states a factor of the logits.
    scales: the file may state factors of the embedding, the scores, what layers add, and a divisor of the logits;
    missing_scales: those that hold where it does not, by the width and the number of layers, None: 1;
    score_scale: that of attention's scores where no key states it, from the heads of each layer; score_cap, logit_cap:
    where the file states none, None: the family has none;
    sinks: as in `AttentionConfig`; experts: how they are selected where the file does not say (it does say how many),
    None: the family has none; early_router, separate_experts: as in `ExpertsConfig` (`separate`); averaged: what the
    shared expert and the others give is halved;
    delta: some layers are Gated DeltaNet, and attention has a gate, in one tensor with q. tiled: as in
    `DeltaNetConfig`. latent: attention is `LatentAttentionConfig`; channel_delta: but `ChannelDeltaConfig` in layers
    without heads for keys and values. mamba: layers without heads for keys and values are
    Mamba2; separate: a layer is attention, Mamba2 or an FFN alone; beside: both attention and Mamba2; unrotated:
    positions are not rotated in any layer; short_conv: layers without heads for keys and values are `ShortConvConfig`;
    layer_inputs: layers may get so many numbers of tokens beside the residual stream where the file does not say how
    many, and share keys and values; None: they do neither;
    change, change_ffns: make the heads, and the FFNs, of all layers of those that follow from the rest; complete: makes
    the configuration of that, with the shapes of the file's tensors by name.
    names: of tensors, where the family calls them otherwise; draft_names: of those of a draft head, where it does;
    ollama_names: those that Ollama's files may have instead.
    published: the activation in PowerInfer's own files, None: there are none; pre_tokenizer: of these, or of Ollama's,
    where they name none or "default", as there was one for the family.
    """

    architecture: str
    activation: str
    gated: bool = True
    norm: str = "rms"
    interleaved: bool = False
    norms: str = "pre"
    parallel: bool | None = False
    qk_norm: str | None = None
    v_norm: bool = False
    qkv_bias: bool = False
    partial: bool = False
    window: int | None = 0
    window_heads: bool = False
    full_every: int = 0
    full_first: bool = False
    unrotated_every: int = 0
    local_theta: float | None = None
    single_rope: bool = False
    full_unrotated: bool = False
    rope_pattern: bool = False
    positions: str = "rope"
    plain_norms: bool = False
    epsilon: float | None = None
    out_norm_eps: float | None = None
    embed_norm: bool = False
    scaled: bool = False
    scaling: str = "linear"
    whole_factor: bool = False
    multiplied: bool = False
    growth: Callable[[Fields], dict[str, Any]] | None = None
    scales: bool = False
    scaled_logits: bool = False
    missing_scales: Callable[[int, int], Mapping[str, float]] | None = None
    score_scale: Callable[[Fields, Sequence[AttentionConfig]], float | None] | None = None
    score_cap: float | None = None
    logit_cap: float | None = None
    sinks: bool = False
    fused: tuple[Fused, ...] = ()
    experts: RouterConfig | None = None
    early_router: bool = False
    separate_experts: bool = False
    averaged: bool = False
    delta: bool = False
    tiled: bool = False
    latent: bool = False
    channel_delta: bool = False
    mamba: bool = False
    short_conv: bool = False
    separate: bool = False
    beside: bool = False
    unrotated: bool = False
    layer_inputs: int | None = None
    change: Callable[[Fields, Sequence[AttentionConfig]], list[AttentionConfig]] | None = None
    change_ffns: Callable[[Fields, Sequence[FfnKind]], list[FfnKind]] | None = None
    complete: Callable[[Fields, Mapping[str, tuple[int, ...]], ModelConfig], ModelConfig] | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    draft_names: Mapping[str, str] = field(default_factory=dict)
    ollama_names: Mapping[str, str] = field(default_factory=dict)
    published: str | None = None
    pre_tokenizer: str | None = None

    @property
    def activations(self) -> tuple[str, ...]:
        """Activations that a file may name."""
        if self.activation == "swiglu_oai":
            return (self.activation, *_WITHOUT_CURVE)
        if self.activation == "xielu":
            return (self.activation,)
        return _WITHOUT_CURVE if self.gated else ("relu", "relu2")


NORMALISED, UNNORMALISED = (RouterConfig(1, normalise=normalise) for normalise in (True, False))
SIGMOIDS = RouterConfig(1, scoring="sigmoid")
"""Selection of a family's experts, and their weights."""

SECOND_NORM = {"ffn_norm": "post_attention_norm"}
"""The norm before FFNs, where it has the name that others give to a norm behind attention."""
