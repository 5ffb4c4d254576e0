"""Mistral Small 4: latent attention, whose queries grow with their positions, and experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from powerinfer.config import ExpertsConfig, FfnKind, ModelConfig
from powerinfer.formats import layout
from powerinfer.formats.families.deepseek import LATENT_GGUF, LATENT_NAMES, fuse_latents, read_v3
from powerinfer.formats.families.ministral import default_rope
from powerinfer.formats.family import LLAMA_DEFAULTS, NORMALISED, Folder, Tensors
from powerinfer.formats.fields import Fields
from powerinfer.formats.folder_parts import read_deepseek_experts
from powerinfer.formats.source import Fused, Names, keep_text

_NAMES = LATENT_NAMES.extended(
    {"experts_down": "mlp.experts.down_proj"}
    | dict.fromkeys(("experts_gate", "experts_up"), "mlp.experts.gate_up_proj")
)


def _read(family: Folder, fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    """The share of a head that is rotated may be stated, beside its sizes."""
    plain, rotated = (
        fields.integer(f"qk_{part}_head_dim", 1, layout.MAX_HEAD_DIM) for part in ("nope", "rope")
    )
    return read_v3(replace(family, partial=rotated / (plain + rotated)), fields, config, n_layers)


def _read_experts(family: Folder, fields: Fields, n_layers: int) -> Sequence[FfnKind]:
    """Experts as of DeepSeek-V3, whose scores are a softmax that nothing corrects."""
    ffns = read_deepseek_experts(family, fields, n_layers)
    return [
        replace(ffn, router=replace(ffn.router, scoring="softmax", correction=False))
        if isinstance(ffn, ExpertsConfig)
        else ffn
        for ffn in ffns
    ]


def _rename(stored: Tensors) -> list[str]:
    notes = keep_text(stored)
    for name in [name for name in stored if name.endswith((".experts.gate_up_proj", ".experts.down_proj"))]:
        stored[f"{name}.weight"] = stored.pop(name)
    return notes


def _fused(config: ModelConfig, names: Names) -> list[Fused]:
    together = [Fused(("experts_gate", "experts_up"), ffn.n_experts) for ffn in [*config.experts.values()][:1]]
    return [*fuse_latents(config, names), *together]


FOLDERS = (
    Folder(
        "mistral4", ("Mistral4ForCausalLM",), _read, vision_class="Mistral3ForConditionalGeneration",
        defaults=LLAMA_DEFAULTS | {
            "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
            "num_attention_heads": 32, "max_position_embeddings": 1048576, "first_k_dense_replace": 0,
            "kv_lora_rank": 256, "q_lora_rank": 1024, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64,
            "v_head_dim": 128, "n_routed_experts": 128, "n_shared_experts": 1, "moe_intermediate_size": 2048,
            "num_experts_per_tok": 4, "norm_topk_prob": True, "rope_interleave": True,
            "rope_parameters": default_rope(1e4, 128.0, 8192),
        },
        grown=True, ffns=_read_experts, names=_NAMES, fused=_fused, rename=_rename,
    ),
)  # fmt: skip
GGUFS = (replace(LATENT_GGUF, architecture="mistral4", experts=NORMALISED),)
