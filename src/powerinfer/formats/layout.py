"""Layout of a model of a given configuration: canonical tensor names and shapes, and the limits of the sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from powerinfer.config import (
    AltUpConfig,
    AttentionConfig,
    EagleConfig,
    ExpertsConfig,
    FfnConfig,
    LayerConfig,
    ModelConfig,
    NoAttention,
    NoFfn,
    Shape,
)
from powerinfer.errors import ModelError

# Beyond every model there is; they keep the arithmetic of absurd files small.
MAX_LAYERS = 1 << 12
MAX_WIDTH = 1 << 20
MAX_HEADS = 1 << 14
MAX_EXPERTS = 1 << 12
MAX_HEAD_DIM = 1 << 12
MAX_VOCAB = 1 << 24
MAX_CONTEXT = 1 << 24
MAX_THETA = 1e15
MAX_SCALE = 1e6

NORMS = ("attn_norm", "attn_out_norm", "ffn_norm", "ffn_out_norm")
"""Norms of a layer: of what attention reads, of what it adds, and of the FFN's. `norms` "post" has the two of what is
read, for their sums."""


def matrix_names(config: ModelConfig) -> Iterator[str]:
    """Canonical names of the matrices: those of the layers, and around them what is a tensor of its own."""
    for layer in range(config.n_layers):
        yield from (f"layers.{layer}.{name}" for name, shape in _parts(config, layer) if is_matrix(name, shape))
    if config.embed_dim:
        yield from ("project_in", "project_out")
    if config.altup is not None:
        yield from (name for name, _ in config.altup.outer(config.d_model))
        yield from (f"layers.{layer}.laurel_{part}" for layer in range(config.n_layers) for part in ("in", "out"))
    if config.layer_inputs:
        yield "inputs_projection"
        yield from (f"layers.{layer}.input_{part}" for layer in range(config.n_layers) for part in ("gate", "out"))
    if not config.tied_embeddings:
        yield "head"


def ordered_readers(layer: LayerConfig) -> dict[str, Sequence[str]]:
    """The matrices that alone read the result of a norm, by its name: it can be in the order of their columns."""
    readers: dict[str, Sequence[str]] = {}
    if layer.norms not in ("pre", "both") or layer.parallel:
        return readers
    if type(layer.attention) is AttentionConfig:
        readers["attn_norm"] = layer.attention.projections
    if type(layer.ffn) is FfnConfig:
        readers["ffn_norm"] = layer.ffn.matrices[:-1]
    return readers


def is_matrix(name: str, shape: Shape) -> bool:
    """Whether a tensor of a layer holds matrices. Biases of experts have two dimensions, too, and so have the taps of a
    convolution, the norms of heads, and what coefficients of residual streams are made of."""
    return len(shape) > 1 and not name.endswith(("_bias", "_conv", "_norm", *_COEFFICIENTS))


_COEFFICIENTS = (".altup_router", ".altup_predict", ".altup_correct")


def is_router(name: str) -> bool:
    """Whether that is a matrix whose products decide which experts are computed: it is never quantised on load."""
    return name.endswith(".router")


def shapes(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """(canonical name, shape) of every tensor that a model of that configuration has."""
    width = config.embed_dim or config.d_model
    yield "embed", (config.vocab_size, width)
    if config.positions == "learned":
        yield "positions", (config.context_length + config.position_offset, config.d_model)
    if config.embed_dim:
        yield "project_in", (config.d_model, width)
        yield "project_out", (width, config.d_model)
    if (numbers := config.layer_inputs) > 0:
        yield "input_table", (config.layer_input_rows, config.n_layers * numbers)
        yield "inputs_projection", (config.n_layers * numbers, config.d_model)
        yield "inputs_norm", (numbers,)
    if config.altup is not None:
        yield from config.altup.outer(config.d_model)
    for layer in range(config.n_layers):
        yield from _layer_shapes(config, layer)
        if numbers > 0:
            yield f"layers.{layer}.input_gate", (numbers, config.d_model)
            yield f"layers.{layer}.input_out", (config.d_model, numbers)
            yield f"layers.{layer}.input_norm", (config.d_model,)
        if config.altup is not None:
            yield from ((f"layers.{layer}.{name}", shape) for name, shape in config.altup.tensors(config.d_model))
        if config.layers[layer].out_scale:
            yield f"layers.{layer}.out_scale", (1,)
    if config.final_norm:
        yield from _norm(config, "final_norm")
    if not config.tied_embeddings:
        yield "head", (config.vocab_size, width)
    if config.head_bias:
        yield "head_bias", (config.vocab_size,)


def draft_shapes(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """The same of the draft head, whose tensors are those of a layer that follows the model's; nothing without one."""
    draft, at, d_model = config.draft, draft_prefix(config), config.d_model
    if draft is None:
        return
    of_layer = _layer_shapes(config.with_draft, config.n_layers)
    yield from of_layer if draft.eagle is None else _eagle_shapes(draft.eagle, of_layer, d_model, at)
    for name in ("draft_embed_norm", "draft_hidden_norm", *["draft_norm"] * draft.final_norm):
        yield from _norm(config, f"{at}{name}")
    if draft.eagle is None:
        yield f"{at}draft_join", (d_model, 2 * d_model)
    if draft.embedding:
        yield f"{at}draft_embed", (config.vocab_size, d_model)
    if draft.head:
        yield f"{at}draft_head", (config.vocab_size if draft.eagle is None else draft.eagle.vocab, d_model)


