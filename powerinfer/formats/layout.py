"""What a model of a given configuration consists of: canonical tensor names and shapes, and the limits of the sizes."""

from __future__ import annotations

from collections.abc import Iterator

from powerinfer.config import ModelConfig
from powerinfer.errors import ModelError

# Beyond every model there is; they keep the arithmetic of absurd files small.
MAX_LAYERS = 1 << 12
MAX_WIDTH = 1 << 20
MAX_HEADS = 1 << 14
MAX_HEAD_DIM = 1 << 12
MAX_VOCAB = 1 << 24
MAX_CONTEXT = 1 << 24
MAX_THETA = 1e15
MAX_SCALE = 1e6

# inner name -> (out, in) as attributes of `_Sizes`; matrices are [out_features, in_features]
_MATRICES = {
    "q": ("q_dim", "d_model"),
    "k": ("kv_dim", "d_model"),
    "v": ("kv_dim", "d_model"),
    "o": ("d_model", "q_dim"),
    "gate": ("d_ff", "d_model"),
    "up": ("d_ff", "d_model"),
    "down": ("d_model", "d_ff"),
}


def matrix_names(config: ModelConfig) -> Iterator[str]:
    """Canonical names of the matrices, those of the layers and, when it is a tensor of its own, the output head."""
    for layer in range(config.n_layers):
        yield from (f"layers.{layer}.{name}" for name in _MATRICES)
    if not config.tied_embeddings:
        yield "head"


def shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(canonical name, shape) of every tensor that a model of that configuration has; `rope_factors` is extra."""
    sizes = {
        "d_model": config.d_model,
        "d_ff": config.d_ff,
        "q_dim": config.n_heads * config.head_dim,
        "kv_dim": config.n_kv_heads * config.head_dim,
    }
    yield "embed", (config.vocab_size, config.d_model)
    for layer in range(config.n_layers):
        for name, shape in _layer_shapes(config, sizes):
            yield f"layers.{layer}.{name}", shape
    yield "final_norm", (config.d_model,)
    if not config.tied_embeddings:
        yield "head", (config.vocab_size, config.d_model)


def _layer_shapes(config: ModelConfig, sizes: dict[str, int]) -> Iterator[tuple[str, tuple[int, ...]]]:
    biases = set()
    if config.qkv_bias:
        biases |= {"q", "k", "v"}
    if config.o_bias:
        biases |= {"o"}
    if config.ffn_bias:
        biases |= {"gate", "up", "down"}
    yield "attn_norm", (config.d_model,)
    yield "ffn_norm", (config.d_model,)
    if config.qk_norm:
        yield "q_norm", (config.head_dim,)
        yield "k_norm", (config.head_dim,)
    for name, (rows, cols) in _MATRICES.items():
        yield name, (sizes[rows], sizes[cols])
        if name in biases:
            yield f"{name}_bias", (sizes[rows],)


def check(config: ModelConfig, where: str) -> None:
    """ModelError if the sizes do not go together. The ranges of the single numbers were checked as they were read."""
    if config.n_heads % config.n_kv_heads:
        raise ModelError(f"{where}: {config.n_heads} heads cannot share {config.n_kv_heads} key-value heads evenly")
    if config.head_dim % 2:
        raise ModelError(f"{where}: heads of {config.head_dim} dimensions cannot be rotated in pairs")
    rope = config.rope
    if rope.scaling == "llama3" and not rope.low_freq_factor < rope.high_freq_factor:
        raise ModelError(f"{where}: RoPE's high_freq_factor is not above its low_freq_factor")
    if rope.scaling == "yarn" and not rope.beta_slow < rope.beta_fast:
        raise ModelError(f"{where}: RoPE's beta_fast is not above its beta_slow")
