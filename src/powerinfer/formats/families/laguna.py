"""Laguna: heads and rotary embeddings by the kind of attention, with a gate for each head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from powerinfer.config import AttentionConfig, FfnConfig, FfnKind, ModelConfig, RopeConfig
from powerinfer.formats import layout
from powerinfer.formats.family import EXPERTS_NAMES, GLM_EXPERTS, LLAMA_DEFAULTS, SIGMOIDS, Folder, Gguf, Tensors
from powerinfer.formats.fields import Fields
from powerinfer.formats.folder_parts import (
    add_biases,
    add_layers,
    read_experts,
    read_ffn_size,
    read_heads,
    read_layer_types,
    read_mlp_types,
    read_switches,
    read_window,
)
from powerinfer.formats.folder_rope import GLOBAL, LOCAL, read_ropes
from powerinfer.formats.mapped import shown

_ROPES = {
    GLOBAL: {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
    LOCAL: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
}


def _read(family: Folder, fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    fields.only("gating", True, "per-head")
    fields.only("moe_apply_router_weight_on_input", False)
    fields.only("moe_router_logit_softcapping", 0, 0.0)
    kinds: Any = fields.get("gating_types", None) or []
    if type(kinds) is not list or any(kind not in ("per-head", "per_head") for kind in kinds):
        raise fields.bad("gating_types", f"is {shown(kinds)}; only per-head is supported")
    heads = add_biases(family, fields, read_heads(family, fields, config))
    counts = fields.integers("num_attention_heads_per_layer", n_layers, 1, layout.MAX_HEADS, heads.n_heads)
    ropes = read_ropes(family, fields, config, heads, None)
    (window,) = set(read_window(fields, n_layers))
    attentions = [
        replace(heads, n_heads=n, rope=ropes[kind], window=window if kind == LOCAL else None).gated(by_head=True)
        for n, kind in zip(counts, read_layer_types(fields, n_layers), strict=True)
    ]
    return add_layers(family, config, attentions, _read_ffns(family, fields, n_layers))


def _read_ffns(family: Folder, fields: Fields, n_layers: int) -> Sequence[FfnKind]:
    experts = read_experts(
        family,
        fields,
        "num_experts",
        "moe_intermediate_size",
        scoring="sigmoid",
        scale=fields.number("moe_routed_scaling_factor", 1e-6, layout.MAX_SCALE, 1.0),
        correction=True,
    )
    experts = replace(experts, shared_size=fields.integer("shared_expert_intermediate_size", 1, layout.MAX_WIDTH))
    dense = FfnConfig(read_ffn_size(fields), experts.activation)
    return [dense if kind == "dense" else experts for kind in read_mlp_types(fields, n_layers, 1)]


def _rename(stored: Tensors) -> list[str]:
    """Names as `transformers` calls the modules; published files have those of another class."""
    for name in list(stored):
        new = name.replace(".mlp.experts.e_score_correction.bias", ".mlp.gate.e_score_correction.bias")
        new = new.replace(".mlp.shared_expert.", ".mlp.shared_experts.")
        if new != name:
            stored[new] = stored.pop(name)
    return []


def _change(fields: Fields, heads: Sequence[AttentionConfig]) -> list[AttentionConfig]:
    """Heads with gates; those with a window, three of four unless the file says which, have a rotary embedding of
    their own."""
    _check_ollama(fields)
    if type(fields.peek("attention.sliding_window_pattern")) is not list:
        slides = [layer % 4 for layer in range(len(heads))]
        if fields.has("attention.layer_types"):  # of Ollama's files
            slides = read_switches(fields, "attention.layer_types", len(heads), 0)
        heads = [one if sliding else replace(one, window=None) for one, sliding in zip(heads, slides, strict=True)]
    dim, theta = heads[0].head_dim, heads[0].rope.theta if heads[0].rope else 1e4
    for dims, base in (("swa.dimension_count", "swa.freq_base"), ("dimension_count_swa", "freq_base_swa")):
        dim = fields.integer(f"rope.{dims}", 2, heads[0].head_dim, dim)
        theta = fields.number(f"rope.{base}", 1.0001, layout.MAX_THETA, theta)
    ropes = {True: _factored(fields, heads[0].rope), False: RopeConfig(theta, dim)}
    return [replace(one, rope=ropes[one.window is None]).gated(by_head=True) for one in heads]


def _check_ollama(fields: Fields) -> None:
    """Keys of Ollama's files alone, which say what is so in every model, or again what others do."""
    fields.only("attention.sink_enabled", False)
    fields.only("attention.gating_type", 1)
    fields.only("attention.qk_norm", True)
    fields.only("decoder_sparse_step", 1)
    fields.only("rope.swa.scaling.type", "", "default", "linear", "none")
    fields.only("rope.swa.scaling.factor", 0.0, 1.0)
    fields.only("dense_layers", list(range(fields.integer("leading_dense_block_count", 0, layout.MAX_LAYERS, 0))))
    fields.get("attention.layer_types", None)
    for of in ("", "swa."):
        fields.number(f"rope.{of}partial_rotary_factor", 0, 1, None)


def _factored(fields: Fields, rope: RopeConfig | None) -> RopeConfig | None:
    """The rotary embedding of global layers. Config.json states YaRN's whole factor, under one key in Ollama's files
    and under another in those of others: it holds, as in transformers."""
    key = "attn_factor" if fields.has("rope.swa.freq_base") else "yarn_attn_factor"
    stated = fields.number(f"rope.scaling.{key}", -1, layout.MAX_SCALE, -1.0)
    if rope is None or rope.scaling != "yarn" or stated <= 0:
        return rope
    computed = 1 + 0.1 * math.log(max(rope.factor, 1))
    note = f"{key} {stated:g} replaces YaRN's {computed:.4g}, as in transformers"
    if not math.isclose(stated, computed, rel_tol=1e-4) and note not in fields.notes:
        fields.notes.append(note)
    return replace(rope, attention_factor=stated)


FOLDERS = (
    Folder(
        "laguna", ("LagunaForCausalLM",), _read, replaces_code=True,
        defaults=LLAMA_DEFAULTS | {
            "vocab_size": 100352, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 40,
            "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072,
            "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512, "sliding_window": 512, "rope_parameters": _ROPES,
        },
        partial=1.0, qk_norm="head",
        names=EXPERTS_NAMES.extended(GLM_EXPERTS | {"q_gate": "self_attn.g_proj"}), rename=_rename,
    ),
)  # fmt: skip
GGUFS = (
    Gguf(
        "laguna", "silu", qk_norm="head", partial=True, experts=SIGMOIDS, change=_change, names={"q_gate": "attn_gate"},
        ollama_names={"q_gate": "attn_g"},
    ),
)  # fmt: skip
