"""What wiring needs: a device that layers are wired on, and tensors of the checkpoint that a layer may lack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from powerinfer.config import ModelConfig
from powerinfer.formats.tensors import ExpertWeights, RawTensor, RestingTensor, StreamMix
from powerinfer.neurons import FfnVectors, Indices

Vector = NDArray[np.float32] | None
Matrix = TypeVar("Matrix")
Norm = TypeVar("Norm")

OwnFfn = Callable[[Norm | None, Any, Norm | None], None]
"""Wires an FFN in another way: called with its norm, what the kind of FFN gives (of neurons `FfnVectors`, whose
matrices are not the checkpoint's; of experts `ExpertWeights`), and the norm of its output."""


class Tensors(Protocol):
    """A model's tensors as they are wired: `Checkpoint`, which documents the methods, or `Headers` of the inventory."""

    config: ModelConfig

    def has(self, name: str) -> bool: ...
    def take(self, name: str) -> RawTensor: ...
    def take_some(self, name: str, index: Indices) -> RawTensor: ...
    def order(self, name: str) -> Indices | None: ...
    def rest(self, name: str) -> RestingTensor: ...
    def skip(self, name: str) -> None: ...
    def check_unchanged(self) -> None: ...


class Builder(Protocol[Matrix, Norm]):
    """A device that layers are wired on: `CpuExecutor` or `GpuLayers`, which document the methods, or the `Recorder` of
    the inventory."""

    def matrix(self, tensor: RawTensor, row_map: NDArray[np.int32] | None = None) -> Matrix: ...
    def head_rows(self, heads: int, dim: int, interleaved: int) -> NDArray[np.int32] | None: ...
    def norm(
        self,
        weight: NDArray[np.float32],
        bias: Vector = None,
        order: Indices | None = None,
        eps: float | None = None,
    ) -> Norm: ...
    def scale(self, factor: float) -> Norm: ...
    def attention(
        self,
        layer: int,
        norm: Norm | None,
        qkv: Sequence[Matrix],  # of `AttentionConfig.projections`
        *,
        biases: Sequence[Vector] = ...,
        q_norm: Vector = None,
        k_norm: Vector = None,
        sinks: Vector = None,
    ) -> None: ...
    def latent_attention(
        self,
        layer: int,
        norm: Norm | None,
        q_latent: Matrix | None,
        q_norm: Vector,
        q: Matrix,
        kv: Matrix,
        kv_norm: NDArray[np.float32],
        k_b: RawTensor,
    ) -> None: ...
    def latent_project(self, layer: int, v_b: RawTensor, matrix: Matrix, norm: Norm | None = None) -> None: ...
    def gate_attended(self, layer: int, norm: Norm | None, matrix: Matrix) -> None: ...
    def delta_net(
        self,
        layer: int,
        norm: Norm | None,
        matrices: Sequence[Matrix],
        *,
        further: Sequence[Matrix] = (),
        taps: NDArray[np.float32],
        decay: NDArray[np.float32],
        dt_bias: NDArray[np.float32],
        out_norm: NDArray[np.float32],
    ) -> None: ...
    def mamba(
        self,
        layer: int,
        norm: Norm | None,
        matrices: Sequence[Matrix],
        *,
        biases: Sequence[Vector],
        taps: NDArray[np.float32],
        taps_bias: Vector,
        of_heads: Sequence[NDArray[np.float32]],
        out_norm: Vector,
    ) -> None: ...
    def short_conv(
        self,
        layer: int,
        norm: Norm | None,
        matrices: Sequence[Matrix],
        *,
        biases: Sequence[Vector],
        taps: NDArray[np.float32],
        taps_bias: Vector,
    ) -> None: ...
    def project(
        self,
        layer: int,
        matrix: Matrix,
        bias: Vector = None,
        norm: Norm | None = None,
        order: Indices | None = None,
        reads: Norm | None = None,
    ) -> None: ...
    def project_beside(self, layer: int, matrix: Matrix, bias: Vector = None, norm: Norm | None = None) -> None: ...
    def ffn(
        self,
        layer: int,
        norm: Norm | None,
        gate: Matrix | None,
        up: Matrix,
        down: Matrix,
        vectors: FfnVectors = ...,
        out_norm: Norm | None = None,
    ) -> None: ...
    def normalise(self, layer: int, norm: Norm) -> None: ...
    def add_layer_input(self, layer: int, gate: Matrix, out: Matrix, norm: Norm | None, activation: str) -> None: ...
    def head(
        self, norm: Norm | None, matrix: Matrix, projection: Matrix | None = None, bias: Vector = None
    ) -> None: ...


class ExpertBuilder(Builder[Matrix, Norm], Protocol):
    """A device that experts are wired on as a whole: `CpuExecutor` or the `Recorder`."""

    def early_router(self, layer: int, router: Matrix, correction: Vector = None) -> None: ...
    def experts(
        self, layer: int, norm: Norm | None, weights: ExpertWeights, out_norm: Norm | None = None
    ) -> None: ...


class StreamBuilder(Builder[Matrix, Norm], Protocol):
    """A device that layers of a model with several residual streams are wired on: all of them, or those of a GPU."""

    def expand_streams(self, matrices: RawTensor) -> None: ...
    def predict_streams(self, layer: int, mix: StreamMix) -> None: ...
    def add_laurel(self, layer: int, norm: Norm, inner: Matrix, outer: Matrix, out_norm: Norm) -> None: ...
    def correct_streams(self, layer: int, mix: StreamMix, scale: Vector) -> None: ...
    def merge_streams(self, matrices: RawTensor) -> None: ...


def vector(checkpoint: Tensors, name: str) -> Vector:
    """A norm's weights, a bias or thresholds; None if the model has no tensor of that name."""
    return checkpoint.take(name).float32() if checkpoint.has(name) else None
