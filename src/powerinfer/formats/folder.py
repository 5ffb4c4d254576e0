"""Hugging Face folders: config.json and safetensors -> `ModelConfig` and canonical names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from powerinfer.config import (
    THRESHOLDED,
    ExpertsConfig,
    FfnConfig,
    GatedAttentionConfig,
    LatentAttentionConfig,
    ModelConfig,
)
from powerinfer.errors import ModelError
from powerinfer.formats import layout
from powerinfer.formats.folder_config import read_config
from powerinfer.formats.gpt_oss_folder import take_experts
from powerinfer.formats.json_file import read_json
from powerinfer.formats.mapped import MappedFile, shown
from powerinfer.formats.safetensors_file import read_safetensors
from powerinfer.formats.source import ONLY_TEXT, Fused, Names, Source, collect, predictor_shapes, without_head_predictor
from powerinfer.formats.tensors import MadeTensor, RawTensor, StoredTensor

_LLAMA = Names(
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
    },
)
_FOUR_NORMS = {
    "attn_norm": "input_layernorm",
    "attn_out_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_out_norm": "post_feedforward_layernorm",
}
_PHI3 = dict.fromkeys("qkv", "self_attn.qkv_proj") | dict.fromkeys(("gate", "up"), "mlp.gate_up_proj")
_OPT = Names(
    outer={
        "embed": "model.decoder.embed_tokens",
        "positions": "model.decoder.embed_positions",
        "project_in": "model.decoder.project_in",
        "project_out": "model.decoder.project_out",
        "final_norm": "model.decoder.final_layer_norm",
        "head": "lm_head",
    },
    layers="model.decoder.layers",
    inner={
        "attn_norm": "self_attn_layer_norm",
        "ffn_norm": "final_layer_norm",
        **{name: f"self_attn.{name}_proj" for name in "qkv"},
        "o": "self_attn.out_proj",
        "up": "fc1",
        "down": "fc2",
    },
)
_FALCON = Names(
    outer={"embed": "transformer.word_embeddings", "head": "lm_head", "final_norm": "transformer.ln_f"},
    layers="transformer.h",
    inner={
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        **dict.fromkeys("qkv", "self_attention.query_key_value"),
        "o": "self_attention.dense",
        "up": "mlp.dense_h_to_4h",
        "down": "mlp.dense_4h_to_h",
    },
)
_OPENELM = Names(
    outer={"embed": "transformer.token_embeddings", "head": "transformer.classifier", "final_norm": "transformer.norm"},
    layers="transformer.layers",
    inner={
        "attn_norm": "attn_norm",
        "ffn_norm": "ffn_norm",
        **dict.fromkeys("qkv", "attn.qkv_proj"),
        "o": "attn.out_proj",
        "q_norm": "attn.q_norm",
        "k_norm": "attn.k_norm",
        **dict.fromkeys(("gate", "up"), "ffn.proj_1"),
        "down": "ffn.proj_2",
        "threshold": "ffn.threshold",
        "product_threshold": "ffn.product_threshold",
    },
)
_FALCON_TWO_NORMS = replace(_FALCON, inner=_FALCON.inner | {"attn_norm": "ln_attn", "ffn_norm": "ln_mlp"})
_QWEN_MOE = replace(
    _LLAMA,
    inner=_LLAMA.inner
    | {
        "router": "mlp.gate",
        **{f"experts_{part}": f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")},
        **{f"shared_{part}": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
        "shared_weight": "mlp.shared_expert_gate",
    },
)
_MIXTRAL = {"router": "block_sparse_moe.gate"} | {
    f"experts_{part}": f"block_sparse_moe.experts.{{}}.{name}"
    for part, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
}
_MINIMAX = {"router_correction": "block_sparse_moe.e_score_correction"} | _MIXTRAL
_GLM_MOE = {"router_correction": "mlp.gate.e_score_correction"} | {
    f"shared_{part}": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")
}
_ERNIE_MOE = _GLM_MOE | {"router_correction": "mlp.moe_statics.e_score_correction"}
_GLM4 = dict.fromkeys(("gate", "up"), "mlp.gate_up_proj") | {
    "attn_out_norm": "post_self_attn_layernorm",
    "ffn_out_norm": "post_mlp_layernorm",
}
_QWEN_DELTA = replace(
    _QWEN_MOE,
    inner=_QWEN_MOE.inner
    | {"q_gate": "self_attn.q_proj", "delta_conv": "linear_attn.conv1d", "delta_o": "linear_attn.out_proj"}
    | {f"delta_{name}": f"linear_attn.{name}" for name in ("decay", "dt", "norm")}
    | {f"delta_{name}": f"linear_attn.in_proj_{name}" for name in "zba"}
    | {f"delta_{name}": "linear_attn.in_proj_qkv" for name in "qkv"},
)
_EXPERTS_TOGETHER = {"experts_down": "mlp.experts.down_proj"} | dict.fromkeys(
    ("experts_gate", "experts_up"), "mlp.experts.gate_up_proj"
)
_QWEN3_NEXT = {f"delta_{name}": "linear_attn.in_proj_qkvz" for name in "qkvz"} | {
    f"delta_{name}": "linear_attn.in_proj_ba" for name in "ba"
}
_LATENT = {
    "q_a": "self_attn.q_a_proj",
    "q_a_norm": "self_attn.q_a_layernorm",
    "q_b": "self_attn.q_b_proj",
    "kv_a": "self_attn.kv_a_proj_with_mqa",
    "kv_a_norm": "self_attn.kv_a_layernorm",
    **dict.fromkeys(("k_b_rows", "v_b"), "self_attn.kv_b_proj"),
}
_GRANITE_MOE = {"router": "block_sparse_moe.router.layer"} | {
    f"{experts}_{part}": f"{where}.{matrix}_linear"
    for experts, where in (("experts", "block_sparse_moe"), ("shared", "shared_mlp"))
    for part, matrix in (("gate", "input"), ("up", "input"), ("down", "output"))
}
_SMALLTHINKER = {"router": "block_sparse_moe.primary_router"} | {
    f"experts_{part}": f"block_sparse_moe.experts.{{}}.{part}" for part in ("gate", "up", "down")
}
_NAMES = {
    "smallthinker": replace(_LLAMA, inner=_LLAMA.inner | _SMALLTHINKER),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), _QWEN_DELTA),
    "qwen3_next": replace(_QWEN_DELTA, inner=_QWEN_DELTA.inner | _QWEN3_NEXT),
    **dict.fromkeys(("granitemoe", "granitemoeshared"), replace(_LLAMA, inner=_LLAMA.inner | _GRANITE_MOE)),
    "mixtral": replace(_LLAMA, inner=_LLAMA.inner | _MIXTRAL),
    "minimax_m2": replace(_LLAMA, inner=_LLAMA.inner | _MINIMAX),
    "glm4": replace(_LLAMA, inner=_LLAMA.inner | _GLM4),
    "ernie4_5_moe": replace(_QWEN_MOE, inner=_QWEN_MOE.inner | _ERNIE_MOE),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "olmoe"), _QWEN_MOE),
    "gpt_oss": replace(
        _LLAMA,
        inner=_LLAMA.inner
        | {"router": "mlp.router", "sinks": "self_attn.sinks"}
        | {f"experts_{part}": f"mlp.experts.{part}" for part in ("gate", "up", "down")},
    ),
    "glm4_moe": replace(_QWEN_MOE, inner=_QWEN_MOE.inner | _GLM_MOE),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
        replace(_QWEN_MOE, inner=_QWEN_MOE.inner | _GLM_MOE | _LATENT),
    ),
    "opt": _OPT,
    "falcon": _FALCON,
    "openelm": _OPENELM,
    "gemma3_text": replace(_LLAMA, inner=_LLAMA.inner | _FOUR_NORMS),
    "olmo2": replace(_LLAMA, inner=_LLAMA.inner | _FOUR_NORMS),
    "olmo3": replace(_LLAMA, inner=_LLAMA.inner | _FOUR_NORMS),
    "phi3": replace(_LLAMA, inner=_LLAMA.inner | _PHI3),
}
THRESHOLDS = (".threshold", ".product_threshold")
"""The ends of the names of thresholds of neurons, which are parameters of their own, not weights of a module."""
WITH_DELTA = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
NORMS_LESS_ONE = ("nemotron", "gemma3_text", *WITH_DELTA)
_MAX_SHARDS = 1 << 12


def file_names(config: ModelConfig, stored: dict[str, RawTensor]) -> Names:
    layer = config.layers[0]
    if config.architecture == "qwen3_5_moe_text" and "model.layers.0.mlp.experts.down_proj.weight" in stored:
        return replace(_QWEN_DELTA, inner=_QWEN_DELTA.inner | _EXPERTS_TOGETHER)
    if config.architecture == "falcon" and layer.parallel and not layer.shared_norm:
        return _FALCON_TWO_NORMS
    return _NAMES.get(config.architecture, _LLAMA)


def fused(config: ModelConfig, names: Names) -> list[Fused]:
    """The matrices that files of the family store in one tensor."""
    if config.architecture == "falcon":
        return [Fused(("q", "k", "v"), config.layers[0].attention.n_kv_heads)]
    if config.architecture in WITH_DELTA:
        return _fused_delta(config, names)
    if isinstance(config.layers[0].attention, LatentAttentionConfig):
        return [Fused(("k_b_rows", "v_b"), config.layers[0].attention.n_heads, flat=True)]
    if config.architecture in ("granitemoe", "granitemoeshared"):
        experts = config.layers[0].ffn
        assert isinstance(experts, ExpertsConfig)
        return [Fused(("experts_gate", "experts_up"), experts.n_experts), Fused(("shared_gate", "shared_up"))]
    both = config.architecture in ("phi3", "openelm")
    if config.architecture == "glm4":
        return [Fused(("gate", "up"))]
    return [Fused(("q", "k", "v")), Fused(("gate", "up"))] if both else []


def _fused_delta(config: ModelConfig, names: Names) -> list[Fused]:
    found = [Fused(("q", "q_gate"), one.n_heads) for one in config.attentions if isinstance(one, GatedAttentionConfig)]
    ffn = config.layers[0].ffn
    if isinstance(ffn, ExpertsConfig) and "{}" not in names("layers.0.experts_gate"):
        found.append(Fused(("experts_gate", "experts_up"), ffn.n_experts))
    inner = ("delta_q", "delta_k", "delta_v")
    if config.architecture != "qwen3_next":
        return [*found, Fused(inner)]
    groups = [one.n_key_heads for one in config.states.values()][:1]
    return [*found, *(Fused(one, n) for one in ((*inner, "delta_z"), ("delta_b", "delta_a")) for n in groups)]


def open_folder(folder: Path) -> Source:
    """The model in a Hugging Face folder; ModelError if it is malformed or not one this engine runs."""
    metadata, config_file = read_json(folder / "config.json")
    notes: list[str] = []
    unread: list[str] = []
    config = read_config(metadata, folder, notes, unread)
    layout.check(config, str(folder / "config.json"))
    stored, files = _read_weights(folder)
    stored = {name: tensor for name, tensor in stored.items() if not _is_buffer(name)}
    if config.architecture == "opt" and not any(name.startswith("model.decoder.") for name in stored):
        stored = {f"model.{name}" if name.startswith("decoder.") else name: stored[name] for name in stored}
    made: dict[str, MadeTensor] = {}
    if config.architecture == "gpt_oss":
        made = take_experts(config, stored, str(folder))
    elif any(isinstance(layer.ffn, ExpertsConfig) for layer in config.layers):
        stored = dict(_of_experts(config, metadata, stored))
    stored, left_out = without_head_predictor(stored)
    notes += left_out
    if config.architecture in WITH_DELTA:
        stored, left_out = _of_delta(stored)
        notes += left_out
    names = file_names(config, stored)
    config, stored = _with_thresholds(config, stored, folder)
    if config.tied_embeddings:
        config = _with_stored_head(config, stored, files, names, notes)
    predictors = config.architecture == "bamboo" and any(".mlp.predictor." in name for name in stored)
    extra = predictor_shapes(config, stored, names) if predictors else ()
    tensors = collect(config, stored, names, str(folder), extra, fused(config, names), made)
    if config.architecture in NORMS_LESS_ONE:
        _add_one_to_norms(tensors, files)
    for name in (f"layers.{layer}.delta_decay" for layer in config.states):
        rates = -np.exp(tensors[name].gathered().float32())
        tensors[name] = RawTensor("F32", rates.shape, rates.astype("<f4").view(np.uint8))
    source = Source("hf", folder, config, metadata, tensors, [config_file, *files], notes, unread=unread)
    if not predictors:
        return source
    # The model's own code skips neurons whose predicted probability is at most a half.
    notes.append("the files include predictors, with threshold 0")
    return replace(source, predictor_threshold=0.0)


def _of_experts(
    config: ModelConfig, metadata: dict[str, Any], stored: dict[str, RawTensor]
) -> Iterator[tuple[str, RawTensor]]:
    """The tensors with the names of other layers; without those of layers that only predict further tokens,
    which follow the model's own (GLM-4.5)."""
    further = metadata.get("num_nextn_predict_layers") or metadata.get("num_mtp_layers")
    beyond = re.compile(r"model\.layers\.(\d{1,9})\.") if further else None
    for name, tensor in stored.items():
        if beyond and (found := beyond.match(name)) and int(found[1]) >= config.n_layers:
            continue
        if name.startswith("model.mtp_"):  # ERNIE's
            continue
        if name.endswith(".e_score_correction_bias"):
            name = name.removesuffix("_bias") + ".bias"
        yield name, tensor


