"""Nemotron-H, Nemotron Nano 2 and Nemotron 3: layers of one part each, Mamba2, attention, an MLP or experts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from powerinfer.config import (
    AttentionConfig,
    AttentionKind,
    ExpertsConfig,
    FfnKind,
    LayerConfig,
    ModelConfig,
    NoAttention,
    NoFfn,
    RouterConfig,
)
from powerinfer.formats import layout
from powerinfer.formats.family import DRAFT_NAMES, GLM_EXPERTS, PLAIN, Folder, Gguf, Tensors
from powerinfer.formats.fields import Fields
from powerinfer.formats.folder_mamba import MAMBA_NAMES, fuse_mamba, read_mamba, rename_mamba
from powerinfer.formats.folder_parts import read_experts, read_ffn
from powerinfer.formats.mapped import shown
from powerinfer.formats.source import Names, SingleTensor

_MAMBA, _ATTENTION, _MLP, _EXPERTS = "M*-E"
_TYPES = {
    "mamba": _MAMBA, "linear_attention": _MAMBA, "attention": _ATTENTION, "full_attention": _ATTENTION,
    "mlp": _MLP, "moe": _EXPERTS,
}  # fmt: skip


def _read_pattern(fields: Fields, n_layers: int) -> str:
    """The part of each layer, a letter of M (Mamba2), * (attention), - (an MLP), E (experts)."""
    for key in ("layers_block_type", "layer_types"):
        types = fields.get(key, None)
        if types is None:
            continue
        if type(types) is not list or not all(type(one) is str and one in _TYPES for one in types):
            strange = next((one for one in types if one not in _TYPES), types) if type(types) is list else types
            raise fields.bad(key, f"holds {shown(strange)}; only {', '.join(_TYPES)} are supported")
        pattern = "".join(_TYPES[one] for one in types)
        break
    else:
        key, pattern = "hybrid_override_pattern", fields.text("hybrid_override_pattern")
        strange = next((one for one in pattern if one not in "M*-E"), None)
        if strange is not None:
            kinds = "M (Mamba2), * (attention), - (MLP) and E (experts)"
            raise fields.bad(key, f"has the letter {shown(strange)}; only {kinds} are supported")
    if len(pattern) != n_layers:
        raise fields.bad(key, f"has {len(pattern)} layers, not {n_layers}")
    return pattern


def _read_experts(family: Folder, fields: Fields) -> ExpertsConfig:
    fields.only("mlp_bias", False)
    groups = fields.integer("n_group", 1, layout.MAX_EXPERTS)
    experts = read_experts(
        family,
        fields,
        "n_routed_experts",
        "moe_intermediate_size",
        scoring="sigmoid",
        normalise=fields.flag("norm_topk_prob"),
        scale=fields.number("routed_scaling_factor", 1e-6, layout.MAX_SCALE),
        correction=True,
        groups=groups,
        top_groups=fields.integer("topk_group", 1, groups),
        group_best=2 if groups > 1 else 1,
    )
    shared = fields.integer("n_shared_experts", 0, layout.MAX_EXPERTS)
    size = fields.integer("moe_shared_expert_intermediate_size", 1, layout.MAX_WIDTH)
    latents = fields.integer("moe_latent_size", 1, layout.MAX_WIDTH, 0)
    return replace(experts, gated=False, shared_size=size if shared else 0, latents=latents)


def _read(family: Folder, fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    fields.only("sliding_window")
    pattern = _read_pattern(fields, n_layers)
    nothing: AttentionKind = NoAttention()
    parts: dict[str, tuple[AttentionKind, FfnKind]] = {}
    if _MAMBA in pattern:
        fields.only("mamba_proj_bias", False, fields.flag("use_bias"))
        mamba = read_mamba(
            fields,
            heads="mamba_num_heads",
            head_dim="mamba_head_dim",
            groups="n_groups" if fields.has("n_groups") else "mamba_num_groups",  # as Nano 2 calls it
            state="ssm_state_size" if fields.has("ssm_state_size") else "mamba_state_dim",
            act="mamba_hidden_act",
        )
        mamba = replace(mamba, bias=fields.flag("use_bias"), norm_groups=mamba.n_groups)
        parts[_MAMBA] = mamba, NoFfn()
    if _ATTENTION in pattern:
        fields.only("attention_bias", False)  # which the class does not look at
        older = fields.integer("attention_head_dim", 2, layout.MAX_HEAD_DIM, 128)  # as Nemotron-H calls it
        head_dim = fields.integer("head_dim", 2, layout.MAX_HEAD_DIM, older)
        n_heads = fields.integer("num_attention_heads", 1, layout.MAX_HEADS)
        kv_heads = fields.integer("num_key_value_heads", 1, layout.MAX_HEADS, n_heads)
        parts[_ATTENTION] = AttentionConfig(n_heads, kv_heads, head_dim), NoFfn()
    if _MLP in pattern:
        parts[_MLP] = nothing, read_ffn(family, fields)
    if _EXPERTS in pattern:
        parts[_EXPERTS] = nothing, _read_experts(family, fields)
    else:
        fields.get("n_routed_experts", None)  # of layers that the model does not have
    layers = tuple(LayerConfig(*parts[letter]) for letter in pattern)
    return replace(config, layers=layers)


def _head_name(name: str, metadata: Mapping[str, Any]) -> tuple[int, str] | None:
    """A draft head is two layers below `mtp`, attention and behind it experts or an MLP, which are one here."""
    match = re.fullmatch(r"(?:model\.|backbone\.)?mtp\.(?:layers\.(\d{1,9})\.)?(.+)", name)
    if match is None:
        return None
    types = metadata.get("mtp_layers_block_type") or metadata.get("mtp_hybrid_override_pattern") or "*E"
    pattern = "".join(_TYPES.get(str(one), str(one)) for one in types) if isinstance(types, list | str) else ""
    if pattern not in (_ATTENTION + _EXPERTS, _ATTENTION + _MLP):
        return 0, name  # no name of a layer, so that the head is left out
    layer, inner = int(match[1] or 0), match[2]
    return layer // 2, f"ffn_{inner}" if layer % 2 and inner.startswith("norm.") else inner


def _rename(stored: Tensors) -> list[str]:
    all_tensors = dict(stored)
    stored.clear()
    for name, tensor in all_tensors.items():
        name = f"model.{name.removeprefix('backbone.')}" if name.startswith("backbone.") else name
        name = name.replace(".e_score_correction_bias", ".e_score_correction.bias")
        together = name.endswith((".mixer.experts.up_proj", ".mixer.experts.down_proj"))
        stored[f"{name}.weight" if together else name] = tensor
    rename_mamba(stored)
    return []


_NAMES = Names(
    outer={"embed": "model.embeddings", "head": "lm_head", "final_norm": "model.norm_f"},
    layers="model.layers",
    inner={
        **dict.fromkeys(("attn_norm", "ffn_norm"), "norm"),
        **{name: f"mixer.{name}_proj" for name in ("q", "k", "v", "o", "up", "down")},
        **{f"mamba_{part}": f"mixer.{name}" for part, name in MAMBA_NAMES.items()},
        "router": "mixer.gate",
        **{name: f"mixer.{where.removeprefix('mlp.')}" for name, where in GLM_EXPERTS.items()},
        **{f"experts_{part}": f"mixer.experts.{{}}.{part}_proj" for part in ("up", "down")},
        "latent_in": "mixer.fc1_latent_proj",
        "latent_out": "mixer.fc2_latent_proj",
        **DRAFT_NAMES,
    },
)


def _find_names(config: ModelConfig, stored: Mapping[str, SingleTensor]) -> Names:
    if any(name.endswith(".mixer.experts.up_proj.weight") for name in stored):
        return _NAMES.extended({f"experts_{part}": f"mixer.experts.{part}_proj" for part in ("up", "down")})
    return _NAMES


FOLDERS = (
    Folder(
        "nemotron_h", ("NemotronHForCausalLM",), _read, replaces_code=True, layer_list="layers_block_type",
        defaults={
            "vocab_size": 131072, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
            "max_position_embeddings": 4096, "intermediate_size": 21504, "mlp_hidden_act": "relu2",
            "mamba_state_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "mamba_hidden_act": "silu",
            "mamba_num_groups": 8, "conv_kernel": 4, "use_conv_bias": True, "use_bias": False, "n_routed_experts": 8,
            "n_shared_experts": 1, "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688,
            "num_experts_per_tok": 2, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
            "norm_topk_prob": True, "layer_norm_epsilon": 1e-5,
        },
        keys={"rms_norm_eps": "layer_norm_epsilon", "hidden_act": "mlp_hidden_act"},
        gated=False, activations=PLAIN, mlp_bias=True, find_names=_find_names, fused=fuse_mamba, rename=_rename,
        head_name=_head_name, draft_names={"ffn_norm": "ffn_norm", "draft_norm": "final_layernorm"},
    ),
)  # fmt: skip
_GGUF = Gguf(
    "nemotron_h", "relu2", gated=False, mamba=True, separate=True, unrotated=True, names={"ffn_norm": "attn_norm"}
)
_WITH_EXPERTS = replace(
    _GGUF, architecture="nemotron_h_moe", experts=RouterConfig(1, scoring="sigmoid", correction=True),
    draft_names={"ffn_norm": "post_attention_norm"},
    ollama_names={"latent_in": "ffn_latent_in", "latent_out": "ffn_latent_out"},
)  # fmt: skip
GGUFS = (
    _GGUF,
    _WITH_EXPERTS,
    replace(_WITH_EXPERTS, architecture="nemotron_h_omni"),  # Ollama's, with what reads pictures and sound
)
