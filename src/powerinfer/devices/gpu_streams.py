"""Residual streams of a model on a GPU (`AltUpConfig`), beside the one that its layers compute with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from powerinfer.config import AltUpConfig
from powerinfer.devices.torch_device import import_torch

if TYPE_CHECKING:
    from torch import Tensor, device

    from powerinfer.devices.gpu_weights import GpuNorm
else:
    Tensor = device = GpuNorm = Any

_LEAST = 1e-5
"""Mean square of a row that is brought to the magnitude of another."""


class GpuStreams:
    """float32 [streams, max_tokens, d_model], always at the same address."""

    def __init__(self, altup: AltUpConfig, max_tokens: int, d_model: int, to: device) -> None:
        self.n = altup.streams
        self._active = altup.active
        self._rows = import_torch().zeros((altup.streams, max_tokens, d_model), device=to)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return int(self._rows.nbytes)

    def passed(self, tokens: int) -> tuple[Tensor, ...]:
        """The rows of so many tokens of each stream, [T, d_model], for another device."""
        return tuple(stream[:tokens] for stream in self._rows)

    def take(self, passed: Sequence[Tensor]) -> None:
        """Have the rows that another device passes on, once they are there."""
        for stream, rows in zip(self._rows, passed, strict=True):
            stream[: len(rows)].copy_(rows, non_blocking=True)

    def expand(self, x: Tensor, products: Tensor) -> None:
        """The first stream is x [T, d_model], the others are its products [T, (streams - 1) * d_model] with a matrix
        each, brought to its magnitude."""
        tokens = len(x)
        by_stream = products.view(tokens, self.n - 1, -1).transpose(0, 1)
        self._rows[0, :tokens].copy_(x)
        self._rows[1:, :tokens].copy_(by_stream * (_magnitude(x) / _magnitude(by_stream, _LEAST)))

    def predict(self, tokens: int, norm: GpuNorm, router: Tensor, weights: Tensor) -> Tensor:
        """Each stream += a sum of all of them; the active one."""
        rows = self._rows[:, :tokens]
        by = _coefficients(rows[self._active], norm, router, weights).view(tokens, self.n, self.n)
        rows.add_(by.bmm(rows.transpose(0, 1)).transpose(0, 1))
        return rows[self._active]

    def correct(self, x: Tensor, norm: GpuNorm, router: Tensor, weights: Tensor, scale: Tensor | None) -> Tensor:
        """Each stream += (1 + coefficient) * (x - the active one); the active one, times a scale."""
        rows = self._rows[:, : len(x)]
        by = _coefficients(x, norm, router, weights) + 1
        rows.add_(by.t()[:, :, None] * (x - rows[self._active]))
        active = rows[self._active]
        return active if scale is None else active * scale

    def add(self, more: Tensor) -> None:
        """Each stream but the first += more [T, d_model]."""
        self._rows[1:, : len(more)].add_(more)

    def merge(self, tokens: int, matrices: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
        """The mean of the first stream and of what each matrix makes of another, brought to its magnitude."""
        first, *further = self._rows[:, :tokens]
        products = (matrix(stream) for matrix, stream in zip(matrices, further, strict=True))
        magnitude = _magnitude(first)
        return sum((each * (magnitude / _magnitude(each, _LEAST)) for each in products), start=first) / self.n


def _magnitude(rows: Tensor, least: float = 0.0) -> Tensor:
    return rows.square().mean(dim=-1, keepdim=True).clamp(min=least).sqrt()


def _coefficients(rows: Tensor, norm: GpuNorm, router: Tensor, weights: Tensor) -> Tensor:
    return ((norm(rows) @ router.t()) / rows.shape[-1]).tanh() @ weights.t()