def _eagle_shapes(
    eagle: EagleConfig, of_layer: Iterator[tuple[str, Shape]], d_model: int, at: str
) -> Iterator[tuple[str, Shape]]:
    """The same of what an EAGLE head has beside the others. of_layer: of a layer that reads one row."""
    joined = [f"{at}{part}" for part in "qkv"]
    for name, shape in of_layer:
        if name != f"{at}attn_norm":
            yield name, (shape[0], 2 * d_model) if name in joined else shape
    yield f"{at}draft_fuse", (d_model, len(eagle.layers) * d_model)
    yield from ((f"{at}{name}", (width * d_model,)) for name, width in feature_norms(eagle).items())
    yield f"{at}draft_tokens", (eagle.vocab,)


def feature_norms(eagle: EagleConfig) -> dict[str, int]:
    """Names of the norms of an EAGLE head's features, and of how many of these each is."""
    if eagle.norms == "each":
        return {f"draft_feature{place}_norm": 1 for place in range(len(eagle.layers))}
    return {"draft_features_norm": len(eagle.layers)} if eagle.norms == "whole" else {}


def draft_matrices(config: ModelConfig) -> Iterator[str]:
    """Canonical names of the draft head's matrices."""
    return (name for name, shape in draft_shapes(config) if is_matrix(name, shape) and not name.endswith("_embed"))


def draft_prefix(config: ModelConfig) -> str:
    """The beginning of the canonical names of the draft head's tensors."""
    return f"layers.{config.n_layers}."


def _layer_shapes(config: ModelConfig, layer: int) -> Iterator[tuple[str, Shape]]:
    for name in _layer_norms(config.layers[layer]):
        yield from _norm(config, f"layers.{layer}.{name}")
    yield from ((f"layers.{layer}.{name}", shape) for name, shape in _parts(config, layer))


def _norm(config: ModelConfig, name: str) -> Iterator[tuple[str, Shape]]:
    yield name, (config.d_model,)
    if config.norm == "layer" and config.norm_bias:
        yield f"{name}_bias", (config.d_model,)


def _layer_norms(layer: LayerConfig) -> list[str]:
    outer = layer.norms in ("output", "both")
    names = [name for name in NORMS if (outer if "_out_" in name else layer.norms != "output")]
    if isinstance(layer.attention, NoAttention):
        names = [name for name in names if not name.startswith("attn")]
    if isinstance(layer.ffn, NoFfn):
        names = [name for name in names if not name.startswith("ffn")]
    return [name for name in names if name != "ffn_norm" or not layer.shared_norm]


def _parts(config: ModelConfig, layer: int) -> Iterator[tuple[str, Shape]]:
    """(name within the layer, shape) of the tensors of attention and FFN."""
    for part in (config.layers[layer].attention, config.layers[layer].ffn):
        yield from part.tensors(config.d_model)


