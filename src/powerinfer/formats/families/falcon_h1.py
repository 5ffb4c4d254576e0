"""Falcon-H1: attention beside Mamba2 in every layer, and factors of what goes in and out of either (muP)."""

from __future__ import annotations

from dataclasses import replace

from powerinfer.config import FfnConfig, LayerConfig, Mamba2Config, ModelConfig, ParallelConfig, uniform
from powerinfer.formats import layout
from powerinfer.formats.family import LLAMA_NAMES, Folder, Gguf, Tensors
from powerinfer.formats.fields import Fields
from powerinfer.formats.folder_mamba import MAMBA_NAMES, fuse_mamba, read_mamba, rename_mamba
from powerinfer.formats.folder_parts import add_biases, read_activation, read_ffn_size, read_heads
from powerinfer.formats.folder_rope import read_rope
from powerinfer.formats.mapped import shown


def _factor(fields: Fields, key: str) -> float:
    return float(fields.number(key, 1e-6, layout.MAX_SCALE, 1.0))


def _factors(fields: Fields, key: str, count: int) -> list[float]:
    values = fields.get(key, None)
    if values is None:
        return [1.0] * count
    right = type(values) is list and len(values) == count
    if not right or not all(type(one) in (int, float) and 1e-6 <= one <= layout.MAX_SCALE for one in values):
        raise fields.bad(key, f"is {shown(values)}, not {count} factors")
    return list(map(float, values))


def _read_mamba(fields: Fields, d_model: int) -> Mamba2Config:
    fields.only("mamba_proj_bias", False)
    fields.only("projectors_bias", False)
    mamba = read_mamba(
        fields, groups="mamba_n_groups", state="mamba_d_state", taps="mamba_d_conv", bias="mamba_conv_bias"
    )
    expand = fields.integer("mamba_expand", 1, 64, 2)
    if mamba.width != fields.integer("mamba_d_ssm", 1, layout.MAX_WIDTH, expand * d_model):
        raise fields.bad("mamba_d_ssm", f"is not mamba_n_heads times mamba_d_head, {mamba.width}")
    before = fields.flag("mamba_norm_before_gate", True)
    norm = "none" if not fields.flag("mamba_rms_norm", False) else "before" if before else "gated"
    of_input = _factor(fields, "ssm_in_multiplier")
    z, x, b, c, dt = (of_input * one for one in _factors(fields, "ssm_multipliers", 5))
    return replace(mamba, norm=norm, norm_groups=mamba.n_groups, scales=(z, x, b, c, dt))


def _read(family: Folder, fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    """Factors of attention's input are those of its scores and of its result; that of an FFN's gate is one of its
    input, and divides its result."""
    heads = add_biases(family, fields, read_heads(family, fields, config))
    of_input, of_key = _factor(fields, "attention_in_multiplier"), _factor(fields, "key_multiplier")
    if heads.qkv_bias and of_input != 1:
        raise fields.bad("attention_in_multiplier", "is set, which does not go with attention_bias here")
    attention = replace(
        heads, rope=read_rope(family, fields, config, heads), scale=of_input**2 * of_key * heads.head_dim**-0.5
    )
    if heads.qkv_bias and of_key != 1:
        raise fields.bad("key_multiplier", "is set, which does not go with attention_bias here")
    of_output = of_input * _factor(fields, "attention_out_multiplier")
    mixers = ParallelConfig(
        attention, _read_mamba(fields, config.d_model), (of_output, _factor(fields, "ssm_out_multiplier"))
    )
    fields.only("mlp_bias", False)
    of_gate, of_down = _factors(fields, "mlp_multipliers", 2)
    ffn = FfnConfig(read_ffn_size(fields), read_activation(family, fields))
    layer = LayerConfig(mixers, ffn, ffn_factors=(of_gate, of_down / of_gate))
    return replace(
        config,
        layers=uniform(n_layers, layer),
        embedding_scale=_factor(fields, "embedding_multiplier"),
        logit_scale=_factor(fields, "lm_head_multiplier"),
    )


def _rename(stored: Tensors) -> list[str]:
    rename_mamba(stored)
    return []


_NAMES = LLAMA_NAMES.extended(
    {f"mamba_{part}": f"mamba.{name}" for part, name in MAMBA_NAMES.items()}
    | {name: f"feed_forward.{name}_proj" for name in ("gate", "up", "down")}
    | {"ffn_norm": "pre_ff_layernorm"}
)
FOLDERS = (
    Folder(
        "falcon_h1", ("FalconH1ForCausalLM",), _read,
        defaults={
            "vocab_size": 128000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_act": "silu", "rms_norm_eps": 1e-5,
            "max_position_embeddings": 8192, "mamba_d_ssm": 1024, "mamba_n_heads": 128, "mamba_n_groups": 1,
            "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True,
        },
        names=replace(_NAMES, outer=LLAMA_NAMES.outer | {"final_norm": "model.final_layernorm"}),
        fused=fuse_mamba, rename=_rename,
    ),
)  # fmt: skip
GGUFS = (Gguf("falcon-h1", "silu", mamba=True, beside=True),)