_RENAMED = {".linear_attn.A_log": ".linear_attn.decay.weight", ".linear_attn.dt_bias": ".linear_attn.dt.bias"}


def _of_delta(stored: dict[str, RawTensor]) -> tuple[dict[str, RawTensor], list[str]]:
    """The tensors of the text's part with the names of other layers, and notes on what is left out: pictures and the
    prediction of further tokens."""
    found: dict[str, RawTensor] = {}
    pictures = 0
    for name, tensor in stored.items():
        if name.startswith(("model.visual.", "visual.")):
            pictures += 1
            continue
        if name.startswith(("mtp.", "model.mtp.")):
            continue
        name = name.replace("model.language_model.", "model.", 1)
        for old, new in _RENAMED.items():
            name = name.replace(old, new)
        of_all = name.endswith((".mlp.experts.gate_up_proj", ".mlp.experts.down_proj"))
        found[f"{name}.weight" if of_all else name] = tensor
    return found, [ONLY_TEXT] if pictures else []


def _with_thresholds(
    config: ModelConfig, stored: dict[str, RawTensor], folder: Path
) -> tuple[ModelConfig, dict[str, RawTensor]]:
    """The configuration, with the product thresholds that only tensors show, and the tensors, with the names of others
    for the thresholds of neurons; ModelError where config.json says otherwise than the tensors."""
    of_activations, of_products = ([name for name in stored if name.endswith(end)] for end in THRESHOLDS)
    found = [*of_activations, *of_products]
    each = any(isinstance(layer.ffn, FfnConfig) and layer.ffn.thresholds for layer in config.layers)
    if each and not of_activations and config.in_banks:
        raise ModelError(f"{folder}: activation topk without thresholds of neurons")
    if each and not of_activations:
        raise ModelError(
            f"{folder / 'config.json'}: hidden_act_param is missing, and the folder has no thresholds of neurons"
        )
    if found and not each:
        raise ModelError(
            f"{folder}: has thresholds of single neurons ({shown(found[0])}), which go neither with hidden_act_param "
            f"in config.json nor with experts nor with an activation other than {', '.join(THRESHOLDED)} and topk"
        )
    if of_products:
        layers = (replace(layer, ffn=replace(layer.neurons, product_thresholds=True)) for layer in config.layers)
        config = replace(config, layers=tuple(layers))
        layout.check(config, str(folder))
    return config, {f"{name}.weight" if name.endswith(THRESHOLDS) else name: one for name, one in stored.items()}


