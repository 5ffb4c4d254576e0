"""nanochat, whose norms have no weights."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from powerinfer.config import ModelConfig
from powerinfer.errors import ModelError
from powerinfer.formats import layout
from powerinfer.formats.family import LLAMA_NAMES, PLAIN, Folder, Tensors
from powerinfer.formats.fields import Fields
from powerinfer.formats.folder_parts import plain_norms, read_plain
from powerinfer.formats.quant import Bytes, Float32
from powerinfer.formats.tensors import MadeTensor, RawTensor
from powerinfer.formats.weight_types import FLOAT_TYPES


def _read(family: Folder, fields: Fields, config: ModelConfig, n_layers: int) -> ModelConfig:
    fields.only("attention_bias", False)
    fields.only("tie_word_embeddings", False)  # the embedding is normalised
    cap = fields.number("final_logit_softcapping", 1e-6, layout.MAX_SCALE, None)
    return replace(read_plain(family, fields, config, n_layers), logit_cap=cap)


def _make(config: ModelConfig, stored: Tensors, source: str) -> dict[str, MadeTensor]:
    """Norms; the embedding, which is normalised before the layers; queries and keys, whose halves are rotated the other
    way round, with these exchanged."""
    tensors = plain_norms(config)

    def take(name: str, rows: int) -> RawTensor:
        tensor = stored.pop(f"model.{name}.weight", None)
        shape = (rows, config.d_model)
        if not isinstance(tensor, RawTensor) or tensor.type not in FLOAT_TYPES or tensor.shape != shape:
            raise ModelError(f"{source}: tensor model.{name}.weight is missing, or of another type or shape")
        return tensor

    embed = take("embed_tokens", config.vocab_size)
    tensors["embed"] = MadeTensor("F32", embed.shape, (embed,), partial(_normalised, embed, config.norm_eps))
    for at, layer in enumerate(config.layers):
        heads = layer.heads
        for part, n in (("q", heads.n_heads), ("k", heads.n_kv_heads)):
            tensor = take(f"layers.{at}.self_attn.{part}_proj", n * heads.head_dim)
            tensors[f"layers.{at}.{part}"] = MadeTensor(tensor.type, tensor.shape, (tensor,), partial(_exchanged, n))
    return tensors


def _normalised(tensor: RawTensor, eps: float, data: Bytes) -> Bytes:
    rows: Float32 = replace(tensor, data=data).float32()
    of_squares = np.mean(np.square(rows, dtype=np.float64), axis=1, keepdims=True)
    weights: Float32 = (rows / np.sqrt(of_squares + eps)).astype("<f4")
    return weights.view(np.uint8).reshape(-1)


def _exchanged(heads: int, data: Bytes) -> Bytes:
    """The halves of each head."""
    return np.ascontiguousarray(data.reshape(heads, 2, -1)[:, ::-1]).reshape(-1)


FOLDERS = (
    Folder(
        "nanochat", ("NanoChatForCausalLM",), _read,
        defaults={
            "vocab_size": 50304, "hidden_size": 768, "intermediate_size": 8192, "num_hidden_layers": 12,
            "num_attention_heads": 6, "max_position_embeddings": 2048, "hidden_act": "relu2", "rms_norm_eps": 1e-6,
            "final_logit_softcapping": 15.0,
        },
        biases=(None, None), qk_norm="plain", gated=False, activations=PLAIN,
        names=LLAMA_NAMES.extended({"up": "mlp.fc1", "down": "mlp.fc2"}), make=_make,
    ),
)  # fmt: skip
