"""The blocks of a decoder-only transformer, wired in the order they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from powerinfer.devices.cpu import CpuExecutor
from powerinfer.devices.cpu_ffn import Weights
from powerinfer.formats import layout
from powerinfer.formats.checkpoint import Checkpoint, RawTensor
from powerinfer.progress import Progress

if TYPE_CHECKING:
    from powerinfer import _native
    from powerinfer.devices.gpu import GpuLayers
    from powerinfer.devices.gpu_layer import FfnParts
    from powerinfer.devices.gpu_weights import GpuNorm
    from powerinfer.formats.bundle_file import BundleFile

Vector = NDArray[np.float32] | None
Matrix = TypeVar("Matrix")
Norm = TypeVar("Norm")

OwnFfn = Callable[[Norm | None, Sequence[Vector], Norm | None], None]
"""Wires an FFN whose matrices are not the checkpoint's: called with its norm, the biases of gate, up and down, and the
norm of its output."""

SplitFfns = Callable[["CpuExecutor", "GpuLayers", int, Sequence[Vector]], "FfnParts"]
"""Makes the FFN of a layer on a GPU as a sum of parts, given the biases of gate, up and down; that of down is added by
the layer."""


class Neurons(Protocol):
    """A model's neurons as bundles, None: there are none; predictors: layer -> its predictor, None: there are none."""

    @property
    def bundles(self) -> BundleFile | None: ...
    @property
    def predictors(self) -> Callable[[int], Weights] | None: ...
    def threshold(self, layer: int) -> float:
        """The magnitude up to which activations of a layer count as zero."""
        ...


class Builder(Protocol[Matrix, Norm]):
    """A device that layers are wired on: `CpuExecutor` or `GpuLayers`, which document the methods."""

    def matrix(self, tensor: RawTensor, row_map: NDArray[np.int32] | None = None) -> Matrix: ...
    def head_rows(self, heads: int, interleaved: bool) -> NDArray[np.int32] | None: ...
    def norm(self, weight: NDArray[np.float32], bias: Vector = None) -> Norm: ...
    def attention(
        self,
        layer: int,
        norm: Norm | None,
        qkv: Sequence[Matrix],
        *,
        biases: Sequence[Vector] = ...,
        q_norm: Vector = None,
        k_norm: Vector = None,
    ) -> None: ...
    def project(self, layer: int, matrix: Matrix, bias: Vector = None, norm: Norm | None = None) -> None: ...
    def ffn(
        self,
        layer: int,
        norm: Norm | None,
        gate: Matrix | None,
        up: Matrix,
        down: Matrix,
        biases: Sequence[Vector] = ...,
        out_norm: Norm | None = None,
    ) -> None: ...
    def normalise(self, layer: int, norm: Norm) -> None: ...
    def head(self, norm: Norm | None, matrix: Matrix, projection: Matrix | None = None) -> None: ...


def wire(
    executor: CpuExecutor,
    checkpoint: Checkpoint,
    progress: Progress,
    first: GpuLayers | None = None,
    *,
    neurons: Neurons | None = None,
    split: SplitFfns | None = None,
    head: bool = False,
) -> None:
    """Embedding, layers, head. Every tensor of the checkpoint is taken once.

    neurons: of the executor's FFNs if they have bundles, None: from the checkpoint's matrices. first: gets the layers
    before the executor's, with FFNs made by `split` if given, and with `head` the head too.
    """
    config = checkpoint.config
    embedding = checkpoint.take("embed")
    positions = checkpoint.take("positions") if config.positions == "learned" else None
    executor.embed(embedding, positions, _projection(executor, checkpoint, "project_in"), config.embedding_scale)
    for layer in range(config.n_layers):
        if first is not None and layer < first.layers:
            of_first = None if split is None else partial(_split, executor, first, layer, split)
            _layer(first, checkpoint, layer, of_first)
        else:
            own: OwnFfn[_native.Norm] | None = None
            if neurons is not None and neurons.bundles is not None:
                own = partial(_bundled, executor, neurons, layer)
            _layer(executor, checkpoint, layer, own)
        checkpoint.release()  # packed: the file's pages need not stay in memory
        progress("loading weights", layer + 1, config.n_layers)
    if first is not None and head:
        _head(first, checkpoint, embedding)
    else:
        _head(executor, checkpoint, embedding)