def _add_one_to_norms(tensors: dict[str, StoredTensor], files: list[MappedFile]) -> None:
    """Some families' files keep the weights of their norms less one."""
    for file in files:
        file.check()
    for name, tensor in tensors.items():
        if name.endswith("_norm") and not name.endswith(".delta_norm"):
            values = tensor.gathered().float32() + np.float32(1)
            tensors[name] = RawTensor("F32", tensor.shape, values.astype("<f4").view(np.uint8))


def _with_stored_head(
    config: ModelConfig, stored: dict[str, RawTensor], files: list[MappedFile], names: Names, notes: list[str]
) -> ModelConfig:
    """Some folders keep a copy of the tied embedding as the head; it goes if it really is one, and else is the head, as
    in `transformers`."""
    head, embed = stored.get(names("head")), stored.get(names("embed"))
    if head is None or embed is None:
        return config
    for file in files:
        file.check()
    if (head.type, head.shape) == (embed.type, embed.shape) and np.array_equal(head.data, embed.data):
        del stored[names("head")]
        return config
    notes.append("config.json ties lm_head to the embedding, but the two tensors differ: each is used as it is stored")
    return replace(config, tied_embeddings=False)


_BUFFERS = (
    "inv_freq", "cos_cached", "sin_cached", "freqs_cis", "rope_cache",
    "position_ids", "masked_bias", "causal_mask", "attention_mask",
)  # fmt: skip


