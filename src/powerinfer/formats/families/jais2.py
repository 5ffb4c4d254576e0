"""Jais 2."""

from __future__ import annotations

from powerinfer.formats.family import PLAIN, Folder, Gguf

FOLDERS = (
    Folder(
        "jais2", ("Jais2ForCausalLM",),
        defaults={
            "vocab_size": 150272, "hidden_size": 3328, "intermediate_size": 26624, "num_hidden_layers": 32,
            "num_attention_heads": 26, "max_position_embeddings": 8192, "hidden_act": "relu2", "attention_bias": True,
            "mlp_bias": True,
        },
        keys={"rms_norm_eps": "layer_norm_eps"}, gated=False, activations=PLAIN, mlp_bias=True, norm="layer",
    ),
)  # fmt: skip
GGUFS = (Gguf("jais2", "relu2", gated=False, norm="layer"),)
