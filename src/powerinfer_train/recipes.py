"""Recipes by which a dense model is made sparse, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from powerinfer.config import (
    BANK,
    AttentionConfig,
    ChannelDeltaConfig,
    ExpertsConfig,
    FfnConfig,
    Mamba2Config,
    ModelConfig,
    ParallelConfig,
    ShortConvConfig,
    SparsifyConfig,
)
from powerinfer.errors import ModelError, RequestError
from powerinfer.formats.block_scales import SCALED
from powerinfer.formats.checkpoint import Checkpoint
from powerinfer.formats.layout import is_router, matrix_names
from powerinfer.formats.quant import block_type
from powerinfer.formats.weight_types import FLOAT_TYPES

UNTRAINED = Mamba2Config, ParallelConfig, ShortConvConfig, ChannelDeltaConfig
"""Kinds of attention without a backward pass in torch_model.py."""

FFN_PARTS = frozenset(f"{of}{part}" for of in ("", "experts_", "shared_") for part in ("gate", "up", "down"))
"""Matrices of a layer's FFN, by the last part of their canonical names."""


@dataclass(frozen=True)
class StoredTypes:
    """--type, --attention-type and --embedding-type."""

    changed: str
    attention: str = "same"
    embedding: str = "same"

    def __getitem__(self, name: str) -> str:
        """Type of a changed matrix, by its canonical name."""
        if name == "embed":
            return self.embedding
        is_changed = self.attention == "same" or name.rpartition(".")[2] in FFN_PARTS
        return self.changed if is_changed else self.attention


def stored_types(options: SparsifyConfig) -> StoredTypes:
    """Types of the options."""
    changed = options.type
    if changed == "auto":
        changed = "bf16" if options.format == "folder" else "q8_0"
    return StoredTypes(changed, options.attention_type, options.embedding_type)


@dataclass(frozen=True)
class RecipeStage:
    """A part of the training. share: of the tokens; rate: Adam's learning rate for the FFNs' matrices; other: its
    factor for the layers' other matrices, 0: these are not trained; stored: weights are rounded to the type they will
    be stored in wherever they are used, so that what remains learns to do with that.

    name: "regress": each FFN learns the original one's outputs for the original one's inputs, all layers side by side;
    "distil": the model learns the original's logits.
    """

    name: str
    share: float
    rate: float
    other: float = 0.0
    stored: bool = False


@dataclass(frozen=True)
class Recipe:
    """activation: of the sparse model; of: activations of models that it is for.

    How the share of zeros comes about: by a threshold in each layer that follows a quantile of what it is compared
    with, where the activation has one; else by a penalty on the neurons that fire. It rises from `begin` of the target
    to all of it at the share `reached` of the tokens.

    weighted: in a model without experts a neuron has a threshold of its own, the layer's divided by its importance
    (`training`).

    products: a neuron also has a threshold of its product h, by an importance of its own: the gate alone makes a part
    of the zeros (`gate_share`), and the product the others. Without experts, and only where `weighted`.

    topk has no thresholds to follow: how many neurons of a bank count follows from the share of zeros.
    """

    activation: str
    of: tuple[str, ...]
    stages: tuple[RecipeStage, ...]
    weighted: bool = False
    products: bool = False
    begin: float = 0.4
    reached: float = 0.6


_RELU = (
    RecipeStage("regress", 0.4, 2e-3),
    RecipeStage("distil", 0.45, 3e-4),
    RecipeStage("distil", 0.15, 3e-5, other=1.0, stored=True),
)
_CATS = (RecipeStage("distil", 0.5, 6e-4, other=0.3), RecipeStage("distil", 0.5, 2e-4, other=0.3, stored=True))

RECIPES = {
    "cats": Recipe("cats", ("silu",), _CATS, weighted=True, begin=0.7, reached=0.25),
    "product": Recipe("cats", ("silu",), _CATS, weighted=True, products=True, begin=0.7, reached=0.25),
    "topk": Recipe("topk", ("silu",), _CATS, weighted=True, begin=0.7, reached=0.25),
    "fatrelu": Recipe("fatrelu", ("silu", "gelu_tanh", "swiglu_oai"), _RELU),
    "reglu": Recipe("relu", ("silu", "gelu_tanh", "swiglu_oai"), _RELU),
    "drelu": Recipe("drelu", ("silu", "gelu_tanh", "swiglu_oai"), _RELU),
}
"""Recipe by the name of --recipe. cats: arXiv 2404.08763; fatrelu, reglu: ProSparse, arXiv 2402.13516; drelu: arXiv
2406.05955."""