def _layer(builder: Builder[Matrix, Norm], checkpoint: Checkpoint, layer: int, own: OwnFfn[Norm] | None) -> None:
    """Attention, then the FFN, with norms placed as `LayerConfig.norms` states."""
    config = checkpoint.config.layers[layer]
    attn_norm, attn_out_norm, ffn_norm, ffn_out_norm = (
        _norm(builder, checkpoint, f"layers.{layer}.{name}") for name in layout.NORMS
    )
    if config.norms == "post":
        assert attn_norm is not None and ffn_norm is not None
        _attention(builder, checkpoint, layer, None)
        _project(builder, checkpoint, layer, None)
        builder.normalise(layer, attn_norm)
        _ffn(builder, checkpoint, layer, None, None, own)
        builder.normalise(layer, ffn_norm)
        return
    _attention(builder, checkpoint, layer, attn_norm)
    if config.parallel:  # the FFN reads x before the result of attention is added to it
        _ffn(builder, checkpoint, layer, attn_norm if config.shared_norm else ffn_norm, ffn_out_norm, own)
        _project(builder, checkpoint, layer, attn_out_norm)
    else:
        _project(builder, checkpoint, layer, attn_out_norm)
        _ffn(builder, checkpoint, layer, ffn_norm, ffn_out_norm, own)


def _attention(builder: Builder[Matrix, Norm], checkpoint: Checkpoint, layer: int, norm: Norm | None) -> None:
    config = checkpoint.config
    name = f"layers.{layer}."
    heads = {"q": config.n_heads, "k": config.n_kv_heads, "v": config.n_kv_heads}
    # Values are not rotated: their rows may be padded, but are never reordered.
    rope = config.layers[layer].attention.rope
    interleaved = rope is not None and rope.interleaved
    maps = {part: builder.head_rows(n, interleaved and part != "v") for part, n in heads.items()}
    builder.attention(
        layer,
        norm,
        [builder.matrix(checkpoint.take(name + part), maps[part]) for part in heads],
        biases=[_reordered(_vector(checkpoint, name + part + "_bias"), maps[part]) for part in heads],
        q_norm=_vector(checkpoint, name + "q_norm"),
        k_norm=_vector(checkpoint, name + "k_norm"),
    )


def _project(builder: Builder[Matrix, Norm], checkpoint: Checkpoint, layer: int, norm: Norm | None) -> None:
    name = f"layers.{layer}.o"
    builder.project(layer, builder.matrix(checkpoint.take(name)), _vector(checkpoint, name + "_bias"), norm)


def _ffn(
    builder: Builder[Matrix, Norm],
    checkpoint: Checkpoint,
    layer: int,
    norm: Norm | None,
    out_norm: Norm | None,
    own: OwnFfn[Norm] | None,
) -> None:
    name, parts = f"layers.{layer}.", checkpoint.config.layers[layer].ffn.matrices
    biases = [_vector(checkpoint, name + part + "_bias") for part in ("gate", "up", "down")]
    if own is not None:
        for part in parts:
            checkpoint.skip(name + part)
        own(norm, biases, out_norm)
        return
    *gate, up, down = (builder.matrix(checkpoint.take(name + part)) for part in parts)
    builder.ffn(layer, norm, gate[0] if gate else None, up, down, biases, out_norm)


def _split(
    executor: CpuExecutor,
    first: GpuLayers,
    layer: int,
    split: SplitFfns,
    norm: GpuNorm | None,
    biases: Sequence[Vector],
    out_norm: GpuNorm | None,
) -> None:
    first.split_ffn(layer, norm, split(executor, first, layer, biases), biases[2], out_norm)


def _bundled(
    executor: CpuExecutor,
    neurons: Neurons,
    layer: int,
    norm: _native.Norm | None,
    biases: Sequence[Vector],
    out_norm: _native.Norm | None,
) -> None:
    bundles, threshold = neurons.bundles, neurons.threshold(layer)
    assert bundles is not None
    bundles.file.check()
    weights = None if neurons.predictors is None else neurons.predictors(layer)
    norms: dict[str, Any] = {"norm": norm, "out_norm": out_norm}
    rows = bundles.copied(layer)
    executor.bundled_ffn(layer, bundles.layout, rows, **norms, biases=biases, threshold=threshold, predictor=weights)


def _head(builder: Builder[Matrix, Norm], checkpoint: Checkpoint, embedding: RawTensor) -> None:
    config = checkpoint.config
    norm = _norm(builder, checkpoint, "final_norm")
    matrix = builder.matrix(embedding if config.tied_embeddings else checkpoint.take("head"))
    builder.head(norm, matrix, _projection(builder, checkpoint, "project_out"))


def _norm(builder: Builder[Matrix, Norm], checkpoint: Checkpoint, name: str) -> Norm | None:
    """None if the model has no tensor of that name."""
    if not checkpoint.has(name):
        return None
    return builder.norm(checkpoint.take(name).float32(), _vector(checkpoint, name + "_bias"))


def _projection(builder: Builder[Matrix, Norm], checkpoint: Checkpoint, name: str) -> Matrix | None:
    return builder.matrix(checkpoint.take(name)) if checkpoint.config.embed_dim else None


def _vector(checkpoint: Checkpoint, name: str) -> Vector:
    return checkpoint.take(name).float32() if checkpoint.has(name) else None


def _reordered(vector: Vector, rows: NDArray[np.int32] | None) -> Vector:
    if vector is None or rows is None:
        return vector
    return np.where(rows < 0, np.float32(0), vector[rows])
