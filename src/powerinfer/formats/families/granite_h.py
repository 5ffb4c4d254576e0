"""Granite 4 H: Mamba2 in most layers, attention in some, and FFNs or experts behind each."""

from __future__ import annotations

from dataclasses import replace

from powerinfer.config import AttentionKind, ExpertsConfig, FfnConfig, FfnKind, ModelConfig
from powerinfer.formats import layout
from powerinfer.formats.families import granite
from powerinfer.formats.family import LLAMA_DEFAULTS, NORMALISED, Folder, Gguf, Tensors
from powerinfer.formats.fields import Fields
from powerinfer.formats.folder_mamba import MAMBA_NAMES, fuse_mamba, read_mamba, rename_mamba
from powerinfer.formats.folder_parts import add_biases, add_layers, read_activation, read_heads
from powerinfer.formats.folder_rope import read_rope
from powerinfer.formats.mapped import shown
from powerinfer.formats.source import Fused, Names

_MAMBA, _ATTENTION = ("linear_attention", "mamba"), ("full_attention", "attention")


def _read(family: Folder, fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    fields.only("mamba_proj_bias", False)
    mamba = read_mamba(
        fields, groups="mamba_n_groups", state="mamba_d_state", taps="mamba_d_conv", bias="mamba_conv_bias"
    )
    mamba = replace(mamba, norm_groups=mamba.n_groups)
    if mamba.width != config.d_model * fields.integer("mamba_expand", 1, 64, 2):
        raise fields.bad("mamba_n_heads", f"times mamba_d_head is {mamba.width}, not mamba_expand times hidden_size")
    heads = add_biases(family, fields, read_heads(family, fields, config))
    rope, kind = read_rope(family, fields, config, heads), fields.text("position_embedding_type", "nope")
    if kind not in ("nope", "rope"):
        raise fields.bad("position_embedding_type", f"is {shown(kind)}; only rope and nope are supported")
    scale = granite.read_factor(fields, "attention_multiplier")
    attention = replace(heads, rope=rope if kind == "rope" else None, scale=scale)
    kinds: dict[str, AttentionKind] = dict.fromkeys(_MAMBA, mamba) | dict.fromkeys(_ATTENTION, attention)
    types = fields.get("layer_types", None)
    if types is None:
        types = [_MAMBA[0]] * n_layers
    if type(types) is not list or len(types) != n_layers or not all(type(one) is str and one in kinds for one in types):
        raise fields.bad("layer_types", f"is {shown(types)}, not one of {', '.join(kinds)} for every layer")
    config = add_layers(family, config, [kinds[one] for one in types], [_read_ffn(family, fields)] * n_layers)
    return granite.scale_sums(fields, config)


def _read_ffn(family: Folder, fields: Fields) -> FfnKind:
    if fields.integer("num_local_experts", 0, layout.MAX_EXPERTS):
        return granite.read_shared_experts(family, fields, 1)[0]
    fields.get("intermediate_size", None)  # of the experts that the model does not have
    return FfnConfig(fields.integer("shared_intermediate_size", 1, layout.MAX_WIDTH), read_activation(family, fields))


def _fused(config: ModelConfig, names: Names) -> list[Fused]:
    experts = isinstance(config.layers[0].ffn, ExpertsConfig)
    ffns = granite.fuse_experts(config, names) if experts else [Fused(("gate", "up"))]
    return [*ffns, *fuse_mamba(config, names)]


def _rename(stored: Tensors) -> list[str]:
    rename_mamba(stored)
    return []


FOLDERS = (
    Folder(
        "granitemoehybrid", ("GraniteMoeHybridForCausalLM",), _read,
        defaults=LLAMA_DEFAULTS | {
            "max_position_embeddings": 2048, "num_local_experts": 8, "num_experts_per_tok": 2,
            "shared_intermediate_size": 1024, "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256,
            "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True,
        },
        names=granite.EXPERTS_NAMES.extended(
            {f"mamba_{part}": f"mamba.{name}" for part, name in MAMBA_NAMES.items()}
            | dict.fromkeys(("gate", "up"), "shared_mlp.input_linear")
            | {"down": "shared_mlp.output_linear"}
        ),
        fused=_fused, rename=_rename,
    ),
)  # fmt: skip
GGUFS = (Gguf("granitehybrid", "silu", interleaved=True, scales=True, experts=NORMALISED, mamba=True),)