GATE_SHARE = 0.7
"""Share of the zeros of a recipe with `products` that the gate alone makes. On SmolLM2-135M, untrained, at 60 % of the
FFN's bytes, perplexity grows 1.49 times with 1.0, 1.31 with 0.72 and 1.53 with 0.5 (docs/sparsify.md)."""


def gate_share(options: SparsifyConfig) -> float:
    """The share of the zeros that the gate alone makes, for a recipe with `products`."""
    return GATE_SHARE if options.gate_zeros is None else options.gate_zeros / options.zeros


def trained_names(config: ModelConfig) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(matrices of FFNs, all matrices of layers but the routers'), by canonical name. The embedding and the head stay
    as they are."""
    names = tuple(name for name in matrix_names(config) if name.startswith("layers.") and not is_router(name))
    return tuple(name for name in names if name.rpartition(".")[2] in FFN_PARTS), names


def scaled_types(checkpoint: Checkpoint, names: Sequence[str], types: StoredTypes) -> dict[str, str]:
    """Type of each matrix, by name, of which only the scales of its blocks are trained, for --type same.

    ModelError for one in a type that has no such scales.
    """
    if checkpoint.source != "gguf":
        return {}
    types_by_name = {name: checkpoint.stored_type(name) for name in names if types[name] == "same"}
    types_by_name = {name: kind for name, kind in types_by_name.items() if kind not in FLOAT_TYPES}
    for name, kind in types_by_name.items():
        if kind not in SCALED:
            raise ModelError(
                f"{checkpoint.path}: {name} is stored as {kind}, whose scales cannot be trained: give another --type"
            )
    return types_by_name


def code_bytes(checkpoint: Checkpoint, config: SparsifyConfig) -> dict[str, int]:
    """Bytes of a weight's code in memory, by the name of a matrix of which only scales are trained.

    ModelError for a type without scales that can be trained.
    """
    types = scaled_types(checkpoint, trained_names(checkpoint.config)[1], stored_types(config))
    return {name: 1 if block_type(kind).block == 32 else 2 for name, kind in types.items()}


def code_bytes_of_k_quants(config: ModelConfig, options: SparsifyConfig) -> dict[str, int]:
    """`code_bytes` of a model whose matrices are all K-quants."""
    types = stored_types(options)
    return {name: 2 for name in trained_names(config)[1] if types[name] == "same"}


def check(options: SparsifyConfig, config: ModelConfig) -> Recipe:
    """The recipe of the options. RequestError if one is out of its range or does not suit the others or the model, or
    if the model cannot be trained."""
    check_options(options)
    if options.window > config.context_length:
        raise RequestError(f"--window {options.window} is more than the model's context of {config.context_length}")
    return check_recipe(options.recipe, config)


def check_options(options: SparsifyConfig) -> None:
    """Check options without the model: RequestError for values out of their range, or that do not suit others."""
    for field in fields(options):
        flag, value = f"--{field.name.replace('_', '-')}", getattr(options, field.name)
        choices = field.metadata.get("choices")
        if choices and value not in choices:
            raise RequestError(f"{flag} must be one of {', '.join(choices)}, not {value!r}")
        least = field.metadata.get("least", 0 if field.default == 0 else 1)
        if type(field.default) is int and (type(value) is not int or value < least):
            raise RequestError(f"{flag} must be a whole number of at least {least}, not {value}")
        if type(value) is int and value >= 1 << 63:
            raise RequestError(f"{flag} {value} is more than 64 bits hold")
    if not 0 < options.zeros < 1:
        raise RequestError(f"--zeros {options.zeros:g} must be above 0 and below 1")
    if options.gate_zeros is not None:
        if not RECIPES[options.recipe].products:
            raise RequestError("--gate-zeros is for --recipe product alone")
        if not 0 < options.gate_zeros <= options.zeros:
            raise RequestError(f"--gate-zeros {options.gate_zeros:g} must be above 0 and at most --zeros")
    if not 0 < options.lr <= 100:
        raise RequestError(f"--lr {options.lr:g} must be above 0 and at most 100")
    if not options.save >= 0:
        raise RequestError(f"--save must be a number of seconds, not {options.save:g}")
    if options.batch < options.window:
        raise RequestError(f"--batch {options.batch} is less than a window of {options.window} tokens")
    if options.tokens < options.batch:
        raise RequestError(f"--tokens {options.tokens} is less than a step of --batch {options.batch} tokens")


def uncomputed_reason(config: ModelConfig) -> str | None:
    """Reason for which torch_model.py does not compute a model, whatever its kinds of attention; None: it does."""
    if any(experts.separate for experts in config.experts.values()):
        return "experts with norms of their own"
    if config.layer_inputs:
        return "inputs of layers"
    if any(isinstance(one, AttentionConfig) and one.kv_from is not None for one in config.attentions):
        return "layers that read the keys and values of another one"
    return None


def _check_trained(config: ModelConfig) -> None:
    if any(isinstance(layer.attention, UNTRAINED) for layer in config.layers):
        reason = "models with Mamba2, short convolutions or Kimi Delta Attention are not trained so far"
        raise RequestError(f"{reason}: take one of attention or Gated DeltaNet")
    if config.logit_cap is not None:
        raise RequestError("models that cap their logits (Gemma 2, 3n and 4) are not trained so far")
    uncomputed = uncomputed_reason(config)
    if uncomputed is not None:
        raise RequestError(f"models with {uncomputed} are not trained so far")


def check_recipe(name: str, config: ModelConfig) -> Recipe:
    """RequestError if the recipe is not for that model, or the model cannot be trained."""
    recipe = RECIPES[name]
    _check_trained(config)
    for layer in config.layers:
        ffn = layer.ffn
        if not isinstance(ffn, FfnConfig | ExpertsConfig) or not ffn.gated or ffn.activation not in recipe.of:
            suited = " and ".join(recipe.of)
            suiting = [one for one, other in RECIPES.items() if ffn.gated and ffn.activation in other.of]
            use = f": use recipe {' or '.join(suiting)}" if suiting else ""
            if ffn.activation in {one.activation for one in RECIPES.values()}:
                use = ": it is sparse already; to train it further, give its original with -m, and it with --start"
            raise RequestError(f"recipe {name} is for gated FFNs of {suited}, and this model has {ffn.title}{use}")
        if ffn.activation == "swiglu_oai" and not ffn.bias:
            raise RequestError(
                f"recipe {name} changes biases of up in experts of swiglu_oai, and this model has none there: take "
                "a published file of gpt-oss"
            )
        if recipe.products and not isinstance(ffn, FfnConfig):
            raise RequestError(
                f"recipe {name} is for FFNs without experts, and this model has {ffn.title}: use recipe cats"
            )
        if recipe.activation == "topk" and not (isinstance(ffn, FfnConfig) and ffn.size % BANK == 0):
            raise RequestError(
                f"recipe {name} is for FFNs of whole banks of {BANK} neurons, without experts, and this model has "
                f"{ffn.title}: use recipe cats"
            )
    return recipe


def moved_biases(config: ModelConfig) -> dict[str, float]:
    """Biases that get another value from the start, by canonical name, and how much is added.

    The product of swiglu_oai has up + 1 where others have up. So the same matrices serve a sparse activation.
    """
    experts = (layer for layer, ffn in config.experts.items() if ffn.activation == "swiglu_oai")
    return {f"layers.{layer}.experts_up_bias": 1.0 for layer in experts}


def dense_reason(config: ModelConfig, recipe: Recipe) -> str | None:
    """Reason for which the engine will compute every neuron of the sparse model; None: it can skip some."""
    layers = (replace(one, ffn=replace(one.ffn, activation=recipe.activation)) for one in config.layers)  # type: ignore
    sparse = replace(config, layers=tuple(layers))
    return sparse.whole_reason and sparse.whole_experts_reason
