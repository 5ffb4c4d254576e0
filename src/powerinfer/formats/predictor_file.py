"""Trained predictors on disk: of each layer `layers.N.in` [rank, d_model] and `layers.N.out` [neurons, rank].

Of a layer of experts the neurons are those of all experts, one expert after another, then those of a shared expert
without gates, and the floor is 0. A layer's rank, threshold and floor are in the file's description, null for a layer
without neurons, which has no tensors. Weights are F16, BF16, F32, or Q8_0, whose rows of blocks are stored as U8 [rows,
row_bytes].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np

from powerinfer.config import ModelConfig
from powerinfer.errors import ModelError
from powerinfer.formats.checkpoint import Checkpoint
from powerinfer.formats.json_file import Between, Count, Share
from powerinfer.formats.layout import MAX_WIDTH
from powerinfer.formats.mapped import MappedFile, shown
from powerinfer.formats.prepared import PREDICTOR, PreparedFile
from powerinfer.formats.quant import Float32, block_type, dequantize, quantize
from powerinfer.formats.tensors import RawTensor
from powerinfer.neurons import Predictor

PREDICTOR_TYPES = ("F16", "BF16", "F32", "Q8_0")
"""The types that a predictor's weights can have."""

FIGURES = ("recall", "precision", "candidate_fraction", "active_fraction", "svd_recall", "svd_candidate_fraction")
"""Figures of each trained layer, shares from 0 to 1, on held-out samples."""


@dataclass(frozen=True)
class _LayerDescription:
    rank: Annotated[int, Between(1, MAX_WIDTH)]
    threshold: Annotated[float, Between(-1e6, 1e6)]  # of the magnitude of a logit
    floor: Count


@dataclass(frozen=True)
class _LayerTraining:
    """The fields of a layer that a report shows; others are allowed."""

    extra_fields: ClassVar[bool] = True
    rank: Count
    method: str
    recall: Share
    precision: Share
    candidate_fraction: Share
    active_fraction: Share
    svd_recall: Share
    svd_candidate_fraction: Share


@dataclass(frozen=True)
class _Training:
    """The fields that a report shows; others are allowed."""

    extra_fields: ClassVar[bool] = True
    recall_target: Share
    share_of_model: Share
    held_out_tokens: Count
    layers: list[_LayerTraining]


@dataclass(frozen=True)
class _PredictorHeader:
    d_model: int
    neurons: list[int]
    type: str
    layers: list[_LayerDescription | None]
    training: _Training | None = None


@dataclass(frozen=True)
class LayerPredictor:
    """A layer's predictor and its weights, views of a mapped file: inner [rank, d_model] and outer [neurons, rank]."""

    predictor: Predictor
    inner: RawTensor
    outer: RawTensor


@dataclass(frozen=True)
class PredictorFile:
    """The predictors of a model, by layer, mapped; call `file.check()` before the weights are read.

    training: how they were trained, and their quality, as described in docs/train.md; None if unknown.
    """

    type: str
    layers: dict[int, LayerPredictor]
    file: MappedFile
    training: dict[str, Any] | None = None

    @property
    def path(self) -> Path:
        """The file."""
        return self.file.path

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return sum(layer.inner.data.nbytes + layer.outer.data.nbytes for layer in self.layers.values())


