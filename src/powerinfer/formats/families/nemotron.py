"""Nemotron and Minitron."""

from __future__ import annotations

from powerinfer.formats.family import PLAIN, Folder, Gguf

FOLDERS = (
    Folder(
        "nemotron", ("NemotronForCausalLM",), defaults={"hidden_act": "relu2"}, keys={"rms_norm_eps": "norm_eps"},
        kv_heads_stated=True, partial=0.5, gated=False, activations=PLAIN, mlp_bias=True, norm="layer",
        norms_less_one=True,
    ),
)
GGUFS = (Gguf("nemotron", "relu2", gated=False, norm="layer", partial=True),)
