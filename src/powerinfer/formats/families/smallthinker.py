"""SmallThinker: layers may lack a window, and rotated positions; a router reads what its layer does."""

from __future__ import annotations

from dataclasses import replace

from powerinfer.config import ExpertsConfig, ModelConfig, RouterConfig
from powerinfer.formats import layout
from powerinfer.formats.family import LLAMA_NAMES, SIGMOIDS, Folder, Gguf
from powerinfer.formats.fields import Fields
from powerinfer.formats.folder_parts import add_layers, read_activation, read_heads, read_switches
from powerinfer.formats.folder_rope import read_rope


def _read(family: Folder, fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    fields.only("moe_enable_early_router", True)
    fields.only("moe_enable_secondary_experts", False)
    if 0 in read_switches(fields, "moe_layer_layout", n_layers, 1):
        raise fields.bad("moe_layer_layout", "holds layers without experts, which are not supported")
    heads = read_heads(family, fields, config)
    rope = read_rope(family, fields, config, heads)
    size = fields.integer("sliding_window_size", 1, layout.MAX_CONTEXT)
    n_experts = fields.integer("moe_num_primary_experts", 1, layout.MAX_EXPERTS)
    scoring = "softmax" if fields.flag("moe_primary_router_apply_softmax", False) else "sigmoid"
    experts = ExpertsConfig(
        n_experts,
        fields.integer("moe_ffn_hidden_size", 1, layout.MAX_WIDTH),
        RouterConfig(fields.integer("moe_num_active_primary_experts", 1, n_experts), scoring),
        read_activation(family, fields),
        early_router=True,
    )
    rotated = read_switches(fields, "rope_layout", n_layers, 1)
    windows = read_switches(fields, "sliding_window_layout", n_layers, 0)
    attentions = [
        replace(heads, rope=rope if turns else None, window=size if slides else None)
        for turns, slides in zip(rotated, windows, strict=True)
    ]
    return add_layers(family, config, attentions, [experts] * n_layers)


FOLDERS = (
    Folder(
        "smallthinker", ("SmallThinkerForCausalLM",), _read, replaces_code=True,
        defaults={
            "num_hidden_layers": 32, "hidden_size": 1536, "vocab_size": 151936, "rms_norm_eps": 1e-6,
            "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072,
            "sliding_window_size": 4096, "moe_num_primary_experts": 32, "moe_ffn_hidden_size": 768,
            "moe_num_active_primary_experts": 4, "tie_word_embeddings": True, "hidden_act": "relu",
        },
        theta=1e6, activations={"relu": "relu"},
        names=LLAMA_NAMES.extended(
            {"router": "block_sparse_moe.primary_router"}
            | {f"experts_{part}": f"block_sparse_moe.experts.{{}}.{part}" for part in ("gate", "up", "down")}
        ),
    ),
)  # fmt: skip
GGUFS = (Gguf("smallthinker", "relu", full_every=4, full_first=True, experts=SIGMOIDS, early_router=True),)
