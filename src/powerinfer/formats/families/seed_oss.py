"""Seed-OSS."""

from __future__ import annotations

from powerinfer.formats.family import LLAMA_DEFAULTS, SECOND_NORM, Folder, Gguf

FOLDERS = (
    Folder(
        "seed_oss", ("SeedOssForCausalLM",),
        defaults=LLAMA_DEFAULTS | {
            "vocab_size": 155136, "hidden_size": 4096, "intermediate_size": 27648, "num_hidden_layers": 64,
            "num_attention_heads": 80, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288,
            "attention_bias": True,
        },
        biases=("attention_bias", "attention_out_bias"), mlp_bias=True,
    ),
)  # fmt: skip
GGUFS = (Gguf("seed_oss", "silu", names=SECOND_NORM),)
