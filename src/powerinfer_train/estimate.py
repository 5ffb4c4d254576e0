"""Costs of a training, on paper: operations, memory and hours, from a model's configuration and a recipe alone.

Operations are those of products, two for a multiplication and an addition. A matrix of n weights takes 2n for a token
forward, 2n for the gradient of its input and 2n for its own; of experts those that a token selects. Attention within a
window of w tokens takes 2w for each dimension of its heads, since a token sees half of them, and backward twice that;
of latent attention, whose heads have keys and values of their own here, w for each dimension of either. Gated DeltaNet
has products within chunks and with states, `_mixing`.

    regress   the teacher's layers forward; the student's FFNs forward, and backward for their matrices
    distil    teacher and student forward with their heads; backward from the head to the first layer for inputs, and
              for the matrices that are trained
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from powerinfer.config import (
    AttentionKind,
    DeltaNetConfig,
    ExpertsConfig,
    LatentAttentionConfig,
    ModelConfig,
    SparsifyConfig,
)
from powerinfer.errors import RequestError
from powerinfer.formats.layout import is_matrix, is_router, shapes
from powerinfer_train.recipes import FFN_PARTS, Recipe, RecipeStage, check

SHARE = 0.35  # of a device's peak that a training reaches, unless another one is given


CHUNK = 32
"""Tokens for which the rule of Gated DeltaNet is computed at a time (`torch_delta`): of 16 to 128 the number that takes
a CPU the least time. Longer chunks solve larger systems, of shorter ones there are more states."""


class TrainingDevice(NamedTuple):
    """flops_s: products of bfloat16 matrices, summed in float32, without sparsity; memory: bytes."""

    name: str
    flops_s: float
    memory: float


DEVICES = (TrainingDevice("RTX 4090", 165.2e12, 24 * 2**30), TrainingDevice("H100 SXM", 989.4e12, 80 * 2**30))
"""NVIDIA's figures: the whitepaper of the Ada architecture (appendix A) and of the H100 (table 1)."""

PLACES = ("all on the device", "moments in RAM", "moments and weights in RAM")
"""Places of Adam's moments and of the student's float32 weights."""


@dataclass(frozen=True)
class StageCost:
    """tokens: of the stage; flops: of a token; weights: that are trained."""

    name: str
    tokens: int
    flops: float
    weights: int


@dataclass(frozen=True)
class MemoryNeeds:
    """Bytes of a training, about. place: of PLACES."""

    place: str
    device: int
    ram: int


@dataclass(frozen=True)
class Rates:
    """FLOP/s of the stages of a training on this machine. peak: of the product of two large matrices."""

    device: str
    stages: tuple[float, ...]
    peak: float


def stage_costs(config: ModelConfig, recipe: Recipe, tokens: int, window: int) -> list[StageCost]:
    """Costs of each stage of a recipe."""
    return [
        StageCost(stage.name, round(stage.share * tokens), _flops(config, stage, window), _trained(config, stage))
        for stage in recipe.stages
    ]


class _Matrix(NamedTuple):
    """weights: all of them, of a stack those of its matrices; used: those that a token is multiplied with; matrix: of
    one matrix."""

    name: str
    weights: int
    used: float
    matrix: int

    @property
    def part(self) -> str:
        return self.name.rpartition(".")[2]


def _matrices(config: ModelConfig) -> Iterator[_Matrix]:
    """Matrices that are multiplied with; the embedding only if it is the head, too."""
    for name, shape in shapes(config):
        if name == "positions" or not is_matrix(name, shape) or (name == "embed" and not config.tied_embeddings):
            continue
        used = float(math.prod(shape))
        if ".experts_" in name:
            experts = config.layers[int(name.split(".")[1])].ffn
            assert isinstance(experts, ExpertsConfig)
            used *= experts.router.top_k / experts.n_experts
        yield _Matrix(name, math.prod(shape), used, math.prod(shape[-2:]))


def _is_trained(matrix: _Matrix, stage: RecipeStage) -> bool:
    layers = stage.other and matrix.name.startswith("layers.") and not is_router(matrix.name)
    return matrix.part in FFN_PARTS or bool(layers)


def _trained(config: ModelConfig, stage: RecipeStage) -> int:
    return sum(one.weights for one in _matrices(config) if _is_trained(one, stage))


def _flops(config: ModelConfig, stage: RecipeStage, window: int) -> float:
    matrices = list(_matrices(config))
    head = sum(one.used for one in matrices if "." not in one.name)
    layers = sum(one.used for one in matrices if "." in one.name)
    mixing = sum(_mixing(layer.attention, window) for layer in config.layers)
    if stage.name == "regress":
        ffns = sum(one.used for one in matrices if one.part in FFN_PARTS)
        down = sum(one.used for one in matrices if one.part.endswith("down"))
        return 2 * (layers + mixing) + 2 * ffns + 2 * (ffns + down)
    trained = sum(one.used for one in matrices if _is_trained(one, stage))
    forward = 2 * (layers + head + mixing)
    return 2 * forward + 2 * (layers + head + 2 * mixing) + 2 * trained


