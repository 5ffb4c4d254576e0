"""Norms and matrices of layers on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from powerinfer.devices.torch_device import import_torch
from powerinfer.formats.tensors import RawTensor
from powerinfer.kernels import gpu, gpu_latent

if TYPE_CHECKING:
    from torch import Tensor, device
else:
    Tensor = device = Any


@dataclass(frozen=True)
class GpuNorm:
    """weight, bias: float32 [n] on the device. RMS norm; LayerNorm where `layer`; only a product with the weights, [n]
    or [1], where `plain`."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    layer: bool
    plain: bool = False

    def __call__(self, x: Tensor, into: Tensor | None = None) -> Tensor:
        """x float32 [rows, n], normalised."""
        if self.plain:
            return import_torch().mul(x, self.weight, out=into)
        return gpu.norm(x, self.weight, self.bias, self.eps, self.layer, into)


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix [out, in] of the model's file, to be uploaded. row_map: row r is to be row row_map[r] of the tensor."""

    tensor: RawTensor
    row_map: NDArray[np.int32] | None

    @property
    def rows(self) -> int:
        """Rows on the device."""
        return self.tensor.shape[0] if self.row_map is None else len(self.row_map)

    @property
    def type(self) -> str:
        """Type on the device."""
        return gpu.gpu_type(self.tensor.type, self.tensor.shape[1])


class Matrices:
    """Matrices that multiply the same rows: one where their types allow it, so that one kernel is launched.

    biases: float32 [rows] of each, None where it has none.
    """

    def __init__(self, matrices: Sequence[StoredMatrix], biases: Sequence[Tensor | None], device: device) -> None:
        torch = import_torch()
        parts = [(one.tensor, one.row_map) for one in matrices]
        alike = len({one.type for one in matrices}) == 1
        self.weights = [gpu.upload_together(some, device) for some in ([parts] if alike else [[one] for one in parts])]
        self.nbytes = sum(weight.nbytes for weight in self.weights)
        self.bias: Tensor | None = None
        if any(bias is not None for bias in biases):
            pairs = zip(matrices, biases, strict=True)
            self.bias = torch.cat([torch.zeros(one.rows, device=device) if b is None else b for one, b in pairs])

    def __call__(self, x: Tensor) -> Tensor:
        """x float32 [T, k] -> float32 [T, rows of all], one matrix after another, biases added."""
        if len(self.weights) == 1:
            return gpu.linear(self.weights[0], x, self.bias)
        out = import_torch().cat([gpu.linear(weight, x) for weight in self.weights], dim=1)
        return out if self.bias is None else out.add_(self.bias)


class HeadMatrices:
    """A matrix of each head, [heads, out, in], which multiplies that head's rows."""

    def __init__(self, tensor: RawTensor, device: device) -> None:
        self.weight = gpu_latent.upload(tensor, device)
        self.nbytes = self.weight.nbytes

    def __call__(self, x: Tensor, by_token: bool = False) -> Tensor:
        """x float32 [heads, T, in] -> float32 [heads, T, out], or [T, heads, out] if `by_token`."""
        return gpu_latent.per_head(self.weight, x, by_token)
