"""OpenELM: layers of several sizes (arXiv 2404.14619), which the published files state one by one."""

from __future__ import annotations

from powerinfer.config import AttentionConfig, FfnConfig, ModelConfig, RopeConfig
from powerinfer.formats import layout
from powerinfer.formats.family import Folder, Gguf
from powerinfer.formats.fields import Fields
from powerinfer.formats.folder_parts import add_layers, read_activation
from powerinfer.formats.mapped import shown
from powerinfer.formats.source import Fused, Names


def _read(family: Folder, fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    fields.only("ffn_with_glu", True)
    fields.only("normalization_layer_name", "rms_norm")
    dim = fields.integer("head_dim", 2, layout.MAX_HEAD_DIM)
    rope = RopeConfig(fields.number("rope_freq_constant", 1.0001, layout.MAX_THETA, 10000.0), dim)
    qk_norm = "head" if fields.flag("normalize_qk_projections", False) else None
    activation = read_activation(family, fields)
    divisor = fields.integer("ffn_dim_divisor", 1, layout.MAX_WIDTH)
    heads, kv_heads = (
        fields.integers(key, n_layers, 1, layout.MAX_HEADS) for key in ("num_query_heads", "num_kv_heads")
    )
    shares = fields.get("ffn_multipliers", None)
    if type(shares) is not list or len(shares) != n_layers or not all(type(one) in (int, float) for one in shares):
        raise fields.bad("ffn_multipliers", f"is {shown(shares)}, not a number for every layer")
    sizes = [_divisible(share * config.d_model, divisor) for share in shares if 0 < share < layout.MAX_WIDTH]
    if len(sizes) != n_layers or max(sizes) > layout.MAX_WIDTH:
        raise fields.bad("ffn_multipliers", f"is {shown(shares)}, which are no sizes of FFNs")
    attentions = [
        AttentionConfig(n, kv, dim, rope, qk_norm=qk_norm) for n, kv in zip(heads, kv_heads, strict=True)
    ]
    return add_layers(family, config, attentions, [FfnConfig(size, activation) for size in sizes])


def _divisible(size: float, divisor: int) -> int:
    """The multiple of `divisor` nearest to `size`, at least one; the next one if it is more than a tenth below."""
    nearest = max(divisor, int(size + divisor / 2) // divisor * divisor)
    return nearest + divisor * (nearest < 0.9 * size)


FOLDERS = (
    Folder(
        "openelm", ("OpenELMForCausalLM",), _read, replaces_code=True,
        defaults={
            "vocab_size": 32000, "max_context_length": 2048, "model_dim": 2048, "num_transformer_layers": 12,
            "head_dim": 128, "ffn_dim_divisor": 256, "activation_fn_name": "swish", "rms_norm_eps": 1e-6,
        },
        keys={
            "hidden_size": "model_dim", "num_hidden_layers": "num_transformer_layers",
            "max_position_embeddings": "max_context_length", "tie_word_embeddings": "share_input_output_layers",
            "hidden_act": "activation_fn_name",
        },
        names=Names(
            outer={
                "embed": "transformer.token_embeddings", "head": "transformer.classifier",
                "final_norm": "transformer.norm",
            },
            layers="transformer.layers",
            inner={
                "attn_norm": "attn_norm", "ffn_norm": "ffn_norm", **dict.fromkeys("qkv", "attn.qkv_proj"),
                "o": "attn.out_proj", "q_norm": "attn.q_norm", "k_norm": "attn.k_norm",
                **dict.fromkeys(("gate", "up"), "ffn.proj_1"), "down": "ffn.proj_2", "threshold": "ffn.threshold",
                "product_threshold": "ffn.product_threshold",
            },
        ),
        fused=(Fused(("q", "k", "v")), Fused(("gate", "up"))),
    ),
)  # fmt: skip
GGUFS = (Gguf("openelm", "silu", qk_norm="head"),)
