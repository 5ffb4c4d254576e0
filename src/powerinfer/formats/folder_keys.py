"""Keys of config.json that a family's reader did not read: those that could change a result are refused, the others
are listed for whoever asks.
"""

from __future__ import annotations

from typing import Any

from powerinfer.formats.fields import Fields

# What asks for nothing, of keys by which some class changes what it computes; null always does.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "router_logit_softcapping", "clip_qkv"), ()),
    **dict.fromkeys(("logit_scale", "logits_scaling", "embedding_multiplier", "residual_multiplier"), (1, 1.0)),
    **dict.fromkeys(("scale_emb", "scale_depth", "partial_rotary_factor"), (1, 1.0)),
    **dict.fromkeys(("attention_multiplier", "query_pre_attn_scalar"), ()),
    **dict.fromkeys(("attention_chunk_size", "swiglu_limit", "swiglu_alpha"), ()),
    **dict.fromkeys(("use_qk_norm", "qk_layernorm", "qk_norm", "alibi", "use_parallel_residual"), (False,)),
    **dict.fromkeys(("add_cross_attention", "is_encoder_decoder", "use_bidirectional_attention", "mlp_bias"), (False,)),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), (0, 1)),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "linear_num_key_heads", "num_kv_shared_layers"), (0,)),
}
# Lists with a value for every layer, and what each may be.
_OF_LAYERS = {
    "layer_types": "full_attention", "no_rope_layers": 1, "attn_type_list": 1, "sliding_window_layout": 0,
}  # fmt: skip


def check_others(fields: Fields) -> None:
    """Refuse a key that was not read and asks for what this family does not do here. ModelError that names it."""
    for key in fields.unread():
        if key in _NEUTRAL:
            fields.only(key, *_NEUTRAL[key])
        values: Any = fields.get(key, None) if key in _OF_LAYERS else None
        if type(values) is list and any(value != _OF_LAYERS[key] for value in values):
            strange = next(value for value in values if value != _OF_LAYERS[key])
            raise fields.bad(key, f"holds {strange!r:.80}, which this family does not have here")


# Keys that say nothing about the results of a model as it is used here: how it was trained, by what it was written,
# which tokens its tokenizer and its generation have.
_INFORMATION = (
    "_name_or_path architectures model_type transformers_version torch_dtype dtype auto_map use_cache pretraining_tp "
    "bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id image_token_id "
    "video_token_id vision_start_token_id vision_end_token_id initializer_range initializer_factor init_std "
    "attention_dropout hidden_dropout dropout activation_dropout embd_pdrop resid_pdrop attn_pdrop layerdrop "
    "residual_dropout classifier_dropout output_attentions output_hidden_states output_router_logits return_dict "
    "router_aux_loss_coef router_z_loss_coef router_jitter_noise aux_loss_alpha seq_aux ep_size moe_aux_loss_coef "
    "id2label label2id problem_type task_specific_params prefix gradient_checkpointing use_return_dict is_decoder "
    "chunk_size_feed_forward torchscript _attn_implementation attn_implementation _flash_attn_2_enabled vision_config "
    "text_config quantization_config language_model_only"
)


def not_read(fields: Fields) -> list[str]:
    """The keys that nothing read, without those that are for information."""
    information = set(_INFORMATION.split())
    return [key for key in fields.unread() if key not in information and fields.peek(key) is not None]
