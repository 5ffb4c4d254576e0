"""Muse Glimmer: a normalised embedding, gated attention whose global layers rotate no positions, four norms a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from powerinfer.config import AttentionConfig, ModelConfig
from powerinfer.formats import layout
from powerinfer.formats.family import FOUR_NORMS, Folder, Gguf
from powerinfer.formats.fields import Fields
from powerinfer.formats.folder_parts import add_layers, local_ropes, read_ffn, read_layer_types
from powerinfer.formats.folder_rope import GLOBAL, LOCAL
from powerinfer.formats.source import keep_text


def _read(family: Folder, fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    """The base is that of `rope_parameters` whatever number `layer_rope_theta` has, as in the class."""
    fourth = [not (n_layers - 1 - layer) % 4 for layer in range(n_layers)]  # backwards from the last
    types = read_layer_types(fields, n_layers, default=[GLOBAL if is_fourth else LOCAL for is_fourth in fourth])
    turning = [not is_fourth for is_fourth in fourth]
    if fields.has("layer_rope_theta"):
        turning = [base != 0 for base in fields.numbers("layer_rope_theta", n_layers, 0, layout.MAX_THETA)]
    scale = fields.number("qk_scale_factor", 1e-6, layout.MAX_SCALE)
    attentions = [
        replace(heads, rope=heads.rope if turns else None, scale=scale * heads.head_dim**-0.5)
        for heads, turns in zip(local_ropes(family, fields, config, types, unrotated=False), turning, strict=True)
    ]
    config = add_layers(family, config, _gated(fields, attentions), [read_ffn(family, fields)] * n_layers)
    return replace(
        config,
        out_norm_eps=float(fields.number("post_norm_eps", 1e-12, 0.1)),
        embed_norm=True,
        logit_scale=float(fields.number("output_multiplier", 1e-6, layout.MAX_SCALE)),
        logit_cap=float(fields.number("final_logit_softcapping", 1e-6, layout.MAX_SCALE)),
    )


def _gated(fields: Fields, heads: Sequence[AttentionConfig]) -> list[AttentionConfig]:
    return [attention.gated() for attention in heads]


FOLDERS = (
    Folder(
        "muse_glimmer_text", ("MuseGlimmerForCausalLM",), _read, vision_class="MuseGlimmerForConditionalGeneration",
        defaults={
            "vocab_size": 202048, "hidden_size": 6656, "intermediate_size": 19968, "num_hidden_layers": 52,
            "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "hidden_activation": "silu",
            "max_position_embeddings": 131072, "sliding_window": 2048, "final_logit_softcapping": 20.0,
            "qk_scale_factor": 3.87, "output_multiplier": 0.19611613513818404, "post_norm_eps": 1e-8,
        },
        keys={"hidden_act": "hidden_activation"}, qk_norm="plain", norms="both",
        names=FOUR_NORMS.extended({"q_gate": "self_attn.gate_proj"}), rename=keep_text, norms_less_one=True,
        whole_norms=("final_norm",),
    ),
)  # fmt: skip
GGUFS = (
    Gguf(
        "muse-glimmer", "silu", interleaved=True, norms="both", qk_norm="head", full_every=4, full_unrotated=True,
        scaled_logits=True, logit_cap=0.0, out_norm_eps=1e-8, embed_norm=True, change=_gated,
        names={"q_gate": "attn_gate"},
    ),
)  # fmt: skip
