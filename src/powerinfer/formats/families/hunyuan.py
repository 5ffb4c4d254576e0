"""Hunyuan, dense and with experts (A13B): queries and keys are rotated before they are normalised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from powerinfer.config import ExpertsConfig, FfnKind, ModelConfig, RouterConfig
from powerinfer.formats import layout
from powerinfer.formats.family import EXPERTS_NAMES, NORMALISED, Folder, Gguf
from powerinfer.formats.fields import Fields
from powerinfer.formats.folder_parts import read_activation, read_ffn_size, read_plain


def _read(family: Folder, fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    for key in ("use_cla", "use_mla", "mlp_bias", "position_embedding_xdrope"):
        fields.only(key, False)
    fields.only("use_qk_norm", True)
    return read_plain(family, fields, config, n_layers)


def _read_experts(family: Folder, fields: Fields, n_layers: int) -> Sequence[FfnKind]:
    """Experts in all layers beside a shared one of their size, as the class has them."""
    size = read_ffn_size(fields)
    if fields.integer("moe_intermediate_size", 1, layout.MAX_WIDTH, size) != size:
        raise fields.bad("moe_intermediate_size", f"is not intermediate_size, {size}")
    if fields.integer("num_shared_expert", 0, layout.MAX_EXPERTS, 1) != 1:
        raise fields.bad("num_shared_expert", "is not 1")
    fields.only("moe_layer_num_skipped", 0)
    n_experts = fields.integer("num_experts", 1, layout.MAX_EXPERTS)
    router = RouterConfig(fields.integer("moe_topk", 1, n_experts))
    return [ExpertsConfig(n_experts, size, router, read_activation(family, fields), shared_size=size)] * n_layers


_NAMES = EXPERTS_NAMES.extended(
    {"q_norm": "self_attn.query_layernorm", "k_norm": "self_attn.key_layernorm", "router": "mlp.gate.wg"}
    | {f"shared_{part}": f"mlp.shared_mlp.{part}_proj" for part in ("gate", "up", "down")}
)
_DENSE = Folder(
    "hunyuan_v1_dense", ("HunYuanDenseV1ForCausalLM",), _read, replaces_code=True,
    defaults={
        "vocab_size": 290943, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "max_position_embeddings": 2048, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    },
    stretched=True, qk_norm="rotated", names=_NAMES,
)  # fmt: skip
_EXPERTS = replace(
    _DENSE, model_type="hunyuan_v1_moe", classes=("HunYuanMoEV1ForCausalLM",), ffns=_read_experts,
    defaults={**_DENSE.defaults, "num_experts": 1, "moe_topk": 1},
)  # fmt: skip

FOLDERS = (_DENSE, _EXPERTS)
GGUFS = (
    Gguf("hunyuan-dense", "silu", qk_norm="rotated"),
    Gguf("hunyuan-moe", "silu", qk_norm="rotated", experts=NORMALISED),
)