def check(config: ModelConfig, source: str) -> None:
    """ModelError if the settings do not go together. The ranges of the single numbers were checked as they were read.

    source: what the error begins with, a file name.
    """
    if config.positions not in ("rope", "learned") or (config.position_offset and config.positions == "rope"):
        raise ModelError(f"{source}: positions {config.positions!r}, offset {config.position_offset}, are unknown")
    if config.norm not in ("rms", "layer"):
        raise ModelError(f"{source}: norm {config.norm!r} is unknown")
    if config.logit_cap is not None and not config.logit_cap > 0:
        raise ModelError(f"{source}: logits capped at {config.logit_cap:g}")
    if config.layer_inputs % 16:
        raise ModelError(f"{source}: inputs of layers of {config.layer_inputs} numbers, no multiple of 16")
    if config.altup is not None:
        _check_streams(config, config.altup, source)
    elif config.layer_inputs and config.layer_input_rows < config.vocab_size:
        rows = f"{config.layer_input_rows} rows for {config.vocab_size} tokens"
        raise ModelError(f"{source}: the table of layers' inputs has {rows}")
    _check_sources(config, source)
    _check_draft(config, source)
    for layer in set(config.with_draft.layers):
        _check_norms(config, layer, source)
        for part in (layer.attention, layer.ffn):
            problem = part.problem()
            if problem is not None:
                raise ModelError(f"{source}: {problem}")


def _check_streams(config: ModelConfig, altup: AltUpConfig, source: str) -> None:
    """ModelError unless layers can compute with one of several residual streams. Their table of inputs may lack tokens,
    which then have its first row."""
    if (problem := altup.problem()) is not None:
        raise ModelError(f"{source}: {problem}")
    if not config.layer_inputs or any(layer.norms != "both" or layer.out_scale for layer in config.layers):
        raise ModelError(f"{source}: several residual streams need inputs of layers, and norms before and behind")


def _check_sources(config: ModelConfig, source: str) -> None:
    """ModelError unless layers that read the keys and values of another one find them there."""
    for number, layer in enumerate(config.layers):
        attention = layer.attention
        if not isinstance(attention, AttentionConfig) or attention.kv_from is None:
            continue
        other = config.layers[attention.kv_from].attention if 0 <= attention.kv_from < number else None
        same = isinstance(other, AttentionConfig) and other.kv_from is None
        shape = attention.n_kv_heads, attention.head_dim
        if not same or other is None or (other.n_kv_heads, other.head_dim) != shape:
            raise ModelError(f"{source}: layer {number} reads keys of layer {attention.kv_from}, which has none such")


def _check_draft(config: ModelConfig, source: str) -> None:
    """ModelError where a draft head does not go with the model."""
    reasons = {
        "a table of positions": config.positions == "learned",
        "an embedding of another width": config.embed_dim > 0,
        "inputs of layers": config.layer_inputs > 0,
        "no final norm": not config.final_norm,
    }
    if config.draft is not None and config.draft.eagle is not None:
        reasons |= {"other norms than RMS": config.norm != "rms", "several residual streams": config.altup is not None}
    if config.draft is not None and (strange := [reason for reason, true in reasons.items() if true]):
        raise ModelError(f"{source}: a draft head does not go with {strange[0]}")


def _check_norms(config: ModelConfig, layer: LayerConfig, source: str) -> None:
    if layer.norms not in ("pre", "post", "output", "both"):
        raise ModelError(f"{source}: norms in order {layer.norms!r} are unknown")
    if layer.out_scale and layer.norms == "post":
        raise ModelError(f"{source}: a factor behind layers does not go with norms {layer.norms!r}")
    if layer.norms == "post" and (layer.parallel or config.final_norm):
        raise ModelError(f"{source}: norms behind attention and FFN go with neither a final norm nor a parallel FFN")
    if layer.parallel and layer.norms != "pre":
        raise ModelError(f"{source}: norms {layer.norms!r} do not go with a parallel FFN")
    if config.residual_scale != 1 and layer.norms != "pre":
        raise ModelError(f"{source}: a scale of what layers add does not go with norms {layer.norms!r}")
    if isinstance(layer.ffn, ExpertsConfig) and layer.ffn.early_router and layer.norms == "post":
        raise ModelError(f"{source}: a router before attention does not go with norms {layer.norms!r}")
    if layer.shared_norm and not layer.parallel:
        raise ModelError(f"{source}: one norm for attention and FFN needs them to be parallel")
