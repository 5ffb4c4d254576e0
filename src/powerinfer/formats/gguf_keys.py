"""Keys that files of every architecture may have because their writer puts them there: the base classes of llama.cpp's
converter, today's and those of 2023, and Ollama's. None asks for anything beyond what other keys and the tensors say:
a value must be neutral, or repeat what they say, or the key is about something that this engine does not do.
"""

from __future__ import annotations

from powerinfer.config import AttentionConfig, ExpertsConfig, ModelConfig
from powerinfer.formats.fields import Fields
from powerinfer.formats.mapped import shown

_WITHOUT_EFFECT = (
    "tensor_data_layout",  # how the converter read the weights
    "use_parallel_residual",  # of GPT-NeoX alone; Falcon's is read before
    "max_position_embeddings",  # the context again, in Ollama's files of Command R7B
    "image_token_index", "image_token_id", "vision_start_token_id", "vision_end_token_id", "spatial_merge_size",
    # of a picture's positions: in a text they are all the same
    "mrope_sections", "rope.dimension_sections", "rope.mrope_interleaved", "rope.mrope_section", "rope.mrope_sections",
)  # fmt: skip
_OF_OTHERS = ("vision.", "audio.", "mm.", "split.")  # what reads pictures and sound, and the parts of a file
_NEUTRAL = {
    **dict.fromkeys(("nextn_predict_layers", "pooling_type", "expert_shared_count"), (0,)),
    **dict.fromkeys(("attention.clamp_kqv", "attention.max_alibi_bias"), (0, 0.0)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), (0, 0.0)),
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale"), (0, 0.0, 1, 1.0)),
    "attention.scale": (0, 0.0),
    **dict.fromkeys(("expert_group_count", "expert_group_used_count", "expert_gating_func"), (0, 1)),
    **dict.fromkeys(("leading_dense_block_count", "attention.shared_kv_layers"), (0,)),
    "embedding_length_per_layer_input": (0,),
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "expert_used_count": (0,),
}
_OF_EXPERTS = ("expert_feed_forward_length", "expert_shared_feed_forward_length")  # where there are none
_OF_STATES = "ssm."  # where no layer has one: Granite 4 without Mamba2
_EPSILONS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", "attention.group_norm_epsilon")


def check_others(fields: Fields, config: ModelConfig) -> list[str]:
    """Refuse every key of the architecture that was not read, unless it is one of these. ModelError that names it.

    What is returned are the keys that nothing reads, because they have no effect.
    """
    for key, values in {**_NEUTRAL, **_restated(config)}.items():
        if not fields.was_read(key):
            fields.only(key, *values)
    without_effect = _WITHOUT_EFFECT if config.experts else (*_WITHOUT_EFFECT, *_OF_EXPERTS)
    of_others = _OF_OTHERS if config.states else (*_OF_OTHERS, _OF_STATES)
    unused = []
    for key in fields.unread():
        if key in _EPSILONS:  # of the kind of norm that the architecture does not have
            fields.number(key, 0, 1, None)
        elif not (key in without_effect or key.startswith(of_others)):
            raise fields.bad(shown(key)[1:-1], "is set, and this engine does not know what it means")
        unused.append(key)
    return unused


def _restated(config: ModelConfig) -> dict[str, tuple[object, ...]]:
    """Keys that say again what others do, and what they may say."""
    heads = {layer.attention.head_dim for layer in config.layers if isinstance(layer.attention, AttentionConfig)}
    head_dim = tuple(heads) if len(heads) == 1 else ()
    dims, bases = {rope.dim for rope in config.ropes}, {rope.theta for rope in config.ropes}
    normalise = {layer.ffn.router.normalise for layer in config.layers if isinstance(layer.ffn, ExpertsConfig)}
    return {
        **dict.fromkeys(("attention.head_dim", "attention.key_length_swa", "attention.value_length_swa"), head_dim),
        "rope.dimension_count_swa": tuple(dims) if len(dims) == 1 else (),
        **dict.fromkeys(("rope.freq_base_swa", "rope.local.freq_base"), tuple(bases) if len(bases) == 1 else ()),
        "norm_top_k_prob": tuple(normalise) or (True, False),
    }
