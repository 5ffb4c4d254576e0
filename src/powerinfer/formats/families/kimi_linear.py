"""Kimi Linear: Kimi Delta Attention beside latent attention that rotates nothing, and experts as of DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from powerinfer.config import AttentionKind, ChannelDeltaConfig, LatentAttentionConfig, ModelConfig
from powerinfer.formats import layout
from powerinfer.formats.families.deepseek import LATENT_GGUF, LATENT_NAMES, fuse_latents, read_v3
from powerinfer.formats.family import LLAMA_DEFAULTS, SIGMOIDS, Folder, Tensors
from powerinfer.formats.fields import Fields
from powerinfer.formats.folder_parts import read_deepseek_experts, read_layer_types, read_mixed_activation
from powerinfer.formats.folder_rope import GLOBAL
from powerinfer.formats.mapped import shown
from powerinfer.formats.tensors import RawTensor

_LINEAR = "linear_attention"
_OF_LINEAR = {
    "head_dim": ("linear_head_dim", layout.MAX_HEAD_DIM), "num_heads": ("linear_num_heads", layout.MAX_HEADS),
    "short_conv_kernel_size": ("linear_conv_kernel_dim", layout.MAX_HEAD_DIM),
}  # fmt: skip
"""Keys of `linear_attn_config`: what `transformers` calls them, and the largest number."""


def _read(family: Folder, fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    fields.only("mla_use_nope", True)
    fields.only("mla_use_output_gate", False)
    fields.only("moe_router_activation_func", "sigmoid")
    linear: Any = fields.get("linear_attn_config", {})
    if type(linear) is not dict:
        raise fields.bad("linear_attn_config", f"is {shown(linear)}, not an object")
    inner = Fields(linear, f"{fields.source}: linear_attn_config")
    inner.only("gate_lower_bound")  # Kimi K3's, as the next
    inner.only("use_full_rank_gate", False)
    dim, heads, taps = (
        inner.integer(key, 1, high, fields.integer(other, 1, high)) for key, (other, high) in _OF_LINEAR.items()
    )
    config = read_v3(family, fields, config, n_layers)
    delta = ChannelDeltaConfig(heads, dim, heads, dim, taps, activation=read_mixed_activation(fields))
    types = _read_types(fields, inner, n_layers)
    fields.notes += [f"{shown(key)[1:-1]} of linear_attn_config is not read" for key in inner.unread()]
    layers = []
    for layer, kind in zip(config.layers, types, strict=True):
        latent = layer.attention
        assert isinstance(latent, LatentAttentionConfig)
        attention: AttentionKind = delta if kind == _LINEAR else replace(latent, rope=None)
        layers.append(replace(layer, attention=attention))
    return replace(config, layers=tuple(layers))


def _read_types(fields: Fields, linear: Fields, n_layers: int) -> Sequence[str]:
    """The kind of each layer, stated or by the numbers, from 1, of those with either."""
    numbers: list[Any] = [linear.get(key, None) for key in ("full_attn_layers", "kda_layers")]
    if fields.has("layer_types"):
        return read_layer_types(fields, n_layers, other=_LINEAR)
    if None in numbers:
        return [GLOBAL if layer and layer % 4 == 0 else _LINEAR for layer in range(n_layers)]
    full, kda = ([] if type(listed) is not list else listed for listed in numbers)
    if sorted([*full, *kda], key=repr) != sorted(range(1, n_layers + 1), key=repr):
        raise fields.bad("linear_attn_config", f"does not name each of {n_layers} layers once")
    return [GLOBAL if layer in full else _LINEAR for layer in range(1, n_layers + 1)]


def _rename(stored: Tensors) -> list[str]:
    """Names of a dense FFN as elsewhere; vectors that files keep in four dimensions."""
    for name in list(stored):
        new = name.replace(".block_sparse_moe.", ".mlp.")
        new = new.replace(".self_attn.A_log", ".self_attn.decay.weight").replace(".dt_bias", ".dt.bias")
        tensor = stored.pop(name)
        if new.endswith((".decay.weight", ".dt.bias")) and isinstance(tensor, RawTensor):
            tensor = replace(tensor, shape=(tensor.size,))
        stored[new] = tensor
    return []


_NAMES = LATENT_NAMES.extended(
    {f"experts_{part}": f"mlp.experts.{{}}.{own}" for part, own in (("gate", "w1"), ("up", "w3"), ("down", "w2"))}
    | {f"delta_{part}": f"self_attn.{part}_proj" for part in ("q", "k", "v", "f_a", "f_b", "g_a", "g_b", "b", "o")}
    | {f"delta_{part}_conv": f"self_attn.{part}_conv1d" for part in "qkv"}
    | {"delta_decay": "self_attn.decay", "delta_dt": "self_attn.dt", "delta_norm": "self_attn.o_norm"}
)

FOLDERS = (
    Folder(
        "kimi_linear", ("KimiLinearForCausalLM",), _read, replaces_code=True,
        defaults=LLAMA_DEFAULTS | {
            "vocab_size": 163840, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 27,
            "num_attention_heads": 32, "rms_norm_eps": 1e-5, "max_position_embeddings": 1048576,
            "first_k_dense_replace": 1, "n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 1024,
            "norm_topk_prob": True, "num_experts_per_tok": 8, "routed_scaling_factor": 2.446, "linear_head_dim": 128,
            "linear_num_heads": 32, "linear_conv_kernel_dim": 4,
        },
        other_keys={
            "num_experts": "n_routed_experts", "num_local_experts": "n_routed_experts", "num_expert_group": "n_group",
            "num_experts_per_token": "num_experts_per_tok", "num_shared_experts": "n_shared_experts",
            "moe_renormalize": "norm_topk_prob", "model_max_length": "max_position_embeddings",
        },
        mixed_act=True, ffns=read_deepseek_experts, names=_NAMES, fused=fuse_latents, rename=_rename,
    ),
)  # fmt: skip
GGUFS = (
    replace(
        LATENT_GGUF, architecture="kimi-linear", experts=SIGMOIDS, growth=None, unrotated=True, channel_delta=True,
        names={f"delta_{part}": f"attn_{part}" for part in "qkv"} | {"delta_o": "attn_output"},
    ),
)  # fmt: skip