def open_predictor(checkpoint: Checkpoint, prepared: str | None = None) -> PredictorFile:
    """The predictors that were trained for a model, from the folder `prepared` (None: beside the model).

    ModelError, with the command that makes them, if there are none or they do not match the model as it is opened.
    """
    place = PreparedFile(PREDICTOR, checkpoint, prepared)
    description, tensors, file = place.read()
    config = checkpoint.config
    for name, size in (("d_model", config.d_model), ("neurons", list(config.separable))):
        if description.get(name) != size:
            raise place.bad(f"states a {name} of {shown(description.get(name))}, and the model has {size}")
    header = place.described(_PredictorHeader, description)
    type_name = header.type
    block = block_type(type_name).block if type_name in PREDICTOR_TYPES else 0
    if not block or config.d_model % block:
        raise place.bad(f"holds weights of type {shown(type_name)}, which it cannot")
    if len(header.layers) != config.n_layers:
        raise place.bad(f"does not describe {config.n_layers} layers")
    layers = {}
    for layer, stated in enumerate(header.layers):
        if (stated is None) != (config.separable[layer] == 0):
            raise place.bad(f"describes a predictor of layer {layer}" if stated else f"describes none of layer {layer}")
        if stated is None:
            continue
        most = 0 if config.experts else config.separable[layer]
        if stated.rank % block or stated.rank > config.d_model or stated.floor > most:
            raise place.bad(
                f"has a rank of {stated.rank} and a floor of {stated.floor} in layer {layer}, which cannot be"
            )
        predictor = Predictor(stated.rank, stated.threshold, stated.floor)
        weights = []
        for name, shape in _shapes(config, layer, predictor.rank):
            tensor = place.holds(tensors, name, *_stored(type_name, shape))
            weights.append(RawTensor(type_name, shape, tensor.data))
        layers[layer] = LayerPredictor(predictor, *weights)
    place.holds_no_more(tensors)
    if header.training is not None and len(header.training.layers) != len(layers):
        raise place.bad(f"does not tell how {len(layers)} layers were trained")
    return PredictorFile(type_name, layers, file, description.get("training"))


def write_predictor(
    checkpoint: Checkpoint,
    prepared: str | None,
    type_name: str,
    layers: Sequence[Predictor | None],
    weights: Iterable[tuple[Float32, Float32]],
    training: Mapping[str, Any] | None = None,
) -> Path:
    """Write the predictors of a model; the path of the file.

    layers: one for each layer, None where it has no neurons; weights: of the others in order, inner [rank, d_model] and
    outer [neurons, rank], float32, consumed one by one. They are stored in `type_name`, one of `PREDICTOR_TYPES`; for
    Q8_0, d_model and the ranks must be multiples of 32. training: what `PredictorFile.training` will be, values of
    JSON. ModelError for values that the type cannot hold, PowerInferError if the file cannot be written.
    """
    config = checkpoint.config
    assert len(layers) == config.n_layers and type_name in PREDICTOR_TYPES
    description = {
        "d_model": config.d_model,
        "neurons": list(config.separable),
        "type": type_name,
        "layers": [one and {**asdict(one), "threshold": float(one.threshold)} for one in layers],
        **({} if training is None else {"training": dict(training)}),
    }
    names = [list(_shapes(config, n, one.rank)) for n, one in enumerate(layers) if one is not None]
    tensors = [(name, *_stored(type_name, shape)) for pair in names for name, shape in pair]
    place = PreparedFile(PREDICTOR, checkpoint, prepared)
    with place.write(description, tensors) as write:
        for pair, arrays in zip(names, weights, strict=True):
            for (name, shape), values in zip(pair, arrays, strict=True):
                assert values.shape == shape, (name, values.shape, shape)
                data = quantize(values, type_name)
                if not np.isfinite(dequantize(data, type_name)).all():
                    raise ModelError(f"the predictor's {name} has a weight that {type_name} cannot hold")
                write(name, data)
    return place.path


def _shapes(config: ModelConfig, layer: int, rank: int) -> Iterator[tuple[str, tuple[int, int]]]:
    yield f"layers.{layer}.in", (rank, config.d_model)
    yield f"layers.{layer}.out", (config.separable[layer], rank)


def _stored(type_name: str, shape: tuple[int, int]) -> tuple[str, tuple[int, int]]:
    """(dtype, shape) of weights in a safetensors file, which knows no blocks; ValueError for rows of broken blocks."""
    kind = block_type(type_name)
    return (type_name, shape) if kind.block == 1 else ("U8", (shape[0], kind.row_bytes(shape[1])))
