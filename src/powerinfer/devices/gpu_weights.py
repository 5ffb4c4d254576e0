"""Norms and matrices of layers on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from powerinfer.devices.torch_device import import_torch
from powerinfer.formats.quant import block_type
from powerinfer.formats.tensors import RawTensor
from powerinfer.formats.weight_types import WEIGHT_TYPES
from powerinfer.kernels import gpu, gpu_host, gpu_latent, gpu_panels
from powerinfer.kernels.cpu import LANES

if TYPE_CHECKING:
    from torch import Tensor, device

    from powerinfer.devices.stage import Stage
    from powerinfer.formats.quant import Bytes
    from powerinfer.kernels.activations import Activations
else:
    Tensor = device = Any


@dataclass(frozen=True)
class GpuNorm:
    """weight, bias: float32 [n] on the device. RMS norm; LayerNorm where `layer`; only a product with the weights, [n]
    or [1], where `plain`. order: int32 [n], number i of the result is of number order[i] of a row, as weight and bias
    are; None: numbers stay where they are."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    layer: bool
    plain: bool = False
    order: Tensor | None = None

    def __call__(
        self, x: Tensor, into: Tensor | None = None, for_codes: bool = False, sent: Tensor | None = None
    ) -> Tensor:
        """x float32 [rows, n], normalised. for_codes, sent: as of `gpu.norm`."""
        if self.order is not None:
            x = x.index_select(1, self.order)
        if not self.plain:
            return gpu.norm(x, self.weight, self.bias, self.eps, self.layer, into, for_codes, sent)
        out = import_torch().mul(x, self.weight, out=into)
        if sent is not None:
            gpu_host.put(out, sent)
        return out


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

    biases: float32 [rows] of each, None where it has none. for_codes: whether some are of `INTEGERS`. OverflowError for
    scales of blocks that are infinite or NaN.
    """

    def __init__(self, matrices: Sequence[StoredMatrix], biases: Sequence[Tensor | None], device: device) -> None:
        parts = [(one.tensor, one.row_map) for one in matrices]
        alike = len({one.type for one in matrices}) == 1
        self.weights = [gpu.upload_together(some, device) for some in ([parts] if alike else [[one] for one in parts])]
        if not all(map(_are_numbers, self.weights)):
            raise OverflowError("scales of blocks are infinite or not numbers")
        self.nbytes = sum(weight.nbytes for weight in self.weights)
        self.for_codes = any(weight.type in gpu.INTEGERS for weight in self.weights)
        self.bias = _joined([one.rows for one in matrices], biases, device)

    def __call__(self, x: Tensor, into: Tensor | None = None) -> Tensor:
        """x float32 [T, k] -> float32 [T, rows of all], one matrix after another, biases added; or `into`, that much
        more."""
        if len(self.weights) == 1:
            return gpu.linear(self.weights[0], x, self.bias, into)
        activations = gpu.activations_of(x)
        out = import_torch().cat([gpu.linear(weight, activations) for weight in self.weights], dim=1)
        out = out if self.bias is None else out.add_(self.bias)
        return out if into is None else into.add_(out)


@dataclass(frozen=True)
class PanelMatrix:
    """A matrix [out, in] that the CPU has in panels, to be streamed through a stage by the operator that takes it.

    panels: uint8 [panels, bytes of a panel]; kept: int64 [rows], those of the panels' rows that count, None: the first.
    """

    stage: Stage
    type: str
    rows: int
    k: int
    panels: Bytes
    rows_kept: NDArray[np.int64] | None = None


class StreamedMatrices:
    """Matrices, as `Matrices`, that stay in RAM: each product streams them to the device, a few panels at a time."""

    nbytes = 0
    for_codes = False

    def __init__(self, matrices: Sequence[PanelMatrix], biases: Sequence[Tensor | None], device: device) -> None:
        torch = import_torch()
        self.bias = _joined([one.rows for one in matrices], biases, device)
        numbers = [None if one.rows_kept is None else torch.from_numpy(one.rows_kept).to(device) for one in matrices]
        self._matrices = list(zip(matrices, numbers, strict=True))

    def __call__(self, x: Tensor, into: Tensor | None = None) -> Tensor:
        """Multiply as `Matrices` does."""
        torch = import_torch()
        out = torch.empty((len(x), sum(one.rows for one, _ in self._matrices)), dtype=x.dtype, device=x.device)
        at, activations = 0, gpu.activations_of(x)
        for matrix, index in self._matrices:
            columns = out[:, at : at + matrix.rows]
            if index is None:
                self._product(matrix, activations, columns)
            else:
                wide = torch.empty((len(x), LANES * len(matrix.panels)), dtype=x.dtype, device=x.device)
                self._product(matrix, activations, wide)
                columns.copy_(wide.index_select(1, index))
            at += matrix.rows
        out = out if self.bias is None else out.add_(self.bias)
        return out if into is None else into.add_(out)

    def _product(self, matrix: PanelMatrix, x: Activations, out: Tensor) -> None:
        """out [T, n] = x . the first n rows of the panels."""
        step = matrix.stage.panels_at_once(matrix.type, matrix.k, matrix.panels.shape[1])
        for begin in range(0, len(matrix.panels), step):
            panels = matrix.panels[begin : begin + step]
            to = out[:, LANES * begin : LANES * (begin + step)]
            with matrix.stage.sent([panels.reshape(-1)]) as (part,):
                assert part is not None
                weight = gpu_panels.from_panels(matrix.type, matrix.k, part.view(len(panels), -1))
                to.copy_(gpu.linear(weight, x)[:, : to.shape[1]])
            del weight  # the next piece reuses its memory


def _are_numbers(weight: gpu.Weight) -> bool:
    """Whether the exponents of all float16 scales and minima of a weight's blocks are those of numbers."""
    halves = WEIGHT_TYPES[weight.type].halves
    if weight.scales is None or not halves:
        return True
    if weight.type not in gpu.CUT:  # they lie side by side
        return not bool((weight.scales.view(import_torch().uint8)[:, 1::2] & 0x7C == 0x7C).any())
    begin, end = gpu.CUT[weight.type]
    header = block_type(weight.type).nbytes - (end - begin)
    high = (1 + (at if at < begin else at - (end - begin)) for at in halves)
    return not any(bool((weight.scales[:, one::header] & 0x7C == 0x7C).any()) for one in high)


def _joined(rows: Sequence[int], biases: Sequence[Tensor | None], device: device) -> Tensor | None:
    """The biases of matrices with that many rows, one after another, zeros where one has none; None without any."""
    torch = import_torch()
    if all(bias is None for bias in biases):
        return None
    pairs = zip(rows, biases, strict=True)
    joined: Tensor = torch.cat([torch.zeros(n, device=device) if bias is None else bias for n, bias in pairs])
    return joined


class HeadMatrices:
    """A matrix of each head, [heads, out, in], which multiplies that head's rows."""

    def __init__(self, tensor: RawTensor, device: device) -> None:
        self.weight = gpu_latent.upload(tensor, device)
        self.nbytes = self.weight.nbytes

    def __call__(self, x: Tensor, by_token: bool = False) -> Tensor:
        """x float32 [heads, T, in] -> float32 [heads, T, out], or [T, heads, out] if `by_token`."""
        return gpu_latent.per_head(self.weight, x, by_token)