def _mixing(attention: AttentionKind, window: int) -> float:
    """Multiplications of a token with what others left, forward."""
    if isinstance(attention, LatentAttentionConfig):
        return attention.n_heads * (attention.query_dim + attention.value_dim) / 2 * window
    if isinstance(attention, DeltaNetConfig):
        keys, values, chunk = attention.key_dim, attention.value_dim, min(CHUNK, window)
        within = chunk * (3 * keys + 2 * values) + chunk**2 / 2
        return attention.n_value_heads * (within + 3 * keys * values) + attention.channels * attention.taps
    return attention.n_heads * attention.head_dim * window


def _kept_of_heads(attention: AttentionKind) -> float:
    """Bytes that a token keeps of queries, keys, values and what heads give: two float32 of each element; of Gated
    DeltaNet seven, and what chunks have: their states and matrices."""
    if isinstance(attention, LatentAttentionConfig):
        return 8 * 2 * attention.n_heads * (attention.query_dim + attention.value_dim)
    if isinstance(attention, DeltaNetConfig):
        keys, values = attention.key_dim, attention.value_dim
        of_chunks = keys * values / CHUNK + 9 * CHUNK
        return 4 * (attention.n_value_heads * (of_chunks + 7 * (keys + values)) + 2 * attention.channels)
    return 8 * (2 * attention.n_heads + 2 * attention.n_kv_heads) * attention.head_dim


def memory(
    config: ModelConfig,
    recipe: Recipe,
    rows: int,
    window: int,
    product: int = 2,
    codes: Mapping[str, int] = MappingProxyType({}),
) -> list[MemoryNeeds]:
    """Memory in each of PLACES; where only scales are trained there is the first alone. product: bytes of the type that
    matrices are multiplied in; codes: as of `recipes.code_bytes`.

    Of a weight there are, in bytes, `product` of the teacher's, and of one that is trained 4 of the student's, 4 of the
    gradient, 8 of the moments and 2 of its copy for the products, if these are in two. On top comes what the rows that
    are computed at once keep for the way back. Codes are the teacher's, too; beside them there are, of a block of 32
    weights (256 where codes have 2 bytes), two numbers of 4 bytes in six places, and for a while the values and the
    gradient of a matrix.
    """
    total = sum(math.prod(shape) for _, shape in shapes(config))
    trained = max(_trained(config, stage) for stage in recipe.stages)
    scaled = [one for one in _matrices(config) if one.name in codes]
    of_codes = sum(codes[one.name] * one.weights for one in scaled)
    scales = sum(2 * 4 * 6 * one.weights // (32 if codes[one.name] == 1 else 256) for one in scaled)
    passing = (8 + 2 * product) * max((one.matrix for one in scaled), default=0)
    full = trained - sum(one.weights for one in scaled)
    fixed = product * (total - trained + full) + of_codes + scales + passing + (6 if product == 2 else 4) * full
    fixed += rows * window * _kept_bytes(config, product)
    places = [
        MemoryNeeds(PLACES[0], fixed + 12 * full, 0),
        MemoryNeeds(PLACES[1], fixed + 4 * full, 8 * full),
        MemoryNeeds(PLACES[2], fixed, 12 * full),
    ]
    return places if full else places[:1]


def _kept_bytes(config: ModelConfig, product: int) -> int:
    """Bytes that a token keeps for the way back, about: of each layer the stream and its norms, what attention reads
    and gives, and of a neuron four values in the type of the products and what is cut."""
    total = 0
    for layer in config.layers:
        ffn, heads = layer.ffn, _kept_of_heads(layer.attention)
        neurons = ffn.size * ffn.router.top_k + ffn.shared_size if isinstance(ffn, ExpertsConfig) else ffn.width
        total += 28 * config.d_model + round(heads) + (4 * product + 2) * neurons
    return total


def estimate(
    config: ModelConfig,
    options: SparsifyConfig,
    share: float | None,
    rates: Rates | None,
    codes: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, Any]:
    """The document of `powerinfer sparsify --estimate`. share: of a device's peak, None: as measured, or SHARE; rates:
    measured on this machine; codes: as of `memory`. RequestError for options that `check` refuses, and a share out of
    its range."""
    if share is not None and not 0 < share <= 1:
        raise RequestError(f"--share {share:g} must be above 0 and at most 1")
    recipe = check(options, config)
    stages = stage_costs(config, recipe, options.tokens, options.window)
    total = sum(stage.tokens * stage.flops for stage in stages)
    places = memory(config, recipe, options.rows, options.window, codes=codes)
    machine, reached = None, SHARE if share is None else share
    if rates is not None:
        seconds = sum(stage.tokens * stage.flops / rate for stage, rate in zip(stages, rates.stages, strict=True))
        flops_s = total / seconds
        machine = {"device": rates.device, "flops_s": flops_s, "peak_flops_s": rates.peak, "hours": seconds / 3600}
        reached = min(1.0, flops_s / rates.peak) if share is None else share
    devices = []
    for device in DEVICES:
        fits = next((one.place for one in places if one.device <= device.memory), None)
        hours = total / (device.flops_s * reached) / 3600
        devices.append({"name": device.name, "flops_s": device.flops_s, "hours": hours, "fits": fits})
    return {
        "model": config.name or config.architecture,
        "parameters": sum(math.prod(shape) for _, shape in shapes(config)),
        "active_parameters": round(sum(one.used for one in _matrices(config))),
        "recipe": options.recipe,
        "tokens": options.tokens,
        "stages": [asdict(stage) for stage in stages],
        "flops": total,
        "memory": [asdict(one) for one in places],
        "share": reached,
        "devices": devices,
        "here": machine,
    }
