"""Phi-3 and Phi-4."""

from __future__ import annotations

from powerinfer.formats.family import LLAMA_NAMES, Folder, Gguf
from powerinfer.formats.folder_parts import read_window
from powerinfer.formats.source import Fused

FOLDERS = (
    Folder(
        "phi3", ("Phi3ForCausalLM",),
        defaults={
            "vocab_size": 32064, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096,
            "hidden_act": "silu",
        },
        partial=1.0, biases=(None, None), windows=read_window,
        names=LLAMA_NAMES.extended(
            dict.fromkeys("qkv", "self_attn.qkv_proj") | dict.fromkeys(("gate", "up"), "mlp.gate_up_proj")
        ),
        fused=(Fused(("q", "k", "v")), Fused(("gate", "up"))),
    ),
)  # fmt: skip
GGUFS = (Gguf("phi3", "silu", partial=True, fused=(Fused(("gate", "up")),)),)
