"""What a model of a given configuration consists of: canonical tensor names and shapes, and the limits of the sizes."""

from __future__ import annotations

from collections.abc import Iterator

from powerinfer.config import ACTIVATIONS, FfnConfig, LayerConfig, ModelConfig, RopeConfig
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

# inner name -> (out, in) as keys of the sizes in `_layer_shapes`; matrices are [out_features, in_features]
_MATRICES = {
    "q": ("q_dim", "d_model"),
    "k": ("kv_dim", "d_model"),
    "v": ("kv_dim", "d_model"),
    "o": ("d_model", "q_dim"),
    "gate": ("neurons", "d_model"),
    "up": ("neurons", "d_model"),
    "down": ("d_model", "neurons"),
}


NORMS = ("attn_norm", "attn_out_norm", "ffn_norm", "ffn_out_norm")
"""Norms of a layer: of what attention reads, of what it adds, and of the FFN's. `norms` "post" has the two of what is
read, for their sums."""


def matrix_names(config: ModelConfig) -> Iterator[str]:
    """Canonical names of the matrices: those of the layers, and around them what is a tensor of its own."""
    for layer in range(config.n_layers):
        yield from (f"layers.{layer}.{name}" for name in ("q", "k", "v", "o", *config.layers[layer].ffn.matrices))
    if config.embed_dim:
        yield from ("project_in", "project_out")
    if not config.tied_embeddings:
        yield "head"


def shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(canonical name, shape) of every tensor that a model of that configuration has."""
    width = config.embed_dim or config.d_model
    yield "embed", (config.vocab_size, width)
    if config.positions == "learned":
        yield "positions", (config.context_length + config.position_offset, config.d_model)
    if config.embed_dim:
        yield "project_in", (config.d_model, width)
        yield "project_out", (width, config.d_model)
    for layer in range(config.n_layers):
        for name, shape in _layer_shapes(config, config.layers[layer]):
            yield f"layers.{layer}.{name}", shape
    if config.final_norm:
        yield from _norm(config, "final_norm")
    if not config.tied_embeddings:
        yield "head", (config.vocab_size, width)


def _norm(config: ModelConfig, name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield name, (config.d_model,)
    if config.norm == "layer":
        yield f"{name}_bias", (config.d_model,)


def _layer_norms(layer: LayerConfig) -> list[str]:
    outer = layer.norms in ("output", "both")
    names = [name for name in NORMS if (outer if "_out_" in name else layer.norms != "output")]
    return [name for name in names if name != "ffn_norm" or not layer.shared_norm]


def _layer_shapes(config: ModelConfig, layer: LayerConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    attention, ffn = layer.attention, layer.ffn
    sizes = {
        "d_model": config.d_model,
        "neurons": ffn.size,
        "q_dim": config.n_heads * config.head_dim,
        "kv_dim": config.n_kv_heads * config.head_dim,
    }
    biases = set()
    if attention.qkv_bias:
        biases |= {"q", "k", "v"}
    if attention.o_bias:
        biases |= {"o"}
    if ffn.bias:
        biases |= {"gate", "up", "down"}
    for name in _layer_norms(layer):
        yield from _norm(config, name)
    if attention.qk_norm is not None:
        width = attention.qk_norm == "width"
        yield "q_norm", (sizes["q_dim"] if width else config.head_dim,)
        yield "k_norm", (sizes["kv_dim"] if width else config.head_dim,)
    for name in ("q", "k", "v", "o", *ffn.matrices):
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
    if config.positions not in ("rope", "learned") or (config.position_offset and config.positions == "rope"):
        raise ModelError(f"{where}: positions {config.positions!r}, offset {config.position_offset}, are unknown")
    if config.norm not in ("rms", "layer"):
        raise ModelError(f"{where}: norm {config.norm!r} is unknown")
    if len({layer.ffn.gated for layer in config.layers}) > 1:
        raise ModelError(f"{where}: FFNs with and without a gate in one model are not supported")
    for layer in set(config.layers):
        _check_norms(config, layer, where)
        _check_ffn(layer.ffn, where)
    for rope in config.ropes:
        _check_rope(config, rope, where)


def _check_norms(config: ModelConfig, layer: LayerConfig, where: str) -> None:
    if layer.norms not in ("pre", "post", "output", "both") or layer.attention.qk_norm not in (None, "head", "width"):
        kinds = f"{layer.norms!r}, of q and k {layer.attention.qk_norm!r}"
        raise ModelError(f"{where}: norms in order {kinds}, are unknown")
    if layer.norms == "post" and (layer.parallel or config.final_norm):
        raise ModelError(f"{where}: norms behind attention and FFN go with neither a final norm nor a parallel FFN")
    if layer.parallel and layer.norms != "pre":
        raise ModelError(f"{where}: norms {layer.norms!r} do not go with a parallel FFN")
    if layer.shared_norm and not layer.parallel:
        raise ModelError(f"{where}: one norm for attention and FFN needs them to be parallel")


def _check_rope(config: ModelConfig, rope: RopeConfig, where: str) -> None:
    if rope.dim % 2 or not 2 <= rope.dim <= config.head_dim:
        raise ModelError(f"{where}: {rope.dim} of a head's {config.head_dim} dimensions cannot be rotated in pairs")
    if rope.scaling == "llama3" and not rope.low_freq_factor < rope.high_freq_factor:
        raise ModelError(f"{where}: RoPE's high_freq_factor is not above its low_freq_factor")
    if rope.scaling == "yarn" and not rope.beta_slow < rope.beta_fast:
        raise ModelError(f"{where}: RoPE's beta_fast is not above its beta_slow")


def _check_ffn(ffn: FfnConfig, where: str) -> None:
    if ffn.activation not in ACTIVATIONS:
        raise ModelError(f"{where}: activation {ffn.activation!r} is unknown (only {', '.join(ACTIVATIONS)})")
    if ffn.activation == "drelu" and not ffn.gated:
        raise ModelError(f"{where}: activation drelu needs a gated FFN")
    if ffn.threshold < 0 or (ffn.threshold and ffn.activation != "fatrelu"):
        raise ModelError(f"{where}: activation {ffn.activation} with threshold {ffn.threshold:g}")
