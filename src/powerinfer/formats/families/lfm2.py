"""LFM2 and LFM2.5: gated short convolutions beside attention, with experts or without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from powerinfer.config import AttentionKind, FfnConfig, FfnKind, ModelConfig, ShortConvConfig
from powerinfer.formats import layout
from powerinfer.formats.family import EXPERTS_NAMES, SIGMOIDS, Folder, Gguf, Tensors
from powerinfer.formats.fields import Fields
from powerinfer.formats.folder_parts import add_layers, read_experts, read_heads
from powerinfer.formats.folder_rope import GLOBAL, read_rope
from powerinfer.formats.mapped import shown
from powerinfer.formats.source import Fused, keep_text

_CONV = "conv"


def _read(family: Folder, fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    fields.only("sliding_window")
    heads = read_heads(family, fields, config)
    attention = replace(heads, rope=read_rope(family, fields, config, heads), qk_norm="head")
    taps, bias = fields.integer("conv_L_cache", 1, layout.MAX_HEAD_DIM), fields.flag("conv_bias")
    kinds: dict[str, AttentionKind] = {GLOBAL: attention, _CONV: ShortConvConfig(config.d_model, taps, bias)}
    ffns = family.ffns(family, fields, n_layers) if family.ffns is not None else [_read_ffn(fields)] * n_layers
    config = add_layers(family, config, [kinds[kind] for kind in _read_types(fields, n_layers)], ffns)
    return replace(config, tied_embeddings=fields.flag("tie_embedding", config.tied_embeddings))  # the older name


def _read_types(fields: Fields, n_layers: int) -> list[str]:
    """The kind of each layer, stated or, in the first files, by the numbers of those with attention."""
    kinds = fields.get("layer_types", None)
    numbers = fields.get("full_attn_idxs", None)
    if kinds is None:
        numbers = list(range(n_layers)) if numbers is None else numbers
        if type(numbers) is not list or not all(type(one) is int and 0 <= one < n_layers for one in numbers):
            raise fields.bad("full_attn_idxs", f"is {shown(numbers)}, not numbers of some of {n_layers} layers")
        return [GLOBAL if layer in set(numbers) else _CONV for layer in range(n_layers)]
    if type(kinds) is not list or len(kinds) != n_layers or not all(kind in (GLOBAL, _CONV) for kind in kinds):
        raise fields.bad("layer_types", f"is {shown(kinds)}, not {GLOBAL} or {_CONV} for every layer")
    return [str(kind) for kind in kinds]


def _read_ffn(fields: Fields) -> FfnConfig:
    """A dense FFN, whose number of neurons follows from what is stated, as in the class."""
    stated = fields.integer("intermediate_size", 1, layout.MAX_WIDTH)
    size = fields.integer("block_ff_dim", 1, layout.MAX_WIDTH, stated)
    factor = fields.number("block_ffn_dim_multiplier", 1e-6, layout.MAX_SCALE)
    multiple = fields.integer("block_multiple_of", 1, layout.MAX_WIDTH)
    if fields.flag("block_auto_adjust_ff_dim"):
        size = -(-int(factor * int(2 * size / 3)) // multiple) * multiple
    if not 1 <= size <= layout.MAX_WIDTH:
        raise fields.bad("intermediate_size", f"gives {size} neurons with the keys block_*")
    return FfnConfig(size)


def _read_experts(family: Folder, fields: Fields, n_layers: int) -> Sequence[FfnKind]:
    """Experts behind the first layers."""
    experts = read_experts(
        family,
        fields,
        "num_experts",
        "moe_intermediate_size",
        scoring="sigmoid",
        normalise=fields.flag("norm_topk_prob"),
        scale=fields.number("routed_scaling_factor", 1e-6, layout.MAX_SCALE),
        correction=fields.flag("use_expert_bias"),
    )
    first = fields.integer("num_dense_layers", 0, layout.MAX_LAYERS)
    dense = FfnConfig(fields.integer("intermediate_size", 1, layout.MAX_WIDTH))
    return [dense if layer < first else experts for layer in range(n_layers)]


def _rename(stored: Tensors) -> list[str]:
    notes = keep_text(stored)
    for name in [name for name in stored if name.endswith(".expert_bias")]:
        stored[f"{name.removesuffix('.expert_bias')}.gate_correction.bias"] = stored.pop(name)
    return notes


_FFN = (("gate", "w1"), ("up", "w3"), ("down", "w2"))
_NAMES = EXPERTS_NAMES.extended(
    {"attn_norm": "operator_norm", "ffn_norm": "ffn_norm", "o": "self_attn.out_proj"}
    | {f"{part}_norm": f"self_attn.{part}_layernorm" for part in "qk"}
    | {f"short_{part}": "conv.in_proj" for part in "bcx"}
    | {"short_conv": "conv.conv", "short_o": "conv.out_proj"}
    | {part: f"feed_forward.{own}" for part, own in _FFN}
    | {f"experts_{part}": f"feed_forward.experts.{{}}.{own}" for part, own in _FFN}
    | {"router": "feed_forward.gate", "router_correction": "feed_forward.gate_correction"}
)
_INPUTS = Fused(("short_b", "short_c", "short_x"))
_DENSE = Folder(
    "lfm2", ("Lfm2ForCausalLM", "LFM2ForCausalLM"), _read, vision_class="Lfm2VlForConditionalGeneration",
    defaults={
        "vocab_size": 65536, "hidden_size": 2560, "intermediate_size": 12288, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 128000, "norm_eps": 1e-5,
        "tie_word_embeddings": True, "hidden_act": "silu", "conv_bias": False, "conv_L_cache": 3,
        "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True,
    },
    keys={"rms_norm_eps": "norm_eps"}, theta=1e6, biases=(None, None),
    names=replace(_NAMES, outer=_NAMES.outer | {"final_norm": "model.embedding_norm"}),
    fused=(_INPUTS,), rename=_rename,
)  # fmt: skip
_EXPERTS = replace(
    _DENSE, model_type="lfm2_moe", classes=("Lfm2MoeForCausalLM",), vision_class="", ffns=_read_experts,
    defaults={
        **_DENSE.defaults,
        "hidden_size": 2048, "intermediate_size": 7168, "moe_intermediate_size": 1792, "num_dense_layers": 2,
        "num_experts_per_tok": 4, "num_experts": 32, "use_expert_bias": True, "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
    },
)  # fmt: skip

FOLDERS = (_DENSE, _EXPERTS)
_GGUF = Gguf("lfm2", "silu", qk_norm="head", short_conv=True, names={"final_norm": "token_embd_norm"})
GGUFS = (_GGUF, replace(_GGUF, architecture="lfm2moe", experts=SIGMOIDS))
