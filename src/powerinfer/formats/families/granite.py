"""Granite, dense, with experts, and with a shared one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from powerinfer.config import ExpertsConfig, FfnKind, ModelConfig
from powerinfer.formats import layout
from powerinfer.formats.family import LLAMA_DEFAULTS, LLAMA_NAMES, NORMALISED, Folder, Gguf
from powerinfer.formats.fields import Fields
from powerinfer.formats.folder_parts import change_attention, read_experts, read_local_experts, read_plain
from powerinfer.formats.source import Fused, Names


def _read(family: Folder, fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    def factor(key: str) -> float:
        return float(fields.number(key, 1e-6, layout.MAX_SCALE, 1.0))

    config = change_attention(read_plain(family, fields, config, n_layers), scale=factor("attention_multiplier"))
    return replace(
        config,
        embedding_scale=factor("embedding_multiplier"),
        residual_scale=factor("residual_multiplier"),
        logit_scale=1 / factor("logits_scaling"),
    )


def _read_shared_experts(family: Folder, fields: Fields, n_layers: int) -> Sequence[FfnKind]:
    experts = read_experts(family, fields, "num_local_experts", "intermediate_size")
    size = fields.integer("shared_intermediate_size", 0, layout.MAX_WIDTH, 0)
    return [replace(experts, shared_size=size)] * n_layers


def _fused(config: ModelConfig, names: Names) -> list[Fused]:
    experts = config.layers[0].ffn
    assert isinstance(experts, ExpertsConfig)
    return [Fused(("experts_gate", "experts_up"), experts.n_experts), Fused(("shared_gate", "shared_up"))]


_DENSE = Folder("granite", ("GraniteForCausalLM",), _read, defaults=LLAMA_DEFAULTS, mlp_bias=True)
_EXPERTS = replace(
    _DENSE, model_type="granitemoe", classes=("GraniteMoeForCausalLM",),
    defaults=LLAMA_DEFAULTS | {"max_position_embeddings": 2048, "num_local_experts": 8, "num_experts_per_tok": 2},
    ffns=read_local_experts,
    names=LLAMA_NAMES.extended(
        {"router": "block_sparse_moe.router.layer"}
        | {
            f"{experts}_{part}": f"{block}.{matrix}_linear"
            for experts, block in (("experts", "block_sparse_moe"), ("shared", "shared_mlp"))
            for part, matrix in (("gate", "input"), ("up", "input"), ("down", "output"))
        }
    ),
    fused=_fused,
)
_SHARED = replace(
    _EXPERTS, model_type="granitemoeshared", classes=("GraniteMoeSharedForCausalLM",), ffns=_read_shared_experts
)

FOLDERS = (_DENSE, _EXPERTS, _SHARED)
GGUFS = (
    Gguf("granite", "silu", interleaved=True, scales=True),
    Gguf("granitemoe", "silu", interleaved=True, scales=True, experts=NORMALISED),
)
