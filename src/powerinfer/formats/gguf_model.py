"""GGUF metadata and tensor names -> `ModelConfig` and canonical names, for the architectures this engine runs.

Anything unknown that could change the result is refused: an unknown architecture, any unknown key of the architecture,
any unused tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from powerinfer.config import (
    THRESHOLDED,
    AttentionConfig,
    AttentionKind,
    ChannelDeltaConfig,
    DeltaNetConfig,
    ExpertsConfig,
    FfnConfig,
    FfnKind,
    GatedAttentionConfig,
    LatentAttentionConfig,
    LayerConfig,
    Mamba2Config,
    ModelConfig,
    NoAttention,
    NoFfn,
    ParallelConfig,
    RopeConfig,
    RouterConfig,
    ShortConvConfig,
)
from powerinfer.errors import ModelError, nearest_supported
from powerinfer.formats import layout
from powerinfer.formats.draft_head import read_draft
from powerinfer.formats.families import GGUFS
from powerinfer.formats.family import Gguf
from powerinfer.formats.fields import Fields
from powerinfer.formats.folder_parts import plain_norms, sharing_keys
from powerinfer.formats.gguf import GGUFFile
from powerinfer.formats.gguf_keys import check_others
from powerinfer.formats.mapped import shown
from powerinfer.formats.source import (
    NO_MTP,
    ONLY_TEXT,
    Fused,
    Names,
    Source,
    collect,
    drop_head_predictor,
    printable,
)
from powerinfer.formats.tensors import RawTensor
from powerinfer.formats.weight_types import FLOAT_TYPES, NATIVE_TYPES

NAMES = Names(
    outer={
        "embed": "token_embd",
        "positions": "position_embd",
        "head": "output",
        "final_norm": "output_norm",
        "input_table": "per_layer_token_embd",
        "inputs_projection": "per_layer_model_proj",
        "inputs_norm": "per_layer_proj_norm",
        "altup_in": "altup_proj",
        "altup_out": "altup_unembd_proj",
    },
    layers="blk",
    inner={
        "attn_norm": "attn_norm",
        "attn_out_norm": "post_attention_norm",
        "ffn_norm": "ffn_norm",
        "ffn_out_norm": "post_ffw_norm",
        "q": "attn_q",
        "k": "attn_k",
        "v": "attn_v",
        "o": "attn_output",
        "q_norm": "attn_q_norm",
        "k_norm": "attn_k_norm",
        "sinks": "attn_sinks",
        "attended_norm": "attn_sub_norm",
        **{name: f"attn_{name}" for name in ("q_a", "q_a_norm", "q_b", "kv_a_norm", "k_b", "v_b")},
        "kv_a": "attn_kv_a_mqa",
        "gate": "ffn_gate",
        "up": "ffn_up",
        "down": "ffn_down",
        "threshold": "ffn_threshold",
        "product_threshold": "ffn_product_threshold",
        "inner_norm": "ffn_sub_norm",
        "router": "ffn_gate_inp",
        "router_correction": "exp_probs_b",
        **{f"experts_{part}": f"ffn_{part}_exps" for part in ("gate", "up", "down")},
        **{f"shared_{part}": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
        "shared_weight": "ffn_gate_inp_shexp",
        "q_gate": "attn_q",
        **dict.fromkeys(("delta_q", "delta_k", "delta_v"), "attn_qkv"),
        "delta_z": "attn_gate",
        "delta_b": "ssm_beta",
        "delta_a": "ssm_alpha",
        "delta_conv": "ssm_conv1d",
        "delta_decay": "ssm_a",
        "delta_dt": "ssm_dt",
        "delta_norm": "ssm_norm",
        "delta_o": "ssm_out",
        **{f"delta_{name}": f"ssm_{name}" for name in ("f_a", "f_b", "g_a", "g_b")},
        **{f"delta_{name}_conv": f"ssm_conv1d_{name}" for name in "qkv"},
        **dict.fromkeys(("mamba_z", "mamba_xbc", "mamba_dt"), "ssm_in"),
        "mamba_conv": "ssm_conv1d",
        "mamba_step": "ssm_dt",
        **{f"mamba_{name}": f"ssm_{name}" for name in ("a", "d", "norm")},
        "mamba_o": "ssm_out",
        **dict.fromkeys(("short_b", "short_c", "short_x"), "shortconv.in_proj"),
        "short_conv": "shortconv.conv",
        "short_o": "shortconv.out_proj",
        "input_gate": "inp_gate",
        "input_out": "proj",
        "input_norm": "post_norm",
        "out_scale": "layer_output_scale",
        "router_scale": "ffn_gate_inp.scale",
        "router_factors": "ffn_down_exps.scale",
        "experts_norm": "pre_ffw_norm_2",
        "shared_out_norm": "post_ffw_norm_1",
        "experts_out_norm": "post_ffw_norm_2",
        "latent_in": "ffn_latent_down",
        "latent_out": "ffn_latent_up",
        "draft_join": "nextn.eh_proj",
        "draft_embed_norm": "nextn.enorm",
        "draft_hidden_norm": "nextn.hnorm",
        "draft_embed": "nextn.embed_tokens",
        "draft_head": "nextn.shared_head_head",
        "draft_norm": "nextn.shared_head_norm",
    },
)
_QKV = Fused(("q", "k", "v"))
_DELTA_QKV = Fused(("delta_q", "delta_k", "delta_v"))
_KV_B = ("k_b_rows", "v_b")  # head by head, in files of before April 2025
_GATE_UP = ("experts_gate", "experts_up")
_GATE_UP_EXPERTS = "ffn_gate_up_exps"
_SHARED = ("shared_gate", "shared_up")  # the first lies in the other's tensor, in files of Granite
_OF_PICTURES = ("v.", "mm.", "a.", "model.vision_tower.")
"""The beginnings of names that Ollama gives to what reads pictures and sound."""
_OF_DRAFT = "mtp."  # and to what predicts further tokens
_ENDS = {**dict.fromkeys((".ssm_a", ".ssm_d", ".ffn_norm", ".attn_sinks"), "weight"), ".ssm_dt": "bias"}
"""Kinds of names that have none in files: the third is Falcon-H1's, the last two are Ollama's."""
DIVISORS = ("rope_freqs", "rope_factors_short", "rope_factors_long")  # of the frequencies of the rotary embedding
_OPT_OFFSET = 2  # of the rows in OPT's table of positions


def open_gguf(file: GGUFFile, draft_head: bool = False) -> Source:
    """The model in a GGUF file, or in all parts of a split one; ModelError if it is not one this engine runs.

    draft_head: with the head that predicts further tokens, if it has one.
    """
    config_notes: list[str] = []
    unread: list[str] = []
    config = read_config(file, notes=config_notes, unread=unread)
    stored, notes = drop_head_predictor(stored_tensors(file, config))
    text = {name: tensor for name, tensor in stored.items() if not name.startswith(_OF_PICTURES)}
    if len(text) < len(stored):
        notes.append(ONLY_TEXT)
    of_model = {name: tensor for name, tensor in text.items() if not name.startswith(_OF_DRAFT)}
    if len(of_model) < len(text):
        notes.append(NO_MTP)
    notes += config_notes
    made_tensors = plain_norms(config) if GGUFS[config.architecture].plain_norms else {}
    names, of_fused, path = names_of(file, config), fused(file, config), str(file.path)
    tensors = collect(config, of_model, names, path, (), of_fused, made_tensors)
    heads = _blocks(file, config) - config.n_layers
    if draft_head and heads and NO_MTP not in notes:
        file.check()
        at = f"blk.{config.n_layers}."
        stored = stored_tensors(file, config, config.n_layers + 1)
        of_head = {name: tensor for name, tensor in stored.items() if name.startswith(at)}
        names = names.extended(GGUFS[config.architecture].draft_names)
        config = read_draft(config, tensors, of_head, names, path, of_fused, heads, notes)
    metadata = _with_pre_tokenizer(file, config)
    return Source("gguf", file.path, config, metadata, tensors, file.files, notes, unread=unread)


def _with_pre_tokenizer(file: GGUFFile, config: ModelConfig) -> dict[str, Any]:
    """The metadata with the family's pre-tokenizer where Ollama's converter did not know it."""
    key, name = "tokenizer.ggml.pre", GGUFS[config.architecture].pre_tokenizer
    if name is None or file.metadata.get(key, "default") != "default":
        return file.metadata
    return file.metadata | {key: name}


def _blocks(file: GGUFFile, config: ModelConfig) -> int:
    """Layers of the file, with those that predict further tokens."""
    fields = Fields(file.metadata, str(file.path), prefix=f"{config.architecture}.")
    return int(fields.integer("block_count", 1, layout.MAX_LAYERS))


def stored_tensors(file: GGUFFile, config: ModelConfig, layers: int | None = None) -> dict[str, RawTensor]:
    """The tensors under the names of the file, without those that became part of the configuration. layers: of which
    they are, None: those of the model."""
    layers = config.n_layers if layers is None else layers
    read = [f"{name}.weight" for name in DIVISORS] if config.ropes else []
    beyond = tuple(f"blk.{layer}." for layer in range(layers, _blocks(file, config)))
    left_out = {*read, *redundant_tensors(file, config, layers)}
    stored = {
        next((f"{name}.{kind}" for end, kind in _ENDS.items() if name.endswith(end)), name): tensor
        for name, tensor in file.tensors.items()
        if name not in left_out and not name.startswith(beyond) and not name.endswith(".input_scale")
    }
    for name in [name for name in stored if name.endswith(".ssm_norm.weight")]:  # by groups
        if stored[name].type in FLOAT_TYPES:
            stored[name] = replace(stored[name], shape=(stored[name].size,))
    for name in [name for name in stored if name.endswith(_OLLAMA_FACTORS)]:
        stored[name.replace(_OLLAMA_FACTORS, _FACTORS[1])] = stored.pop(name)
    stored = with_scales(file, stored)
    _cut_queries(stored, config)
    return {f"{name}.weight" if name.endswith(_FACTORS) else name: tensor for name, tensor in stored.items()}


_FACTORS = (".ffn_gate_inp.scale", ".ffn_down_exps.scale")  # vectors of Gemma 4, beside matrices of these names
_OLLAMA_FACTORS = ".ffn_gate_inp.per_expert_scale"  # what the second is called in Ollama's first files


def with_scales(file: GGUFFile, stored: dict[str, RawTensor]) -> dict[str, RawTensor]:
    """The tensors, those of NVFP4 with the factors that files have in tensors of their own, `NAME.scale` or
    `NAME.weight.scale`: one for a matrix or for each of stacked ones. (`NAME.input_scale` is about activations.)"""
    ends = (".weight.scale", ".scale")
    tensors = dict(stored)
    for name, scale in stored.items():
        end = next((end for end in ends if name.endswith(end)), None)
        matrix = None if end is None else f"{name.removesuffix(end)}.weight"
        tensor = tensors.get(matrix) if matrix else None
        if matrix is None or tensor is None or tensor.type in NATIVE_TYPES - {"NVFP4"}:
            continue
        if tensor.scales is not None or scale.type not in FLOAT_TYPES or scale.size not in _matrices(tensor.shape):
            raise ModelError(f"{file.path}: tensor {shown(name)} is not one number for each matrix of {matrix}")
        file.check()
        values = scale.float32().reshape(-1)
        if not np.isfinite(values).all():
            raise ModelError(f"{file.path}: tensor {shown(name)} holds values that are no numbers")
        tensors[matrix] = replace(tensor, scales=values.copy())
        del tensors[name]
    return tensors


def _matrices(shape: tuple[int, ...]) -> tuple[int, int]:
    """Number of factors that may go with a tensor: one, or one for each of its matrices."""
    return 1, math.prod(shape[:-2])


def redundant_tensors(file: GGUFFile, config: ModelConfig, layers: int | None = None) -> list[str]:
    """Names that tensors may have which say what others do, or that nothing uses: files of latent attention may have
    `attn_kv_b` beside `attn_k_b` and `attn_v_b`, others keys of layers that read those of another layer."""
    if _somewhere(file, "attn_k_b"):
        return [f"blk.{layer}.attn_kv_b.weight" for layer in range(config.n_layers if layers is None else layers)]
    names = ("attn_k", "attn_v", "attn_k_norm")
    return [f"blk.{layer}.{name}.weight" for layer in _sharing(config) for name in names]


def _sharing(config: ModelConfig) -> list[int]:
    """Layers that read the keys and values of others."""
    return [layer for layer, kind in enumerate(config.layers) if getattr(kind.attention, "kv_from", None) is not None]


def _cut_queries(stored: dict[str, RawTensor], config: ModelConfig) -> None:
    """Leave, of one tensor for q, k and v, the rows of q in layers that read the keys and values of others."""
    for layer in _sharing(config):
        heads, tensor = config.layers[layer].heads, stored.pop(f"blk.{layer}.attn_qkv.weight", None)
        if tensor is not None:
            shape = (min(heads.n_heads * heads.head_dim, tensor.shape[0]), *tensor.shape[1:])
            nbytes = tensor.nbytes // tensor.shape[0] * shape[0]
            stored[f"blk.{layer}.attn_q.weight"] = replace(tensor, shape=shape, data=tensor.data[:nbytes])


def names_of(file: GGUFFile, config: ModelConfig) -> Names:
    """Spelling of canonical names in this file."""
    inner = dict(NAMES.inner)
    if _somewhere(file, _GATE_UP_EXPERTS):
        inner |= dict.fromkeys(("experts_gate", "experts_up"), _GATE_UP_EXPERTS)
    if _somewhere(file, "ssm_ba"):
        inner["delta_a"] = "ssm_ba"
    if _somewhere(file, "ssm_in"):  # of the first files of Qwen3-Next
        inner["delta_z"] = "ssm_in"
    together = fused(file, config)
    family = GGUFS[config.architecture]
    inner |= {name: own for name, own in family.names.items() if name not in NAMES.outer}
    for matrices in together:
        combined: dict[tuple[str, ...], str] = {_KV_B: "attn_kv_b", _GATE_UP: _GATE_UP_EXPERTS}
        combined |= dict.fromkeys((_QKV.parts, _DELTA_QKV.parts), "attn_qkv")
        inner |= dict.fromkeys(matrices.parts, combined.get(matrices.parts) or inner[matrices.parts[-1]])
    outer = {name: family.names.get(name, own) for name, own in NAMES.outer.items()}
    if "output_norm.weight" in file.tensors:  # in Ollama's files of LFM2, too
        outer["final_norm"] = NAMES.outer["final_norm"]
    inner |= {name: own for name, own in family.ollama_names.items() if _somewhere(file, own)}
    if family.parallel and not config.layers[0].shared_norm:
        inner |= {"attn_norm": "attn_norm_2", "ffn_norm": "attn_norm"}
    exceptions = _separate_names(file, config) if _QKV in together else {}
    return replace(NAMES, outer=outer, inner=inner, exceptions=exceptions)


def _separate_names(file: GGUFFile, config: ModelConfig) -> dict[str, str]:
    """Names of q, k and v in layers that have not all three, where other layers have one matrix of them."""
    sharing = _sharing(config)
    layers = [at for at in range(config.n_layers) if at in sharing or f"blk.{at}.attn_qkv.weight" not in file.tensors]
    kinds = ("", "weight"), ("_bias", "bias")
    return {
        f"layers.{layer}.{part}{of}": f"blk.{layer}.attn_{part}.{kind}"
        for layer in layers
        for part in _QKV.parts
        for of, kind in kinds
    }


def fused(file: GGUFFile, config: ModelConfig) -> list[Fused]:
    """The matrices that the file stores in one tensor."""
    family = GGUFS[config.architecture]
    counts = [layer.ffn.n_experts for layer in config.layers if isinstance(layer.ffn, ExpertsConfig)]
    experts = [Fused(_GATE_UP, n) for n in counts[:1] if _somewhere(file, _GATE_UP_EXPERTS)]
    if family.gated and _somewhere(file, "ffn_up_shexp") and not _somewhere(file, "ffn_gate_shexp"):
        experts.append(Fused(_SHARED))
    if family.delta:
        return [*_fused_delta(file, config), *experts]
    of_states = ("short_b", "short_c", "short_x") if family.short_conv else ("mamba_z", "mamba_xbc", "mamba_dt")
    inputs = [Fused(of_states)] * bool(config.states)
    if family.latent:
        return [*_fused_latents(file, config), *experts]
    anywhere = family.mamba or family.short_conv
    together = _somewhere(file, "attn_qkv") if anywhere else "blk.0.attn_qkv.weight" in file.tensors
    qkv = [_QKV] if together else []
    return [*qkv, *family.fused, *experts, *inputs]


def _fused_latents(file: GGUFFile, config: ModelConfig) -> list[Fused]:
    """The matrices of latent attention, and of Kimi Delta Attention, that the file stores in one tensor."""
    heads = [one.n_heads for one in config.attentions if isinstance(one, LatentAttentionConfig)]
    together = _somewhere(file, "attn_kv_b") and not _somewhere(file, "attn_k_b")
    of_delta = [_DELTA_QKV] * (bool(config.states) and _somewhere(file, "attn_qkv"))
    return [*of_delta, *(Fused(_KV_B, n, flat=True) for n in heads[:1] if together)]


def _fused_delta(file: GGUFFile, config: ModelConfig) -> list[Fused]:
    gated = (one for one in config.attentions if isinstance(one, GatedAttentionConfig))
    tensors = [Fused(("q", "q_gate"), one.n_heads) for one in gated]
    heads = [one.n_key_heads for one in config.states.values()][:1]
    inner = ("delta_q", "delta_k", "delta_v")
    if _somewhere(file, "ssm_in"):
        tensors += [Fused((*inner, "delta_z"), n) for n in heads]
    else:
        tensors += [Fused(inner)]
    return tensors + [Fused(("delta_b", "delta_a"), n) for n in heads if _somewhere(file, "ssm_ba")]


def _somewhere(file: GGUFFile, matrix: str) -> bool:
    """Whether some layer has a matrix of that name."""
    return any(name.endswith(f".{matrix}.weight") for name in file.tensors)


def _is_biased(file: GGUFFile, matrix: str) -> bool:
    """Whether some layer has a bias of that matrix."""
    return any(name.endswith(f".{matrix}.bias") for name in file.tensors)


def _divisors(file: GGUFFile, name: str, dim: int) -> tuple[float, ...]:
    """Divisors of the frequencies, as the file has them; () where it has none."""
    tensor = file.tensors.get(f"{name}.weight")
    if tensor is None:
        return ()
    if tensor.size != dim // 2 or max(tensor.shape) != tensor.size or tensor.type not in FLOAT_TYPES:
        raise ModelError(f"{file.path}: {name}.weight is not {dim // 2} numbers")
    file.check()
    values = tensor.float32().reshape(-1)
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise ModelError(f"{file.path}: {name}.weight holds values that are not positive numbers")
    return tuple(map(float, values))


def read_config(
    file: GGUFFile,
    published: bool = False,
    notes: list[str] | None = None,
    unread: list[str] | None = None,
) -> ModelConfig:
    """The configuration, checked; ModelError if it is not one this engine runs.

    published: it is one of PowerInfer's own files; notes: gets lines for the user; unread: gets the keys that nothing
    reads.
    """
    source = str(file.path)
    general = Fields(file.metadata, source)
    family = _family(general, published)
    architecture = family.architecture
    fields = Fields(file.metadata, source, f"{architecture}.", notes)
    if family.published is not None and published:
        family = replace(family, activation=family.published)
        fields.only("hidden_act", family.activation)
    if family.parallel is None:
        family = replace(family, parallel="blk.0.ffn_norm.weight" not in file.tensors)
    if family.norm == "stated":
        family = replace(family, norm="rms" if fields.has("attention.layer_norm_rms_epsilon") else "layer")
    d_model = fields.integer("embedding_length", 1, layout.MAX_WIDTH)
    n_layers = fields.integer("block_count", 1, layout.MAX_LAYERS)
    # Layers that only predict further tokens follow the model's own.
    n_layers -= fields.integer("nextn_predict_layers", 0, n_layers - 1, 0)
    names = file.tensors
    if "token_embd.weight" not in names:
        raise ModelError(f"{source}: tensor token_embd.weight is missing")
    learned = family.positions == "learned"
    if family.parallel:
        fields.only("use_parallel_residual", True)
    inputs, input_rows = _layer_inputs(file, fields, family)
    config = ModelConfig(
        architecture=architecture,
        d_model=d_model,
        vocab_size=_vocabulary(file, fields),
        context_length=_table(file, fields) if learned else fields.integer("context_length", 1, layout.MAX_CONTEXT),
        norm_eps=_epsilon(fields, family),
        layers=_all_layers(file, fields, family, d_model, n_layers),
        norm=family.norm,
        out_norm_eps=family.out_norm_eps,
        embed_norm=family.embed_norm,
        norm_bias=family.norm != "layer" or "output_norm.bias" in names,
        positions=family.positions,
        position_offset=_OPT_OFFSET if learned else 0,
        embedding_scale=float(np.sqrt(np.float32(d_model))) if family.scaled else _factor(fields, family, "embedding"),
        residual_scale=_factor(fields, family, "residual"),
        layer_inputs=inputs,
        layer_input_rows=input_rows,
        logit_scale=_logit_scale(fields, family),
        logit_cap=_cap(fields, "final_logit_softcapping", family.logit_cap),
        head_bias="output.bias" in names,
        tied_embeddings="output.weight" not in names,
        name=printable(general.get("general.name", "")),
    )
    if family.complete is not None:
        config = family.complete(fields, {name: tensor.shape for name, tensor in names.items()}, config)
    unused = check_others(fields, config)
    if unread is not None:
        unread += [key for key in file.metadata if not key.startswith((f"{architecture}.", *_READ_ELSEWHERE))]
        unread += [f"{architecture}.{key}" for key in unused]
    layout.check(config, source)
    return config


_READ_ELSEWHERE = ("general.", "tokenizer.", "split.", "quantize.", "xielu.")


def _logit_scale(fields: Fields, family: Gguf) -> float:
    """The factor of the logits, which files of Granite have as a divisor."""
    if family.scaled_logits:
        return float(fields.number("logit_scale", 1e-6, layout.MAX_SCALE))
    return 1 / _factor(fields, family, "logit")


def _factor(fields: Fields, family: Gguf, of: str) -> float:
    if not family.scales:
        return 1.0
    missing: Mapping[str, float] = {}
    if family.missing_scales is not None:
        sizes = ("embedding_length", layout.MAX_WIDTH), ("block_count", layout.MAX_LAYERS)
        missing = family.missing_scales(*(fields.integer(key, 1, high) for key, high in sizes))
    return float(fields.number(f"{of}_scale", 1e-6, layout.MAX_SCALE, missing.get(of, 1.0)))


def _layer_inputs(file: GGUFFile, fields: Fields, family: Gguf) -> tuple[int, int]:
    """`layer_inputs` and `layer_input_rows` of `ModelConfig`."""
    numbers = 0
    if family.layer_inputs is not None:
        numbers = fields.integer("embedding_length_per_layer_input", 0, layout.MAX_WIDTH, family.layer_inputs)
    table = file.tensors.get("per_layer_token_embd.weight", file.tensors["token_embd.weight"])  # named later if missing
    return numbers, table.shape[0] if numbers else 0


def _cap(fields: Fields, key: str, default: float | None) -> float | None:
    """A cap of scores or logits; default: None, the family has none."""
    return None if default is None else fields.number(key, 0, layout.MAX_SCALE, default) or None


def _all_layers(
    file: GGUFFile, fields: Fields, family: Gguf, d_model: int, n_layers: int
) -> tuple[LayerConfig, ...]:
    if family.latent:
        return _latent_layers(file, fields, family, n_layers)
    if family.mamba or family.short_conv:
        return _state_layers(file, fields, family, d_model, n_layers)
    return _layers(file, fields, family, _heads(fields, d_model, n_layers, states=family.delta))


def _heads(fields: Fields, d_model: int, n_layers: int, states: bool) -> list[AttentionConfig]:
    """The heads of each layer: one number for all of them, or one for each; states: 0 of keys and values in layers
    that have a state in place of attention, as in Ollama's files."""
    heads = fields.integers("attention.head_count", n_layers, 1, layout.MAX_HEADS)
    if not fields.has("attention.key_length") and (len(set(heads)) > 1 or d_model % heads[0]):
        counts = " or ".join(map(str, sorted(set(heads))[:2]))
        raise fields.bad("attention.key_length", f"is missing, and {counts} heads do not divide {d_model} evenly")
    head_dim = fields.integer("attention.key_length", 2, layout.MAX_HEAD_DIM, max(2, d_model // heads[0]))
    fields.only("attention.value_length", head_dim)
    if fields.has("attention.head_count_kv"):
        listed = fields.integers("attention.head_count_kv", n_layers, int(not states), layout.MAX_HEADS)
        if not any(listed):
            raise fields.bad("attention.head_count_kv", "is 0 in all layers")
        kv_heads = [count or max(listed) for count in listed]
    else:
        kv_heads = heads
    return [AttentionConfig(n, kv, head_dim) for n, kv in zip(heads, kv_heads, strict=True)]


def _has_shared(ffn: FfnKind) -> bool:
    """Whether an FFN is experts with a shared one."""
    return isinstance(ffn, ExpertsConfig) and ffn.shared_size > 0


def _layers(file: GGUFFile, fields: Fields, family: Gguf, heads: list[AttentionConfig]) -> tuple[LayerConfig, ...]:
    """The layers. Biases: the file says by having them; one that is then missing elsewhere is an error."""
    names, n_layers = file.tensors, len(heads)
    windows = _windows(fields, n_layers, family)
    ropes = _ropes(file, fields, family, heads[0].head_dim, windows)
    if family.window_heads:
        heads = _window_heads(file, fields, heads, windows)
    qk_norm = family.qk_norm
    if qk_norm == "stored":
        of_heads = "separate" if family.norm == "layer" else "head"
        qk_norm = of_heads if "blk.0.attn_q_norm.weight" in names else None
    shared: dict[str, Any] = {
        "qkv_bias": family.qkv_bias or "blk.0.attn_q.bias" in names or "blk.0.attn_qkv.bias" in names,
        "o_bias": f"blk.0.{family.names.get('o', NAMES.inner['o'])}.bias" in names,
        "qk_norm": qk_norm,
        "v_norm": family.v_norm,
        "scale": _scale(fields, family, heads),
        "score_cap": _cap(fields, "attn_logit_softcapping", family.score_cap),
        "sinks": family.sinks,
        **({} if family.growth is None else family.growth(fields)),
    }
    plain = [
        replace(heads_, rope=of_layer, window=window, **shared)
        for heads_, window, of_layer in zip(heads, windows, ropes, strict=True)
    ]
    plain = plain if family.change is None else family.change(fields, plain)
    if family.layer_inputs is not None:
        plain = sharing_keys(fields, plain, n_layers - fields.integer("attention.shared_kv_layers", 0, n_layers - 1, 0))
    attentions = _delta(fields, family, plain) if family.delta else plain
    ffns = _ffns(file, fields, family, n_layers)
    ffns = ffns if family.change_ffns is None else family.change_ffns(fields, ffns)
    return tuple(
        LayerConfig(
            attention,
            ffn,
            norms=family.norms,
            parallel=bool(family.parallel),
            shared_norm=bool(family.parallel) and "blk.0.attn_norm_2.weight" not in names,
            ffn_factors=(1.0, 0.5) if family.averaged and _has_shared(ffn) else (1.0, 1.0),
            out_scale=_somewhere(file, "layer_output_scale"),
        )
        for attention, ffn in zip(attentions, ffns, strict=True)
    )


def _window_heads(
    file: GGUFFile, fields: Fields, heads: Sequence[AttentionConfig], windows: Sequence[int | None]
) -> list[AttentionConfig]:
    """The heads of each layer, those of layers with a window of another size; without a tensor for values keys are."""
    dim = fields.integer("attention.key_length_swa", 2, layout.MAX_HEAD_DIM, heads[0].head_dim)
    fields.only("attention.value_length_swa", dim)
    fields.only("rope.dimension_count_swa", dim)
    values = ("attn_v", "attn_qkv")
    return [
        replace(
            attention,
            head_dim=attention.head_dim if window is None else dim,
            keys_as_values=not any(f"blk.{layer}.{name}.weight" in file.tensors for name in values),
        )
        for layer, (attention, window) in enumerate(zip(heads, windows, strict=True))
    ]


def _ropes(
    file: GGUFFile, fields: Fields, family: Gguf, head_dim: int, windows: Sequence[int | None]
) -> list[RopeConfig | None]:
    """The rotary embedding of each layer; windows: of the layers."""
    rope = None if family.positions == "learned" else _rope(file, fields, family, head_dim)
    if family.scales and not fields.flag("rope.scaling.finetuned", True):
        rope = None  # how Granite's files say so
    local, slides = _local_rope(fields, family, rope), any(windows)
    rotated: Any = [_is_rotated(family, layer, window, slides) for layer, window in enumerate(windows)]
    if family.rope_pattern:
        key = "attention.rope_pattern"
        rotated = fields.get(key, rotated)
        if type(rotated) is not list or len(rotated) != len(windows) or not all(type(one) is bool for one in rotated):
            raise fields.bad(key, f"is {shown(rotated)}, not a truth value for every layer")
    of_layers = [rope if window is None else local for window in windows]
    return [of_layer if turns else None for of_layer, turns in zip(of_layers, rotated, strict=True)]


def _local_rope(fields: Fields, family: Gguf, rope: RopeConfig | None) -> RopeConfig | None:
    """The rotary embedding of layers with a window, where that of the others is `rope`."""
    if rope is None or not family.full_every or family.single_rope:
        return rope
    theta = family.local_theta or rope.theta
    for key in ("rope.local.freq_base", "rope.freq_base_local", "rope.freq_base_swa"):  # the first two are Ollama's
        theta = fields.number(key, 1.0001, layout.MAX_THETA, theta)
    dim = fields.integer("rope.dimension_count_swa", 2, layout.MAX_HEAD_DIM, rope.dim)
    dim = dim if family.window_heads else rope.dim
    return replace(rope, theta=theta) if family.full_first else RopeConfig(theta, dim, rope.interleaved)


def _is_rotated(family: Gguf, layer: int, window: int | None, slides: bool) -> bool:
    """Whether positions are rotated in a layer, from its number and its window; slides: any layer has a window."""
    if slides and family.full_first and not layer % family.full_every:
        return False
    if slides and family.full_unrotated and window is None:
        return False
    return not family.unrotated_every or bool((layer + 1) % family.unrotated_every)


def _delta(fields: Fields, family: Gguf, heads: list[AttentionConfig]) -> list[AttentionKind]:
    """Gated DeltaNet where the file says, else in three layers of four; gated attention with these heads elsewhere."""
    values = fields.integer("ssm.time_step_rank", 1, layout.MAX_HEADS)
    width = fields.integer("ssm.inner_size", values, layout.MAX_WIDTH)
    if width % values:
        raise fields.bad("ssm.inner_size", f"is {width}, which {values} heads do not divide")
    delta = DeltaNetConfig(
        fields.integer("ssm.group_count", 1, layout.MAX_HEADS),
        fields.integer("ssm.state_size", 1, layout.MAX_HEAD_DIM),
        values,
        width // values,
        fields.integer("ssm.conv_kernel", 1, layout.MAX_HEAD_DIM),
        fields.flag("ssm.v_head_reordered", family.tiled),
    )
    interval = fields.integer("full_attention_interval", 1, layout.MAX_LAYERS, 4)
    stated: Any = fields.get("attention.recurrent_layers", None)
    recurrent = [bool((layer + 1) % interval) for layer in range(len(heads))] if stated is None else stated
    if type(recurrent) is not list or len(recurrent) < len(heads) or not all(type(one) is bool for one in recurrent):
        raise fields.bad("attention.recurrent_layers", f"is {shown(stated)}, not a truth value for every layer")
    gated = [own.gated() for own in heads]
    return [delta if keeps else own for own, keeps in zip(gated, recurrent[: len(heads)], strict=True)]


def _state_layers(
    file: GGUFFile, fields: Fields, family: Gguf, d_model: int, n_layers: int
) -> tuple[LayerConfig, ...]:
    """The layers of a model with Mamba2, or short convolutions, where there are no heads for keys and values, and
    attention elsewhere."""
    kv_heads = [0] * n_layers
    if fields.has("attention.head_count_kv"):
        kv_heads = _block_numbers(fields, "attention.head_count_kv", n_layers, layout.MAX_HEADS)
    n_heads = fields.integer("attention.head_count", 1 if any(kv_heads) else 0, layout.MAX_HEADS)
    head_dim = fields.integer("attention.key_length", 2, layout.MAX_HEAD_DIM, max(2, d_model // max(n_heads, 1)))
    fields.only("attention.value_length", head_dim)
    rope: RopeConfig | None = _rope(file, fields, replace(family, partial=True), head_dim)
    if family.unrotated or (family.scales and not fields.flag("rope.scaling.finetuned", True)):
        rope = None
    qkv_bias, o_bias = (_is_biased(file, name) for name in ("attn_q", "attn_output"))
    scale = _scale(fields, family, [])
    plain = AttentionConfig(
        n_heads, 1, head_dim, rope, qkv_bias=qkv_bias, o_bias=o_bias, qk_norm=family.qk_norm, scale=scale
    )
    mixer: Mamba2Config | ShortConvConfig | None = None
    if family.beside or not all(kv_heads):
        mixer = _short_conv(fields, d_model) if family.short_conv else _mamba(file, fields)
    layers = []
    for kv, ffn in zip(kv_heads, _ffns(file, fields, family, n_layers), strict=True):
        attention: AttentionKind = replace(plain, n_kv_heads=kv) if mixer is None or kv else mixer
        if family.beside and isinstance(mixer, Mamba2Config) and isinstance(attention, AttentionConfig):
            attention = ParallelConfig(attention, mixer)
        alone = family.separate and not isinstance(ffn, NoFfn)
        layers.append(LayerConfig(NoAttention() if alone else attention, ffn))
    return tuple(layers)


def _short_conv(fields: Fields, d_model: int) -> ShortConvConfig:
    return ShortConvConfig(d_model, fields.integer("shortconv.l_cache", 1, layout.MAX_HEAD_DIM))


def _mamba(file: GGUFFile, fields: Fields) -> Mamba2Config:
    heads = fields.integer("ssm.time_step_rank", 1, layout.MAX_HEADS)
    width = fields.integer("ssm.inner_size", 1, layout.MAX_WIDTH)
    groups = fields.integer("ssm.group_count", 1, layout.MAX_HEADS)
    if width % heads:
        raise fields.bad("ssm.inner_size", f"is {width}, which {heads} heads do not divide")
    return Mamba2Config(
        heads,
        width // heads,
        groups,
        fields.integer("ssm.state_size", 1, layout.MAX_HEAD_DIM),
        fields.integer("ssm.conv_kernel", 1, layout.MAX_HEAD_DIM),
        conv_bias=_is_biased(file, "ssm_conv1d"),
        bias=_is_biased(file, "ssm_in"),
        norm="gated" if _somewhere(file, "ssm_norm") else "none",
        norm_groups=groups,
    )


def _block_numbers(fields: Fields, key: str, n_layers: int, high: int) -> list[int]:
    """A number, which may be 0, for each layer; the file may have more for blocks that predict further tokens."""
    return fields.integers(key, fields.integer("block_count", 1, layout.MAX_LAYERS), 0, high)[:n_layers]


def _latent_layers(file: GGUFFile, fields: Fields, family: Gguf, n_layers: int) -> tuple[LayerConfig, ...]:
    """The layers of a model with latent attention. The keys of newer files state what the cache holds, those of older
    ones the heads' own dimensions."""

    def dims(key: str) -> int:
        return int(fields.integer(key, 1, layout.MAX_HEAD_DIM))

    heads, latents, rotated = (
        fields.integer("attention.head_count", 1, layout.MAX_HEADS),
        dims("attention.kv_lora_rank"),
        dims("rope.dimension_count"),
    )
    of_cache, of_head = "", ""
    if fields.has("attention.key_length_mla"):
        cached, stated = latents + rotated, [fields.peek(f"attention.key_length{end}") for end in ("", "_mla")]
        swapped = stated[0] != cached == stated[1]  # Ollama's files of GLM-4.7-Flash
        of_cache, of_head = ("_mla", "") if swapped else ("", "_mla")
        fields.only(f"attention.key_length{of_cache}", cached)
        if family.channel_delta:
            fields.get("attention.value_length", None)  # hidden_size / heads: llama.cpp writes it, and does not read it
        else:
            fields.only(f"attention.value_length{of_cache}", latents)
    query, value = (dims(f"attention.{name}_length{of_head}") for name in ("key", "value"))
    if query <= rotated:
        raise fields.bad("rope.dimension_count", f"is {rotated}, and leaves nothing of the {query} of a head")
    rope, gain = _latent_rope(file, fields, family, rotated)
    latent = LatentAttentionConfig(
        heads,
        latents,
        query - rotated,
        rotated,
        value,
        None if family.unrotated else rope,
        gain * query**-0.5,
        fields.integer("attention.q_lora_rank", 0, layout.MAX_WIDTH, 0) or None,
        _epsilon(fields, family),
        **({} if family.growth is None else family.growth(fields)),
    )
    attentions: list[AttentionKind] = [latent] * n_layers
    if family.channel_delta:
        kv_heads = _block_numbers(fields, "attention.head_count_kv", n_layers, layout.MAX_HEADS)
        if {*kv_heads} - {0, 1, heads}:
            raise fields.bad("attention.head_count_kv", f"holds {max(kv_heads)}, which is not supported")
        dim, taps = dims("kda.head_dim"), dims("ssm.conv_kernel")
        attentions = [latent if kv else ChannelDeltaConfig(heads, dim, heads, dim, taps) for kv in kv_heads]
    else:
        fields.only("attention.head_count_kv", 1, heads)
    ffns = _ffns(file, fields, family, n_layers)
    return tuple(LayerConfig(attention, ffn) for attention, ffn in zip(attentions, ffns, strict=True))


def _latent_rope(file: GGUFFile, fields: Fields, family: Gguf, dim: int) -> tuple[RopeConfig, float]:
    """(rotary embedding, factor of attention's scores): with YaRN the scores are larger in place of what is rotated."""
    multiplier = fields.number("rope.scaling.yarn_log_multiplier", 0, layout.MAX_SCALE, 0.0)
    rope = _rope(file, fields, family, dim)
    if rope.scaling != "yarn":
        return rope, 1.0
    if not multiplier:
        raise fields.bad("rope.scaling.yarn_log_multiplier", "is missing: convert the model again")
    if rope.attention_factor is not None:
        raise fields.bad("rope.scaling.attn_factor", "is not 1, which this engine does not support here")
    return replace(rope, attention_factor=1.0), (1 + multiplier * math.log(max(rope.factor, 1))) ** 2


def _ffns(file: GGUFFile, fields: Fields, family: Gguf, n_layers: int) -> list[FfnKind]:
    """The FFN of each layer; layers with a router have experts."""
    has_thresholds, of_products = (_somewhere(file, name) for name in ("ffn_threshold", "ffn_product_threshold"))
    activation, thresholds = _activation(fields, family, n_layers, has_thresholds)
    bias = _is_biased(file, "ffn_up")
    sizes = _dense_sizes(file, fields, family, n_layers)
    ffns: list[FfnKind] = [
        FfnConfig(size, activation, threshold, family.gated, bias, has_thresholds, of_products) if size else NoFfn()
        for size, threshold in zip(sizes, thresholds, strict=True)
    ]
    if family.experts is None or not fields.integer("expert_count", 0, layout.MAX_EXPERTS, 0):
        fields.only("expert_count", 0)
        fields.only("expert_used_count", 0)
        return ffns
    if has_thresholds or of_products:
        raise ModelError(f"{file.path}: has thresholds of single neurons, which models of experts cannot have")
    experts = _experts(file, fields, family.experts, activation, max(*sizes, 1))
    experts = replace(experts, gated=family.gated, early_router=family.early_router)
    if family.separate_experts:
        router = replace(experts.router, factors=_has_factors(file))
        experts = replace(experts, router=router, shared_size=sizes[0], separate=True)
        if len(set(sizes)) > 1:
            raise fields.bad("feed_forward_length", "differs among layers with experts, which is not supported")
    experts = replace(experts, latents=_latents(file, fields))
    if "blk.0.ffn_gate.0.weight" in file.tensors:
        raise ModelError(
            f"{file.path}: has a tensor for each expert, as files of 2023 do: "
            "convert the model again, or take a newer file"
        )
    with_router = _routed_layers(file, fields, n_layers)
    if not any(with_router):
        raise fields.bad("expert_count", f"is {experts.n_experts}, but no layer has a router")
    return [
        replace(experts, threshold=threshold) if routed else ffn
        for ffn, routed, threshold in zip(ffns, with_router, thresholds, strict=True)
    ]


def _dense_sizes(file: GGUFFile, fields: Fields, family: Gguf, n_layers: int) -> list[int]:
    """The neurons of each layer's dense FFN, 0 where it has none."""
    if family.mamba:
        return _block_numbers(fields, "feed_forward_length", n_layers, layout.MAX_WIDTH)
    implied = family.short_conv or (family.delta and fields.has("expert_feed_forward_length"))
    default = {"default": 1} if implied else {}
    low = 0 if family.delta and default else 1  # Ollama's files say 0 where every layer has experts
    sizes = fields.integers("feed_forward_length", n_layers, low, layout.MAX_WIDTH, **default)
    return _stored_sizes(file, fields, sizes) if family.short_conv else sizes


def _latents(file: GGUFFile, fields: Fields) -> int:
    """Dimensions that experts compute in, 0 where these are those of the model."""
    down = ".ffn_latent_down.weight", ".ffn_latent_in.weight"
    shape = next((tensor.shape for name, tensor in file.tensors.items() if name.endswith(down)), None)
    if shape is None:
        return 0
    stated: int = fields.integer("moe_latent_size", 1, layout.MAX_WIDTH, min(shape[0], layout.MAX_WIDTH))
    return stated  # Ollama's files have no key for it


def _stored_sizes(file: GGUFFile, fields: Fields, stated: list[int]) -> list[int]:
    """The neurons of dense FFNs as their matrices have them: Ollama's files of LFM2 state the number in config.json,
    which the class adjusts."""
    tensors = (file.tensors.get(f"blk.{layer}.ffn_up.weight") for layer in range(len(stated)))
    sizes = [size if one is None else one.shape[0] for one, size in zip(tensors, stated, strict=True)]
    if sizes != stated and fields.has("feed_forward_length"):
        fields.notes.append(f"FFNs have {max(sizes)} neurons, not feed_forward_length {max(stated)}, as in Ollama")
    return sizes


def _has_factors(file: GGUFFile) -> bool:
    """Whether the weights of experts have factors; with NVFP4 these are in the factors of down."""
    downs = [tensor for name, tensor in file.tensors.items() if name.endswith(".ffn_down_exps.weight")]
    return all(tensor.type != "NVFP4" for tensor in downs)


def _routed_layers(file: GGUFFile, fields: Fields, n_layers: int) -> list[bool]:
    """Layers that have a router, by its tensor; ModelError where keys say otherwise."""
    with_router = [f"blk.{layer}.ffn_gate_inp.weight" in file.tensors for layer in range(n_layers)]
    dense = fields.integer("leading_dense_block_count", 0, n_layers, 0)
    if any(with_router[:dense]):
        raise fields.bad("leading_dense_block_count", f"is {dense}, but some of these layers have experts")
    step = fields.integer("interleave_moe_layer_step", 1, layout.MAX_LAYERS, 1)
    if any(layer % step and routed for layer, routed in enumerate(with_router, 1)):
        raise fields.bad("interleave_moe_layer_step", f"is {step}, but layers between these have experts")
    return with_router


def _experts(file: GGUFFile, fields: Fields, router: RouterConfig, activation: str, size: int) -> ExpertsConfig:
    """size: neurons of an expert, where the file states no other number."""
    n_experts = fields.integer("expert_count", 1, layout.MAX_EXPERTS)
    size = fields.integer("expert_feed_forward_length", 1, layout.MAX_WIDTH, size)
    shared = [name for name in file.tensors if name.endswith(".ffn_up_shexp.weight")]
    shared_size = 0
    if shared:
        count = fields.integer("expert_shared_count", 1, layout.MAX_EXPERTS, 1)
        shared_size = fields.integer("expert_shared_feed_forward_length", 1, layout.MAX_WIDTH, size * count)
    else:
        if count := fields.integer("expert_shared_count", 0, layout.MAX_EXPERTS, 0):
            raise fields.bad("expert_shared_count", f"is {count}, but the file has no shared expert")
        fields.get("expert_shared_feed_forward_length", None)  # of a shared expert that the file does not have
    gating = {0: router.scoring, 1: "softmax", 2: "sigmoid"}
    correction = any(name.endswith(".exp_probs_b.bias") for name in file.tensors)
    if correction and not router.correction:  # ERNIE's apart those are sigmoids; GLM-4.7-Flash's first files do not say
        gating[0] = "sigmoid"
    scoring = gating[fields.integer("expert_gating_func", 0, max(gating), 0)]
    groups = fields.integer("expert_group_count", 1, n_experts, 1)
    return ExpertsConfig(
        n_experts,
        size,
        replace(
            router,
            top_k=fields.integer("expert_used_count", 1, n_experts),
            scoring=scoring,
            normalise=fields.flag("expert_weights_norm", router.normalise),
            scale=fields.number("expert_weights_scale", 0, layout.MAX_SCALE, 1.0) or 1.0,
            correction=correction,
            bias=any(name.endswith(".ffn_gate_inp.bias") for name in file.tensors),
            groups=groups,
            top_groups=fields.integer("expert_group_used_count", 1, groups, groups),
            group_best=2 if groups > 1 and scoring == "sigmoid" else 1,
        ),
        activation,
        bias=any(name.endswith(".ffn_down_exps.bias") for name in file.tensors),
        shared_size=shared_size,
        shared_weight=any(name.endswith(".ffn_gate_inp_shexp.weight") for name in file.tensors),
    )


def _scale(fields: Fields, family: Gguf, heads: list[AttentionConfig]) -> float | None:
    """Scale of attention's scores."""
    if family.scales:
        return fields.number("attention.scale", 0, layout.MAX_SCALE, 0.0) or None
    return None if family.score_scale is None else family.score_scale(fields, heads)


def _family(general: Fields, published: bool) -> Gguf:
    general.only("general.type", "model", "")
    general.only("general.quantization_version", 2)
    families = {name: family for name, family in GGUFS.items() if not published or family.published is not None}
    for foreign in ("adapter.",) if published else ("powerinfer.", "adapter."):
        if any(key.startswith(foreign) for key in general.unread()):
            raise ModelError(f"{general.source}: GGUF files with {foreign}* metadata are not supported")
    name = str(general.text("general.architecture"))
    if name not in families:
        if name in _OF_BITNET:
            raise ModelError(f"{general.source}: architecture {name} is bitnet.cpp's alone: {_OF_BITNET[name]}")
        few = f"is not supported (only {', '.join(sorted(families))})"
        problem = few if published else nearest_supported(name, families)
        raise ModelError(f"{general.source}: architecture {shown(name)} {problem}")
    return families[name]


_OF_BITNET = dict.fromkeys(
    ("bitnet-b1.58", "bitnet-25"), "take the folder microsoft/bitnet-b1.58-2B-4T, whose weights are the same"
)


def _activation(fields: Fields, family: Gguf, n_layers: int, has_thresholds: bool) -> tuple[str, list[float]]:
    """(activation, its threshold in each layer); `hidden_act` is a key of this engine's own: others go by the
    architecture alone. each: every neuron has a threshold of its own; of topk the layer then has how many count."""
    name = fields.text("hidden_act", family.activation)
    if name not in family.activations:
        reason = f"is {shown(name)}" if fields.has("hidden_act") else f"is missing, which means {name}"
        raise fields.bad("hidden_act", f"{reason}; only {', '.join(family.activations)} is supported here")
    if name == "topk":
        return name, fields.numbers("hidden_act_param", n_layers, 0, layout.MAX_SCALE)
    if has_thresholds and fields.has("hidden_act_param"):
        raise fields.bad("hidden_act_param", "is set, but the file has a threshold for each neuron")
    if has_thresholds or name not in THRESHOLDED:
        return name, [0.0] * n_layers
    return name, fields.numbers("hidden_act_param", n_layers, 0, layout.MAX_SCALE)


def _epsilon(fields: Fields, family: Gguf) -> float:
    if family.norm == "rms":
        plain = "attention.layer_norm_epsilon"  # which stands for it in files of Nemotron-H
        other = fields.number(plain, 1e-12, 0.1, None) if family.separate else None
        default = {} if other is None else {"default": other}
        return float(fields.number("attention.layer_norm_rms_epsilon", 1e-12, 0.1, **default))
    default = {} if family.epsilon is None else {"default": family.epsilon}
    other = fields.number("attention.layer_norm_rms_epsilon", 1e-12, 0.1, None)  # in files of Phi-3.5-MoE
    default = default if other is None else {"default": other}
    return float(fields.number("attention.layer_norm_epsilon", 1e-12, 0.1, **default))


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
        raise ModelError(f"{fields.source}: {count} tokens, but {shape[0]} rows of token_embd.weight")
    return shape[0]


def _rope(file: GGUFFile, fields: Fields, family: Gguf, head_dim: int) -> RopeConfig:
    dim = head_dim
    if family.partial:
        dim = fields.integer("rope.dimension_count", 2, head_dim, head_dim)
    fields.only("rope.dimension_count", dim)
    theta = fields.number("rope.freq_base", 1.0001, layout.MAX_THETA, 10000.0)
    divisors, short, long = (_divisors(file, name, dim) for name in DIVISORS)
    plain = RopeConfig(theta, dim, family.interleaved, divisors=divisors)
    multiplier = 0.0
    if family.multiplied:
        fields.only("rope.scaling.mscale", 1.0)  # as Ollama calls it, whose files have both or none
        multiplier = fields.number("rope.scaling.mscale_all_dim", 0, layout.MAX_SCALE, 0.0)
        multiplier = fields.number("rope.scaling.yarn_log_multiplier", 0, layout.MAX_SCALE, multiplier)
    kind, factor, original, gain = _rope_scaling(fields, family.scaling)
    if divisors and (short or kind == "yarn" or (kind != "none" and factor != 1)):
        raise ModelError(f"{fields.source}: has both rope_freqs.weight and RoPE scaling {kind!r}")
    original = original or fields.integer("context_length", 1, layout.MAX_CONTEXT)
    if short and long:
        context = fields.integer("context_length", 1, layout.MAX_CONTEXT)
        settings: dict[str, Any]
        settings = {"factor": context / original, "attention_factor": gain, "divisors": short, "long_divisors": long}
        return replace(plain, scaling="longrope", original_context_length=original, **settings)
    if short or long or kind == "longrope":
        raise ModelError(f"{fields.source}: has not both rope_factors_short.weight and rope_factors_long.weight")
    if kind == "yarn":
        gain = _computed_times(fields, family, gain, factor)
        gain /= 1 + 0.1 * multiplier * math.log(max(factor, 1))
        return replace(
            plain, scaling="yarn", factor=factor, original_context_length=original, **_yarn(fields, factor, gain)
        )
    if gain != 1:
        raise fields.bad("rope.scaling.attn_factor", f"is {gain:g}, which this engine supports for yarn scaling only")
    return plain if kind == "none" or factor == 1 else replace(plain, scaling="linear", factor=factor)


def _rope_scaling(fields: Fields, default: str) -> tuple[str, float, int, float]:
    """(kind, factor, original context or 0, factor of attention). default: the kind where a file states none."""
    # ggml: a factor without a type means linear scaling, and a factor of 0 none; the second key is the older one
    kind = fields.text("rope.scaling.type", "") or default
    kind = "none" if kind == "default" else kind  # as config.json says it, and Ollama repeats it
    kinds = "none", "linear", "yarn", "longrope"
    if kind not in kinds:
        raise fields.bad("rope.scaling.type", f"is {shown(kind)}, which is not supported (only {', '.join(kinds)})")
    old = fields.number("rope.scale_linear", 0, layout.MAX_SCALE, 0.0)
    factor = fields.number("rope.scaling.factor", 0, layout.MAX_SCALE, old) or 1.0
    original = fields.integer("rope.scaling.original_context_length", 0, layout.MAX_CONTEXT, 0)
    gain = fields.number("rope.scaling.attn_factor", 1e-6, layout.MAX_SCALE, 1.0)
    fields.flag("rope.scaling.finetuned", False)
    fields.only("rope.scaling.alpha", 0.0)
    if kind != "yarn":
        for key in _OF_YARN:
            fields.get(f"rope.scaling.{key}", None)
    if not fields.was_read("rope.scaling.yarn_log_multiplier"):
        fields.only("rope.scaling.yarn_log_multiplier", 0.0)
    return kind, factor, original, gain


def _computed_times(fields: Fields, family: Gguf, stated: float, factor: float) -> float:
    """The factor of YaRN beside the one that follows from the factor of the positions. Some files state both as one."""
    if not family.whole_factor or not fields.has("rope.scaling.attn_factor"):
        return stated
    computed = 1 + 0.1 * math.log(max(factor, 1))
    if not math.isclose(stated, computed, rel_tol=1e-4):
        fields.notes.append(f"attn_factor {stated:g} replaces YaRN's {computed:.4g}, as in transformers")
    return stated / computed


_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}
_EXTRAPOLATION = ("extrapolation_factor", "yarn_ext_factor")
_OF_YARN = (*_EXTRAPOLATION, "yarn_attn_factor", *_BETAS, *(f"yarn_{key}" for key in _BETAS))


def _yarn(fields: Fields, factor: float, gain: float) -> dict[str, Any]:
    """The fields of `RopeConfig` for yarn.

    `yarn_attn_factor` is what config.json had as `attention_factor`, which replaces the factor that follows from that
    of the positions, or as `attn_factor`, below 1, which neither `transformers` nor llama.cpp applies.
    """
    settings: dict[str, Any] = {}
    for key, value in _BETAS.items():
        for name in (key, f"yarn_{key}"):  # as Ollama calls it, and as others do
            value = fields.number(f"rope.scaling.{name}", 1e-6, layout.MAX_SCALE, value)
        settings[key] = value
    for key in _EXTRAPOLATION:
        if fields.number(f"rope.scaling.{key}", -1, layout.MAX_SCALE, 1.0) not in (1, -1):
            fields.notes.append(f"{key} of YaRN is not applied, as in transformers")
    computed = 1 + 0.1 * math.log(max(factor, 1))
    stated = fields.number("rope.scaling.yarn_attn_factor", -1, layout.MAX_SCALE, -1.0)
    if 0 < stated < 1:
        fields.notes.append(f"yarn_attn_factor {stated:g} is not applied to YaRN's {computed:.4g}, as in transformers")
    if stated > 1 and not math.isclose(stated, computed, rel_tol=1e-4):
        fields.notes.append(f"yarn_attn_factor {stated:g} replaces YaRN's {computed:.4g}, as in transformers")
        return settings | {"attention_factor": gain * stated}
    return settings | {"attention_factor": None if gain == 1 else gain * computed}


def _windows(fields: Fields, n_layers: int, family: Gguf) -> list[int | None]:
    """The sliding window of each layer."""
    default = {} if family.window is None else {"default": family.window}
    window = fields.integer("attention.sliding_window", int(not default), layout.MAX_CONTEXT, **default)
    pattern = fields.get("attention.sliding_window_pattern", None)
    if not window:
        return [None] * n_layers
    if pattern is None or type(pattern) is int:
        implied = family.full_every or n_layers + 1
        interval = fields.integer("attention.sliding_window_pattern", 1, layout.MAX_LAYERS, implied)
        return [window if (layer + (not family.full_first)) % interval else None for layer in range(n_layers)]
    if type(pattern) is not list or len(pattern) != n_layers or not all(type(slides) is bool for slides in pattern):
        raise fields.bad("attention.sliding_window_pattern", f"is {shown(pattern)}, not a truth value for every layer")
    return [window if slides else None for slides in pattern]
