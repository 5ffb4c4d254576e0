"""How a dense model is made sparse, as data."""

from __future__ import annotations

from dataclasses import dataclass

from powerinfer.config import ExpertsConfig, FfnConfig, ModelConfig
from powerinfer.errors import RequestError

FFN_PARTS = frozenset(f"{of}{part}" for of in ("", "experts_", "shared_") for part in ("gate", "up", "down"))
"""Matrices of a layer's FFN, by the last part of their canonical names."""


@dataclass(frozen=True)
class Stage:
    """A part of the training. share: of the tokens; rate: Adam's learning rate; every: all weights are trained, else
    those of the FFNs alone.

    name: "regress": each FFN learns the original one's outputs for the original one's inputs, all layers side by side;
    "distil": the model learns the original's logits.
    """

    name: str
    share: float
    rate: float
    every: bool = False


@dataclass(frozen=True)
class Recipe:
    """activation: of the sparse model; of: activations of models that it is for.

    How the share of zeros comes about: by a threshold in each layer that follows a quantile of what it is compared
    with, where the activation has one; else by a penalty on the neurons that fire.
    """

    activation: str
    of: tuple[str, ...]
    stages: tuple[Stage, ...]


_RELU = (Stage("regress", 0.4, 2e-3), Stage("distil", 0.45, 3e-4), Stage("distil", 0.15, 3e-5, every=True))

RECIPES = {
    "cats": Recipe("cats", ("silu",), (Stage("distil", 0.85, 3e-4), Stage("distil", 0.15, 3e-5, every=True))),
    "fatrelu": Recipe("fatrelu", ("silu", "gelu_tanh"), _RELU),
    "reglu": Recipe("relu", ("silu", "gelu_tanh"), _RELU),
    "drelu": Recipe("drelu", ("silu", "gelu_tanh"), _RELU),
}
"""By the name of --recipe. cats: arXiv 2404.08763; fatrelu, reglu: ProSparse, arXiv 2402.13516; drelu: arXiv
2406.05955."""


def check_recipe(name: str, config: ModelConfig) -> Recipe:
    """RequestError if there is no such recipe, or it is not for that model."""
    if name not in RECIPES:
        raise RequestError(f"there is no recipe {name!r} (only {', '.join(RECIPES)})")
    recipe = RECIPES[name]
    for layer in config.layers:
        ffn = layer.ffn
        if not isinstance(ffn, FfnConfig | ExpertsConfig) or not ffn.gated or ffn.activation not in recipe.of:
            suited = " and ".join(recipe.of)
            raise RequestError(f"recipe {name} is for gated FFNs of {suited}, and this model has {ffn.title}")
    return recipe