def _is_buffer(name: str) -> bool:
    """Whether a tensor is what a class saved beside its weights, and makes anew from the configuration."""
    return name.rpartition(".")[2] in _BUFFERS


# --- weights ---------------------------------------------------------------------------------------------------------


def _read_weights(folder: Path) -> tuple[dict[str, RawTensor], list[MappedFile]]:
    """All tensors of the folder, from one file or from the shards that the index names."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        tensors, _, file = read_safetensors(single)
        return tensors, [file]
    if not index.exists():
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))
        why = "; pickle files can run code and are never read" if pickled else ""
        raise ModelError(f"{folder} holds neither {single.name} nor {index.name}{why}")
    places = _weight_map(index)
    tensors = {}
    files = []
    for name in sorted(set(places.values())):
        shard, _, file = read_safetensors(folder / name)
        files.append(file)
        for twice in sorted(tensors.keys() & shard.keys()):
            one, other = tensors[twice], shard[twice]
            if (one.type, one.shape) != (other.type, other.shape) or not np.array_equal(one.data, other.data):
                raise ModelError(f"{folder / name}: tensor {shown(twice)} is in another file, too, with other values")
        tensors |= shard
    missing = {tensor for tensor in places.keys() - tensors.keys() if not _is_buffer(tensor)}
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
