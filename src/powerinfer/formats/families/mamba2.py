"""Mamba2 alone: layers of one mixer, without FFNs."""

from __future__ import annotations

from dataclasses import replace

from powerinfer.config import LayerConfig, ModelConfig, NoFfn, uniform
from powerinfer.formats.family import Folder, Gguf, Tensors
from powerinfer.formats.fields import Fields
from powerinfer.formats.folder_mamba import MAMBA_NAMES, fuse_mamba, read_mamba, rename_mamba
from powerinfer.formats.source import Names


def _read(family: Folder, fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    mamba = read_mamba(fields, heads="num_heads", head_dim="head_dim", state="state_size")
    mamba = replace(mamba, bias=fields.flag("use_bias"), norm_groups=mamba.n_groups)
    if mamba.width != config.d_model * fields.integer("expand", 1, 64, 2):
        raise fields.bad("num_heads", f"times head_dim is {mamba.width}, not expand times hidden_size")
    return replace(config, layers=uniform(n_layers, LayerConfig(mamba, NoFfn())))


def _rename(stored: Tensors) -> list[str]:
    rename_mamba(stored)
    return []


FOLDERS = (
    Folder(
        "mamba2", ("Mamba2ForCausalLM",), _read,
        defaults={
            "vocab_size": 32768, "hidden_size": 4096, "num_hidden_layers": 64, "num_heads": 128, "head_dim": 64,
            "state_size": 128, "n_groups": 8, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True,
            "hidden_act": "silu", "layer_norm_epsilon": 1e-5, "max_position_embeddings": 1 << 20,
        },
        keys={"rms_norm_eps": "layer_norm_epsilon"},
        names=Names(
            outer={"embed": "backbone.embeddings", "head": "lm_head", "final_norm": "backbone.norm_f"},
            layers="backbone.layers",
            inner={"attn_norm": "norm", **{f"mamba_{part}": f"mixer.{name}" for part, name in MAMBA_NAMES.items()}},
        ),
        fused=fuse_mamba, rename=_rename,
    ),
)  # fmt: skip
GGUFS = (Gguf("mamba2", "silu", mamba=True, unrotated=True),)
