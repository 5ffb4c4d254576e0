"""PLM: latent attention, and FFNs of squared ReLU without a gate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from powerinfer.config import FfnKind, ModelConfig
from powerinfer.formats.families.deepseek import LATENT_GGUF, LATENT_NAMES, fuse_latents, read_v3
from powerinfer.formats.family import PLAIN, Folder
from powerinfer.formats.fields import Fields
from powerinfer.formats.folder_parts import read_ffn


def _read(family: Folder, fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    config = read_v3(family, fields, config, n_layers)
    if any(rope.scaling is not None for rope in config.ropes):
        raise fields.bad("rope_scaling", "is set, which this family does not have here")
    return config


def _read_ffns(family: Folder, fields: Fields, n_layers: int) -> Sequence[FfnKind]:
    return [read_ffn(family, fields)] * n_layers


FOLDERS = (
    Folder(
        "plm", ("PLMForCausalLM",), _read, replaces_code=True,
        defaults={
            "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 32,
            "num_attention_heads": 16, "hidden_act": "relu2", "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True, "rope_interleave": True,
        },
        theta=1e5, gated=False, activations=PLAIN, ffns=_read_ffns, names=LATENT_NAMES, fused=fuse_latents,
    ),
)  # fmt: skip
GGUFS = (replace(LATENT_GGUF, architecture="plm", activation="relu2", gated=False, experts=None, growth=None),)
