"""What wiring needs: a device that layers are wired on, and tensors of the checkpoint that a layer may lack."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from powerinfer.formats.checkpoint import Checkpoint, RawTensor
from powerinfer.formats.tensors import RestingTensor
from powerinfer.neurons import FfnVectors, Indices

Vector = NDArray[np.float32] | None
Matrix = TypeVar("Matrix")
Norm = TypeVar("Norm")

OwnFfn = Callable[[Norm | None, Any, Norm | None], None]
"""Wires an FFN in another way: called with its norm, what the kind of FFN gives (of neurons `FfnVectors`, whose
matrices are not the checkpoint's; of experts `ExpertWeights`), and the norm of its output."""


class ExpertWeights(NamedTuple):
    """A layer's experts: the router [experts, d_model]; gives the experts' matrices [experts, out, in], large, one
    after another; those of the shared expert; float32 vectors that a layer may lack. some: gives the matrices of some
    experts alone; resting: says where they lie, ModelError where not as they are used; check: ChangedError if the file
    that the matrices may be views of was changed."""

    router: RawTensor
    experts: Callable[[], Iterator[RawTensor]]
    shared: Sequence[RawTensor]
    correction: Vector
    shared_weight: Vector
    router_bias: Vector
    biases: Sequence[Vector]  # of the experts' matrices, [experts, out]
    norm: Vector  # of their input, float32 [d_model], where it is an RMS norm
    some: Callable[[Indices], Iterator[RawTensor]]
    resting: Callable[[], Sequence[RestingTensor]]
    check: Callable[[], None]


class Builder(Protocol[Matrix, Norm]):
    """A device that layers are wired on: `CpuExecutor` or `GpuLayers`, which document the methods."""

    def matrix(self, tensor: RawTensor, row_map: NDArray[np.int32] | None = None) -> Matrix: ...
    def head_rows(self, heads: int, dim: int, interleaved: int) -> NDArray[np.int32] | None: ...
    def norm(self, weight: NDArray[np.float32], bias: Vector = None) -> Norm: ...
    def scale(self, factor: float) -> Norm: ...
    def attention(
        self,
        layer: int,
        norm: Norm | None,
        qkv: Sequence[Matrix],
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
        taps: NDArray[np.float32],
        decay: NDArray[np.float32],
        dt_bias: NDArray[np.float32],
        out_norm: NDArray[np.float32],
    ) -> None: ...
    def project(self, layer: int, matrix: Matrix, bias: Vector = None, norm: Norm | None = None) -> None: ...
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
    def head(self, norm: Norm | None, matrix: Matrix, projection: Matrix | None = None) -> None: ...


def vector(checkpoint: Checkpoint, name: str) -> Vector:
    """A norm's weights, a bias or thresholds; None if the model has no tensor of that name."""
    return checkpoint.take(name).float32() if checkpoint.has(name) else None
