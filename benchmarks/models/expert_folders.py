"""Hugging Face folders of models of experts with random weights, for expert_models.py: F16, norms and routers F32.

What published folders store in one tensor, or in another form, is stored so here: the inverse of formats/folder.py and
formats/families/gpt_oss.py. gpt-oss has its experts in MXFP4.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from benchmarks.models.vocabulary import write_json, write_tokenizer_files
from powerinfer.config import (
    AttentionConfig,
    DeltaNetConfig,
    ExpertsConfig,
    LatentAttentionConfig,
    ModelConfig,
    Shape,
)
from powerinfer.formats.families import FOLDERS
from powerinfer.formats.folder import file_names, fused
from powerinfer.formats.layout import shapes
from powerinfer.formats.quant import block_type, quantize
from powerinfer.formats.safetensors_file import safetensors_header
from powerinfer.formats.tensors import RawTensor

Values = Iterator[np.ndarray]

_TOGETHER = {"model.layers.0.mlp.experts.down_proj.weight": RawTensor("F16", (0,), np.empty(0, np.uint8))}
"""What the reader recognises folders by whose experts are in one tensor, as published ones of Qwen3.5 are."""
_PUBLISHED = {
    ".e_score_correction.bias": ".e_score_correction_bias",
    ".linear_attn.decay.weight": ".linear_attn.A_log",
    ".linear_attn.dt.bias": ".linear_attn.dt_bias",
    ".self_attn.sinks.weight": ".self_attn.sinks",
    **{f".experts.{one}_proj.weight": f".experts.{one}_proj" for one in ("gate_up", "down")},
    **{f".experts.{one}.weight": ".experts.gate_up_proj" for one in ("gate", "up")},
    **{f".experts.{one}.bias": ".experts.gate_up_proj_bias" for one in ("gate", "up")},
    ".experts.down.weight": ".experts.down_proj",
    ".experts.down.bias": ".experts.down_proj_bias",
}
"""The end of a name as the reader has it -> as it is in the file."""


def rows_of(counts: list[int], groups: int) -> list[np.ndarray]:
    """Of parts with so many rows, which are in one tensor group by group in turn: each part's rows in it."""
    ends = np.cumsum(counts)[:-1] // groups
    return [one.reshape(-1) for one in np.split(np.arange(sum(counts)).reshape(groups, -1), ends, axis=1)]


@dataclass
class _Run:
    """Bytes of the file, from `at` on: one tensor, those of all experts, or an MXFP4 one's blocks and scales.

    kind: a name of `quant.BLOCK_TYPES`; columns: values of a row; parts: canonical name -> its number of rows,
    in turn in each of the groups.
    """

    tensors: list[tuple[str, str, Shape]]  # (name, type, shape)
    kind: str
    columns: int
    parts: dict[str, int]
    groups: int = 1
    at: int = 0

    @property
    def row_bytes(self) -> int:
        return block_type(self.kind).row_bytes(self.columns)

    @property
    def rows(self) -> int:
        return sum(self.parts.values())


