"""Arcee's AFM."""

from __future__ import annotations

from powerinfer.formats.family import PLAIN, Folder, Gguf

FOLDERS = (
    Folder(
        "arcee", ("ArceeForCausalLM",), replaces_code=True,
        defaults={
            "hidden_size": 2560, "intermediate_size": 18432, "num_hidden_layers": 32, "num_attention_heads": 32,
            "vocab_size": 32000, "max_position_embeddings": 4096, "hidden_act": "relu2",
        },
        gated=False, activations=PLAIN, mlp_bias=True,
    ),
)  # fmt: skip
GGUFS = (Gguf("arcee", "relu2", gated=False, interleaved=True),)
