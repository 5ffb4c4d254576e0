"""What a model of a given configuration consists of: canonical tensor names and shapes, and the limits of the sizes."""

from __future__ import annotations

from collections.abc import Iterator

from powerinfer.config import ACTIVATIONS, ModelConfig
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

# inner name -> (out, in) as keys of `_sizes`; matrices are [out_features, in_features]
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
    """Canonical names of the matrices: those of the layers, and around them what is a tensor of its own."""
    for layer in range(config.n_layers):
        yield from (f"layers.{layer}.{name}" for name in _layer_matrices(config))
    if config.embed_dim:
        yield from ("project_in", "project_out")
    if not config.tied_embeddings:
        yield "head"


def shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(canonical name, shape) of every tensor that a model of that configuration has; `rope_factors` is extra."""
    width = config.embed_dim or config.d_model
    yield "embed", (config.vocab_size, width)
    if config.positions == "learned":
        yield "positions", (config.context_length + config.position_offset, config.d_model)
    if config.embed_dim:
        yield "project_in", (config.d_model, width)
        yield "project_out", (width, config.d_model)
    for layer in range(config.n_layers):
        for name, shape in _layer_shapes(config):
            yield f"layers.{layer}.{name}", shape
    if config.final_norm:
        yield from _norm(config, "final_norm")
    if not config.tied_embeddings:
        yield "head", (config.vocab_size, width)


def _layer_matrices(config: ModelConfig) -> list[str]:
    return [name for name in _MATRICES if config.gated or name != "gate"]


def _norm(config: ModelConfig, name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield name, (config.d_model,)
    if config.norm == "layer":
        yield f"{name}_bias", (config.d_model,)


def _sizes(config: ModelConfig) -> dict[str, int]:
    return {
        "d_model": config.d_model,
        "d_ff": config.d_ff,
        "q_dim": config.n_heads * config.head_dim,
        "kv_dim": config.n_kv_heads * config.head_dim,
    }


def _layer_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    sizes = _sizes(config)
    biases = set()
    if config.qkv_bias:
        biases |= {"q", "k", "v"}
    if config.o_bias:
        biases |= {"o"}
    if config.ffn_bias:
        biases |= {"gate", "up", "down"}
    yield from _norm(config, "attn_norm")
    if not config.shared_norm:
        yield from _norm(config, "ffn_norm")
    if config.qk_norm:
        yield "q_norm", (config.head_dim,)
        yield "k_norm", (config.head_dim,)
    for name in _layer_matrices(config):
        rows, cols = _MATRICES[name]
        yield name, (sizes[rows], sizes[cols])
        if name in biases:
            yield f"{name}_bias", (sizes[rows],)


def check(config: ModelConfig, where: str) -> None:
    """ModelError if the settings do not go together. The ranges of the single numbers were checked as they were read.

    where: what the error begins with, a file name.
    """
    if config.n_heads % config.n_kv_heads:
        raise ModelError(f"{where}: {config.n_heads} heads cannot share {config.n_kv_heads} key-value heads evenly")
    if config.head_dim % 2:
        raise ModelError(f"{where}: heads of {config.head_dim} dimensions cannot be cut into pairs")
    _check_positions(config, where)
    _check_ffn(config, where)
    if config.norm not in ("rms", "layer") or config.norm_order not in ("pre", "post"):
        raise ModelError(f"{where}: norm {config.norm!r} in order {config.norm_order!r} is unknown")
    if config.norm_order == "post" and (config.parallel or config.final_norm):
        raise ModelError(f"{where}: norms behind attention and FFN go with neither a final norm nor a parallel FFN")
    if config.shared_norm and not config.parallel:
        raise ModelError(f"{where}: one norm for attention and FFN needs them to be parallel")


def _check_positions(config: ModelConfig, where: str) -> None:
    rope = config.rope
    if config.positions == "learned":
        return
    if config.positions != "rope" or config.position_offset:
        raise ModelError(f"{where}: positions {config.positions!r}, offset {config.position_offset}, are unknown")
    if rope.dim % 2 or not 2 <= rope.dim <= config.head_dim:
        raise ModelError(f"{where}: {rope.dim} of a head's {config.head_dim} dimensions cannot be rotated in pairs")
    if rope.scaling == "llama3" and not rope.low_freq_factor < rope.high_freq_factor:
        raise ModelError(f"{where}: RoPE's high_freq_factor is not above its low_freq_factor")
    if rope.scaling == "yarn" and not rope.beta_slow < rope.beta_fast:
        raise ModelError(f"{where}: RoPE's beta_fast is not above its beta_slow")


def _check_ffn(config: ModelConfig, where: str) -> None:
    if config.activation not in ACTIVATIONS:
        raise ModelError(f"{where}: activation {config.activation!r} is unknown (only {', '.join(ACTIVATIONS)})")
    if config.activation == "drelu" and not config.gated:
        raise ModelError(f"{where}: activation drelu needs a gated FFN")
    if config.activation_threshold < 0 or (config.activation_threshold and config.activation != "fatrelu"):
        raise ModelError(f"{where}: activation {config.activation} with threshold {config.activation_threshold:g}")