def _runs(config: ModelConfig) -> Iterator[_Run]:
    """In file order."""
    names = file_names(config, _TOGETHER)
    cuts = {part: one for one in fused(config, names) for part in one.parts}
    known = dict(shapes(config))
    together: dict[str, list[str]] = {}
    for canonical in known:
        name = names(f"{canonical}_rows" if _turned(canonical) else canonical)
        end = next((end for end in _PUBLISHED if name.endswith(end)), "")
        together.setdefault(name.removesuffix(end) + _PUBLISHED.get(end, ""), []).append(canonical)
    for name, parts in together.items():
        first = known[parts[0]]
        of_experts = parts[0].rpartition(".")[2].startswith("experts_")
        columns = 1 if _is_vector(parts[0], first) else first[-2] if _turned(parts[0]) else first[-1]
        counts = [math.prod(known[part]) // columns for part in parts]
        groups, flat = 1, False
        if len(parts) > 1 and config.architecture == "gpt_oss":
            groups = counts[0]  # rows of gate and up in turn
        elif len(parts) > 1:
            cut = cuts[parts[0].rpartition(".")[2] + "_rows" * _turned(parts[0])]
            groups, flat = cut.groups, cut.flat
        outer = first[:1] if of_experts and not flat else ()
        shape = (*outer, sum(counts) // math.prod(outer), *((columns,) if columns > 1 else ()))
        kind = "F32" if len(first) == 1 or parts[0].endswith(".router") else "F16"
        tensors = [(name, kind, shape)]
        if "{}" in name:
            tensors = [(name.format(expert), kind, shape[1:]) for expert in range(shape[0])]
        elif config.architecture == "gpt_oss" and of_experts and columns > 1:
            kind, blocks = "MXFP4", (*shape[:-1], columns // 32)
            tensors = [(f"{name}_blocks", "U8", (*blocks, 16)), (f"{name}_scales", "U8", blocks)]
        elif parts[0].endswith(".shared_weight"):
            tensors = [(name, kind, (1, *first))]
        elif parts[0].endswith(".delta_conv"):
            tensors = [(name, kind, (first[0], 1, first[1]))]
        yield _Run(tensors, kind, columns, dict(zip(parts, counts, strict=True)), groups)


def _turned(canonical: str) -> bool:
    """Whether the file has the matrices of it transposed."""
    return canonical.endswith(".k_b")


def _is_vector(canonical: str, shape: Shape) -> bool:
    """Also of each expert one."""
    return len(shape) == 1 or canonical.endswith("_bias")


def write_folder(path: Path, config: ModelConfig, values: Iterable[tuple[str, Values]]) -> None:
    """config.json, tokenizer.json and model.safetensors. values: of each canonical name, in any order, its values row
    by row in pieces; a tensor that has several is put together in memory."""
    beside = path.with_name(path.name + ".part")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    write_json(beside / "config.json", document(config))
    write_tokenizer_files(beside, config.vocab_size)
    with (beside / "model.safetensors").open("wb") as file:
        _write_tensors(file, config, values)
    os.replace(beside, path)


def _write_tensors(file: BinaryIO, config: ModelConfig, values: Iterable[tuple[str, Values]]) -> None:
    bytes_of = {"F32": 4, "F16": 2, "U8": 1}
    runs: dict[str, _Run] = {}
    described = []
    at = 0
    for run in _runs(config):
        run.at = at
        for name, kind, shape in run.tensors:
            described.append((name, kind, shape, math.prod(shape) * bytes_of[kind]))
            at += described[-1][3]
        runs |= dict.fromkeys(run.parts, run)
    file.write(safetensors_header(described, {"format": "pt"}))
    start = file.tell()
    known = dict(shapes(config))
    unfinished: dict[int, tuple[np.ndarray, set[str]]] = {}
    for canonical, pieces in values:
        run = runs[canonical]
        if _turned(canonical):
            turned = np.concatenate(list(pieces)).reshape(known[canonical]).swapaxes(1, 2)
            pieces = iter([turned.reshape(-1, run.columns)])
        stored = (quantize(_as_stored(config, canonical, piece).reshape(-1, run.columns), run.kind) for piece in pieces)
        if len(run.parts) == 1 and run.kind != "MXFP4":
            file.seek(start + run.at)
            for part in stored:
                file.write(part.data)
            continue
        empty = np.empty((run.rows, run.row_bytes), np.uint8)
        whole, missing = unfinished.setdefault(run.at, (empty, set(run.parts)))
        rows = dict(zip(run.parts, rows_of(list(run.parts.values()), run.groups), strict=True))[canonical]
        done = 0
        for part in stored:
            whole[rows[done : done + len(part)]] = part
            done += len(part)
        missing.remove(canonical)
        if not missing:
            del unfinished[run.at]
            file.seek(start + run.at)
            for part in _blocks_and_scales(whole) if run.kind == "MXFP4" else (whole,):
                file.write(part.data)


def _as_stored(config: ModelConfig, canonical: str, values: np.ndarray) -> np.ndarray:
    if canonical.endswith(".delta_decay"):
        return np.log(-values)
    norm = canonical.endswith("_norm") and not canonical.endswith(".delta_norm")
    return values - np.float32(1) if norm and FOLDERS[config.architecture].norms_less_one else values


def _blocks_and_scales(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of MXFP4 as the files of gpt-oss have them: the bytes of `blocks` hold elements 2 j and 2 j + 1."""
    every = rows.reshape(-1, 17)
    even, odd = every[:, 1::2], every[:, 2::2]  # elements j in low halves, 16 + j in high ones
    blocks = np.concatenate([(even & 0x0F) | (odd << 4), (even >> 4) | (odd & 0xF0)], axis=1)
    return blocks, np.ascontiguousarray(every[:, 0])


# ---------------------------------------------------------------- config.json


def document(config: ModelConfig) -> dict[str, Any]:
    """config.json."""
    attention = next(layer.attention for layer in config.layers if layer.attention.rope is not None)
    experts = config.layers[-1].ffn
    assert attention.rope is not None and isinstance(experts, ExpertsConfig)
    shared = {
        "architectures": list(FOLDERS[config.architecture].classes),
        "model_type": config.architecture,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads,
        "head_dim": attention.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": attention.rope.theta,
        "tie_word_embeddings": config.tied_embeddings,
        "hidden_act": experts.activation,
        "torch_dtype": "float16",
    }
    return shared | FAMILIES[config.architecture](config, attention, experts)


def _selected(experts: ExpertsConfig) -> dict[str, Any]:
    return {"num_experts_per_tok": experts.router.top_k, "norm_topk_prob": experts.router.normalise}


def _mixtral(config: ModelConfig, attention: Any, experts: ExpertsConfig) -> dict[str, Any]:
    return {
        "num_experts_per_tok": experts.router.top_k,
        "num_local_experts": experts.n_experts,
        "intermediate_size": experts.size,
        "sliding_window": None,
    }


def _olmoe(config: ModelConfig, attention: Any, experts: ExpertsConfig) -> dict[str, Any]:
    return _selected(experts) | {"num_experts": experts.n_experts, "intermediate_size": experts.size}


def _qwen(config: ModelConfig, attention: Any, experts: ExpertsConfig) -> dict[str, Any]:
    return _selected(experts) | {"num_experts": experts.n_experts, "moe_intermediate_size": experts.size}


def _delta(config: ModelConfig, attention: AttentionConfig, experts: ExpertsConfig) -> dict[str, Any]:
    kinds = [layer.attention for layer in config.layers]
    delta = next(kind for kind in kinds if isinstance(kind, DeltaNetConfig))
    assert attention.rope is not None
    return _qwen(config, attention, experts) | {
        "shared_expert_intermediate_size": experts.shared_size,
        "partial_rotary_factor": attention.rope.dim / attention.head_dim,
        "layer_types": ["linear_attention" if isinstance(kind, DeltaNetConfig) else "full_attention" for kind in kinds],
        "linear_num_key_heads": delta.n_key_heads,
        "linear_key_head_dim": delta.key_dim,
        "linear_num_value_heads": delta.n_value_heads,
        "linear_value_head_dim": delta.value_dim,
        "linear_conv_kernel_dim": delta.taps,
    }


def _behind_dense(config: ModelConfig, experts: ExpertsConfig) -> dict[str, Any]:
    dense = [layer.ffn.width for layer in config.layers if layer.ffn.neurons is not None]
    return _selected(experts) | {
        "n_routed_experts": experts.n_experts,
        "moe_intermediate_size": experts.size,
        "n_shared_experts": experts.shared_size // experts.size,
        "first_k_dense_replace": len(dense),
        "intermediate_size": dense[0] if dense else experts.size,
        "routed_scaling_factor": experts.router.scale,
        "n_group": experts.router.groups,
        "topk_group": experts.router.top_groups,
    }


def _glm(config: ModelConfig, attention: AttentionConfig, experts: ExpertsConfig) -> dict[str, Any]:
    assert attention.rope is not None
    return _behind_dense(config, experts) | {
        "partial_rotary_factor": attention.rope.dim / attention.head_dim,
        "attention_bias": attention.qkv_bias,
    }


def _deepseek(config: ModelConfig, attention: LatentAttentionConfig, experts: ExpertsConfig) -> dict[str, Any]:
    second = config.architecture == "deepseek_v2"
    limited = second and experts.router.groups > 1
    rope = attention.rope
    gain = (attention.scale * attention.query_dim**0.5) ** 0.5
    mscale = round((gain - 1) / (0.1 * math.log(rope.factor)), 9)
    return _behind_dense(config, experts) | {
        "num_key_value_heads": attention.n_heads,
        "head_dim": attention.rope_dim,
        "q_lora_rank": attention.q_latents,
        "kv_lora_rank": attention.latents,
        "qk_nope_head_dim": attention.plain_dim,
        "qk_rope_head_dim": attention.rope_dim,
        "v_head_dim": attention.value_dim,
        "scoring_func": experts.router.scoring,
        "topk_method": "group_limited_greedy" if limited else "greedy" if second else "noaux_tc",
        "rope_scaling": _yarn(attention) | {"mscale": mscale, "mscale_all_dim": mscale},
    }


def _yarn(attention: Any) -> dict[str, Any]:
    rope = attention.rope
    return {
        "rope_type": "yarn",
        "factor": rope.factor,
        "original_max_position_embeddings": rope.original_context_length,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "truncate": rope.truncate,
    }


def _gpt_oss(config: ModelConfig, attention: AttentionConfig, experts: ExpertsConfig) -> dict[str, Any]:
    windows = [getattr(layer.attention, "window", None) for layer in config.layers]
    return {
        "hidden_act": "silu",
        "num_experts_per_tok": experts.router.top_k,
        "num_local_experts": experts.n_experts,
        "intermediate_size": experts.size,
        "attention_bias": attention.qkv_bias,
        "swiglu_limit": 7.0,
        "sliding_window": next((window for window in windows if window is not None), 128),
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in windows],
        "rope_scaling": _yarn(attention),
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        },
    }


def _smallthinker(config: ModelConfig, attention: AttentionConfig, experts: ExpertsConfig) -> dict[str, Any]:
    kinds = [layer.attention for layer in config.layers]
    windows = [getattr(kind, "window", None) for kind in kinds]
    return {
        "moe_num_primary_experts": experts.n_experts,
        "moe_num_active_primary_experts": experts.router.top_k,
        "moe_ffn_hidden_size": experts.size,
        "moe_primary_router_apply_softmax": experts.router.scoring == "softmax",
        "rope_layout": [int(kind.rope is not None) for kind in kinds],
        "sliding_window_layout": [int(window is not None) for window in windows],
        "sliding_window_size": next((window for window in windows if window is not None), 4096),
    }


FAMILIES: dict[str, Callable[[ModelConfig, Any, ExpertsConfig], dict[str, Any]]] = {
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "qwen3_moe": _qwen,
    "glm4_moe": _glm,
    "smallthinker": _smallthinker,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "qwen3_next": _delta,
    "qwen3_5_moe_text": _delta,
    "gpt_oss": _gpt_oss,
}
"""Family, of those that can be written -> its own keys of config.json."""
